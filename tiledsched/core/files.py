"""Files that are read up to a size and written whole or not at all, and temporary folders that go with their process."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import io
import lzma
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tiledsched.core.errors import FileFormatError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORGOTTEN_S = 60.0
"""Seconds after which a half-written file is removed if its writer does not run here. In a shared folder, the writer may run on
another machine.
"""
PREFIX, LOCK = "tiledsched-", "lock"
MARK = f"a temporary folder of tiledsched on {socket.gethostname()}".encode()
"""What the lock file of a temporary folder holds. Where another host made the folder, its lock may not be seen from here."""
MOST_BYTES = 1 << 29
"""Most bytes of a data file that is read. The largest table that ships has a hundredth of it."""
PART_BYTES = 1 << 20
"""Bytes that are unpacked at once."""
SMALL_FILE_BYTES = 1 << 18
"""Bytes that a compiler needs at least for a program and its machine code."""
MOST_TYPED = 1 << 22
"""Most bytes of a file that people write by hand: settings, a search space, a list of candidates."""

XZ = b"\xfd7zXZ\0"
COMPRESSED = {
    b"\x1f\x8b": "gunzip -k",
    b"BZh": "bunzip2 -k",
    XZ: "unxz -k",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
    b"PK\3\4": "unzip",
    b"7z\xbc\xaf": "7z x",
}
"""How compressed files begin -> the command that unpacks such a file."""

_PART = re.compile(r"\.tiledsched-(\d{1,9})-[0-9a-f]{8}\.part(-\w+)?")
"""Names of files that become others once they are whole, with the id of their process, and of the journals of such a database."""
_ODD = re.compile(r"[^\n\t -~]")
_FORMULA = re.compile(r"'*[=+@\t-].", re.DOTALL)
"""How a cell begins that a spreadsheet computes, or one that was kept from it."""

NO_HOME = Path("/nonexistent")
"""Stands for the home folder of a user who has none. Nothing is found there, and nothing can be written there."""


def user_folder(kind: str) -> Path:
    """This user's folder for `config`, `cache` or `data`. In a pod, a user may have no home folder."""
    import platformdirs

    try:
        return Path(getattr(platformdirs, f"user_{kind}_dir")("tiledsched"))
    except RuntimeError:
        return NO_HOME / kind / "tiledsched"


def kind_of_file(path: str | os.PathLike[str]) -> str:
    """`file`, `folder` or `other` (a pipe, a device); empty where there is nothing.

    Raises:
        OSError: the system does not tell, as of a folder that this user may not read or a name that no file can have.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except ValueError as error:  # NUL, or half a character
        raise OSError(errno.EINVAL, "no file can have this name") from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def real_path(path: str | os.PathLike[str]) -> str:
    """The whole path without links. Of links that lead in a circle, and of a name that no file can have, it is a path of nothing;
    `Path.resolve` raises of the first a RuntimeError before Python 3.13, and of the second a ValueError.
    """
    try:
        return os.path.realpath(path)
    except ValueError:  # NUL, or half a character
        return os.fspath(path)


class TooLargeError(OSError):
    """A file is larger than a file of its kind may be."""

    def __init__(self, most: int) -> None:
        super().__init__(f"larger than {most >> 20} MiB, which no such file is")
        self.strerror = str(self.args[0])


def read_bounded(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The contents of a file. A pipe that nobody writes to is empty: opening one as usual waits for a writer, perhaps for ever.

    Raises:
        OSError: the file cannot be read, has more than `most` bytes, or a name that no file can have.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            # In parts, because a read sets aside all that it might bring; the first has all of most files.
            parts = [file.read(min(os.fstat(file.fileno()).st_size, most) + 1)]
            while sum(map(len, parts)) <= most and (part := file.read(1 << 20)):
                parts.append(part)
    except ValueError as error:  # NUL, or half a character
        raise OSError(errno.EINVAL, "no file can have this name") from error
    if sum(map(len, parts)) > most:
        raise TooLargeError(most)
    return b"".join(parts)


def check_plain(path: str | os.PathLike[str], data: bytes) -> bytes:
    """What was read from a file that must not be compressed.

    Raises:
        FileFormatError: it is.
    """
    unpack = next((command for magic, command in COMPRESSED.items() if data.startswith(magic)), "")
    if unpack:
        raise FileFormatError(f"{os.fspath(path)} is compressed; unpack it first: {unpack} {os.fspath(path)}")
    return data


def plain_text(path: str | os.PathLike[str], data: bytes) -> str:
    """The text that was read from a file in UTF-8, without the mark of byte order that it may begin with.

    Raises:
        FileFormatError: the file is compressed, or in another encoding.
    """
    try:
        return check_plain(path, data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FileFormatError(
            f"{os.fspath(path)} is not text in UTF-8 (line {line}); save it in that encoding"
        ) from error


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a TOML file that people write by hand.

    Raises:
        OSError: the file cannot be read, or is larger than any such file.
        ValueError: the file is not valid TOML, compressed, or not in UTF-8. The message says where.
    """
    try:
        return dict(_parsed_toml(plain_text(path, read_bounded(path, MOST_TYPED))))
    except (RecursionError, FileFormatError) as error:
        raise ValueError(str(error)) from error


@lru_cache(maxsize=32)
def _parsed_toml(text: str) -> dict[str, Any]:
    """What a text says, which nobody changes: search spaces are read again for each table that is served from."""
    return tomllib.loads(text)


