"""On a real GPU: `sdpa` against float64, what is launched against what was measured, and the measuring process."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys

import numpy
import pytest
from attention_runs import attention_reference

from tiledsched.build.compiler import BuildTask, compile_task
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.declaration import LARGEST_ERROR
from tiledsched.measure.runner import Batch, Candidate, Checked

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [
    # batch, heads, kv_heads, seq_q, seq_k, head_dim
    (2, 4, 4, 512, 512, 64),
    (1, 8, 2, 384, 384, 128),
    (2, 3, 3, 300, 300, 64),
    (1, 2, 2, 77, 77, 80),
    (1, 4, 1, 200, 333, 96),
    (1, 2, 2, 333, 200, 128),
    (3, 2, 2, 5, 1000, 64),
    (1, 2, 2, 256, 256, 256),
    (1, 2, 2, 130, 130, 33),
    (1, 1, 1, 1, 1, 16),
]


@pytest.fixture
def serve(monkeypatch, tmp_path):
    from tiledsched.ops import sdpa as module

    monkeypatch.setenv("TILEDSCHED_FALLBACK", "error")
    module.reload()
    yield module
    module.reload()


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def tensors(batch, heads, kv_heads, seq_q, seq_k, head_dim, dtype):
    generator = torch.Generator(device="cuda").manual_seed(seq_q * 31 + head_dim)
    shapes = ((batch, heads, seq_q, head_dim), *(((batch, kv_heads, seq_k, head_dim),) * 2))
    return tuple(torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)


def relative_error(out, q, k, v, causal, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    reference = attention_reference(numpy, *(x.float().cpu().numpy() for x in (q, k, v)), causal=causal, scale=scale)
    difference = out.float().cpu().numpy().astype("float64") - reference
    return float(numpy.linalg.norm(difference) / numpy.linalg.norm(reference))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sdpa_is_right(serve, shape, causal, dtype) -> None:
    q, k, v = tensors(*shape, dtype)
    out = serve.sdpa(q, k, v, causal=causal)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert relative_error(out, q, k, v, causal) < (1.5e-3 if dtype is torch.float16 else 1e-2)


FORCED = [
    {"TILE_M": 128, "TILE_N": 32},
    {"PERSISTENT": "strided"},
    {"PERSISTENT": "strided", "BLOCK_ORDER": "heads_fastest"},
    {"PERSISTENT": "snake", "BLOCK_ORDER": "swizzled"},
    {"BLOCK_ORDER": "reversed"},
    {"LOOP_SPLIT": "1"},
    {"NUM_WORKER_WARPS": 8},
    {"KV_DIRECTION": "backward"},
    {"KV_DIRECTION": "sawtooth", "LOOP_SPLIT": "0"},
    {"Q_SUBTILES": 2, "TILE_N": 32},
    {"KV_SUBTILES": 2, "TILE_N": 32},
    {"QK_AHEAD": 1, "TILE_N": 32},
    {"TMA_STORE": 0},
    {"TMA_LOADS": 0},
    {"DIVISION": "ieee"},
    {"LAZY_RESCALE": 1},
]


@pytest.mark.parametrize("knobs", FORCED)
def test_forced_schedules_are_right(serve, monkeypatch, knobs) -> None:
    for name, value in knobs.items():
        monkeypatch.setenv(f"TILEDSCHED_{name}", str(value))
    serve.reload()
    for shape in ((2, 3, 3, 300, 300, 64), (1, 4, 2, 515, 515, 128)):
        q, k, v = tensors(*shape, torch.float16)
        assert serve.plan_for(q, k, v, causal=True).served.provenance == "forced"
        assert relative_error(serve.sdpa(q, k, v, causal=True), q, k, v, True) < 1.5e-3


def test_scales_and_strides(serve) -> None:
    q, k, v = tensors(2, 4, 4, 200, 200, 64, torch.float16)
    for scale in (1e-3, 0.5, 1.0):
        assert relative_error(serve.sdpa(q, k, v, scale=scale), q, k, v, False, scale) < 1.5e-3
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # [B, S, H, D] in memory
    assert not views[0].is_contiguous()
    torch.testing.assert_close(serve.sdpa(*views, causal=True), serve.sdpa(q, k, v, causal=True), rtol=0, atol=0)


def test_fp16_accumulation_is_served_only_when_asked_for(serve, monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.serve.entries.load_entries", lambda *given: [])  # nothing measured stands in for it
    serve.reload()
    q, k, v = tensors(2, 4, 4, 1024, 1024, 64, torch.float16)
    assert serve.plan_for(q, k, v).served.schedule["accum_mode"] == "fp32"
    exact = relative_error(serve.sdpa(q, k, v, causal=True), q, k, v, True)
    monkeypatch.setenv("TILEDSCHED_ACCUM_MODE", "fp16")
    serve.reload()
    assert serve.plan_for(q, k, v).served.schedule["accum_mode"] == "fp16"
    assert exact < relative_error(serve.sdpa(q, k, v, causal=True), q, k, v, True) < 5e-2


def test_a_graph_replay_equals_the_eager_call(serve) -> None:
    q, k, v = tensors(1, 4, 4, 256, 256, 64, torch.float16)
    eager = serve.sdpa(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = serve.sdpa(q, k, v)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


LAUNCH = """
import torch, sys
from tiledsched.ops import sdpa as serve
q, k, v = (torch.randn({shape}, device="cuda", dtype=torch.float16) for _ in range(3))
plan = serve.plan_for(q, k, v, causal={causal})
serve.sdpa(q, k, v, causal={causal})
torch.cuda.synchronize()
import json
print(json.dumps(plan.served.schedule.to_json()))
"""


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("shape", "causal"), [((4, 16, 1024, 128), True), ((16, 32, 256, 64), False), ((1, 3, 512, 64), True)]
)
def test_what_is_launched_is_what_would_be_measured(tmp_path, shape, causal) -> None:
    """cuTile's own cache, after one launch in a new process, holds the machine code that the build makes."""
    import json

    from tiledsched.build.cubin import read_artifact
    from tiledsched.core.schedule import Schedule

    # Nothing prebuilt: a kernel from a bundle never reaches cuTile's cache.
    environment = os.environ | {
        "CUDA_TILE_CACHE_DIR": str(tmp_path),
        "TILEDSCHED_CACHE": str(tmp_path / "ours"),
        "TILEDSCHED_RIVALS": "off",
    }
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH.format(shape=shape, causal=causal)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    schedule = Schedule.from_json(json.loads(done.stdout.splitlines()[-1]))
    with sqlite3.connect(tmp_path / "cache.db") as cache:
        launched = {read_artifact(blob, arch()).fingerprint for (blob,) in cache.execute("select blob from cache")}
    batch, heads, seq, head_dim = shape
    problem = Attention.problem(
        seq_q=seq, seq_k=seq, head_dim=head_dim, causal=causal, batch=batch, heads=heads, kv_heads=heads
    )
    built = compile_task(BuildTask(kernel="attention", schedule=schedule, problem=problem, arch=arch()))
    assert launched == {built.artifact.fingerprint}


