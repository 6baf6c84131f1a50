"""`sdpa` with a window, a softcap, sinks, key starts and key lengths: served by the kernel, or left to torch, alike."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from serve_on_cpu import TOLERANCE, tensors

from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.ops import plans
from tiledsched.ops import sdpa as serve

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
        ({"sinks": torch.zeros(3)}, r"sinks must be a floating-point tensor \[heads = 2\], got \(3,\)"),
        ({"sinks": torch.zeros(2, dtype=torch.int32)}, "sinks must be a floating-point tensor"),
        ({"key_lengths": torch.zeros(2)}, r"key_lengths must be an integer tensor \[batch = 1\], got \(2,\)"),
        ({"key_lengths": torch.zeros(1)}, "key_lengths must be an integer tensor"),
        ({"key_lengths": 5}, "key_lengths must be an integer tensor"),
        ({"key_starts": torch.zeros(1, dtype=torch.int64, device="meta")}, "key_starts must be on q's device"),
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
