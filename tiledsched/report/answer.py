"""The report's answer in sentences. The figures are those of the functions that the charts are drawn from."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from tiledsched.core.labels import format_problem
from tiledsched.core.problem import unit_of
from tiledsched.report.axes import show
from tiledsched.report.effects import joined_effects
from tiledsched.report.records import AS_GOOD, MEASURED, KnobVerdict, ProblemReport, Report, Timed
from tiledsched.report.views import explored

MOST_NAMED = 6
"""Knobs that are named in a sentence, at most; those whose values cost most are taken."""
MATTERS = 0.05
"""A choice that costs less than this, at its worst, matters little."""


def answer(report: Report) -> tuple[str, ...]:
    """What the report found, in sentences. The first says what was measured on which GPU and when, or that nothing was
    measured and every figure is the model's estimate.
    """
    section = report.measured if report.measured.problems else report.modelled
    problems = explored(section.problems)
    lines = [_source(report, problems)]
    lines += [
        f"The clock of {device.device.name} was held down {device.held_down}. Times at a low clock decide little."
        for device in report.conditions
        if device.held_down
    ]
    if not problems:
        return (*lines, *_of_winners(section.problems))
    lines += [_tiles(report, problems), _default(problems), *_knobs(report, problems), _best(problems)]
    return tuple(filter(None, lines))


def problem_answer(one: ProblemReport, report: Report) -> str:
    """What is known of one problem, in sentences."""
    measured = one.provenance == MEASURED
    where = f"On {one.device_name}" if measured else f"By the model's estimate for {report.arch}"
    lines = [f"{where} {_best_of(one)}{', measured' if measured else ''}."]
    others = []
    if one.second_tile:
        others.append(
            f"the second best tile, {_tile(one.second_tile.tile)}, takes {longer(one.second_tile.relative - 1)}"
        )
    elif len(one.tiles) > 1:
        tried = f"{_tile(one.tiles[1].tile)}: {_count(one.tiles[1].programs, 'program')}"
        lines.append(f"Too little was tried of other tiles to say what they cost ({tried}).")
    if one.default and one.default.relative > 1:
        others.append(f"the untuned default takes {longer(one.default.relative - 1)}")
    elif one.default:
        lines.append("The untuned default is the best.")
    elif measured:
        lines.append("The untuned default was not timed.")
    lines += [_sentence(_and(others))] if others else []
    if one.programs > 1:
        near, near5 = (sum(timed.relative <= 1 + limit for timed in _programs(one)) for limit in (0.01, 0.05))
        lines.append(
            f"Of {_count(one.programs, 'program')}, the best included, {near} {'is' if near == 1 else 'are'} within 1% of the "
            f"best time and {near5} within 5%."
        )
    else:
        lines.append(f"No other schedule {'was timed' if measured else 'has an estimate'}{_raced(one)}.")
    if one.rivals:
        lines.append(
            f"Of other implementations, {_and(f'{name} takes {longer(ratio - 1)}' for name, ratio in one.rivals)}."
        )
    return " ".join(lines)


def _raced(one: ProblemReport) -> str:
    """What the entry of the race says of the runner-up, whose own time is not known."""
    if one.runner_up is None or one.runner_up_drop is None:
        return ""
    return f", but the race's runner-up, `{one.runner_up.schedule.short()}`, took {longer(one.runner_up_drop)}"


def _best_of(one: ProblemReport) -> str:
    return f"the best schedule is `{one.best.schedule.short()}`: {_time(one)}"


def next_step(report: Report) -> str:
    """What to run to know more, with its command; empty where everything asked for is known."""
    measured, modelled = report.measured.problems, report.modelled.problems
    if not measured and not modelled:
        return (
            f"Run {_command(report, 'tune')}: where a GPU of {report.arch} is present it measures, elsewhere a performance model "
            "ranks the schedules."
        )
    if not measured:
        known = [one for one in modelled if one.default_drop or one.tile_drop]
        first = max(known, key=lambda one: one.default_drop or one.tile_drop or 0.0, default=None)
        why = ": for this problem the estimates differ most" if first else ""
        return f"To measure, run {_command(report, 'tune', first)} on a machine with a GPU of {report.arch}{why}."
    problems = explored(measured)
    if not problems:
        return (
            f"To learn what other schedules cost, run {_command(report, 'record', measured[0])} on the same GPU: it measures "
            "300 programs of a problem."
        )
    least = [one for one in problems if len(one.tiles) > 1 and one.second_tile is None]
    if least:
        command, over = _command(report, "record", least[0]), _count(len(least), "problem")
        return f"To learn what other tiles cost, run {command} on the same GPU: too few programs of them were timed for {over}."
    tile = report.tile_knobs or ()
    unknown = [
        each for each in joined_effects(problems) if each.advice in ("unclear", "untried") and each.knob not in tile
    ]
    if unknown:
        command = _command(report, "tune", max(problems, key=lambda one: one.programs), "--neighbours")
        return (
            f"To learn more about {_names(each.knob for each in unknown)}, run {command} on the same GPU, and likewise for other "
            "problems: it times schedules that differ from the best in one or two knobs."
        )
    return ""


def _source(report: Report, problems: Sequence[ProblemReport]) -> str:
    measured, modelled = report.measured.problems, report.modelled.problems
    kernel = report.kernel
    if not measured and not modelled:
        return (
            f"Nothing was measured on {_where(report)}, and nothing was modelled: nothing is known of {kernel} there."
        )
    if not measured:
        return (
            f"Nothing was measured on {_where(report)}: every figure is the performance model's estimate, for "
            f"{_count(len(modelled), 'problem')} of {kernel}."
        )
    names = _and(dict.fromkeys(one.device_name for one in measured))
    months = [f"{date:%Y-%m}" for device in report.conditions for date in (device.first, device.last)]
    when = f", {min(months)}" + (f" to {max(months)}" if max(months) > min(months) else "") if months else ""
    cap = ", at its power cap" if report.regime == "sustained" else ""
    said = f"Measured on {names} ({report.arch}{when}){cap}: "
    if problems:
        said += f"{sum(one.programs for one in problems):,} programs of {kernel} for {_cases(problems)}"
        if rest := len(measured) - len(problems):
            said += f"; for {_count(rest, 'other problem')} little beside the best schedule was timed"
    else:
        said += f"the best schedules of {_cases(measured)} of {kernel}"
    if modelled:
        said += f"; {_count(len(modelled), 'other problem')} {'is' if len(modelled) == 1 else 'are'} only modelled"
    return f"{said}."


def _where(report: Report) -> str:
    regime = f" in the {report.regime} regime" if report.elsewhere else ""
    return report.arch + (f" ({report.device_name})" if report.device_name else "") + regime


def _of_winners(problems: Sequence[ProblemReport]) -> list[str]:
    """What can be said where little but the best schedules has a time."""
    if not problems:
        return []
    second = [one.runner_up_drop for one in problems if one.runner_up_drop is not None]
    lines = ["What other schedules cost is not known."]
    if second:
        known = f"{longer(statistics.median(second))} ({_median(second)})"
        lines = [f"Of other schedules only the race's runner-up is known: it takes {known}."]
    return lines + ([_sentence(_best_of(problems[0]))] if len(problems) == 1 else [])


def _tiles(report: Report, problems: Sequence[ProblemReport]) -> str:
    """How sensitive the kernel is to its tile."""
    if report.tile_knobs is None:
        return ""
    devices = [*dict.fromkeys(one.device_name for one in problems)]
    kernel = f"{f'On {_and(devices)}, ' if devices[0] else 'By the estimate, '}{report.kernel}"
    second = [one.tile_drop for one in problems if one.tile_drop is not None]
    worst = [one.worst_tile.relative - 1 for one in problems if one.worst_tile]
    if not second:
        return f"How much the tile of {report.kernel} matters is not known: too few programs of other tiles were timed."
    drop, most = statistics.median(second), statistics.median(worst) if worst else 0.0
    known = _median(second)
    bad = f", and the worst {longer(most)}" if len(worst) == len(second) and most > drop else ""
    if drop > AS_GOOD:
        return f"{kernel} is sensitive to its tile: the second best tile takes {longer(drop)} ({known}){bad}."
    if most > MATTERS:
        return (
            f"{kernel} has several tiles that are as good as the best: the second best takes {longer(drop)}, which is noise "
            f"({known}){bad}."
        )
    return (
        f"{kernel} is not sensitive to its tile: the second best takes {longer(drop)}, which is noise ({known}){bad}."
    )


def _default(problems: Sequence[ProblemReport]) -> str:
    drops = [one.default_drop for one in problems if one.default_drop is not None]
    if not drops:
        return "The untuned default schedule was not timed." if problems[0].provenance == MEASURED else ""
    return f"The untuned default takes {longer(statistics.median(drops))} than the best schedule ({_median(drops)})."


def _knobs(report: Report, problems: Sequence[ProblemReport]) -> list[str]:
    verdicts = [each for each in joined_effects(problems) if each.knob not in (report.tile_knobs or ())]
    of = {
        advice: [each for each in verdicts if each.advice == advice]
        for advice in ("choose", "leave", "unclear", "untried")
    }
    lines = []
    if of["choose"]:
        chosen = _list([f"`{each.knob}` ({_preferred(each)})" for each in of["choose"]])
        lines.append(f"Tune {chosen} for each problem.")
    if of["leave"]:
        lines.append(f"Leave {_list([_left(each) for each in of['leave']])}: no other value tried is faster.")
    if of["unclear"]:
        lines.append(
            f"Tune {_names(each.knob for each in of['unclear'])}, too: no value is known to be good for every "
            f"{'problem' if len(problems) > 1 else 'program'}."
        )
    if of["untried"]:
        lines.append(
            f"Too few programs that differ in one knob alone were timed to judge {_names(each.knob for each in of['untried'])}."
        )
    return lines


def _left(verdict: KnobVerdict) -> str:
    return f"`{verdict.knob}` at {show(verdict.value)}"


def _preferred(verdict: KnobVerdict) -> str:
    """Which values problems prefer: `1 is faster for 11 problems, 2 for 3`."""
    (first, number), *others = verdict.preferred
    return f"{show(first)} is faster for {_count(number, 'problem')}" + "".join(
        f", {show(value)} for {times}" for value, times in others
    )


def _best(problems: Sequence[ProblemReport]) -> str:
    """The best schedule of the only problem, or how often each tile is best and where the rate is highest."""
    if len(problems) == 1:
        return _sentence(_best_of(problems[0]))
    said = ""
    if counts := Counter(one.tiles[0].tile for one in problems if one.tiles).most_common():
        (first, number), *others = counts
        often = _and(
            [f"{_tile(first)} is the best tile for {number}", *(f"{_tile(tile)} for {times}" for tile, times in others)]
        )
        said = f"Of {_count(len(problems), 'problem')}, {often}. "
    units = Counter(unit_of(one.problem) for one in problems)
    unit = max(units, key=lambda each: units[each])
    top = max((one for one in problems if unit_of(one.problem) == unit), key=lambda one: one.best.rate)
    return f"{said}The highest rate is that of {top.problem}: `{top.best.schedule.short()}`, {_time(top)}."


def longer(drop: float) -> str:
    """How much longer something takes than the best, in words: `6.3% longer`, `2.1 times as long`."""
    if drop < 0:
        return f"{_percent(-drop)} less time"
    return f"{_percent(drop)} longer" if drop < 1 else f"{1 + drop:,.{1 if drop < 99 else 0}f} times as long"


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.{0 if fraction >= 0.0995 else 1}f}%"


def _median(values: Sequence[float]) -> str:
    return f"median of {_count(len(values), 'problem')}" if len(values) > 1 else "1 problem"


def _cases(problems: Sequence[ProblemReport]) -> str:
    devices = len({one.device_name for one in problems})
    return _count(len(problems), "problem") + (", each GPU's counted apart" if devices > 1 else "")


def _time(one: ProblemReport) -> str:
    """The best time of a problem and its rate."""
    us = f"{one.best.us:,.0f}" if one.best.us >= 1000 else f"{one.best.us:.4g}"
    return f"{us} µs" + (f" ({one.best.rate:,.4g} {unit_of(one.problem)})" if one.best.rate else "")


def _programs(one: ProblemReport) -> list[Timed]:
    return [timed for timed in one.timed if timed.same_program_as is None]


def _tile(tile: tuple[int, int]) -> str:
    return f"{tile[0]}x{tile[1]}"


def _command(report: Report, name: str, one: ProblemReport | None = None, *more: str) -> str:
    problem = ["-p", format_problem(one.problem)] if one else []
    return f"`{shlex.join(['tiledsched', name, report.kernel, '--arch', report.arch, *problem, *more])}`"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _names(knobs: Iterable[str]) -> str:
    return _list([f"`{knob}`" for knob in knobs])


def _list(words: Sequence[str]) -> str:
    more = len(words) - MOST_NAMED
    return _and([*words[:MOST_NAMED], f"{more} more"] if more > 1 else words)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
