"""One GPU, one measurer: a lock by the GPU's UUID, held by the process that measures, from its first launch to its last.

The lock is the operating system's (`flock`), on a file that every user of the machine can open. It ends with whoever holds
it, however that ends: workers started under it inherit it, so that no GPU is free while one whose parent was killed still
uses it. What the file says is for people who wait; anybody can write to it, and nothing is decided by it.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tiledsched.core.config import load_settings, log
from tiledsched.core.errors import MeasureError
from tiledsched.core.files import user_folder
from tiledsched.measure.nvml import current_gpu

FOLDER = Path("/tmp")
"""Where everybody can make files. Not TMPDIR, which differs between users: they would not see each other's locks."""
POLL_S = 0.5
LONGEST = 160
"""Characters that are shown of a holder."""
_held: dict[str, GpuLock] = {}
_changing = threading.Lock()


@dataclass(eq=False)
class GpuLock:
    """A GPU held by this process. Whoever holds it again, in the same process, shares it."""

    uuid: str
    """UUID of the GPU."""
    descriptor: int
    """Descriptor of the lock file; a child that inherits it holds the GPU, too."""
    holders: int = 1
    """How many have not released it yet."""

    def release(self) -> None:
        """Give it back, once for each time it was taken."""
        with _changing:
            self.holders -= 1
            if not self.holders:
                del _held[self.uuid]
                with suppress(OSError):
                    os.ftruncate(self.descriptor, 0)
                os.close(self.descriptor)


def hold(uuid: str, name: str) -> GpuLock | None:
    """Hold a GPU; wait for who holds it, for as long as the setting `gpu_wait` says, and say so once.

    Args:
        uuid: of the GPU; empty where it is not known, and then nothing is held.
        name: for people.

    Returns:
        The lock; None where nothing can be locked.

    Raises:
        MeasureError: another process held it to the end of that time.
    """
    if not uuid:
        return None
    wait_s, began, warned = load_settings().gpu_wait, time.monotonic(), False
    while True:
        with _changing:
            if uuid in _held:
                _held[uuid].holders += 1
                return _held[uuid]
            descriptor = _open_file(uuid, quiet=warned)
            if descriptor is None:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                by = _read_holder(descriptor)
                os.close(descriptor)
            else:
                _write_holder(descriptor)
                return _held.setdefault(uuid, GpuLock(uuid, descriptor))
        if wait_s is not None and time.monotonic() - began >= wait_s:
            raise MeasureError(
                f"GPU {name} ({uuid}) is held by {by}, and one process at a time measures on a GPU; run again "
                "when it has ended, or wait for it: TILEDSCHED_GPU_WAIT says for how many seconds"
            )
        if not warned:
            log.warning("waiting for GPU %s (%s): held by %s", name, uuid, by)
            warned = True
        time.sleep(POLL_S if wait_s is None else min(POLL_S, wait_s))


@contextmanager
def holding_current_gpu() -> Iterator[None]:
    """Hold the current CUDA device of this process, of one that measures without a worker; see `hold`."""
    lock = hold(*current_gpu())
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _open_file(uuid: str, *, quiet: bool) -> int | None:
    """The lock's file: the one for all users, else one of this user's own; None where there is neither."""
    name = f"tiledsched-{re.sub(r'[^A-Za-z0-9-]', '-', uuid)}.lock"
    own = user_folder("cache")
    for folder, left in ((FOLDER, "other users are not waited for"), (own, "nobody is waited for")):
        try:
            if folder is own:
                own.mkdir(parents=True, exist_ok=True)
            return _open_plain(folder / name)
        except OSError as error:
            if not quiet:
                log.warning("%s cannot be a lock (%s): %s", folder / name, error.strerror, left)
    return None


def _open_plain(path: Path) -> int:
    """Open a file to lock; it is made where there is none.

    Raises:
        OSError: it is no plain file (a link, say, that somebody put there), or cannot be opened.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:  # Linux refuses O_CREAT of what is there and another's, in a folder that all may write to (fs.protected_regular)
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)  # whatever the umask is
        except FileExistsError:
            descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file")
    return descriptor


def _write_holder(descriptor: int) -> None:
    program = Path(sys.argv[0] or "python")
    words = [program.parent.name if program.name == "__main__.py" else program.name]
    if words == ["tiledsched"]:
        words += sys.argv[1:2]  # of others' arguments nothing is told to everybody
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = f"user {os.getuid()}"
    text = f"pid {os.getpid()} ({user}, {' '.join(words)}) since {time.strftime('%H:%M')}\n"
    with suppress(OSError):  # a full disk is no reason not to measure
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _read_holder(descriptor: int) -> str:
    """What the file says of its holder, in whatever words somebody wrote there, fit to be printed."""
    with suppress(OSError):
        text = os.pread(descriptor, 4 * LONGEST, 0).decode(errors="replace")
        said = "".join(each for each in text if each.isprintable())[:LONGEST].strip()
        if said:
            return said
    return "a process that does not say who it is"
