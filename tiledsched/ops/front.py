"""What the torch-shaped functions of the kernels share: `kernels/NAME/front.py` holds those of a kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from tiledsched.core.errors import ProblemError, UnsupportedError, first_line
from tiledsched.core.registry import SHIPPED, kernel_named
from tiledsched.kernels.epilogues import ACTIVATIONS, ARRAYS, E4M3, read_call
from tiledsched.ops.arguments import described
from tiledsched.serve import process

Called = TypeVar("Called", bound=Callable[..., Any])
MISTAKES = dict.fromkeys((TypeError, ValueError, IndexError, AttributeError, NotImplementedError), "") | {
    RuntimeError: "Expected a value of type"
}
"""Errors that follow from arguments which are not what a function takes -> the words that say so."""
GRADIENTS: dict[str, Callable[[Any, dict[str, Any]], None]] = {}
"""Kernel -> the function that gives its operator, which is pinned to some values, a gradient. The front of a kernel sets it. A
kernel without one whose gradient ships as `NAME_backward` has that gradient."""


@functools.cache
def operator(kernel: str, **pinned: Any) -> Any:
    """The operator of a kernel, made at its first call, with the fields of its problems that are given pinned to these values."""
    if (
        torch.compiler.is_dynamo_compiling()
    ):  # which traces this in spite of the cache, and cannot trace how one is made
        return getattr(torch.ops.tiledsched, _registered(kernel, **pinned))
    from tiledsched.serve.op import op

    made = op(f"tiledsched::{_word(kernel, pinned)}", kernel_named(kernel), **pinned)
    if kernel in GRADIENTS:
        GRADIENTS[kernel](made, pinned)
    elif f"{kernel}_backward" in SHIPPED:
        made.register_autograd(operator(f"{kernel}_backward"))
    return made


@torch.compiler.assume_constant_result
def _registered(kernel: str, **pinned: Any) -> str:
    """The name under which torch knows the operator of a kernel, which is made first where need be."""
    operator(kernel, **pinned)
    return _word(kernel, pinned)


def multiply(
    product: str,
    operands: Sequence[Tensor],
    epilogue: Any,
    arrays: Sequence[Tensor],
    *parts: Any,
    gate_scales: Sequence[Tensor] = (),
    **more_fields: Any,
) -> Tensor:
    """A product with an epilogue.

    Args:
        product: the kernel of the plain product.
        operands: the two factors, the first `[m, k]`, or `[..., m, k]` for `matmul`, and what else the plain product takes.
        epilogue: an author's own function, or None.
        arrays: what it reads.
        parts: the other arguments of :func:`tiledsched.kernels.epilogues.read_call`.
        gate_scales: those of the gate, where operands have scales.
        more_fields: fields of the problem, beside those of the epilogue or in their place.

    Raises:
        ProblemError: a word is not known, or arguments exclude each other.
        DeclarationError: the author's function cannot be compiled, or takes another number of arrays.
    """
    first, second, *more = operands
    fields, second, read = read_call(first, second, epilogue, arrays, *parts)
    if product == "matmul":  # which alone gives the result the axes of its input
        first = flat_rows(first)
    product = f"{product}_epilogue"
    if epilogue is not None:
        product = _own_kernel(
            product, epilogue, tuple([(each.ndim, str(each.dtype).removeprefix("torch.")) for each in arrays])
        )
    return operator(product, **fields | more_fields)(first, second, *more, *read, *gate_scales, *arrays)


@torch.compiler.assume_constant_result
def _own_kernel(product: str, function: Callable[..., Any], arrays: tuple[tuple[int, str], ...]) -> str:
    """The name of the kernel of a product with an author's own epilogue, which is made where need be."""
    from tiledsched.kernels.own_epilogues import kernel_of

    return kernel_of(kernel_named(product), function, arrays).name


def _word(kernel: str, pinned: dict[str, Any]) -> str:
    return kernel + "".join(f"_{value if isinstance(value, str) else name}" for name, value in pinned.items() if value)


def takes_tensors(function: Called) -> Called:
    """A public function of a kernel that says which argument is no tensor, or else what all of them are, in place of the error
    that follows from it. A call without an error checks nothing.
    """

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            if torch.compiler.is_dynamo_compiling():  # which cannot trace the rest, and then hides the error
                raise
            given = {**dict(zip(inspect.signature(function).parameters, arguments, strict=False)), **named}
            for name, value in given.items():
                kind, listed = str(function.__annotations__.get(name)), isinstance(value, (tuple, list))
                fits = listed == kind.startswith("tuple") and all(
                    isinstance(x, Tensor) and x.layout is torch.strided for x in (value if listed else [value])
                )
                if "Tensor" in kind and not (
                    fits or (value is None and "None" in kind) or (isinstance(value, str) and "str" in kind)
                ):
                    wanted = "tuple of tensors, as in arrays=(limits,)" if kind.startswith("tuple") else "torch.Tensor"
                    raise ProblemError(f"{name} must be a {wanted}, got {described(value)}") from error
            if error.__traceback__.tb_next and MISTAKES.get(type(error), "\0") in str(error):  # type: ignore[union-attr]
                raise ProblemError(
                    f"{first_line(error)}, of {', '.join(f'{name} = {described(value)}' for name, value in given.items())}; see "
                    f"help(tiledsched.{function.__name__})"
                ) from error
            raise

    return cast(Called, checked)


