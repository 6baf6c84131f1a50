r"""Times what is served for problems that nobody tuned beside every installed rival.

    python -m docs.studies.untuned --seed 4901 --attention 120 --matmul 80 --scaled-matmul 36 --csv untuned.csv
    python -m docs.studies.untuned --summary untuned.csv

Problems are drawn at random from the mixes of the functions in :data:`DRAWS`; those that ship tuned are left out. All
programs are built ahead in a pool of processes. All methods of a problem then take turns in one paced run, each launch queued
behind a kernel that spins, so that the time on the GPU is told apart from the time that a call takes the host.

The summary judges a caller's time. In a captured graph it is the time on the GPU; in an eager call the larger of that and of the
host's time. Rows are written after each problem, and a run with the same file goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import io
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from docs.studies.flags import count, flag, parser_with, positive
from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.pool import BuildPool
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core import data_files
from tiledsched.core.device import arch_spec, spilled
from tiledsched.core.errors import TiledschedError
from tiledsched.core.files import csv_text, write_whole
from tiledsched.core.launches import problem_class
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named, problem_from_json
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.matmul import Matmul
from tiledsched.kernels.scaled_matmul import ScaledMatmul
from tiledsched.kernels.scaled_matmul.declaration import SHAPES, scale_shapes
from tiledsched.rivals.forecast import OURS, TimedProblem, timed_problems
from tiledsched.rivals.offers import DISPATCH_US, forecast_offers
from tiledsched.serve.bundle import VARIABLE, BundledProgram, write_bundle
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.transfer import log_us
from tiledsched.store.exchange import text_of
from tiledsched.store.shipped import read_shipped_entries

ROUNDS = 9
"""Samples of each method."""
HOST_CALLS = 20
"""Calls in a row whose time on the host is taken: few enough that none waits for the GPU."""
GAP_S = 0.004
"""Seconds from the beginning of one launch to the next, at least."""
WRONG = 0.02
"""Norm of the difference to a rival's output, over that output's norm, from which an output counts as wrong."""
SERVED = "served"
"""The row of the public function, whatever it runs: only its time on the host is measured."""
LOSS_BANDS = (1.0, 2.0, 4.0, 99.0)
"""Largest distances of the bands of expected losses."""
WARMERS = 8
"""Processes that have rivals compiled ahead."""
WARM_S = 150.0
"""Seconds for that, at most."""


# Problems


def _about(chance: random.Random, low: float, high: float) -> int:
    """A size drawn uniformly in its logarithm."""
    return max(1, round(math.exp(chance.uniform(math.log(low), math.log(high)))))


def _length(chance: random.Random, low: int, high: int) -> int:
    """A length: a power of two, a multiple of 64, or any."""
    length = _about(chance, low, high)
    kind = chance.random()
    if kind < 0.3:
        return 1 << round(math.log2(length))
    return -(-length // 64) * 64 if kind < 0.45 else length


def _pairs(text: str) -> list[tuple[int, int]]:
    """The pairs of numbers in a text such as `32x8 32x32`."""
    return [(int(first), int(second)) for first, _, second in (word.partition("x") for word in text.split())]


HEADS = _pairs(
    "32x8 32x8 32x8 32x8 32x32 32x32 32x32 24x8 28x4 40x8 16x16 12x12 24x8 28x4 40x8 16x16 12x12 64x8 48x8 14x2 16x8 8x8 20x20 "
    "5x5 3x3 32x1 71x1 8x1"
)
"""(query heads, key heads): grouped as in models of today, ungrouped, and one key head for all."""
HEAD_COLUMNS = (*[128] * 8, *[64] * 5, 96, 96, 80, 72, 40, 112, 160, 192, 256, 256)
"""Columns of a head."""
MOST_FLOPS = 1.5e12
MOST_BYTES = 1.5e9


def drawn_attention(chance: random.Random) -> Problem:
    """A problem of attention: a prompt, a chunk of one, tokens, an encoder's or a decoder's rows that read another text."""
    while True:
        task = chance.choices(("prompt", "chunk", "token", "encoder", "context"), (30, 12, 26, 20, 12))[0]
        heads, kv_heads = chance.choice(HEADS)
        values: dict[str, Any] = {
            "head_dim": chance.choice(HEAD_COLUMNS),
            "dtype": chance.choice(("bfloat16", "bfloat16", "float16")),
            "heads": heads,
            "kv_heads": kv_heads,
        }
        if task == "token":
            rows = chance.choice((1, 1, 1, 1, 2, 4, 7, 8, 16))
            keys = _length(chance, 256, 65536)
            values |= {"seq_q": rows, "seq_k": keys, "batch": _about(chance, 1, min(128, max(1, 2**19 // keys)))}
            if rows > 1 and chance.random() < 0.5:
                values |= {"causal": True, "alignment": "bottom_right"}
        elif task == "chunk":
            rows = _length(chance, 32, 4096)
            values |= {
                "seq_q": rows,
                "seq_k": rows + _length(chance, 64, 16384),
                "batch": chance.choice((1, 1, 1, 2, 3, 4)),
            }
            values |= {"causal": True, "alignment": "bottom_right"}
        elif task == "context":
            rows = _length(chance, 64, 16384)
            values |= {
                "seq_q": rows,
                "seq_k": _length(chance, 32, 1024),
                "batch": _about(chance, 1, max(1, min(32, 2**15 // rows))),
            }
        else:
            rows = _length(chance, 64, 16384)
            values |= {"seq_q": rows, "seq_k": rows, "batch": _about(chance, 1, max(1, min(64, 2**15 // rows)))}
            values |= {"causal": task == "prompt"}
        p = Attention.problem(**values)
        elements = p.batch * (p.heads * p.seq_q + p.kv_heads * p.seq_k) * 2 * p.head_dim
        if p.flops <= MOST_FLOPS and 2 * elements <= MOST_BYTES:
            return p


WIDTHS = _pairs(
    "6144x4096 4096x4096 28672x4096 4096x14336 10240x8192 8192x8192 57344x8192 8192x28672 4608x3584 3584x3584 37888x3584 "
    "3584x18944 11008x4096 4096x11008 12288x4096 3072x8192 16384x3072 3072x3072 2048x2048 5120x5120 27648x5120 5120x13824 "
    "1024x8192 768x768 3072x768 768x3072 1536x8960 17920x1536 2560x2560 50257x768 32000x4096 151936x896"
)
"""(n, k) of the projections of language models."""


def drawn_products(chance: random.Random) -> Problem:
    """A matrix product: a projection of some tokens, sizes about equal, tall or narrow, small, or with a large k."""
    while True:
        task = chance.choices(("tokens", "square", "tall", "small", "deep"), (45, 20, 13, 10, 12))[0]
        if task == "tokens":
            n, k = chance.choice(WIDTHS)
            m = chance.choice((1, 2, 8, 16, 32, 64)) if chance.random() < 0.2 else _length(chance, 16, 16384)
        elif task == "square":
            m, n, k = (_length(chance, 512, 12288) for _ in range(3))
        elif task == "tall":
            m, n, k = _length(chance, 8192, 200000), _length(chance, 32, 1024), _length(chance, 32, 2048)
            if chance.random() < 0.4:
                m, n = n, m
        elif task == "small":
            m, n, k = (_length(chance, 32, 1024) for _ in range(3))
        else:
            m, n, k = _length(chance, 16, 2048), _length(chance, 64, 2048), _length(chance, 8192, 100000)
        layouts = [("row", "column")] * 6 + [("row", "row")] * 3 + [("column", "row"), ("column", "column")]
        a_layout, b_layout = layouts[0] if task == "tokens" and chance.random() < 0.7 else chance.choice(layouts)
        dtype = chance.choice(("bfloat16", "bfloat16", "float16"))
        p = Matmul.problem(m=m, n=n, k=k, dtype=dtype, a_layout=a_layout, b_layout=b_layout)
        if 2.0 * m * n * k <= MOST_FLOPS and 2 * (m * k + k * n + m * n) <= MOST_BYTES:
            return p


def drawn_scaled(chance: random.Random) -> Problem:
    """A product of 8-bit floats: a projection of Llama or Qwen for some tokens, often as many as nothing divides, with a scale
    for each row or for each operand, summed in either way."""
    n, k = chance.choice([shape for shapes in SHAPES.values() for shape in shapes])
    m = chance.choice((1, 8, 16, 64)) if chance.random() < 0.2 else _length(chance, 16, 16384)
    scales = chance.choice(("row", "row", "tensor"))
    return ScaledMatmul.problem(m=m, n=n, k=k, scales=scales, fast_accum=chance.random() < 0.5)


DRAWS: Mapping[str, Callable[[random.Random], Problem]] = {
    "attention": drawn_attention,
    "matmul": drawn_products,
    "scaled_matmul": drawn_scaled,
}
"""Kernel -> what draws a problem of it."""


def drawn(kernel: str, seed: int, number: int, known: Iterable[Problem] = ()) -> list[Problem]:
    """Different problems of a kernel, none of which is known."""
    chance, left_out = random.Random(f"{kernel} {seed}"), set(known)
    found: dict[Problem, None] = {}
    while len(found) < number:
        p = DRAWS[kernel](chance)
        if p not in left_out:
            found[p] = None
    return list(found)


# Rows


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one problem."""

    seed: int
    """Seed by which the problems were drawn."""
    kernel: str
    """Name of the kernel."""
    problem: str
    """The problem, as JSON."""
    method: str
    """`ours 0` is what our tables serve, `ours 1` the next choice; else the name of a rival, or `served`."""
    schedule: str = ""
    """Our schedule as JSON; empty for rivals."""
    us: float | None = None
    """Median time on the GPU in microseconds."""
    low_us: float | None = None
    """The second smallest sample."""
    high_us: float | None = None
    """The second largest sample."""
    host_us: float | None = None
    """Time until a call returns, in microseconds."""
    spill_bytes: int = 0
    """Registers that our program spills, in bytes a thread."""
    eager: str = ""
    """The method that serves eager calls; empty but in the row of `served`."""
    graph: str = ""
    """The method that serves captured graphs; empty but in the row of `served`."""
    note: str = ""
    """The provenance, in the row of `served`; in others, why there is no time."""
    versions: str = ""
    """Device, driver and libraries; in the row of `served`."""

    def to_csv(self) -> dict[str, Any]:
        """One cell for each of `COLUMNS`."""
        return {name: "" if value is None else value for name, value in vars(self).items()}


