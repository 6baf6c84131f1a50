"""The report's CSV files. Measured and modelled figures have columns of their own, so they cannot be mixed up."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from tiledsched.report.analysis import seq_regime
from tiledsched.report.records import MEASURED, MODELLED, ProblemReport, Report, Section, Tile

PROBLEM_COLUMNS = ("seq_q", "seq_k", "head_dim", "dtype", "causal", "batch", "heads", "kv_heads")
MEASURED_COLUMNS = ("median_us", "ci_low_us", "ci_high_us", "samples", "tflops", "relative")
MODELLED_COLUMNS = ("modelled_us", "modelled_tflops", "modelled_relative")
FACT_COLUMNS = ("registers", "threads", "shared_bytes", "spill_bytes", "code_bytes", "ctas_per_sm")


def schedules_csv(report: Report) -> str:
    """One row for every schedule with a time, by problem, fastest first.

    The knobs of all schedules are columns. A cell is empty where there is no value, so measured rows have no modelled
    figures and modelled rows no measured ones.
    """
    problems = [*report.measured.problems, *report.modelled.problems]
    knobs = list(dict.fromkeys(knob for one in problems for timed in one.timed for knob in timed.schedule))
    head = ["arch", "device", "regime", "provenance", "problem_id", *PROBLEM_COLUMNS, "schedule_id", *knobs,
            *MEASURED_COLUMNS, *MODELLED_COLUMNS, "same_program_as", "fingerprint", *FACT_COLUMNS]  # fmt: skip
    rows = []
    for one in problems:
        problem = one.problem.to_json()
        measured = one.provenance == MEASURED
        shared = {"arch": report.arch, "device": one.device_name, "regime": report.regime if measured else "",
                  "provenance": one.provenance, "problem_id": one.problem.id,
                  **{name: problem[name] for name in PROBLEM_COLUMNS}}  # fmt: skip
        for timed in one.timed:
            row: dict[str, Any] = {
                **shared,
                "schedule_id": timed.schedule.id,
                **timed.schedule,
                "same_program_as": timed.same_program_as.id if timed.same_program_as else "",
                "fingerprint": timed.fingerprint,
            }
            times = [_number(timed.us), _number(timed.tflops), _number(timed.relative)]
            if measured:
                row |= dict(zip(("median_us", "tflops", "relative"), times, strict=True))
                row |= {"ci_low_us": _number(timed.ci_low_us), "ci_high_us": _number(timed.ci_high_us),
                        "samples": timed.samples}  # fmt: skip
            else:
                row |= dict(zip(MODELLED_COLUMNS, times, strict=True))
            if timed.facts is not None:
                row |= {name: getattr(timed.facts, name) for name in FACT_COLUMNS}
            rows.append(row)
    return _csv(head, rows)


def sensitivity_csv(report: Report) -> str:
    """One row for every problem and one for every regime of sequence lengths: best tile, runner-up tile, drop."""
    head = ["arch", "device", "provenance", "scope", "head_dim", "dtype", "causal", "accum_mode", "seq_regime",
            "seq_lens", "problems", "problem_id", "best_tile", "runner_up_tile", "drop_percent", "worst_drop_percent",
            "modelled_drop_percent", "modelled_worst_drop_percent"]  # fmt: skip
    rows = []
    for section in (report.measured, report.modelled):
        for one in section.problems:
            if one.tiles:
                rows.append(_problem_row(one) | _drops(section, one.tile_drop, one.tiles[-1].relative - 1))
        for line in section.sensitivity:
            rows.append({
                "device": line.device_name, "scope": "regime", "head_dim": line.head_dim, "dtype": line.dtype,
                "causal": line.causal, "accum_mode": line.accum_mode, "seq_regime": line.regime,
                "seq_lens": " ".join(map(str, line.seq_lens)), "problems": line.problems,
                "best_tile": _tile(line.best), "runner_up_tile": _tile(line.runner_up),
            } | _drops(section, line.drop, line.spread))  # fmt: skip
    return _csv(head, [{"arch": report.arch, **row} for row in rows])


def regimes_csv(report: Report) -> str:
    """One row for every problem measured in both regimes: who wins in each, and what the other's winner loses there."""
    head = ["arch", "device", "problem_id", *PROBLEM_COLUMNS, "accum_mode", "programs", "burst_winner",
            "sustained_winner", "same", "burst_loss_percent", "burst_loss_distinct", "sustained_loss_percent",
            "sustained_loss_distinct"]  # fmt: skip
    rows = []
    for one in report.regimes:
        problem = one.problem.to_json()
        rows.append({
            "arch": report.arch, "device": one.device_name, "problem_id": one.problem.id,
            **{name: problem[name] for name in PROBLEM_COLUMNS}, "accum_mode": one.accum_mode,
            "programs": one.programs, "burst_winner": one.burst_winner.id, "sustained_winner": one.sustained_winner.id,
            "same": one.same, "burst_loss_percent": f"{one.burst_loss * 100:.3f}",
            "burst_loss_distinct": one.burst_loss_distinct,
            "sustained_loss_percent": f"{one.sustained_loss * 100:.3f}",
            "sustained_loss_distinct": one.sustained_loss_distinct,
        })  # fmt: skip
    return _csv(head, rows)


