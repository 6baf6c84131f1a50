"""One of two ranks that attend to distributed tensors: `python sharded_attention.py RANK FILE`. The kernel runs on the CPU.

It prints, for each case, the placements of the output and how far outputs and gradients are from those of whole tensors.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist
from serve_on_cpu import Launches, using
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tiledsched import sdpa

CASES = {
    "batch": (Shard(0), {}),
    "heads": (Shard(1), {}),
    "heads and sinks": (Shard(1), {"sinks": Shard(0)}),
    "batch and lengths": (Shard(0), {"key_lengths": Shard(0)}),
    "batch and sinks": (Shard(0), {"sinks": Replicate()}),
    "rows": (Shard(2), {}),
    "one head": (Shard(1), {"kv_heads": 1}),
}
"""How q, k and v are split, and of the optional arguments which are given, and how they are split."""


def run(launches: Launches, mesh, split, more):
    """The output's placements, the largest error of output and gradients, and the shape of q in each launch."""
    more = dict(more)
    kv_heads = more.pop("kv_heads", 2)
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 8, 16), "k": (2, kv_heads, 8, 16), "v": (2, kv_heads, 8, 16)}
    whole = {name: torch.randn(shape, generator=generator).half().requires_grad_() for name, shape in shapes.items()}
    placed = {name: split if whole[name].shape[split.dim] > 1 else Replicate() for name in whole}
    for name, placement in more.items():
        whole[name] = torch.tensor([3, 8]) if name == "key_lengths" else torch.randn(4, generator=generator).half()
        placed[name] = placement
    parts = {
        name: distribute_tensor(each.detach(), mesh, [placed[name]]).requires_grad_(each.requires_grad)
        for name, each in whole.items()
    }
    weights = torch.randn(shapes["q"], generator=generator).half()
    wanted = sdpa(**whole, causal=True)
    wanted.backward(weights)
    launches.clear()
    found = sdpa(**parts, causal=True)
    seen = [each.shape for *_, arguments in launches for each in arguments[:1]]
    found.backward(distribute_tensor(weights, mesh, found.placements))
    pairs = [(found, wanted), *((parts[name].grad, each.grad) for name, each in whole.items() if each.requires_grad)]
    errors = [float((ours.full_tensor() - theirs).abs().max()) for ours, theirs in pairs]
    return str(found.placements), errors, seen


def main() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    assert "torch.distributed.tensor" in sys.modules
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    launches = Launches()
    warnings.simplefilter("ignore")
    with using(launches.runtime):
        found = {name: run(launches, mesh, *case) for name, case in CASES.items()}
    print(json.dumps(found, default=str))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
