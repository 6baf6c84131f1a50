"""The report's answer in sentences. The figures are those of the functions that the charts are drawn from."""

from __future__ import annotations

import os
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tiledsched.core.labels import format_problem
from tiledsched.core.problem import unit_of
from tiledsched.core.registry import SHIPPED, kernel_named
from tiledsched.core.schedule import HINT_KNOBS
from tiledsched.core.text import code, figure, joined, longer, percent, plural, short, tile_text
from tiledsched.report.analysis import named_tile
from tiledsched.report.axes import show
from tiledsched.report.effects import joined_effects
from tiledsched.report.records import AS_GOOD, MEASURED, KnobVerdict, ProblemReport, Report, Timed
from tiledsched.report.views import explored

MOST_NAMED = 6
"""Knobs that are named in a sentence, at most; those whose values cost most are taken."""
MATTERS = 0.05
"""A kernel whose worst tile costs less than this is not sensitive to its tile."""
MODEL_ERROR = 0.034
"""Mean error of the model's times on a GB10 at lengths from 2048, under the conditions of each publication
(docs/results/blackwell.md). Estimates that lie closer together than this say little about which is faster."""


def answer(report: Report) -> tuple[str, ...]:
    """What the report found, in sentences. The first says what was measured on which GPU and when, or that nothing was
    measured and every figure is the model's estimate.
    """
    section = report.measured if report.measured.problems else report.modelled
    problems = explored(section.problems)
    lines = [
        _source(report, problems),
        *(
            f"The clock of {device.device.name} was held down {device.held_down}. Times at a low clock decide little."
            for device in report.conditions
            if device.held_down
        ),
    ]
    if not problems:
        return (*lines, *_of_winners(section.problems))
    found = [
        *_served(report, problems),
        _tiles(report, problems),
        _default(problems),
        _untuned(problems),
        *_knobs(report, problems),
        _highest_rate(problems),
    ]
    return tuple(filter(None, [*lines, *found]))


def next_step(report: Report) -> str:
    """What to run first where nothing is known, or which of the modelled problems to measure first; else empty."""
    if not report.measured.problems and not report.modelled.problems:
        return (
            f"Run {command_of(report, 'tune')}: where a GPU of {report.arch} is present it measures, elsewhere a performance "
            "model ranks the schedules."
        )
    return least_sure(report)


def least_sure(report: Report) -> str:
    """Which modelled problems to measure first, and with which command: those whose two best tiles have estimates that lie
    closer together than the model's mean error. Empty where there is no such problem, or nothing is modelled.
    """
    close = [
        (sum(tile.relative - 1 < MODEL_ERROR for tile in one.tiles), one)
        for one in report.modelled.problems
        if len(one.tiles) > 1 and one.tiles[1].relative - 1 < MODEL_ERROR
    ]
    if not close:
        return ""
    most, first = min(close, key=lambda each: (-each[0], each[1].best.us, len(format_problem(each[1].problem))))
    tiles = " and ".join(tile_text(tile.tile) for tile in first.tiles[:2])
    return (
        f"For {len(close)} of {len(report.modelled.problems)} modelled problems the estimates of the two best tiles are within "
        f"{MODEL_ERROR * 100:.1f}% of each other, which is the model's mean error where others measured, so measure these first. "
        f"The least sure is {first.problem}, with {most} tiles that close, the best of them {tiles}: run "
        f"{command_of(report, 'tune', first)} on a machine with this GPU."
    )


def _source(report: Report, problems: Sequence[ProblemReport]) -> str:
    """The first sentence. `problems` are those on which the answer rests."""
    measured, modelled, kernel = report.measured.problems, report.modelled.problems, report.kernel
    if not measured:
        device = f" ({report.device_name})" if report.device_name else ""
        regime = f" in the {report.regime} regime" if report.elsewhere else ""
        nothing = f"was measured on {report.arch}{device}{regime}"
        if not modelled:
            return f"Nothing of {kernel} {nothing}, and nothing was modelled."
        return (
            f"Nothing {nothing}: every figure is the performance model's estimate, for {_cases(modelled)} of {kernel}."
        )
    months = sorted(f"{date:%Y-%m}" for device in report.conditions for date in (device.first, device.last))
    when = ", " + " to ".join(dict.fromkeys((months[0], months[-1]))) if months else ""
    cap = ", at its power cap" if report.regime == "sustained" else ""
    said = f"Measured on {joined(_devices(measured))} ({report.arch}{when}){cap}: "
    if problems:
        said += f"{sum(one.programs for one in problems):,} programs of {kernel} for {_cases(problems)}"
        if rest := len(measured) - len(problems):
            said += f"; of {plural(rest, 'other problem')} little but the winner of a search is known"
    else:
        said += f"the best {'schedule' if len(measured) == 1 else 'schedules'} of {_cases(measured)} of {kernel}"
    if modelled:
        said += f"; {plural(len(modelled), 'other problem')} {'is' if len(modelled) == 1 else 'are'} only modelled"
    return f"{said}."


