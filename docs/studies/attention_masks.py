r"""Mask tensors of `sdpa` on a GPU, served by our kernel: compared with torch's by torch's own criterion, and timed beside torch.

    python -m docs.studies.attention_masks right --csv right.csv
    python -m docs.studies.attention_masks times --csv times.csv
    python -m docs.studies.attention_masks times --cells boolean        # and `--cells bfloat16,float32` on another GPU

`right` compares outputs and the gradients of q, k and v at odd sizes. Its criterion is that of torch's own test of masks,
`test_mem_efficient_attention_attn_mask_vs_math_ref_grads` (test/test_transformers.py of 2025): the largest error may be so
many times as large as that of torch's math backend in bfloat16. What is true is computed by the math backend in float64.

`times` times `sdpa` with the setting `masks = own` beside torch's efficient backend, its cuDNN backend where that takes the
problem, and what torch chooses. A backend that refuses a problem as it stands is given keys and values that were repeated for
all heads, or a mask cast to the type of q, before the clock starts. All calls are captured in CUDA graphs, take turns, and are
timed behind a flush of the L2 cache. The outputs are compared, too.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from docs.studies.batch_invariance import normal
from docs.studies.flags import flag, names, parser_with, positive
from docs.studies.flex_variants import LARGEST_ERROR, collected, gains, medians_us, relative_error

ALLOWED = {"out": 4.0, "grad_q": 160.0, "grad_k": 25.0, "grad_v": 8.0}
"""How many times the error of the math backend in bfloat16 torch's test allows, of the output and of each gradient. It allows
1e-5 in any case."""
ODD = ((1, 1), (1, 1000), (63, 65), (65, 129), (129, 63), (1000, 1000))
"""Rows and keys of the problems that are compared."""
CONTENTS = ("random", "all seen", "rows hidden")
FORMS: dict[str, Callable[[Any], Any]] = {
    "for each head": lambda mask: mask,
    "for one sequence": lambda mask: mask[:1],
    "two axes": lambda mask: mask[0, 0],
    "expanded": lambda mask: mask[:, :1].expand(mask.shape),
    "of keys": lambda mask: mask[:, :1, :1],
    "transposed": lambda mask: mask.mT.contiguous().mT,
    "every second key": lambda mask: mask.repeat_interleave(2, -1)[..., ::2],
}
"""Views of a mask `[batch, heads, rows, keys]`, by name."""
BACKENDS = {"efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "auto": ""}
"""torch's backends; `auto` is what torch chooses."""
CELLS = (
    "boolean padding b11k 16x16x16x1024x1024x64",
    "boolean padding b11k 4x16x16x4096x4096x128",
    "boolean padding b11k 2x32x8x8192x8192x128",
    "boolean padding b11k 8x10x10x4096x77x64",  # cross attention to a prompt, as in diffusion
    "boolean padding b11k 16x32x8x1x4096x128",  # decoding
    "boolean causal b1qk 8x32x8x16x8192x128",  # 16 new rows
    "boolean causal b1qk 16x32x32x1024x1024x64",  # the mask of a padded batch in transformers
    "boolean causal b1qk 4x16x4x4096x4096x128",
    "boolean documents 11qk 2x16x16x8192x8192x128",
    "boolean blocks bhqk 4x16x16x2048x2048x128",
    "boolean blocks 1hqk 2x32x8x4096x4096x64",
    "boolean shifted b1qk 2048x6x6x49x49x64",  # shifted windows of an image
    "bfloat16 padding b11k 4x16x16x4096x4096x128",
    "bfloat16 padding b11k 8x10x10x4096x77x64",
    "bfloat16 causal b1qk 16x32x32x1024x1024x64",
    "bfloat16 causal b1qk 4x16x4x4096x4096x128",
    "bfloat16 causal b1qk 8x32x8x16x4096x128",
    "bfloat16 bias 11qk 2x16x16x8192x8192x128",
    "bfloat16 bias 1hqk 16x16x16x1024x1024x64",  # relative positions
    "bfloat16 bias bhqk 4x16x16x2048x2048x64",  # pairs of residues
    "bfloat16 bias 1h1k 16x32x8x1x8192x128",  # decoding with slopes
    "bfloat16 bias 1hqk 2048x6x6x49x49x64",  # windows of an image, with relative positions
    "bfloat16 bias 1hqk 128x16x16x256x256x64",
    "float32 bias 1hqk 4x16x16x2048x2048x128",
)
"""The problems that are timed: type and content of the mask, its axes (1 where they broadcast), and batch, heads, heads of keys,
rows, keys and columns of a head."""