COLUMNS = tuple(Row.__annotations__)
NUMBERS = ("us", "low_us", "high_us", "host_us")


def read(path: Path) -> list[Row]:
    """The rows of a CSV file, which may be compressed."""
    rows = []
    for line in csv.DictReader(io.StringIO(text_of(path, path.read_bytes()))):
        told: dict[str, Any] = dict(line)
        told |= {name: float(line[name]) if line[name] else None for name in NUMBERS}
        told |= {"seed": int(line["seed"]), "spill_bytes": int(line["spill_bytes"])}
        rows.append(Row(**told))
    return rows


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A caller's time with what is served, over the time with the fastest rival: a rival's over ours, so that 1.1 is faster."""

    problem: str
    """The problem as people read it."""
    kernel: str
    """Name of the kernel."""
    graph: float
    """In a captured graph."""
    eager: float
    """In an eager call."""
    served: str
    """What served: in graphs, then in eager calls."""
    fastest: str
    """The fastest rival in graphs."""
    rivals_us: float
    """Its time."""


def judged(rows: Iterable[Row]) -> list[Judged]:
    """One result for each problem whose served methods and a rival were timed."""
    groups: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        groups[row.problem][row.method] = row
    found = []
    for text, methods in groups.items():
        served = methods.get(SERVED)
        timed = {name: row for name, row in methods.items() if row.us is not None}
        rivals = {name: row for name, row in timed.items() if not name.startswith("ours")}
        if served is None or not rivals or not {served.eager, served.graph} <= timed.keys():
            continue
        on_gpu = {name: float(row.us or 0) for name, row in timed.items()}
        eager = {name: max(on_gpu[name], rivals[name].host_us or 0) for name in rivals}
        fastest = min(rivals, key=lambda name: on_gpu[name])
        found.append(
            Judged(
                problem=str(problem_from_json(json.loads(text))),
                kernel=served.kernel,
                graph=on_gpu[fastest] / on_gpu[served.graph],
                eager=min(eager.values()) / max(on_gpu[served.eager], served.host_us or 0),
                served=served.graph if served.graph == served.eager else f"{served.graph} / {served.eager}",
                fastest=fastest,
                rivals_us=on_gpu[fastest],
            )
        )
    return found


def cross_validated(rows: Iterable[Row], kernel: str, arch: str = "sm_90") -> list[Judged]:
    """What would serve each problem of which rows tell, had it not been timed: by the times of all others.

    The times on the host are those that ship, because builds disturbed those of the rows.
    """
    from tiledsched.serve import process

    declared = kernel_named(kernel)
    entries = load_entries(process.settings(), {arch}, declared)
    space, spec, found = space_for(arch, declared), arch_spec(arch), []

    def default_us(p: Problem) -> float:
        return math.exp(log_us(p, space.default(p), spec))

    for text, times, schedule in drawn_times(rows, kernel):
        p = problem_from_json(json.loads(text))
        timed = timed_problems(declared, arch, entries, default_us, p)
        ours_us = math.exp(log_us(p, schedule, spec)) if schedule else 0.0
        forecasts = timed.forecast(p, ours_us, default_us(p)) if timed and schedule else {}
        rivals = {name: us for name, us in times.items() if name != OURS}
        if not (rivals and forecasts and OURS in times):
            continue
        offers = [each for each in forecast_offers(declared, forecasts) if each.name in rivals]
        in_graphs = offers[0].name if offers else OURS
        eager = next((each.name for each in offers if not each.only_captured), OURS)
        hosts = {name: each.host_us for name, each in forecasts.items()}
        fastest = min(rivals, key=lambda name: rivals[name])
        host_us = hosts[eager] + (DISPATCH_US if eager != OURS else 0)
        found.append(
            Judged(
                problem=str(p),
                kernel=kernel,
                graph=rivals[fastest] / times[in_graphs],
                eager=min(max(us, hosts[name]) for name, us in rivals.items()) / max(times[eager], host_us),
                served=in_graphs if in_graphs == eager else f"{in_graphs} / {eager}",
                fastest=fastest,
                rivals_us=rivals[fastest],
            )
        )
    return found


def summary(every: Sequence[Judged], worst: int = 10) -> str:
    """Text: for each kernel and kind of call the geometric mean of the ratios, how many are below 0.95, and the worst."""
    lines = []
    for kernel in dict.fromkeys(each.kernel for each in every):
        mine = [each for each in every if each.kernel == kernel]
        for kind in ("graph", "eager"):
            ratios = [getattr(each, kind) for each in mine]
            lines.append(
                f"{kernel} {kind}: {len(ratios)} problems, geometric mean {statistics.geometric_mean(ratios):.3f}x, "
                f"below 0.95x {sum(each < 0.95 for each in ratios)}, below 0.99x {sum(each < 0.99 for each in ratios)}, "
                f"worst {min(ratios):.3f}x"
            )
        for each in sorted(mine, key=lambda each: min(each.graph, each.eager))[:worst]:
            lines.append(
                f"  graph {each.graph:.3f} eager {each.eager:.3f} {each.served} against {each.fastest} {each.rivals_us:.1f} us: "
                f"{each.problem}"
            )
    return "\n".join(lines) + "\n"


def drawn_times(rows: Iterable[Row], kernel: str) -> list[tuple[str, dict[str, float], Schedule | None]]:
    """Each problem of a kernel, as JSON, with the times of rivals and of what was served of ours, and the schedule of that."""
    groups: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.kernel == kernel and row.us is not None:
            groups[row.problem][row.method] = row
    told = []
    for text, methods in groups.items():
        own = [row for name, row in sorted(methods.items()) if name.startswith("ours")]
        served = [row for row in own if not spilled(row.spill_bytes)] or own
        times = {name: row.us or 0.0 for name, row in methods.items() if not name.startswith("ours")}
        schedule = Schedule(json.loads(served[0].schedule)) if served else None
        told.append((text, times | ({OURS: served[0].us or 0.0} if served else {}), schedule))
    return told


def shipped_times(rows: Sequence[Row], kernel: str, arch: str = "sm_90") -> dict[str, Any]:
    """What `tuning_db/model/KERNEL/timed_ARCH.json` holds: times from rows, and those of rivals in the table that ships; the
    model's estimates that they are told beside; and for each method what its calls take the host in the last draw."""
    declared, spec = kernel_named(kernel), arch_spec(arch)
    space = space_for(arch, declared)
    hosts: dict[str, list[float]] = defaultdict(list)
    last = [row.seed for row in rows if row.kernel == kernel][-1:]
    for row in rows:
        if row.kernel == kernel and row.us is not None and [row.seed] == last:
            hosts[OURS if row.method.startswith("ours") else row.method].append(row.host_us or 0.0)
    names = sorted(hosts)
    told = {
        problem_from_json(json.loads(text)): (times, schedule) for text, times, schedule in drawn_times(rows, kernel)
    }
    for entry in read_shipped_entries(table_path(kernel, arch)):
        times = {each.name: each.median_us for each in entry.rivals or () if each.median_us and each.name in hosts}
        if times and entry.problem.declaration.similarity.timing_features(entry.problem):
            told.setdefault(entry.problem, (times, None))
    lines = []
    for p, (times, schedule) in told.items():
        modelled = [math.exp(log_us(p, each, spec)) if each else None for each in (space.default(p), schedule)]
        timed = TimedProblem.of(p, times, spec, modelled[0] or 0.0, modelled[1])
        lines.append(
            {
                "problem": timed.problem,
                "place": [round(each, 4) for each in timed.place],
                "us": [round(us, 2) if (us := times.get(name)) else None for name in names],
                "base_us": round(timed.base_us, 2),
                "ours_us": timed.ours_us and round(timed.ours_us, 2),
            }
        )
    return {
        "schema_version": 1,
        "versions": next((row.versions for row in rows if row.kernel == kernel and row.versions), ""),
        "seeds": sorted({row.seed for row in rows if row.kernel == kernel}),
        "methods": names,
        "host_us": {name: round(statistics.median(hosts[name]), 1) for name in names},
        "rows": lines,
    }


