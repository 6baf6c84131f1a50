"""Runs Nsight Compute; its errors say what to do where it is missing or may not read the GPU's counters."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from tiledsched.build.toolchain import compiler_at_hand, tool_version
from tiledsched.core.errors import ConfigError, MeasureError
from tiledsched.core.files import OwnFolder
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.processes import child_environment, python_command
from tiledsched.ops.bench import choose_methods, methods_of
from tiledsched.rivals.methods import OURS, SERVED
from tiledsched.studies.profile.launch import FAILED
from tiledsched.studies.profile.metrics import MethodProfile, ncu_metrics, read_raw

PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu", "/usr/local/cuda*/nsight-compute*/ncu")
TIMEOUT_S = 600
FIRST_RIVAL = "torch_auto"
"""The rival that is profiled where a kernel has it: torch's own choice among its backends."""
MISSING = (
    "Nsight Compute (ncu) is neither on PATH nor in its usual folders; install it from "
    "https://developer.nvidia.com/nsight-compute, or name it with --ncu FILE"
)
FORBIDDEN = (
    "this user may not read the GPU's counters; run as root, or let an administrator load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM); a container also needs "
    "--cap-add=SYS_ADMIN"
)


def find_ncu(named: str | None = None, places: Sequence[str] = PLACES) -> str:
    """The path of Nsight Compute's command line.

    Raises:
        ConfigError: it is not there.
    """
    return find_program("ncu", named, places, MISSING)


def find_program(program: str, named: str | None, places: Sequence[str], missing: str) -> str:
    """The path of a program: of the one that is named, or else on PATH or in its usual places, as patterns.

    Raises:
        ConfigError: it is not there; `missing` says how to get it.
    """
    usual = () if named else places
    paths = [path for pattern in usual for path in sorted(glob.glob(pattern), reverse=True)]
    found = shutil.which(named or program) or next((path for path in paths if os.access(path, os.X_OK)), None)
    if found is None:
        raise ConfigError(f"there is no program {named}; {missing}" if named else missing)
    return found


def versions(ncu: str, driver: str) -> str:
    """Versions of the profiler, driver and compiler, and the date, in one line."""
    known = (
        ("driver", driver),
        ("tileiras", compiler_at_hand()),
        ("Nsight Compute", tool_version(Path(ncu), r"Version ([\d.]+)")),
    )
    return ", ".join([*(f"{name} {version}" for name, version in known if version), date.today().isoformat()])


def profiled_methods(kernel: KernelClass, problem: Problem, named: Sequence[str] | None) -> list[str]:
    """The methods that are named, or else the kernel and its first rival.

    Raises:
        ConfigError: a name that no method of this problem has.
    """
    if named:
        return [method.name for method in choose_methods(kernel, named, [problem])]
    rivals = [name for name in methods_of(kernel, [problem]) if name not in (OURS, SERVED, "untuned", "matmul")]
    return [OURS, *([FIRST_RIVAL] if FIRST_RIVAL in rivals else rivals[:1])]


def profile(
    kernel: KernelClass,
    problem: Problem,
    methods: Sequence[str],
    *,
    ncu: str,
    progress: Callable[[str], None] = lambda text: None,
) -> list[MethodProfile]:
    """Profile one call of each method, each in a process of its own. A method that does not run has a status instead of
    figures.

    Raises:
        ConfigError: the counters may not be read.
        MeasureError: the profiler failed in another way.
    """
    return [_profiled(kernel, problem, method, ncu, progress) for method in methods]


def _profiled(
    kernel: KernelClass, problem: Problem, method: str, ncu: str, progress: Callable[[str], None]
) -> MethodProfile:
    progress(f"{problem}: {method}")
    with OwnFolder() as folder:
        log = Path(folder) / "raw.csv"
        counted = [
            ncu,
            "--target-processes",
            "application-only",
            "--profile-from-start",
            "off",
            "--clock-control",
            "none",
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
            "--metrics",
            ncu_metrics(),
            "--log-file",
            str(log),
        ]
        launched = [kernel.locator(), json.dumps(problem.to_json()), method]
        command = [*counted, *python_command("tiledsched.studies.profile.launch"), *launched]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=child_environment())
        except subprocess.TimeoutExpired:
            raise MeasureError(f"{method} was not profiled within {TIMEOUT_S} s; leave it out with --methods") from None
        except OSError as error:
            raise ConfigError(f"{ncu} cannot be run ({error.strerror}); {MISSING}") from error
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if "ERR_NVGPUCTRPERM" in text + done.stdout + done.stderr:
        raise ConfigError(FORBIDDEN)
    if done.returncode == FAILED:
        return MethodProfile(method=method, status=said[-1] if said else "it does not run")
    try:
        return MethodProfile(method=method, kernels=tuple(read_raw(text)))
    except MeasureError as error:
        last = (said or [line for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1]
        raise MeasureError(f"{method}: {error} (exit code {done.returncode}: {last[:200]})") from None
