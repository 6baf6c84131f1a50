"""What programmatic dependent launch (the knob `pdl`) brings to chains of our own launches, and whether their bits stay the same.

    python -m docs.studies.dependent_launch --csv chains.csv

Needs an H100 or later. Each chain is timed on one schedule with every value of the knob in turn: in CUDA graphs of 20 calls back
to back, and in single calls behind an emptied L2 cache. Then it is replayed with the value that makes it fastest, in graphs and
in eager calls that were queued ahead of the GPU. Calls alternate between two sets of inputs and share workspaces, so that a
launch that reads what the call before has left there is noticed; each output is compared on the GPU with that of the chain
without the knob. To show that mistakes are noticed, some chains are also replayed with launches that do not wait.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from unittest.mock import patch

from docs.studies.flags import flag, integers, parser_with, positive
from tiledsched.core import chains, launches
from tiledsched.core.arrays import strides_of
from tiledsched.core.cases import output_specs, random_inputs
from tiledsched.core.errors import LaunchError
from tiledsched.core.files import write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.report.document import Table, to_markdown

DECODING = {"seq_q": 1, "dtype": "bfloat16"}
EIGHT = {"heads": 32, "kv_heads": 8, "seq_k": 8192, "head_dim": 128, "kv8": "head"}
PRODUCT = {"dtype": "bfloat16", "b_layout": "column"}
BACKWARD = {"dtype": "bfloat16", "causal": True, "deterministic": True}
CHAINS: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    (
        "attention",
        {**DECODING, "batch": 1, "heads": 16, "kv_heads": 16, "seq_k": 1024, "head_dim": 64, "dtype": "float16"},
        {},
    ),
    ("attention", {**DECODING, "batch": 2, "heads": 32, "kv_heads": 4, "seq_k": 1000, "head_dim": 128}, {}),
    ("attention", {**DECODING, "batch": 1, "heads": 32, "kv_heads": 8, "seq_k": 4096, "head_dim": 128}, {}),
    ("attention", {**DECODING, "batch": 1, "heads": 64, "kv_heads": 8, "seq_k": 8192, "head_dim": 64}, {}),
    ("attention", {**DECODING, "seq_q": 5, "batch": 1, "heads": 32, "kv_heads": 8, "seq_k": 3000, "head_dim": 128}, {}),
    ("attention", {**DECODING, "batch": 1, "heads": 64, "kv_heads": 8, "seq_k": 8192, "head_dim": 128}, {}),
    ("scaled_matmul", {"m": 16, "n": 3584, "k": 18944, "scales": "row", "fast_accum": True}, {}),
    ("matmul", {"m": 16, "n": 4096, "k": 14336, **PRODUCT}, {"SPLIT_K": 4}),
    ("matmul", {"m": 16, "n": 4096, "k": 4096, **PRODUCT}, {"SPLIT_K": 4}),
    ("matmul", {"m": 2047, "n": 2049, "k": 2048, "dtype": "bfloat16"}, {}),
    ("grouped_matmul", {"tokens": 512, "experts": 128, "n": 2048, "k": 768, **PRODUCT}, {}),
    ("rms_norm_backward", {"rows": 2048, "columns": 4096, "dtype": "bfloat16"}, {}),
    (
        "attention_backward",
        {**BACKWARD, "batch": 1, "heads": 16, "kv_heads": 16, "seq_q": 1024, "seq_k": 1024, "head_dim": 128},
        {},
    ),
    ("attention", {**DECODING, **EIGHT, "batch": 4}, {}),
    ("attention", {**DECODING, **EIGHT, "batch": 1, "page": 16, "lengths": True}, {}),
    ("scaled_matmul", {"m": 16, "n": 7168, "k": 16384, "scales": "block"}, {}),
    ("scaled_matmul", {"m": 16, "n": 4096, "k": 7168, "scales": "block"}, {}),
)
"""The kernel, the problem, and what of the served schedule is changed, so that there is a chain."""
IN_ROW = 20
"""Calls of a graph that is timed."""
BURST = 8
"""Calls in a row whose outputs are then compared."""
ROUNDS = 40
"""Samples of each variant."""
AHEAD_US = 120.0
"""How long the GPU is kept busy while a burst of eager calls is queued."""
CYCLES_PER_US = 1980
MISTAKES = 2000
"""Calls of a chain whose launches do not wait."""
VALUES = (0, 1, 2)
"""Of the knob."""
LEAST_GAIN = 1.01
"""A value that makes a chain this many times as fast has its outputs compared."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One chain."""

    chain: str
    """Kernel and problem."""
    schedule: str
    """In short."""
    launches: int
    """How many it has."""
    graph_us: tuple[float, ...]
    """Median of a call in a graph, for each value of the knob."""
    eager_us: tuple[float, ...]
    """Median of a single call behind an emptied cache, likewise."""
    pdl: int = 0
    """The value whose outputs were compared; 0 for none."""
    graph_replays: int = 0
    """Calls compared in graphs."""
    graph_wrong: int = 0
    """Outputs of them with other bits."""
    eager_replays: int = 0
    """Eager calls compared."""
    eager_wrong: int = 0
    """Outputs of them with other bits."""
    mistakes_noticed: int | None = None
    """Outputs with other bits where launches do not wait, of `MISTAKES` calls; None where that was not tried."""

    def gain(self, captured: bool, value: int) -> float:
        """How many times as fast a value of the knob makes the chain."""
        times_us = self.graph_us if captured else self.eager_us
        return times_us[0] / times_us[value]

    def fastest(self) -> int:
        """The value that makes it fastest, in graphs or in single calls; 0 where none makes it faster."""
        gains = {value: max(self.gain(True, value), self.gain(False, value)) for value in VALUES[1:]}
        best = max(gains, key=gains.__getitem__)
        return best if gains[best] > LEAST_GAIN else 0


