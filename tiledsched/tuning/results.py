"""What a tune found, who is told of its progress, and under `--numerics same`, the numbers that a schedule must give to win and
what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Candidate, Measurement
from tiledsched.store.evidence import clocks_of, throttled
from tiledsched.store.records import SAME_NUMBERS, Entry, Printable
from tiledsched.tuning.builder import Program


class Watcher:
    """Is told of progress, and shows nothing. The bars of the command line do."""

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """A stage of `total` steps begins."""

    def step(self, done: int) -> None:
        """`done` steps of it are done."""

    def best(self, us: float, schedule: Schedule) -> None:
        """A schedule is the best so far; `us` is measured, or estimated where nothing is measured."""


@dataclass(frozen=True, kw_only=True)
class WantedNumbers:
    """The numbers that a schedule must give to win, and the program that gives them."""

    program: Program
    """Wins whatever the bits are: they are its own."""
    accuracy: Accuracy
    """What the check of it told."""
    grids: Callable[[Schedule], tuple[tuple[int, int, int], ...]]
    """Gives the grids of a schedule's launches."""

    def __post_init__(self) -> None:
        if not self.accuracy.outputs:
            raise ConfigError(
                "these measurements do not tell whether outputs are the same bit for bit: they were recorded before that was "
                "noted; record them again, or leave out --numerics same"
            )

    def why_not(self, candidate: Candidate, accuracy: Accuracy) -> Failure | None:
        """Why a candidate that computes right must not win; None where its numbers are the wanted ones."""
        if (candidate.artifact.fingerprint, self.grids(candidate.schedule)) == self.program.key:
            return None
        how = "" if accuracy.repeatable else ": it gives other bits from run to run"
        message = f"differs from the incumbent's numbers ({self.program.schedule.short()}){how}"
        return (
            None if accuracy.same_numbers(self.accuracy) else Failure(kind=FailureKind.OTHER_NUMBERS, message=message)
        )

    def known(self, taken: Measurement) -> bool | None:
        """Whether a measurement in the store is of the wanted numbers; None where it does not tell. What was never checked, as it
        was far too slow, counts: it is checked before it may win.
        """
        accuracy = taken.accuracy
        if accuracy is None or taken.fingerprint == self.program.fingerprint:
            return True
        return accuracy.same_numbers(self.accuracy)


