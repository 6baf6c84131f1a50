"""Any declared kernel through the real measuring process on a made-up GPU: in place, lists, several launches, integers, fp8."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest
from fake_worker import artifact, cubin
from sample_kernels import KERNELS, Accumulate, CountUp, Dequantize, Pick, RowSums, ScaleAdd, first
from test_measure_gpu import TIMEOUTS, command

from tiledsched.build.cubin import join
from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.registry import load_kernel
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
    wrong = runner.check(candidate(kernel, 90.0, check="wrong"))
    assert wrong.kind is FailureKind.WRONG_RESULT
    for regime in ("burst", "sustained"):
        (batch,) = runner.sample([candidate(kernel)], rounds=3, regime=regime)
        assert batch.samples_us == pytest.approx((100.0 * launches,) * 3)
        graphs = regime == "sustained" and kernel not in (Accumulate, RowSums)  # 200 us need none
        assert batch.conditions.graph_launches == (20 if graphs else 0)


@pytest.mark.parametrize("changes", [{"order": "column"}, {"rows": 33, "columns": 77, "dtype": "bfloat16"}], ids=str)
def test_other_layouts_and_sizes(begin, changes):
    problem = first(ScaleAdd)[0].replace(**changes)
    runner = begin(ScaleAdd, problem)
    assert isinstance(runner.check(candidate(ScaleAdd)), Checked)
    assert "in Out, row tile 0" in runner.check(candidate(ScaleAdd, check="wrong")).message


def test_where_something_is_wrong(begin):
    message = begin(Pick).check(candidate(Pick, check="wrong")).message
    assert message == (
        "random inputs: unequal elements 1 above 0 in Out, row tile 0, column tile 3, the first of 1 wrong tiles of 4"
    )
    message = begin(Dequantize).check(candidate(Dequantize, check="unwritten")).message
    assert "relative error inf above 0.008 in Out, row tile 0" in message


def test_a_workspace_that_is_not_left_zero_is_a_wrong_result(begin):
    """And costs nobody else."""
    runner = begin(CountUp)
    failure = runner.check(candidate(CountUp, 50.0, check="unzeroed"))
    assert failure.kind is FailureKind.WRONG_RESULT
    assert "Counter must be left zero" in failure.message
    assert isinstance(runner.check(candidate(CountUp)), Checked)


def test_a_race_in_a_kernel_that_changes_in_place(begin):
    """Launches in a row find the array as it was, and a right kernel is right in each."""
    runner = begin(Accumulate)
    checked = runner.check(candidate(Accumulate))
    assert isinstance(checked, Checked), checked
    assert checked.accuracy.repeatable
    failure = runner.check(candidate(Accumulate, 50.0, check="wrong-in-a-row"))
    assert "after launches in a row, relative error" in failure.message


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


def test_a_kernel_in_a_file(begin, declared):
    """The worker finds the file; it is in none of the places where modules are looked for."""
    kernel = declared()
    problem = kernel.problem(count=1000)
    made = Candidate(schedule=first_schedule(kernel), artifact=artifact(cubin(100.0), "a" * 24))
    assert isinstance(begin(kernel, problem).check(made), Checked)


@pytest.mark.parametrize("reference", ["return X[:-1]", "return X / xp.nothing_of_that_name"])
def test_a_reference_that_is_wrong_is_told(begin, declared, reference):
    kernel = declared(reference=reference)
    with pytest.raises(MeasureError, match=r"cannot prepare .*; correct what the kernel declares"):
        begin(kernel, kernel.problem(count=1000)).wait()


def test_a_grid_that_fails_costs_the_candidate(begin, declared):
    kernel = declared(grid="return 1 // (s['TILE'] - 256)")
    runner = begin(kernel, kernel.problem(count=1000))
    made = [
        Candidate(schedule=first_schedule(kernel).replace(TILE=tile), artifact=artifact(cubin(100.0), f"{tile:024d}"))
        for tile in (256, 512)
    ]
    failure = runner.check(made[0])
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.LAUNCH_FAILURE
    assert "ZeroDivisionError" in failure.message
    assert runner.probe(made[1]).kind is FailureKind.LAUNCH_FAILURE  # 0 blocks
    kernel.grid = staticmethod(lambda p, s, device: 4)
    assert isinstance(runner.check(made[1]), Checked)


def first_schedule(kernel):
    from tiledsched.core.schedule import Schedule

    return Schedule({name: choices[0] for name, choices in kernel.knobs.items()})


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
