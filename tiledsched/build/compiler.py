"""Compile one schedule for one arch, ahead of time, with no GPU; and name what a store of programs holds of it.

A name is a hash of all that the contents of the file depend on, so that no file is ever replaced.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from tiledsched.build.cubin import Artifact, join, read_artifact
from tiledsched.build.host_code import for_host, host_arch
from tiledsched.build.store import default_cache_folder
from tiledsched.build.toolchain import ANY_WORKER_WARPS, compiler_at_hand, installed_toolchain, release
from tiledsched.core.canonical import stable_id
from tiledsched.core.copies import closed_over, names_in
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import LONGEST, Failure, FailureKind, NoRoomError, describe
from tiledsched.core.extras import package_version
from tiledsched.core.files import PREFIX, has_room, is_full
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.processes import import_cutile
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule

DEFAULT_TIMEOUT_S = 120.0
MISLEADING_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
"""tileiras would mix in the parts of whatever toolkit these name, and fail."""


@dataclass(frozen=True, kw_only=True)
class BuildTask:
    """One compile: everything a worker process needs, small enough to send to it."""

    kernel: str
    """Where the kernel is declared; see :func:`tiledsched.core.registry.load_kernel`."""
    schedule: Schedule
    """What to compile."""
    problem: Problem
    """Any problem of the class wanted; only its class reaches the compiler."""
    arch: str
    """Target, e.g. sm_121."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds after which the compiler is killed."""
    host_arch: str = field(default_factory=host_arch)
    """Architecture of the hosts that launch it: this one's unless given."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What became of a task."""

    task: BuildTask
    """The task."""
    artifact: Artifact | None
    """The machine code, or None."""
    failure: Failure | None
    """Why there is none, or None."""
    seconds: float
    """Wall time of the compile."""


def prepare_process() -> None:
    """Set this process up for compiling. Call before `cuda.tile` is imported; harmless afterwards.

    cuTile's own disk cache is left out: its key holds source paths and line numbers, and the artifact store does the
    same job by content.
    """
    for name in MISLEADING_VARIABLES:
        os.environ.pop(name, None)
    os.environ["CUDA_TILE_CACHE_DIR"] = "off"
    import_cutile()


NO_MEANS = re.compile("cannot allocate memory|read-only file system|too many open files", re.IGNORECASE)
"""What the system says where a compiler could not write or had no memory."""
FULL = re.compile("no space left|disk quota", re.IGNORECASE)
"""What it says where a disk is full."""


def compile_task(task: BuildTask) -> Built:
    """Compile `task`; a compiler error or timeout is a typed failure, not an exception.

    Raises:
        NoRoomError: the disk for temporary files is full, which is no failure of the candidate.
    """
    import cuda.tile as ct

    started = time.perf_counter()
    artifact = failure = None
    try:
        kernel = load_kernel(task.kernel)
        with ct.compiler_timeout(task.timeout_s):
            artifact = compile_schedule(kernel, task.problem, task.schedule, task.arch, task.host_arch)
        wrong = kernel.unsound(task.problem, task.schedule, artifact.facts, task.arch)
        if wrong:
            artifact, failure = None, Failure(kind=FailureKind.COMPILE_ERROR, message=wrong)
    except ct.TileCompilerTimeoutError:
        failure = Failure(kind=FailureKind.COMPILE_TIMEOUT, message=f"compiler stopped after {task.timeout_s:g} s")
    except Exception as error:  # whatever a compiler trips over must cost one candidate, not the run
        if is_full(error) or FULL.search(str(error)) or not has_room(tempfile.gettempdir()):
            raise no_room(tempfile.gettempdir(), describe(error)[:LONGEST]) from error
        kind = FailureKind.COMPILER_KILLED if says_nothing_of_program(error) else FailureKind.COMPILE_ERROR
        failure = Failure(kind=kind, message=describe(error)[:LONGEST])
    return Built(task=task, artifact=artifact, failure=failure, seconds=time.perf_counter() - started)


def compile_schedule(
    kernel: KernelClass, problem: Problem, schedule: Schedule, arch: str, host: str | None = None
) -> Artifact:
    """The machine code of every launch of a schedule, for hosts like this one unless others are named. Whatever the compiler
    trips over is raised.
    """
    from tiledsched.core.launches import signature, steps, tile_kernels

    device = arch_spec(arch)
    objects = tile_kernels(kernel, {arch: schedule}, problem, device)
    signatures = [signature(kernel, problem, schedule, step) for step in steps(kernel, problem, schedule, device)]
    return export(objects, signatures, arch, host)


