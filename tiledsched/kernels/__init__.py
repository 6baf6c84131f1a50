"""Kernels with knobs. One module per kernel; `template_for` finds one by name."""

from __future__ import annotations

from tiledsched.errors import SpaceError
from tiledsched.kernels.template import KernelTemplate


def template_for(name: str) -> KernelTemplate:
    """The template called `name`.

    Raises:
        SpaceError: no such kernel.
    """
    if name == "attention":
        from tiledsched.kernels.attention.template import AttentionTemplate

        return AttentionTemplate()
    raise SpaceError(f"unknown kernel {name!r}; known is attention")