def importance_csv(report: Report) -> str:
    """One row for every knob: the share of the difference between good programs and all that it accounts for."""
    head = ["arch", "knob", "share_percent", "largest_share_percent", "problems"]
    return _csv(head, [{"arch": report.arch, "knob": one.knob, "share_percent": f"{one.share * 100:.3f}",
                        "largest_share_percent": f"{one.largest * 100:.3f}", "problems": one.problems}
                       for one in report.measured.shares])  # fmt: skip


def interactions_csv(report: Report) -> str:
    """One row for every change of a knob whose effect depends on the rest of the schedule."""
    head = ["arch", "knob", "before", "after", "circumstance", "change_with_percent", "pairs_with",
            "change_without_percent", "pairs_without"]  # fmt: skip
    return _csv(head, [{"arch": report.arch, "knob": one.knob, "before": one.before, "after": one.after,
                        "circumstance": one.circumstance, "change_with_percent": f"{one.effect_with * 100:.3f}",
                        "pairs_with": one.pairs_with, "change_without_percent": f"{one.effect_without * 100:.3f}",
                        "pairs_without": one.pairs_without} for one in report.measured.interactions])  # fmt: skip


def _problem_row(one: ProblemReport) -> dict[str, Any]:
    return {
        "device": one.device_name,
        "scope": "problem",
        "head_dim": one.problem.head_dim,
        "dtype": one.problem.dtype,
        "causal": one.problem.causal,
        "accum_mode": one.accum_mode,
        "seq_regime": seq_regime(one.seq_len),
        "seq_lens": one.seq_len,
        "problems": 1,
        "problem_id": one.problem.id,
        "best_tile": _tile(one.tiles[0].tile),
        "runner_up_tile": _tile(one.tiles[1].tile if len(one.tiles) > 1 else None),
    }


def _drops(section: Section, drop: float | None, worst: float) -> dict[str, Any]:
    prefix = "modelled_" if section.provenance == MODELLED else ""
    return {
        "provenance": section.provenance,
        f"{prefix}drop_percent": "" if drop is None else f"{drop * 100:.3f}",
        f"{prefix}worst_drop_percent": f"{worst * 100:.3f}",
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _tile(tile: Tile | None) -> str:
    return f"{tile[0]}x{tile[1]}" if tile else ""


def _csv(head: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, head, restval="", lineterminator="\n")
    writer.writeheader()
    # As in the JSON of schedules and problems: true and false, not Python's True and False.
    writer.writerows(
        {key: str(cell).lower() if isinstance(cell, bool) else cell for key, cell in row.items()} for row in rows
    )
    return file.getvalue()