def drawn_losses(rows: Iterable[Row], kernel: str, arch: str = "sm_90") -> dict[str, Any]:
    """What `tuning_db/model/KERNEL/transfer.json` holds of a kernel without recorded landscapes.

    It is how much slower what was served of ours is than the fastest method that was timed, by group and by the distance of the
    nearest problem of the tables.
    """
    from tiledsched.serve import process

    declared = kernel_named(kernel)
    similarity, known = declared.similarity, {e.problem for e in load_entries(process.settings(), {arch}, declared)}
    groups: dict[tuple[bool, str, float], list[float]] = defaultdict(list)
    fastest: dict[str, float] = {}
    for row in rows:
        if row.kernel == kernel and row.us is not None:
            fastest[row.problem] = min(row.us, fastest.get(row.problem, math.inf))
    for text, times, _ in drawn_times(rows, kernel):
        p = problem_from_json(json.loads(text))
        alike = [similarity.distance(each, p) for each in known if similarity.kind(each) == similarity.kind(p)]
        if OURS in times:
            up_to = next(most for most in LOSS_BANDS if min(alike, default=0.0) <= most) if alike else LOSS_BANDS[-1]
            group = similarity.loss_group(p) if alike else ""
            groups[not alike, group, up_to].append(times[OURS] / fastest[text])
    bands = [
        {
            "arch": arch,
            "group": group,
            "other_kind": other,
            "up_to": up_to,
            "mean": round(statistics.geometric_mean(losses) - 1, 4),
            "worst": round(max(losses) - 1, 4),
            "cases": len(losses),
        }
        for (other, group, up_to), losses in sorted(groups.items())
    ]
    return {"schema_version": 1, "bands": bands}


