"""A comparison in sentences: the verdict, what each side is, and what is unlike between the two."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from tiledsched.core.groups import largest
from tiledsched.core.text import class_words, joined, percent, plural
from tiledsched.measure.clocks import describe_throttling
from tiledsched.report.compare import Compared, Comparison, KnownTime

ONE = {"are": "is", "have": "has", "hold": "holds"}
LONG = 32
"""A longer name, such as a path, does not stand in sentences: there the side is A or B."""


def verdict_of(found: Comparison) -> str:
    """The comparison, which has rows, in one sentence, with how many problems each part of it is over."""
    rows, (a, b) = found.rows, (found.a, found.b)
    if a == b or max(len(a), len(b)) > LONG:
        a, b = "A", "B"
    total = plural(len(rows), "problem")
    if found.modelled:
        sides = [name for name, taken in ((a, rows[0].a), (b, rows[0].b)) if taken.modelled]
        whose = f"the times of {' and of '.join(sides)} are the performance model's"
        ratios = [row.ratio for row in rows]
        middle = statistics.median(ratios)
        return (
            f"This compares estimates, not two measurements ({whose}), so nothing is called faster or slower: over {total}, "
            f"{b} takes {middle:.2f} times the time of {a} at the median, from {min(ratios):.2f} to {max(ratios):.2f} times."
        )
    again = [row for row in rows if not row.one_measurement]
    if not again:
        return f"{a} and {b} hold the very same measurements: none of {total} was timed anew."
    parts: list[str] = []
    for verdict in ("slower", "faster"):
        if ratios := [max(row.ratio, 1 / row.ratio) for row in rows if row.verdict == verdict]:
            of = f" for {len(ratios)}" if parts else f" than {a} for {len(ratios)} of {total}"
            by = f"by {excess(statistics.median(ratios))}" + " at the median of those" * (len(ratios) > 1)
            parts.append(f"{verdict}{of} ({by})")
    device, *more = {taken.device for row in rows for taken in (row.a, row.b)}
    where = "" if more else f"On {device}, "
    head = " and ".join(parts) or f"neither slower nor faster than {a} for any of {total}"
    counts = Counter(row.verdict for row in again)
    changed, ties = (sum(getattr(row, name) for row in rows) for name in ("winner_changed", "winner_tied"))
    rest = {
        f"are the same within {found.threshold * 100:g}%": counts["same"],
        "are tied": counts["tied"],
        "hold the very same measurement on both sides": len(rows) - len(again),
        "have another winner": changed or "none",
        "have two winners that are tied": ties,
    }
    said = [_one(f"{count} {words}") for words, count in rest.items() if count]
    return f"{where}{b} is {head}; {joined(said)}."


def _one(words: str) -> str:
    """Words about a count, with the verb in the singular where it is one."""
    return re.sub("^1 (are|have|hold)", lambda found: f"1 {ONE[found[1]]}", words)


def excess(ratio: float) -> str:
    """How much longer the slower of two times is: 1.042 is `4.2%`, and from 2 on it is `a factor of 2.5`."""
    return f"a factor of {ratio:.3g}" if ratio >= 2 else percent(ratio - 1)


def conditions_of(found: Comparison) -> list[str]:
    """What is unlike between the two sides, apart from what is compared: a sentence for each, and none where all is alike."""
    rows = [row for row in found.rows if not row.one_measurement and not (row.a.modelled or row.b.modelled)]
    sentences = []
    if others := [row for row in rows if row.a.device != row.b.device]:
        a, b = (_listed(getattr(row, side).device for row in others) for side in ("a", "b"))
        sentences.append(
            f"A was measured on {a} and B on {b}: for {plural(len(others), 'problem')} this is a comparison of GPUs."
        )
    if unlike := [row for row in rows if _unlike(row)]:
        sentences.append(
            f"In {plural(len(unlike), 'problem')} the two GPUs have one name and are not alike: {_unlike(unlike[0])}. "
            "A difference may be the GPU's."
        )
    seen = largest(
        (taken.device, taken.conditions.sm_clock_mhz if taken.conditions else 0)
        for row in found.rows
        for taken in (row.a, row.b)
    )
    for side in ("a", "b"):
        if slowed := [*filter(None, (_throttling(getattr(row, side), seen) for row in rows))]:
            sentences.append(
                f"In {plural(len(slowed), 'problem')} the clock of {side.upper()}'s GPU was held down, "
                f"{slowed[0]}: these times are too "
                "long, and say little about the schedules."
            )
    return sentences


def _unlike(row: Compared) -> str:
    """How two GPUs of one name differ, in words; empty where they do not."""
    a, b = row.a.gpu, row.b.gpu
    if a is None or b is None or a.name != b.name:
        return ""
    if a.sm_count != b.sm_count:
        return f"{a.sm_count} SMs and {b.sm_count} SMs"
    first, second = a.memory_bytes / 2**30, b.memory_bytes / 2**30
    unlike = first and second and abs(first - second) > 1
    return f"{first:.0f} GiB and {second:.0f} GiB of memory" if unlike else ""


def _throttling(taken: KnownTime, seen_mhz: Mapping[str, int]) -> str:
    """In words how far below its clock the GPU was held; empty where it was not, or is not known."""
    if taken.conditions is None or taken.gpu is None:
        return ""
    return describe_throttling(taken.conditions, taken.gpu, taken.regime, seen_mhz.get(taken.device, 0))


def unlike_in_a(row: Compared) -> str:
    """What A's best schedule has in place of B's knobs: `64x64 occ=2`, and `without latK` where it leaves `latK` at its usual
    value.
    """
    a, b = ({_knob(word): word for word in one.schedule.split()} for one in (row.a, row.b))
    usual = [knob for knob in b if knob not in a]
    has = [
        *(word for knob, word in a.items() if b.get(knob) != word),
        *(each for each in usual if b[each][:3] == "no_"),
    ]
    without = joined(each for each in usual if each not in has)
    return ", ".join(filter(None, [" ".join(has), without and f"without {without}"]))


def _knob(word: str) -> str:
    """The knob of a word of an abbreviated schedule; a tile, such as 128x64, is one."""
    return "tile" if word[0].isdigit() else word.partition("=")[0].removeprefix("no_")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted({name or "an unknown GPU" for name in names}))


def label_of(known: KnownTime, found: Comparison) -> str:
    """The problem as people read it, with the regime, accuracy class and arch where the comparison has several of them."""
    words = known.regime, class_words(known.accum_mode), known.arch, known.kernel
    marks = [word for word, several in zip(words, found.several, strict=True) if several]
    return f"{known.problem} ({', '.join(marks)})" if marks else known.problem


def side_facts(found: Comparison) -> list[tuple[str, str]]:
    """For each side its letter, and in words what it is: its name, GPU, compiler and days."""
    facts = []
    for letter, name in (("A", found.a), ("B", found.b)):
        taken = [row.a if letter == "A" else row.b for row in found.rows]
        estimated = f"{name}, estimated by the performance model for {_listed(one.arch for one in taken)}"
        measured = f"{name}, measured on {_listed(one.device for one in taken)}"
        known = estimated if any(one.modelled for one in taken) else measured
        compilers = sorted({one.compiler for one in taken} - {""})
        days = sorted(f"{one.when:%Y-%m-%d}" for one in taken if one.when)
        when = (f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}") if days else ""
        by = f"with compiler {' and '.join(compilers)}" if compilers else ""
        facts.append((letter, " ".join(part for part in (known, when, by) if part)))
    return facts


def drift_of(found: Comparison) -> str:
    """What the programs say that both sides measured with the same machine code; empty where neither side measured any."""
    if found.modelled or not any(not row.one_measurement for row in found.rows):
        return ""
    if not found.drift:
        return "no machine code was measured on both sides: part of a difference may be the machine"
    mean = statistics.geometric_mean(found.drift)
    return (
        f"programs with the same machine code: {len(found.drift)} measured on both sides take {mean:.3f}x; that is the machine "
        "or the day, no schedule"
    )


def reasons_of(found: Comparison) -> list[tuple[str, int, str, str]]:
    """What could not be compared, by side and reason, the most frequent first: the side, how many problems, why, and one of
    them.
    """
    counts = Counter((side, why) for side, _, why in found.unpaired)
    examples = {(side, why): one for side, one, why in reversed(found.unpaired)}
    return [(side, n, why, label_of(examples[side, why], found)) for (side, why), n in counts.most_common()]
