"""SiLU in cuTile. The program chooses the best tile with `exhaustive_search`, which remembers what it found (docs/drop-in.md)."""

import cuda.tile as ct
import torch

from tiledsched import exhaustive_search

SIZES = (1 << 20, 1 << 24, 1 << 26)
CONFIGS = [
    {"tile": tile, "num_worker_warps": warps, "occupancy": occupancy}
    for tile in (512, 1024, 2048, 4096, 8192)
    for warps in (4, 8)
    for occupancy in (2, 4)
]


@ct.kernel
def silu(X, Out, TILE: ct.Constant[int]):
    block = ct.bid(0)
    x = ct.load(X, (block,), (TILE,)).astype(ct.float32)
    ct.store(Out, (block,), (x / (1 + ct.exp(-x))).astype(Out.dtype))


def hints(config):
    return {name: config[name] for name in ("num_worker_warps", "occupancy")}


def best_tile(x, out):
    """The fastest configuration for arrays of this size, measured once on each GPU and then remembered."""
    return exhaustive_search(
        CONFIGS,
        torch.cuda.current_stream(),
        lambda config: (ct.cdiv(x.numel(), config["tile"]), 1, 1),
        silu,
        lambda config: (x, out, config["tile"]),
        hints,
        quiet=True,
    ).best


def main():
    for size in SIZES:
        x = torch.randn(size, device="cuda", dtype=torch.float16)
        out = torch.empty_like(x)
        best = best_tile(x, out)
        grid = (ct.cdiv(size, best.config["tile"]), 1, 1)
        kernel = silu.replace_hints(**hints(best.config))
        ct.launch(torch.cuda.current_stream(), grid, kernel, (x, out, best.config["tile"]))
        torch.testing.assert_close(out, torch.nn.functional.silu(x), rtol=2e-3, atol=2e-3)
        print(f"{size} elements: {best.config}, {best.mean_us:.1f} us")


if __name__ == "__main__":
    main()
