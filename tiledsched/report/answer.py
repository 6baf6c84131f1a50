"""The report's answer in sentences. The figures are those of the functions that the charts are drawn from."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tiledsched.core.problem import unit_of, unit_text
from tiledsched.core.registry import command_word, kernel_named
from tiledsched.core.schedule import named_tile
from tiledsched.core.text import code, figure, format_problem, joined, longer, percent, plural, short, show, tile_text
from tiledsched.measure.runner import HOW
from tiledsched.report.effects import FEWEST_PROBLEMS, MOST_OTHERS, joined_effects
from tiledsched.report.records import AS_GOOD, MEASURED, KnobVerdict, ProblemReport, Report, Timed
from tiledsched.report.rules import Rule, rules_of
from tiledsched.report.views import explored
from tiledsched.store.records import MeasurementSummary

MOST_NAMED = 6
"""Knobs that are named in a sentence, at most; those whose values cost most are taken."""
MOST_RULES = 5
"""Rules in the answer, at most; the table of rules has all of them."""
MATTERS = 0.05
"""A kernel whose worst tile costs less than this is not sensitive to its tile."""


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
        return (*lines, *_tiles_served(report, section.problems), *_of_winners(section.problems))
    rules = rules_of(section.problems, report.tile)
    found = [
        _error(report, problems),
        *_tiles_served(report, problems),
        *(_served(problems) if len(problems) > 1 else _served_alone(problems[0])),
        _tiles(report, problems),
        _default(problems),
        _untuned(problems),
        *_rule_sentences(rules),
        *_knobs(report, problems, rules),
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
    closer together than the model's error. Empty where there is no such problem, or the error is not known.
    """
    close = [
        (sum(tile.relative - 1 <= one.tolerance for tile in one.tiles), one)
        for one in report.modelled.problems
        if one.error and len(one.tiles) > 1 and one.tiles[1].relative - 1 <= one.tolerance
    ]
    if not close:
        return ""
    most, first = min(close, key=lambda each: (-each[0], each[1].best.us, len(format_problem(each[1].problem))))
    tiles = " and ".join(tile_text(tile.tile) for tile in first.tiles[:2])
    return (
        f"For {len(close)} of {len(report.modelled.problems)} modelled problems the estimates of the two best tiles differ by "
        "less than the model's error, so measure these first. "
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
    cap = f", {HOW[report.regime]}" if report.regime in HOW else ""
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


def _error(report: Report, problems: Sequence[ProblemReport]) -> str:
    """How far the model is off on problems like these; empty where they were measured."""
    if problems[0].provenance == MEASURED:
        return ""
    known = [one.error for one in problems if one.error]
    unknown = f"never compared with measurements of {report.kernel} on {report.arch} that the model was not fitted to"
    if not known:
        return f"Estimates like these were {unknown}: they do not tell which schedule is faster."
    least, most = (percent(end(error.mean for error in known)) for end in (min, max))
    off = f"{least} to {most} off on average, depending on size and tile" if least != most else f"{most} off on average"
    said = f"Estimates like these were {off} ({joined(dict.fromkeys(error.source for error in known))})."
    rest = len(problems) - len(known)
    return said + (f" For {rest} of {plural(len(problems), 'problem')} they were {unknown}." if rest else "")


def _rule_sentences(rules: Sequence[Rule]) -> list[str]:
    """For which problems each value of a knob is good, as far as rules were found."""
    sentences = [f"{rule.text} ({rule.score})" for rule in rules[:MOST_RULES]]
    return [f"Which value is good depends on the problem. {'. '.join(sentences)}."] if sentences else []


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


def _unit(report: Report) -> tuple[str, str]:
    """What the two knobs of a tile map are called, and one of their values: a tile, or by their names."""
    knobs = report.tile
    if named_tile(knobs) or all(any(word in knob.lower() for word in ("tile", "block")) for knob in knobs):
        return "its tile", "tile"
    return " and ".join(map(code, knobs)), "pair of values"


def tile_unit(report: Report) -> str:
    """What a tile of the report's map is called; empty where the kernel has no tile."""
    return _unit(report)[1] if report.tile else ""


def _tiles_served(report: Report, problems: Sequence[ProblemReport]) -> list[str]:
    """For how many of several problems each tile is served."""
    found = [each.schedule for one in problems if (each := one.explained) and {*report.tile} <= {*each.schedule}]
    if len(problems) < 2 or not found or not report.tile:
        return []
    counts = Counter(tile_text((each.number(report.tile[0]), each.number(report.tile[1]))) for each in found)
    (first, number), *others = counts.most_common()
    most = _sentence(f"{_unit(report)[1]} {first} is served for {number} of {len(problems)} problems")[:-1]
    return [f"{joined([most, *(f'{each} for {times}' for each, times in others)])}."]


def _served(problems: Sequence[ProblemReport]) -> list[str]:
    """How what `explain` serves compares with the fastest that was timed."""
    measured, said = problems[0].provenance == MEASURED, list[str]()
    apart = [one for one in problems if one.serves is None]
    faster = [one for one in problems if one.faster]
    longest = [one for one in problems if one.serves and one.leader is not one.serves and not one.faster]
    first_of = [one for one in problems if one.serves and one.serves.us <= one.best.us]
    ties = len(problems) - len(apart) - len(faster) - len(longest) - len(first_of)
    among = "the fastest that was timed" if measured else "the one with the shortest estimate"
    tied = "ties with it" if measured else "differs from that one by no more than the model's error"
    parts = [
        f"is {among} for {len(first_of)}" if first_of else "",
        f"{tied} for {ties}" if ties else "",
        f"is surely slower than another for {len(faster)}" if faster else "",
        f"has a longer estimate than another for {len(longest)}" if longest else "",
        f"{'was not timed beside the others' if measured else 'has no estimate'} for {len(apart)}" if apart else "",
    ]
    said.append(f"Of {len(problems)} problems, the schedule that `explain` serves {joined(filter(None, parts))}.")
    if faster:
        worst = max(faster, key=lambda one: one.serves.relative if one.serves else 1.0)
        said.append(f"For {worst.problem}, {short(worst.leader.schedule)} is the faster: {_apart(worst)}.")
    return said


def _apart(one: ProblemReport) -> str:
    """By how much another schedule is surely faster than the one served, with both times and their days."""
    assert one.serves
    times = [
        f"{figure(each.us)} µs{f' on {each.taken:%Y-%m-%d}' if each.taken else ''}" for each in (one.best, one.serves)
    ]
    return (
        f"it took {times[0]}, and {short(one.serves.schedule)}, which is served, {times[1]}. That is "
        f"{longer(1 / one.serves.relative - 1)}, but the two were not raced against each other"
    )


def _served_alone(one: ProblemReport) -> list[str]:
    """What is served for the only problem of a report, with its time where it has one."""
    if one.explained is None:
        return [_sentence(_best_of(one))]
    served, measured = short(one.explained.schedule), one.provenance == MEASURED
    best = f"{short(one.best.schedule)}, {best_time(one, one.best)}"
    if one.serves is None:
        known = "was not timed beside the others" if measured else "has no estimate"
        if one.other_run:
            known = f"took {run_text(one.other_run)}, in another run, and {known}"
        return [
            f"`explain` serves {served}, which {known}. The {'fastest of these' if measured else 'shortest'} is {best}."
        ]
    said = [f"`explain` serves {served}: {best_time(one, one.serves)}."]
    if one.faster:
        said.append(f"Another is surely faster, {short(one.best.schedule)}: {_apart(one)}.")
    elif one.serves.us > one.best.us:
        known = "no more than the model's error away" if one.error else "how far such estimates are off is not known"
        which = "fastest" if measured else "shortest estimate"
        said.append(f"The {which} is {best}; {'that is a tie' if measured else known}.")
    return said


def _tiles(report: Report, problems: Sequence[ProblemReport]) -> str:
    """How sensitive the kernel is to its tile."""
    if not report.tile:
        return ""
    what, unit = _unit(report)
    second = [one.tile_drop for one in problems if one.tile_drop is not None]
    worst = [one.worst_tile.relative - 1 for one in problems if one.worst_tile]
    if not second:
        return (
            f"How much {report.kernel} depends on {what} is not known: too few programs of any other {unit} were timed."
        )
    where = f"On {joined(_devices(problems))}"
    most = statistics.median(worst) if worst else 0.0
    if problems[0].provenance != MEASURED:
        two = [sorted(tile.us for tile in one.tiles)[:2] for one in problems if one.tile_drop is not None]
        apart = sum(not one.second_tile.ties for one in problems if one.second_tile and one.error)
        error = (
            f", for {apart} of them by more than the model's error" if apart else ", by no more than the model's error"
        )
        error = error if any(one.error for one in problems) else ""
        near = f"{percent(statistics.median(slower / faster - 1 for faster, slower in two))} ({_median(second)})"
        return f"By the estimate, the two best {unit}s differ by {near}{error}; the worst takes {longer(most)}."
    drop = statistics.median(second)
    ties = sum(one.second_tile.ties for one in problems if one.second_tile)
    said = f"{longer(drop)} ({_median(second)})"
    if ties == len(second):
        said, takes = f"({_median(second)})", "ties with the best"
    else:
        takes, said = "takes", f"{said}; it ties with the best for {ties} of them" if ties else said
    if most > drop:
        said += f", and the worst {'takes ' * (takes != 'takes')}{longer(most)}"
        said += "" if len(worst) == len(second) else f" ({_median(worst)})"
    if len(second) < FEWEST_PROBLEMS:
        return f"{where}, the second best {unit} {takes} {said}."
    if drop > AS_GOOD:
        return f"{where}, {report.kernel} is sensitive to {what}: the second best {unit} {takes} {said}."
    verdict = f"has more than one good {unit}" if most > MATTERS else f"is not sensitive to {what}"
    return f"{where}, {report.kernel} {verdict}: the second best {takes} {said}."


def _default(problems: Sequence[ProblemReport]) -> str:
    """What the compiler defaults cost."""
    drops = [one.default_drop for one in problems if one.default_drop is not None]
    if not drops:
        of_space = problems[0].provenance == MEASURED and not problems[0].problem.declaration.is_called
        return "The compiler defaults were not timed." if of_space else ""
    rest = len(problems) - len(drops)
    return f"The compiler defaults take {_cost(drops)}{f'; for {rest} they have no time' if rest else ''}."


def _untuned(problems: Sequence[ProblemReport]) -> str:
    """What is lost where a problem was never tuned, as far as it was timed, and what such choices lost elsewhere."""
    choices = [one.untuned for one in problems if one.untuned]
    drops = [each.relative - 1 for each in choices if each.relative is not None]
    unknown = [each for each in choices if each.relative is None]
    if {each.provenance for each in choices} <= {"default"}:
        return "Without tuning, the compiler defaults are served." if choices else ""
    no_time = "was not timed" if problems[0].provenance == MEASURED else "has no estimate"
    said = f"takes {_cost(drops)}" if drops else f"{no_time} here"
    if drops and unknown:
        said += f"; for the other {len(unknown)} that schedule {no_time}"
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
    return [each for each in joined_effects(problems) if each.knob not in report.tile]


def _knobs(report: Report, problems: Sequence[ProblemReport], rules: Sequence[Rule]) -> list[str]:
    """What to do about the other knobs."""
    of: dict[str, list[KnobVerdict]] = defaultdict(list)
    measured = problems[0].provenance == MEASURED
    ruled = {rule.knob for rule in rules}
    for each in verdicts(report, problems):
        advice = "won" if each.advice == "unclear" and _agreed(each) else each.advice
        of["rule" if (each.knob,) in ruled else advice].append(each)
    of["told"] = [*of["choose"], *of["leave"]]
    too = ", too" if of["choose"] else ""
    sentences = {
        "leave": f"Leave {_with_evidence(of['leave'])}: no other value compared is more than 1% faster.",
        "same": f"Differences below 1% are all that is known between values of {_names(of['same'])}.",
        "few": f"Too few problems to advise: no other value compared is more than 1% faster than {_with_evidence(of['few'])}.",
        "choose": f"Tune {_preferred(of['choose'], len(problems))} for each problem.",
        "unclear": f"Tune {_won(of['unclear'])}{too}: no value is known to be good for every problem.",
        "won": f"Pairs of programs settle nothing about {_won(of['won'])}, of which nearly all winners have one value.",
        "untried": f"Too few programs that differ in one knob alone were timed to judge {_names(of['untried'])}.",
    }
    if not measured:
        sentences = {
            "told": f"By more than the model's error differ the values of {_preferred(of['told'], len(problems))}.",
            "unclear": f"The model cannot tell the values of {_names(of['unclear'])} apart: it is further off than they differ.",
        }
    return [sentence for advice, sentence in sentences.items() if of[advice]]


def _agreed(verdict: KnobVerdict) -> bool:
    """Whether nearly all winners of searches have one value."""
    total = sum(number for _, number in verdict.winners)
    return total >= FEWEST_PROBLEMS and verdict.winners[0][1] >= (1 - MOST_OTHERS) * total


def _with_evidence(verdicts: Sequence[KnobVerdict]) -> str:
    """Knobs at a value, with the evidence: `x` at 1 (over 14 problems; 2 of 489 winners of searches have another value)."""
    words = []
    for place, each in enumerate(verdicts):
        total = sum(number for _, number in each.winners)
        rest = total - dict(each.winners).get(each.value, 0)
        have = f" of searches {'has' if rest == 1 else 'have'} another value" if place == 0 else ""
        others = f"; {rest} of {plural(total, 'winner')}{have}" if total else ""
        where = f"{'over ' if place == 0 else ''}{plural(each.problems, 'problem')}{others}"
        words.append(f"{code(each.knob)} at {show(each.value)} ({where})")
    return _list(words)


def _won(verdicts: Sequence[KnobVerdict]) -> str:
    """Knobs with the values that winners of searches have most often: `x` (winners of searches: 2 for 237, 1 for 187)."""
    words = list[str]()
    for each in verdicts:
        first = "" if words else "winners of searches: "
        values = ", ".join(f"{show(value)} for {number}" for value, number in each.winners[:3])
        words.append(code(each.knob) + (f" ({first}{values})" if values else ""))
    return _list(words)


def _preferred(verdicts: Sequence[KnobVerdict], problems: int) -> str:
    """Knobs with the values that problems prefer: `x` (1 is faster for 11 problems, 2 for 3)."""
    words = list[str]()
    for each in verdicts:
        (first, number), *others = each.preferred
        rest = problems - sum(times for _, times in each.preferred)
        none = "the model cannot tell for" if any(effect.estimated for effect in each.effects) else "none surely for"
        values = [
            f"{show(first)} is faster for {plural(number, 'problem')}",
            *(f"{show(value)} for {n}" for value, n in others),
            *([f"{none} {rest}"] if rest else []),
        ]
        words.append(f"{code(each.knob)} ({', '.join(values)})")
    return _list(words)


def _highest_rate(problems: Sequence[ProblemReport]) -> str:
    """Where the rate is highest, of several problems."""
    units = Counter(unit_of(one.problem) for one in problems)
    unit = max(units, key=lambda each: units[each])
    top = max((one for one in problems if unit_of(one.problem) == unit), key=lambda one: one.leader.rate)
    if len(problems) == 1 or not top.leader.rate:
        return ""
    best = f"{short(top.leader.schedule)}, {best_time(top, top.leader)}"
    return f"Among these problems, the highest rate is that of {top.problem}: {best}."


def _best_of(one: ProblemReport) -> str:
    return f"the best schedule is {short(one.leader.schedule)}: {best_time(one, one.leader)}"


def run_text(taken: MeasurementSummary) -> str:
    """A measured time and its day."""
    return f"{figure(taken.median_us)} µs on {taken.created_at:%Y-%m-%d}"


def best_time(one: ProblemReport, timed: Timed) -> str:
    """A time of a problem and its rate."""
    rate = f" ({figure(timed.rate)} {unit_text(one.problem)})" if timed.rate else ""
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
    """The words of a command that name the kernel and the arch of a report; with a problem, that too."""
    problem = ["-p", format_problem(one.problem)] if one else []
    return [command_word(kernel_named(report.kernel)), "--arch", report.arch, *problem]


def _names(verdicts: Iterable[KnobVerdict]) -> str:
    return _list([code(each.knob) for each in verdicts])


def _list(found: Iterable[str]) -> str:
    words = [*found]
    more = len(words) - MOST_NAMED
    return joined([*words[:MOST_NAMED], f"{more} more"] if more > 1 else words)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
