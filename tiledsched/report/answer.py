"""The report's answer in sentences. The figures are those of the functions that the charts are drawn from."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tiledsched.core.labels import format_problem
from tiledsched.core.problem import unit_of
from tiledsched.core.schedule import named_tile
from tiledsched.core.text import code, figure, joined, longer, percent, plural, short, tile_text
from tiledsched.report.axes import show
from tiledsched.report.effects import joined_effects
from tiledsched.report.records import AS_GOOD, MEASURED, KnobVerdict, ProblemReport, Report
from tiledsched.report.rules import rules_of
from tiledsched.report.views import explored

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
        return (*lines, *_of_winners(section.problems))
    found = [
        _error(report, problems),
        _tiles(report, problems),
        _default(problems),
        *rule_sentences(report),
        *_knobs(report, problems),
        _best(report, problems),
    ]
    return tuple(filter(None, [*lines, *found]))


def problem_answer(one: ProblemReport, report: Report) -> str:
    """What is known of one problem, in sentences."""
    measured = one.provenance == MEASURED
    where = f"On {one.device_name}" if measured else f"By the model's estimate for {report.arch}"
    lines = [f"{where} {_best_of(one)}{', measured' if measured else ''}."]
    others = []
    if _tile_knobs(report) and one.second_tile:
        others.append(
            f"the second best {_unit(report)[1]}, {tile_text(one.second_tile.tile)}, takes "
            f"{longer(one.second_tile.relative - 1)}"
        )
    elif _tile_knobs(report) and len(one.tiles) > 1:
        tried = f"{tile_text(one.tiles[1].tile)}: {plural(one.tiles[1].programs, 'program')}"
        lines.append(f"Too little was tried of any other {_unit(report)[1]} to say what it costs ({tried}).")
    if one.default and one.default.relative > 1:
        others.append(f"the untuned default takes {longer(one.default.relative - 1)}")
    elif one.default or measured:
        lines.append(f"The untuned default {'is the best' if one.default else 'was not timed'}.")
    lines += [_sentence(joined(others))] if others else []
    if one.programs > 1:
        programs = [timed.relative for timed in one.timed if timed.same_program_as is None]
        near, wider = (sum(relative <= 1 + limit for relative in programs) for limit in (0.01, 0.05))
        lines.append(
            f"Of {plural(one.programs, 'program')}, the best included, {near} {'is' if near == 1 else 'are'} within 1% of the "
            f"best time and {wider} within 5%."
        )
    else:
        lines.append(f"No other schedule {'was timed' if measured else 'has an estimate'}{_raced(one)}.")
    if one.races:
        first = one.races[0]
        day = f" ({first.taken:%Y-%m-%d})" if first.taken else ""
        times = joined(f"{race.name} took {figure(race.us)} µs against {figure(race.ours_us)} µs" for race in one.races)
        lines.append(f"Timed in turn with {short(first.schedule)}{day}, {times}.")
    return " ".join(lines)


def next_step(report: Report) -> str:
    """What to run to know more, with its command; empty where nothing is left open."""
    measured, modelled = report.measured.problems, report.modelled.problems
    if not measured and not modelled:
        return (
            f"Run {_command(report, 'tune')}: where a GPU of {report.arch} is present it measures, elsewhere a performance "
            "model ranks the schedules."
        )
    if not measured and (first := least_sure(report)):
        return first
    if not measured:
        known = [one for one in modelled if one.default_drop or one.tile_drop]
        most = max(known, key=lambda one: one.default_drop or one.tile_drop or 0.0, default=None)
        why = ": for this problem the estimates differ most" if most else ""
        return f"To measure, run {_command(report, 'tune', most)} on a machine with a GPU of {report.arch}{why}."
    problems = explored(measured)
    if not problems:
        command = _command(report, "record", measured[0])
        return (
            f"To learn what other schedules cost, run {command} on the same GPU: it measures 300 programs of a problem."
        )
    if bare := [one for one in problems if _tile_knobs(report) and len(one.tiles) > 1 and one.second_tile is None]:
        command, over = _command(report, "record", bare[0]), plural(len(bare), "problem")
        unit = _unit(report)[1]
        return f"To learn what any other {unit} costs, run {command} on the same GPU: too few were timed for {over}."
    if unknown := [each for each in _verdicts(report, problems) if each.advice in ("unclear", "untried")]:
        command = _command(report, "tune", max(problems, key=lambda one: one.programs), "--neighbours")
        return (
            f"To learn more about {_names(unknown)}, run {command} on the same GPU, and likewise for other problems: it times "
            "schedules that differ from the best in one or two knobs."
        )
    return ""


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
        f"{_command(report, 'tune', first)} on a machine with this GPU."
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


def rule_sentences(report: Report) -> list[str]:
    """For which problems each value of a knob is good, as far as rules were found."""
    found = rules_of((report.measured if report.measured.problems else report.modelled).problems, report.tile)
    sentences = [f"{rule.text} ({rule.score})" for rule in found[:MOST_RULES]]
    return [f"Which value is good depends on the problem. {'. '.join(sentences)}."] if found else []


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


def _raced(one: ProblemReport) -> str:
    """What the entry says of the runner-up, whose own time is not known."""
    if one.runner_up is None or one.runner_up_drop is None:
        return ""
    return f", but the race's runner-up, {short(one.runner_up.schedule)}, took {longer(one.runner_up_drop)}"


def _tile_knobs(report: Report) -> tuple[str, ...]:
    """The knobs that make a tile; none where a map is drawn over compiler hints for want of a tile."""
    return report.tile


def _unit(report: Report) -> tuple[str, str]:
    """What the two knobs of a tile map are called, and one of their values: a tile, or by their names."""
    knobs = _tile_knobs(report)
    if named_tile(knobs) or all(any(word in knob.lower() for word in ("tile", "block")) for knob in knobs):
        return "its tile", "tile"
    return " and ".join(map(code, knobs)), "pair of values"


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
    said = f"{longer(drop)} ({_median(second)})"
    if most > drop:
        said += f", and the worst {longer(most)}" + ("" if len(worst) == len(second) else f" ({_median(worst)})")
    if not measured:
        apart = sum(one.tile_drop > one.tolerance for one in problems if one.tile_drop is not None)
        which = f"For {apart} of {len(second)} problems the" if apart else "The"
        more = "more" if apart else "no more"
        return f"{where}, the second best {unit} takes {said}. {which} two differ by {more} than the model's error."
    if drop > AS_GOOD:
        return f"{where}, {report.kernel} is sensitive to {what}: the second best {unit} takes {said}."
    verdict = f"has more than one good {unit}" if most > MATTERS else f"is not sensitive to {what}"
    return f"{where}, {report.kernel} {verdict}: the second best takes {said}."


def _default(problems: Sequence[ProblemReport]) -> str:
    drops = [one.default_drop for one in problems if one.default_drop is not None]
    if not drops:
        return "The untuned default was not timed." if problems[0].provenance == MEASURED else ""
    drop = statistics.median(drops)
    if drop <= AS_GOOD:
        return f"The untuned default is as good as the best schedule: it takes {longer(drop)} ({_median(drops)})."
    return f"The untuned default takes {longer(drop, 'the best schedule')} ({_median(drops)})."


def _verdicts(report: Report, problems: Sequence[ProblemReport]) -> list[KnobVerdict]:
    return [each for each in joined_effects(problems) if each.knob not in _tile_knobs(report)]


def _knobs(report: Report, problems: Sequence[ProblemReport]) -> list[str]:
    """What to do about the other knobs."""
    of: dict[str, list[KnobVerdict]] = defaultdict(list)
    measured = problems[0].provenance == MEASURED
    section = report.measured if measured else report.modelled
    ruled = {rule.knob for rule in rules_of(section.problems, report.tile)}
    for each in _verdicts(report, problems):
        of["rule" if (each.knob,) in ruled else each.advice].append(each)
    chosen = [f"{code(each.knob)} ({_preferred(each, len(problems))})" for each in of["choose"]]
    left = [f"{code(each.knob)} at {show(each.value)}" for each in of["leave"]]
    what, too = "problem" if len(problems) > 1 else "program", ", too" if chosen else ""
    sentences = {
        "choose": f"Tune {_list(chosen)} for each problem.",
        "leave": f"Leave {_list(left)}: no other value tried is more than 1% faster.",
        "unclear": f"Tune {_names(of['unclear'])}{too}: no value is known to be good for every {what}.",
        "untried": f"Too few programs that differ in one knob alone were timed to judge {_names(of['untried'])}.",
    }
    if not measured:
        told = [f"{code(each.knob)} ({_preferred(each, len(problems))})" for each in (*of["choose"], *of["leave"])]
        sentences = {
            "told": f"By more than the model's error differ the values of {_list(told)}.",
            "unclear": f"The model cannot tell the values of {_names(of['unclear'])} apart: it is further off than they differ.",
        }
        of["told"] = [*of["choose"], *of["leave"]]
    return [sentence for advice, sentence in sentences.items() if of[advice]]


def _preferred(verdict: KnobVerdict, problems: int) -> str:
    """Which values problems prefer: `1 is faster for 11 problems, 2 for 3`."""
    (first, number), *others = verdict.preferred
    words = [
        f"{show(first)} is faster for {plural(number, 'problem')}",
        *(f"{show(value)} for {n}" for value, n in others),
    ]
    rest = problems - sum(times for _, times in verdict.preferred)
    none = "the model cannot tell for" if any(each.estimated for each in verdict.effects) else "none surely for"
    return ", ".join([*words, *([f"{none} {rest}"] if rest else [])])


def _best(report: Report, problems: Sequence[ProblemReport]) -> str:
    """The best schedule of the only problem, or how often each tile is best and where the rate is highest."""
    if len(problems) == 1:
        return _sentence(_best_of(problems[0]))
    said, unit = "", _unit(report)[1]
    counts = Counter(one.tiles[0].tile for one in problems if one.tiles and _tile_knobs(report)).most_common()
    if counts:
        (first, number), *others = counts
        best, more = (
            f"{tile_text(first)} is the best {unit} for",
            [f"{tile_text(tile)} for {times}" for tile, times in others],
        )
        said = f"Of {len(problems)} problems, {joined([f'{best} {number}', *more])}. " if more else f"{best} all. "
    units = Counter(unit_of(one.problem) for one in problems)
    unit = max(units, key=lambda each: units[each])
    top = max((one for one in problems if unit_of(one.problem) == unit), key=lambda one: one.best.rate)
    return f"{said}Among these problems, the highest rate is that of {top.problem}: {short(top.best.schedule)}, {_time(top)}."


def _best_of(one: ProblemReport) -> str:
    return f"the best schedule is {short(one.best.schedule)}: {_time(one)}"


def _time(one: ProblemReport) -> str:
    """The best time of a problem and its rate."""
    rate = f" ({figure(one.best.rate)} {unit_of(one.problem)})" if one.best.rate else ""
    return f"{figure(one.best.us)} µs{rate}"


def _median(values: Sequence[float]) -> str:
    return f"median of {len(values)} problems" if len(values) > 1 else "1 problem"


def _cases(problems: Sequence[ProblemReport]) -> str:
    return plural(len(problems), "problem") + (", counted on each GPU" if len(_devices(problems)) > 1 else "")


def _devices(problems: Sequence[ProblemReport]) -> list[str]:
    return [*dict.fromkeys(one.device_name for one in problems)]


def _command(report: Report, name: str, one: ProblemReport | None = None, *more: str) -> str:
    problem = ["-p", format_problem(one.problem)] if one else []
    return code(shlex.join(["tiledsched", name, report.kernel, "--arch", report.arch, *problem, *more]))


def _names(verdicts: Iterable[KnobVerdict]) -> str:
    return _list([code(each.knob) for each in verdicts])


def _list(words: Sequence[str]) -> str:
    more = len(words) - MOST_NAMED
    return joined([*words[:MOST_NAMED], f"{more} more"] if more > 1 else words)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
