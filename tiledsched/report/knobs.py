"""What each knob value was worth, over recorded landscapes: two Markdown tables.

`python -m tiledsched.report.knobs tuning_db/landscapes/*_burst_*.json.xz`. Plain is the default of the space; the
structural knobs are those it marks `measured_only`. Programs that were never checked count in no time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiledsched.errors import DatabaseError
from tiledsched.measure.runner import Measurement
from tiledsched.report.document import NOTHING, Table, to_markdown
from tiledsched.schedule import KnobValue, Schedule
from tiledsched.space import SearchSpace, space_for
from tiledsched.store.exchange import read_table


@dataclass(frozen=True, kw_only=True)
class KnobVerdict:
    """One knob value that departs from the plain kernel. Gains above 1 speak for it."""

    knob: str
    """Its name."""
    value: KnobValue
    """The value that departs."""
    recorded: int
    """Distinct programs with it, over all landscapes."""
    checked: int
    """Of those, programs that were not hopeless: only these count below."""
    in_best: int
    """Landscapes whose fastest program has it."""
    ahead: int
    """Landscapes whose fastest program has it and is ahead of all with another value, 95% intervals apart."""
    over_plain: tuple[float, ...]
    """For each landscape with both: best time with the plain value over best time with this one."""
    over_others: tuple[float, ...]
    """The same against the best of all other values of the knob."""
    pairs: tuple[float, ...]
    """Plain time over its time, for programs that differ in nothing else."""


def checked_landscape(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those that were checked, fastest first.

    Raises:
        DatabaseError: there are none.
    """
    checked = sorted((one for one in measurements if one.accuracy is not None), key=lambda one: one.median_us)
    if not checked:
        raise DatabaseError("the landscape holds no checked program; give one that `tiledsched record` wrote")
    return checked


def _first(ranked: Sequence[Measurement], accept: Callable[[Schedule], bool]) -> Measurement | None:
    return next((one for one in ranked if accept(one.schedule)), None)


def verdict(space: SearchSpace, landscapes: Sequence[Sequence[Measurement]], knob: str, value: KnobValue) -> KnobVerdict:
    """What `knob=value` was worth over landscapes of one regime, each of one problem."""
    plain = space.knobs[knob].default
    in_best = ahead = 0
    over_plain, over_others, pairs = [], [], []
    for landscape in landscapes:
        ranked = checked_landscape(landscape)
        mine = _first(ranked, lambda schedule: schedule[knob] == value)
        if mine is None:
            continue
        other = _first(ranked, lambda schedule: schedule[knob] != value)
        unchanged = _first(ranked, lambda schedule: schedule[knob] == plain)
        in_best += mine is ranked[0]
        if other is not None:
            ahead += mine.ci_high_us < other.ci_low_us
            over_others.append(other.median_us / mine.median_us)
        if unchanged is not None:
            over_plain.append(unchanged.median_us / mine.median_us)
        times = {one.schedule: one.median_us for one in ranked}
        for schedule, us in times.items():
            partner = schedule.replace(**{knob: plain})
            if schedule[knob] == value and partner in times:
                pairs.append(times[partner] / us)
    having = [one for landscape in landscapes for one in landscape if one.schedule[knob] == value]
    return KnobVerdict(knob=knob, value=value, recorded=len(having), in_best=in_best, ahead=ahead,
                       checked=sum(one.accuracy is not None for one in having), over_plain=tuple(over_plain),
                       over_others=tuple(over_others), pairs=tuple(pairs))  # fmt: skip


def _middle_and_most(ratios: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}") if ratios else (NOTHING, NOTHING)


def knob_table(space: SearchSpace, landscapes: Sequence[Sequence[Measurement]]) -> Table:
    """One row for each value that departs from the default and was recorded."""
    rows = []
    for name, knob in space.knobs.items():
        values = {one.schedule[name] for landscape in landscapes for one in landscape} - {knob.default}
        for value in sorted(values, key=lambda value: (isinstance(value, str), value)):
            got = verdict(space, landscapes, name, value)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            rows.append((f"`{name}={text}`", str(got.recorded), str(got.checked), str(got.in_best), str(got.ahead),
                         *_middle_and_most(got.over_plain), *_middle_and_most(got.over_others),
                         _middle_and_most(got.pairs)[0], str(len(got.pairs))))  # fmt: skip
    return Table(head=("knob value", "programs", "checked", "in best", "clearly ahead", "over plain: median", "best",
                       "over all others: median", "best", "pairs: median", "pairs"), rows=tuple(rows))  # fmt: skip


def problem_table(space: SearchSpace, landscapes: Sequence[Sequence[Measurement]]) -> Table:
    """One row for each landscape: its best program, against the best without structural knobs."""
    rows = []
    for landscape in landscapes:
        ranked = checked_landscape(landscape)
        best = ranked[0]
        pins = space.modelled_pins().items()
        unchanged = _first(ranked, lambda schedule: all(schedule[name] == value for name, value in pins))
        gain, apart = NOTHING, NOTHING
        if unchanged is not None:
            gain = f"{unchanged.median_us / best.median_us:.3f}x"
            apart = "yes" if best.ci_high_us < unchanged.ci_low_us else "no"
        rows.append((str(best.problem), str(len(ranked)), best.schedule.short(), f"{best.median_us:.1f}",
                     f"{best.problem.tflops(best.median_us):.0f}", gain, apart))  # fmt: skip
    return Table(head=("problem", "checked programs", "best schedule", "us", "TFLOP/s", "gain over no structural knob",
                       "intervals apart"), rows=tuple(rows))  # fmt: skip


def main(paths: Sequence[str]) -> None:
    """Print both tables for landscapes of one arch."""
    landscapes = [[stored.measurement for stored in read_table(path).measurements] for path in paths]
    if not landscapes or len({(one.device.arch, one.regime) for all_of in landscapes for one in all_of}) != 1:
        raise SystemExit("give landscape files of one arch and one regime")
    space = space_for(landscapes[0][0].device.arch)
    print(to_markdown([knob_table(space, landscapes), problem_table(space, landscapes)]), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
