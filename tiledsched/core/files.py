"""Files that appear whole or not at all, and are read up to a size; folders for what is gone with the process that made them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import lzma
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

FORGOTTEN_S = 60.0
"""Age of a half-written file whose writer does not run: where a folder is shared, the writer may run on another machine."""
PREFIX, LOCK = "tiledsched-", "lock"
MOST_BYTES = 1 << 29
"""Of a file of data: the largest table that ships has a hundredth of it."""
SMALL_FILE_BYTES = 1 << 18
"""More than a program and its machine code: a disk that has less left is full to a compiler."""
MOST_TYPED = 1 << 22
"""Of a file that people write: settings, a search space, a list of candidates."""


NO_HOME = Path("/nonexistent")
"""The home of who has none, by convention: nothing is found there, and what cannot be written there is told with its remedy."""


def user_folder(kind: str) -> Path:
    """This user's folder for `config`, `cache` or `data`. In a pod a user may have no home, and be in no list of users."""
    import platformdirs

    try:
        return Path(getattr(platformdirs, f"user_{kind}_dir")("tiledsched"))
    except RuntimeError:
        return NO_HOME / kind / "tiledsched"


class TooLargeError(OSError):
    """A file larger than any of its kind."""

    def __init__(self, most: int) -> None:
        super().__init__(f"larger than {most >> 20} MiB, which no such file is")
        self.strerror = str(self.args[0])


def read_bounded(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """What is in a file.

    Raises:
        OSError: it cannot be read, or has more than `most` bytes.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise TooLargeError(most)
    return data


def unpacked(data: bytes, most: int = MOST_BYTES) -> bytes:
    """What was compressed with xz.

    Raises:
        OSError: it has more than `most` bytes.
        lzma.LZMAError, EOFError: it is damaged, or ends early.
    """
    unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=1 << 28)
    found = unpacker.decompress(data, max_length=most + 1)
    if len(found) > most:
        raise TooLargeError(most)
    if not unpacker.eof:
        raise EOFError("it ends early")
    return found


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write beside the file, then rename: whoever reads sees the old contents or the new. Text becomes UTF-8.

    Raises:
        OSError: it cannot be written; what was there is still there, and nothing lies beside it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # a pipe or a terminal, whose place nothing can take; of a folder this raises
        return
    partial = beside(target)
    try:
        partial.write_bytes(data)
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def beside(target: Path) -> Path:
    """A name for what becomes `target` once it is whole. What killed processes left under such names is removed by the way."""
    for left in target.parent.glob(".tiledsched-*.part*"):
        with contextlib.suppress(OSError, ValueError):
            if time.time() - left.stat().st_mtime > FORGOTTEN_S and not _runs(int(left.name.split("-")[1])):
                left.unlink()
    return target.with_name(f".tiledsched-{os.getpid()}-{secrets.token_hex(4)}.part")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that a disk or a quota was full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_room(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder takes one more small file. For who met an error that may or may not come of a full disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(SMALL_FILE_BYTES))
    except OSError as error:
        return not is_full(error)
    return True


class OwnFolder:
    """A temporary folder of this process. Those that killed processes of this user left behind are removed by the way."""

    def __init__(self) -> None:
        _sweep()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # let go by the system when this process ends, however it does

    def close(self) -> None:
        """Remove it. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep() -> None:
    """Remove the folders whose process is gone: nobody holds their lock. One without a lock is being made, or not ours."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
