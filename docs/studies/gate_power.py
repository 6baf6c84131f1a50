"""`python -m docs.studies.gate_power`: how often `tiledsched compare --gate` gives a false alarm, and what it catches.

    python -m docs.studies.gate_power record served.db served.csv             # one run: 20 problems, on the GPU here
    python -m docs.studies.gate_power record slower.db slower.csv --slower    # the same with schedules that are slower
    python -m docs.studies.gate_power summary served.csv slower.csv           # no GPU

A *run* is one process that measures what is served for each of 20 problems, as `tiledsched tune --effort served` does, without
the check of the results, which takes most of the time. With `--slower` the database first gets an entry for each problem with
the runner-up of the table that ships, which took 3.0 to 4.4% longer when the table was measured: what the run then measures
are real programs that are slower.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from docs.studies.flags import parser_with, positive
from tiledsched.cli.problems import read_problems
from tiledsched.core import data_files
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError, Failure, TiledschedError
from tiledsched.core.files import csv_text
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.measure import nvml
from tiledsched.measure.estimate import Timing
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.runner import Candidate, Checked, Conditions, Measurement
from tiledsched.report.compare import Comparison, KnownTime, ProgramTime, judged
from tiledsched.report.gate import judged_by_runs
from tiledsched.store.exchange import read_table
from tiledsched.store.records import Entry
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.resources import Tools
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
COLUMNS = (
    "run",
    "device",
    "compiler",
    "kernel",
    "problem",
    "schedule",
    "fingerprint",
    "samples",
    "us",
    "low_us",
    "high_us",
)
"""Columns of the file of a database's runs: a row for each problem of each run."""

LIMIT, CHECKS, PLANTED, FACTORS = 0.03, 50, 100, (1.03, 1.04)


class Unchecked(GpuRunner):
    """Measures as a tune does, without computing whether results are right, which takes most of the time of a run."""

    def check(self, candidate: Candidate) -> Checked | Failure:
        """Compare nothing."""
        return Checked(accuracy=None, first_look_us=self._expected(candidate))


def problems_of(kernel: KernelClass) -> list[Problem]:
    """The problems of a kernel that are measured."""
    return [problem for text in PROBLEMS[kernel.name] for problem in read_problems(kernel, text)]


UNCHECKED = Tools(runner=lambda kernel, seed: Unchecked(kernel, seed=seed, gpu=nvml.only_gpu()))


def main(arguments: Sequence[str] | None = None, tools: Tools = UNCHECKED) -> int:
    """Measure one run, or print the summary; 2 where something is missing or wrong."""
    options = parse(arguments)
    try:
        if options.command == "record":
            print(f"{len(record(options, tools))} problems measured for {options.db}")
        else:
            print(summarise(read_runs(options.served), read_runs(options.slower), options.runs))
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
    recorder = commands.add_parser("record", help="measure one run")
    recorder.add_argument("db", type=Path, help="the database of this side's runs")
    recorder.add_argument("csv", type=Path, help="the file to which a row is appended for each problem")
    recorder.add_argument("--slower", action="store_true", help="measure the runner-up of each problem's table entry")
    summary = commands.add_parser("summary", help="measure nothing: say what the gate makes of recorded runs")
    summary.add_argument("served", type=Path, help="the file of what is served")
    summary.add_argument("slower", type=Path, help="the file of the slower schedules")
    summary.add_argument("--runs", type=positive, default=3, help="runs of each side of a check (3)")
    return parser.parse_args(arguments)


def record(options: argparse.Namespace, tools: Tools) -> list[dict[str, Any]]:
    """Measure what is served for every problem once, store it and append it to the file."""
    rows = []
    for kernel_name in PROBLEMS:
        kernel = load_kernel(kernel_name)
        problems = problems_of(kernel)
        settings = load_settings({"db": str(options.db), "rivals": "off"})
        # A fixed seed would give every run the same inputs and orders.
        chosen = TuneOptions(effort="served", seed=int(datetime.now(timezone.utc).timestamp()))
        with Session(ARCH, settings=settings, tools=tools) as session:
            if options.slower and not session.db.entries(ARCH, kernel_name):
                seed_slower(session, kernel_name, problems)
            report = session.tune(kernel, problems, chosen)
            for result in report.results:
                stored = session.db.measurements(result.entry.problem, ARCH, run_id=report.run_id)
                found = next(each for each in stored if each.id == result.entry.measurement_id)
                timed = found.measurement
                rows.append(
                    {
                        "run": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                        "device": timed.device.name,
                        "compiler": found.toolchain.tileiras,
                        "kernel": kernel_name,
                        "problem": str(timed.problem),
                        "schedule": timed.schedule.short(),
                        "fingerprint": timed.fingerprint,
                        "samples": len(timed.samples_us),
                        "us": timed.median_us,
                        "low_us": timed.ci_low_us,
                        "high_us": timed.ci_high_us,
                    }
                )
    rows = [{**row, "run": rows[0]["run"]} for row in rows]
    with options.csv.open("a", encoding="utf-8") as file:
        file.write(csv_text(rows, COLUMNS, head=file.tell() == 0))
    return rows


