"""Problems that nobody tuned: expected times of rivals and of our choice, sizes that stand for others, and shares of a work tile."""

from __future__ import annotations

import math
import statistics

import pytest
import served_entries

from tiledsched.core import data_files
from tiledsched.core.cost import EFFICIENCY
from tiledsched.core.device import arch_spec
from tiledsched.core.launches import problem_class
from tiledsched.core.registry import kernel_named
from tiledsched.core.similarity import about
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.matmul import Matmul
from tiledsched.measure.runner import RivalTime
from tiledsched.rivals.forecast import OURS, Forecast, TimedProblem, TimedProblems, floor_us, timed_problems
from tiledsched.rivals.offers import PLANNED_WORTH_US, forecast_offers
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import transfer
from tiledsched.store.shipped import read_shipped_entries

SPEC = arch_spec("sm_90")
HOSTS = {"torch": 8.0, OURS: 10.0}
H200 = "NVIDIA H200"


def product(m=4096, n=4096, k=4096, **more):
    return Matmul.problem(m=m, n=n, k=k, **{"dtype": "bfloat16", "b_layout": "column", **more})


def timed(**ratios):
    """Products of as many rows as the names say, on which our kernel takes so many times as long as cuBLAS's 100 us."""
    rows = [
        TimedProblem.of(product(m=int(name[1:])), {"torch": 100.0, OURS: 100.0 * ratio}, SPEC, 90.0, 90.0)
        for name, ratio in ratios.items()
    ]
    return TimedProblems(rows, HOSTS, SPEC)


def forecast(us, spread=0.0, host_us=10.0):
    return Forecast(us=us, spread=spread, host_us=host_us, cases=3, nearest=product())


def test_between_timed_problems_the_ratio_is_between_theirs_and_surer_the_nearer_they_are() -> None:
    found = timed(m1024=2.0, m4096=1.0)
    there, between, far = (found.forecast(product(m=m), 90.0, 90.0) for m in (1024, 2048, 1 << 17))
    assert there["torch"].us == pytest.approx(100, rel=0.05)
    assert there[OURS].us / there["torch"].us == pytest.approx(2, rel=0.05)
    assert between[OURS].us / between["torch"].us == pytest.approx(math.sqrt(2), rel=0.05)
    assert there[OURS].spread < between[OURS].spread < far[OURS].spread
    assert (between[OURS].cases, there[OURS].nearest) == (2, product(m=1024))
    assert far["torch"].us > 300  # its work is that much more
    twice = found.forecast(product(m=1024), 180.0, 90.0)  # a schedule that the model gives twice the time
    assert (twice[OURS].us / there[OURS].us, twice["torch"].us) == (pytest.approx(2), there["torch"].us)


def test_what_was_timed_nowhere_has_no_expected_time() -> None:
    assert TimedProblems([], HOSTS, SPEC).forecast(product(), 1.0, 1.0) == {}
    only = TimedProblems([TimedProblem.of(product(), {"torch": 1.0}, SPEC, 1.0)], HOSTS, SPEC)
    assert list(only.forecast(product(), 1.0, 1.0)) == ["torch"]
    timed_attention = timed_problems(Attention, "sm_90", [], lambda p: 1.0)
    assert timed_attention is not None
    windowed = Attention.standard(seq_len=2048, head_dim=64, causal=True).replace(window=128)
    assert timed_attention.forecast(windowed, 1.0, 1.0) == {}
    assert timed_problems(Attention, "sm_100", [], lambda p: 1.0) is None
    assert timed_problems(kernel_named("softmax"), "sm_90", [], lambda p: 1.0) is None


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


def shipped(name):
    return read_shipped_entries(data_files.tuning_db() / "tables" / name / "sm_90.json")


@pytest.mark.parametrize("name", ["matmul", "matmul_epilogue", "scaled_matmul", "grouped_matmul", "attention"])
def test_nothing_was_measured_that_is_faster_than_any_forecast(name) -> None:
    for entry in shipped(name):
        times = [each.median_us for each in entry.rivals or () if each.median_us] + [entry.median_us or math.inf]
        assert min(times) > floor_us(entry.problem, SPEC, EFFICIENCY), entry.problem


