"""How much one grouped product says about another."""

from __future__ import annotations

import math
from typing import Any

from tiledsched.core.similarity import Similarity, about


class GroupedMatmulSimilarity(Similarity):
    """How grouped products compare: by the rows of a group, above all."""

    def distance(self, p: Any, q: Any) -> float:
        """Octaves between the sizes, where those between the rows of a group count twice."""
        sizes = sum(abs(math.log2(getattr(p, name) / getattr(q, name))) for name in ("tokens", "experts", "n", "k"))
        layouts = 0.3 * (p.b_layout != q.b_layout) + 0.3 * (p.dtype != q.dtype)
        return sizes + abs(math.log2(p.tokens / p.experts) - math.log2(q.tokens / q.experts)) + layouts

    def bucketed(self, p: Any) -> Any:
        """The product of about as many rows: a model's weights have sizes of their own."""
        return p.replace(tokens=about(p.tokens))

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Octaves of the rows of a group and of the sizes, four to one; the layout of B."""
        sizes = (math.log2(each) / 4 for each in (p.tokens / p.experts, p.tokens, p.n, p.k))
        return (*sizes, 0.3 * (p.b_layout == "column"))
