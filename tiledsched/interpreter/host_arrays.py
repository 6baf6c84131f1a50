"""What a program passes to a launch, as NumPy sees it."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes

from tiledsched.interpreter.values import InterpreterError

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
