"""Layer normalisation, as a function like torch's."""

from __future__ import annotations

from torch import Tensor

from tiledsched.ops.front import flat_rows, operator, takes_tensors


@takes_tensors
def layer_norm(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last axis, as `torch.nn.functional.layer_norm`.

    Args:
        input: `[..., columns]` CUDA tensor, float16 or bfloat16.
        weight, bias: `[columns]`, of the same type; either may be None.
        eps: added to the variance.

    Returns:
        The normalised rows, of the shape and type of `input`.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    given = [each for each in (weight, bias) if each is not None]
    norm = operator("layer_norm", weighted=weight is not None, biased=bias is not None)
    out: Tensor = norm(flat_rows(input), *given, eps)
    return out.reshape(input.shape)
