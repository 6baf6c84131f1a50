"""Provoke faults on a real GPU, each in the middle of a race, and record what they cost.

    python tests/provoke_faults.py --out faults.json [--only hang,stray_write] [--fake]

Needs the compiler and a GPU with CuPy; with `--fake`, the process that owns the GPU is real and the GPU is made up.
Each fault meets three good candidates in a new race. Nothing may be lost: the fault becomes a typed failure, the good
ones are measured, and the winner is the one of a race without the fault, or tied with it. The exit code is 1 where
something was lost. Two kinds are not here: `gpu_lost` cannot be provoked without harm, and `driver_mismatch` by an old
driver needs one; a cubin for another arch stands in for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import tiledsched
from tiledsched.build.compiler import BuildTask, compile_task
from tiledsched.build.cubin import Artifact
from tiledsched.build.pool import BuildPool
from tiledsched.core import extras, space_files
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.measure.arrays import Launch
from tiledsched.measure.gpu import GpuRunner, Timeouts
from tiledsched.measure.runner import Candidate, Failed, Measurement
from tiledsched.tuning.race import RaceResult, Rules, race

RULES = Rules(opening_rounds=3, heat_rounds=5, most_rounds=18)
GOOD = 3
KILL_AFTER_S = 0.05
"""Into the first run of samples, which takes longer: the process dies in the middle of it."""


class Runner(GpuRunner):
    """Kills its own worker in the first run of samples, where asked to, and keeps what became of that run. A schedule may ask
    it for a grid no GPU takes.
    """

    kill_worker = False
    killed: Failure | None = None

    def _launch(self, candidate: Candidate, *of: Any) -> Launch | Failure:
        launch = super()._launch(candidate, *of)
        if isinstance(launch, Failure) or "grid_too_large" not in candidate.schedule:
            return launch
        return replace(launch, steps=tuple(replace(step, grid=(1, 1 << 17, 1)) for step in launch.steps))

    def _sample_together(self, candidates: Any, rounds: int, regime: str) -> Any:
        if not self.kill_worker:
            return super()._sample_together(candidates, rounds, regime)
        self.kill_worker = False
        pid = self._worker.process.pid
        threading.Timer(KILL_AFTER_S, os.kill, (pid, signal.SIGKILL)).start()
        answer = super()._sample_together(candidates, 50, regime)  # long enough to be in the middle of
        self.killed = answer if isinstance(answer, Failure) else None
        return answer


class RealBench:
    """The GPU of this machine."""

    problem = Attention.problem(seq_q=2048, seq_k=2048, head_dim=64, batch=4, heads=16, kv_heads=16)
    too_large = problem.replace(seq_q=65536, seq_k=65536, batch=4096)
    timeouts = Timeouts(probe_s=4.0)

    def __init__(self) -> None:
        from tiledsched.measure.nvml import devices

        self.options: dict[str, Any] = {}
        found = devices()
        if not found:
            raise MeasureError("no GPU found by NVML; try --fake, or run: tiledsched doctor")
        self.arch = found[0].arch
        changes: list[dict[str, Any]] = [{}, {"tile_m": 128}, {"tile_n": 32}]
        self.good = [self.candidate(**change) for change in changes]

    def schedule(self, **changes: Any) -> Schedule:
        return space_files.space_for(self.arch, Attention).default(self.problem).replace(**changes)

    def candidate(self, *, arch: str = "", causal: bool = False, **changes: Any) -> Candidate:
        arch, schedule = arch or self.arch, self.schedule(**changes)
        built = compile_task(
            BuildTask(kernel="attention", schedule=schedule, arch=arch, problem=self.problem.replace(causal=causal))
        )
        if built.artifact is None:
            raise RuntimeError(f"{schedule} does not build: {built.failure}")
        return Candidate(schedule=schedule, artifact=built.artifact)

    def bad(self, fault: str) -> Candidate:
        """The candidate that brings `fault` about."""
        schedule = self.schedule(fault=fault)
        if fault in ("stray_write", "hang"):
            import bad_kernels

            function = {"stray_write": bad_kernels.stray, "hang": bad_kernels.slow}[fault]
            return Candidate(schedule=schedule, artifact=bad_kernels.build(function, self.problem, self.arch))
        if fault == "wrong_result":
            return Candidate(schedule=schedule, artifact=self.candidate(causal=True).artifact)
        if fault == "other_arch":
            other = "sm_100" if self.arch != "sm_100" else "sm_90"
            return Candidate(schedule=schedule, artifact=self.candidate(arch=other).artifact)
        made = self.candidate(tile_m=32).artifact
        if fault == "grid_too_large":
            return Candidate(schedule=schedule.replace(grid_too_large=True), artifact=made)
        assert fault == "truncated_cubin"
        torn = Artifact(
            arch=made.arch, fingerprint="0" * 24, facts=made.facts, cubin=made.cubin[: len(made.cubin) // 2]
        )
        return Candidate(schedule=schedule, artifact=torn)


ACTS = {
    "stray_write": {"probe": "illegal"},
    "hang": {"probe": "hang"},
    "wrong_result": {"check": "wrong"},
    "other_arch": {"load": "driver"},
    "grid_too_large": {"probe": "launch"},
    "truncated_cubin": {"load": "corrupt"},
}
"""What the made-up GPU's kernel does for each fault."""


