"""Kernel objects that launch what was measured: machine code from a bundle, from the programs on disk, or else compiled on the
same assumptions.

cuTile asks a kernel object for machine code when it is first launched with arguments of a new kind. Its own answer
starts the compiler twice even when its disk cache holds the program (for its version, and for the bytecode it reads)
and translates the kernel's Python; a program that was built before is read from a file instead.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda.tile as ct
from cuda.tile.compilation import ArrayConstraint, CallingConvention

from tiledsched.build.compiler import BuildTask, captured_values, pass_on_worker_warps, program_key
from tiledsched.build.cubin import is_whole, parts, strip_debug
from tiledsched.build.host_code import check_host, for_host, host_arch, host_of
from tiledsched.build.sealed import is_usable
from tiledsched.build.store import ProgramStore, StoredProgram, default_cache_folder, read_program, write_program
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core import launches, preparations
from tiledsched.core.config import Settings, log
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import CompilerError, ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import place_of
from tiledsched.core.schedule import HINT_KNOBS, Schedule
from tiledsched.serve.background import BUILDER, BackgroundBuilder, Build, BuildRequest
from tiledsched.serve.bundle import Bundle, BundledProgram, named_bundle, read_bundle

_thread = threading.local()
Prebuilt = tuple[Bundle, BundledProgram]
"""A program that was built ahead, and the bundle that holds it."""


def make_kernel(
    kernel: KernelClass,
    schedule: Schedule,
    problem: Problem,
    settings: Settings,
    device: Any,
    builder: BackgroundBuilder = BUILDER,
) -> list[Any]:
    """The cuTile kernel objects of a schedule, one for each launch, that take their machine code from a bundle or the programs on
    disk where these hold it, and else have it compiled as it was for measuring.

    Args:
        kernel: the kernel.
        schedule: the schedule.
        problem: decides which functions are launched.
        settings: say where the cache folder is.
        device: where they are launched: anything with `sm_count` and `arch`, which the kernel's launches may read.
        builder: compiles programs for launches that do not wait.

    Raises:
        ConfigError: `TILEDSCHED_BUNDLE` names something that is no bundle.
    """
    objects = launches.tile_kernels(kernel, {device.arch: schedule}, problem, device)
    wanted = launches.steps(kernel, problem, schedule, device)
    store, bundle = ProgramStore(default_cache_folder(settings.cache)), usable_bundle(kernel)
    candidates = [  # the signature of a launch decides which of them fits
        (bundle, program)
        for program in (bundle.programs_of(kernel, device.arch) if bundle else ())
        if _hints(program.schedule) == _hints(schedule)
    ]
    for place, (made, step) in enumerate(zip(objects, wanted, strict=True)):
        made.__class__ = ServedKernel  # the same object otherwise, with the hints it was given
        made.prebuilt, made.declaration, made.step, made.place = candidates, kernel, step, place
        made.arch, made.schedule, made.problem = device.arch, schedule, problem
        made.store, made.builder, made.siblings, made.builds = store, builder, objects, []
    return objects


def _hints(schedule: Schedule) -> tuple[Any, ...]:
    return tuple(schedule.get(knob) for knob in HINT_KNOBS)


def usable_bundle(kernel: KernelClass) -> Bundle | None:
    """The bundle in use, where it was built from this source of `kernel`: programs of other source may take other arguments.

    Raises:
        ConfigError: `TILEDSCHED_BUNDLE` names something that is no bundle.
    """
    path = named_bundle()
    if path is None:
        return None
    bundle = _read(path, path.stat().st_mtime_ns)
    built_from = bundle.source_hashes.get(kernel.name)
    if built_from == _source_hash(kernel):  # type: ignore[arg-type]  # a class is hashable
        return bundle
    if built_from is not None:
        words = "%s is left out: built from another version of the %s kernel; make it again: tiledsched warmup"
        log.warning(words, path, kernel.name)
    return None


@functools.cache
def _source_hash(kernel: KernelClass) -> str:
    """The kernel's source hash, computed once: it reads every source file of the kernel."""
    return kernel.source_hash()


@functools.lru_cache(maxsize=16)
def _read(path: Path, _changed_ns: int) -> Bundle:
    """The bundle with its programs for hosts like this one, read once, and again when the file has changed."""
    bundle, here = read_bundle(path), host_arch()
    usable = tuple(each for each in bundle.programs if each.host_arch == here)
    others = sorted({each.host_arch for each in bundle.programs} - {here})
    if others:
        log.warning(
            "%s: programs for %s hosts are left out, because this host is %s; make it again here, or elsewhere with: "
            "tiledsched warmup --arch ARCH --host-arch %s -o FILE",
            path,
            " and ".join(others),
            here,
            here,
        )
    return replace(bundle, programs=usable)


