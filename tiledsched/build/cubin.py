"""What can be read from a cubin without a GPU: its fingerprint, the resources it takes, and a copy without debug text.

A cubin is a 64-bit ELF file. Its `.nv.info` sections hold records `<u8 format, u8 attribute, u16 value>`; with format 4,
`value` bytes follow. The attribute numbers are those CUDA's own `cuobjdump --dump-elf` prints names for.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiledsched.build.host_code import carried, carrying, host_of
from tiledsched.core.errors import CompilerError
from tiledsched.core.resources import ResourceFacts as ResourceFacts
from tiledsched.core.resources import ctas_per_sm as ctas_per_sm

FACTS_AT = {0x10: ("threads", 0), 0x11: ("spill_bytes", 4), 0x2F: ("registers", 4), 0x3D: ("num_ctas", 0)}
"""Attribute -> the fact that its record holds, and at which byte. By cuobjdump's names these are EIATTR_MAX_THREADS_REQUIRED (of
which x counts), EIATTR_FRAME_SIZE and EIATTR_REGCOUNT (both after the index of a symbol), and EIATTR_CLUSTER_DIMS (x again).
"""
SHT_NOBITS = 8


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A schedule compiled for an arch and a problem class."""

    arch: str
    """Target, e.g. sm_121."""
    fingerprint: str
    """24 hex digits over the machine code, its constants, what the launch does on the host (as code for x86_64, whatever the
    host), and launch attributes. Same fingerprint, same program.
    """
    facts: ResourceFacts
    """Resources it takes."""
    cubin: bytes
    """The file without debug sections, of which :func:`parts` makes what a driver loads."""
    host_arch: str = ""
    """The architecture of the hosts that it runs on; empty where it runs on any."""


SEQUENCE = b"TILESEQ1"
"""Begins the file of a schedule that launches several kernels in a row: their cubins follow, each after its size."""


def join(artifacts: Sequence[Artifact]) -> Artifact:
    """One artifact of kernels that are launched in a row; of a single one, itself.

    The fingerprint is that of all of them in order, and the facts are the largest of any.
    """
    if len(artifacts) == 1:
        return artifacts[0]
    digest = hashlib.sha256("/".join(each.fingerprint for each in artifacts).encode()).hexdigest()[:24]
    every = [asdict(each.facts) for each in artifacts]
    most = {name: max(facts[name] for facts in every) for name in every[0]}
    most["ctas_per_sm"] = min(facts["ctas_per_sm"] for facts in every)
    most["code_bytes"] = sum(facts["code_bytes"] for facts in every)
    data = SEQUENCE + b"".join(struct.pack("<Q", len(each.cubin)) + each.cubin for each in artifacts)
    host = max(each.host_arch for each in artifacts)
    return Artifact(arch=artifacts[0].arch, fingerprint=digest, facts=ResourceFacts(**most), cubin=data, host_arch=host)


def parts(data: bytes) -> list[bytes]:
    """The cubins, as a driver loads them, of a file that :func:`join` made, or of one kernel."""
    return [carried(part)[0] for part in parts_with_host_code(data)]


def parts_with_host_code(data: bytes) -> list[bytes]:
    """The files that :func:`join` put together; of one kernel its own."""
    if not data.startswith(SEQUENCE):
        return [data]
    found, offset = [], len(SEQUENCE)
    while offset + 8 <= len(data):
        (size,) = struct.unpack_from("<Q", data, offset)
        found.append(data[offset + 8 : offset + 8 + size])
        offset += 8 + size
    return found


def symbol_of(cubin: bytes) -> str:
    """The name of the one kernel in a cubin."""
    return next(
        section.name.removeprefix(".text.") for section in _sections(cubin) if section.name.startswith(".text.")
    )


