"""What the rows of a ladder say: the rungs of each kind of problem, their rates and gains, and the answer in sentences."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiledsched.core.problem import rate_text
from tiledsched.core.text import joined, plural
from tiledsched.rivals.methods import OURS
from tiledsched.rivals.rows import BenchRow
from tiledsched.studies.ladder.rungs import rungs
from tiledsched.studies.phrases import times_as_fast

SMALL = 0.02
"""An edit that gains less than this is said to change little."""
SERVED = "the whole kernel of tiledsched, with the schedule that it serves"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A rung of the ladder for one kind of problem: problems that differ in nothing but their length."""

    name: str
    """Name of the method."""
    adds: str
    """What it adds to the rung before."""
    timed: Mapping[int, BenchRow]
    """Length -> its row, where it has a time; the shortest first."""
    gains: Mapping[int, float]
    """Length -> time of the rung before over its own, where both have a time. The two are of one run."""

    @property
    def gain(self) -> float | None:
        """The geometric mean of its gains; None where there is none."""
        return statistics.geometric_mean(self.gains.values()) if self.gains else None


def kind_of(row: BenchRow) -> str:
    """What rows of one ladder have in common: the problem without its length and, at the power cap, the regime."""
    words = re.sub(r"\bS=\S+ ?", "", str(row.problem)).strip()
    return words + (", at the power cap" if row.regime == "sustained" else "")


def kinds_of(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """The rows of each kind of problem on each GPU, by a text that says which; in the order of the rows."""
    several = len({row.device for row in rows}) > 1
    found: dict[str, list[BenchRow]] = {}
    for row in rows:
        found.setdefault(kind_of(row) + (f", on {row.device}" if several else ""), []).append(row)
    return found


def climbed(rows: Sequence[BenchRow]) -> list[Rung]:
    """The rungs of one kind of problem, in their order; those that no row is of are left out."""
    known = {name: adds for name, (adds, _) in rungs().items()} | {OURS: SERVED}
    order = [name for name in known if any(row.method == name for row in rows)]
    timed: dict[str, dict[int, BenchRow]] = {name: {} for name in order}
    for row in sorted(rows, key=lambda row: row.problem.seq_q):
        if row.median_us and row.method in timed:
            timed[row.method][row.problem.seq_q] = row
    found = []
    for place, name in enumerate(order):
        before = timed[order[place - 1]] if place else {}
        gains = {length: _us(before[length]) / _us(row) for length, row in timed[name].items() if length in before}
        found.append(Rung(name=name, adds=known[name], timed=timed[name], gains=gains))
    return found


def longest(found: Sequence[Rung]) -> int | None:
    """The longest length at which any rung has a time; None where none has."""
    return max((length for rung in found for length in rung.timed), default=None)


def answer(kind: str, found: Sequence[Rung]) -> str:
    """What the ladder found for one kind of problem, in sentences."""
    first, last = found[0], found[-1]
    shared = [length for length in last.timed if length in first.timed]
    lines = []
    if shared and first is not last:
        length = shared[-1]
        slow, fast = first.timed[length], last.timed[length]
        lines.append(
            f"For {kind}, `{last.name}` reaches {_rate(fast)} at S={length}: it is "
            f"{times_as_fast(_us(slow) / _us(fast))} as `{first.name}`, which reaches {_rate(slow)}."
        )
    else:
        missing = [f"`{rung.name}`" for rung in found if rung in (first, last) and not rung.timed]
        why = f"{joined(missing)} {'has' if len(missing) == 1 else 'have'} no time" if missing else "no length has both"
        lines.append(f"For {kind}, the first and the last rung cannot be compared: {why}.")
    steps = [rung for rung in found if rung.gain is not None]
    if steps:
        best = max(steps, key=lambda rung: rung.gain or 0.0)
        if best.gain and best.gain > 1 + SMALL:
            lines.append(
                f"The largest step is `{best.name}` ({best.adds}): with it the kernel is {times_as_fast(best.gain)} as "
                f"before ({_mean(best)})."
            )
        slower = [rung for rung in steps if rung.gain and rung.gain < 1 - SMALL]
        if slower:
            said = joined(f"`{rung.name}` {rung.gain:.2f} times as fast ({_mean(rung)})" for rung in slower)
            lines.append(f"{'A step makes' if len(slower) == 1 else 'Some steps make'} it slower: {said}.")
        little = [f"`{rung.name}`" for rung in steps if rung.gain and abs(rung.gain - 1) <= SMALL]
        if little:
            lines.append(f"With {joined(little)} the mean time changes by 2% at most.")
    return " ".join(lines)


def _mean(rung: Rung) -> str:
    over = plural(len(rung.gains), "length")
    return f"geometric mean of {over}" if len(rung.gains) > 1 else over


def _rate(row: BenchRow) -> str:
    return rate_text(row.problem, _us(row))


def _us(row: BenchRow) -> float:
    """The time of a row that has one."""
    assert row.median_us
    return row.median_us