def _of_winners(problems: Sequence[ProblemReport]) -> list[str]:
    """What can be said where little but the best schedules has a time."""
    if not problems:
        return []
    second = [one.runner_up_drop for one in problems if one.runner_up_drop is not None]
    lines = ["What other schedules cost is not known."]
    if second:
        whose = "race" if problems[0].provenance == MEASURED else "model"
        known = f"{longer(statistics.median(second))} ({_median(second)})"
        lines = [f"Of other schedules only the {whose}'s runner-up is known: it takes {known}."]
    return lines + ([_sentence(_best_of(problems[0]))] if len(problems) == 1 else [])


def _tile_knobs(report: Report) -> tuple[str, ...]:
    """The knobs that make a tile; none where a map is drawn over compiler hints for want of a tile."""
    found = report.tile_knobs or ()
    return () if {*found} & {*HINT_KNOBS} else found


def _unit(report: Report) -> tuple[str, str]:
    """What the two knobs of a tile map are called, and one of their values: a tile, or by their names."""
    knobs = _tile_knobs(report)
    if named_tile(knobs) or all(any(word in knob.lower() for word in ("tile", "block")) for knob in knobs):
        return "its tile", "tile"
    return " and ".join(map(code, knobs)), "pair of values"


def tile_unit(report: Report) -> str:
    """What a tile of the report's map is called; empty where the kernel has no tile."""
    return _unit(report)[1] if _tile_knobs(report) else ""


def _served(report: Report, problems: Sequence[ProblemReport]) -> list[str]:
    """What `explain` serves for the problems, and how that compares with the fastest that was timed."""
    tile, said = _tile_knobs(report), list[str]()
    of_tile = [each.schedule for one in problems if (each := one.explained) and tile and {*tile} <= {*each.schedule}]
    counts = Counter(tile_text((each.number(tile[0]), each.number(tile[1]))) for each in of_tile).most_common()
    if len(problems) > 1 and counts:
        named = joined(f"{each} for {number}" for each, number in counts)
        said.append(f"Of {len(problems)} problems, {named} are served with this {_unit(report)[1]}.")
    measured = problems[0].provenance == MEASURED
    apart = [one for one in problems if one.serves is None]
    faster = [one for one in problems if one.faster]
    first = [one for one in problems if one.serves and one.serves.us <= one.best.us]
    ties = len(problems) - len(apart) - len(faster) - len(first)
    among = "the fastest that was timed" if measured else "the one with the shortest estimate"
    parts = [f"is {among} for {len(first)}" if first else ""]
    parts.append((f"ties with it for {ties}" if measured else f"has a longer estimate for {ties}") if ties else "")
    parts.append(f"is surely slower than another for {len(faster)}" if faster else "")
    unknown = "was not timed beside the others" if measured else "has no estimate"
    parts.append(f"{unknown} for {len(apart)}" if apart else "")
    said.append(
        f"The schedule that `explain` serves {joined(filter(None, parts))} of {plural(len(problems), 'problem')}."
    )
    if faster:
        most = min(faster, key=lambda one: 1 / one.serves.relative if one.serves else 1.0)
        said.append(_sentence(faster_text(most)))
    return said


def faster_text(one: ProblemReport) -> str:
    """That another schedule is surely faster than the one served, with both times and their days; empty where none is."""
    if one.faster is None or one.serves is None:
        return ""
    times = [
        f"{figure(each.us)} µs{f' on {each.taken:%Y-%m-%d}' if each.taken else ''}" for each in (one.faster, one.serves)
    ]
    return (
        f"for {one.problem}, {short(one.faster.schedule)} took {times[0]}, and what is served, {short(one.serves.schedule)}, "
        f"{times[1]}: {longer(1 / one.serves.relative - 1)}, but the two were not raced against each other"
    )