@pytest.fixture(scope="module")
def runner():
    from tiledsched.measure.gpu import GpuRunner

    runner = GpuRunner(kernel_named("attention"))
    yield runner
    runner.close()


def candidate(problem: Problem, **knobs) -> Candidate:
    schedule = space_for(arch(), Attention).default(problem).replace(**knobs)
    built = compile_task(BuildTask(kernel="attention", schedule=schedule, problem=problem, arch=arch()))
    assert built.failure is None, built.failure
    return Candidate(schedule=schedule, artifact=built.artifact)


SMALL = Attention.problem(seq_q=512, seq_k=512, head_dim=64, batch=2, heads=4, kv_heads=4)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_worker_checks_and_times(runner, dtype) -> None:
    problem = SMALL.replace(dtype=dtype, causal=True)
    runner.begin(problem)
    some = [candidate(problem), candidate(problem, tile_n=128)]
    for one in some:
        checked = runner.check(one)
        assert isinstance(checked, Checked), checked
        assert checked.accuracy.repeatable
        for error in (checked.accuracy.worst_tile_error, checked.accuracy.adversarial_tile_error):
            assert 0 < error < (1.5e-3 if dtype == "float16" else 1e-2)
    batches = runner.sample(some, rounds=5, regime="burst")
    for batch in batches:
        assert isinstance(batch, Batch)
        assert len(batch.samples_us) == 5
        assert 1 < min(batch.samples_us) < 1000
        assert batch.conditions.sm_clock_mhz > 0


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(300, 300, 64, 8, 1), (200, 1000, 128, 16, 8), (512, 512, 256, 8, 8)])
def test_right_kernels_pass_the_gate_with_room(runner, dtype, causal, shape) -> None:
    seq_q, seq_k, head_dim, heads, kv_heads = shape
    problem = Attention.problem(
        seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, dtype=dtype, causal=causal, batch=8, heads=heads, kv_heads=kv_heads
    )
    runner.begin(problem)
    checked = runner.check(candidate(problem))
    assert isinstance(checked, Checked), checked
    limit = LARGEST_ERROR[dtype, "fp32"]
    assert 0 < checked.accuracy.adversarial_tile_error < limit / 5


