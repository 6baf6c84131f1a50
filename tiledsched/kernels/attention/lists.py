"""The kernel that fills lists of blocks: which blocks of keys the rows of each block see, as a function of an author's says.

:mod:`tiledsched.kernels.attention.mods` says how a list lies in memory. Each block of the grid makes one list, in one pass over
the keys: it counts the pairs of row and key that the function lets through. A block of keys is seen in full where these are all.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cuda.tile as ct

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import compiled
from tiledsched.kernels.attention.variants import (
    BLOCK,
    HEAD,
    array_fields_of,
    blocks_of,
    drawn_arrays,
    kernel_by_code,
    locator,
    source_hash,
    word_of,
)

Int = ct.Constant[int]
SOURCE = """def block_lists({arrays}Blocks: ct.Array, seq_q: int, seq_k: int, KEYS: Int):
    fill_list(MASK, ({names}), Blocks, seq_q, seq_k, KEYS)
"""


def fill_list(mask, arrays, Blocks, seq_q, seq_k, KEYS):
    """Fill the list of one block of rows."""
    place, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    rows = place * BLOCK + ct.arange(BLOCK, dtype=ct.int32)[:, None]
    count = min(seq_q - place * BLOCK, BLOCK)
    blocks, partial, full, pairs = ct.cdiv(seq_k, BLOCK), 0, 0, count * BLOCK
    for block in range(blocks):
        seen = 0
        for part in ct.static_iter(range(BLOCK // KEYS)):
            columns = block * BLOCK + part * KEYS + ct.arange(KEYS, dtype=ct.int32)[None, :]
            visible = mask(batch, head, rows, columns, *arrays) & (columns < seq_k)
            if visible.shape[0] == 1:  # the same for all rows
                seen = seen + visible.astype(ct.int32) * count
            else:  # a thread holds whole rows, which it adds up by itself
                seen = seen + ct.sum((visible & (rows < seq_q)).astype(ct.int32), axis=1)
        seen = ct.sum(seen)
        if seen == pairs:
            ct.scatter(Blocks, (batch, head, place, HEAD + blocks - 1 - full), block, check_bounds=False)
            full = full + 1
        elif seen > 0:
            ct.scatter(Blocks, (batch, head, place, HEAD + partial), block, check_bounds=False)
            partial = partial + 1
    for unused in range(partial, blocks - full):  # an empty list is read, too: its last number must be a block
        ct.scatter(Blocks, (batch, head, place, HEAD + unused), 0, check_bounds=False)
    ct.scatter(Blocks, (batch, head, place, 0), partial, check_bounds=False)
    ct.scatter(Blocks, (batch, head, place, 1), partial + full, check_bounds=False)


def lists_kernel(mask_mod: Any, arrays: Sequence[tuple[int, str]]) -> KernelClass:
    """The kernel that fills the lists of blocks of a function, which is made at first.

    Its `batch` and `heads` are those of the lists: 1 where the function does not read the sequence or the head.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx, *arrays)`, whether a row sees a key.
        arrays: axes and element type of each array that it takes.

    Raises:
        DeclarationError: the function cannot be compiled.
    """
    return kernel_by_code("block_lists", {"mask_mod": mask_mod}, arrays, _make)


def _make(name: str, identity: str, functions: Mapping[str, Any], arrays: Sequence[tuple[int, str]]) -> KernelClass:
    mask_mod, (names, fields, sizes) = functions["mask_mod"], array_fields_of(arrays)
    parameters, given = ("".join(form.format(each) for each in names) for form in ("{}: ct.Array, ", "{}, "))
    text = SOURCE.format(arrays=parameters, names=given)
    body = {
        "__module__": __name__,
        "__doc__": f"Lists of the blocks that {word_of(mask_mod)} shows.",
        "name": name,
        "function": staticmethod(compiled(f"<{name}>", text, {**globals(), "MASK": mask_mod}, "block_lists")),
        **{size: ts.dim() for size in ("seq_q", "seq_k")},
        **{size: ts.dim(1) for size in ("batch", "heads")},
        "derived": sizes,
        **fields,
        "Blocks": ts.out("batch heads row_blocks list_length", dtype="int32"),
        "knobs": {"KEYS": [64, 128, 32]},
        "mods": (None, mask_mod),
        "mod_arrays": names,
        "identity": identity,
        "declared_in": "",
        **{each.__name__: staticmethod(each) for each in (grid, inputs, reference)},
        **{each.__name__: classmethod(each) for each in (source_hash, locator)},
    }
    return type(name, (Kernel,), body)


def grid(p: Any, s: Schedule, device: Any) -> tuple[int, int, int]:
    """One block for each list."""
    return (p.row_blocks, p.heads, p.batch)


def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
    """The arrays that the function takes."""
    return drawn_arrays(xp, rng, p)[0]


def reference(xp: Any, p: Any, **arrays: Any) -> Any:
    """The lists, from what the function says of every row and key."""
    return blocks_of(xp, p, arrays, p.batch, p.heads)
