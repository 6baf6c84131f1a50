"""Kernels that misbehave on purpose, with the attention kernel's run-time parameters, for tests of the measuring process."""

from __future__ import annotations

import io

import cuda.tile as ct
from cuda.tile.compilation import KernelSignature, export_kernel

from tiledsched.build.cubin import Artifact, read_artifact
from tiledsched.core.device import arch_spec
from tiledsched.core.launches import signature, steps
from tiledsched.core.problem import Problem
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.entries import HeadArray


def stray(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, scale_log2: float):
    """Writes far outside the output."""
    batches = ct.arange(64, dtype=ct.int32) * 7_919 + 1_000_000  # far apart: one of them, at least, is nobody's memory
    zeros = ct.full((64,), 0, dtype=ct.int32)
    ct.scatter(Out, (batches, zeros, zeros, zeros), ct.full((64,), 1.0, dtype=Out.dtype), check_bounds=False)


def slow(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, scale_log2: float):
    """Runs for some tens of seconds, then ends by itself. One block does, so that a large grid makes it no longer."""
    if ct.bid(0) == 0:
        value = ct.full((1, 1, 1, 64), scale_log2, dtype=ct.float32)
        for _ in range(600_000_000):
            value = ct.sin(value) + scale_log2
        ct.store(Out, (0, 0, 0, 0), value.astype(Out.dtype))


def build(function, problem: Problem, arch: str) -> Artifact:
    """`function` compiled for `arch`, loadable in place of the attention kernel."""
    schedule = space_for(arch, Attention).default(problem)
    (step,) = steps(Attention, problem, schedule, arch_spec(arch))
    like = signature(Attention, problem, schedule, step)
    plain = KernelSignature(like.parameters[:5], like.calling_convention, like.symbol)
    output = io.BytesIO()
    export_kernel(ct.kernel(function), [plain], output, gpu_code=arch, output_format="cubin")
    return read_artifact(output.getvalue(), arch)
