"""The rungs from a first attention kernel to the served one, that kernel's declaration, and what NVIDIA published of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tiledsched.core.fields as ts
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.rivals import Call, Method
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.ops.own_methods import ATTENTION_METHODS, schedule_launch

SOURCE = "github.com/NVIDIA/dgx-spark-playbooks at 0db7c14, nvidia/cutile-kernels/README.md"
"""Where the figures stand. They were timed as CUDA graphs, and their scripts have 4 x 32 heads and the causal mask."""
PROBLEM = {"batch": 4, "heads": 32, "kv_heads": 32, "head_dim": 128, "dtype": "float16", "causal": True}
LAST = "tiledsched"
"""The rung that stands beside NVIDIA's finished kernels: both are what their authors recommend."""


PUBLISHED = {
    **{
        ("GB10", 2048, rung): tflops
        for rung, tflops in {
            "naive": 62.8,
            "exp2": 66.5,
            "load_order": 66.3,
            "latency": 66.5,
            "occupancy": 79.5,
            "division": 81.1,
        }.items()
    },
    **{
        (gpu, seq, LAST): tflops
        for gpu, values in {
            "GB10": {1024: 58.188, 2048: 80.907, 4096: 86.19, 8192: 88.891, 16384: 89.492},
            "B300": {1024: 465.0, 2048: 770.0, 4096: 999.0, 8192: 1159.0, 16384: 1254.0},
        }.items()
        for seq, tflops in values.items()
    },
}
"""(GPU, sequence length, the rung of ours that has the same edits) -> TFLOP/s, with half of the operations counted under the
causal mask, as ours. The rungs of the playbook at S=2048 come first, then the finished kernel over sequence lengths: TileGym's on
a GB10 with 64x64 tiles, the playbook's on a B300 with 256x128."""


def published_for(problem: Problem) -> dict[tuple[str, int, str], float]:
    """What NVIDIA published for this very problem; nothing where it is none of NVIDIA's."""
    theirs = problem.declaration.problem(seq_q=problem.seq_q, seq_k=problem.seq_q, **PROBLEM)
    return {key: tflops for key, tflops in PUBLISHED.items() if (key[1], problem) == (problem.seq_q, theirs)}


