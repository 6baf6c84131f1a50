"""Whether a tune for graphs chooses what is fastest in graphs, and what it takes of a full memory, on a machine with a GPU.

`python -m docs.studies.as_deployed regret attention -p B=8,H=32,Sq=1,Sk=4096,D=128 --csv FILE` tunes each problem eagerly and
with `--deploy graph`, and then times every program that either tune measured, and those that the model likes best, as replays of
CUDA graphs, interleaved in one run. The oracle is the program that is fastest in half of the rounds; what the two choices take
over it is read off the other half, so that no program wins by the luck of the rounds that chose it.

`memory attention -p ... --share 0.95` fills that share of the GPU, by this process and by `--beside`, and tunes. What NVML says
is in use is read meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from docs.studies.flags import count, flag, parser_with, positive
from tiledsched.cli.problems import read_problems
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import Failure, MeasureError, TiledschedError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import accuracy_class
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import GIB, Batch, Candidate, Runner
from tiledsched.serve.entries import load_table
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.prior import estimator
from tiledsched.tuning.results import TuneReport
from tiledsched.tuning.session import Session

HOPELESS = 1.3
"""Programs whose first launch takes this many times the least one are not timed further."""
LISTING_S = 5.0
POLL_S = 0.005
PART_BYTES = 1 << 26
"""A GPU is filled in parts of this size."""
FILLER = """
import sys, cupy
wanted, part = map(int, sys.argv[1:])
held = []
while True:
    free, total = cupy.cuda.runtime.memGetInfo()
    if total - free + part > wanted:
        break
    held.append(cupy.cuda.Memory(part))
