r"""The twelve variants of docs/examples/attention_variants.py on a GPU beside torch's FlexAttention: errors, times and compiles.

    python -m docs.studies.flex_variants right
    python -m docs.studies.flex_variants times --sizes 1024,4096,16384 --widths 64,128 --compilers 12 --csv times.csv
    python -m docs.studies.flex_variants times --sizes 1024,16384,32768 --most-seconds 120 --csv times.csv --lacking
    python -m docs.studies.flex_variants builtin --sizes 4096 --csv builtin.csv
    python -m docs.studies.flex_variants compiles

`right` compares outputs at odd sizes with torch's FlexAttention, which is not compiled and computes in float64. `times` times
`tiledsched.flex`, FlexAttention compiled, FlexAttention on its FLASH backend where that is installed, and for a dense bias also
torch's `scaled_dot_product_attention`. All are given their masks' blocks, are captured in CUDA graphs, take turns, and are timed
behind a flush of the L2 cache. With `--compilers`, so many processes first fill the caches on disk (`compile`), because
one alone takes about ten seconds for each problem. Each row is written when it was measured; with `--lacking` the rows of
the file are kept, and only problems that it lacks are timed. With `--gradients` the gradients of q, k and v are computed,
too, and the times are those of both passes. `builtin` times a causal mask and a causal window as functions, by several
schedules, beside the same masks built into `tiledsched.sdpa`. `compiles` calls each variant again with other contents of its
arrays, and times these calls.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cuda.tile as ct

from docs.examples import attention_variants as variants
from docs.studies.batch_invariance import FLUSHED_BYTES, normal, write
from docs.studies.flags import flag, integers, parser_with, positive, words

NAMES = (
    "causal",
    "prefix_lm",
    "window_with_global_tokens",
    "same_document",
    "alibi",
    "t5_bias",
    "softcap",
    "neighbourhood_2d",
    "window_3d",
    "tree",
    "block_sparse",
    "dense_bias",
)
SMALL_BLOCKS = "block_sparse_64"
"""The pattern of blocks of 64, a quarter of those that kernels skip; with `--variants` only."""
ODD = ((1, 1), (63, 64), (129, 128), (300, 64), (1000, 128))
"""Keys, and columns of a head, of the problems that are compared."""
TOKENS, HIDDEN, NODES = 16384, 2048, 64
"""Tokens of a call and columns of all heads, as in the papers on FlashAttention; and nodes of a tree."""
ROUNDS = 11
WINDOW = 512
"""Keys that a row sees in the causal window beside the built-in one."""
SMALL = {"tile_m": 64, "tile_n": 128, "num_worker_warps": 4, "occupancy": 2, "q_subtiles": 1}
SHARED = SMALL | {"tile_n": 64, "q_subtiles": 2}
TALL = {"tile_m": 128, "tile_n": 64, "num_worker_warps": 8, "occupancy": 2, "q_subtiles": 1}
LARGE = TALL | {"tile_n": 128, "occupancy": 1}
PLAIN = {"loop_split": True, "persistent": "no", "latency_k": 0, "latency_v": 0, "kv_subtiles": 1, "flat_steps": 0}
PLAIN |= {"qk_ahead": False, "store_late": False, "q_in_registers": False, "unroll": 1, "kv_direction": "forward"}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "served": {},
    "small_natural": {**PLAIN, **SMALL, "block_order": "natural"},
    "small_swizzled": {**PLAIN, **SMALL, "block_order": "swizzled"},
    "shared_swizzled": {**PLAIN, **SHARED, "block_order": "swizzled"},
    "shared_heads": {**PLAIN, **SHARED, "block_order": "heads_fastest"},
    "tall_natural": {**PLAIN, **TALL, "block_order": "natural"},
    "tall_swizzled": {**PLAIN, **TALL, "block_order": "swizzled"},
    "large_swizzled": {**PLAIN, **LARGE, "block_order": "swizzled"},
}
"""Schedules by which `builtin` has functions computed: the one that serves, and some that are forced, by tiles and order."""
LARGEST_ERROR = 2e-2
"""Largest relative error, by Frobenius norm, of an output in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One variant in cuTile's words and in torch's, with the arrays of one problem."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    arrays: tuple[Any, ...] = ()
    torch_score: Callable[..., Any] | None = None
    torch_mask: Callable[..., Any] | None = None
    rows: int = 0
    """Query rows where these are not as many as keys."""


