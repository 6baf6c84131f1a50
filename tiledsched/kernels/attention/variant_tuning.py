"""What the tuner asks of an author's own attention: its problems, what may be measured beside it, and how rates are stated."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tiledsched.kernels.attention.declaration import Attention
from tiledsched.kernels.attention.models import Values
from tiledsched.kernels.attention.options import FIELDS
from tiledsched.kernels.attention.suites import STANDARD, SUITES

MASKS = ("causal", "alignment", *FIELDS)
"""Fields of attention that an author's functions say in a problem's place."""


def tuning_traits(score_mod: Any, mask_mod: Any) -> dict[str, Any]:
    """What the class of an author's own attention has in its body for the tuner.

    Other implementations of attention cannot be given functions in cuTile's words, so that none is a rival. A function that hides
    keys makes the order of a row's sums depend on other rows: blocks that all 128 rows see come last. So no order of sums serves
    every batch there.
    """
    return {
        "space": Attention.name,
        "suites": unmasked_suites(),
        "default_suite": STANDARD,
        "rivals": staticmethod(lambda p: {}),
        "planning_rivals": (),
        "compiled_rivals": (),
        "batch_dims": () if mask_mod else Attention.batch_dims,
        "unordered": "takes the blocks that all their rows see last",
        "counted_work": "of all pairs" if mask_mod else "",
    }


@functools.cache
def unmasked_suites() -> Mapping[str, Sequence[Values]]:
    """The suites of attention without masks, which the author's functions say, and without problems that have other features."""
    found = {
        name: [
            {field: value for field, value in each.items() if field not in MASKS}
            for each in problems
            if FIELDS.keys().isdisjoint(each)
        ]
        for name, problems in SUITES.items()
    }
    return {name: problems for name, problems in found.items() if problems}
