r"""The twelve variants of docs/examples/attention_variants.py on a GPU beside torch's FlexAttention: errors, times and compiles.

    python -m docs.studies.flex_variants right
    python -m docs.studies.flex_variants times --apart --most-seconds 240 --csv times.csv
    python -m docs.studies.flex_variants times --sizes 1024,16384,32768 --most-seconds 120 --csv times.csv --lacking
    python -m docs.studies.flex_variants builtin --sizes 4096 --csv builtin.csv
    python -m docs.studies.flex_variants compiles

`right` compares outputs at odd sizes with torch's FlexAttention, which is not compiled and computes in float64. `times` times
`tiledsched.flex`, FlexAttention compiled, FlexAttention on its FLASH backend where that is installed, and for a dense bias also
torch's `scaled_dot_product_attention`. All are given their masks' blocks, are captured in CUDA graphs, take turns, and are timed
behind a flush of the L2 cache. An output that differs from ours is reported, and its method left out. Each row is written when
it was measured; with `--lacking` the rows of the file are kept, and only problems that it lacks are timed. Of a variant such as
`causal_gradients` the gradients of q, k and v are computed, too, and the times are those of both passes; `--gradients` adds these
at 4096 keys.

Every method compiles for seconds for each problem. With `--apart`, each variant and width of heads therefore has a process of its
own: all of them compile at once, and none is timed before; then problem after problem is timed, in the order of the flags, in
the process that compiled it, while the others wait. A kernel that ends its process, as an illegal access of memory does, takes
with it no problem of another variant.

`builtin` times a causal mask and a causal window as functions, by several schedules, beside the same masks built into
`tiledsched.sdpa`; or, with `--variants`, others by these schedules. `compiles` calls each variant again with other contents of
its arrays, and times these calls.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import importlib.util
import itertools
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
GRADIENTS = "_gradients"
"""The end of a variant's name with which forward and backward are timed together."""
SMALL_BLOCKS = "block_sparse_64"
"""The pattern of blocks of 64, a quarter of those that kernels skip; with `--variants` only."""
ODD = ((1, 1), (63, 64), (129, 128), (300, 64), (1000, 128))
"""Keys, and columns of a head, of the problems that are compared."""
TOKENS, HIDDEN, NODES = 16384, 2048, 64
"""Tokens of a call and columns of all heads, as in the papers on FlashAttention; and nodes of a tree."""
ROUNDS = 11
WINDOW = 512
"""Keys that a row sees in the causal window beside the built-in one."""
BUILT_IN = ("causal", f"window_{WINDOW}")
"""Masks that `tiledsched.sdpa` has, too."""
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
    "large_in_registers": {**PLAIN, **LARGE, "block_order": "swizzled", "q_in_registers": True},
    "large_reversed": {**PLAIN, **LARGE, "block_order": "reversed"},
    "three_swizzled": {**PLAIN, **SMALL, "tile_n": 64, "occupancy": 3, "latency_k": 2, "block_order": "swizzled"},
}
"""Schedules by which `builtin` has functions computed: the one that serves, and some that are forced, by tiles and order."""
PREPARING = 0.7
"""The share of the time within which processes of `--apart` compile; what is not ready then is left out."""
LARGEST_ERROR = 2e-2
"""Largest relative error, by Frobenius norm, of an output in bfloat16; gradients of two methods may differ by twice as much."""


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
    axes: str = ""
    """Which of `b` and `h` the mask reads: torch's lists are broadcast over the others, as ours are."""


def within(x: Any, low: int, high: int) -> Any:
    """A number clamped, as torch's FLASH backend takes it, too."""
    import torch

    return torch.where(x < low, low, torch.where(x > high, high, x))


