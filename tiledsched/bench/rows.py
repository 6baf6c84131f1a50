"""The rows a bench writes: one for each method and cell, a cell being one problem in one regime."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiledsched.core.canonical import canonical_json
from tiledsched.core.errors import ConfigError, ProblemError
from tiledsched.core.files import write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named, problem_from_json
from tiledsched.measure.runner import Conditions

OK = "ok"
"""Status of a row that has a time."""
SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim")
"""Columns of attention's files from before there were other kernels; empty where a problem has no such value."""
Cell = tuple[str, Problem]
"""(regime, problem)."""


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One method on one problem in one regime."""

    problem: Problem
    """What was computed."""
    method: str
    """See `tiledsched.bench.methods`."""
    regime: str
    """burst or sustained."""
    status: str
    """ok, or why there is no time."""
    median_us: float | None = None
    """Median of the samples."""
    ci_low_us: float | None = None
    """Lower end of its 95% confidence interval."""
    ci_high_us: float | None = None
    """Upper end."""
    flops: float | None = None
    """Floating-point operations of one call where they are not the problem's: the matmul's."""
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
    schedule: str = ""
    """What our own method launched."""
    provenance: str = ""
    """Where that schedule came from."""
    measured_program: bool | None = None
    """Whether the launched machine code is the measured artifact's; None where not checked."""
    device: str = ""
    """GPU."""
    versions: str = ""
    """Driver and libraries."""
    p95_us: float | None = None
    """95th percentile of the samples."""
    compiler: str = ""
    """Version of the compiler that made our own machine code; empty where that was not asked."""

    @property
    def cell(self) -> Cell:
        """What it shares with the rows it was interleaved with."""
        return self.regime, self.problem

    @property
    def tflops(self) -> float | None:
        """Rate in TFLOP/s; None where there is no time."""
        if not self.median_us:
            return None
        return (self.flops or self.problem.flops) / self.median_us / 1e6

    @property
    def gbps(self) -> float | None:
        """Least traffic over time, GB/s; None where there is no time, and of the matmul."""
        return self.problem.gbps(self.median_us) if self.median_us and not self.flops else None

    def to_csv(self) -> dict[str, Any]:
        """A flat row; :meth:`from_csv` inverts it, up to the digits kept."""
        p = self.problem.values
        return {
            "regime": self.regime,
            "method": self.method,
            "dtype": p.get("dtype", ""),
            "causal": p.get("causal", ""),
            **{name: p.get(name, "") for name in SIZES},
            "median_us": _rounded(self.median_us, 3),
            "ci_low_us": _rounded(self.ci_low_us, 3),
            "ci_high_us": _rounded(self.ci_high_us, 3),
            "tflops": _rounded(self.tflops, 2),
            "max_abs_err": _digits(self.max_abs_err),
            "sm_clock_mhz": self.conditions.sm_clock_mhz,
            "status": self.status,
            "rel_err": _digits(self.rel_err),
            "compared": self.compared,
            "samples": self.samples,
            "ceiling_ratio": _rounded(self.ceiling_ratio, 4),
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
            "gbps": _rounded(self.gbps, 1),
            "compiler": self.compiler,
            "p95_us": _rounded(self.p95_us, 3),
        }

    def to_json(self) -> dict[str, Any]:
        """The same, for `--json`."""
        return self.to_csv()

    @classmethod
    def from_csv(cls, cells: Mapping[str, str | None]) -> BenchRow:
        """The row `to_csv` wrote, in this version or an earlier one, which had fewer columns.

        Raises:
            KeyError, ValueError: a cell that every version writes is missing, or is no number where one is needed.
        """
        texts = {name: value or "" for name, value in cells.items()}
        stored = texts.get("problem")
        problem = problem_from_json(json.loads(stored)) if stored else _former_problem(texts)
        median_us, tflops = _number(texts["median_us"]), _number(texts["tflops"])
        flops = tflops * median_us * 1e6 if texts["method"] == "matmul" and tflops and median_us else None
        conditions = Conditions(
            sm_clock_mhz=int(texts["sm_clock_mhz"] or 0),
            power_w=float(texts.get("power_w") or 0),
            temperature_c=int(texts.get("temperature_c") or 0),
            throttle_reasons=tuple(name for name in texts.get("throttle", "").split("+") if name),
            graph_launches=int(texts.get("graph_launches") or 0),
        )
        return cls(
            problem=problem,
            method=texts["method"],
            regime=texts["regime"],
            status=texts["status"],
            median_us=median_us,
            ci_low_us=_number(texts["ci_low_us"]),
            ci_high_us=_number(texts["ci_high_us"]),
            flops=flops,
            max_abs_err=_number(texts["max_abs_err"]),
            rel_err=_number(texts.get("rel_err", "")),
            compared=texts.get("compared", ""),
            samples=int(texts["samples"]) if texts.get("samples") else None,
            ceiling_ratio=_number(texts.get("ceiling_ratio", "")),
            conditions=conditions,
            schedule=texts.get("schedule", ""),
            provenance=texts.get("provenance", ""),
            measured_program={"True": True, "False": False}.get(texts.get("measured_program", "")),
            device=texts.get("device", ""),
            versions=texts.get("versions", ""),
            compiler=texts.get("compiler", ""),
            p95_us=_number(texts.get("p95_us", "")),
        )


