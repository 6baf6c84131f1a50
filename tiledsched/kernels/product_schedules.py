"""What the declarations of matrix products share: how work is divided, and the shapes of models' linear layers."""

from __future__ import annotations

from tiledsched.core import Problem, Schedule
from tiledsched.kernels.product_model import tile_columns

MODELS = {
    "llama_8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama_70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen_7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
"""(n, k) of the projections of queries, keys and values together, of the attention's output, and of the two halves of the
feed-forward network; from the models' published configurations (Llama 3.1, Qwen 2.5).
"""
COMBINE_ELEMENTS = 2048
"""Elements of a tile of `combine`: 16 a thread, four loads of 16 bytes for each share."""
FEWEST_COMBINED_COLUMNS = 32
"""Fewest columns of a combining tile that divides C: a row is then 128 bytes of partial sums."""
TMA_BYTES = 16
"""Rows must start at multiples of this many bytes for the TMA unit."""


def row_bytes(run: int, item: int = 2) -> bool:
    """Whether rows of `run` elements start where TMA cannot load them."""
    return run * item % TMA_BYTES != 0


def work_tiles(p: Problem, s: Schedule) -> int:
    """Work tiles of a product."""
    return -(-p.m // s.number("TILE_M")) * -(-p.n // tile_columns(s)) * s.number("SPLIT_K")


def combine_tile(p: Problem) -> tuple[int, int, bool]:
    """(rows, columns, whether they divide C) of the tiles that sum partial products."""
    columns = min(p.n & -p.n, COMBINE_ELEMENTS)
    rows = min(p.m & -p.m, COMBINE_ELEMENTS // columns)
    if columns < FEWEST_COMBINED_COLUMNS or rows * columns < COMBINE_ELEMENTS // 16:
        return 8, COMBINE_ELEMENTS // 8, False
    return rows, columns, True
