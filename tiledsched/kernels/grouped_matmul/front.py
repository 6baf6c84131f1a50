"""The grouped product, as a function like torch's."""

from __future__ import annotations

from torch import Tensor

from tiledsched.ops.front import operator, takes_tensors


@takes_tensors
def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The rows of each group of `a` times that group's matrix, on the tuned schedule, as `torch._grouped_mm(a, b, offs=offsets)`.

    No size of a group is read on the host, so that calls can be captured in CUDA graphs.

    Args:
        a: `[tokens, k]` CUDA tensor whose rows are sorted by group, float16 or bfloat16.
        b: `[groups, k, n]`, of the same type; each matrix is row- or column-major (`weight.transpose(1, 2)`).
        offsets: `[groups]`, int32: where each group ends. They never fall; a group may be empty.

    Returns:
        `[tokens, n]`, of the type of the inputs. Rows from the last offset on are undefined.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    out: Tensor = operator("grouped_matmul")(a, b, offsets)
    return out