def table_path(kernel: str, arch: str) -> Path:
    """The table of a kernel that ships."""
    return data_files.tuning_db() / "tables" / kernel / f"{arch}.json"


def write_times(rows: Sequence[Row], kernel: str, path: Path) -> None:
    """Write :func:`shipped_times`, a problem a line."""
    found = shipped_times(rows, kernel)
    lines = ",\n".join(json.dumps(row, sort_keys=True, separators=(",", ":")) for row in found.pop("rows"))
    head = json.dumps(found, sort_keys=True, indent=1)[:-2]
    write_whole(path, f'{head},\n "rows": [\n{lines}\n]\n}}\n')


# Building


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What may be timed of ours on one problem."""

    problem: Problem
    """The problem."""
    served: Served
    """The table's answer."""
    schedules: tuple[Schedule, ...]
    """Its schedule, then further choices."""


def choices_of(problems: Sequence[Problem], arch: str, device: str, further: int) -> list[Choices]:
    """The answers of the tables that ship, and as many further choices of each."""
    from tiledsched.serve import process

    tables: dict[str, Any] = {}
    found = []
    for p in problems:
        kernel = p.declaration
        if kernel.name not in tables:
            entries = load_entries(process.settings(), {arch}, kernel)
            tables[kernel.name] = table_of(entries, process.settings(), kernel=kernel)
        served = tables[kernel.name].resolve(p, arch, device)
        found.append(
            Choices(problem=p, served=served, schedules=(served.schedule, *served.alternatives)[: 1 + further])
        )
    return found


