"""Floating-point operations of operators, as `torch.utils.flop_counter` counts them.

A call that finds a counter at work gives it the formulas. They are not registered before, since torch's module of counters
imports Triton, which may take longer than a first call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_dispatch_modes = torch._C._len_torch_dispatch_stack
_formulas: dict[Any, Callable[..., int]] = {}
"""By operator, which torch calls a packet of overloads."""


def set_formula(overload: Any, formula: Callable[..., int]) -> None:
    """Have `FlopCounterMode` count a formula for each call of an operator.

    Args:
        overload: the operator.
        formula: from the arguments of a call, and its result as `out_val`, to the number of operations.
    """
    _formulas[overload._overloadpacket] = formula


def inform_counters() -> None:
    """Give the formulas to the counters that are at work in this thread, and register them for later ones."""
    counting = sys.modules.get("torch.utils.flop_counter") if _dispatch_modes() else None
    if counting is None:
        return
    for packet in _formulas.keys() - counting.flop_registry.keys():
        counting.register_flop_formula(packet, get_raw=True)(_formulas[packet])
    for counter in (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()):
        if isinstance(counter, counting.FlopCounterMode):
            counter.flop_registry = counting.flop_registry | counter.flop_registry