def _former_problem(texts: Mapping[str, str]) -> Problem:
    """That of a row from before there were other kernels than attention."""
    sizes: dict[str, Any] = {name: int(texts[name]) for name in SIZES}
    if texts["causal"] not in ("True", "False"):
        raise ValueError(f"causal is {texts['causal']!r}, not True or False")
    return kernel_named("attention").problem(
        **sizes,
        dtype=texts["dtype"],
        causal=texts["causal"] == "True",
        alignment=texts.get("alignment") or "top_left",
        value_dim=int(texts.get("value_dim") or 0),
    )


def _rounded(value: float | None, places: int) -> float | None:
    return None if value is None else round(value, places)


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _number(text: str) -> float | None:
    return float(text) if text else None


COLUMNS = list(BenchRow(problem=Problem("", {}), method="", regime="", status="").to_csv())
"""Of the CSV file, in order."""


def append_rows(rows: Sequence[BenchRow], path: Path) -> None:
    """Add the rows of a cell to the end of a CSV file, all at once; the file is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
    if not path.exists() or path.stat().st_size == 0:
        writer.writeheader()
    writer.writerows(row.to_csv() for row in rows)
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(text.getvalue())


def read_rows(path: Path) -> list[BenchRow]:
    """Every row of a bench's CSV file; of rows of one method, compiler and cell, the last. A line torn by a kill is left out.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); pass a file that bench --csv wrote") from error
    whole = text[: text.rfind("\n") + 1]
    found: dict[tuple[Cell, str, str], BenchRow] = {}
    try:
        for cells in csv.DictReader(io.StringIO(whole, newline="")):
            row = BenchRow.from_csv(cells)
            found.pop((row.cell, row.method, row.compiler), None)
            found[row.cell, row.method, row.compiler] = row
    except (KeyError, TypeError, ValueError, ProblemError) as error:
        raise ConfigError(f"{path} is not a bench: {error}; pass a file that bench --csv wrote") from error
    return list(found.values())


def finished_cells(path: Path, methods: Sequence[str]) -> set[Cell]:
    """Cells of which the file already has a row of each of `methods`; and the file is made fit to append to.

    Raises:
        ConfigError: the file is no bench of this version.
    """
    if not path.exists() or path.stat().st_size == 0:
        return set()
    rows = read_rows(path)
    text = path.read_text(encoding="utf-8")
    if text.partition("\n")[0].strip().split(",") != COLUMNS:
        raise ConfigError(f"{path} has the columns of another version; choose another file")
    if not text.endswith("\n"):
        write_whole(path, text[: text.rfind("\n") + 1])
    done: dict[Cell, set[str]] = {}
    for row in rows:
        done.setdefault(row.cell, set()).add(row.method)
    return {cell for cell, found in done.items() if set(methods) <= found}
