"""One GPU, one measurer: a lock that processes and users share, that ends with its holder, and that nobody can abuse."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import platformdirs
import pytest
from test_measure_gpu import PROBLEM, SCRIPT, TIMEOUTS, assert_usable, candidate, command, make_runner, wait_for_file
from test_rooms import arrows, files_of

from tiledsched.core.config import configure
from tiledsched.core.errors import MeasureError
from tiledsched.core.registry import kernel_named
from tiledsched.measure import gpu, lock

assert make_runner  # a fixture
UUID = "GPU-made-up"
HOLD = """
import sys, time
from pathlib import Path
from tiledsched.measure import lock
lock.FOLDER = Path(sys.argv[1])
lock.hold("GPU-made-up", "Made-up GPU")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where locks are, for this test."""
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    monkeypatch.setattr(lock, "POLL_S", 0.02)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "own"))
    yield tmp_path
    assert not lock._held, "a lock was not released"


@pytest.fixture
def start(folder):
    """Start a process that holds the GPU, or waits for it."""
    started = []

    def start_process(code=HOLD, *, held=True):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        if held:
            assert process.stdout.readline() == "held\n", process.stderr.read()
        return process

    yield start_process
    for process in started:
        process.kill()
        process.communicate()


def place(folder: Path) -> Path:
    return folder / f"tiledsched-{UUID}.lock"


def is_free(folder: Path) -> bool:
    """Whether somebody else could take it: locks of two opened files exclude each other in one process, too."""
    with place(folder).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def hold_and_release() -> None:
    held = lock.hold(UUID, "Made-up GPU")
    assert held is not None
    held.release()


def test_who_waits_no_longer_is_told_for_whom(start):
    holder = start()
    for wait_s in (0, 1):
        began = time.monotonic()
        with configure(gpu_wait=wait_s), pytest.raises(MeasureError) as caught:
            lock.hold(UUID, "Made-up GPU")
        assert wait_s <= time.monotonic() - began < wait_s + 9
        assert str(caught.value).startswith(f"GPU Made-up GPU ({UUID}) is held by pid {holder.pid} (")
        for words in (time.strftime("since %H"), "TILEDSCHED_GPU_WAIT"):
            assert words in str(caught.value)
        with configure(gpu_wait=0), pytest.raises(MeasureError, match="is held by"):  # no worker starts
            gpu.GpuRunner(kernel_named("attention"), worker_command=["/no such program"], gpu=(UUID, "Made-up GPU"))


def test_a_killed_holder_frees_it_and_waiting_is_said_once(start, caplog, monkeypatch):
    holder, polls = start(), []

    def pause(seconds) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            holder.kill()
            holder.wait()

    monkeypatch.setattr(lock.time, "sleep", pause)
    hold_and_release()
    assert (len(polls), len(caplog.messages)) == (3, 1)
    assert caplog.messages[0].startswith(f"waiting for GPU Made-up GPU ({UUID}): held by pid {holder.pid} (")


@pytest.mark.slow
def test_waiting_ends_with_ctrl_c(start):
    start()
    waiting = start(held=False)
    assert waiting.stderr.readline().startswith("waiting for GPU")
    waiting.send_signal(signal.SIGINT)
    waiting.wait(timeout=20)
    assert "KeyboardInterrupt" in waiting.stderr.read()


def test_one_process_may_hold_it_several_times_in_a_file_that_every_user_can_open(folder):
    before = os.umask(0o077)
    try:
        first, second = lock.hold(UUID, "Made-up GPU"), lock.hold(UUID, "Made-up GPU")
    finally:
        os.umask(before)
    first.release()
    assert not is_free(folder)
    second.release()
    assert is_free(folder)
    assert (place(folder).read_text(), place(folder).stat().st_mode & 0o777) == ("", 0o666)


def test_odd_uuids_stay_in_the_folder_and_a_gpu_without_one_is_not_locked(folder):
    assert lock.hold("", "") is None
    assert list(folder.iterdir()) == []
    lock.hold("../MIG-1/2/..", "").release()
    assert [path.name for path in folder.iterdir()] == ["tiledsched----MIG-1-2---.lock"]


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to, lambda path, victim: os.mkfifo(path)])
def test_what_is_planted_is_refused_and_a_file_of_ones_own_taken(plant, folder, caplog):
    victim = folder / "victim"
    victim.write_text("precious")
    plant(place(folder), victim)
    held = lock.hold(UUID, "Made-up GPU")
    assert victim.read_text() == "precious"
    assert not is_free(folder / "own")
    held.release()
    for words in ("cannot be a lock", "other users are not waited for"):
        assert words in caplog.messages[0]


def test_where_nothing_can_be_written_nothing_is_locked(folder, caplog, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setattr(lock, "FOLDER", folder / "nowhere")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(folder / "file" / "own"))
    assert lock.hold(UUID, "Made-up GPU") is None
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "other users are not waited for",
        "nobody is waited for",
    ]


@pytest.mark.parametrize(
    "text", [b"\x1b[2J\x1b]0;title\x07pid\r\n\xe2\x80\xae 1" + b"x" * 1_000_000, b"", b"\xff\x00", b"\n\n"]
)
def test_whatever_the_file_says_is_harmless(text, folder):
    place(folder).write_bytes(text)
    with place(folder).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with configure(gpu_wait=0), pytest.raises(MeasureError) as caught:
            lock.hold(UUID, "Made-up GPU")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500
    hold_and_release()


def test_a_runner_holds_the_gpu_until_it_is_closed(folder):
    runner = gpu.GpuRunner(
        kernel_named("attention"), timeouts=TIMEOUTS, worker_command=command(), gpu=(UUID, "Made-up GPU")
    )
    assert not is_free(folder)
    runner.begin(PROBLEM)
    assert_usable(runner)
    runner.check(candidate(check="exit"))  # a new worker
    assert_usable(runner)
    assert not is_free(folder)
    runner.close()
    runner.close()
    assert is_free(folder)


def test_what_the_worker_says_is_held_before_anything_runs_on_it(start, make_runner, monkeypatch):
    holder = start()
    sent = []
    real = gpu.WorkerProcess.send
    monkeypatch.setattr(
        gpu.WorkerProcess, "send", lambda self, verb, *more: (sent.append(verb), real(self, verb, *more))[1]
    )
    runner = gpu.GpuRunner(kernel_named("attention"), timeouts=TIMEOUTS, worker_command=command("named"))
    try:
        runner.begin(PROBLEM)
        with configure(gpu_wait=0):
            for _ in range(2):  # whoever asks again is told again
                with pytest.raises(MeasureError, match="is held by"):
                    _ = runner.device
        assert sent == []
        holder.kill()
        holder.wait()
        assert_usable(runner)
        assert sent[0] == "begin"
        assert set(lock._held) == {UUID}
        other = make_runner("named")
        assert_usable(other)
    finally:
        runner.close()
    assert set(lock._held) == {UUID}
    other.close()


@pytest.mark.slow
def test_no_gpu_is_free_while_a_worker_uses_it(start, folder, monkeypatch, tmp_path):
    """The parent is killed in the middle of a kernel that never ends; its worker notices within a second."""
    monkeypatch.setenv("FAKE_WORKER_HANGS", str(hangs := tmp_path / "hangs"))
    holder = start(f"""
import sys
sys.path[:0] = {[str(Path(SCRIPT).parent)]!r}
from test_measure_lock import *
lock.FOLDER = Path(sys.argv[1])
runner = gpu.GpuRunner(kernel_named("attention"), worker_command=command(), gpu=(UUID, "Made-up GPU"))
runner.begin(PROBLEM)
runner.wait()
print("held", runner._worker.process.pid, sep=chr(10), flush=True)
runner.check(candidate(check="hang"))
""")
    worker = holder.stdout.readline().strip()
    wait_for_file(hangs)
    holder.kill()
    holder.wait()
    hold_and_release()  # waits
    with suppress(OSError):  # who ends has let go of all its files
        assert os.listdir(f"/proc/{worker}/fd") == [], "the GPU was free before the worker had ended"


def test_what_serves_neither_locks_nor_waits():
    for path in [each for room in ("serve", "attention", "functions") for each in files_of(room)]:
        reached = {module for module, _ in arrows(path)}
        assert not reached & {"tiledsched.measure.lock", "tiledsched.measure.gpu"}, path
