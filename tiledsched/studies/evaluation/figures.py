"""The figures of the evaluation, as Vega-Lite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tiledsched.report.vega import BLUE, GREEN, ORANGE, RED, Spec, chart, quantity, titled, word
from tiledsched.studies.evaluation.rows import BASELINE, EXPLICIT, FORCED, LENGTHS, OURS, ResultRow

WIDTH, HEIGHT = 165, 140
"""Of a panel, so that four of them and their axes stand in one line of the page."""
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
        for row in sorted(rows, key=lambda row: (row.causal, row.D))
        if row.median_ms and row.dtype in dtypes and (not methods or row.method in methods)
    ]


def _tips() -> list[Spec]:
    return [{"field": field} for field in ("method", "dtype", "panel", "S", "tflops", "gbps")]


def _length() -> Spec:
    return quantity("S", "sequence length S", scale={"type": "log", "base": 2}, axis={"values": list(LENGTHS)})


def throughput(rows: Sequence[ResultRow]) -> Spec:
    """Figure 3: tokens per second over S, for our kernel and torch's SDPA in both element types; whiskers reach to the
    95th percentile.
    """
    values = _values(rows, (OURS, BASELINE), ("float16", "bfloat16"))
    colour = word("method", None, scale=COLOURS, legend=_legend(OURS, BASELINE))
    layers = [
        {
            "mark": {"type": "rule", "opacity": 0.6},
            "encoding": {"x": _length(), "y": quantity("p95", ""), "y2": {"field": "tokens"}, "color": colour},
        },
        {
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": _length(),
                "y": quantity("tokens", "tokens/s", axis={"format": "~s"}),
                "color": colour,
                "strokeDash": word("dtype", None, legend={"orient": "bottom"}),
                "tooltip": _tips(),
            },
        },
    ]
    return _panels(values, {"layer": layers, "width": WIDTH, "height": HEIGHT})


def regime_map(rows: Sequence[ResultRow]) -> Spec:
    """Figure 4: torch's time over ours, by S and D."""
    base = {row.cell: row.median_ms for row in rows if row.method == BASELINE and row.median_ms}
    values = [
        {
            "S": row.S,
            "D": row.D,
            "ratio": round(base[row.cell] / row.median_ms, 3),
            "said": f"{base[row.cell] / row.median_ms:.2f}",
            "panel": f"{row.dtype}, {'causal' if row.causal else 'full'}",
        }
        for row in rows
        if row.method == OURS and row.median_ms and row.cell in base
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
            "facet": word("panel", None),
            "columns": 4,
            "spec": {"layer": layers, "width": {"step": 40}, "height": {"step": 24}},
        },
    )


def bandwidth(rows: Sequence[ResultRow]) -> Spec:
    """Figure 5: the bandwidth proxy over S, for our kernel and torch's SDPA."""
    line = {
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": _length(),
            "y": quantity("gbps", "bandwidth proxy, GB/s"),
            "color": word("method", None, scale=COLOURS, legend=_legend(OURS, BASELINE)),
            "tooltip": _tips(),
        },
        "width": WIDTH,
        "height": HEIGHT,
    }
    return _panels(_values(rows, (OURS, BASELINE)), line)


def bars(rows: Sequence[ResultRow], methods: Sequence[str]) -> Spec:
    """Figures 6 and 7: TFLOP/s by S, with a bar for each method."""
    bar = {
        "mark": "bar",
        "encoding": {
            "x": {"field": "S", "type": "ordinal", "title": "sequence length S", "axis": {"labelAngle": 0}},
            "xOffset": {"field": "method", "sort": list(methods)},
            "y": quantity("tflops", "TFLOP/s"),
            "color": word("method", None, scale=COLOURS, legend=_legend(*methods)),
            "tooltip": _tips(),
        },
        "width": WIDTH,
        "height": HEIGHT,
    }
    return _panels(_values(rows, methods), bar)


def _legend(*methods: str) -> Spec:
    return {"values": list(methods), "orient": "bottom"}


def _panels(values: list[dict[str, Any]], spec: Spec) -> Spec:
    """A panel for each head dimension, without a mask and then with the causal one; fewer to a line on a narrow page."""
    order = list(dict.fromkeys(value["panel"] for value in values))
    columns = len({panel.split(",")[0] for panel in order}) or 1
    return chart(
        values,
        {"facet": word("panel", None), "columns": columns, "spec": spec, "resolve": {"scale": {"y": "independent"}}},
    )


def of_results(rows: Sequence[ResultRow], about: str) -> dict[str, tuple[str, str, Spec]]:
    """File name -> heading, text and figure, for the figures that have something to draw. `about` stands in each picture and
    says where its times were measured.
    """
    wanted = {
        "figure3_throughput_vs_s": (
            "Figure 3: throughput",
            "Tokens per second over the sequence length, a token being one query of one head: float16 is solid, bfloat16 "
            "dashed. Higher is faster. A bar below a point reaches down to the rate of the slowest twentieth of the samples.",
            throughput(rows),
        ),
        "figure4_regime_map": (
            "Figure 4: where we are faster than torch",
            "The time of torch's SDPA, which chooses its backend itself, divided by ours: 1.20 means that torch takes 20% "
            "longer, and below 1 torch is faster.",
            regime_map(rows),
        ),
        "figure5_bw_proxy": (
            "Figure 5: bandwidth proxy",
            "The size of queries, keys, values and outputs, divided by the time. The nearer that is to what the GPU's memory "
            "can move, the more a problem is limited by memory. The bytes that were really moved were not measured.",
            bandwidth(rows),
        ),
        "figure6_flash_style": (
            "Figure 6: rates",
            "Rates of our kernel, of torch's SDPA and of a flash attention written in Triton, float16. Higher is faster.",
            bars(rows, (OURS, BASELINE, "triton")),
        ),
        "figure6_explicit_baselines": (
            "Figure 6: attention in separate operations",
            "Rates of our kernel, of torch's math backend and of attention written in torch operators; float16.",
            bars(rows, (OURS, *EXPLICIT)),
        ),
        "figure7_forced_backends": (
            "Figure 7: each backend of torch",
            "Rates of our kernel and of each backend of torch's SDPA where torch is made to use it, float16. Higher is faster.",
            bars(rows, (OURS, *FORCED)),
        ),
    }
    return {
        name: (heading, text, titled(spec, heading, about))
        for name, (heading, text, spec) in wanted.items()
        if spec["data"]["values"]
    }
