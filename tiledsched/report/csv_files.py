"""The report's CSV files. Measured and modelled figures have columns of their own, so that they cannot be mixed up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiledsched.core.files import csv_text
from tiledsched.core.problem import Problem, unit_of
from tiledsched.core.text import tile_text
from tiledsched.report.effects import value_effects
from tiledsched.report.records import MEASURED, MODELLED, ProblemReport, Report
from tiledsched.report.rules import rules_of
from tiledsched.report.views import explored

RATE_COLUMNS = {"TFLOP/s": "tflops", "GB/s": "gbps"}
FACT_COLUMNS = ("registers", "threads", "shared_bytes", "spill_bytes", "code_bytes", "ctas_per_sm")


def schedules_csv(report: Report) -> str:
    """One row for every schedule with a time, by problem, fastest first.

    The problems' fields and the knobs of all schedules are columns; one that is called like another column has `problem_`
    or `knob_` before it. A cell is empty where there is no value, so measured rows have no modelled figures and modelled
    rows no measured ones.
    """
    problems = report.problems
    rates = [column for unit, column in RATE_COLUMNS.items() if any(unit_of(one.problem) == unit for one in problems)]
    first = ["arch", "device", "regime", "provenance", "problem_id"]
    last = [
        "median_us",
        "ci_low_us",
        "ci_high_us",
        "samples",
        *rates,
        "relative",
        "modelled_us",
        *(f"modelled_{rate}" for rate in rates),
        "modelled_relative",
        "same_program_as",
        "fingerprint",
        *FACT_COLUMNS,
    ]
    fields = _columns(_fields(one.problem for one in problems), "problem", (*first, "schedule_id", *last))
    knobs = _columns(
        dict.fromkeys(knob for one in problems for timed in one.timed for knob in timed.schedule),
        "knob",
        (*first, *fields.values(), "schedule_id", *last),
    )
    rows: list[dict[str, Any]] = []
    for one in problems:
        measured = one.provenance == MEASURED
        prefix = "" if measured else "modelled_"
        shared = {
            "arch": report.arch,
            "device": one.device_name,
            "regime": report.regime if measured else "",
            "provenance": one.provenance,
            "problem_id": one.problem.id,
            **_values(one.problem, fields),
        }
        rows += [
            {
                **shared,
                "schedule_id": timed.schedule.id,
                **{knobs[knob]: value for knob, value in timed.schedule.items()},
                "same_program_as": timed.same_program_as and timed.same_program_as.id,
                "fingerprint": timed.fingerprint,
                "median_us" if measured else "modelled_us": _number(timed.us),
                f"{prefix}relative": _number(timed.relative),
                f"{prefix}{RATE_COLUMNS[unit_of(one.problem)]}": _number(timed.rate),
                "ci_low_us": _number(getattr(timed.timing, "ci_low_us", None)),
                "ci_high_us": _number(getattr(timed.timing, "ci_high_us", None)),
                "samples": timed.samples if timed.timing else None,
                **{name: getattr(timed.facts, name, None) for name in FACT_COLUMNS},
            }
            for timed in one.timed
        ]
    return _csv([*first, *fields.values(), "schedule_id", *knobs.values(), *last], rows)


def sensitivity_csv(report: Report) -> str:
    """One row for each problem: its best tile, the second one, and what the others cost."""
    accum = _accum_column(report)
    first = ["arch", "device", "provenance"]
    last = [
        *accum,
        "size",
        "problem_id",
        "best_tile",
        "runner_up_tile",
        "drop_percent",
        "worst_drop_percent",
        "modelled_drop_percent",
        "modelled_worst_drop_percent",
    ]
    shared = list(_columns(report.axes.shared, "problem", (*first, *last)).values())
    rows = [
        {
            "arch": report.arch,
            "device": one.device_name,
            **dict(zip(shared, one.shared, strict=True)),
            **dict.fromkeys(accum, one.accum_mode),
            "size": one.size,
            "problem_id": one.problem.id,
            "best_tile": tile_text(one.tiles[0].tile),
            "runner_up_tile": one.second_tile and tile_text(one.second_tile.tile),
            **_drops(one),
        }
        for one in report.problems
        if one.tiles
    ]
    return _csv([*first, *shared, *last], rows)


def regimes_csv(report: Report) -> str:
    """One row for each problem measured in both regimes: the winner of each, and what it costs in the other regime."""
    accum = _accum_column(report)
    first = ["arch", "device", "problem_id"]
    last = [
        *accum,
        "programs",
        "burst_winner",
        "sustained_winner",
        "same",
        "burst_loss_percent",
        "burst_loss_distinct",
        "sustained_loss_percent",
        "sustained_loss_distinct",
    ]
    fields = _columns(_fields(one.problem for one in report.regimes), "problem", (*first, *last))
    return _csv(
        [*first, *fields.values(), *last],
        [
            {
                "arch": report.arch,
                "device": one.device_name,
                "problem_id": one.problem.id,
                **_values(one.problem, fields),
                **dict.fromkeys(accum, one.accum_mode),
                "programs": one.programs,
                "burst_winner": one.burst_winner.id,
                "sustained_winner": one.sustained_winner.id,
                "same": one.same,
                "burst_loss_percent": _percent(one.burst_loss),
                "burst_loss_distinct": one.burst_loss_distinct,
                "sustained_loss_percent": _percent(one.sustained_loss),
                "sustained_loss_distinct": one.sustained_loss_distinct,
            }
            for one in report.regimes
        ],
    )


def knobs_csv(report: Report) -> str:
    """One row for each problem, knob and value: time with the value over time with the best schedule's value, from matched
    pairs; the ratio is empty where too few pairs were timed.
    """
    rows: list[dict[str, Any]] = []
    accum = _accum_column(report)
    for one in report.problems:
        prefix = "modelled_" if one.provenance == MODELLED else ""
        rows += [
            {
                "arch": report.arch,
                "device": one.device_name,
                "provenance": one.provenance,
                "problem": str(one.problem),
                "problem_id": one.problem.id,
                **dict.fromkeys(accum, one.accum_mode),
                "knob": each.knob,
                "value": each.value,
                "against": each.against,
                f"{prefix}ratio": _number(each.ratio),
                "modelled_least" if prefix else "ci_low": _number(each.ci_low),
                "modelled_most" if prefix else "ci_high": _number(each.ci_high),
                "pairs": each.pairs,
            }
            for each in value_effects(one)
        ]
    identity = ("arch", "device", "provenance", "problem", "problem_id", *accum, "knob", "value", "against")
    ratios = ("ratio", "ci_low", "ci_high", "pairs", "modelled_ratio", "modelled_least", "modelled_most")
    return _csv((*identity, *ratios), rows)


def rules_csv(report: Report) -> str:
    """One row for each part of each rule: for which problems which values of a knob are good, and how often the rule is right for
    problems left out.
    """
    rows = [
        {
            "arch": report.arch,
            "provenance": section.provenance,
            "knob": " x ".join(rule.knob),
            "where": condition.replace("`", ""),
            "values": " or ".join(values),
            "problems": number,
            "rule_problems": rule.problems,
            "right": rule.right,
            "constant_right": rule.constant_right,
            "saved_percent": _percent(rule.saved),
        }
        for section in (report.measured, report.modelled)
        for rule in rules_of(section.problems, report.tile)
        for condition, values, number in rule.parts
    ]
    return _csv(list(rows[0]) if rows else (), rows)


def winners_csv(report: Report) -> str:
    """The best schedules of the problems that the report explores, as `tiledsched tune --candidates` takes them: a column for
    each knob, a row for each schedule.
    """
    problems = explored(report.measured.problems) or explored(report.modelled.problems)
    rows = [dict(schedule) for schedule in dict.fromkeys(one.best.schedule for one in problems)]
    return _csv(list(dict.fromkeys(knob for row in rows for knob in row)), rows)


def _fields(problems: Iterable[Problem]) -> list[str]:
    """The fields of the problems. Fields added later are left out where every problem has their default."""
    return list(dict.fromkeys(name for one in problems for name in one.to_json() if name != "kernel"))


def _columns(names: Iterable[str], what: str, taken: Sequence[str]) -> dict[str, str]:
    """Name -> title of its column, which starts with `what` where another column has the name."""
    return {name: f"{what}_{name}" if name in taken else name for name in names}


def _values(problem: Problem, columns: Mapping[str, str]) -> dict[str, Any]:
    return {column: problem.values[name] for name, column in columns.items()}


def _accum_column(report: Report) -> list[str]:
    """A column of accumulators, only where the kernel can trade accuracy for speed."""
    known = (*(one.best.schedule for one in report.problems), *(entry.schedule for entry in report.unmeasured))
    return ["accum_mode"] if any("accum_mode" in schedule for schedule in known) else []


def _drops(one: ProblemReport) -> dict[str, Any]:
    """What other tiles cost than the best."""
    prefix = "modelled_" if one.provenance == MODELLED else ""
    return {
        "provenance": one.provenance,
        f"{prefix}drop_percent": _percent(one.tile_drop),
        f"{prefix}worst_drop_percent": _percent(one.worst_tile.relative - 1 if one.worst_tile else None),
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share * 100:.3f}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"


def _csv(head: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    # As in the JSON of schedules and problems: true and false, not Python's True and False.
    return csv_text(({column: _text(value) for column, value in row.items()} for row in rows), head)


def _text(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else value
