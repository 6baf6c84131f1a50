"""Small made-up records for the store's tests. Run as a program, it writes the old database a schema leaves behind:

python tests/store_samples.py tests/data/store_0001.db
"""

from __future__ import annotations

import sqlite3
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgres import server

from tiledsched.build.cubin import Artifact
from tiledsched.build.toolchain import Toolchain
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.problem import ProblemClass
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Conditions, Device, Measurement, RivalTime
from tiledsched.store.db import TuningDB
from tiledsched.store.engine import resolve_url
from tiledsched.store.models import RunRow
from tiledsched.store.records import BuildRecord, Entry, StoredMeasurement

BACKENDS = ("file", pytest.param("postgresql", marks=pytest.mark.slow))
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
TOOLCHAIN = Toolchain(cuda_tile="1.7.0", tileiras="13.4.12", ptxas="13.4.12", nvvm="13.4.12")
DEVICE = Device(
    name="NVIDIA Sample", arch="sm_90", sm_count=132, memory_bytes=1 << 37, l2_bytes=50 << 20, driver="580.1"
)
PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
RIVALS = (
    RivalTime(
        name="flash_attention_4",
        median_us=90.0,
        ours_us=100.0,
        ratio=0.9,
        ratio_low=0.89,
        ratio_high=0.91,
        samples=30,
        host_us=340.0,
        capturable=True,
        version="flash-attn-4 4.0.0b36",
    ),
    RivalTime(name="torch_flash", failure="RuntimeError: No available kernel."),
)
FAILURE = Failure(kind=FailureKind.COMPILE_ERROR, message="tileiras: error: out of registers")


@contextmanager
def new_url(backend: str, folder: Path) -> Iterator[str]:
    """Where an empty database of the backend is: memory, file (in `folder`), or postgresql (a schema, dropped afterwards)."""
    if backend != "postgresql":
        yield ":memory:" if backend == "memory" else str(folder / "tuning.db")
        return
    url, schema = resolve_url(server()), f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(url, pool_pre_ping=True)  # some tests end every connection
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    inside = url.update_query_dict({"options": f"-csearch_path={schema}"})
    yield inside.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")
    engine.dispose()


def schedule(tile_m=128, tile_n=64, **knobs) -> Schedule:
    return Schedule({"tile_m": tile_m, "tile_n": tile_n, "occupancy": 1, "loop_split": False, **knobs})


def problem_class(**changes) -> ProblemClass:
    return ProblemClass({"head_dim": 64, "dtype": "float16", "causal": False, "signature": "abcdef012345", **changes})


def artifact(fingerprint="f" * 24, arch="sm_90", registers=168) -> Artifact:
    facts = ResourceFacts(
        registers=registers, threads=128, shared_bytes=65536, spill_bytes=0, num_ctas=1, code_bytes=20480, ctas_per_sm=2
    )
    return Artifact(arch=arch, fingerprint=fingerprint, facts=facts, cubin=b"\x7fELF" * 100)


def build(outcome=None, *, sched=None, arch="sm_90", **changes) -> BuildRecord:
    values = {
        "kernel": "attention",
        "source_hash": "abc",
        "toolchain": TOOLCHAIN,
        "arch": arch,
        "schedule": schedule() if sched is None else sched,
        "problem_class": problem_class(),
        "seconds": 1.5,
    }
    return BuildRecord.of(outcome if outcome is not None else artifact(arch=arch), **{**values, **changes})


def measurement(median_us=100.0, **changes) -> Measurement:
    values = {
        "problem": PROBLEM,
        "schedule": schedule(),
        "fingerprint": "f" * 24,
        "device": DEVICE,
        "regime": "burst",
        "median_us": median_us,
        "ci_low_us": median_us * 0.99,
        "ci_high_us": median_us * 1.01,
        "samples_us": tuple(median_us * share for share in (0.99, 1.0, 1.005, 0.995, 1.01)),
        "accuracy": Accuracy(max_abs_error=1e-3, worst_tile_error=5e-4, worst_tile=(0, 1, 2), repeatable=True),
        "conditions": Conditions(sm_clock_mhz=1980, power_w=512.5, throttle_reasons=("sw_power_cap",)),
        "runner": "gpu",
    }
    return Measurement(**{**values, **changes})


