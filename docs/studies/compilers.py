"""Times what each compiler serves: `python -m docs.studies.compilers --arch sm_90 --suite attention --csv FILE`.

Of each problem three programs take turns on the GPU: what the table serves under every compiler that it has evidence of, each
as the machine code that was measured (from the cache or a bundle: no compiler but the one installed is needed), and, of the
method `stale`, the other compilers' schedules as the one at hand builds them, which is what is served before a `refresh`.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from docs.studies.flags import flag, parser_with
from tiledsched.build.cubin import Artifact
from tiledsched.build.store import ProgramStore
from tiledsched.core.config import load_settings
from tiledsched.core.errors import Failure, TiledschedError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.problem_lists import problems_of
from tiledsched.core.registry import load_kernel
from tiledsched.measure.runner import Candidate, Runner
from tiledsched.rivals.rows import OK, BenchRow, append_rows, read_rows
from tiledsched.serve.entries import load_entries
from tiledsched.serve.prebuilt import usable_bundle
from tiledsched.store.records import Entry
from tiledsched.studies.ablation.ladder import outcome_of
from tiledsched.tuning.builder import Builder
from tiledsched.tuning.session import Session

SERVED, STALE = "tiledsched", "stale"
SUSTAINED_ROUNDS = 5
"""In the sustained regime, so many times as many samples: they follow each other at once and spread more."""


def served_by(entries: Iterable[Entry], problem: Problem, device: str) -> dict[str, Entry]:
    """Compiler -> the measured entry that it serves on a GPU, oldest compiler first. Of several regimes, the first by
    name counts.
    """
    found: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda each: (each.compiler, each.regime)):
        if entry.provenance == "measured" and (entry.problem, entry.device_name) == (problem, device):
            found.setdefault(entry.compiler, entry)
    return found


class MachineCode:
    """Measured machine code by its fingerprint, from the cache or else from the bundle in use."""

    def __init__(self, store: ProgramStore, kernel: KernelClass, arch: str) -> None:
        self._store, self._arch = store, arch
        bundles = [bundle] if (bundle := usable_bundle(kernel)) else []
        self._bundled = {
            program.fingerprint: (each, program)
            for each in bundles
            for program in each.programs
            if (program.kernel, program.arch) == (kernel.name, arch)
        }

    def get(self, fingerprint: str) -> Artifact | None:
        """The machine code; None where it is nowhere."""
        found = self._store.get(self._arch, fingerprint)
        if found is None and fingerprint in self._bundled:
            bundle, program = self._bundled[fingerprint]
            found = bundle.artifact(program)
        return found


def compare(
    runner: Runner,
    builder: Builder,
    code: MachineCode,
    served: Mapping[str, Entry],
    problem: Problem,
    *,
    regime: str,
    rounds: int,
) -> list[BenchRow]:
    """The rows of one problem: the program of every compiler, timed in one interleaved run.

    Args:
        runner: what times.
        builder: of the compiler at hand; it has built the other compilers' schedules.
        code: what was measured.
        served: compiler -> entry.
        problem: what is computed.
        regime: burst or sustained.
        rounds: samples of each.
    """
    at_hand = builder.toolchain.tileiras
    wanted: list[tuple[BenchRow, Entry, str]] = []
    for compiler, entry in served.items():
        row = BenchRow(
            problem=problem,
            method=SERVED,
            regime=regime,
            status=OK,
            schedule=entry.schedule.short(),
            provenance="measured",
            device=runner.device.name,
            versions=f"driver {runner.device.driver}",
            compiler=compiler,
        )
        wanted.append((replace(row, measured_program=True), entry, entry.fingerprint))
        if compiler != at_hand:
            print_of = builder.fingerprint(entry.schedule, problem) or ""
            wanted.append((replace(row, method=STALE, compiler=at_hand, measured_program=False), entry, print_of))
    runner.begin(problem)
    rows: list[BenchRow] = []
    ready: list[tuple[BenchRow, Candidate]] = []
    for row, entry, fingerprint in wanted:
        artifact = code.get(fingerprint) if fingerprint else None
        if artifact is None:
            rows.append(
                replace(row, status="its machine code is not at hand: bundle it where its compiler is installed")
            )
            continue
        candidate = Candidate(schedule=entry.schedule, artifact=artifact)
        seen = runner.probe(candidate)
        if isinstance(seen, Failure):
            rows.append(replace(row, status=f"{seen.kind}: {seen.message}"))
        else:
            ready.append((row, candidate))
    count = rounds * (SUSTAINED_ROUNDS if regime == "sustained" else 1)
    batches = runner.sample([each for _, each in ready], rounds=count, regime=regime) if ready else []
    for (row, _), batch in zip(ready, batches, strict=True):
        outcome = outcome_of(batch)
        if isinstance(batch, Failure) or isinstance(outcome, str):
            rows.append(replace(row, status=str(outcome)))
        else:
            count = len(batch.samples_us)
            rows.append(replace(row, timing=outcome, samples=count, conditions=batch.conditions))
    return rows


def run(
    kernel: KernelClass,
    problems: Sequence[Problem],
    arch: str,
    *,
    regimes: Sequence[str],
    rounds: int,
    budget_s: float | None = None,
    done: Sequence[BenchRow] = (),
) -> Iterator[list[BenchRow]]:
    """The rows of each problem in each regime, except those that `done` already has.

    Raises:
        MeasureError: there is no GPU of the arch.
        CompilerError: there is no compiler.
    """
    settings, began = load_settings(), time.monotonic()
    entries = load_entries(settings, {arch}, kernel.name)
    cells = {row.cell for row in done}
    with Session(arch, settings=settings) as session:
        code = MachineCode(session.artifacts, kernel, arch)
        runner = session.open_runner(kernel, "gpu", without="--summary FILE")
        assert runner is not None
        builder = session.builder(kernel)
        tables = {problem: served_by(entries, problem, runner.device.name) for problem in problems}
        builder.build_for_each(
            (entry.schedule, problem) for problem, served in tables.items() for entry in served.values()
        )
        for regime in regimes:
            for problem in problems:
                if (regime, problem) in cells:
                    continue
                if budget_s is not None and time.monotonic() - began > budget_s:
                    return
                if tables[problem]:
                    yield compare(runner, builder, code, tables[problem], problem, regime=regime, rounds=rounds)


def ratios(rows: Iterable[BenchRow], oldest: str, method: str) -> dict[tuple[str, Problem], float]:
    """Cell -> time of `method` under a newer compiler over the time of what the oldest compiler serves, minus 1."""
    cells: dict[tuple[str, Problem], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.median_us:
            cells[row.cell]["oldest" if (row.compiler, row.method) == (oldest, SERVED) else row.method] = row.median_us
    return {
        cell: found[method] / found["oldest"] - 1 for cell, found in cells.items() if {"oldest", method} <= set(found)
    }


def summary(rows: Sequence[BenchRow]) -> str:
    """A summary of the rows, in lines of text."""
    versions = sorted({row.compiler for row in rows if row.method == SERVED})
    if len(versions) < 2:
        return f"the rows are of one compiler ({', '.join(versions)}); refresh under another first"
    lines = [f"time under {versions[-1]} over that of what {versions[0]} serves:"]
    for method, about in ((SERVED, "what is served now"), (STALE, "the old schedules")):
        for regime in dict.fromkeys(row.regime for row in rows):
            found = {cell: each for cell, each in ratios(rows, versions[0], method).items() if cell[0] == regime}
            if found:
                mean = statistics.geometric_mean(1 + each for each in found.values()) - 1
                (_, worst), most = max(found.items(), key=lambda item: item[1])
                slower = sum(each > 0.01 for each in found.values())
                lines.append(
                    f"  {about}, {regime}: {mean:+.1%} by geometric mean of {len(found)}, {slower} slower by more than "
                    f"1%, worst {most:+.1%} ({worst})"
                )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the file, and print a summary."""
    parser = parser_with(
        flag("kernel", nargs="?", default="attention"),
        flag("--arch", default="sm_90"),
        flag("--suite", help="only these problems; all that the kernel names unless given"),
        flag("--regime", choices=["burst", "sustained", "both"], default="burst"),
        flag("--rounds", type=int, default=24, help="samples of each program (24; sustained, 5 times as many)"),
        flag("--budget", type=float, metavar="SECONDS", help="begin no problem after that"),
        flag("--csv", metavar="FILE", type=Path, help="add the rows to this file; problems that it has are left out"),
        flag("--summary", metavar="FILE", type=Path, help="say what a file's rows say; no GPU"),
        prog="python -m docs.studies.compilers",
        description="what each compiler serves, in turn",
    )
    options = parser.parse_args(arguments)
    try:
        if options.summary:
            rows = read_rows(options.summary)
        else:
            kernel = load_kernel(options.kernel)
            rows = read_rows(options.csv) if options.csv and options.csv.exists() else []
            regimes = ("burst", "sustained") if options.regime == "both" else (options.regime,)
            for found in run(
                kernel,
                problems_of(kernel, options.suite),
                options.arch,
                regimes=regimes,
                rounds=options.rounds,
                budget_s=options.budget,
                done=rows,
            ):
                rows += found
                if options.csv:
                    append_rows(found, options.csv)
    except TiledschedError as error:
        parser.exit(error.exit_code, f"{error}\n")
    print(summary(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
