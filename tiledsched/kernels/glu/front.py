"""Gated linear units, as functions like torch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiledsched.core.errors import ProblemError
from tiledsched.ops.front import call_quantized, check_shape, flat_rows, operator, takes_tensors


@takes_tensors
def swiglu(gate: Tensor, up: Tensor | None = None, *, quantize: Any = None) -> Any:
    """`silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `[..., columns]` CUDA tensor, float16 or bfloat16; without `up`, `[..., 2 * columns]`: gate and up side by side.
        up: of the same shape and type. Both may be strided, such as two parts of one projection.
        quantize: round to float8_e4m3fn with scales: `"row"` for a scale of each row, its largest magnitude over 448; or a CUDA
            tensor of one float32, the scale of all rows. Elements are divided by their scale and rounded to nearest even; those
            that do not fit become the largest number of their sign. There are no gradients.

    Returns:
        `[..., columns]`, of the type of the inputs. With `quantize` float8_e4m3fn, and the scales: float32, `[..., 1]`, or the
        tensor that was given, as `scaled_matmul` takes them.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    return _gated(gate, up, "silu", quantize)


@takes_tensors
def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none", quantize: Any = None) -> Any:
    """`gelu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate, up, quantize: see :func:`swiglu`.
        approximate: `"none"`, or `"tanh"` for the approximation of gelu by tanh, as in `torch.nn.functional.gelu`.

    Returns:
        As :func:`swiglu`.

    Raises:
        ProblemError, UnsupportedError: as :func:`swiglu`, or another word for `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ProblemError(f"approximate = {approximate!r}; allowed are 'none' and 'tanh'")
    return _gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh", quantize)


def _gated(gate: Tensor, up: Tensor | None, activation: str, quantize: Any) -> Any:
    if up is None:
        if gate.shape[-1] % 2:
            raise ProblemError(f"gate and up side by side have an even number of columns, got {gate.shape[-1]}")
        gate, up = gate.chunk(2, -1)
    check_shape("up", up, "gate", gate.shape)
    arrays = [flat_rows(gate), flat_rows(up)]
    if quantize is None:
        return operator("glu")(*arrays, activation).reshape(gate.shape)
    return call_quantized("glu_quantized", arrays, quantize, gate, {}, activation=activation)
