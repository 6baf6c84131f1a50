"""TileGym's kernels of matrix products, mixtures of experts among them."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from strangers import programs
from strangers.references import mixture_of_experts, normal
from strangers.tilegym_rows import functools, tilegym

PROGRAMS: list[programs.Program] = []
program = functools.partial(programs.program, PROGRAMS)


@program("matmul.py", "_matmul_kernel")
def matmul():
    for dtype in (torch.float16, torch.float32):
        a, b = normal(150, 100, dtype=dtype), normal(100, 90, dtype=dtype)
        yield tilegym("matmul").matmul(a, b), a.double() @ b.double()


@program("matmul.py", "_static_persistent_matmul_kernel")
def matmul_persistent():
    a, b = normal(100, 150), normal(90, 100)
    got = tilegym("matmul").matmul(a, b, trans_a=True, trans_b=True, static_persistent=True)
    yield got, a.double().T @ b.double().T


@program("bmm.py", "_bmm_kernel")
def bmm():
    a, b = normal(2, 100, 70), normal(2, 70, 90)
    yield tilegym("bmm").bmm(a, b, static_persistent=False), a.double() @ b.double()


@program("bmm.py", "_static_persistent_bmm_kernel")
def bmm_persistent():
    a, b = normal(3, 70, 100), normal(3, 90, 70)
    got = tilegym("bmm").bmm(a, b, transpose_a=True, transpose_b=True)
    yield got, a.double().mT @ b.double().mT


@program("group_gemm.py", "_group_gemm_kernel")
def group_gemm():
    for transposed in (False, True):
        sizes = ((100, 60, 70), (130, 40, 200), (20, 150, 30))
        a = [normal(m, k) for m, k, n in sizes]
        b = [normal(n, k) if transposed else normal(k, n) for m, k, n in sizes]
        got = tilegym("group_gemm").group_gemm(a, b, transpose_b=transposed)
        for c, x, y in zip(got, a, b, strict=True):
            yield c, x.double() @ (y.double().T if transposed else y.double())


@program("linear_gluact_linear.py", "_linear_gluact_fwd_kernel", tolerance=4e-3)
def linear_gluact_linear():
    activations = {"silu": F.silu, "relu": F.relu, "gelu-tanh": lambda x: F.gelu(x, approximate="tanh")}
    for name, activation in activations.items():
        # Its sums are not padded, so that its columns are whole tiles.
        x, first, second, last = (normal(*s, dtype=torch.float32) for s in ((50, 128), (90, 128), (90, 128), (40, 90)))
        got = tilegym("linear_gluact_linear").linear_gluact_linear(x, first, second, last, name)
        x, first, second, last = (each.double() for each in (x, first, second, last))
        yield got, (activation(x @ first.T) * (x @ second.T)) @ last.T


@program("fp8_quantization_matmul.py", "_w8a8_block_fp8_matmul_kernel")
def fp8_matmul():
    a, b = (normal(m, 256, dtype=torch.float8_e4m3fn) for m in (40, 128))
    a_scale, b_scale = torch.rand(40, 2) + 0.5, torch.rand(1, 2) + 0.5
    want = (a.double() * a_scale.double().repeat_interleave(128, 1)) @ (
        b.double() * b_scale.double().repeat_interleave(128, 1)
    ).T
    for use_tma in (True, False):
        got = tilegym("fp8_quantization_matmul").w8a8_block_fp8_matmul(a, b, a_scale, b_scale, use_tma=use_tma)
        yield got, want


ALIGN = "moe_align_block_size"


@program(
    "moe_align_block.py",
    *(f"_{ALIGN}_stage{stage}_kernel" for stage in ("1", "2", "3", "4b_scatter")),
    tolerance=0.0,
    check_overlap=False,  # programs without tokens rewrite offsets with what they hold
)
def moe_align_block_size():
    ids, experts, block = torch.randint(0, 5, (37, 2), dtype=torch.int32), 5, 16
    sorted_ids, expert_ids, padded, cumsum, largest = tilegym("moe_align_block").moe_align_block_size(
        ids, block, experts
    )
    counts = torch.bincount(ids.flatten(), minlength=experts)
    blocks = -(-counts // block)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), (blocks * block).cumsum(0)])
    yield cumsum, starts
    yield padded, starts[-1:]
    yield largest, counts.max().reshape(1)
    yield expert_ids[: blocks.sum()], torch.repeat_interleave(torch.arange(experts), blocks)
    for expert in range(experts):
        mine = sorted_ids[starts[expert] : starts[expert + 1]]
        tokens = (ids.flatten() == expert).nonzero().flatten()
        yield mine.sort().values[: len(tokens)], tokens
        yield mine.sort().values[len(tokens) :], torch.full((len(mine) - len(tokens),), ids.numel())


@program("moe.py", "_fused_moe_kernel")
def fused_moe():
    import cuda.tile as ct

    tokens, depth, columns, experts, chosen, block = 20, 64, 96, 4, 2, 16
    x, weights = normal(tokens, depth), normal(experts, columns, depth)
    ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)]).int()
    routing = torch.rand(tokens, chosen)
    order = ids.flatten().argsort(stable=True).int()
    token_ids, expert_ids = [], []
    for expert in range(experts):
        mine = order[ids.flatten()[order] == expert]
        blocks = -(-len(mine) // block)
        token_ids.append(F.pad(mine, (0, blocks * block - len(mine)), value=ids.numel()))
        expert_ids += [expert] * blocks
    sorted_ids = torch.cat(token_ids)
    config = {"TILE_SIZE_M": block, "TILE_SIZE_N": 32, "TILE_SIZE_K": 32, "GROUP_SIZE_M": 8}
    for routed in (False, True):
        out = torch.full((tokens, chosen, columns), float("nan")).half()
        tilegym("moe").invoke_fused_moe_kernel(
            x,
            weights,
            out,
            None,
            None,
            routing,
            ids,
            sorted_ids,
            torch.tensor(expert_ids, dtype=torch.int32),
            torch.tensor([len(sorted_ids)], dtype=torch.int32),
            routed,
            chosen,
            config,
            ct.float16,
            False,
        )
        yield out, mixture_of_experts(x, weights, ids.long(), routing, routed=routed)