print("full", flush=True)
sys.stdin.read()
"""
"""The program that holds memory until its input ends."""


@dataclass(frozen=True, kw_only=True)
class RegretRow:
    """One problem in one regime of graphs."""

    kernel: str
    problem: str
    regime: str
    programs: int
    """Programs timed together."""
    rounds: int
    oracle_us: float
    """The oracle's median over the rounds that did not choose it."""
    regret: float
    """What the choice of `--deploy graph` takes over the oracle in those rounds, as a part of the oracle's time."""
    regret_high: float
    """Upper end of its 95% interval."""
    eager_regret: float
    """The same of the eager tune's choice."""
    same: bool
    """Whether both tunes chose the same program."""
    captured: bool
    """Whether the table gives a captured call the choice, and an eager call the eager one."""
    choice: str
    oracle: str
    eager: str
    seconds: float
    """What both tunes took."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One tune beside a full memory."""

    kernel: str
    problem: str
    by: str
    """Who filled the memory: another process, or the tune (`--beside`)."""
    total_gib: float
    full_gib: float
    """In use before the tune, or taken by it first."""
    cap_gib: float
    """What the search might take."""
    peak_gib: float
    """What it says that it took."""
    device_peak_gib: float
    """The most that was in use on the GPU, by NVML."""
    outcome: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part of the study; 2 where no GPU or compiler is found, or nothing can be tuned."""
    parser = parser_with(
        flag("part", choices=("regret", "memory"), help="what is asked"),
        flag("kernel", help="which kernel"),
        flag("-p", "--problem", nargs="+", default=[], help="problems, as `tiledsched tune -p` takes them"),
        flag("--effort", default="quick", help="of each tune (quick)"),
        flag("--cold", action="store_true", help="empty the cache before each replay"),
        flag("--extra", type=count, default=24, help="programs that the model likes best, besides those measured (24)"),
        flag("--rounds", type=positive, default=60, help="rounds of all programs together (60)"),
        flag("--share", type=float, default=0.95, help="part of the memory that is full (0.95)"),
        flag("--jobs", type=positive, help="compile processes (default: one per CPU)"),
        flag("--db", help="the database (default: the user's)"),
        flag("--csv", type=Path, required=True, help="the file to which the rows are appended"),
        prog="python -m docs.studies.as_deployed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args(arguments)
    try:
        kernel = load_kernel(options.kernel)
        problems = [problem for text in options.problem for problem in read_problems(kernel, text)]
        with Session(here(), settings=load_settings({"db": options.db}), jobs=options.jobs) as session:
            for problem in problems:
                for row in (regrets if options.part == "regret" else memories)(session, problem, options):
                    append(options.csv, row)
                    print(summary(row), flush=True)
    except TiledschedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def here() -> str:
    """The arch of the first GPU.

    Raises:
        MeasureError: there is none.
    """
    from tiledsched.measure import nvml

    found = nvml.devices()
    if not found:
        raise MeasureError("no GPU is here, and the study measures on one")
    return found[0].arch


def append(path: Path, row: Any) -> None:
    """Add a row to a CSV file, with a heading where the file is new."""
    values = {**asdict(row), "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}"}
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(values))
        if is_new:
            writer.writeheader()
        writer.writerow(values)


def summary(row: RegretRow | MemoryRow) -> str:
    """A row as a line for people."""
    if isinstance(row, MemoryRow):
        return (
            f"{row.kernel} {row.problem}, filled by {row.by}: {row.full_gib:.1f} of {row.total_gib:.1f} GiB full; took "
            f"{row.peak_gib:.2f} of {row.cap_gib:.2f} GiB; in use at most {row.device_peak_gib:.2f} GiB; {row.outcome}"
        )
    return (
        f"{row.kernel} {row.problem} {row.regime}: regret {row.regret:+.2%} (at most {row.regret_high:+.2%}), eager choice "
        f"{row.eager_regret:+.2%}; oracle of {row.programs} programs {row.oracle_us:.2f} us; "
        f"{'same program' if row.same else 'other program'}, {'looked up as deployed' if row.captured else 'WRONG LOOKUP'}; "
        f"{row.seconds:.0f} s"
    )


# Regret


def regrets(session: Session, problem: Problem, options: argparse.Namespace) -> Iterator[RegretRow]:
    """The row of a problem: both tunes, and the oracle over all that they measured and what the model likes best."""
    kernel, began = problem.declaration, time.monotonic()
    eager = _tuned(session, problem, TuneOptions(effort=options.effort, rivals="off"))
    graph = TuneOptions(effort=options.effort, rivals="off", deploy="graph", cold=options.cold)
    choice = _tuned(session, problem, graph)
    seconds, regime = time.monotonic() - began, str(graph.regime)
    runner = session.open_runner(kernel, "gpu")
    assert runner is not None
    field = _field(session, problem, [choice, eager], options.extra, runner)
    runner.begin(problem)
    sampled = sampled_together(runner, field, options.rounds, regime, keep=2)
    served = load_table(session.settings, kernel=kernel, archs={session.arch})
    name = runner.device_name
    captured = served.resolve_captured(problem, session.arch, name)
    looked_up = captured is not None and captured.schedule == choice
    looked_up &= served.resolve(problem, session.arch, name).schedule == eager
    yield judged(
        sampled,
        problem=problem,
        regime=regime,
        rounds=options.rounds,
        choice=field[0].schedule,
        eager=field[1].schedule,
        captured=looked_up,
        seconds=seconds,
    )


def _tuned(session: Session, problem: Problem, options: TuneOptions) -> Schedule:
    """The winner of a tune. What is served may be another entry: a shipped one, say, of another regime."""
    return session.tune(problem.declaration, [problem], options).results[0].entry.schedule


def _field(
    session: Session, problem: Problem, first: Sequence[Schedule], extra: int, runner: Runner
) -> list[Candidate]:
    """Distinct programs: those of `first`, one for each even where they are the same, all that were measured on this GPU in any
    regime, and the model's favourites among the rest."""
    kernel = problem.declaration
    builder, space = session.builder(kernel), session.space(kernel)
    known = [each.measurement for each in session.db.measurements(problem, session.arch, runner.device_name)]
    pinned = accuracy_class(space, session.settings.accum_mode)
    listed, _ = space.listed(problem, pinned=pinned, deadline_s=time.monotonic() + LISTING_S)
    estimate = estimator(problem, arch_spec(session.arch, runner.device_name))
    favourites = sorted(listed, key=lambda each: (estimate(each, None), each.id))[:extra]
    schedules = list(dict.fromkeys([*first, *(space.complete(each.schedule) for each in known), *favourites]))
    builder.build(schedules, problem)
    programs = builder.programs(schedules, problem, runner.device)
    of = [next(program for program in programs if each in program.schedules) for each in first]
    return builder.candidates([*of, *(each for each in programs if each not in of)])


def sampled_together(
    runner: Runner, field: Sequence[Candidate], rounds: int, regime: str, *, keep: int
) -> dict[Schedule, tuple[float, ...]]:
    """Samples of all programs of a field in the same rounds, less the hopeless and those that fail or compute wrong; the first
    `keep` of them stay.

    Raises:
        MeasureError: one of these fails.
    """
    looks = [runner.probe(each) for each in field]
    least = min(each for each in looks if not isinstance(each, Failure))
    promising = [
        each
        for place, (each, look) in enumerate(zip(field, looks, strict=True))
        if place < keep or (not isinstance(look, Failure) and look <= HOPELESS * least)
    ]
    distinct = list({each.schedule: each for each in promising}.values())
    checked = [each for each in distinct if not isinstance(runner.check(each), Failure)]
    batches = runner.sample(checked, rounds=rounds, regime=regime)
    found = {
        each.schedule: batch.samples_us
        for each, batch in zip(checked, batches, strict=True)
        if isinstance(batch, Batch)
    }
    lost = [each.schedule.short() for each in field[:keep] if each.schedule not in found]
    if lost:
        raise MeasureError(f"a tune's choice fails when it is timed again: {lost[0]}; run: tiledsched doctor")
    return found


