"""The charts of rates: over the problem's size, under the ceilings, and for several archs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tiledsched.core.problem import unit_of
from tiledsched.report.ceilings import roof_of
from tiledsched.report.records import MEASURED, Report, Section
from tiledsched.report.vega import BINARY, BLUE, GREEN, ORANGE, RED, SIZES, Spec, chart, quantity, tips, word

SEVERAL = 3
"""Where any group has at least this many problems, only groups with as many get a panel of rates."""


def rates(section: Section, report: Report) -> Spec | None:
    """The best rate of every problem over the swept size, with a panel for each group."""
    problems = [one for one in section.problems if one.best.rate]
    if not problems:
        return None
    unit = unit_of(problems[0].problem)
    rows = [
        {
            "group": report.group_text(one),
            "size": one.size,
            "rate": round(one.best.rate, 1),
            "problem": str(one.problem),
            "us": round(one.best.us, 2),
            "schedule": one.best.schedule.short(),
        }
        for one in problems
        if unit_of(one.problem) == unit
    ]
    sizes = Counter(row["group"] for row in rows)
    rows = [row for row in rows if sizes[row["group"]] >= min(SEVERAL, max(sizes.values()))]
    dots = {
        "mark": {"type": "circle", "size": 45, "color": BLUE, "opacity": 0.7},
        "width": 190,
        "height": 110,
        "encoding": {
            "x": quantity("size", report.axes.swept_title, scale=BINARY, axis=SIZES),
            "y": quantity("rate", unit, axis={"tickCount": 4}),
            "tooltip": tips(problem="problem", rate=unit, us="us", schedule="schedule"),
        },
    }
    return chart(rows, {"facet": word("group", None), "columns": 4, "spec": dots})


def roofline(section: Section, report: Report) -> Spec | None:
    """Rates over arithmetic intensity, under the highest rates that were measured and those computed for the arch."""
    from tiledsched.core.device import ARCHS, arch_spec

    problems = [
        one for one in section.problems if one.best.rate and unit_of(one.problem) == "TFLOP/s" and one.problem.min_bytes
    ]
    if report.arch not in ARCHS or not problems:
        return None
    first, *others = {one.device_name for one in problems}
    spec = arch_spec(report.arch, "" if others else first)
    clocks = [condition.sm_clock_mhz[1] for condition in report.conditions if condition.sm_clock_mhz]
    ghz = max(clocks) / 1e3 if clocks and section.provenance == MEASURED else spec.clock_ghz
    peak = spec.tensor_flops * spec.sm_count * ghz / 1e3
    computed = f"computed: {spec.sm_count} SMs x {spec.tensor_flops} FLOP x {ghz:.2f} GHz; {spec.dram_gbps:.0f} GB/s"
    roofs = {computed: (peak, spec.dram_gbps)}
    peaks = dict.fromkeys({one.device_name for one in problems}, peak)
    for name in sorted(peaks):
        found = roof_of(report.ceilings, name) if section.provenance == MEASURED else None
        if found:
            peaks[name] = found[0].rate
            roofs[f"measured: {found[0]}; {found[1]}"] = (found[0].rate, found[1].rate)
    rows = [
        {
            "intensity": one.problem.flops / one.problem.min_bytes,
            "rate": round(one.best.rate, 1),
            "problem": str(one.problem),
            "share": f"{one.best.rate / peaks[one.device_name] * 100:.0f}%",
            "schedule": one.best.schedule.short(),
        }
        for one in problems
    ]
    intensities = [one.problem.flops / one.problem.min_bytes for one in problems]
    low, high = min(intensities) / 2, max(intensities) * 2
    lines = [
        {"intensity": at, "rate": min(flops, at * gbps / 1e3), "said": said, "ceiling": said.partition(":")[0]}
        for said, (flops, gbps) in roofs.items()
        for at in sorted({low, high, min(max(flops * 1e3 / gbps, low), high)})
    ]
    dashes = {"measured": [1, 0], "computed": [4, 4]}
    kinds = [kind for kind in dashes if any(row["ceiling"] == kind for row in lines)]
    line = {
        "data": {"values": lines},
        "mark": {"type": "line", "color": RED, "strokeWidth": 2},
        "encoding": {
            "x": quantity(
                "intensity",
                "FLOP per byte, each input read and each output written once",
                scale={"type": "log", "nice": False},
            ),
            "y": quantity("rate", "TFLOP/s", scale={"type": "log"}),
            "detail": {"field": "said", "type": "nominal"},
            "strokeDash": word(
                "ceiling", "ceiling", scale={"domain": kinds, "range": [dashes[kind] for kind in kinds]}
            ),
            "tooltip": tips(said="ceiling"),
        },
    }
    dots = {
        "mark": {"type": "circle", "size": 50, "opacity": 0.6, "color": BLUE},
        "encoding": {
            "x": {"field": "intensity", "type": "quantitative"},
            "y": {"field": "rate", "type": "quantitative"},
            "tooltip": tips(
                problem="problem", rate=f"{section.provenance} TFLOP/s", share="of the ceiling", schedule="schedule"
            ),
        },
    }
    return chart(rows, {"layer": [line, dots]}, width=820, height=300)


def said_of_roofs(section: Section, report: Report) -> str:
    """The text above the roofline."""
    devices = sorted({one.device_name for one in section.problems})
    found = [roof for name in devices if section.provenance == MEASURED and (roof := roof_of(report.ceilings, name))]
    computed = "computed from the rates per clock of the arch's usual GPU"
    if not found:
        return f"Best rates under ceilings {computed}, not measured. `tiledsched tune matmul` and `tune softmax` measure them."
    said = "; ".join(f"{flops}; {gbps}" for flops, gbps in found)
    return f"Best rates under the highest that any kernel was measured at: {said}. Dashed: {computed} at the highest clock seen."


def rates_of(reports: Sequence[Report]) -> Spec | None:
    """The best rates of several archs over the swept size, with a panel for each group of problems."""
    rows: list[dict[str, Any]] = []
    for report in reports:
        for section in (report.measured, report.modelled):
            for one in section.problems:
                if one.best.rate and one.accum_mode == "fp32":
                    group = report.axes.describe_shared(one.problem) or report.kernel
                    rows.append(
                        {
                            "group": group,
                            "arch": f"{report.arch} {section.provenance}",
                            "size": one.size,
                            "rate": round(one.best.rate, 1),
                            "problem": str(one.problem),
                            "schedule": one.best.schedule.short(),
                        }
                    )
    archs: dict[str, set[str]] = {}
    for row in rows:
        archs.setdefault(row["group"], set()).add(row["arch"])
    rows = [row for row in rows if len(archs[row["group"]]) > 1]
    if not rows:
        return None
    axes = reports[0].axes
    dots = {
        "mark": {"type": "point", "filled": True, "opacity": 0.75},
        "width": 220,
        "height": 150,
        "encoding": {
            "x": quantity("size", axes.swept_title, scale=BINARY, axis=SIZES),
            "y": quantity("rate", "rate", scale={"type": "log"}),
            "color": word("arch", None, scale={"range": [BLUE, ORANGE, GREEN, RED]}),
            "shape": word("arch", None),
            "tooltip": tips(problem="problem", arch="arch", rate="rate", schedule="schedule"),
        },
    }
    return chart(rows, {"facet": word("group", None), "columns": 3, "spec": dots})
