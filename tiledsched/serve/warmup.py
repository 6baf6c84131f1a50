"""Builds the programs that the tuned table serves, so that no process has to compile them later.

Machine code is taken from the store of programs where it is there, and compiled where not. It is written to the programs in the
cache folder of this machine, or to a bundle: a file for machines without a compiler.
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

from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.cubin import Artifact, join, parts_with_host_code, read_artifact
from tiledsched.build.host_code import host_arch
from tiledsched.build.pool import BuildPool
from tiledsched.build.sealed import is_usable
from tiledsched.build.store import ProgramStore, StoredProgram, default_cache_folder, read_program, write_program
from tiledsched.core import launches
from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, Failure, TiledschedError
from tiledsched.core.files import read_bounded
from tiledsched.core.launches import problem_class
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import command_word
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import source_part
from tiledsched.serve.bundle import BundledProgram, read_bundle, write_bundle
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.prebuilt import make_kernel
from tiledsched.store.records import Entry
from tiledsched.store.spills import lost_bytes

Key = tuple[str, str]
"""(schedule id, problem class id): what a build depends on, within one arch, kernel source and compiler."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of building ahead."""

    arch: str
    """The GPU's arch."""
    host_arch: str
    """The architecture of the hosts that launch it."""
    path: Path
    """The bundle, or the folder of programs."""
    programs: int
    """Number of programs in it."""
    problems: int
    """Number of problems that they serve."""
    reused: int
    """Number of programs that were there: in the store of programs, in an earlier bundle, or in the cache folder."""
    compiled: int
    """Number of programs compiled for it."""
    failures: tuple[tuple[Schedule, Failure], ...]
    """Schedules that did not build, and why."""
    lost: tuple[Built, ...]
    """Builds of choices that were not measured and turned out to spill registers or to fail, so that the next choices serve."""
    size_bytes: int
    """Size of the file, or of the programs."""
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
    path: Path | None,
    entries: Sequence[Entry],
    table: LookupTable,
    kernel: KernelClass,
    artifacts: ProgramStore,
    pool: BuildPool,
    compiler: str,
    settings: Settings,
    *,
    problems: Iterable[Problem] = (),
    device: str = "",
    likely: Callable[[Problem], Iterable[Problem]] = lambda problem: (),
    progress: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Build every program that `table` serves on `arch` for some problems and for similar ones, transferred schedules included.

    Args:
        arch: for example sm_90; no GPU of it is needed.
        path: the bundle to write; programs of an earlier one there are used again. None: the programs go to the cache folder,
            where every process on this machine finds them.
        entries: the tuned table; only entries of `arch` and this kernel count.
        table: says which schedule a problem is served with.
        kernel: the kernel.
        artifacts: the store of builds for the hosts that launch them, where new ones are kept, too.
        pool: the compile processes, which start with the first program that has to be built.
        compiler: the compiler that builds, for people.
        settings: say where the cache folder is.
        problems: what is to be computed; the problems of the entries unless given.
        device: name of the GPU that the programs are for; that of the first entry unless given.
        likely: gives further problems that are to be expected where there is this one.
        progress: called with a line of text now and then.

    Raises:
        ConfigError: the table has no entry for `arch`, and no problems are given, or the file cannot be written.
        DeclarationError: the kernel was declared at a prompt, where compile processes do not find it.
    """
    started = time.perf_counter()
    mine = [entry for entry in entries if entry.arch == arch and entry.kernel == kernel.name]
    asked = list(problems) or [entry.problem for entry in mine]
    if not asked:
        raise ConfigError(f"nothing is tuned for {arch}; run: tiledsched tune {command_word(kernel)} --arch {arch}")
    device = device or next((entry.device_name for entry in mine), "")
    wanted = list(dict.fromkeys(each for problem in asked for each in (problem, *likely(problem))))

    def files(schedule: Schedule, problem: Problem) -> list[Path | None]:
        """The file of each launch on contiguous arrays, which this machine has of programs for its own hosts."""
        objects = make_kernel(kernel, schedule, problem, settings, arch_spec(arch))
        return [each.declared()[1] for each in objects] if artifacts.host_arch == host_arch() else []

    # Of a kernel that is known from its results only, the results go along: its programs are those of its own caller.
    has_code = any(each is not None for each in (kernel.function, kernel.entry, kernel.launches))
    found = _at_hand(arch, path, mine, kernel, artifacts) if has_code else {}
    had = set(found)
    needed: dict[Key, tuple[Schedule, Problem]] = {}
    outcomes: dict[Key, Built] = {}
    lost: dict[Key, Built] = {}
    waiting = [
        (problem, served)
        for problem in (wanted if has_code else ())
        for served in (table.resolve(problem, arch, device), table.resolve_captured(problem, arch, device))
        if served is not None
    ]
    while waiting:
        keys = [_key(kernel, arch, problem, served.schedule) for problem, served in waiting]
        fresh = {
            key: (served.schedule, problem)
            for key, (problem, served) in zip(keys, waiting, strict=True)
            if key not in needed
        }
        for key in [each for each in fresh if each not in found]:
            known = _stored(files(*fresh[key]), arch)
            if known is not None:
                found[key] = known
                had.add(key)
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
            key = _key(kernel, arch, built.task.problem, built.task.schedule)
            outcomes[key] = built
            if built.artifact is not None:
                artifacts.put(built.artifact)
                found[key] = built.artifact
            if done % max(1, len(tasks) // 4) == 0:
                progress(f"built {done}/{len(tasks)}")
        # What turns out to spill and was not measured gives way to the next choice, as what fails does in a call, too.
        for key, (_, served) in zip(keys, waiting, strict=True):
            if served.alternatives and key in outcomes and _lost(outcomes[key]) and key not in lost:
                lost[key] = outcomes[key]
                table = table.knowing(arch, {key[0]: {key[1]: _lost(outcomes[key])}})
        following = []
        for key, (problem, served) in zip(keys, waiting, strict=True):
            now = None
            if key in lost:
                now = table.resolve(problem, arch, device)
            elif key not in found:
                now = table.fallback_for(served, problem, arch)
            if now is not None and now.schedule != served.schedule:
                following.append((problem, now))
        waiting = following
    built_pairs = {key: pair for key, pair in needed.items() if key in found}
    if path is None:
        path, symbol = ProgramStore(default_cache_folder(settings.cache)).folder / arch, launches.symbol(kernel)
        size = sum(_store(files(*pair), symbol, found[key]) for key, pair in built_pairs.items())
    else:
        programs = [
            BundledProgram(
                kernel=kernel.name,
                arch=arch,
                schedule=schedule,
                problem=problem,
                fingerprint=found[key].fingerprint,
                host_arch=artifacts.host_arch,
            )
            for key, (schedule, problem) in built_pairs.items()
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
    reused = len(built_pairs.keys() & had)
    return Prepared(
        arch=arch,
        host_arch=artifacts.host_arch,
        path=path,
        programs=len(built_pairs),
        problems=len(wanted),
        reused=reused,
        compiled=len(built_pairs) - reused,
        failures=tuple((each.task.schedule, each.failure) for each in outcomes.values() if each.failure),
        lost=tuple(lost.values()),
        size_bytes=size,
        seconds=time.perf_counter() - started,
    )


def _stored(paths: Sequence[Path | None], arch: str) -> Artifact | None:
    """The machine code of the launches whose programs are in some files; None where some have to be compiled."""
    programs = [read_program(path) if path else None for path in paths]
    with suppress(TiledschedError):
        if programs and all(each is not None and each.cubin for each in programs):
            return join([read_artifact(each.cubin, arch) for each in programs if each is not None])
    return None


def _store(paths: Sequence[Path | None], symbol: str, artifact: Artifact) -> int:
    """Keep the machine code of each launch in its file; returns its bytes."""
    for path, cubin in zip(paths, parts_with_host_code(artifact.cubin), strict=True):
        if path is not None and not is_usable(path):
            write_program(path, StoredProgram(cubin=cubin, symbol=symbol))
    return len(artifact.cubin)


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
    arch: str, path: Path | None, entries: Iterable[Entry], kernel: KernelClass, artifacts: ProgramStore
) -> dict[Key, Artifact]:
    """Machine code of this kernel source that need not be built: that of the entries, and that of an earlier bundle."""
    source_hash = kernel.source_hash()
    found: dict[Key, Artifact] = {}
    for entry in entries:
        if source_part(entry.source_hash) == source_hash and entry.fingerprint:
            artifact = artifacts.get(arch, entry.fingerprint)
            if artifact is not None:
                found[_key(kernel, arch, entry.problem, entry.schedule)] = artifact
    with suppress(TiledschedError):  # what an unusable bundle holds is built anew
        bundle = read_bundle(path) if path is not None else None
        if bundle is None or bundle.source_hashes.get(kernel.name) != source_hash:
            return found
        for program in bundle.programs_of(kernel, arch):
            key = _key(kernel, arch, program.problem, program.schedule)
            if key not in found and program.host_arch == artifacts.host_arch:
                with suppress(ConfigError):  # as is a damaged program
                    found[key] = bundle.artifact(program)
    return found