def judged(
    sampled: dict[Schedule, tuple[float, ...]],
    *,
    problem: Problem,
    regime: str,
    rounds: int,
    choice: Schedule,
    eager: Schedule,
    captured: bool,
    seconds: float,
) -> RegretRow:
    """The row of samples: the oracle is chosen in the even rounds and judged in the odd ones."""
    oracle = min(sampled, key=lambda each: (statistics.median(sampled[each][::2]), each.id))

    def over(schedule: Schedule) -> Timing:
        pairs = zip(sampled[schedule][1::2], sampled[oracle][1::2], strict=True)
        return Timing.of([mine / best for mine, best in pairs])

    return RegretRow(
        kernel=problem.kernel,
        problem=str(problem),
        regime=regime,
        programs=len(sampled),
        rounds=rounds,
        oracle_us=statistics.median(sampled[oracle][1::2]),
        regret=over(choice).median_us - 1,
        regret_high=over(choice).ci_high_us - 1,
        eager_regret=over(eager).median_us - 1,
        same=choice == eager,
        captured=captured,
        choice=choice.short(),
        oracle=oracle.short(),
        eager=eager.short(),
        seconds=seconds,
    )


# Memory


def memories(session: Session, problem: Problem, options: argparse.Namespace) -> Iterator[MemoryRow]:
    """Two rows of a problem: a tune beside memory that another process has, and one that takes it first."""
    total = in_use()[1]
    with filled(options.share * total):
        yield _tuned_beside(session, problem, options, 0.0, "another process", in_use()[0])
    taken = options.share * total - in_use()[0]
    yield _tuned_beside(session, problem, options, round(taken / GIB, 2), "the tune", options.share * total)


def _tuned_beside(
    session: Session, problem: Problem, options: argparse.Namespace, beside_gib: float, by: str, full: float
) -> MemoryRow:
    chosen = TuneOptions(effort=options.effort, deploy="graph", cold=options.cold, beside_gib=beside_gib)
    cap = peak = 0
    with watched() as most:
        try:
            found: TuneReport = session.tune(problem.declaration, [problem], chosen)
            result = found.results[0]
            rivals = ", ".join(f"{each.name} {each.failure or 'timed'}" for each in result.entry.rivals or ())
            outcome = f"{result.programs} programs, {result.failed} failed; {result.memory}; rivals: {rivals}"
            stored = session.db.measurements(problem, session.arch, regime=chosen.regime)
            conditions = [each.measurement.conditions for each in stored]
            cap, peak = (max(getattr(each, name) for each in conditions) for name in MEMORY)
        except TiledschedError as error:
            outcome = f"{type(error).__name__}: {error}"
    session.close()  # what it takes is given back before the next
    return MemoryRow(
        kernel=problem.kernel,
        problem=str(problem),
        by=by,
        total_gib=in_use()[1] / GIB,
        full_gib=full / GIB,
        cap_gib=cap / GIB,
        peak_gib=peak / GIB,
        device_peak_gib=most[0] / GIB,
        outcome=outcome,
    )


MEMORY = ("memory_cap_bytes", "memory_peak_bytes")


def in_use() -> tuple[int, int]:
    """Bytes of the first GPU's memory in use, and all of them."""
    import pynvml

    pynvml.nvmlInit()
    found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    return int(found.used), int(found.total)


@contextmanager
def watched() -> Iterator[list[int]]:
    """The most bytes that are in use on the GPU during the block, in a list of one."""
    most, ended = [in_use()[0]], threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            most[0] = max(most[0], in_use()[0])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


@contextmanager
def filled(wanted: float) -> Iterator[None]:
    """In the block another process holds memory, as a served model would, so that this many bytes of the GPU are in use."""
    command = [sys.executable, "-c", FILLER, str(round(wanted)), str(PART_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as filler:
        assert filler.stdin is not None
        assert filler.stdout is not None
        try:
            if not filler.stdout.readline():
                raise MeasureError("the process that fills the memory ended early; run: tiledsched doctor")
            yield
        finally:
            filler.stdin.close()  # which ends it


if __name__ == "__main__":
    sys.exit(main())
