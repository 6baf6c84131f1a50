"""A stranger's program: host code that launches kernels, what it should compute, and how running it turned out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strangers.stand_in import gpu_stand_in
from tiledsched.interpreter import InterpreterError, UnsupportedOperationError, launches_on_cpu
from tiledsched.interpreter.contraction import Arithmetic

Pairs = Iterable[tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Program:
    file: str
    """Path of the source within its package."""
    kernels: tuple[str, ...]
    """Names of the kernels in that file which it launches, and which its result shows to be right."""
    compute: Callable[[], Pairs]
    """Runs the host code and yields what came out beside what should have."""
    tolerance: float
    """Largest difference allowed, as a part of the reference's largest element."""
    check_overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    launched: frozenset[str]
    """Names of the kernels that ran to their end."""
    error: float
    """Largest difference found, as a part of the reference's largest element; infinite where something raised."""
    agrees: bool
    lacking: str
    """The operation that the interpreter lacks, by its own error; or the error, where it is another one."""
    trace: str
    """Where the error came from."""


def program(
    programs: list[Program], file: str, *kernels: str, tolerance: float = 2e-3, check_overlap: bool = True
) -> Callable[[Callable[[], Pairs]], Callable[[], Pairs]]:
    """Add the decorated function to `programs` as a program of these kernels."""

    def add(compute: Callable[[], Pairs]) -> Callable[[], Pairs]:
        programs.append(
            Program(file=file, kernels=kernels, compute=compute, tolerance=tolerance, check_overlap=check_overlap)
        )
        return compute

    return add


def run(each: Program, arithmetic: Arithmetic = "rounded") -> Outcome:
    """How running `each` turned out."""
    torch.manual_seed(0)
    error, lacking, trace = 0.0, "", ""
    with launches_on_cpu(check_overlap=each.check_overlap, arithmetic=arithmetic) as launched:
        try:
            with gpu_stand_in():
                pairs = [(plain(got), plain(want)) for got, want in each.compute()]
            error = max(difference(got, want) for got, want in pairs)
        except UnsupportedOperationError as failure:
            error, lacking, trace = float("inf"), failure.operation, traceback.format_exc()
        except InterpreterError as failure:
            error, lacking, trace = float("inf"), str(failure), traceback.format_exc()
        except Exception as failure:  # a stranger's program may raise anything
            error, lacking, trace = float("inf"), f"{type(failure).__name__}: {failure}", traceback.format_exc()
    ended = launched[:-1] if lacking else launched
    return Outcome(launched=frozenset(ended), error=error, agrees=error <= each.tolerance, lacking=lacking, trace=trace)


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a part of the reference's largest element; infinite where shapes or NaNs differ."""
    if got.shape != want.shape or not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf")
    largest = np.nanmax(np.abs(want), initial=0.0)
    return float(np.nanmax(np.abs(got - want), initial=0.0) / (largest or 1.0))


def plain(value: Any) -> np.ndarray:
    """`value` in NumPy's float64; a complex number as two."""
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj()
        value = (torch.view_as_real(value) if value.is_complex() else value).double().numpy()
    return np.asarray(value, np.float64)
