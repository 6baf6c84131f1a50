"""What the first screen says of a problem: whether it was measured, what to run next, what is served, what not tuning costs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import code, figure, joined, longer, percent, plural, short, tile_text
from tiledsched.report.analysis import broad
from tiledsched.report.answer import best_time, command_of, run_text, tile_unit, verdicts
from tiledsched.report.axes import show
from tiledsched.report.records import MEASURED, ProblemReport, Report, Timed
from tiledsched.report.rules import rules_of
from tiledsched.report.views import MOST_PROBLEMS, distinct, explored, judged_knobs
from tiledsched.store.model_error import error_text

SHIPPED = "shipped"
"""The layer of entries that came with the package."""
MOST_NAMED = 3
"""Knobs that the next command is said to be about, and rules about knobs, at most."""


def shown_problems(report: Report) -> list[ProblemReport]:
    """The problems of a report that a page shows one by one, measured ones first: those with many programs, and those tuned here;
    or else those of which anything is known.
    """
    found = {*explored(report.measured.problems), *explored(report.modelled.problems)}
    found |= set(sorted(filter(tuned_at, report.problems), key=_newest)[-MOST_PROBLEMS // 3 :])
    return [one for one in report.problems if one in found] or [*report.problems[:MOST_PROBLEMS]]


def opened_on(problems: Sequence[ProblemReport]) -> int:
    """The place of the problem on which a page opens: the one tuned last. Of what ships, one whose fastest program is served,
    with the most programs, the newest of these.
    """
    tuned = [one for one in problems if tuned_at(one)]
    return problems.index(max(tuned, key=_newest) if tuned else max(problems, key=_evidence))


def tuned_at(one: ProblemReport) -> datetime | None:
    """When a problem was tuned; None for one that only what ships knows."""
    own = one.served is not None and one.served.layer != SHIPPED
    return (one.served.updated_at or one.taken) if own and one.served else one.taken if one.trace else None


def _evidence(one: ProblemReport) -> tuple[bool, bool, int, datetime]:
    if one.provenance != MEASURED:
        return False, one.error is not None, one.programs, datetime.min
    raced = one.explained is not None and one.explained.provenance == MEASURED
    return True, raced and one.serves is one.leader, one.programs, _newest(one)[0]


def _newest(one: ProblemReport) -> tuple[datetime, int]:
    when = tuned_at(one) or one.taken or datetime.min
    return when.astimezone(timezone.utc).replace(tzinfo=None) if when.tzinfo else when, one.programs


def status(one: ProblemReport, report: Report) -> str:
    """Whether the figures of a problem were measured, where and when, and of how many programs they are."""
    of = plural(one.programs, "program")
    if one.provenance != MEASURED:
        error = (
            f"{error_text(one.error)}, so that smaller differences decide nothing" if one.error else error_text(None)
        )
        return f"Nothing was measured: the performance model estimates {of} for {report.arch}; {error}."
    if one.programs > 1:
        near, wider = (sum(timed.relative <= 1 + limit for timed in distinct(one)) for limit in (0.01, 0.05))
        of += f"; beside the fastest, {near - 1} {'is' if near == 2 else 'are'} within 1% of its time and {wider - 1} within 5%"
    day = f", {one.taken:%Y-%m-%d}" if one.taken else ""
    cap = " at its power cap" if report.regime == "sustained" else ""
    held = "".join(
        f" Its clock was held down {device.held_down}; times at a low clock decide little."
        for device in report.conditions
        if device.held_down and device.device.name == one.device_name
    )
    return f"Measured on {one.device_name} ({report.arch}{day}){cap}: {of}.{held}"


def next_of(one: ProblemReport, report: Report) -> tuple[str, str]:
    """The command to run next for a problem, and what it does."""
    unit, known = tile_unit(report), bool(broad([one]))
    if kernel_named(report.kernel).is_called:
        more = "its own program measures again where `TILEDSCHED_REMEMBER=new`"
        return command_of(report, "explain", one), f"says what is known of it; {more}."
    if one.provenance != MEASURED:
        return command_of(report, "tune", one), f"measures it, on a machine with a GPU of {report.arch}."
    if one.explained is None or one.explained.provenance != MEASURED:
        return command_of(
            report, "tune", one
        ), "decides what serves it, on the same GPU: it was measured, but never raced."
    if not known or (unit and len(one.tiles) > 1 and one.second_tile is None):
        what = f"any other {unit} costs" if known else "other schedules cost"
        return command_of(report, "record", one), f"measures 300 programs on the same GPU, to learn what {what}."
    open_knobs = [each.knob for each in verdicts(report, [one]) if each.advice in ("unclear", "untried")]
    if open_knobs:
        named = joined(
            [
                *map(code, open_knobs[:MOST_NAMED]),
                *([f"{len(open_knobs) - MOST_NAMED} more knobs"] if len(open_knobs) > MOST_NAMED else []),
            ]
        )
        tries = "tries schedules that differ from the best in one or two knobs"
        return command_of(report, "tune", one, "--neighbours"), f"{tries}, if you want to know more about {named}."
    return command_of(report, "explain", one), "says what a call of it gets, and why."


def facts(one: ProblemReport, report: Report) -> list[tuple[str, str, str]]:
    """What a reader wants to know of a problem: what it is, the figure, and what there is to add."""
    costs = [] if kernel_named(report.kernel).is_called else [_untuned(one, report), _default(one, report)]
    found = [_served(one, report), *costs]
    if (unit := tile_unit(report)) and one.tile_drop is not None and one.second_tile:
        second = one.second_tile
        found.append(
            _cost(
                f"Second best {unit}",
                one,
                1 + one.tile_drop,
                f"{tile_text(second.tile)}: {short(second.schedule)}",
                second.ties,
            )
        )
    elif unit and len(one.tiles) > 1:
        tried = f"{plural(one.tiles[1].programs, 'program')} of {tile_text(one.tiles[1].tile)}"
        found.append((f"Second best {unit}", "not known", f"Too little was tried of any other: {tried}."))
    elif one.runner_up and one.runner_up_drop is not None:
        found.append(_cost("Runner-up", one, 1 + one.runner_up_drop, short(one.runner_up.schedule)))
    return found


def _cost(title: str, one: ProblemReport, relative: float, more: str, tie: bool = False) -> tuple[str, str, str]:
    """What a choice costs; of estimates, only what is beyond the model's error."""
    said = longer(relative - 1) if abs(relative - 1) >= 0.0005 else "no longer"
    if one.provenance != MEASURED and abs(relative - 1) <= one.tolerance:
        error = "within the model's error" if one.error else "not known"
        return title, error, f"By the estimates {said}. {more}"
    return (title, "a tie", f"{said}, which cannot be told apart. {more}") if tie else (title, said, more)