def test_forecasts_for_products_with_epilogues_as_if_none_had_raced() -> None:
    """Against the races that ship: ours is not taken for faster than any product is, and rivals go by the plain product."""
    kernel, ratios = kernel_named("matmul_epilogue"), dict[str, list[float]]()
    table = LookupTable(shipped("matmul"), kernel, rivals=True)._of_arch("sm_90")
    for entry in shipped("matmul_epilogue"):
        p, plain = entry.problem, kernel.cost.timed_as(entry.problem)
        default_us = table.modelled_us(plain, space_for("sm_90", Matmul).default(plain))
        found = table.timed.forecast(p, table.modelled_us(p, entry.schedule), default_us)
        for each in entry.rivals:
            for method, us in ((each.name, each.median_us), (OURS, each.ours_us)):
                if method in found and us:
                    ratios.setdefault(method, []).append(found[method].us / us)
    assert min(ratios[OURS]) > 0.8
    for method in ("cublas_fused", "torch_compile"):
        assert 0.8 < min(ratios[method]) < max(ratios[method]) < 1.2
        assert 0.95 < statistics.geometric_mean(ratios[method]) < 1.05


def test_rivals_of_an_epilogue_are_forecast_by_the_default_of_the_plain_product() -> None:
    table = LookupTable(shipped("matmul"), kernel_named("matmul_epilogue"), rivals=True)
    p = table.kernel.problem(m=8192, n=4096, k=12288, b_layout="column", residual=True)
    (offer,) = table.resolve(p, "sm_90", H200).rivals
    assert offer.name == "cublas_fused"  # which took 1031 us, and our winner 1047
    assert "expected to take 10" in offer.reason


SCALED = {"n": 4096, "k": 4096, "scales": "row"}
GROUPED = {"experts": 8, "n": 4096, "k": 4096, "b_layout": "column"}


def raced(kernel, values, schedule, ratio, **more):
    """The entry of a problem on which the kernel's rival took `ratio` times as long as ours, for which the model is right."""
    p = kernel.problem(**values)
    ours = kernel.cost.model(p, schedule, kernel.cost.expected(p, schedule, SPEC), SPEC)
    paired = {"ratio": ratio, "ratio_low": ratio, "ratio_high": ratio, "median_us": ours * ratio, "ours_us": ours}
    rival = RivalTime(name=next(iter(kernel.rivals(p))), capturable=True, **(paired | more))
    return served_entries.entry(p, kernel=kernel.name, schedule=schedule, rivals=(rival,), layer="shipped")


LOSING, WINNING, MIXED = (0.7, 0.72, 0.71) * 3, (1.5, 1.45, 1.5) * 3, (1.5,) * 6 + (0.7,) * 3


@pytest.mark.parametrize(
    ("name", "size", "values"),
    [
        ("scaled_matmul", "m", SCALED),
        ("scaled_matmul", "m", SCALED | {"fast_accum": True}),
        ("grouped_matmul", "tokens", GROUPED),
    ],
)
@pytest.mark.parametrize(
    ("ratios", "more", "asked", "served"),
    [
        (LOSING, {}, 30000, True),
        (LOSING[:7], {}, 110000, False),  # too few to say anything far away
        (LOSING, {}, 5500, True),
        (WINNING, {}, 5500, False),
        (MIXED, {}, 20000, True),
        (MIXED, {}, 1500, False),
        (LOSING, {"failure": "RuntimeError: no", "median_us": None}, 5500, False),
    ],
)
def test_where_no_times_ship_those_of_a_table_let_a_rival_serve(
    name, size, values, ratios, more, asked, served
) -> None:
    kernel = kernel_named(name)
    schedule = space_for("sm_90", kernel).default(kernel.problem(**values, **{size: 1000}))
    sizes = zip((1000, 1300, 1700, 2200, 2900, 3800, 8000, 10000, 13000), ratios, strict=False)
    entries = [raced(kernel, values | {size: count}, schedule, ratio, **more) for count, ratio in sizes]
    table = LookupTable(entries, kernel, rivals=True)
    found = table.resolve(kernel.problem(**values, **{size: asked}), "sm_90", H200)
    assert found.provenance == "transferred"
    assert bool(found.rivals) == served
    if served:
        assert "by times on 9 problems" in found.rivals[0].reason
    if values.get("scales"):  # others have functions of their own for blocks, and may have none here
        blocks = kernel.problem(**values | {"scales": "block", "fast_accum": False, size: asked})
        assert not table.resolve(blocks, "sm_90", H200).rivals


