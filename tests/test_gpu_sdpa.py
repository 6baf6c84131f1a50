"""`sdpa` on a real GPU: against torch's own tolerances, and under everything torch can put around an operator."""

from __future__ import annotations

import csv
import gc
import re
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("serve"),
]

from on_gpu import captured, replayed
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tiledsched import configure
from tiledsched.core.errors import LaunchError
from tiledsched.ops.varlen import sdpa_paged
from tiledsched.serve import process

# As in torch's test_transformers.py: the error of torch's math in the same dtype, times this, or the floor.
FUDGE = 1.5
FLOOR = {torch.float16: {"atol": 1e-3, "rtol": 1e-3}, torch.bfloat16: {"atol": 1e-3, "rtol": 1.6e-2}}


def tensors(batch=2, heads=4, kv_heads=None, rows=256, keys=None, columns=64, value_columns=None, dtype=torch.float16):
    generator = torch.Generator(device="cuda").manual_seed(rows * 31 + columns)
    kv = (batch, kv_heads or heads, keys or rows)
    shapes = ((batch, heads, rows, columns), (*kv, columns), (*kv, value_columns or columns))
    return tuple(torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)


def visible(q, k, causal):
    """Which keys each row sees; None where all."""
    rows, keys = q.shape[-2], k.shape[-2]
    diagonal = {"top_left": 0, True: 0, "bottom_right": keys - rows}.get(causal)
    return None if diagonal is None else torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(diagonal)


