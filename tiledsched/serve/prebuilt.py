"""Kernel objects that launch what was measured: machine code from bundles, else compiled on the same assumptions.

cuTile asks a kernel object for machine code when it is first launched with arguments of a new kind. Its own answer
starts the compiler twice even when its disk cache holds the program (for its version, and for the bytecode it reads)
and translates the kernel's Python; a prebuilt program is read from a file instead.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda.tile as ct

from tiledsched.build.compiler import pass_on_worker_warps
from tiledsched.build.cubin import parts, read_artifact
from tiledsched.build.host_code import check_host, for_host, host_arch, host_of
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core import launch as launches
from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import CompilerError, ConfigError, TiledschedError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.resources import spilled
from tiledsched.core.schedule import HINT_KNOBS, Schedule
from tiledsched.serve.bundle import Bundle, BundledProgram, bundle_paths, named_bundle, read_bundle

log = logging.getLogger("tiledsched")
_thread = threading.local()


SAME_ARGUMENTS = frozenset({1, 2})
"""Versions of cuTile's calling convention that pass the same arguments and make the same machine code, unless a size is constant,
which the parameters tell. A launch takes the first where no size is; builds always take the second."""
Prebuilt = tuple[Bundle, BundledProgram]
"""A program that was built ahead, and the bundle that holds it."""


def make_kernel(
    kernel: KernelClass, schedule: Schedule, problem: Problem, settings: Settings, device: Any
) -> list[Any]:
    """The cuTile kernel objects of a schedule, one for each launch, that take their machine code from bundles where these hold
    it, and else have it compiled as it was for measuring.

    Args:
        kernel: the kernel.
        schedule: the schedule.
        problem: decides which functions are launched.
        settings: say where bundles lie.
        device: where they are launched: anything with `sm_count` and `arch`, which the kernel's launches may read.

    Raises:
        ConfigError: `TILEDSCHED_BUNDLE` names something that is no bundle.
    """
    objects = launches.tile_kernels(kernel, {device.arch: schedule}, problem, device)
    wanted = launches.steps(kernel, problem, schedule, device)
    candidates = [  # the signature of a launch decides which of them fits
        (bundle, program)
        for bundle in usable_bundles(kernel, settings)
        for program in bundle.programs_of(kernel, device.arch)
        if _hints(program.schedule) == _hints(schedule)
    ]
    for place, (made, step) in enumerate(zip(objects, wanted, strict=True)):
        made.__class__ = ServedKernel  # the same object otherwise, with the hints it was given
        made.prebuilt, made.declaration, made.step, made.place = candidates, kernel, step, place
        made.arch, made.refused = device.arch, {}
    return objects


def _hints(schedule: Schedule) -> tuple[Any, ...]:
    return tuple(schedule.get(knob) for knob in HINT_KNOBS)


def usable_bundles(kernel: KernelClass, settings: Settings) -> list[Bundle]:
    """The bundles that were built from this source of `kernel`: programs of other source may take other arguments.

    Raises:
        ConfigError: `TILEDSCHED_BUNDLE` names something that is no bundle.
    """
    named = named_bundle()
    usable = []
    for path in bundle_paths(settings):
        try:
            bundle = _read(path, path.stat().st_mtime_ns)
        except (TiledschedError, OSError) as error:
            if path == named:
                raise
            log.warning("left out: %s", error)
            continue
        built_from = bundle.source_hashes.get(kernel.name)
        if built_from == _source_hash(kernel):  # type: ignore[arg-type]  # a class is hashable
            usable.append(bundle)
        elif built_from is not None:
            level = logging.WARNING if path == named else logging.INFO
            words = "%s is left out: built from another version of the %s kernel; make it again: tiledsched warmup"
            log.log(level, words, path, kernel.name)
    return usable


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
    versions = {each.calling_convention.version for each in (built, wanted)}
    if len(versions) > 1 and not versions <= SAME_ARGUMENTS:
        return False
    pairs = list(zip(built.parameters, wanted.parameters, strict=False))
    return len(built.parameters) == len(wanted.parameters) and all(_holds(*pair) for pair in pairs)


def _holds(built: Any, wanted: Any) -> bool:
    """Whether every assumption about one parameter of the built signature holds for the wanted one."""
    from cuda.tile.compilation import ArrayConstraint

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


@contextmanager
def refusing_spills(refuses: bool) -> Iterator[None]:
    """Have launches of this thread raise `TileError`, or not, where a program that they would load spills registers."""
    before = getattr(_thread, "refuses_spills", False)
    _thread.refuses_spills = refuses
    try:
        yield
    finally:
        _thread.refuses_spills = before


class SpillsError(ct.TileError):
    """A program spills registers where another schedule may be served; cuTile treats it as a failed compilation."""


class ServedKernel(ct.kernel):
    """A cuTile kernel object that looks for its machine code in bundles first. `_compile` is not public; a test pins it."""

    prebuilt: list[Prebuilt]
    arch: str
    declaration: KernelClass
    step: Any
    place: int
    refused: dict[str, str]

    def _compile(
        self, signature: Any, context: Any, compute_capability: tuple[int, int] | None = None, *more: Any
    ) -> Any:
        # Without a compiler a spilling program of a bundle is all there is.
        refuses = getattr(_thread, "refuses_spills", False) and bool(compiler_at_hand())
        launch = str(signature) if refuses else ""
        if launch in self.refused:
            raise SpillsError(self.refused[launch])
        found = self._found(signature, context, compute_capability, *more)
        if refuses and (bytes_each := spilled(read_artifact(found[0], self.arch).facts.spill_bytes)):
            self.refused[launch] = f"its program spills {bytes_each} bytes of registers a thread"
            raise SpillsError(self.refused[launch])
        return found

    def _found(self, signature: Any, *target: Any) -> Any:
        found = find_program(self.prebuilt, self.declaration, self.place, self.step.function, signature)
        if found is not None:
            bundle, program = found
            try:
                code = bundle.artifact(program).cubin
            except ConfigError as error:  # what is damaged never runs
                log.warning("%s; its program is compiled instead", error)
            else:
                log.info("%s from %s", program.fingerprint, bundle.path)
                return parts(code)[self.place], launches.symbol(self.declaration), None, ()
        pass_on_worker_warps()  # the schedule measured may have hints that cuTile does not pass on
        try:
            wanted = launches.assumed(self.declaration, signature, self.step)
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
