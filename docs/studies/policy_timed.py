r"""Times serving policies on problems that nobody tuned, where they choose different schedules.

    python -m docs.studies.policy_timed --seeds 301,302 --policies model=1,reach=0.6 distances=6 --csv timed.csv
    python -m docs.studies.policy_timed --summary timed.csv

Problems are drawn at random as those of the suite `drawn`, with other seeds; what the table knows is left out. Each policy is
what is served with some numbers changed; what is served takes part as it is. Only choices are timed, no rivals, as `sdpa`
launches them: where a program spills registers, the next choice. All choices of a problem are interleaved in one run.
"""

from __future__ import annotations

import argparse
import csv
import io
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from docs.studies.flags import flag, integers, parser_with, positive
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.files import csv_text, write_whole
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import drawn
from tiledsched.measure.estimate import Timing
from tiledsched.report.document import Table as Printed, to_markdown
from tiledsched.rivals.bench import BenchOptions, TorchHarness, run_bench
from tiledsched.rivals.rows import TIMES
from tiledsched.serve import process
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_entries
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import NEAR_KIND, TransferParameters
from tiledsched.store.exchange import text_of
from tiledsched.store.records import Entry

ALIKE = "alike"
"""Status of a problem for which all policies choose the same schedule."""
ROUNDS = 12
"""Samples of each choice."""
Choices = Mapping[TransferParameters, Served]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one policy chose for one problem."""

    problem: str
    """The problem as people read it."""
    policy: str
    """The policy's numbers."""
    choice: str
    """The schedule in short."""
    launched: str = ""
    """The schedule that was launched, which is another one where the chosen program spills registers."""
    timing: Timing | None = None
    """The time of a launch; None where there is none."""
    status: str = ALIKE
    """ok, why there is no time, or that all choices are alike."""
    device: str = ""
    """Name of the GPU."""
    versions: str = ""
    """Versions of the driver and libraries."""

    def to_csv(self) -> dict[str, Any]:
        """One cell for each of `COLUMNS`."""
        row = vars(self) | (vars(self.timing) if self.timing else {})
        return {name: row.get(name) for name in COLUMNS}


COLUMNS = ("problem", "policy", "choice", "launched", *TIMES, "status", "device", "versions")


def numbers_of(policy: TransferParameters) -> str:
    """All its numbers, for people and files."""
    return " ".join(f"{name}={value:g}" for name, value in asdict(policy).items())


def policy_of(text: str) -> TransferParameters:
    """What is served, with the numbers of `name=value,name=value` in place of its own.

    Raises:
        argparse.ArgumentTypeError: there is no such number.
    """
    kinds = {name: type(value) for name, value in asdict(NEAR_KIND).items()}
    try:
        named: dict[str, Any] = dict(part.split("=") for part in text.split(","))
        return replace(NEAR_KIND, **{name: kinds[name](value) for name, value in named.items()})
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value,...; names are {', '.join(kinds)}") from error


def problems_of(seeds: Iterable[int], entries: Sequence[Entry]) -> list[Problem]:
    """Those drawn with the seeds that no entry knows."""
    known = {entry.problem for entry in entries}
    found = dict.fromkeys(Attention.as_problem(each) for seed in seeds for each in drawn(seed))
    return [each for each in found if each not in known]


def chosen(
    problem: Problem, tables: Mapping[TransferParameters, LookupTable], arch: str, device: str = ""
) -> dict[TransferParameters, Served]:
    """What each policy's table serves for the problem."""
    return {policy: table.resolve(problem, arch, device) for policy, table in tables.items()}


def tables_of(
    policies: Sequence[TransferParameters], entries: Sequence[Entry]
) -> dict[TransferParameters, LookupTable]:
    """A table for each policy, what is served first."""
    compiler = compiler_at_hand()
    return {
        policy: LookupTable(entries, kernel=Attention, compiler=compiler, policy=policy)
        for policy in (NEAR_KIND, *policies)
    }


def different(choices: Choices) -> list[Served]:
    """One answer for each schedule that was chosen."""
    return list({served.schedule: served for served in choices.values()}.values())


def _method(served: Served, launched: dict[str, str]) -> Any:
    """The launch of a choice, as a method of the bench. `launched` receives the schedule that was launched in the end."""
    from tiledsched.core.rivals import Method
    from tiledsched.ops.own_methods import attention_call, launched_plan, plan_call

    name = served.schedule.short()

    def make(arrays: Any) -> Callable[[], Any]:
        plan = launched_plan(name, arrays, lambda: attention_call(arrays).make_plan(served))
        launched[name] = plan.served.schedule.short()
        return plan_call(arrays, plan)

    return Method(name=name, make=make)


