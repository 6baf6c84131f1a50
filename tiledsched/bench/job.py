"""`bench` as a function: what the command line calls, and a worker of a fleet for one problem."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from tiledsched.bench.rows import BenchRow, Cell
from tiledsched.core import config
from tiledsched.core.kernel import KernelClass
from tiledsched.core.problem import Problem


def bench_here(
    kernel: KernelClass,
    problems: Sequence[Problem],
    *,
    db: str | None = None,
    methods: Sequence[str] | None = None,
    ceiling: bool = False,
    regime: str = "burst",
    rounds: int = 30,
    budget_s: float | None = None,
    verify: bool = False,
    done: Callable[[Sequence[str]], Collection[Cell]] = lambda methods: (),
    keep: Callable[[Sequence[BenchRow]], None] = lambda rows: None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[BenchRow]:
    """Time a kernel beside its rivals on this GPU.

    Args:
        kernel: whose.
        problems: what to compute.
        db: database to serve from; None for the user's.
        methods: what takes part; None for all that is installed.
        ceiling: also a large matmul, and every rate over it.
        regime: burst, sustained or both.
        rounds: samples of a quick method.
        budget_s: seconds for all problems together.
        verify: check that what is launched is the machine code that was measured.
        done: told the methods' names; the cells to leave out.
        keep: given the rows of each cell as they are known.
        progress: told a line per cell.

    Raises:
        TiledschedError: an unknown method, or a GPU that cannot be used.
    """
    from tiledsched.bench.harness import TorchHarness
    from tiledsched.bench.methods import choose_methods
    from tiledsched.bench.run import BenchOptions, run_bench
    from tiledsched.measure.lock import holding_current_gpu

    if db:
        os.environ["TILEDSCHED_DB"] = db  # what is launched reads its own settings
        for forget in config.watchers:  # and may have read another database's, in this process
            forget()
    chosen = choose_methods(kernel, methods, problems, ceiling=ceiling)
    regimes = ("burst", "sustained") if regime == "both" else (regime,)
    left_out = done([method.name for method in chosen])
    how = BenchOptions(methods=tuple(chosen), regimes=regimes, rounds=rounds, budget_s=budget_s)
    with holding_current_gpu():
        return run_bench(problems, how, TorchHarness(verify=verify), done=left_out, keep=keep, progress=progress)