def _sections(elf: bytes) -> list[Any]:
    """Sections of an ELF file. The reader is imported here, because most uses of this module do not need it."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        return list(ELFFile(io.BytesIO(elf)).iter_sections())
    except ELFError as error:
        raise CompilerError(f"not a cubin: {error}; delete the file and build again") from error


def read_artifact(data: bytes, arch: str, reference: bytes = b"") -> Artifact:
    """Fingerprint, facts and stripped copy of a cubin, which must hold one kernel, or several that :func:`join` put together.

    Args:
        data: the cubin, or the file of an artifact.
        arch: its target.
        reference: the object file for x86_64 hosts of a cubin just compiled for others.

    Raises:
        CompilerError: the bytes are not a cubin with one kernel.
    """
    if data.startswith(SEQUENCE):
        return join([read_artifact(part, arch) for part in parts_with_host_code(data)])
    cubin, known = carried(data)
    reference = reference or known
    sections = _sections(cubin)
    texts = [section for section in sections if section.name.startswith(".text.")]
    if len(texts) != 1:
        raise CompilerError(f"expected one kernel in the cubin, found {len(texts)}; was the compile cut short?")
    kernel = texts[0].name.removeprefix(".text.")
    facts = _facts(sections, arch, kernel=kernel, code_bytes=texts[0]["sh_size"])
    return Artifact(
        arch=arch,
        fingerprint=_fingerprint(sections, kernel, facts, reference),
        facts=facts,
        cubin=carrying(strip_debug(cubin), reference),
        host_arch=host_of(cubin),
    )


def _fingerprint(sections: list[Any], kernel: str, facts: ResourceFacts, reference: bytes) -> str:
    digest = hashlib.sha256()
    for section in sections:
        if section.name.startswith((".text.", ".nv.constant")):
            # Without the kernel's name, which differs between ahead-of-time and launch-time builds.
            digest.update(section.name.removesuffix(f".{kernel}").encode())
            digest.update(section.data())
        elif section.name == ".nv.host":
            digest.update(_host_code(reference or section.data()))
    launch = (facts.registers, facts.threads, facts.shared_bytes, facts.num_ctas)
    digest.update(repr(launch).encode())
    return digest.hexdigest()[:24]


def _host_code(data: bytes) -> bytes:
    """The code in an object file that the driver runs on the host at launch: it writes the TMA descriptors, which hold the
    arrays' constant sizes. Two kernels can differ in nothing else. The kernel's name is not in it.
    """
    return b"".join(section.data() for section in _sections(data) if section.name in (".text", ".ltext"))


def _facts(sections: list[Any], arch: str, *, kernel: str, code_bytes: int) -> ResourceFacts:
    found = {"registers": 0, "spill_bytes": 0, "threads": 0, "num_ctas": 1, "shared_bytes": 0}
    for section in sections:
        if section.name in (".nv.info", f".nv.info.{kernel}"):
            for attribute, value in _info_records(section.data()):
                if attribute in FACTS_AT:
                    name, offset = FACTS_AT[attribute]
                    found[name] = max(found[name], struct.unpack_from("<I", value, offset)[0])
        elif section.name == f".nv.shared.{kernel}":
            found["shared_bytes"] = section["sh_size"]
    if not found["registers"] or not found["threads"]:
        raise CompilerError(f"the cubin of {kernel!r} names no register or thread count; its format is unknown here")
    resident = ctas_per_sm(arch, found["registers"], found["threads"], found["shared_bytes"])
    return ResourceFacts(code_bytes=code_bytes, ctas_per_sm=resident, **found)


def _info_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == 4:
            yield attribute, data[offset : offset + value]
            offset += value


def is_whole(cubin: bytes) -> bool:
    """Whether every section lies inside the file. A driver given a file cut short may refuse it, crash or hang."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF":
        return False
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count = struct.unpack_from("<HH", cubin, 58)
    if entry_bytes != 64 or table + count * entry_bytes > len(cubin):
        return False
    for i in range(count):
        kind, offset, size = struct.unpack_from("<4xI16xQQ", cubin, table + i * entry_bytes)
        if kind != SHT_NOBITS and offset + size > len(cubin):
            return False
    return True


def _is_debug(name: str) -> bool:
    plain = name.removeprefix(".nv.merc").removeprefix(".rela")
    return plain.startswith((".debug_", ".nv_debug_", ".nv.tileir.debug"))


def strip_debug(cubin: bytes) -> bytes:
    """`cubin` with the contents of its debug sections removed (about a quarter of the size remains).

    Sections keep their indices, so no symbol or relocation needs renumbering: a debug section becomes empty, and the
    other sections move up. Program headers follow the sections they point at.
    """
    e_phoff, e_shoff = struct.unpack_from("<QQ", cubin, 32)
    e_phnum, e_shentsize, e_shnum, e_shstrndx = struct.unpack_from("<HHHH", cubin, 56)
    headers = [list(struct.unpack_from("<IIQQQQIIQQ", cubin, e_shoff + i * e_shentsize)) for i in range(e_shnum)]
    names_at = headers[e_shstrndx][4]

    def name_of(header: list[int]) -> str:
        start = names_at + header[0]
        return cubin[start : cubin.index(b"\0", start)].decode()

    out = bytearray(cubin[:64])
    moved: dict[int, int] = {}  # old offset of a section with contents -> new one; some sections share theirs
    for header in headers[1:]:
        kind, offset, align = header[1], header[4], max(1, header[8])
        if _is_debug(name_of(header)):
            header[5] = 0
        filled = header[5] > 0 and kind != SHT_NOBITS
        if filled and offset in moved:
            header[4] = moved[offset]
            continue
        out.extend(b"\0" * (-len(out) % align))
        header[4] = len(out)
        if filled:
            moved[offset] = len(out)
            out.extend(cubin[offset : offset + header[5]])
    out.extend(b"\0" * (-len(out) % 8))
    new_shoff = len(out)
    for header in headers:
        out.extend(struct.pack("<IIQQQQIIQQ", *header))
    new_phoff = len(out)
    moved[e_phoff] = new_phoff
    for i in range(e_phnum):
        segment = list(struct.unpack_from("<IIQQQQQQ", cubin, e_phoff + i * 56))
        segment[2] = moved.get(segment[2], new_phoff)
        out.extend(struct.pack("<IIQQQQQQ", *segment))
    struct.pack_into("<QQ", out, 32, new_phoff, new_shoff)
    return bytes(out)
