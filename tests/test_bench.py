"""The bench without a GPU: its problems, rows, turns, errors and statuses, on a made-up harness."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import sys
import types
from pathlib import Path

import numpy
import pytest
from attention_runs import attention_reference

from tiledsched.checking.errors import NOT_FINITE, Error, error_of
from tiledsched.cli import main
from tiledsched.core.errors import ConfigError, MeasureError, MissingPackageError
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.models import MODELS
from tiledsched.kernels.attention.rivals import MOST_PAIRS, MOST_SCORES, compared_pairs, reference_of_pair
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Conditions
from tiledsched.ops.bench import bench_here, choose_methods, methods_of
from tiledsched.ops.own_methods import UNTUNED, untuned_schedule
from tiledsched.rivals.bench import BenchOptions, PreparedCell, Ready, TorchHarness, bench_cell, run_bench
from tiledsched.rivals.methods import OURS, Trial
from tiledsched.rivals.rows import COLUMNS, BenchRow, append_rows, finished_cells, read_rows
from tiledsched.rivals.sampling import LEAST_SAMPLES, QUEUED, Pace, sample_counts, sample_in_turn, spread_evenly

METHODS = methods_of(Attention)
SUITES = {name: Attention.suite(name) for name in Attention.suites}
PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
OTHER = PROBLEM.replace(causal=True)
FIRST_COLUMNS = [
    "regime",
    "method",
    "dtype",
    "causal",
    "batch",
    "heads",
    "kv_heads",
    "seq_q",
    "seq_k",
    "head_dim",
    "median_us",
    "ci_low_us",
    "ci_high_us",
    "tflops",
    "max_abs_err",
    "sm_clock_mhz",
    "status",
]
TIMES = {
    OURS: 100.0,
    "untuned": 200.0,
    "torch_flash": 150.0,
    "torch_cudnn": 90.0,
    "torch_math": 6000.0,
    "matmul": 500.0,
}


# The problems


def test_suites_hold_what_their_names_say() -> None:
    assert all(len(set(suite)) == len(suite) for suite in SUITES.values())
    grid = itertools.product((512, 1024, 2048, 4096, 8192, 16384), (64, 128), (False, True), ("float16", "bfloat16"))
    found = [
        (p.batch * p.seq_q, p.heads * p.head_dim, p.seq_q, p.head_dim, p.causal, p.dtype) for p in SUITES["attention"]
    ]
    wanted = [(16384, 2048, *p) for p in grid]
    assert set(found) == {*wanted, *((seq, 8 * dim, seq, dim, *more) for _, _, seq, dim, *more in wanted)}
    assert all(p.kv_heads < p.heads for p in SUITES["gqa"])
    assert all(p.seq_q <= 16 < p.seq_k for p in SUITES["decode"])
    assert {p.group for p in SUITES["models"]} == {1, 2, 3, 4, 5, 7, 8, 12}
    assert set(SUITES["models"]) == {p for name in MODELS for p in SUITES[name]}


def test_the_documentation_lists_every_suite_and_method_and_column() -> None:
    text = (Path(__file__).parent.parent / "docs" / "bench.md").read_text()
    for name, suite in SUITES.items():
        assert f"|`{name}`|{len(suite)}: " in text
    for name in (*METHODS, *COLUMNS):
        assert f"`{name}`" in text, name


# Turns


@pytest.mark.parametrize(
    ("times_us", "how", "counts"),
    [
        # 10 ms, 10 ms, 40 ms and 0.8 s each, of 0.3 s
        ([50, 4000, 20_000, 400_000], {"regime": "burst"}, [30, 30, 8, LEAST_SAMPLES]),
        ([50, 4000, 400_000], {"regime": "sustained"}, [300, 75, LEAST_SAMPLES]),
        # A budget shortens what rounds would take, and never below six.
        ([50, 50], {"regime": "burst", "seconds": 0.2}, [10, 10]),
        ([50, 50], {"regime": "burst", "seconds": 100}, [30, 30]),
        ([50, 50], {"regime": "burst", "seconds": -1}, [LEAST_SAMPLES] * 2),
        ([], {"regime": "burst", "seconds": 1}, []),
    ],
)
def test_quick_methods_get_all_rounds_and_slow_ones_their_share_of_the_time(times_us, how, counts) -> None:
    assert sample_counts(times_us, rounds=30, **how) == counts


def test_samples_of_each_method_are_spread_over_the_whole_run() -> None:
    order = spread_evenly([20, 20, 4], random.Random(1))
    assert [order.count(index) for index in range(3)] == [20, 20, 4]
    assert all(order[start : start + 11].count(2) in (0, 1, 2) for start in range(0, 44, 11))
    assert order != spread_evenly([20, 20, 4], random.Random(2))
    places = [spread_evenly([1, 100], random.Random(seed)).index(0) for seed in range(20)]
    assert min(places) < 30 < 70 < max(places)
    rounds = spread_evenly([5, 5], random.Random(3))
    assert [sorted(rounds[start : start + 2]) for start in range(0, 10, 2)] == [[0, 1]] * 5


class Watch:
    """A stopwatch that runs nothing, and a clock by which method i takes `times_us[i]`."""

    def __init__(self, times_us) -> None:
        self.times_us, self.now, self.starts, self.ahead, self.most_ahead, self.paced = times_us, 0.0, [], 0, 0, set()

    def queue(self, index, *, paced):
        self.paced.add(paced)
        self.ahead += 1
        self.most_ahead = max(self.ahead, self.most_ahead)
        self.starts.append((index, self.now))
        self.now += self.times_us[index] / 1e6
        return index

    def read(self, queued):
        self.ahead -= 1
        return self.times_us[queued]

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Log:
    def __init__(self) -> None:
        self.polled = 0

    def poll(self) -> None:
        self.polled += 1

    def summary(self) -> Conditions:
        return Conditions(sm_clock_mhz=1980, power_w=400.0, throttle_reasons=("power cap", "sync boost"))


def test_burst_leaves_the_gap_and_after_a_slow_launch_as_long_a_rest() -> None:
    log, watch = Log(), Watch([100.0, 30_000.0])
    samples = sample_in_turn(watch, [6, 6], regime="burst", rng=random.Random(0), log=log, pace=Pace(clock=watch))
    assert samples == [[100.0] * 6, [30_000.0] * 6]
    assert watch.paced == {True}
    for (index, start), (_, following) in itertools.pairwise(watch.starts):
        assert following - start == pytest.approx(0.010 if index == 0 else 0.060)
    assert log.polled >= 6


def test_sustained_warms_up_first_and_keeps_the_queue_full() -> None:
    watch = Watch([1000.0, 3000.0])
    pace = Pace(clock=watch, warmup_s=0.5)
    samples = sample_in_turn(watch, [40, 12], regime="sustained", rng=random.Random(0), log=Log(), pace=pace)
    assert [len(each) for each in samples] == [40, 12]
    assert (watch.paced, watch.most_ahead, watch.ahead) == ({False}, QUEUED + 1, 0)
    assert sum(start < 0.5 for _, start in watch.starts) == len(watch.starts) - 52  # none of the warm-up counts


# Methods


def test_methods_are_chosen_in_their_own_order_and_unknown_ones_refused() -> None:
    chosen = choose_methods(Attention, ["torch_cudnn", "tiledsched"], ceiling=True)
    assert [m.name for m in chosen] == ["tiledsched", "torch_cudnn", "matmul"]
    default = {m.name for m in choose_methods(Attention, None)}
    torch = {"torch_flash", "torch_cudnn", "torch_efficient", "torch_math", "torch_auto"}
    assert {OURS, "untuned", "eager"} | torch <= default - {"matmul"}
    assert METHODS["tilegym"].installed == ("tilegym" in default)  # a method takes part where it is installed, or named
    assert [m.name for m in choose_methods(Attention, ["tilegym"])] == ["tilegym"]
    with pytest.raises(
        ConfigError, match="unknown method 'torch_best'; known are tiledsched, served, left_out, untuned"
    ):
        choose_methods("attention", ["torch_best"])


LARGE = Attention.standard(seq_len=16384, head_dim=64)


@pytest.mark.parametrize(
    ("method", "problem", "gib", "refusal"),
    [
        (METHODS["torch_math"], LARGE, 139, "skipped: its score matrices would take 128 GiB"),
        (METHODS["torch_math"], PROBLEM, 139, ""),
        (METHODS["torch_flash"], LARGE, 1, ""),
        (dataclasses.replace(METHODS["tilegym"], package="no.such"), PROBLEM, 1024, "not installed: no.such"),
    ],
)
def test_a_method_that_does_not_fit_or_is_not_installed_is_skipped(method, problem, gib, refusal) -> None:
    assert method.refusal(problem, gib << 30) == refusal


def test_the_untuned_schedule_names_every_knob_of_the_space() -> None:
    schedule = untuned_schedule("sm_90")
    assert Attention.grids(Attention.standard(seq_len=512, head_dim=64), schedule, types.SimpleNamespace(sm_count=132))
    assert set(schedule) == set(space_for("sm_90", Attention).knobs)
    assert UNTUNED.items() <= dict(schedule).items()


# Errors


def square(length, heads, **more):
    return Attention.problem(seq_q=length, seq_k=length, head_dim=64, heads=heads, kv_heads=heads, **more)


@pytest.mark.parametrize(
    ("problem", "count", "pairs"),
    [
        (Attention.standard(seq_len=512, head_dim=64), MOST_PAIRS, None),
        (Attention.standard(seq_len=16384, head_dim=64), MOST_SCORES // 16384**2, None),
        (square(65536, 8), 2, [(0, 0), (0, 7)]),
        (square(65536, 1), 1, [(0, 0)]),
        (square(8, 2), 2, [(0, 0), (0, 1)]),
    ],
    ids=str,
)
def test_pairs_are_the_same_every_time_and_bounded_by_work(problem, count, pairs) -> None:
    found = compared_pairs(problem)
    assert found == compared_pairs(problem) == (pairs or found)
    assert len(found) == len(set(found)) == count
    assert {(0, 0), (problem.batch - 1, problem.heads - 1)} >= {found[0], found[-1]}


def test_errors_are_those_of_all_pairs_together() -> None:
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 40, 16)) for _ in range(3))
    reference = attention_reference(numpy, q, k, v, causal=True, scale=0.25)[0]
    problem = Attention.problem(seq_q=40, seq_k=40, head_dim=16, heads=2, kv_heads=2, causal=True)
    expected = [reference_of_pair(numpy, problem, q[0, h], k[0, h], v[0, h]) for h in range(2)]
    numpy.testing.assert_allclose(expected, reference, rtol=1e-12)
    outputs = [expected[0], expected[1] + 0.5 * (numpy.arange(640).reshape(40, 16) == 53)]
    error = error_of(numpy, zip(outputs, expected, strict=True))
    assert (error.max_abs, error.relative) == pytest.approx((0.5, 0.5 / numpy.linalg.norm(reference)))
    assert NOT_FINITE.verdict("float16").startswith("wrong result: not every")
    inaccurate = Error(max_abs=1.0, relative=0.02)
    assert (inaccurate.verdict("float16"), inaccurate.verdict("bfloat16")) == ("wrong result: relative error 0.02", "")


# Cells


RIGHT = {"max_abs_err": 1e-3, "rel_err": 2e-4, "compared": "4/64"}
OF_OURS = {**RIGHT, "schedule": "64x64", "provenance": "measured"}


class Harness:
    """A harness without a GPU: methods take `TIMES`; `failing` ones have a status; of `late` ones, the host is too slow; `dies` breaks
    at that problem."""

    device, versions = "NVIDIA Sample", "driver 1 torch 2"

    def __init__(self, failing=None, dies=None, breaks=False, lost=False, late=()) -> None:
        self.failing, self.dies, self.breaks, self.lost, self.prepared = failing or {}, dies, breaks, lost, []
        self.late = late

    def prepare(self, problem, methods, regime):
        if problem == self.dies:
            raise MeasureError("the GPU cannot be used any more")
        self.prepared.append((regime, problem))
        ready = tuple(
            Ready(
                method=method,
                trial=Trial(call=lambda: None, look_us=TIMES.get(method.name, 300.0)),
                fields={} if method.name == "matmul" else (OF_OURS if method.name == OURS else RIGHT),
            )
            for method in methods
            if method.name not in self.failing
        )
        watch = Watch([math.nan if each.method.name in self.late else each.trial.look_us for each in ready])
        if self.breaks:
            watch.read = self._break
        return PreparedCell(ready=ready, failed=self.failing, watch=watch, log=Log())

    def check(self) -> None:
        if self.lost:
            raise MeasureError("the GPU cannot be used any more")

    def _break(self, queued):
        raise RuntimeError("CUDA error: unspecified launch failure\nmore of it")


QUICK = Pace(gap_s=0.0005, warmup_s=0.0, rewarm_s=0.0)


def options(names=(OURS, "untuned", "torch_flash", "torch_cudnn"), **more) -> BenchOptions:
    return BenchOptions(methods=tuple(METHODS[name] for name in names), rounds=8, pace=QUICK, **more)


def test_a_cell_has_a_row_for_each_method_in_order_whatever_became_of_it() -> None:
    harness = Harness(failing={"untuned": "not served: why"})
    rows = bench_cell(harness, ("burst", PROBLEM), options((OURS, "untuned", "torch_cudnn", "matmul")))
    assert [(row.method, row.status) for row in rows] == [
        (OURS, "ok"),
        ("untuned", "not served: why"),
        ("torch_cudnn", "ok"),
        ("matmul", "ok"),
    ]
    ours, untuned, cudnn, matmul = rows
    assert (ours.timing, ours.samples) == (Timing(median_us=100.0, ci_low_us=100.0, ci_high_us=100.0), 8)
    assert (ours.max_abs_err, ours.rel_err, ours.compared, ours.provenance) == (1e-3, 2e-4, "4/64", "measured")
    assert (ours.device, ours.conditions.sm_clock_mhz) == ("NVIDIA Sample", 1980)
    assert (untuned.median_us, untuned.tflops) == (None, None)
    rates = PROBLEM.flops / 90e-6 / 1e12, 2 * 8192**3 / 500e-6 / 1e12
    assert (cudnn.tflops, matmul.tflops) == pytest.approx(rates)
    assert (ours.ceiling_ratio, matmul.ceiling_ratio) == pytest.approx((ours.tflops / matmul.tflops, 1.0))


def test_what_breaks_while_timed_costs_the_cell_and_not_the_run() -> None:
    rows = bench_cell(Harness(failing={"untuned": "out of memory"}, breaks=True), ("burst", PROBLEM), options())
    assert [row.status for row in rows] == [
        "while timed: RuntimeError: CUDA error: unspecified launch failure",
        "out of memory",
    ] + [rows[0].status] * 2
    assert all(row.median_us is None for row in rows)


def test_cells_are_kept_one_by_one_burst_before_sustained() -> None:
    kept, said, harness = [], [], Harness()
    rows = run_bench(
        [PROBLEM, OTHER],
        options(regimes=("burst", "sustained")),
        harness,
        done={("burst", OTHER)},
        keep=kept.append,
        progress=said.append,
    )
    assert harness.prepared == [("burst", PROBLEM), ("sustained", PROBLEM), ("sustained", OTHER)]
    assert [len(cell) for cell in kept] == [4, 4, 4]
    assert rows == [row for cell in kept for row in cell]
    assert len(said) == 3
    assert said[0].startswith("[1/3] burst B=16")
    assert "torch_cudnn 90.0 us" in said[0]


def test_a_lost_gpu_ends_the_run_and_leaves_what_was_kept() -> None:
    kept = []
    with pytest.raises(MeasureError):
        run_bench([PROBLEM, OTHER], options(), Harness(dies=OTHER), keep=kept.append)
    assert len(kept) == 1
    with pytest.raises(MeasureError):  # lost while timed: rows that would say nothing are not kept
        run_bench([PROBLEM], options(), Harness(breaks=True, lost=True), keep=kept.append)
    assert len(kept) == 1


def test_a_spent_budget_leaves_the_rest_for_the_next_run() -> None:
    said, harness, now = [], Harness(), itertools.count(step=0.4)
    problems = [PROBLEM.replace(batch=batch) for batch in range(1, 9)]
    run_bench(problems, options(budget_s=4.0), harness, progress=said.append, clock=lambda: next(now))
    assert 1 <= len(harness.prepared) < 8
    left = 8 - len(harness.prepared)
    assert said[-1] == f"the budget is spent, {left} of 8 cells are left; run again to go on"


# Rows


def sample_rows(regime="burst", problem=PROBLEM, **times) -> list[BenchRow]:
    return [
        BenchRow(
            problem=problem,
            method=name,
            regime=regime,
            status="ok" if us else "out of memory",
            timing=Timing(median_us=us, ci_low_us=us * 0.99, ci_high_us=us * 1.01) if us else None,
            max_abs_err=us and 1e-3,
            rel_err=us and 2e-4,
            samples=30 if us else None,
            compared="4/64",
            conditions=Log().summary(),
            flops=METHODS[name].flops,
            device="NVIDIA Sample",
            versions="torch 2.11",
        )
        for name, us in times.items()
    ]


def test_columns_begin_as_agreed() -> None:
    assert COLUMNS[: len(FIRST_COLUMNS)] == FIRST_COLUMNS
    assert {"rel_err", "power_w", "throttle", "provenance", "measured_program", "schedule", "ceiling_ratio"} < set(
        COLUMNS
    )


def test_rows_survive_the_file(tmp_path) -> None:
    path = tmp_path / "new" / "rows.csv"
    problem = Attention.problem(
        seq_q=8, seq_k=64, head_dim=64, value_dim=32, causal=True, alignment="bottom_right", heads=4, kv_heads=2
    )
    rows = sample_rows(problem=problem, tiledsched=100.0, torch_math=None, matmul=500.0)
    rows[0] = dataclasses.replace(rows[0], schedule="64x64", provenance="measured", measured_program=False)
    append_rows(rows[:2], path)
    append_rows(rows[2:], path)
    again = read_rows(path)
    assert [row.to_csv() for row in again] == [row.to_csv() for row in rows]
    assert (again[0].problem, again[0].conditions.throttle_reasons) == (problem, ("power cap", "sync boost"))
    assert [row.measured_program for row in again] == [False, None, None]
    assert again[2].tflops == pytest.approx(rows[2].tflops, rel=1e-3)


def test_a_killed_run_keeps_its_cells_and_the_next_leaves_them_out(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    names = ["tiledsched", "torch_flash"]
    append_rows(sample_rows(tiledsched=100.0, torch_flash=None), path)
    append_rows(sample_rows("sustained", tiledsched=110.0), path)  # flash was not asked for
    whole = path.read_text()
    append_rows(sample_rows(problem=OTHER, tiledsched=120.0), path)
    path.write_text(path.read_text()[:-5])  # killed in the middle of a line
    assert len(read_rows(path)) == 3
    assert finished_cells(path, names) == {("burst", PROBLEM)}
    assert path.read_text() == whole
    append_rows(sample_rows("sustained", tiledsched=111.0, torch_flash=140.0), path)
    assert finished_cells(path, names) == {("burst", PROBLEM), ("sustained", PROBLEM)}
    assert [row.median_us for row in read_rows(path) if row.regime == "sustained"] == [111.0, 140.0]  # the last counts
    assert finished_cells(tmp_path / "none.csv", names) == set()


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ",".join(FIRST_COLUMNS) + "\n" + ",".join(["x"] * 17) + "\n", None])
def test_another_file_is_refused(tmp_path, text) -> None:
    path = tmp_path / "rows.csv"
    if text:
        path.write_text(text)
    message = "is not a bench: .*" if text else "cannot be read .*"
    with pytest.raises(ConfigError, match=f"{message}; pass a file that bench --csv wrote"):
        read_rows(path)


def test_a_file_with_other_columns_is_not_appended_to(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    append_rows(sample_rows(tiledsched=100.0), path)
    turned = path.read_text().replace("regime,method", "method,regime").replace("burst,tiledsched", "tiledsched,burst")
    path.write_text(turned)
    assert read_rows(path)[0].median_us == 100.0
    with pytest.raises(ConfigError, match="other columns than this version"):
        finished_cells(path, [OURS])


# The command


def test_a_bench_goes_on_where_it_stopped(tmp_path) -> None:
    harness, path = Harness(failing={"torch_math": "skipped: too large"}), tmp_path / "rows.csv"
    how = {
        "methods": ["tiledsched", "torch_cudnn", "torch_math"],
        "ceiling": True,
        "rounds": 6,
        "harness": harness,
        "pace": QUICK,
    }
    rows = bench_here(Attention, [PROBLEM], path=path, **how)
    assert [row.method for row in rows] == [OURS, "torch_cudnn", "torch_math", "matmul"]
    bench_here(Attention, [PROBLEM, OTHER], path=path, regime="both", **how)
    assert harness.prepared == [("burst", PROBLEM), ("burst", OTHER), ("sustained", PROBLEM), ("sustained", OTHER)]
    assert len(read_rows(path)) == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "fastest"], "unknown method 'fastest'"),
        (["--summary", "none.csv"], "pass a file that bench --csv wrote"),
    ],
)
def test_wrong_use_is_explained(arguments, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_harness_without_a_gpu_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingPackageError, match=r"cupy is not installed; run: pip install"):
        TorchHarness()


def test_what_is_timed_beside_others_has_no_time() -> None:
    harness = Harness(failing={"untuned": "not served: why"})
    prepare = harness.prepare
    beside = types.SimpleNamespace(poll=Log().poll, summary=lambda: Conditions(others=(4711,), concurrent_pids=(4711,)))
    harness.prepare = lambda *given: dataclasses.replace(prepare(*given), log=beside)
    rows = bench_cell(harness, ("burst", PROBLEM), options((OURS, "untuned")))
    assert [(row.status, row.median_us) for row in rows] == [
        ("timed beside process 4711 on the GPU", None),
        ("not served: why", None),
    ]
