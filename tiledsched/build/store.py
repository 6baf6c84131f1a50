"""Everything that was compiled on this machine, in one folder of sealed files, where every later process finds it.

A file lies in a folder for the hosts and the arch that it is for. Its name is a key of hexadecimal digits over all that the
contents depend on, so that it never has to be replaced. A damaged file is removed and never run.

|the file holds|its key|
|---|---|
|the machine code of a schedule, packed ("artifact")|its fingerprint|
|the machine code of one launch, or why the compiler makes none|a hash of what it is compiled from|
|what became of a build that a fleet shares|a hash of kernel, source, toolchain, schedule and class of problems|
"""

from __future__ import annotations

import errno
import fcntl
import lzma
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tiledsched.build.cubin import Artifact, read_artifact
from tiledsched.build.host_code import carried, check_host, host_arch, host_folder
from tiledsched.build.sealed import discard, is_usable, read_sealed, write_sealed
from tiledsched.core.errors import CompilerError, ConfigError, DatabaseError
from tiledsched.core.files import make_private, others_may_change, unpacked, user_folder

CACHE_VARIABLE = "TILEDSCHED_CACHE"


def default_cache_folder(chosen: str | None = None) -> Path:
    """The folder that the setting `cache` chose; else `$TILEDSCHED_CACHE`, or the user's cache directory."""
    return Path(chosen or os.environ.get(CACHE_VARIABLE) or user_folder("cache"))


class StoredProgram(msgspec.Struct, kw_only=True, frozen=True):
    """The machine code of one launch, or why the compiler makes none."""

    cubin: bytes = b""
    """The machine code, as an artifact keeps it; empty where the compiler refused."""
    symbol: str = ""
    """The name of its function."""
    error: str = ""
    """What the compiler said where it refused. It says so each time, which makes it worth keeping."""


class ProgramStore:
    """A folder of machine code. Safe for several processes: files appear whole or not at all, and never change.

    Args:
        cache: the cache folder; the user's unless given. Hosts of several architectures may share it.
        host: the architecture of the hosts that its machine code is for; this one's unless given.
    """

    def __init__(self, cache: Path | None = None, host: str | None = None) -> None:
        self.host_arch, self._cache = host or host_arch(), cache or default_cache_folder()
        self.folder = host_folder(self._cache / "programs", self.host_arch)

    def for_host(self, host: str) -> ProgramStore:
        """The store of machine code for hosts of another architecture in the same cache folder."""
        return ProgramStore(self._cache, host)

    def path(self, arch: str, key: str) -> Path:
        """The file of a key, which need not be there.

        Raises:
            DatabaseError: arch or key is none: made of another's data, it could point outside the folder.
        """
        if not (re.fullmatch(r"sm_\w+", arch, re.ASCII) and re.fullmatch(r"[0-9a-f]+", key)):
            raise DatabaseError(
                f"{arch!r} and {key!r} name no machine code: an arch is sm_ and a number, a "
                "fingerprint hex digits; import the table or database they come from again"
            )
        return self.folder / arch / key[:2] / key

    def ready(self) -> None:
        """Make the folder, so that an unusable folder is found before anything is built.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        try:
            make_private(self.folder)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            why = others_may_change(self.folder)
        except OSError as error:
            raise self._unusable(error) from error
        if why:
            raise ConfigError(
                f"cannot keep machine code in {self.folder}, because {why}, and it would run as it is; take that right away "
                f"(chmod go-w, chown), or name another folder with {CACHE_VARIABLE}"
            )

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot keep machine code in {self.folder}: {error.strerror}; free some space there, or name another "
            f"folder with {CACHE_VARIABLE}"
        )

    def put(self, artifact: Artifact) -> None:
        """Keep the machine code of a schedule. Keeping it twice changes nothing.

        Raises:
            ConfigError: the folder cannot be written to, or is full.
        """
        path = self.path(artifact.arch, artifact.fingerprint)
        error = None if is_usable(path) else write_sealed(path, {}, lzma.compress(artifact.cubin, preset=6))
        if error:
            raise self._unusable(error) from error

    def has(self, arch: str, fingerprint: str) -> bool:
        """Whether the machine code of a schedule is here."""
        return is_usable(self.path(arch, fingerprint))

    def get(self, arch: str, fingerprint: str) -> Artifact | None:
        """The machine code of a schedule; None where it is not here. A file that is damaged or for other hosts is removed."""
        path = self.path(arch, fingerprint)
        found = read_sealed(path, dict[str, Any])
        if found is None:
            return None
        try:
            return checked_artifact(bytes(unpacked(found[1])), arch, fingerprint, self.host_arch)
        except (OSError, lzma.LZMAError, CompilerError, EOFError) as error:
            discard(path, str(error))
            return None


def checked_artifact(data: bytes, arch: str, fingerprint: str, host: str) -> Artifact:
    """The artifact in a file, which must be the machine code of a fingerprint for hosts of an architecture.

    Raises:
        CompilerError: it is other machine code, or none.
    """
    artifact = read_artifact(data, arch)
    if artifact.fingerprint != fingerprint:
        raise CompilerError(f"it is machine code {artifact.fingerprint}")
    if artifact.host_arch not in ("", host):
        raise CompilerError(f"it is for {artifact.host_arch} hosts")
    return artifact


def read_program(path: Path) -> StoredProgram | None:
    """The program of a launch in a file; None where there is none. A file that is damaged or for other hosts is removed."""
    found = read_sealed(path, StoredProgram)
    if found is None:
        return None
    program, cubin = found
    try:
        check_host(carried(cubin)[0])
    except CompilerError as error:
        discard(path, str(error))
        return None
    return msgspec.structs.replace(program, cubin=cubin)


def write_program(path: Path, program: StoredProgram) -> None:
    """Keep the program of a launch. Where the folder cannot be written to, it is compiled again."""
    write_sealed(path, {"symbol": program.symbol, "error": program.error}, program.cubin)


class Claims:
    """The files of stores that this process makes now, and no other process meanwhile.

    Each is a lock on one byte of a file in a folder, which the system gives up when this process ends, however it ends. Where the
    folder cannot be locked, every process makes what it needs. A folder may have one of these in a process at a time: the system
    gives up all locks of a process on a file when the process closes it.

    Args:
        folder: holds the file that is locked, on a file system that all processes share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock_file = folder, -1
        self.paths: set[Path] = set()
        """The files that are claimed."""

    def claim(self, path: Path, *, wait: bool = False) -> bool:
        """Claim a file. False where another process has it, unless the call is to `wait` for that process."""
        with suppress(OSError):
            if self._lock_file < 0:
                make_private(self._folder)
                self._lock_file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(path, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return False
        self.paths.add(path)
        return True

    def release(self, path: Path) -> None:
        """Let others claim a file."""
        self.paths.discard(path)
        with suppress(OSError):
            self._lock(path, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let others claim all files. More may be claimed afterwards."""
        self.paths.clear()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _lock(self, path: Path, how: int) -> None:
        fcntl.lockf(self._lock_file, how, 1, int(path.name[:7], 16), os.SEEK_SET)
