"""The rows that a bench writes: one for each method in each cell, where a cell is one problem in one regime."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tiledsched.core.canonical import canonical_json
from tiledsched.core.errors import ConfigError, ProblemError
from tiledsched.core.files import check_plain, csv_text, from_csv_cell, plain_text, read_bounded, write_whole
from tiledsched.core.groups import grouped
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Conditions

OK = "ok"
"""Status of a row that has a time."""
SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim")
"""Sizes of attention with a column of their own; empty for a problem that has no such field."""
WORDS = ("method", "regime", "status", "compared", "schedule", "provenance", "device", "versions", "compiler")
NUMBERS = ("max_abs_err", "rel_err", "ceiling_ratio", "p95_us")
"""Fields of a row whose columns hold a word, and those whose columns hold a number or nothing."""
TIMES = tuple(each.name for each in fields(Timing))
"""Columns of a time."""
Cell = tuple[str, Problem]
"""(regime, problem)."""


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """What the rows of studies have in common: a time, or why there is none."""

    problem: Problem
    """What was computed."""
    regime: str
    """burst or sustained."""
    status: str
    """ok, or why there is no time."""
    timing: Timing | None = None
    """The time of one call; None where there is none."""
    schedule: str = ""
    """What our own kernel launched, as people read it."""
    device: str = ""
    """Name of the GPU."""
    taken: str = ""
    """Day on which it was timed, in UTC, as YYYY-MM-DD; empty where it was not recorded."""


@dataclass(frozen=True, kw_only=True)
class BenchRow(StudyRow):
    """One method on one problem in one regime."""

    method: str
    """See `tiledsched.rivals.methods`."""
    flops: float | None = None
    """Floating-point operations of one call, for the matmul, whose operations are not the problem's; else None."""
    max_abs_err: float | None = None
    """Largest absolute difference from the float64 reference, over what was compared."""
    rel_err: float | None = None
    """Relative Frobenius error against float64, over what was compared."""
    compared: str = ""
    """What was compared: (batch, head) pairs of how many, such as 4/64, or all."""
    samples: int | None = None
    """How many samples the median is of."""
    ceiling_ratio: float | None = None
    """Its rate over that of the 8192^3 matmul of the same cell."""
    conditions: Conditions = field(default_factory=Conditions)
    """Clocks, power and throttling while this cell was timed, all methods together."""
    provenance: str = ""
    """Where the schedule of our own method came from."""
    measured_program: bool | None = None
    """Whether the launched machine code is the measured artifact's; None where not checked."""
    versions: str = ""
    """Driver and libraries."""
    p95_us: float | None = None
    """95th percentile of the samples."""
    compiler: str = ""
    """Version of the compiler that built our machine code; empty where it was not recorded."""
    output_errs: str = ""
    """The relative error of each output where a kernel has several, such as `dQ=0.0021 dK=0.0022`."""

    @property
    def cell(self) -> Cell:
        """Regime and problem, which it shares with the rows that it was interleaved with."""
        return self.regime, self.problem

    @property
    def median_us(self) -> float | None:
        """The median of the time; None for a row without time."""
        return self.timing.median_us if self.timing else None

    @property
    def tflops(self) -> float | None:
        """Rate in TFLOP/s; None for a row without time."""
        if not self.median_us:
            return None
        return (self.flops or self.problem.flops) / self.median_us / 1e6

    @property
    def gbps(self) -> float | None:
        """Least memory traffic over time, in GB/s; None for a row without time and for the matmul."""
        return self.problem.gbps(self.median_us) if self.median_us and not self.flops else None

    def to_csv(self) -> dict[str, Any]:
        """One cell for each of `COLUMNS`, also for `--json`; :meth:`from_csv` reads it back, up to rounding."""
        p = self.problem.values
        return {
            "regime": self.regime,
            "method": self.method,
            "dtype": p.get("dtype", ""),
            "causal": p.get("causal", ""),
            **{name: p.get(name, "") for name in SIZES},
            **timing_columns(self.timing, 3),
            "tflops": rounded(self.tflops, 2),
            "max_abs_err": _digits(self.max_abs_err),
            "sm_clock_mhz": self.conditions.sm_clock_mhz,
            "status": self.status,
            "rel_err": _digits(self.rel_err),
            "compared": self.compared,
            "samples": self.samples,
            "ceiling_ratio": rounded(self.ceiling_ratio, 4),
            "power_w": round(self.conditions.power_w),
            "temperature_c": self.conditions.temperature_c,
            "throttle": "+".join(self.conditions.throttle_reasons),
            "graph_launches": self.conditions.graph_launches,
            "alignment": p.get("alignment", ""),
            "value_dim": p.get("value_dim", ""),
            "provenance": self.provenance,
            "measured_program": self.measured_program,
            "schedule": self.schedule,
            "device": self.device,
            "versions": self.versions,
            "kernel": self.problem.kernel,
            "problem": canonical_json(self.problem.to_json()),
            "gbps": rounded(self.gbps, 1),
            "compiler": self.compiler,
            "p95_us": rounded(self.p95_us, 3),
            "taken": self.taken,
            "output_errs": self.output_errs,
        }

    @classmethod
    def from_csv(cls, cells: Mapping[str, str | None]) -> BenchRow:
        """The row that `to_csv` wrote.

        Raises:
            KeyError, ValueError: a cell is missing, or holds no number where one is needed.
        """
        texts = {name: value or "" for name, value in cells.items()}
        timing = None
        if texts["median_us"]:
            timing = Timing(**{name: float(texts[name]) for name in TIMES})
        own_flops = texts["method"] == "matmul" and timing is not None
        return cls(
            problem=problem_from_json(json.loads(texts["problem"])),
            timing=timing,
            flops=float(texts["tflops"]) * timing.median_us * 1e6 if own_flops and timing else None,
            samples=int(texts["samples"]) if texts["samples"] else None,
            taken=texts.get("taken", ""),
            output_errs=texts.get("output_errs", ""),
            measured_program={"True": True, "False": False}.get(texts["measured_program"]),
            conditions=Conditions(
                sm_clock_mhz=int(texts["sm_clock_mhz"]),
                power_w=float(texts["power_w"]),
                temperature_c=int(texts["temperature_c"]),
                throttle_reasons=tuple(name for name in texts["throttle"].split("+") if name),
                graph_launches=int(texts["graph_launches"]),
            ),
            **{name: texts[name] for name in WORDS},  # type: ignore[arg-type]
            **{name: _number(texts[name]) for name in NUMBERS},  # type: ignore[arg-type]
        )


