"""The inputs of an attention problem for `bench`, and which parts of its output are compared with float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from tiledsched.bench.case import BenchCase
from tiledsched.bench.methods import LEFT_OUT, OURS, Arrays
from tiledsched.bench.rivals.attention_plans import left_out_plan, own_plan, served_plan
from tiledsched.checking.errors import NOT_FINITE, Error
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.inputs import places
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention.rivals import heads_first, longest
from tiledsched.kernels.attention.scales import DEFAULT_CAP, default_scale

MOST_SCORES = 1 << 30
"""Scores of the reference, at most: four heads of 16384 x 16384, which take some tens of milliseconds in float64 on an
H200.
"""
MOST_PAIRS = 64
"""(sequence, head) pairs, at most, since each costs a few launches."""

Pair = tuple[int, int]
"""(sequence, query head). Without packing, each entry of the batch is a sequence."""


class AttentionArrays(Arrays):
    """Q, K and V, then the arrays of features that the problem has: sinks, sequence lengths, and where sequences and
    pages lie.

    Q, K and V are contiguous. Where sequences are packed or keys lie in pages, rows come before heads in memory.
    """

    @property
    def q(self) -> Any:
        """`[batch, heads, seq_q, head_dim]`."""
        return self.tensors[0]

    @property
    def k(self) -> Any:
        """`[batch, kv_heads, seq_k, head_dim]`, or pages."""
        return self.tensors[1]

    @property
    def v(self) -> Any:
        """`[batch, kv_heads, seq_k, value_dim]`, or pages."""
        return self.tensors[2]

    @property
    def features(self) -> Any:
        """The features of the problem, as the public functions read them. The longest sequence is read from the device."""
        from tiledsched.ops.features import NO_FEATURES, AttentionFeatures

        p, given = self.problem, self.by_name
        if not (p.has_features or p.is_varlen):
            return NO_FEATURES
        most = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest(p, self.tensors), strict=False))
        return AttentionFeatures(
            window=p.window,
            window_right=p.window_right,
            softcap=DEFAULT_CAP if p.softcap else 0.0,
            sinks=given.get("Sinks"),
            key_starts=given.get("Starts"),
            key_lengths=given.get("Lengths"),
            cu_seqlens_q=given.get("CuQ"),
            cu_seqlens_k=given.get("CuK"),
            block_table=given.get("Table"),
            **most,
        )

    @property
    def call(self) -> Any:
        """The call of the public functions, for which plans are made."""
        from tiledsched.ops.plans import AttentionCall

        p = self.problem
        return AttentionCall(self.q, self.k, self.v, p.alignment if p.causal else None, None, False, self.features)


def compared_pairs(problem: Problem, heads: int | None = None, most_scores: int = MOST_SCORES) -> list[Pair]:
    """The pairs whose output is compared: the first, the last, and others drawn with the problem's id as seed.

    As many as `most_scores` and `MOST_PAIRS` allow, two at least, all where they allow it. So every run of a problem
    compares the same pairs.

    Args:
        problem: whose.
        heads: how many heads a sequence has, if not the query heads are compared but the key heads.
        most_scores: scores of the reference, at most.
    """
    heads = heads or problem.heads
    total, group = problem.sequences * heads, problem.heads // heads
    count = min(total, MOST_PAIRS, max(2, most_scores // (group * problem.mean_rows * problem.mean_keys)))
    numbers = {0, total - 1}
    others = random.Random(problem.id).sample(range(1, max(1, total - 1)), max(0, count - len(numbers)))
    return [divmod(number, heads) for number in sorted(numbers.union(others))]


def reference_of_pair(xp: Any, problem: Problem, q: Any, k: Any, v: Any, **features: Any) -> Any:
    """The float64 output of one (sequence, head) pair, `[seq_q, value_dim]`.

    Args:
        xp: numpy or cupy.
        problem: mask and scale.
        q: `[seq_q, head_dim]` of that head, of a type that `xp` knows and float64 holds.
        k: `[seq_k, head_dim]` of its key head; v, `[seq_k, value_dim]`, likewise.
        features: sinks, starts and lengths, `[1]` each, of that head and sequence, where the problem has them.
    """
    out, _ = attention_and_lse(
        xp,
        q[None, None],
        k[None, None],
        v[None, None],
        causal=problem.causal,
        scale=default_scale(problem),
        alignment=problem.alignment,
        window=problem.window,
        window_right=problem.window_right,
        cap=DEFAULT_CAP if problem.softcap else 0.0,
        **features,
    )
    return out[0, 0]


@dataclass(frozen=True)
class PairCase(BenchCase):
    """A case of which only some (sequence, head) pairs are compared, because comparing all of a long problem would take
    minutes.
    """

    arrays: AttentionArrays
    """The inputs that methods are called on."""
    pairs: Sequence[Pair]
    """The pairs that are compared."""
    places: Mapping[str, Any]
    """Where sequences and pages lie, as arrays on the host."""

    @property
    def compared(self) -> str:
        """How much of the output is compared, such as `4/64`."""
        return f"{len(self.pairs)}/{self.arrays.problem.sequences * self.arrays.problem.heads}"

    def error(self, out: Any) -> Error:
        """How far a method's output is from float64; none of its elements may be infinite or NaN."""
        out = out.detach()
        if not bool(self.arrays.torch.isfinite(out).all()):
            return NOT_FINITE
        parts = (rows_of(out, self.places, *pair) for pair in self.pairs)
        return self.error_where_finite(zip(parts, self.expected, strict=True))

    def explain(self, method: str, *, verify: bool) -> Any:
        """What our kernel launched and why, or the rival that is served in its place."""
        from tiledsched.serve.execute import explain_plan

        plan = {OURS: own_plan, LEFT_OUT: left_out_plan}.get(method, served_plan)(self.arrays)
        return explain_plan(plan, self.arrays.call.tensors, verify=verify and method != LEFT_OUT)


