"""A job for fleets of made-up GPUs: the whole of `tune`, on recorded landscapes, with faults at will.

Its problems are those of the landscapes with other numbers of heads: each is searched, raced and stored as on a GPU, and takes
a fraction of a second. What happens is told by the environment, which workers on a made-up cluster inherit:
FLEET_GPUS (`sm_90:4,sm_100:2`) and FLEET_FOLDER, where each job notes itself, and where files named after heads say what
goes wrong: `crash-7`, `hang-7`, `error-7` once, `fail-7` always; `stay-7` keeps a job from ending while it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from unittest.mock import patch

from tiledsched.build import compiler, cubin
from tiledsched.core import config, data_files, space_files
from tiledsched.core.config import load_settings
from tiledsched.core.errors import Failure, FailureKind, MeasureError, NoValidScheduleError
from tiledsched.fleet import jobs as real
from tiledsched.fleet.clock import Clock
from tiledsched.fleet.gpus import Gpu
from tiledsched.kernels.attention import Attention
from tiledsched.measure.replay import ReplayRunner
from tiledsched.serve import entries
from tiledsched.store.exchange import read_table
from tiledsched.tuning import prior, resources
from tiledsched.tuning.session import Session

LANDSCAPES = sorted((data_files.tuning_db() / "landscapes" / "attention").glob("*_burst_*.json.xz"))
PROGRAMS = 8
OTHER = "13.4.10"
"""A compiler of which nothing ships."""
NAMES = {"sm_90": "NVIDIA Replayed", "sm_100": "NVIDIA Replayed B"}


class MovedClock:
    """A time that stands until a test moves it, or somebody waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(now=self.now, monotonic=lambda: self.seconds, wait=self.wait)

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=self.seconds)

    def pass_s(self, seconds: float) -> None:
        self.seconds += seconds

    def wait(self, seconds: float, stop: threading.Event | None = None) -> bool:
        self.seconds += seconds
        return stop is not None and stop.is_set()


def problems(count: int, first: int = 1):
    """So many problems, of as many landscapes as there are."""
    return [base(number).replace(heads=number, kv_heads=number) for number in range(first, first + count)]


def base(number: int):
    return landscape(LANDSCAPES[number % 4]).measurements[0].measurement.problem


@functools.cache
def landscape(path: Path):
    return read_table(path)


class Replay:
    """Builds, machine code and times of one problem, from a landscape."""

    jobs = 1

    def __init__(self, problem, arch: str) -> None:
        table = landscape(LANDSCAPES[problem.values["heads"] % 4])
        space = space_files.space_for(arch, Attention)
        device = dataclasses.replace(table.measurements[0].measurement.device, arch=arch, name=NAMES[arch] + label())
        taken = [
            (each.measurement, space.complete(each.measurement.schedule)) for each in table.measurements[: 8 * PROGRAMS]
        ]
        possible = [(one, schedule) for one, schedule in taken if not space.unworkable(schedule, problem)]
        self.measurements = [
            dataclasses.replace(one, problem=problem, device=device, schedule=schedule)
            for one, schedule in possible[:PROGRAMS]
        ]
        self.facts = {each.fingerprint: each.facts for each in table.artifacts}
        self.fingerprints = {each.schedule: each.fingerprint for each in self.measurements}
        self.problem = problem
        self.toolchain, self.arch = table.measurements[0].toolchain, arch
        self.best = min(self.measurements, key=lambda each: each.median_us)

    def recompiled(self):
        """Built by another compiler, which makes other machine code of some schedules."""
        self.toolchain = dataclasses.replace(self.toolchain, tileiras=OTHER, ptxas=OTHER, nvvm=OTHER)
        new = {
            each: each.fingerprint[::-1] if changes(each.schedule) else each.fingerprint for each in self.measurements
        }
        self.facts |= {new[each]: self.facts[each.fingerprint] for each in self.measurements}
        self.measurements = [dataclasses.replace(each, fingerprint=new[each]) for each in self.measurements]
        self.fingerprints = {each.schedule: each.fingerprint for each in self.measurements}
        return self

    def build(self, tasks, *, leave=0):
        for task in tasks:
            found = self.fingerprints.get(task.schedule)
            failure = None if found else Failure(kind=FailureKind.COMPILE_ERROR, message="not recorded")
            yield compiler.Built(
                task=task, artifact=self.get(self.arch, found) if found else None, failure=failure, seconds=0.1
            )

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def has(self, arch, fingerprint) -> bool:
        return True

    def put(self, artifact) -> None: ...

    def get(self, arch, fingerprint) -> cubin.Artifact:
        return cubin.Artifact(arch=arch, fingerprint=fingerprint, facts=self.facts[fingerprint], cubin=b"")

    def session(self, given):
        """A session on the database of another, whose compiler and GPU are this landscape's."""
        runner = ReplayRunner(Attention, self.measurements, seed=self.problem.values["heads"])
        tools = resources.Tools(
            toolchain=lambda: self.toolchain,
            artifacts=lambda folder: self,
            pool=lambda jobs: self,
            devices=lambda: [runner.device],
            runner=lambda kernel, seed: runner,
            rivals=lambda kernel, runner, regime: None,
            space=lambda arch, kernel, file: space_files.space_for(arch, kernel).limited_to(tuple(self.fingerprints)),
        )
        return Session(self.arch, settings=given.settings, jobs=given.jobs, tools=tools)


