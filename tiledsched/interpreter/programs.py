"""Running whole programs on the CPU: their own host code, with every launch answered by the interpreter."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cuda.tile as ct
import cuda.tile.tune as tune
import ml_dtypes

from tiledsched.interpreter.contraction import Arithmetic
from tiledsched.interpreter.launch import BlockOrder, Undetermined, run
from tiledsched.interpreter.private import undecorated
from tiledsched.interpreter.values import InterpreterError


@contextlib.contextmanager
def launches_on_cpu(
    *,
    check_overlap: bool = True,
    order: BlockOrder = "forward",
    undetermined: Undetermined = "nan",
    arithmetic: Arithmetic = "rounded",
) -> Iterator[list[str]]:
    """Within the `with`, `ct.launch` runs kernels in the interpreter, for any program that calls it.

    Arrays are NumPy arrays or CPU tensors of torch (bfloat16 and the 8-bit floats too), changed in place; the stream is
    not looked at. `ct.tune.exhaustive_search` answers with the first configuration it is given, untimed. Both are
    replaced in every module that holds them under their own name, and put back afterwards. Import the program before:
    what it keeps of `ct.launch` under another name from within the `with` cannot be put back, and refuses to run.

    Args:
        check_overlap: whether a store to an element that another block stored to is an error; pass False for a kernel
            whose blocks take turns, under a lock for example.
        order: in which blocks run; see `BlockOrder`.
        undetermined: what padding of that mode holds; see `Undetermined`.
        arithmetic: how numbers are computed; see `Arithmetic`.

    Yields:
        The names of the kernels launched so far, in order: one entry a launch, added as it begins.

    Raises:
        InterpreterError: from the call that launched, see :func:`run`; or an argument is on a device, or the `with` is
            over.
    """
    launched: list[str] = []
    over = False

    def launch(stream: Any, grid: tuple[int, ...], kernel: Any, args: Sequence[Any], /) -> None:
        if over:
            raise InterpreterError(
                "this launch is from within launches_on_cpu, which is over; import the program before"
            )
        launched.append(undecorated(kernel).__name__)
        arrays = [as_numpy(arg) for arg in args]
        run(
            kernel,
            tuple(grid),
            arrays,
            check_overlap=check_overlap,
            order=order,
            undetermined=undetermined,
            arithmetic=arithmetic,
        )

    replacements = (("launch", ct.launch, launch), ("exhaustive_search", tune.exhaustive_search, take_first))
    for name, original, replacement in replacements:
        _replace(name, original, replacement)
    try:
        yield launched
    finally:
        over = True
        for name, original, replacement in replacements:
            _replace(name, replacement, original)


def take_first(search_space: Sequence[Any], *others: Any, **options: Any) -> tune.TuningResult[Any]:
    """What `ct.tune.exhaustive_search` answers on the CPU, where nothing can be timed: the first configuration.

    Its time is 0, of no samples, so that programs that compare times find one.
    """
    first = next(iter(search_space), None)
    if first is None:
        raise InterpreterError("ct.tune.exhaustive_search was given no configuration; give it at least one")
    untimed = tune.Measurement(config=first, mean_us=0.0, num_samples=0, error_margin_us=0.0)
    return tune.TuningResult(best=untimed, successes=[untimed], failures=[])


def _replace(name: str, present: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    """Put `wanted` wherever a module holds `present` under this name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is present:
            vars(module)[name] = wanted


CARRIERS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8"}
"""torch's types that NumPy lacks, and the integer type whose bits carry them over."""


def as_numpy(value: Any) -> Any:
    """`value` with every torch tensor in it, in lists and tuples too, as a NumPy array of the same memory and strides.

    Raises:
        InterpreterError: a tensor that is not on the CPU, or of a type that NumPy and ml_dtypes lack.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(as_numpy(item) for item in value)
    if not _is_tensor(value):
        return value
    if value.device.type != "cpu":
        raise InterpreterError(f"a tensor is on {value.device}; the interpreter runs on the CPU: pass tensor.cpu()")
    name, tensor = str(value.dtype).removeprefix("torch."), value.detach()
    if name in CARRIERS:
        torch = importlib.import_module("torch")
        return tensor.view(getattr(torch, CARRIERS[name])).numpy().view(getattr(ml_dtypes, name))
    try:
        return tensor.numpy()
    except TypeError as error:
        raise InterpreterError(f"the interpreter cannot hold a tensor of {value.dtype}; cast it first") from error


def _is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor, found without importing torch."""
    return any(each.__module__ == "torch" and each.__name__ == "Tensor" for each in type(value).__mro__)