@pytest.mark.compiler
def test_float16_sums_pass_their_own_gate(runner) -> None:
    runner.begin(SMALL)
    checked = runner.check(candidate(SMALL, accum_mode="fp16"))
    assert isinstance(checked, Checked), checked
    assert 1e-3 < checked.accuracy.adversarial_tile_error < LARGEST_ERROR["float16", "fp16"] / 2


@pytest.mark.compiler
def test_float16_sums_are_found_out_where_more_is_promised(runner) -> None:
    """Their machine code, offered as a kernel that sums in float32."""
    runner.begin(SMALL)
    good, narrow = candidate(SMALL), candidate(SMALL, accum_mode="fp16")
    failure = runner.check(Candidate(schedule=good.schedule, artifact=narrow.artifact))
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.WRONG_RESULT
    assert "inputs: relative error" in failure.message


@pytest.mark.compiler
def test_a_wrong_result_never_wins(runner) -> None:
    """A kernel built without the causal mask, offered for a causal problem."""
    runner.begin(SMALL.replace(causal=True))
    wrong = runner.check(candidate(SMALL))
    assert isinstance(wrong, Failure)
    assert wrong.kind is FailureKind.WRONG_RESULT
    assert "row tile" in wrong.message


@pytest.mark.compiler
def test_killed_and_corrupt_cost_one_candidate(runner) -> None:
    runner.begin(SMALL)
    good = candidate(SMALL)
    assert isinstance(runner.check(good), Checked)
    torn = Candidate(
        schedule=good.schedule,
        artifact=type(good.artifact)(
            arch=arch(), fingerprint="0" * 24, facts=good.artifact.facts, cubin=good.artifact.cubin[:2000]
        ),
    )
    failure = runner.check(torn)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.ARTIFACT_CORRUPT
    assert isinstance(runner.check(good), Checked)
    victim = runner._worker.process
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped: the runner finds out by itself
    assert isinstance(runner.check(good), Checked)
    assert runner._worker.process is not victim


@pytest.mark.compiler
def test_a_stray_write_costs_one_candidate(runner) -> None:
    from bad_kernels import build, stray

    runner.begin(SMALL)
    good = candidate(SMALL)
    bad = Candidate(schedule=good.schedule, artifact=build(stray, SMALL, arch()))
    process = runner._worker.process
    failure = runner.check(bad)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.ILLEGAL_ADDRESS, failure
    assert isinstance(runner.check(good), Checked)
    assert runner._worker.process is not process  # the old one's context is lost for good


@pytest.mark.compiler
def test_a_kernel_that_takes_too_long_is_killed() -> None:
    import time

    from bad_kernels import build, slow

    from tiledsched.measure.gpu import GpuRunner, Timeouts

    runner = GpuRunner(kernel_named("attention"), timeouts=Timeouts(probe_s=4.0))
    try:
        runner.begin(SMALL)
        good = candidate(SMALL)
        started = time.monotonic()
        bad = Candidate(schedule=good.schedule, artifact=build(slow, SMALL, arch()))
        failure = runner.probe(bad)
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.HANG, failure
        assert time.monotonic() - started < 60
        assert isinstance(runner.check(good), Checked)
    finally:
        runner.close()