def math_attention(q, k, v, causal, scale=None):
    """softmax(scale * q @ k^T) @ v step by step in the dtype of q; rows that see nothing are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = visible(q, k, causal)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


def assert_right(out, q, k, v, causal=False, scale=None):
    golden = math_attention(q.double(), k.double(), v.double(), causal, scale)
    low = math_attention(q, k, v, causal, scale).double()
    floor = FLOOR[q.dtype]
    atol = max(floor["atol"], FUDGE * float((low - golden).abs().max()))
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), golden, atol=atol, rtol=floor["rtol"])


# Shapes


@pytest.mark.parametrize("columns", [8, 64, 96, 128, 203])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_odd_sizes(serve, columns, causal) -> None:
    for rows, keys in ((4, 143), (143, 579), (579, 127), (1, 127)):
        q, k, v = tensors(rows=rows, keys=keys, columns=columns)
        assert_right(serve.sdpa(q, k, v, causal=causal), q, k, v, causal)


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_the_log_sum_exp(serve, causal) -> None:
    q, k, v = tensors(rows=200, keys=130, heads=4, kv_heads=2)
    out, lse = serve.sdpa(q, k, v, causal=causal, return_lse=True)
    assert_right(out, q, k, v, causal)
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).mT / 8
    mask = visible(q, k, causal)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-3, rtol=1e-3)


def test_every_layout_is_read_where_it_lies(serve) -> None:
    batch, heads, rows, columns = 2, 4, 200, 64
    packed = torch.randn(batch, rows, 3, heads, columns, device="cuda", dtype=torch.float16)
    cache = torch.randn(2, batch, heads, 4 * rows, columns, device="cuda", dtype=torch.float16)
    single = torch.randn(batch, 1, rows, columns, device="cuda", dtype=torch.float16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    layouts = {
        "packed": (q, k, v),
        "cache": (q, cache[0, :, :, :333], cache[1, :, :, :333]),
        "expanded": (q, single.expand(-1, heads, -1, -1), single.expand(-1, heads, -1, -1)),
        "columns first": tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)),
        "unaligned": tuple(
            torch.randn(batch, heads, rows, columns + 1, device="cuda").half()[..., 1:] for _ in range(3)
        ),
    }
    for name, views in layouts.items():
        assert not all(x.is_contiguous() for x in views), name
        copies = tuple(x.contiguous() for x in views)
        for causal in (False, True):
            out = serve.sdpa(*views, causal=causal)
            assert_right(out, *copies, causal=causal)
    assert serve.sdpa(q, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kv_combine", ["last_block", "launch"])
def test_split_keys(serve, kv_combine) -> None:
    """The counters are zero again after each launch: the second and the third come out the same."""
    q, k, v = tensors(rows=5, keys=4096)
    with configure(kv_splits=4, kv_combine=kv_combine, tile_m=16, tile_n=64, tma_loads=False):
        first = serve.sdpa(q, k, v)
        assert serve.plan_for(q, k, v).served.schedule["kv_splits"] == 4
        assert_right(first, q, k, v)
        for _ in range(2):
            assert_right(serve.sdpa(q, k, v), q, k, v)
        graph, out = captured(lambda: serve.sdpa(q, k, v))
        for _ in range(2):
            out.zero_()
            graph.replay()
            assert_right(out, q, k, v)


# Around the operator


@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {"backend": "inductor"}, {"mode": "reduce-overhead"}])
def test_compiled_equals_eager(serve, options) -> None:
    compiled = torch.compile(lambda q, k, v: serve.sdpa(q, k, v, causal=True), fullgraph=True, **options)
    q, k, v = tensors(rows=192)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    eager = serve.sdpa(q, k, v, causal=True)
    for _ in range(4):  # warm up, record, replay
        out = compiled(q, k, v)
        assert torch.equal(out, eager)
        assert out.stride() == eager.stride()


def test_a_graph_reads_new_inputs_and_outlives_a_reload(serve) -> None:
    q, k, v = tensors(rows=512)
    serve.sdpa(q, k, v, causal=True)
    graph, out = captured(lambda: serve.sdpa(q, k, v, causal=True))
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    expected = serve.sdpa(q, k, v, causal=True).clone()
    serve.reload()
    gc.collect()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore")  # the graph stays empty
def test_a_program_that_never_ran_is_refused_in_a_capture(serve) -> None:
    q, k, v = tensors(rows=512)
    with configure(latency_k=7, latency_v=9):  # a program that no other test launches
        with pytest.raises(LaunchError, match="call sdpa once with these shapes"):
            captured(lambda: serve.sdpa(q, k, v))
        warm = serve.sdpa(q, k, v)  # nothing is broken, and the advice helps
        assert torch.equal(replayed(lambda: serve.sdpa(q, k, v)), warm)


def test_torch_serves_until_the_program_is_built(serve, monkeypatch, tmp_path, caplog) -> None:
    """In an empty cache folder. The first capture comes too early, and holds torch's; what warms up for one waits."""
    caplog.set_level("INFO", logger="tiledsched")
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "torch")
    serve.reload()
    with configure(compile="background", rivals="record"):
        q, k, v = tensors(rows=200)
        want = torch_sdpa(q, k, v)
        torch.testing.assert_close(serve.sdpa(q, k, v), want, atol=2e-3, rtol=2e-3)
        assert "compiling; torch serves until the program is built" in caplog.text
        torch.testing.assert_close(replayed(lambda: serve.sdpa(q, k, v)), want, atol=2e-3, rtol=2e-3)
        assert "a CUDA graph is being captured, which holds torch's" in caplog.text
        for build in list(process.runtime.builder.builds.values()):
            build.wait()
        torch.testing.assert_close(serve.sdpa(q, k, v), want, atol=2e-3, rtol=2e-3)
        assert "the program is built, and serves from now on" in caplog.text
        q, k, v = tensors(rows=200, columns=32)
        with torch.cuda.stream(torch.cuda.Stream()):
            serve.sdpa(q, k, v)  # waits
        torch.cuda.synchronize()
        assert caplog.text.count("compiling; torch serves") == 1


