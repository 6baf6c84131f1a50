"""Times a large database of attention: merging measurements, one exact lookup, reading all entries, `show` and `report`.
Nothing is measured on a GPU.

python -m docs.studies.large_store [--folder DIR] [--each N] [MEASUREMENTS]
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from tiledsched.build.toolchain import Toolchain
from tiledsched.core.canonical import stable_id
from tiledsched.core.problem import Problem
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Conditions, Device, Measurement
from tiledsched.store.db import TuningDB
from tiledsched.store.records import Entry, StoredMeasurement

ARCH, AT_ONCE, LOOKUPS, SCHEDULES = "sm_90", 100_000, 2000, 2000
DEVICE = Device(name="Made-up GPU", arch=ARCH, sm_count=132)
TOOLCHAIN = Toolchain(cuda_tile="1.7.0", tileiras="13.4.92", ptxas="13.4.92", nvvm="13.4.92")
WHEN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def problem_of(number: int, each: int) -> Problem:
    """The problem of a made-up measurement: every `each` measurements share one."""
    return Attention.standard(seq_len=64 * (1 + number // each), head_dim=64)


def made_up(count: int, each: int) -> Iterator[StoredMeasurement]:
    """Made-up measurements, with ten samples each. Those of one problem are of 2000 programs, again and again."""
    schedules = list(itertools.islice(space_for(ARCH, Attention).schedules(problem_of(0, each)), SCHEDULES))
    for number in range(count):
        program = number % SCHEDULES
        us = 100.0 + program * 7 % SCHEDULES / 100 + number // SCHEDULES % 10 / 1000
        taken = Measurement(
            problem=problem_of(number, each),
            schedule=schedules[program],
            fingerprint=stable_id(program, 24),
            device=DEVICE,
            regime="burst",
            median_us=us,
            ci_low_us=us - 0.5,
            ci_high_us=us + 0.5,
            samples_us=(us - 0.5, *(us,) * 8, us + 0.5),
            accuracy=None,
            conditions=Conditions(),
            runner="gpu",
        )
        yield StoredMeasurement(
            id=0,
            uid=stable_id(["made up", number], 24),
            run_id=None,
            kernel=Attention.name,
            source_hash="",
            toolchain=TOOLCHAIN,
            measurement=taken,
            created_at=WHEN + timedelta(seconds=number),
        )


def entry_of(best: StoredMeasurement) -> Entry:
    """The entry that serves such a measurement."""
    taken = best.measurement
    return Entry(
        kernel=best.kernel,
        arch=ARCH,
        problem=taken.problem,
        device_name=DEVICE.name,
        regime="burst",
        provenance="measured",
        schedule=taken.schedule,
        fingerprint=taken.fingerprint,
        measurement=best.summary,
        toolchain=TOOLCHAIN,
        updated_at=WHEN,
    )


def timed(path: Path, count: int, each: int) -> Iterator[str]:
    """Fill a database and read from it; yields a line for each thing timed."""
    made = made_up(count, each)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TuningDB.open(path) as db:
        while some := list(itertools.islice(made, AT_ONCE)):
            started = time.perf_counter()
            first = {one.measurement.problem: one for one in reversed(some)}
            db.merge(some, [entry_of(one) for one in first.values()])
            yield f"merging {len(some):,}: {time.perf_counter() - started:.1f} s"
    yield f"size: {path.stat().st_size >> 20} MiB"
    asked, rng = [], random.Random(0)
    with TuningDB.open(path, read_only=True) as db:
        for _ in range(LOOKUPS):
            problem = problem_of(rng.randrange(count), each)
            started = time.perf_counter()
            (found,) = db.entries(ARCH, Attention.name, problem=problem, device_name=DEVICE.name)
            asked.append(1e3 * (time.perf_counter() - started))
            assert found.problem == problem
        asked.sort()
        yield f"one entry: median {asked[LOOKUPS // 2]:.2f} ms, p99 {asked[LOOKUPS * 99 // 100]:.2f} ms, of {LOOKUPS} lookups"
        started = time.perf_counter()
        entries = db.entries()
        yield f"all {len(entries)} entries: {time.perf_counter() - started:.2f} s"
    for command in (["show", "attention"], ["report", "attention", "-o", str(path.parent / "report")]):
        started = time.perf_counter()
        run = [sys.executable, "-m", "tiledsched", *command, "--arch", ARCH, "--db", str(path)]
        subprocess.run(run, check=True, capture_output=True)
        took, most = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
        yield f"{command[0]}, with the start of its process: {took:.2f} s, {most} MiB at most"


def main() -> None:
    """Run the study as a command."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.studies.large_store", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "measurements", type=int, nargs="?", default=1_000_000, help="how many are made up (default: %(default)s)"
    )
    parser.add_argument(
        "--each", type=int, default=2000, metavar="N", help="how many of them share a problem (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the database is made and stays (default: removed at the end)"
    )
    options = parser.parse_args()
    if options.measurements < 1 or options.each < 1:
        parser.error("measurements, --each: give a number above 0")
    with tempfile.TemporaryDirectory() as made:
        for line in timed((options.folder or Path(made)) / "large.db", options.measurements, options.each):
            print(line, flush=True)


if __name__ == "__main__":
    main()
