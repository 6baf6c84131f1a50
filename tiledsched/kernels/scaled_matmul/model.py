"""Estimated time of a product of 8-bit floats that was never run. Only the order of the estimates is meant to be used."""

from __future__ import annotations

from tiledsched.core import ArchSpec, Problem, ResourceFacts, Schedule
from tiledsched.core.cost import WARPS_PER_GROUP
from tiledsched.kernels.product_model import ProductCost, step_cycles

CONVERTED_SPEEDUP = 0.5
"""Rate, as a share of that of 16-bit products, where warps convert 8-bit operands because the tile is too narrow for wgmma."""
PROMOTED_K = 128
"""Elements of k after which sums of products are added to float32 ones: four wgmma instructions (QGMMA and FADD in the code)."""


MOST_SUMS = 64 * 128
"""Sums of a group of four warps, beyond which those in float32 and those in the tensor cores together spill registers."""
SPILLED_SUMS = 2.5
"""How many times as long a step takes where they do: 128 x 256 sums against 128 x 128 on an H200."""


class ScaledMatmulCost(ProductCost):
    """The time of a product of 8-bit floats."""

    item_bytes = 1

    def step_cycles(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec, resident: int) -> float:
        """Cycles of a step. Exchanged operands exchange the sides of the tile; sums in float32 take additions of their own."""
        groups_of_rows = spec.product_rows > 16
        converted = groups_of_rows and not s["SWAP"] and s.number("TILE_M") < 64
        turned = s.replace(TILE_M=s["TILE_N"], TILE_N=s["TILE_M"]) if s["SWAP"] else s
        cycles = step_cycles(
            turned,
            facts,
            spec,
            resident,
            by_tma=spec.producer_warps > 0,
            item_bytes=self.item_bytes,
            speedup=CONVERTED_SPEEDUP if converted else spec.fp8_speedup,
        )
        if groups_of_rows and not p.fast_accum:
            sums = s.number("TILE_M") * s.number("TILE_N") / max(1, facts.num_ctas)
            cycles += sums / spec.fp32_ops * s.number("TILE_K") / PROMOTED_K
            cycles *= SPILLED_SUMS if sums > MOST_SUMS * s.number("num_worker_warps") / WARPS_PER_GROUP else 1.0
        return cycles
