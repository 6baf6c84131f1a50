"""How long the first calls of a process take: ours, in both settings of `compile`, beside torch's. Needs a GPU.

    python -m docs.studies.first_calls --csv FILE

Each row is measured in a process of its own, which imports, calls each shape once in the order of `SHAPES`, and waits for the GPU
after each call. `import` is the import of torch and of tiledsched, `start` what torch needs to make its first tensor on the GPU.
Our methods run in three kinds of homes: `fresh` is an empty one, `second` one in which a process like it ran to its end before,
and `warmed` an empty one in which `tiledsched warmup` built what these shapes are served with. `takeover_s` is how long after the
first call of a shape our kernel served it, while the shapes were called in turn; empty where torch never served.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from docs.studies.flags import flag, parser_with
from tiledsched.core.processes import child_environment

SHAPES = {
    "prefill B=1 H=32/8 S=2048 D=128": ("attention", (1, 32, 8, 2048, 2048, 128), "B=1,H=32/8,S=2048,D=128,causal"),
    "prefill B=1 H=8 S=1024 D=64": ("attention", (1, 8, 8, 1024, 1024, 64), "B=1,H=8,S=1024,D=64,causal"),
    "odd B=4 H=32 S=1500 D=96": ("attention", (4, 32, 32, 1500, 1500, 96), "B=4,H=32,S=1500,D=96,causal"),
    "odd B=3 H=5 S=777 D=128": ("attention", (3, 5, 5, 777, 777, 128), "B=3,H=5,S=777,D=128,causal"),
    "decode B=8 H=32/8 4096 keys": ("attention", (8, 32, 8, 1, 4096, 128), "B=8,H=32/8,seq_q=1,seq_k=4096,D=128"),
    "matmul 333x4096x11008": ("matmul", (333, 11008, 4096), "m=333,n=11008,k=4096"),
    "matmul 4096x4096x4096": ("matmul", (4096, 4096, 4096), "m=4096,n=4096,k=4096"),
    "rms_norm 2048x4096": ("rms_norm", (2048, 4096), "rows=2048,columns=4096"),
}
"""Name -> the kernel, the sizes of a call, and the problem as `warmup -p` takes it. Element type: bfloat16."""
METHODS = ("torch", "background", "wait")
HOMES = ("fresh", "second", "warmed")
TAKEOVER_S = 60.0
"""How long a process waits for our kernel to take over."""


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """One first call, or another part of a process's start."""

    home: str
    """fresh, second or warmed; empty for torch."""
    method: str
    """The method: torch, or a value of the setting `compile`."""
    what: str
    """import, start, or the shape."""
    seconds: float
    """Wall time."""
    takeover_s: float | None = None
    """Seconds from the first call until our kernel served; None where it did at once, or for torch."""


def make_call(what: str, ours: bool) -> Callable[[], Any]:
    """The call of a shape on new tensors."""
    import torch

    kind, sizes, _ = SHAPES[what]

    def new(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    if kind == "attention":
        batch, heads, kv_heads, rows, keys, columns = sizes
        q, k, v = (
            new(batch, heads, rows, columns),
            new(batch, kv_heads, keys, columns),
            new(batch, kv_heads, keys, columns),
        )
        causal, grouped = rows > 1, heads != kv_heads
        if ours:
            from tiledsched import sdpa

            return lambda: sdpa(q, k, v, is_causal=causal)
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=causal, enable_gqa=grouped)
    if kind == "matmul":
        m, n, inner = sizes
        a, b = new(m, inner), new(inner, n)
        if ours:
            from tiledsched.kernels.matmul.front import matmul

            return lambda: matmul(a, b)
        return lambda: torch.mm(a, b)
    rows, columns = sizes
    x, w = new(rows, columns), new(columns)
    if ours:
        from tiledsched.kernels.rms_norm.front import rms_norm

        return lambda: rms_norm(x, w)
    return lambda: torch.nn.functional.rms_norm(x, (columns,), w, 1e-5)


