"""What `sdpa` would do with given tensors, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiledsched.serve.explain import Explanation, launched_fingerprint

if TYPE_CHECKING:
    import torch

    from tiledsched.ops.features import AttentionFeatures
    from tiledsched.ops.plans import Plan


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False, verify: bool = False, **asked: Any
) -> Explanation:
    """What `sdpa` would do with these tensors, and why.

    Args:
        q, k, v, causal: as for :func:`tiledsched.sdpa`.
        verify: also compile, for these very tensors, what would be launched, and
            compare its machine code with the measured one. Takes about a second and needs the compiler.
        asked: window, softcap, sinks, key_starts and key_lengths, as for `sdpa`.

    Raises:
        UnsupportedError: the kernel cannot serve them.
    """
    from tiledsched.ops.arguments import CAUSAL
    from tiledsched.ops.features import NAMES, read_beside
    from tiledsched.ops.plans import plan_for

    plan = plan_for(q, k, v, causal=causal, **asked)
    _, beside = read_beside(q, k, CAUSAL[causal], *(asked.get(name) for name in NAMES))
    return explain_plan(plan, beside, q, k, v, verify=verify)


def explain_plan(
    plan: Plan, beside: AttentionFeatures, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, verify: bool
) -> Explanation:
    """The same of a plan, with what is asked for beside, of q, k and v."""
    from tiledsched.ops.launching import all_arguments
    from tiledsched.serve.process import device_facts, settings

    facts = device_facts(plan.device)
    launches = all_arguments(plan, q, k, v, beside) if verify else []
    fingerprint = (
        launched_fingerprint([each[0] for each in launches], [each[1] for each in launches], facts.arch)
        if verify
        else ""
    )
    return Explanation(
        problem=plan.problem,
        arch=facts.arch,
        device_name=facts.name,
        served=plan.served,
        rival=plan.rival.name if plan.rival else "",
        in_graphs=plan.in_graphs.name if plan.in_graphs else "",
        launched_fingerprint=fingerprint,
        controls=settings().sources,
    )
