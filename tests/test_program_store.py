"""The store of programs: what is put in comes out, whatever is damaged is absent, and hosts of two kinds share a folder."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cubins import ARCH, CUBINS, HOSTS, MADE

from tiledsched.build.cubin import read_artifact
from tiledsched.build.sealed import MAGIC, read_sealed, write_sealed
from tiledsched.build.store import Claims, ProgramStore, StoredProgram, read_program, write_program
from tiledsched.core.errors import CompilerError, Failure, FailureKind
from tiledsched.fleet.builds import BuildNote
from tiledsched.store import host as this_host

KEY, HERE = "ab12" * 10, MADE["x86_64"]
NOTE = BuildNote(seconds=2.5, failure=Failure(kind=FailureKind.COMPILE_ERROR, message="no"))


@dataclass
class Kept:
    """A file of a store, how it is written and how it is read."""

    value: Any
    path: Path
    write: Any
    read: Any


def kept(kind: str, folder: Path) -> Kept:
    store = ProgramStore(folder, "x86_64")
    path = store.path(ARCH, KEY)
    if kind == "artifact":
        path = store.path(ARCH, HERE.fingerprint)
        return Kept(HERE, path, lambda: store.put(HERE), lambda: store.get(ARCH, HERE.fingerprint))
    if kind == "outcome of a build":
        return Kept((NOTE, b""), path, lambda: write_sealed(path, NOTE, b""), lambda: read_sealed(path, BuildNote))
    if kind == "host code":
        return Kept(({"name": KEY}, b"o"), path, lambda: write_sealed(path, {}, b"o"), lambda: read_sealed(path, dict))
    cubin = b"" if kind == "refusal" else HERE.cubin
    program = StoredProgram(cubin=cubin, symbol="softmax", error="" if cubin else "no such tile")
    return Kept(program, path, lambda: write_program(path, program), lambda: read_program(path))


def sealed(line: bytes, contents: bytes = b"") -> bytes:
    """A file whose checksum is right."""
    rest = line + b"\n" + contents
    return MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


@pytest.mark.parametrize("kind", ["artifact", "program", "refusal", "outcome of a build", "host code"])
def test_a_file_gives_back_what_was_put_in_and_any_damage_is_absence(kind, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    file = kept(kind, tmp_path)
    assert file.read() is None
    file.write()
    assert file.read() == file.value
    whole = file.path.read_bytes()
    places = [*range(300), *range(300, len(whole), 41)]
    damaged = [whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :] for at in places if at < len(whole)]
    damaged += [whole[:size] for size in range(0, len(whole), max(1, len(whole) // 40))]
    damaged += [whole + b"x", lzma.compress(whole), whole.replace(MAGIC, b"TILESEALED0 ")]
    lines = [b"", b"\xff", b"[]", b"3", b'"name"', b"{}", b"null", b'{"name": 1}', b"[" * 100_000, b'{"name": "cd"}']
    damaged += [sealed(line, HERE.cubin) for line in lines]
    named = {"name": file.path.name}
    if kind != "host code":  # whose facts and contents may be any
        wrong = {"symbol": 3, "seconds": "long", "failure": {"kind": "none"}}
        damaged += [sealed(json.dumps(named | wrong).encode(), each) for each in (b"", b"\x7fELF" + bytes(99))]
    for each in damaged:
        file.path.write_bytes(each)
        assert file.read() is None, each[:200]
        assert not file.path.exists()
    reasons = ["its checksum is wrong", "it is no file of this cache", "it was written as cd"]
    for why in (*reasons, "what it says of its contents cannot be read: "):
        assert f"is damaged ({why}" in caplog.text
    file.path.mkdir()
    assert file.read() is None
    file.path.rmdir()
    before = os.umask(0)
    file.write()
    os.umask(before)
    assert file.read() == file.value
    for mode, whose in ((0o666, "mode 666"), (0o664, "mode 664"), (0o644, "another user")):
        file.path.chmod(mode)
        if whose == "another user":
            if os.geteuid():  # who may not give a file away
                continue
            os.chown(file.path, 12345, -1)
        assert file.read() is None
        assert f"{file.path.parent} is not used" in caplog.text
        assert whose in caplog.text
        file.write()
        assert file.read() == file.value


def test_what_has_no_room_is_lost_or_said(tmp_path) -> None:
    (tmp_path / "programs").touch()
    path = ProgramStore(tmp_path).path(ARCH, KEY)
    write_program(path, StoredProgram(error="no"))  # it is compiled again
    assert isinstance(write_sealed(path, {}, b""), OSError)
    assert Claims(tmp_path / "programs").claim(path)  # where nothing can be locked, everybody makes what is needed


CLAIMS = """
import sys
from pathlib import Path
from tiledsched.build.store import Claims
claims, path = Claims(Path(sys.argv[1])), Path(sys.argv[1]) / sys.argv[2]
print(claims.claim(path, wait=sys.argv[3] == "wait"), flush=True)
sys.stdin.read()
"""


def test_one_process_makes_a_file_at_a_time(tmp_path) -> None:
    """Until it has released the file, or is gone."""
    claims, path = Claims(tmp_path), tmp_path / KEY
    with ExitStack() as stack:

        def other(wait: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", CLAIMS, str(tmp_path), KEY, wait]
            return stack.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, text=True))

        assert claims.claim(path)
        refused, waits = other("refused"), other("wait")
        assert refused.stdout.readline() == "False\n"
        claims.release(path)
        assert waits.stdout.readline() == "True\n"
        assert not claims.claim(path)
        assert claims.claim(tmp_path / KEY[::-1])
        waits.kill()
        assert claims.claim(path, wait=True)


def test_a_process_is_known_by_its_number_and_its_start(monkeypatch) -> None:
    pid, began = os.getpid(), this_host.facts()["pid_started"]
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    known = [(pid, began), (pid, None), (pid, began + 1), (ended.pid, None)]
    assert [this_host.is_alive(*each) for each in known] == [True, True, False, False]
    assert [this_host.lives(word) for word in (this_host.own_word(), f"{pid}.{began + 1}", "word")] == [
        True,
        False,
        False,
    ]
    monkeypatch.setattr(this_host, "_stat", lambda pid: ("", None))  # a system that does not tell
    assert this_host.is_alive(pid, began)


def test_hosts_of_both_kinds_share_a_cache_folder(tmp_path) -> None:
    """Neither finds the other's machine code, and neither replaces it."""
    stores = {host: ProgramStore(tmp_path, host) for host in HOSTS}
    fingerprint = HERE.fingerprint
    for host, store in stores.items():
        assert not store.has(ARCH, fingerprint)
        store.put(MADE[host])
        written = store.path(ARCH, fingerprint).stat().st_mtime_ns
        store.put(replace(MADE[host], cubin=b"other"))  # once kept, machine code never changes
        assert store.path(ARCH, fingerprint).stat().st_mtime_ns == written
    for host, store in stores.items():
        assert store.get(ARCH, fingerprint) == stores["x86_64"].for_host(host).get(ARCH, fingerprint) == MADE[host]
    path = stores["x86_64"].path(ARCH, fingerprint)
    path.write_bytes(stores["aarch64"].path(ARCH, fingerprint).read_bytes())
    assert stores["x86_64"].get(ARCH, fingerprint) is None
    assert not stores["x86_64"].has(ARCH, fingerprint)
    write_program(path, StoredProgram(cubin=MADE["aarch64"].cubin))
    assert read_program(path) is None or ProgramStore(tmp_path).host_arch == "aarch64"


def test_a_damaged_cubin_is_an_error_of_the_compiler_or_another_program() -> None:
    cubin = CUBINS["x86_64"]
    headers = len(cubin) - 64 * 40
    for at in [*range(64), *range(64, headers, 37), *range(headers, len(cubin), 3)]:
        with suppress(CompilerError):
            read_artifact(cubin[:at] + bytes([cubin[at] ^ 0x81]) + cubin[at + 1 :], ARCH)
        with suppress(CompilerError):
            read_artifact(cubin[:at], ARCH)
