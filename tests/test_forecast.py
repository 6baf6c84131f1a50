"""Expected times of rivals and of our untuned choice: the interpolation, and what it decides for problems that ship timed."""

from __future__ import annotations

import math

import pytest

from tiledsched.core.device import arch_spec
from tiledsched.core.registry import kernel_named
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.matmul import Matmul
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.forecast import OURS, Forecast, TimedProblems, timed_problems
from tiledsched.serve.rivals import PLANNED_WORTH_US, forecast_offers

SPEC = arch_spec("sm_90")
HOSTS = {"torch": 8.0, OURS: 10.0}
H200 = "NVIDIA H200"


def product(m=4096, n=4096, k=4096, **more):
    return Matmul.problem(m=m, n=n, k=k, **{"dtype": "bfloat16", "b_layout": "column", **more})


def timed(**ratios):
    """Products of as many rows as the names say, on which our kernel takes so many times as long as cuBLAS's 100 us."""
    return TimedProblems(
        {product(m=int(name[1:])): {"torch": 100.0, OURS: 100.0 * ratio} for name, ratio in ratios.items()}, HOSTS, SPEC
    )


def forecast(us, spread=0.0, host_us=10.0):
    return Forecast(us=us, spread=spread, host_us=host_us, cases=3, nearest=product())


def test_between_timed_problems_the_ratio_is_between_theirs_and_surer_the_nearer_they_are() -> None:
    found = timed(m1024=2.0, m4096=1.0)
    there, between, far = (found.forecast(product(m=m)) for m in (1024, 2048, 1 << 17))
    assert there["torch"].us == pytest.approx(100, rel=0.05)
    assert there[OURS].us / there["torch"].us == pytest.approx(2, rel=0.05)
    assert between[OURS].us / between["torch"].us == pytest.approx(math.sqrt(2), rel=0.05)
    assert there[OURS].spread < between[OURS].spread < far[OURS].spread
    assert (between[OURS].cases, there[OURS].nearest, there["torch"].spread) == (2, product(m=1024), 0.0)
    assert far["torch"].us > 1000  # its work is that much more


def test_what_was_timed_nowhere_has_no_expected_time() -> None:
    assert TimedProblems({}, HOSTS, SPEC).forecast(product()) == {}
    assert list(TimedProblems({product(): {"torch": 1.0}}, HOSTS, SPEC).forecast(product())) == ["torch"]
    timed_attention = timed_problems(Attention, "sm_90", [])
    assert timed_attention is not None
    windowed = Attention.standard(seq_len=2048, head_dim=64, causal=True).replace(window=128)
    assert timed_attention.forecast(windowed) == {}
    assert timed_problems(Attention, "sm_100", []) is None
    assert timed_problems(kernel_named("softmax"), "sm_90", []) is None


@pytest.mark.parametrize(
    ("kernel", "name", "times", "served"),
    [
        (Matmul, "torch", (90.0, 100.0), "both"),
        (Matmul, "torch", (101.0, 100.0), ""),
        (Matmul, "torch", (101.0, 100.0, 0.1), "both"),  # ours is not sure enough
        (Matmul, "torch", (5.0, 9.0), "graphs"),  # calling it through us takes the host longer
        (Attention, "flash_attention_4", (8.5, 9.0), ""),  # not worth its compilation
        (Attention, "torch_cudnn", (90.0, 100.0), "graphs"),  # not worth its planning in calls of one problem
        (Attention, "torch_cudnn", (9000.0, 9000.0 + PLANNED_WORTH_US + 1), "both"),
    ],
)
def test_a_rival_serves_where_a_caller_is_expected_to_gain(kernel, name, times, served) -> None:
    theirs, ours, *spread = times
    offers = forecast_offers(kernel, {name: forecast(theirs), OURS: forecast(ours, *spread)})
    assert ["graphs" if each.only_captured else "both" for each in offers] == ([served] if served else [])
    assert all(each.capturable and each.ratio < 1 and f"to take {theirs:.1f} us" in each.reason for each in offers)


def test_without_our_own_times_nothing_is_offered() -> None:
    assert forecast_offers(Matmul, {"torch": forecast(1.0)}) == ()


@pytest.mark.parametrize("sizes", [(333, 4096, 11008), (100, 50000, 512), (8192, 1024, 8192), (4096, 4096, 4096)])
def test_products_that_lost_to_cublas_untuned_are_served_by_it(sizes) -> None:
    table = table_of(load_entries(process.settings(), {"sm_90"}, Matmul), process.settings(), kernel=Matmul)
    served = table.resolve(product(*sizes), "sm_90", H200)
    assert [each.name for each in served.rivals] == ["torch"]