def find_program(
    candidates: Sequence[Prebuilt], kernel: KernelClass, place: int, function: Any, signature: Any
) -> Prebuilt | None:
    """The first program whose machine code may run in a launch of this signature; None where none may.

    Args:
        candidates: programs with the right hints.
        kernel: the kernel.
        place: the number of the launch among the launches of a schedule.
        function: the tile function that is launched.
        signature: of the launch.
    """
    for each in candidates:
        _, program = each
        p, s = program.problem, program.schedule
        wanted = launches.steps(kernel, p, s, arch_spec(program.arch))
        if place >= len(wanted) or wanted[place].function is not function:
            continue
        # Most programs differ in a constant, and comparing constants is a hundred times faster than comparing signatures.
        pairs = zip(wanted[place].arguments, signature.parameters, strict=False)
        constant = all(ours.value == theirs.value for ours, theirs in pairs if ours.kind == "constant")
        if constant and serves(launches.signature(kernel, p, s, wanted[place]), signature):
            return each
    return None


def serves(built: Any, wanted: Any) -> bool:
    """Whether machine code built for signature `built` is right for a launch with signature `wanted`.

    It is when every assumption it was built on holds for the launch. What is constant must be equal: constants are not
    passed at run time, so they decide which arguments the machine code takes.
    """
    if built.calling_convention.version != wanted.calling_convention.version:
        return False
    pairs = list(zip(built.parameters, wanted.parameters, strict=False))
    return len(built.parameters) == len(wanted.parameters) and all(_holds(*pair) for pair in pairs)


def _holds(built: Any, wanted: Any) -> bool:
    """Whether every assumption about one parameter of the built signature holds for the wanted one."""
    if not (isinstance(built, ArrayConstraint) and isinstance(wanted, ArrayConstraint)):
        return bool(built == wanted)
    same = ("dtype", "ndim", "index_dtype", "stride_constant", "shape_constant", "alias_groups", "may_alias_internally")
    if any(getattr(built, name) != getattr(wanted, name) for name in same):
        return False
    factors = [
        (built.base_addr_divisible_by, wanted.base_addr_divisible_by),
        *zip(built.stride_divisible_by, wanted.stride_divisible_by, strict=True),
        *zip(built.shape_divisible_by, wanted.shape_divisible_by, strict=True),
    ]
    bounds = zip(built.stride_lower_bound_incl, wanted.stride_lower_bound_incl, strict=True)
    return all(theirs % ours == 0 for ours, theirs in factors) and all(
        ours is None or (theirs is not None and theirs >= ours) for ours, theirs in bounds
    )


class BuildingError(ct.TileError):
    """A program is being compiled by another process; cuTile treats it as a failed compilation."""


@contextmanager
def not_waiting(waits: bool = False) -> Iterator[list[Build]]:
    """Have launches of this thread raise :class:`BuildingError` where their program has yet to be compiled, which another process
    then does. Yields the list of the builds that launches missed.

    Args:
        waits: have launches wait for their programs after all; the list stays empty.
    """
    missed: list[Build] = []
    before = getattr(_thread, "missed", None)
    _thread.missed = None if waits else missed
    try:
        yield missed
    finally:
        _thread.missed = before


def missed_builds() -> list[Build] | None:
    """The builds that launches of this thread missed, to add to; None where they wait."""
    return getattr(_thread, "missed", None)


