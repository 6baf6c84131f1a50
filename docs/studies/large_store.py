"""Times the commands that read a large database, or write to one, on a database of made-up measurements, and how soon each ends
at SIGTERM. Nothing is measured on a GPU.

python -m docs.studies.large_store [--folder DIR] [--entries N] [--limit SECONDS] [MEASUREMENTS]
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import os
import platform
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from tiledsched.build.toolchain import Toolchain
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.canonical import stable_id
from tiledsched.core.device import ARCHS, ResourceFacts
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.launches import problem_class
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Conditions, Device, Measurement
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import SCHEMA_VERSION, written
from tiledsched.store.records import BuildRecord, Entry, StoredMeasurement

ARCH, SCHEDULES, SAMPLES, AT_ONCE = "sm_90", 2000, 101, 10_000
LARGE = 100
"""One landscape of so many is a recording of `SCHEDULES` programs; the others share what is left."""
KERNELS = ("attention", "attention", "matmul", "attention", "rms_norm", "attention", "matmul", "softmax")
"""The kernels of made-up landscapes, in turn."""
DEVICES = tuple(
    Device(
        name=f"Made-up {name}", arch=ARCH, sm_count=132, memory_bytes=80 << 30, l2_bytes=50 << 20, driver="580.95.05"
    )
    for name in ("H100", "H200")
)
TOOLCHAIN = Toolchain(cuda_tile="1.7.0", tileiras="13.4.92", ptxas="13.4.92", nvvm="13.4.92")
WHEN = datetime(2026, 1, 1, tzinfo=timezone.utc)
SPREAD = tuple(1 + (place - SAMPLES // 2) / 5000 for place in range(SAMPLES))
"""The samples of a measurement, over their median."""


@dataclass(frozen=True)
class Made:
    """What is made up of one problem on one device in one regime."""

    measurements: list[StoredMeasurement]
    entry: Entry


def problem_of(number: int) -> Problem:
    """The problem of a made-up landscape. Two landscapes in a row have one: those of two devices."""
    kernel, number = KERNELS[number // 2 % len(KERNELS)], number // 2
    declared, dtype = kernel_named(kernel), ("float16", "bfloat16")[number % 2]
    if kernel == "attention":
        sizes = {"seq_len": 64 * (1 + number // 3), "head_dim": (64, 96, 128)[number % 3]}
        return Attention.standard(**sizes, causal=number // 2 % 2 == 1, dtype=dtype)
    if kernel == "matmul":
        return declared.problem(m=16 * (1 + number // 8), n=4096, k=1024 * (1 + number % 3), dtype=dtype)
    return declared.problem(rows=64 * (1 + number // 8), columns=(1024, 4096, 5120, 8192)[number % 4], dtype=dtype)


class MakesUp:
    """Makes up measurements, entries and builds that a check finds sound."""

    def __init__(self, count: int, entries: int) -> None:
        large = -(-entries // LARGE)
        self.sizes = (
            [SCHEDULES if number % LARGE == 0 else 0 for number in range(entries)]
            if 2 * large * SCHEDULES < count
            else [0] * entries
        )
        left, rest = count - sum(self.sizes), self.sizes.count(0)
        few = iter(left // rest + (place < left % rest) for place in range(rest))
        self.sizes = [size or next(few) for size in self.sizes]
        self._schedules: dict[str, list[Schedule]] = {}
        self._rng = random.Random(0)

    def schedules(self, kernel: str) -> list[Schedule]:
        """The schedules that are made up to be measured of a kernel, in a mixed order."""
        if kernel not in self._schedules:
            number = 2 * KERNELS.index(kernel)
            found = list(space_for(ARCH, kernel_named(kernel)).schedules(problem_of(number)))
            self._rng.shuffle(found)
            self._schedules[kernel] = found[:SCHEDULES]
        return self._schedules[kernel]

    def landscape(self, number: int, first: int = 0) -> Made:
        """What is made up of one landscape, with a further number for its problem. Schedules are measured again where there are
        fewer than measurements.
        """
        size, number = self.sizes[number], number + first
        problem, device = problem_of(number), DEVICES[number % 2]
        kernel, regime = problem.declaration, "sustained" if number % 20 > 17 else "burst"
        schedules = self.schedules(kernel.name)
        conditions = Conditions(
            sm_clock_mhz=1980 - number % 5 * 15,
            memory_clock_mhz=2619,
            power_w=400.0 + number % 200,
            temperature_c=40 + number % 20,
            gap_ms=2.0,
        )
        taken, source = [], kernel.source_hash()
        for place in range(size):
            program = place % len(schedules)
            us = round(
                (20 + number % 997) * (1 + program * 7 % 2003 / 1000) * (1 + place // len(schedules) % 3 / 500), 3
            )
            turn = place % SAMPLES
            samples = [round(us * each, 3) for each in SPREAD]
            made = Measurement(
                problem=problem,
                schedule=schedules[program],
                fingerprint=fingerprint_of(problem, schedules[program]),
                device=device,
                regime=regime,
                median_us=us,
                ci_low_us=samples[SAMPLES // 2 - 10],
                ci_high_us=samples[SAMPLES // 2 + 10],
                samples_us=(*samples[turn:], *samples[:turn]),
                accuracy=Accuracy(
                    max_abs_error=0.001, worst_tile_error=0.0003, worst_tile=(program % 4, 0), repeatable=True
                ),
                conditions=conditions,
                runner="gpu",
            )
            taken.append(
                StoredMeasurement(
                    uid=stable_id(["made up", number, place], 24),
                    kernel=kernel.name,
                    source_hash=source,
                    toolchain=TOOLCHAIN,
                    measurement=made,
                    created_at=WHEN + timedelta(minutes=number, milliseconds=place),
                )
            )
        best, *others = sorted({each.measurement.schedule: each for each in reversed(taken)}.values(), key=median_of)[
            :3
        ]
        entry = Entry(
            kernel=kernel.name,
            arch=ARCH,
            problem=problem,
            device_name=device.name,
            regime=regime,
            provenance="measured",
            schedule=best.measurement.schedule,
            fingerprint=best.measurement.fingerprint,
            measurement=best.summary,
            runner_up=others[0].measurement.schedule if others else None,
            margin=median_of(others[0]) / median_of(best) - 1 if others else None,
            candidates=min(size, len(schedules)),
            source="made up",
            toolchain=TOOLCHAIN,
            source_hash=source,
            updated_at=WHEN + timedelta(minutes=number),
        )
        return Made(taken, entry)

    def builds(self) -> Iterator[BuildRecord]:
        """A build of every program; one schedule in fifty more did not build."""
        done = set()
        for number, size in enumerate(self.sizes):
            problem = problem_of(number)
            kernel = problem.declaration
            for place, schedule in enumerate(self.schedules(kernel.name)[:size]):
                fingerprint = fingerprint_of(problem, schedule)
                if fingerprint in done:
                    continue
                done.add(fingerprint)
                failure = Failure(kind=FailureKind.COMPILE_ERROR, message="made up") if place % 50 == 49 else None
                yield BuildRecord(
                    kernel=kernel.name,
                    source_hash=kernel.source_hash(),
                    toolchain=TOOLCHAIN,
                    arch=ARCH,
                    schedule=schedule,
                    problem_class=problem_class(kernel, problem, schedule, ARCHS[ARCH]),
                    fingerprint="" if failure else fingerprint,
                    facts=None if failure else FACTS,
                    cubin_bytes=0 if failure else 30_000,
                    failure=failure,
                    seconds=2.5,
                )


FACTS = ResourceFacts(
    registers=168, threads=384, shared_bytes=98304, spill_bytes=0, num_ctas=1, code_bytes=24_576, ctas_per_sm=1
)
_fingerprints: dict[tuple[object, ...], str] = {}


def fingerprint_of(problem: Problem, schedule: Schedule) -> str:
    """The made-up fingerprint of a program: problems that agree in what is compiled in have the same."""
    v = problem.values
    key = problem.kernel, v["dtype"], v.get("head_dim"), v.get("causal"), v.get("columns"), schedule
    return _fingerprints.get(key) or _fingerprints.setdefault(key, stable_id([*key[:-1], schedule.id], 24))


def median_of(stored: StoredMeasurement) -> float:
    """The median of a measurement, in microseconds."""
    return stored.measurement.median_us


def fill(path: Path, count: int, entries: int, first: int = 0) -> Iterator[list[Made]]:
    """Fill a database with landscapes from a number on; yields those of each transaction."""
    made = MakesUp(count, entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TuningDB.open(path) as db:
        builds = made.builds()
        while some := list(itertools.islice(builds, AT_ONCE)):
            db.record_builds(some)
        found: list[Made] = []
        for number in range(entries):
            found.append(made.landscape(number, first))
            if sum(len(each.measurements) for each in found) >= AT_ONCE or number == entries - 1:
                db.merge([one for each in found for one in each.measurements], [each.entry for each in found])
                yield found
                found = []


def write_table(path: Path, made: Iterable[Made]) -> None:
    """Write a table of landscapes, as `tiledsched db export` does, in more lines."""
    with lzma.open(path, "wt", preset=1, encoding="utf-8") as file:
        file.write(f'{{"artifacts": [], "schema_version": {SCHEMA_VERSION}, "measurements": [')
        entries, between = [], ""
        for each in made:
            entries.append(json.dumps(written(each.entry)))
            for stored in each.measurements:
                file.write(between + json.dumps(written(stored)))
                between = ",\n"
        file.write('], "entries": [' + ",\n".join(entries) + "]}")


def run(words: Sequence[str], limit_s: float) -> tuple[str, float]:
    """Run a command of `tiledsched`: its exit code, what it took of time and memory, and the time in seconds."""
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "tiledsched", *words], stdout=subprocess.DEVNULL)
    timer = threading.Timer(limit_s, child.terminate)
    timer.start()
    _, status, used = os.wait4(child.pid, 0)
    timer.cancel()
    took = time.perf_counter() - started
    cores = used.ru_utime + used.ru_stime
    return (
        f"exit {os.waitstatus_to_exitcode(status)}, {took:.1f} s ({cores:.1f} s of CPU), {used.ru_maxrss >> 10} MiB",
        took,
    )


def timed(folder: Path, count: int, entries: int, limit_s: float) -> Iterator[str]:
    """Make the databases, and run each command on them twice: to its end, and with a signal in the middle; yields a line of a
    table for each.
    """
    path, other, table = folder / "large.db", folder / "other.db", folder / "other.json.xz"
    started = time.perf_counter()
    for _ in () if path.exists() else fill(path, count, entries):
        pass
    write_table(table, itertools.chain.from_iterable(fill(other, count // 10, entries // 10, first=2 * entries)))
    made_in = time.perf_counter() - started
    yield f"{count:,} measurements, {entries:,} entries, {path.stat().st_size >> 20} MiB, made in {made_in:.0f} s"
    yield f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    on_it = ["--db", str(path)]
    commands = {
        "check": ["db", "check", *on_it],
        "report": ["report", "attention", "--arch", ARCH, "-o", str(folder / "report"), *on_it],
        "compare": ["compare", f"{path}@H100", f"{path}@H200"],
        "import of a table": ["db", "import", str(table), *on_it],
        "import of a database": ["db", "import", str(other), *on_it],
    }
    for name, words in commands.items():
        said, took = run(words, limit_s)
        _, ended = run(words, took / 2)
        yield f"|{name}|{said}|ends {ended - took / 2:.1f} s after SIGTERM|"


def main() -> None:
    """Run the study as a command."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.studies.large_store", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "measurements", type=int, nargs="?", default=1_000_000, help="how many are made up (default: %(default)s)"
    )
    parser.add_argument(
        "--entries", type=int, default=20_000, help="how many entries these are of (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=170, help="seconds after which a command is ended (default: 170)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the databases are made and stay; one that is there is used (default: removed at the end)",
    )
    options = parser.parse_args()
    if options.entries < 10 or options.measurements < 10 * options.entries:
        parser.error("give at least 10 entries, and 10 measurements for each")
    with tempfile.TemporaryDirectory() as made:
        for line in timed(options.folder or Path(made), options.measurements, options.entries, options.limit):
            print(line, flush=True)


if __name__ == "__main__":
    main()