def seed_slower(session: Session, kernel_name: str, problems: Sequence[Problem]) -> None:
    """Serve the runner-up of each problem's entry in the table that ships, with a time of one sample: a run measures it anew."""
    shipped = read_table(data_files.tuning_db() / "tables" / kernel_name / f"{ARCH}.json").entries
    for problem in problems:
        entry = next(
            each for each in shipped if each.problem == problem and each.runner_up and each.compiler.startswith("13.5")
        )
        assert entry.runner_up is not None
        assert entry.measurement is not None
        us = entry.measurement.median_us * (1 + (entry.margin or 0))
        device = entry.measurement.device
        taken = Measurement(
            problem=problem,
            schedule=entry.runner_up,
            fingerprint="",
            device=device,
            regime="burst",
            **vars(Timing(median_us=us, ci_low_us=us, ci_high_us=us)),
            samples_us=(us,),
            accuracy=None,
            conditions=Conditions(),
            runner="gpu",
        )
        number = session.db.record_measurement(None, kernel_name, entry.source_hash, session.toolchain, taken)
        session.db.put_entry(
            Entry(
                kernel=kernel_name,
                arch=ARCH,
                problem=problem,
                provenance="measured",
                schedule=entry.runner_up,
                fingerprint="",
                device_name=session.device_here,
                regime="burst",
                toolchain=session.toolchain,
                source_hash=entry.source_hash,
                measurement_id=number,
            )
        )


def read_runs(path: Path) -> list[dict[str, ProgramTime]]:
    """The runs of a file that `record` wrote, each with its time of every problem."""
    found: dict[str, dict[str, ProgramTime]] = defaultdict(dict)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                us, low, high = (float(row[name]) for name in ("us", "low_us", "high_us"))
                taken = ProgramTime(row["schedule"], row["fingerprint"], us, low, high, row["run"] + path.name)
                found[row["run"]][f"{row['kernel']} {row['problem']}"] = taken
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


def summarise(served: Sequence[dict[str, ProgramTime]], slower: Sequence[dict[str, ProgramTime]], runs: int) -> str:
    """What the gate says of checks with so many runs a side, drawn from those recorded."""
    rng = random.Random(0)

    def draw() -> tuple[list[dict[str, ProgramTime]], list[dict[str, ProgramTime]]]:
        drawn = rng.sample(served, 2 * runs)
        return drawn[:runs], drawn[runs:]

    def verdict_on(name: str, before: Any, after: Any) -> str:
        return next(row.verdict for row in check(before, after).rows if row.b.problem == name)

    names = list(served[0])
    alarms = [check(*draw()) for _ in range(CHECKS)]
    lines = [
        f"{len(served)} runs of what is served, {len(slower)} of slower schedules, {len(names)} problems; {runs} runs a side",
        f"A/A: {sum(each.regressed for each in alarms)} of {CHECKS} checks give an alarm; runs differ by "
        f"{statistics.median(each.noise or 0 for each in alarms):.2%}; "
        f"{statistics.mean(row.verdict == 'tied' for each in alarms for row in each.rows):.1%} of the verdicts are `tied`",
    ]
    for factor in FACTORS:
        planted = Counter[str]()
        for place in range(PLANTED):
            name, (before, after) = names[place % len(names)], draw()
            planted[verdict_on(name, before, [slowed(run, name, factor) for run in after])] += 1
        lines.append(
            f"planted {factor - 1:.0%} in the times of one problem: {dict(planted.most_common())} of {PLANTED}"
        )
    caught: dict[str, Counter[str]] = {}
    lines.append("")
    lines.append("| real programs | served, us | slower | spread of runs | verdicts |")
    lines.append("|---|---:|---:|---:|---|")
    for name in names if len(slower) >= runs else ():
        times = [[math.log(run[name].us) for run in each] for each in (served, slower)]
        ratio = math.exp(statistics.mean(times[1]) - statistics.mean(times[0])) - 1
        found = Counter[str]()
        for _ in range(PLANTED // len(names)):
            before, after = draw()
            changed = rng.sample(slower, runs)
            found[
                verdict_on(
                    name, before, [{**run, name: other[name]} for run, other in zip(after, changed, strict=True)]
                )
            ] += 1
        caught.setdefault("3% or more" if ratio >= LIMIT else "less than 3%", Counter()).update(found)
        spread = math.sqrt(statistics.mean(statistics.variance(each) for each in times))
        us = math.exp(statistics.mean(times[0]))
        lines.append(f"|{name}|{us:.1f}|{ratio:+.2%}|{spread:.2%}|{dict(found.most_common())}|")
    lines += [
        f"real programs that are slower by {which}: {dict(found.most_common())}" for which, found in caught.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
