"""Two ranks that attend to distributed tensors: `python sharded_attention.py FOLDER`. The kernels run on the CPU.

Each rank writes `FOLDER/RANK.json`: for each case, how the output is placed, the shape of each rank's queries, and by name how far the output and the
gradients are from those that torch computes of whole tensors in float32.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from serve_on_cpu import Launches, using
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tiledsched import sdpa, sdpa_paged
from tiledsched.ops.fallback import attend_in_torch
from tiledsched.ops.features import AttentionFeatures

BATCH, HEADS, ROWS, WHOLE = Shard(0), Shard(1), Shard(2), Replicate()
CASES = {
    "batch": ((2, 2, 1), (BATCH, BATCH, BATCH), {}),
    "heads": ((1, 4, 2), (HEADS, HEADS, HEADS), {}),
    "rows": ((1, 2, 1), (ROWS, ROWS, ROWS), {}),
    "one head of keys": ((1, 2, 1), (HEADS, WHOLE, WHOLE), {}),
    "three heads of keys": ((1, 6, 3), (HEADS, HEADS, HEADS), {}),
    "batch and features": ((2, 2, 1), (BATCH, BATCH, BATCH), {"sinks": WHOLE, "key_lengths": BATCH}),
    "heads and features": ((1, 4, 2), (HEADS, HEADS, HEADS), {"sinks": BATCH, "key_lengths": WHOLE}),
}
"""Batch, heads and heads of keys; the placements of q, k and v; and optional arguments with theirs. Of most cases each rank
computes one sequence, two heads and one head of keys, so that there are three problems in all."""


def run(launches: Launches, mesh, sizes, placements, more):
    batch, heads, kv_heads = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (batch, heads, 8, 16),
        "k": (batch, kv_heads, 8, 16),
        "v": (batch, kv_heads, 8, 16),
        "sinks": (heads,),
    }
    whole = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    whole["key_lengths"] = torch.tensor([5, 8][:batch])
    weights = torch.randn(shapes["q"], generator=generator).half()
    placed = dict(zip("qkv", placements, strict=True)) | more
    floats = {name: whole[name].float().requires_grad_() for name in placed if name != "key_lengths"}
    features = AttentionFeatures(sinks=floats.get("sinks"), key_lengths=whole["key_lengths"] if more else None)
    wanted = attend_in_torch(*(floats[name] for name in "qkv"), None, 0.0, "top_left", None, False, features)
    wanted.backward(weights.float())
    parts = {
        name: distribute_tensor(whole[name], mesh, [each]).requires_grad_(name in floats)
        for name, each in placed.items()
    }
    launches.clear()
    found = sdpa(**parts, causal=True)
    seen = launches[0][3][0].shape
    found.backward(distribute_tensor(weights, mesh, found.placements))
    pairs = {"out": (found, wanted), **{name: (parts[name].grad, each.grad) for name, each in floats.items()}}
    errors = {name: float((ours.full_tensor() - theirs).abs().max()) for name, (ours, theirs) in pairs.items()}
    return str(found.placements[0]), tuple(seen), errors


def run_on_pages(launches: Launches, mesh):
    """Pages may belong to any sequence, so that every rank needs all of them, while the batch is split."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 8, 2, 16), "k_cache": (4, 16, 1, 16), "v_cache": (4, 16, 1, 16)}
    whole = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    whole |= {"block_table": torch.tensor([[3, 0], [1, 2]]), "key_lengths": torch.tensor([20, 9])}
    wanted = sdpa_paged(**whole)
    placed = dict.fromkeys(whole, BATCH) | {"k_cache": WHOLE, "v_cache": WHOLE}
    launches.clear()
    found = sdpa_paged(**{name: distribute_tensor(whole[name], mesh, [each]) for name, each in placed.items()})
    error = float((found.full_tensor() - wanted).abs().max())
    return str(found.placements[0]), tuple(launches[0][3][0].shape), {"out": error}


def attend(rank: int, folder: Path) -> None:
    """What one rank does."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    launches = Launches()
    warnings.simplefilter("ignore")
    with using(launches.runtime):
        found = {name: run(launches, mesh, *case) for name, case in CASES.items()}
        found["pages"] = run_on_pages(launches, mesh)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo  # which distributed tensors import: here it is once for both ranks

    torch.set_num_threads(1)
    ranks = [
        multiprocessing.get_context("fork").Process(target=attend, args=(rank, Path(sys.argv[1]))) for rank in (0, 1)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))
