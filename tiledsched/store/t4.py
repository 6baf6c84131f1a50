"""Landscapes for other tuners: the T4 results format and Kernel Tuner's cache file.

T4 is the results format that autotuners agreed on, with a schema for results and one for metadata (version 1.0.0,
kept with Kernel Tuner; see docs/database.md). Kernel Tuner's simulation mode reads another file, its cache: the same
configurations in an object keyed by their values. Both hold times in milliseconds, which is their unit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiledsched import __version__
from tiledsched.core.errors import DatabaseError, Failure, FailureKind
from tiledsched.core.files import write_whole
from tiledsched.core.groups import firsts, values_by_name
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.sources import source_part
from tiledsched.measure.runner import Device
from tiledsched.store.codec import encode
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import landscape_file_name, written
from tiledsched.store.foreign import RECORD
from tiledsched.store.records import ArtifactRecord, BuildRecord, StoredMeasurement

T4_VERSION = "1.0.0"
INVALIDITY = {
    FailureKind.COMPILE_ERROR: "compile",
    FailureKind.COMPILER_KILLED: "compile",
    FailureKind.COMPILE_TIMEOUT: "timeout",
    FailureKind.HANG: "timeout",
    FailureKind.WRONG_RESULT: "correctness",
}
"""T4's word for each kind of failure; all other kinds are `runtime`. `constraints` never occurs, because a schedule that
breaks a constraint is never tried."""
NOT_COMPILED = (FailureKind.COMPILE_ERROR, FailureKind.COMPILER_KILLED, FailureKind.COMPILE_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A landscape with its failures."""

    measurements: tuple[StoredMeasurement, ...]
    """The newest measurement of each schedule, the fastest first. There is at least one."""
    failures: tuple[tuple[Schedule, Failure], ...]
    """The schedules that gave no measurement, sorted by id, and why."""
    compile_seconds: dict[Schedule, float]
    """Wall time of each schedule's compile, where it is known."""
    artifacts: Mapping[tuple[str, str], ArtifactRecord] = field(default_factory=dict)
    """Facts of machine code, by arch and fingerprint."""

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.measurements[0].measurement.problem

    @property
    def newest(self) -> StoredMeasurement:
        """The newest measurement, whose source and toolchain are stated for the whole landscape."""
        return max(self.measurements, key=lambda one: (one.created_at, one.uid))

    @property
    def file_stem(self) -> str:
        """The landscape's file name without its ending."""
        taken = self.measurements[0].measurement
        return landscape_file_name(taken.problem, taken.device.name, taken.regime).removesuffix(".json.xz")

    @property
    def knobs(self) -> dict[str, list[KnobValue]]:
        """The sorted values of each knob. A schedule of an older space may lack some knobs."""
        schedules = [one.measurement.schedule for one in self.measurements] + [each for each, _ in self.failures]
        return values_by_name(schedules)


def recorded(db: TuningDB, problem: Problem, device_name: str, regime: str) -> Recorded:
    """The landscape of one problem on one device. Failures and compile times are those of the newest source and toolchain.

    Raises:
        DatabaseError: the problem was not measured on the device.
    """
    everything = db.measurements(problem, device_name=device_name, regime=regime, latest=True)
    if not everything:
        raise DatabaseError(
            f"nothing is measured of {problem} on {device_name} in the {regime} regime; run: tiledsched record"
        )
    last = everything[0]
    by_schedule = firsts((stored.measurement.schedule, stored) for stored in everything)  # newest first
    device = last.measurement.device
    builds = [
        build
        for build in db.find_builds(last.kernel, source_part(last.source_hash), last.toolchain, device.arch).values()
        if _serves(build, problem, device)
    ]
    failed = {build.schedule: build.failure for build in builds if build.failure}
    fingerprints = {build.schedule: build.fingerprint for build in builds}
    for failure in db.failures(device.arch, problem, stage="measure"):
        its, right = failure.failure, failure.failure.kind is FailureKind.OTHER_NUMBERS
        if not right and (failure.device_name, failure.fingerprint) == (
            device_name,
            fingerprints.get(failure.schedule),
        ):
            failed.setdefault(failure.schedule, its)
    return Recorded(
        measurements=tuple(sorted(by_schedule.values(), key=lambda one: (one.measurement.median_us, one.uid))),
        failures=tuple(
            (each, failed[each]) for each in sorted(failed, key=lambda schedule: schedule.id) if each not in by_schedule
        ),
        compile_seconds={build.schedule: build.seconds for build in builds},
        artifacts=db.artifacts(device.arch),
    )


