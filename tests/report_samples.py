"""Databases for the report's tests: real schedules, made-up times."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from datetime import datetime, timezone

import golden
import pytest

from tiledsched.build.cubin import Artifact
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.device import ResourceFacts, arch_spec
from tiledsched.core.errors import Failure
from tiledsched.core.launches import problem_class
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Conditions, Device, Measurement
from tiledsched.report import build_report, write_report
from tiledsched.report.document import Chart, Explorer
from tiledsched.report.records import ProblemReport, Timed
from tiledsched.report.text import document
from tiledsched.report.views import KNOB
from tiledsched.store.records import BuildRecord, Entry, Toolchain

TOOLCHAIN = Toolchain(cuda_tile="1.7.0", tileiras="13.4.12", ptxas="13.4.12", nvvm="13.4.12")
DEVICE = Device(
    name="NVIDIA H200", arch="sm_90", sm_count=132, memory_bytes=139 << 30, l2_bytes=60 << 20, driver="580.1"
)
PROBLEM = Attention.standard(seq_len=4096, head_dim=64)
DEFAULT = space_for("sm_90", Attention).default(PROBLEM)
SOURCE = "abc"


def check_golden(name, text):
    """Compares a text with a file of tests/data/golden, today's date aside."""
    day = datetime.now(timezone.utc)
    golden.check_golden(name, re.sub(rf"{day:%Y-%m}(-{day:%d}( \d\d:\d\d)?)?", "TODAY", text))


def _without_knobs(rows):
    """Rows of programs without the values of their knobs."""
    rows = [] if isinstance(rows, str) else rows
    return [{key: value for key, value in row.items() if not key.startswith(KNOB)} for row in rows]


def specs_of(blocks):
    """The charts of a document, a line for each of their parts."""
    found = {}
    for block in blocks:
        if isinstance(block, Chart):
            found[block.name] = block.spec
        elif isinstance(block, Explorer):
            found |= {
                f"{case.title}: {name}": _without_knobs(rows)
                for case in block.cases
                for name, rows in case.rows.items()
            }
            found |= {view.name: view.spec for view in block.views} | block.shared
    return "".join(f"{name}: {json.dumps(value, default=list)}\n" for name, value in found.items())


def draws_nothing(folder):
    """A PYTHONPATH with a `vl_convert` that draws empty charts: tests/test_report_files.py draws those of every kind."""
    folder.mkdir()
    functions = {"vegalite_to_svg": "<svg/>", "vegalite_to_png": b"png", "javascript_bundle": "vega = 0;"}
    made = "".join(f"def {name}(*given, **named):\n    return {text!r}\n\n\n" for name, text in functions.items())
    (folder / "vl_convert.py").write_text(made, encoding="utf-8")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def check_report(name, report, folder):
    """Compares the sentences, tables, files and charts of a report with a file of tests/data/golden/report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiledsched.report.document.drawings", lambda blocks: {})
        files = [path for path in write_report(report, folder) if path.suffix != ".html"]
    texts = [f"== {path.name}\n{path.read_text(encoding='utf-8')}" for path in files]
    text = "\n".join([*texts, specs_of(document(report))])
    check_golden(f"report/{name.replace(' ', '_').replace(',', '')}.txt", text)


def grid(tiles=(1.0, 1.06, 1.5, 2.1), occupancies=(1.0, 1.2), inert=1.0):
    """Times of four tiles with four programs each. The default, 64x64, is the third tile."""
    return {
        plain(*tile, occupancy=occupancy, latency_k=latency): 100.0 * slower * factor * (inert if latency else 1)
        for tile, slower in zip(((128, 64), (128, 128), (64, 64), (64, 128)), tiles, strict=True)
        for occupancy, factor in zip((1, 2), occupancies, strict=True)
        for latency in (0, 2)
    }


def plain(tile_m, tile_n, **knobs):
    """The default schedule with another tile, and with `knobs`."""
    return DEFAULT.replace(tile_m=tile_m, tile_n=tile_n, **knobs)


def report_of(db, arch="sm_90", **wanted):
    """Attention's report, unless another kernel is named."""
    return build_report(db, arch, **{"kernel": Attention, **wanted})


def taken(
    schedule, us, *, problem=PROBLEM, fingerprint=None, regime="burst", device=DEVICE.name, clock=1980, reasons=()
):
    return Measurement(
        problem=problem,
        schedule=schedule,
        fingerprint=fingerprint or schedule.id * 2,
        regime=regime,
        median_us=us,
        device=replace(DEVICE, name=device),
        ci_low_us=us * 0.995,
        ci_high_us=us * 1.005,
        samples_us=tuple(us * (1 + i / 1000) for i in (-5, -1, 0, 1, 5)),
        runner="gpu",
        accuracy=Accuracy(max_abs_error=1e-3, worst_tile_error=5e-4, worst_tile=(0, 0, 0), repeatable=True),
        conditions=Conditions(sm_clock_mhz=clock, power_w=512.0, temperature_c=51, throttle_reasons=reasons),
    )


