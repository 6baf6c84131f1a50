"""TileGym's kernels over rows and elements: norms, activations, softmax, dropout, positions, transposition."""

from __future__ import annotations

import functools
import importlib
import os
from unittest import mock

import torch
from torch.nn import functional as F  # noqa: N812

from strangers import programs
from strangers.references import normal

PROGRAMS: list[programs.Program] = []
program = functools.partial(programs.program, PROGRAMS)


def tilegym(name: str):
    """A module of TileGym's cuTile operations (the package rebinds some of their names)."""
    return importlib.import_module(f"tilegym.ops.cutile.{name}")


def untuned():
    """TileGym takes its defaults instead of searching."""
    return mock.patch.dict(os.environ, TILEGYM_DISABLE_AUTOTUNE="1")


@program("activation/relu.py", "_relu_fwd_kernel", tolerance=0.0)
def relu():
    x = normal(3, 500)
    yield tilegym("activation.relu").relu(x), F.relu(x)


@program("activation/gelu.py", "_gelu_kernel")
def gelu():
    for approximate in ("none", "tanh"):  # both of its ways approximate by tanh
        x = normal(3, 500)
        yield tilegym("activation.gelu").gelu(x, approximate), F.gelu(x.double(), approximate="tanh")


@program("activation/geglu.py", "_geglu_fwd_kernel")
def geglu():
    for approximate in ("none", "tanh"):
        x = normal(3, 400)
        a, b = x.double().chunk(2, -1)
        yield tilegym("activation.geglu").geglu(x, -1, approximate), a * F.gelu(b, approximate="tanh")


@program("swiglu.py", "_swiglu_forward_kernel")
def swiglu():
    for columns in (256, 200):
        a, b = normal(3, columns), normal(3, columns)
        yield tilegym("swiglu").swiglu(a, b), F.silu(a.double()) * b.double()


@program("silu_and_mul.py", "_silu_and_mul_kernel_row_wise", tolerance=1e-2)
def silu_and_mul():
    x = normal(3, 400, dtype=torch.bfloat16)
    a, b = x.double().chunk(2, -1)
    yield tilegym("silu_and_mul").silu_and_mul(x), F.silu(a) * b


@program("softmax.py", "_softmax_kernel")
def softmax():
    x = normal(20, 300)
    yield tilegym("softmax").softmax(x), x.double().softmax(-1)


@program("softmax.py", "_softmax_kernel_tma")
def softmax_by_tiles():
    x = normal(20, 300)
    yield tilegym("softmax").softmax(x, use_tma=True), x.double().softmax(-1)


@program("softmax.py", "_softmax_kernel_chunked")
def softmax_by_chunks():
    x = normal(3, 9000)
    yield tilegym("softmax").softmax(x, use_chunked=True), x.double().softmax(-1)


@program("softmax.py", "_softmax_kernel_multi_wave_full_row_reg_cached_ldg")
def softmax_by_rows():
    for columns in (256, 300):
        x = normal(5, columns)
        yield tilegym("softmax").softmax(x, use_multi_wave=True), x.double().softmax(-1)


def check_rms_norm(mode: str, rows: int):
    x, weight = normal(rows, 300), normal(300)
    want = F.rms_norm(x.double(), (300,), weight.double(), 1e-5)
    yield tilegym("rms_norm").rms_norm(x, (300,), weight, 1e-5, mode=mode), want


@program("rms_norm.py", "_rms_norm_kernel_gather")
def rms_norm():
    yield from check_rms_norm("multi_wave_reload", 4)


@program("rms_norm.py", "_rms_norm_kernel_multi_wave_cached")
def rms_norm_cached():
    yield from check_rms_norm("multi_wave_cached", 4)


@program("rms_norm.py", "_rms_norm_kernel_static_persistent")
def rms_norm_persistent():
    yield from check_rms_norm("static_persistent", 100)


def check_layer_norm(inner: int):
    x, weight, bias = normal(2, 40, inner), normal(40), normal(40)
    exact = x.double()
    centred = exact - exact.mean(1, keepdim=True)
    scaled = centred * torch.rsqrt(exact.var(1, correction=0, keepdim=True) + 1e-5)
    want = scaled * weight.double()[:, None] + bias.double()[:, None]
    yield tilegym("layer_norm").layer_norm(x, 1, 2, weight, bias, 1e-5), want


@program("layer_norm.py", "_layer_norm_fwd_kernel")
def layer_norm():
    yield from check_layer_norm(24)


@program("layer_norm.py", "_layer_norm_fwd_kernel_gather")
def layer_norm_gather():
    yield from check_layer_norm(1)
    yield from check_layer_norm(6)


@program("layer_norm_legacy.py", "_layer_norm_fwd_kernel")
def layer_norm_legacy():
    x, weight, bias = normal(5, 300), normal(300), normal(300)
    want = F.layer_norm(x.double(), (300,), weight.double(), bias.double(), 1e-5)
    yield tilegym("layer_norm_legacy").layer_norm_legacy(x, (300,), weight, bias, 1e-5), want


@program("layer_norm_legacy.py", "_persistent_layer_norm_fwd_kernel", tolerance=1e-2)
def layer_norm_persistent():
    x, weight, bias = (normal(*shape, dtype=torch.bfloat16) for shape in ((20, 300), (300,), (300,)))
    want = F.layer_norm(x.double(), (300,), weight.double(), bias.double(), 1e-5)
    got, mean, *_ = tilegym("layer_norm_legacy").persistent_layer_norm(x, (300,), weight, bias, 1e-5)
    yield got, want
    yield mean, x.double().mean(-1)


@program("dropout.py", "_dropout_kernel")
def dropout():
    x = normal(3000).abs() + 1
    got = tilegym("dropout").dropout(x, 7, p=0.25)
    kept = got != 0
    yield got, torch.where(kept, x.double() / 0.75, 0.0)
    yield kept.double().mean().round(decimals=1), 0.8  # 0.75, which rounds to even


@program("rope.py", "_rope_kernel")
def rope():
    q, k = normal(2, 4, 6, 64), normal(2, 2, 6, 64)
    angles = torch.rand(2, 6, 32)
    cos, sin = torch.cat([angles.cos()] * 2, -1).half(), torch.cat([angles.sin()] * 2, -1).half()

    def rotated(x):
        low, high = x.double().chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        return x.double() * c + torch.cat([-high, low], -1) * s

    want = rotated(q), rotated(k)
    yield from zip(tilegym("rope").apply_rope_base(q, k, cos, sin), want, strict=True)


@program("transpose.py", "_transpose_kernel", tolerance=0.0)
def transpose():
    x = normal(100, 70)
    yield tilegym("transpose").transpose(x), x.T


@program("splitk_reduce.py", "_splitk_reduce_kernel")
def splitk_reduce():
    for splits in (3, 16):
        parts, logs = normal(2, 3, splits, 64), normal(2, 3, splits, dtype=torch.float32)
        weights = torch.softmax(logs.double() * torch.log(torch.tensor(2.0)).double(), -1)
        want = (parts.double() * weights[..., None]).sum(2)
        yield tilegym("splitk_reduce").splitk_reduce(parts, logs, torch.empty(2, 3, 64).half(), 128), want
