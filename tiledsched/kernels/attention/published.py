"""Times of torch's attention backends that others published, for GPUs on which nothing was measured.

`tuning_db/model/attention/published.json` has them by GPU, with source, conditions and margin. `docs.studies.blackwell` names the
sources and judges what is estimated from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tiledsched.core.problem import Problem

FULL_ROWS = 512
"""Query rows for each SM that fill a GPU: four blocks of 128 rows."""
Cells = Sequence[Sequence[Any]]
"""(rival, mask, columns of a head, length, batch times heads, microseconds) of each published time."""


def expected_us(p: Problem, rival: str, cells: Cells, sm_count: int) -> float | None:
    """Expected time of a rival on a problem; None where too little was published.

    The rate is that of the fewest columns timed that are not fewer than the problem's, because backends pad. Between two lengths
    it is linear in the logarithm of the length; beyond the longest it stays; below the shortest nothing is known. Fewer heads
    than were timed have the same rate while they fill the GPU, and take no less time after that.

    Args:
        p: the problem.
        rival: name of the rival.
        cells: what was published of the GPU.
        sm_count: its number of SMs.
    """
    mask = "causal" if p.causal else "full"
    of_mask = [each for each in cells if each[:2] == [rival, mask] and each[2] >= p.head_dim]
    columns = min((each[2] for each in of_mask), default=0)
    timed = sorted((seq, heads, us) for _, _, width, seq, heads, us in of_mask if width == columns)
    if not timed or p.seq_q < timed[0][0]:
        return None
    logs, rates = [math.log(seq) for seq, _, _ in timed], [heads * seq**2 / us for seq, heads, us in timed]
    nearest = min(timed, key=lambda each: abs(math.log(each[0] / p.seq_q)))
    heads = max(p.sequences * p.heads, min(nearest[1], FULL_ROWS * sm_count / p.seq_q))
    return float(heads * p.seq_q**2 / np.interp(math.log(p.seq_q), logs, rates))


def published_device(p: Problem, device_name: str, figures: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the figures say of a GPU; None where they say nothing, or the problem is another than self-attention with one head
    dimension and without further features."""
    plain = not (p.has_features or p.lse) and p.seq_q == p.seq_k and p.value_columns == p.head_dim
    if not plain or "Laptop" in device_name:
        return None
    return next((found for name, found in figures.items() if f" {name} " in f" {device_name} "), None)


def published_rivals(p: Problem, cells: Cells, sm_count: int) -> dict[str, float]:
    """Rival -> expected time on a problem in microseconds; the other arguments are those of :func:`expected_us`."""
    times = {rival: expected_us(p, rival, cells, sm_count) for rival in sorted({each[0] for each in cells})}
    return {rival: us for rival, us in times.items() if us is not None}
