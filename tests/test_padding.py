"""Masks that hide padding at the ends of keys: what is read from them, when, and that it is what torch makes of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as functional

from tiledsched.ops import padding
from tiledsched.ops.padding import HIDDEN, hidden_ends

Q, K = torch.zeros(3, 2, 5, 8), torch.zeros(3, 2, 7, 8)
LEFT_AND_RIGHT = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1] * 7], dtype=torch.bool)


@pytest.fixture(autouse=True)
def forget():
    padding._known.clear()


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
    starts, lengths = hidden_ends(mask, Q, K, at_once=True)
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
    assert hidden_ends(mask, Q, K, at_once=True) is None


def test_one_mask_for_all_sequences() -> None:
    starts, lengths = hidden_ends(LEFT_AND_RIGHT[1:2, None, None], Q, K, at_once=True)
    assert starts is None
    assert lengths.tolist() == [3, 3, 3]
    assert hidden_ends(torch.ones(1, 1, 1, 7), Q, K, at_once=True) is None  # a bias of one
    assert hidden_ends(torch.zeros(1, 1, 1, 7), Q, K, at_once=True) == (None, None)


def test_it_is_read_when_it_comes_again_and_once(monkeypatch) -> None:
    reads = []
    monkeypatch.setattr(padding, "_read", lambda *given, read=padding._read: reads.append(given) or read(*given))
    mask = LEFT_AND_RIGHT.clone()[:, None, None]
    assert hidden_ends(mask, Q, K) is None
    assert not reads
    for _ in range(3):
        assert hidden_ends(mask, Q, K)[1].tolist() == [7, 3, 7]
    assert hidden_ends(mask[:, 0, 0][:, None, None], Q, K)[1].tolist() == [7, 3, 7]  # another view of it
    assert len(reads) == 1
    mask[0] = True
    assert hidden_ends(mask, Q, K) is None  # written to: as if never seen
    starts, lengths = hidden_ends(mask, Q, K)
    assert starts is None
    assert lengths.tolist() == [7, 3, 7]
    assert len(reads) == 2


def test_in_transforms_and_modes_a_mask_has_no_memory_to_know_it_by(quiet) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tiledsched import sdpa

    q, k = torch.randn(2, *Q.shape), torch.randn(2, *K.shape)
    masks = torch.stack([LEFT_AND_RIGHT, LEFT_AND_RIGHT.flip(0)])[:, :, None, None]
    seen = torch.vmap(lambda q, k, mask: sdpa(q, k, k, mask))(q, k, masks)
    for each in range(2):
        wanted = functional.scaled_dot_product_attention(q[each], k[each], k[each], masks[each])
        torch.testing.assert_close(seen[each], wanted)
    torch.vmap(lambda mask: q.sum() * 0 if hidden_ends(mask, Q, K, at_once=True) is None else pytest.fail("read"))(
        masks
    )
    with FakeTensorMode():
        assert (
            hidden_ends(torch.ones(3, 7, dtype=torch.bool), torch.empty(Q.shape), torch.empty(K.shape), at_once=True)
            is None
        )


def test_memory_of_a_mask_that_is_gone_is_not_taken_for_it() -> None:
    """What is remembered is kept alive, and little of it."""
    for number in range(3 * padding.MAX_MASKS):
        mask = torch.arange(7)[None].expand(3, 7) < 1 + number % 7
        _, lengths = hidden_ends(mask.clone(), Q, K, at_once=True)
        assert (None if lengths is None else lengths.tolist()) == (None if number % 7 == 6 else [1 + number % 7] * 3)
        assert len(padding._known) <= padding.MAX_MASKS
    with torch.inference_mode():
        assert (
            hidden_ends(torch.ones(3, 7, dtype=torch.bool), Q, K, at_once=True) is None
        )  # no version: it may be written to


@pytest.mark.parametrize("fallback", ["torch", "error"])
@pytest.mark.parametrize("hidden", [None, HIDDEN])
def test_sdpa_serves_it(hidden, fallback, launches, quiet) -> None:
    """From its second call on, the first being torch's; at once where torch is not to compute."""
    from tiledsched import configure, sdpa

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, rows, 16, generator=generator, dtype=torch.float16) for rows in (5, 7, 7))
    mask = (LEFT_AND_RIGHT.clone() if hidden is None else added(LEFT_AND_RIGHT, hidden, torch.float16))[:, None, None]
    wanted = functional.scaled_dot_product_attention(q, k, v, mask)
    with configure(fallback=fallback):
        for call in range(3):
            torch.testing.assert_close(sdpa(q, k, v, mask), wanted, atol=4e-3, rtol=4e-3)
            assert bool(launches) is (call > 0 or fallback == "error")


def test_diffusers_serves_it_at_once(launches) -> None:
    from tiledsched.ops.integrations import diffusers

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, rows, 2, 16, generator=generator, dtype=torch.float16) for rows in (5, 7, 7))
    for mask in (LEFT_AND_RIGHT, LEFT_AND_RIGHT[:, None, None]):
        out = diffusers.attention(q, k, v, mask)
        native = functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), LEFT_AND_RIGHT[:, None, None]
        )
        torch.testing.assert_close(out, native.transpose(1, 2), atol=4e-3, rtol=4e-3)
    assert launches
