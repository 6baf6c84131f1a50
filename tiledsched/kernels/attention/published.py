"""Times of torch's attention backends that others published, for GPUs on which nothing was measured.

`tuning_db/model/attention/published.json` has them by GPU: `docs.studies.blackwell` names the sources and judges what is
estimated from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tiledsched.core import data_files
from tiledsched.core.problem import Problem

Cells = Sequence[Sequence[Any]]
"""(rival, mask, columns of a head, length, batch times heads, microseconds) of each published time."""


@lru_cache(maxsize=1)
def published_devices() -> Mapping[str, Mapping[str, Any]]:
    """Product name of a GPU -> source, conditions, margin and times."""
    path = data_files.tuning_db() / "model" / "attention" / "published.json"
    found: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["devices"]
    return found


def expected_us(p: Problem, rival: str, cells: Cells) -> float | None:
    """Expected time of a rival on a problem; None where too little was published.

    The time is that of the fewest columns timed that are not fewer than the problem's, because backends pad. Between two lengths
    the logarithm of the time is linear in that of the length; beyond the longest the rate stays; below the shortest nothing is
    known. More heads than were timed take longer in proportion; fewer take as long, because a GPU that is not full is no faster.
    """
    mask = "causal" if p.causal else "full"
    of_mask = [each for each in cells if each[:2] == [rival, mask] and each[2] >= p.head_dim]
    if not of_mask:
        return None
    columns, heads = min(each[2] for each in of_mask), p.sequences * p.heads
    timed = sorted((each[3], each[5] * max(1.0, heads / each[4])) for each in of_mask if each[2] == columns)
    lengths, times = zip(*timed, strict=True)
    if p.seq_q < lengths[0]:
        return None
    within = math.exp(float(np.interp(math.log(p.seq_q), np.log(lengths), np.log(times))))
    return within * max(1.0, p.seq_q / lengths[-1]) ** 2


def published_device(p: Problem, device_name: str) -> Mapping[str, Any] | None:
    """What was published of a GPU; None where nothing was, or where the problem is another than self-attention with one head
    dimension and without further features."""
    plain = not (p.has_features or p.lse) and p.seq_q == p.seq_k and p.value_columns == p.head_dim
    if not plain or "Laptop" in device_name:
        return None
    return next((found for name, found in published_devices().items() if f" {name} " in f" {device_name} "), None)


def published_rivals(p: Problem, cells: Cells) -> dict[str, float]:
    """Rival -> expected time on a problem in microseconds."""
    times = {rival: expected_us(p, rival, cells) for rival in sorted({each[0] for each in cells})}
    return {rival: us for rival, us in times.items() if us is not None}
