"""Gradients of operators: how a call of which they are required joins torch's autograd, and, where a second operator computes
them, which array of the one is which of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tiledsched.core.errors import ConfigError, did_you_mean
from tiledsched.serve.schema import NO_DEFAULT, OpSchema, Parameter


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for ordinary tensors outside of transforms, without what torch does for others, which takes it longer than
    all else of an apply."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


@dataclass(frozen=True, kw_only=True)
class JoinedBackward:
    """What torch calls for the gradients of an operator: a second operator, on what the first one saved."""

    backward: Any
    """The second operator."""
    arrays: int
    """Inputs of the first."""
    saved: tuple[int, ...]
    """The arrays that are saved, counted through the inputs and then the outputs of the first operator."""
    arguments: tuple[int, ...]
    """The other arguments of the first operator that are kept."""
    values: tuple[Any, ...]
    """Arguments of the second operator that are the same in every call."""
    required: frozenset[int]
    """The outputs of the first operator whose gradients may not be missing: they are zeros where nothing depends on the output."""
    places: tuple[int, ...]
    """For each argument of the second operator its place in the row of what is saved, gradients of the outputs, arguments that are
    kept, and values."""
    results: tuple[int | None, ...]
    """For each input of the first operator the output of the second that is its gradient; None where it has none."""

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the backward needs, and nothing else."""
        outputs = output if isinstance(output, tuple) else (output,)
        arrays = (*inputs[: self.arrays], *outputs)
        ctx.save_for_backward(*[arrays[place] for place in self.saved])
        ctx.arguments = [inputs[place] for place in self.arguments]
        ctx.outputs = [(each.shape, each.dtype, each.device) for each in outputs]
        ctx.set_materialize_grads(False)

    def __call__(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients of the first operator's inputs."""
        needed = [
            _zeros(*ctx.outputs[place]) if each is None and place in self.required else each
            for place, each in enumerate(gradients)
        ]
        # Saved tensors are read once: what is recomputed under checkpointing is there only once.
        row = (*ctx.saved_tensors, *needed, *ctx.arguments, *self.values)
        found = self.backward(*[row[place] for place in self.places])
        found = found if isinstance(found, tuple) else (found,)
        return tuple(
            [
                found[place]
                if place is not None and is_needed
                else None  # of an input that is missing torch takes nothing else
                for place, is_needed in zip(self.results, ctx.needs_input_grad, strict=False)
            ]
        )


def _zeros(shape: Any, dtype: Any, device: Any) -> Any:
    """The gradient of an output that nothing depends on."""
    return torch.zeros(shape, dtype=dtype, device=device)


def join(name: str, first: OpSchema, backward: Any, names: Mapping[str, str]) -> JoinedBackward:
    """What computes the gradients of the operator called `name` by the operator `backward`.

    Args:
        name: the first operator's, for messages.
        first: its schema.
        backward: the second operator.
        names: what an input of the second, or a gradient of the first, is called at the other one, where that is something else.

    Raises:
        ConfigError: an array of the second is called like none of the first, or an operator takes lists of arrays.
    """
    second: OpSchema = backward.schema
    if any(each.kind == "list" for each in (*first.parameters, *second.parameters)) or second.changed:
        raise ConfigError(
            f"{backward.name} cannot be the backward of {name}: one of them takes lists of arrays or works in place; register a "
            "function of (ctx, *gradients)"
        )
    arrays = (*first.inputs, *first.outputs)
    known = {word: ("saved", place) for place, word in enumerate(arrays)}
    known |= {f"d{word}": ("gradient", n) for n, word in enumerate(first.outputs) if f"d{word}" not in arrays}
    wanted = [names.get(f"d{each}", f"d{each}") for each in first.inputs]
    _refuse_unknown(name, names, first, second)
    # Where each argument is from: an array that is saved, the gradient of an output, an argument of the first, or a value.
    sources: list[tuple[str, Any]] = []
    required = set()
    for each in second.parameters:
        word = names.get(each.name, each.name)
        if each.kind != "array":
            sources.append(_argument(name, first, backward, each, word))
        elif word in known:
            sources.append(known[word])
            if known[word][0] == "gradient" and each.default is NO_DEFAULT:
                required.add(known[word][1])
        elif each.default is not NO_DEFAULT:
            sources.append(("value", None))
        else:
            raise _no_match(f"{backward.name}, input {each.name}", name, known, word, each.name)
    for word in second.outputs:
        if word not in wanted:
            raise _no_match(f"{backward.name}, output {word}", name, [f"d{each}" for each in first.inputs], word, "dX")
    saved = tuple(dict.fromkeys(place for kind, place in sources if kind == "saved"))
    arguments = tuple(place for kind, place in sources if kind == "argument")
    values = tuple(value for kind, value in sources if kind == "value")
    parts = {"saved": saved, "gradient": range(len(first.outputs)), "argument": arguments}
    row = [(kind, place) for kind, part in parts.items() for place in part]
    rest = iter(range(len(row), len(row) + len(values)))
    return JoinedBackward(
        backward=backward,
        arrays=len(first.inputs),
        saved=saved,
        arguments=arguments,
        values=values,
        required=frozenset(required),
        places=tuple(next(rest) if each[0] == "value" else row.index(each) for each in sources),
        results=tuple(second.outputs.index(word) if word in second.outputs else None for word in wanted),
    )


def _argument(name: str, first: OpSchema, backward: Any, each: Parameter, word: str) -> tuple[str, Any]:
    """Where a field or a scalar of the second operator is from."""
    known = [parameter.name for parameter in first.parameters]
    if word in known[len(first.inputs) :]:
        return "argument", known.index(word)
    if word in first.pinned:
        return "value", first.pinned[word]
    if each.default is NO_DEFAULT:
        raise ConfigError(
            f"{backward.name} needs {each.name}, and {name} has no argument of that name; make the operator with it: "
            f"op(name, kernel, {each.name}=...)"
        )
    return "value", each.default


def _refuse_unknown(name: str, names: Mapping[str, str], first: OpSchema, second: OpSchema) -> None:
    """Raise where `names` renames nothing, or says that a gradient is what the second operator does not return."""
    inputs, gradients = [each.name for each in second.parameters], [f"d{each}" for each in first.inputs]
    for word, other in names.items():
        known, what = [*inputs, *gradients], word
        if word in gradients and word not in inputs:
            known, what = second.outputs, other
        if what not in known:
            raise ConfigError(
                f"names={{{word!r}: {other!r}}}: {name} and its backward have no {what} there; known are {', '.join(known)}"
                f"{did_you_mean(what, known)}"
            )


def _no_match(what: str, name: str, known: Iterable[str], word: str, example: str) -> ConfigError:
    return ConfigError(
        f"{what}: is called like nothing of {name}, which has {', '.join(known)}{did_you_mean(word, known)}; rename it, or say "
        f"which it is: names={{{example!r}: ...}}"
    )