def measure(method: str, home: str) -> Iterator[FirstCall]:
    """The rows of this process."""
    began = time.perf_counter()
    import torch

    ours = method != "torch"
    if ours:
        from tiledsched.ops.sdpa import sdpa  # noqa: F401
    yield FirstCall(home=home, method=method, what="import", seconds=time.perf_counter() - began)
    began = time.perf_counter()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    yield FirstCall(home=home, method=method, what="start", seconds=time.perf_counter() - began)
    calls = {what: make_call(what, ours) for what in SHAPES}
    torch.cuda.synchronize()
    seconds, called = {}, {}
    for what, call in calls.items():
        called[what] = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds[what] = time.perf_counter() - called[what]
    taken = _takeovers(calls, called) if ours else {}
    for what in SHAPES:
        yield FirstCall(home=home, method=method, what=what, seconds=seconds[what], takeover_s=taken.get(what))


def _takeovers(calls: Mapping[str, Callable[[], Any]], called: Mapping[str, float]) -> dict[str, float]:
    """By shape that torch served, the seconds from its first call until its program served. All are called in turn meanwhile."""
    from tiledsched.serve.plan_cache import PlanCache

    def waiting() -> int:
        return sum(len(cache.building) for cache in PlanCache.every)

    taken: dict[str, float] = {}
    left = dict(calls)
    end = time.perf_counter() + TAKEOVER_S
    while waiting() and time.perf_counter() < end:
        for what, call in list(left.items()):
            before = waiting()
            call()
            if waiting() < before:
                taken[what] = time.perf_counter() - called[what]
                del left[what]
        time.sleep(0.01)
    return taken


def child(method: str, home: str, folder: str) -> list[FirstCall]:
    """The rows of a new process in a home."""
    environment = child_environment() | home_environment(folder)
    if method != "torch":
        environment["TILEDSCHED_COMPILE"] = method
    command = [sys.executable, "-m", "docs.studies.first_calls", "--method", method, "--home", home]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{method} in a {home} home failed:\n{done.stderr[-2000:]}")
    return [FirstCall(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def home_environment(folder: str) -> dict[str, str]:
    """The variables of a home in which nothing is but what is made there."""
    return {
        "HOME": folder,
        "XDG_CACHE_HOME": f"{folder}/cache",
        "XDG_DATA_HOME": f"{folder}/data",
        "TILEDSCHED_CACHE": f"{folder}/tiledsched",
        "TILEDSCHED_DB": f"{folder}/none.db",
        "CUDA_TILE_CACHE_DIR": f"{folder}/cutile",
    }


def warmed() -> dict[str, list[str]]:
    """By kernel, the words of `tiledsched warmup` that build what the shapes are served with."""
    found: dict[str, list[str]] = {}
    for kernel, _, words in SHAPES.values():
        found.setdefault(kernel, []).extend(("-p", f"{words},dtype=bfloat16"))
    return found


def run() -> Iterator[FirstCall]:
    """Every row, as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the first one reads torch's files from the disk
            rows = child("torch", "", folder)
        yield from rows
    for method in METHODS[1:]:
        with tempfile.TemporaryDirectory() as folder:
            yield from child(method, "fresh", folder)
            yield from child(method, "second", folder)
        with tempfile.TemporaryDirectory() as folder:
            for kernel, problems in warmed().items():
                command = [sys.executable, "-m", "tiledsched", "warmup", kernel, *problems]
                subprocess.run(
                    command, env=child_environment() | home_environment(folder), check=True, stdout=sys.stderr
                )
            yield from child(method, "warmed", folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and print."""
    parser = parser_with(
        flag("--csv", metavar="FILE", type=Path, help="where to write the rows"),
        flag("--method", choices=METHODS, help=argparse.SUPPRESS),  # of a process that measures
        flag("--home", default="", help=argparse.SUPPRESS),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    given = parser.parse_args(arguments)
    if given.method:
        for row in measure(given.method, given.home):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    rows = []
    for row in run():
        rows.append(row)
        taken = "" if row.takeover_s is None else f", ours after {row.takeover_s:.1f} s"
        print(f"{row.method:10} {row.home:6} {row.what:46} {row.seconds:7.3f} s{taken}", flush=True)
    if given.csv:
        with given.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
