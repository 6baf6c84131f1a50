"""Bring what is served up to the compiler and the kernel's source at hand: build it again, and race it again where the machine
code changed.

Rivals that were never timed next to what is served, or in another version, are timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core import data_files
from tiledsched.core.config import INVARIANT
from tiledsched.core.groups import grouped
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.problem_lists import Cases, problems_of
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Runner
from tiledsched.rivals.races import RivalRaces
from tiledsched.serve.entries import load_entries
from tiledsched.store.evidence import for_compiler, leaders
from tiledsched.store.exchange import read_table
from tiledsched.store.records import Entry, Place, StoredMeasurement
from tiledsched.tuning.options import RefreshOptions, TuneOptions
from tiledsched.tuning.resources import Resources
from tiledsched.tuning.results import TuneReport, Watcher

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
    why: str
    """Why the evidence could not be kept; empty where it was."""

    @property
    def leaders(self) -> tuple[Schedule, ...]:
        """What is raced first: what was served, what tied with it, and the runner-up."""
        return tuple(leaders(self.was))

    @property
    def change(self) -> float | None:
        """Measured time now over what it was, less 1."""
        now, was = self.now.median_us if self.now else None, self.was.median_us
        return now / was - 1 if now and was else None

    @property
    def same_numbers(self) -> bool | None:
        """Whether what is served now gives the bits that were measured before; None where that is not known."""
        taken = [each.measurement for each in (self.was, self.now) if each is not None]
        before, after = [each.accuracy if each else None for each in (*taken, None)][:2]
        return before.same_numbers(after) if before and after else None

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
            "same_numbers": self.same_numbers,
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


class Refresh:
    """The refresh of one kernel; see `Session.refresh`.

    Args:
        resources: the database, the compiler and the GPU.
        kernel: whose entries are looked at.
        options: how much the races do.
        watcher: shows progress.
    """

    def __init__(
        self, resources: Resources, kernel: KernelClass, options: RefreshOptions, watcher: Watcher | None = None
    ) -> None:
        self._resources, self._kernel, self._options, self._watcher = resources, kernel, options, watcher or Watcher()
        self._started, self._compiler = time.monotonic(), resources.toolchain.tileiras
        self._ends = math.inf if options.budget_s is None else self._started + options.budget_s
        self._builder = resources.builder(kernel, options.compile_timeout_s)
        self._db = self._builder.db

    def run(
        self, problems: Cases | str | None, tune: Callable[[Sequence[Problem], TuneOptions], TuneReport]
    ) -> RefreshReport:
        """Keep the evidence of machine code that is the same, and race the rest with `tune`."""
        measured = self._measured(problems)
        now = self._compiler, self._builder.evidence_source
        others = [entry for entry in measured if (entry.compiler, entry.source_hash) != now]
        compiled = self._build(others, "comparing machine code")
        evidence = self._evidence(others)
        changed = {entry.key: self._changed(entry, evidence) for entry in others}
        kept = {
            entry.key: self._restate(entry, evidence, toolchain=self._builder.toolchain, source_hash=now[1])
            for entry in others
            if not changed[entry.key]
        }
        here = self._resources.device_names() if self._options.runner != "none" else set()
        raced = self._race([each for each in others if changed[each.key] and each.device_name in here], tune)
        standing = [*(entry for entry in measured if entry.key not in changed), *kept.values()]
        stays = self._options.numerics == "same"  # a rival that begins to serve has other numbers
        timed = self._time_rivals([entry for entry in standing if entry.device_name in here and not stays])
        rows = []
        for entry in others:
            served = kept.get(entry.key) or raced.get(entry.place)
            outcome = KEPT if entry.key in kept else RACED if served else LEFT
            rows.append(Refreshed(was=entry, outcome=outcome, now=served, why=changed[entry.key]))
        return RefreshReport(
            kernel=self._kernel,
            arch=self._resources.arch,
            compiler=self._compiler,
            current=len(measured) - len(others),
            rows=rows,
            rivals=timed,
            compiled=compiled,
            seconds=time.monotonic() - self._started,
        )

    def _measured(self, problems: Cases | str | None) -> list[Entry]:
        """The measured entries of the kernel that are served under the compiler at hand, of these problems where some are
        given.
        """
        wanted = None if problems is None else set(problems_of(self._kernel, problems))
        served = load_entries(self._resources.settings, {self._resources.arch}, self._kernel)
        return [
            entry
            for entry in for_compiler(served, self._compiler)
            if entry.provenance == "measured"
            and (entry.kernel, entry.arch) == (self._kernel.name, self._resources.arch)
            and (wanted is None or entry.problem in wanted)
            and entry.problem.known
        ]

    def _build(self, entries: Sequence[Entry], what: str) -> int:
        """Build what entries serve; how many were compiled."""
        if not entries:
            return 0
        self._watcher.stage(entries[0].problem, what, len(entries))
        return self._builder.build_for_each(
            [(entry.schedule, entry.problem) for entry in entries], progress=lambda done, _: self._watcher.step(done)
        )

    def _evidence(self, entries: Sequence[Entry]) -> dict[str, StoredMeasurement]:
        """The measurements behind entries, by uid: of the database, or else of what ships."""
        wanted = {entry.measurement.uid for entry in entries if entry.measurement}
        found = [
            stored
            for problem in {entry.problem for entry in entries}
            for stored in self._db.measurements(problem, self._resources.arch)
        ]
        path = data_files.tuning_db() / "tables" / self._kernel.name / f"{self._resources.arch}.json"
        if wanted - {stored.uid for stored in found} and path.is_file():
            found = [*read_table(path).measurements, *found]
        return {stored.uid: stored for stored in found if stored.uid in wanted}

    def _changed(self, entry: Entry, evidence: Mapping[str, StoredMeasurement]) -> str:
        """Why the evidence of an entry does not hold for what is built now; empty where it does."""
        record = self._builder.record(entry.schedule, entry.problem)
        if record is None or record.failure is not None:
            return f"it does not build: {record.failure.message}" if record and record.failure else "it was not built"
        if record.fingerprint != entry.fingerprint:
            return "its machine code is another"
        known = entry.measurement is not None and entry.measurement.uid in evidence
        return "" if known else "its samples are not at hand"

    def _restate(self, entry: Entry, evidence: Mapping[str, StoredMeasurement], **changes: Any) -> Entry:
        """Store an entry with changes, and the measurement that it stands on."""
        assert entry.measurement is not None  # it was measured
        now = entry.replace(run_id=None, measurement_id=None, updated_at=None, **changes)
        self._db.merge([evidence[entry.measurement.uid]], [])
        self._db.put_entry(now)
        return now

    def _race(
        self, entries: Sequence[Entry], tune: Callable[[Sequence[Problem], TuneOptions], TuneReport]
    ) -> dict[Place, Entry]:
        """Tune the problems of entries again, those of each regime and accuracy class together; what is served now."""
        groups = grouped(((entry.regime, entry.accum_mode), entry.problem) for entry in entries)
        raced: dict[Place, Entry] = {}
        for (regime, accum_mode), problems in groups.items():
            chosen = TuneOptions(
                regime=regime,
                accum_mode=None if accum_mode == INVARIANT else accum_mode,
                effort=self._options.effort,
                budget_s=None if self._ends == math.inf else max(1.0, self._ends - time.monotonic()),
                neighbours=self._options.neighbours,
                runner="gpu",
                numerics=INVARIANT if accum_mode == INVARIANT else self._options.numerics,
                seed=self._options.seed,
                compile_timeout_s=self._options.compile_timeout_s,
            )
            raced |= {entry.place: entry for entry in tune(problems, chosen).entries}
        return raced

    def _time_rivals(self, entries: Sequence[Entry]) -> list[Entry]:
        """Entries with the times of rivals that they did not know, stored; none is begun after the budget has ended."""
        timed: list[Entry] = []
        if not entries or self._resources.settings.rivals == "off":
            return timed
        gpu = self._resources.open_runner(self._kernel, "gpu", seed=self._options.seed)
        assert gpu is not None
        for regime in sorted({entry.regime for entry in entries}):
            rivals = self._resources.open_rivals(self._kernel, regime)
            if rivals is None:
                break
            mine = [
                entry for entry in entries if entry.regime == regime and not entry.group
            ]  # no rival has a group's bits
            lacking = [entry for entry in mine if _lacks(entry, rivals)]
            self._build(lacking, "building what is served")
            evidence = self._evidence(lacking)
            for entry in lacking:
                if time.monotonic() > self._ends:
                    break
                if not self._changed(entry, evidence):
                    timed += self._with_rivals(entry, evidence, gpu, rivals)
        return timed

    def _with_rivals(
        self, entry: Entry, evidence: Mapping[str, StoredMeasurement], gpu: Runner, rivals: RivalRaces
    ) -> list[Entry]:
        """The entry with the times of every rival, stored; nothing where they cannot be timed."""
        programs = self._builder.programs([entry.schedule], entry.problem, gpu.device)
        for candidate in self._builder.candidates(programs):
            self._watcher.stage(entry.problem, "rivals", 1)
            found = rivals.race(entry.problem, candidate)
            self._watcher.step(1)
            if found is not None:
                return [self._restate(entry, evidence, rivals=tuple(found))]
        return []


def _lacks(entry: Entry, rivals: RivalRaces) -> bool:
    """Whether a rival is installed that was not timed next to an entry, or only in another version."""
    known = {each.name: each.version for each in entry.rivals or ()}
    return any(
        name not in known or known[name] not in ("", version)
        for name, version in rivals.versions(entry.problem).items()
    )
