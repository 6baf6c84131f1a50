"""How much one matrix product says about another."""

from __future__ import annotations

import math
from typing import Any

from tiledsched.core.similarity import Similarity, about
from tiledsched.core.storage import ALIGNMENT
from tiledsched.kernels.product_model import ELEMENT_BYTES


class MatmulSimilarity(Similarity):
    """How matrix products compare."""

    def rival_kind(self, p: Any) -> tuple[int, ...]:
        """The alignment of rows of A, B and C, in elements from 1 to 8. Below 8, cuBLAS may take several times as long."""
        runs = p.m if p.a_layout == "column" else p.k, p.k if p.b_layout == "column" else p.n, p.n
        return tuple(min(run & -run, ALIGNMENT // ELEMENT_BYTES) for run in runs)

    def bucketed(self, p: Any) -> Any:
        """The product of about as many rows of A: the tokens of a model, whose weights have sizes of their own."""
        return p.replace(m=about(p.m))

    def loss_group(self, p: Any) -> str:
        """The group of problems for which the loss of a transferred schedule was measured."""
        return "odd rows" if min(self.rival_kind(p)) < ALIGNMENT // ELEMENT_BYTES else "aligned rows"

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Octaves of the sizes and of C, four and six to one; the layouts; and the alignment of rows, two octaves to one."""
        sizes = math.log2(p.m) / 4, math.log2(p.n) / 4, math.log2(p.k) / 4, math.log2(p.m * p.n) / 6
        layouts = 0.3 * (p.a_layout == "column"), 0.3 * (p.b_layout == "column")
        return (*sizes, *layouts, *(math.log2(run) / 2 for run in self.rival_kind(p)))