class FakeBench:
    """A made-up GPU: see fake_worker.py."""

    problem = Attention.problem(seq_q=40, seq_k=24, head_dim=16, batch=8, heads=2, kv_heads=1)
    too_large = problem.replace(head_dim=250)
    timeouts = Timeouts(load_s=0.8, probe_s=0.8, check_s=0.8, sample_s=0.8, each_sample_s=0.01)
    arch = "sm_90"

    def __init__(self) -> None:
        import fake_worker

        self.options = {"worker_command": (sys.executable, str(Path(fake_worker.__file__)), "ready"), "gap_ms": 2.0}
        self.good = [self._candidate(us) for us in (100.0, 120.0, 150.0)]

    def _candidate(self, us: float, **acts: str) -> Candidate:
        from fake_worker import artifact, cubin

        return Candidate(schedule=self.schedule(us=int(us)), artifact=artifact(cubin(us, **acts), f"{int(us):024d}"))

    def schedule(self, **changes: Any) -> Schedule:
        plain = space_files.space_for(self.arch, Attention).default(self.problem)
        return Schedule({"q_subtiles": 1, **plain, "tile_m": 16, "persistent": "no", **changes})

    def bad(self, fault: str) -> Candidate:
        """The candidate that brings `fault` about."""
        return self._candidate(50.0, **ACTS[fault])


Bench = RealBench | FakeBench


def offer(bench: Bench, runner: Runner, fault: str) -> Candidate:
    """A bad candidate, to be raced among the good."""
    return bench.bad(fault)


def kill_worker(bench: Bench, runner: Runner, fault: str) -> None:
    """No bad candidate: the process dies while the good ones are timed."""
    runner.kill_worker = True


def too_large(bench: Bench, runner: Runner, fault: str) -> Failure:
    """A problem that does not fit, and after it one that does."""
    try:
        runner.begin(bench.too_large)
        runner.wait()
    except MeasureError as error:
        if "memory" in str(error).lower():
            return Failure(kind=FailureKind.OUT_OF_MEMORY, message=str(error))
        raise
    raise RuntimeError(f"{bench.too_large} fits")


def compile_too_long(bench: Bench, runner: Runner, fault: str) -> Failure:
    """A compile that is given no time, with nothing of it in cuTile's cache; nothing of it reaches the race."""
    task = BuildTask(
        kernel="attention",
        schedule=space_files.space_for(bench.arch, Attention).default(bench.problem),
        problem=bench.problem,
        arch=bench.arch,
        timeout_s=0.01,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, CUDA_TILE_CACHE_DIR=folder),
        BuildPool(jobs=1) as pool,
    ):
        (built,) = pool.build([task])
    if built.failure is None:
        raise RuntimeError("it compiled within its limit")
    return built.failure


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    how: str
    """How it is brought about, for the record."""
    expected: FailureKind
    provoke: Callable[[Any, Runner, str], Candidate | Failure | None] = offer
    """What is raced among the good, or what failed before the race."""


