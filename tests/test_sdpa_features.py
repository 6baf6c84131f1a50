"""`sdpa` with a window, a softcap, sinks, key starts and key lengths, `sdpa_varlen` and `sdpa_paged`: served by the kernel, or left
to torch, alike."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import served_entries
from serve_on_cpu import TOLERANCE, tensors

from tiledsched import configure
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.kernels.attention import Attention
from tiledsched.ops import plans, sdpa as serve
from tiledsched.ops.plans import AttentionCall
from tiledsched.ops.varlen import sdpa_paged, sdpa_varlen
from tiledsched.serve import plan as serve_plan, process
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable

pytestmark = pytest.mark.usefixtures("fresh")

SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])
STARTS, LENGTHS = torch.tensor([3, 0, 40]), torch.tensor([40, 20, 40])
ASKED = [
    {"window": 7, "causal": True},
    {"window": 1, "causal": "bottom_right"},
    {"window": 30, "causal": "bottom_right"},
    {"window": (6, 5)},
    {"window": (-1, 3)},
    {"window": [4, None], "sinks": SINKS},
    {"window": (5, 9), "causal": True},
    {"window": (2, 0), "key_starts": STARTS},
    {"softcap": 2.0},
    {"softcap": 5, "causal": True},
    {"sinks": SINKS},
    {"sinks": SINKS.half(), "causal": True},
    {"key_lengths": LENGTHS},
    {"key_starts": STARTS.int()},
    {"key_starts": STARTS, "key_lengths": LENGTHS.to(torch.int16)},
    {
        "key_starts": STARTS,
        "key_lengths": LENGTHS,
        "causal": "bottom_right",
        "window": 9,
        "softcap": 3.0,
        "sinks": SINKS,
    },
]


def exact(
    q,
    k,
    v,
    *,
    causal=False,
    window=0,
    softcap=0.0,
    sinks=None,
    key_starts=None,
    key_lengths=None,
    scale=None,
    mask=None,
):
    """The output and the log-sum-exp in float64, one row after the other."""
    (batch, heads, rows, columns), keys = q.shape, k.shape[2]
    k, v = (each.double().repeat_interleave(heads // k.shape[1], 1) for each in (k, v))
    out, lse = torch.zeros(batch, heads, rows, v.shape[3], dtype=torch.float64), torch.zeros(batch, heads, rows)
    for b in range(batch):
        for i in range(rows):
            last = i + (keys - rows if causal == "bottom_right" else 0) if causal else keys - 1
            first = max(last - window + 1, 0) if isinstance(window, int) and window else 0
            if isinstance(
                window, (tuple, list)
            ):  # FlashAttention's, aligned at the bottom right unless causal says otherwise
                own = last if causal else i + keys - rows
                before, after = (keys if each in (-1, None) else each for each in window)
                first, last = max(own - before, 0), min(own + (0 if causal else after), keys - 1)
            first = max(first, 0 if key_starts is None else int(key_starts[b]))
            end = min(last + 1, keys if key_lengths is None else int(key_lengths[b]))
            seen = [j for j in range(first, end) if mask is None or mask[i, j]]
            for h in range(heads):
                score = k[b, h, seen] @ q[b, h, i].double() * (columns**-0.5 if scale is None else scale)
                score = softcap * torch.tanh(score / softcap) if softcap else score
                total = score if sinks is None else torch.cat([score, sinks[h : h + 1].double()])
                lse[b, h, i] = torch.logsumexp(total, 0) if len(total) else -math.inf
                out[b, h, i] = torch.exp(score - lse[b, h, i]) @ v[b, h, seen] if seen else 0.0
    return out, lse


def agree(found, wanted):
    torch.testing.assert_close(found.double(), wanted.double(), **TOLERANCE[torch.float16])


def unwritten(keys_or_values, asked):
    """With NaN in the slots that `key_starts` and `key_lengths` hide: serving engines leave them unwritten."""
    places = torch.arange(keys_or_values.shape[2])
    used = (places >= asked.get("key_starts", torch.zeros(3))[:, None]) & (
        places < asked.get("key_lengths", torch.full((3,), len(places)))[:, None]
    )
    return keys_or_values.detach().masked_fill(~used[:, None, :, None], math.nan)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_it_is_served(launches, asked) -> None:
    q, k, v = tensors(batch=3, heads=4, kv_heads=2, rows=24, keys=40, value_columns=32)
    wanted, wanted_lse = exact(q, k, v, **asked)
    k, v = unwritten(k, asked), unwritten(v, asked)
    agree(serve.sdpa(q, k, v, **asked), wanted)
    out, lse = serve.sdpa(q, k, v, **asked, return_lse=True, scale=16**-0.5)
    agree(out, wanted)
    agree(lse, wanted_lse)
    agree(serve.sdpa(q, k, v, **asked), wanted)
    assert len(launches) == 3


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_torch_is_told_the_same(launches, left_to_torch, asked) -> None:
    """What is left to torch means the same, and is differentiable."""
    given = [each.float().requires_grad_() for each in tensors(batch=3, heads=4, kv_heads=2, rows=24, keys=40)]
    wanted, wanted_lse = exact(*given, **asked)
    ours_given = [given[0], *(unwritten(each, asked).requires_grad_() for each in given[1:])]
    out, lse = serve.sdpa(*ours_given, **asked, return_lse=True)
    agree(out, wanted)
    agree(lse, wanted_lse)
    found = torch.autograd.grad(out.sum(), ours_given)
    for ours, theirs in zip(found, torch.autograd.grad(wanted.sum(), given), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert launches == []


def test_mask_tensors_and_their_gradients_of_sinks_are_torchs(launches, left_to_torch) -> None:
    mask = torch.ones(24, 40, dtype=torch.bool).tril(3)
    q, k, v = tensors(batch=3, heads=4, rows=24, keys=40)
    sinks = SINKS.clone().requires_grad_()
    more = {"sinks": sinks, "softcap": 4.0, "key_lengths": LENGTHS}
    out = serve.sdpa(q, k, v, mask, **more)
    agree(out, exact(q, k, v, mask=mask, **more)[0])
    out.sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.any()
    assert launches == []
    added = torch.zeros(24, 40).masked_fill(~mask, -math.inf)
    agree(serve.sdpa(q, k, v, added, **more), out)


def test_values_vary_without_another_plan(launches) -> None:
    """Sinks, starts and lengths are read at each launch."""
    q, k, v = tensors(batch=3, heads=4, rows=24, keys=40)
    for lengths in (LENGTHS, torch.tensor([0, 1, 99]), torch.tensor([-3, 40, 17])):
        agree(serve.sdpa(q, k, v, key_lengths=lengths), exact(q, k, v, key_lengths=lengths.clamp(0, 40))[0])
    assert len({id(each[2]) for each in launches}) == 1
    assert len(plans.cache.plans) == 1


def test_lengths_and_sinks_are_read_where_they_lie(launches) -> None:
    q, k, v = tensors(batch=3, heads=4, rows=24, keys=40)
    lengths, sinks = torch.stack([LENGTHS, LENGTHS + 9], 1)[:, 0], torch.stack([SINKS, SINKS + 9], 1)[:, 0]
    more = {"key_lengths": lengths, "sinks": sinks}
    agree(serve.sdpa(q, k, v, **more), exact(q, k, v, **more)[0])


def test_a_window_that_hides_nothing_needs_no_other_kernel(launches) -> None:
    q, k, v = tensors(rows=24)
    assert torch.equal(serve.sdpa(q, k, v, causal=True, window=24), serve.sdpa(q, k, v, causal=True))
    assert torch.equal(serve.sdpa(q, k, v, window=(-1, -1)), serve.sdpa(q, k, v))
    assert torch.equal(serve.sdpa(q, k, v, window=(-1, 0)), serve.sdpa(q, k, v, causal="bottom_right"))
    assert torch.equal(serve.sdpa(q, k, v, window=(99, 99)), serve.sdpa(q, k, v))
    assert launches[0][2] is launches[1][2]


def test_three_axes_have_a_batch_of_one(launches) -> None:
    q, k, v = tensors(heads=4, rows=24, keys=40)
    more = {"sinks": SINKS, "key_lengths": LENGTHS[:1] - 7, "window": (9, 2)}
    agree(serve.sdpa(q[0], k[0], v[0], **more), exact(q, k, v, **more)[0][0])
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"window": 4}, "window = 4 needs causal = True or 'bottom_right'"),
        ({"window": 0, "causal": True}, "window must be a positive integer"),
        ({"window": (1, 2, 3)}, "or a pair of keys before and after a row's own"),
        ({"window": (1.5, 2)}, "or a pair of keys before and after a row's own"),
        ({"window": (-2, 2)}, "or a pair of keys before and after a row's own"),
        ({"window": True, "causal": True}, "window must be a positive integer"),
        ({"window": 2.5, "causal": True}, "window must be a positive integer"),
        ({"softcap": -1.0}, "softcap must be a positive number"),
        ({"softcap": math.nan}, "softcap must be a positive number"),
        ({"softcap": "50"}, "softcap must be a positive number"),
        ({"sinks": [1.0, 2.0]}, "sinks must be a floating-point tensor"),
        (
            {"sinks": torch.zeros(3)},
            r"sinks must be a floating-point tensor \[heads = 2\] on q.s device, cpu, got float32 \(3,\) on cpu",
        ),
        ({"sinks": torch.zeros(2, dtype=torch.int32)}, "sinks must be a floating-point tensor"),
        (
            {"key_lengths": torch.zeros(2)},
            r"key_lengths must be an integer tensor \[batch = 1\] on q.s device, cpu, got float32 \(2,\) on cpu",
        ),
        ({"key_lengths": torch.zeros(1)}, "key_lengths must be an integer tensor"),
        ({"key_lengths": 5}, "key_lengths must be an integer tensor"),
        (
            {"key_starts": torch.zeros(1, dtype=torch.int64, device="meta")},
            "key_starts must be an integer tensor .* on q's device, cpu, got int64 .* on meta",
        ),
    ],
)
def test_bad_values_are_refused(launches, given, words) -> None:
    with pytest.raises(ProblemError, match=words):
        serve.sdpa(*tensors(), **given)
    assert launches == []


def test_a_cap_beyond_float32_is_torchs(launches, left_to_torch) -> None:
    q, k, v = tensors()
    agree(serve.sdpa(q, k, v, softcap=1e6), exact(q, k, v, softcap=1e6)[0])
    assert launches == []


def test_nested_tensors_are_refused(launches) -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with pytest.raises(UnsupportedError, match="of nested tensors are not served"):
        serve.sdpa(nested, nested, nested, softcap=3.0)


# Packed sequences and pages


ROWS, KEYS = torch.tensor([0, 9, 9, 10, 40]), torch.tensor([0, 4, 37, 37, 67])
"""Of four sequences: a few rows of fewer keys; no rows; a row that has no keys; as many of both."""
PACKED_ASKED = [
    {},
    {"causal": True},
    {"causal": "top_left"},
    {"causal": True, "window": 7, "sinks": SINKS},
    {"softcap": 2.0, "scale": 0.3},
    {"window": (8, 4)},
]


def packed_tensors(dtype=torch.float16, total_q=40, total_k=67):
    generator = torch.Generator().manual_seed(7)
    shapes = ((total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 32))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def one_by_one(q, k, v, rows, keys, *, causal=False, **more):
    """Each sequence by itself, in float64."""
    causal = "bottom_right" if causal is True else causal
    outs, lses = [], []
    for begin, end, first, last in zip(rows, rows[1:], keys, keys[1:], strict=False):
        parts = (q[begin:end], k[first:last], v[first:last])
        out, lse = exact(*(each.transpose(0, 1)[None] for each in parts), causal=causal, **more)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def pages_of(lengths, page, *, most, seed=3, dtype=torch.float16):
    """Pools of pages in disorder, NaN where no sequence has keys; the table, and keys and values laid side by side."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths) * most + 3
    k = torch.randn((count, page, 2, 16), generator=generator).to(dtype)
    v = torch.randn((count, page, 2, 32), generator=generator).to(dtype)
    table = torch.randperm(count, generator=generator)[: len(lengths) * most].reshape(len(lengths), most)
    dense = [[pool[table[b]].flatten(0, 1)[:length] for pool in (k, v)] for b, length in enumerate(lengths)]
    used = torch.zeros(count, page, dtype=torch.bool)
    for b, length in enumerate(lengths):
        places = torch.arange(length)
        used[table[b, places // page], places % page] = True
    k, v = (each.masked_fill(~used[:, :, None, None], math.nan) for each in (k, v))
    wild = table.clone()
    for b, length in enumerate(lengths):  # what no sequence has keys for may be anything
        wild[b, -(-length // page) :] = torch.tensor([-1, 10**6])[b % 2]
    return k, v, wild.int(), dense


@pytest.mark.parametrize("asked", PACKED_ASKED, ids=str)
def test_packed_sequences_are_served(launches, asked) -> None:
    q, k, v = packed_tensors()
    wanted, wanted_lse = one_by_one(q, k, v, ROWS, KEYS, **asked)
    out = sdpa_varlen(q, k, v, ROWS.int(), KEYS.int(), 30, 33, **asked)
    assert out.shape == (40, 4, 32)
    assert out.is_contiguous()
    agree(out, wanted)
    out, lse = sdpa_varlen(q, k, v, ROWS, KEYS, return_lse=True, **asked)
    agree(out, wanted)
    agree(lse, wanted_lse)
    assert len(launches) == 2


@pytest.mark.parametrize(
    ("asked", "longest", "masked"),
    [
        ({"causal": True}, (1, 33), False),
        ({"causal": True, "window": 40}, (1, 33), False),
        ({"window": (40, 0)}, (1, None), True),  # which of the keys are too many for the window is not known
        ({"causal": True, "window": 8}, (1, 33), True),
        ({"causal": True}, (None, None), True),
    ],
    ids=str,
)
def test_a_mask_that_hides_nothing_of_sequences_as_long_as_is_said_is_none(launches, asked, longest, masked) -> None:
    q, k, v = packed_tensors(total_q=4)
    rows = torch.arange(5)
    wanted, _ = one_by_one(q, k, v, rows, KEYS, **asked)
    agree(sdpa_varlen(q, k, v, rows.int(), KEYS.int(), *longest, **asked), wanted)
    (plan,) = plans.cache.plans.values()
    assert plan.problem.causal is masked


@pytest.mark.parametrize("given", [(30, 33), (None, None)])
@pytest.mark.parametrize("asked", PACKED_ASKED, ids=str)
def test_torch_is_told_the_same_of_packed_sequences(launches, left_to_torch, asked, given) -> None:
    tensors = [each.requires_grad_() for each in packed_tensors(torch.float32)]
    wanted, wanted_lse = one_by_one(*tensors, ROWS, KEYS, **asked)
    out, lse = sdpa_varlen(*tensors, ROWS.int(), KEYS.int(), *given, return_lse=True, **asked)
    agree(out, wanted)
    agree(lse, wanted_lse)
    found = torch.autograd.grad(out.sum(), tensors)
    for ours, theirs in zip(found, torch.autograd.grad(wanted.sum(), tensors), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert launches == []


def test_one_plan_for_all_lengths(launches) -> None:
    """Where sequences begin is read at each launch; parts of one array are read where they lie."""
    qkv = torch.randn(50, 3, 4, 16, generator=torch.Generator().manual_seed(1)).half()
    q, k, v = qkv.unbind(1)
    for lengths in ([50, 0, 0], [1, 48, 1], [17, 16, 17]):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        agree(sdpa_varlen(q, k, v, offsets, causal=True), one_by_one(q, k, v, offsets, offsets, causal=True)[0])
    assert len(plans.cache.plans) == 1
    assert launches[0][3][0].data_ptr() == q.data_ptr()


@pytest.mark.parametrize("page", [16, 48, 64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "asked", [{}, {"causal": False, "window": (20, 1)}, {"window": 20, "sinks": SINKS, "softcap": 3.0}], ids=str
)
def test_pages_are_served(launches, quiet, page, rows, asked) -> None:
    lengths = [100, 0, 64, 1]
    q = torch.randn(4, rows, 4, 16, generator=torch.Generator().manual_seed(2)).half()
    k, v, table, dense = pages_of(lengths, page, most=7)
    out, lse = sdpa_paged(q, k, v, table, torch.tensor(lengths).int(), return_lse=True, **asked)
    more = {"causal": True} | asked
    for b, (keys, values) in enumerate(dense):
        both = one_by_one(q[b], keys, values, [0, rows], [0, lengths[b]], **more)
        agree(out[b], both[0])
        agree(lse[b], both[1])
    with configure(fallback="torch"), torch.enable_grad():
        again = sdpa_paged(q.float().requires_grad_(), k.float(), v.float(), table, torch.tensor(lengths), **asked)
    agree(again, out)
    assert len(launches) == 1


def test_packed_rows_over_pages_are_served(launches, quiet) -> None:
    """What vLLM asks for: prompts in chunks and single tokens at once, each over its own pages."""
    lengths, rows = [100, 33, 7], torch.tensor([0, 40, 41, 48])
    q = torch.randn(48, 4, 16, generator=torch.Generator().manual_seed(2)).half()
    k, v, table, dense = pages_of(lengths, 16, most=7)
    call = {"causal": True, "block_table": table, "seqused_k": torch.tensor(lengths).int(), "return_lse": True}
    out, lse = sdpa_varlen(q, k, v, rows.int(), None, 40, 100, **call)
    for b, (keys, values) in enumerate(dense):
        own = slice(int(rows[b]), int(rows[b + 1]))
        both = one_by_one(q[own], keys, values, [0, own.stop - own.start], [0, lengths[b]], causal=True)
        agree(out[own], both[0])
        agree(lse[:, own], both[1])
    assert len(launches) == 1
    with configure(fallback="torch"):
        float_call = sdpa_varlen(q.float(), k.float(), v.float(), rows.int(), None, **call)
    agree(float_call[0], out)


def test_what_the_kernel_lacks_is_torchs(launches, left_to_torch) -> None:
    q, k, v = packed_tensors()
    none = torch.zeros(5, dtype=torch.int32)
    out, lse = sdpa_varlen(q, k[:0], v[:0], ROWS.int(), none, return_lse=True, sinks=SINKS)
    assert not out.any()
    agree(lse, SINKS[:, None].expand(4, 40))
    k, v, table, dense = pages_of([20, 9], 10, most=2)
    queries = torch.randn(2, 1, 4, 16).half()
    out = sdpa_paged(queries, k, v, table, torch.tensor([20, 9]))
    for b, (keys, values) in enumerate(dense):
        agree(out[b], one_by_one(queries[b], keys, values, [0, 1], [0, len(keys)])[0])
    assert launches == []
    with configure(fallback="error"), pytest.raises(UnsupportedError, match="page must be a multiple of 16"):
        sdpa_paged(queries, k, v, table, torch.tensor([20, 9]))


BAD = [
    ({"cu_seqlens_q": None}, r"cu_seqlens_q must be an integer tensor \[sequences \+ 1\] .*, got NoneType"),
    ({"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}, "so two numbers at least; got one"),
    ({"cu_seqlens_q": torch.zeros(5)}, "cu_seqlens_q must be an integer tensor"),
    (
        {"cu_seqlens_k": KEYS[:4]},
        r"cu_seqlens_k must be an integer tensor \[4 sequences \+ 1\] .*, got int64 \(4,\) on cpu",
    ),
    (
        {"cu_seqlens_k": KEYS.to("meta")},
        "cu_seqlens_k must be an integer tensor .* on q's device, cpu, got int64 .* on meta",
    ),
    ({"causal": 2}, "causal = 2; allowed are"),
    ({"window": 3}, "window = 3 needs causal"),
    ({"seqused_k": KEYS}, "give block_table, too"),
    ({"block_table": torch.zeros(4, 2).int()}, r"k must be a tensor \[batch or pages, rows, heads, columns\]"),
    ({"q": torch.zeros(1, 40, 4, 16).half()}, r"q must be a tensor \[rows of all, heads, columns\]"),
    ({"sinks": SINKS[:2]}, r"sinks must be a floating-point tensor \[heads = 4\]"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_values_of_packed_sequences_are_refused(launches, given, words) -> None:
    q, k, v = packed_tensors()
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": ROWS, "cu_seqlens_k": KEYS} | given
    with pytest.raises(ProblemError, match=words):
        sdpa_varlen(**call)
    assert launches == []


def test_bad_pages_are_refused(launches) -> None:
    q = torch.randn(2, 1, 4, 16).half()
    k, v, table, _ = pages_of([20, 9], 16, most=2)
    lengths = torch.tensor([20, 9])
    for arguments, words in (
        (
            (table[:1], lengths),
            r"block_table must be an integer tensor \[2 sequences, pages\] .*, got int32 \(1, 2\) on cpu",
        ),
        ((table.float(), lengths), "block_table must be an integer tensor"),
        ((table, lengths[:1]), r"key_lengths must be an integer tensor \[2 sequences\]"),
        ((table, lengths.half()), "key_lengths must be an integer tensor"),
    ):
        with pytest.raises(ProblemError, match=words):
            sdpa_paged(q, k, v, *arguments)
    with pytest.raises(ProblemError, match="both given"):
        sdpa_varlen(q[:, 0], k, v, ROWS[:3], ROWS[:3], block_table=table, seqused_k=lengths)


@pytest.mark.parametrize("gradients", [False, True])
def test_compiled_whole_it_is_the_same(launches, quiet, gradients) -> None:
    q, k, v = (each.requires_grad_(gradients) for each in packed_tensors())

    def call(q, k, v, rows, keys):
        return sdpa_varlen(q, k, v, rows, keys, 30, 33, causal=True, window=9, sinks=SINKS)

    torch._dynamo.reset()
    with configure(fallback="torch" if gradients else "error"):
        serve.reload()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        rows, keys = ROWS.int(), KEYS.int()
        agree(compiled(q, k, v, rows, keys), call(q, k, v, rows, keys))
        if gradients:
            compiled(q, k, v, rows, keys).sum().backward()
            assert math.isfinite(float(q.grad.abs().sum()))


def test_a_pool_of_pages_beyond_32_bits_is_indexed_with_64(launches, monkeypatch) -> None:
    """A pool has more pages than a call reads, and so more elements than its problem says."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 2, 16, generator=generator).half()
    pool = torch.randn(40, 16, 2, 16, generator=generator).half()
    table, lengths = torch.tensor([[39, 3], [0, 38]], dtype=torch.int32), torch.tensor([20, 32], dtype=torch.int32)
    wanted = sdpa_paged(q, pool, pool, table, lengths)
    process.forget_plans()
    monkeypatch.setattr(serve_plan, "LARGEST_INT32", pool[:39].numel())
    torch.testing.assert_close(sdpa_paged(q, pool, pool, table, lengths), wanted, rtol=0, atol=0)
    assert [kernel._pyfunc.__name__ for _, _, kernel, _ in launches] == ["attention_varlen", "attention_varlen_wide"]


def test_what_was_measured_with_32_bits_is_not_called_measured_with_64(monkeypatch) -> None:
    q = torch.zeros(2, 2, 64, 16, dtype=torch.float16)
    far = torch.zeros(2, 2, 200, 16, dtype=torch.float16)[:, :, :64]
    near, apart = (AttentionCall(q, k, k, None, None, False).problem for k in (q, far))
    table = LookupTable([served_entries.entry(near(), "measured")], Attention)
    monkeypatch.setattr(serve_plan, "LARGEST_INT32", q.numel())
    usual, wide = (explain_problem(table, make(), "sm_90", "NVIDIA H200") for make in (near, apart))
    assert (usual.served.provenance, "wide form" in str(usual)) == ("measured", False)
    assert (wide.served.provenance, "not in its wide form" in str(wide)) == ("transferred", True)
    assert wide.served.schedule == usual.served.schedule
