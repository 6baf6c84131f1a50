"""On a real GPU: small declared kernels through the measuring process; right ones pass, planted mistakes do not."""

from __future__ import annotations

import pytest
from sample_kernels import (
    KERNELS,
    Accumulate,
    CountUp,
    Dequantize,
    DoubleEach,
    Pick,
    RowSums,
    ScaleAdd,
    ScaleAddWrong,
    first,
)

from tiledsched.build.compiler import compile_schedule
from tiledsched.core.errors import FailureKind
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.runner import Batch, Candidate, Checked

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compiler,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins runners. They time nothing that decides, so that tests in other processes need not wait for the GPU."""
    monkeypatch.setattr("tiledsched.measure.lock.FOLDER", tmp_path)
    made = []

    def start(kernel, problem=None):
        runner = GpuRunner(kernel)
        made.append(runner)
        runner.begin(problem or first(kernel)[0])
        return runner

    yield start
    for runner in made:
        runner.close()


def candidate(runner, kernel, problem=None, **knobs) -> Candidate:
    problem, schedule = problem or first(kernel)[0], first(kernel)[1].replace(**knobs)
    return Candidate(schedule=schedule, artifact=compile_schedule(kernel, problem, schedule, runner.device.arch))


def assert_right(runner, one: Candidate) -> None:
    checked = runner.check(one)
    assert isinstance(checked, Checked), checked
    assert checked.accuracy.repeatable
    assert isinstance(runner.probe(one), float)
    for regime in ("burst", "sustained"):
        (batch,) = runner.sample([one], rounds=5, regime=regime)
        assert isinstance(batch, Batch), batch
        assert 0.5 < min(batch.samples_us) < 10_000
    assert isinstance(runner.check(one), Checked)  # nothing that was timed left anything behind


@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernels_pass(begin, kernel):
    runner = begin(kernel)
    for tile in kernel.knobs["TILE"]:
        assert_right(runner, candidate(runner, kernel, TILE=tile))


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        (ScaleAdd, {"order": "column"}),
        (ScaleAdd, {"rows": 33, "columns": 77}),
        (ScaleAdd, {"rows": 33, "columns": 77, "order": "column", "dtype": "bfloat16"}),
        (ScaleAdd, {"rows": 1, "columns": 77, "order": "column", "dtype": "float32"}),
        (ScaleAdd, {"rows": 4096, "columns": 4096, "dtype": "float32"}),
        (Accumulate, {"rows": 1000, "columns": 5000}),
        (DoubleEach, {"groups": (1, 700, 33, 64, 5), "columns": 80}),
        (DoubleEach, {"groups": (7,), "columns": 33}),
        (RowSums, {"rows": 5000, "columns": 8193}),
        (Pick, {"entries": 1 << 20, "count": 100_001}),
        (Dequantize, {"quantized": "float8_e5m2", "rows": 77, "columns": 1000}),
        (CountUp, {"count": 1_000_000}),
    ],
    ids=str,
)
def test_right_kernels_pass_on_other_problems(begin, kernel, changes):
    problem = first(kernel)[0].replace(**changes)
    runner = begin(kernel, problem)
    assert_right(runner, candidate(runner, kernel, problem))


def test_a_mistake_is_found(begin):
    runner = begin(ScaleAddWrong)
    failure = runner.check(candidate(runner, ScaleAddWrong))
    assert failure.kind is FailureKind.WRONG_RESULT
    assert failure.message.startswith("random inputs: relative error")


def half_of_the_rows(p, s, device, launches=RowSums.launches):
    return [(function, (p.rows // 2, *grid[1:])) for function, grid in launches(p, s, device)]


def test_half_a_grid_is_found(begin, monkeypatch):
    """What no block wrote is NaN, or the largest integer."""
    for kernel in (ScaleAdd, Accumulate, Pick, RowSums):
        runner = begin(kernel)
        made = candidate(runner, kernel)
        with monkeypatch.context() as patch:
            if kernel is RowSums:
                patch.setattr(kernel, "launches", staticmethod(half_of_the_rows))
            else:
                patch.setattr(kernel, "grid", staticmethod(lambda p, s, device: (1, 1)))
            failure = runner.check(made)
        assert failure.kind is FailureKind.WRONG_RESULT, failure
        assert isinstance(runner.check(made), Checked)


def test_in_place_arrays_are_restored_between_launches(begin):
    """Launched once more on what it left, the kernel gives something else: ten in a row agree only if they are restored."""
    runner = begin(Accumulate)
    made = candidate(runner, Accumulate)
    for _ in range(2):
        checked = runner.check(made)
        assert isinstance(checked, Checked), checked
        assert checked.accuracy.repeatable
        (batch,) = runner.sample([made], rounds=3, regime="sustained")
        assert batch.conditions.graph_launches == 0
