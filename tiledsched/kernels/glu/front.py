"""Gated linear units, as functions like torch's."""

from __future__ import annotations

from torch import Tensor

from tiledsched.core.errors import ProblemError
from tiledsched.ops.front import check_shape, flat_rows, operator, takes_tensors


@takes_tensors
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `[..., columns]` CUDA tensor, float16 or bfloat16; without `up`, `[..., 2 * columns]`: gate and up side by side.
        up: of the same shape and type. Both may be strided, such as two parts of one projection.

    Returns:
        `[..., columns]`, of the type of the inputs.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    return _gated(gate, up, "silu")


@takes_tensors
def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """`gelu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate, up: see :func:`swiglu`.
        approximate: `"none"`, or `"tanh"` for the approximation of gelu by tanh, as in `torch.nn.functional.gelu`.

    Returns:
        `[..., columns]`, of the type of the inputs.

    Raises:
        ProblemError, UnsupportedError: as :func:`swiglu`, or another word for `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ProblemError(f"approximate = {approximate!r}; allowed are 'none' and 'tanh'")
    return _gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def _gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        if gate.shape[-1] % 2:
            raise ProblemError(f"gate and up side by side have an even number of columns, got {gate.shape[-1]}")
        gate, up = gate.chunk(2, -1)
    check_shape("up", up, "gate", gate.shape)
    out: Tensor = operator("glu")(flat_rows(gate), flat_rows(up), activation)
    return out.reshape(gate.shape)
