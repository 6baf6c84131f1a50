r"""Proves on a GPU that a row has the same bits whatever is computed beside it, and says what that costs.

    python -m docs.studies.batch_invariance rows --processes 60 --at-once 10 --csv rows.csv
    python -m docs.studies.batch_invariance times --csv times.csv

`rows` starts processes of their own. Each computes every case once with all rows: 2048 rows of products, norms and chunks of a
prompt, 64 sequences that decode. Then it computes parts of these rows, from a row drawn at random on, eagerly, by `torch.compile`
and in CUDA graphs, and compares the bits. The processes share out the numbers of rows, so that together they compute every number
from 1 on; some numbers all of them compute. A digest of all rows shows that processes agree with each other. All processes
compile products; other functions are compiled by every third one.

`times` times what `tiledsched.batch_invariant()` serves beside what is served otherwise, and products beside torch's (cuBLAS).
All calls are captured in CUDA graphs, take turns, and are timed behind a flush of the L2 cache.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docs.studies.flags import flag, parser_with, positive

WEIGHTS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (10240, 8192))
"""Outputs and inputs of linear layers of Llama 3 with 8 and with 70 billion parameters."""
ROWS, SEQUENCES = 2048, 64
"""Rows of products, norms and prompts, and sequences that decode."""
PROBED = (1, 2, 3, 16, 17, 63, 64, 65, 128, 512, 2048)
"""Numbers of rows that every process computes eagerly and in graphs."""
COMPILED = (2, 17, 64, 333, 2048)
"""Numbers of rows that every process computes by `torch.compile`."""
TIMED = (1, 16, 64, 128, 256, 512, 1024, 2048)
"""Numbers of rows of which products are timed."""
DECODED = tuple((sequences, keys) for sequences in (1, 4, 16, 64) for keys in (1024, 4096, 16384))
"""Sequences and keys of which decoding is timed."""
PROMPTS = (512, 2048, 8192)
"""Rows of prompts that are timed whole."""
COMPILING = 3
"""One process in this number compiles a function other than a product: compiling takes most of a process's time."""
MODES = ("eager", "compiled", "graph")
FLUSHED_BYTES = 128 << 20
ROUNDS = 11
"""Times that each call is timed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function of rows of which any part can be computed alone."""

    name: str
    """What is computed, in words."""
    rows: int
    """Rows that there are."""
    function: Callable[..., Any]
    """The function of tensors that is proven or timed."""
    tensors: Callable[[int, int], tuple[Any, ...]]
    """The tensors of a part: its first row, and its number of rows."""
    rows_of: Callable[[Any], Any] = lambda out: out
    """The output with the rows as its first axis."""
    least: int = 1
    """The fewest rows of a part."""

    def part(self, call: Callable[..., Any], first: int, rows: int) -> Any:
        """The bits of a part, by a call that computes what `function` does."""
        import torch

        return self.rows_of(call(*self.tensors(first, rows))).contiguous().view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one process found out about one case in one mode."""

    case: str
    mode: str
    process: int
    digest: str
    """Of the bits of all rows."""
    numbers: list[int]
    """The numbers of rows that were computed."""
    unequal: list[int]
    """Those of them with a row that had other bits."""


# Cases
def normal(seed: int, *shape: int, scale: float = 1.0, device: str = "cuda") -> Any:
    """The same normal numbers in every process, in bfloat16."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()


def products(weights: Iterable[tuple[int, int]] = WEIGHTS) -> Iterator[Case]:
    """Rows times the weights of linear layers."""
    import tiledsched as ts

    for n, k in weights:
        x, w = normal(1, ROWS, k), normal(2, n, k, scale=k**-0.5).t()
        yield Case(
            name=f"matmul {n}x{k}",
            rows=ROWS,
            function=ts.matmul,
            tensors=lambda first, rows, x=x, w=w: (x[first : first + rows], w),  # type: ignore[misc]
        )


