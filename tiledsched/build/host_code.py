"""The code that a cubin holds for the host's processor, and the architecture that it is for.

tileiras puts a small object file into every cubin (section `.nv.host`). At a launch the driver runs it: it reads the arguments
and writes the TMA descriptors behind them, with constant sizes of the arrays. Its architecture is what `--host-arch` names; the
code for the GPU is the same for all.

What host code writes is compared in one form: its code for x86_64, which every tileiras makes of the same program, whatever
machine it runs on. Machine code for other hosts carries that form along (docs/decisions.md).
"""

from __future__ import annotations

import platform
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tiledsched.build.elf import sections
from tiledsched.build.sealed import read_sealed, write_sealed
from tiledsched.build.toolchain import tool_version
from tiledsched.core.errors import CompilerError

REFERENCE = "x86_64"
"""The architecture whose host code stands for what the host code of a program writes, on every host."""
ELF_MACHINES = {62: REFERENCE, 183: "aarch64"}
"""By the number in an ELF file's header, the architectures of hosts that tileiras makes code for."""
SECTION = 0x70000087
"""The ELF type of the section `.nv.host`."""
CARRIED = b"TILEHOST"
"""Begins the file of a program for other hosts: the size of the reference's host code, that code, and the cubin follow."""


def host_arch() -> str:
    """The architecture of this machine's processor, by the name that tileiras has for it."""
    machine = platform.machine()
    return {"AMD64": REFERENCE, "arm64": "aarch64"}.get(machine, machine)


def host_folder(folder: Path, host: str) -> Path:
    """Where a folder that several hosts may share keeps what is for hosts of one architecture."""
    return folder if host == REFERENCE else folder / host


def host_section(cubin: bytes) -> bytes:
    """The object file for the host in a cubin; empty where it has none and runs on any host.

    Raises:
        CompilerError: the bytes are as many as a cubin has at least, and no whole cubin.
    """
    return next((each.data for each in sections(cubin) if each.kind == SECTION), b"") if len(cubin) >= 64 else b""


def host_of(cubin: bytes) -> str:
    """The architecture of the hosts that a whole cubin runs on; empty where it runs on any."""
    section = host_section(cubin)
    number = int.from_bytes(section[18:20], "little")
    return ELF_MACHINES.get(number, f"of ELF machine {number}") if section else ""


def check_host(cubin: bytes) -> None:
    """Refuse a cubin whose host code this machine's processor cannot run.

    Raises:
        CompilerError: it is for hosts of another architecture.
    """
    host, here = host_of(cubin), host_arch()
    if host not in ("", here):
        raise CompilerError(
            f"this program is for {host} hosts and this host is {here}: a cache that both use holds it; name a folder of this "
            "host's own with TILEDSCHED_CACHE and CUDA_TILE_CACHE_DIR"
        )


def carrying(cubin: bytes, reference: bytes) -> bytes:
    """A file of a cubin and the reference's host code; of the cubin alone where that is empty."""
    return CARRIED + struct.pack("<Q", len(reference)) + reference + cubin if reference else cubin


def carried(data: bytes) -> tuple[bytes, bytes]:
    """(cubin, the reference's host code) of a file that :func:`carrying` made."""
    if not data.startswith(CARRIED) or len(data) < 16:
        return data, b""
    (size,) = struct.unpack_from("<Q", data, 8)
    return data[16 + size :], data[16 : 16 + size]


@cache
def takes_host(tileiras: str, host: str) -> bool:
    """Whether a compiler can be told to make host code of an architecture. All from 13.1 to 13.5 can."""
    command = [tileiras, f"--host-arch={host}", "--version"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    return False


@contextmanager
def for_host(host: str, known: Path | None = None) -> Iterator[list[bytes]]:
    """Have cuTile, which does not name the host to tileiras, compile for hosts of an architecture in the block.

    Yields a list to which each compile adds the reference's object file of its host code, where it made other host code.
    cuTile's names are not public; tests pin them.

    Args:
        host: the architecture.
        known: the folder that keeps the reference's host code by other hosts'; without it the reference is not asked for.

    Raises:
        CompilerError: the compiler makes no host code for other machines than this one.
    """
    from cuda.tile import _compile
    from cuda.tile._cext import default_tile_context

    references: list[bytes] = []
    with _compile._compiler_lock:  # so that no other thread compiles meanwhile
        binary, config = _compile._find_compiler_bin(), default_tile_context.config
        plain, cache_dir = binary.run, config.cache_dir
        if not takes_host(binary.path, host):
            if host != host_arch():
                raise CompilerError(
                    f"{binary.path} makes no code for {host} hosts; install a tileiras of 13.4 or newer"
                )
            yield references
            return

        def run(args: list[str], flags: list[str], timeout_sec: float | None = None) -> None:
            plain(args, [*flags, f"--host-arch={host}"], timeout_sec)
            made = Path(args[-1]).read_bytes()
            if known is not None and host_of(made) not in ("", REFERENCE):
                version = tool_version(Path(binary.path))
                file = known / sha256(version.encode() + host_section(made)).hexdigest()[:40]
                references.append(_reference(file, plain, args, flags, timeout_sec))

        binary.run = run
        config.cache_dir = None  # cuTile's cache does not tell hosts apart
        try:
            yield references
        finally:
            del binary.run
            config.cache_dir = cache_dir


def _reference(file: Path, run: Any, args: Sequence[str], flags: Sequence[str], timeout_s: float | None) -> bytes:
    """The reference's host code of a program: from a file where a program with the same host code had it, else compiled. Most
    programs of a search differ only in their device code.
    """
    kept = read_sealed(file, dict[str, Any])
    if kept is not None:
        return kept[1]
    out = f"{args[-1]}.{REFERENCE}"
    run([args[0], "-o", out], [*flags, f"--host-arch={REFERENCE}"], timeout_s)
    made = host_section(Path(out).read_bytes())
    write_sealed(file, {}, made)
    return made
