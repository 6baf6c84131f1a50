"""Merging by evidence: whatever the order, the grouping and the number of times, the same entries from the same measurements."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import DEVICE, PROBLEM, START, entry, new_url, schedule, stored

from tiledsched.cli import main
from tiledsched.core.config import Settings
from tiledsched.serve.entries import layers
from tiledsched.store.db import TuningDB
from tiledsched.store.location import database_exists
from tiledsched.store.records import Entry, StoredMeasurement

PROBLEMS = (PROBLEM, PROBLEM.replace(causal=True))
HOLDS = {"device_name": DEVICE.name, "regime": "burst"}


@st.composite
def pieces(draw) -> tuple[list[StoredMeasurement], list[Entry]]:
    """What one database brings: measured and modelled entries with few different times, so that many are equal."""
    measurements, entries = {}, {}
    for _ in range(draw(st.integers(1, 4))):
        problem, tile, us = (
            draw(st.sampled_from(PROBLEMS)),
            draw(st.sampled_from((64, 128))),
            draw(st.sampled_from((90.0, 100.0))),
        )
        day = timedelta(days=draw(st.integers(0, 3)))
        if draw(st.booleans()):
            uid = f"{PROBLEMS.index(problem)}{tile:03}{us:03.0f}{day.days}".rjust(24, "0")
            taken = stored(
                uid,
                created_at=START + day,
                problem=problem,
                schedule=schedule(tile),
                fingerprint=f"{tile:024}",
                median_us=us,
            )
            measurements[uid] = taken
            new = entry(
                "measured",
                problem=problem,
                schedule=schedule(tile),
                fingerprint=f"{tile:024}",
                updated_at=START + day,
                source=f"day {day.days}",
                **HOLDS,
            ).replace(measurement=taken.summary)
        else:
            new = entry(
                "modelled", problem=problem, schedule=schedule(tile), model_us=us, updated_at=START + day, **HOLDS
            )
        entries[new.key] = new
    return list(measurements.values()), list(entries.values())


def state(db: TuningDB) -> str:
    """All that a merge may change, without numbers that mean something here only."""
    entries = [
        {**each.to_json(), "measurement_id": None, "measurement": each.measurement and each.measurement.uid}
        for each in db.entries()
    ]
    return json.dumps([entries, sorted(each.uid for each in db.measurements())], sort_keys=True)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(pieces(), min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_order_grouping_and_repetition_change_nothing(brought, rng) -> None:
    with TuningDB.open(":memory:") as one, TuningDB.open(":memory:") as other, TuningDB.open(":memory:") as part:
        for piece in brought:
            one.merge(*piece)
        shuffled = [*brought, rng.choice(brought)]
        rng.shuffle(shuffled)
        for piece in shuffled[:2]:  # merged elsewhere first
            part.merge(*piece)
        for piece in shuffled[2:]:
            other.merge(*piece)
        other.merge(part.measurements(), part.entries())
        assert state(one) == state(other)
        before = state(one)
        one.merge(other.measurements(), other.entries())
        assert state(one) == before


@settings(max_examples=6, deadline=None)
@given(st.lists(pieces(), min_size=1, max_size=3))
def test_what_is_served_after_a_merge_is_the_fastest_that_came(brought) -> None:
    with TuningDB.open(":memory:") as db:
        for piece in brought:
            db.merge(*piece)
        for got in db.entries():
            offered = [each for _, entries in brought for each in entries if each.key == got.key]
            rank = min(each.rank for each in offered)
            times = [each.median_us or each.model_us for each in offered if each.rank == rank]
            assert (got.rank, got.median_us or got.model_us) == (rank, min(times))


def measured(uid: str, us: float, **changes) -> tuple[StoredMeasurement, Entry]:
    taken = stored(uid.rjust(24, "0"), median_us=us, **changes)
    one = taken.measurement
    return taken, entry(
        "measured", schedule=one.schedule, fingerprint=one.fingerprint, updated_at=START, **HOLDS
    ).replace(measurement=taken.summary)


def test_contradictions_are_told_whichever_way_they_meet() -> None:
    """The same program at another time; and a faster one that was measured and is not served."""
    fast, slow = measured("b", 100.0), measured("a", 110.0)  # by name the slower would come first
    beaten = stored("c".rjust(24, "0"), median_us=80.0, schedule=schedule(64), fingerprint="e" * 24)
    for first, second in ((fast, slow), (slow, fast)):
        with TuningDB.open(":memory:") as db:
            assert db.merge([first[0]], [first[1]]).contradictions == ()
            (found,) = db.merge([second[0]], [second[1]]).contradictions
            assert (found.entry.median_us, found.median_us, found.schedule) == (100.0, 110.0, found.entry.schedule)
            (found,) = db.merge([beaten], [second[1]]).contradictions
            assert (found.median_us, found.schedule) == (80.0, schedule(64))
            assert "lost to 64x64" in str(found)


@pytest.mark.parametrize(("us", "accuracy"), [(98.0, True), (80.0, False)], ids=["within the spread", "never checked"])
def test_what_decides_nothing_contradicts_nothing(us, accuracy) -> None:
    served = measured("a", 100.0)
    changes = {} if accuracy else {"accuracy": None}
    other = stored("c".rjust(24, "0"), median_us=us, schedule=schedule(64), fingerprint="e" * 24, **changes)
    with TuningDB.open(":memory:") as db:
        db.merge([served[0]], [served[1]])
        assert db.merge([other], [served[1]]).contradictions == ()


def test_the_command_takes_several_and_says_what_to_race(tmp_path, capsys) -> None:
    for name, us in (("a", 100.0), ("b", 130.0)):
        with TuningDB.open(tmp_path / f"{name}.db") as db:
            taken, one = measured(name, us)
            db.merge([taken], [one])
    target = str(tmp_path / "all.db")
    assert main(["db", "import", "--db", target, str(tmp_path / "b.db"), str(tmp_path / "a.db")]) == 0
    said = capsys.readouterr().out
    assert "entries: 1 added, 1 replaced, 0 kept; measurements: 2 added, 0 known" in said
    assert "served with 100.00 us, was also measured at 130.00 us" in said
    assert "let a race decide: tiledsched tune attention --arch sm_90 --regime burst -p S=1024,D=64" in said
    assert main(["db", "import", "--db", target, str(tmp_path / "b.db"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["entries_kept"], told["contradictions"][0]["median_us"]) == (1, 130.0)


WRITER = """
import sys
sys.path[:0] = {path!r}
from store_samples import DEVICE, PROBLEM, START, entry, schedule, stored
from tiledsched.store.db import TuningDB
mine = int(sys.argv[1])
with TuningDB.open({url!r}) as db:
    for turn in range(4):
        problems = [PROBLEM.replace(batch=1 + (turn + step) % 8) for step in range(5)]
        if mine % 2:
            problems.reverse()
        taken = [stored(f"{{mine:02}}{{turn:02}}{{each.values['batch']:020}}", problem=each, median_us=100.0 + mine) for each in problems]
        db.merge(taken, [entry("measured", problem=each, device_name=DEVICE.name, regime="burst", updated_at=START).replace(
            measurement=one.summary) for each, one in zip(problems, taken)])
        db.put_entry(entry("modelled", problem=PROBLEM.replace(batch=20 + turn), model_us=50.0 + mine))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "postgresql"])
def test_writers_of_a_new_database_lose_nothing_and_stop_no_reader(backend, tmp_path) -> None:
    with new_url(backend, tmp_path) as url:
        program, seen = WRITER.format(path=sys.path, url=url), 0
        running = [
            subprocess.Popen([sys.executable, "-c", program, str(each)], stderr=subprocess.PIPE, text=True)
            for each in range(4)
        ]
        while any(each.poll() is None for each in running):
            if backend == "file" and database_exists(url):
                (*_, mine) = layers(Settings(db=url), (), "attention")
                assert seen <= len(mine.entries)
                seen = len(mine.entries)
            time.sleep(0.05)
        assert [(each.communicate(timeout=100)[1], each.returncode) for each in running] == [("", 0)] * 4
        with TuningDB.open(url) as db:
            assert len(db.measurements()) == 4 * 4 * 5
            entries = db.entries(provenance="measured")
            assert [each.median_us for each in entries] == [100.0] * 8
            assert len(db.entries(provenance="modelled")) == 4
            assert db.check() == []
