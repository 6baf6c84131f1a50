"""Measures the time that one call takes on the host: `python -m docs.studies.host_cost --csv FILE`, on a machine with a
GPU.

Every call is timed by itself, with the clock read before and after it. The queue of the GPU is kept short (all methods
wait for it every few calls, outside the timing), so that a call never waits for the GPU. Methods take turns in blocks, in
an order drawn anew each round, so that a slow spell of the machine meets all of them.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from docs.studies.flags import flag, parser_with
from tiledsched.core.errors import MeasureError
from tiledsched.core.extras import installing
from tiledsched.core.files import csv_text, write_whole

CALLS_PER_BLOCK = 20
"""Calls between two waits for the GPU: few enough that its queue never fills."""
WARM_CALLS = 6
"""Calls before a block whose plans were made anew."""
LOOKUPS = 100
"""Lookups in one sample, because the clock is too coarse for one."""


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """The time that one method takes on the host."""

    method: str
    """Name of the method."""
    median_us: float
    """Median time of a call."""
    p90_us: float
    """Time below which nine calls in ten stay."""


@dataclass(frozen=True, kw_only=True)
class HostMethod:
    """One way to make a call."""

    call: Callable[[], Any]
    """The call that is timed."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context that is entered around a block of calls; entering it is not timed."""


def measure_host_costs(
    methods: Mapping[str, HostMethod], *, rounds: int, synchronize: Callable[[], None], seed: int = 0
) -> list[HostCost]:
    """Time every method in `rounds` blocks of `CALLS_PER_BLOCK` calls.

    Args:
        methods: by name.
        rounds: blocks of each method.
        synchronize: waits until the GPU is idle.
        seed: of the order of methods.
    """
    samples: dict[str, list[float]] = {name: [] for name in methods}
    order, rng = list(methods), random.Random(seed)
    for method in methods.values():  # compile, load, and fill every cache
        _time_block(method)
    with _no_collection():
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                synchronize()
                samples[name].extend(_time_block(methods[name]))
    return [
        HostCost(method=name, median_us=statistics.median(each), p90_us=statistics.quantiles(each, n=10)[-1])
        for name, each in samples.items()
    ]


def _time_block(method: HostMethod) -> list[float]:
    clock, call, found = time.perf_counter_ns, method.call, []
    with method.within():
        for _ in range(CALLS_PER_BLOCK):
            started = clock()
            call()
            found.append((clock() - started) / 1e3)
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep garbage collection off, because it would be timed with whichever method happens to be called."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_methods(notes: str | None = None) -> dict[str, HostMethod]:
    """All methods, on B=1 H=8 S=512 D=64 float16, which is so small that the host takes longer than the GPU.

    Args:
        notes: only `sdpa`, and the same while its problems are captured in this folder.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

    from docs.examples.attention_variants import causal
    from tiledsched.core.config import configure
    from tiledsched.ops import plans
    from tiledsched.ops.block_masks import block_mask
    from tiledsched.ops.flex import flex
    from tiledsched.ops.operator import sdpa_operator
    from tiledsched.ops.sdpa import plan_for, sdpa
    from tiledsched.serve import process

    process.wait_for_programs()  # torch is not to be timed as ours
    q, k, v = (torch.randn((1, 8, 512, 64), device="cuda", dtype=torch.float16) for _ in range(3))
    plan, mask = plan_for(q, k, v).own, block_mask(causal, q, k)
    ((kernel, grid, _, launch),) = plan.steps
    arguments = (q, k, v, sdpa(q, k, v), *plan.tail)
    stream, graph = torch.cuda.current_stream().cuda_stream, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sdpa(q, k, v)

    def call() -> Any:
        return sdpa(q, k, v)

    @contextmanager
    def capture(folder: str | None) -> Iterator[None]:
        """Plans are made anew, whether calls are noted or not, and are hot before anything is timed."""
        with configure(capture=folder):
            for _ in range(WARM_CALLS):
                call()
            torch.cuda.synchronize()
            yield

    def look_up() -> None:
        find = plans.find_ready
        for _ in range(LOOKUPS):
            find(q, k, v, None, None, False)

    if notes is not None:
        return {
            "sdpa": HostMethod(call=call, within=lambda: capture("0")),
            "sdpa_captured": HostMethod(call=call, within=lambda: capture(notes)),
        }
    return {
        "sdpa": HostMethod(call=call),
        "flex": HostMethod(call=lambda: flex(q, k, v, block_mask=mask)),
        "operator": HostMethod(call=lambda: sdpa_operator(q, k, v)),
        "torch_auto": HostMethod(call=lambda: torch_sdpa(q, k, v)),
        "torch_flash": HostMethod(
            call=lambda: torch_sdpa(q, k, v), within=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        ),
        "torch_cudnn": HostMethod(
            call=lambda: torch_sdpa(q, k, v), within=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        ),
        "launch": HostMethod(call=lambda: launch(stream, grid, kernel, arguments)),
        "graph_replay": HostMethod(call=graph.replay),
        "lookup": HostMethod(call=look_up),
    }


def run(rounds: int, notes: str | None = None) -> list[HostCost]:
    """Measure on the current CUDA device; `notes` is that of :func:`make_methods`.

    Raises:
        MeasureError: there is none.
    """
    try:
        import torch
    except ImportError as error:
        raise MeasureError(f"torch is not installed; run: {installing('gpu')}") from error
    if not torch.cuda.is_available():
        raise MeasureError("torch sees no CUDA device; run: tiledsched doctor")
    from tiledsched.measure.lock import holding_current_gpu

    with holding_current_gpu(), torch.inference_mode():
        costs = measure_host_costs(make_methods(notes), rounds=rounds, synchronize=torch.cuda.synchronize)
    return [each if each.method != "lookup" else per_lookup(each) for each in costs]


def per_lookup(cost: HostCost) -> HostCost:
    """The cost of one of the `LOOKUPS` lookups that were timed together."""
    return HostCost(method=cost.method, median_us=cost.median_us / LOOKUPS, p90_us=cost.p90_us / LOOKUPS)


def write_csv(path: str, costs: Sequence[HostCost]) -> None:
    """Write a CSV file with one row for each method: method, median_us, p90_us."""
    rows = [
        {"method": each.method, "median_us": round(each.median_us, 3), "p90_us": round(each.p90_us, 3)}
        for each in costs
    ]
    write_whole(path, csv_text(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the costs, and write the file."""
    parser = parser_with(
        flag("--csv", metavar="FILE", help="write the rows to this file"),
        flag("--capture", action="store_true", help="only sdpa, with its problems captured and without, in turn"),
        flag("--rounds", type=int, default=200, help=f"blocks of {CALLS_PER_BLOCK} calls per method (200)"),
        prog="python -m docs.studies.host_cost",
        description="host cost of one call",
    )
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as notes:
            costs = run(options.rounds, notes if options.capture else None)
    except MeasureError as error:
        parser.exit(error.exit_code, f"{error}\n")
    for each in costs:
        print(f"{each.method:14} {each.median_us:8.2f} us median {each.p90_us:8.2f} us p90")
    if options.csv:
        write_csv(options.csv, costs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
