"""The gradient of an operator that a second operator computes: which array of the one is which of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiledsched.core.errors import ConfigError, did_you_mean
from tiledsched.serve.schema import NO_DEFAULT, OpSchema, Parameter


@dataclass(frozen=True, kw_only=True)
class JoinedBackward:
    """What torch calls for the gradients of an operator: a second operator, on what the first one saved."""

    backward: Any
    """The second operator."""
    arrays: int
    """Inputs of the first."""
    saved: tuple[int, ...]
    """The arrays that are saved, counted through the inputs and then the outputs of the first operator."""
    sources: tuple[tuple[str, Any], ...]
    """Where each argument of the second operator is from: (saved, the array), (gradient, output of the first), (optional, output
    whose gradient may be missing), (argument, place among those of the first) or (value, itself)."""
    results: tuple[int | None, ...]
    """For each input of the first operator the output of the second that is its gradient; None where it has none."""

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the backward needs, and nothing else."""
        outputs = output if isinstance(output, tuple) else (output,)
        arrays = (*inputs[: self.arrays], *outputs)
        ctx.save_for_backward(*(arrays[place] for place in self.saved))
        ctx.arguments = {place: inputs[place] for kind, place in self.sources if kind == "argument"}
        ctx.outputs = [(each.shape, each.dtype, each.device) for each in outputs]
        ctx.set_materialize_grads(False)

    def __call__(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients of the first operator's inputs."""
        # Read once: what is recomputed under checkpointing is there only once.
        saved = dict(zip(self.saved, ctx.saved_tensors, strict=True))
        needed = {
            place: _zeros(*ctx.outputs[place]) if gradients[place] is None else gradients[place]
            for kind, place in self.sources
            if kind == "gradient"
        }
        values = {"saved": saved, "argument": ctx.arguments, "gradient": needed, "optional": gradients}
        given = [source if kind == "value" else values[kind][source] for kind, source in self.sources]
        found = self.backward(*given)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(
            found[place]
            if place is not None and is_needed
            else None  # of an input that is missing torch takes nothing else
            for place, is_needed in zip(self.results, ctx.needs_input_grad, strict=False)
        )


def _zeros(shape: Any, dtype: Any, device: Any) -> Any:
    """The gradient of an output that nothing depends on."""
    import torch

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
    sources = []
    for each in second.parameters:
        word = names.get(each.name, each.name)
        if each.kind != "array":
            sources.append(_argument(name, first, backward, each, word))
        elif word in known:
            kind, place = known[word]
            optional = kind == "gradient" and each.default is not NO_DEFAULT
            sources.append(("optional" if optional else kind, place))
        elif each.default is not NO_DEFAULT:
            sources.append(("value", None))
        else:
            raise _no_match(f"{backward.name}, input {each.name}", name, known, word, each.name)
    for word in second.outputs:
        if word not in wanted:
            raise _no_match(f"{backward.name}, output {word}", name, [f"d{each}" for each in first.inputs], word, "dX")
    return JoinedBackward(
        backward=backward,
        arrays=len(first.inputs),
        saved=tuple(dict.fromkeys(place for kind, place in sources if kind == "saved")),
        sources=tuple(sources),
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