def _serves(build: BuildRecord, problem: Problem, device: Device) -> bool:
    from tiledsched.core.launches import problem_class  # imports cuTile

    try:
        return problem_class(problem.declaration, problem, build.schedule, device) == build.problem_class
    except Exception:  # an unknown kernel, or a schedule of an older space: its functions may stumble in any way
        return False


def t4_results(landscape: Recorded) -> dict[str, Any]:
    """The landscape as T4 results: one for each schedule that was measured or failed. Times are in milliseconds."""
    results = [_measured(landscape, stored) for stored in landscape.measurements]
    for schedule, failure in landscape.failures:
        results.append(
            {
                "configuration": schedule.to_json(),
                "times": {**_compile_time(landscape, schedule), "runtimes": []},
                "invalidity": INVALIDITY.get(failure.kind, "runtime"),
                "correctness": 0,
                "measurements": [{"name": "failure", "value": f"{failure.kind}: {failure.message}", "unit": ""}],
                "objectives": ["time"],
            }
        )
    return {"schema_version": T4_VERSION, "metadata": {"timeunit": "milliseconds"}, "results": results}


def _measured(landscape: Recorded, stored: StoredMeasurement) -> dict[str, Any]:
    taken = stored.measurement
    values: list[tuple[str, Any, str]] = [
        ("time", taken.median_us / 1e3, "ms"),
        ("time_ci_low", taken.ci_low_us / 1e3, "ms"),
        ("time_ci_high", taken.ci_high_us / 1e3, "ms"),
        ("TFLOP/s", taken.problem.tflops(taken.median_us), "TFLOP/s"),
        ("sm_clock", taken.conditions.sm_clock_mhz, "MHz"),
        ("power", taken.conditions.power_w, "W"),
    ]
    if taken.accuracy is not None:
        values.append(("worst_tile_error", taken.accuracy.worst_tile_error, ""))
    artifact = landscape.artifacts.get((taken.device.arch, taken.fingerprint))
    record = {**written(stored), "artifact": encode(artifact)}
    values.append((RECORD, json.dumps(record, sort_keys=True), ""))  # what `db import` reads
    return {
        "timestamp": stored.created_at.isoformat(),
        "configuration": taken.schedule.to_json(),
        "times": {**_compile_time(landscape, taken.schedule), "runtimes": [us / 1e3 for us in taken.samples_us]},
        "invalidity": "correct",
        "correctness": 1,
        "measurements": [{"name": name, "value": value, "unit": unit} for name, value, unit in values],
        "objectives": ["time"],
    }


def _compile_time(landscape: Recorded, schedule: Schedule) -> dict[str, float]:
    """The compile time under two keys: the schema says `compilation_time`, and Kernel Tuner writes `compilation`."""
    seconds = landscape.compile_seconds.get(schedule)
    return {} if seconds is None else {"compilation_time": seconds * 1e3, "compilation": seconds * 1e3}