def other_products() -> Iterator[Case]:
    """A product of 8-bit floats with a scale for each row, and one of rows that are sorted by the expert that they go to."""
    import torch

    import tiledsched as ts

    x, w = normal(3, ROWS, 4096).to(torch.float8_e4m3fn), normal(4, 4096, 4096).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = (normal(5, *shape).float().abs() * 0.02 for shape in ((ROWS, 1), (1, 4096)))
    for fast in (True, False):
        yield Case(
            name=f"scaled_matmul 4096x4096{' fast' if fast else ''}",
            rows=ROWS,
            function=partial(ts.scaled_matmul, use_fast_accum=fast),
            tensors=lambda first, rows: (x[first : first + rows], w, scale_a[first : first + rows], scale_b),
        )
    tokens, experts = normal(6, ROWS, 4096), normal(7, 8, 4096, 4096, scale=1 / 64).transpose(1, 2)
    ends = torch.tensor([300, 300, 1000, 1048, 1500, 1501, 1900, ROWS], dtype=torch.int32, device="cuda")
    yield Case(
        name="grouped_matmul 8x4096x4096",
        rows=ROWS,
        function=ts.grouped_matmul,
        tensors=lambda first, rows: (tokens[first : first + rows], experts, (ends - first).clamp(0, rows)),
    )


def norms() -> Iterator[Case]:
    """Functions of the columns of a row."""
    import tiledsched as ts

    x, w, b = normal(8, ROWS, 8192), normal(9, 8192), normal(10, 8192)
    for function, more in ((ts.rms_norm, (w,)), (ts.layer_norm, (w, b)), (ts.softmax, ())):
        yield Case(
            name=f"{function.__name__} 8192",
            rows=ROWS,
            function=function,
            tensors=lambda first, rows, more=more: (x[first : first + rows], *more),  # type: ignore[misc]
        )


def decoding(sequences: int = SEQUENCES, keys: int = 4096) -> Case:
    """One new token of each sequence."""
    import tiledsched as ts

    q, k, v = normal(11, sequences, 32, 1, 128), *(normal(seed, sequences, 8, keys, 128) for seed in (12, 13))
    return Case(
        name=f"sdpa decoding {keys} keys",
        rows=sequences,
        function=ts.sdpa,
        tensors=lambda first, rows: tuple(each[first : first + rows] for each in (q, k, v)),
    )


def chunks(rows: int = ROWS) -> Case:
    """Chunks of a prompt, each with the keys up to its own last row."""
    import tiledsched as ts

    q, k, v = normal(17, 1, 32, rows, 128), *(normal(seed, 1, 8, rows, 128) for seed in (18, 19))
    return Case(
        name=f"sdpa chunks of a prompt of {rows}",
        rows=rows,
        least=2,
        function=partial(ts.sdpa, causal="bottom_right"),
        tensors=lambda first, rows: (q[:, :, first : first + rows], *(each[:, :, : first + rows] for each in (k, v))),
        rows_of=lambda out: out[0].transpose(0, 1),
    )


def attention() -> Iterator[Case]:
    """Decoding; decoding in a cache with room for more keys, whose size changes from part to part; chunks of a prompt."""
    import torch

    import tiledsched as ts

    yield decoding()
    few, most = 16, 2048
    q, k, v = normal(14, few, 32, 1, 128), *(normal(seed, few, 8, 2 * most, 128) for seed in (15, 16))
    lengths = torch.tensor([most - 117 * each for each in range(few)], dtype=torch.int32, device="cuda")

    def in_room(first: int, rows: int) -> tuple[Any, ...]:
        room, part = most + 128 * (rows * 7 % 17), slice(first, first + rows)
        return q[part], k[part, :, :room], v[part, :, :room], lengths[part]

    yield Case(
        name="sdpa decoding in a cache",
        rows=few,
        function=lambda q, k, v, lengths: ts.sdpa(q, k, v, key_lengths=lengths),
        tensors=in_room,
    )
    yield chunks()


KINDS: dict[str, Callable[[], Iterable[Case]]] = {
    "products": products,
    "other products": other_products,
    "norms": norms,
    "attention": attention,
}
"""What is proven, by words that `--kinds` takes."""


# Rows
def numbers_of(case: Case, process: int, processes: int) -> list[int]:
    """The numbers of rows that one of several processes computes: those that all compute, and its share of the others."""
    own = [each for each in range(case.least, case.rows + 1) if each % processes == process % processes]
    return sorted({*own, *(each for each in PROBED if case.least <= each <= case.rows)})


