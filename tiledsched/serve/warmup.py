"""Build ahead what the tuned table serves, so that no process has to compile it later.

The machine code is that of the table's entries where the artifact store has it, and built where not. It goes into a
bundle: in the cache folder for this machine (`warmup`), or to a file for machines without a compiler (`bundle`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.build.artifacts import ArtifactStore
from tiledsched.build.compiler import BuildTask
from tiledsched.build.cubin import Artifact, read_artifact
from tiledsched.build.pool import BuildPool
from tiledsched.errors import ConfigError, Failure, TiledschedError
from tiledsched.kernel import KernelClass
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.serve.bundle import Program, read_bundle, write_bundle
from tiledsched.serve.lookup import Table
from tiledsched.store.records import EntryRecord

Key = tuple[str, str]
"""(schedule id, problem class id): what a build depends on, within one arch, kernel source and compiler."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which programs to prepare: those of the table's entries, and of problems like them."""

    dtypes: tuple[str, ...] = ()
    """Element types; empty for those the entries have."""
    groups: tuple[int, ...] = ()
    """Query heads per key/value head; empty for those the entries have."""
    any_length: bool = False
    """Also key lengths that no tile divides, which take other machine code."""
    decode: bool = False
    """Also one query row that sees every key, which is what generation with a cache asks for."""

    def problems(self, problem: Problem) -> list[Problem]:
        """`problem` and those like it; head counts that a group does not divide are left out."""
        found = [problem]
        for dtype, group, odd in itertools.product(self.dtypes or (problem.dtype,), self.groups or (problem.group,),
                                                   (0, 1) if self.any_length else (0,)):  # fmt: skip
            if problem.heads % group:
                continue
            like = problem.replace(dtype=dtype, kv_heads=problem.heads // group, seq_q=problem.seq_q + odd,
                                   seq_k=problem.seq_k + odd)  # fmt: skip
            found.append(like)
            if self.decode:
                found.append(like.replace(seq_q=1, causal=False))
        return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What became of it."""

    arch: str
    """For which arch."""
    path: Path
    """The bundle written."""
    programs: int
    """Programs in it."""
    problems: int
    """Problems they serve."""
    reused: int
    """Of the programs: had before, from the store of artifacts or the bundle that lay there."""
    compiled: int
    """Of the programs: built now."""
    failures: tuple[tuple[Schedule, Failure], ...]
    """What would not build."""
    size_bytes: int
    """Of the file."""
    seconds: float
    """Wall time."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {"arch": self.arch, "file": str(self.path), "programs": self.programs, "problems": self.problems,
                "reused": self.reused, "compiled": self.compiled, "bytes": self.size_bytes,
                "failures": [{"schedule": schedule.to_json(), "kind": str(failure.kind), "message": failure.message}
                             for schedule, failure in self.failures],
                "seconds": round(self.seconds, 3)}  # fmt: skip

    def __str__(self) -> str:
        reasons = "; ".join(dict.fromkeys(failure.message for _, failure in self.failures))
        failed = f", {len(self.failures)} would not build ({reasons})" if reasons else ""
        return (f"{self.arch}: {self.programs} programs for {self.problems} problems ({self.reused} had before, "
                f"{self.compiled} built now{failed}), {self.size_bytes / 1024:.0f} KiB in {self.path}, "
                f"{self.seconds:.1f} s")  # fmt: skip


