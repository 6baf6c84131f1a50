"""Layer norm with Triton: `autotune` times the configurations at the first call with a new key."""

import torch
import triton
import triton.language as tl


@triton.autotune(
    configs=[triton.Config({}, num_warps=warps) for warps in (2, 4, 8, 16)], key=["columns"], cache_results=True
)
@triton.jit
def layer_norm_kernel(X, W, B, Out, columns, eps, TILE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, TILE)
    inside = at < columns
    x = tl.load(X + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / columns
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / columns
    w = tl.load(W + at, mask=inside).to(tl.float32)
    b = tl.load(B + at, mask=inside).to(tl.float32)
    normal = centred * tl.rsqrt(variance + eps) * w + b
    tl.store(Out + row * columns + at, normal.to(Out.dtype.element_ty), mask=inside)


def layer_norm(x, w, b, eps=1e-5):
    rows, columns = x.shape
    out = torch.empty_like(x)
    layer_norm_kernel[(rows,)](x, w, b, out, columns, eps, TILE=triton.next_power_of_2(columns))
    return out


if __name__ == "__main__":
    from harness import INTERPRETED, check

    if INTERPRETED:
        layer_norm_kernel.configs = layer_norm_kernel.configs[:1]  # one is not timed: there is no GPU
    check(layer_norm)
