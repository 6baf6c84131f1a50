"""Rivals on a real GPU: timed by their own process beside a winner, served where they are said to be faster, and in the bench."""

from __future__ import annotations

import dataclasses

import numpy
import pytest

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")
from on_gpu import arch, on_side_stream, replayed

from tiledsched import configure, explain, sdpa
from tiledsched.checking.errors import case_errors, wrong_result
from tiledsched.checking.inputs import make_cases
from tiledsched.cli.bench_summary import summarise
from tiledsched.core.cases import expected_outputs, output_specs, random_inputs
from tiledsched.core.rivals import call_on
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.backends import flash_attention_4, raced
from tiledsched.kernels.attention_backward.backends import raced as raced_backward
from tiledsched.kernels.attention_backward.declaration import AttentionBackward
from tiledsched.ops import plans, sdpa as serve
from tiledsched.ops.bench import choose_methods, methods_of
from tiledsched.rivals.bench import BenchOptions, TorchHarness, run_bench
from tiledsched.rivals.methods import OURS, SERVED, as_stored, as_tensors, case_error, make_case
from tiledsched.serve import entries, process
from tiledsched.tuning.session import tune

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {
    "seq_q": 1024,
    "seq_k": 1024,
    "head_dim": 128,
    "batch": 4,
    "heads": 16,
    "kv_heads": 16,
    "dtype": "bfloat16",
    "causal": True,
}


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    """The database of a tune with rivals, and what it stored."""

    db = str(tmp_path_factory.mktemp("tuned") / "tuning.db")
    return db, tune(Attention, [SIZES], arch=arch(), db=db, effort="quick", trials=2, runner="gpu").entries[0]


@pytest.fixture
def tuned(tuning, monkeypatch):
    """What a tune with rivals stored, and a process that serves it."""

    monkeypatch.setenv("TILEDSCHED_DB", tuning[0])
    serve.reload()
    yield tuning[1]
    serve.reload()


def tensors():
    shape = (SIZES["batch"], SIZES["heads"], SIZES["seq_q"], SIZES["head_dim"])
    generator = torch.Generator(device="cuda").manual_seed(1)
    return tuple(torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(3))


@pytest.mark.measures
def test_torchs_backends_are_timed_beside_the_winner(tuned) -> None:
    times = {each.name: each for each in tuned.rivals}
    assert {times[name].failure for name in times} == {""}
    for name in ("torch_cudnn", "torch_flash", "torch_efficient"):
        assert times[name].capturable
        assert times[name].ratio_low <= times[name].ratio <= times[name].ratio_high
        assert times[name].ours_us == pytest.approx(tuned.median_us, rel=0.1)  # the same kernel, in another process
        assert 0.5 < times[name].ratio < 5
        assert times[name].host_us > 1


@pytest.mark.measures
@pytest.mark.parametrize("name", ["torch_cudnn", "torch_flash", "torch_efficient", "flash_attention_4"])
def test_each_serves_where_it_is_said_to_be_faster(tuned, monkeypatch, name) -> None:

    if name not in {each.name for each in tuned.rivals}:
        pytest.skip(f"{name} is not installed")
    q, k, v = tensors()
    with configure(rivals="off"):
        own = sdpa(q, k, v, causal=True)
    time = next(each for each in tuned.rivals if each.name == name)
    faster = dataclasses.replace(time, ratio=0.5, ratio_low=0.49, ratio_high=0.51, host_us=1.0)
    layer = entries.Layer(name="user", where="", entries=[tuned.replace(rivals=(faster,))])
    monkeypatch.setattr(entries, "layers", lambda *given, **more: [layer])
    with configure(rivals="serve"):
        assert explain(q, k, v, causal=True).rival == name
        for _ in range(3):
            out = sdpa(q, k, v, causal=True)
            assert out.stride() == q.stride()
            torch.testing.assert_close(out, own, rtol=2e-2, atol=2e-2)
        rows_first = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)]
        out = sdpa(*rows_first, causal=True)
        assert out.stride() == rows_first[0].stride()
        torch.testing.assert_close(out, own, rtol=2e-2, atol=2e-2)
        if time.capturable:
            torch.testing.assert_close(replayed(lambda: sdpa(q, k, v, causal=True)), own, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page", [0, 16, 64, 128])
@pytest.mark.parametrize("packed", [5, 0])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("name", ["torch_varlen", "flash_attention_4"])
def test_rivals_of_packed_sequences_and_pages_are_right(name, packed, page, window) -> None:
    """Some sequences are empty, and rows that see no key are zero; what lies beyond a sequence's keys does not matter; graphs hold
    the call."""
    p = Attention.problem(
        seq_q=764 if packed else 30,
        seq_k=640 if page else 764,
        head_dim=128,
        heads=8,
        kv_heads=2,
        dtype="bfloat16",
        causal=True,
        alignment="bottom_right",
        window=window,
        page=page,
        batch=1 if packed else 5,
        packed=packed,
        lengths=page > 0,
    )
    rival = raced(p).get(name) if packed or page else None
    if rival is None:
        pytest.skip("it is not installed, or does not know the problem")
    (spec,), ours = output_specs(Attention, p), space_for("sm_90", Attention).default(p)
    for case in make_cases(Attention, numpy, numpy.random.default_rng(3), p):
        call = call_on(rival, [each.cuda() for each in as_tensors(torch, p, case.inputs)])
        out = call()
        stored = {"Out": as_stored(torch, numpy, out.cpu(), spec)}
        errors = case_errors(numpy, [spec], stored, case, Attention.tolerance(p, ours), Attention.check_tile(p, ours))
        assert wrong_result(errors, case) is None
        torch.testing.assert_close(replayed(call), out)


@pytest.mark.measures
@pytest.mark.parametrize("name", ["torch_cudnn", "flash_attention_4"])
def test_one_whose_host_is_slow_serves_in_graphs_alone(tuned, monkeypatch, name) -> None:

    process.runtime.loaded.clear()  # as in a process where no other test has called it
    time = next((each for each in tuned.rivals if each.name == name), None)
    if time is None or not time.capturable:
        pytest.skip(f"{name} is not installed, or no graph holds it")
    q, k, v = tensors()
    called = []

    def counted(*given, late):
        call = raced(*given, late=late)[name]
        return {name: lambda *tensors: called.append(torch.cuda.is_current_stream_capturing()) or call(*tensors)}

    monkeypatch.setattr(plans, "raced", counted)
    with configure(rivals="off"):
        own = sdpa(q, k, v, causal=True)
    late = dataclasses.replace(time, ratio=0.5, ratio_low=0.49, ratio_high=0.51, host_us=1e6)
    layer = entries.Layer(name="user", where="", entries=[tuned.replace(rivals=(late,))])
    monkeypatch.setattr(entries, "layers", lambda *given, **more: [layer])
    with configure(rivals="serve"):
        assert (explain(q, k, v, causal=True).rival, explain(q, k, v, causal=True).in_graphs) == ("", name)
        for _ in range(3):
            assert torch.equal(sdpa(q, k, v, causal=True), own)
        assert called == []
        assert torch.equal(on_side_stream(lambda: sdpa(q, k, v, causal=True)), own)
        torch.testing.assert_close(replayed(lambda: sdpa(q, k, v, causal=True)), own, rtol=2e-2, atol=2e-2)
    assert called == [False, True]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"causal": False, "kv_heads": 4},
        {"window": 256},
        {"softcap": True},
        {"seq_q": 384, "seq_k": 1000, "alignment": "bottom_right"},
    ],
    ids=str,
)
def test_a_second_call_of_flash_attention_4_is_of_its_compiled_function(monkeypatch, sizes) -> None:

    function = pytest.importorskip("flash_attn.cute.interface")._flash_attn_fwd
    problem = Attention.problem(**{**SIZES, **sizes})
    kept = flash_attention_4(problem)
    for seed in range(3):
        torch.manual_seed(seed)
        lengths = ((problem.heads, problem.seq_q), *[(problem.kv_heads, problem.seq_k)] * 2)
        q, k, v = (torch.randn((problem.batch, *each, 128), device="cuda").to(torch.bfloat16) for each in lengths)
        with monkeypatch.context() as patch:
            if seed:
                patch.setattr(function, "compile_cache", None)  # the whole call would look into it
            out = kept(q, k, v)
        assert torch.equal(out, flash_attention_4(problem)(q, k, v))


