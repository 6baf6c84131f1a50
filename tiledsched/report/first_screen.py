"""What the first screen says of a problem: whether it was measured, what to run next, what is served, what not tuning costs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from tiledsched.core.device import describe_gpus
from tiledsched.core.groups import largest
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import code, figure, joined, longer, percent, plural, short, show, tile_text
from tiledsched.measure.runner import HOW
from tiledsched.report.analysis import broad
from tiledsched.report.answer import best_time, command_of, run_text, tile_unit, verdicts
from tiledsched.report.records import MEASURED, ProblemReport, Report, Timed, ValueEffect
from tiledsched.report.rules import Rule, rules_of
from tiledsched.report.views import MOST_PROBLEMS, explored, judged_knobs
from tiledsched.store.model_error import error_text

SURE = 0.8
"""A rule on the first screen is right for at least this share of the problems that it was not made from."""
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
    """The place of the problem on which a page opens: the one tuned last. Of what ships, one whose fastest program is served and
    for which what not tuning costs was measured, with the most programs, the newest of these.
    """
    tuned = [one for one in problems if tuned_at(one)]
    return problems.index(max(tuned, key=_newest) if tuned else max(problems, key=_evidence))


def tuned_at(one: ProblemReport) -> datetime | None:
    """When a problem was tuned; None for one that only what ships knows."""
    own = one.served is not None and one.served.layer != SHIPPED
    return (one.served.updated_at or one.taken) if own and one.served else one.taken if one.trace else None


def _evidence(one: ProblemReport) -> tuple[bool, bool, bool, int, datetime]:
    if one.provenance != MEASURED:
        return False, one.error is not None, False, one.programs, datetime.min
    raced = one.explained is not None and one.explained.provenance == MEASURED
    whole = one.untuned is not None and one.untuned.relative is not None
    return True, raced and one.serves is one.best, whole, one.programs, _newest(one)[0]


def _newest(one: ProblemReport) -> tuple[datetime, int]:
    when = tuned_at(one) or one.taken or datetime.min
    return when.astimezone(timezone.utc).replace(tzinfo=None) if when.tzinfo else when, one.programs


def status(one: ProblemReport, report: Report) -> str:
    """Whether the figures of a problem were measured, where and when, and of how many programs they are."""
    of = plural(one.programs, "program")
    if one.provenance != MEASURED:
        error = error_text(one.error)
        if one.error:
            error += f", so that differences below {percent(one.tolerance)} decide nothing"
        entry = one.explained.entry if one.explained else None
        day = f" on {entry.updated_at:%Y-%m-%d}" if entry and entry.updated_at else ""
        gpu = describe_gpus(report.arch)
        return f"Nothing was measured: the performance model estimated {of} for {gpu}{day}; {error}."
    day = f", {one.taken:%Y-%m-%d}" if one.taken else ""
    cap = f" {HOW[report.regime]}" if report.regime in HOW else ""
    held = "".join(
        f" Its clock was held down {device.held_down}; times at a low clock decide little."
        for device in report.conditions
        if device.held_down and device.device.name == one.device_name
    )
    return f"Measured on {one.device_name} ({report.arch}{day}){cap}: {of} of this problem.{held}"


def next_of(one: ProblemReport, report: Report) -> str:
    """The command to run next for a problem, as code, and what it does."""
    unit, known = tile_unit(report), bool(broad([one]))
    if kernel_named(report.kernel).is_called:
        more = "its own program measures again where `TILEDSCHED_REMEMBER=new`"
        return f"{command_of(report, 'explain', one)} says what is known of it; {more}."
    tune = command_of(report, "tune", one)
    if one.provenance != MEASURED:
        return f"{tune} measures it, on a machine with a GPU of {report.arch}."
    if one.explained is None or one.explained.provenance != MEASURED:
        return f"{tune} decides what serves it, on the same GPU: it was measured, but never raced."
    if not known or (unit and len(one.tiles) > 1 and one.second_tile is None):
        what = f"any other {unit} costs" if known else "other schedules cost"
        record = command_of(report, "record", one)
        return f"{record} measures 300 programs on the same GPU, to learn what {what}."
    clear = {*costly(one, report), *(knob for rule in _rules(one, report) for knob in rule.knob)}
    unclear = [each.knob for each in verdicts(report, [one]) if each.advice in ("unclear", "untried")]
    if unclear := [knob for knob in unclear if knob not in clear]:
        rest = [f"{len(unclear) - MOST_NAMED} more knobs"] if len(unclear) > MOST_NAMED else []
        named = joined([*map(code, unclear[:MOST_NAMED]), *rest])
        return (
            f"nothing is needed, calls use what is served. To learn more about {named}, "
            f"{command_of(report, 'tune', one, '--neighbours')} tries schedules that differ in one or two knobs."
        )
    return f"{command_of(report, 'explain', one)} says what a call of it gets, and why."


def facts(one: ProblemReport, report: Report) -> list[tuple[str, str, str]]:
    """What a reader wants to know of a problem: what it is, the figure, and what there is to add."""
    costs = [] if kernel_named(report.kernel).is_called else [_untuned(one, report), _default(one, report)]
    found = [_served(one, report), *costs]
    if (unit := tile_unit(report)) and one.tile_drop is not None and one.second_tile:
        second = one.second_tile
        if _undecided(one, 1 + one.tile_drop):
            return found
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


def _undecided(one: ProblemReport, relative: float) -> bool:
    """Whether what a choice costs is an estimate that lies within the model's error."""
    return one.provenance != MEASURED and abs(relative - 1) <= one.tolerance


