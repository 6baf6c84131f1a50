"""Attention of given arrays in the interpreter."""

from __future__ import annotations

from tiledsched.interpreter import SmallDevice, run_schedule
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention.scales import scales


def run_outputs(kernel, schedule, problem, q, k, v, scale=None, *, sm_count=8, order="forward", cap=None, more=None):
    """`out`, and `lse` where the problem asks for it. `more`: its inputs beside q, k and v, by name."""
    scale_log2, cap_scale = scales(problem, scale, cap)
    found = run_schedule(
        kernel,
        problem,
        schedule,
        {"Q": q, "K": k, "V": v, **(more or {})},
        scalars={"scale_log2": scale_log2, "cap_scale": cap_scale},
        device=SmallDevice(sm_count=sm_count),
        order=order,
    )
    return {"out": found["Out"], **({"lse": found["Lse"][..., 0]} if "Lse" in found else {})}


def run_problem(kernel, schedule, problem, q, k, v, scale=None, **more):
    """The output alone."""
    return run_outputs(kernel, schedule, problem, q, k, v, scale, **more)["out"]


def attention_reference(*arrays, **more):
    """The output alone of the reference."""
    return attention_and_lse(*arrays, **more)[0]
