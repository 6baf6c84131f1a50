"""The study of first calls: what it warms is what it calls, and what took over is told from what torch still serves."""

from __future__ import annotations

import pytest

from docs.studies import first_calls
from tiledsched.cli.problems import read_problems
from tiledsched.core.registry import kernel_named
from tiledsched.serve.plan_cache import PlanCache


@pytest.mark.parametrize("what", first_calls.SHAPES)
def test_what_is_warmed_is_what_is_called(what) -> None:
    kernel, sizes, words = first_calls.SHAPES[what]
    (problem,) = read_problems(kernel_named(kernel), f"{words},dtype=bfloat16")
    names = {
        "attention": ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"),
        "matmul": ("m", "n", "k"),
        "rms_norm": ("rows", "columns"),
    }[kernel]
    assert tuple(getattr(problem, name) for name in names) == sizes
    assert first_calls.warmed()[kernel].count(f"{words},dtype=bfloat16") == 1


def test_a_takeover_is_told_from_a_call_that_torch_served() -> None:
    cache = PlanCache(lambda *given: given)
    cache.building["slow"] = cache.building["never asked"] = ()
    left = [1]

    def slow() -> None:
        if not left:
            cache.building.clear()
        left.clear()

    try:
        assert first_calls._takeovers({"ready": lambda: None, "slow": slow}, {"ready": 0.0, "slow": 0.0}).keys() == {
            "slow"
        }
    finally:
        PlanCache.every.remove(cache)
