"""How much one product of 8-bit floats says about another."""

from __future__ import annotations

import math
from typing import Any

from tiledsched.core.similarity import Similarity, about


class ScaledMatmulSimilarity(Similarity):
    """How products of 8-bit floats compare."""

    def bucketed(self, p: Any) -> Any:
        """The product of about as many rows of A: the tokens of a model, whose weights have sizes of their own."""
        return p.replace(m=about(p.m))

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Octaves of the sizes and of C, four and six to one; and where products are summed."""
        sizes = math.log2(p.m) / 4, math.log2(p.n) / 4, math.log2(p.k) / 4, math.log2(p.m * p.n) / 6
        return (*sizes, float(p.fast_accum), 0.3 * (p.scales == "row"))