class Builds:
    """The programs of choices, built in a pool, each once."""

    def __init__(self, choices: Sequence[Choices], arch: str, jobs: int) -> None:
        self._arch, self._pool = arch, BuildPool(jobs)
        self._builds: dict[tuple[str, str, str], tuple[BuildTask, concurrent.futures.Future[Built]]] = {}
        for each in choices:
            for schedule in each.schedules:
                key = self._key(each.problem, schedule)
                if key not in self._builds:
                    kernel = each.problem.declaration.locator()
                    task = BuildTask(kernel=kernel, schedule=schedule, problem=each.problem, arch=arch, timeout_s=60.0)
                    self._builds[key] = task, self._pool.submit(task)

    def _key(self, p: Problem, s: Schedule) -> tuple[str, str, str]:
        return p.kernel, s.id, problem_class(p.declaration, p, s, arch_spec(self._arch)).id

    def built(self, p: Problem, s: Schedule) -> Built:
        """The result of one build; waits for it."""
        return self._pool.outcome(*self._builds[self._key(p, s)])

    def finish(self) -> None:
        """Wait until everything is built: builds would disturb the times that calls take the host."""
        concurrent.futures.wait([future for _, future in self._builds.values()])

    def write(self, each: Choices, path: Path) -> dict[Schedule, Built]:
        """Write the programs of a problem as a bundle; returns the builds."""
        found = {schedule: self.built(each.problem, schedule) for schedule in each.schedules}
        programs, artifacts = [], {}
        for schedule, built in found.items():
            if built.artifact is not None:
                artifacts[self._arch, built.artifact.fingerprint] = built.artifact
                programs.append(
                    BundledProgram(
                        kernel=each.problem.kernel,
                        arch=self._arch,
                        schedule=schedule,
                        problem=each.problem,
                        fingerprint=built.artifact.fingerprint,
                        host_arch=built.task.host_arch,
                    )
                )
        kernel = each.problem.declaration
        write_bundle(path, programs, artifacts, [], {kernel.name: kernel.source_hash()}, compiler_at_hand())
        return found

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def warm_rivals(problems: Sequence[Problem]) -> int:
    """Call the rivals that compile themselves once on each problem; how many calls succeeded. Runs in a process of its own."""
    import torch

    done = 0
    for p in problems:
        named = p.declaration.rivals(p)
        for name in p.declaration.compiled_rivals:
            try:
                if name in named:
                    named[name](*tensors_of(torch, p))
                    torch.cuda.synchronize()
                    done += 1
            except Exception as error:
                print(f"{p}: {name}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        torch.cuda.empty_cache()
    return done


def _share(p: Problem) -> int:
    """Problems that share a rival's program are called by one process."""
    told = (p.values.get("dtype"), p.values.get("head_dim"), p.values.get("causal"), getattr(p, "group", 0))
    return random.Random(repr(told)).randrange(WARMERS)


def warm_all(problems: Sequence[Problem]) -> None:
    """Have rivals that compile themselves do so in several processes, into the cache that the environment names."""
    shares: dict[int, list[Problem]] = defaultdict(list)
    for p in problems:
        if p.declaration.compiled_rivals:
            shares[_share(p)].append(p)
    began = time.monotonic()
    pool = ProcessPoolExecutor(WARMERS, mp_context=multiprocessing.get_context("spawn"))
    work = [pool.submit(warm_rivals, share) for share in shares.values()]
    done, _ = concurrent.futures.wait(work, timeout=WARM_S)
    told = [each.exception() or each.result() for each in done]
    print(f"rivals were compiled ahead for {time.monotonic() - began:.0f} s: {told}", flush=True)
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


# Timing


def tensors_of(torch: Any, p: Problem) -> tuple[Any, ...]:
    """Random inputs of a problem."""

    def made(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=getattr(torch, p.dtype))

    if p.kernel == ScaledMatmul.name:
        kind, sizes = getattr(torch, p.dtype), ((p.m, p.k), (p.n, p.k))
        a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16).to(kind) for size in sizes)
        scales = (torch.rand(shape, device="cuda") + 0.5 for shape in scale_shapes(p))
        return a, b.t(), *scales
    if p.kernel == Matmul.name:
        a = made(p.k, p.m).t() if p.a_layout == "column" else made(p.m, p.k)
        return a, made(p.n, p.k).t() if p.b_layout == "column" else made(p.k, p.n)
    q = made(p.batch, p.heads, p.seq_q, p.head_dim)
    return q, *(made(p.batch, p.kv_heads, p.seq_k, p.head_dim) for _ in range(2))


