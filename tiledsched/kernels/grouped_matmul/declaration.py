"""The declaration of grouped products: sizes, offsets, knobs, and which launches a schedule comes to.

What runs on the GPU is in `tiles` beside it; cuTile is imported where a launch is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.cases import Case, random_inputs
from tiledsched.core.cost import NEXT_LAUNCH_US
from tiledsched.core.device import ArchSpec, ResourceFacts, grid_blocks
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import Similarity, about
from tiledsched.kernels.grouped_matmul.rivals import raced
from tiledsched.kernels.product_schedules import ELEMENT_BYTES, ProductCost, instruction, row_bytes, step_cycles

FEWEST_GROUPS = 32
"""Least width of the vectors over all groups: a warp."""
OFFSET_KINDS = ("even", "one", "alternate", "ends")
"""Kinds of offsets in the adversarial test inputs."""
SKEW = 1.0
"""Exponent by which the rows of a group fall with its rank in the random test inputs (Zipf's law)."""

TOKENS = (64, 1024, 4096)
"""Tokens before each goes to several experts."""
MODELS = {
    "mixtral_8x7b": (8, 2, ((28672, 4096), (4096, 14336))),
    "qwen3_30b": (128, 8, ((1536, 2048), (2048, 768))),
    "deepseek_v3": (32, 1, ((4096, 7168), (7168, 2048))),
    "gpt_oss_20b": (32, 4, ((5760, 2880), (2880, 2880))),
    "llama4_scout": (16, 1, ((16384, 5120), (5120, 8192))),
}
"""Model -> experts, experts of each token, and (n, k) of the two halves of an expert's feed-forward network, gate and up
together; from the models' published configurations. DeepSeek-V3's 256 experts, eight for each token, are spread over eight GPUs.
"""

SUITES: dict[str, list[dict[str, Any]]] = {
    name: [
        {"tokens": tokens * chosen, "experts": experts, "n": n, "k": k, "b_layout": "column"}
        for n, k in shapes
        for tokens in TOKENS
    ]
    for name, (experts, chosen, shapes) in MODELS.items()
}
"""Tokens times weights that lie as `torch.nn.Linear` keeps them: `[experts, n, k]`, which is B column-major."""


class GroupedMatmulCost(ProductCost):
    """The time of a grouped product whose groups are of about one size."""

    def bytes_moved(self, p: Problem) -> int:
        """A and C once, and the matrix of each group that has rows in the random test inputs, on which problems are timed."""
        read = numpy.count_nonzero(numpy.diff(skewed_ends(p.tokens, p.experts), prepend=0))
        return super().bytes_moved(p) - int(p.experts - read) * p.k * p.n * ELEMENT_BYTES

    def row_tiles(self, p: Problem, s: Schedule) -> int:
        """Tiles of rows: every group has one that is not full."""
        tile = s.number("TILE_M")
        groups = min(p.experts, p.tokens)
        return groups * -(-p.tokens // (groups * tile))

    def step_cycles(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec, resident: int) -> float:
        """Cycles of a step. Exchanged operands exchange the sides of the tile."""
        turned = s.replace(TILE_M=s["TILE_N"], TILE_N=s["TILE_M"]) if s["SWAP"] else s
        return step_cycles(turned, facts, spec, resident, by_tma=spec.producer_warps > 0 and not p.odd)

    def dram_bytes(self, p: Problem, s: Schedule, spec: ArchSpec, slots: int) -> float:
        """Every group's matrix once, and beyond that what a product of one group would take."""
        others = max(0, min(p.experts, p.tokens) - 1) * p.k * p.n * ELEMENT_BYTES
        return others + super().dram_bytes(p, s, spec, slots)

    def other_launches_us(self, p: Problem, s: Schedule, spec: ArchSpec) -> float:
        """The list of tiles before the product."""
        return NEXT_LAUNCH_US


class GroupedMatmulSimilarity(Similarity):
    """How grouped products compare: by the rows of a group, above all."""

    def distance(self, p: Any, q: Any) -> float:
        """Octaves between the sizes, where those between the rows of a group count twice."""
        sizes = sum(abs(math.log2(getattr(p, name) / getattr(q, name))) for name in ("tokens", "experts", "n", "k"))
        layouts = 0.3 * (p.b_layout != q.b_layout) + 0.3 * (p.dtype != q.dtype)
        return sizes + abs(math.log2(p.tokens / p.experts) - math.log2(q.tokens / q.experts)) + layouts

    def bucketed(self, p: Any) -> Any:
        """The product of about as many rows: a model's weights have sizes of their own."""
        return p.replace(tokens=about(p.tokens))

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Octaves of the rows of a group and of the sizes, four to one; the layout of B."""
        sizes = (math.log2(each) / 4 for each in (p.tokens / p.experts, p.tokens, p.n, p.k))
        return (*sizes, 0.3 * (p.b_layout == "column"))


class GroupedMatmul(Kernel):
    """C[rows of group g] = A[rows of group g] @ B[g], for A `[tokens, k]`, B `[experts, k, n]` and C `[tokens, n]`.

    The rows of A are sorted by group. Group g ends before row Offsets[g], int32 on the device, where the next one begins, as in
    `torch._grouped_mm`. Groups may be empty; rows from the last offset on are not written. Sums are in float32 and rounded once.
    """

    name = "grouped_matmul"
    tokens = ts.dim()
    experts = ts.dim()
    n = ts.dim()
    k = ts.dim()
    dtype = ts.dtype("bfloat16", "float16")
    b_layout = ts.choice("row", "column")
    derived = {
        "m": lambda p: p.tokens,
        "odd": lambda p: row_bytes(p.k) or row_bytes(p.k if p.b_layout == "column" else p.n),
        "group_rows": lambda p: -(-p.tokens // p.experts),
    }

    A = ts.array("tokens k")
    B = ts.array("experts k n", layout="b_layout")
    Offsets = ts.array("experts", dtype="int32")
    C = ts.out("tokens n")
    Tiles = ts.workspace(lambda p, s: (4, most_tiles(p, s)), dtype="int32")

    knobs = {
        "TILE_M": ts.knob((128, 64, 256, 16, 32), about="rows of a work tile", weight=1.0),
        "TILE_N": ts.knob((256, 128, 64), about="columns of a work tile", weight=1.0),
        "TILE_K": ts.knob((64, 128), about="columns of A that a step of the main loop takes", weight=0.4),
        "SWAP": ts.knob(
            (False, True), about="whether columns of B take the rows of the tensor core's tile", weight=1.0
        ),
        "STORE": ts.knob(("view", "rows"), about="how the next group's rows are left alone", weight=0.4),
        "num_worker_warps": ts.knob((8, 4), about="warps that multiply", weight=1.0),
        "num_ctas": ts.knob((1, 2), about="blocks of a cluster, which share their operands", weight=1.0),
        "GROUP_M": ts.knob((8, 4, 16), about="tiles of rows that are taken together", weight=0.1),
        "PERSISTENT": ts.knob((True, False), about="whether a block takes several work tiles", weight=0.4),
        "occupancy": ts.knob((0, 2), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4),
        "LATENCY": ts.knob((6, 0), about="latency hint of the main loop's loads", measured_only=True),
    }
    constraints = {
        "TILE_M * TILE_N <= 32768 * num_ctas": "two groups of warps hold 128 x 256 sums in registers, and no more",
        "TILE_M >= 64 * num_ctas or num_ctas == 1": "a cluster divides the rows of a tile",
        "num_ctas == 1 or STORE == 'rows'": "the compiler (13.5 on sm_90) makes illegal instructions of views in clusters",
        "num_ctas == 1 or shared_memory_bytes > 200000": "clusters share loads on the data-center archs since sm_90",
    }
    exploring = {
        "SWAP or TILE_M >= 64": "the tensor core's tile has 64 rows",
        "not SWAP or TILE_M <= 64 or STORE == 'rows'": "tiles of 128 rows fill the tensor core's, and are tried with one store",
        "TILE_M * TILE_N <= 16384 * num_ctas or num_worker_warps == 8": "one group of warps spills more than 128 x 128 sums",
        "TILE_M * TILE_N >= 16384 or num_worker_warps == 4": "small tiles leave a second group of warps no work",
        "TILE_M < 128 or TILE_N >= 128": "tall and narrow tiles read more than they multiply",
        "TILE_M <= 128 or num_ctas == 2 or TILE_N == 128": "beyond what registers hold",
        "group_rows > 32 or TILE_M <= 32": "rows beyond the group's last are multiplied for nothing",
        "group_rows > 64 or TILE_M <= 64": "rows beyond the group's last are multiplied for nothing",
        "group_rows > 192 or TILE_M <= 128": "rows beyond the group's last are multiplied for nothing",
        "group_rows <= 64 or TILE_M >= 64": "small tiles read their operands too often",
        "TILE_K <= 64 or TILE_M * TILE_N <= 16384": "long steps leave room for two of them, where tiles are large",
        "num_ctas == 1": "clusters spill registers where threads store rows (688 bytes of 256 x 256 sums under 13.5 on sm_90)",
        "GROUP_M == 8 or (tokens > 1024 and TILE_M * TILE_N >= 32768)": "the order is tried on large tiles",
        "occupancy == 0 or (TILE_M * TILE_N <= 16384 and num_worker_warps == 4)": "of larger tiles an SM holds one in any case",
        "LATENCY == 6 or TILE_M * TILE_N >= 16384": "without the hint large tiles are tried",
    }
    suites = SUITES
    cost = GroupedMatmulCost()
    similarity = GroupedMatmulSimilarity()
    batch_dims = ("tokens",)
    axes = ("tokens", "experts", "n", "k", "dtype")
    plain = {"LATENCY": 0, "SWAP": False}

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Sizes of the first launch's vectors, what is known of rows of C, and how they are stored."""
        return {
            "GROUPS": max(FEWEST_GROUPS, 1 << (p.experts - 1).bit_length()),
            "ALIGNED": not row_bytes(p.n),
            "STORE_VIEW": s["STORE"] == "view",
        }

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Any]:
        """The list of tiles, and the product. No more blocks are launched than the list may have tiles."""
        from tiledsched.kernels.grouped_matmul import tiles

        slots = most_tiles(p, s)
        blocks = grid_blocks(slots * -(-p.n // s.number("TILE_N")), s, device, persistent=bool(s["PERSISTENT"]))
        return [(tiles.list_tiles, (slots,)), (tiles.grouped_matmul, (blocks,))]

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """Rows that go to groups by Zipf's law, in an order of their own: some groups have many, and some perhaps none."""
        return {"Offsets": xp.asarray(skewed_ends(p.tokens, p.experts))}

    @staticmethod
    def adversarial(xp: Any, rng: Any, p: Problem, reference: Callable[..., Any]) -> Iterator[Case]:
        """Even groups; all rows in one; every other group empty; and all rows in the first and the last group."""
        random = random_inputs(p.declaration, xp, rng, p)
        for kind in OFFSET_KINDS:
            inputs = {**random, "Offsets": xp.asarray(group_ends(kind, p.tokens, p.experts))}
            yield Case(kind, inputs, reference(inputs))

    @staticmethod
    def reference(xp: Any, A: Any, B: Any, Offsets: Any) -> Any:
        """Each group's product."""
        out, begin = xp.zeros((A.shape[0], B.shape[2]), A.dtype), 0
        for group, end in enumerate(int(each) for each in Offsets):
            if end > begin:
                out[begin:end] = A[begin:end] @ B[group]
            begin = end
        return out

    @staticmethod
    def reduction_order(p: Problem, s: Schedule) -> tuple[Any, ...]:
        """The instruction, and which operand takes the rows of the tensor core; a tile walks all of k in order."""
        return instruction(s), s["SWAP"]

    rivals = staticmethod(raced)

    @staticmethod
    def flops(p: Problem) -> float:
        """A multiply-add is two."""
        return 2.0 * p.tokens * p.n * p.k

    @staticmethod
    def small() -> list[Problem]:
        """Sizes that no tile divides, both layouts, rows that TMA cannot load, and more groups than rows."""
        made: list[dict[str, Any]] = [
            {"tokens": 200, "experts": 5, "n": 136, "k": 72},
            {"tokens": 30, "experts": 40, "n": 80, "k": 136, "b_layout": "column"},
            {"tokens": 130, "experts": 3, "n": 75, "k": 101, "dtype": "float16"},
            {"tokens": 1, "experts": 1, "n": 8, "k": 8, "b_layout": "column"},
        ]
        return [GroupedMatmul.problem(**values) for values in made]


def most_tiles(p: Problem, s: Schedule) -> int:
    """Most tiles of rows that any offsets make."""
    tile = s.number("TILE_M")
    groups = min(p.experts, p.tokens)
    return (p.tokens - groups) // tile + groups


def group_ends(kind: str, rows: int, groups: int) -> numpy.ndarray[Any, Any]:
    """The ends of groups, int32, for a kind of :data:`OFFSET_KINDS`."""
    if kind == "one":
        counts = numpy.eye(1, groups, groups // 2)[0]
    elif kind == "alternate":
        counts = numpy.arange(groups) % 2 == (groups > 1)
    elif kind == "ends":
        counts = numpy.isin(numpy.arange(groups), (0, groups - 1))
    else:
        counts = numpy.ones(groups)
    return numpy.rint(numpy.cumsum(counts / counts.sum()) * rows).astype(numpy.int32)


def skewed_ends(rows: int, groups: int) -> numpy.ndarray[Any, Any]:
    """The ends of groups, int32, of the random test inputs: some groups have many rows, and some perhaps none."""
    weights = 1.0 / numpy.arange(1, groups + 1) ** SKEW
    order = numpy.random.default_rng(groups).permutation(groups)
    return numpy.rint(numpy.cumsum(weights[order] / weights.sum()) * rows).astype(numpy.int32)