def timing_columns(timing: Timing | None, places: int) -> dict[str, float | None]:
    """The columns of a time in microseconds, rounded to so many places; empty cells where there is none."""
    return {name: rounded(getattr(timing, name, None), places) for name in TIMES}


def rounded(value: float | None, places: int) -> float | None:
    """A number rounded to so many places; None as it is."""
    return None if value is None else round(value, places)


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _number(text: str) -> float | None:
    return float(text) if text else None


COLUMNS = list(BenchRow(problem=Problem("", {}), method="", regime="", status="").to_csv())
"""Columns of the CSV file, in order."""


def append_rows(rows: Sequence[BenchRow], path: Path) -> None:
    """Append the rows of a cell to a CSV file in one write; the file is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = not os.path.exists(path) or path.stat().st_size == 0
    text = csv_text([row.to_csv() for row in rows], COLUMNS, head=begins)
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(text)


def read_rows(path: Path) -> list[BenchRow]:
    """The rows of a bench's CSV file. Where several rows have the same method, compiler and cell, only the last counts.

    A last line without a line break was cut off when a run was killed, and is left out.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    found: dict[tuple[Cell, str, str], BenchRow] = {}
    try:
        data = check_plain(path, read_bounded(path))
        whole = plain_text(path, data[: data.rfind(b"\n") + 1])
        for cells in csv.DictReader(io.StringIO(whole, newline="")):
            row = BenchRow.from_csv({name: from_csv_cell(cell) for name, cell in cells.items()})
            found.pop((row.cell, row.method, row.compiler), None)
            found[row.cell, row.method, row.compiler] = row
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); pass a file that bench --csv wrote") from error
    except (KeyError, TypeError, ValueError, RecursionError, csv.Error, ProblemError) as error:
        raise ConfigError(f"{path} is not a bench: {error}; pass a file that bench --csv wrote") from error
    return list(found.values())


def finished_cells(path: Path, methods: Sequence[str]) -> set[Cell]:
    """Cells for which the file already has a row of each of `methods`.

    A last line that was cut off is removed from the file, so that rows can be appended.

    Raises:
        ConfigError: the file is not a bench, or has other columns.
    """
    if not os.path.exists(path) or path.stat().st_size == 0:
        return set()
    rows = read_rows(path)
    text = path.read_text(encoding="utf-8")
    if text.partition("\n")[0].strip().split(",") != COLUMNS:
        raise ConfigError(f"{path} has other columns than this version writes; choose another file")
    if not text.endswith("\n"):
        write_whole(path, text[: text.rfind("\n") + 1])
    done = grouped((row.cell, row.method) for row in rows)
    return {cell for cell, found in done.items() if set(methods) <= {*found}}
