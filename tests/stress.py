"""Many processes that make, read, tune, import and clear one database at the same time, and what must be true of it afterwards.

python tests/stress.py URL [SECONDS [PROCESSES]] prints what went wrong, a line for each thing; see :mod:`test_stress`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import sqlalchemy as sa
from store_samples import (
    DEVICE,
    FAILURE,
    PROBLEM,
    TOOLCHAIN,
    artifact,
    build,
    entry,
    measurement,
    runs,
    schedule,
    stored,
)

from tiledsched.core.errors import Failure, FailureKind
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table, import_table

PROBLEMS = [PROBLEM.replace(batch=each) for each in range(1, 9)]
HANG = Failure(kind=FailureKind.HANG, message="no answer for 5 s")
SHARED = len(PROBLEMS)
"""Measurements of the table that every process imports, of problems that nothing else is stored of."""


class Worker:
    """One of the processes: it does all kinds of work by turns, and notes what was committed, which must not be lost.

    Args:
        number: which one.
        url: the database, which need not be there yet.
        table: a table file that all import.
    """

    def __init__(self, number: int, url: str, table: Path) -> None:
        self.number, self.url, self.table = number, url, table
        self.rng, self.turn = random.Random(number), 0
        self.measured: list[str] = []
        self.built: list[str] = []
        self.done: list[int] = []
        self.served: list[int] = []
        self.counts: Counter[str] = Counter()

    def uid(self) -> str:
        """A number that no other process and no other turn has."""
        self.turn += 1
        return f"{self.number:04x}{self.turn:020x}"

    def make(self) -> None:
        """Open the database as every command does, and make it where it is not there."""
        with TuningDB.open(self.url) as db:
            assert db.schema_revision

    def read(self) -> None:
        """Read all of it: what this process stored is there, and each row is whole."""
        with TuningDB.open(self.url, read_only=True) as db:
            found = {each.uid for each in db.measurements()}
            assert found >= {*self.measured}, "what this process stored is gone"
            assert all(each.fingerprint for each in db.entries())
            db.landscapes()
            db.failures()

    def tune(self) -> None:
        """What a tune stores: a run, builds, a measurement, an entry."""
        mine, problem = self.uid(), self.rng.choice(PROBLEMS)
        with TuningDB.open(self.url) as db:
            run = db.start_run({"problems": [problem.to_json()]}, "sm_90")
            other = schedule(number=self.number, turn=self.turn)
            assert db.find_builds("attention", "abc", TOOLCHAIN, "sm_90") is not None
            db.record_builds([build(artifact(mine), sched=other)])
            self.built.append(other.id)
            taken = measurement(self.rng.uniform(90, 110), problem=problem, schedule=other, fingerprint=mine)
            number = db.record_measurement(run, "attention", "abc", TOOLCHAIN, taken)
            db.put_entry(
                entry(
                    "measured",
                    problem=problem,
                    schedule=other,
                    fingerprint=mine,
                    device_name=DEVICE.name,
                    regime="burst",
                    measurement_id=number,
                    run_id=run,
                )
            )
            db.finish_run(run)
            self.done.append(run)
            self.served.append(problem.batch)

    def merge(self) -> None:
        """What an import of another database stores."""
        uids = [self.uid() for _ in range(4)]
        taken = [stored(uid, problem=problem) for uid, problem in zip(uids, self.rng.sample(PROBLEMS, 4), strict=True)]
        record = entry("measured", problem=taken[0].measurement.problem, device_name=DEVICE.name, regime="burst")
        with TuningDB.open(self.url) as db:
            assert db.merge(taken, [record.replace(measurement=taken[0].summary)]).measurements_added == 4
        self.measured += uids
        self.served.append(taken[0].measurement.problem.batch)

    def take(self) -> None:
        """Import the table that all import: its rows are there once."""
        with TuningDB.open(self.url) as db:
            self.counts["imported"] += import_table(db, self.table).measurements_added

    def fail(self) -> None:
        """Store a failure; and begin a run in a process that ends at once, which the next run must notice."""
        with TuningDB.open(self.url) as db:
            db.record_failure(None, "attention", "sm_90", "measure", schedule(), HANG, problem=PROBLEM, device=DEVICE)
            self.counts["failed"] += 1
            db.record_builds([build(FAILURE, sched=schedule(failing=self.number, turn=self.turn))])
            self.counts["failed"] += 1
            self.turn += 1
        child = os.fork()
        if child == 0:
            try:
                with TuningDB.open(self.url) as db:
                    os.write(1, f"{json.dumps({'abandoned': db.start_run({}, 'sm_90')})}\n".encode())
                os._exit(0)
            except BaseException:
                os.write(1, f"{json.dumps({'raised': traceback.format_exc()})}\n".encode())
            os._exit(1)
        os.waitpid(child, 0)

    def clear(self) -> None:
        """Delete all failures there are, whoever stored them."""
        with TuningDB.open(self.url) as db:
            self.counts["cleared"] += db.forget_failures()

    def run(self, until: float) -> None:
        """Work until then, and say what was done."""
        works = [self.make, self.read, self.tune, self.merge, self.take, self.fail, self.clear]
        raised = ""
        try:
            self.make()
            while time.monotonic() < until:
                work = self.rng.choice(works)
                work()
                self.counts[work.__name__] += 1
        except BaseException:
            raised = f"process {self.number}: {traceback.format_exc()}"
        os.write(1, f"{json.dumps(self.said() | {'raised': raised})}\n".encode())

    def said(self) -> dict[str, object]:
        """What this process did, all of which must be there."""
        return {name: getattr(self, name) for name in ("measured", "built", "done", "served", "counts")}


def write_table(path: Path) -> Path:
    """Write the table that every process imports; returns its path."""
    with TuningDB.open(":memory:") as db:
        shared = [stored(f"ffff{n:020x}", problem=each.replace(causal=True)) for n, each in enumerate(PROBLEMS)]
        served = entry("measured", device_name=DEVICE.name, regime="burst")
        db.merge(
            shared, [served.replace(problem=each.measurement.problem, measurement=each.summary) for each in shared]
        )
        export_table(db, path)
    return path


def stress(url: str, seconds: float, processes: int) -> list[dict[str, object]]:
    """What each of the processes said. All begin at once, with a database that is not there."""
    with tempfile.TemporaryDirectory() as folder:
        table = write_table(Path(folder) / "table.json")
        files = [(Path(folder) / str(number)) for number in range(processes)]
        children, until = [], time.monotonic() + seconds
        for number, file in enumerate(files):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
                Worker(number, url, table).run(until)
                os._exit(0)
            children.append(child)
        ends = [os.waitpid(child, 0)[1] for child in children]
        said = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [*said, *({"raised": f"a process ended with {end}"} for end in ends if end)]


def verdict(url: str, said: list[dict[str, object]]) -> list[str]:
    """What is wrong with a database after all processes have ended, given what they said; empty where nothing is."""
    wrong = [str(each["raised"]) for each in said if each.get("raised")]
    counts: Counter[str] = Counter()
    for each in said:
        counts.update(each.get("counts", {}))

    def promised(name: str) -> list[object]:
        return [one for each in said for one in each.get(name, [])]

    with TuningDB.open(url) as db:
        wrong += db.check()
        if url.startswith("postgresql"):
            engine_says = "ok"
        else:
            with db.reading() as session:
                engine_says = session.scalar(sa.text("PRAGMA integrity_check"))
        if engine_says != "ok":
            wrong.append(f"the integrity check says {engine_says}")
        uids = Counter(each.uid for each in db.measurements())
        builds = {each for each, _ in db.find_builds("attention", "abc", TOOLCHAIN, "sm_90")}
        status = {row.id: row.status for row in runs(db)}
        failures = db.forget_failures()
        served = {each.problem: each for each in db.entries()}
        last = db.start_run({}, "sm_90")  # which notices runs whose process is gone
        now = {row.id: row.status for row in runs(db) if row.id != last}
    if lost := {*promised("measured")} - {*uids}:
        wrong.append(f"{len(lost)} measurements of an import are lost")
    tuned = len(promised("done"))
    if len(uids) != tuned + len(promised("measured")) + counts["imported"] or max(uids.values(), default=1) > 1:
        wrong.append(
            f"{len(uids)} measurements are there, {tuned} of tunes and {len(promised('measured'))} of imports were stored"
        )
    if lost := {*promised("built")} - builds:
        wrong.append(f"{len(lost)} builds are lost")
    if any(status.get(each) != "done" for each in promised("done")):
        wrong.append("runs that ended are not there as done")
    abandoned = [each["abandoned"] for each in said if "abandoned" in each]
    if any(now.get(each) != "interrupted" for each in abandoned) or len(status) != tuned + len(abandoned):
        wrong.append("runs whose process ended are lost, or not there as interrupted")
    if counts["imported"] != SHARED * bool(counts["take"]):
        wrong.append(f"of the {SHARED} measurements that all imported, {counts['imported']} were added")
    if counts["failed"] != counts["cleared"] + failures:
        wrong.append(f"{counts['failed']} failures were stored, {counts['cleared']} cleared, and {failures} are left")
    if {each.batch for each in served if not each.causal} != {*promised("served")} or any(
        each.provenance != "measured" for each in served.values()
    ):
        wrong.append(f"{len(served)} problems are served, {len({*promised('served')})} were stored")
    return wrong


def main(url: str, seconds: str = "60", processes: str = "64") -> int:
    """Stress a database that is not there yet; print what is wrong, and how much was done."""
    said = stress(url, float(seconds), int(processes))
    wrong = verdict(url, said)
    done: Counter[str] = sum((Counter(each.get("counts", {})) for each in said), Counter())
    print(json.dumps({"done": done, "wrong": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