def read(cell: str) -> tuple[str, str, str, list[int]]:
    """The parts of a cell; see CELLS."""
    kind, content, axes, sizes = cell.split()
    return kind, content, axes, [int(each) for each in sizes.split("x")]


def mask_of(cell: str, device: str = "cuda") -> Any:
    """The mask of a cell. Numbers that hide are the lowest of their type, as in transformers."""
    import torch

    torch.manual_seed(0)
    kind, content, axes, (batches, heads, _, seq_q, seq_k, _) = read(cell)
    shape = [1 if axis == "1" else size for axis, size in zip(axes, (batches, heads, seq_q, seq_k), strict=True)]
    dtype = torch.bool if kind == "boolean" else getattr(torch, kind)
    if content == "bias":
        return torch.randn(shape, device=device).to(dtype)
    batch, _, rows, keys = torch.meshgrid(
        *(torch.arange(each, device=device) for each in (batches, 1, seq_q, seq_k)), indexing="ij"
    )
    rows = rows + seq_k - seq_q
    if content == "documents":
        seen = rows // (seq_k // 7) == keys // (seq_k // 7)
    elif content == "blocks":  # of 64 rows and 64 keys, of which a third is seen, and the diagonal
        blocks = torch.rand(*shape[:2], -(-seq_q // 64), -(-seq_k // 64), device=device) < 1 / 3
        seen = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :seq_q, :seq_k] | (
            rows // 64 == keys // 64
        )
    elif content == "shifted":  # every fourth window holds two parts of the image
        seen = (batch % 4 > 0) | ((rows < seq_k // 2) == (keys < seq_k // 2))
    else:  # sequences from half of the length to all of it
        seen = (keys < seq_k - batch * seq_k // (2 * batches)) & ((keys <= rows) | (content == "padding"))
    seen = seen[tuple(slice(each) for each in shape)].contiguous()
    return seen if kind == "boolean" else torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)


def torch_call(backend: str, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """torch's attention by one backend, or by what it chooses."""
    from torch.nn import attention, functional

    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)) if backend else contextlib.nullcontext():
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def masks(rows: int, keys: int, device: str) -> Iterator[tuple[str, Any]]:
    """The masks of a problem of two sequences and four heads that are compared, by name."""
    import torch

    torch.manual_seed(rows + keys)
    for (place, kind), (at, form) in itertools.product(enumerate(("boolean", "bfloat16", "float32")), enumerate(FORMS)):
        content = CONTENTS[(place + at + rows) % len(CONTENTS)]  # each with all kinds and forms
        seen = torch.rand(2, 4, rows, keys, device=device) < (1.0 if content == "all seen" else 0.6)
        if content == "rows hidden":
            seen[0, :, ::3] = seen[1, :, -1:] = False
        added = torch.randn(seen.shape, device=device).masked_fill(~seen, -torch.inf)
        mask = seen if kind == "boolean" else added.to(getattr(torch, kind))
        yield f"{kind}, {content}, {form}", FORMS[form](mask)


def results(call: Callable[..., Any], mask: Any, dtype: Any, given: Sequence[Any], above: Any) -> list[Any]:
    """The output of a call, and the gradients of q, k and v, computed in a type."""
    tensors = [each.to(dtype, copy=True).requires_grad_() for each in given]
    out = call(*tensors, mask.to(dtype) if dtype.itemsize == 8 and mask.is_floating_point() else mask)
    out.backward(above.to(dtype))
    return [out.detach(), *(each.grad for each in tensors)]


def right(
    cells: Sequence[str],
    device: str = "cuda",
    sizes: Sequence[tuple[int, int]] = ODD,
    own: Callable[..., Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each mask: the errors of the output and of the gradients, each as a part of what torch's test allows; of another
    function than `sdpa`, if one is given."""
    import torch

    import tiledsched as ts

    for place, (rows, keys) in enumerate(sizes):  # all masks of a size share programs
        for name, mask in (each for each in masks(rows, keys, device) if any(word in each[0] for word in cells)):
            width, kv_heads = 64 << place % 2, 2 << place // 2 % 2
            shapes = ((4, rows), (kv_heads, keys), (kv_heads, keys), (4, rows))
            *given, above = (normal(seed, 2, *shape, width, device=device) for seed, shape in enumerate(shapes))
            exact, low, ours = (
                results(call, mask, dtype, given, above)
                for call, dtype in (
                    (partial(torch_call, "MATH"), torch.float64),
                    (partial(torch_call, "MATH"), torch.bfloat16),
                    (own or ts.sdpa, torch.bfloat16),
                )
            )
            row: dict[str, Any] = {"cell": f"{name}, {rows}x{keys}x{width}, {4 // kv_heads} heads share keys"}
            for (what, factor), *of in zip(ALLOWED.items(), exact, low, ours, strict=True):
                error_low, error = (float((each - of[0]).abs().max()) for each in of[1:])
                row[what] = round(error / max(1e-5, factor * error_low), 4)
            yield row | {"good": all(row[what] <= 1 for what in ALLOWED)}


def first_that_runs(name: str, calls: Iterable[Callable[[], Any]]) -> Callable[[], Any] | None:
    """The first of some calls that does not fail; None, with a word on stderr, where all do."""
    for call in calls:
        try:
            call()
            return call
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
    print(f"{name}: {reason[:120]}", file=sys.stderr)
    return None


def times(cells: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each cell: each method's time in microseconds, what ours gains, and how far the outputs are apart."""
    import tiledsched as ts

    for cell in (cell for cell in CELLS if any(each in cell for each in cells)):
        *_, (batch, heads, kv_heads, rows, keys, width) = read(cell)
        shapes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
        q, k, v = (normal(seed, batch, *shape, width) for seed, shape in enumerate(shapes))
        mask, repeated = mask_of(cell), [each.repeat_interleave(heads // kv_heads, 1) for each in (k, v)]
        given = list(itertools.product(((k, v), repeated), (mask, mask.to(q.dtype)) if "float" in cell else (mask,)))
        tried: dict[str, list[Callable[[], Any]]] = {"tiledsched": [partial(ts.sdpa, q, k, v, mask)]}
        for method, backend in BACKENDS.items():
            tried[method] = [partial(torch_call, backend, q, key, value, added) for (key, value), added in given]
        calls = {name: each for name, of in tried.items() if (each := first_that_runs(f"{cell}, {name}", of))}
        us = medians_us(calls)
        both = [each for each in BACKENDS if {each, "tiledsched"} <= us.keys()]
        error = relative_error(calls["tiledsched"](), calls["efficient"]()) if "efficient" in both else float("nan")
        row: dict[str, Any] = {"cell": cell} | {f"{each}_us": round(us.get(each, float("nan")), 2) for each in tried}
        row |= {f"over_{each}": round(us[each] / us["tiledsched"], 4) if each in both else "" for each in BACKENDS}
        yield row | {"error": round(error, 5), "good": error <= LARGEST_ERROR and row["over_efficient"] > 1}


def conclusion(what: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The largest errors, or our speed over each backend's; and, as the last line, how many rows are good."""
    if what == "times":
        said, good = gains(rows, BACKENDS, lambda row: str(row["cell"])), "right, and faster than the efficient backend"
    else:
        worst = ", ".join(f"{each} {max((row[each] for row in rows), default=0):.2f}" for each in ALLOWED)
        said, good = [f"largest errors as parts of what torch's test allows: {worst}"], "equal by torch's test"
    return [*said, f"{good}: {sum(row['good'] for row in rows)} of {len(rows)}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or time; 1 if an output is wrong, or a cell is not ahead of torch's efficient backend."""
    import tiledsched as ts

    parser = parser_with(
        flag("what", choices=["right", "times"]),
        flag(
            "--cells", type=names, default=[""], help="words, with commas between them, of which a cell's name has one"
        ),
        flag("--most-seconds", type=positive, default=3600, help="seconds after which the study ends"),
        flag("--csv", default="", help="a file for the rows"),
        description=__doc__.partition("\n\n")[0],
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # by which torch says why a backend refuses a problem
    ends = time.monotonic() + options.most_seconds
    found = right(options.cells) if options.what == "right" else times(options.cells)
    with ts.configure(masks="own", fallback="error"):
        rows = collected(itertools.takewhile(lambda row: time.monotonic() < ends, found), options.csv)
    print("\n".join(conclusion(options.what, rows)))
    return int(not rows or not all(row["good"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
