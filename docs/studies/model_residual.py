r"""What measurements say beyond the static model: measured factors for knob values, few and additive in log time.

A ridge regression of log(measured / modelled) on which knob values a schedule has, alone and together with the knobs
they are known to interact with. Only differences within a problem count, and fast programs count most: a program twice
as slow as the best weighs 256 times less. The coefficients of an arch are in `tuning_db/model/attention/ARCH.json`; an arch
without that file has none, and its estimate is the static model's alone. Fit and write them with

    python -m docs.studies.model_residual tuning_db/landscapes/attention/*_burst_*.json.xz \
        --out tuning_db/model/attention/sm_90.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from docs.studies.landscapes import Landscape, read_landscape
from tiledsched.core import data_files
from tiledsched.core.device import ArchSpec
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.resources import ResourceFacts
from tiledsched.core.schedule import PLAIN, Schedule
from tiledsched.kernels.attention.model import estimate_us

SCHEMA_VERSION = 1
RIDGE = 10.0
"""Strength of the pull towards zero, in programs as fast as the best."""
STEEPNESS = 8.0
"""Weight of a program: (best time / its time) to this power."""
DEFAULTS = {**PLAIN, "loop_split": False, "latency_k": 0, "latency_v": 0, "qk_ahead": False, "lazy_rescale": False}
"""Plain values; knobs with these have no coefficient."""
ALONE = (
    "latency_k",
    "latency_v",
    "opt_level",
    "block_order",
    "kv_subtiles",
    "q_subtiles",
    "tma_loads",
    "tma_store",
    "division",
    "lazy_rescale",
    "num_ctas",
    "persistent",
)
"""Knobs whose effect is taken as the same everywhere."""
DEPENDENT = ("loop_split", "qk_ahead", "kv_direction")
"""Knobs whose effect depends on the warps and on whether the grid is persistent."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The measured factors of one arch."""

    arch: str
    """Where they were measured."""
    coefficients: Mapping[str, float]
    """Log of the factor, by feature."""

    def log_factor(self, schedule: Schedule, facts: ResourceFacts) -> float:
        """What to add to the log of the static estimate. Features never seen count nothing."""
        return sum(self.coefficients.get(name, 0.0) for name in features(schedule, facts))


def expected_us(problem: Problem, schedule: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
    """The static model's microseconds times the measured factors of the arch, where there are some."""
    us, residual = estimate_us(problem, schedule, facts, spec), shipped_residual(spec.arch)
    return us if residual is None else us * math.exp(residual.log_factor(schedule, facts))


def features(schedule: Schedule, facts: ResourceFacts) -> list[str]:
    """What counts of a program. Each is a name such as `qk_ahead=true` or `tile=64x128 warps=8`; all have weight one."""
    if "tile_m" not in schedule:  # of another kernel: every knob value by itself
        return [f"{name}={value}" for name, value in schedule.items()]
    warps, grid = f"warps={schedule['num_worker_warps']}", "tiles" if schedule["persistent"] == "no" else "persistent"
    tile = f"tile={schedule['tile_m']}x{schedule['tile_n']}"
    found = [tile, f"{tile} {warps}", f"{tile} {grid}", f"{warps} resident={min(3, facts.ctas_per_sm)}"]
    for knob in (*ALONE, *DEPENDENT):
        value = schedule.get(knob, DEFAULTS[knob])
        if value != DEFAULTS[knob]:
            name = f"{knob}={str(value).lower()}"
            found += [name, f"{name} {grid}", f"{name} {warps}"] if knob in DEPENDENT else [name]
    return found


def fit(landscapes: Sequence[Landscape], arch: str) -> Residual:
    """The residual of one arch from landscapes of that arch."""
    named = [[features(p.schedule, p.facts) for p in one.programs] for one in landscapes]
    names = sorted({name for landscape in named for program in landscape for name in program})
    index = {name: i for i, name in enumerate(names)}
    gram: NDArray[np.float64] = RIDGE * np.eye(len(names))
    moment = np.zeros(len(names))
    for landscape, programs in zip(landscapes, named, strict=True):
        matrix = np.zeros((len(programs), len(names)))
        for row, program in enumerate(programs):
            matrix[row, [index[name] for name in program]] = 1.0
        target = np.log(landscape.measured_us / landscape.modelled_us)
        weight = (landscape.measured_us.min() / landscape.measured_us) ** STEEPNESS
        matrix -= np.average(matrix, axis=0, weights=weight)
        target -= np.average(target, weights=weight)
        gram = gram + matrix.T @ (matrix * weight[:, None])
        moment = moment + matrix.T @ (weight * target)
    solved = np.linalg.solve(gram, moment).tolist()
    return Residual(arch=arch, coefficients=dict(zip(names, solved, strict=True)))


@lru_cache(maxsize=16)
def shipped_residual(arch: str) -> Residual | None:
    """The residual that ships for `arch`; None where nothing was measured there.

    Raises:
        ConfigError: a file of another version or arch.
    """
    path = data_files.tuning_db() / "model" / "attention" / f"{arch}.json"
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema_version") != SCHEMA_VERSION or data.get("arch") != arch:
        raise ConfigError(
            f"{path} is not a residual of {arch} of version {SCHEMA_VERSION}; fit it again: "
            f"python -m docs.studies.model_residual FILE... --out {path}"
        )
    return Residual(arch=arch, coefficients=data["coefficients"])


def write(residual: Residual, path: Path) -> None:
    """The residual as reviewable JSON."""
    coefficients = {name: round(value, 5) for name, value in sorted(residual.coefficients.items())}
    data = {"schema_version": SCHEMA_VERSION, "arch": residual.arch, "coefficients": coefficients}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, indent=1) + "\n")


def main() -> None:
    """Fit the residual to the landscapes named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs.studies.model_residual", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="landscape files of one arch and regime")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    landscapes = [read_landscape(path) for path in arguments.files]
    if len({(one.arch, one.regime) for one in landscapes}) != 1:
        raise ConfigError("the landscapes are not of one arch and one regime; give files of one of each")
    residual = fit(landscapes, landscapes[0].arch)
    write(residual, arguments.out)
    print(f"{len(residual.coefficients)} factors from {sum(len(one.programs) for one in landscapes)} programs")


if __name__ == "__main__":
    main()
