"""Clocks that were held down: what is marked, what says so, and what loses to evidence taken at full clocks."""

from __future__ import annotations

import dataclasses

import pytest
from golden import lacking
from report_samples import report_of
from store_samples import DEVICE, PROBLEM, TOOLCHAIN, entry, measurement, schedule, stored
from test_search_tuner import LANDSCAPES, Recorded, tune

from tiledsched.cli import served_output, tuned_output
from tiledsched.core import config, data_files
from tiledsched.kernels.attention import Attention
from tiledsched.measure.clocks import describe_throttling
from tiledsched.measure.runner import Conditions, Device
from tiledsched.report.document import to_markdown
from tiledsched.report.text import document
from tiledsched.rivals.rows import BenchRow
from tiledsched.serve import explain, lookup
from tiledsched.serve.entries import Layer, combined, load_entries
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import clocks_of, contradictions, for_compiler, throttled
from tiledsched.store.exchange import read_table
from tiledsched.tuning import refresh, results

HOT = Conditions(sm_clock_mhz=513, throttle_reasons=("software thermal",))
FULL = Conditions(sm_clock_mhz=1980)
GB10 = Device(name="NVIDIA GB10", arch="sm_121", sm_count=48)


@pytest.fixture
def db(tmp_path):
    with TuningDB.open(tmp_path / "tuning.db") as db:
        yield db


@pytest.mark.parametrize(
    ("name", "arch", "regime", "mhz", "reasons", "seen_mhz", "low"),
    [
        ("NVIDIA GB10", "sm_121", "burst", 513, ("software thermal",), 0, True),
        ("NVIDIA GB10", "sm_121", "burst", 850, (), 0, True),
        ("NVIDIA GB10", "sm_121", "sustained", 850, (), 0, True),
        ("NVIDIA GB10", "sm_121", "burst", 2405, (), 3003, False),
        ("NVIDIA GB10", "sm_121", "burst", 2200, ("hardware thermal",), 2400, True),
        ("NVIDIA GB10", "sm_121", "burst", 2400, ("hardware thermal",), 2400, False),
        ("NVIDIA GB10", "sm_121", "burst", 0, (), 2400, False),
        ("NVIDIA GB10", "sm_121", "burst", 0, ("hardware slowdown",), 0, True),
        ("NVIDIA H200", "sm_90", "sustained", 1440, ("power cap",), 1980, False),
        ("NVIDIA H200", "sm_90", "burst", 1440, ("power cap",), 1980, True),
        ("NVIDIA L4", "sm_89", "burst", 1600, (), 0, False),
        ("NVIDIA L4", "sm_89", "burst", 600, (), 0, True),
        ("NVIDIA Other", "sm_999", "burst", 600, (), 0, False),
        ("NVIDIA Other", "sm_999", "burst", 600, (), 2000, True),
    ],
)
def test_what_a_gpu_should_hold_is_known_by_its_regime(name, arch, regime, mhz, reasons, seen_mhz, low) -> None:
    device = Device(name=name, arch=arch, sm_count=1)
    words = describe_throttling(Conditions(sm_clock_mhz=mhz, throttle_reasons=reasons), device, regime, seen_mhz)
    assert bool(words) == low
    assert not low or (str(mhz or "not report") in words and (reasons[0] if reasons else "no reason") in words)


def test_nothing_that_ships_is_marked() -> None:
    entries = load_entries(config.Settings(db="/nonexistent/x.db"), None)
    seen_mhz = clocks_of(entries)
    assert seen_mhz == {"NVIDIA H200": 1980}
    assert [each for each in entries if throttled(each, seen_mhz)] == []


@pytest.mark.parametrize("path", sorted((data_files.tuning_db() / "landscapes").rglob("*_s512_*.xz")))
def test_no_landscape_that_ships_is_marked(path) -> None:
    taken = [stored.measurement for stored in read_table(path).measurements]
    assert not any(describe_throttling(each.conditions, each.device, each.regime, 1980) for each in taken)


def put(db, us, conditions, **more) -> bool:
    number = db.record_measurement(None, "attention", "abc", TOOLCHAIN, measurement(us, conditions=conditions, **more))
    return db.put_entry(entry("measured", device_name=DEVICE.name, regime="burst", measurement_id=number))


@pytest.mark.parametrize(
    ("first", "second", "us"),
    [(HOT, FULL, 100.0), (FULL, HOT, 100.0), (HOT, HOT, 90.0), (FULL, FULL, 90.0)],
    ids=["then full", "then held down", "both held down", "both full"],
)
def test_what_was_held_down_loses_to_what_was_not(db, first, second, us) -> None:
    """A second tune replaces a first one, unless only the second was held down."""
    put(db, 300.0 if first == HOT else 100.0, first)
    replaced = put(db, us if second == FULL or first == HOT else 300.0, second)
    assert replaced == (second == FULL or first == HOT)
    assert db.entries()[0].median_us == us


