"""Sums up the study: for each method how often and how well it chose, for each problem how much a time varies."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from docs.studies.repeatability.rows import METHODS, REFEREE, StudyRow
from tiledsched.core.problem import Problem
from tiledsched.report.document import Heading, Table, to_markdown


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """One method over all problems and sessions. Shares are of its rows; a row without a choice counts as a miss."""

    method: str
    """Name of the method."""
    problems: int
    """Distinct problems."""
    sessions: int
    """Distinct sessions."""
    choices: int
    """Rows: one for each problem and session."""
    same_winner: float
    """Share of rows with the winner that the method chose most often on that problem."""
    in_tie_set: float | None
    """Share of rows whose choice is in the tie set of the same session's race; None without races."""
    in_other_tie_sets: float | None
    """Share of pairs of a choice and a race of the same problem on another session where it is in that race's tie set."""
    worst_regret: float | None
    """Largest regret; None where the method never chose anything."""
    mean_regret: float | None
    """Geometric mean of (1 + regret), minus 1."""
    median_device_seconds: float | None
    """Median of the device seconds of its rows."""
    ratio_to_race: float | None
    """Median over problems and sessions of its device seconds over those of the race."""
    median_kernel_seconds: float | None
    """Median of the GPU time in candidates."""
    failures: int
    """Candidates that gave no time, over all rows."""


@dataclass(frozen=True, kw_only=True)
class NoiseSummary:
    """How much a paced burst time varies on one problem, in the referee's runs."""

    problem: Problem
    """The problem."""
    device: str
    """Name of the GPU."""
    programs: int
    """Distinct programs the referee timed."""
    sessions: int
    """Distinct sessions."""
    cv: float | None
    """Coefficient of variation of single samples: median over programs and sessions."""
    cv_of_10: float | None
    """Coefficient of variation of medians of ten samples: median over programs and sessions."""
    cv_between_sessions: float | None
    """Coefficient of variation of a program's medians in different sessions: median over programs timed in two or more."""


@dataclass(frozen=True, kw_only=True)
class StudySummary:
    """The summary of all sessions."""

    methods: tuple[MethodSummary, ...]
    """One line for each method, the race first."""
    noise: tuple[NoiseSummary, ...]
    """One line for each problem."""

    def to_markdown(self) -> str:
        """Two tables: the methods, and how much a time varies."""
        return to_markdown(
            [
                Heading(text="Choosing again and again, among the same programs"),
                Table(head=METHOD_TITLES, rows=tuple(_method_cells(each) for each in self.methods)),
                Heading(text="Coefficient of variation of a paced burst time"),
                Table(head=NOISE_TITLES, rows=tuple(_noise_cells(each) for each in self.noise)),
            ]
        )


METHOD_TITLES = (
    "method",
    "problems",
    "sessions",
    "same winner",
    "in tie set",
    "in other tie sets",
    "worst regret",
    "mean regret",
    "device s",
    "of race",
    "kernel s",
    "failures",
)
NOISE_TITLES = ("problem", "device", "programs", "sessions", "one sample", "median of 10", "between sessions")


def _method_cells(one: MethodSummary) -> tuple[str, ...]:
    return (
        one.method,
        str(one.problems),
        str(one.sessions),
        _percent(one.same_winner, 0),
        _percent(one.in_tie_set, 0),
        _percent(one.in_other_tie_sets, 0),
        _percent(one.worst_regret, 2),
        _percent(one.mean_regret, 2),
        _fixed(one.median_device_seconds),
        _fixed(one.ratio_to_race),
        _fixed(one.median_kernel_seconds),
        str(one.failures),
    )


def _noise_cells(one: NoiseSummary) -> tuple[str, ...]:
    return (
        str(one.problem),
        one.device,
        str(one.programs),
        str(one.sessions),
        _percent(one.cv, 2),
        _percent(one.cv_of_10, 2),
        _percent(one.cv_between_sessions, 2),
    )


def summarise(rows: Sequence[StudyRow]) -> StudySummary:
    """The summary of any number of sessions. Problems on different devices are different problems."""
    by_method: dict[str, list[StudyRow]] = defaultdict(list)
    for row in rows:
        by_method[row.method].append(row)
    races = by_method["race"]
    methods = [_method(name, by_method[name], races) for name in METHODS if by_method[name]]
    noise = [_noise(found) for _, found in sorted(_by_problem(by_method[REFEREE]).items())]
    return StudySummary(methods=tuple(methods), noise=tuple(noise))


def _by_problem(rows: Iterable[StudyRow]) -> dict[tuple[Problem, str], list[StudyRow]]:
    found: dict[tuple[Problem, str], list[StudyRow]] = defaultdict(list)
    for row in rows:
        found[row.problem, row.device].append(row)
    return found


def _method(name: str, rows: Sequence[StudyRow], races: Sequence[StudyRow]) -> MethodSummary:
    problems = _by_problem(rows)
    races_of = _by_problem(races)
    same, other, ratios = [], [], []
    for key, found in problems.items():
        for row in found:
            for one in races_of.get(key, ()):
                inside = row.schedule_id in (one.ties or ())
                if one.session != row.session:
                    other.append(inside)
                    continue
                same.append(inside)
                if row.device_seconds and one.device_seconds:
                    ratios.append(row.device_seconds / one.device_seconds)
    regrets = [row.regret for row in rows if row.regret is not None]
    return MethodSummary(
        method=name,
        problems=len(problems),
        sessions=len({row.session for row in rows}),
        choices=len(rows),
        same_winner=sum(_most_often(found) for found in problems.values()) / len(rows),
        in_tie_set=_mean(same),
        in_other_tie_sets=_mean(other),
        worst_regret=max(regrets, default=None),
        mean_regret=statistics.geometric_mean(1 + regret for regret in regrets) - 1 if regrets else None,
        median_device_seconds=_median(row.device_seconds for row in rows),
        ratio_to_race=_median(ratios),
        median_kernel_seconds=_median(row.kernel_seconds for row in rows),
        failures=sum(row.failures or 0 for row in rows),
    )


def _most_often(rows: Iterable[StudyRow]) -> int:
    """How many rows have the most frequent winner."""
    return max(Counter(row.schedule_id for row in rows if row.schedule_id).values(), default=0)


def _noise(rows: Sequence[StudyRow]) -> NoiseSummary:
    medians: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.estimate_us is not None:
            medians[row.schedule_id].append(row.estimate_us)
    again = [statistics.stdev(values) / statistics.fmean(values) for values in medians.values() if len(values) > 1]
    return NoiseSummary(
        problem=rows[0].problem,
        device=rows[0].device,
        programs=len(medians),
        sessions=len({row.session for row in rows}),
        cv=_median(row.cv for row in rows),
        cv_of_10=_median(row.cv_of_10 for row in rows),
        cv_between_sessions=_median(again),
    )


def _mean(values: Sequence[bool]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _percent(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}%}"


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
