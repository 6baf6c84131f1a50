"""Plans of attention: how a call of `sdpa`, `sdpa_varlen` or `sdpa_paged` becomes a plan, is found again and is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from tiledsched.core.arrays import ALIGNMENT, strides_of
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.backends import empty_output, output_dtype, raced
from tiledsched.kernels.attention.options import EIGHT_BITS
from tiledsched.kernels.attention.problem import unfit_for_q8, words_of
from tiledsched.kernels.attention.scales import scales
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.ops.arguments import EIGHT_BIT_DTYPE, check_tensors, unserved
from tiledsched.ops.features import NO_FEATURES, AttentionFeatures, in_words
from tiledsched.serve import process
from tiledsched.serve.chain import Served
from tiledsched.serve.execute import launch_plan
from tiledsched.serve.plan import Decision, Plan, beyond_int32, choose, make_plan, rival_fields
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.serve.schema import Output


def plan_key(
    q: Any,
    k: Any,
    v: Any,
    causal: str | None,
    scale: float | None,
    lse: bool,
    features: AttentionFeatures = NO_FEATURES,
) -> tuple[Any, ...]:
    """What a plan depends on.

    Strides count only where a tensor is not contiguous: such a tensor may span more than its elements, and more than a 32-bit
    index reaches, and the output keeps q's order of axes. cuTile itself tells apart, at every launch, the layouts that need
    other machine code.
    """
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, causal, scale, lse)
    if features is not NO_FEATURES:
        key = (*key, features.key)  # type: ignore[assignment]
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return key
    return (*key, q.stride(), k.stride(), v.stride())


cache: PlanCache[Plan] = PlanCache(plan_key)


def find_ready(q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool) -> Plan | None:
    """The plan for a call that needs nothing but a launch: a shorter :meth:`PlanCache.find_ready`.

    Args:
        q, k, v: plain tensors, not nested ones: torch's comparison would end the process.
        causal, scale, lse: as in :class:`AttentionCall`.
    """
    for (same_causal, same_scale, same_lse), matches, plan in cache.recent:
        if same_causal == causal and same_scale == scale and same_lse == lse and matches(q, k, v):
            return plan
    return cache.find_by_key((q, k, v), (causal, scale, lse))


class AttentionCall(NamedTuple):
    """A call of attention whose arguments have been read."""

    q: Any
    """`[batch, heads, rows, columns]`; of packed sequences `[1, heads, rows of all, columns]`."""
    k: Any
    """`[batch, kv_heads, keys, columns]`; of pages `[pages, kv_heads, rows of a page, columns]`."""
    v: Any
    """Like k, with columns of its own."""
    causal: str | None
    """top_left or bottom_right, where the causal mask is aligned; None for no mask."""
    scale: float | None
    """The softmax scale; None for 1 / sqrt(head_dim)."""
    lse: bool
    """Whether the log-sum-exp is returned, too."""
    features: AttentionFeatures = NO_FEATURES
    """The optional features of the call."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What a launch takes: q, k, v and the features' tensors."""
        return (*as_read(*self[:3], self.features), *self.features.feature_arrays(self.q).values())

    def problem(self) -> Problem:
        """The problem that the tensors pose.

        Raises:
            ProblemError: the kernel has no such problem.
        """
        page = 0 if self.features.block_table is None else self.k.shape[2]
        eight: dict[str, Any] = {"kv8": self.features.kv8, "q8": self.q.dtype == EIGHT_BIT_DTYPE}
        problem = self.features.kernel.problem(**self.fields(), page=page, **eight, lse=self.lse)
        if beyond_int32(self.tensors):  # pages are more than a call reads, and others may be parts of larger ones
            # As if derived of the sizes: the same problem, by functions with 64-bit indices.
            vars(problem)["wide"] = True
        return problem

    def fields(self) -> dict[str, Any]:
        """The fields of the problem that the kernels of both directions have."""
        q, k, v, features = self.q, self.k, self.v, self.features
        batch, heads, seq_q, head_dim = q.shape
        pages = 1 if features.block_table is None else features.block_table.shape[1]
        return {
            "seq_q": seq_q,
            "seq_k": pages * k.shape[2],
            "head_dim": head_dim,
            "dtype": str(output_dtype(q)).removeprefix("torch."),
            "causal": self.causal is not None,
            "alignment": self.causal or "top_left",
            "batch": batch,
            "heads": heads,
            "kv_heads": k.shape[1],
            "value_dim": v.shape[3],
            **features.fields,
        }

    def without_q8(self) -> bool:
        """Whether the kernel has no program for the call's queries in 8 bits; it has one for the same numbers in bfloat16."""
        refused = unserved(*self[:3], None, 0.0)
        return bool(refused or unfit_for_q8({**self.fields(), "page": 0, "kv8": self.features.kv8}))

    def find_plan(self) -> Plan | str:
        """The plan of the call, or why the kernel cannot serve it.

        Raises:
            ProblemError: shapes, dtypes or devices that do not fit together.
            ConfigError: settings that contradict each other, such as a forced knob that makes the schedule invalid.
        """
        return cache.find(plan_key(*self), self.make_plan)

    def make_plan(self, served: Served | None = None) -> Plan | str:
        """A new plan of the call, or why the kernel cannot serve it.

        Args:
            served: what is served; the table's answer unless given.

        Raises:
            ProblemError, ConfigError: as :meth:`find_plan`.
        """
        q, k, v, _, scale, _, features = self
        tensors = (q, k, v) if features.block_table is None else (q[:1], k[:1], v[:1])  # of pages there is any number
        check_tensors(*tensors, eight_bits=features.k_scale is not None)
        reason = unserved(*tensors, None, 0.0)
        if reason:
            return reason
        cap = features.softcap or None
        if process.is_invariant() and getattr(features.kernel, "mods", (None, None))[1] is not None:
            raise UnsupportedError(
                "flex with a mask_mod has bits that depend on the batch; call it outside of batch_invariant(), or have score_mod "
                "return minus infinity for the keys that a row does not see"
            )
        try:
            problem = self.problem()
            numbers = dict(zip(("scale_log2", "cap_scale"), scales(problem, scale, cap), strict=True))
        except ProblemError as error:
            return str(error)
        decision = choose(features.front, problem, (q, k, v), lambda: raced(problem, scale, cap, late=True), served)
        if isinstance(decision, str):
            return decision
        decodes = q.shape[2] <= FEW_ROWS and features is NO_FEATURES and decision.captured_served is None
        return self._plan_like_last(decision, numbers) if decodes else self._plan_of(decision, numbers)

    def _plan_of(self, decision: Decision, numbers: dict[str, float]) -> Plan:
        q, value_columns = self.q, self.v.shape[3]
        inputs = dict(zip("QKV", as_read(q, self.k, self.v, self.features), strict=True))
        inputs |= self.features.feature_arrays(q)
        shape, dtype = (*q.shape[:3], value_columns), decision.problem.dtype
        outputs = {"Out": Output(shapes=(shape,), strides=(empty_output(q, value_columns).stride(),), dtype=dtype)}
        if self.lse:
            spec = Attention.array_spec("Lse", decision.problem)
            outputs["Lse"] = Output(shapes=spec.shapes, strides=(strides_of(spec.shape, False),), dtype=spec.dtype)
        return make_plan(decision, inputs, outputs, numbers)

    def _plan_like_last(self, decision: Decision, numbers: dict[str, float]) -> Plan:
        """A plan of few rows. A model that decodes asks for another length with every token, whose launches are mostly those of
        the length before: then the plan made last is used again, for the new problem."""
        q, k, v, causal, _, lse, _ = self
        problem, schedule = decision.problem, decision.served.schedule
        kind = (
            schedule,
            *numbers.values(),
            causal,
            lse,
            q.dtype,
            q.device,
            q.shape,
            q.stride(),
            k.shape[:2],
            v.shape[3],
        )
        launches = Attention.launches(problem, schedule, process.device_facts(decision.device))
        follows_from = (problem.wide, Attention.constants(problem, schedule), launches)
        before, plan = cache.last_of_kind.get(kind, (None, None))
        if plan is None or before != follows_from:
            plan = self._plan_of(decision, numbers)
            cache.last_of_kind[kind] = (follows_from, plan)
            return plan
        return replace(plan, **vars(decision), **rival_fields(decision, plan.is_single, plan.sync))

    def launch(self, plan: Plan, *, first: bool = False, keep_zeros: bool = False) -> Any:
        """Launch a plan of the call; see :func:`launch_attention`."""
        q, k, v, _, _, lse, features = self
        return launch_attention(plan, q, k, v, lse, features, first, keep_zeros)