def _tiles(report: Report, problems: Sequence[ProblemReport]) -> str:
    """How sensitive the kernel is to its tile."""
    if not _tile_knobs(report):
        return ""
    what, unit = _unit(report)
    second = [one.tile_drop for one in problems if one.tile_drop is not None]
    worst = [one.worst_tile.relative - 1 for one in problems if one.worst_tile]
    if not second:
        return (
            f"How much {report.kernel} depends on {what} is not known: too few programs of any other {unit} were timed."
        )
    measured = problems[0].provenance == MEASURED
    where = f"On {joined(_devices(problems))}" if measured else "By the estimate"
    drop, most = statistics.median(second), statistics.median(worst) if worst else 0.0
    ties = sum(one.second_tile.ties for one in problems if one.second_tile)
    said = f"{longer(drop)} ({_median(second)})"
    if ties == len(second):
        said, takes = f"({_median(second)})", "ties with the best"
    else:
        takes, said = "takes", f"{said}; it ties with the best for {ties} of them" if ties else said
    if most > drop:
        said += f", and the worst {'takes ' * (takes != 'takes')}{longer(most)}"
        said += "" if len(worst) == len(second) else f" ({_median(worst)})"
    if drop > (AS_GOOD if measured else MODEL_ERROR):
        return f"{where}, {report.kernel} is sensitive to {what}: the second best {unit} {takes} {said}."
    verdict = f"has more than one good {unit}" if most > MATTERS else f"is not sensitive to {what}"
    error = "" if measured else f" Differences below {MODEL_ERROR * 100:.1f}% are within the model's error."
    return f"{where}, {report.kernel} {verdict}: the second best {takes} {said}.{error}"


def _default(problems: Sequence[ProblemReport]) -> str:
    """What the compiler defaults cost."""
    drops = [one.default_drop for one in problems if one.default_drop is not None]
    if not drops:
        return "The compiler defaults were not timed." if problems[0].provenance == MEASURED else ""
    rest = len(problems) - len(drops)
    return f"The compiler defaults take {_cost(drops)}{f'; for {rest} they have no time' if rest else ''}."


def _untuned(problems: Sequence[ProblemReport]) -> str:
    """What is lost where a problem was never tuned, as far as it was timed, and what such choices lost elsewhere."""
    choices = [one.untuned for one in problems if one.untuned]
    drops = [each.relative - 1 for each in choices if each.relative is not None]
    unknown = [each for each in choices if each.relative is None]
    if not choices:
        return ""
    said = f"takes {_cost(drops)}" if drops else "has no time for any of these problems"
    if drops and unknown:
        said += f"; for the other {len(unknown)} that schedule was not timed"
    expected = {each.expected for each in unknown if each.expected}
    if expected:
        means = sorted(each.mean for each in expected)
        mean = " to ".join(dict.fromkeys((percent(means[0]), percent(means[-1]))))
        archs = joined(sorted({each.arch for each in expected}))
        said += (
            f". On problems of {archs} that were hidden from it, such choices lost {mean} on average, and at worst "
            f"{percent(max(each.worst for each in expected))}"
        )
    return f"What is served without tuning {said}."


def _cost(drops: Sequence[float]) -> str:
    """Losses over the best time in words: their median and the largest."""
    drop = statistics.median(drops)
    most = f", at most {longer(max(drops))}" if len(drops) > 1 and max(drops) > drop + 0.0005 else ""
    return f"{longer(drop, 'the best schedule')} ({_median(drops)}{most})"


def verdicts(report: Report, problems: Sequence[ProblemReport]) -> list[KnobVerdict]:
    """What to do about each knob but those of the tile."""
    return [each for each in joined_effects(problems) if each.knob not in _tile_knobs(report)]