def compared(name: str, batch: int, heads: int, keys: int, device: str = "cuda", seed: int = 0) -> Compared:
    """A variant for a problem of so many keys; the contents of its arrays follow from the seed."""
    import torch

    chance = torch.Generator().manual_seed(seed)

    def drawn(below: int, *shape: int) -> Any:
        return torch.randint(0, below, shape, generator=chance, dtype=torch.int32).to(device)

    if name == "causal":
        return Compared(mask=variants.causal, torch_mask=lambda b, h, q, k: k <= q)
    if name == BUILT_IN[1]:
        return Compared(mask=causal_window(WINDOW), torch_mask=lambda b, h, q, k: (k <= q) & (q - k < WINDOW))
    if name == "prefix_lm":
        prefix = drawn(keys // 2 + 1, batch)
        return Compared(
            mask=variants.prefix_lm,
            arrays=(prefix,),
            torch_mask=lambda b, h, q, k: (k <= q) | (k < prefix[b]),
            axes="b",
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
            mask=variants.same_document, arrays=(ids,), torch_mask=lambda b, h, q, k: ids[b, q] == ids[b, k], axes="b"
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
            torch_score=lambda s, b, h, q, k: s + biases[h, within(k - q, -furthest, furthest) + furthest],
        )
    if name == "softcap":
        return Compared(score=variants.softcap(30.0), torch_score=lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0))
    if name == "neighbourhood_2d":
        width = 1 << (keys.bit_length() // 2)
        height, radius = max(1, keys // width), min(6, max(0, (min(width, keys // width) - 1) // 2))

        def near(b: Any, h: Any, q: Any, k: Any) -> Any:
            row = within(q // width, radius, height - 1 - radius)
            column = within(q % width, radius, width - 1 - radius)
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
            return (k < keys - nodes) | ancestors[b, q, within(k - (keys - nodes), 0, nodes)]

        return Compared(mask=variants.tree, arrays=(context, ancestors), torch_mask=in_path, rows=nodes, axes="b")
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
            axes="h",
        )
    assert name == "dense_bias", name
    of = heads if heads * keys * keys < 1 << 31 else 1  # torch's kernel ends with an illegal access beyond
    values = normal(seed, 1, of, keys, keys, device=device)
    whole, first = values[0], values[0, 0]  # the FLASH backend takes no number as an index
    each, one = lambda s, b, h, q, k: s + whole[h, q, k], lambda s, b, h, q, k: s + first[q, k]
    return Compared(score=variants.dense_bias, arrays=(values,), torch_score=each if of > 1 else one)


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
        batch, heads = (size if axis in of.axes else 1 for size, axis in zip(q.shape, "bh", strict=False))
        large = compiled and batch * heads * q.shape[2] * k.shape[2] > 1 << 31  # else all pairs fit into memory
        make = torch.compile(flex.create_block_mask) if large else flex.create_block_mask
        with Path(tempfile.gettempdir(), "flex_variants.lock").open("w") as lock:  # those of one process at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            mask = make(of.torch_mask, batch, heads, q.shape[2], k.shape[2], device=q.device)
            torch.cuda.empty_cache()
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


def methods_of(name: str, of: Compared, q: Any, k: Any, v: Any, ends: float) -> dict[str, Callable[[], Any]]:
    """Each method's call, or that of its gradients, computed once. One that is not installed, refuses the problem or computes
    something else is left out with a word on stderr; with no time left, all are."""
    import torch

    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "tiledsched": lambda: own_call(of, q, k, v),
        "flex": lambda: torch_call(of, q, k, v),
    }
    if importlib.util.find_spec("flash_attn"):
        makers["flash"] = lambda: torch_call(of, q, k, v, "FLASH")
    if name == "dense_bias":
        attend, bias = torch.nn.functional.scaled_dot_product_attention, of.arrays[0]
        makers["sdpa"] = lambda: partial(attend, q, k, v, attn_mask=bias)
    gradients = name.endswith(GRADIENTS)
    above = torch.randn_like(q) if gradients else None
    problem, right = f"{name}, {k.shape[2]} keys, D={k.shape[3]}", None
    found: dict[str, Callable[[], Any]] = {}
    for method, make in makers.items():
        if time.monotonic() > ends:
            print(f"{problem}: no time left to compile {method}", file=sys.stderr)
            return {}
        try:
            call = make()
            if gradients:
                call = partial(with_gradients, call, (q, k, v), above)
            results = call() if gradients else (call(),)
            torch.cuda.synchronize()
            right = results if right is None else right
            error = max(map(relative_error, results, right))
            if not error <= (2 if gradients else 1) * LARGEST_ERROR:
                raise ValueError(f"differs from {next(iter(found), 'itself')}, by {error:.3g}")
        except Exception as error:
            print(f"{problem}, {method}: {type(error).__name__}: {str(error).strip()[:300]!r}", file=sys.stderr)
            continue
        found[method] = call
    return found


Cell = tuple[str, int, int, int, int]
"""A problem: variant, batch, heads, keys and width of heads."""


def cells(names: Sequence[str], sizes: Sequence[int], widths: Sequence[int]) -> Iterator[Cell]:
    """The problems that are timed."""
    for keys, width, name in itertools.product(sizes, widths, names):
        yield name, max(1, TOKENS // keys), HIDDEN // width, keys, width


def with_gradients(call: Callable[[], Any], tensors: Sequence[Any], above: Any) -> Any:
    """The gradients of tensors for one of the output, which is computed first."""
    import torch

    return torch.autograd.grad(call(), tensors, above)


def medians_us(methods: Mapping[str, Callable[[], Any]], graphs: bool = False) -> dict[str, float]:
    """Each method's median time in microseconds, captured in a CUDA graph, by turns, behind a flush of the L2 cache. Those that
    cannot be captured are left out. With `graphs` they are replays of graphs already."""
    import torch

    from tiledsched.measure.timing import TorchStopwatch

    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    watch, taken = TorchStopwatch(torch, list(methods.values()), flush), defaultdict(list)
    captured = [index for index in range(len(methods)) if graphs or watch.capture(index, 1)]
    for turn in range(ROUNDS):
        for index in captured[:: 1 if turn % 2 else -1]:
            taken[index].append(watch.read(watch.queue(index, paced=True)))
    return {method: statistics.median(taken[index]) for index, method in enumerate(methods) if index in taken}


def prepared(asked: Iterable[Cell], ends: float) -> Iterator[tuple[Cell, dict[str, Callable[[], Any]]]]:
    """Each problem with the calls of its methods, compiled."""
    import torch

    torch._dynamo.config.recompile_limit = (
        1000  # else torch gives up on a function that it has compiled for eight problems
    )
    for cell in asked:
        name, batch, heads, keys, width = cell
        if time.monotonic() > ends:
            print(f"no time left for {name}, {keys} keys, D={width}", file=sys.stderr)
            continue
        try:
            of, with_gradients = compared(name.removesuffix(GRADIENTS), batch, heads, keys), name.endswith(GRADIENTS)
            q, k, v = (each.requires_grad_(with_gradients) for each in tensors_of(of, batch, heads, keys, width))
            yield cell, methods_of(name, of, q, k, v, ends)
        except torch.OutOfMemoryError:
            print(f"{name}, {keys} keys, D={width}: no memory", file=sys.stderr)
        torch.cuda.empty_cache()  # which other processes may need


def timed(cell: Cell, methods: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The row of a problem: each method's time in microseconds, and what ours gains."""
    us = medians_us(methods)
    for method in methods.keys() - us:
        print(f"{cell[0]}, {cell[3]} keys, {method}: not captured", file=sys.stderr)
    return {
        "variant": cell[0],
        "keys": cell[3],
        "width": cell[4],
        **{f"{each}_us": round(us[each], 2) if each in us else "" for each in METHODS},
        **{
            f"over_{each}": round(us[each] / us["tiledsched"], 4) if each in us and "tiledsched" in us else ""
            for each in METHODS[1:]
        },
    }


def answer(asked: Iterable[Cell], ends: float) -> None:
    """What a process of `--apart` does: prepare, say so, and time the problems whose numbers of keys it is then told."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    ready = {cell[3]: (cell, methods) for cell, methods in prepared(asked, ends) if methods}
    print(sorted(ready), file=answers)
    for line in sys.stdin:
        print(json.dumps(timed(*ready[int(line)]) if int(line) in ready else None), file=answers)


PROGRAM = (sys.executable, "-m", "docs.studies.flex_variants", "answer")


def apart(asked: Sequence[Cell], most_s: float, program: Sequence[str] = PROGRAM) -> Iterator[dict[str, Any]]:
    """The rows of problems that processes compile, one for each variant and width, and then time in turn."""
    began, sizes = time.monotonic(), defaultdict(list)
    for name, _, _, keys, width in asked:
        sizes[name, width].append(str(keys))
    more = ("--most-seconds", str(math.ceil(PREPARING * most_s)))
    workers = {
        key: subprocess.Popen(
            [*program, "--variants", key[0], "--widths", str(key[1]), "--sizes", ",".join(given), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for key, given in sizes.items()
    }

    def end(key: tuple[str, int]) -> None:
        worker = workers.pop(key)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.communicate()

    def read(key: tuple[str, int], until: float) -> Any:
        """A process's next answer; where it gives none until then, None, and the process is ended."""
        answers = workers[key].stdout
        assert answers
        in_time, _, _ = select.select([answers], [], [], max(0.0, began + until - time.monotonic()))
        line = answers.readline() if in_time else ""
        if not line:
            print(f"{key}: {'ended' if in_time else f'no answer by {until:.0f} s'}", file=sys.stderr)
            end(key)
        return json.loads(line or "null")

    try:
        for key in sizes:
            read(key, (1 + PREPARING) / 2 * most_s)
        print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr)
        for name, _, _, keys, width in asked:
            if (name, width) in workers:
                print(keys, file=workers[name, width].stdin, flush=True)
                row = read((name, width), most_s)
                if row:
                    yield row
    finally:
        for key in list(workers):
            end(key)


def builtin(
    names: Sequence[str], sizes: Sequence[int], widths: Sequence[int], schedules: Sequence[str], most_s: float
) -> Iterator[dict[str, Any]]:
    """A row for each mask, number of keys and width of heads with the time of the mask built into `sdpa`, where there is one, and
    one for each schedule of `flex` with its time, and how many times as long it takes. All of a mask take turns."""
    import torch

    import tiledsched as ts

    of_sdpa: dict[str, dict[str, Any]] = {"causal": {}, BUILT_IN[1]: {"window": WINDOW}}
    ends = time.monotonic() + most_s
    for keys, width, name in itertools.product(sizes, widths, names):
        batch, heads = max(1, TOKENS // keys), HIDDEN // width
        of = compared(name, batch, heads, keys)
        q, k, v = tensors_of(of, batch, heads, keys, width)
        calls, replays, right = dict.fromkeys(schedules, own_call(of, q, k, v)), {}, None
        if name in of_sdpa:
            calls = {"builtin": partial(ts.sdpa, q, k, v, is_causal=True, **of_sdpa[name]), **calls}
        for method, call in calls.items():
            knobs = SCHEDULES.get(method, {})
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
                raise SystemExit(f"{name}, {keys} keys, D={width}: {method} differs from the first method")
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


def lacking(asked: Iterable[Cell], rows: Sequence[dict[str, Any]]) -> list[Cell]:
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
        flag("what", choices=["right", "times", "builtin", "compiles", "answer"]),
        flag(
            "--variants",
            type=words((*NAMES, SMALL_BLOCKS, BUILT_IN[1], *(name + GRADIENTS for name in NAMES))),
            help="the variants, with commas between them; unless given all twelve, or for `builtin` those built in",
        ),
        flag("--sizes", type=integers, default=[1024, 4096, 16384, 32768], help="keys of the problems that are timed"),
        flag("--widths", type=integers, default=[64, 128], help="columns of their heads"),
        flag("--most-seconds", type=positive, default=3600, help="seconds after which nothing more is timed"),
        flag("--apart", action="store_true", help="a process for each variant and width compiles ahead"),
        flag(
            "--schedules",
            type=words(tuple(SCHEDULES)),
            default=list(SCHEDULES),
            help="those that `builtin` forces, with commas between them",
        ),
        flag(
            "--gradients", type=words(NAMES), default=[], help="variants of which both passes are timed together, too"
        ),
        flag("--lacking", action="store_true", help="keep the rows of the file, and time only problems that it lacks"),
        flag("--csv", default="", help="a file for the rows"),
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args(arguments)
    options.variants = options.variants or (BUILT_IN if options.what == "builtin" else NAMES)
    began, known = time.monotonic(), rows_of(options.csv) if options.lacking else []
    both = [name + GRADIENTS for name in options.gradients]
    every = (*cells(both, [4096], options.widths), *cells(options.variants, options.sizes, options.widths))
    asked = lacking(every, known)
    ends = began + options.most_seconds
    if options.what == "right":
        found = right(options.variants)
    elif options.what == "answer":
        answer(asked, ends)
        return 0
    elif options.what == "times" and options.apart:
        found = apart(asked, options.most_seconds)
    elif options.what == "times":
        found = (timed(*each) for each in prepared(asked, ends) if each[1])
    elif options.what == "builtin":
        found = builtin(options.variants, options.sizes, options.widths, options.schedules, options.most_seconds)
    else:
        found = compiles(options.variants)
    rows = collected(found, options.csv, known)
    if options.what == "times":
        backward = [row for row in rows if row["variant"].endswith(GRADIENTS)]
        print("\n".join([*gains([row for row in rows if row not in backward]), *gains(backward)]))
    wrong = [row for row in rows if options.what == "right" and not row["error"] <= LARGEST_ERROR]
    return int(bool(wrong) or not rows)


if __name__ == "__main__":
    raise SystemExit(main())