def are_served(first: Tensor, *others: Tensor | None) -> bool:
    """Whether all tensors are there, on one GPU, and of one type that the kernels of rows take: float16 or bfloat16."""
    return (
        first.dtype in (torch.float16, torch.bfloat16)
        and first.device.type == process.runtime.device_type
        and all(each is not None and (each.dtype, each.device) == (first.dtype, first.device) for each in others)
    )


def flat_rows(x: Tensor) -> Tensor:
    """`[rows, columns]`."""
    return x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x[None]


def check_shape(name: str, given: Tensor, like: str, shape: Any) -> None:
    """Raise unless a tensor has this shape: as many elements in another order would be taken for others.

    Raises:
        ProblemError: it has another shape.
    """
    if given.shape != shape:
        raise ProblemError(
            f"{name} must have the shape of {like}, {tuple(shape)}, got {tuple(given.shape)}; reshape it"
        )


def call_quantized(
    kernel: str, arrays: Sequence[Tensor], quantize: Any, like: Tensor, pinned: dict[str, Any], **named: Any
) -> tuple[Tensor, ...]:
    """What a kernel of quantised rows returns, of the shape of `like`, and the scales: `[..., 1]`, or the tensor that was given.

    Args:
        kernel: its name.
        arrays: what it reads, but for a given scale.
        quantize: "row", where each row gets a scale of its own, or a tensor of one element, the scale of all rows.
        like: a tensor of the shape of the results.
        pinned: fields of its problems, but for whether a scale is given.
        named: what else it takes.

    Raises:
        ProblemError: `quantize` is neither.
    """
    static = isinstance(quantize, Tensor) and quantize.numel() == 1
    if not static and not (isinstance(quantize, str) and quantize == "row"):
        raise ProblemError('quantize must be "row", or a float32 tensor of one element, the scale of all rows')
    given = (*arrays, quantize.reshape(1)) if static else arrays
    *made, scale = operator(kernel, **pinned, static=static)(*given, **named)
    scales = quantize if static else scale.reshape(*like.shape[:-1], 1)
    return (*[each.reshape(like.shape) for each in made], scales)


class Steps(NamedTuple):
    """What the gradients of a kind of products are made of. `d` is the gradient of a product A @ B, plus the bias."""

    product: Callable[[Tensor, Tensor], Tensor]
    """A @ B."""
    weights: Callable[[Tensor, Tensor], Tensor]
    """Of d and B, the gradient of B."""
    bias: Callable[[Tensor], Tensor]
    """Of d, the gradient of the bias."""
    biased: Callable[[Tensor, Tensor], Tensor]
    """A @ B with the bias added before the sums are rounded, so that they have the signs that the result was made of."""
    finished: Callable[[Tensor], Tensor]
    """From the gradient of A, as products leave it, to what is returned."""


def differentiate(
    kernels: Sequence[str], read: tuple[str, ...], steps_of: Callable[[dict[str, Tensor]], Steps]
) -> None:
    """Give the operators of matrix products gradients: the sums are computed anew, and torch's formulae applied to them.

    Args:
        kernels: the plain product and the one with an epilogue.
        read: the names of the arrays that the plain product reads.
        steps_of: from the arrays that a call read, by their names, to the steps. It is a function of a module, so that operators
            can be pickled.
    """
    GRADIENTS.update(dict.fromkeys(kernels, functools.partial(_register, read, steps_of)))


def _register(read: tuple[str, ...], steps_of: Callable[..., Steps], made: Any, pinned: Mapping[str, Any]) -> None:
    backward = functools.partial(_gradients, read, steps_of, pinned)
    made.register_autograd(backward, setup_context=functools.partial(_save, read, pinned))


def _gradients(
    read: tuple[str, ...], steps_of: Callable[..., Steps], pinned: Mapping[str, Any], ctx: Any, d: Tensor
) -> tuple[Any, ...]:
    """The gradients of the arrays that an operator reads, in the order in which it takes them."""
    if pinned.get("out_dtype") == E4M3:
        raise UnsupportedError("a result of 8 bits has no gradients; leave out out_scale where gradients are required")
    names = [*read, *(name for name in ARRAYS if pinned.get(name.lower()))]
    given = dict(zip(names, ctx.saved_tensors, strict=False))
    wanted = dict(zip(names, ctx.needs_input_grad, strict=False))
    steps, activation = steps_of(given), ACTIVATIONS[pinned.get("activation", "none")]
    aten, found, factors = torch.ops.aten, {"Residual": d}, {}

    def sums() -> Tensor:
        return (steps.biased if "Bias" in given else steps.product)(given["A"], given["B"])

    if "Gate" in given:
        gate = steps.product(given["A"], given["Gate"])
        factors["Gate"] = activation.slope(aten, d * sums(), gate)
        d = d * activation.torch(torch.nn.functional, gate)
    elif pinned.get("activation", "none") != "none":
        d = activation.slope(aten, d, sums())
    if wanted.get("Bias"):
        found["Bias"] = steps.bias(d)
    factors["B"] = d
    found |= {name: steps.weights(each, given[name]) for name, each in factors.items() if wanted[name]}
    if wanted["A"]:
        parts = [steps.product(each, given[name].mT) for name, each in factors.items()]
        found["A"] = steps.finished(functools.reduce(torch.add, parts))
    return tuple([found.get(name) if wanted[name] else None for name in names])


def _save(read: tuple[str, ...], pinned: Mapping[str, Any], ctx: Any, inputs: Any, output: Any) -> None:
    """Save what the gradients read: all before the residual, which may be changed in place."""
    ctx.save_for_backward(*inputs[: len(read) + pinned.get("bias", False) + pinned.get("gate", False)])