def stored(uid="d" * 24, *, created_at=START, **changes) -> StoredMeasurement:
    return StoredMeasurement(
        id=0,
        uid=uid,
        run_id=None,
        kernel="attention",
        source_hash="abc",
        toolchain=TOOLCHAIN,
        measurement=measurement(**changes),
        created_at=created_at,
    )


def entry(provenance="modelled", **changes) -> Entry:
    values = {
        "kernel": "attention",
        "arch": "sm_90",
        "problem": PROBLEM,
        "provenance": provenance,
        "schedule": schedule(),
        "fingerprint": "f" * 24,
        "model_us": 90.0,
        "toolchain": TOOLCHAIN,
        "source_hash": "abc",
        "candidates": 7,
        "source": "a test",
    }
    return Entry(**{**values, **changes})


def runs(db: TuningDB) -> list[RunRow]:
    """The runs of a database, the newest first."""
    with db.reading() as session:
        return list(session.scalars(sa.select(RunRow).order_by(RunRow.id.desc())))


def fill(db: TuningDB) -> None:
    """A few rows in every table."""
    run = db.start_run({"arch": "sm_90", "seq_len": [1024]}, "sm_90")
    other = schedule(64, 32)
    db.record_builds([build(), build(artifact("e" * 24), sched=other), build(FAILURE, sched=schedule(256, 256))])
    first = db.record_measurement(run, "attention", "abc", TOOLCHAIN, measurement(100.0))
    db.record_measurement(run, "attention", "abc", TOOLCHAIN, measurement(120.0, schedule=other, fingerprint="e" * 24))
    db.record_failure(run, "attention", "sm_90", "build", schedule(256, 256), FAILURE)
    hang = Failure(kind=FailureKind.HANG, message="no answer for 5 s")
    db.record_failure(
        run, "attention", "sm_90", "measure", other, hang, problem=PROBLEM, fingerprint="e" * 24, device=DEVICE
    )
    db.put_entry(
        entry(
            "measured",
            device_name=DEVICE.name,
            regime="burst",
            measurement_id=first,
            runner_up=other,
            margin=0.2,
            ties=(schedule(occupancy=2),),
            rivals=RIVALS,
            run_id=run,
            updated_at=START,
        )
    )
    later = START + timedelta(days=1)
    db.put_entry(entry("modelled", problem=PROBLEM.replace(causal=True), fingerprint="", updated_at=later))
    db.finish_run(run)


def fill_fleet(db: TuningDB) -> None:
    """A row in every table of a fleet's."""
    from tiledsched.fleet.campaign import CampaignPlan, Outcome
    from tiledsched.fleet.clock import Clock
    from tiledsched.fleet.leases import Leases

    leases = Leases(db, clock=Clock(now=lambda: START))
    campaign = leases.open(CampaignPlan(job="tune", kernel="attention", problems={"sm_90": [PROBLEM]}))
    worker = leases.join(campaign.id, hostname="host", pid=1, gpu="GPU-1", device_name=DEVICE.name, arch="sm_90")
    told = {"fingerprint": "f" * 24, "median_us": 100.0, "ci_low_us": 99.0, "ci_high_us": 101.0}
    leases.note_control(campaign.id, worker, "GPU-1", "sm_90", told)
    lease = leases.take(campaign, worker, ["sm_90"])
    assert lease is not None
    leases.finish(lease, Outcome.DONE, result={"median_us": 100.0})
    leases.end(campaign.id)


if __name__ == "__main__":
    with TuningDB.open(sys.argv[1]) as filled:
        fill(filled)
        fill_fleet(filled)
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    for statement in ("PRAGMA journal_mode=DELETE", "PRAGMA page_size=1024", "VACUUM"):  # small enough to keep in git
        connection.execute(statement)
    connection.close()