def export(objects: Sequence[Any], signatures: Sequence[Any], arch: str, host: str | None = None) -> Artifact:
    """The machine code of cuTile kernel objects, of each for launches with one signature, as one artifact."""
    from cuda.tile.compilation import export_kernel

    pass_on_worker_warps()
    built = []
    for tile_kernel, signature in zip(objects, signatures, strict=True):
        output = io.BytesIO()
        with for_host(host or host_arch(), default_cache_folder() / "host_code") as references:
            export_kernel(tile_kernel, [signature], output, gpu_code=arch, output_format="cubin")
        built.append(read_artifact(output.getvalue(), arch, *references))
    return join(built)


@functools.cache
def pass_on_worker_warps() -> None:
    """Have cuTile hand on every `num_worker_warps` that the compiler at hand takes.

    cuTile 1.7 asks for bytecode of 13.5, which it does not write yet, where the hint is neither 4 nor 8. The compiler of
    13.5 takes it in bytecode of 13.4 as well; the one of 13.4 ignores it, so there the error stays.
    """
    from cuda.tile import _ir2bytecode

    resolve = getattr(_ir2bytecode, "_resolve_num_worker_warps", None)
    if resolve is not None and release(compiler_at_hand()) >= ANY_WORKER_WARPS:
        _ir2bytecode._resolve_num_worker_warps = lambda warps, version: warps  # checked when the hint was given


def says_nothing_of_program(error: BaseException) -> bool:
    """Whether an error says nothing of the program: the system ended the compiler, or had no file, space or memory for it."""
    words = str(error)
    return (
        isinstance(error, (OSError, MemoryError)) or words.startswith("Return code -") or bool(NO_MEANS.search(words))
    )


def no_room(folder: str, why: str) -> NoRoomError:
    """The error for a compile that had no room in its temporary `folder`."""
    path = Path(folder)
    where = path.parent if path.name.startswith(PREFIX) else path
    return NoRoomError(
        f"no room to compile in {where} of {socket.gethostname()}: {why}; free some space there, or name another "
        "folder with TMPDIR, and run again: what was built and measured is kept"
    )


KEY_DIGITS = 40
PLAIN = ("bool", "int", "float", "str", "bytes", "tuple", "NoneType", "DType", "module")
"""Names of the types whose values are what they are printed as; DType is cuTile's."""


@functools.lru_cache(maxsize=4096)
def build_key(task: BuildTask) -> str:
    """The key of what became of a build: of toolchain, hosts, arch, the kernel's source, schedule and class of problems."""
    from tiledsched.core.launches import problem_class  # imports cuTile, before which compile processes are prepared

    kernel = load_kernel(task.kernel)
    known = problem_class(kernel, task.problem, task.schedule, arch_spec(task.arch))
    toolchain = installed_toolchain().id
    return stable_id(
        [toolchain, task.host_arch, task.arch, kernel.source_hash(), task.schedule.id, known.id], KEY_DIGITS
    )


def program_key(source: str, captured: Any, hints: Mapping[str, Any], signature: Any, arch: str) -> str:
    """The key of the program of one launch; empty where no file can hold it.

    Args:
        source: hash of the kernel's source.
        captured: what :func:`captured_values` found.
        hints: the hints of the compilation, by name.
        signature: of the launch, with the assumptions that it is compiled on.
        arch: the GPU's.
    """
    tileiras = compiler_at_hand()  # starts no process where the compiler was installed with pip
    if captured is None or not tileiras:
        return ""
    parts = [source, captured, sorted(hints.items()), str(signature.parameters), signature.calling_convention.code]
    versions = f"cuda-tile {package_version('cuda-tile')}, tileiras {tileiras}"
    return stable_id([*parts, arch, host_arch(), versions], KEY_DIGITS)


@functools.lru_cache(maxsize=1024)
def captured_values(function: FunctionType) -> list[Any] | None:
    """What a tile function takes from around it, which its source alone does not tell: the plain values of the globals and of the
    enclosing functions that it, and the functions it calls, read. None where it captures something else.
    """
    found: list[Any] = []
    seen: set[int] = set()

    def visit(each: FunctionType) -> bool:
        if id(each) in seen:
            return True
        seen.add(id(each))
        code = each.__code__
        found.append([each.__qualname__, code.co_firstlineno])
        for name, value in closed_over(each).items():
            inner = inspect.unwrap(value) if callable(value) else value
            if type(inner).__name__ in PLAIN:
                found.append([name, repr(inner)])
            elif not (isinstance(inner, FunctionType) and visit(inner)):
                return False
        for name in names_in(code):
            value = each.__globals__.get(name)
            inner = inspect.unwrap(value) if isinstance(value, FunctionType) else value
            if type(inner).__name__ in PLAIN[:-1] and name in each.__globals__:
                found.append([name, repr(inner)])
            elif isinstance(inner, FunctionType) and not visit(inner):
                return False
        return True

    return found if visit(function) else None
