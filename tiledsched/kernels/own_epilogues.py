"""An author's own epilogue as a kernel: products with an epilogue that have a function in the place of the activation.

The function is tile code in cuTile's words. What it says, and the values that it takes from around it, are part of the kernel's
name, as for an author's own attention; the arrays that it reads are run-time arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DeclarationError
from tiledsched.core.problem import KernelClass
from tiledsched.kernels.attention.variants import code_of, evaluated, word_of

_known: dict[str, KernelClass] = {}


def kernel_of(product: KernelClass, function: Callable[..., Any], arrays: Sequence[tuple[int, str]]) -> KernelClass:
    """The kernel of a product, a function, and arrays of so many axes and such types, which is made at first. Functions of equal
    code have one.

    Raises:
        DeclarationError: the function cannot be compiled, or takes another number of arrays.
    """
    code = code_of(function, "epilogue")
    try:
        inspect.signature(function).bind("acc", "row", "column", *arrays)
    except TypeError as error:
        wanted = ", ".join(["acc", "row", "column", *(f"array{place}" for place in range(len(arrays)))])
        raise DeclarationError(f"epilogue must take ({wanted}), and {word_of(function)} does not: {error}") from error
    identity = stable_id([code, [list(each) for each in arrays]], 8)
    name = f"{product.space}_{word_of(function)}_{identity}"
    if name not in _known:
        fields: dict[str, Any] = {}
        for place, (rank, dtype) in enumerate(arrays):
            sides = [f"array{place}_axis{axis}" for axis in range(rank)]
            fields |= {side: ts.dim() for side in sides}
            fields[f"array{place}"] = ts.array(" ".join(sides), dtype=dtype)
        body = {
            "__module__": __name__,
            "__doc__": f"{product.__doc__}\n\n    {word_of(function)} is its activation.",
            "name": name,
            "space": product.space,
            "identity": identity,
            "epilogue": staticmethod(function),
            "own_arrays": tuple(f"array{place}" for place in range(len(arrays))),
            "suites": {},
            "small": None,
            **fields,
            **{each.__name__: classmethod(each) for each in (apply_own, source_hash, locator)},
        }
        _known[name] = type(name, (product,), body)
    return _known[name]


def apply_own(kernel: Any, xp: Any, sums: Any, arrays: dict[str, Any]) -> Any:
    """What the function returns for sums `[rows, columns]`, in their precision; it is computed on the host."""
    rows, columns = (numpy.arange(size, dtype=numpy.int32) for size in sums.shape)
    on_host = [each if isinstance(each, numpy.ndarray) else each.get() for each in (sums, *arrays.values())]
    sums, *given = on_host
    found = evaluated(kernel.epilogue, "epilogue", sums, rows[:, None], columns[None], arrays=given)
    return xp.asarray(numpy.broadcast_to(found, sums.shape))


def source_hash(kernel: Any) -> str:
    """Hash of the source of products with epilogues, and of the author's function."""
    return stable_id([kernel.__base__.source_hash(), kernel.identity])


def locator(kernel: Any) -> str:
    """Where another process finds the kernel.

    Raises:
        DeclarationError: always, since calls make it.
    """
    raise DeclarationError(
        f"{kernel.name} is made by calls, and has no name in a module; it is served by what won for {kernel.space}: tune that"
    )
