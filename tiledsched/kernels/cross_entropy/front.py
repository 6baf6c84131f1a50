"""Cross entropy, as a function like torch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiledsched.core.errors import ProblemError
from tiledsched.ops.front import check_shape, flat_rows, operator, takes_tensors


@takes_tensors
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
) -> Any:
    """The cross entropy of each row of logits with its label, `logsumexp(row) - row[label]`, in float32.

    It is made of differences of logits: rows far from zero lose no digits.

    Args:
        logits: `[..., columns]` CUDA tensor, float16, bfloat16 or float32: classes are on the last axis.
        labels: `[...]`, int64 or int32. A label that is neither a column nor `ignore_index` makes its row's loss NaN.
        ignore_index: the label of rows that do not count; their loss is 0.
        label_smoothing: the share of the target, from 0 to 1, that all columns have alike; the label has the rest.
        reduction: `"none"` for the losses; `"sum"`, or `"mean"` over the rows that count, as in torch.
        return_lse: also return the logarithm of the sum of exponentials of each row.

    Returns:
        The loss or losses in float32; with `return_lse` also `[...]` float32.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, another word for `reduction`, or no CUDA tensors.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ProblemError(f"reduction = {reduction!r}; allowed are 'none', 'mean' and 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise ProblemError(f"label_smoothing = {label_smoothing!r}; it is a share of the target, from 0 to 1")
    check_shape("labels", labels, "logits without its last axis", logits.shape[:-1])
    loss, lse = operator("cross_entropy")(
        flat_rows(logits), labels.reshape(-1), label_smoothing != 0, ignore_index, label_smoothing
    )
    if reduction == "none":
        loss = loss.reshape(labels.shape)
    else:
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / (labels != ignore_index).sum()
    return (loss, lse.reshape(labels.shape)) if return_lse else loss
