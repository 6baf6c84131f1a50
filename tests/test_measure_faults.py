"""Every way in which measuring can fail, in the middle of a race, and the accuracy gate, through the real worker process.

The GPU is made up (fake_worker.py); the process, the pipe, the time limits and the race are those of a real one.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial

import provoke_faults
import pytest
from test_measure_gpu import PROBLEM, TIMEOUTS, candidate, command, is_gone

from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.registry import kernel_named
from tiledsched.kernels.attention.inputs import KINDS
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.runner import Candidate, Checked, Failed, Measurement
from tiledsched.tuning.race import Rules, race

RULES = Rules(opening_rounds=2, heat_rounds=3, most_rounds=8)

# What happens when, the kind it must be stored as, and words of its message. Failures of the compiler never reach a
# race; tests/test_build.py and tests/test_search_programs.py provoke them. The last says whether the worker is replaced.
FAULTS = [
    ({"load": "corrupt"}, FailureKind.ARTIFACT_CORRUPT, "device kernel image is invalid", False),
    ({"load": "crash"}, FailureKind.ARTIFACT_CORRUPT, "code -11 during load", True),
    ({"load": "driver"}, FailureKind.DRIVER_MISMATCH, "unsupported toolchain", False),
    ({"load": "memory"}, FailureKind.OUT_OF_MEMORY, "Out of memory", False),
    ({"load": "hang"}, FailureKind.HANG, "no answer to load", True),
    ({"load": "kill"}, FailureKind.WORKER_KILLED, "code -9 during load", True),
    ({"probe": "launch"}, FailureKind.LAUNCH_FAILURE, "invalid argument", False),
    ({"probe": "illegal"}, FailureKind.ILLEGAL_ADDRESS, "illegal memory access", True),
    ({"probe": "hang"}, FailureKind.HANG, "no answer to probe within", True),
    ({"probe": "memory"}, FailureKind.OUT_OF_MEMORY, "Out of memory", False),
    ({"probe": "ecc"}, FailureKind.GPU_LOST, "uncorrectable ECC", True),
    ({"check": "wrong"}, FailureKind.WRONG_RESULT, "random inputs: relative error", False),
    ({"check": "unwritten"}, FailureKind.WRONG_RESULT, "relative error inf", False),
    ({"check": "illegal"}, FailureKind.ILLEGAL_ADDRESS, "illegal memory access", True),
    ({"check": "hang"}, FailureKind.HANG, "no answer to check within", True),
    ({"check": "kill"}, FailureKind.WORKER_KILLED, "code -9 during check", True),
    ({"check": "exit"}, FailureKind.WORKER_KILLED, "code 3 during check", True),
    ({"check": "memory"}, FailureKind.OUT_OF_MEMORY, "Out of memory", False),
    ({"check": "ecc"}, FailureKind.GPU_LOST, "uncorrectable ECC", True),
    ({"sample": "launch"}, FailureKind.LAUNCH_FAILURE, "invalid argument", False),
    ({"sample": "assert"}, FailureKind.LAUNCH_FAILURE, "no word for", True),
    ({"sample": "illegal"}, FailureKind.ILLEGAL_ADDRESS, "illegal memory access", True),
    ({"sample": "hang"}, FailureKind.HANG, "no answer to sample within", True),
    ({"sample": "kill"}, FailureKind.WORKER_KILLED, "code -9 during sample", True),
    ({"sample": "ecc"}, FailureKind.GPU_LOST, "uncorrectable ECC", True),
]
BY_THE_COMPILER = {FailureKind.COMPILE_ERROR, FailureKind.COMPILE_TIMEOUT, FailureKind.COMPILER_KILLED}


def test_every_kind_of_failure_is_provoked():
    others = BY_THE_COMPILER | {FailureKind.OTHER_NUMBERS}  # no fault: results are right
    assert {kind for _, kind, *_ in FAULTS} | others == set(FailureKind)


def new_runner(mode="ready"):
    return GpuRunner(kernel_named("attention"), timeouts=TIMEOUTS, gap_ms=0.0, worker_command=command(mode))


@pytest.fixture(scope="module")
def runner():
    """One for all tests: its workers are replaced when they die."""
    made = new_runner()
    yield made
    made.close()


def begun(runner, problem):
    """The runner at the beginning of a problem."""
    runner.begin(problem)
    return runner


EVERY_DAY = (
    ("load", "corrupt"),
    ("load", "crash"),
    ("load", "kill"),
    ("probe", "hang"),
    ("check", "wrong"),
    ("check", "kill"),
    ("sample", "ecc"),
)
"""One fault of each stage, and each way to end; the others take half a minute together."""


@pytest.mark.parametrize(
    ("script", "kind", "words", "lost"),
    [pytest.param(*each, marks=[] if set(each[0].items()) & set(EVERY_DAY) else pytest.mark.slow) for each in FAULTS],
    ids=str,
)
def test_a_fault_in_mid_race_costs_one_candidate(runner, monkeypatch, script, kind, words, lost):
    """The faulty one would be the fastest; of four others each is measured, and the right one wins."""
    times_us = (100.0, 104.0, 130.0, 900.0)
    good, bad, reported = [candidate(us, noise=0.002) for us in times_us], candidate(50.0, **script), []
    limits = {f"{stage}_s": 0.8 for stage, what in script.items() if what == "hang"}
    monkeypatch.setattr(runner, "_timeouts", replace(TIMEOUTS, **limits))
    begun(runner, PROBLEM).wait()
    first = runner._worker
    result = race(runner, PROBLEM, [*good[:2], bad, *good[2:]], rules=RULES, on_outcome=reported.append)
    assert (runner._worker is not first) is is_gone(first.process) is lost
    assert sorted(outcome.schedule.id for outcome in reported) == sorted(c.schedule.id for c in [*good, bad])
    assert reported == list(result.outcomes)
    (failed,) = (outcome for outcome in reported if isinstance(outcome, Failed))
    assert (failed.schedule, failed.fingerprint) == (bad.schedule, bad.artifact.fingerprint)
    assert (failed.failure.kind, words in failed.failure.message) == (kind, True)
    measured = {outcome.schedule: outcome for outcome in reported if isinstance(outcome, Measurement)}
    medians = [measured[each.schedule].median_us for each in good]
    assert medians == pytest.approx(times_us, rel=0.003)
    dropped = [len(measured[each.schedule].samples_us) for each in good[2:]]
    assert dropped in ([2, 1], [1, 1])  # dropped at once; hopeless
    assert (result.winner.schedule, result.runner_up.schedule) == (good[0].schedule, good[1].schedule)


def test_two_faults_of_one_race(runner):
    """One breaks the context while it is looked at, the other kills the process while everyone is timed."""
    good = [candidate(us) for us in (100.0, 140.0)]
    bad = [candidate(50.0, probe="illegal"), candidate(51.0, sample="kill")]
    result = race(begun(runner, PROBLEM), PROBLEM, [*bad, *good], rules=RULES)
    kinds = {o.schedule: o.failure.kind for o in result.outcomes if isinstance(o, Failed)}
    assert kinds == {bad[0].schedule: FailureKind.ILLEGAL_ADDRESS, bad[1].schedule: FailureKind.WORKER_KILLED}
    assert result.winner.schedule == good[0].schedule
    assert len(result.outcomes) == 4


def test_a_gpu_that_does_not_come_back_ends_the_race_and_the_culprit_is_told(tmp_path):
    field = [candidate(100.0), candidate(50.0, probe="ecc"), candidate(140.0)]
    reported, runner = [], new_runner(f"ready:{tmp_path / 'started'}")
    with contextlib.closing(runner):
        with pytest.raises(MeasureError, match="no CUDA-capable device"):
            race(begun(runner, PROBLEM), PROBLEM, field, rules=RULES, on_outcome=reported.append)
        with pytest.raises(MeasureError, match="no CUDA-capable device"):  # whoever asks again is told again
            runner.check(candidate())
    told = [(outcome.schedule, outcome.failure.kind) for outcome in reported]
    assert told == [(field[1].schedule, FailureKind.GPU_LOST)]


# The gate. Eight key/value heads: one for each kind of adversarial inputs.
EIGHT = PROBLEM.replace(batch=8)


def with_mode(one: Candidate, accum_mode: str) -> Candidate:
    return Candidate(schedule=one.schedule.replace(accum_mode=accum_mode), artifact=one.artifact)


@pytest.mark.parametrize("problem", [EIGHT, EIGHT.replace(dtype="bfloat16"), EIGHT.replace(causal=True)], ids=str)
def test_a_right_kernel_passes_the_begun(runner, problem):
    checked = begun(runner, problem).check(candidate())
    assert isinstance(checked, Checked), checked
    largest = 4e-4 if problem.dtype == "float16" else 3e-3
    assert 0 < checked.accuracy.worst_tile_error < largest
    assert 0 < checked.accuracy.adversarial_tile_error < largest
    assert checked.accuracy.adversarial_tile_error != checked.accuracy.worst_tile_error


def test_a_result_wrong_on_adversarial_inputs_only(runner):
    """Key/value head 5 holds values that are large; with three heads, no head does. Sums in float16 need not hold them."""
    narrow = candidate(check="narrow")
    failure = begun(runner, EIGHT).check(narrow)
    assert (KINDS.index("large"), failure.kind) == (5, FailureKind.WRONG_RESULT)
    assert failure.message.startswith("large inputs: relative error inf above 0.004 in Out[5, 0], row tile 0")
    checked = runner.check(with_mode(narrow, "fp16"))
    assert isinstance(checked, Checked), checked
    assert checked.accuracy.adversarial_tile_error < 1e-3
    assert isinstance(runner.check(with_mode(candidate(check="wrong"), "fp16")), Failure)
    assert isinstance(begun(runner, EIGHT.replace(batch=3)).check(narrow), Checked)


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        # One batch entry, 16 query heads of 8 key/value heads: heads 10 and 11 share the large values.
        (
            {"batch": 1, "heads": 16, "kv_heads": 8},
            "narrow",
            "large inputs: relative error inf above 0.004 in Out[0, 10]",
        ),
        # `wrong-head` adds one to the last head of the first batch entry: of its three tiles the first is named.
        ({}, "wrong-head", "in Out[0, 1], row tile 0, the first of 3 wrong tiles of 12"),
    ],
)
def test_where_a_result_is_wrong(runner, changes, check, words):
    assert words in begun(runner, PROBLEM.replace(**changes)).check(candidate(check=check)).message


# The script that provokes faults on a real GPU.


@pytest.mark.slow
def test_the_script_on_a_made_up_gpu(tmp_path, capsys):
    out = tmp_path / "faults.json"
    faults = ["stray_write", "wrong_result", "worker_killed", "truncated_cubin", "out_of_memory"]
    assert provoke_faults.main(["--fake", "--out", str(out), "--only", ",".join(faults)]) == 0
    record = json.loads(out.read_text())
    assert record["device"]["name"] == "Made-up GPU"
    assert record["made_up"] is True
    assert [row["fault"] for row in record["faults"]] == faults
    for row in record["faults"]:
        assert row["outcome_kind"] == row["expected_kind"], row
        assert (row["good_measured"], row["winner_unchanged"], row["lost"]) == (3, True, False)
        assert row["message"]
    assert "nothing lost in 5 faults" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_tells_what_was_lost(tmp_path, capsys, monkeypatch):
    """A provocation that crashes stops no other; a fault that was no fault, and a winner that changed, are told."""

    def crash(bench, runner, fault):
        raise RuntimeError("could not be provoked")

    def harmless(bench, runner, fault):
        return bench._candidate(10.0)

    one = partial(provoke_faults.Fault, how="", expected=FailureKind.HANG)
    faults = (
        one(name="crash", provoke=crash),
        one(name="harmless", provoke=harmless),
        one(name="grid_too_large", expected=FailureKind.LAUNCH_FAILURE),
    )
    monkeypatch.setattr(provoke_faults, "FAULTS", faults)
    out = tmp_path / "faults.json"
    assert provoke_faults.main(["--fake", "--out", str(out)]) == 1
    crashed, faster, good = json.loads(out.read_text())["faults"]
    assert (crashed["lost"], crashed["good_measured"], crashed["outcome_kind"]) == (True, 0, "")
    assert crashed["message"] == "RuntimeError: could not be provoked"
    assert (faster["lost"], faster["good_measured"], faster["winner_unchanged"]) == (True, 3, False)
    assert good["lost"] is False
    assert "lost: crash, harmless" in capsys.readouterr().out