def launch_attention(
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    lse: bool,
    features: AttentionFeatures = NO_FEATURES,
    first: bool = False,
    keep_zeros: bool = False,
) -> Any:
    """The output, or output and log-sum-exp; see :func:`tiledsched.serve.execute.launch_plan`."""
    if features is NO_FEATURES:
        result = launch_plan(plan, (q, k, v), None, first, keep_zeros)
    else:
        extras = () if features.cu_seqlens_q is None else longest_sequence(plan.problem, features)
        tensors = (*as_read(q, k, v, features), *features.feature_arrays(q).values())
        result = launch_plan(plan, tensors, None, first, keep_zeros, extras)
    return (result[0], result[1].squeeze(-1)) if lse else result


def as_read(q: Any, k: Any, v: Any, features: AttentionFeatures) -> tuple[Any, Any, Any]:
    """q, k and v as the kernel takes them: keys and values in 8 bits in words; or, with queries in 8 bits, values by columns."""
    if features.k_scale is None:
        return q, k, v
    if q.dtype == EIGHT_BIT_DTYPE:  # products take values whose keys lie side by side
        q, k, v = (in_words(each, ALIGNMENT, EIGHT_BITS) for each in (q, k, v.mT))
        return q, k, v.mT
    words = words_of(k.shape[3], v.shape[3])
    return q, in_words(k, *words), in_words(v, *words)


def _place(offsets: Any) -> tuple[Any, ...]:
    """Where in memory offsets lie: two tensors of equal length that lie alike hold the same."""
    return offsets.data_ptr(), offsets.stride(), offsets.dtype


def longest_sequence(problem: Problem, features: AttentionFeatures) -> tuple[int, int] | None:
    """Rows and keys of the longest packed sequence, which a rival takes after the tensors.

    None where no rival can be called: the caller did not say how long the sequences are, which only the device knows; or rows
    and keys are packed differently under a mask aligned at the top left, which rivals have only for those packed alike.
    """
    cu_q, cu_k = features.cu_seqlens_q, features.cu_seqlens_k
    alike = features.block_table is None and (cu_k is cu_q or _place(cu_k) == _place(cu_q))
    if problem.causal and problem.alignment == "top_left" and not alike:
        return None
    rows, keys = features.max_seqlen_q, features.max_seqlen_k or (features.max_seqlen_q if alike else 0)
    keys = keys if features.block_table is None else problem.seq_k
    return (rows, keys) if rows and keys else None
