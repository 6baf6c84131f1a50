"""How a command ends that somebody else ends: what it leaves behind, and what the next one finds."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_samples import runs

from tiledsched import cli
from tiledsched.core import files
from tiledsched.store.db import TuningDB

TUNE = [
    sys.executable,
    "-m",
    "tiledsched",
    "tune",
    "softmax",
    "--arch",
    "sm_90",
    "--problem",
    "rows=4096,columns=1000:1016",
    "--runner",
    "none",
    "--jobs",
    "2",
]


@pytest.fixture
def home(tmp_path):
    """The environment of a command, with everything it may write to in one folder."""
    (tmp_path / "tmp").mkdir()
    return {
        **os.environ,
        "TMPDIR": str(tmp_path / "tmp"),
        "HOME": str(tmp_path / "home"),
        "TILEDSCHED_DB": str(tmp_path / "x.db"),
        "TILEDSCHED_CACHE": str(tmp_path / "cache"),
    }


def members(group: int) -> list[str]:
    """The commands of the processes of a session, as the system tells them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(state[3]) == group and state[0] != "Z":
                found.append((folder / "cmdline").read_text())
        except (OSError, IndexError):
            continue
    return found


def started(home, number: int) -> subprocess.Popen[str]:
    """A tune that compiles, after so many of its builds are stored. Ctrl-C reaches it, as in the foreground of a shell."""
    child = subprocess.Popen(
        TUNE,
        env=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while len(builds(home)) < number and child.poll() is None:
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.05)
    assert child.poll() is None, child.communicate()[0]
    return child


def builds(home) -> set[int]:
    """What the database holds, read the way another program would, while or after a run writes it."""
    if not Path(home["TILEDSCHED_DB"]).exists():
        return set()
    with sqlite3.connect(home["TILEDSCHED_DB"]) as db:
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
        try:
            return set(db.execute("select id from builds"))
        except sqlite3.OperationalError:  # the schema is not committed yet
            return set()


def ended(child: subprocess.Popen[str]) -> str:
    out = child.communicate(timeout=60)[0]
    deadline = time.monotonic() + 10
    while members(child.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members(child.pid) == []
    return out


def told_to_end(child: subprocess.Popen[str], number: int, home) -> list[str]:
    """Check what a command leaves that a signal ends; how its runs ended."""
    child.send_signal(number)
    out = ended(child)
    assert child.returncode == 128 + number
    assert "everything finished so far is stored" in out
    assert "Traceback" not in out
    assert os.listdir(home["TMPDIR"]) == []
    with TuningDB.open(home["TILEDSCHED_DB"]) as db:
        assert db.check() == []
        return [run.status for run in runs(db)]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_told_to_end_leaves_nothing(home, number) -> None:
    assert told_to_end(started(home, 1), number, home) == ["interrupted"]


@pytest.mark.slow
@pytest.mark.compiler
def test_a_killed_run_loses_nothing_and_the_next_cleans_up_and_goes_on(home) -> None:
    rng, committed = random.Random(7), set()
    for _ in range(2):
        child = started(home, len(committed) + rng.randint(1, 2))
        time.sleep(rng.uniform(0, 0.5))
        child.kill()
        ended(child)
        assert committed <= builds(home)
        committed = builds(home)
    done = subprocess.run([*TUNE, "--trials", "6", "--json"], env=home, capture_output=True, text=True, check=True)
    results = json.loads(done.stdout)["results"]
    assert sum(each["compiled"] for each in results) == sum(each["schedules"] for each in results) - len(committed)
    assert committed <= builds(home)
    assert os.listdir(home["TMPDIR"]) == []
    with TuningDB.open(home["TILEDSCHED_DB"]) as db:
        assert runs(db)[0].status == "done"
        assert db.check() == []


def test_a_compiler_that_hangs_ends_with_the_command(home) -> None:
    """Killed, it ends nobody itself: its compile processes do, and what they started with them."""
    code = """
import subprocess
from tiledsched.build import pool
from tiledsched.build.compiler import BuildTask
from tiledsched.kernels.softmax import Softmax
from tiledsched.core.schedule import Schedule

def compile_task(task):
    subprocess.run(["sh", "-c", "echo compiling; exec sleep 600"])

pool.compile_task = compile_task
if __name__ == "__main__":
    task = BuildTask(kernel="softmax", schedule=Schedule({}), problem=Softmax.problem(rows=1, columns=1), arch="sm_90")
    list(pool.BuildPool(1).build([task]))
"""
    script = Path(home["TMPDIR"]).parent / "hangs.py"
    script.write_text(code)
    child = subprocess.Popen(
        [sys.executable, str(script)],
        env={**home, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "compiling\n"
    assert len(members(child.pid)) >= 3
    child.kill()
    ended(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_once(number) -> None:
    """What it does on its way out is not cut short by the next one."""
    seen = []

    def devices() -> list:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), each)
            seen.append("cleaned up")
        return []

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where this runs under nohup
    try:
        assert cli.main(["explain"], devices=devices) == 128 + number
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == ["cleaned up"]


@pytest.mark.parametrize("told", ["interrupt", "left"])
def test_processes_that_only_just_started_say_nothing_as_they_end(tmp_path, told) -> None:
    """Ctrl-C reaches them before they are set up, and what starts them may end before they have read what to do."""
    code = f"""
import os, signal, sys
from multiprocessing import util
from tiledsched.core.processes import SafeSpawnContext
usual = util.spawnv_passfds
def started(path, words, descriptors):
    pid = usual(path, words, descriptors)
    if any("spawn_main" in str(word) for word in words):
        if {told!r} == "left":
            raise KeyboardInterrupt
        os.kill(pid, signal.SIGINT)
    return pid
if __name__ == "__main__":
    util.spawnv_passfds = started
    try:
        process = SafeSpawnContext().Process(target=os.getpid)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    except KeyboardInterrupt:
        pass
"""
    (tmp_path / "starts.py").write_text(code)
    done = subprocess.run([sys.executable, str(tmp_path / "starts.py")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_folder_is_held_before_others_can_find_it(tmp_path, monkeypatch) -> None:
    """Else who sweeps just then takes it for that of a process that is gone."""
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    hold, swept = files.fcntl.flock, []

    def sweep_first(lock, how) -> None:
        if how == files.fcntl.LOCK_EX:
            files._sweep()
            swept.append(lock)
        hold(lock, how)

    monkeypatch.setattr(files.fcntl, "flock", sweep_first)
    made = files.OwnFolder()
    assert swept
    assert os.path.isdir(made.path)
    files._sweep()
    assert os.path.isdir(made.path)
    made.close()


def test_a_folder_lives_as_long_as_its_process(tmp_path, monkeypatch, python) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    code = "from tiledsched.core.files import OwnFolder; import os; print(OwnFolder().path, flush=True); os.kill(os.getpid(), 9)"
    left = Path(python(code, code=-signal.SIGKILL, TMPDIR=str(tmp_path)).out.strip())
    assert left.is_dir()
    (tmp_path / "tiledsched-foreign").mkdir()  # no lock in it: not ours
    (tmp_path / "tiledsched-link").symlink_to(left)
    mine = files.OwnFolder()
    assert not left.exists()
    assert (tmp_path / "tiledsched-foreign").is_dir()
    other = files.OwnFolder()
    assert os.path.isdir(mine.path)  # whose process lives
    for folder in (mine, other, mine):
        folder.close()
        assert not os.path.exists(folder.path)
