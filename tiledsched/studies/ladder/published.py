"""What NVIDIA published for the problems of its playbook for flash attention in cuTile Python. None of it is ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiledsched.core.problem import Problem

SOURCE = "github.com/NVIDIA/dgx-spark-playbooks at 0db7c14, nvidia/cutile-kernels/README.md"
"""Where the figures stand. They were timed as CUDA graphs, and their scripts have 4 x 32 heads and the causal mask."""
PROBLEM = {"batch": 4, "heads": 32, "kv_heads": 32, "head_dim": 128, "dtype": "float16", "causal": True}
LAST = "tiledsched"
"""The rung that stands beside NVIDIA's finished kernels: both are what their authors recommend."""


@dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """A rate that NVIDIA published."""

    gpu: str
    """GB10 or B300."""
    seq: int
    """Sequence length."""
    rung: str
    """The rung of ours that has the same edits."""
    tflops: float
    """TFLOP/s, with half of the operations counted under the causal mask, as ours."""


def _rates(gpu: str, seq: int, values: Mapping[str, float]) -> list[PublishedRate]:
    return [PublishedRate(gpu=gpu, seq=seq, rung=rung, tflops=value) for rung, value in values.items()]


PUBLISHED = (
    *_rates(
        "GB10",
        2048,
        {"naive": 62.8, "exp2": 66.5, "load_order": 66.3, "latency": 66.5, "occupancy": 79.5, "division": 81.1},
    ),
    *(
        PublishedRate(gpu=gpu, seq=seq, rung=LAST, tflops=value)
        for gpu, values in (
            ("GB10", {1024: 58.188, 2048: 80.907, 4096: 86.19, 8192: 88.891, 16384: 89.492}),
            ("B300", {1024: 465.0, 2048: 770.0, 4096: 999.0, 8192: 1159.0, 16384: 1254.0}),
        )
        for seq, value in values.items()
    ),
)
"""The rungs of the playbook at S=2048, then the finished kernel over sequence lengths: TileGym's on a GB10 with 64x64 tiles, the
playbook's on a B300 with 256x128."""


def published_for(problem: Problem) -> list[PublishedRate]:
    """What NVIDIA published for this very problem; nothing where it is none of NVIDIA's."""
    lengths = {each.seq for each in PUBLISHED}
    theirs = {length: problem.declaration.problem(seq_q=length, seq_k=length, **PROBLEM) for length in lengths}
    return [each for each in PUBLISHED if theirs[each.seq] == problem]
