"""An author's own epilogue as a kernel: products with an epilogue that have a function in the place of the activation.

The function is tile code in cuTile's words. What it says, and the values that it takes from around it, are part of the kernel's
name, as for an author's own attention; the arrays that it reads are run-time arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.errors import DeclarationError
from tiledsched.core.problem import KernelClass
from tiledsched.kernels.attention.variants import evaluated, kernel_by_code, source_hash, word_of


def kernel_of(product: KernelClass, function: Callable[..., Any], arrays: Sequence[tuple[int, str]]) -> KernelClass:
    """The kernel of a product, a function, and arrays of so many axes and such types, which is made at first. Functions of equal
    code have one.

    Raises:
        DeclarationError: the function cannot be compiled, or takes another number of arrays.
    """
    return kernel_by_code(product.space, {"epilogue": function}, arrays, _maker(product))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _maker(product: KernelClass) -> Callable[..., KernelClass]:
    """What makes the kernels of a product: the same object for the same one."""
    return functools.partial(_make, product)


def _make(
    product: KernelClass, name: str, identity: str, functions: Mapping[str, Any], arrays: Sequence[tuple[int, str]]
) -> KernelClass:
    sides = [[f"array{place}_axis{axis}" for axis in range(rank)] for place, (rank, _) in enumerate(arrays)]
    types = {f"array{place}": dtype for place, (_, dtype) in enumerate(arrays)}
    body = {
        "__module__": __name__,
        "__doc__": f"{product.__doc__}\n\n    {word_of(functions['epilogue'])} is its activation.",
        "name": name,
        "space": product.space,
        "identity": identity,
        "epilogue": staticmethod(functions["epilogue"]),
        "own_arrays": tuple(types),
        "suites": {},
        "small": None,
        **{side: ts.dim() for each in sides for side in each},
        **{each: ts.array(" ".join(own), dtype=types[each]) for each, own in zip(types, sides, strict=True)},
        **{each.__name__: classmethod(each) for each in (apply_own, source_hash, locator)},
    }
    return type(name, (product,), body)


def apply_own(kernel: Any, xp: Any, sums: Any, arrays: dict[str, Any]) -> Any:
    """What the function returns for sums `[rows, columns]`, in their precision; it is computed on the host."""
    rows, columns = (numpy.arange(size, dtype=numpy.int32) for size in sums.shape)
    on_host = [
        each if isinstance(each, numpy.ndarray) else each.get()
        for each in (sums, *(arrays[name] for name in kernel.own_arrays))
    ]
    found = evaluated(kernel.epilogue, "epilogue", on_host[0], rows[:, None], columns[None], arrays=on_host[1:])
    return xp.array(numpy.broadcast_to(found, sums.shape))  # which may be written to


def locator(kernel: Any) -> str:
    """Where another process finds the kernel.

    Raises:
        DeclarationError: always, since calls make it.
    """
    raise DeclarationError(
        f"{kernel.name} is made by calls, and has no name in a module; it is served by what won for {kernel.space}: tune that"
    )