def _build(problem: Problem, answers: Sequence[Served]) -> None:
    """Let cuTile cache the programs of some answers, so that timing them need not wait. Failures show when they are
    timed.
    """
    import cupy
    import torch

    from tiledsched.rivals.methods import make_case

    try:
        arrays = make_case(torch, cupy, problem).arrays
        for served in answers:
            _method(served, {}).make(arrays)
    except Exception as error:  # of a process that only prepares
        print(f"{problem}: {type(error).__name__}: {error}")


def timed(work: Mapping[Problem, Choices], harness: Any, bench: Callable[..., Any] = run_bench) -> Iterator[list[Row]]:
    """The rows of each problem, as `bench` times it. Problems for which all policies choose the same schedule come first.

    Raises:
        MeasureError: the GPU cannot be used any more.
    """
    answered = ((problem, choices, different(choices)) for problem, choices in work.items())
    for problem, choices, answers in sorted(answered, key=lambda each: len(each[2]) > 1):
        launched: dict[str, str] = {}
        rows = [
            Row(problem=str(problem), policy=numbers_of(policy), choice=served.schedule.short())
            for policy, served in choices.items()
        ]
        if len(answers) > 1:
            methods = tuple(_method(served, launched) for served in answers)
            found = {
                each.method: each for each in bench([problem], BenchOptions(methods=methods, rounds=ROUNDS), harness)
            }
            rows = [
                replace(
                    row,
                    launched=launched.get(row.choice, ""),
                    timing=found[row.choice].timing,
                    status=found[row.choice].status,
                    device=harness.device,
                    versions=harness.versions,
                )
                for row in rows
            ]
        yield rows


def read(path: Path) -> list[Row]:
    """The rows of a CSV file, which may be compressed."""
    return [_row(line) for line in csv.DictReader(io.StringIO(text_of(path, path.read_bytes())))]


def _row(line: Mapping[str, Any]) -> Row:
    timing = Timing(**{name: float(line[name]) for name in TIMES}) if line["median_us"] else None
    return Row(timing=timing, **{name: value for name, value in line.items() if name not in TIMES})


def summary(rows: Sequence[Row]) -> str:
    """Markdown: how fast each policy's choices are where they differ."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.timing:
            times[row.problem][row.policy] = row.timing.median_us
    policies = list(dict.fromkeys(row.policy for row in rows))
    whole = [each for each in times.values() if len(each) == len(policies)]
    table = []
    for policy in policies:
        losses = [each[policy] / min(each.values()) for each in whole]
        beside = [each[policy] / each[policies[0]] for each in whole]
        table.append(
            (
                policy,
                _mean(beside),
                _mean(losses),
                *(str(sum(loss > most for loss in losses)) for most in (1.05, 1.1)),
                f"{max(losses, default=1.0):.2f}x",
            )
        )
    head = ("policy", "time over the first's", "over the fastest choice", "by more than 5%", "10%", "worst")
    drawn_ones = len({row.problem for row in rows})
    return (
        to_markdown([Printed(head=head, rows=tuple(table))])
        + f"\n{drawn_ones} problems, in {len(times)} of which choices differ; {len(whole)} are timed in all.\n"
    )


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.4f}x" if ratios else "-"


def main() -> None:
    """Time the policies and print the summary."""
    parser = parser_with(
        flag("--seeds", type=integers, default=[], help="40 problems are drawn with each"),
        flag(
            "--policies",
            type=policy_of,
            nargs="+",
            default=[],
            metavar="NAME=VALUE,...",
            help="numbers of `tiledsched.serve.transfer.TransferParameters` that differ from what is served",
        ),
        flag("--workers", type=positive, default=1, help="processes that build what is to be timed"),
        flag("--csv", type=Path, help="rows are written here as they are known"),
        flag("--summary", type=Path, help="only print what such a file says; no GPU"),
        prog="python -m docs.studies.policy_timed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.parse_args()
    if asked.summary:
        print(summary(read(asked.summary)), end="")
        return
    if not (asked.seeds and asked.policies and asked.csv):
        parser.error("--seeds, --policies and --csv are needed; or --summary")

    harness = TorchHarness()
    process.wait_for_programs()  # torch is not to be timed as ours
    entries = load_entries(process.settings(), {harness.arch}, Attention.name)
    tables = tables_of(asked.policies, entries)
    work = {each: chosen(each, tables, harness.arch, harness.device) for each in problems_of(asked.seeds, entries)}
    if asked.workers > 1:
        with ProcessPoolExecutor(asked.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            apart = {each: answers for each, choices in work.items() if len(answers := different(choices)) > 1}
            list(pool.map(_build, apart, apart.values()))
    rows: list[Row] = []
    for found in timed(work, harness):
        rows += found
        write_whole(asked.csv, csv_text([row.to_csv() for row in rows], COLUMNS))
    print(summary(rows), end="")


if __name__ == "__main__":
    main()
