"""The figures of the evaluation, as Vega-Lite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tiledsched.report.vega import BINARY, BLUE, GREEN, ORANGE, RED, SIZES, Spec, chart, quantity, word
from tiledsched.studies.evaluation.rows import (
    BASELINE,
    DTYPES,
    EXPLICIT,
    FORCED,
    HEAD_DIMS,
    OURS,
    ResultRow,
    times_by_cell,
)

PANELS = [f"D={head_dim}, {mask}" for mask in ("full", "causal") for head_dim in HEAD_DIMS]
COLOURS = {
    "domain": [OURS, BASELINE, *EXPLICIT, *FORCED, "triton"],
    "range": [RED, BLUE, "#999999", "#CC79A7", GREEN, ORANGE, "#56B4E9", "#F0E442"],
}


def _values(
    rows: Sequence[ResultRow], methods: Collection[str] = (), dtypes: Collection[str] = ("float16",)
) -> list[dict[str, Any]]:
    return [
        {
            "method": row.method,
            "S": row.S,
            "panel": f"D={row.D}, {'causal' if row.causal else 'full'}",
            "dtype": row.dtype,
            "tokens": row.throughput_tokens_per_s,
            "p95": row.B * row.H * row.S / (row.p95_ms / 1e3) if row.p95_ms else None,
            "tflops": round(row.tflops_per_s, 2) if row.tflops_per_s else None,
            "gbps": round(row.approx_bw_gbps, 1) if row.approx_bw_gbps else None,
            "status": row.status,
        }
        for row in rows
        if row.median_ms and row.dtype in dtypes and (not methods or row.method in methods)
    ]


def _tips() -> list[Spec]:
    return [{"field": field} for field in ("method", "dtype", "panel", "S", "tflops", "gbps")]


def _length(rows: Sequence[ResultRow]) -> Spec:
    axis = {"labelExpr": SIZES["labelExpr"], "values": sorted({row.S for row in rows})}
    return quantity("S", "sequence length S", scale=BINARY, axis=axis)


def _colour(methods: Sequence[str]) -> Spec:
    return word("method", None, scale=COLOURS, legend={"values": list(methods), "orient": "bottom"})


def throughput(rows: Sequence[ResultRow]) -> Spec:
    """Figure 3: tokens per second over S, for our kernel and torch's SDPA in both element types; whiskers reach to the
    95th percentile.
    """
    values = _values(rows, (OURS, BASELINE), ("float16", "bfloat16"))
    colour = _colour((OURS, BASELINE))
    dash = word("dtype", None, scale={"domain": list(DTYPES), "range": [[1, 0], [4, 3]]}, legend=None)
    layers = [
        {
            "mark": {"type": "rule", "opacity": 0.6},
            "encoding": {"x": _length(rows), "y": quantity("p95", ""), "y2": {"field": "tokens"}, "color": colour},
        },
        {
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": _length(rows),
                "y": quantity("tokens", "tokens/s", axis={"format": "~s"}),
                "color": colour,
                "strokeDash": dash,
                "tooltip": _tips(),
            },
        },
    ]
    return _panels(values, {"layer": layers, "width": 200, "height": 150})


def regime_map(rows: Sequence[ResultRow]) -> Spec:
    """Figure 4: torch's time over ours, by S and D."""
    values = [
        {
            "S": length,
            "D": head_dim,
            "ratio": round(times[BASELINE] / times[OURS], 3),
            "said": f"{times[BASELINE] / times[OURS]:.2f}",
            "panel": f"{dtype}, {'causal' if causal else 'full'}",
        }
        for (dtype, causal, length, head_dim), times in times_by_cell(rows).items()
        if {OURS, BASELINE} <= times.keys()
    ]
    place = {
        "x": {"field": "D", "type": "ordinal", "title": "head dimension D", "axis": {"labelAngle": 0}},
        "y": {"field": "S", "type": "ordinal", "title": "sequence length S"},
    }
    tip = [{"field": "S"}, {"field": "D"}, {"field": "said", "title": "times as fast as torch's SDPA"}]
    colour = quantity(
        "ratio",
        "torch's time / ours",
        scale={"scheme": "redblue", "domain": [0.5, 2], "domainMid": 1, "type": "log", "clamp": True},
    )
    layers = [
        {"mark": "rect", "encoding": {**place, "color": colour, "tooltip": tip}},
        {
            "mark": {"type": "text", "fontSize": 10},
            "encoding": {**place, "text": {"field": "said"}, "color": {"value": "black"}},
        },
    ]
    return chart(
        values,
        {
            "facet": word("panel", None) | {"sort": [f"{d}, {m}" for d in DTYPES for m in ("full", "causal")]},
            "columns": 4,
            "panelColumns": len({value["D"] for value in values}),
            "spec": {"layer": layers, "width": {"step": 40}, "height": {"step": 24}},
        },
    )


