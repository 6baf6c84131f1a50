"""64 processes make, read, tune, import and clear one database at once: nothing is lost, nothing raises, and the database is sound.

`STRESS=60 python -m pytest tests/test_stress.py` does so for 60 seconds.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from store_samples import DEVICE, PROBLEM, new_url, schedule
from stress import HANG, Worker, verdict, write_table

from tiledsched.store import engine
from tiledsched.store.db import TuningDB

SECONDS, PROCESSES = os.environ.get("STRESS", "10"), "64"


def stressed(url: str, seconds: str, processes: str) -> Any:
    """What the stress of a database in another process found wrong, and what was done."""
    command = [sys.executable, str(Path(__file__).parent / "stress.py"), url, seconds, processes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "postgresql"])
def test_nothing_is_lost_and_nothing_raises(backend, tmp_path) -> None:
    with new_url(backend, tmp_path) as url:
        assert stressed(url, SECONDS, PROCESSES)["wrong"] == []


LOSSES = {
    "DELETE FROM measurements WHERE uid = 'ffff00000000000000000003'": "measurements are there",
    "DELETE FROM measurements WHERE uid LIKE '0001%'": "4 measurements of an import are lost",
    "DELETE FROM builds WHERE failure_kind IS NULL": "1 builds are lost",
    "DELETE FROM failures": "1 failures were stored, 0 cleared, and 0 are left",
    "UPDATE runs SET status = 'interrupted'": "runs that ended are not there as done",
    "DELETE FROM runs": "runs whose process ended are lost",
    "DELETE FROM entries": "problems are served",
    "UPDATE entries SET fingerprint = '0'": "of another fingerprint",
}


@pytest.mark.slow
@pytest.mark.parametrize("statement", [*LOSSES, ""])
def test_every_loss_is_noticed(statement, tmp_path, capfd) -> None:
    """One process does each kind of work once. Then one thing is lost."""
    url, table = str(tmp_path / "x.db"), write_table(tmp_path / "table.json")
    worker = Worker(1, url, table)
    for work in (worker.make, worker.tune, worker.merge, worker.take, worker.read):
        work()
        worker.counts[work.__name__] += 1
    with TuningDB.open(url) as db:
        db.record_failure(None, "attention", "sm_90", "measure", schedule(), HANG, problem=PROBLEM, device=DEVICE)
        worker.counts["failed"] += 1
    with closing(sqlite3.connect(url, isolation_level=None)) as connection:
        connection.execute(statement)
    wrong = verdict(url, [worker.said()])
    assert LOSSES[statement] in "\n".join(wrong) if statement else wrong == []
    assert "it raised" in verdict(url, [worker.said(), {"raised": "it raised"}])


class Busy:
    """A driver's connection to a database that others write: each look whether it is free takes a while of a clock."""

    OperationalError = sqlite3.OperationalError

    def __init__(self, looks: int, *, moves: bool) -> None:
        self.left, self.moves, self.now, self.said = looks, moves, 0.0, list[str]()

    def execute(self, statement: str) -> Busy:
        self.said.append(statement)
        if statement == "BEGIN IMMEDIATE":
            self.now += 50.0
            self.left -= 1
            if self.left >= 0:
                raise sqlite3.OperationalError("database is locked")
        return self

    def fetchone(self) -> tuple[int]:
        return (self.left if self.moves else 0,)


@pytest.mark.parametrize("moves", [True, False])
def test_who_waits_gives_up_only_where_nobody_writes(moves, monkeypatch) -> None:
    busy = Busy(9, moves=moves)
    monkeypatch.setattr(engine.time, "monotonic", lambda: busy.now)
    if moves:
        engine._begin_writing(busy)
        assert busy.said[-1] == "PRAGMA busy_timeout=60000"
    else:
        with pytest.raises(sa.exc.OperationalError, match="locked"):
            engine._begin_writing(busy)
    assert busy.said.count("BEGIN IMMEDIATE") == (10 if moves else 3)
