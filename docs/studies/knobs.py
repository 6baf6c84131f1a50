"""Measures what each knob value was worth, over recorded landscapes: three Markdown tables.

`python -m docs.studies.knobs tuning_db/landscapes/attention/*_burst_*.json.xz`. Plain is the default of the space; the
structural knobs are those it marks `measured_only`. Programs that were never checked count in no time of the first two
tables; the third has changes of one knob whose effect depends on other knobs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from docs.studies.interactions import interactions, interactions_table
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import rate_of, unit_of
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import KnobValue
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.core.text import NOTHING
from tiledsched.measure.runner import Measurement
from tiledsched.report.document import Table, to_markdown
from tiledsched.store.exchange import read_table

Landscapes = Sequence[Sequence[Measurement]]
KNOB_HEAD = (
    "knob value",
    "programs",
    "checked",
    "in best",
    "clearly ahead",
    "over plain: median",
    "best",
    "over all others: median",
    "best",
    "pairs: median",
    "pairs",
)
PROBLEM_HEAD = (
    "problem",
    "checked programs",
    "best schedule",
    "us",
    "{unit}",
    "gain over no structural knob",
    "intervals apart",
)


@dataclass(frozen=True, kw_only=True)
class KnobVerdict:
    """What one knob value that is not the default was worth. Ratios above 1 mean that it is faster."""

    recorded: int
    """Distinct programs with the value, over all landscapes."""
    checked: int
    """How many of them were fast enough to be checked; only these count below."""
    in_best: int
    """Landscapes whose fastest program has the value."""
    ahead: int
    """How many of these landscapes have it ahead of every program with another value, with 95% intervals apart."""
    over_plain: tuple[float, ...]
    """For each landscape with both: best time with the plain value over best time with this one."""
    over_others: tuple[float, ...]
    """For each landscape with both: best time with any other value over best time with this one."""
    pairs: tuple[float, ...]
    """Time with the plain value over time with this one, for programs that differ in nothing else."""


def fastest_first(landscape: Sequence[Measurement]) -> list[Measurement]:
    """The checked programs, fastest first."""
    return sorted((one for one in landscape if one.accuracy is not None), key=lambda one: one.median_us)


def verdict(space: SearchSpace, landscapes: Landscapes, knob: str, value: KnobValue) -> KnobVerdict:
    """What `knob=value` was worth over landscapes of one regime, each of one problem."""
    plain = space.knobs[knob].default
    in_best = ahead = checked = 0
    over_plain, over_others, pairs = [], [], []
    for ranked in map(fastest_first, landscapes):
        having = [one for one in ranked if one.schedule[knob] == value]
        others = [one for one in ranked if one.schedule[knob] != value]
        unchanged = {one.schedule: one.median_us for one in others if one.schedule[knob] == plain}
        checked += len(having)
        in_best += ranked[:1] == having[:1] != []
        if having and others:
            ahead += having[0].ci_high_us < others[0].ci_low_us
            over_others.append(others[0].median_us / having[0].median_us)
        if having and unchanged:
            over_plain.append(min(unchanged.values()) / having[0].median_us)
        for one in having:
            partner = one.schedule.replace(**{knob: plain})
            if partner in unchanged:
                pairs.append(unchanged[partner] / one.median_us)
    recorded = sum(one.schedule[knob] == value for landscape in landscapes for one in landscape)
    return KnobVerdict(
        recorded=recorded,
        checked=checked,
        in_best=in_best,
        ahead=ahead,
        pairs=tuple(pairs),
        over_plain=tuple(over_plain),
        over_others=tuple(over_others),
    )


def _middle_and_most(ratios: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}") if ratios else (NOTHING, NOTHING)


def knob_row(space: SearchSpace, landscapes: Landscapes, knob: str, value: KnobValue) -> tuple[str, ...]:
    """The verdict as cells under `KNOB_HEAD`."""
    got = verdict(space, landscapes, knob, value)
    return (
        f"`{knob}={str(value).lower()}`",
        str(got.recorded),
        str(got.checked),
        str(got.in_best),
        str(got.ahead),
        *_middle_and_most(got.over_plain),
        *_middle_and_most(got.over_others),
        _middle_and_most(got.pairs)[0],
        str(len(got.pairs)),
    )


def problem_row(pins: Mapping[str, KnobValue], ranked: Sequence[Measurement]) -> tuple[str, ...]:
    """The best program against the best with the values of `pins`, as cells under `PROBLEM_HEAD`."""
    best = ranked[0]
    plain = next((one for one in ranked if all(one.schedule[name] == value for name, value in pins.items())), None)
    gain = f"{plain.median_us / best.median_us:.3f}x" if plain else NOTHING
    apart = "yes" if plain and best.ci_high_us < plain.ci_low_us else "no"
    return (
        str(best.problem),
        str(len(ranked)),
        best.schedule.short(),
        f"{best.median_us:.1f}",
        f"{rate_of(best.problem, best.median_us):.0f}",
        gain,
        apart,
    )


def tables(space: SearchSpace, landscapes: Landscapes) -> tuple[Table, Table]:
    """A table with a row for each recorded value that is not the default, and one with a row for each landscape."""
    landscapes = [
        [replace(one, schedule=space.complete(one.schedule)) for one in landscape] for landscape in landscapes
    ]
    departures = [
        (name, value) for name, knob in space.knobs.items() for value in knob.choices if value != knob.default
    ]
    knob_rows = (knob_row(space, landscapes, *departure) for departure in departures)
    problem_rows = (problem_row(space.modelled_pins(), fastest_first(one)) for one in landscapes)
    head = tuple(title.format(unit=unit_of(landscapes[0][0].problem)) for title in PROBLEM_HEAD)
    return (
        Table(head=KNOB_HEAD, rows=tuple(row for row in knob_rows if row[1] != "0")),
        Table(head=head, rows=tuple(problem_rows)),
    )


if __name__ == "__main__":
    recorded = [[stored.measurement for stored in read_table(path).measurements] for path in sys.argv[1:]]
    kinds = {(one.problem.kernel, one.device.arch, one.regime) for landscape in recorded for one in landscape}
    if len(kinds) != 1:
        raise ConfigError("the landscapes are not of one kernel, one arch and one regime; give files of one of each")
    ((kernel, arch, _),) = kinds
    times = [[(one.schedule, one.median_us) for one in landscape] for landscape in recorded]
    print(
        to_markdown(
            [*tables(space_for(arch, kernel=kernel_named(kernel)), recorded), interactions_table(interactions(times))]
        ),
        end="",
    )