def add_times(db, times, *, fingerprints=None, **changes):
    """Measurements at the times given, in microseconds; their numbers by schedule."""
    return {
        schedule: db.record_measurement(
            None,
            changes.get("problem", PROBLEM).kernel,
            SOURCE,
            TOOLCHAIN,
            taken(schedule, us, fingerprint=(fingerprints or {}).get(schedule), **changes),
        )
        for schedule, us in times.items()
    }


def build_of(schedule, outcome, *, problem=PROBLEM, arch="sm_90"):
    """A build that became the fingerprint or the failure given."""
    if isinstance(outcome, str):
        facts = ResourceFacts(
            registers=128, threads=256, shared_bytes=65536, spill_bytes=16, num_ctas=1, code_bytes=20480, ctas_per_sm=2
        )
        outcome = Artifact(arch=arch, fingerprint=outcome, facts=facts, cubin=b"\x7fELF" * 100)
    served = problem_class(kernel_named(problem.kernel), problem, schedule, arch_spec(arch))
    return BuildRecord.of(
        outcome,
        kernel=problem.kernel,
        source_hash=SOURCE,
        toolchain=TOOLCHAIN,
        arch=arch,
        schedule=schedule,
        seconds=1.0,
        problem_class=served,
    )


def add_builds(db, builds):
    db.record_builds(builds)


def add_failure(db, stage, schedule, kind, message, **more):
    db.record_failure(None, "attention", "sm_90", stage, schedule, Failure(kind=kind, message=message), **more)


def entry(schedule, **more):
    """A measured entry of PROBLEM."""
    known = {"kernel": "attention", "arch": "sm_90", "problem": PROBLEM, "provenance": "measured", "regime": "burst"}
    code = {"fingerprint": schedule.id * 2, "device_name": DEVICE.name, "toolchain": TOOLCHAIN}
    return Entry(**{**known, **code, "schedule": schedule, **more})


def add_entry(db, schedule, **more):
    db.put_entry(entry(schedule, **more))


def add_raced(db, times, winner, **more):
    """Measurements, and the entry that serves the winner."""
    numbers = add_times(db, times, problem=more.get("problem", PROBLEM))
    db.put_entry(entry(winner, measurement_id=numbers[winner], **more))


def add_modelled(db, schedule, *, problem=PROBLEM, arch="sm_90", **changes):
    db.put_entry(
        Entry(
            kernel=problem.kernel,
            arch=arch,
            problem=problem,
            provenance="modelled",
            schedule=schedule,
            fingerprint="d" * 24,
            model_us=90.0,
            toolchain=TOOLCHAIN,
            source_hash=SOURCE,
            **changes,
        )
    )


def formula(schedule, problem):
    """Microseconds by a plausible formula: tiles matter most, then occupancy and warps."""
    us = problem.flops / 450e6
    us *= {64: 1.25, 128: 1.0}[schedule["tile_m"]] * {32: 1.6, 64: 1.0, 128: 1.04}[schedule["tile_n"]]
    us *= {1: 1.15, 2: 1.0, 3: 1.05, 4: 1.3}[schedule["occupancy"]] * {4: 1.2, 8: 1.0}[schedule["num_worker_warps"]]
    us *= 0.93 if schedule["loop_split"] else 1.0
    us *= 0.97 if schedule["persistent"] != "no" and schedule["tile_n"] == 128 else 1.0
    return us * (1 + int(schedule.id, 16) % 997 / 1e5)


def landscape(db, problem=PROBLEM, *, every=7, **changes):
    """Every seventh plain schedule of the shipped space, measured by the formula; the times by schedule."""
    pinned = {"num_ctas": 1, "opt_level": 3, "accum_mode": "fp32", "block_order": "natural", "latency_v": 0}
    space = space_for("sm_90", Attention)
    schedules = list(space.schedules(problem, pinned=space.modelled_pins() | pinned))
    schedules = [schedule for schedule in schedules if schedule["persistent"] != "snake"][::every]
    times = {schedule: formula(schedule, problem) for schedule in schedules}
    add_times(db, times, problem=problem, **changes)
    return times


def problem_of(times, same_programs=None, *, problem=PROBLEM, provenance="measured", **more):
    """What is reported of one problem, from the time of each schedule, without a database.

    `same_programs` names for a schedule the one that was timed in its place.
    """
    same = same_programs or {}
    us = {schedule: times[same.get(schedule, schedule)] for schedule in times}
    ordered = sorted(times, key=lambda schedule: (us[schedule], schedule in same))
    timed = tuple(
        Timed(
            schedule=schedule,
            fingerprint=schedule.id,
            us=us[schedule],
            relative=us[schedule] / us[ordered[0]],
            same_program_as=same.get(schedule),
        )
        for schedule in ordered
    )
    return ProblemReport(
        provenance=provenance,
        problem=problem,
        device_name=DEVICE.name if provenance == "measured" else "",
        accum_mode="fp32",
        size=0,
        shared=(),
        timed=timed,
        runner_up=timed[1] if len(timed) > 1 else None,
        default=None,
        median_us=timed[len(timed) // 2].us,
        programs=len(timed) - len(same),
        served=None,
        **more,
    )