def t4_metadata(landscape: Recorded) -> dict[str, Any]:
    """The T4 metadata of a landscape: the GPU, the software, and, under `tiledsched`, what was computed and how."""
    newest = landscape.newest
    device, toolchain = newest.measurement.device, newest.toolchain
    versions = (
        ("cuda-tile", toolchain.cuda_tile),
        ("nvidia-cuda-tileiras", toolchain.tileiras),
        ("nvidia-cuda-nvcc", toolchain.ptxas),
        ("nvidia-nvvm", toolchain.nvvm),
    )
    return {
        "schema_version": T4_VERSION,
        "metadata": {
            "hardware": {"hardware_description": [encode(device)]},
            "environment": {
                "device_query": {"name": device.name, "driver_version": device.driver},
                "requirements": [f"{name}=={version}" for name, version in versions if version],
            },
            "tiledsched": {
                "version": __version__,
                "kernel": newest.kernel,
                "source_hash": source_part(newest.source_hash),
                "problem": landscape.problem.to_json(),
                "regime": newest.measurement.regime,
                "toolchain": encode(toolchain),
                "tune_params": landscape.knobs,
            },
        },
    }


def kernel_tuner_cache(landscape: Recorded) -> dict[str, Any]:
    """The landscape as a cache for Kernel Tuner's simulation mode. Times are in milliseconds.

    `benchmark_time` is the sum of the samples, without the pauses between them.

    Raises:
        DatabaseError: the landscape has schedules with different knobs.
    """
    first = landscape.measurements[0]
    knobs = landscape.knobs
    problem = landscape.problem
    cache: dict[str, Any] = {}

    def add(schedule: Schedule, timestamp: str, **values: Any) -> None:
        if set(schedule) != set(knobs):
            missing = sorted(set(knobs) - set(schedule))
            raise DatabaseError(
                f"a schedule measured for {problem} lacks the knobs {', '.join(missing)}: it is of an "
                "older space; record the landscape into a database of its own"
            )
        compile_ms = landscape.compile_seconds.get(schedule, 0.0) * 1e3
        cache[",".join(str(schedule[knob]) for knob in knobs)] = {
            **{knob: schedule[knob] for knob in knobs},
            **values,
            "compile_time": compile_ms,
            "verification_time": 0.0,
            "strategy_time": 0.0,
            "framework_time": 0.0,
            "timestamp": timestamp,
        }

    for stored in landscape.measurements:
        taken = stored.measurement
        times = [us / 1e3 for us in taken.samples_us]
        add(
            taken.schedule,
            stored.created_at.isoformat(),
            time=taken.median_us / 1e3,
            times=times,
            benchmark_time=sum(times),
        )
    for schedule, failure in landscape.failures:
        error = "CompilationFailedConfig" if failure.kind in NOT_COMPILED else "RuntimeFailedConfig"
        add(schedule, first.created_at.isoformat(), time=error, times=[], benchmark_time=0.0)
    return {
        "schema_version": "1.1.0",
        "device_name": first.measurement.device.name,
        "kernel_name": first.kernel,
        "problem_size": [value for value in problem.values.values() if type(value) is int],
        "tune_params_keys": list(knobs),
        "tune_params": knobs,
        "objective": "time",
        "cache": cache,
    }


def export_foreign(landscape: Recorded, folder: str | os.PathLike[str], form: str) -> list[Path]:
    """Write one landscape to `folder` in the format `form`, which is t4 or kernel-tuner-cache.

    Returns:
        The files that were written.

    Raises:
        DatabaseError: the folder cannot be written, or the format cannot hold the landscape.
    """
    stem = landscape.file_stem
    if form == "t4":
        documents = {f"{stem}.t4.json": t4_results(landscape), f"{stem}.t4.metadata.json": t4_metadata(landscape)}
    else:
        documents = {f"{stem}.cache.json": kernel_tuner_cache(landscape)}
    paths = []
    for name, document in documents.items():
        path = Path(folder) / name
        try:
            # Without that line break, Kernel Tuner's dashboard takes the cache for one that is still being written.
            write_whole(path, f"{json.dumps(document)[:-1]}\n}}")
        except OSError as error:
            raise DatabaseError(f"cannot write {path}: {error.strerror}; give another folder") from error
        paths.append(path)
    return paths
