"""Runs methods on landscapes in several processes. The same arguments give the same runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from docs.studies.search.field import Field, read_field
from docs.studies.search.methods import METHODS
from docs.studies.search.scores import Run, score
from tiledsched.core import data_files
from tiledsched.core.errors import ConfigError

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_fields: tuple[Field, ...] = ()
HELD_OUT = "held_out"
"""The folder of landscapes that neither the static models nor the surrogate's constants were fitted to."""


def shipped_landscapes(kernel: str = "attention") -> list[Path]:
    """The recorded landscapes of a kernel in the burst regime to which models and constants may be fitted."""
    return sorted((data_files.tuning_db() / "landscapes" / kernel).glob("*_burst_*.json.xz"))


def held_out_landscapes(kernel: str = "*") -> list[Path]:
    """The landscapes of a kernel, or of all kernels, that nothing was fitted to."""
    return sorted((data_files.tuning_db() / "landscapes").glob(f"{kernel}/{HELD_OUT}/*_burst_*.json.xz"))


def run_bench(paths: Sequence[Path], samplers: Sequence[str], *, seeds: int, jobs: int) -> list[Run]:
    """Every sampler on every landscape, with at most `seeds` seeds each (fewer where `SearchMethod.most_seeds` says so).

    Raises:
        ConfigError: a sampler is unknown, or needs a package that is not installed; a landscape is not there, or none is given.
    """
    unknown = sorted(set(samplers) - set(METHODS))
    if unknown:
        raise ConfigError(f"unknown sampler {unknown[0]!r}; known are {', '.join(METHODS)}")
    if not paths:
        raise ConfigError("no landscapes to search; give files written by: tiledsched record")
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"there is no landscape at {path}; give files that `tiledsched record` wrote")
    for name in ONE_THREAD:  # inherited by the processes: threads of each would only fight for the cores
        os.environ.setdefault(name, "1")
    runs: list[Run] = []
    with ProcessPoolExecutor(jobs, initializer=_read_fields, initargs=(list(paths),)) as pool:
        for sampler in samplers:
            count = min(seeds, METHODS[sampler].most_seeds)
            tasks = [(sampler, place, seed) for seed in range(count) for place in range(len(paths))]
            runs += pool.map(_run, tasks)
    return runs


def _read_fields(paths: Sequence[Path]) -> None:
    global _fields
    _fields = tuple(read_field(path) for path in paths)


def _run(task: tuple[str, int, int]) -> Run:
    sampler, place, seed = task
    return score(sampler, _fields[place], seed, METHODS[sampler].search(_fields[place], _fields, seed))
