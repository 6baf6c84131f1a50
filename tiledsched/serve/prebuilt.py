"""Kernel objects that launch what was measured: machine code from bundles, else compiled on the same assumptions.

cuTile asks a kernel object for machine code when it is first launched with arguments of a new kind. Its own answer
starts the compiler twice even when its disk cache holds the program (for its version, and for the bytecode it reads)
and translates the kernel's Python; a prebuilt program is read from a file instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.config import Settings
from tiledsched.errors import CompilerError, TiledschedError
from tiledsched.kernel import HINT_KNOBS, KernelClass
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.serve.bundle import VARIABLE, Bundle, Program, bundle_paths, named_bundle, read_bundle

log = logging.getLogger("tiledsched")


@dataclass(frozen=True, kw_only=True)
class Prebuilt:
    """A program of a bundle, and the bundle."""

    program: Program
    """What it is."""
    bundle: Bundle
    """Where its machine code lies."""


def make_kernel(template: KernelClass, schedules: Mapping[str, Schedule], problem: Problem,
                settings: Settings) -> Any:  # fmt: skip
    """`template.kernel(schedules, problem)` that takes its machine code from bundles where they hold it, else has it
    compiled as it was for measuring.

    Args:
        template: whose kernel.
        schedules: arch -> schedule; their hints go into the kernel.
        problem: decides the kernel function.
        settings: say where bundles lie.

    Returns:
        A cuTile kernel object.

    Raises:
        ConfigError: `TILEDSCHED_BUNDLE` names something that is no bundle.
    """
    kernel = template.kernel(schedules, problem)
    candidates = {arch: _with_hints(template, arch, schedule, settings) for arch, schedule in schedules.items()}
    kernel.__class__ = _kernel_class()  # the same object otherwise, with the hints `template.kernel` gave it
    kernel.prebuilt, kernel.template = candidates, template
    return kernel


def _with_hints(template: KernelClass, arch: str, schedule: Schedule, settings: Settings) -> list[Prebuilt]:
    """Prebuilt programs of `arch` with the hints of `schedule`; which of them fits, the launch's signature decides."""
    wanted = _hints(schedule)
    return [
        Prebuilt(program=program, bundle=bundle)
        for bundle in usable_bundles(template, settings)
        for program in bundle.programs
        if program.kernel == template.name and program.arch == arch and _hints(program.schedule) == wanted
    ]


def _hints(schedule: Schedule) -> tuple[int, ...]:
    return tuple(schedule.number(knob) for knob in HINT_KNOBS)


def usable_bundles(template: KernelClass, settings: Settings) -> list[Bundle]:
    """Bundles built from the very source of `template`; another's programs may take other arguments.

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
        if bundle.source_hashes.get(template.name) == template.source_hash:
            usable.append(bundle)
        elif path == named:
            log.warning("%s = %s is left out: built from another version of the %s kernel; make it again with this "
                        "tiledsched", VARIABLE, path, template.name)  # fmt: skip
        else:
            log.info("%s is left out: built from another version of the kernel; run: tiledsched warmup", path)
    return usable


@functools.lru_cache(maxsize=16)
def _read(path: Path, _changed_ns: int) -> Bundle:
    """Read once; again when the file has changed."""
    return read_bundle(path)


def find_program(candidates: Sequence[Prebuilt], template: KernelClass, signature: Any) -> Prebuilt | None:
    """The first whose machine code may run where a launch asks for `signature`; None where none may."""
    for each in candidates:
        if serves(template.signature(each.program.schedule, each.program.problem), signature):
            return each
    return None


def serves(built: Any, asked: Any) -> bool:
    """Whether machine code built for signature `built` is right for a launch with signature `asked`.

    It is when every assumption it was built on holds for the launch. What is constant must be equal: constants are not
    passed at run time, so they decide which arguments the machine code takes.
    """
    if built.calling_convention.code != asked.calling_convention.code:
        return False
    pairs = list(zip(built.parameters, asked.parameters, strict=False))
    return len(built.parameters) == len(asked.parameters) and all(_holds(*pair) for pair in pairs)


def _holds(built: Any, asked: Any) -> bool:
    from cuda.tile.compilation import ArrayConstraint

    if not (isinstance(built, ArrayConstraint) and isinstance(asked, ArrayConstraint)):
        return bool(built == asked)
    same = ("dtype", "ndim", "index_dtype", "stride_constant", "shape_constant", "alias_groups", "may_alias_internally")
    if any(getattr(built, name) != getattr(asked, name) for name in same):
        return False
    factors = [(built.base_addr_divisible_by, asked.base_addr_divisible_by),
               *zip(built.stride_divisible_by, asked.stride_divisible_by, strict=True),
               *zip(built.shape_divisible_by, asked.shape_divisible_by, strict=True)]  # fmt: skip
    bounds = zip(built.stride_lower_bound_incl, asked.stride_lower_bound_incl, strict=True)
    return (all(theirs % ours == 0 for ours, theirs in factors)
            and all(ours is None or (theirs is not None and theirs >= ours) for ours, theirs in bounds))  # fmt: skip


@functools.cache
def _kernel_class() -> type:
    """A subclass of `ct.kernel` that looks into bundles first (`_compile` is not public, and pinned by a test)."""
    import cuda.tile as ct

    class ServedKernel(ct.kernel):
        prebuilt: Mapping[str, list[Prebuilt]]
        template: KernelClass

        def _compile(self, signature: Any, context: Any, compute_capability: tuple[int, int] | None = None,
                     *more: Any) -> Any:  # fmt: skip
            arch = _arch(compute_capability)
            found = find_program(self.prebuilt.get(arch, []), self.template, signature)
            if found is not None:
                symbol = self.template.signature(found.program.schedule, found.program.problem).symbol
                log.info("%s from %s", found.program.fingerprint, found.bundle.path)
                return found.bundle.cubin(found.program), symbol, None, ()
            try:
                return super()._compile(self.template.assumed(signature), context, compute_capability, *more)
            except FileNotFoundError as error:
                raise CompilerError(f"no bundle holds this program for {arch} and there is no compiler ({error}); add it "
                                    "to the bundle (tiledsched bundle --dtype, --group, --any-length, --decode) or install the "
                                    "compiler: tiledsched doctor") from error  # fmt: skip

    return ServedKernel


def _arch(compute_capability: tuple[int, int] | None) -> str:
    if compute_capability is None:
        import torch

        compute_capability = torch.cuda.get_device_capability()
    major, minor = compute_capability
    return f"sm_{major}{minor}"