class PlainAttention(Kernel):
    """Attention as one would first write it: each pair of a sequence and a head is computed by itself."""

    name = "plain_attention"
    pairs, rows = ts.dim(), ts.dim()
    head_dim = ts.dim(constant=True)
    causal = ts.flag(False)
    dtype = ts.dtype("float16", "bfloat16")
    Q, K, V = ts.array("pairs rows head_dim"), ts.array("pairs rows head_dim"), ts.array("pairs rows head_dim")
    Out = ts.out("pairs rows head_dim")
    knobs: ClassVar = {
        "tile_m": ts.knob((64, 128), about="rows of queries"),
        "tile_n": ts.knob((64, 128), about="rows of keys"),
        "exponent": ts.knob(("natural", "base2"), about="base of the exponentials"),
        "k_load": ts.knob(("permute", "order"), about="keys transposed by hand, or by the load"),
        "latency_k": ts.knob((0, 2), about="hint to the loads of keys; 0 for none"),
        "latency_v": ts.knob((0, 4), about="hint to the loads of values; 0 for none"),
        "occupancy": ts.knob((0, 1, 2), about="blocks an SM should hold; 0 leaves it to the compiler"),
        "num_worker_warps": ts.knob((0, 8), about="warps of a block; 0 leaves them to the compiler"),
        "division": ts.knob(("ieee", "approximate"), about="of the accumulator"),
    }
    constraints: ClassVar = {"head_dim in (16, 32, 64, 128, 256)": "a tile's sides are powers of two"}
    axes = ("rows", "head_dim", "causal", "dtype")
    suites: ClassVar = {"playbook": [{"pairs": 8, "rows": 2048, "head_dim": 128}]}

    @staticmethod
    def grid(p: Problem, s: Schedule, device: Any) -> tuple[int, ...]:
        """One block for each tile of queries of each pair."""
        return -(-p.rows // int(s["tile_m"])), p.pairs

    @staticmethod
    def entry(p: Problem, s: Schedule) -> Callable[..., None]:
        """The kernel's only tile function."""
        from tiledsched.studies.ladder.tiles import attend

        return attend

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """The values of the kernel's constant parameters."""
        return {
            "scale": p.head_dim**-0.5,
            "TILE_M": s["tile_m"],
            "TILE_N": s["tile_n"],
            "CAUSAL": p.causal,
            "BASE2": s["exponent"] == "base2",
            "TRANSPOSE": s["k_load"] == "permute",
            "LATENCY_K": s["latency_k"],
            "LATENCY_V": s["latency_v"],
            "IEEE": s["division"] == "ieee",
        }

    @staticmethod
    def reference(xp: Any, p: Problem, Q: Any, K: Any, V: Any) -> Any:
        """Softmax of the scaled and masked products, times the values: `[pairs, rows, head_dim]`."""
        scores = xp.einsum("bqd,bkd->bqk", Q, K) * p.head_dim**-0.5
        if p.causal:
            place = xp.arange(p.rows)
            scores = xp.where(place[None, None, :] <= place[None, :, None], scores, -xp.inf)
        powers = xp.exp(scores - scores.max(-1, keepdims=True))
        return xp.einsum("bqk,bkd->bqd", powers / powers.sum(-1, keepdims=True), V)

    @staticmethod
    def flops(p: Problem) -> float:
        """Operations of the two matrix products; half of them with the causal mask."""
        return 4.0 * p.pairs * p.rows * p.rows * p.head_dim / (2 if p.causal else 1)


NAIVE = Schedule(
    {
        "tile_m": 64,
        "tile_n": 64,
        "exponent": "natural",
        "k_load": "permute",
        "latency_k": 0,
        "latency_v": 0,
        "occupancy": 0,
        "num_worker_warps": 0,
        "division": "ieee",
    }
)
EDITS: Sequence[tuple[str, str, Mapping[str, KnobValue]]] = (
    ("naive", "natural exponent, keys transposed by hand, IEEE division, no hints", {}),
    ("exp2", "exponentials to base 2", {"exponent": "base2"}),
    ("load_order", "keys transposed by the load", {"k_load": "order"}),
    ("latency", "latency hints 2 and 4 to the loads", {"latency_k": 2, "latency_v": 4}),
    ("occupancy", "two blocks on an SM", {"occupancy": 2}),
    ("division", "approximate division", {"division": "approximate"}),
    (
        "tiles",
        "128 by 128 tiles, a block on an SM, of eight warps",
        {"tile_m": 128, "tile_n": 128, "occupancy": 1, "num_worker_warps": 8},
    ),
)
"""For each rung its name, what was edited, and the knobs that the edit changes."""


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def usual() -> list[Problem]:
    """The problems of the ladder where none is named: one sequence, 16 heads of 128 columns, float16, no mask."""
    make = kernel_named("attention").problem
    return [
        make(batch=1, heads=16, kv_heads=16, seq_q=length, seq_k=length, head_dim=128, dtype="float16", causal=False)
        for length in LENGTHS
    ]


def rungs() -> dict[str, tuple[str, Schedule]]:
    """Name -> what was edited, and the schedule with all edits so far."""
    found, schedule = {}, NAIVE
    for name, about, changes in EDITS:
        schedule = schedule.replace(**changes)
        found[name] = about, schedule
    return found


def plain_problem(problem: Problem) -> Problem:
    """The plain kernel's problem that is the same as an attention problem.

    Raises:
        UnsupportedError: the plain kernel has no such thing.
    """
    p, sizes = problem, ("seq_q", "seq_k", "head_dim", "dtype", "causal", "batch", "heads", "kv_heads", "alignment")
    fields = problem.declaration.fields
    more = any(value != fields[name].default for name, value in p.values.items() if name not in sizes)
    if p.heads != p.kv_heads or p.seq_q != p.seq_k or p.head_dim & (p.head_dim - 1) or more:
        raise UnsupportedError(
            "the plain kernel has keys for every head, as many keys as queries, heads of a power of two, and no more features "
            "than the causal mask"
        )
    return PlainAttention.problem(
        pairs=p.batch * p.heads, rows=p.seq_q, head_dim=p.head_dim, causal=p.causal, dtype=p.dtype
    )


def methods() -> list[Method]:
    """The methods of the bench: every rung, and last what is served."""
    found = [Method(name=name, make=_launched(schedule)) for name, (_, schedule) in rungs().items()]
    return [*found, ATTENTION_METHODS[0]]


def _launched(schedule: Schedule) -> Callable[[Any], Call]:
    def make(arrays: Any) -> Call:
        torch, problem = arrays.torch, plain_problem(arrays.problem)
        launch = schedule_launch(torch, PlainAttention, problem, schedule)
        shape = (problem.pairs, problem.rows, problem.head_dim)
        q, k, v = (tensor.view(shape) for tensor in arrays.tensors)

        def call() -> Any:
            out = torch.empty_like(arrays.tensors[0])
            launch(q, k, v, out.view(shape))
            return out

        return call

    return make
