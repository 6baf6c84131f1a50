"""The bench and the ablation on a real GPU."""

from __future__ import annotations

import pytest

from tiledsched.cli.bench_summary import summarise
from tiledsched.kernels.attention import Attention
from tiledsched.ops.bench import choose_methods, methods_of
from tiledsched.rivals.bench import BenchOptions, TorchHarness, run_bench
from tiledsched.rivals.methods import OURS, SERVED, case_error, make_case

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MUST = {OURS, SERVED, "untuned", "torch_flash", "torch_efficient", "torch_math", "torch_auto", "eager"}
METHODS = methods_of(Attention)
PROBLEMS = [
    Attention.standard(seq_len=512, head_dim=64, batch=1, heads=8),
    Attention.standard(seq_len=1024, head_dim=128, dtype="bfloat16", causal=True, batch=2, heads=8),
]


@pytest.fixture(scope="module")
def harness():
    return TorchHarness()


def benched(problems, options, harness):
    """The rows of a bench. Beside another process that computes on the GPU none has a time, and the test is skipped."""
    rows = run_bench(problems, options, harness)
    disturbed = next((row.conditions.disturbance for row in rows if row.conditions.concurrent_pids), "")
    if disturbed:
        pytest.skip(f"the bench ran {disturbed}")
    return rows


@pytest.mark.measures
@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_every_method_installed_has_a_time_and_is_right(harness, regime) -> None:
    methods = tuple(choose_methods(Attention, None, ceiling=True))
    rows = benched(PROBLEMS, BenchOptions(methods=methods, regimes=(regime,), rounds=8), harness)
    assert [row.method for row in rows] == [method.name for method in methods] * len(PROBLEMS)
    said = {(row.method, str(row.problem)): row.status for row in rows}
    for row in rows:
        if row.method in MUST:
            assert row.status == "ok", said
            assert 0 < row.timing.ci_low_us <= row.median_us <= row.timing.ci_high_us
            assert row.rel_err < (2e-3 if row.problem.dtype == "float16" else 1.5e-2)
            assert 0 < row.ceiling_ratio < 1
        if regime == "sustained" and row.method == OURS:
            assert row.conditions.graph_launches == 20  # short, and capturable
    assert summarise(rows)[0].without == 0


PACKED = {"seq_q": 1000, "seq_k": 1000, "head_dim": 128, "heads": 8, "kv_heads": 2, "dtype": "bfloat16", "packed": 5}
PAGED = {
    "seq_q": 1,
    "seq_k": 1024,
    "head_dim": 128,
    "heads": 8,
    "kv_heads": 2,
    "dtype": "bfloat16",
    "batch": 4,
    "page": 16,
    "lengths": True,
    "causal": True,
    "alignment": "bottom_right",
}
PLACED = [
    Attention.problem(**PACKED),
    Attention.problem(**PACKED, causal=True),
    Attention.problem(**{**PACKED, "seq_k": 1600}, causal=True, alignment="bottom_right", window=100),
    Attention.problem(**PAGED),
    Attention.problem(**{**PAGED, "page": 128, "seq_q": 100}),
    Attention.problem(**{**PAGED, "page": 64, "seq_q": 300, "batch": 1, "packed": 4}),
]


@pytest.mark.measures
@pytest.mark.parametrize("problem", PLACED, ids=str)
def test_every_method_that_knows_packed_sequences_or_pages_is_right(harness, problem) -> None:
    rows = benched([problem], BenchOptions(methods=tuple(choose_methods(Attention, None)), rounds=6), harness)
    said = {row.method: row.status for row in rows}
    must = (
        {OURS, SERVED}
        | ({"flash_attention_4"} & set(said))
        | (set() if problem.page else {"torch_varlen", "torch_flex"})
    )
    assert {row.method for row in rows if row.status == "ok"} == must & set(said), said
    assert all(row.rel_err < 1.5e-2 for row in rows if row.status == "ok")
    refused = {text for name, text in said.items() if name not in must | {"torch_varlen", "torch_flex"}}
    assert refused == {"not served: it knows no packed sequences, and no pages"}


@pytest.mark.measures
def test_slow_launches_and_quick_ones_have_the_times_they_have_alone(harness) -> None:
    """A graph replay, an event pair behind a flush and torch's own view of one kernel agree within what a flush costs."""
    problem = Attention.standard(seq_len=4096, head_dim=64)
    ours = (METHODS[OURS], METHODS["torch_math"])
    both = benched([problem], BenchOptions(methods=ours, rounds=10), harness)
    alone = benched([problem], BenchOptions(methods=ours[:1], rounds=10), harness)
    assert both[0].median_us == pytest.approx(alone[0].median_us, rel=0.1)
    assert both[1].samples < both[0].samples


@pytest.mark.skipif(not METHODS["triton"].installed, reason="needs Triton")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 300, "seq_k": 300, "head_dim": 64},
        {"heads": 2, "kv_heads": 2, "seq_q": 77, "seq_k": 200, "head_dim": 80},
        {"heads": 4, "seq_q": 1, "seq_k": 1000, "head_dim": 128},
        {"heads": 2, "kv_heads": 2, "seq_q": 256, "seq_k": 256, "head_dim": 192, "value_dim": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "alignment": "bottom_right"}], ids=str)
def test_the_triton_kernel_is_right(sizes, dtype, mask) -> None:
    case = make_case(torch, cupy, Attention.problem(**sizes, **mask, dtype=dtype))
    error = case_error(cupy, case, METHODS["triton"].make(case.arrays)())
    assert error.relative < (1.5e-3 if dtype == "float16" else 1e-2)