def unpacked(data: bytes, most: int = MOST_BYTES) -> bytearray:
    """The data that was compressed with xz.

    Raises:
        OSError: the data has more than `most` bytes.
        lzma.LZMAError, EOFError: the compressed data is damaged, or ends early.
    """
    unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=1 << 28)
    whole = bytearray()  # which grows in place, where a list of parts takes twice the memory when it is joined
    while True:
        whole += unpacker.decompress(data, max_length=PART_BYTES)
        if len(whole) > most:
            raise TooLargeError(most)
        data = b""
        if unpacker.eof:
            return whole
        if unpacker.needs_input:
            raise EOFError("it ends early")


def printable(text: str) -> str:
    """Text in which what a terminal or a page would obey is spelt out, as in `\\x1b`: control characters, marks that turn the
    direction of text, and halves of characters. Line breaks and tabs stay.
    """
    return _ODD.sub(lambda found: _spelt(found[0]), text)


def _spelt(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def csv_cell(value: Any) -> Any:
    """A value as a cell of a CSV file. Text that a spreadsheet would compute gets a `'` in front; see :func:`from_csv_cell`."""
    if not isinstance(value, str) or value.isalnum():
        return value
    text = printable(value)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def from_csv_cell(cell: str) -> str:
    """The text of a cell that :func:`csv_cell` wrote."""
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell[1:]) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def csv_text(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None, *, missing: str = "", head: bool = True
) -> str:
    """Rows as the text of a CSV file; see :func:`csv_cell` for its cells.

    Args:
        rows: the value of each column; a column that a row lacks, or has None in, is written as `missing`.
        columns: the columns in order; None for those of the rows, in the order in which they first occur.
        missing: what stands in a cell without a value.
        head: whether the first line names the columns.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row)) if columns is None else columns
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval=missing, lineterminator="\n")
    if head:
        writer.writer.writerow(map(csv_cell, names))
    writer.writerows(
        {name: missing if value is None else csv_cell(value) for name, value in row.items()} for row in rows
    )
    return text.getvalue()


def others_may_change(path: str | os.PathLike[str], *, any_owner: bool = False) -> str:
    """By whom, other than this user and root, a file may have been written, or another one been put in its place, in words; empty
    where by nobody. All folders above it count, as for the keys of ssh; of those like /tmp, in which nobody renames what belongs
    to others, only the owner does.

    Args:
        path: the file, or a folder.
        any_owner: whether its owner, and those of the folders, are trusted, whoever they are.

    Raises:
        OSError: there is no such file.
    """
    place = Path(os.path.realpath(path))
    for each in (place, *place.parents):
        status = os.stat(each)
        if not any_owner and status.st_uid not in (os.geteuid(), 0):
            return f"{each} belongs to another user ({status.st_uid})"
        if status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            return f"others may write {each} (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def make_private(folder: Path) -> None:
    """Make a folder and those above it, where they are missing, so that only this user may write in them.

    Raises:
        OSError: it cannot be made.
    """
    for each in reversed([folder, *(above for above in folder.parents if not above.exists())]):
        each.mkdir(0o755, exist_ok=True)


def write_whole(path: str | os.PathLike[str], content: bytes | str, *, private: bool = False) -> None:
    """Write a temporary file and rename it, so that readers see the old contents or the new. Text is written as UTF-8. A file
    that there was keeps its mode, unless it is `private`, which only this user may write.

    Raises:
        OSError: the file cannot be written. The old contents are still there, and no temporary file is left.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a link stays a link
    if os.path.exists(target) and not os.path.isfile(target):
        target.write_bytes(data)  # a pipe or a terminal, whose place nothing can take; of a folder this raises
        return
    partial = partial_path(target)
    try:
        partial.touch(0o644 if private else 0o666)
        partial.write_bytes(data)
        if os.path.exists(target) and not private:
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # a user knows of no other file
        raise


def partial_path(target: Path) -> Path:
    """A path for the file that becomes `target` once it is whole. Old files that killed processes of this user left under such
    names are removed.
    """
    for left in target.parent.glob(".tiledsched-*.part*"):
        with contextlib.suppress(OSError):
            named, status = _PART.fullmatch(left.name), left.lstat()
            if named is None or status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                continue
            if time.time() - status.st_mtime > FORGOTTEN_S and not _runs(int(named[1])):
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


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on, each once: Python does not keep causes from forming a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that a disk or a quota was full."""
    return any(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in causes(error))


def has_room(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder takes one more small file. Tells whether an error may have come from a full disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(SMALL_FILE_BYTES))
    except OSError as error:
        return not is_full(error)
    return True


class OwnFolder:
    """A temporary folder of this process. Folders that killed processes of this user left behind are removed, too."""

    def __init__(self) -> None:
        _sweep()
        self._pid = os.getpid()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        made = os.path.join(self.path, f"new.{LOCK}")
        self._lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the system releases the lock when this process ends, however it ends
        os.write(self._lock, MARK)
        os.rename(made, os.path.join(self.path, LOCK))  # held as soon as it has its name, by which others look for it

    def close(self) -> None:
        """Remove the folder. Safe to call twice, and nothing in a process that was forked from the one that made it."""
        if self._lock >= 0:
            if os.getpid() == self._pid:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()


def _sweep() -> None:
    """Remove the folders of this user, made on this host, whose lock nobody holds: their process is gone. A folder without a lock
    file is just being made; one whose lock file holds anything else is a stranger's.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(lock).st_mode) and os.read(lock, 2 * len(MARK)) == MARK:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