def make_case(torch: Any, cupy: Any, problem: Problem) -> PairCase:
    """The case of a problem: standard normal inputs, the same in every run, and the pairs that are compared.

    CuPy has no bfloat16: it is given float32, which holds both types.
    """
    generator = generator_of(torch, problem)
    q, k, v = drawn(torch, problem, generator)
    given, features = drawn_features(torch, problem, generator, q.device)
    pairs, expected = compared_pairs(problem), []
    arrays = AttentionArrays(torch=torch, problem=problem, tensors=(q, k, v, *features))
    for sequence, head in pairs:
        kv_head = head // problem.group
        parts = (rows_of(q, given, sequence, head), *(keys_of(each, given, sequence, kv_head) for each in (k, v)))
        wide = (cupy.from_dlpack(each.float()) for each in parts)
        own = {} if problem.is_varlen else {name.lower(): each[sequence : sequence + 1] for name, each in given.items()}
        if problem.sinks:
            own["sinks"] = features[0][head : head + 1].double().cpu().numpy()
        of_head, of_keys, of_values = wide
        expected.append(reference_of_pair(cupy, problem, of_head, of_keys, of_values, **own))
    torch.cuda.synchronize()
    return PairCase(arrays, expected, cupy, pairs, given)


def generator_of(torch: Any, problem: Problem) -> Any:
    """What draws the inputs of a problem: the same in every run."""
    return torch.Generator(device="cuda").manual_seed(int(problem.id, 16) % 2**31)


def drawn(torch: Any, problem: Problem, generator: Any) -> list[Any]:
    """Standard normal q, k and v as the kernel takes them; rows come before heads in memory where servers store them so."""
    keys = (problem.key_entries, problem.kv_heads, problem.key_rows)
    shapes = (
        (problem.batch, problem.heads, problem.seq_q, problem.head_dim),
        (*keys, problem.head_dim),
        (*keys, problem.value_columns),
    )
    packed = (problem.packed, problem.ends_k, problem.ends_k)
    return [
        drawn_array(torch, problem, generator, shape, bool(each)) for shape, each in zip(shapes, packed, strict=True)
    ]


def drawn_array(torch: Any, problem: Problem, generator: Any, shape: tuple[int, ...], packed: bool) -> Any:
    """A standard normal array of that shape, in which sequences are packed or are not; see :func:`drawn`."""
    entries, heads, rows, columns = shape
    in_memory = (entries, rows, heads, columns) if problem.is_varlen else shape
    one = torch.randn(in_memory, generator=generator, device="cuda").to(getattr(torch, problem.dtype))
    return heads_first(one[0] if packed else one) if problem.is_varlen else one


def drawn_features(torch: Any, problem: Problem, generator: Any, device: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """(where sequences and pages lie, as arrays on the host; the tensors of the problem's features, sinks first)."""
    given = places(numpy.random.default_rng(int(problem.id, 16) % 2**31), problem)
    features = []
    if problem.sinks:
        features = [torch.randn((problem.heads,), generator=generator, device="cuda").to(getattr(torch, problem.dtype))]
    alike = {id(each): torch.as_tensor(each, dtype=torch.int32, device=device) for each in given.values()}
    return given, features + [alike[id(each)] for each in given.values()]  # rows and keys that lie alike: one tensor


def rows_of(queries: Any, given: Mapping[str, Any], sequence: int, head: int | slice) -> Any:
    """The rows of one sequence and head, `[rows, columns]`, of queries or of an output `[batch, heads, rows, columns]`.

    Args:
        queries: a torch tensor.
        given: what `inputs.places` gives.
        sequence: which, also of packed ones.
        head: which; for a slice, the first axis is that of heads.
    """
    if "CuQ" not in given:
        return queries[sequence, head]
    return queries[0, head, int(given["CuQ"][sequence]) : int(given["CuQ"][sequence + 1])]


def keys_of(keys: Any, given: Mapping[str, Any], sequence: int, kv_head: int | slice) -> Any:
    """The keys or values of one sequence and key head, `[keys, columns]`."""
    if "Table" in given:
        pages = keys[:, kv_head][[int(each) for each in given["Table"][sequence]]]
        return pages.flatten(0, 1)[: int(given["Lengths"][sequence])]
    if "CuK" in given:
        return keys[0, kv_head, int(given["CuK"][sequence]) : int(given["CuK"][sequence + 1])]
    return keys[sequence, kv_head]