def _cost(title: str, one: ProblemReport, relative: float, more: str, tie: bool = False) -> tuple[str, str, str]:
    """What a choice costs; of estimates, only what is beyond the model's error."""
    said = longer(relative - 1)
    if _undecided(one, relative):
        why = (
            "The estimates differ by less than their error."
            if one.error
            else "The error of the estimates is not known."
        )
        return title, "cannot be told", why
    return (
        (title, "a tie", f"It cannot be told apart from what is served ({said}). {more}")
        if tie
        else (title, said, more)
    )


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
        if one.serves and not one.faster and one.serves.relative >= 1.0005 and not _undecided(one, one.serves.relative):
            more.append(f"The least time of these, with which costs are compared, is {figure(one.best.us)} µs.")
    else:
        more.append(f"It was not timed with these. The fastest that was: {_time(one.best, report)}.")
    if one.other_run:
        more.append(f"{run_text(one.other_run)}, when it was tuned: `explain` shows that time.")
    if one.ties:
        tied = sorted({name_of(each, report) for each in one.ties} - {name_of(chosen, report)}) if report.tile else []
        others = f", of {tile_unit(report)} {joined(tied)} too" if tied else ""
        more.append(f"{plural(len(one.ties), 'other schedule')} cannot be told apart from it{others}.")
    if one.faster and one.serves:
        more.append(f"Timed faster, but not raced: {_time(one.faster, report)}, {longer(1 / one.serves.relative - 1)}.")
    return ("Served to calls" if one.explained else "Best"), name_of(chosen, report), " ".join(more)


def _time(timed: Timed, report: Report) -> str:
    return f"{name_of(timed.schedule, report)}, {figure(timed.us)} µs"


def _untuned(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    title, other = "Served without tuning", one.untuned
    if other is None:
        return title, "not known", "What would be served was not timed."
    how = {
        "transferred": "chosen by the tuned problems most like this one",
        "modelled": "chosen by the performance model",
    }
    named = f"{name_of(other.schedule, report)}, {how.get(other.provenance, 'the compiler defaults')}."
    tuned = one.explained is not None and one.explained.provenance == MEASURED
    same = one.explained is not None and other.schedule == one.explained.schedule
    if same and tuned:
        return title, "the same", f"{named} It is the schedule that is served."
    if not tuned:
        named = f"It was never tuned: {named}"
    if other.relative is not None and (tuned or not _undecided(one, other.relative)):
        return _cost(title, one, other.relative, named)
    if same:
        return title, "the same", f"{named} What tuning gains is not known yet."
    if other.expected:
        worst = f"{percent(other.expected.worst)} at worst"
        took = f"such choices took {longer(other.expected.mean)} than the best on average, {worst}"
        about = f"Not timed here. On {other.expected.cases} other tuned problems {took}."
        return title, f"about {longer(other.expected.mean)}", f"{named} {about}"
    return title, "not known", f"{named} It was not timed for this problem."


def _default(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    title = "Compiler defaults"
    if one.default is None:
        return title, "not known", f"They {'were not timed' if one.provenance == MEASURED else 'have no estimate'}."
    tie = one.default.schedule in one.ties
    return _cost(title, one, one.default.relative, f"{_time(one.default, report)}.", tie)


def costly(one: ProblemReport, report: Report) -> dict[str, ValueEffect]:
    """The value of each knob, but those of the tile, that costs most in a problem, where that is sure; the costliest first."""
    sure = (
        each
        for each in judged_knobs(one, report.tile_knobs)
        if each.ci_low is not None and each.ratio and min(each.ci_low, each.ratio - one.tolerance) > 1
    )
    worst = largest(((each.knob, each) for each in sure), key=_ratio)
    return {each.knob: each for each in sorted(worst.values(), key=_ratio, reverse=True)}


def _ratio(effect: ValueEffect) -> float:
    return effect.ratio or 0.0


def _rules(one: ProblemReport, report: Report) -> list[Rule]:
    """The rules over problems that name a good value for this one, and are right for most problems."""
    section = report.measured if one.provenance == MEASURED else report.modelled
    found = rules_of(section.problems, report.tile)
    return [rule for rule in found if one not in rule.misses and rule.right >= SURE * rule.problems]


def lead(one: ProblemReport, report: Report) -> list[tuple[str, str]]:
    """The knobs that cost most in this problem, and which value of a knob is good for which problems, each under its title."""
    if one.programs < 2:
        return []
    measured, tile = one.provenance == MEASURED, tile_unit(report) or "map"
    costs = [
        f"{code(each.knob)} = {show(each.value)} takes {longer(_ratio(each) - 1)} than {show(each.against)}"
        for each in list(costly(one, report).values())[: 2 * MOST_NAMED]
    ]
    if costs:
        own = (
            f" What is served has the better value{'' if len(costs) == 1 else 's'}." if one.serves is one.leader else ""
        )
        here = f"{'' if measured else 'By the estimates, '}{joined(costs)}.{own} The {tile} is in the map below."
    else:
        why = "were tried in too few pairs or" if measured else "differ by less than the model's error or"
        here = f"None is known to matter: values of knobs, besides the {tile}, {why} cost nothing."
    rules = [f"{rule.brief(one)} ({rule.shares})." for rule in _rules(one, report)[:MOST_NAMED]]
    shares = "Each share is of problems that the rule was not made from; one value for all is the best single value."
    none = "No rule was found that says which value is good for which problems."
    by_problem = " ".join([*rules, shares]) if rules else none
    return [("Knobs in this problem", here), ("Knobs by kind of problem", by_problem)]
