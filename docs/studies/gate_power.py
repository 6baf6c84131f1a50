"""`python -m docs.studies.gate_power`: how often `tiledsched compare --gate` gives a false alarm, and what it catches.

    python -m docs.studies.gate_power record runs.csv --seconds 180     # on an H200; may be repeated
    python -m docs.studies.gate_power summary runs.csv                  # no GPU; a file for each session on one machine

A *run* is one measuring process. It times two programs of each of 20 problems, one after the other, as `tune --effort served`
does, without checking the results, which takes most of the time: the schedule that the table of sm_90 serves, and the table's
runner-up, which took 3.0 to 4.4% longer when the table was measured. So there are real runs of real programs, and real programs
that are slower. A check of the summary compares runs of different processes of one session.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from docs.studies.flags import parser_with, positive
from tiledsched.cli.problems import read_problems
from tiledsched.core import data_files
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, Failure, MeasureError, TiledschedError
from tiledsched.core.files import csv_text
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.measure import nvml
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.runner import Candidate, Checked, Device, Measurement, Runner
from tiledsched.report.compare import Comparison, KnownTime, ProgramTime, judged
from tiledsched.report.gate import judged_by_runs
from tiledsched.store.exchange import read_table
from tiledsched.tuning.race import race
from tiledsched.tuning.session import Session

ARCH = "sm_90"
PROBLEMS = {
    "attention": (
        "S=224,D=64,B=16,H=20,causal=yes",
        "S=1024,D=96,B=1,H=32,dtype=bfloat16,causal=yes",
        "S=1024,D=96,B=2,H=32,dtype=bfloat16,causal=yes,value_dim=64",
        "S=1024,D=128,B=1,H=8,dtype=bfloat16,causal=yes",
        "S=1024,D=160,B=4,H=16,causal=yes",
        "D=128,B=1,seq_q=1024,seq_k=8192,dtype=bfloat16,causal=yes,heads=28,kv_heads=4,alignment=bottom_right",
        "S=1500,D=128,B=2,dtype=bfloat16,causal=yes,heads=32,kv_heads=8",
        "S=1536,D=192,B=1,H=96,dtype=bfloat16,causal=yes,value_dim=128",
        "S=2048,D=40,B=4,H=8",
        "S=2048,D=256,B=4,dtype=bfloat16,causal=yes,heads=16,kv_heads=8",
        "D=72,B=2,H=16,seq_q=4096,seq_k=256",
        "S=4096,D=64,B=2,H=10",
        "S=4096,D=80,B=4,H=16,causal=yes",
        "D=128,B=1,H=32,seq_q=16384,seq_k=256,dtype=bfloat16",
    ),
    "matmul": (
        "m=16,n=3584,k=18944,b_layout=column",
        "m=16,n=28672,k=4096,dtype=float16,b_layout=column",
        "m=512,n=3584,k=18944,dtype=float16,b_layout=column",
        "m=512,n=6144,k=4096,dtype=float16,b_layout=column",
        "m=1024,n=1024,k=1024",
        "m=4096,n=4096,k=14336,b_layout=column",
    ),
}
"""20 problems of the table of sm_90 that ships, 9 to 600 us long on an H200, whose runner-up took 3.0 to 4.4% longer."""
SERVED, SLOWER = "served", "runner-up"
COLUMNS = (
    "run",
    "device",
    "driver",
    "compiler",
    "kernel",
    "problem",
    "program",
    "schedule",
    "samples",
    "us",
    "low_us",
    "high_us",
)
"""Columns of the file: a row for each program of each run."""
LIMIT, CHECKS, PLANTED, FACTORS = 0.03, 50, 100, (1.03, 1.04)


class Unchecked(GpuRunner):
    """Measures as a tune does, in one process for problems of several kernels, without computing whether results are right."""

    def begin(self, problem: Problem) -> None:
        """Make the inputs of a problem of any kernel."""
        self._kernel = problem.declaration
        super().begin(problem)

    def check(self, candidate: Candidate) -> Checked | Failure:
        """Compare nothing."""
        return Checked(accuracy=None, first_look_us=self._expected(candidate))


def start_unchecked(seed: int) -> Runner:
    """A process that measures on the GPU here."""
    return Unchecked(load_kernel("attention"), seed=seed, gpu=nvml.only_gpu())


def main(arguments: Sequence[str] | None = None, start: Callable[[int], Runner] = start_unchecked) -> int:
    """Measure runs, or print the summary; 2 where something is missing or wrong."""
    options = parse(arguments)
    try:
        if options.command == "record":
            print(f"{record(options.csv, options.seconds, start)} runs added to {options.csv}")
        else:
            print(summarise([read_runs(path) for path in options.csv], options.runs))
    except TiledschedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = parser_with(
        prog="python -m docs.studies.gate_power",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="measure runs")
    recorder.add_argument("csv", type=Path, help="the file to which a row is appended for each program of each run")
    recorder.add_argument(
        "--seconds", type=positive, default=180, help="begin no run that would end later than this (180)"
    )
    summary = commands.add_parser("summary", help="measure nothing: say what the gate makes of recorded runs")
    summary.add_argument("csv", type=Path, nargs="+", help="the files, one of each session")
    summary.add_argument("--runs", type=positive, default=3, help="runs of each side of a check (3)")
    return parser.parse_args(arguments)


def record(path: Path, seconds: float, start: Callable[[int], Runner]) -> int:
    """Build both programs of each problem, and measure them in one process after the other until the time is up; how many."""
    ends = time.monotonic() + seconds
    programs: list[tuple[Problem, str, Candidate]] = []
    for kernel_name in PROBLEMS:
        with Session(ARCH) as session:
            builder = session.builder(load_kernel(kernel_name))
            pairs = [(problem, *each) for problem, found in entries_of(kernel_name) for each in found.items()]
            builder.build_for_each([(schedule, problem) for problem, _, schedule in pairs])
            for problem, name, schedule in pairs:
                (candidate,) = builder.candidates(builder.programs([schedule], problem, arch_spec(ARCH)))
                programs.append((problem, name, candidate))
            compiler = session.toolchain.tileiras
    count, longest = 0, 0.0
    while (began := time.monotonic()) + longest < ends:
        rows = []
        runner = start(int(began))
        try:
            for problem, of in itertools.groupby(programs, key=lambda each: each[0]):
                runner.begin(problem)
                for _, name, candidate in of:
                    taken = race(runner, problem, [candidate]).winner
                    if taken is None:
                        raise MeasureError(f"{problem} was not measured with its {name}; run: tiledsched doctor")
                    known = runner.device, compiler, problem, name, taken
                    rows.append(row_of(datetime.now(timezone.utc), *known))
        finally:
            runner.close()
        rows = [{**row, "run": rows[-1]["run"]} for row in rows]
        with path.open("a", encoding="utf-8") as file:
            file.write(csv_text(rows, COLUMNS, head=file.tell() == 0))
        count, longest = count + 1, max(longest, time.monotonic() - began)
        print(f"run {count}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    return count


def entries_of(kernel_name: str) -> list[tuple[Problem, dict[str, Schedule]]]:
    """Of each problem the schedule that the table serves, and its runner-up."""
    table = read_table(data_files.tuning_db() / "tables" / kernel_name / f"{ARCH}.json").entries
    kernel, found = load_kernel(kernel_name), []
    for problem in (each for text in PROBLEMS[kernel_name] for each in read_problems(kernel, text)):
        known = [each for each in table if each.problem == problem and each.runner_up and each.regime == "burst"]
        entry = max(known, key=lambda each: each.compiler)
        assert entry.runner_up is not None
        complete = space_for(ARCH, kernel).complete
        found.append((problem, {SERVED: complete(entry.schedule), SLOWER: complete(entry.runner_up)}))
    return found


def row_of(
    when: datetime, device: Device, compiler: str, problem: Problem, name: str, taken: Measurement
) -> dict[str, Any]:
    """A row of the file."""
    return {
        "run": when.isoformat(timespec="seconds"),
        "device": device.name,
        "driver": device.driver,
        "compiler": compiler,
        "kernel": problem.kernel,
        "problem": str(problem),
        "program": name,
        "schedule": taken.schedule.short(),
        "samples": len(taken.samples_us),
        "us": taken.median_us,
        "low_us": taken.ci_low_us,
        "high_us": taken.ci_high_us,
    }


def read_runs(path: Path) -> list[dict[str, dict[str, ProgramTime]]]:
    """The runs of a file that `record` wrote: of each problem both programs, by name."""
    found: dict[str, dict[str, dict[str, ProgramTime]]] = defaultdict(lambda: defaultdict(dict))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                us, low, high = (float(row[name]) for name in ("us", "low_us", "high_us"))
                taken = ProgramTime(row["schedule"], row["program"], us, low, high, row["run"] + row["program"])
                found[row["run"]][f"{row['kernel']} {row['problem']}"][row["program"]] = taken
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}); pass a file that `record` wrote") from error
    return list(found.values())


def check(before: Sequence[Mapping[str, ProgramTime]], after: Sequence[Mapping[str, ProgramTime]]) -> Comparison:
    """The gate's verdict on some runs, which must not help itself by seeing that the machine code is the same."""
    rows = []
    for name in before[0]:
        a, b = (
            KnownTime(
                kernel="",
                arch=ARCH,
                device="",
                regime="burst",
                accum_mode="fp32",
                problem_id=name,
                problem=name,
                words="",
                schedule_id=runs[0][name].schedule,
                schedule=runs[0][name].schedule,
                fingerprint=side,
                timing=runs[0][name].timing,
                uid=runs[0][name].uid,
                runs=tuple(run[name] for run in runs),
            )
            for side, runs in (("before", before), ("after", after))
        )
        rows.append(judged(a, b, LIMIT))
    return judged_by_runs(Comparison(a="before", b="after", rows=tuple(rows), drift=(), threshold=LIMIT), LIMIT)