def captured(function: Callable[..., Any], *tensors: Any) -> Any:
    """The output of a call that a CUDA graph has captured, after a replay. No program is loaded within a capture."""
    import torch

    function(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*tensors)
    graph.replay()
    torch.cuda.synchronize()
    return out


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function after `torch.compile`, for tensors of any sizes: all products share one."""
    import torch

    torch._dynamo.config.recompile_limit = 64
    made: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True)
    return made


def prove(case: Case, process: int, processes: int, modes: Sequence[str] = MODES) -> Iterator[Found]:
    """Compare parts of a case with all of its rows, in each mode."""
    import torch

    whole, rng = case.part(case.function, 0, case.rows), random.Random(process)
    digest = hashlib.sha256(whole.cpu().numpy().tobytes()).hexdigest()[:16]
    numbers = numbers_of(case, process, processes)
    calls: dict[str, Callable[[], Callable[..., Any]]] = {
        "eager": lambda: case.function,
        "compiled": lambda: compiled(case.function),
        "graph": lambda: partial(captured, case.function),
    }
    of_mode = {"eager": numbers, "graph": [each for each in numbers if each in PROBED or each % 8 == process % 8]}
    for mode in modes:
        call, unequal = calls[mode](), []
        chosen = of_mode.get(mode, [each for each in COMPILED if case.least <= each <= case.rows])
        for rows in chosen:
            first = rng.randrange(case.rows - rows + 1)
            if not torch.equal(case.part(call, first, rows), whole[first : first + rows]):
                unequal.append(rows)
        yield Found(case=case.name, mode=mode, process=process, digest=digest, numbers=chosen, unequal=unequal)


def one_process(kinds: Sequence[str], process: int, processes: int) -> None:
    """What one process does: it prints what it found, a line of JSON for each case and mode."""
    import torch

    import tiledsched as ts

    with ts.batch_invariant():
        for kind in kinds:
            for index, case in enumerate(KINDS[kind]()):
                in_turn = kind == "products" or index % COMPILING == process % COMPILING
                for found in prove(case, process, processes, MODES if in_turn else ("eager", "graph")):
                    print(json.dumps(asdict(found)), flush=True)
                torch.cuda.empty_cache()


def start(kinds: Sequence[str], processes: int, ends_s: float, process: int) -> list[Found]:
    """What another process finds by a time of `time.monotonic()`, at which it is killed. Its hashes of text are its own."""
    first = process % len(kinds)  # each process builds other programs first
    turned = ",".join([*kinds[first:], *kinds[:first]])
    command = [sys.executable, "-m", "docs.studies.batch_invariance", "process", "--kinds", turned]
    command += ["--process", str(process), "--processes", str(processes)]
    env = os.environ | {"PYTHONHASHSEED": str(process + 1), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            printed, errors = running.communicate(timeout=max(0.1, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.kill()
            printed, errors = running.communicate()
    found = [Found(**json.loads(line)) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    if running.returncode:
        print(f"process {process} ended with {running.returncode}: {errors[-1500:]}", file=sys.stderr, flush=True)
        found.append(Found(case="process", mode="ended", process=process, digest="", numbers=[0], unequal=[0]))
    return found


def summary(found: Sequence[Found]) -> tuple[list[str], bool]:
    """A line for each case and mode, and whether all bits were equal."""
    by_case: dict[tuple[str, str], list[Found]] = defaultdict(list)
    for each in found:
        by_case[each.case, each.mode].append(each)
    lines, right = [], bool(found)
    for (case, mode), of in by_case.items():
        digests, good = {each.digest for each in of}, sum(not each.unequal for each in of)
        numbers = {number for each in of for number in each.numbers}
        wrong = sorted({number for each in of for number in each.unequal})
        right = right and len(digests) == 1 and good == len(of)
        parts = sum(len(each.numbers) for each in of)
        lines.append(
            f"{case:28} {mode:8} equal in {good} of {len(of)} processes, {len(numbers)} numbers of rows, {parts} calls, "
            f"{len(digests)} digest{'s' if len(digests) > 1 else ''}" + (f"; unequal: {wrong[:8]}" if wrong else "")
        )
    return lines, right


def prove_in_processes(kinds: Sequence[str], processes: int, at_once: int, most_s: float, path: str) -> int:
    """Start the processes, print what they found, and write it; 1 if any bits differ, or a process did not finish."""
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        of_process = pool.map(partial(start, kinds, processes, began + most_s), range(processes))
        found = [each for of in of_process for each in of]
    write(path, [asdict(each) | {"numbers": len(each.numbers), "unequal": str(each.unequal)} for each in found])
    lines, right = summary(found)
    print("\n".join([*lines, f"{processes} processes, {time.monotonic() - began:.0f} s"]))
    return 0 if right else 1


# Times
def times(kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each product and number of rows, for decoding with so many sequences and keys, and for prompts."""
    import torch

    for case in products() if "products" in kinds else ():
        for rows in TIMED:
            yield from row(case, rows, torch.matmul)
    for sequences, keys in DECODED if "attention" in kinds else ():
        yield from row(decoding(sequences, keys), sequences, None)
        torch.cuda.empty_cache()
    for rows in PROMPTS if "attention" in kinds else ():
        yield from row(chunks(rows), rows, None)


