"""Which compiler is installed, and whether it can build for an arch."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import CompilerError
from tiledsched.core.extras import package_version
from tiledsched.core.schedule import Schedule

PARTS = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
RELEASES = ("13.4", "13.5")
"""Releases of the compiler that this package is tried with, the oldest first."""
INSTALL = "pip install " + " ".join(f"'{part}==13.4.*'" for part in PARTS)
OLDEST = {"sm_90": (13, 4), "sm_110": (13, 4)}
"""First compiler release that targets an arch, where it is later than 13.2."""
OLDEST_ANY = (13, 2)


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Versions of everything that decides what machine code comes out."""

    cuda_tile: str
    """The Python package cuda-tile."""
    tileiras: str
    """The Tile IR compiler."""
    ptxas: str
    """The assembler it calls; empty where it is not found."""
    nvvm: str
    """The NVVM library it loads; empty where its version is not known."""

    @property
    def compiler(self) -> str:
        """One line: `cuda-tile 1.7.0, tileiras 13.4.92`."""
        return f"cuda-tile {self.cuda_tile}, tileiras {self.tileiras}"

    @property
    def id(self) -> str:
        """Stable id; builds of different toolchains never mix."""
        return stable_id(asdict(self))


def wheel_folder() -> Path | None:
    """The folder of the compiler installed from wheels, or None."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        spec = None
    for root in (spec.submodule_search_locations or []) if spec else []:
        if package_version("nvidia-cuda-tileiras") and (Path(root) / "bin" / "tileiras").is_file():
            return Path(root) / "bin"
    return None


def compiler_folder() -> Path | None:
    """The folder of the compiler cuTile will use: from wheels, else on PATH; None where there is none."""
    found = shutil.which("tileiras")
    return wheel_folder() or (Path(found).parent if found else None)


@functools.cache
def tool_version(path: Path, pattern: str = r"V(\d+\.\d+\.\d+)") -> str:
    """`13.4.92` from a CUDA tool's --version, by a pattern; empty where it does not run."""
    try:
        text = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(pattern, text)
    return found.group(1) if found else ""


def compiler_at_hand() -> str:
    """Version of the compiler on this machine, e.g. 13.4.92, found as quickly as possible; empty where there is none."""
    if wheel_folder():
        return package_version("nvidia-cuda-tileiras")
    folder = compiler_folder()
    return tool_version(folder / "tileiras") if folder else ""


def installed_toolchain() -> Toolchain:
    """The toolchain on this machine.

    Raises:
        CompilerError: cuda-tile or tileiras is missing, or the compiler's parts are of different releases.
    """
    return _installed_toolchain(os.environ.get("PATH", ""))


@functools.cache
def _installed_toolchain(_path: str) -> Toolchain:
    cuda_tile = package_version("cuda-tile")
    if not cuda_tile:
        raise CompilerError("cuda-tile is not installed; run: pip install cuda-tile")
    folder = compiler_folder()
    if folder is None:
        raise CompilerError(f"the cuTile compiler (tileiras) is not installed; run: {INSTALL}")
    toolchain = Toolchain(
        cuda_tile=cuda_tile,
        tileiras=tool_version(folder / "tileiras"),
        ptxas=tool_version(folder / "ptxas"),
        nvvm=package_version("nvidia-nvvm") if folder == wheel_folder() else "",
    )
    if not toolchain.tileiras:
        raise CompilerError(f"{folder / 'tileiras'} does not run; reinstall it: {INSTALL}")
    releases = {release(version) for version in (toolchain.tileiras, toolchain.ptxas, toolchain.nvvm) if version}
    if len(releases) > 1:
        raise CompilerError(
            f"compiler parts of different releases: tileiras {toolchain.tileiras}, ptxas "
            f"{toolchain.ptxas}, nvvm {toolchain.nvvm}; install one release: {INSTALL}"
        )
    return toolchain


ANY_WORKER_WARPS = (13, 5)
"""First compiler release that takes values of `num_worker_warps` other than 4 and 8."""


def takes_hints(compiler: str, schedule: Schedule) -> bool:
    """Whether a compiler takes the hints of a schedule; where there is none, bundles may."""
    usual = schedule.get("num_worker_warps", 0) in (0, 4, 8)
    return usual or not compiler or release(compiler) >= ANY_WORKER_WARPS


def release(version: str) -> tuple[int, int]:
    """(13, 4) from 13.4.92."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_arch(toolchain: Toolchain, arch: str) -> None:
    """Raise CompilerError where the toolchain is too old for `arch`."""
    oldest = OLDEST.get(arch, OLDEST_ANY)
    if release(toolchain.tileiras) < oldest:
        raise CompilerError(
            f"tileiras {toolchain.tileiras} is too old for {arch}, which needs {oldest[0]}.{oldest[1]}; run: {INSTALL}"
        )