def slowed(run: Mapping[str, ProgramTime], name: str, factor: float) -> dict[str, ProgramTime]:
    """A run in which one problem took longer."""
    was = run[name]
    longer = was._replace(us=was.us * factor, ci_low_us=was.ci_low_us * factor, ci_high_us=was.ci_high_us * factor)
    return {**run, name: longer}


Run = Mapping[str, Mapping[str, ProgramTime]]
"""Of each problem both programs, by name."""


def summarise(sessions: Sequence[Sequence[Run]], runs: int) -> str:
    """What the gate says of checks with so many runs a side, drawn from those recorded.

    Raises:
        ConfigError: no session has enough runs.
    """
    rng, recorded = random.Random(0), [run for session in sessions for run in session]
    names, enough = list(recorded[0]), [session for session in sessions if len(session) >= 2 * runs]
    if not enough:
        raise ConfigError(f"no session has {2 * runs} runs; record more, or pass --runs")
    splits = sum(math.comb(len(each), runs) * math.comb(len(each) - runs, runs) for each in enough)

    def draw(before: str = SERVED) -> list[list[dict[str, ProgramTime]]]:
        """Runs of the two sides, of different processes, with one program of each problem, and the second side's other ones."""
        drawn = rng.sample(rng.choice(enough), 2 * runs)
        other = SLOWER if before == SERVED else SERVED
        parts = (drawn[:runs], before), (drawn[runs:], before), (drawn[runs:], other)
        return [[{name: each[name][program] for name in names} for each in part] for part, program in parts]

    def verdict_on(name: str, before: Any, after: Any) -> str:
        return next(row.verdict for row in check(before, after).rows if row.b.problem == name)

    many = " and ".join(str(len(each)) for each in sessions)
    lines = [f"{many} runs of {len(names)} problems; {runs} runs a side, of which {splits:,} choices differ"]
    for program in (SERVED, SLOWER):
        found = [check(*draw(program)[:2]) for _ in range(CHECKS)]
        lines.append(
            f"A/A checks of the {program}: {sum(each.regressed for each in found)} of {CHECKS} give an alarm; runs differ by "
            f"{statistics.median(each.noise or 0 for each in found):.2%}; "
            f"{statistics.mean(row.verdict == 'tied' for each in found for row in each.rows):.1%} of the verdicts are `tied`"
        )
    for factor in FACTORS:
        planted = Counter[str]()
        for place in range(PLANTED):
            name, (before, after, _) = names[place % len(names)], draw()
            planted[verdict_on(name, before, [slowed(run, name, factor) for run in after])] += 1
        lines.append(f"times of one problem times {factor}: {_counted(planted)} of {PLANTED}")
    lines += ["", "|problem|served, us|runner-up|spread of runs|verdicts on it|", "|---|---:|---:|---:|---|"]
    caught: dict[bool, Counter[str]] = defaultdict(Counter)
    for name in names:
        ratio = statistics.geometric_mean(run[name][SLOWER].us / run[name][SERVED].us for run in recorded) - 1
        verdicts = Counter[str]()
        for _ in range(PLANTED // len(names)):
            before, after, other = draw()
            changed = [{**run, name: each[name]} for run, each in zip(after, other, strict=True)]
            verdicts[verdict_on(name, before, changed)] += 1
        caught[ratio >= LIMIT].update(verdicts)
        times = [[math.log(run[name][program].us) for run in each] for each in enough for program in (SERVED, SLOWER)]
        spread = math.sqrt(statistics.mean(statistics.variance(each) for each in times))
        us = statistics.geometric_mean(run[name][SERVED].us for run in recorded)
        lines.append(f"|{name}|{us:.1f}|{ratio:+.2%}|{spread:.2%}|{_counted(verdicts)}|")
    lines += ["", f"real programs that take 3% longer or more: {_counted(caught[True])}"]
    lines.append(f"real programs that take less than 3% longer: {_counted(caught[False])}")
    return "\n".join(lines)


def _counted(verdicts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) or "none"


if __name__ == "__main__":
    sys.exit(main())