def row(case: Case, rows: int, rival: Callable[..., Any] | None) -> Iterator[dict[str, Any]]:
    """The times of a case, in microseconds: batch-invariant, as served otherwise, and by another function."""
    import torch

    import tiledsched as ts
    from tiledsched.measure.timing import TorchStopwatch

    tensors = case.tensors(0, rows)
    calls = [partial(case.function, *tensors)] * 2 + ([partial(rival, *tensors)] if rival else [])
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    watch, taken = TorchStopwatch(torch, calls, flush), defaultdict[int, list[float]](list)
    with ts.batch_invariant():
        captures = [watch.capture(0, 1)]
    captures += [watch.capture(index, 1) for index in range(1, len(calls))]
    if not all(captures):
        print(f"{case.name}, {rows} rows: not captured", file=sys.stderr)
        return
    for turn in range(ROUNDS):
        for index in list(range(len(calls)))[:: 1 if turn % 2 else -1]:
            taken[index].append(watch.read(watch.queue(index, paced=True)))
    us = [statistics.median(taken[index]) for index in range(len(calls))]
    yield {
        "case": case.name,
        "rows": rows,
        "invariant_us": round(us[0], 2),
        "any_us": round(us[1], 2),
        "torch_us": round(us[2], 2) if rival else "",
        "of_any": round(us[1] / us[0], 4),
        "of_torch": round(us[2] / us[0], 4) if rival else "",
    }


def rates(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The speed of batch-invariant calls as a part of that of others: geometric mean and least, for products and decoding."""
    lines = []
    for kind, against in (("matmul", "torch"), ("matmul", "any"), ("decoding", "any"), ("prompt", "any")):
        ratios = {
            f"{each['case']}, {each['rows']}": float(each[f"of_{against}"]) for each in rows if kind in each["case"]
        }
        if ratios:
            mean, least = math.exp(statistics.mean(map(math.log, ratios.values()))), min(ratios, key=ratios.__getitem__)
            lines.append(
                f"{kind} against {against}: {mean:.3f} of its speed in {len(ratios)} cases, least {ratios[least]:.3f} ({least})"
            )
    return lines


def write(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove or time; 1 if any bits differ."""
    parser = parser_with(
        flag("what", choices=["rows", "times", "process"], help="`process` is what `rows` starts"),
        flag("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=f"of {', '.join(KINDS)}"),
        flag("--processes", type=positive, default=60, help="processes that prove"),
        flag("--at-once", type=positive, default=10, help="how many of them run at the same time"),
        flag("--most-seconds", type=positive, default=3600, help="seconds after which processes are killed"),
        flag("--process", type=int, default=0, help=argparse.SUPPRESS),
        flag("--csv", default="batch_invariance.csv", help="the file that the rows are written to"),
        description=__doc__.splitlines()[0],
    )
    given = parser.parse_args(arguments)
    if given.what == "process":
        one_process(given.kinds, given.process, given.processes)
        return 0
    if given.what == "rows":
        return prove_in_processes(given.kinds, given.processes, given.at_once, given.most_seconds, given.csv)
    found: list[dict[str, Any]] = []
    for each in times(given.kinds):
        found.append(each)
        print(*each.values(), sep="\t", flush=True)
        write(given.csv, found)
    print("\n".join(rates(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