def name_of(schedule: Schedule, report: Report) -> str:
    """A schedule in a word: its tile, or all of it in short where it has none."""
    if report.tile and {*report.tile} <= {*schedule}:
        return "x".join(str(schedule[knob]) for knob in report.tile)
    return schedule.short() or "all at their plainest"


def _served(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    chosen = one.explained.schedule if one.explained else one.leader.schedule
    more = [] if name_of(chosen, report) == chosen.short() else [short(chosen)]
    if one.serves or not one.explained:
        more.append(f"{best_time(one, one.serves or one.leader)}{'' if one.provenance == MEASURED else ', modelled'}.")
        if one.serves and not one.faster and one.serves.relative >= 1.0005:
            least = "time of these" if one.provenance == MEASURED else "estimate"
            more.append(f"The least {least}, with which costs are compared, is {figure(one.best.us)} µs.")
    else:
        more.append(f"It was not timed with these. The fastest that was: {_time(one.best, report)}.")
    if one.other_run:
        more.append(f"`explain` shows its time in another run, {run_text(one.other_run)}.")
    if one.ties:
        tied = sorted({name_of(each, report) for each in one.ties} - {name_of(chosen, report)}) if report.tile else []
        others = f", of {tile_unit(report)} {joined(tied)} too" if tied else ""
        more.append(f"{plural(len(one.ties), 'other schedule')} cannot be told apart from it{others}.")
    if one.faster and one.serves:
        more.append(f"Timed faster, but not raced: {_time(one.faster, report)}, {longer(1 / one.serves.relative - 1)}.")
    return ("Served" if one.explained else "Best"), name_of(chosen, report), " ".join(more)


def _time(timed: Timed, report: Report) -> str:
    return f"{name_of(timed.schedule, report)}, {figure(timed.us)} µs"


def _untuned(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    title, other = "Served without tuning", one.untuned
    if other is None:
        return title, "not known", "What would be served was not timed."
    how = {"transferred": "the tuned problems most like this one", "modelled": "the performance model"}
    named = f"{name_of(other.schedule, report)}, chosen by {how[other.provenance]}." if other.provenance in how else ""
    if other.relative is not None:
        return _cost(title, one, other.relative, named)
    if other.expected:
        worst = f"{percent(other.expected.worst)} at worst"
        took = f"such choices took {longer(other.expected.mean)} than the best on average, {worst}"
        about = f"Not timed here. On {other.expected.cases} other tuned problems {took}."
        return title, f"about {longer(other.expected.mean)}", f"{named} {about}".strip()
    return title, "not known", f"{named} It was not timed for this problem.".strip()


def _default(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    title = "Compiler defaults"
    if one.default is None:
        return title, "not known", f"They {'were not timed' if one.provenance == MEASURED else 'have no estimate'}."
    tie = one.default.schedule in one.ties
    return _cost(title, one, one.default.relative, f"{_time(one.default, report)}.", tie)


def lead(one: ProblemReport, report: Report) -> str:
    """Which value of a knob is good for which problems, and the knobs that cost most in this one; empty if neither is known."""
    section = report.measured if one.provenance == MEASURED else report.modelled
    holding = [rule for rule in rules_of(section.problems, report.tile) if one not in rule.misses]
    said = [f"{rule.brief}." for rule in holding[:MOST_NAMED]]
    worst: dict[str, tuple[float, str]] = {}
    for each in judged_knobs(one, report.tile_knobs):
        if each.ci_low is not None and each.ratio and min(each.ci_low, each.ratio - one.tolerance) > 1:
            worst[each.knob] = max(worst.get(each.knob, (0.0, "")), (each.ratio, show(each.value)))
    ranked = sorted(worst, key=lambda knob: -worst[knob][0])[: 2 * MOST_NAMED]
    what = f"besides the {tile_unit(report) or 'map'}"
    if ranked:
        costs = joined(f"{code(knob)} = {worst[knob][1]} {longer(worst[knob][0] - 1)}" for knob in ranked)
        said.append(f"The values that cost most here, {what}: {costs}.")
    elif not said and one.programs > 1:
        why = (
            "were tried in too few pairs or"
            if one.provenance == MEASURED
            else "differ by less than the model's error or"
        )
        said.append(f"None is known: no rule over problems was found, and values of knobs, {what}, {why} cost nothing.")
    return " ".join(["Knobs that matter:", *said] if said else [])