def _knobs(report: Report, problems: Sequence[ProblemReport]) -> list[str]:
    """What to do about the other knobs."""
    of: dict[str, list[KnobVerdict]] = defaultdict(list)
    for each in verdicts(report, problems):
        unseen = problems[0].provenance != MEASURED and _without_effect(each)
        of["unseen" if unseen else each.advice].append(each)
    chosen = [f"{code(each.knob)} ({_preferred(each, len(problems))})" for each in of["choose"]]
    left = [f"{code(each.knob)} at {show(each.value)}" for each in of["leave"]]
    what, too = "problem" if len(problems) > 1 else "program", ", too" if chosen else ""
    sentences = {
        "choose": f"Tune {_list(chosen)} for each problem.",
        "leave": f"Leave {_list(left)}: no other value tried is more than 1% faster.",
        "unseen": f"The model sees no difference between values of {_names(of['unseen'])}.",
        "unclear": f"Tune {_names(of['unclear'])}{too}: no value is known to be good for every {what}.",
        "untried": f"Too few programs that differ in one knob alone were timed to judge {_names(of['untried'])}.",
    }
    return [sentence for advice, sentence in sentences.items() if of[advice]]


def _without_effect(verdict: KnobVerdict) -> bool:
    """Whether no value compared makes any difference: a model may know nothing of a knob."""
    ratios = [each.ratio for each in verdict.effects if each.ratio is not None]
    return bool(ratios) and all(abs(ratio - 1) < 1e-6 for ratio in ratios)


def _preferred(verdict: KnobVerdict, problems: int) -> str:
    """Which values problems prefer: `1 is faster for 11 problems, 2 for 3`."""
    (first, number), *others = verdict.preferred
    words = [
        f"{show(first)} is faster for {plural(number, 'problem')}",
        *(f"{show(value)} for {n}" for value, n in others),
    ]
    rest = problems - sum(times for _, times in verdict.preferred)
    return ", ".join([*words, *([f"none surely for {rest}"] if rest else [])])


def _highest_rate(problems: Sequence[ProblemReport]) -> str:
    """Where the rate is highest, of several problems."""
    units = Counter(unit_of(one.problem) for one in problems)
    unit = max(units, key=lambda each: units[each])
    top = max((one for one in problems if unit_of(one.problem) == unit), key=lambda one: one.best.rate)
    if len(problems) == 1 or not top.best.rate:
        return _sentence(_best_of(top)) if len(problems) == 1 else ""
    best = f"{short(top.leader.schedule)}, {best_time(top, top.leader)}"
    return f"Among these problems, the highest rate is that of {top.problem}: {best}."


def _best_of(one: ProblemReport) -> str:
    return f"the best schedule is {short(one.leader.schedule)}: {best_time(one, one.leader)}"


def best_time(one: ProblemReport, timed: Timed) -> str:
    """A time of a problem and its rate."""
    rate = f" ({figure(timed.rate)} {unit_of(one.problem)})" if timed.rate else ""
    return f"{figure(timed.us)} µs{rate}"


def _median(values: Sequence[float]) -> str:
    return f"median of {len(values)} problems" if len(values) > 1 else "1 problem"


def _cases(problems: Sequence[ProblemReport]) -> str:
    return plural(len(problems), "problem") + (", counted on each GPU" if len(_devices(problems)) > 1 else "")


def _devices(problems: Sequence[ProblemReport]) -> list[str]:
    return [*dict.fromkeys(one.device_name for one in problems)]


def command_of(report: Report, name: str, one: ProblemReport | None = None, *more: str) -> str:
    """A command about the kernel and the arch of a report, as code; with a problem, about that."""
    return code(shlex.join(["tiledsched", *name.split(), *target_of(report, one), *more]))


def target_of(report: Report, one: ProblemReport | None = None) -> list[str]:
    """The words of a command that name the kernel and the arch of a report; with a problem, that too. A kernel of one's own is
    named by its file.
    """
    kernel = report.kernel if report.kernel in SHIPPED else kernel_named(report.kernel).locator()
    problem = ["-p", format_problem(one.problem)] if one else []
    return [os.path.relpath(kernel) if os.path.isabs(kernel) else kernel, "--arch", report.arch, *problem]


def _names(verdicts: Iterable[KnobVerdict]) -> str:
    return _list([code(each.knob) for each in verdicts])


def _list(words: Sequence[str]) -> str:
    more = len(words) - MOST_NAMED
    return joined([*words[:MOST_NAMED], f"{more} more"] if more > 1 else words)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
