"""`refresh`: what is served, built again with the compiler and the source at hand; raced again where the machine code changed.

Rivals that were never timed beside what is served, or in another version, are timed beside it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tiledsched.core import config, data_files
from tiledsched.core.config import load_settings
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.nvml import devices
from tiledsched.tuning.session import (
    Cases,
    Tools,
    kernel_of,
    open_rivals,
    open_runner,
    prepare_tools,
    problems_of,
    tune,
)

if TYPE_CHECKING:
    from tiledsched.measure.gpu import GpuRunner
    from tiledsched.measure.rivals import RivalRaces
    from tiledsched.store.db import TuningDB
    from tiledsched.store.records import Entry, Place, StoredMeasurement
    from tiledsched.tuning.programs import Builder
    from tiledsched.tuning.tuner import Watcher

KEPT, RACED, LEFT = "kept", "raced", "to race"


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """What became of one entry that was measured with another compiler or another source."""

    was: Entry
    """What was served."""
    outcome: str
    """`kept`: the machine code is the same, and so is the evidence. `raced`. `to race`: no GPU of its kind measured here."""
    now: Entry | None
    """What is served now; None where it is still to be raced."""
    leaders: tuple[Schedule, ...]
    """What is raced first: what was served, what tied with it, and the runner-up."""
    why: str
    """Why the evidence could not be kept; empty where it was."""

    @property
    def change(self) -> float | None:
        """Measured time now over what it was, less 1."""
        now, was = self.now.median_us if self.now else None, self.was.median_us
        return now / was - 1 if now and was else None

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "problem": self.was.problem.to_json(),
            "device": self.was.device_name,
            "regime": self.was.regime,
            "outcome": self.outcome,
            "why": self.why,
            "was": _told(self.was),
            "now": _told(self.now) if self.now else None,
            "change": self.change,
            "leaders": [schedule.to_json() for schedule in self.leaders],
        }


@dataclass(frozen=True, kw_only=True)
class RefreshReport:
    """What `refresh` came to."""

    kernel: KernelClass
    """Whose."""
    arch: str
    """For which arch."""
    compiler: str
    """Version at hand."""
    current: int
    """Entries that are of this compiler and this source already."""
    rows: Sequence[Refreshed]
    """The others."""
    rivals: Sequence[Entry]
    """Entries of the same machine code beside which rivals were timed anew."""
    compiled: int
    """Compiler runs it took to compare."""
    seconds: float
    """Wall time, races included."""

    def of(self, outcome: str) -> list[Refreshed]:
        """The rows that came to this."""
        return [row for row in self.rows if row.outcome == outcome]

    @property
    def change(self) -> float | None:
        """Geometric mean of the raced ones' times now over what they were, less 1."""
        ratios = [1 + row.change for row in self.rows if row.outcome == RACED and row.change is not None]
        return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) - 1 if ratios else None

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "kernel": self.kernel.name,
            "arch": self.arch,
            "compiler": self.compiler,
            "current": self.current,
            **{outcome.replace(" ", "_"): len(self.of(outcome)) for outcome in (KEPT, RACED, LEFT)},
            "change": self.change,
            "rivals": len(self.rivals),
            "compiled": self.compiled,
            "seconds": round(self.seconds, 3),
            "rows": [row.to_json() for row in self.rows],
        }


def _told(entry: Entry) -> dict[str, Any]:
    return {
        "compiler": entry.compiler,
        "schedule": entry.schedule.to_json(),
        "fingerprint": entry.fingerprint,
        "median_us": entry.median_us,
    }


