"""The methods that are compared, and how each is called on the same arrays.

Nothing is imported before it is used: a method whose package is missing, or which refuses a problem, costs its own row only.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiledsched.bench.rivals import module_of, rivals_of
from tiledsched.core.cases import input_specs, output_specs
from tiledsched.core.errors import ConfigError, UnsupportedError
from tiledsched.core.fields import Flag
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.measure.rivals import call_on

OURS = "tiledsched"
"""The method that always runs our kernel."""
SERVED = "served"
"""The method that runs whatever is served: our kernel, or a rival that was measured to be faster."""
LEFT_OUT = "left_out"
"""The method that runs what would be served if nobody had tuned the suites that hold the problem."""
DETERMINISTIC = "deterministic"
"""The method that runs our kernel with a fixed order of sums, where a kernel may be asked for that."""
MATMUL = "matmul"
MATMUL_SIZE = 8192
"""Rows and columns of the square matrices whose product is the practical ceiling of arithmetic."""
MEMORY_SHARE = 0.5
"""Share of the device's memory that the score matrices of a method may take."""

Call = Callable[[], Any]
"""Starts one computation on the current stream; returns its output, or its outputs in the order declared."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """The inputs of one problem, as torch tensors on the GPU."""

    torch: Any
    """The torch module."""
    problem: Problem
    """The problem to compute."""
    tensors: tuple[Any, ...]
    """Inputs, and arrays that the kernel changes in place, in the order declared; a list of arrays is a list here."""

    @property
    def by_name(self) -> dict[str, Any]:
        """The tensors by the names of the kernel's arrays."""
        specs = input_specs(self.problem.declaration, self.problem)
        return dict(zip((spec.name for spec in specs), self.tensors, strict=True))

    @property
    def dtype(self) -> Any:
        """Element type of the first input."""
        first = self.tensors[0]
        return (first[0] if isinstance(first, list) else first).dtype


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to compute a problem; or the matmul, whose rate is the ceiling."""

    name: str
    """Name in `--methods` and in the rows."""
    about: str
    """One line that says what it is."""
    make: Callable[[Any], Call]
    """Makes the call on given arrays. It raises UnsupportedError, or whatever its library raises, where it cannot."""
    package: str = ""
    """The Python package it needs besides torch. Where that is missing, the method takes part only if it is named."""
    score_bytes: int = 0
    """For attention methods that hold the whole score matrix: bytes of device memory for each of its elements; else 0."""

    by_name: bool = False
    """Whether it takes part only where it is named."""

    @property
    def installed(self) -> bool:
        """Whether its package is installed; nothing is imported to find out."""
        try:
            return not self.package or importlib.util.find_spec(self.package) is not None
        except ModuleNotFoundError:  # a part of a package that is not there
            return False

    @property
    def flops(self) -> float | None:
        """Floating-point operations of one call of the matmul; None for all other methods, whose operations are the
        problem's.
        """
        return 2.0 * MATMUL_SIZE**3 if self.name == MATMUL else None

    def refusal(self, problem: Problem, memory_bytes: int) -> str:
        """Why it is not even tried on `problem`; empty where it is tried."""
        if not self.installed:
            return f"not installed: {self.package}"
        scores = problem.batch * problem.heads * problem.seq_q * problem.seq_k if self.score_bytes else 0
        needed = self.score_bytes * scores
        if needed > MEMORY_SHARE * memory_bytes:
            return f"skipped: its score matrices would take {needed / 2**30:.0f} GiB"
        return ""


def operator_call(arrays: Arrays) -> tuple[Any, list[Any]]:
    """The torch operator of the problem's kernel and its arguments: tensors, sizes that the tensors do not show, scalars.

    Flags decide which arrays there are, so that each combination of them is an operator of its own.
    """
    from tiledsched.serve.op import op

    p, kernel = arrays.problem, arrays.problem.declaration
    flags = {name: p.values[name] for name, field in kernel.fields.items() if isinstance(field, Flag)}
    word = "_".join([kernel.name, *(name for name, value in flags.items() if value)])
    operator = op("tiledsched_bench::" + re.sub(r"\W", "_", word), kernel, **flags)
    tensors = arrays.by_name
    given = []
    for each in operator.schema.parameters:
        if each.kind in ("array", "list"):
            given.append(tensors.get(each.name))
        else:
            given.append(p.values[each.name] if each.kind == "field" else each.default)
    return operator, given


def _copies(arrays: Arrays) -> tuple[Any, ...]:
    """The inputs, with copies of those that the kernel changes in place: every method sees them unchanged."""
    specs = input_specs(arrays.problem.declaration, arrays.problem)
    return tuple(
        tensor.clone() if spec.role == "inout" else tensor for spec, tensor in zip(specs, arrays.tensors, strict=True)
    )


def kernel_call(arrays: Arrays, *, own: bool) -> Call:
    """The operator, whatever it runs, or our own kernel as it launches that, even where a rival is served.

    It gets copies of the arrays that it changes, so that other methods see them unchanged.
    """
    specs = input_specs(arrays.problem.declaration, arrays.problem)
    copies = _copies(arrays)
    operator, given = operator_call(replace(arrays, tensors=copies))
    operator = operator.own if own else operator
    changed = {spec.name: tensor for spec, tensor in zip(specs, copies, strict=True) if spec.role == "inout"}
    if not changed:
        return lambda: operator(*given)
    names = [spec.name for spec in output_specs(arrays.problem.declaration, arrays.problem)]

    def call() -> Any:
        out = operator(*given)
        made = iter(() if out is None else out if isinstance(out, tuple) else (out,))
        return tuple(changed[name] if name in changed else next(made) for name in names)

    return call


def _rival(arrays: Arrays, *, name: str) -> Call:
    rivals = rivals_of(arrays.problem.declaration, arrays.problem)
    if name not in rivals:
        raise UnsupportedError(f"the kernel names no {name} for this problem")
    return call_on(rivals[name], _copies(arrays))


def _matmul(arrays: Arrays) -> Call:
    """One large matrix product through torch: the rate that this GPU's tensor cores reach in practice."""
    torch = arrays.torch
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(arrays.dtype) for _ in range(2))
    return lambda: torch.matmul(left, right)


