"""One training step of a small GPT over ranks: `torchrun --standalone --nproc-per-node 2 -m docs.studies.training_ranks`.

Every rank takes three steps from the same weights: alone on the whole batch, then on its part of the batch under
`DistributedDataParallel`, then under FSDP2 (`fully_shard`). Both must give every rank the same gradients, to the bit, and
those of the whole batch within rounding. Then heads of one attention are split over the ranks as distributed tensors. Last,
the ranks compare the schedules that they were served.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tiledsched as ts
from docs.studies.flags import positive
from docs.studies.gpt import GPT, Shape, ours, served, tokens

FARTHEST = 0.02
"""How far gradients may be from those of one rank, as the norm of the difference over the norm: bf16 rounds to 0.004."""


def make(shape: Shape, device: torch.device) -> GPT:
    """A model whose weights are the same on all ranks."""
    torch.manual_seed(0)
    with device:
        return GPT(shape, ours)


def gradients(model: nn.Module, batch: Tensor, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The gradient of each parameter after one step on `batch` `[sequences, context + 1]`; of sharded ones in full."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    found = {name: each.grad for name, each in named}
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in found.items()
        if each is not None
    }


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest distance of a gradient from the wanted one, over the norm of that."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[name] - each).norm() / each.norm().clamp_min(1e-12)) for name, each in wanted.items())


def same_everywhere(found: dict[str, Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    for each in found.values():
        first = each.clone()
        dist.broadcast(first, 0)
        differs = torch.tensor(float(not torch.equal(first, each)), device=each.device)
        dist.all_reduce(differs)
        if differs:
            return False
    return True


def split_heads(device: torch.device, shape: Shape) -> float:
    """The distance of attention whose heads are split over the ranks, and of its gradients, from that of whole tensors."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator(device).manual_seed(0)
    size = (2, shape.heads, shape.context, shape.width // shape.heads)
    q, k, v, weight = (torch.randn(size, generator=generator, device=device).bfloat16() for _ in range(4))
    whole = [each.clone().requires_grad_() for each in (q, k, v)]
    parts = [distribute_tensor(each, mesh, [Shard(1)]).requires_grad_() for each in (q, k, v)]
    wanted = ours(*whole)
    wanted.backward(weight)
    found: Any = ours(*parts)
    if list(found.placements) != [Shard(1)]:
        return float("inf")
    found.backward(distribute_tensor(weight, mesh, [Shard(1)]))
    pairs = [(found.full_tensor(), wanted)] + [
        (ours_.grad.full_tensor(), theirs.grad) for ours_, theirs in zip(parts, whole, strict=True)
    ]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the steps, compare, and print on the first rank."""
    parser = argparse.ArgumentParser(description="One step of a small GPT under DDP and FSDP2, started by torchrun.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, default in (("layers", 4), ("heads", 8), ("width", 512), ("context", 1024), ("batch", 8)):
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"default: {default}")
    options = parser.parse_args(arguments)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        ts.configure(compile="wait", fallback="error", rivals="record")  # our kernels alone
    device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else None)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    shape = Shape(
        layers=options.layers, heads=options.heads, width=options.width, context=options.context, vocabulary=4096
    )
    batch = tokens(shape, options.batch, 1)[0].to(device)
    mine = batch.chunk(ranks)[rank]

    alone = make(shape, device)
    wanted = gradients(alone, batch, alone.named_parameters())
    ddp = make(shape, device)
    found = {"DDP": gradients(DistributedDataParallel(ddp), mine, ddp.named_parameters())}
    sharded = make(shape, device)
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    found["FSDP2"] = gradients(sharded, mine, sharded.named_parameters())

    good, lines = (
        True,
        [
            f"{ranks} ranks, {torch.cuda.get_device_name() if options.device == 'cuda' else 'CPU'}, torch {torch.__version__}"
        ],
    )
    for name, each in found.items():
        same, distance = same_everywhere(each), apart(each, wanted)
        good &= same and distance < FARTHEST
        lines.append(
            f"{name}: gradients {'equal on all ranks' if same else 'DIFFER between ranks'}, "
            f"{distance:.4f} from one rank with the whole batch"
        )
    if options.device == "cuda":  # torch cannot split its attention on CPUs
        distance = split_heads(device, shape)
        good &= distance < FARTHEST
        lines.append(f"heads split over ranks: output and gradients {distance:.4f} from whole tensors")
    schedules: list[Any] = [None] * ranks
    dist.all_gather_object(schedules, served())
    same = all(each == schedules[0] for each in schedules)
    good &= same
    lines.append(f"schedules: {'the same on all ranks' if same else 'DIFFER'}; digest {ts.check_ranks()}")
    if rank == 0:
        print("\n".join([*lines, *(f"  {each}" for each in schedules[0])]))
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
