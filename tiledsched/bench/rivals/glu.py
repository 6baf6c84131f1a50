"""Rivals of gated linear units."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled
from tiledsched.core.problem import Problem
from tiledsched.kernels.glu.declaration import of_torch


def rivals(p: Problem) -> Rivals:
    """Each takes Gate and Up and returns the gated elements."""
    gate = of_torch(p.activation)
    found: dict[str, Callable[..., Any]] = {"torch": gate, "torch_compile": compiled(gate)}
    if p.activation != "gelu" and importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = _liger if p.activation == "silu" else _liger_gelu
    if p.activation == "silu" and importlib.util.find_spec("tilegym") is not None:
        found["tilegym"] = _tilegym
    return found


def _tilegym(gate: Any, up: Any) -> Any:
    from tilegym.ops import get_swiglu

    return get_swiglu()(gate, up)


def _liger(gate: Any, up: Any) -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def _liger_gelu(gate: Any, up: Any) -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)
