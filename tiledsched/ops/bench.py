"""A bench: a kernel timed in turn with its rivals, for the command line, for studies, and for a worker of a fleet."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiledsched.core import config
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.rivals import Method
from tiledsched.ops.own_methods import own_methods, own_outputs
from tiledsched.rivals.bench import BenchOptions, TorchHarness, run_bench
from tiledsched.rivals.methods import CEILING, MATMUL, rival_methods
from tiledsched.rivals.rows import BenchRow, Cell, append_rows, finished_cells
from tiledsched.rivals.sampling import USUAL_PACE, Pace


def methods_of(kernel: KernelClass, problems: Sequence[Problem] = ()) -> Mapping[str, Method]:
    """The methods for a kernel by name, in the order of the rows: our own, every rival that it has for one of the problems, and
    the matmul.
    """
    return {each.name: each for each in (*own_methods(kernel), *rival_methods(kernel, problems), CEILING)}


def choose_methods(
    kernel: KernelClass | str,
    names: Sequence[str] | Sequence[Method] | None,
    problems: Sequence[Problem] = (),
    *,
    ceiling: bool = False,
) -> list[Method]:
    """The named methods, in the order of `methods_of`; without names, every method that is installed.

    Args:
        kernel: whose.
        names: of `methods_of`; methods themselves are taken as they are.
        problems: what is computed; rivals may differ between them.
        ceiling: also the matmul, which no default includes.

    Raises:
        ConfigError: an unknown name.
    """
    given = [each for each in names or () if isinstance(each, Method)]
    if given:
        return given
    methods = methods_of(load_kernel(kernel) if isinstance(kernel, str) else kernel, problems)
    named = [each for each in names or () if isinstance(each, str)]
    unknown = sorted(set(named) - set(methods))
    if unknown:
        raise ConfigError(f"unknown method {unknown[0]!r}; known are {', '.join(methods)}")
    wanted = set(named or (name for name, method in methods.items() if method.installed and not method.by_name))
    return [method for name, method in methods.items() if name in wanted or (ceiling and name == MATMUL)]


def bench_here(
    kernel: KernelClass,
    problems: Sequence[Problem],
    *,
    db: str | None = None,
    methods: Sequence[str] | Sequence[Method] | None = None,
    ceiling: bool = False,
    regime: str = "burst",
    rounds: int = 30,
    budget_s: float | None = None,
    verify: bool = False,
    harness: Any = None,
    pace: Pace = USUAL_PACE,
    path: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[BenchRow]:
    """Time a kernel and its rivals on this GPU.

    Args:
        kernel: the kernel.
        problems: what to compute.
        db: database to serve from; None for the user's.
        methods: the methods that take part, or their names; None for all that are installed.
        ceiling: also time a large matmul, and give every rate over its rate.
        regime: burst, sustained or both.
        rounds: samples of a quick method.
        budget_s: seconds for all problems together.
        verify: check that the machine code that is launched is the one that was measured.
        harness: what runs the methods; None for the current CUDA device.
        pace: pauses between launches, and how long the GPU is warmed up.
        path: a CSV file to which the rows of each cell are appended as soon as they are known; cells that it holds are left out.
        progress: called with a line for each cell.

    Raises:
        ConfigError: a method is unknown, or the file is not a bench, or has other columns.
        MeasureError: the GPU cannot be used.
    """
    from tiledsched.measure.lock import holding_current_gpu

    if db:
        os.environ["TILEDSCHED_DB"] = db  # what is launched reads its own settings
        for forget in config.watchers:  # and this process may have read another database before
            forget()
    chosen = choose_methods(kernel, methods, problems, ceiling=ceiling)
    regimes = ("burst", "sustained") if regime == "both" else (regime,)
    done: Collection[Cell] = finished_cells(path, [method.name for method in chosen]) if path else ()
    options = BenchOptions(methods=tuple(chosen), regimes=regimes, rounds=rounds, budget_s=budget_s, pace=pace)

    def keep(rows: Sequence[BenchRow]) -> None:
        if path:
            append_rows(rows, path)

    with holding_current_gpu(), config.configure(compile="wait"):  # torch is not to be timed as ours
        here = harness or TorchHarness(verify=verify, own=own_outputs)
        return run_bench(problems, options, here, done=done, keep=keep, progress=progress)
