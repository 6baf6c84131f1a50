"""The GPU runner with its real worker process on a made-up GPU (fake_worker.py): failures cost one candidate each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fake_worker
import pytest
from fake_worker import artifact, cubin

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.gpu import SHORT_GAP_MS, GpuRunner, Timeouts
from tiledsched.measure.runner import Batch, Candidate, Checked

PROBLEM = Attention.problem(seq_q=40, seq_k=24, head_dim=16, batch=2, heads=2, kv_heads=1)
TIMEOUTS = Timeouts(
    start_s=60.0, begin_s=60.0, load_s=20.0, probe_s=20.0, check_s=20.0, sample_s=20.0, each_sample_s=0.01
)
"""For workers that answer, at any load."""
SCRIPT = str(Path(fake_worker.__file__))


def command(mode="ready"):
    return sys.executable, SCRIPT, mode


def candidate(us=100.0, *, tile_m=16, **script) -> Candidate:
    """A candidate told apart by what it does."""
    made = artifact(cubin(us, **script), stable_id([us, script], 24))
    name = "-".join([str(us), *map(str, script.values())])
    schedule = (
        space_for("sm_90", Attention).default(PROBLEM).replace(tile_m=tile_m, q_subtiles=1, persistent="no", name=name)
    )
    return Candidate(schedule=schedule, artifact=made)


@pytest.fixture
def make_runner():
    made = []

    def make(mode="ready", timeouts=TIMEOUTS, problem=PROBLEM, **more):
        runner = GpuRunner(kernel_named("attention"), timeouts=timeouts, worker_command=command(mode), **more)
        made.append(runner)
        if problem is not None:
            runner.begin(problem)
        runner.wait()
        return runner

    yield make
    for runner in made:
        runner.close()


@pytest.fixture(scope="module")
def shared():
    """A runner for all tests that leave it usable: its workers are replaced when they die."""
    runner = GpuRunner(kernel_named("attention"), timeouts=TIMEOUTS, worker_command=command())
    yield runner
    runner.close()


@pytest.fixture
def runner(shared):
    """The shared runner, at the beginning of a problem."""
    shared.begin(PROBLEM)
    shared.wait()
    return shared


def is_gone(process: subprocess.Popen) -> bool:
    return process.returncode is not None and not Path(f"/proc/{process.pid}").exists()


def assert_wrong(runner: GpuRunner, one: Candidate, words: str) -> None:
    failure = runner.check(one)
    assert failure.kind is FailureKind.WRONG_RESULT
    assert words in failure.message


def assert_usable(runner: GpuRunner) -> None:
    checked = runner.check(candidate(77.0))
    assert isinstance(checked, Checked), checked
    batch = runner.sample([candidate(77.0)], rounds=2, regime="burst")[0]
    assert batch.samples_us == pytest.approx((77.0, 77.0))


@pytest.mark.parametrize("problem", [PROBLEM, PROBLEM.replace(dtype="bfloat16", causal=True)], ids=str)
def test_right_candidate(runner, problem):
    runner.begin(problem)
    assert (runner.device.name, runner.device.arch, runner.device.sm_count) == ("Made-up GPU", "sm_90", 8)
    assert [runner.probe(candidate(us)) for us in (123.0, 9e4)] == [pytest.approx(123.0), pytest.approx(9e4)]
    checked = runner.check(candidate(123.0))
    assert (checked.first_look_us, checked.accuracy.repeatable) == (pytest.approx(123.0), True)
    assert 0 < checked.accuracy.worst_tile_error < 1e-2
    assert 0 < checked.accuracy.max_abs_error < 0.05
    assert not runner.check(candidate(50.0, check="unrepeatable")).accuracy.repeatable
    other, again = (runner.check(each).accuracy for each in (candidate(50.0, check="other-bits"), candidate(99.0)))
    assert (again.same_numbers(checked.accuracy), again.same_numbers(other), other.repeatable) == (True, False, True)
    inputs, outputs = again.outputs.split(".")
    assert len(inputs) == len(outputs) == 16
    assert other.outputs.startswith(inputs)


def test_a_race_that_shows_only_in_launches_in_a_row(runner):
    assert_wrong(runner, candidate(50.0, check="wrong-in-a-row"), "after launches in a row")
    assert isinstance(runner.check(candidate(9000.0, check="wrong-in-a-row")), Checked)  # slow ones are not repeated


OTHER = PROBLEM.replace(causal=True, alignment="bottom_right", value_dim=8, lse=True)
"""Rows that see nothing, another width of values, and the log-sum-exp."""


@pytest.mark.parametrize("problem", [OTHER, OTHER.replace(seq_q=8, dtype="bfloat16")], ids=str)
@pytest.mark.parametrize("kv_splits", [1, 4])
def test_other_problems(runner, problem, kv_splits):
    runner.begin(problem)
    right = candidate(123.0)
    right = replace(right, schedule=right.schedule.replace(kv_splits=kv_splits))
    assert isinstance(runner.check(right), Checked)
    assert_samples(runner, {right: 123.0}, "burst", 0)
    assert_samples(runner, {right: 123.0}, "sustained", 20)
    for act, what in (
        ("wrong-lse", "random inputs: error 1 above 0.002 in Lse[0, 1], row tile"),
        ("unwritten-lse", "error inf above 0.002 in Lse"),
        ("wrong", "relative error"),
    ):
        assert_wrong(runner, candidate(124.0, check=act), what)


def assert_samples(runner, us_of, regime="burst", graph_launches=0):
    """Candidates take the times they should, and are timed one by one, or in graphs of so many launches; their conditions."""
    batches = runner.sample(list(us_of), rounds=3, regime=regime)
    assert [batch.samples_us for batch in batches] == [pytest.approx((us,) * 3) for us in us_of.values()]
    assert {batch.conditions.graph_launches for batch in batches} == {graph_launches}
    return batches[0].conditions


def test_time_limits_follow_the_expectation(runner, monkeypatch):
    """A problem of 6 GFLOP may take 0.06 s longer at 100 GFLOP/s; a candidate seen at 20 ms gets 10 times that a launch."""
    limits = {}
    ask = type(runner._worker).ask

    def watched(worker, timeout_s, verb, *arguments):
        limits[verb] = timeout_s
        return ask(worker, timeout_s, verb, *arguments)

    monkeypatch.setattr(type(runner._worker), "ask", watched)
    runner.probe(candidate(2e4))
    assert limits["probe"] == pytest.approx(TIMEOUTS.probe_s + PROBLEM.flops / 1e11)
    runner.check(candidate(2e4))
    assert limits["check"] == pytest.approx(TIMEOUTS.check_s + 3 * 10 * 0.02)
    runner.sample([candidate(2e4)], rounds=5, regime="burst")
    assert limits["sample"] == pytest.approx(TIMEOUTS.sample_s + 5 * (TIMEOUTS.each_sample_s + 10 * 0.02))


def test_pacing_is_calibrated_once_per_problem(make_runner):
    runner = make_runner()
    pair = {candidate(100.0): 100.0, candidate(200.0): 200.0}
    for each in pair:
        runner.probe(each)
    assert runner.gap_trials == ()
    conditions = assert_samples(runner, pair)
    trial, longer = runner.gap_trials
    assert (trial.gap_ms, trial.median_us) == (pytest.approx(0.2), pytest.approx(100.0))  # the fastest, twice its time
    assert (longer.gap_ms, conditions.gap_ms) == (pytest.approx(0.4), trial.gap_ms)
    assert_samples(runner, pair)
    assert runner.gap_trials == (trial, longer)
    given = make_runner(gap_ms=1.0)
    assert assert_samples(given, pair).gap_ms == 1.0
    assert given.gap_trials == ()


def test_short_launches_are_timed_in_graphs_at_the_power_cap_and_not_calibrated(runner):
    """All of a problem in the same way, and the time is that of one launch. Paced ones are timed one by one."""
    for fastest, graph_launches in ((140.0, 20), (160.0, 0)):
        runner.begin(PROBLEM)
        pair = {candidate(fastest): fastest, candidate(200.0): 200.0}
        for each in pair:
            runner.probe(each)
        assert_samples(runner, pair, "burst", 0)
        assert_samples(runner, pair, "sustained", graph_launches)
    before = runner.gap_trials
    runner.begin(PROBLEM)
    runner.probe(candidate(30.0))
    assert assert_samples(runner, {candidate(30.0): 30.0}).gap_ms == SHORT_GAP_MS
    assert runner.gap_trials is before


def test_a_calibration_that_fails_costs_nobody_else(runner):
    group = {candidate(50.0, calibrate="exit"): 50.0, candidate(60.0): 60.0}
    for each in group:
        runner.probe(each)
    assert assert_samples(runner, group).gap_ms == 10.0


@pytest.fixture
def together(runner, monkeypatch):
    """Notes how many candidates are timed together, and for how many rounds; those in company fail if so told."""
    real = runner._sample_together

    def watched(group, rounds, regime):
        watched.noted.append((len(group), rounds))
        return watched.failure if watched.failure and len(group) > 1 else real(group, rounds, regime)

    watched.failure, watched.noted = None, []
    monkeypatch.setattr(runner, "_sample_together", watched)
    return watched


def test_the_others_are_still_interleaved(runner, together):
    """After the culprit is found, the healthy ones are timed in one run, not one after another."""
    group = [candidate(10.0), candidate(20.0, sample="exit"), candidate(30.0), candidate(40.0, load="corrupt")]
    batches = runner.sample(group, rounds=4, regime="burst")
    assert [isinstance(batch, Failure) for batch in batches] == [False, True, False, True]
    assert together.noted == [(4, 4), (1, 1), (1, 1), (1, 1), (1, 1), (2, 4)]
    batches = runner.sample([candidate(1.0, sample="launch"), candidate(2.0, sample="exit")], rounds=2, regime="burst")
    assert [batch.kind for batch in batches] == [FailureKind.LAUNCH_FAILURE, FailureKind.WORKER_KILLED]
    together.failure = Failure(kind=FailureKind.HANG, message="only in company")
    assert_samples(runner, {candidate(10.0): 10.0, candidate(20.0): 20.0})


REQUESTS = {
    "check": (Checked, lambda runner: runner.check(candidate(10.0))),
    "sample": (Batch, lambda runner: runner.sample([candidate(10.0)], rounds=1, regime="burst")[0]),
    "begin": (type(None), lambda runner: runner.begin(PROBLEM.replace(seq_q=8))),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_worker_killed_from_outside_between_requests(runner, request_):
    assert isinstance(runner.check(candidate(10.0)), Checked)
    victim, (kind, ask) = runner._worker.process, REQUESTS[request_]
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    assert isinstance(ask(runner), kind)
    assert is_gone(victim)
    assert_usable(runner)


def test_ctrl_c_while_waiting_leaves_no_stale_answer(runner, monkeypatch):
    worker = runner._worker

    def interrupted(timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.connection, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.ask(1.0, "check", None)
    assert is_gone(worker.process)
    assert_usable(runner)


def test_the_worker_ignores_ctrl_c(runner):
    """The terminal sends it to the whole process group; only the parent decides when the worker ends."""
    os.kill(runner._worker.process.pid, signal.SIGINT)
    worker = runner._worker
    assert_usable(runner)
    assert runner._worker is worker


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("no-gpu", "no CUDA-capable device"),
        ("crash", "No module named 'cupy'"),
        ("silent", "no answer to start within 0.5 s"),
    ],
)
def test_no_start(mode, words):
    """Neither a start nor a `begin` is waited for before it is needed; what does not start leaves nothing behind."""
    timeouts = Timeouts(start_s=0.5 if mode == "silent" else 20.0)
    runner = GpuRunner(kernel_named("attention"), timeouts=timeouts, worker_command=command(mode))
    runner.begin(PROBLEM)
    for _ in range(2):  # whoever asks again is told again
        with pytest.raises(MeasureError, match=words) as caught:
            _ = runner.device
        assert str(caught.value).endswith("run: tiledsched doctor")
    assert is_gone(runner._worker.process)
    assert not Path(runner._worker._folder.path).exists()


@pytest.mark.parametrize("ask", [GpuRunner.wait, lambda runner: runner.check(candidate(10.0))], ids=["wait", "check"])
def test_a_problem_that_does_not_fit_is_told_by_the_next_request(runner, ask):
    runner.begin(PROBLEM.replace(head_dim=250))
    with pytest.raises(MeasureError, match=r"Out of memory.*try smaller sizes"):
        ask(runner)
    runner.begin(PROBLEM)
    assert_usable(runner)


def test_same_seed_same_requests(make_runner, monkeypatch):
    def requests(runner):
        sent = []
        worker = runner._worker
        real = worker.connection.send
        monkeypatch.setattr(worker.connection, "send", lambda request: (sent.append(request), real(request))[1])
        runner.begin(PROBLEM)
        runner.sample([candidate(10.0)], rounds=1, regime="burst")
        return sent

    first, second, other = (requests(make_runner(seed=seed, problem=None)) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_close_twice_leaves_nothing_behind(make_runner):
    runner = make_runner()
    process, folder = runner._worker.process, Path(runner._worker._folder.path)
    runner.check(candidate(10.0))
    assert list(folder.glob("*.cubin"))
    runner.close()
    runner.close()
    assert is_gone(process)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "idle", "hanging"])
def test_the_worker_ends_with_its_parent(when, monkeypatch, tmp_path):
    """Even when the parent is killed, before it heard anything or in the middle of a kernel that never ends."""
    program = f"""
