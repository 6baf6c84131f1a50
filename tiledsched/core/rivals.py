"""Other implementations of a kernel's problems: what the file `rivals.py` of a kernel's folder is written in.

A *method* is one way to compute a problem, which a bench times in turn with the others. `Kernel.rivals` names those among them
that a tune times, too, and that may serve calls; `Kernel.stand_in` is what serves while a program is compiled. For a softmax:

    def in_torch(p, numbers):
        import torch

        return lambda X: torch.softmax(X, -1)

    def tilegym(p):  # several functions: the fastest on the arrays counts
        from tilegym.ops import softmax

        return {"plain": softmax, "tma": partial(softmax, use_tma=True)}

    METHODS = (*torch_methods(in_torch), Method(name="tilegym", make=called(tilegym), package="tilegym"))
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiledsched.core.arrays import ArraySpec
from tiledsched.core.problem import Problem

Function = Callable[..., Any]
"""Takes a problem's inputs as torch tensors, in the order declared, and returns its outputs, likewise."""
Variants = Mapping[str, Function]
"""Functions for one problem by name."""
Numbers = Mapping[str, float]
"""The run-time scalars of a call by name."""
Call = Callable[[], Any]
"""Starts one computation on the current stream; returns its output, or its outputs in the order declared."""
MEMORY_SHARE = 0.5
"""Share of the device's memory that a method may take beyond its inputs and outputs."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """The inputs of one problem, as torch tensors on the GPU."""

    torch: Any
    """The torch module."""
    problem: Problem
    """The problem to compute."""
    tensors: tuple[Any, ...]
    """Inputs, and arrays that the kernel changes in place, in the order declared; a list of arrays is a list here."""
    look_us: Callable[[Call], float] = lambda call: 0.0
    """Gives the rough time of a call in microseconds."""

    @property
    def specs(self) -> list[ArraySpec]:
        """The kernel's arrays whose contents are given, in the order of the tensors."""
        return [spec for spec in self.problem.declaration.arrays(self.problem) if spec.role in ("in", "inout")]

    @property
    def by_name(self) -> dict[str, Any]:
        """The tensors by the names of the kernel's arrays."""
        return {spec.name: tensor for spec, tensor in zip(self.specs, self.tensors, strict=True)}

    @property
    def copies(self) -> tuple[Any, ...]:
        """The tensors, with copies of those that the kernel changes in place: every method sees them unchanged."""
        pairs = zip(self.specs, self.tensors, strict=True)
        return tuple(tensor.clone() if spec.role == "inout" else tensor for spec, tensor in pairs)


@dataclass(frozen=True, kw_only=True)
class RivalCase:
    """One problem, ready to be computed by every method, and the right outputs in float64."""

    arrays: Arrays
    """The inputs that methods are called on."""
    expected: Mapping[str, Sequence[Any]]
    """The right arrays, or parts of them, by the name of the output."""
    parts: Callable[[Mapping[str, Any]], Mapping[str, Sequence[Any]]]
    """Gives the same parts of a method's outputs, which are given by name."""
    compared: str = "all"
    """How much of the outputs is compared: all, or a number of (batch, head) pairs such as `4/64`."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to compute a problem. Nothing is imported before it is used: a method whose package is missing, or which refuses a
    problem, costs its own row only.
    """

    name: str
    """Name in `--methods` and in the rows."""
    make: Callable[[Arrays], Call]
    """Makes the call on given arrays. It raises UnsupportedError, or whatever its library raises, where it cannot."""
    package: str = ""
    """The Python package it needs besides torch. Where that is missing, the method takes part only if it is named."""
    knows: Callable[[Problem], bool] = lambda p: True
    """Whether it takes part in the rows of a problem."""
    extra_bytes: Callable[[Problem], int] = lambda p: 0
    """Device memory in bytes that it takes beyond inputs and outputs, where that may be too much."""
    by_name: bool = False
    """Whether it takes part only where it is named."""
    explain: Callable[[Arrays, bool], Any] | None = None
    """For our own methods: what is launched on the arrays, and why (`tiledsched.explain`). The flag asks for the machine code to
    be compared with the measured artifact."""
    names_rivals: bool = False
    """Whether a rival may be launched in place of our kernel."""
    flops: float | None = None
    """Floating-point operations of a call; None where they are the problem's."""

    @property
    def installed(self) -> bool:
        """Whether its package is installed; nothing is imported to find out."""
        return not self.package or is_installed(self.package)

    def refusal(self, problem: Problem, memory_bytes: int) -> str:
        """Why it is not even tried on `problem`; empty where it is tried."""
        if not self.installed:
            return f"not installed: {self.package}"
        needed = self.extra_bytes(problem)
        if needed > MEMORY_SHARE * memory_bytes:
            return f"skipped: its score matrices would take {needed / 2**30:.0f} GiB"
        return ""


def is_installed(package: str) -> bool:
    """Whether a package or a module of one is installed. The module itself is not imported to find out."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a part of a package that is not there
        return False


def called(make: Callable[[Problem], Function | Variants]) -> Callable[[Arrays], Call]:
    """`Method.make` of a function that is made for a problem; of several of them by name, the fastest on the arrays.

    Variants that refuse the arrays are left out; where all do, the first one's error is raised.
    """

    def on_arrays(arrays: Arrays) -> Call:
        found, tensors = make(arrays.problem), arrays.copies
        if not isinstance(found, Mapping):
            return call_on(found, tensors)
        times: dict[str, float] = {}
        refusals: list[Exception] = []
        for name, variant in found.items():
            try:
                times[name] = arrays.look_us(partial(variant, *tensors))
            except Exception as error:
                refusals.append(error)
        if not times:
            raise refusals[0]
        return partial(found[min(times, key=lambda name: times[name])], *tensors)

    return on_arrays


def call_on(function: Function, tensors: Sequence[Any]) -> Call:
    """A rival's call on some inputs, what it reads of their values read already; see `Kernel.rivals`."""
    bind = getattr(function, "bind", None)
    return bind(*tensors) if bind else partial(function, *tensors)
