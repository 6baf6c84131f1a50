"""TileGym's backward kernels, reached through torch's autograd where TileGym connects them to it."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from strangers import programs
from strangers.references import attention, causal_mask, normal
from strangers.tilegym_rows import functools, tilegym
from strangers.tilegym_states import mamba2, mamba_inputs

PROGRAMS: list[programs.Program] = []
program = functools.partial(programs.program, PROGRAMS)


def gradients(function, *inputs: torch.Tensor):
    """The gradients of `function`'s output, weighted by fixed numbers, by each of the inputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    return torch.autograd.grad(out, leaves, weights.to(out.dtype))


def check_gradients(function, reference, *inputs: torch.Tensor):
    """Gradients of the program and of its reference, which gets float64."""
    yield from zip(gradients(function, *inputs), gradients(reference, *(x.double() for x in inputs)), strict=True)


@program("activation/gelu.py", "_gelu_kernel_backward", tolerance=4e-3)
def gelu():
    gelu = tilegym("activation.gelu").gelu
    yield from check_gradients(gelu, F.gelu, normal(3, 500))
    tanh = {"approximate": "tanh"}
    yield from check_gradients(functools.partial(gelu, **tanh), functools.partial(F.gelu, **tanh), normal(3, 500))


@program("activation/geglu.py", "_geglu_bwd_kernel", tolerance=4e-3)
def geglu():
    for approximate in ("none", "tanh"):

        def reference(x, approximate=approximate):
            a, b = x.chunk(2, -1)
            return a * F.gelu(b, approximate=approximate)

        geglu = functools.partial(tilegym("activation.geglu").geglu, approximate=approximate)
        yield from check_gradients(geglu, reference, normal(3, 400))


@program("swiglu.py", "_swiglu_backward_kernel")
def swiglu():
    yield from check_gradients(tilegym("swiglu").swiglu, lambda a, b: F.silu(a) * b, normal(3, 200), normal(3, 200))


@program("silu_and_mul.py", "_silu_and_mul_backward_kernel_row_wise")
def silu_and_mul():
    def reference(x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    yield from check_gradients(tilegym("silu_and_mul").silu_and_mul, reference, normal(3, 400))


@program("rms_norm.py", "_rms_bwd_kernel")
def rms_norm():
    norm = tilegym("rms_norm").rms_norm
    yield from check_gradients(
        lambda x, weight: norm(x, (300,), weight, 1e-5),
        lambda x, weight: F.rms_norm(x, (300,), weight, 1e-5),
        normal(30, 300),
        normal(300),
    )


@program("attention.py", *(f"_fmha_bwd_{part}_kernel" for part in ("preprocess", "dkdv", "dq")), tolerance=4e-3)
def fmha():
    for causal in (True, False):
        mask = causal_mask(128, 128) if causal else None
        yield from check_gradients(
            functools.partial(tilegym("attention").tile_fmha_with_backward, is_causal=causal),
            functools.partial(attention, mask=mask),
            normal(1, 4, 128, 64),
            normal(1, 2, 128, 64),
            normal(1, 2, 128, 64),
        )


@program(
    "mamba2.py",
    "bwd_pass_state_kernel",
    "compute_dd_dcb_dx_kernel",
    "compute_da_db_dc_ddt_kernel",
    tolerance=1e-2,
    check_overlap=False,  # heads of a group add to one gradient
)
def mamba2_backward():
    inputs = mamba_inputs(128)
    change, last_change = normal(*inputs[0].shape, dtype=torch.bfloat16), torch.randn(inputs[-1].shape)
    got = tilegym("mamba2").mamba2_chunk_backward(*inputs, change, last_change)
    leaves = [each.double().requires_grad_() for each in inputs]
    want = torch.autograd.grad(mamba2(*leaves), leaves, (change.double(), last_change.double()))
    yield from zip(got, want, strict=True)


ACTIVATIONS = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "relu_sq": lambda x: F.relu(x) ** 2,
}


@program("moe_actgrad_bwd.py", "_moe_actgrad_bwd_kernel", tolerance=4e-3)
def moe_actgrad():
    experts, inner, hidden, tokens, total = 3, 96, 64, 30, 50
    offsets = torch.tensor([0, 20, 20, total], dtype=torch.int32)
    out_change, weights, scores = normal(tokens, hidden), normal(experts, inner, hidden), torch.rand(total)
    rows, places = torch.randint(0, tokens, (total,)).int(), torch.randperm(total).int()
    expert = torch.repeat_interleave(torch.arange(experts), offsets.diff().long())
    change = torch.einsum("th,tih->ti", out_change.double()[rows.long()], weights.double()[expert])
    for name, activation in ACTIVATIONS.items():
        gated = name.endswith("glu")
        before = normal(total, 2 * inner if gated else inner)
        nothing = torch.full_like(before, float("nan")), torch.zeros(total), torch.full((total, inner), float("nan"))
        got, score_change, scaled = nothing[0], nothing[1], nothing[2].half()
        tilegym("moe_actgrad_bwd").moe_actgrad_bwd(
            out_change, before, weights, got, score_change, None, None, scaled, scores, offsets, rows, places, name
        )
        leaf = before.double().requires_grad_()
        after = activation(*leaf.chunk(2, -1)) if gated else activation(leaf)
        score = scores.double()[places.long(), None]
        yield got, torch.autograd.grad((after * score * change).sum(), leaf)[0]
        yield scaled, after * score
        yield score_change, (after * change).sum(-1)
