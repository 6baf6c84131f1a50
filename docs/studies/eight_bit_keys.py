"""Decoding over keys and values in 8 bits against 16 bits: `python -m docs.studies.eight_bit_keys times --csv FILE`.

Needs a GPU, and the compiler. A cell is a batch of sequences of 8192 keys of 128 columns, 8 key heads, and 32 or 64 query heads,
each with one row, whose keys lie one after the other or in pages. All programs of a cell take turns in one paced run: ours in 8
bits with a scale for each head, ours in 16 bits (bfloat16), ours in 16 bits over half the keys, which are as many bytes as all of
them in 8 bits, and torch's own backends in 16 bits where they compute the cell. Each is captured in a CUDA graph, behind a flush
of the L2 cache, and queued ahead of the GPU. The programs are built first, all at once. `errors` needs no GPU: the errors that 8
bits make, in the interpreter (docs/serving.md).

`prompts` asks about prompts with queries in 8 bits, too: 2 sequences of 1024 to 16384 rows and keys, 16 heads of 128 or 64
columns, with and without a causal mask. A row is a method: what is served in 8 bits, of values by columns and of values by rows,
which are copied; other schedules in 8 bits; what is served in bfloat16; and torch's cuDNN in bfloat16. Errors are of one head
against float64 over numbers that nothing rounded.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from docs.studies.batch_invariance import FLUSHED_BYTES, write
from docs.studies.flags import flag, integers, names, parser_with, positive
from tiledsched.core.errors import TiledschedError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention

KEYS, WIDTH, KV_HEADS = 8192, 128, 8
BATCHES, HEADS, PAGES = (16, 64, 1, 128, 4), (32, 64), (0, 16)
ROUNDS = 25
LARGEST = 448.0
"""The largest number in 8 bits."""
SHARES = {1: (32, 64), 4: (8, 16), 16: (1, 2), 64: (1,), 128: (1,)}
"""Batch -> shares of the keys that are tried."""


KINDS = ("8", "16", "half")
"""Keys in 8 bits, in 16 bits, and half as many in 16 bits."""


def problems(batch: int, heads: int, page: int) -> tuple[Problem, ...]:
    """The problems of a cell, by `KINDS`."""
    sizes = {"batch": batch, "heads": heads, "kv_heads": KV_HEADS, "seq_q": 1, "head_dim": WIDTH, "dtype": "bfloat16"}
    places = {"page": page, "lengths": True} if page else {}
    kinds = ((KEYS, "head"), (KEYS, ""), (KEYS // 2, ""))
    return tuple(Attention.problem(**sizes, **places, seq_k=keys, kv8=kv8) for keys, kv8 in kinds)


def tried(problem: Problem, arch: str, served: Schedule, few: bool) -> list[Schedule]:
    """What is served, and schedules that may be faster; with `few`, of two sizes of tiles."""
    space, found = space_for(arch, Attention), [served]
    tiles = ((16, 128, 2), (16, 64, 3), (16, 128, 3)) if problem.kv8 else ((64, 64, 1), (64, 128, 2))
    tiles = tiles[:2] if few else tiles
    shares = SHARES.get(problem.batch, (1,))
    for (rows, keys, blocks), share, ahead in itertools.product(tiles, shares, (False, True)):
        plain = problem.kv8 and not problem.page and share == 1
        if (ahead or (keys, blocks) == (128, 3)) and not plain:
            continue
        changed = space.default(problem).replace(
            tile_m=rows,
            tile_n=keys,
            occupancy=blocks,
            pack_gqa=True,
            num_worker_warps=4,
            kv_splits=share,
            kv_combine="launch" if share > 1 else "last_block",
            page_lookup="scalar" if 0 < problem.page < keys else "gather",
            loop_split=bool(problem.page),
            qk_ahead=ahead,
        )
        found.append(changed)
    return list(dict.fromkeys(found))


def build(of: Sequence[tuple[Problem, Schedule]], device: Any, most_s: float) -> set[tuple[Problem, Schedule]]:
    """Have every program on disk where launches look for it, compiled in all processes at once; those that are there in time."""
    from tiledsched.build.compiler import BuildTask
    from tiledsched.build.cubin import parts_with_host_code
    from tiledsched.build.pool import BuildPool
    from tiledsched.build.store import StoredProgram, write_program
    from tiledsched.core.launches import symbol
    from tiledsched.serve import process
    from tiledsched.serve.prebuilt import make_kernel

    ends, tasks, paths_of = time.monotonic() + most_s, dict[Any, BuildTask](), dict[Any, Any]()
    for pair in of:
        objects = make_kernel(Attention, pair[1], pair[0], process.settings(), device)
        paths = paths_of[pair] = tuple(each.declared()[1] for each in objects)
        if None not in paths and not all(path.is_file() for path in paths):
            tasks[paths] = BuildTask(kernel="attention", schedule=pair[1], problem=pair[0], arch=device.arch)
    pool, places = BuildPool(), {task: paths for paths, task in tasks.items()}
    for built in pool.build(tasks.values()) if tasks else ():
        if built.artifact is None:
            print(f"{built.task.problem}: {built.task.schedule.short()} {built.failure}", file=sys.stderr)
        else:
            for path, cubin in zip(places[built.task], parts_with_host_code(built.artifact.cubin), strict=True):
                write_program(path, StoredProgram(cubin=cubin, symbol=symbol(Attention)))
        if time.monotonic() > ends:
            print("no time left to build the rest", file=sys.stderr)
            break
    pool.close()
    return {pair for pair, paths in paths_of.items() if None not in paths and all(path.is_file() for path in paths)}


def calls_of(batch: int, heads: int, page: int, device: str = "cuda") -> tuple[Any, ...]:
    """The calls of a cell, by `KINDS`, over the same keys and values but for their rounding and number."""
    import torch

    from tiledsched.ops.features import NO_FEATURES, AttentionFeatures
    from tiledsched.ops.plans import AttentionCall

    make = torch.Generator(device=device).manual_seed(batch * heads)
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(batch, heads, 1, WIDTH, generator=make, **kind)
    shape = (batch * KEYS // page, page, KV_HEADS, WIDTH) if page else (batch, KV_HEADS, KEYS, WIDTH)
    k, v = (torch.randn(shape, generator=make, **kind) for _ in range(2))
    k, v = (each.transpose(1, 2) if page else each for each in (k, v))
    scale = torch.full((KV_HEADS,), 6.0 / LARGEST, device=device)
    k8, v8 = ((each / scale[0].item()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn) for each in (k, v))
    places = {}
    if page:
        table = torch.randperm(batch * KEYS // page, generator=make, device=device).to(torch.int32)
        lengths = torch.full((batch,), KEYS, dtype=torch.int32, device=device)
        places = {"block_table": table.view(batch, -1), "key_lengths": lengths}
        half_table = table.view(batch, -1)[:, : KEYS // 2 // page].contiguous()
        half = k, v, AttentionFeatures(block_table=half_table, key_lengths=lengths // 2)
    else:
        half = *(each[:, :, : KEYS // 2].contiguous() for each in (k, v)), NO_FEATURES
    wide = AttentionFeatures(**places) if page else NO_FEATURES
    eight = AttentionFeatures(**places, k_scale=scale, v_scale=scale)
    operands = (k8, v8, eight), (k, v, wide), half
    return tuple(AttentionCall(q, keys, values, None, None, False, features) for keys, values, features in operands)


def torch_calls(call: Any) -> dict[str, Callable[[], Any]]:
    """torch's attention in 16 bits by the backends that take few rows."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: Any) -> Callable[[], Any]:
        def attend() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(call.q, call.k, call.v, enable_gqa=True)

        return attend

    return {"cudnn": by(SDPBackend.CUDNN_ATTENTION), "flash": by(SDPBackend.FLASH_ATTENTION)}


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Each call's median time in microseconds; calls that fail or cannot be captured are left out."""
    import torch

    from tiledsched.measure.timing import TorchStopwatch

    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    watch, taken = TorchStopwatch(torch, list(calls.values()), flush), defaultdict[int, list[float]](list)
    captured = [index for index in range(len(calls)) if watch.capture(index, 1)]
    for turn in range(rounds):
        for index in captured[:: 1 if turn % 2 else -1]:
            taken[index].append(watch.read(watch.queue(index, paced=True)))
    return {name: statistics.median(taken[index]) for index, name in enumerate(calls) if index in taken}