def prepare(arch: str, path: Path, entries: Sequence[EntryRecord], table: Table, template: KernelClass,
            artifacts: ArtifactStore, compiler: str, *, wanted: Wanted | None = None, others: Sequence[Path] = (),
            jobs: int | None = None, progress: Callable[[str], None] = lambda text: None) -> Prepared:  # fmt: skip
    """Write a bundle with every program that `table` serves `arch` for its entries' problems, and for those like them.

    Args:
        arch: e.g. sm_90; no GPU of it is needed.
        path: the bundle; one that lies there gives what it has.
        entries: the tuned table; only those of `arch` and this kernel count.
        table: answers which schedule a problem is served with.
        template: the kernel.
        artifacts: builds already made, and where new ones are kept.
        compiler: what builds, for people.
        wanted: more problems than the entries have.
        others: more bundles that may have some of the programs.
        jobs: compile processes; one per CPU unless given.
        progress: called with a line now and then.

    Raises:
        ConfigError: the table has no entry for `arch`, or the file cannot be written.
    """
    started = time.perf_counter()
    mine = [entry for entry in entries if entry.arch == arch and entry.kernel == template.name]
    if not mine:
        raise ConfigError(f"nothing is tuned for {arch}; run: tiledsched tune --arch {arch}")
    device = mine[0].device_name
    problems = list(dict.fromkeys(each for entry in mine for each in (wanted or Wanted()).problems(entry.problem)))
    needed: dict[Key, tuple[Schedule, Problem]] = {}
    for problem in problems:
        schedule = table.resolve(problem, arch, device).schedule
        needed.setdefault(_key(template, schedule, problem), (schedule, problem))
    found = _had_before(arch, [path, *others], mine, template, artifacts)
    reused = len(needed.keys() & found.keys())
    tasks = [BuildTask(kernel=template.name, schedule=schedule, problem=problem, arch=arch)
             for key, (schedule, problem) in needed.items() if key not in found]  # fmt: skip
    progress(f"{arch}: {len(needed)} programs, {len(tasks)} to build")
    failures = []
    for key, outcome in _built(tasks, template, jobs, progress):
        if isinstance(outcome, Artifact):
            artifacts.put(outcome)
            found[key] = outcome
        else:
            failures.append((needed[key][0], outcome))
    programs = [Program(kernel=template.name, arch=arch, schedule=schedule, problem=problem,
                        fingerprint=found[key].fingerprint)
                for key, (schedule, problem) in needed.items() if key in found]  # fmt: skip
    size = write_bundle(path, programs, {(arch, each.fingerprint): each for each in found.values()}, mine,
                        {template.name: template.source_hash}, compiler)  # fmt: skip
    return Prepared(arch=arch, path=path, programs=len(programs), problems=len(problems), reused=reused,
                    compiled=len(programs) - reused, failures=tuple(failures), size_bytes=size,
                    seconds=time.perf_counter() - started)  # fmt: skip


def _key(template: KernelClass, schedule: Schedule, problem: Problem) -> Key:
    return schedule.id, template.problem_class(schedule, problem).id


def _had_before(arch: str, paths: Iterable[Path], entries: Iterable[EntryRecord], template: KernelClass,
                artifacts: ArtifactStore) -> dict[Key, Artifact]:  # fmt: skip
    """Machine code of this very kernel source that need not be built: the entries' own, and that of earlier bundles."""
    found: dict[Key, Artifact] = {}
    for entry in entries:
        if entry.source_hash == template.source_hash and entry.fingerprint:
            artifact = artifacts.get(arch, entry.fingerprint)
            if artifact is not None:
                found[_key(template, entry.schedule, entry.problem)] = artifact
    for path in paths:
        try:
            bundle = read_bundle(path)
            if bundle.source_hashes.get(template.name) != template.source_hash:
                continue
            for program in bundle.programs:
                key = _key(template, program.schedule, program.problem)
                if program.arch == arch and program.kernel == template.name and key not in found:
                    found[key] = read_artifact(bundle.cubin(program), arch)
        except TiledschedError:
            continue  # none there, or not usable: its programs are built anew
    return found


def _built(tasks: Sequence[BuildTask], template: KernelClass, jobs: int | None,
           progress: Callable[[str], None]) -> Iterable[tuple[Key, Artifact | Failure]]:  # fmt: skip
    """Each task's outcome; no process is started where there is none."""
    if not tasks:
        return
    with BuildPool(jobs) as pool:
        for done, built in enumerate(pool.build(tasks), start=1):
            outcome: Artifact | Failure | None = built.artifact or built.failure
            assert outcome is not None
            if done % max(1, len(tasks) // 4) == 0:
                progress(f"built {done}/{len(tasks)}")
            yield _key(template, built.task.schedule, built.task.problem), outcome
