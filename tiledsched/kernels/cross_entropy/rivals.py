"""Cross entropy by others: a function takes Logits and Labels, and returns the losses and the log-sum-exp of each row.

Liger's is none of them: it computes the gradient in the same pass, over the logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, called
from tiledsched.kernels.torch_rivals import torch_methods


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's functions on the logits in float32, which stand in while the kernel is compiled."""
    import torch

    ignored, smoothing = int(numbers["ignore_index"]), float(numbers["smoothing"])

    def call(Logits: Any, Labels: Any) -> Any:
        wide = Logits.float()
        loss = torch.nn.functional.cross_entropy(
            wide, Labels.long(), ignore_index=ignored, label_smoothing=smoothing, reduction="none"
        )
        return loss, torch.logsumexp(wide, -1)

    return call


def quack(p: Problem) -> Function:
    """QuACK's cross entropy."""
    from quack.cross_entropy import cross_entropy_fwd

    return partial(cross_entropy_fwd, ignore_index=int(p.declaration.scalar_values(p)["ignore_index"]), return_lse=True)


METHODS = (
    *torch_methods(in_torch),
    Method(
        name="quack",
        make=called(quack),
        package="quack",
        knows=lambda p: not p.declaration.scalar_values(p)["smoothing"],
    ),
)
