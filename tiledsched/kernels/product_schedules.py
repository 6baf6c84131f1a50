"""What the declarations of matrix products share: how work is divided, and the shapes of models' linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import tiledsched.core.fields as ts
from tiledsched.core.cost import WARPGROUP_ROWS
from tiledsched.core.device import grid_blocks
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import Similarity, about
from tiledsched.kernels.product_model import tile_columns

Launch = tuple[Callable[..., None], tuple[int, ...]]
"""A function of tile code, and its grid."""

MODELS = {
    "llama_8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama_70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen_7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
"""(n, k) of the projections of queries, keys and values together, of the attention's output, and of the two halves of the
feed-forward network; from the models' published configurations (Llama 3.1, Qwen 2.5).
"""
OVERLAP = ts.knob(
    (0, 1, 2),
    about="when the sum behind shares may begin: after the product (0), once its blocks have ended (1), or have begun (2)",
    measured_only=True,
)
"""The knob `pdl`; :mod:`tiledsched.core.chains` says what it does."""
COMBINE_ELEMENTS = 2048
"""Elements of a tile of `combine`: 16 a thread, four loads of 16 bytes for each share."""
FEWEST_COMBINED_COLUMNS = 32
"""Fewest columns of a combining tile that divides C: a row is then 128 bytes of partial sums."""
TMA_BYTES = 16
"""Rows must start at multiples of this many bytes for the TMA unit."""


class ProductSimilarity(Similarity):
    """How products of all rows of A with one B compare."""

    def bucketed(self, p: Any) -> Any:
        """The product of about as many rows of A: the tokens of a model, whose weights have sizes of their own."""
        return p.replace(m=about(p.m))


class Product:
    """What the declarations of products of all rows of A with one B share; each is a :class:`Kernel`, too."""

    m = ts.dim()
    n = ts.dim()
    k = ts.dim()

    batch_dims: ClassVar[tuple[str, ...]] = ("m",)

    @staticmethod
    def reduction_order(p: Problem, s: Schedule) -> tuple[Any, ...]:
        """The shares of k and the products' instruction."""
        return share_bounds(p.k, s), instruction(s)

    @staticmethod
    def flops(p: Problem) -> float:
        """A multiply-add is two."""
        return 2.0 * p.m * p.n * p.k


def share_bounds(k: int, s: Schedule) -> tuple[int, ...]:
    """Where in k the shares begin whose sums are added up at the end; each share is summed from its first element to its last."""
    tile, shares = s.number("TILE_K"), abs(int(s.get("SPLIT_K", 1)))
    return tuple(-(-k // tile) * share // shares * tile for share in range(shares))


def instruction(s: Schedule) -> str:
    """Which tensor-core instructions multiply: of groups of warps (wgmma on sm_90), or where tiles have few rows, of warps."""
    rows = s["TILE_N"] if s.get("SWAP") else s["TILE_M"]
    return "warp groups" if int(rows) // s.number("num_ctas") >= WARPGROUP_ROWS else "warps"


def row_bytes(run: int, item: int = 2) -> bool:
    """Whether rows of `run` elements start where TMA cannot load them."""
    return run * item % TMA_BYTES != 0


def work_tiles(p: Problem, s: Schedule) -> int:
    """Work tiles of a product."""
    return -(-p.m // s.number("TILE_M")) * -(-p.n // tile_columns(s)) * max(1, s.number("SPLIT_K"))


def combine_tile(p: Problem) -> tuple[int, int, bool]:
    """(rows, columns, whether they divide C) of the tiles that sum partial products."""
    columns = min(p.n & -p.n, COMBINE_ELEMENTS)
    rows = min(p.m & -p.m, COMBINE_ELEMENTS // columns)
    if columns < FEWEST_COMBINED_COLUMNS or rows * columns < COMBINE_ELEMENTS // 16:
        return 8, COMBINE_ELEMENTS // 8, False
    return rows, columns, True


def product_launches(
    p: Problem,
    s: Schedule,
    device: Any,
    product: Callable[..., None],
    partial: Callable[..., None],
    combine: Callable[..., None],
) -> list[Launch]:
    """The launch of `product`; where blocks share the walk over k, that of `partial`, and of what combines their sums."""
    blocks = grid_blocks(work_tiles(p, s), s, device, persistent=bool(s["PERSISTENT"]))
    if s.number("SPLIT_K") <= 1:
        return [(product, (blocks,))]
    rows, columns, _ = combine_tile(p)
    return [(partial, (blocks,)), (combine, (-(-p.m // rows), -(-p.n // columns)))]


def combine_constants(p: Problem) -> dict[str, Any]:
    """The constants of the tiles that sum partial products."""
    return dict(zip(("COMBINE_M", "COMBINE_N", "COMBINE_EVEN"), combine_tile(p), strict=True))