def winners(db) -> dict[tuple[object, str], str]:
    """What is served of each problem and arch: measured, and no slower than the best of its landscape."""
    found = {}
    for entry in db.entries():
        replay = Replay(entry.problem, entry.arch)
        taken = {each.fingerprint: each.median_us for each in replay.measurements}
        assert entry.provenance == "measured"
        assert taken[entry.fingerprint] <= 1.01 * replay.best.median_us
        found[entry.problem, entry.arch] = entry.fingerprint
    return found


def changes(schedule) -> bool:
    """Whether another compiler makes other machine code of it."""
    return int(schedule.id, 16) % 2 == 0


def label() -> str:
    said = os.environ.get("TILEDSCHED_GPU_LABEL", "")
    return f" ({said})" if said else ""


def folder() -> Path:
    return Path(os.environ["FLEET_FOLDER"])


def once(word: str) -> bool:
    """Whether that is to go wrong now: the file is removed, so that the next attempt goes well."""
    try:
        (folder() / word).unlink()
    except FileNotFoundError:
        return False
    return True


def begin(problem, progress) -> None:
    """What goes wrong with a problem, where something is to."""
    number = problem.values["heads"]
    progress("replaying")
    if once(f"crash-{number}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if once(f"hang-{number}"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if once(f"error-{number}"):
        raise MeasureError("the GPU has fallen off the bus; run: tiledsched doctor")
    if (folder() / f"fail-{number}").exists():
        raise NoValidScheduleError("no schedule works; relax the constraints")


def end(problem, arch) -> None:
    """Note that it was done; first stay for as long as is wished, with all that was found still at hand."""
    number = problem.values["heads"]
    while (folder() / f"stay-{number}").exists():
        (folder() / f"stays-{number}").touch()
        time.sleep(0.05)
    with open(folder() / "jobs.log", "a") as log:
        log.write(f"{arch} {number} {os.getpid()}\n")


@contextmanager
def replayed(replay, given):
    """A session that a landscape answers."""
    with (
        replay.session(given) as session,
        patch.object(entries, "_shipped", lambda *given: entries.Layer(name="shipped", where="", entries=())),
        patch.object(prior.Shipped, "winners", ()),  # reading what ships takes longer than such a tune
    ):
        yield session


def replaying(command, change=lambda replay: replay, **usual):
    """A command's job, replayed."""

    def run(session, kernel, problem, progress, *, pause_s=0.0, **options):
        begin(problem, progress)
        time.sleep(pause_s)
        with replayed(change(Replay(problem, session.arch)), session) as here:
            result = command(here, kernel, problem, progress, **{**usual, **options})
        end(problem, session.arch)
        return result

    return run


tune = replaying(real.tune, trials=4, sampler="random", effort="quick")
record = replaying(real.record)
refresh = replaying(real.refresh, Replay.recompiled)  # under another compiler


@functools.cache
def settings():
    """Read once in a process, as operators do."""
    return load_settings()


config.watchers.append(settings.cache_clear)


def bench(session, kernel, problem, progress, **options):
    """`bench` of one problem, with a stopwatch that runs nothing. What is served is looked up as a launch does it."""
    from test_bench import QUICK, Harness

    class Served(Harness):
        def prepare(self, problem, methods, regime):
            found = entries.load_table(settings(), kernel=kernel, archs={session.arch})
            answer = found.resolve(problem, session.arch, NAMES[session.arch])
            prepared = super().prepare(problem, methods, regime)
            first, *others = prepared.ready
            served = {"schedule": answer.schedule.short(), "provenance": answer.provenance}
            return dataclasses.replace(
                prepared, ready=(dataclasses.replace(first, fields={**first.fields, **served}), *others)
            )

    begin(problem, progress)
    fakes = {"harness": Served(), "pace": QUICK}
    with patch.object(entries, "_shipped", lambda *given: entries.Layer(name="shipped", where="", entries=())):
        result = real.bench(session, kernel, problem, progress, **fakes, **options)
    end(problem, session.arch)
    return result


def control(session, kernel, problem, **options):
    """Every GPU takes what it is told to, by a file `slow-UUID` that holds a factor."""
    uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    slow = folder() / f"slow-{uuid}"
    factor = float(slow.read_text()) if slow.exists() else 1.0
    return {
        "fingerprint": "c" * 24,
        "median_us": 100.0 * factor,
        "ci_low_us": 99.9 * factor,
        "ci_high_us": 100.1 * factor,
        "conditions": {},
    }


def gpus():
    """As FLEET_GPUS says."""
    found = []
    for words in os.environ.get("FLEET_GPUS", "sm_90:1").split(","):
        arch, count = words.split(":")
        found += [
            Gpu(uuid=f"GPU-{arch}-{os.environ.get('FLEET_HOST', 'here')}-{place}", name=NAMES[arch], arch=arch)
            for place in range(int(count))
        ]
    return found
