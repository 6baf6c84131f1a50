"""Masks that hide padding at the ends of keys: what is read from them, and that it is what torch makes of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as functional
from serve_on_cpu import capturing, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tiledsched import configure, sdpa
from tiledsched.core.errors import UnsupportedError
from tiledsched.ops.integrations import diffusers
from tiledsched.ops.padding import HIDDEN, hidden_ends

CLOSE = {"atol": 4e-3, "rtol": 4e-3}
Q, K = torch.zeros(3, 2, 5, 8), torch.zeros(3, 2, 7, 8)
LEFT_AND_RIGHT = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1] * 7], dtype=torch.bool)


def added(seen: torch.Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.where(seen, 0.0, hidden).to(dtype)


@pytest.mark.parametrize(
    "mask",
    [
        LEFT_AND_RIGHT,
        LEFT_AND_RIGHT[:, None, None],
        added(LEFT_AND_RIGHT, -torch.inf)[:, None, None],
        added(LEFT_AND_RIGHT, HIDDEN)[:, None, None],
        added(LEFT_AND_RIGHT, -65504.0, torch.float16),
        added(LEFT_AND_RIGHT, torch.finfo(torch.bfloat16).min, torch.bfloat16)[:, None, None],
    ],
    ids=lambda mask: f"{mask.dtype} {mask.ndim}",
)
def test_where_keys_start_and_end(mask) -> None:
    starts, lengths = hidden_ends(mask, Q, K)
    assert (starts.tolist(), lengths.tolist()) == ([1, 0, 0], [7, 3, 7])
    assert starts.dtype == lengths.dtype == torch.int32


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 0, 1, 1, 1, 1, 1]] * 3, dtype=torch.bool),
        torch.tensor([[0] * 7] + [[1] * 7] * 2, dtype=torch.bool),
        added(LEFT_AND_RIGHT, -100.0),
        torch.where(LEFT_AND_RIGHT, 1.0, -torch.inf),
        torch.zeros(3, 7, dtype=torch.int64),
        torch.ones(2, 7, dtype=torch.bool),
        torch.ones(3, 1, 5, 7, dtype=torch.bool),
        torch.ones(3, 2, 1, 7, dtype=torch.bool),
        torch.full((3, 7), torch.nan),
        torch.zeros(3, 7, requires_grad=True),
    ],
    ids=[
        "a hole",
        "nothing seen",
        "a bias",
        "scores raised",
        "integers",
        "another batch",
        "rows",
        "heads",
        "nan",
        "gradients",
    ],
)
def test_what_says_more_is_left_alone(mask) -> None:
    assert hidden_ends(mask, Q, K) is None


def test_one_mask_for_all_sequences() -> None:
    starts, lengths = hidden_ends(LEFT_AND_RIGHT[1:2, None, None], Q, K)
    assert starts is None
    assert lengths.tolist() == [3, 3, 3]
    assert hidden_ends(torch.ones(1, 1, 1, 7), Q, K) is None  # a bias of one
    assert hidden_ends(torch.zeros(1, 1, 1, 7), Q, K) == (None, None)


def _by_data(mask, new):
    mask.data.copy_(new)


def _by_numpy(mask, new):
    mask.numpy()[...] = new.numpy()


def _by_dlpack(mask, new):
    torch.from_dlpack(mask).copy_(new)


def _in_inference_mode(mask, new):
    with torch.inference_mode():
        mask.copy_(new)


@pytest.mark.parametrize("write", [_by_data, _by_numpy, _by_dlpack, _in_inference_mode, torch.Tensor.copy_])
@pytest.mark.parametrize("fallback", ["torch", "error"])
def test_a_mask_rewritten_in_place_is_read_anew(write, fallback, launches, quiet) -> None:
    """Whatever writes to its memory, whether or not torch counts a new version."""
    q, k, v = tensors(batch=3, rows=5, keys=7)
    mask = torch.zeros(3, 1, 1, 7)
    holes = torch.tensor([[1, 0, 1, 1, 1, 1, 1]] * 3, dtype=torch.bool)
    with configure(fallback=fallback, masks="torch"):
        for seen in (LEFT_AND_RIGHT, LEFT_AND_RIGHT.flip(0, 1), LEFT_AND_RIGHT.flip(0), holes, LEFT_AND_RIGHT):
            write(mask, added(seen, -torch.inf)[:, None, None])
            for _ in range(3):
                if seen is holes and fallback == "error":
                    with pytest.raises(UnsupportedError, match="a mask tensor is given"):
                        sdpa(q, k, v, mask.half())
                    continue
                wanted = functional.scaled_dot_product_attention(q, k, v, seen[:, None, None])
                torch.testing.assert_close(sdpa(q, k, v, mask if seen is not holes else mask.half()), wanted, **CLOSE)
    assert launches


def test_a_mask_is_left_to_torch_while_a_graph_is_captured(launches, quiet) -> None:
    q, k = torch.randn(3, 2, 5, 16).half(), torch.randn(3, 2, 7, 16).half()
    mask = LEFT_AND_RIGHT[:, None, None]
    sdpa(q, k, k, mask)
    launches.clear()
    with capturing():
        assert hidden_ends(mask, q, k) is None
        with configure(fallback="torch"):
            wanted = functional.scaled_dot_product_attention(q, k, k, mask)
            torch.testing.assert_close(sdpa(q, k, k, mask), wanted, **CLOSE)
    assert not launches


def test_in_transforms_and_modes_a_mask_has_no_memory_to_know_it_by(quiet) -> None:
    q, k = torch.randn(2, *Q.shape), torch.randn(2, *K.shape)
    masks = torch.stack([LEFT_AND_RIGHT, LEFT_AND_RIGHT.flip(0)])[:, :, None, None]
    seen = torch.vmap(lambda q, k, mask: sdpa(q, k, k, mask))(q, k, masks)
    for each in range(2):
        wanted = functional.scaled_dot_product_attention(q[each], k[each], k[each], masks[each])
        torch.testing.assert_close(seen[each], wanted)
    torch.vmap(lambda mask: q.sum() * 0 if hidden_ends(mask, Q, K) is None else pytest.fail("read"))(masks)
    with FakeTensorMode():
        assert hidden_ends(torch.ones(3, 7, dtype=torch.bool), torch.empty(Q.shape), torch.empty(K.shape)) is None


def test_a_mask_that_is_more_than_its_memory_is_left_alone() -> None:
    mask = torch.zeros(3, 7)
    for each in (torch._neg_view(mask), torch._efficientzerotensor((3, 7)), torch._to_functional_tensor(mask)):
        assert hidden_ends(each, Q, K) is None
    with forward_ad.dual_level():
        assert hidden_ends(forward_ad.make_dual(mask, mask), Q, K) is None
    with torch.inference_mode():
        assert hidden_ends(torch.zeros(3, 7), Q, K) == (None, None)


def test_diffusers_serves_it_at_once(launches) -> None:
    q, k, v = (each.transpose(1, 2) for each in tensors(batch=3, rows=5, keys=7))
    for mask in (LEFT_AND_RIGHT, LEFT_AND_RIGHT[:, None, None]):
        out = diffusers.attention(q, k, v, mask)
        native = functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), LEFT_AND_RIGHT[:, None, None]
        )
        torch.testing.assert_close(out, native.transpose(1, 2), **CLOSE)
    assert launches