def test_it_runs_on_the_current_stream(serve) -> None:
    q, k, v = tensors(rows=512)
    want = serve.sdpa(q * 2, k, v)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # 50 ms: whoever does not wait for this stream reads zeros
        late.copy_(q * 2)
        out = serve.sdpa(late, k, v)
    stream.synchronize()
    assert torch.equal(out, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_it_runs_where_the_tensors_are(serve) -> None:
    q, k, v = tensors()
    want = serve.sdpa(q, k, v)
    there = [x.to("cuda:1") for x in (q, k, v)]
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        out = serve.sdpa(*there)
        assert out.device == torch.device("cuda:1")
        assert torch.equal(out.to("cuda:0"), want)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_torch_does(serve, dtype) -> None:
    q, k, v = tensors(dtype=torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        out, theirs = serve.sdpa(q, k, v, causal=True), torch_sdpa(q, k, v, is_causal=True)
        direct = torch.ops.tiledsched.sdpa(q, k, v, "top_left")
        compiled = torch.compile(lambda *x: serve.sdpa(*x, causal=True), fullgraph=True, backend="aot_eager")(q, k, v)
    assert out.dtype == theirs.dtype == dtype
    want = serve.sdpa(q.to(dtype), k.to(dtype), v.to(dtype), causal=True)
    assert torch.equal(out, want)
    assert torch.equal(direct, want)
    assert torch.equal(compiled, want)


def test_sync_lets_a_call_stand_alone(serve) -> None:
    q, k, v = tensors()
    want = serve.sdpa(q, k, v)
    with configure(sync=True):
        out = serve.sdpa(q, k, v)
        assert torch.cuda.current_stream().query()
        inside = replayed(lambda: serve.sdpa(q, k, v))  # where waiting is not allowed, it does not wait
    assert torch.equal(out, want)
    assert torch.equal(inside, want)


def test_host_costs_are_measured(tmp_path) -> None:
    from docs.studies import host_cost

    path = tmp_path / "host.csv"
    assert host_cost.main(["--rounds", "5", "--csv", str(path)]) == 0
    rows = {row["method"]: float(row["median_us"]) for row in csv.DictReader(path.open())}
    assert set(rows) == {
        "sdpa",
        "flex",
        "operator",
        "torch_auto",
        "torch_flash",
        "torch_cudnn",
        "launch",
        "graph_replay",
        "lookup",
    }
    assert 0 < rows["lookup"] < rows["graph_replay"] < rows["sdpa"]


def recipes() -> list[str]:
    text = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("recipe", recipes())
def test_recipes_run(serve, recipe) -> None:
    exec(recipe, dict(zip("qkv", tensors(rows=256), strict=True)))
    configure(fallback=None)


@pytest.mark.parametrize("way", ["data", "dlpack", "graph"])
def test_a_mask_rewritten_in_place_is_read_anew(serve, way) -> None:
    q, k, v = tensors()
    mask = torch.zeros(2, 1, 1, 256, device="cuda", dtype=q.dtype)
    source, places = torch.zeros_like(mask), torch.arange(256, device="cuda")
    mask.copy_(source)
    write = {
        "data": lambda: mask.data.copy_(source),
        "dlpack": lambda: torch.from_dlpack(mask).copy_(source),
        "graph": captured(lambda: mask.copy_(source))[0].replay,
    }[way]
    for length in (256, 100, 17, 200):
        source.copy_(torch.where(places < length, 0.0, -torch.inf))
        write()
        for _ in range(3):
            found = serve.sdpa(q, k, v, mask)
            torch.testing.assert_close(found, torch_sdpa(q, k, v, source), atol=4e-3, rtol=4e-3)


def test_a_pending_negation_counts(serve) -> None:
    q, k, v = tensors()
    for _ in range(4):
        torch.testing.assert_close(serve.sdpa(torch._neg_view(q), k, v), serve.sdpa(-q, k, v), rtol=0, atol=0)


def in_graph(call):
    """A function that replays a CUDA graph of `call`, and gives its output."""
    for _ in range(2):
        call()
    graph, out = captured(call)
    return lambda: (graph.replay(), out)[1]


WAYS = {
    "eager": lambda call: call,
    "graph": in_graph,
    "compiled": lambda call: torch.compile(call, fullgraph=True, mode="reduce-overhead"),
}


@pytest.mark.parametrize(("way", "rows"), [("eager", 1), ("eager", 300), ("graph", 24), ("graph", 1), ("compiled", 24)])
@pytest.mark.parametrize("hidden", ["starts", "lengths", "pages", "window over freed pages"])
def test_unwritten_slots_do_not_count(serve, way, rows, hidden) -> None:
    """Slots that no sequence uses may hold NaN, whatever the lengths of a later call are."""
    keys, page = 768, 16
    window = (200, 0) if hidden.startswith("window") else None
    q, k, v = tensors(batch=4, heads=8, kv_heads=2, rows=rows, keys=keys, columns=128)
    lengths = torch.tensor([768, 513, 500, 301], device="cuda", dtype=torch.int32)
    starts = torch.zeros_like(lengths)
    taken = torch.randperm(4 * keys // page, device="cuda").reshape(4, -1)
    table, pools, dense = taken.int(), [], [torch.empty_like(k), torch.empty_like(v)]
    for each in (k, v):
        laid = each.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)  # [batch * pages, kv_heads, page, columns]
        pools.append(torch.empty_like(laid).index_copy_(0, taken.flatten(), laid).transpose(1, 2).contiguous())
    whole = [each.clone() for each in pools]

    def call():
        if "pages" not in hidden:
            return serve.sdpa(q, *dense, causal=False, key_starts=starts, key_lengths=lengths)
        out = sdpa_paged(q.transpose(1, 2), pools[0], pools[1], table, lengths, causal=True, window=window)
        return out.transpose(1, 2)

    def unwritten(first, end):
        places = torch.arange(keys, device="cuda")
        used = (places >= first[:, None]) & (places < end[:, None])
        for own, each in zip(dense, (k, v), strict=True):
            own.copy_(each.masked_fill(~used[:, None, :, None], torch.nan))
        own_pages = torch.zeros(len(whole[0]), page, dtype=torch.bool, device="cuda")
        own_pages[taken.flatten()] = used.unflatten(1, (-1, page)).flatten(0, 1)
        for own, each in zip(pools, whole, strict=True):
            own.copy_(each.masked_fill(~own_pages[:, :, None, None], torch.nan))

    unwritten(starts, lengths)
    run = WAYS[way](call)
    for step in range(3):
        lengths.sub_(step)
        if hidden == "starts":
            starts.copy_(torch.tensor([0, 37 + step, 130, 300], device="cuda"))
        freed = (lengths - rows - 200).clamp(min=0) // page * page if window else starts
        unwritten(torch.maximum(freed, starts), lengths)
        places, row = torch.arange(keys, device="cuda"), torch.arange(rows, device="cuda")[:, None]
        seen = ((places >= starts[:, None]) & (places < lengths[:, None]))[:, None, None]
        if "pages" in hidden:
            own = (lengths - rows)[:, None, None, None] + row
            seen = seen & (places <= own) & ((places > own - 201) if window else True)
        want = torch_sdpa(q.float(), k.float(), v.float(), seen, enable_gqa=True)
        want = want.masked_fill(~seen.any(-1, keepdim=True), 0.0)
        torch.testing.assert_close(run().float(), want, atol=4e-3, rtol=4e-3)


def test_a_mask_of_cudagraph_trees_is_read_anew(serve) -> None:
    """A mask made in a compiled region lies in the tree's own memory, and is rewritten by each replay."""
    q, k, v = tensors()
    places, length = torch.arange(256, device="cuda"), torch.tensor([200], device="cuda")

    def masked(length):
        return torch.where(places < length, 0.0, -torch.inf).to(q.dtype).expand(2, 1, 1, 256)

    compiled = torch.compile(masked, fullgraph=True, mode="reduce-overhead")
    for value in (200, 200, 100, 17, 256, 200):
        length.fill_(value)
        torch.compiler.cudagraph_mark_step_begin()
        found = serve.sdpa(q, k, v, compiled(length))
        torch.testing.assert_close(found, torch_sdpa(q, k, v, masked(length)), atol=4e-3, rtol=4e-3)


# Keys and values in 8 bits


def in_eight_bits(each, dim):
    """Numbers in 8 bits, their scales over all axes but `dim`, and what both stand for, in float64."""
    axes = [axis for axis in range(4) if axis != dim]
    scale = each.float().abs().amax(axes, keepdim=True) / 448
    narrow = (each / scale).to(torch.float8_e4m3fn)
    return narrow, scale.flatten(), narrow.double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_keys_in_eight_bits(serve, columns, dtype) -> None:
    """Rows that decode, and prompts, over one key, a tile, one more, and many; in a CUDA graph, too."""
    for rows, keys, dim in ((1, 1, None), (1, 128, 1), (1, 129, 1), (3, 5000, None), (130, 131, 1)):
        q, k, v = tensors(heads=8, kv_heads=2, rows=rows, keys=keys, columns=columns, dtype=dtype)
        (k8, k_scale, exact_k), (v8, v_scale, exact_v) = in_eight_bits(k, dim), in_eight_bits(v, dim)
        want = math_attention(q.double(), exact_k, exact_v, "bottom_right")
        call = partial(serve.sdpa, q, k8, v8, causal="bottom_right", k_scale=k_scale, v_scale=v_scale)
        for out in (call(), replayed(call)):
            torch.testing.assert_close(out.double(), want, atol=2e-3 if dtype == torch.float16 else 1.6e-2, rtol=1.6e-2)
        if dim is None:
            numbers = {"k_scale": float(k_scale), "v_scale": float(v_scale)}
            assert torch.equal(replayed(partial(serve.sdpa, q, k8, v8, causal="bottom_right", **numbers)), out)


@pytest.mark.parametrize("columns", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("dim", [None, 1])
def test_queries_in_eight_bits(serve, columns, dim) -> None:
    """Values by rows, which are copied, and by columns; a tile of rows and keys, one more, and many; in a CUDA graph, too."""
    for rows, keys, causal in ((65, 16, False), (128, 128, True), (129, 144, "bottom_right"), (700, 5008, False)):
        q, k, v = tensors(heads=8, kv_heads=2, rows=rows, keys=keys, columns=columns, dtype=torch.bfloat16)
        (q8, q_scale, exact_q), (k8, k_scale, exact_k), (v8, v_scale, exact_v) = (
            in_eight_bits(each, which) for each, which in ((q, None), (k, dim), (v, dim))
        )
        want = math_attention(exact_q, exact_k, exact_v, causal)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "causal": causal}
        by_rows, by_columns = (partial(serve.sdpa, q8, k8, each, **scales) for each in (v8, v8.mT.contiguous().mT))
        assert serve.plan_for(q8, k8, v8, **scales).problem.q8
        for call in (by_rows, by_columns):
            for out in (call(), replayed(call)):
                assert out.dtype == torch.bfloat16
                assert (out.double() - want).norm() < 0.04 * want.norm()
        if not causal:
            scores = exact_q @ exact_k.repeat_interleave(4, dim=1).mT * columns**-0.5
            sums = by_columns(return_lse=True)[1]
            torch.testing.assert_close(sums.double(), scores.logsumexp(-1), atol=2e-2, rtol=0.0)


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("rows", [1025, 1279])
def test_long_prompts_in_eight_bits(serve, rows, causal) -> None:
    """Tiles of 128 rows serve: of whole tiles of keys, and of one that is cut off; a row more and one fewer than whole tiles."""
    for keys in (4112, 4224):
        q, k, v = tensors(heads=32, kv_heads=8, rows=rows, keys=keys, columns=128, dtype=torch.bfloat16)
        numbers = [in_eight_bits(each, 1 if each is not q else None) for each in (q, k, v)]
        (q8, k8, v8), (q_scale, k_scale, v_scale), exact = zip(*numbers, strict=True)
        call = partial(serve.sdpa, q8, k8, v8.mT.contiguous().mT, causal=causal)
        call = partial(call, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        assert serve.plan_for(*call.args, **call.keywords).served.schedule["tile_m"] == 128
        out = call()
        assert torch.equal(out, replayed(call))
        for sequence in range(2):
            q_one, k_one, v_one = (each[sequence : sequence + 1] for each in exact)
            want = math_attention(q_one, k_one, v_one, causal)
            assert (out[sequence].double() - want[0]).norm() < 0.04 * want.norm()


@pytest.mark.parametrize("page", [16, 48, 128, 512])
@pytest.mark.parametrize("dim", [None, 2, 0])
def test_pages_in_eight_bits(serve, page, dim) -> None:
    """Sequences without keys, of one key, and of all; pages that nobody reads hold NaN and scales of NaN."""
    pages, lengths = 3072 // page, torch.tensor([0, 1, page + 1, 3072, 700], dtype=torch.int32, device="cuda")
    q, k, v = tensors(batch=5, heads=8, kv_heads=2, rows=1, keys=3072, columns=128, dtype=torch.bfloat16)
    table = torch.randperm(5 * pages, device="cuda").view(5, pages).to(torch.int32)
    pools, scales, dense = [], [], []
    for each in (k, v):
        cut = each.unflatten(2, (pages, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        narrow, scale, exact = in_eight_bits(cut, dim)
        dense.append(exact.unflatten(0, (5, pages)).flatten(1, 2).transpose(1, 2))
        pool = torch.full_like(narrow.view(torch.uint8), 0x7F)
        of = torch.full((len(cut),), torch.nan, device="cuda") if dim == 0 else scale
        for sequence, length in enumerate(lengths.tolist()):
            used = -(-length // page)
            own = slice(sequence * pages, sequence * pages + used)
            pool[table[sequence, :used].long()] = narrow.view(torch.uint8)[own]
            if dim == 0:
                of[table[sequence, :used].long()] = scale[own]
        pools.append(pool.view(torch.float8_e4m3fn))
        scales.append(of)
    want = torch.zeros(5, 8, 1, 128, dtype=torch.float64, device="cuda")
    for sequence, length in enumerate(lengths.tolist()):
        keys, values = (each[sequence : sequence + 1, :, :length] for each in dense)
        if length:
            want[sequence] = math_attention(q[sequence : sequence + 1].double(), keys, values, False)[0]
    call = partial(sdpa_paged, q.transpose(1, 2), *pools, table, lengths, k_scale=scales[0], v_scale=scales[1])
    for out in (call(), replayed(call)):
        torch.testing.assert_close(out.transpose(1, 2).double(), want, atol=1.6e-2, rtol=1.6e-2)
