"""One session: for every problem, every method chooses once among the same programs; then a referee times the chosen.

Nothing measured here is stored, so that every session finds the same programs in the same order.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from docs.studies.repeatability.methods import Choice, SelectionMethod, versions
from docs.studies.repeatability.rows import REFEREE, StudyRow
from tiledsched.core.errors import Failure, MeasureError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.measure.runner import Batch, Candidate, Device, Runner
from tiledsched.store.db import TuningDB
from tiledsched.tuning.builder import Builder, Key

REFEREE_ROUNDS = 60
"""Samples of each program in the referee's run: six blocks of ten."""
LEADERS = 4
"""So many of the fastest known candidates take part in the referee's run, whichever were chosen."""
BLOCK = 10
ACCUM_MODE = "fp32"
"""The accuracy class of the study."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A distinct program that was measured before."""

    schedule: Schedule
    """The schedule under which it was measured."""
    key: Key
    """Fingerprint of its machine code, and its grids."""
    median_us: float
    """Its time then, which decides only which programs take part."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """The programs to choose among on one problem, the same for every method and session."""

    candidates: tuple[Candidate, ...]
    """Distinct programs: the default first, the others by schedule id, which is no order of speed."""
    leaders: tuple[Candidate, ...]
    """The candidates that are fastest as far as is known."""


def known_programs(db: TuningDB, builder: Builder, space: SearchSpace, problem: Problem, device: Device) -> list[Known]:
    """The distinct programs measured on `device` in the burst regime, fastest first; fp32 accumulators only."""
    found: dict[Key, Known] = {}
    for stored in db.landscape(problem, device.name, "burst"):
        one = stored.measurement
        if (
            not space.violations(one.schedule, problem)
            and accuracy_class(space, ACCUM_MODE).items() <= one.schedule.items()
        ):
            key = (one.fingerprint, builder.kernel.grids(problem, one.schedule, device))
            found.setdefault(key, Known(schedule=one.schedule, key=key, median_us=one.median_us))
    return list(found.values())


def mixed(ranked: Sequence[Known], count: int) -> list[Known]:
    """`count` programs: half of them are the fastest, the others are spread evenly over the rest and include the
    slowest.
    """
    if count >= len(ranked):
        return list(ranked)
    fastest = (count + 1) // 2
    spread_over = count - fastest
    steps = (step * (len(ranked) - fastest) // spread_over for step in range(1, spread_over + 1))
    return [*ranked[:fastest], *(ranked[fastest - 1 + step] for step in steps)]


def find_field(
    db: TuningDB, builder: Builder, space: SearchSpace, problem: Problem, device: Device, programs: int
) -> Field:
    """Choose, and where needed build, at most `programs` programs; the default is always among them.

    A known program whose schedule builds to other machine code today is left out: what is known is not about it.

    Raises:
        MeasureError: fewer than two programs are known, or the default does not build.
    """
    default = space.default(problem, pinned=accuracy_class(space, ACCUM_MODE))
    builder.build([default], problem)
    built = builder.programs([default], problem, device)
    if not built:
        raise MeasureError(f"the default schedule does not build for {problem}; run: tiledsched doctor")
    ranked = known_programs(db, builder, space, problem, device)
    others = mixed([known for known in ranked if known.key != built[0].key], programs - 1)
    builder.build([known.schedule for known in others], problem)
    wanted = {built[0].key: default}
    for known in sorted(others, key=lambda known: known.schedule.id):
        record = builder.record(known.schedule, problem)
        if record is not None and record.fingerprint == known.key[0]:
            wanted[known.key] = known.schedule
    found: dict[Key, Candidate] = {}
    for key, schedule in wanted.items():
        artifact = builder.artifacts.get(builder.arch, key[0])
        if artifact is not None:
            found[key] = Candidate(schedule=schedule, artifact=artifact)
    if len(found) < 2 or built[0].key not in found:
        raise MeasureError(f"too few programs of {problem} are measured on {device.name}; run first: tiledsched tune")
    leaders = [found[known.key] for known in ranked if known.key in found][:LEADERS]
    return Field(candidates=tuple(found.values()), leaders=tuple(leaders))


def run_session(
    fields: Sequence[tuple[Problem, Field]],
    methods: Sequence[SelectionMethod],
    runner: Runner,
    *,
    seed: int,
    began: datetime,
    keep: Callable[[Sequence[StudyRow]], None],
    progress: Callable[[str], None] = lambda text: None,
) -> list[StudyRow]:
    """Let every method choose once on every problem, in shuffled order, then let the referee time what was chosen.

    Args:
        fields: problems with who takes part.
        methods: ways to choose.
        runner: the referee's.
        seed: of the order.
        began: start of the session, UTC; it names the session.
        keep: given the rows of each problem as they are known.
        progress: told a line per method.

    Returns:
        All rows.

    Raises:
        MeasureError: the GPU is lost, a method cannot run here, or the referee gets no time of any program.
    """
    rng = random.Random(seed)
    shared = {
        "session": began.isoformat(timespec="seconds"),
        "seed": seed,
        "device": runner.device.name,
        "driver": runner.device.driver,
        "versions": versions(),
    }
    rows: list[StudyRow] = []
    for problem, field in rng.sample(list(fields), len(fields)):
        choices: list[tuple[SelectionMethod, Choice, float]] = []
        for method in rng.sample(list(methods), len(methods)):
            method.prepare(problem, field.candidates)
            started = time.perf_counter()
            choice = method.choose(problem, field.candidates)
            seconds = time.perf_counter() - started
            choices.append((method, choice, seconds))
            chosen = f"{choice.schedule.short()}, {choice.estimate_us:.1f} us" if choice.schedule else "nothing works"
            progress(f"{problem}: {method.name}: {chosen}, {seconds:.1f} s")
        samples = referee(runner, problem, field, [choice.schedule for _, choice, _ in choices])
        done = _rows(problem, field, choices, samples, shared)
        keep(done)
        rows += done
    return rows


def referee(
    runner: Runner, problem: Problem, field: Field, chosen: Sequence[Schedule | None], rounds: int = REFEREE_ROUNDS
) -> dict[Schedule, tuple[float, ...]]:
    """Samples in microseconds of every chosen program and the leaders, from one interleaved, paced run.

    Raises:
        MeasureError: none of them gave a time, or other processes ran on the GPU meanwhile.
    """
    called = {candidate.schedule: candidate for candidate in field.leaders}
    called |= {candidate.schedule: candidate for candidate in field.candidates if candidate.schedule in chosen}
    runner.begin(problem)
    ready = [each for each in called.values() if not isinstance(runner.check(each), Failure)]
    batches = runner.sample(ready, rounds=rounds, regime="burst") if ready else []
    beside = next((batch.conditions.disturbance for batch in batches if isinstance(batch, Batch)), "")
    if beside:
        raise MeasureError(f"{problem} was timed {beside}, which decides nothing; end it and run again")
    samples = {
        each.schedule: batch.samples_us
        for each, batch in zip(ready, batches, strict=True)
        if not isinstance(batch, Failure)
    }
    if not samples:
        raise MeasureError(f"the referee got no time of any program of {problem}; run: tiledsched doctor")
    return samples


def spread(samples: Sequence[float]) -> float | None:
    """Coefficient of variation: sample standard deviation over mean; None below two samples."""
    return statistics.stdev(samples) / statistics.fmean(samples) if len(samples) > 1 else None


def block_medians(samples: Sequence[float], block: int = BLOCK) -> list[float]:
    """Medians of consecutive blocks; samples that fill no block are left out."""
    return [statistics.median(samples[i : i + block]) for i in range(0, len(samples) - block + 1, block)]


def _rows(
    problem: Problem,
    field: Field,
    choices: Sequence[tuple[SelectionMethod, Choice, float]],
    samples: dict[Schedule, tuple[float, ...]],
    shared: dict[str, object],
) -> list[StudyRow]:
    medians = {schedule: statistics.median(values) for schedule, values in samples.items()}
    best_us = min(medians.values())
    fingerprints = {candidate.schedule: candidate.artifact.fingerprint for candidate in field.candidates}

    def row(schedule: Schedule | None, **more: object) -> StudyRow:
        timed = samples.get(schedule, ()) if schedule else ()
        values: dict[str, object] = {
            **shared,
            "problem": problem,
            "schedule_id": schedule.id if schedule else "",
            "schedule": schedule.short() if schedule else "",
            "fingerprint": fingerprints[schedule] if schedule else "",
            "regret": medians[schedule] / best_us - 1 if schedule in medians else None,
            "cv": spread(timed),
            "cv_of_10": spread(block_medians(timed)),
            **more,
        }
        return StudyRow(**values)  # type: ignore[arg-type]

    rows = []
    for position, (method, choice, seconds) in enumerate(choices, start=1):
        ties = None
        if method.name == "race":
            ties = tuple(each.id for each in (choice.schedule, *choice.ties) if each is not None)
        rows.append(
            row(
                choice.schedule,
                position=position,
                method=method.name,
                estimate_us=choice.estimate_us,
                ties=ties,
                device_seconds=seconds,
                kernel_seconds=choice.kernel_seconds,
                launches=choice.launches,
                candidates=len(field.candidates),
                failures=choice.failures,
            )
        )
    for schedule, median_us in medians.items():
        rows.append(
            row(
                schedule,
                position=0,
                method=REFEREE,
                estimate_us=median_us,
                device_seconds=None,
                kernel_seconds=None,
                launches=len(samples[schedule]),
                candidates=len(samples),
                failures=None,
            )
        )
    return rows
