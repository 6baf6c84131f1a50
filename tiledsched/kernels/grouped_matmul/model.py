"""Estimated time of a grouped product that was never run. Only the order of the estimates is meant to be used."""

from __future__ import annotations

from typing import Any

import numpy

from tiledsched.core import ArchSpec, Problem, ResourceFacts, Schedule
from tiledsched.kernels.product_model import ELEMENT_BYTES, SECOND_LAUNCH_US, ProductCost, dram_bytes, step_cycles

SKEW = 1.0
"""Exponent by which the rows of a group fall with its rank in the random test inputs (Zipf's law)."""


def skewed_ends(rows: int, groups: int) -> numpy.ndarray[Any, Any]:
    """The ends of groups, int32, of the random test inputs: some groups have many rows, and some perhaps none."""
    weights = 1.0 / numpy.arange(1, groups + 1) ** SKEW
    order = numpy.random.default_rng(groups).permutation(groups)
    return numpy.rint(numpy.cumsum(weights[order] / weights.sum()) * rows).astype(numpy.int32)


class GroupedMatmulCost(ProductCost):
    """The time of a grouped product whose groups are of about one size."""

    def bytes_moved(self, p: Problem) -> int:
        """A and C once, and the matrix of each group that has rows in the random test inputs, on which problems are timed."""
        read = numpy.count_nonzero(numpy.diff(skewed_ends(p.tokens, p.experts), prepend=0))
        return super().bytes_moved(p) - int(p.experts - read) * p.k * p.n * ELEMENT_BYTES

    def row_tiles(self, p: Problem, s: Schedule) -> int:
        """Tiles of rows: every group has one that is not full."""
        tile = s.number("TILE_M")
        groups = min(p.experts, p.tokens)
        return groups * -(-p.tokens // (groups * tile))

    def step_cycles(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec, resident: int) -> float:
        """Cycles of a step. Exchanged operands exchange the sides of the tile."""
        turned = s.replace(TILE_M=s["TILE_N"], TILE_N=s["TILE_M"]) if s["SWAP"] else s
        return step_cycles(turned, facts, spec, resident, by_tma=spec.producer_warps > 0 and not p.odd)

    def dram_bytes(self, p: Problem, s: Schedule, spec: ArchSpec, slots: int) -> float:
        """Every group's matrix once, and beyond that what a product of one group would take."""
        others = max(0, min(p.experts, p.tokens) - 1) * p.k * p.n * ELEMENT_BYTES
        return others + dram_bytes(p, s, spec, slots)

    def other_launches_us(self, p: Problem, s: Schedule, spec: ArchSpec) -> float:
        """The list of tiles before the product."""
        return SECOND_LAUNCH_US