import sys
sys.path[:0] = {[str(Path(SCRIPT).parent)]!r}
from test_measure_gpu import *
runner = GpuRunner(kernel_named("attention"), timeouts=Timeouts(), worker_command=command())
runner.begin(PROBLEM)
if {when!r} != "starting":
    runner.wait()
print(runner._worker.process.pid, runner._worker._folder.path, flush=True)
runner.check(candidate(check="hang")) if {when!r} == "hanging" else time.sleep(600)
"""
    monkeypatch.setenv("FAKE_WORKER_HANGS", str(tmp_path / "hangs"))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    worker, folder = parent.stdout.readline().split()
    if when == "hanging":
        wait_for_file(tmp_path / "hangs")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while state_of(worker) != "gone" or Path(folder).exists():
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.05)


def wait_for_file(path: Path) -> None:
    """Until a process has made the file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path}"
        time.sleep(0.01)


def state_of(pid: str) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return "gone" if state == "Z" else state  # a zombie nobody reaps, in a container without an init process


def test_the_worker_holds_neither_torch_nor_a_compiler(python):
    program = """
import sys
import fake_worker
sys.modules["cupy"] = fake_worker.fake_cupy("ready")
import tiledsched.measure.worker
heavy = {"torch", "cuda", "optuna", "sqlalchemy", "pebble"}
print(sorted(heavy & set(sys.modules)))
"""
    assert python(program).out == "[]\n"


