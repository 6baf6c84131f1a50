"""Any declared kernel through the real measuring process on a made-up GPU: in place, lists, several launches, integers, fp8."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest
from fake_worker import artifact, cubin
from sample_kernels import KERNELS, Accumulate, CountUp, Dequantize, Pick, RowSums, ScaleAdd, first
from test_measure_gpu import TIMEOUTS, assert_wrong, command

from tiledsched.build.cubin import join
from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import FailureKind, MeasureError
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention_backward import AttentionBackward
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.runner import Candidate, Checked


@pytest.fixture(scope="module")
def begin():
    """Begin a problem of a kernel; each kernel has one runner for all tests."""
    made = {}

    def start(kernel, problem=None):
        if kernel not in made:
            made[kernel] = GpuRunner(kernel, timeouts=TIMEOUTS, gap_ms=0.0, worker_command=command())
        made[kernel].begin(problem or first(kernel)[0])
        return made[kernel]

    yield start
    for runner in made.values():
        runner.close()


def candidate(kernel, us=100.0, **script) -> Candidate:
    made = artifact(cubin(us, **script), stable_id([us, script], 24))
    if kernel.launches is not None:
        made = join([made, dataclasses.replace(made, fingerprint="0" * 24)])
    return Candidate(schedule=first(kernel)[1], artifact=made)


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_declared_kernel(begin, kernel):
    runner = begin(kernel)
    launches = 2 if kernel is RowSums else 1
    assert runner.probe(candidate(kernel)) == pytest.approx(100.0 * launches)
    checked = runner.check(candidate(kernel))
    assert isinstance(checked, Checked), checked
    assert checked.accuracy.repeatable
    assert checked.accuracy.worst_tile_error < 5e-3
    assert_wrong(runner, candidate(kernel, 90.0, check="wrong"), "inputs: ")
    for regime in ("burst", "sustained"):
        (batch,) = runner.sample([candidate(kernel)], rounds=3, regime=regime)
        assert batch.samples_us == pytest.approx((100.0 * launches,) * 3)
        graphs = regime == "sustained" and kernel not in (Accumulate, RowSums)  # 200 us need none
        assert batch.conditions.graph_launches == (20 if graphs else 0)


@pytest.mark.parametrize(
    ("kernel", "changes", "check", "words"),
    [
        (ScaleAdd, {"order": "column"}, "wrong", "in Out, row tile 0"),
        (ScaleAdd, {"rows": 33, "columns": 77, "dtype": "bfloat16"}, "wrong", "in Out, row tile 0"),
        (
            Pick,
            {},
            "wrong",
            "random inputs: unequal elements 1 above 0 in Out, row tile 0, column tile 3, the first of 1 wrong tiles of 4",
        ),
        (Dequantize, {}, "unwritten", "relative error inf above 0.008 in Out, row tile 0"),
        (CountUp, {}, "unzeroed", "Counter must be left zero"),  # and costs nobody else
        # Launches in a row find the array as it was, and a right kernel is right in each.
        (Accumulate, {}, "wrong-in-a-row", "after launches in a row, relative error"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_and_costs_nobody_else(begin, kernel, changes, check, words):
    runner = begin(kernel, first(kernel)[0].replace(**changes))
    assert_wrong(runner, candidate(kernel, 50.0, check=check), words)
    right = runner.check(candidate(kernel))
    assert isinstance(right, Checked), right
    assert right.accuracy.repeatable


FILE = """
import cuda.tile as ct
import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel

def copy(X, Out, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)))

class Copy(Kernel):
    function = copy
    count = ts.dim()
    X = ts.array("count", dtype="float32")
    Out = ts.out("count", dtype="float32")
    knobs = {{"TILE": [128, 256]}}

    def grid(p, s, device):
        {grid}

    def reference(xp, X):
        {reference}
"""


@pytest.fixture
def declared(tmp_path):
    def write(grid="return -(-p.count // s['TILE'])", reference="return X"):
        path = tmp_path / "copies.py"
        path.write_text(textwrap.dedent(FILE.format(grid=grid, reference=reference)))
        return load_kernel(f"{path}:Copy")

    return write


@pytest.mark.parametrize("reference", ["return X[:-1]", "return X / xp.nothing_of_that_name"])
def test_a_reference_that_is_wrong_is_told(begin, declared, reference):
    kernel = declared(reference=reference)
    with pytest.raises(MeasureError, match=r"cannot prepare .*; correct what the kernel declares"):
        begin(kernel, kernel.problem(count=1000)).wait()


def test_a_grid_that_fails_costs_the_candidate(begin, declared):
    """Of a kernel in a file, which is in none of the places where modules are looked for."""
    kernel = declared(grid="return 1 // (s['TILE'] - 256)")
    runner = begin(kernel, kernel.problem(count=1000))
    raising, empty = (
        Candidate(schedule=Schedule(TILE=tile), artifact=artifact(cubin(100.0), f"{tile:024d}")) for tile in (256, 512)
    )
    failure = runner.check(raising)
    assert failure.kind is FailureKind.LAUNCH_FAILURE
    assert "ZeroDivisionError" in failure.message
    assert runner.probe(empty).kind is FailureKind.LAUNCH_FAILURE  # 0 blocks
    kernel.grid = staticmethod(lambda p, s, device: 4)
    assert isinstance(runner.check(empty), Checked)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_problem_refuses_other_bits_from_launch_to_launch(begin, deterministic):
    problem = AttentionBackward.problem(seq_q=20, seq_k=20, head_dim=16, deterministic=deterministic)
    schedule = space_for("sm_90", AttentionBackward).default(problem)
    runner = begin(AttentionBackward, problem)
    for check, right in (("right", True), ("unrepeatable", not deterministic)):
        parts = [artifact(cubin(10.0, check=check), stable_id([check, part], 24)) for part in range(3)]
        checked = runner.check(Candidate(schedule=schedule, artifact=join(parts)))
        assert isinstance(checked, Checked) == right, checked
        assert right or "other bits from launch to launch" in checked.message
