"""What can be read from a cubin without a GPU: its fingerprint, the resources it takes, and a copy without debug text.

A cubin is a 64-bit ELF file. Its `.nv.info` sections hold records `<u8 format, u8 attribute, u16 value>`; with format 4,
`value` bytes follow. The attribute numbers are those CUDA's own `cuobjdump --dump-elf` prints names for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from tiledsched.build.elf import HEADER, NOBITS, ElfSection, section_headers, sections
from tiledsched.build.host_code import carried, carrying, host_of
from tiledsched.core.device import ResourceFacts, ctas_per_sm
from tiledsched.core.errors import CompilerError

FACTS_AT = {0x10: ("threads", 0), 0x11: ("spill_bytes", 4), 0x2F: ("registers", 4), 0x3D: ("num_ctas", 0)}
"""Attribute -> the fact that its record holds, and at which byte. By cuobjdump's names these are EIATTR_MAX_THREADS_REQUIRED (of
which x counts), EIATTR_FRAME_SIZE and EIATTR_REGCOUNT (both after the index of a symbol), and EIATTR_CLUSTER_DIMS (x again).
"""


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


TEXT = ".text."
"""Begins the name of the section that holds a kernel's code; the kernel's name follows."""
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
    return next(each.name.removeprefix(TEXT) for each in sections(cubin) if each.name.startswith(TEXT))


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
    found = sections(cubin)
    texts = [section for section in found if section.name.startswith(TEXT)]
    if len(texts) != 1:
        raise CompilerError(f"expected one kernel in the cubin, found {len(texts)}; was the compile cut short?")
    kernel = texts[0].name.removeprefix(TEXT)
    try:
        facts = _facts(found, arch, kernel=kernel, code_bytes=texts[0].size)
        return Artifact(
            arch=arch,
            fingerprint=_fingerprint(found, kernel, facts, reference),
            facts=facts,
            cubin=carrying(strip_debug(cubin), reference),
            host_arch=host_of(cubin),
        )
    except (struct.error, ArithmeticError, LookupError) as error:
        raise CompilerError(f"not a cubin: {error}; delete the file and build again") from error


def _fingerprint(found: Sequence[ElfSection], kernel: str, facts: ResourceFacts, reference: bytes) -> str:
    digest = hashlib.sha256()
    for section in found:
        if section.name.startswith((TEXT, ".nv.constant")):
            # Without the kernel's name, which differs between ahead-of-time and launch-time builds.
            digest.update(section.name.removesuffix(f".{kernel}").encode())
            digest.update(section.data)
        elif section.name == ".nv.host":
            digest.update(host_instructions(reference or section.data))
    launch = (facts.registers, facts.threads, facts.shared_bytes, facts.num_ctas)
    digest.update(repr(launch).encode())
    return digest.hexdigest()[:24]


def host_instructions(data: bytes) -> bytes:
    """The code in an object file that the driver runs on the host at launch: it writes the TMA descriptors, which hold the
    arrays' constant sizes. Two kernels can differ in nothing else. The kernel's name is not in it.
    """
    return b"".join(section.data for section in sections(data) if section.name in (".text", ".ltext"))


def _facts(found: Sequence[ElfSection], arch: str, *, kernel: str, code_bytes: int) -> ResourceFacts:
    values = {"registers": 0, "spill_bytes": 0, "threads": 0, "num_ctas": 1, "shared_bytes": 0}
    for section in found:
        if section.name in (".nv.info", f".nv.info.{kernel}"):
            for attribute, value in _info_records(section.data):
                if attribute in FACTS_AT:
                    name, offset = FACTS_AT[attribute]
                    values[name] = max(values[name], struct.unpack_from("<I", value, offset)[0])
        elif section.name == f".nv.shared.{kernel}":
            values["shared_bytes"] = section.size
    if not values["registers"] or not values["threads"]:
        raise CompilerError(f"the cubin of {kernel!r} names no register or thread count; its format is unknown here")
    resident = ctas_per_sm(arch, values["registers"], values["threads"], values["shared_bytes"])
    return ResourceFacts(code_bytes=code_bytes, ctas_per_sm=resident, **values)


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
    try:
        section_headers(cubin)
    except CompilerError:
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
    (e_phoff,) = struct.unpack_from("<Q", cubin, 32)
    (e_phnum,) = struct.unpack_from("<H", cubin, 56)
    headers = section_headers(cubin)
    out = bytearray(cubin[:64])
    moved: dict[int, int] = {}  # old offset of a section with contents -> new one; some sections share theirs
    for header, section in zip(headers[1:], sections(cubin)[1:], strict=True):
        offset, align = header[4], max(1, header[8])
        if _is_debug(section.name):
            header[5] = 0
        filled = header[5] > 0 and header[1] != NOBITS
        if filled and offset in moved:
            header[4] = moved[offset]
            continue
        out.extend(b"\0" * (-len(out) % align))
        header[4] = len(out)
        if filled:
            moved[offset] = len(out)
            out.extend(section.data)
    out.extend(b"\0" * (-len(out) % 8))
    new_shoff = len(out)
    for header in headers:
        out.extend(HEADER.pack(*header))
    new_phoff = len(out)
    moved[e_phoff] = new_phoff
    for i in range(e_phnum):
        segment = list(struct.unpack_from("<IIQQQQQQ", cubin, e_phoff + i * 56))
        segment[2] = moved.get(segment[2], new_phoff)
        out.extend(struct.pack("<IIQQQQQQ", *segment))
    struct.pack_into("<QQ", out, 32, new_phoff, new_shoff)
    return bytes(out)
