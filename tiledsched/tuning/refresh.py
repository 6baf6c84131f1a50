"""Bring what is served up to the compiler and the kernel's source at hand: build it again, and race it again where the machine
code changed.

Rivals that were never timed next to what is served, or in another version, are timed.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiledsched.core import config, data_files
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Runner
from tiledsched.tuning.options import RefreshOptions, TuneOptions
from tiledsched.tuning.problems import Cases, kernel_of, problems_of
from tiledsched.tuning.resources import Resources, RivalTimer
from tiledsched.tuning.run import tune_problems

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB
    from tiledsched.store.records import Entry, Place, StoredMeasurement
    from tiledsched.tuning.programs import Builder
    from tiledsched.tuning.tuner import Watcher

KEPT, RACED, LEFT = "kept", "raced", "to race"


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """What became of one entry that was measured with another compiler or another source."""

    was: Entry
    """The entry that was served before."""
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
            "was": _summarise(self.was),
            "now": _summarise(self.now) if self.now else None,
            "change": self.change,
            "leaders": [schedule.to_json() for schedule in self.leaders],
        }


@dataclass(frozen=True, kw_only=True)
class RefreshReport:
    """What a refresh found and changed."""

    kernel: KernelClass
    """The kernel whose entries were looked at."""
    arch: str
    """The arch they are for."""
    compiler: str
    """Version of the compiler at hand."""
    current: int
    """How many entries are of this compiler and this source already."""
    rows: Sequence[Refreshed]
    """What became of each of the others."""
    rivals: Sequence[Entry]
    """Entries whose machine code is the same and whose rivals were timed anew."""
    compiled: int
    """How often the compiler ran to compare machine code."""
    seconds: float
    """Wall time, races included."""

    def of(self, outcome: str) -> list[Refreshed]:
        """The rows with this outcome."""
        return [row for row in self.rows if row.outcome == outcome]

    @property
    def change(self) -> float | None:
        """Geometric mean over the raced entries of the time now over the time before, less 1."""
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


def _summarise(entry: Entry) -> dict[str, Any]:
    return {
        "compiler": entry.compiler,
        "schedule": entry.schedule.to_json(),
        "fingerprint": entry.fingerprint,
        "median_us": entry.median_us,
    }


def refresh_entries(
    resources: Resources,
    kernel: KernelClass | str,
    problems: Cases | str | None,
    options: RefreshOptions,
    *,
    watcher: Watcher | None = None,
    command: Mapping[str, Any] | None = None,
) -> RefreshReport:
    """Keep the evidence of machine code that is the same, and race the rest; see `Session.refresh`."""
    from tiledsched.store.evidence import leaders
    from tiledsched.tuning.tuner import Silent

    started, watcher = time.monotonic(), watcher or Silent()
    kernel = kernel_of(kernel)
    kernel.locator()  # raises where the compile processes could not find it
    measured = _measured(resources, kernel, problems)
    builder = resources.builder(kernel, options.compile_timeout_s)
    now = resources.toolchain.tileiras, builder.source_hash
    others = [entry for entry in measured if (entry.compiler, entry.source_hash) != now]
    compiled = _build(others, builder, "comparing machine code", watcher)
    changed, kept = _keep_evidence(others, builder)
    _forget_what_is_served()
    here = resources.device_names() if options.runner != "none" else set()
    ends = None if options.budget_s is None else started + options.budget_s
    to_race = [entry for entry in others if entry.key in changed and entry.device_name in here]
    raced = _race(resources, kernel, to_race, options, ends, watcher, command)
    keys = {entry.key for entry in others}
    standing = [*(entry for entry in measured if entry.key not in keys), *kept.values()]
    standing = [entry for entry in standing if entry.device_name in here]
    timed = _time_rivals(resources, builder, standing, options.seed, ends, watcher)
    _forget_what_is_served()
    rows = []
    for entry in others:
        served = kept.get(entry.key) or raced.get(entry.place)
        outcome = KEPT if entry.key in kept else RACED if served else LEFT
        rows.append(
            Refreshed(
                was=entry, outcome=outcome, now=served, leaders=tuple(leaders(entry)), why=changed.get(entry.key, "")
            )
        )
    return RefreshReport(
        kernel=kernel,
        arch=resources.arch,
        compiler=resources.toolchain.tileiras,
        current=len(measured) - len(others),
        rows=rows,
        rivals=timed,
        compiled=compiled,
        seconds=time.monotonic() - started,
    )


def _measured(resources: Resources, kernel: KernelClass, problems: Cases | str | None) -> list[Entry]:
    """The measured entries of a kernel that are served under the compiler at hand, of these problems where some are given."""
    from tiledsched.serve.entries import load_entries
    from tiledsched.store.evidence import for_compiler

    wanted = None if problems is None else set(problems_of(kernel, problems))
    served = load_entries(resources.settings, {resources.arch}, kernel.name)
    return [
        entry
        for entry in for_compiler(served, resources.toolchain.tileiras)
        if entry.provenance == "measured"
        and (entry.kernel, entry.arch) == (kernel.name, resources.arch)
        and (wanted is None or entry.problem in wanted)
        and entry.problem.known
    ]


def _build(entries: Sequence[Entry], builder: Builder, what: str, watcher: Watcher) -> int:
    """Build what entries serve; how many were compiled."""
    if not entries:
        return 0
    watcher.stage(entries[0].problem, what, len(entries))
    return builder.build_for_each(
        [(entry.schedule, entry.problem) for entry in entries], progress=lambda done, _: watcher.step(done)
    )


def _keep_evidence(entries: Sequence[Entry], builder: Builder) -> tuple[dict[Any, str], dict[Any, Entry]]:
    """By key: why the evidence of an entry does not hold for what is built now, or the entry as it is kept from now on."""
    changed = {entry.key: why for entry in entries if (why := _changed(entry, builder))}
    same = [entry for entry in entries if entry.key not in changed]
    evidence = _evidence(builder.db, same, builder.kernel, builder.arch)
    kept = {}
    for entry in same:
        if entry.measurement is None or entry.measurement.uid not in evidence:
            changed[entry.key] = "its samples are not at hand"
            continue
        now = entry.replace(
            toolchain=builder.toolchain,
            source_hash=builder.source_hash,
            run_id=None,
            measurement_id=None,
            updated_at=None,
        )
        builder.db.merge([evidence[entry.measurement.uid]], [])
        builder.db.put_entry(now)
        kept[entry.key] = now
    return changed, kept


def _race(
    resources: Resources,
    kernel: KernelClass,
    entries: Sequence[Entry],
    options: RefreshOptions,
    ends: float | None,
    watcher: Watcher,
    command: Mapping[str, Any] | None,
) -> dict[Place, Entry]:
    """Tune the problems of entries again, those of each regime and accuracy class together; what is served now, by place."""
    groups: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for entry in entries:
        groups[entry.regime, entry.accum_mode].append(entry.problem)
    raced: dict[Place, Entry] = {}
    for (regime, accum_mode), problems in groups.items():
        chosen = TuneOptions(
            regime=regime,
            accum_mode=accum_mode,
            effort=options.effort,
            budget_s=None if ends is None else max(1.0, ends - time.monotonic()),
            neighbours=options.neighbours,
            runner="gpu",
            seed=options.seed,
            compile_timeout_s=options.compile_timeout_s,
        )
        found = tune_problems(resources, kernel, problems, chosen, watcher=watcher, command=command)
        raced |= {entry.place: entry for entry in found.entries}
    return raced


def _forget_what_is_served() -> None:
    """Have the operators of this process look again."""
    for forget in config.watchers:
        forget()


def _time_rivals(
    resources: Resources, builder: Builder, entries: Sequence[Entry], seed: int, ends: float | None, watcher: Watcher
) -> list[Entry]:
    """Entries with the times of rivals that they did not know, stored; none is begun after `ends` (`time.monotonic()`)."""
    timed: list[Entry] = []
    if not entries or resources.settings.rivals == "off":
        return timed
    gpu = resources.open_runner(builder.kernel, "gpu", seed=seed)
    assert gpu is not None
    for regime in sorted({entry.regime for entry in entries}):
        rivals = resources.open_rivals(builder.kernel, regime)
        if rivals is None:
            break
        lacking = [entry for entry in entries if entry.regime == regime and _lacks(entry, rivals)]
        timed += _with_rivals(lacking, builder, gpu, rivals, ends, watcher)
    return timed


def _lacks(entry: Entry, rivals: RivalTimer) -> bool:
    """Whether a rival is installed that was not timed next to an entry, or only in another version."""
    known = {each.name: each.version for each in entry.rivals or ()}
    return any(
        name not in known or known[name] not in ("", version)
        for name, version in rivals.versions(entry.problem).items()
    )


def _with_rivals(
    entries: Sequence[Entry], builder: Builder, gpu: Runner, rivals: RivalTimer, ends: float | None, watcher: Watcher
) -> list[Entry]:
    """Time every rival next to the machine code of each entry, where that is still the same, and store what they took."""
    timed: list[Entry] = []
    _build(entries, builder, "building what is served", watcher)
    evidence = _evidence(builder.db, entries, builder.kernel, builder.arch)
    for entry in entries:
        if ends is not None and time.monotonic() > ends:
            break
        stored = evidence.get(entry.measurement.uid) if entry.measurement else None
        candidates = builder.candidates(builder.programs([entry.schedule], entry.problem, gpu.device))
        if stored is None or not candidates or candidates[0].artifact.fingerprint != entry.fingerprint:
            continue
        watcher.stage(entry.problem, "rivals", 1)
        found = rivals.race(entry.problem, candidates[0])
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
