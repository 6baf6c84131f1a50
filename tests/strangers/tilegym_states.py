"""TileGym's recurrences and its experimental kernels other than attention."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from strangers import programs
from strangers.references import gated_delta_rule, normal
from strangers.tilegym_rows import functools, tilegym, untuned

PROGRAMS: list[programs.Program] = []
program = functools.partial(programs.program, PROGRAMS)


def delta_inputs(steps: int, heads: int = 2, value_heads: int = 2, columns: int = 32, value_columns: int = 32):
    q, k = normal(1, steps, heads, columns), F.normalize(normal(1, steps, heads, columns).float(), dim=-1).half()
    v, gate = normal(1, steps, value_heads, value_columns), -torch.rand(1, steps, value_heads)
    return q, k, v, gate, torch.rand(1, steps, value_heads)


@program("chunk_gated_delta_rule.py", "_intra_chunk_prepare_kernel", "_chunk_inter_recurrence_kernel", tolerance=1e-2)
def chunk_gated_delta_rule():
    for normalize in (False, True):
        arguments = delta_inputs(40)
        rule = tilegym("chunk_gated_delta_rule").chunk_gated_delta_rule
        got = rule(*arguments, chunk_size=16, output_final_state=True, use_qk_l2norm_in_kernel=normalize)
        yield from zip(got, gated_delta_rule(*arguments, normalize=normalize), strict=True)


def check_recurrence(steps: int, *, value_columns: int = 32, **options):
    arguments = delta_inputs(steps, value_heads=4, value_columns=value_columns)
    state = torch.randn(1, 4, 32, value_columns)
    rule = tilegym("recurrent_gated_delta_rule").recurrent_gated_delta_rule
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True} | options
    yield from zip(rule(*arguments, **options), gated_delta_rule(*arguments, state, normalize=True), strict=True)


@program("recurrent_gated_delta_rule.py", "_recurrent_gated_delta_rule_fwd_kernel")
def recurrent_gated_delta_rule():
    yield from check_recurrence(5)


@program("recurrent_gated_delta_rule.py", "_recurrent_gated_delta_rule_fwd_kernel_persistent")
def recurrent_gated_delta_rule_persistent():
    yield from check_recurrence(5, persistent=True)


@program("recurrent_gated_delta_rule.py", "_recurrent_gated_delta_rule_fwd_kernel_decode_vstream")
def recurrent_gated_delta_rule_decode():
    with untuned():
        yield from check_recurrence(1, value_columns=64)


def mamba2(x, a, b, c, d, dt, state):
    """The state space recurrence over `[batch, time, heads, columns]`: outputs and the last state."""
    x, a, b, c, d, dt, state = (each.double() for each in (x, a, b, c, d, dt, state))
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (b, c))
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(a * dt[:, t])[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., :, None] * b[:, t, :, None, :]
        outputs.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outputs, 1), state


def mamba_inputs(steps: int, head_columns: int = 64):
    heads, groups, states = 4, 2, 64
    x, d = normal(1, steps, heads, head_columns, dtype=torch.bfloat16), torch.randn(heads)
    b, c = (normal(1, steps, groups, states, dtype=torch.bfloat16) for _ in range(2))
    a, dt = -torch.rand(heads), torch.rand(1, steps, heads) * 0.2
    return x, a, b, c, d, dt, torch.randn(1, heads, head_columns, states)


@program("mamba2.py", "chunk_cumsum_kernel", "fwd_pass_state_kernel", "compute_out_kernel", tolerance=1e-2)
def mamba2_forward():
    arguments = mamba_inputs(128)
    with untuned():
        got = tilegym("mamba2").mamba2_chunk_forward(*arguments, chunk_size=32)
    yield from zip(got[:2], mamba2(*arguments), strict=True)


@program("mamba2.py", "compute_out_swap_kernel", tolerance=1e-2)
def mamba2_forward_swapped():
    arguments = mamba_inputs(128)
    got = tilegym("mamba2").mamba2_chunk_forward(*arguments)
    yield from zip(got[:2], mamba2(*arguments), strict=True)


@program("experimental/fused_linear_cross_entropy.py", "_ce_online_kernel")
def fused_linear_cross_entropy():
    hidden, weight, target = normal(20, 32, dtype=torch.float32), normal(5000, 32, dtype=torch.float32), None
    target = torch.randint(0, 5000, (20,))
    target[3] = -100
    loss = tilegym("experimental.fused_linear_cross_entropy").fused_linear_cross_entropy(hidden, weight, target)
    yield loss, F.cross_entropy(hidden.double() @ weight.double().T, target)


@program("experimental/mhc.py", "_mhc_split_gemm_rms_kernel", "_mhc_finalize_scale_bias_sigmoid_kernel")
def mhc_gemm():
    rows, n, depth = 128, 4, 256
    columns = 2 * n + n * n
    x, w, bias = (normal(*s, dtype=torch.float32) for s in ((rows, depth), (depth, columns), (columns,)))
    config = {"TILE_SIZE_M": 64, "TILE_SIZE_N": 32, "TILE_SIZE_K": 64, "SPLIT_K": 2, "GROUP_SIZE_M": 8}
    scale = torch.tensor([0.5] * n + [0.7] * n + [0.9] * (n * n)).double()
    norm = x.double().pow(2).mean(-1, keepdim=True).sqrt()
    linear = x.double() @ w.double() * scale / norm + bias.double()
    want = torch.cat([linear[:, :n].sigmoid(), 2 * linear[:, n : 2 * n].sigmoid(), linear[:, 2 * n :]], -1)
    for cfg in (config, None):
        got = tilegym("experimental.mhc").mhc_gemm_rms_scale(x, w, n, 0.5, 0.7, 0.9, bias, cfg=cfg)
        yield from zip(got, (want, norm), strict=True)


@program("experimental/mhc.py", "_mhc_apply_residual_kernel")
def mhc_apply_residual():
    rows, n, columns = 3, 4, 1024
    x, out, y = normal(rows, n * columns), normal(rows, columns), normal(rows, 2 * n + n * n)
    got = tilegym("experimental.mhc").mhc_apply_residual(x, out, y, n)
    mixed = y.double()[:, 2 * n :].view(rows, n, n) @ x.double().view(rows, n, columns)
    yield got, (mixed + y.double()[:, n : 2 * n, None] * out.double()[:, None]).view(rows, -1)


@program("experimental/mhc.py", "_mhc_sinkhorn_kernel")
def mhc_sinkhorn():
    rows, n = 5, 4
    y = normal(rows, 2 * n + n * n, dtype=torch.float32)
    matrix = y.double()[:, 2 * n :].view(rows, n, n).exp()
    for _ in range(20):
        matrix = matrix / matrix.sum(2, keepdim=True)
        matrix = matrix / matrix.sum(1, keepdim=True)
    want = torch.cat([y.double()[:, : 2 * n], matrix.view(rows, -1)], -1)
    yield tilegym("experimental.mhc").mhc_sinkhorn(y, n), want


@program("experimental/nvfp4_quantize.py", "_nvfp4_quant_kernel", tolerance=0.0)
def nvfp4_quantize():
    rows, columns = 128, 128
    x = normal(rows, columns, dtype=torch.float32)
    packed, scales = tilegym("experimental.nvfp4_quantize").tile_nvfp4_quantize(x, 2.0)
    blocks = x.numpy().reshape(rows, columns // 16, 16)
    before = np.maximum(np.abs(blocks).max(-1) / np.float32(6.0) * np.float32(2.0), np.float32(1.5258789e-05))
    scale = before.astype(ml_dtypes.float8_e4m3fn)
    fours = (blocks * (np.float32(2.0) / scale.astype(np.float32))[..., None]).astype(ml_dtypes.float4_e2m1fn)
    codes = fours.view(np.uint8).reshape(rows, columns // 2, 2)
    yield packed, codes[..., 0] | codes[..., 1] << 4
    swizzled = scale.view(np.uint8).reshape(4, 32, columns // 64, 4).transpose(2, 1, 0, 3)
    yield scales, swizzled.reshape(-1)