def test_it_loses_in_every_layer_and_merge(db, tmp_path) -> None:
    slow, full = (
        entry("measured", device_name=DEVICE.name, regime="burst", measurement=stored("d" * 24, **more).summary)
        for more in ({"median_us": 90.0, "conditions": HOT}, {"median_us": 100.0, "conditions": FULL})
    )
    layers = [Layer(name="shipped", where="", entries=[full]), Layer(name="user", where="", entries=[slow])]
    assert [each.layer for each in combined(layers)] == ["shipped"]
    newer = slow.replace(toolchain=dataclasses.replace(TOOLCHAIN, tileiras="13.9.9"))
    assert for_compiler([newer, full], "13.9.9") == [full]
    records = [stored("d" * 24, median_us=90.0, conditions=HOT), stored("e" * 24, median_us=100.0, conditions=FULL)]
    pairs = [each.replace(measurement=record.summary) for each, record in zip((slow, full), records, strict=True)]
    for order in (pairs, pairs[::-1]):
        with TuningDB.open(":memory:") as merged:
            for each in order:
                merged.merge(records, [each])
            assert merged.entries()[0].median_us == 100.0
    assert not list(contradictions([full], lambda each: [stored(median_us=300.0, conditions=HOT)]))


def throttle(recorded: Recorded, conditions: Conditions, times: float) -> Recorded:
    """The same landscape, measured at other clocks."""
    other = Recorded.recompiled(recorded, lambda schedule: False)
    other.measurements = [
        dataclasses.replace(
            each,
            conditions=conditions,
            samples_us=tuple(times * us for us in each.samples_us),
            **{name: times * getattr(each, name) for name in ("median_us", "ci_low_us", "ci_high_us")},
        )
        for each in recorded.measurements
    ]
    return other


def test_a_throttled_tune_says_so_and_the_next_one_learns_nothing_from_it(db, capsys) -> None:
    recorded = Recorded(LANDSCAPES[0])
    slow, full = throttle(recorded, HOT, 3.0), throttle(recorded, FULL, 1.0)

    def report(result) -> results.TuneReport:
        entries = db.entries()
        return results.TuneReport(
            kernel=Attention, arch="sm_90", run_id=1, results=[result], entries=entries, measured=True
        )

    first = tune(slow, db, trials=16, effort="quick")
    tuned_output.print_tuned(report(first))
    print(
        explain.explain_problem(lookup.LookupTable(db.entries(), Attention), recorded.problem, "sm_90", "NVIDIA H200")
    )
    served_output.print_entries(db.entries())
    assert "clock held down" in str(report(first))
    assert tuned_output.tune_result_json(first)["held_down"] == first.held_down
    second = tune(full, db, trials=16, effort="quick")
    assert (second.stored, second.held_down) == (True, "")
    assert second.measured >= 12  # what was measured at a low clock is measured again
    best_us = db.entries()[0].median_us
    third = tune(slow, db, trials=16, effort="quick")
    assert (third.stored, db.entries()[0].median_us) == (False, best_us)
    tuned_output.print_tuned(report(third))
    printed = " ".join("".join(capsys.readouterr()).split())
    words = (
        "us measured with the clock held down",
        "at 513 MHz, where its maker gives 1980 MHz for NVIDIA H200 (software thermal)",
        "what is measured at its clock replaces what was not B=1",  # it ends the first tune's paragraph
        "the evidence was taken while the GPU's clock was held down",
        " held down at 513 MHz, where its maker gives 1980 MHz",
        "measured, held down",
        "held down: measured at 513 MHz",
        "us measured, ",
        "kept: a measured entry stands above",
        "where this GPU held 1980 MHz in other measurements",
    )
    assert lacking(printed, *words) == []


def test_a_bench_says_so(capsys) -> None:
    rows = [
        BenchRow(problem=PROBLEM, method=method, regime="burst", status="ok", conditions=HOT, device="NVIDIA GB10")
        for method in ("tiledsched", "torch_cudnn")
    ]
    served_output.print_bench(rows)
    assert "clock held down in 2 of 2 rows, at 513 MHz, where its maker gives 2420 MHz" in capsys.readouterr().err


def test_a_report_says_so(db) -> None:
    put(db, 100.0, FULL)
    put(db, 300.0, HOT, schedule=schedule(128, 64), fingerprint="e" * 24)
    words = "held down in 1 of 2 measurements, at 513 MHz, where this GPU held 1980 MHz in other measurements"
    assert words in to_markdown(document(report_of(db, "sm_90")))


def test_a_refresh_says_so(capsys) -> None:
    was, now = (
        entry(
            "measured", device_name=DEVICE.name, regime="burst", measurement=stored(median_us=us, conditions=at).summary
        )
        for us, at in ((100.0, FULL), (300.0, HOT))
    )
    row = refresh.Refreshed(was=was, outcome="raced", now=now, why="its machine code is another")
    tuned_output.print_refreshed(
        refresh.RefreshReport(
            kernel=Attention, arch="sm_90", compiler="13.9", current=0, rows=[row], rivals=[], compiled=1, seconds=1.0
        )
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "clock held down at 513 MHz, where its maker gives 1980 MHz for NVIDIA H200 (software thermal)" in printed
