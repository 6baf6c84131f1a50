"""A bundle: built machine code in one file, for processes that must not compile and machines that cannot.

It is a zip file that holds `bundle.json` (what the programs are, the entries they serve, and the hash of each cubin) and one
stripped cubin for each arch and fingerprint. The same contents give the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tiledsched.build.cubin import Artifact
from tiledsched.build.host_code import REFERENCE, host_folder
from tiledsched.build.store import checked_artifact
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import CompilerError, ConfigError, TiledschedError
from tiledsched.core.files import MOST_BYTES, TooLargeError, kind_of_file, others_may_change, write_whole
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.store.codec import decode, encode
from tiledsched.store.records import Entry
from tiledsched.store.spills import Spills

SCHEMA_VERSION = 2
"""The version of `bundle.json`."""
VARIABLE = "TILEDSCHED_BUNDLE"
"""The environment variable that names a bundle."""
INDEX = "bundle.json"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the zip: the earliest it can hold, so that contents alone decide the bytes."""
MAKE = "make one with: tiledsched warmup --arch ARCH -o FILE"


@dataclass(frozen=True, kw_only=True)
class BundledProgram:
    """One program of a bundle."""

    kernel: str
    """The name of its kernel."""
    arch: str
    """For example sm_90."""
    schedule: Schedule
    """The schedule it was built of."""
    problem: Problem
    """A problem of the problem class it was built for."""
    fingerprint: str
    """The fingerprint of its machine code."""
    host_arch: str = REFERENCE
    """The architecture of the hosts that it was built for."""

    @property
    def cubin_name(self) -> str:
        """The file of its machine code inside the bundle."""
        folder = host_folder(Path("cubins"), self.host_arch) / self.arch
        return f"{folder.as_posix()}/{self.fingerprint}.cubin"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle file, opened; machine code is read when it is needed."""

    path: Path
    """The file."""
    source_hashes: Mapping[str, str]
    """By kernel name, the hash of the tile code that the programs were built from."""
    compiler: str
    """The compiler that built them, for people."""
    programs: tuple[BundledProgram, ...]
    """The programs it holds."""
    table: Sequence[Any] = field(repr=False)
    """The tuned table it was made from, undecoded: a process that only needs a program does not read the evidence."""
    spills: Mapping[str, Mapping[str, Spills]] = field(repr=False)
    """By kernel name and arch, what its maker knew of programs that spill registers or do not build: a machine without a compiler
    makes the choices that its maker made."""
    hashes: Mapping[str, str] = field(repr=False)
    """The SHA-256 of each cubin by its name in the file. A fingerprint leaves out names and some of what a launch reads."""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The tuned table it was made from: what is served, and on what evidence.

        Raises:
            DatabaseError: an entry is wrong.
        """
        return tuple(decode(Entry, row, f"{self.path.name}: entries[{i}]") for i, row in enumerate(self.table))

    def programs_of(self, kernel: KernelClass, arch: str) -> list[BundledProgram]:
        """Its programs of a kernel for an arch."""
        return [each for each in self.programs if (each.kernel, each.arch) == (kernel.name, arch)]

    def artifact(self, program: BundledProgram) -> Artifact:
        """The machine code of one of its programs, checked against its hash, its fingerprint, and the entries that it serves.

        Raises:
            ConfigError: the file is damaged, or holds other machine code.
        """
        name = program.cubin_name
        try:
            with zipfile.ZipFile(self.path) as file:
                code = _member(file, name)
            artifact = checked_artifact(code, program.arch, program.fingerprint, program.host_arch)
            if hashlib.sha256(code).hexdigest() != self.hashes.get(name):
                raise CompilerError("it has another hash than the bundle lists")
            measured = self._measured(program)
            if measured and program.fingerprint not in measured:
                raise CompilerError(f"it is not machine code {min(measured)}, which was measured")
        except Exception as error:  # damage may look like anything
            raise ConfigError(f"{self.path} is damaged ({name}: {error}); {MAKE}") from error
        return replace(artifact, cubin=code)

    def _measured(self, program: BundledProgram) -> set[str]:
        """The fingerprints that its entries name for a program: what was measured of this source, under this compiler."""
        rows = [
            row
            for row in self.table
            if row["kernel"] == program.kernel
            and row["arch"] == program.arch
            and row["schedule"].items()
            <= program.schedule.items()  # a bundle's programs have every knob, old entries not
            and row.get("source_hash") == self.source_hashes.get(program.kernel)
        ]
        entries = (decode(Entry, row, self.path.name) for row in rows)
        return {
            entry.fingerprint
            for entry in entries
            if entry.provenance == "measured"
            and entry.fingerprint
            and entry.toolchain is not None
            and entry.toolchain.compiler == self.compiler
            and _built_for(entry.problem, program) == _built_for(program.problem, program)
        }


