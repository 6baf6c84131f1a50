"""What is left of a process that is killed at any moment: everything it had committed, and nothing it had not.

`KILLS=40 python -m pytest tests/test_kills.py` kills each kind of work forty times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from store_samples import BACKENDS, fill, new_url, runs

from tiledsched.core import files
from tiledsched.core.files import write_whole
from tiledsched.store import engine, exchange
from tiledsched.store.db import TuningDB

pytestmark = pytest.mark.slow
TRIES = int(os.environ.get("KILLS", "2"))
MERGING = """
    import sys
    from store_samples import DEVICE, entry, stored
    from tiledsched.store.db import TuningDB
    first = int(sys.argv[2]) * 1000000
    with TuningDB.open(sys.argv[1]) as db:
        print("ready", flush=True)
        for number in range(first, first + 100000, 20):
            taken = [stored(f"{each:024x}") for each in range(number, number + 20)]
            record = entry("measured", device_name=DEVICE.name, regime="burst").replace(measurement=taken[0].summary)
            db.merge(taken, [record])
            print(number, flush=True)
    """
OPENING = """
    import sys
    from tiledsched.store.db import TuningDB
    print("ready", flush=True)
    with TuningDB.open(sys.argv[1]) as db:
        pass
    """
WRITING = """
    import sys
    from tiledsched.store.db import TuningDB
    from tiledsched.store.exchange import export_table
    with TuningDB.open(sys.argv[1], read_only=True) as db:
        print("ready", flush=True)
        for number in range(100000):
            export_table(db, sys.argv[2] + "/table.json")
            db.back_up(sys.argv[2] + "/copy.db", replace=True)
            print(number, flush=True)
    """
REFRESHING = """
    import dataclasses, os, sys
    from test_refresh import first_and_second, refreshed, toolchain, tuned
    from tiledsched.store.db import TuningDB
    os.environ["TILEDSCHED_DB"] = sys.argv[1]
    first, second = first_and_second()
    with TuningDB.open(sys.argv[1]) as db:
        tuned(db, first)
    print("ready", flush=True)
    for number in range(int(sys.argv[2]), 100000):
        second.toolchain = toolchain(f"13.5.{number}")
        (row,) = refreshed(second).rows
        print(row.now.compiler, row.now.measurement.uid, flush=True)
    """


def killed(code: str, *arguments: object, after_s: float, lines: int = 0) -> list[str]:
    """What a process said until it was killed, so long after it was ready and said so many lines: whole lines, without the first."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    said = [child.stdout.readline().strip() for _ in range(lines)]
    time.sleep(after_s)
    child.kill()
    said += [line.strip() for line in child.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
    assert child.returncode in (0, -signal.SIGKILL), "it failed by itself"
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_merge_loses_nothing_committed(backend, tmp_path) -> None:
    pause, promised = random.Random(1), set[str]()
    with new_url(backend, tmp_path) as url:
        with TuningDB.open(url):
            pass
        for number in range(TRIES):
            done = [
                int(line)
                for line in killed(MERGING, url, number, after_s=pause.uniform(0, 0.4), lines=(number + 1) % 2)
            ]
            promised |= {f"{each:024x}" for start in done for each in range(start, start + 20)}
            with TuningDB.open(url) as db:
                assert db.check() == []
                found = {stored.uid for stored in db.measurements()}
                assert promised <= found
                assert len(found) % 20 == 0  # whole merges
                assert len(db.entries()) == (1 if found else 0)
    assert promised


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_refresh_and_its_races_lose_nothing_committed(backend, tmp_path) -> None:
    pause, promised = random.Random(4), set[tuple[str, str]]()
    with new_url(backend, tmp_path) as url:
        for number in range((TRIES + 1) // 2):
            done = killed(REFRESHING, url, 1000 * number, after_s=pause.uniform(0, 1), lines=(number + 1) % 2)
            promised |= {tuple(line.split()) for line in done}
            with TuningDB.open(url) as db:
                assert db.check() == []
                measured = {stored.uid for stored in db.measurements()}
                served = {(entry.compiler, entry.measurement.uid) for entry in db.entries()}
                assert promised <= served
                assert {uid for _, uid in served} <= measured
                assert {run.status for run in runs(db)} <= {"done", "running", "interrupted"}


def test_a_database_is_made_whole_or_not_at_all(tmp_path) -> None:
    pause = random.Random(5)
    for number in range(2 * TRIES):
        path = tmp_path / f"{number}.db"
        killed(OPENING, path, after_s=pause.uniform(0, 0.9))
        with TuningDB.open(path) as db:
            assert db.schema_revision == engine.HEAD
            assert db.check() == []
            fill(db)
            assert len(db.entries()) == len(db.measurements()) == 2


def test_a_killed_export_or_backup_leaves_the_file_that_was_there(tmp_path, monkeypatch) -> None:
    pause = random.Random(3)
    with TuningDB.open(tmp_path / "x.db") as db:
        fill(db)
        entries = db.entries()
        exchange.export_table(db, tmp_path / "table.json")
        db.back_up(tmp_path / "copy.db")
    for _ in range(TRIES):
        killed(WRITING, tmp_path / "x.db", tmp_path, after_s=pause.uniform(0.05, 0.3))
        assert len(exchange.read_table(tmp_path / "table.json").entries) == 2
        with TuningDB.open(tmp_path / "copy.db") as db:
            assert db.check() == []
            assert db.entries() == entries
    monkeypatch.setattr(files, "FORGOTTEN_S", 0.0)
    write_whole(tmp_path / "table.json", "{}")  # the next writer removes what is left
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".part", ".part-journal"))]
