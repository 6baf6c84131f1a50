"""What the first screen says of a problem: whether it was measured, what to run next, what is served, what not tuning costs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from tiledsched.core.schedule import Schedule
from tiledsched.core.text import code, figure, joined, longer, percent, plural, short, tile_text
from tiledsched.report.analysis import broad
from tiledsched.report.answer import best_time, command_of, tile_unit, verdicts
from tiledsched.report.records import MEASURED, ProblemReport, Report, Timed
from tiledsched.report.views import MOST_PROBLEMS, explored, judged_knobs

SHIPPED = "shipped"
"""The layer of entries that came with the package."""
MOST_NAMED = 3
"""Knobs that the next command is said to be about, at most."""
MOST_FACTS = 4
"""Facts of a problem, at most: they stand side by side."""


def shown_problems(report: Report) -> list[ProblemReport]:
    """The problems of a report that a page shows one by one, measured ones first: those with many programs, and those tuned here;
    or else those of which anything is known.
    """
    problems = [*report.measured.problems, *report.modelled.problems]
    found = {*explored(report.measured.problems), *explored(report.modelled.problems)}
    found |= set(sorted(filter(tuned_at, problems), key=_newest)[-MOST_PROBLEMS // 3 :])
    return [one for one in problems if one in found] or problems[:MOST_PROBLEMS]


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


def _evidence(one: ProblemReport) -> tuple[bool, int, datetime]:
    fastest = one.serves is not None and (one.serves is one.best or one.best.schedule in one.ties)
    return fastest, one.programs, _newest(one)[0]


def _newest(one: ProblemReport) -> tuple[datetime, int]:
    when = tuned_at(one) or one.taken or datetime.min
    return when.astimezone(timezone.utc).replace(tzinfo=None) if when.tzinfo else when, one.programs


def status(one: ProblemReport, report: Report) -> str:
    """Whether the figures of a problem were measured, where and when, and of how many programs they are."""
    programs = [timed.relative for timed in one.timed if timed.same_program_as is None]
    near, wider = (sum(relative <= 1 + limit for relative in programs) for limit in (0.01, 0.05))
    of = plural(one.programs, "program")
    if one.programs > 1:
        of += f", {near} of them within 1% of the best time and {wider} within 5%, the best included"
    if one.provenance != MEASURED:
        return f"Nothing was measured here: the performance model estimates every time for {report.arch}, of {of}."
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
                *([f"{len(open_knobs) - MOST_NAMED} more"] if len(open_knobs) > MOST_NAMED else []),
            ]
        )
        tries = "tries schedules that differ from the best in one or two knobs"
        return command_of(report, "tune", one, "--neighbours"), f"{tries}, to learn more about {named}."
    return command_of(report, "explain", one), "says what a call of it gets, and why."


def facts(one: ProblemReport, report: Report) -> list[tuple[str, str, str]]:
    """What a reader wants to know of a problem: what it is, the figure, and what there is to add."""
    found = [_served(one, report), _untuned(one, report), _default(one, report)]
    if unit := tile_unit(report):
        if one.second_tile:
            value = f"{longer(one.second_tile.relative - 1)}"
            found.append(
                (f"Second best {unit}", value, f"{tile_text(one.second_tile.tile)}: {short(one.second_tile.schedule)}")
            )
        elif len(one.tiles) > 1:
            tried = f"{plural(one.tiles[1].programs, 'program')} of {tile_text(one.tiles[1].tile)}"
            found.append((f"Second best {unit}", "not known", f"Too little was tried of any other: {tried}."))
    if one.runner_up and one.runner_up_drop is not None and len(found) < MOST_FACTS:
        found.append(("Runner-up", longer(one.runner_up_drop), short(one.runner_up.schedule)))
    return found


def name_of(schedule: Schedule, report: Report) -> str:
    """A schedule in a word: its tile, or all of it in short where it has none."""
    knobs = report.tile_knobs or ()
    if tile_unit(report) and {*knobs} <= {*schedule}:
        return "x".join(str(schedule[knob]) for knob in knobs)
    return schedule.short() or "the plainest schedule"


def _served(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    chosen = one.explained.schedule if one.explained else one.best.schedule
    timed, more = one.serves or one.best, [short(chosen)]
    if one.serves is None and one.explained:
        more.append(f"It was not timed with these. The fastest that was: {_time(one.best, one, report)}.")
    else:
        more.append(f"{best_time(one, timed)}{'' if one.provenance == MEASURED else ', modelled'}.")
    tied = sorted({name_of(each, report) for each in one.ties} - {name_of(chosen, report)})
    if one.ties:
        others = (
            f", with the {tile_unit(report) or 'schedule'} {joined(tied)} too" if tied and tile_unit(report) else ""
        )
        more.append(f"{plural(len(one.ties), 'other schedule')} cannot be told apart from it{others}.")
    if timed.relative > 1.0005 and one.best.schedule not in one.ties:
        least = "fastest measured" if one.provenance == MEASURED else "model's least estimate today"
        more.append(f"The {least}: {_time(one.best, one, report)}, {longer(1 / timed.relative - 1)}.")
    return ("Served" if one.explained else "Best"), name_of(chosen, report), " ".join(more)


def _time(timed: Timed, one: ProblemReport, report: Report) -> str:
    return f"{name_of(timed.schedule, report)}, {figure(timed.us)} µs"


def _untuned(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    title, other = "Served without tuning", one.untuned
    if other is None:
        return title, "not known", "No schedule is known for it."
    how = {"transferred": "the tuned problems most like this one", "modelled": "the performance model"}
    named = f"{name_of(other.schedule, report)}, chosen by {how[other.provenance]}." if other.provenance in how else ""
    if other.relative is not None:
        return title, longer(other.relative - 1), named
    if other.expected:
        worst = f"at worst {percent(other.expected.worst)}"
        about = f"Expected, not timed: the mean over {other.expected.cases} hidden problems, {worst}."
        return title, f"about {longer(other.expected.mean)}", f"{named} {about}".strip()
    return title, "not known", f"{named} It was not timed for this problem.".strip()


def _default(one: ProblemReport, report: Report) -> tuple[str, str, str]:
    title = "Compiler defaults"
    if one.default is None:
        return title, "not known", "They were not timed."
    tie = one.default.schedule in one.ties or one.default is one.serves
    more = f"{name_of(one.default.schedule, report)}, {figure(one.default.us)} µs." + (
        " A tie with what is served." if tie else ""
    )
    return title, longer(one.default.relative - 1), more


def lead(one: ProblemReport, report: Report) -> str:
    """The knobs that cost most in this problem, in a sentence; empty where none is known to."""
    worst: dict[str, float] = {}
    for each in judged_knobs(one, report.tile_knobs or ()):
        if each.ci_low is not None and each.ci_low > 1:
            worst[each.knob] = max(worst.get(each.knob, 0.0), each.ratio or 0.0)
    ranked = sorted(worst, key=lambda knob: -worst[knob])[: 2 * MOST_NAMED]
    named = joined(f"{code(knob)} {percent(worst[knob] - 1)}" for knob in ranked)
    return (
        f"Knobs that cost most at their worst value, besides the {tile_unit(report) or 'map'}: {named}."
        if named
        else ""
    )
