"""The samples of cuTile's own repository, found by the environment variable CUTILE_SAMPLES."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from strangers import programs
from strangers.references import attention, causal_mask, mixture_of_experts, normal

PROGRAMS: list[programs.Program] = []
program = functools.partial(programs.program, PROGRAMS)
FOLDER = Path(os.environ.get("CUTILE_SAMPLES", "."))


@functools.cache
def sample(file: str):
    """The module of a sample; the one that wants CuPy gets NumPy."""
    cupy = types.ModuleType("cupy")
    cupy.random, cupy.zeros_like, cupy.asnumpy = np.random, np.zeros_like, np.asarray
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: None)
    name = f"cutile_sample_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, cupy=cupy), mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        spec.loader.exec_module(module)
    return module


def check_matmul(persistent: bool):
    for dtype in (torch.float16, torch.float32):
        a, b = normal(150, 100, dtype=dtype), normal(100, 90, dtype=dtype)
        yield sample("MatMul.py").cutile_matmul(a, b, persistent=persistent), a.double() @ b.double()


@program("MatMul.py", "matmul_kernel")
def matmul():
    yield from check_matmul(persistent=False)


@program("MatMul.py", "persistent_matmul_kernel")
def matmul_persistent():
    yield from check_matmul(persistent=True)


@program("BatchMatMul.py", "batch_matmul_kernel")
def batch_matmul():
    for dtype in (torch.float16, torch.float8_e4m3fn):
        a, b = normal(2, 150, 100, dtype=dtype), normal(2, 100, 90, dtype=dtype)
        yield sample("BatchMatMul.py").bmm(a, b, torch.float32), a.double() @ b.double()


@program("AllGatherMatmul.py", "gather_matmul_kernel")
def gather_matmul():
    import cuda.tile as ct

    # The host code wants processes that share their memory; the kernel sees a list of arrays.
    parts, weights = [normal(64, 96, dtype=torch.float32) for _ in range(3)], normal(96, 80, dtype=torch.float32)
    out = torch.full((192, 80), math.nan)
    ct.launch(None, (6, 3), sample("AllGatherMatmul.py").gather_matmul_kernel, (parts, weights, out, 32, 32, 32))
    yield out, torch.cat(parts).double() @ weights.double()


def check_sum(*shape: int, gather: bool):
    a, b = normal(*shape, dtype=torch.float32), normal(*shape, dtype=torch.float32)
    yield sample("VectorAddition.py").vec_add(a, b, use_gather=gather), a.double() + b.double()


for _kernel, _shape, _gather in (
    ("1d", (3000,), False),
    ("2d", (70, 200), False),
    ("1d_gather", (3001,), True),
    ("2d_gather", (70, 201), True),
):
    program("VectorAddition.py", f"vec_add_kernel_{_kernel}")(functools.partial(check_sum, *_shape, gather=_gather))


@program("quickstart/VectorAdd_quickstart.py", "vector_add")
def vector_add():
    module = sample("quickstart/VectorAdd_quickstart.py")
    module.test()  # it compares by itself, with the CuPy that is NumPy here
    a, b, c = np.random.default_rng(0).standard_normal((3, 128))
    module.ct.launch(None, (8, 1, 1), module.vector_add, (a, b, c, 16))
    yield c, a + b


@program("Transpose.py", "transpose_kernel", tolerance=0.0)
def transpose():
    for dtype in (torch.float16, torch.float32):
        x = normal(150, 100, dtype=dtype)
        yield sample("Transpose.py").cutile_transpose(x), x.T


@program(
    "LayerNorm.py",
    "layer_norm_fwd",
    "layer_norm_bwd_dx_partial_dwdb",
    "layer_norm_bwd_dwdb",
    check_overlap=False,  # its blocks add to shared sums in turn, under a lock
)
def layer_norm():
    x, weight, bias = (normal(*shape, dtype=torch.float32) for shape in ((70, 1500), (1500,), (1500,)))
    change = normal(70, 1500, dtype=torch.float32)
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    out = sample("LayerNorm.py").cutile_layer_norm(*leaves, 1e-5)
    want = F.layer_norm(exact[0], (1500,), exact[1], exact[2], 1e-5)
    yield out, want
    out.backward(change)
    want.backward(change.double())
    for got, each in zip(leaves, exact, strict=True):
        yield got.grad, each.grad


@program("FFT.py", "fft_kernel")
def fft():
    # A batch of one: with more, its blocks load outside the input (test_finds_blocks_that_load_outside_their_array).
    x = torch.randn(1, 256, dtype=torch.complex64)
    want = torch.fft.fft(x.to(torch.complex128), dim=-1)
    yield sample("FFT.py").cutile_fft(x, (4, 8, 8)), want


def moe_inputs():
    tokens, hidden, inner, experts, chosen = 20, 64, 48, 4, 2
    x, up, down = normal(tokens, hidden), normal(experts, 2 * inner, hidden), normal(experts, hidden, inner)
    routing = torch.rand(tokens, chosen).half()
    return x, up, down, routing, torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)])


@program("MoE.py", "fused_moe_kernel", "silu_and_mul_kernel", tolerance=4e-3)
def mixture():
    x, up, down, routing, ids = moe_inputs()
    up, down = up * 0.125, down * 0.125
    gate, linear = mixture_of_experts(x, up, ids, routing, routed=False).chunk(2, -1)
    want = torch.einsum("tkd,tknd->tkn", F.silu(gate) * linear, down.double()[ids]) * routing.double()[..., None]
    yield sample("MoE.py").cutile_moe(x, up, down, routing, ids, 16, 32, 32), want.sum(1)


@program("AttentionFMHA.py", "fmha_kernel")
def fmha():
    module = sample("AttentionFMHA.py")
    q, k, v = normal(1, 4, 100, 64), normal(1, 2, 128, 64), normal(1, 2, 128, 64)
    got = module.cutile_fmha(q, k, v, tile_m=64, tile_n=64, query_group_size=2)
    yield got, attention(q, k, v)
    best = module.tune_cutile_fmha(q, k, v, 0.125, input_pos=28, query_group_size=2, causal=True)
    got = module.cutile_fmha(
        q, k, v, input_pos=28, tile_m=best.TILE_M, tile_n=best.TILE_N, query_group_size=2, causal=True
    )
    yield got, attention(q, k, v, mask=causal_mask(100, 128))


@program("BlockScaledMatMul.py", "block_scaled_matmul_kernel")
def block_scaled_matmul():
    module = sample("BlockScaledMatMul.py")
    (a, a_scale), (b, b_scale) = (module.block_quantize(torch.rand(256, 256), 32) for _ in range(2))
    want = (a.double() * a_scale.double().repeat_interleave(32, 1)) @ (
        b.double() * b_scale.double().repeat_interleave(32, 1)
    ).T
    yield module.cutile_block_scaled_matmul(a, a_scale, b.T, b_scale.T), want
    swizzled = module.swizzle_32_4_4(a_scale), module.swizzle_32_4_4(b_scale)
    yield module.cutile_block_scaled_matmul(a, swizzled[0], b.T, swizzled[1]), want
