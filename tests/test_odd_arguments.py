"""Arguments that are not what the functions like torch's take: each call is computed, or refused in words of this package."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flex_mods as mods

import tiledsched as ts
from tiledsched.core.errors import ProblemError, TiledschedError

HALF, EIGHT = torch.float16, torch.float8_e4m3fn


def ones(*shape, dtype=HALF, device="cpu"):
    return torch.ones(shape).to(dtype).to(device)


ROWS, HEADS = (6, 16), (2, 4, 8, 16)
ENDS, TABLE = torch.tensor([0, 8, 16], dtype=torch.int32), torch.arange(6, dtype=torch.int32).reshape(2, 3)
LENGTHS = torch.tensor([20, 40], dtype=torch.int32)
ATTENTION = [
    *({}, {"return_lse": True}, {"causal": True, "window": 3}, {"window": (2, 2)}, {"softcap": 3.0}, {"scale": 0.5}),
    *(
        {"sinks": ones(4)},
        {"key_lengths": LENGTHS // 10},
        {"attn_mask": ones(8, 8, dtype=torch.bool)},
        {"dropout_p": 0.1},
    ),
    *({"k_scale": 1.0, "v_scale": 1.0}, {"deterministic": True}),
]
CALLS = {
    "sdpa": ({"q": ones(*HEADS), "k": ones(*HEADS), "v": ones(*HEADS)}, ATTENTION),
    "sdpa_varlen": (
        {name: ones(16, 4, 16) for name in "qkv"} | {"cu_seqlens_q": ENDS, "max_seqlen_q": 8, "max_seqlen_k": 8},
        [{}, {"return_lse": True}, {"softcap": 2.0}],
    ),
    "sdpa_paged": (
        {"q": ones(2, 1, 4, 16), "k_cache": ones(6, 16, 4, 16), "v_cache": ones(6, 16, 4, 16)}
        | {"block_table": TABLE, "key_lengths": LENGTHS},
        [{}, {"return_lse": True}],
    ),
    "flex": (
        {name: ones(*HEADS) for name in "qkv"},
        [{"mask_mod": mods.causal}, {"mask_mod": mods.causal, "return_lse": True}],
    ),
    "softmax": ({"input": ones(*ROWS)}, [{}]),
    "rms_norm": (
        {"input": ones(*ROWS), "weight": ones(16), "eps": 1e-5},
        [{}, {"quantize": "row"}, {"residual": ones(*ROWS)}],
    ),
    "layer_norm": ({"input": ones(*ROWS), "weight": ones(16), "bias": ones(16), "eps": 1e-5}, [{}]),
    "swiglu": ({"gate": ones(*ROWS), "up": ones(*ROWS)}, [{}, {"quantize": "row"}]),
    "rope": (
        {"q": ones(*HEADS), "k": ones(*HEADS), "cos": ones(8, 8), "sin": ones(8, 8), "rotary_dim": 16},
        [{}, {"interleaved": True}, {"inplace": True}],
    ),
    "cross_entropy": (
        {"logits": ones(*ROWS), "labels": ones(6, dtype=torch.int64), "ignore_index": 3, "label_smoothing": 0.5},
        [{}, {"reduction": "none"}, {"return_lse": True}],
    ),
    "matmul": (
        {"input": ones(*ROWS), "other": ones(16, 8)},
        [{}, {"bias": ones(8)}, {"out_scale": torch.ones(())}, {"residual": ones(6, 8)}, {"gate": ones(16, 8)}],
    ),
    "scaled_matmul": (
        {"a": ones(6, 16, dtype=EIGHT), "b": ones(8, 16, dtype=EIGHT).t()}
        | {"scale_a": ones(6, 1, dtype=torch.float32), "scale_b": ones(1, 8, dtype=torch.float32)},
        [{}],
    ),
    "grouped_matmul": (
        {"a": ones(*ROWS), "b": ones(2, 16, 8), "offsets": torch.tensor([3, 6], dtype=torch.int32)},
        [{}, {"bias": ones(2, 8)}],
    ),
}
"""Function -> arguments that are right, and options beside them."""


def wrong(right):
    """What may stand in the place of an argument, by what is odd about it."""
    yield from (
        ("none", None),
        ("a list", [[1.0]]),
        ("a pair", (right, right)),
        ("text", "x"),
        ("a number", 3.0),
        ("an array", np.ones(3)),
    )
    if isinstance(right, torch.Tensor):
        shape, kind = tuple(right.shape), {"dtype": right.dtype}
        for axes in range(7):
            yield f"{axes} axes", ones(*((1,) * 6 + shape)[6 + len(shape) - axes :], **kind)
        for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16, EIGHT):
            yield str(dtype), right.to(dtype)
        yield from (("meta", right.to("meta")), ("strides of 0", ones(*(1,) * len(shape), **kind).expand(shape)))
        for place in range(len(shape)):
            for size in (0, shape[place] + 1):
                yield f"axis {place} of {size}", ones(*shape[:place], size, *shape[place + 1 :], **kind)
        if right.is_floating_point():
            yield "sparse", right.to(HALF).to_sparse()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fallback", ["torch", pytest.param("error", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_computed_or_refused_in_our_words(launches, name, fallback) -> None:
    """In the place of each argument, and of all that such an oddity can stand for."""
    right, options = CALLS[name]
    function, odd = getattr(ts, name), {each: dict(wrong(value)) for each, value in right.items()}
    cases = [{each: value} for each, kinds in odd.items() for value in kinds.values()]
    cases += [{each: kinds[what] for each, kinds in odd.items() if what in kinds} for what in next(iter(odd.values()))]
    with ts.configure(fallback=fallback):
        for option in options:
            for case in cases:
                with contextlib.suppress(TiledschedError):
                    function(**{**right, **option, **case})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ts.rms_norm(ones(6, 16), ones(16), "x"),
            r"argument 'eps'.*, of input = float16 \(6, 16\) on cpu, weight = ",
        ),
        (
            lambda: ts.rope(ones(*HEADS), ones(*HEADS), ones(), ones(8, 8)),
            r"IndexError.*cos = float16 \(\) on cpu.*help\(tiledsched.rope\)",
        ),
        (
            lambda: ts.sdpa(*[ones(*HEADS, dtype=torch.int32)] * 3),
            r"q must be a torch.Tensor, got int32 \(2, 4, 8, 16\) on cpu",
        ),
        (
            lambda: ts.sdpa(*[ones(*HEADS).to_sparse()] * 3),
            r"on cpu, torch.sparse_coo; attention takes dense floating-point",
        ),
        (
            lambda: ts.sdpa_paged(**CALLS["sdpa_paged"][0] | {"v_cache": ones(5, 16, 4, 16)}),
            "k and v of one first size",
        ),
        (
            lambda: ts.sdpa_varlen(**CALLS["sdpa_varlen"][0] | {"max_seqlen_q": "x"}),
            "must be whole numbers or None, got 'x'",
        ),
    ],
)
def test_what_was_wrong_is_told(launches, call, words) -> None:
    with pytest.raises(ProblemError, match=words):
        call()


def test_errors_of_the_call_itself_stay_pythons(launches) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        ts.rms_norm(ones(6, 16), ones(16), epsilon=1e-5)


OPTIONS = {name: option for option in ATTENTION[:6] for name in [" ".join(option) or "none"]} | {
    "sinks": {"sinks": ones(1)},
    "key_lengths": {"key_lengths": torch.tensor([5])},
    "attn_mask": {"attn_mask": torch.ones(8, 8).tril().bool()},
    "bottom right": {"causal": "bottom_right", "return_lse": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_attention_of_two_axes_is_that_of_one_head(launches, option, left_to_torch) -> None:
    q, k, v = (torch.randn(8, 16).half() for _ in range(3))
    found, whole = (
        ts.sdpa(q, k, v, **OPTIONS[option]),
        ts.sdpa(q[None, None], k[None, None], v[None, None], **OPTIONS[option]),
    )
    if isinstance(found, torch.Tensor):
        found, whole = [found], [whole]
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other[0, 0])


@pytest.mark.parametrize("option", ["none", "return_lse", "causal window", "softcap"])
def test_axes_that_differ_are_broadcast_as_torch_broadcasts(launches, option, left_to_torch) -> None:
    q, k, v = torch.randn(8, 16).half(), torch.randn(2, 4, 8, 16).half(), torch.randn(2, 4, 8, 16).half()
    found, whole = ts.sdpa(q, k, v, **OPTIONS[option]), ts.sdpa(q.expand(2, 4, 8, 16), k, v, **OPTIONS[option])
    for one, other in zip(
        *([each] if isinstance(each, torch.Tensor) else each for each in (found, whole)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


def test_autocast_takes_what_is_no_tensor_and_has_no_device_of_its_kind(launches) -> None:
    q = ones(*HEADS, dtype=torch.float32)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ProblemError, match=r"k must be a torch.Tensor, got ndarray"),
    ):
        ts.sdpa(q, q.numpy(), q)
    empty = [each.to("meta") for each in (q, q, q)]
    assert ts.flex(*empty, mask_mod=mods.causal).shape == q.shape


def test_every_function_like_torchs_is_tried() -> None:
    from tiledsched.ops import front

    public = {
        name for name in ts.__all__ if getattr(inspect.unwrap(getattr(ts, name)), "__module__", "").endswith(".front")
    }
    assert public - {"geglu"} <= CALLS.keys(), front.__name__
