"""The roofline's ceilings: the highest rates that anything was measured at, of any kernel, on the GPU of the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_samples import PROBLEM, TOOLCHAIN, add_times, plain, report_of, taken

from tiledsched.core.config import load_settings
from tiledsched.kernels.matmul import Matmul
from tiledsched.kernels.softmax import Softmax
from tiledsched.report.charts import roofs, share_of_ceiling
from tiledsched.report.landscapes import measured_ceilings
from tiledsched.report.views import roofline_rows
from tiledsched.serve.entries import load_entries
from tiledsched.store.records import Entry

LARGE = Softmax.problem(rows=65536, columns=8192)
SMALL = Softmax.problem(rows=64, columns=1024)
CACHED = Matmul.problem(m=4096, n=4096, k=4096, dtype="float16")
PRODUCT = Matmul.problem(m=8192, n=8192, k=8192, dtype="float16")


def entry(db, problem, us, **changes) -> Entry:
    """A measured entry as it is read back from a database."""
    measured = {key: changes.pop(key) for key in ("device", "regime", "clock") if key in changes}
    found = taken(plain(128, 64), us, problem=problem, **measured)
    number = db.record_measurement(None, problem.kernel, "abc", TOOLCHAIN, found)
    db.put_entry(
        Entry(
            kernel=problem.kernel,
            arch="sm_90",
            problem=problem,
            provenance="measured",
            schedule=found.schedule,
            fingerprint=found.fingerprint,
            device_name=found.device.name,
            regime=found.regime,
            measurement_id=number,
            toolchain=TOOLCHAIN,
            **changes,
        )
    )
    return next(
        each
        for each in db.entries(kernel=problem.kernel)
        if (each.problem, each.device_name, each.regime) == (problem, found.device.name, found.regime)
    )


def test_the_highest_rate_of_each_unit_and_gpu_with_its_clock(db):
    rows = [
        entry(db, PRODUCT, 1400.0, clock=1755),
        entry(db, PRODUCT.replace(k=4096), 800.0),
        entry(db, LARGE, 500.0),
        entry(db, LARGE.replace(rows=32768), 300.0),
        entry(db, CACHED, 1000.0, device="NVIDIA H100"),
    ]
    found = measured_ceilings(rows, "burst", ["float16", "bfloat16"])
    assert [(each.device_name, each.unit, each.problem) for each in found] == [
        ("NVIDIA H100", "TFLOP/s", CACHED),
        ("NVIDIA H200", "GB/s", LARGE),
        ("NVIDIA H200", "TFLOP/s", PRODUCT),
    ]
    assert found[2].rate == PRODUCT.tflops(1400.0)
    assert found[1].rate == LARGE.gbps(500.0)
    assert "at 1755 MHz (matmul m=8192" in str(found[2])


def test_caches_other_regimes_narrow_types_and_estimates_are_no_ceilings(db):
    slow = entry(db, LARGE, 500.0)
    for row in (
        entry(db, SMALL, 0.1),  # fits the cache: its rate is not the memory's
        entry(db, LARGE, 100.0, regime="sustained"),
        slow.replace(provenance="transferred"),
    ):
        assert [each.rate for each in measured_ceilings([slow, row], "burst", ["bfloat16"])] == [LARGE.gbps(500.0)]
    assert measured_ceilings([entry(db, PRODUCT, 1400.0)], "burst", ["float8_e4m3fn"])[0].unit == "GB/s"


def test_the_roofline_is_drawn_under_what_was_measured(db):
    add_times(db, {plain(128, 64): 1000.0})
    report = report_of(db, served=[entry(db, PRODUCT, 1400.0), entry(db, LARGE, 500.0)])
    (one,) = report.measured.problems
    said = share_of_ceiling(report, one)
    assert f"reaches {PROBLEM.tflops(1000.0) / PRODUCT.tflops(1400.0) * 100:.0f}% of the ceiling measured" in said
    assert f"{PRODUCT.tflops(1400.0):.0f} TFLOP/s" in said
    assert f"{LARGE.gbps(500.0):.0f} GB/s" in said
    lines = roofs(report, one)
    assert max(line["rate"] for line in lines if line["ceiling"] == "measured") == PRODUCT.tflops(1400.0)
    assert {line["ceiling"] for line in lines} == {"measured", "computed"}
    assert [row["rate"] for row in roofline_rows(one, {})] == [round(PROBLEM.tflops(1000.0), 2)]
    bare = report_of(db)
    assert "of the ceiling computed" in share_of_ceiling(bare, bare.measured.problems[0])


@pytest.mark.parametrize(("name", "sms"), [("NVIDIA GeForce RTX 5090", 170), ("NVIDIA RTX PRO 6000 Blackwell", 188)])
def test_the_computed_roof_is_that_of_the_gpu_and_not_of_its_arch(db, name, sms):
    add_times(db, {plain(128, 64): 1000.0})
    report = replace(report_of(db), arch="sm_120")
    (one,) = report.measured.problems
    assert f"computed: {sms} SMs" in share_of_ceiling(report, replace(one, device_name=name))


def test_what_ships_holds_both_ceilings_of_the_measured_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "none.db"))
    found = measured_ceilings(load_entries(load_settings(), {"sm_90"}), "burst", ["float16", "bfloat16"])
    gbps, flops = (each for each in found if each.device_name == "NVIDIA H200")
    assert 700 < flops.rate < 990  # dense, by the data sheet
    assert 3900 < gbps.rate < 4800
    assert flops.sm_clock_mhz > 1000