BACKWARD = {"seq_q": 300, "seq_k": 300, "head_dim": 64, "batch": 2, "heads": 4, "kv_heads": 2, "dtype": "bfloat16"}
BELOW = {"seq_q": 200, "causal": True, "alignment": "bottom_right"}
PACKED = {"batch": 1, "packed": 5, "causal": True, "alignment": "bottom_right"}


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"causal": True, "head_dim": 128},
        {"causal": True, "deterministic": True},
        {"kv_heads": 4, "value_dim": 32},
        BELOW,
        {**BELOW, "window": 50, "softcap": True, "sinks": True},
        {"causal": True, "dlse": True, "dtype": "float16"},
        PACKED,
        {**PACKED, "window": 40, "deterministic": True},
    ],
    ids=str,
)
def test_gradients_of_rivals_are_right_by_our_log_sum_exp_and_graphs_hold_them(sizes) -> None:
    """The output and the log-sum-exp are computed in float32. A deterministic rival gives the same bits again."""

    p = AttentionBackward.problem(**{**BACKWARD, **sizes})
    if not raced_backward(p):
        pytest.skip("FlashAttention-4 is not installed")
    stored = random_inputs(AttentionBackward, numpy, numpy.random.default_rng(2), p)
    right = expected_outputs(AttentionBackward, numpy, p, stored, "float64")
    given = tuple(each.cuda() for each in as_tensors(torch, p, stored))
    turned = tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in given[:5]) + given[5:]
    for name, rival in raced_backward(p).items():
        for inputs in (given, turned):
            call = call_on(rival, inputs)
            found = call()
            for made, wanted in zip(found, right, strict=True):
                error = (made.double().cpu() - torch.from_numpy(wanted)).norm() / numpy.linalg.norm(wanted)
                assert error < (2e-2 if p.dtype == "bfloat16" else 4e-3), (name, float(error))
            for made, before in zip(replayed(call), found, strict=True):
                if p.deterministic:
                    assert torch.equal(made, before)
                torch.testing.assert_close(made, before, rtol=2e-2, atol=2e-2)


# The bench


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


BENCHED = {"seq_q": 1000, "seq_k": 1000, "head_dim": 128, "heads": 8, "kv_heads": 2, "dtype": "bfloat16", "packed": 5}
IN_PAGES = {
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
    Attention.problem(**BENCHED),
    Attention.problem(**BENCHED, causal=True),
    Attention.problem(**{**BENCHED, "seq_k": 1600}, causal=True, alignment="bottom_right", window=100),
    Attention.problem(**IN_PAGES),
    Attention.problem(**{**IN_PAGES, "page": 128, "seq_q": 100}),
    Attention.problem(**{**IN_PAGES, "page": 64, "seq_q": 300, "batch": 1, "packed": 4}),
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