def _built_for(problem: Problem, program: BundledProgram) -> str:
    """What the machine code of a program would depend on, were it built for this problem."""
    from tiledsched.core.launches import problem_class  # imports cuTile, which who only reads entries does without

    return problem_class(problem.declaration, problem, program.schedule, arch_spec(program.arch)).id


def _member(file: zipfile.ZipFile, name: str) -> bytes:
    """The contents of a file in a zip, whose size is checked first."""
    if file.getinfo(name).file_size > MOST_BYTES:
        raise TooLargeError(MOST_BYTES)
    return file.read(name)


def named_bundle() -> Path | None:
    """The bundle that `TILEDSCHED_BUNDLE` names.

    Raises:
        ConfigError: there is no such file.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    if not os.path.isfile(text):
        raise ConfigError(f"{VARIABLE} = {text!r}: no such file; {MAKE}")
    return Path(text)


def write_bundle(
    path: Path,
    programs: Sequence[BundledProgram],
    artifacts: Mapping[tuple[str, str], Artifact],
    entries: Sequence[Entry],
    source_hashes: Mapping[str, str],
    compiler: str,
    spills: Mapping[str, Mapping[str, Spills]] = MappingProxyType({}),
) -> int:
    """Write a bundle; the file appears whole or not at all. Returns its bytes.

    Args:
        path: the file to write.
        programs: the programs it shall hold.
        artifacts: their machine code, by arch and fingerprint.
        entries: the tuned table that they come from.
        source_hashes: by kernel name, the hash of its tile code.
        compiler: the compiler that built them.
        spills: by kernel name and arch, what is known of programs that spill registers or do not build.

    Raises:
        ConfigError: the file cannot be written.
    """
    index = {
        "schema_version": SCHEMA_VERSION,
        "source_hashes": dict(source_hashes),
        "compiler": compiler,
        "programs": [encode(program) for program in programs],
        "entries": [entry.to_json() for entry in entries],
        "spills": {name: dict(archs) for name, archs in spills.items()},
    }
    cubins = {program.cubin_name: artifacts[program.arch, program.fingerprint].cubin for program in programs}
    index["hashes"] = {name: hashlib.sha256(cubin).hexdigest() for name, cubin in cubins.items()}
    first, contents = (json.dumps(index, sort_keys=True, indent=1) + "\n").encode(), io.BytesIO()
    with zipfile.ZipFile(contents, "w") as file:
        for name, data in [(INDEX, first), *sorted(cubins.items())]:
            file.writestr(zipfile.ZipInfo(name, EPOCH), data, compress_type=zipfile.ZIP_DEFLATED)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, contents.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another path") from error
    return len(contents.getvalue())


def read_bundle(path: Path) -> Bundle:
    """Open a bundle.

    Raises:
        ConfigError: it is no bundle, damaged, or of a newer schema, or others than its owner may write it.
    """
    try:
        if kind_of_file(path) == "other":  # opening a pipe waits for whoever writes to it
            raise OSError(errno.EINVAL, "not a regular file")
        if why := others_may_change(path, any_owner=True):
            raise ConfigError(
                f"{path} is not used: {why}, and its programs would run as they are; take that right away (chmod go-w)"
            )
        with zipfile.ZipFile(path) as file:
            index = json.loads(_member(file, INDEX))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {MAKE}") from error
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} is no bundle ({error}); {MAKE}") from error
    version = index.get("schema_version") if isinstance(index, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(f"{path} has schema_version {version!r}, this tiledsched reads {SCHEMA_VERSION}; {MAKE}")
    try:
        rows = [{**row, "problem": {"kernel": row["kernel"], **row["problem"]}} for row in index["programs"]]
        return Bundle(
            path=path,
            source_hashes=dict(index["source_hashes"]),
            compiler=str(index["compiler"]),
            programs=tuple(decode(BundledProgram, row, "programs") for row in rows),  # earlier ones name no host
            table=list(index["entries"]),
            spills=dict(index.get("spills", {})),  # earlier ones know of none
            hashes=dict(index["hashes"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, TiledschedError) as error:
        raise ConfigError(f"{path} is no bundle ({type(error).__name__}: {error}); {MAKE}") from error
