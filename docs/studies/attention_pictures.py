"""The pictures of the attention variants in the documentation: `python -m docs.studies.attention_pictures [FOLDER]`.

Each shows what a function of docs/examples/attention_variants.py gives for 64 keys, as the interpreter computes it: query rows go
down, keys to the right. Tiles of 16 x 16 are outlined. In a full tile all rows see all keys, in an empty one no row sees any: a
kernel that goes by tiles needs no mask for the first and skips the second. The files are the same wherever they are made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from docs.examples import attention_variants as variants
from tiledsched.interpreter import evaluate

SIZE, TILE, CELL = 64, 16, 5
"""Keys of a picture, rows and keys of a tile, and pixels of an element."""
LEFT, TOP, WIDTH = 44, 30, 400
"""Pixels left of the elements and above them, and of the whole picture."""
LEVELS = 4
"""Steps of colour from 0 to the largest bias."""
CLASSES = ("full", "partial", "empty")
STYLE = """
.card{fill:#fff}text{font:12px system-ui,sans-serif;fill:#24292f}
.seen,.plus{fill:#3b82f6}.minus{fill:#d946a6}.zero{fill:#8c959f;fill-opacity:.3}
.tile{fill:none;stroke-width:2}.full{stroke:#24292f}.partial{stroke:#c2410c;stroke-dasharray:5 3}
.empty{stroke:#8c959f;stroke-width:1;stroke-dasharray:1 3}.line{fill:none;stroke:#3b82f6;stroke-width:3}
@media(prefers-color-scheme:dark){.card{fill:#161b22}text{fill:#e6edf3}.full{stroke:#e6edf3}.partial{stroke:#fb923c}}
"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One variant, as it is drawn."""

    title: str
    """What a screen reader says."""
    score: Any = None
    """The function of scores. What it makes of scores of zero is drawn; if they stay zero, the new score over the old one."""
    mask: Any = None
    """The function of what rows see; None where they see all keys."""
    arrays: tuple[Any, ...] = ()
    """The arrays of the functions."""
    rows: int = SIZE
    """Query rows."""


def elements(picture: Picture) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What rows see, and the bias of each element, `[rows, keys]`, of the first sequence and head."""
    q_idx, kv_idx = np.arange(picture.rows, dtype=np.int32)[:, None], np.arange(SIZE, dtype=np.int32)[None]
    places, bias = (0, 0, q_idx, kv_idx), np.zeros((picture.rows, SIZE), np.float32)
    seen = evaluate(picture.mask, *places, arrays=picture.arrays) if picture.mask else bias == 0
    return seen, evaluate(picture.score, bias, *places, arrays=picture.arrays) if picture.score else bias


def tile_classes(seen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`full`, `partial` or `empty` for each tile."""
    tiles = seen.reshape(-1, TILE, SIZE // TILE, TILE)
    some, all_of_it = tiles.any((1, 3)), tiles.all((1, 3))
    return np.where(all_of_it, CLASSES[0], np.where(some, CLASSES[1], CLASSES[2]))


def runs(wanted: np.ndarray[Any, Any]) -> str:
    """A path around the elements wanted: one rectangle for each run in a row."""
    found = []
    for y, row in enumerate(wanted):
        (edges,) = np.nonzero(np.diff(row, prepend=False, append=False))
        found += [f"M{first} {y}h{last - first}v1H{first}z" for first, last in edges.reshape(-1, 2).tolist()]
    return "".join(found)


def matrix(picture: Picture) -> Iterator[str]:
    """The elements and tiles of a variant, and what they mean."""
    seen, bias = elements(picture)
    kinds = tile_classes(seen)
    yield f'<g transform="translate({LEFT} {TOP}) scale({CELL})" shape-rendering="crispEdges">'
    if picture.score is None:
        yield f'<path class="seen" d="{runs(seen)}"/>'
    else:
        levels = np.rint(bias / np.abs(bias[seen]).max() * LEVELS).astype(int)
        drawn = range(levels[seen].min(), levels[seen].max() + 1)
        for level in drawn:
            yield f'<path {shade(level)} d="{runs(seen & (levels == level))}"/>'
    yield "</g>"
    for (down, right), kind in np.ndenumerate(kinds):
        yield outline(LEFT + right * TILE * CELL, TOP + down * TILE * CELL, TILE * CELL, kind)
    bottom = TOP + picture.rows * CELL
    yield f'<text x="{LEFT}" y="{TOP - 10}">keys →</text>'
    yield f'<text transform="translate({LEFT - 14} {TOP}) rotate(90)">query rows →</text>'
    if picture.score is None:
        yield f'<path class="seen" d="M{LEFT} {bottom + 14}h16v16h-16z"/>'
        yield words(LEFT + 22, bottom, "the row sees the key")
    else:
        yield words(LEFT, bottom, f"bias from {bias[seen].min():.3g}")
        for place, level in enumerate(drawn):
            yield f'<path {shade(level)} d="M{LEFT + 106 + 16 * place} {bottom + 14}h16v16h-16z"/>'
        yield words(LEFT + 112 + 16 * len(drawn), bottom, f"to {bias[seen].max():.3g}")
    yield words(LEFT, bottom + 26, f"{TILE} x {TILE} tiles:")
    for place, kind in enumerate(CLASSES):
        yield outline(LEFT + 84 + 94 * place, bottom + 40, 16, kind)
        yield words(LEFT + 106 + 94 * place, bottom + 26, f"{(kinds == kind).sum()} {kind}")


def shade(level: int) -> str:
    """The attributes of elements of a bias, from -LEVELS to LEVELS."""
    kind = "minus" if level < 0 else "plus" if level else "zero"
    return f'class="{kind}" opacity="{abs(level) / LEVELS or 1:g}"'


def outline(x: float, y: float, side: int, kind: str) -> str:
    """The edge of a tile, inside of it."""
    return f'<rect class="tile {kind}" x="{x + 1.5}" y="{y + 1.5}" width="{side - 3}" height="{side - 3}"/>'


def words(x: float, y: float, text: str) -> str:
    """Text of the legend, in the line below `y`."""
    return f'<text x="{x}" y="{y + 26}">{text}</text>'


def curve(picture: Picture) -> Iterator[str]:
    """What a function of scores makes of them: the new score over the old one."""
    old = np.linspace(-60, 60, 121, dtype=np.float32)
    new = evaluate(picture.score, old, 0, 0, 0, 0)
    x, y = LEFT + 160 + old * 2.5, TOP + 80 - new * 2.5
    points = " ".join(f"{across:.1f},{down:.1f}" for across, down in zip(x, y, strict=True))
    levels = "".join(f"M{LEFT} {TOP + 80 + down}h320" for down in (-50, 0, 50))
    yield f'<path class="tile empty" d="{levels}M{LEFT + 160} {TOP}v160"/>'
    yield f'<text x="{LEFT - 22}" y="{TOP + 34}">20</text><text x="{LEFT - 26}" y="{TOP + 134}">-20</text>'
    yield f'<path class="tile partial" d="M{LEFT + 85} {TOP + 155}l150-150"/><polyline class="line" points="{points}"/>'
    yield f'<text x="{LEFT}" y="{TOP - 10}">↑ score after the cap</text>'
    yield f'<text x="{LEFT + 316}" y="{TOP + 98}" text-anchor="end">score before it →</text>'
    yield f'<path class="line" d="M{LEFT} {TOP + 182}h22"/>' + words(LEFT + 28, TOP + 160, "with a cap of 20")
    yield f'<path class="tile partial" d="M{LEFT + 170} {TOP + 182}h22"/>' + words(LEFT + 198, TOP + 160, "without")


def svg(picture: Picture) -> str:
    """The text of a picture's file."""
    changes_zero = picture.score is None or elements(picture)[1].any()
    height = TOP + (picture.rows * CELL + 66 if changes_zero else 206)
    body = "\n".join((matrix if changes_zero else curve)(picture))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">
<title>{picture.title}</title><style>{STYLE}</style>
<rect class="card" width="{WIDTH}" height="{height}" rx="8"/>
{body}
</svg>
"""


def example_tree() -> np.ndarray[Any, Any]:
    """Ancestors of the 16 nodes of a tree whose nodes have three children: `[1, nodes, nodes]`."""
    found = np.eye(TILE, dtype=bool)
    for node in range(1, TILE):
        found[node] |= found[(node - 1) // 3]
    return found[None]


def example_bias() -> np.ndarray[Any, Any]:
    """A bias of blocks of 4 x 4 elements, `[1, 1, rows, keys]`."""
    row, key = np.indices((SIZE // 4, SIZE // 4))
    return ((row * row + 3 * key * key + row * key) % 9 - 4).repeat(4, 0).repeat(4, 1)[None, None].astype(
        np.float32
    ) / 2


DOCUMENTS = np.repeat(np.arange(4, dtype=np.int32), (22, 18, 10, 14))[None]
PATTERN = np.array([[[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]], bool)
TABLE = np.array([[1 - bucket % 16 / 8 for bucket in variants.t5_buckets()]], np.float32)
PICTURES = {
    "causal": Picture(title="Causal: a triangle", mask=variants.causal),
    "prefix_lm": Picture(
        title="Prefix LM: all rows see the first 24 keys, and those up to their own",
        mask=variants.prefix_lm,
        arrays=(np.array([24], np.int32),),
    ),
    "window_with_global_tokens": Picture(
        title="A window of 6 keys on each side, and 3 global tokens", mask=variants.window_with_global_tokens(6, 3)
    ),
    "same_document": Picture(
        title="Four documents: squares on the diagonal", mask=variants.same_document, arrays=(DOCUMENTS,)
    ),
    "alibi": Picture(
        title="ALiBi with a slope of 1/8, causal: the further back a key, the lower its score",
        score=variants.alibi,
        mask=variants.causal,
        arrays=(np.array([0.125], np.float32),),
    ),
    "t5_bias": Picture(title="T5: one bias for each bucket of distances", score=variants.t5_bias, arrays=(TABLE,)),
    "softcap": Picture(title="Softcap: a curve that levels off at the cap", score=variants.softcap(20.0)),
    "neighbourhood_2d": Picture(
        title="Neighbourhoods of 3 x 3 in an image of 8 x 8", mask=variants.neighbourhood_2d(8, 8, 1)
    ),
    "window_3d": Picture(
        title="Windows of 3 x 3 x 3 in a video of 4 frames of 4 x 4", mask=variants.window_3d(4, 4, 1, 1, 1)
    ),
    "tree": Picture(
        title="16 nodes of a tree see the context of 48 keys and their ancestors",
        mask=variants.tree,
        arrays=(np.array([SIZE - TILE], np.int32), example_tree()),
        rows=TILE,
    ),
    "block_sparse": Picture(
        title="A pattern of blocks of 16 x 16", mask=variants.block_sparse(TILE), arrays=(PATTERN,)
    ),
    "dense_bias": Picture(title="A bias for each row and key", score=variants.dense_bias, arrays=(example_bias(),)),
}
"""Name of a function in the examples -> how it is drawn."""


def main(folder: Path) -> None:
    """Write all pictures to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        (folder / f"{name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/attention"))