@contextmanager
def not_waiting() -> Iterator[None]:
    """Within the block, chains are made whose launches do not wait for one another."""

    def made(function: Any, waits: bool, releases: bool) -> Any:
        return chains.in_chain(function, False, releases)

    with patch.object(launches, "in_chain", made):
        yield


class Chain:
    """A problem with two sets of inputs, and the plans of its variants.

    Args:
        xp: cupy; numpy in tests.
        kernel, values: the problem.
        changes: knobs of the served schedule that are changed.
    """

    def __init__(self, xp: Any, kernel: str, values: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        import torch

        from tiledsched.rivals.methods import as_tensors
        from tiledsched.serve import process

        declared = load_kernel(kernel)
        self.problem: Problem = declared.problem(**values)
        facts = process.device_facts(process.runtime.current_device())
        self.served = process.table(declared).resolve(self.problem, facts.arch, facts.name)
        self.schedule = self.served.schedule.replace(**changes)
        self.inputs = []
        for seed in (1, 2):
            stored = random_inputs(declared, xp, xp.random.default_rng(seed), self.problem)
            self.inputs.append(as_tensors(torch, self.problem, stored))

    def plan(self, schedule: Schedule) -> Any:
        """A plan of this problem on a schedule."""
        from tiledsched.serve.plan import Decision, make_plan
        from tiledsched.serve.schema import Output

        p, kernel = self.problem, self.problem.declaration
        names = [spec.name for spec in kernel.arrays(p) if spec.role in ("in", "inout")]
        outputs = {
            spec.name: Output(
                shapes=spec.shapes,
                strides=tuple(strides_of(shape, spec.column) for shape in spec.shapes),
                dtype=spec.dtype,
            )
            for spec in output_specs(kernel, p)
        }
        served = replace(self.served, schedule=schedule, rivals=())
        decision = Decision(name=kernel.name, problem=p, device=self.inputs[0][0].get_device(), served=served)
        return make_plan(decision, dict(zip(names, self.inputs[0], strict=True)), outputs, kernel.scalar_values(p))

    def plans(self) -> list[Any]:
        """A plan for each value of the knob."""
        return [self.plan(self.schedule.replace(pdl=value)) for value in VALUES]

    def call(self, plan: Any, place: int, first: bool = False) -> tuple[Any, ...]:
        """The outputs of a call on one of the two sets of inputs."""
        from tiledsched.serve.execute import launch_plan

        made = launch_plan(plan, self.inputs[place % 2], first=first, keep_zeros=True)
        return made if isinstance(made, tuple) else (made,)


def build(made: Sequence[tuple[Chain, Sequence[Any]]]) -> None:
    """Compile, in several processes, what some chains need."""
    from tiledsched.serve import prebuilt, process

    for _ in range(3):  # a launch behind one that is missing is asked for by itself
        for chain, plans in made:
            for plan in plans:
                with suppress(LaunchError), prebuilt.not_waiting():
                    chain.call(plan, 0, first=True)
        for each in list(process.runtime.builder.builds.values()):
            each.wait()


def times(chain: Chain, plans: Sequence[Any]) -> list[tuple[float, ...]]:
    """Medians in microseconds of each plan, in graphs and in single calls."""
    import torch

    from tiledsched.measure.nvml import current_device
    from tiledsched.measure.timing import TorchStopwatch

    flush = torch.empty(max(2 * current_device().l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")
    calls = [lambda plan=plan: chain.call(plan, 0) for plan in plans]
    found = []
    for captured in (IN_ROW, 0):
        watch = TorchStopwatch(torch, calls, flush, host_us=AHEAD_US)
        for index in range(len(calls)) if captured else ():
            assert watch.capture(index, captured), "a chain that cannot be captured"
        samples: list[list[float]] = [[] for _ in calls]
        order = random.Random(0)
        for _ in range(ROUNDS):
            for index in order.sample(range(len(calls)), len(calls)):
                samples[index].append(watch.read(watch.queue(index, paced=True)))
        found.append(tuple(map(statistics.median, samples)))
    return found


def replayed(
    torch: Any,
    call: Callable[[int], Sequence[Any]],
    right: Sequence[Sequence[Any]],
    count: int,
    graph: bool,
    most_s: float,
) -> tuple[int, int]:
    """(calls made, outputs with other bits) of calls that alternate between two sets of inputs.

    Args:
        torch: the module.
        call: makes a call on the set of inputs of a number, 0 or 1.
        right: the outputs wanted of each.
        count: how many calls are wanted.
        graph: whether bursts are replays of a CUDA graph.
        most_s: seconds after which no more bursts begin.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=right[0][0].device)

    def burst() -> None:
        made = [call(place % 2) for place in range(BURST)]
        for place, outputs in enumerate(made):
            for one, wanted in zip(outputs, right[place % 2], strict=True):
                wrong.add_((bits(torch, one) != bits(torch, wanted)).any())

    burst()  # loads what a capture may not load
    torch.cuda.synchronize()
    begun, done = time.monotonic(), 0
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            burst()
    while done < count and time.monotonic() - begun < most_s:
        if graph:
            captured.replay()
        else:
            torch.cuda._sleep(round(AHEAD_US * CYCLES_PER_US))
            burst()
        done += BURST
        if done % (64 * BURST) == 0:
            torch.cuda.synchronize()  # so that the clock tells of the GPU
    return done, int(wrong)


def bits(torch: Any, array: Any) -> Any:
    """An array's elements as integers: equal numbers may have other bits, and a NaN equals itself."""
    return array.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.element_size()])


def timed(chain: Chain, plans: Sequence[Any]) -> Row:
    """The times of a chain."""
    for plan in plans:
        chain.call(plan, 0, first=True)
    graph_us, eager_us = times(chain, plans)
    return Row(
        chain=f"{chain.problem.declaration.name} {chain.problem}",
        schedule=chain.schedule.short(),
        launches=len(plans[0].steps),
        graph_us=graph_us,
        eager_us=eager_us,
    )


def compared(row: Row, chain: Chain, plans: Sequence[Any], value: int, replays: int, most_s: float, probe: bool) -> Row:
    """The row of a chain, with what a comparison of its outputs with one value of the knob came to.

    Args:
        row: its times.
        chain, plans: what is launched.
        value: of the knob.
        replays: calls of each mode.
        most_s: seconds for each mode.
        probe: whether launches that do not wait are tried, too.
    """
    import torch

    from tiledsched.serve import process

    right = [[each.clone() for each in chain.call(plans[0], place)] for place in (0, 1)]
    found: dict[str, Any] = {"pdl": value}
    for mode in ("graph", "eager"):
        found[f"{mode}_replays"], found[f"{mode}_wrong"] = replayed(
            torch, lambda place: chain.call(plans[value], place), right, replays, mode == "graph", most_s
        )
    if probe:
        process.forget_kernels()  # which are shared by plans of one schedule
        with not_waiting():
            wrong = chain.plan(chain.schedule.replace(pdl=2))
        process.forget_kernels()
        chain.call(wrong, 0, first=True)
        _, found["mistakes_noticed"] = replayed(
            torch, lambda place: chain.call(wrong, place), right, MISTAKES, True, most_s
        )
    return replace(row, **found)


def table(rows: Sequence[Row]) -> str:
    """The rows for people: times in microseconds, and how many times as fast the values 1 and 2 of the knob are."""
    head = (
        "chain",
        "n",
        "graph us",
        "pdl=1",
        "pdl=2",
        "alone us",
        "pdl=1",
        "pdl=2",
        "pdl",
        "compared",
        "wrong",
        "planted",
    )
    cells = []
    for row in rows:
        gains = [(f"{row.gain(captured, 1):.3f}", f"{row.gain(captured, 2):.3f}") for captured in (True, False)]
        calls = f"{row.graph_replays}+{row.eager_replays}"
        wrong, planted = (
            str(row.graph_wrong + row.eager_wrong),
            "-" if row.mistakes_noticed is None else str(row.mistakes_noticed),
        )
        times_us = f"{row.graph_us[0]:.2f}", f"{row.eager_us[0]:.2f}"
        cells.append(
            (
                row.chain,
                str(row.launches),
                times_us[0],
                *gains[0],
                times_us[1],
                *gains[1],
                str(row.pdl),
                calls,
                wrong,
                planted,
            )
        )
    return to_markdown([Table(head=head, rows=cells)])


def write(path: str, rows: Sequence[Row]) -> None:
    """Write the rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [each.name for each in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    write_whole(path, text.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = parser_with(
        flag("--replays", type=positive, default=100_000, help="calls of each chain that are compared in each mode"),
        flag("--most-seconds", type=positive, default=600, help="seconds for one mode of one chain"),
        flag("--chains", type=integers, help="numbers of chains, from 1; all unless given"),
        flag("--probed", type=integers, default=[2, 10], help="numbers of chains that are also run without waiting"),
        flag("--csv", help="where the rows are written"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args(arguments)
    import cupy

    from tiledsched.core.config import configure
    from tiledsched.serve import process
    from tiledsched.serve.background import BackgroundBuilder

    process.runtime.builder = BackgroundBuilder(processes=os.cpu_count() or 1)
    with configure(compile="wait", rivals="off"):
        numbers = options.chains or range(1, len(CHAINS) + 1)
        made = [(chain, chain.plans()) for chain in (Chain(cupy, *CHAINS[number - 1]) for number in numbers)]
        build(made)
        rows = [timed(*each) for each in made]
        print(table(rows), flush=True)
        for place, (row, (chain, plans)) in enumerate(zip(rows, made, strict=True)):
            if options.csv:
                write(options.csv, rows)
            value, probe = row.fastest(), numbers[place] in options.probed
            if value:
                rows[place] = compared(row, chain, plans, value, options.replays, options.most_seconds, probe)
            print(rows[place], flush=True)
    if options.csv:
        write(options.csv, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