CEILING = Method(name=MATMUL, about="8192^3 matmul through torch, the ceiling", make=_matmul, by_name=True)


def methods_of(kernel: KernelClass, problems: Sequence[Problem] = ()) -> Mapping[str, Method]:
    """The methods for a kernel: those listed by its module in `bench.rivals`, else our kernel and every rival it has
    for one of the problems.
    """
    listed: Mapping[str, Method] | None = getattr(module_of(kernel), "METHODS", None)
    if listed is not None:
        return {**listed, MATMUL: CEILING}
    names = dict.fromkeys(name for problem in problems for name in rivals_of(kernel, problem))
    return {
        OURS: Method(
            name=OURS, about="the kernel on the schedule that the table names", make=partial(kernel_call, own=True)
        ),
        SERVED: Method(name=SERVED, about="the operator, whatever it runs", make=partial(kernel_call, own=False)),
        **{name: Method(name=name, about="a rival", make=partial(_rival, name=name)) for name in names},
        MATMUL: CEILING,
    }


def choose_methods(
    kernel: KernelClass | str,
    names: Sequence[str] | Sequence[Method] | None,
    problems: Sequence[Problem] = (),
    *,
    ceiling: bool = False,
) -> list[Method]:
    """The named methods, in the order of `methods_of`; without names, every method that is installed.

    Args:
        kernel: whose.
        names: of `methods_of`; methods themselves are taken as they are.
        problems: what is computed; rivals may differ between them.
        ceiling: also the matmul, which no default includes.

    Raises:
        ConfigError: an unknown name.
    """
    given = [each for each in names or () if isinstance(each, Method)]
    if given:
        return given
    methods = methods_of(load_kernel(kernel) if isinstance(kernel, str) else kernel, problems)
    named = [each for each in names or () if isinstance(each, str)]
    unknown = sorted(set(named) - set(methods))
    if unknown:
        raise ConfigError(f"unknown method {unknown[0]!r}; known are {', '.join(methods)}")
    wanted = set(named or (name for name, method in methods.items() if method.installed and not method.by_name))
    if ceiling:
        wanted.add(MATMUL)
    return [method for name, method in methods.items() if name in wanted]
