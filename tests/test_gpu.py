"""On a real GPU: `sdpa` against float64, what is launched against what was measured, and the measuring process."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy
import pytest
from attention_runs import attention_reference
from bad_kernels import build, slow, stray

from tiledsched.build.compiler import BuildTask, compile_task
from tiledsched.build.cubin import read_artifact
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.declaration import LARGEST_ERROR
from tiledsched.measure.gpu import GpuRunner, Timeouts
from tiledsched.measure.runner import Candidate, Checked

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")
from on_gpu import arch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def tensors(batch, heads, kv_heads, seq_q, seq_k, head_dim, dtype):
    generator = torch.Generator(device="cuda").manual_seed(seq_q * 31 + head_dim)
    shapes = ((batch, heads, seq_q, head_dim), *(((batch, kv_heads, seq_k, head_dim),) * 2))
    return tuple(torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)


def relative_error(out, q, k, v, causal, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    reference = attention_reference(numpy, *(x.float().cpu().numpy() for x in (q, k, v)), causal=causal, scale=scale)
    difference = out.float().cpu().numpy().astype("float64") - reference
    return float(numpy.linalg.norm(difference) / numpy.linalg.norm(reference))


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


def test_fp16_accumulation_is_served_only_when_asked_for(serve, monkeypatch) -> None:
    monkeypatch.setattr(
        "tiledsched.serve.entries.layers", lambda *given, **more: []
    )  # nothing measured stands in for it
    serve.reload()
    q, k, v = tensors(2, 4, 4, 1024, 1024, 64, torch.float16)
    assert serve.plan_for(q, k, v).served.schedule["accum_mode"] == "fp32"
    exact = relative_error(serve.sdpa(q, k, v, causal=True), q, k, v, True)
    monkeypatch.setenv("TILEDSCHED_ACCUM_MODE", "fp16")
    serve.reload()
    assert serve.plan_for(q, k, v).served.schedule["accum_mode"] == "fp16"
    assert exact < relative_error(serve.sdpa(q, k, v, causal=True), q, k, v, True) < 5e-2


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
    with closing(GpuRunner(kernel_named("attention"))) as runner:
        yield runner


def candidate(problem: Problem, **knobs) -> Candidate:
    schedule = space_for(arch(), Attention).default(problem).replace(**knobs)
    built = compile_task(BuildTask(kernel="attention", schedule=schedule, problem=problem, arch=arch()))
    assert built.failure is None, built.failure
    return Candidate(schedule=schedule, artifact=built.artifact)


def kind_of(found: object) -> FailureKind:
    assert isinstance(found, Failure), found
    return found.kind


SMALL = Attention.problem(seq_q=512, seq_k=512, head_dim=64, batch=2, heads=4, kv_heads=4)


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
@pytest.mark.parametrize(
    ("problem", "knobs", "words"),
    [
        # Float16 sums, offered as a kernel that sums in float32.
        (SMALL, {"accum_mode": "fp16"}, "inputs: relative error"),
        # Built without the causal mask, offered for a causal problem.
        (SMALL.replace(causal=True), {}, "row tile"),
    ],
)
def test_a_wrong_result_never_wins(runner, problem, knobs, words) -> None:
    runner.begin(problem)
    failure = runner.check(Candidate(schedule=candidate(SMALL).schedule, artifact=candidate(SMALL, **knobs).artifact))
    assert kind_of(failure) is FailureKind.WRONG_RESULT
    assert words in failure.message


@pytest.mark.compiler
def test_killed_and_corrupt_cost_one_candidate(runner) -> None:
    runner.begin(SMALL)
    good = candidate(SMALL)
    assert isinstance(runner.check(good), Checked)
    torn = replace(good, artifact=replace(good.artifact, fingerprint="0" * 24, cubin=good.artifact.cubin[:2000]))
    assert kind_of(runner.check(torn)) is FailureKind.ARTIFACT_CORRUPT
    assert isinstance(runner.check(good), Checked)
    victim = runner._worker.process
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped: the runner finds out by itself
    assert isinstance(runner.check(good), Checked)
    assert runner._worker.process is not victim


@pytest.mark.compiler
def test_a_stray_write_costs_one_candidate(runner) -> None:
    runner.begin(SMALL)
    good = candidate(SMALL)
    bad = Candidate(schedule=good.schedule, artifact=build(stray, SMALL, arch()))
    process = runner._worker.process
    assert kind_of(runner.check(bad)) is FailureKind.ILLEGAL_ADDRESS
    assert isinstance(runner.check(good), Checked)
    assert runner._worker.process is not process  # the old one's context is lost for good


@pytest.mark.compiler
def test_a_kernel_that_takes_too_long_is_killed() -> None:
    with closing(GpuRunner(kernel_named("attention"), timeouts=Timeouts(probe_s=4.0))) as runner:
        runner.begin(SMALL)
        good, started = candidate(SMALL), time.monotonic()
        bad = Candidate(schedule=good.schedule, artifact=build(slow, SMALL, arch()))
        assert kind_of(runner.probe(bad)) is FailureKind.HANG
        assert time.monotonic() - started < 60
        assert isinstance(runner.check(good), Checked)