class ServedKernel(ct.kernel):
    """A cuTile kernel object that looks for its machine code in bundles and among the programs on disk before it is compiled.
    `_compile` is not public; a test pins it.
    """

    prebuilt: list[Prebuilt]
    arch: str
    declaration: KernelClass
    step: Any
    place: int
    schedule: Schedule
    problem: Problem
    store: ProgramStore
    builder: BackgroundBuilder
    siblings: list[ServedKernel]
    """The kernel objects of all launches of the schedule, this one among them."""
    builds: list[Build]
    """Builds that launches of it missed."""

    def _compile(
        self, signature: Any, context: Any, compute_capability: tuple[int, int] | None = None, *more: Any
    ) -> Any:
        wanted = launches.assumed(self.declaration, signature, self.step)
        code = self._bundled(wanted)
        if code:
            return code, launches.symbol(self.declaration), None, ()
        path, missed = self.program_path(wanted), missed_builds()
        program = None if path is None else self._program(path, wanted, missed)
        if program is not None and program.error:
            raise ct.TileError(program.error)
        if program is not None:
            return parts(program.cubin)[0], program.symbol, None, ()
        made = self._compiled_here(wanted, context, compute_capability, *more)
        if (
            path is not None and made[2:] == (None, ()) and is_whole(made[0])
        ):  # else it needs more than its machine code
            write_program(path, StoredProgram(cubin=strip_debug(made[0]), symbol=made[1]))
        return made

    def program_path(self, wanted: Any) -> Path | None:
        """The file of the program that is compiled for a signature; None where no file can hold it."""
        kernel, hints = self.declaration, self._compiler_options.hints_by_target()
        mine = {**hints["default"], **hints.get(self.arch, {})}
        source = preparations.source_hash() if self.step.prepares else _source_hash(kernel)  # type: ignore[arg-type]
        key = program_key(source, captured_values(self._pyfunc), mine, wanted, self.arch)
        return self.store.path(self.arch, key) if key else None

    def declared(self) -> tuple[Any, Path | None]:
        """The signature of a launch on contiguous arrays, and the file of its program; None where no file can hold that."""
        wanted = launches.signature(self.declaration, self.problem, self.schedule, self.step)
        return wanted, self.program_path(wanted)

    def _bundled(self, signature: Any) -> bytes:
        """Machine code from a bundle; empty where none holds it."""
        found = find_program(self.prebuilt, self.declaration, self.place, self.step.function, signature)
        if found is None:
            return b""
        bundle, program = found
        try:
            code = bundle.artifact(program).cubin
        except ConfigError as error:  # what is damaged never runs
            log.warning("%s; its program is compiled instead", error)
            return b""
        log.info("%s from %s", program.fingerprint, bundle.path)
        return parts(code)[self.place]

    def _program(self, path: Path, wanted: Any, missed: list[Build] | None) -> StoredProgram | None:
        """The program in a file, or that of a build; None where it has to be compiled here.

        Raises:
            BuildingError: it is being compiled, and this thread does not wait.
        """
        build, program = self.builder.builds.get(path), read_program(path)
        if program is None and build is None and missed is not None:
            build = self._submit(path, wanted)
            for each in self.siblings if build else ():  # whose launches come after it
                declared, file = each.declared()
                if file is not None and not is_usable(file):
                    each._submit(file, declared)
        if program is None and build is not None:
            if missed is not None and not build.is_done:
                self.builds.append(build)
                missed.append(build)
                raise BuildingError(f"{self.declaration.name}: its program is being compiled")
            build.wait()
            program = build.program
            if build.failure:
                log.warning("%s; the program is compiled by the call instead", build.failure)
        self.builder.builds.pop(path, None)
        return program

    def _submit(self, path: Path, wanted: Any) -> Build | None:
        """Have another process compile a program; None where none can."""
        kernel, convention = self.declaration, CallingConvention.cutile_python_v2()
        where = place_of(kernel)
        if (
            not where
            or "__main__" in (kernel.__module__, kernel.declared_in)
            or wanted.calling_convention.code != convention.code
            or not compiler_at_hand()
        ):
            return None  # another process would run the user's script
        return self.builder.submit(
            BuildRequest(
                path=path,
                task=BuildTask(kernel=where, schedule=self.schedule, problem=self.problem, arch=self.arch),
                wide=bool(getattr(self.problem, "wide", False)),
                place=self.place,
                parameters=tuple(wanted.parameters),
            )
        )

    def _compiled_here(self, wanted: Any, *target: Any) -> Any:
        """What cuTile compiles, in this process.

        Raises:
            CompilerError: there is no compiler, or the program is for hosts of another architecture.
        """
        pass_on_worker_warps()  # the schedule measured may have hints that cuTile does not pass on
        try:
            made = super()._compile(wanted, *target)
            if host_of(made[0]) not in ("", host_arch()):  # out of cuTile's cache, which hosts of both kinds share
                with for_host(host_arch()):
                    made = super()._compile(wanted, *target)
                check_host(made[0])
            return made
        except FileNotFoundError as error:
            raise CompilerError(
                f"no bundle holds this program for {self.arch} on {host_arch()} hosts and there is no compiler ({error}); add it "
                "to the bundle (tiledsched warmup -o FILE; see its --also for problems unlike those tuned) or install the "
                "compiler: tiledsched doctor"
            ) from error