@dataclass(frozen=True, kw_only=True)
class NumbersKept(Printable):
    """That only what is served, and what computes the same bits, could win; and what that cost."""

    incumbent: Schedule
    """The schedule whose outputs all others' had to equal: what was served, or the default where nothing was."""
    repeatable: bool
    """Whether it gives the same bits each time. Where it does not, nothing equals it, and only itself could win."""
    refused: int
    """Programs that computed right results, and not these."""
    fastest: Schedule | None = None
    """The fastest of the refused, where one is faster than the winner."""
    gain: float | None = None
    """By what part of the winner's time that one takes less; 0 where none does; None where they were not timed."""

    def __str__(self) -> str:
        """In words, as an entry's source has it."""
        text = f"{SAME_NUMBERS}{self.incumbent.short()}"
        if not self.repeatable:
            text += ", which differ from run to run so that nothing else could win"
        if not self.refused:
            return f"{text}: no program that was checked has others"
        text += f": {self.refused} with others refused"
        if self.fastest is not None and self.gain is not None:
            return f"{text}, the fastest, {self.fastest.short()}, takes {self.gain:.1%} less time"
        return text + (", none of them faster" if self.gain is not None else ", and not timed: the budget ended first")


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What tuning one problem found."""

    entry: Entry
    """What is served from now on (or would be, if the store did not hold something better)."""
    stored: bool
    """False when a stronger entry was kept."""
    schedules: int
    """Schedules considered."""
    programs: int
    """Distinct programs among them with a time, measured in this run or before; where nothing is measured, those built."""
    compiled: int
    """How often the compiler ran."""
    measured: int
    """Those of them that were measured in this run, and not before."""
    failed: int
    """Schedules that did not build, run or compute correctly."""
    seconds: float
    """Wall time."""
    left: int = 0
    """Schedules that effort, trials or time left unbuilt, where the model ranks."""
    more: bool = False
    """Whether the space holds further schedules, which were not even listed or judged: there are too many, or time was up."""
    over_default: float | None = None
    """(default - winner) / winner, of their measured medians or of the model's estimates; None where the default gave neither."""
    over_runner_up: float | None = None
    """(runner-up - winner) / winner, likewise; None where there is no runner-up."""
    held_down: str = ""
    """In words, how far below its clock the GPU was held in how many of this run's measurements; empty where it was in none."""
    candidates: Mapping[str, int] | None = None
    """What became of the rows of the file of candidates: `raced` or why not, with the number of rows; None without a file."""
    memory: str = ""
    """What the search took of the memory that it might take beside a full one, in words; empty where it had no limit."""
    why_failed: str = ""
    """The commonest message of the schedules that did not build; empty where all did."""

    numbers: NumbersKept | str | None = None
    """What it cost that only the same numbers could win, or, in words, those of one order of sums; None where any right ones
    could."""

    def is_served(self, now: Entry) -> bool:
        """Whether what was found is what is served, given the entry that is served for the problem now."""
        found = self.entry
        return self.stored and (now.provenance, now.schedule, now.source) == (
            found.provenance,
            found.schedule,
            found.source,
        )


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What a tune found."""

    kernel: KernelClass
    """The kernel that was tuned."""
    arch: str
    """The arch it was tuned for."""
    run_id: int
    """Number of the run in the database."""
    results: Sequence[TuneResult]
    """One for each problem: how much was tried, and what won."""
    entries: Sequence[Entry]
    """What is served for each problem now; the entry that was there where it is stronger than what was found."""
    measured: bool
    """Whether a GPU measured; otherwise the performance model ranked what was built."""
    left: Mapping[Problem, str] = field(default_factory=dict)
    """The problems that have no result, and why: the budget ended first, or no schedule works."""

    @property
    def winners(self) -> dict[Problem, Schedule]:
        """The schedule that is served for each problem now."""
        return {entry.problem: entry.schedule for entry in self.entries}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A plain dict for each problem: sizes, winner, ties, runner-up and evidence."""
        return [
            {
                **entry.problem.to_json(),
                "arch": entry.arch,
                "device": entry.device_name,
                "provenance": entry.provenance,
                "schedule": entry.schedule.to_json(),
                "median_us": entry.median_us,
                "model_us": entry.model_us,
                "ties": [tie.to_json() for tie in entry.ties],
                "margin": entry.margin,
                "runner_up": entry.runner_up.to_json() if entry.runner_up else None,
                "rivals": None if entry.rivals is None else [asdict(each) for each in entry.rivals],
                "programs": result.programs,
                "measured_programs": result.measured,
                "failed": result.failed,
                "seconds": round(result.seconds, 3),
            }
            for entry, result in zip(self.entries, self.results, strict=True)
        ]

    def _lines(self) -> list[tuple[str, str, str, str]]:
        lines, seen_mhz = [], clocks_of(self.entries)
        for entry in self.entries:
            us = entry.median_us if entry.median_us is not None else entry.model_us
            said = entry.median_us is not None or entry.provenance == "modelled"
            time = "" if us is None else f"{us:.1f} us" + ("" if said else " (modelled)")
            slowed = ", clock held down" if throttled(entry, seen_mhz) else ""
            lines.append((str(entry.problem), entry.schedule.short(), time, entry.provenance + slowed))
        return lines

    def __str__(self) -> str:
        return "\n".join([f"{self.kernel.name} on {self.arch}", *("  " + "  ".join(line) for line in self._lines())])

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        head = "".join(f"<th>{word}</th>" for word in ("problem", "schedule", "time", "provenance"))
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in self._lines()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