def refresh(
    kernel: KernelClass | str,
    problems: Cases | str | None = None,
    *,
    arch: str,
    db: str | None = None,
    effort: str = "quick",
    budget_s: float | None = None,
    neighbours: bool = False,
    runner: str = "auto",
    seed: int = 0,
    jobs: int | None = None,
    compile_timeout_s: float = 120.0,
    watcher: Watcher | None = None,
    command: Mapping[str, Any] | None = None,
) -> RefreshReport:
    """Bring what was measured of a kernel up to the compiler and the source at hand.

    Every measured entry, shipped or one's own, of another compiler or source is built. Where the same machine code comes out its
    evidence holds and is kept. Where not, the problem is tuned again on the GPU it was measured on, the old leaders and what won
    on like problems under this compiler first; without that GPU it is reported. Entries of other compilers stay as they are:
    going back to one brings its evidence back. With the GPU, rivals that are installed and were not timed beside what is kept, or
    in another version, are timed.

    Args:
        kernel: the class, or where it is declared.
        problems: only these; None for all that are measured.
        arch: e.g. sm_90.
        db: path or URL of the database; None for the user's.
        effort: of the races: quick, default or thorough.
        budget_s: seconds for all races together.
        neighbours: race also what differs from the fastest in a knob or two, beyond what the space explores.
        runner: auto, gpu or none.
        seed: of the sampler.
        jobs: compile processes; None for one per CPU.
        compile_timeout_s: per schedule.
        watcher: who is told of progress.
        command: what to note as the command of the races' runs.

    Raises:
        TiledschedError: of a wrong argument or a missing compiler. What was found until then is stored.
    """
    from tiledsched.build.pool import open_pool
    from tiledsched.serve.entries import load_entries
    from tiledsched.store.db import TuningDB
    from tiledsched.store.evidence import for_compiler, leaders
    from tiledsched.tuning.programs import Builder
    from tiledsched.tuning.tuner import Silent

    started = time.monotonic()
    kernel = kernel_of(kernel)
    kernel.locator()  # raises where the compile processes could not find it
    settings, watcher = load_settings({"db": db}), watcher or Silent()
    tools = prepare_tools(kernel, arch, settings=settings)
    compiler = tools.toolchain.tileiras
    wanted = None if problems is None else set(problems_of(kernel, problems))
    measured = [
        entry
        for entry in for_compiler(load_entries(settings, {arch}, kernel.name), compiler)
        if entry.provenance == "measured"
        and (entry.kernel, entry.arch) == (kernel.name, arch)
        and (wanted is None or entry.problem in wanted)
        and entry.problem.known
    ]
    with TuningDB.open(settings.db) as store, open_pool(jobs) as pool:
        builder = Builder(store, tools.artifacts, kernel, arch, tools.toolchain, pool, timeout_s=compile_timeout_s)
        others = [entry for entry in measured if (entry.compiler, entry.source_hash) != (compiler, builder.source_hash)]
        compiled = 0
        if others:
            watcher.stage(others[0].problem, "comparing machine code", len(others))
            compiled = builder.build_for_each(
                [(entry.schedule, entry.problem) for entry in others], progress=lambda done, _: watcher.step(done)
            )
        changed = {entry.key: why for entry in others if (why := _changed(entry, builder))}
        same = [entry for entry in others if entry.key not in changed]
        evidence = _evidence(store, same, kernel, arch)
        changed |= {
            entry.key: "its samples are not at hand"
            for entry in same
            if entry.measurement is None or entry.measurement.uid not in evidence
        }
        kept = {
            entry.key: entry.replace(
                toolchain=tools.toolchain,
                source_hash=builder.source_hash,
                run_id=None,
                measurement_id=None,
                updated_at=None,
            )
            for entry in same
            if entry.key not in changed
        }
        store.merge([evidence[entry.measurement.uid] for entry in kept.values() if entry.measurement], [])
        for entry in kept.values():
            store.put_entry(entry)
    for forget in config.watchers:  # operators of this process look again
        forget()
    here = {device.name for device in devices() if device.arch == arch} if runner != "none" else set()
    groups: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for entry in others:
        if entry.key in changed and entry.device_name in here:
            groups[entry.regime, entry.accum_mode].append(entry.problem)
    raced: dict[Place, Entry] = {}
    for (regime, accum_mode), each in groups.items():
        left_s = None if budget_s is None else max(1.0, budget_s - (time.monotonic() - started))
        found = tune(
            kernel,
            each,
            arch=arch,
            db=db,
            regime=regime,
            accum_mode=accum_mode,
            effort=effort,
            budget_s=left_s,
            neighbours=neighbours,
            runner="gpu",
            seed=seed,
            jobs=jobs,
            compile_timeout_s=compile_timeout_s,
            watcher=watcher,
            command=command,
        )
        raced |= {entry.place: entry for entry in found.entries}
    apart = {entry.key for entry in others}
    standing = [*(entry for entry in measured if entry.key not in apart), *kept.values()]
    standing = [entry for entry in standing if entry.device_name in here]
    timed = _time_rivals(
        kernel,
        arch,
        standing,
        tools,
        seed=seed,
        jobs=jobs,
        timeout_s=compile_timeout_s,
        until_s=None if budget_s is None else started + budget_s,
        watcher=watcher,
    )
    for forget in config.watchers:  # operators of this process look again
        forget()
    rows = []
    for entry in others:
        now = kept.get(entry.key) or raced.get(entry.place)
        outcome = KEPT if entry.key in kept else RACED if now else LEFT
        rows.append(
            Refreshed(
                was=entry, outcome=outcome, now=now, leaders=tuple(leaders(entry)), why=changed.get(entry.key, "")
            )
        )
    return RefreshReport(
        kernel=kernel,
        arch=arch,
        compiler=compiler,
        current=len(measured) - len(others),
        rows=rows,
        rivals=timed,
        compiled=compiled,
        seconds=time.monotonic() - started,
    )