def bandwidth(rows: Sequence[ResultRow]) -> Spec:
    """Figure 5: the bandwidth proxy over S, for our kernel and torch's SDPA."""
    line = {
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": _length(rows),
            "y": quantity("gbps", "bandwidth proxy, GB/s"),
            "color": _colour((OURS, BASELINE)),
            "tooltip": _tips(),
        },
        "width": 200,
        "height": 150,
    }
    return _panels(_values(rows, (OURS, BASELINE)), line)


def bars(rows: Sequence[ResultRow], methods: Sequence[str]) -> Spec:
    """Figures 6 and 7: TFLOP/s by S, with a bar for each method."""
    bar = {
        "mark": "bar",
        "encoding": {
            "x": {
                "field": "S",
                "type": "ordinal",
                "title": "sequence length S",
                "axis": {"labelAngle": 0, "labelExpr": SIZES["labelExpr"]},
            },
            "xOffset": {"field": "method", "sort": list(methods)},
            "y": quantity("tflops", "TFLOP/s"),
            "color": _colour(methods),
            "tooltip": _tips(),
        },
        "width": 200,
        "height": 150,
    }
    return _panels(_values(rows, methods), bar)


def _panels(values: list[dict[str, Any]], spec: Spec) -> Spec:
    """A panel for each mask and head dimension; side by side as far as there is room."""
    facet = {"facet": word("panel", None) | {"sort": PANELS}, "columns": len(HEAD_DIMS), "spec": spec}
    return chart(values, {**facet, "resolve": {"scale": {"y": "independent"}}})


def of_results(rows: Sequence[ResultRow]) -> dict[str, tuple[str, str, Spec]]:
    """File name -> heading, text and figure, for the figures that have something to draw: bars of at least two methods."""
    wanted = {
        "figure3_throughput_vs_s": (
            "Figure 3: throughput",
            "Rows of queries per second: float16 solid, bfloat16 dashed. The vertical line reaches down to the rate at the 95th "
            "percentile of the time: one call in twenty is slower.",
            throughput(rows),
        ),
        "figure4_regime_map": (
            "Figure 4: how many times as fast as torch",
            "The time of torch's SDPA, which chooses its backend itself, over ours: blue where ours is faster, red where it is "
            "slower.",
            regime_map(rows),
        ),
        "figure5_bw_proxy": (
            "Figure 5: bandwidth proxy",
            "The bytes of queries, keys, values and outputs, each counted once, over the time. It says how far a problem is "
            "from being limited by memory, not what was moved.",
            bandwidth(rows),
        ),
        "figure6_flash_style": (
            "Figure 6: beside a Triton kernel",
            "TFLOP/s of ours, of torch's SDPA and of a flash-attention forward in Triton, float16.",
            bars(rows, (OURS, BASELINE, "triton")),
        ),
        "figure6_explicit_baselines": (
            "Figure 6: beside attention written out",
            "TFLOP/s of ours, of torch's math backend and of attention written in torch operators, float16. The last two "
            "store the whole matrix of scores.",
            bars(rows, (OURS, *EXPLICIT)),
        ),
        "figure7_forced_backends": (
            "Figure 7: beside each backend of torch",
            "TFLOP/s of ours and of each backend of torch's SDPA, forced, float16.",
            bars(rows, (OURS, *FORCED)),
        ),
    }
    drawn = {name: {value.get("method") for value in spec["data"]["values"]} for name, (_, _, spec) in wanted.items()}
    return {name: found for name, found in wanted.items() if len(drawn[name]) > (found[2]["spec"].get("mark") == "bar")}
