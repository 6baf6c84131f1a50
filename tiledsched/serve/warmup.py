"""Builds the programs that the tuned table serves, so that no process has to compile them later.

Machine code is taken from the artifact store where the store has it, and compiled where not. It is written to a bundle: in the
cache folder of this machine, or to a file for machines without a compiler.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiledsched.build.artifacts import ArtifactStore
from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.cubin import Artifact
from tiledsched.build.pool import BuildPool
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, Failure, TiledschedError
from tiledsched.core.files import read_bounded
from tiledsched.core.launch import problem_class
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import source_part
from tiledsched.serve.bundle import BundledProgram, read_bundle, write_bundle
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.records import Entry
from tiledsched.store.spills import lost_bytes

Key = tuple[str, str]
"""(schedule id, problem class id): what a build depends on, within one arch, kernel source and compiler."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of writing a bundle."""

    arch: str
    """The GPU's arch."""
    host_arch: str
    """The architecture of the hosts that launch it."""
    path: Path
    """The bundle."""
    programs: int
    """Number of programs in it."""
    problems: int
    """Number of problems that they serve."""
    reused: int
    """Number of programs taken from the artifact store or an earlier bundle."""
    compiled: int
    """Number of programs compiled for it."""
    failures: tuple[tuple[Schedule, Failure], ...]
    """Schedules that did not build, and why."""
    lost: tuple[Built, ...]
    """Builds of choices that were not measured and turned out to spill registers or to fail, so that the next choices serve."""
    size_bytes: int
    """Size of the file."""
    seconds: float
    """Wall time."""

    def to_json(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return {
            "arch": self.arch,
            "host_arch": self.host_arch,
            "file": str(self.path),
            "programs": self.programs,
            "problems": self.problems,
            "reused": self.reused,
            "compiled": self.compiled,
            "bytes": self.size_bytes,
            "failures": [
                {"schedule": schedule.to_json(), "kind": str(failure.kind), "message": failure.message}
                for schedule, failure in self.failures
            ],
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        reasons = "; ".join(dict.fromkeys(failure.message for _, failure in self.failures))
        failed = f", {len(self.failures)} would not build ({reasons})" if reasons else ""
        return (
            f"{self.arch}: {self.programs} programs for {self.problems} problems on {self.host_arch} hosts ({self.reused} had "
            f"before, {self.compiled} built now{failed}), {self.size_bytes / 1024:.0f} KiB in {self.path}, "
            f"{self.seconds:.1f} s"
        )


def prepare(
    arch: str,
    path: Path,
    entries: Sequence[Entry],
    table: LookupTable,
    kernel: KernelClass,
    artifacts: ArtifactStore,
    pool: BuildPool,
    compiler: str,
    *,
    likely: Callable[[Problem], Iterable[Problem]] = lambda problem: (),
    others: Sequence[Path] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Write a bundle with every program that `table` serves on `arch` for the problems of its entries and for similar ones.

    Args:
        arch: for example sm_90; no GPU of it is needed.
        path: the bundle to write; programs of an earlier one there are used again.
        entries: the tuned table; only entries of `arch` and this kernel count.
        table: says which schedule a problem is served with.
        kernel: the kernel.
        artifacts: the store of builds for the hosts that launch them, where new ones are kept, too.
        pool: the compile processes, which start with the first program that has to be built.
        compiler: the compiler that builds, for people.
        likely: gives further problems that are to be expected where there is this one.
        others: further bundles that may have some of the programs.
        progress: called with a line of text now and then.

    Raises:
        ConfigError: the table has no entry for `arch`, or the file cannot be written.
        DeclarationError: the kernel was declared at a prompt, where compile processes do not find it.
    """
    started = time.perf_counter()
    mine = [entry for entry in entries if entry.arch == arch and entry.kernel == kernel.name]
    if not mine:
        where = kernel.locator() if ":" in kernel.name else kernel.name
        raise ConfigError(f"nothing is tuned for {arch}; run: tiledsched tune {where} --arch {arch}")
    device = mine[0].device_name
    problems = list(dict.fromkeys(each for entry in mine for each in (entry.problem, *likely(entry.problem))))
    found = _at_hand(arch, [path, *others], mine, kernel, artifacts)
    had = set(found)
    needed: dict[Key, tuple[Schedule, Problem]] = {}
    failures: list[tuple[Schedule, Failure]] = []
    outcomes: dict[Key, Built] = {}
    lost: dict[Key, Built] = {}
    waiting = [(problem, table.resolve(problem, arch, device)) for problem in problems]
    while waiting:
        keys = [_key(kernel, arch, problem, served.schedule) for problem, served in waiting]
        fresh = {
            key: (served.schedule, problem)
            for key, (problem, served) in zip(keys, waiting, strict=True)
            if key not in needed
        }
        needed |= fresh
        tasks = [
            BuildTask(
                kernel=kernel.locator(), schedule=schedule, problem=problem, arch=arch, host_arch=artifacts.host_arch
            )
            for key, (schedule, problem) in fresh.items()
            if key not in found
        ]
        progress(f"{arch}: {len(needed)} programs, {len(tasks)} to build")
        for done, built in enumerate(pool.build(tasks), start=1):
            outcomes[key := _key(kernel, arch, built.task.problem, built.task.schedule)] = built
            if built.artifact is not None:
                artifacts.put(built.artifact)
                found[key] = built.artifact
            elif built.failure is not None:
                failures.append((built.task.schedule, built.failure))
            if done % max(1, len(tasks) // 4) == 0:
                progress(f"built {done}/{len(tasks)}")
        # What turns out to spill or to fail, and was not measured, gives way to the next choice.
        bad = {key: built for key, built in outcomes.items() if _lost(built)}
        given_up = [
            (problem, served, key)
            for key, (problem, served) in zip(keys, waiting, strict=True)
            if served.alternatives and key in bad
        ]
        for key in {key for _, _, key in given_up}:
            lost[key] = bad[key]
            table = table.knowing(arch, {key[0]: {key[1]: _lost(bad[key])}})
        again = [(problem, served, table.resolve(problem, arch, device)) for problem, served, _ in given_up]
        waiting = [(problem, now) for problem, served, now in again if now.schedule != served.schedule]
    reused = len(needed.keys() & had)
    programs = [
        BundledProgram(
            kernel=kernel.name,
            arch=arch,
            schedule=schedule,
            problem=problem,
            fingerprint=found[key].fingerprint,
            host_arch=artifacts.host_arch,
        )
        for key, (schedule, problem) in needed.items()
        if key in found
    ]
    size = write_bundle(
        path,
        programs,
        {(arch, each.fingerprint): each for each in found.values()},
        mine,
        {kernel.name: kernel.source_hash()},
        compiler,
        {kernel.name: {arch: table.spills(arch)}},
    )
    return Prepared(
        arch=arch,
        host_arch=artifacts.host_arch,
        path=path,
        programs=len(programs),
        problems=len(problems),
        reused=reused,
        compiled=len(programs) - reused,
        failures=tuple(failures),
        lost=tuple(lost.values()),
        size_bytes=size,
        seconds=time.perf_counter() - started,
    )


def renamed_by_contents(done: Prepared, name: str) -> Prepared:
    """Rename a bundle so that its name holds a hash of its contents: equal names mean equal schedules and machine code."""
    digest = hashlib.sha256(read_bounded(done.path)).hexdigest()[:16]
    path = done.path.with_name(f"{re.sub(r'[^A-Za-z0-9]', '_', name)}-{done.arch}-{digest}.zip")
    os.replace(done.path, path)
    return replace(done, path=path)


def _lost(built: Built) -> int:
    """What a build says against its program; see :func:`tiledsched.store.spills.lost_bytes`."""
    outcome = built.artifact.facts if built.artifact is not None else built.failure
    return 0 if outcome is None else lost_bytes(outcome)


def _key(kernel: KernelClass, arch: str, problem: Problem, schedule: Schedule) -> Key:
    return schedule.id, problem_class(kernel, problem, schedule, arch_spec(arch)).id


def _at_hand(
    arch: str, paths: Iterable[Path], entries: Iterable[Entry], kernel: KernelClass, artifacts: ArtifactStore
) -> dict[Key, Artifact]:
    """Machine code of this kernel source that need not be built: that of the entries, and that of earlier bundles."""
    source_hash = kernel.source_hash()
    found: dict[Key, Artifact] = {}
    for entry in entries:
        if source_part(entry.source_hash) == source_hash and entry.fingerprint:
            artifact = artifacts.get(arch, entry.fingerprint)
            if artifact is not None:
                found[_key(kernel, arch, entry.problem, entry.schedule)] = artifact
    for path in paths:
        with suppress(TiledschedError):  # what an unusable bundle holds is built anew
            bundle = read_bundle(path)
            usable = bundle.source_hashes.get(kernel.name) == source_hash
            for program in bundle.programs_of(kernel, arch) if usable else ():
                key = _key(kernel, arch, program.problem, program.schedule)
                if key not in found and program.host_arch == artifacts.host_arch:
                    with suppress(ConfigError):  # as is a damaged program
                        found[key] = bundle.artifact(program)
    return found