def compared(name: str, batch: int, heads: int, keys: int, device: str = "cuda", seed: int = 0) -> Compared:
    """A variant for a problem of so many keys; the contents of its arrays follow from the seed."""
    import torch

    chance = torch.Generator().manual_seed(seed)

    def drawn(below: int, *shape: int) -> Any:
        return torch.randint(0, below, shape, generator=chance, dtype=torch.int32).to(device)

    if name == "causal":
        return Compared(mask=variants.causal, torch_mask=lambda b, h, q, k: k <= q)
    if name == "prefix_lm":
        prefix = drawn(keys // 2 + 1, batch)
        return Compared(
            mask=variants.prefix_lm, arrays=(prefix,), torch_mask=lambda b, h, q, k: (k <= q) | (k < prefix[b])
        )
    if name == "window_with_global_tokens":
        size, tokens = max(1, keys // 32), 16
        return Compared(
            mask=variants.window_with_global_tokens(size, tokens),
            torch_mask=lambda b, h, q, k: ((q - k).abs() <= size) | (q < tokens) | (k < tokens),
        )
    if name == "same_document":
        ids = drawn(max(1, keys // 512), batch, keys).sort(dim=1).values
        return Compared(
            mask=variants.same_document, arrays=(ids,), torch_mask=lambda b, h, q, k: ids[b, q] == ids[b, k]
        )
    if name == "alibi":
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
        return Compared(
            score=variants.alibi, arrays=(slopes,), torch_score=lambda s, b, h, q, k: s + slopes[h] * (k - q)
        )
    if name == "t5_bias":
        table = torch.randn(32, heads, generator=chance)
        biases = table[variants.t5_buckets()].T.contiguous().to(device)
        furthest = biases.shape[1] // 2
        return Compared(
            score=variants.t5_bias,
            arrays=(biases,),
            torch_score=lambda s, b, h, q, k: s + biases[h, (k - q).clamp(-furthest, furthest) + furthest],
        )
    if name == "softcap":
        return Compared(score=variants.softcap(30.0), torch_score=lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0))
    if name == "neighbourhood_2d":
        width = 1 << (keys.bit_length() // 2)
        height, radius = max(1, keys // width), min(6, max(0, (min(width, keys // width) - 1) // 2))

        def near(b: Any, h: Any, q: Any, k: Any) -> Any:
            row = (q // width).clamp(radius, height - 1 - radius)
            column = (q % width).clamp(radius, width - 1 - radius)
            return ((k // width - row).abs() <= radius) & ((k % width - column).abs() <= radius)

        return Compared(mask=variants.neighbourhood_2d(height, width, radius), torch_mask=near)
    if name == "window_3d":
        side = max(1, round(keys ** (1 / 3)))

        def in_window(b: Any, h: Any, q: Any, k: Any) -> Any:
            time_near = (q // (side * side) - k // (side * side)).abs() <= 2
            down = (q // side % side - k // side % side).abs() <= 4
            return time_near & down & ((q % side - k % side).abs() <= 4)

        return Compared(mask=variants.window_3d(side, side, 2, 4, 4), torch_mask=in_window)
    if name == "tree":
        nodes = min(NODES, keys)
        context = torch.full((batch,), keys - nodes, dtype=torch.int32, device=device)
        parents = [int(torch.randint(0, each, (), generator=chance)) if each else -1 for each in range(nodes)]
        ancestors = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
        for node in range(nodes):
            above = node
            while above >= 0:
                ancestors[:, node, above] = True
                above = parents[above]
        ancestors = ancestors.to(device)

        def in_path(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (k < keys - nodes) | ancestors[b, q, (k - (keys - nodes)).clamp(min=0)]

        return Compared(mask=variants.tree, arrays=(context, ancestors), torch_mask=in_path, rows=nodes)
    if name in ("block_sparse", SMALL_BLOCKS):
        side = 64 if name == SMALL_BLOCKS else 128
        blocks = -(-keys // side)
        pattern = torch.rand(heads, blocks, blocks, generator=chance) < 0.2
        pattern |= torch.eye(blocks, dtype=torch.bool)
        pattern = pattern.to(device)
        return Compared(
            mask=variants.block_sparse(side),
            arrays=(pattern,),
            torch_mask=lambda b, h, q, k: pattern[h, q // side, k // side],
        )
    assert name == "dense_bias", name
    values = torch.randn(1, heads, keys, keys, generator=chance).to(device).bfloat16()
    return Compared(
        score=variants.dense_bias, arrays=(values,), torch_score=lambda s, b, h, q, k: s + values[0, h, q, k]
    )


def causal_window(size: int) -> Callable[..., Any]:
    """The mask function of a causal window."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, *arrays: Any) -> Any:
        return ct.maximum(kv_idx - q_idx, q_idx - kv_idx - (size - 1)) <= 0

    return mask_mod


def tensors_of(of: Compared, batch: int, heads: int, keys: int, width: int) -> tuple[Any, Any, Any]:
    """q, k and v in bfloat16."""
    shapes = (of.rows or keys, keys, keys)
    q, k, v = (normal(place, batch, heads, rows, width) for place, rows in enumerate(shapes))
    return q, k, v


def own_call(of: Compared, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """`tiledsched.flex` with the blocks of its mask, if it has one."""
    import tiledsched as ts

    mask = ts.block_mask(of.mask, q, k, arrays=of.arrays) if of.mask and q.shape[2] > 1 else None
    return partial(ts.flex, q, k, v, score_mod=of.score, mask_mod=of.mask, block_mask=mask, arrays=of.arrays)


def torch_call(of: Compared, q: Any, k: Any, v: Any, backend: str = "", compiled: bool = True) -> Callable[[], Any]:
    """torch's FlexAttention."""
    import torch
    from torch.nn.attention import flex_attention as flex

    mask = None
    if of.torch_mask:
        large = compiled and q.shape[2] > 16384  # else all pairs fit into memory
        make = torch.compile(flex.create_block_mask) if large else flex.create_block_mask
        mask = make(of.torch_mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=q.device)
    attend = torch.compile(flex.flex_attention, dynamic=False) if compiled else flex.flex_attention
    more = {"kernel_options": {"BACKEND": backend}} if backend else {}
    return partial(attend, q, k, v, score_mod=of.torch_score, block_mask=mask, **more)


def relative_error(out: Any, wanted: Any) -> float:
    """The relative error by Frobenius norm."""
    return float((out.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def right(names: Sequence[str], batch: int = 2, heads: int = 4) -> Iterator[dict[str, Any]]:
    """A row for each variant and odd size: the error beside that of float64."""
    for name in names:
        for keys, width in ODD:
            of = compared(name, batch, heads, keys)
            q, k, v = tensors_of(of, batch, heads, keys, width)
            wanted = torch_call(of, q.double(), k.double(), v.double(), compiled=False)()
            found = own_call(of, q, k, v)()
            yield {"variant": name, "keys": keys, "width": width, "error": round(relative_error(found, wanted), 6)}


def methods_of(name: str, of: Compared, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Each method's call; one that is not installed, or refuses the problem, is left out with a word on stderr."""
    import torch

    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "tiledsched": lambda: own_call(of, q, k, v),
        "flex": lambda: torch_call(of, q, k, v),
    }
    if importlib.util.find_spec("flash_attn"):
        makers["flash"] = lambda: torch_call(of, q, k, v, "FLASH")
    if name == "dense_bias":
        attend = torch.nn.functional.scaled_dot_product_attention
        makers["sdpa"] = lambda: partial(attend, q, k, v, attn_mask=of.arrays[0])
    found = {}
    for method, make in makers.items():
        try:
            call = make()
            call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name}, {method}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
            continue
        found[method] = call
    return found


def cells(
    names: Sequence[str], sizes: Sequence[int], widths: Sequence[int]
) -> Iterator[tuple[str, int, int, int, int]]:
    """The problems that are timed: variant, batch, heads, keys and width of heads."""
    for keys, width, name in itertools.product(sizes, widths, names):
        batch, heads = max(1, TOKENS // keys), HIDDEN // width
        if (
            name != "dense_bias" or heads * keys * keys < 1 << 31
        ):  # a larger one ends torch's kernel with an illegal access
            yield name, batch, heads, keys, width


def fill_caches(asked: Sequence[tuple[str, int, int, int, int]], processes: int, most_s: float) -> None:
    """Compile every method of these problems in so many processes."""

    def compile_one(cell: tuple[str, int, int, int, int]) -> None:
        name, _, _, keys, width = cell
        options = ("--variants", name, "--sizes", str(keys), "--widths", str(width))
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "docs.studies.flex_variants", "compile", *options],
                stdout=subprocess.DEVNULL,
                timeout=max(0.1, ends - time.monotonic()),
            )

    ends = time.monotonic() + most_s
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(compile_one, asked))


def with_gradients(call: Callable[[], Any], tensors: Sequence[Any], above: Any) -> Any:
    """The gradients of tensors for one of the output, which is computed first."""
    import torch

    return torch.autograd.grad(call(), tensors, above)


def medians_us(methods: Mapping[str, Callable[[], Any]], graphs: bool = False) -> dict[str, float]:
    """Each method's median time in microseconds, captured in a CUDA graph, by turns, behind a flush of the L2 cache. Those that
    cannot be captured are left out. With `graphs` they are replays of graphs already."""
    import torch

    from tiledsched.measure.torch_timing import TorchStopwatch

    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    watch, taken = TorchStopwatch(torch, list(methods.values()), flush), defaultdict(list)
    captured = [index for index in range(len(methods)) if graphs or watch.capture(index, 1)]
    for turn in range(ROUNDS):
        for index in captured[:: 1 if turn % 2 else -1]:
            taken[index].append(watch.read(watch.queue(index, paced=True)))
    return {method: statistics.median(taken[index]) for index, method in enumerate(methods) if index in taken}


def times(
    asked: Sequence[tuple[str, int, int, int, int]], most_s: float, gradients: bool = False
) -> Iterator[dict[str, Any]]:
    """A row for each variant, number of keys and width of heads: each method's time in microseconds, and what ours gains."""
    import torch

    ends = time.monotonic() + most_s
    for name, batch, heads, keys, width in asked:
        if time.monotonic() > ends:
            print(f"no time left for {name} and what follows at {keys} keys", file=sys.stderr)
            return
        torch.compiler.reset()  # else torch gives up on a function that it has compiled for eight problems
        of = compared(name, batch, heads, keys)
        tensors = tensors_of(of, batch, heads, keys, width)
        if gradients:
            above = torch.randn_like(tensors[0])
            for each in tensors:
                each.requires_grad_()
        methods = methods_of(name, of, *tensors)
        if gradients:
            methods = {method: partial(with_gradients, call, tensors, above) for method, call in methods.items()}
        us = medians_us(methods)
        if len(us) < max(1, len(methods)):
            print(f"{name}, {keys} keys: not captured", file=sys.stderr)
            continue
        yield {
            "variant": name,
            "keys": keys,
            "width": width,
            **{f"{each}_us": round(us[each], 2) if each in us else "" for each in METHODS},
            **{
                f"over_{each}": round(us[each] / us["tiledsched"], 4) if each in us and "tiledsched" in us else ""
                for each in METHODS[1:]
            },
        }


def builtin(
    sizes: Sequence[int], widths: Sequence[int], schedules: Sequence[str], most_s: float
) -> Iterator[dict[str, Any]]:
    """A row for each mask, number of keys and width of heads with the time of the mask built into `sdpa`, and one for each
    schedule of `flex` with its time, and how many times as long it takes. All of a mask take turns."""
    import torch

    import tiledsched as ts

    masks = {"causal": (variants.causal, {}), f"window_{WINDOW}": (causal_window(WINDOW), {"window": WINDOW})}
    ends = time.monotonic() + most_s
    for keys, width, (name, (mask, more)) in itertools.product(sizes, widths, masks.items()):
        q, k, v = tensors_of(Compared(), max(1, TOKENS // keys), HIDDEN // width, keys, width)
        blocks, replays, right = ts.block_mask(mask, q, k), {}, None
        of_function = partial(ts.flex, q, k, v, mask_mod=mask, block_mask=blocks)
        for method in ("builtin", *schedules):
            knobs = SCHEDULES.get(method, {})
            call = of_function if method in SCHEDULES else partial(ts.sdpa, q, k, v, is_causal=True, **more)
            if time.monotonic() > ends:
                print(f"no time left for {method} of {name} at {keys} keys", file=sys.stderr)
                break
            try:
                with ts.configure(**knobs, fallback="error"):
                    found = call()
                    graph = torch.cuda.CUDAGraph()
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph):
                        call()
            except Exception as error:
                print(f"{name}, {method}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
                continue
            right = found if right is None else right
            if not relative_error(found, right) <= LARGEST_ERROR:
                raise SystemExit(f"{name}, {keys} keys, D={width}: {method} differs from the built-in mask")
            replays[method] = graph.replay
        us = medians_us(replays, graphs=True)
        for method in us:
            row = {"mask": name, "keys": keys, "width": width, "schedule": method, "us": round(us[method], 2)}
            yield row | {"over_builtin": round(us[method] / us["builtin"], 4) if "builtin" in us else ""}


METHODS = ("tiledsched", "flex", "flash", "sdpa")


def cell_of(row: dict[str, Any]) -> str:
    """What tells a row of times from others."""
    return f"{row['variant']}, {row['keys']}, D={row['width']}"


def gains(
    rows: Sequence[dict[str, Any]],
    methods: Iterable[str] = METHODS[1:],
    name_of: Callable[[dict[str, Any]], str] = cell_of,
) -> list[str]:
    """Our speed over each other method's: geometric mean, and the least with its problem."""
    lines = []
    for method in methods:
        found = {name_of(row): row[f"over_{method}"] for row in rows}
        ratios = {name: float(value) for name, value in found.items() if value != ""}
        if ratios:
            mean, least = math.exp(statistics.mean(map(math.log, ratios.values()))), min(ratios, key=ratios.__getitem__)
            lines.append(f"over {method}: {mean:.3f} in {len(ratios)} cells, least {ratios[least]:.3f} ({least})")
    return lines


def compiles(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each variant with arrays: milliseconds of the first call, and of calls with other contents and other blocks."""
    import torch

    for name in names:
        first, batch, heads, keys = compared(name, 2, 4, 1024), 2, 4, 1024
        if not first.arrays:
            continue
        q, k, v = tensors_of(first, batch, heads, keys, 64)
        spent = []
        for seed in range(4):
            of = compared(name, batch, heads, keys, seed=seed)
            torch.cuda.synchronize()
            began = time.perf_counter()
            own_call(of, q, k, v)()
            torch.cuda.synchronize()
            spent.append(1e3 * (time.perf_counter() - began))
        yield {"variant": name, "first_ms": round(spent[0], 2), "later_ms": round(max(spent[1:]), 3)}


def rows_of(path: str) -> list[dict[str, Any]]:
    """The rows of a file; none where it is not there."""
    if not Path(path).is_file():
        return []
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def lacking(
    asked: Iterable[tuple[str, int, int, int, int]], rows: Sequence[dict[str, Any]]
) -> list[tuple[str, int, int, int, int]]:
    """Those of the problems that no row is of."""
    known = {(row["variant"], int(row["keys"]), int(row["width"])) for row in rows}
    return [cell for cell in asked if (cell[0], *cell[3:]) not in known]


def collected(found: Iterable[dict[str, Any]], path: str, known: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """All rows, behind those that are known, each of which is printed and written to a file, if one is named, as soon as it is
    found."""
    rows = list(known)
    for row in found:
        rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items() if value != ""), flush=True)
        if path:
            write(path, rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, time or count; 1 if an output is wrong."""
    parser = parser_with(
        flag("what", choices=["right", "times", "builtin", "compile", "compiles"]),
        flag(
            "--variants",
            type=words((*NAMES, SMALL_BLOCKS)),
            default=list(NAMES),
            help="the variants, with commas between them",
        ),
        flag("--sizes", type=integers, default=[1024, 4096, 16384, 32768], help="keys of the problems that are timed"),
        flag("--widths", type=integers, default=[64, 128], help="columns of their heads"),
        flag("--most-seconds", type=positive, default=3600, help="seconds after which nothing more is timed"),
        flag("--compilers", type=int, default=0, help="processes that compile before anything is timed"),
        flag(
            "--schedules",
            type=words(tuple(SCHEDULES)),
            default=list(SCHEDULES),
            help="those that `builtin` forces, with commas between them",
        ),
        flag("--gradients", action="store_true", help="time forward and backward together"),
        flag("--lacking", action="store_true", help="keep the rows of the file, and time only problems that it lacks"),
        flag("--csv", default="", help="a file for the rows"),
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args(arguments)
    began, known = time.monotonic(), rows_of(options.csv) if options.lacking else []
    asked = lacking(cells(options.variants, options.sizes, options.widths), known)
    left_s = lambda: options.most_seconds + began - time.monotonic()  # noqa: E731
    if options.what == "right":
        found = right(options.variants)
    elif options.what == "compile":
        for name, batch, heads, keys, width in asked:
            of = compared(name, batch, heads, keys)
            methods_of(name, of, *tensors_of(of, batch, heads, keys, width))
        return 0
    elif options.what == "times":
        if options.compilers:
            fill_caches(asked, options.compilers, options.most_seconds / 2)
            print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr)
        found = times(asked, left_s(), options.gradients)
    elif options.what == "builtin":
        found = builtin(options.sizes, options.widths, options.schedules, options.most_seconds)
    else:
        found = compiles(options.variants)
    rows = collected(found, options.csv, known)
    print("\n".join(gains(rows) if options.what == "times" else []))
    wrong = [row for row in rows if options.what == "right" and not row["error"] <= LARGEST_ERROR]
    return int(bool(wrong) or not rows)


if __name__ == "__main__":
    raise SystemExit(main())
