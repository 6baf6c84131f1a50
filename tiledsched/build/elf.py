"""Reads 64-bit ELF files, such as cubins and the object files that they hold for hosts."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tiledsched.core.errors import CompilerError

HEADER = struct.Struct("<IIQQQQIIQQ")
"""A section header: name, type, flags, address, offset, size, link, info, alignment, size of an entry."""
NOBITS = 8
"""The type of a section that takes memory and no bytes of the file."""
MOST_ALIGNMENT = 1 << 16
"""Bytes to whose multiples a section may be aligned; those of cubins are aligned to 1024 at most."""


class ElfSection(NamedTuple):
    """One section of an ELF file."""

    name: str
    """For example `.text.attention`."""
    kind: int
    """The number of its type."""
    size: int
    """Its bytes in memory."""
    data: bytes
    """Its bytes in the file."""


def section_headers(elf: bytes) -> list[list[int]]:
    """The fields of every section header, in the order of :data:`HEADER`.

    Raises:
        CompilerError: the bytes are no such ELF file, or not all of one: a driver given a file cut short may crash or hang.
    """
    if len(elf) < 64 or elf[:6] != b"\x7fELF\x02\x01":
        raise _no_cubin("it does not begin as an ELF file does")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count = struct.unpack_from("<HH", elf, 58)
    if entry_bytes != HEADER.size or table + count * entry_bytes > len(elf):
        raise _no_cubin("its section headers lie outside")
    headers = [list(HEADER.unpack_from(elf, table + place * HEADER.size)) for place in range(count)]
    for _, kind, _, _, offset, size, _, _, alignment, _ in headers:
        if alignment > MOST_ALIGNMENT or (kind != NOBITS and offset + size > len(elf)):
            raise _no_cubin("a section lies outside")
    return headers


def sections(elf: bytes) -> list[ElfSection]:
    """The sections of an ELF file, in the order of their headers.

    Raises:
        CompilerError: as :func:`section_headers`.
    """
    headers = section_headers(elf)
    (names,) = struct.unpack_from("<H", elf, 62)
    if headers and names >= len(headers):
        raise _no_cubin("its sections have no names")
    return [
        ElfSection(
            name=_text(elf, headers[names][4] + header[0]),
            kind=header[1],
            size=header[5],
            data=b"" if header[1] == NOBITS else elf[header[4] : header[4] + header[5]],
        )
        for header in headers
    ]


def _text(elf: bytes, start: int) -> str:
    return elf[start : elf.find(b"\0", start)].decode(errors="replace")


def _no_cubin(why: str) -> CompilerError:
    return CompilerError(f"not a cubin: {why}; delete the file and build again")
