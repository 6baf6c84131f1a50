"""Problems that a program may launch although only others like them were tuned: what `warmup --also` builds ahead."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.options import DTYPES

VARIANTS: Mapping[str, str] = {
    "dtype": f"these element types ({' or '.join(DTYPES)}) in place of the tuned ones",
    "group": "so many query heads per key/value head in place of the tuned ones, e.g. group=1:4",
    "any-length": "also key lengths that no tile divides: they take other machine code",
    "decode": "also one query row that sees every key, as text generation with a cache computes",
}
"""Name -> what it adds."""


def likely(p: Problem, variants: Mapping[str, Sequence[str]]) -> list[Problem]:
    """The problems like `p` that a program is expected to launch.

    Args:
        p: a problem that was tuned.
        variants: names of `VARIANTS`, each with its values: `{"group": ["1", "4"], "decode": []}`. A head count that a
            group does not divide adds nothing.

    Raises:
        ConfigError: a value that is not allowed.
    """
    for name in ("dtype", "group"):
        if name in variants and not variants[name]:
            raise ConfigError(f"{name} needs a value: {VARIANTS[name]}")
    if wrong := [each for each in variants.get("group", ()) if not each.isdigit() or int(each) < 1]:
        raise ConfigError(f"group={wrong[0]}: write a positive number of query heads per key/value head")
    found = []
    for dtype, group, odd in itertools.product(
        variants.get("dtype", (p.dtype,)),
        map(int, variants.get("group", (p.group,))),
        (0, 1) if "any-length" in variants else (0,),
    ):
        if p.heads % group:
            continue
        like = p.replace(
            dtype=dtype, kv_heads=p.heads // group, seq_q=p.seq_q + odd, seq_k=p.seq_k + odd * max(1, p.page)
        )
        found.append(like)
        if "decode" in variants and not p.packed:
            seen = {"causal": True, "alignment": "bottom_right"} if p.window else {"causal": False}
            found.append(like.replace(seq_q=1, **seen))
    return list(dict.fromkeys(found))
