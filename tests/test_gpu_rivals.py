"""Rivals on a real GPU: timed by their own process beside a winner, and served where they are said to be faster."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
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
    from tiledsched.kernels.attention import Attention
    from tiledsched.tuning.session import tune

    db = str(tmp_path_factory.mktemp("tuned") / "tuning.db")
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return db, tune(Attention, [SIZES], arch=arch, db=db, effort="quick", trials=2, runner="gpu").entries[0]


@pytest.fixture
def tuned(tuning, monkeypatch):
    """What a tune with rivals stored, and a process that serves it."""
    from tiledsched.ops import sdpa as serve

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
    for name in ("torch_cudnn", "torch_flash", "torch_efficient"):
        assert times[name].failure == ""
        assert times[name].capturable
        assert times[name].ratio_low <= times[name].ratio <= times[name].ratio_high
        assert times[name].ours_us == pytest.approx(tuned.median_us, rel=0.1)  # the same kernel, in another process
        assert 0.5 < times[name].ratio < 5
        assert times[name].host_us > 1
    if "flash_attention_4" in times:
        assert times["flash_attention_4"].failure == ""


@pytest.mark.measures
@pytest.mark.parametrize("name", ["torch_cudnn", "torch_flash", "torch_efficient", "flash_attention_4"])
def test_each_serves_where_it_is_said_to_be_faster(tuned, monkeypatch, name) -> None:
    from tiledsched import configure, explain, sdpa
    from tiledsched.serve import entries

    if name not in {each.name for each in tuned.rivals}:
        pytest.skip(f"{name} is not installed")
    q, k, v = tensors()
    with configure(rivals="off"):
        own = sdpa(q, k, v, causal=True)
    time = next(each for each in tuned.rivals if each.name == name)
    faster = dataclasses.replace(time, ratio=0.5, ratio_low=0.49, ratio_high=0.51, host_us=1.0)
    monkeypatch.setattr(entries, "load_entries", lambda *given: [tuned.replace(rivals=(faster,))])
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
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = sdpa(q, k, v, causal=True)
            graph.replay()
            torch.testing.assert_close(out, own, rtol=2e-2, atol=2e-2)


ODD_ROWS, ODD_KEYS = [0, 1, 1, 130, 700, 764], [0, 17, 30, 130, 130, 764]
"""Of five sequences: one row; no rows; more rows than keys; rows without any key; few rows of many keys."""


@pytest.mark.parametrize("page", [0, 16, 64, 128])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("name", ["torch_varlen", "flash_attention_4"])
def test_rivals_of_packed_sequences_and_pages_answer_as_we_do(name, packed, page, window) -> None:
    """Rows that see no key are zero; what a table says beyond a sequence's keys does not matter; graphs hold the call."""
    from tiledsched import configure, sdpa_paged, sdpa_varlen
    from tiledsched.core.rivals import is_installed
    from tiledsched.kernels.attention import Attention
    from tiledsched.kernels.attention import backends as rivals

    if not (packed or page):
        pytest.skip("nothing is placed")
    if name == "flash_attention_4" and not is_installed(rivals.FLASH_4_MODULE):
        pytest.skip("it is not installed")
    if name == "torch_varlen" and page:
        pytest.skip("it has no pages")
    numbers = torch.Generator(device="cuda").manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=numbers, device="cuda").to(torch.bfloat16)

    def whole(values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    lengths, most = [500, 0, 1, 129, 640], 640
    table = torch.randperm(5 * most // (page or most), generator=numbers, device="cuda").reshape(5, -1).int()
    for index, length in enumerate(lengths if page else ()):
        table[index, -(-length // page) :] = (-1, 10**6)[index % 2]
    q = draw(764, 8, 128) if packed else draw(5, 30, 8, 128)
    k, v = (draw(5 * most // page, page, 2, 128) if page else draw(764, 2, 128) for _ in range(2))
    more = {"causal": True, "window": window or None}
    p = Attention.problem(
        seq_q=764 if packed else 30,
        seq_k=most if page else 764,
        head_dim=128,
        heads=8,
        kv_heads=2,
        dtype="bfloat16",
        causal=True,
        alignment="bottom_right",
        window=window,
        page=page,
        batch=1 if packed else 5,
        packed=5 if packed else 0,
        lengths=page > 0,
    )
    with configure(rivals="off", fallback="error"):
        if not packed:
            own = sdpa_paged(q, k, v, table, whole(lengths), **more)
        elif page:
            own = sdpa_varlen(
                q, k, v, whole(ODD_ROWS), None, 570, most, block_table=table, seqused_k=whole(lengths), **more
            )
        else:
            own = sdpa_varlen(q, k, v, whole(ODD_ROWS), whole(ODD_KEYS), 570, 634, **more)
    asked = [whole(lengths)] if page else []
    asked += [whole(ODD_ROWS)] if packed else []
    asked += [table] if page else [whole(ODD_KEYS)]
    heads = [rivals.heads_first(q), *(each.transpose(1, 2) if page else rivals.heads_first(each) for each in (k, v))]
    call = rivals.raced(p)[name].bind(*heads, *asked)
    out = call()
    assert out.stride()[1:] == heads[0].stride()[1:]
    torch.testing.assert_close(out, rivals.heads_first(own), rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = call()
    graph.replay()
    torch.testing.assert_close(again, out)


@pytest.mark.measures
@pytest.mark.parametrize("name", ["torch_cudnn", "flash_attention_4"])
def test_one_whose_host_is_slow_serves_in_graphs_alone(tuned, monkeypatch, name) -> None:
    from tiledsched import configure, explain, sdpa
    from tiledsched.ops import plans
    from tiledsched.serve import entries, process

    process.runtime.loaded.clear()  # as in a process where no other test has called it
    time = next((each for each in tuned.rivals if each.name == name), None)
    if time is None or not time.capturable:
        pytest.skip(f"{name} is not installed, or no graph holds it")
    q, k, v = tensors()
    called, made = [], plans.raced

    def counted(*given, late):
        call = made(*given, late=late)[name]
        return {name: lambda *tensors: called.append(torch.cuda.is_current_stream_capturing()) or call(*tensors)}

    monkeypatch.setattr(plans, "raced", counted)
    with configure(rivals="off"):
        own = sdpa(q, k, v, causal=True)
    late = dataclasses.replace(time, ratio=0.5, ratio_low=0.49, ratio_high=0.51, host_us=1e6)
    monkeypatch.setattr(entries, "load_entries", lambda *given: [tuned.replace(rivals=(late,))])
    with configure(rivals="serve"):
        assert (explain(q, k, v, causal=True).rival, explain(q, k, v, causal=True).in_graphs) == ("", name)
        for _ in range(3):
            assert torch.equal(sdpa(q, k, v, causal=True), own)
        assert called == []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(sdpa(q, k, v, causal=True), own)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sdpa(q, k, v, causal=True)
        graph.replay()
        torch.testing.assert_close(out, own, rtol=2e-2, atol=2e-2)
    assert called == [False, True]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"causal": False, "kv_heads": 4},
        {"window": 256},
        {"softcap": True},
        {"seq_q": 384, "seq_k": 1000, "alignment": "bottom_right"},
    ],
    ids=str,
)
def test_a_second_call_of_flash_attention_4_is_of_its_compiled_function(monkeypatch, asked) -> None:
    from tiledsched.kernels.attention import Attention
    from tiledsched.kernels.attention.backends import flash_attention_4

    function = pytest.importorskip("flash_attn.cute.interface")._flash_attn_fwd
    problem = Attention.problem(**{**SIZES, **asked})
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
    "asked",
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
def test_gradients_of_rivals_are_right_by_our_log_sum_exp_and_graphs_hold_them(asked) -> None:
    """The output and the log-sum-exp are computed in float32. A deterministic rival gives the same bits again."""
    import numpy

    from tiledsched.core.cases import expected_outputs, random_inputs
    from tiledsched.core.rivals import call_on
    from tiledsched.kernels.attention_backward.backends import raced
    from tiledsched.kernels.attention_backward.declaration import AttentionBackward
    from tiledsched.measure.torch_arrays import as_tensors

    p = AttentionBackward.problem(**{**BACKWARD, **asked})
    if not raced(p):
        pytest.skip("FlashAttention-4 is not installed")
    stored = random_inputs(AttentionBackward, numpy, numpy.random.default_rng(2), p)
    right = expected_outputs(AttentionBackward, numpy, p, stored, "float64")
    given = tuple(each.cuda() for each in as_tensors(torch, p, stored))
    turned = tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in given[:5]) + given[5:]
    for name, rival in raced(p).items():
        for inputs in (given, turned):
            call = call_on(rival, inputs)
            found = call()
            for made, wanted in zip(found, right, strict=True):
                error = (made.double().cpu() - torch.from_numpy(wanted)).norm() / numpy.linalg.norm(wanted)
                assert error < (2e-2 if p.dtype == "bfloat16" else 4e-3), (name, float(error))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = call()
            graph.replay()
            for made, before in zip(again, found, strict=True):
                if p.deterministic:
                    assert torch.equal(made, before)
                torch.testing.assert_close(made, before, rtol=2e-2, atol=2e-2)