def times(cells: Sequence[tuple[int, int, int]], few: bool, rounds: int, most_s: float) -> Iterator[dict[str, Any]]:
    """A row for each cell: the fastest program of each kind, what is served, and torch. Prints each program's time."""
    import torch

    from tiledsched.serve import process

    began, device = time.monotonic(), process.device_facts(0)
    table = process.table(Attention)
    of: dict[tuple[int, int, int], list[tuple[Any, list[Schedule]]]] = {}
    for cell in cells:
        of[cell] = []
        for problem in problems(*cell):
            served = table.resolve(problem, device.arch, device.name)
            of[cell].append((served, tried(problem, device.arch, served.schedule, few)))
    pairs = [
        (problem, schedule)
        for cell in cells
        for problem, (_, schedules) in zip(problems(*cell), of[cell], strict=True)
        for schedule in schedules
    ]
    ready = build(pairs, device, 0.6 * most_s)
    print(f"{len(ready)} of {len(set(pairs))} built, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for cell in cells:
        if time.monotonic() - began > most_s:
            print(f"no time left for {cell} and what follows", file=sys.stderr)
            return
        calls: dict[str, Callable[[], Any]] = {}
        made, right = dict(zip(KINDS, calls_of(*cell), strict=True)), {}
        for (bits, call), (served, schedules) in zip(made.items(), of[cell], strict=True):
            for place, schedule in enumerate(schedules):
                name = f"{bits}:{place}"
                if (call.problem(), schedule) not in ready:
                    continue
                try:
                    plan = call.make_plan(replace(served, schedule=schedule, rivals=(), alternatives=()))
                    right[name] = call.launch(plan, first=True).float()
                except TiledschedError as error:
                    print(f"{cell} {schedule.short()}: {error}", file=sys.stderr)
                    continue
                calls[name] = partial(call.launch, plan, keep_zeros=True)
        calls |= torch_calls(made["16"]) if not cell[2] else {}
        if not all(any(name.startswith(bits) for name in right) for bits in made):
            print(f"{cell}: not built", file=sys.stderr)
            continue
        us = medians(calls, rounds)
        best = {bits: min((n for n in us if n.startswith(f"{bits}:")), key=us.__getitem__) for bits in made}
        for bits, (_, schedules) in zip(made, of[cell], strict=True):
            base = right[best["half" if bits == "half" else "16"]]
            for place, schedule in enumerate(schedules):
                name = f"{bits}:{place}"
                if name in us:
                    apart = float((right[name] - base).norm() / base.norm())
                    print(f"{cell} {name} {us[name]:.1f} us {apart:.1e} {schedule.short()}", flush=True)
        row: dict[str, Any] = {"batch": cell[0], "heads": cell[1], "page": cell[2]}
        row |= {f"best_{bits}_us": round(us[best[bits]], 2) for bits in made}
        row |= {f"served_{bits}_us": round(us.get(f"{bits}:0", math.nan), 2) for bits in made}
        row |= {each: round(us[each], 2) if each in us else "" for each in ("cudnn", "flash")}
        row["gain"] = round(us[best["16"]] / us[best["8"]], 3)
        row["half_gain"] = round(us[best["16"]] / us[best["half"]], 3)
        row["served_gain"] = round(us.get("16:0", math.nan) / us.get("8:0", math.nan), 3)
        row |= {f"best_{bits}": of[cell][n][1][int(best[bits].split(":")[1])].short() for n, bits in enumerate(made)}
        yield row
        del calls, made, right, us
        torch.cuda.empty_cache()


PROMPT_LENGTHS, PROMPT_WIDTHS, SEQUENCES, PROMPT_HEADS = (8192, 4096, 2048, 16384, 1024), (128, 64), 2, 16
ROWS_AT_ONCE = 2048
"""Rows whose scores are held in float64."""
PROMPT_TILES: dict[str, dict[str, Any]] = {
    "64x128": {"tile_m": 64, "occupancy": 2, "num_worker_warps": 4},
    "64x128 ahead": {"tile_m": 64, "occupancy": 2, "num_worker_warps": 4, "qk_ahead": True},
    "128x128": {"tile_m": 128, "occupancy": 1, "num_worker_warps": 8},
    "128x128 persistent": {"tile_m": 128, "occupancy": 1, "num_worker_warps": 8, "store_late": True},
    "128x256 persistent": {"tile_m": 128, "kv_subtiles": 2, "occupancy": 1, "num_worker_warps": 8, "store_late": True},
}
"""The schedules in 8 bits that are tried, beside what is served."""


def prompt_schedules(problem: Problem, arch: str) -> dict[str, Schedule]:
    """The schedules that are tried on a prompt, by name. Without a mask no step masks; with one, long blocks begin."""
    found, causal = {}, problem.causal
    for name, tile in PROMPT_TILES.items():
        knobs = {"tile_n": 128, "loop_split": causal, "block_order": "swizzled" if causal else "natural", **tile}
        if tile.get("store_late"):
            knobs |= {
                "persistent": "snake" if causal else "strided",
                "block_order": "reversed" if causal else "natural",
            }
        found[name] = space_for(arch, Attention).default(problem).replace(**knobs)
    return found


def prompt_calls(keys: int, width: int, causal: bool, device: str = "cuda") -> tuple[dict[str, Any], Any]:
    """The calls of a prompt in 8 bits, of values by columns and by rows, and in 16 bits; and q, k and v of the last head in
    float64, before they were rounded.
    """
    import torch

    from tiledsched.ops.features import NO_FEATURES, AttentionFeatures
    from tiledsched.ops.plans import AttentionCall

    make, mask = torch.Generator(device=device).manual_seed(keys), "top_left" if causal else None
    narrow, scales, wide, exact = [], [], [], []
    for _ in "qkv":
        each = torch.randn(SEQUENCES, PROMPT_HEADS, keys, width, generator=make, device=device)
        scale = each.abs().amax((0, 2, 3)) / LARGEST
        narrow.append((each / scale[:, None, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn))
        scales.append(scale)
        wide.append(each.bfloat16())
        exact.append(each[-1, -1].double())
    (q, k, v), eight = narrow, AttentionFeatures(k_scale=scales[0] * scales[1], v_scale=scales[2])
    calls = {
        "8 bits": AttentionCall(q, k, v.mT.contiguous().mT, mask, None, False, eight),
        "8 bits, values copied": AttentionCall(q, k, v, mask, None, False, eight),
        "bfloat16": AttentionCall(wide[0], wide[1], wide[2], mask, None, False, NO_FEATURES),
    }
    return calls, exact


def exact_attention(head: Sequence[Any], causal: bool) -> Any:
    """Attention of one head, given as q, k and v in float64, some rows at a time."""
    import torch

    q, k, v = head
    found, columns = [], torch.arange(len(k), device=k.device)
    for first in range(0, len(q), ROWS_AT_ONCE):
        scores = q[first : first + ROWS_AT_ONCE] @ k.T / math.sqrt(q.shape[1])
        if causal:
            rows = torch.arange(first, first + len(scores), device=k.device)
            scores.masked_fill_(columns > rows[:, None], -math.inf)
        found.append(torch.softmax(scores, -1) @ v)
    return torch.cat(found)


def prompts(lengths: Sequence[int], widths: Sequence[int], rounds: int, most_s: float) -> Iterator[dict[str, Any]]:
    """A row for each method and prompt: its median time, its rate and its error."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tiledsched.serve import process

    began, device, table = time.monotonic(), process.device_facts(0), process.table(Attention)
    sizes = {"batch": SEQUENCES, "heads": PROMPT_HEADS, "kv_heads": PROMPT_HEADS, "dtype": "bfloat16"}
    cells = [
        Attention.problem(**sizes, head_dim=width, seq_q=keys, seq_k=keys, causal=causal)
        for width, keys, causal in itertools.product(widths, lengths, (False, True))
    ]
    of: dict[Problem, list[tuple[str, str, Problem, Any]]] = {}
    for wide in cells:
        narrow = wide.replace(kv8="head", q8=True)
        served = {p: table.resolve(p, device.arch, device.name) for p in (wide, narrow)}
        of[wide] = [
            ("8 bits, served", "8 bits", narrow, served[narrow]),
            ("8 bits, values copied", "8 bits, values copied", narrow, served[narrow]),
            *(
                (f"8 bits, {name}", "8 bits", narrow, replace(served[narrow], schedule=schedule))
                for name, schedule in prompt_schedules(narrow, device.arch).items()
            ),
            ("bfloat16, served", "bfloat16", wide, served[wide]),
        ]
    pairs = [(p, each.schedule) for methods in of.values() for _, _, p, each in methods]
    ready = build(pairs, device, 0.6 * most_s)
    print(f"{len(ready)} of {len(set(pairs))} built, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for wide, methods in of.items():
        if time.monotonic() - began > most_s:
            print(f"no time left for {wide} and what follows", file=sys.stderr)
            return
        made, exact = prompt_calls(wide.seq_k, wide.head_dim, wide.causal)
        right, about = exact_attention(exact, wide.causal), {}
        calls: dict[str, Callable[[], Any]] = {}
        for name, given, p, answer in methods:
            if (p, answer.schedule) not in ready:
                continue
            try:
                plan = made[given].make_plan(replace(answer, rivals=(), alternatives=()))
                about[name] = made[given].launch(plan, first=True)[-1, -1], answer.schedule.short()
            except TiledschedError as error:
                print(f"{wide} {name} {answer.schedule.short()}: {error}", file=sys.stderr)
                continue
            calls[name] = partial(made[given].launch, plan, keep_zeros=True)

        def cudnn(given: Any = made["bfloat16"], causal: bool = wide.causal) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*given[:3], is_causal=causal)

        calls["bfloat16, cuDNN"], about["bfloat16, cuDNN"] = cudnn, (cudnn()[-1, -1], "")
        for name, us in medians(calls, rounds).items():
            out, schedule = about[name]
            yield {
                "keys": wide.seq_k,
                "columns": wide.head_dim,
                "causal": wide.causal,
                "method": name,
                "us": round(us, 2),
                "tflops": round(Attention.flops(wide) / us / 1e6, 1),
                "error": f"{float((out.double() - right).norm() / right.norm()):.4f}",
                "schedule": schedule,
            }
        del made, exact, right, calls, about, cudnn
        torch.cuda.empty_cache()


SPREADS = {"alike": 1.0, "heads 1000 to 1": 1e3, "heads 100000 to 1": 1e5}
"""Inputs -> how much larger the numbers of the first key head are than those of the last."""


def errors() -> Iterator[dict[str, Any]]:
    """A row for each kind of inputs: relative errors of rows that decode over 512 normal keys of 128 columns, by the
    kernels in the interpreter against float64 over keys that nothing rounded; the worst of the heads.

    `of 16 bits` is of bfloat16 keys, `of tensor` and so on of keys in 8 bits with such scales, and `of the kernel` of the latter
    against float64 over the same keys in 8 bits.
    """
    import ml_dtypes
    import numpy

    from tiledsched.interpreter import run_schedule
    from tiledsched.kernels.attention.inputs import in_eight_bits, in_pages
    from tiledsched.kernels.attention.reference import attention_and_lse, scaled_numbers

    rng, bfloat16 = numpy.random.default_rng(0), numpy.dtype(ml_dtypes.bfloat16)
    make = {"seq_q": 1, "seq_k": 512, "head_dim": WIDTH, "heads": 16, "kv_heads": 4, "batch": 2, "dtype": "bfloat16"}
    pages = {"page": 16, "lengths": True}
    places = {
        "Table": rng.permutation(64).reshape(2, 32).astype(numpy.int32),
        "Lengths": numpy.full(2, 512, numpy.int32),
    }
    q = rng.standard_normal((2, 16, 1, WIDTH)).astype(bfloat16)
    for name, ratio in SPREADS.items():
        sizes = numpy.geomspace(1.0, 1.0 / ratio, 4)[:, None, None]
        k = rng.standard_normal((2, 4, 512, WIDTH)) * (1.0 if ratio == 1.0 else sizes)
        v = rng.standard_normal((2, 4, 512, WIDTH)) * sizes
        q_of = q if ratio == 1.0 else (q / numpy.repeat(sizes, 4, axis=0)).astype(bfloat16)

        def exact(p: Problem, keys: Any, values: Any, queries: Any = q_of) -> Any:
            paged: dict[str, Any] = {"table": places["Table"], "lengths": places["Lengths"]} if p.page else {}
            mask: dict[str, Any] = {"causal": False, "scale": WIDTH**-0.5}
            return attention_and_lse(numpy, queries.astype("float64"), keys, values, **mask, **paged)[0]

        def error(found: Any, wanted: Any) -> float:
            apart = numpy.linalg.norm(found.astype("float64") - wanted, axis=(2, 3))
            return float((apart / numpy.linalg.norm(wanted, axis=(2, 3))).max())

        row: dict[str, Any] = {"inputs": name}
        for kv8 in ("", "tensor", "head", "page"):
            p = Attention.problem(**make, kv8=kv8, **(pages if kv8 == "page" else {}))
            own = [in_pages(numpy, each, places["Table"], 16) if p.page else each for each in (k, v)]
            given = {"Q": q_of} | (places if p.page else {})
            if kv8:
                (words, k_scale), (more, v_scale) = (in_eight_bits(numpy, each, p) for each in own)
                given |= {"K": words, "V": more, "KScale": k_scale, "VScale": v_scale}
            else:
                given |= dict(zip("KV", (each.astype(bfloat16) for each in own), strict=True))
            changed = space_for("sm_90", Attention).default(p).replace(tile_m=16, pack_gqa=True)
            found = run_schedule(Attention, p, changed, given)["Out"]
            row[f"of {kv8 or '16 bits'}"] = f"{error(found, exact(p, *own)):.1e}"
            if kv8:
                narrow = [scaled_numbers(numpy, given[n], given[f"{n}Scale"], p, "float64") for n in "KV"]
                row["of the kernel"] = f"{error(found, exact(p, *narrow)):.1e}"
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part of the study."""
    parser = parser_with(
        flag("part", choices=("times", "errors", "prompts"), help="what is asked"),
        flag("--batches", type=integers, default=list(BATCHES), help="sequences that decode together"),
        flag("--heads", type=integers, default=list(HEADS), help="query heads"),
        flag("--pages", type=names, default=[str(each) for each in PAGES], help="keys of a page; 0 for none"),
        flag("--lengths", type=integers, default=list(PROMPT_LENGTHS), help="rows and keys of prompts"),
        flag("--widths", type=integers, default=list(PROMPT_WIDTHS), help="columns of a head of prompts"),
        flag("--few", action="store_true", help="fewer schedules"),
        flag("--rounds", type=positive, default=ROUNDS, help="of all programs of a cell"),
        flag("--most-seconds", type=positive, default=600, help="after which no cell is begun"),
        flag("--csv", default="", help="the file of the rows"),
        prog="python -m docs.studies.eight_bit_keys",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args(arguments)
    if options.part == "errors":
        for row in errors():
            print(" ".join(f"{name}={value}" for name, value in row.items()))
        return 0
    cells = [
        (batch, heads, page)
        for page, heads, batch in itertools.product(map(int, options.pages), options.heads, options.batches)
    ]
    rows = []
    for row in (
        prompts(options.lengths, options.widths, options.rounds, options.most_seconds)
        if options.part == "prompts"
        else times(cells, options.few, options.rounds, options.most_seconds)
    ):
        rows.append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        if options.csv:
            write(options.csv, rows)
    gains = [row["gain"] for row in rows if "gain" in row]
    if gains:
        mean = math.exp(statistics.mean(map(math.log, gains)))
        print(f"8 bits over 16 bits: {mean:.3f} in {len(gains)} cells, least {min(gains):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