def test_who_runs_beside_is_told_with_the_samples_and_by_itself(make_runner):
    runner = make_runner("crowded")
    assert assert_samples(runner, {candidate(100.0): 100.0}).concurrent_pids == (4711,)
    trials = runner.gap_trials
    assert trials
    assert runner._gap_ms is None  # what was found beside it is found again
    (told,) = runner.sample([candidate(100.0)], rounds=0, regime="burst")
    assert (told.samples_us, told.conditions.concurrent_pids) == ((), (4711,))
    assert runner.gap_trials is trials


@pytest.mark.slow
def test_others_are_looked_for_since_the_first_of_a_row_of_requests(make_runner):
    runner = make_runner("crowded", gap_ms=0.0)
    looked_back, since = [], []
    for pause_s in (1.1, 0.1, 0.0):
        since.append(time.time())
        runner.probe(candidate(100.0))
        time.sleep(0.1)
        looked_back += runner.sample([candidate(100.0)], rounds=1, regime="burst")[0].conditions.others
        answered = time.time()
        time.sleep(pause_s)
    first, after_a_rest, in_a_row = looked_back
    assert first >= 100
    assert 100 <= after_a_rest <= (answered - since[1]) * 1e3 + 1  # not since the first
    assert in_a_row >= (200 if since[2] + 0.1 < answered < since[1] + 1 else 100)  # at load, that too was a rest


def test_that_it_is_not_told_who_runs_is_said_once(make_runner, caplog):
    runner = make_runner("doubtful")
    for _ in range(2):
        assert runner.sample([candidate(100.0)], rounds=2, regime="burst")[0].conditions.concurrent_pids is None
    (message,) = caplog.messages
    assert "has the GPU open, and NVML does not tell here whether it runs" in message


def test_rows_have_the_bits_of_the_first_rows_of_more(runner):
    few, more = PROBLEM, PROBLEM.replace(batch=3)
    first = runner.rows(candidate(), few, more, [few])
    both = runner.rows(candidate(), more, more, [few, more])
    assert (both[:1], both[0] == both[1]) == (first, False)
    other = runner.rows(candidate(rows="other-bits"), few, more, [few])
    assert other not in (first, runner.rows(candidate(), few, few, [few]))
    assert runner.rows(candidate(rows="launch"), few, more, [few]).kind is FailureKind.LAUNCH_FAILURE
    assert_usable(runner)
