"""Temporary folders and half-written files: those of killed processes go, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiledsched.core import files
from tiledsched.core.files import MARK, OwnFolder, write_whole

NOBODY = 65534
FORKED = """
import os
from tiledsched.core.files import OwnFolder
folder = OwnFolder()
child = os.fork()
if child == 0:
    folder.close()
    os._exit(0)
os.waitpid(child, 0)
print(os.path.isdir(folder.path))
folder.close()
print(os.path.isdir(folder.path))
"""


def as_killed(folder: Path, name: str = "tiledsched-abcd1234", lock: bytes = MARK) -> Path:
    """A folder as a killed process leaves it, with a file in it."""
    made = folder / name
    made.mkdir()
    (made / "lock").write_bytes(lock)
    (made / "notes.txt").write_text("mine")
    return made


def strange(kind: str, folder: Path) -> Path:
    """A file that has nothing to do with us, in or behind something that looks like one of our folders."""
    made = as_killed(folder, lock=b"" if kind == "an empty lock" else MARK)
    if kind == "a lock of another program":
        (made / "lock").write_text("12345\n")
    elif kind == "more in the lock":
        (made / "lock").write_bytes(MARK + b" no more")
    elif kind == "another host":
        (made / "lock").write_bytes(b"a temporary folder of tiledsched on elsewhere")
    elif kind == "no lock":
        (made / "lock").unlink()
    elif kind == "a pipe":
        (made / "lock").unlink()
        os.mkfifo(made / "lock")
    elif kind == "a folder as lock":
        (made / "lock").unlink()
        (made / "lock").mkdir()
    elif kind == "a link as lock":
        (made / "lock").rename(folder / "else")
        (made / "lock").symlink_to(folder / "else")
    elif kind == "a link to a folder":
        made.rename(folder / "else")
        made.symlink_to(folder / "else")
        return folder / "else" / "notes.txt"
    elif kind == "a folder of another user":
        os.chown(made, NOBODY, -1)
    elif kind == "a link within":  # the folder goes, and what its link leads to stays
        (folder / "else.txt").write_text("mine")
        (made / "link").symlink_to(folder / "else.txt")
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere" / "else.txt").write_text("mine")
        (made / "folder").symlink_to(folder / "elsewhere")
        return folder / "elsewhere" / "else.txt"
    return made / "notes.txt"


KINDS = (
    "an empty lock",
    "a lock of another program",
    "more in the lock",
    "another host",
    "no lock",
    "a pipe",
    "a folder as lock",
    "a link as lock",
    "a link to a folder",
    "a link within",
    pytest.param(
        "a folder of another user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    ),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where this process makes its temporary folders."""
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_ours_stays(kind, folder) -> None:
    kept = strange(kind, folder)
    left = as_killed(folder, "tiledsched-left0000")
    with OwnFolder():
        assert kept.read_text() == "mine"
        assert not left.exists()


def test_a_folder_whose_process_lives_stays(folder) -> None:
    with OwnFolder() as mine, OwnFolder():
        assert os.listdir(mine) == ["lock"]
    assert os.listdir(folder) == []


def test_a_forked_process_leaves_the_folder_of_its_parent(tmp_path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_half_written_files_of_killed_processes_go_and_no_others(tmp_path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead, ours = int(gone.stdout), os.getpid()
    swept = [f".tiledsched-{dead}-0123abcd.part", f".tiledsched-{dead}-0123abcd.part-journal"]
    kept = [
        f".tiledsched-{ours}-0123abcd.part",
        f".tiledsched-{dead}-new00000.part",
        f".tiledsched-{dead}-0123abcd.parts.txt",
        f".tiledsched-notes-{dead}.part",
        f"tiledsched-{dead}-0123abcd.part",
    ]
    for name in [*swept, *kept]:
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (0, 0))
    link, young = f".tiledsched-{dead}-11111111.part", f".tiledsched-{dead}-22222222.part"
    (tmp_path / "else").write_text("x")
    os.utime(tmp_path / "else", (0, 0))
    (tmp_path / link).symlink_to("else")
    (tmp_path / young).write_text("x")
    if os.geteuid() == 0:
        kept.append(f".tiledsched-{dead}-33333333.part")
        (tmp_path / kept[-1]).write_text("x")
        os.utime(tmp_path / kept[-1], (0, 0))
        os.chown(tmp_path / kept[-1], NOBODY, -1)
    write_whole(tmp_path / "new.txt", "new")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, link, young, "else", "new.txt"])


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("tune softmax -p rows=4096,columns=1000:1016 --arch sm_90 --runner none --jobs 2", "*.bytecode"),
        ("warmup softmax -p rows=4096,columns=1000:1016 --arch sm_90 --jobs 2 -o b.zip", "*.bytecode"),
        ("report softmax --arch sm_90 -o r", "lock"),
    ],
)
def test_what_a_killed_command_leaves_the_next_one_removes(words, seen, tmp_path) -> None:
    """What cuTile and its compiler write lies in the folders that are swept."""
    (tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "tmp"),
        "HOME": str(tmp_path),
        "TILEDSCHED_DB": str(tmp_path / "x.db"),
        "TILEDSCHED_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment.pop("CUDA_TILE_TEMP_DIR", None)
    command = [sys.executable, "-m", "tiledsched"]
    child = subprocess.Popen([*command, *words.split()], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not list((tmp_path / "tmp").rglob(seen)):
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(3)  # until the compile processes have noticed
    assert os.listdir(tmp_path / "tmp")
    subprocess.run([*command, "show", "softmax"], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    assert os.listdir(tmp_path / "tmp") == []