def _time_rivals(
    kernel: KernelClass,
    arch: str,
    entries: Sequence[Entry],
    tools: Tools,
    *,
    seed: int,
    jobs: int | None,
    timeout_s: float,
    until_s: float | None,
    watcher: Watcher,
) -> list[Entry]:
    """Entries with the times of rivals that they did not know, stored; none is begun after `until_s` (`time.monotonic()`)."""
    from tiledsched.build.pool import open_pool
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.programs import Builder

    timed: list[Entry] = []
    gpu = open_runner(kernel, arch, runner="gpu", seed=seed) if entries else None
    if gpu is None:
        return timed
    try:
        for regime in sorted({entry.regime for entry in entries}):
            races = open_rivals(kernel, gpu, replace(tools.settings, regime=regime))
            if races is None:
                break
            try:
                lacking = [entry for entry in entries if entry.regime == regime and _lacks(entry, races)]
                with TuningDB.open(tools.settings.db) as store, open_pool(jobs) as pool:
                    builder = Builder(store, tools.artifacts, kernel, arch, tools.toolchain, pool, timeout_s=timeout_s)
                    timed += _beside(lacking, builder, gpu, races, until_s, watcher)
            finally:
                races.close()
    finally:
        gpu.close()
    return timed


def _lacks(entry: Entry, races: RivalRaces) -> bool:
    """Whether a rival is here that was not timed beside an entry, or in another version."""
    known = {each.name: each.version for each in entry.rivals or ()}
    return any(
        name not in known or known[name] not in ("", version) for name, version in races.versions(entry.problem).items()
    )


def _beside(
    entries: Sequence[Entry],
    builder: Builder,
    gpu: GpuRunner,
    races: RivalRaces,
    until_s: float | None,
    watcher: Watcher,
) -> list[Entry]:
    """Time every rival beside the machine code of each entry, where it is still that, and store what they took."""
    timed: list[Entry] = []
    if not entries:
        return timed
    watcher.stage(entries[0].problem, "building what is served", len(entries))
    builder.build_for_each(
        [(entry.schedule, entry.problem) for entry in entries], progress=lambda done, _: watcher.step(done)
    )
    evidence = _evidence(builder.db, entries, builder.kernel, builder.arch)
    for entry in entries:
        if until_s is not None and time.monotonic() > until_s:
            break
        stored = evidence.get(entry.measurement.uid) if entry.measurement else None
        candidates = builder.candidates(builder.programs([entry.schedule], entry.problem, gpu.device))
        if stored is None or not candidates or candidates[0].artifact.fingerprint != entry.fingerprint:
            continue
        watcher.stage(entry.problem, "rivals", 1)
        found = races.race(entry.problem, candidates[0])
        watcher.step(1)
        if found is None:
            continue
        now = entry.replace(rivals=tuple(found), run_id=None, measurement_id=None, updated_at=None)
        builder.db.merge([stored], [])
        builder.db.put_entry(now)
        timed.append(now)
    return timed


def _changed(entry: Entry, builder: Builder) -> str:
    """Why the evidence of an entry does not hold for what is built now; empty where it does."""
    record = builder.record(entry.schedule, entry.problem)
    if record is None or record.failure is not None:
        return f"it does not build: {record.failure.message}" if record and record.failure else "it was not built"
    return "" if record.fingerprint == entry.fingerprint else "its machine code is another"


def _evidence(db: TuningDB, entries: Sequence[Entry], kernel: KernelClass, arch: str) -> dict[str, StoredMeasurement]:
    """The measurements behind entries, by uid: of the database, or else of what ships."""
    from tiledsched.store.exchange import read_table

    wanted = {entry.measurement.uid for entry in entries if entry.measurement}
    found = {
        stored.uid: stored
        for problem in {entry.problem for entry in entries}
        for stored in db.measurements(problem, arch)
        if stored.uid in wanted
    }
    path = data_files.tuning_db() / "tables" / kernel.name / f"{arch}.json"
    if wanted - set(found) and path.is_file():
        found |= {stored.uid: stored for stored in read_table(path).measurements if stored.uid in wanted}
    return found