def public_call(
    p: Problem, tensors: tuple[Any, ...]
) -> tuple[Callable[[], Any], Callable[[Served], Any], Callable[[], Any]]:
    """The public function on these tensors, what makes a plan of a choice, and what finds the plan that the function runs."""
    if p.kernel != Attention.name:
        from tiledsched.ops.front import operator as operator_of

        scaled = p.kernel == ScaledMatmul.name
        operator = operator_of(p.kernel, **({"bias": False} if scaled else {}))
        given = (*tensors, p.out_dtype, p.scales, p.fast_accum) if scaled else tensors
        return lambda: operator(*given), partial(operator._make_plan, given, tensors), lambda: operator.plan_for(*given)
    from tiledsched.ops.plans import AttentionCall
    from tiledsched.ops.sdpa import sdpa

    causal = p.alignment if p.causal else None
    q, k, v = tensors
    call = AttentionCall(q, k, v, causal, None, False)
    return lambda: sdpa(*tensors, causal=causal or False), call.make_plan, call.find_plan


class _Silent:
    def poll(self) -> None:
        """Nothing is recorded."""


class Timer:
    """Times the methods of problems on the current GPU."""

    def __init__(self) -> None:
        import torch

        from tiledsched.measure.nvml import current_device

        self.torch, device = torch, current_device()
        self.device, self.arch = device.name, device.arch
        self._flush = torch.empty(max(2 * device.l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")
        from tiledsched.rivals.bench import versions

        self.versions = f"{device.name} {versions(torch, device.driver)}"

    def rows(self, each: Choices, builds: Builds, bundle: Path, seed: int) -> list[Row]:
        """The rows of one problem."""
        from tiledsched.serve import process
        from tiledsched.serve.execute import launch_plan

        torch, p = self.torch, each.problem
        base = Row(seed=seed, kernel=p.kernel, problem=json.dumps(p.to_json(), sort_keys=True), method="")
        built = builds.write(each, bundle)
        os.environ[VARIABLE] = str(bundle)
        process._retired.extend(process._kernels.values())  # each problem has a bundle of its own
        process._kernels.clear()
        torch.cuda.empty_cache()
        tensors = tensors_of(torch, p)
        public, make, find = public_call(p, tensors)
        found: dict[str, Row] = {}
        calls: dict[str, Callable[[], Any]] = {}
        expected: Any = None

        def try_out(name: str, row: Row, call: Callable[[], Any]) -> None:
            nonlocal expected
            try:
                out = call()
                torch.cuda.synchronize()
                if expected is None:
                    expected = out.float()
                apart = float((out.float() - expected).norm() / expected.norm())
                if not apart < WRONG:
                    found[name] = replace(row, note=f"wrong by {apart:.2g}")
                    return
                found[name], calls[name] = replace(row, host_us=self._host_us(call)), call
            except Exception as error:
                torch.cuda.synchronize()
                found[name] = replace(row, note=f"{type(error).__name__}: {error}"[:120])

        for name, function in p.declaration.rivals(p).items():
            try_out(name, replace(base, method=name), partial(function, *tensors))
        choices: dict[str, str] = {}
        for place, schedule in enumerate(each.schedules):
            name = f"ours {place}"
            artifact = built[schedule].artifact
            row = replace(base, method=name, schedule=json.dumps(schedule.to_json(), sort_keys=True))
            choices[schedule.id] = name
            if artifact is None:
                found[name] = replace(row, note="it does not build")
                continue
            row = replace(row, spill_bytes=artifact.facts.spill_bytes)
            served = replace(each.served, schedule=schedule, alternatives=(), rivals=())
            plan = make(served)
            launch_plan(plan, tensors, first=True)
            try_out(name, row, partial(launch_plan, plan, tensors, keep_zeros=True))
        found[SERVED] = self._served(base, each, public, find, choices)
        for name, (low, middle, high) in self._sampled(calls, found, p).items():
            found[name] = replace(found[name], us=middle, low_us=low, high_us=high)
        return list(found.values())

    def _served(
        self, base: Row, each: Choices, public: Callable[[], Any], find: Callable[[], Any], choices: Mapping[str, str]
    ) -> Row:
        row = replace(base, method=SERVED, note=each.served.provenance, versions=self.versions)
        try:
            public()
            plan = find()  # a first launch may have given way to the next choice
            ours = choices.get(plan.served.schedule.id, "")
            return replace(
                row,
                host_us=self._host_us(public),
                eager=plan.rival.name if plan.rival else ours,
                graph=plan.in_graphs.name if plan.in_graphs else ours,
            )
        except (TiledschedError, RuntimeError) as error:
            return replace(row, note=f"{type(error).__name__}: {error}"[:200])

    def _host_us(self, call: Callable[[], Any]) -> float:
        """Microseconds that a call takes the host in a row of calls: the least of five rows, on an idle GPU."""
        found = []
        for _ in range(5):
            self.torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            found.append((time.perf_counter() - began) / HOST_CALLS * 1e6)
        self.torch.cuda.synchronize()
        return round(min(found), 1)

    def _sampled(
        self, calls: Mapping[str, Callable[[], Any]], found: Mapping[str, Row], p: Problem
    ) -> dict[str, tuple[float, float, float]]:
        from tiledsched.measure.timing import TorchStopwatch
        from tiledsched.rivals.sampling import Pace, sample_in_turn

        host_us = max((found[name].host_us or 0 for name in calls), default=0.0)
        watch = TorchStopwatch(self.torch, list(calls.values()), self._flush, host_us=host_us)
        for place in range(len(calls)):
            watch.read(watch.queue(place, paced=True))
        rng, pace = random.Random(p.id), Pace(gap_s=GAP_S)
        taken = sample_in_turn(watch, [ROUNDS] * len(calls), regime="burst", rng=rng, log=_Silent(), pace=pace)  # type: ignore[arg-type]
        return {
            name: (sorted(each)[1], statistics.median(each), sorted(each)[-2])
            for name, each in zip(calls, taken, strict=True)
            if len(each) > 2
        }


def timed(
    work: Sequence[Choices], timer: Timer, builds: Builds, seeds: Mapping[Problem, int], until: float
) -> Iterator[list[Row]]:
    """The rows of one problem after the other, until the time is over."""
    with tempfile.TemporaryDirectory() as folder:
        for place, each in enumerate(work):
            if time.monotonic() > until:
                print(f"the time is over: {len(work) - place} of {len(work)} problems are left", flush=True)
                return
            try:
                yield timer.rows(each, builds, Path(folder) / f"{place}.zip", seeds[each.problem])
            except TiledschedError as error:
                print(f"{each.problem}: {error}", flush=True)


def main() -> None:
    """Time drawn problems and print the summary."""
    parser = parser_with(
        flag("--seed", type=positive, help="of the draw"),
        flag("--attention", type=count, default=120, help="problems of attention"),
        flag("--matmul", type=count, default=80, help="matrix products"),
        flag("--scaled-matmul", type=count, default=36, help="products of 8-bit floats"),
        flag("--further", type=count, default=0, help="further choices of ours that are timed, to learn from"),
        flag("--jobs", type=positive, help="processes that build; by default one for each CPU"),
        flag("--seconds", type=positive, help="begin no problem after so long"),
        flag("--csv", type=Path, help="rows are written here as they are known"),
        flag("--summary", type=Path, help="only print what such a file says; no GPU"),
        flag(
            "--judge",
            type=Path,
            nargs="+",
            metavar="CSV",
            help="what would serve each problem of such files, had it not been timed",
        ),
        flag("--ship", type=Path, nargs="+", metavar="CSV", help="write the times of such files for serving; no GPU"),
        flag("--losses", type=Path, nargs="+", metavar="CSV", help="write what our choices lose in such files; no GPU"),
        flag("--kernel", choices=list(DRAWS), default="attention", help="of --ship and --losses"),
        flag("--out", type=Path, help="the file that these two write"),
        prog="python -m docs.studies.untuned",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.parse_args()
    if asked.ship:
        write_times([row for path in asked.ship for row in read(path)], asked.kernel, asked.out)
        return
    if asked.summary:
        print(summary(judged(read(asked.summary))), end="")
        return
    if asked.losses:
        rows = [row for path in asked.losses for row in read(path)]
        write_whole(asked.out, json.dumps(drawn_losses(rows, asked.kernel), indent=1) + "\n")
        return
    if asked.judge:
        rows = [row for path in asked.judge for row in read(path)]
        print(summary([each for kernel in DRAWS for each in cross_validated(rows, kernel)]), end="")
        return
    if not (asked.seed and asked.csv):
        parser.error("--seed and --csv are needed; or --summary")
    began = time.monotonic()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # else each process compiles its own
    os.environ.setdefault("TILEDSCHED_COMPILE", "wait")  # else torch would be timed in place of what is being compiled

    timer = Timer()
    rows = read(asked.csv) if asked.csv.exists() else []
    done = {row.problem for row in rows}
    seeds: dict[Problem, int] = {}
    for kernel in DRAWS:
        known = [each.problem for each in read_shipped_entries(table_path(kernel, timer.arch))]
        for p in drawn(kernel, asked.seed, getattr(asked, kernel), known):
            if json.dumps(p.to_json(), sort_keys=True) not in done:
                seeds[p] = asked.seed
    problems = list(seeds)
    random.Random(asked.seed).shuffle(problems)  # a run that is cut off has some of each
    work = choices_of(problems, timer.arch, timer.device, asked.further)
    print(f"{len(work)} problems were resolved after {time.monotonic() - began:.0f} s", flush=True)
    builds = Builds(work, timer.arch, asked.jobs or max(1, (os.cpu_count() or 4) - 3))
    try:
        warm_all(problems)
        builds.finish()
        until = math.inf if asked.seconds is None else began + asked.seconds
        for found in timed(work, timer, builds, seeds, until):
            rows += found
            write_whole(asked.csv, csv_text([row.to_csv() for row in rows], COLUMNS))
    finally:
        builds.close()
    print(f"{len(work)} problems, {time.monotonic() - began:.0f} s", flush=True)
    print(summary(judged(rows)), end="")


if __name__ == "__main__":
    main()
