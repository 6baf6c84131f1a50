"""The gradients of matrix products, plain and with what follows them.

The sums are computed anew, and torch's formulae applied to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiledsched.core.errors import UnsupportedError
from tiledsched.kernels.epilogues import ACTIVATIONS, ARRAYS, E4M3
from tiledsched.ops.front import GRADIENTS


class Steps(NamedTuple):
    """What the gradients of a kind of products are made of. `d` is the gradient of a product A @ B, plus the bias."""

    product: Callable[[Tensor, Tensor], Tensor]
    """A @ B."""
    weights: Callable[[Tensor, Tensor], Tensor]
    """Of d and B, the gradient of B."""
    bias: Callable[[Tensor], Tensor]
    """Of d, the gradient of the bias."""
    added: Tensor | None
    """What the bias adds to the product; None without a bias."""
    finished: Callable[[Tensor], Tensor]
    """From the gradient of A, as products leave it, to what is returned."""


StepsOf = Callable[[dict[str, Tensor]], Steps]
"""From the arrays that a call read, by their names."""


def differentiate(kernels: tuple[str, ...], read: tuple[str, ...], steps_of: StepsOf) -> None:
    """Give the operators of some kernels gradients.

    Args:
        kernels: the plain product and the one with an epilogue.
        read: the names of the arrays that the plain product reads.
        steps_of: a function of a module, since operators are pickled.
    """

    def register(made: Any, pinned: Mapping[str, Any]) -> None:
        backward, save = (functools.partial(each, read, pinned) for each in (_gradients, _save))
        made.register_autograd(functools.partial(backward, steps_of), setup_context=save)

    GRADIENTS.update(dict.fromkeys(kernels, register))


def _gradients(
    read: tuple[str, ...], pinned: Mapping[str, Any], steps_of: StepsOf, ctx: Any, d: Tensor
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
        made = steps.product(given["A"], given["B"])
        return made if steps.added is None else made + steps.added

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