@pytest.mark.parametrize("fast", [False, True])
def test_products_of_8_bits_that_lost_to_cublas_untuned_are_served_by_it(fast) -> None:
    kernel = kernel_named("scaled_matmul")
    p = kernel.problem(m=8192, n=8192, k=8192, scales="row", fast_accum=fast)
    assert floor_us(p, SPEC) < 761 < 2 * floor_us(p, SPEC)  # what cuBLAS took on an H200
    table = table_of(load_entries(process.settings(), {"sm_90"}, kernel), process.settings(), kernel=kernel)
    assert [each.name for each in table.resolve(p, "sm_90", H200).rivals] == ["cublas_scaled"]


# Problems of about one size


def test_sizes_that_stand_for_others_are_a_little_larger_and_as_aligned() -> None:
    for size in range(1, 40000, 7):
        found = about(size)
        assert size <= found <= 1.125 * size + 1
        assert about(found) == found
        assert (found % 16 == 0) == (size % 16 == 0)
    assert len({about(size) for size in range(4096, 8192)}) == 17


@pytest.mark.parametrize(
    ("kernel", "asked", "stands"),
    [
        ("matmul", {"m": 4001, "n": 4001, "k": 4001}, {"m": 4095, "n": 4001, "k": 4001}),  # the weight is what it is
        ("rms_norm", {"rows": 4000, "columns": 4001}, {"rows": 4096, "columns": 4001}),
        ("softmax", {"rows": 1001, "columns": 1000}, {"rows": 1023, "columns": 1000}),
        ("softmax", {"rows": 33, "columns": 1000}, {"rows": 33, "columns": 1000}),
    ],
)
def test_a_problem_of_about_the_size_serves_with_the_same_program(kernel, asked, stands) -> None:
    kernel = kernel_named(kernel)
    problem, other = kernel.problem(**asked), kernel.problem(**stands)
    assert kernel.similarity.bucketed(problem) == other
    space = space_for("sm_90", kernel)
    schedule = space.default(other)
    assert problem_class(kernel, problem, schedule, SPEC) == problem_class(kernel, other, schedule, SPEC)


# What shares a work tile


def test_a_transferred_schedule_fills_the_gpu_with_shares_of_its_own() -> None:
    table = table_of(load_entries(process.settings(), {"sm_90"}, Attention), process.settings(), kernel=Attention)
    values = {"seq_q": 4, "seq_k": 32768, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    masked = {"causal": True, "alignment": "bottom_right"}

    def served(batch):
        return table.resolve(Attention.problem(**values, **masked, batch=batch), "sm_90", H200).schedule

    assert served(1)["kv_splits"] >= 16  # 4 of a paged batch of 8 read the keys at a third of the bandwidth
    assert served(64)["kv_splits"] <= 2
    assert served(1)["pack_gqa"]


def test_the_number_of_shares_is_chosen_anew_where_the_model_expects_a_gain() -> None:
    few = Attention.problem(seq_q=1, seq_k=32768, batch=64, heads=8, head_dim=128, dtype="bfloat16")
    space = space_for("sm_90", Attention)
    won = space.default(few).replace(kv_splits=1)
    known = served_entries.entry(few, schedule=won)
    found = transfer(few.replace(batch=1), [known], space, SPEC)
    assert found is not None
    assert found.schedule["kv_splits"] >= 8
    assert found.schedule.replace(kv_splits=1, kv_combine=won["kv_combine"]) == won
    assert transfer(few.replace(batch=63), [known], space, SPEC).schedule == won
