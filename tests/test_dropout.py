"""Dropout of `sdpa` by our kernel, which the interpreter runs, against NumPy and float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import dropped
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dropped import attention, drawn, factors
from serve_on_cpu import TOLERANCE, changed, tensors
from torch.utils.checkpoint import checkpoint

from tiledsched import configure
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.interpreter import evaluate
from tiledsched.kernels.attention import variants
from tiledsched.kernels.attention.dropout import Dropout, philox
from tiledsched.measure.runner import Device
from tiledsched.ops import sdpa as serve


@pytest.fixture(autouse=True)
def own(launches):
    """Dropout is served by our kernel, or is an error."""
    with configure(masks="own"):
        yield launches


# The generator


@dataclass(frozen=True)
class Word:
    """One of the four words that the tile code of the generator makes."""

    rounds: int
    place: int

    def __call__(self, a, b, c, d, first, second):
        return philox((a, b, c, d), (first, second), self.rounds)[self.place]


ONES, PI = [0xFFFFFFFF] * 6, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]


@pytest.mark.parametrize(
    ("rounds", "given", "words"),
    [
        (7, [0] * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        (10, [0] * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_the_generator_gives_the_numbers_that_its_authors_published(rounds, given, words) -> None:
    """Those of philox4x32 in tests/kat_vectors of Random123 v1.14.0, github.com/DEShawResearch/random123."""
    tiles = [np.full((1, 1), each, np.uint32) for each in given]
    assert tuple(evaluate(Word(rounds, place), *tiles).item() for place in range(4)) == words
    assert dropped.philox(given[:4], given[4:], rounds) == words


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_what_neighbours_have_in_common(p) -> None:
    found = factors(p, [5, -3], 2, 2, 256, 250)
    centred = ((found == 0) - p) / math.sqrt(p * (1 - p))
    assert set(np.unique(found)) == {0, np.float32(1 / (1 - p))}
    assert abs(centred.mean()) < 4 / math.sqrt(centred.size)
    for axis, distance in [(0, 1), (1, 1), (2, 1), (2, 8), (3, 1), (3, 8), (3, 16), (3, 32)]:
        one, other = (np.delete(centred, ends, axis) for ends in (slice(0, distance), slice(-distance, None)))
        assert abs((one * other).mean()) < 4.5 / math.sqrt(one.size), (axis, distance)
    for seed in ([5, -2], [4, -3]):
        other = (factors(p, seed, 2, 2, 256, 250) == 0) - p
        assert abs((other * centred).mean()) < 4.5 * math.sqrt(p * (1 - p) / other.size)


@pytest.mark.parametrize("p", [0.001, 0.3, 0.99])
@pytest.mark.parametrize(("rows", "keys"), [(16, 32), (16, 16), (64, 8), (1, 64), (32, 1)])
def test_tiles_of_any_size_and_orientation_drop_the_same(rows, keys, p) -> None:
    seed, (b, h) = np.array([7, -8], np.int32), (3, 5)
    whole = factors(p, seed, b + 1, h + 1)[b, h]
    for i, j in itertools.product(range(0, 64, rows), range(0, 64, keys)):
        row, key = np.arange(i, i + rows, dtype=np.int32), np.arange(j, j + keys, dtype=np.int32)
        wanted = whole[i : i + rows, j : j + keys]
        assert (evaluate(Dropout(p), b, h, row[:, None], key[None, :], arrays=[seed]) == wanted).all()
        assert (evaluate(Dropout(p), b, h, row[None, :], key[:, None], arrays=[seed]) == wanted.T).all()


# What a call drops


def kept(rows=80, keys=64, heads=2, **given):
    """What a call of `sdpa` multiplies its probabilities with, which are all alike."""
    q, k = torch.zeros(2, heads, rows, 16).half(), torch.zeros(2, 2, keys, 16).half()
    return serve.sdpa(q, k, torch.eye(keys).half().expand(2, 2, keys, keys), **given).float() * keys


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ({}, {}),
        ({"tile_m": 64, "tile_n": 32}, {"keys": 65}),
        ({"q_subtiles": 2, "kv_subtiles": 2, "tile_n": 32}, {"rows": 129, "keys": 129}),
        ({"kv_splits": 2, "tile_n": 32}, {}),
        ({"pack_gqa": True}, {"rows": 4, "heads": 8}),
        ({"pack_gqa": False}, {"rows": 4, "heads": 8}),
        ({"lazy_rescale": True}, {"rows": 63, "keys": 63}),
    ],
)
@pytest.mark.parametrize("p", [0.3, 0.99])
def test_every_schedule_drops_the_same(schedule, sizes, p) -> None:
    seed = drawn(1)
    with configure(**schedule):
        found = kept(**sizes, dropout_p=p)
    wanted = torch.from_numpy(factors(p, seed, *found.shape)).float()
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=0)


def test_each_call_drops_others_and_a_seed_the_same(own, monkeypatch) -> None:
    torch.manual_seed(3)
    first = kept(dropout_p=0.3)
    monkeypatch.setattr(variants, "code_of", None)  # later calls read no text of functions
    other = kept(dropout_p=0.3)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    assert torch.equal(first, kept(dropout_p=np.float64(0.3)))
    assert len({id(kernel) for _, _, kernel, _ in own}) == 1


def test_without_dropout_nothing_is_drawn(own) -> None:
    before = torch.get_rng_state()
    kept(dropout_p=0.0)
    assert torch.equal(before, torch.get_rng_state())
    assert "flex" not in str(own[0][2])


@pytest.mark.slow
def test_other_probabilities_under_torch_compile(own) -> None:
    given = [each.requires_grad_() for each in tensors(rows=70, keys=75)]
    mask = torch.rand(1, 2, 70, 75) > 0.4
    attend = torch.compile(lambda *each, p: serve.sdpa(*each, dropout_p=p), backend="aot_eager", fullgraph=True)
    for p in (0.3, 0.4, 0.5):
        found = []
        for call in (attend, lambda *each, p: serve.sdpa(*each, dropout_p=p)):
            torch.manual_seed(5)
            out = call(*given, mask, p=p)
            found.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
        assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_drops_the_same_again(reentrant) -> None:
    found = []
    for call in (serve.sdpa, lambda *each: checkpoint(serve.sdpa, *each, use_reentrant=reentrant)):
        given = [each.requires_grad_() for each in tensors(rows=20, keys=33)]
        torch.manual_seed(6)
        out = call(*given, None, 0.3)
        torch.rand(1)
        out.float().square().sum().backward()
        found.append([each.grad for each in given])
    assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))


# Outputs and gradients


PASSES = [
    {},
    {"scores_transposed": False, "delta_first": True},
    {"structure": "two_pass", "tile_m": 64, "tile_n": 64, "tile_m_dq": 64, "tile_n_dq": 64},
]
CALLS = [(70, 75, 32, kind, schedule) for schedule in PASSES for kind in ("", "causal", "boolean", "added")]
CALLS += [(1, 129, 64, "", {}), (63, 65, 128, "", {}), (64, 64, 128, "boolean", {}), (129, 63, 64, "causal", {})]


@pytest.mark.parametrize(("rows", "keys", "width", "kind", "schedule"), CALLS)
def test_outputs_and_gradients(own, rows, keys, width, kind, schedule) -> None:
    given = tensors(batch=2, heads=4, kv_heads=2, rows=rows, keys=keys, columns=width)
    seen = torch.rand(2, 1, rows, keys, generator=torch.Generator().manual_seed(0)) > 0.4
    seen = torch.ones_like(seen) if kind == "" else seen.fill_(True).tril() if kind == "causal" else seen
    added = torch.randn(2, 4, rows, keys).half() * (kind == "added")
    more = {"boolean": {"attn_mask": seen}, "added": {"attn_mask": added.masked_fill(~seen, -math.inf)}}
    ours, theirs = ([each.to(dtype).requires_grad_() for each in given] for dtype in (torch.float16, torch.float64))
    theirs = [each.detach().requires_grad_() for each in theirs]
    dout, dlse = torch.randn(2, 4, rows, width).half(), torch.randn(2, 4, rows)
    wanted = attention(theirs, factors(0.4, drawn(7), 2, 4, rows, keys), seen, added)
    with configure(**schedule):
        out = serve.sdpa(*ours, dropout_p=0.4, return_lse=True, **more.get(kind, {"is_causal": kind == "causal"}))
        torch.autograd.backward(out, (dout, dlse))
    torch.autograd.backward(wanted, (dout.double(), dlse.double()))
    for one, other in zip(out, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, **TOLERANCE[torch.float16])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=5e-3, atol=1e-2)


# What is refused, or left to torch


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("masks", ["own", "torch"])
def test_what_is_no_probability_is_refused(own, p, masks) -> None:
    with configure(masks=masks), pytest.raises(ProblemError, match=r"from 0 to 1, got "):
        kept(dropout_p=p)
    assert own == []


@pytest.mark.parametrize(
    "change",
    [
        {"dropout_p": 1.0},
        {"dropout_p": 0.995},
        {"window": 8, "causal": True},
        {"softcap": 5.0},
        {"causal": "bottom_right"},
    ],
)
def test_what_is_left_to_torch(own, change) -> None:
    with pytest.raises(UnsupportedError, match="dropout is asked for"):
        kept(**{"dropout_p": 0.5, **change})
    assert own == []


def test_all_may_be_dropped(quiet) -> None:
    with configure(fallback="torch"):
        assert not kept(dropout_p=1.0).any()


def test_where_no_kernel_runs_dropout_is_not_left_out(quiet) -> None:
    with (
        changed(read_device=lambda index: Device(arch="sm_10", name="none", sm_count=1)),
        configure(fallback="torch"),
        pytest.raises(UnsupportedError, match="set masks = torch"),
    ):
        kept(dropout_p=0.5)


def test_a_subclass_of_tensors_is_left_to_torch(own) -> None:
    """As distributed tensors are."""
    from torch.testing._internal.two_tensor import TwoTensor

    q, k, v = (TwoTensor(each, each.clone()) for each in tensors(rows=20, keys=33))
    with pytest.raises(UnsupportedError, match="dropout is asked for"):
        serve.sdpa(q, k, v, dropout_p=0.5)
    assert own == []