FAULTS = (
    Fault(name="stray_write", how="a kernel that writes far outside its output", expected=FailureKind.ILLEGAL_ADDRESS),
    Fault(name="hang", how="a kernel that runs for tens of seconds, given 4", expected=FailureKind.HANG),
    Fault(name="wrong_result", how="the causal kernel for a problem that is not", expected=FailureKind.WRONG_RESULT),
    Fault(
        name="worker_killed",
        how="SIGKILL to the measuring process while it takes samples",
        expected=FailureKind.WORKER_KILLED,
        provoke=kill_worker,
    ),
    Fault(name="grid_too_large", how="a grid of 131072 blocks along y", expected=FailureKind.LAUNCH_FAILURE),
    Fault(name="truncated_cubin", how="the first half of a cubin", expected=FailureKind.ARTIFACT_CORRUPT),
    Fault(name="other_arch", how="a cubin for another arch", expected=FailureKind.DRIVER_MISMATCH),
    Fault(
        name="out_of_memory",
        how="a problem that does not fit, before one that does",
        expected=FailureKind.OUT_OF_MEMORY,
        provoke=too_large,
    ),
    Fault(
        name="compile_timeout",
        how="a compile with a limit of 10 ms",
        expected=FailureKind.COMPILE_TIMEOUT,
        provoke=compile_too_long,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a fault came to."""

    fault: str
    provoked_how: str
    expected_kind: str
    outcome_kind: str
    """The kind stored; empty where there was none: the fault was lost, or nothing went wrong."""
    message: str
    seconds: float
    """From the start of the measuring process to the end of the race."""
    good_measured: int
    """Of the three."""
    winner_unchanged: bool

    @property
    def lost(self) -> bool:
        """Whether the fault cost more than itself, or was not told."""
        return not (self.outcome_kind and self.winner_unchanged and self.good_measured == GOOD)


def provoke(bench: Bench, fault: Fault, winners: set[Schedule]) -> Row:
    """Race the good candidates with `fault` among them; `winners` are those of a race without."""
    started = time.monotonic()
    failure: Failure | None = None
    result: RaceResult | None = None
    trouble = ""
    runner = None
    try:
        runner = Runner(Attention, timeouts=bench.timeouts, **bench.options)
        found = fault.provoke(bench, runner, fault.name)
        failure = found if isinstance(found, Failure) else None
        field = [*bench.good]
        if isinstance(found, Candidate):
            field.insert(1, found)
        runner.begin(bench.problem)
        result = race(runner, bench.problem, field, rules=RULES)
        failed = [outcome for outcome in result.outcomes if isinstance(outcome, Failed)]
        if isinstance(found, Candidate):
            failure = next((one.failure for one in failed if one.schedule == found.schedule), None)
        failure = failure or runner.killed
    except Exception as error:  # one provocation that goes wrong must not stop the next
        trouble = f"{type(error).__name__}: {error}"
    finally:
        if runner is not None:
            runner.close()
    good = {candidate.schedule for candidate in bench.good}
    outcomes = result.outcomes if result else ()
    measured = sum(isinstance(outcome, Measurement) and outcome.schedule in good for outcome in outcomes)
    return Row(
        fault=fault.name,
        provoked_how=fault.how,
        expected_kind=fault.expected.value,
        outcome_kind=failure.kind.value if failure else "",
        message=trouble or (failure.message if failure else ""),
        seconds=round(time.monotonic() - started, 2),
        good_measured=measured,
        winner_unchanged=bool(result and result.winner and result.winner.schedule in winners),
    )


def run(bench: Bench, faults: list[Fault]) -> dict[str, Any]:
    """Provoke each; the record, as written to the file."""
    runner = Runner(Attention, timeouts=bench.timeouts, **bench.options)
    try:
        runner.begin(bench.problem)
        alone = race(runner, bench.problem, bench.good, rules=RULES)
        device = runner.device
    finally:
        runner.close()
    if alone.winner is None or len(alone.outcomes) != GOOD:
        raise MeasureError(f"the good candidates fail without any fault: {alone.outcomes}; run: tiledsched doctor")
    rows = []
    for fault in faults:
        rows.append(provoke(bench, fault, {alone.winner.schedule, *alone.ties}))
        print(line(rows[-1]), flush=True)
    packages = ("cuda-tile", "nvidia-cuda-tileiras", "cupy-cuda13x", "numpy")
    return {
        "schema_version": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": asdict(device),
        "made_up": isinstance(bench, FakeBench),
        "versions": {
            "tiledsched": tiledsched.__version__,
            "python": platform.python_version(),
            **{name: extras.package_version(name) for name in packages},
        },
        "problem": bench.problem.to_json(),
        "good": [candidate.schedule.to_json() for candidate in bench.good],
        "winner": alone.winner.schedule.id,
        "faults": [asdict(row) | {"lost": row.lost} for row in rows],
    }


def line(row: Row) -> str:
    """One line of the table."""
    kind = row.outcome_kind or "nothing"
    expected = "" if kind == row.expected_kind else f" (expected {row.expected_kind})"
    state = "LOST" if row.lost else "ok"
    return (
        f"{state:5}{row.fault:17}{kind:17}{row.seconds:7.1f} s  {row.good_measured}/{GOOD} measured, winner "
        f"{'the same' if row.winner_unchanged else 'ANOTHER'}{expected}  {row.message[:100]}"
    )


def main(arguments: list[str] | None = None) -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description="Provoke faults in the middle of races and record what they cost.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="faults, separated by commas; all where left out")
    parser.add_argument("--fake", action="store_true", help="a made-up GPU in place of this machine's")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    unknown = sorted(set(names) - {fault.name for fault in FAULTS})
    if unknown:
        parser.error(f"unknown faults {unknown}; known are {', '.join(fault.name for fault in FAULTS)}")
    record = run(FakeBench() if options.fake else RealBench(), [f for f in FAULTS if f.name in names or not names])
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    lost = [row["fault"] for row in record["faults"] if row["lost"]]
    print(f"lost: {', '.join(lost)}" if lost else f"nothing lost in {len(record['faults'])} faults")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
