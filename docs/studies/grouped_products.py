"""Grouped products beside `torch._grouped_mm`, with even, skewed and empty groups: calls in turn, behind a flush of the L2 cache.

    python -m docs.studies.grouped_products --rounds 15 --csv grouped.csv

Needs a GPU. Our kernel runs on the schedule that is served for the problem, also where torch's kernel would be served.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy

from docs.studies.flags import flag, parser_with
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.kernels.grouped_matmul.declaration import group_ends

FLUSHED_BYTES = 128 << 20


def cases(p: Problem) -> Iterator[tuple[str, Any]]:
    """How the rows are spread over the groups, in a word, and the end of each group."""
    yield "even", group_ends("even", p.tokens, p.experts)
    yield "skewed", kernel_named(p.kernel).inputs(numpy, numpy.random.default_rng(0), p)["Offsets"]
    yield "empty", group_ends("alternate", p.tokens, p.experts)


def rows_of(p: Problem, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each spread of the problem's rows over its groups."""
    import torch

    from tiledsched.measure.timing import TorchStopwatch, host_cost_us
    from tiledsched.ops.front import operator

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(getattr(torch, p.dtype))

    a, b = normal(p.tokens, p.k), normal(p.experts, p.n, p.k).transpose(1, 2)
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    ours, theirs = operator(p.kernel).own, kernel_named(p.kernel).rivals(p)["torch_grouped_mm"]
    for spread, ends in cases(p):
        offsets = torch.from_numpy(ends.copy()).cuda()
        calls = [lambda offsets=offsets: ours(a, b, offsets), lambda offsets=offsets: theirs(a, b, offsets)]
        got, wanted = (call().double() for call in calls)
        watch = TorchStopwatch(torch, calls, flush, host_us=max(host_cost_us(torch, call) for call in calls))
        times: list[list[float]] = [[], []]
        for turn in range(rounds):
            for index in (0, 1) if turn % 2 else (1, 0):
                times[index].append(watch.read(watch.queue(index, paced=True)))
        ours_us, torch_us = (statistics.median(each) for each in times)
        yield {
            "tokens": p.tokens,
            "experts": p.experts,
            "n": p.n,
            "k": p.k,
            "rows": spread,
            "ours_us": round(ours_us, 2),
            "torch_us": round(torch_us, 2),
            "ratio": round(torch_us / ours_us, 4),
            "tflops": round(p.flops / ours_us / 1e6, 1),
            "difference": f"{((got - wanted).norm() / wanted.norm()).item():.1e}",
        }


def main() -> None:
    """Time every problem, write its rows, and print the means."""
    parser = parser_with(
        flag("--suite", action="append", help="whose problems are timed; all by default, and several if repeated"),
        flag("--rounds", type=int, default=15, help="how often each call is timed"),
        flag("--csv", required=True, help="the file that the rows are written to"),
        description=__doc__.splitlines()[0],
    )
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    kernel = kernel_named("grouped_matmul")
    for p in (p for name in given.suite or kernel.suites for p in kernel.suite(name)):
        rows += rows_of(p, given.rounds)
        with open(given.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for spread in ("even", "skewed", "empty"):
        ratios = [row["ratio"] for row in rows if row["rows"] == spread]
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        print(
            f"{spread}: {len(ratios)} problems, torch's time over ours {mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
