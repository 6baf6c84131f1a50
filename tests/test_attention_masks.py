"""Mask tensors of `sdpa` served by our kernel, which the interpreter runs, against torch's own attention."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from serve_on_cpu import TOLERANCE, capturing, on_another_stream, tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tiledsched import configure
from tiledsched.core.errors import ConfigError, ProblemError, UnsupportedError
from tiledsched.core.registry import load_kernel, place_of
from tiledsched.kernels.attention.lists import lists_kernel
from tiledsched.kernels.attention.shipped_mods import boolean_mask
from tiledsched.kernels.attention.variants import variant
from tiledsched.kernels.attention_backward.masks import mask_kernel
from tiledsched.kernels.attention_backward.variants import gradient_of
from tiledsched.measure.runner import Device
from tiledsched.ops import sdpa as serve
from tiledsched.ops.masks import read_mask_tensor

MIN = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}


@pytest.fixture(autouse=True)
def own(launches):
    """Masks are served by our kernel, or are an error."""
    with configure(masks="own"):
        yield launches


def expected(q, k, v, mask, scale=None):
    """In float32 by torch's math backend."""
    mask = mask if mask.dtype == torch.bool else mask.float()
    grouped = q.shape[-3] != k.shape[-3]
    with sdpa_kernel(SDPBackend.MATH):
        out = torch_sdpa(q.float(), k.float(), v.float(), attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.to(q.dtype)


def random_mask(kind, shape, dtype):
    """A mask of a shape, of which some rows see nothing, or nothing but scores that are equal."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    seen = torch.rand(shape, generator=generator) > 0.4
    seen[..., 1, :] = False
    if kind == "boolean":
        return seen
    added = torch.randn(shape, generator=generator).to(dtype if kind == "added" else torch.float32)
    added = added.masked_fill(~seen, -math.inf)
    added[..., 2, :] = MIN[added.dtype]
    added[..., 3, :] = max(-1e9, MIN[added.dtype])
    return added


def check(q, k, v, mask, equal_nan=False, **given):
    out = serve.sdpa(q, k, v, mask, **given)
    torch.testing.assert_close(out, expected(q, k, v, mask, **given), equal_nan=equal_nan, **TOLERANCE[q.dtype])


# What torch means


CELLS = list(itertools.product(["boolean", "added", "added in float32"], ["none", "batch", "heads", "both"], [1, 2]))


@pytest.mark.parametrize(("kind", "broadcast", "group"), CELLS)
def test_masks_of_every_kind(own, kind, broadcast, group) -> None:
    dtype = torch.bfloat16 if broadcast in ("none", "heads") else torch.float16
    q, k, v = tensors(batch=2, heads=2, kv_heads=2 // group, rows=70, keys=75, columns=32 * group, dtype=dtype)
    batch, heads = 1 if broadcast in ("batch", "both") else 2, 1 if broadcast in ("heads", "both") else 2
    check(q, k, v, random_mask(kind, (batch, heads, 70, 75), dtype))
    assert len(own) == (2 if kind == "boolean" else 1)  # of boolean masks blocks are listed first


@pytest.mark.parametrize(
    "shape", [(20, 33), (2, 20, 33), (1, 1, 1, 33), (2, 1, 1, 33), (2, 2, 1, 33), (33,), (2, 2, 20, 1)]
)
@pytest.mark.parametrize("kind", [torch.bool, torch.float16])
def test_axes_that_broadcast(own, shape, kind) -> None:
    q, k, v = tensors(batch=2, heads=2, rows=20, keys=33)
    generator = torch.Generator().manual_seed(0)
    mask = (
        torch.rand(shape, generator=generator) > 0.4
        if kind is torch.bool
        else torch.randn(shape, generator=generator).half()
    )
    check(q, k, v, mask)
    assert own


@pytest.mark.parametrize("columns", [128, 256])
def test_wide_heads(columns) -> None:
    q, k, v = tensors(rows=66, keys=40, columns=columns, dtype=torch.bfloat16)
    check(q, k, v, random_mask("boolean", (1, 1, 66, 40), q.dtype))
    check(q, k, v, random_mask("added", (1, 1, 66, 40), q.dtype), scale=0.3)


def test_any_strides() -> None:
    q, k, v = tensors(batch=2, rows=20, keys=33)
    seen = random_mask("boolean", (2, 2, 33, 40), None).transpose(2, 3)[:, :, ::2]
    assert seen.shape == (2, 2, 20, 33)
    check(q, k, v, seen)
    check(q, k, v, seen[:, :1].expand(2, 2, 20, 33))
    check(q, k, v, torch.randn(2, 20, 2, 33).half().transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "change", "copied"),
    [
        ((2, 3, 20, 32), lambda mask: mask, False),
        ((2, 3, 20, 32), lambda mask: mask[:, 1:, 4:], False),
        ((2, 1, 20, 32), lambda mask: mask.expand(2, 3, 20, 32), False),
        ((2, 3, 20, 33), lambda mask: mask, True),
        ((2, 3, 32, 32), lambda mask: mask.mT, True),
        ((2, 3, 20, 64), lambda mask: mask[..., ::2], True),
        ((2, 3, 20, 1), lambda mask: mask.expand(2, 3, 20, 32), True),
    ],
)
def test_rows_that_the_tma_unit_cannot_load_are_copied(dtype, shape, change, copied) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mask = change(values.gt(0) if dtype == torch.bool else values.to(dtype))
    q, k = (torch.zeros(2, mask.shape[1], size, 16, dtype=torch.bfloat16) for size in mask.shape[2:])
    read = read_mask_tensor(mask, q, k)
    assert read.stride(3) == 1
    assert [each * read.element_size() % 16 for each in read.stride()[:3]] == [0] * 3
    assert torch.equal(read.expand(mask.shape), mask.view(torch.uint8) if dtype == torch.bool else mask)
    assert (read.untyped_storage().data_ptr() != mask.untyped_storage().data_ptr()) == copied


def test_axes_that_were_expanded_are_read_once(own) -> None:
    q, k, v = tensors(batch=2, heads=2, rows=130, keys=144)
    seen = random_mask("boolean", (2, 1, 130, 144), None)
    check(q, k, v, seen.expand(2, 2, 130, 144))
    assert own[0][1] == (2, 1, 2)  # lists of blocks: of two blocks of rows, for all heads, for each sequence
    read = read_mask_tensor(seen[:, :, 5:6].expand(2, 2, 130, 144), q, k)
    assert (read.shape, read.data_ptr()) == ((2, 1, 144), seen[:, :, 5:6].data_ptr())


def test_heads_of_one_sequence() -> None:
    q, k, v = (each[0] for each in tensors(rows=20, keys=33))
    check(q, k, v, random_mask("boolean", (20, 33), None))
    mask = random_mask("added", (2, 20, 33), q.dtype)
    out, lse = serve.sdpa(q, k, v, mask, return_lse=True)
    scores = q.float() @ k.float().mT / 4 + mask.float()
    torch.testing.assert_close(out, expected(q, k, v, mask), **TOLERANCE[q.dtype])
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


def test_grouped_heads_of_one_sequence_are_grouped_in_torch_too(own, quiet) -> None:
    q, k, v = (each[0] for each in tensors(rows=20, keys=33, heads=4, kv_heads=2))
    mask = random_mask("boolean", (20, 33), None)
    with configure(masks="torch", fallback="torch"):
        out = serve.sdpa(q, k, v, mask)
    torch.testing.assert_close(out, expected(q[None], k[None], v[None], mask)[0], **TOLERANCE[q.dtype])
    assert own == []


def test_few_rows_share_a_tile_with_other_heads() -> None:
    q, k, v = tensors(batch=2, heads=8, kv_heads=2, rows=1, keys=300)
    with configure(pack_gqa=True):
        for heads in (8, 1):
            check(q, k, v, torch.rand(2, heads, 1, 300) > 0.5)
        q = q.expand(2, 8, 3, 16)
        check(q, k, v, torch.rand(2, 8, 3, 300) > 0.5)
        check(q, k, v, torch.randn(2, 1, 3, 300))


def test_each_sequence_and_head_has_blocks_of_its_own() -> None:
    q, k, v = tensors(batch=2, heads=2, rows=140, keys=260)
    seen = torch.zeros(2, 2, 140, 260, dtype=torch.bool)
    for place, (batch, head) in enumerate(itertools.product(range(2), range(2))):
        seen[batch, head, :130, 64 * place : 64 * place + 70] = True
        seen[batch, head, 130:, :128] = True  # a block that is seen in full
    for mask in (seen, seen[:1], seen[:, 1:], seen[1:, :1]):
        check(q, k, v, mask)


# Rows that are hidden


@pytest.mark.parametrize("arithmetic", ["rounded", "fused"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-1e9, torch.float32),
        (-3e38, torch.float32),
        (MIN[torch.float32], torch.float32),
        (MIN[torch.bfloat16], torch.bfloat16),
        (MIN[torch.float16], torch.float16),
        (-1e4, torch.float16),
        (1e9, torch.float32),
    ],
)
def test_numbers_that_leave_no_difference_between_scores(own, monkeypatch, value, dtype, arithmetic) -> None:
    from tiledsched.interpreter import launch

    plain = launch.run
    monkeypatch.setattr(launch, "run", lambda *given: plain(*given, arithmetic=arithmetic))
    q, k, v = tensors(rows=20, keys=33, dtype=torch.float16 if dtype == torch.float32 else dtype)
    mask = torch.full((20, 33), value, dtype=dtype)
    mask[7, :5] = 0.0
    mask[8, 3:] = -math.inf
    check(q, k, v, mask)
    assert own


def test_what_is_not_a_number_stays_so(own) -> None:
    q, k, v = tensors(rows=20, keys=33)
    mask = torch.zeros(20, 33)
    mask[7, 5] = mask[8] = q[0, 0, 9] = math.nan
    check(q, k, v, mask, equal_nan=True)
    assert serve.sdpa(q, k, v, mask)[0, 0, 7:10].isnan().all()
    assert own


def test_rows_without_a_key() -> None:
    """torch's backends agree on zeros since 2.5; those before gave NaN."""
    q, k, v = tensors(rows=70, keys=40)
    hidden = torch.zeros(70, 40, dtype=torch.bool)
    for mask in (hidden, torch.where(hidden, 0.0, -math.inf)):
        out, lse = serve.sdpa(q, k, v, mask, return_lse=True)
        assert not out.any()
        assert (lse == -math.inf).all()
        assert torch.equal(expected(q, k, v, mask), out)


@pytest.mark.parametrize("kind", ["boolean", "added", "added in float32", "of keys", "many rows"])
@pytest.mark.parametrize(
    "schedule", [{}, {"structure": "two_pass", "tile_m": 64, "tile_n": 64, "tile_m_dq": 64, "tile_n_dq": 64}]
)
def test_gradients(own, kind, schedule) -> None:
    rows = 140 if kind == "many rows" else 70
    given = tensors(batch=2, heads=4, kv_heads=2, rows=rows, keys=75, columns=32)
    mask = random_mask("boolean" if kind in ("of keys", "many rows") else kind, (2, 1, rows, 75), torch.float16)
    mask = mask[:, :, 3:4] if kind == "of keys" else mask
    ours, theirs = (
        [each.clone().to(dtype).requires_grad_() for each in given] for dtype in (torch.float16, torch.float64)
    )
    dout = torch.randn(2, 4, rows, 32).half()
    with configure(**schedule):
        serve.sdpa(*ours, mask).backward(dout)
    k, v = (each.repeat_interleave(2, 1) for each in theirs[1:])
    scores = theirs[0] @ k.mT / math.sqrt(32)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else (scores.float() + mask).double()
    seen = scores.amax(-1, keepdim=True) > -1e6  # rows whose scores float32 cannot tell apart have no gradients
    weights = scores.masked_fill(~seen, 0.0).softmax(-1) * seen
    (weights @ v).backward(dout.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=5e-3, atol=5e-3)
    assert len(own) > 2


# Programs, and what is left to torch


def test_masks_of_all_heads_and_of_each_share_a_program(own) -> None:
    q, k, v = tensors(batch=2, rows=70, keys=75)
    for shape in ((1, 1), (2, 1), (1, 2), (2, 2)):
        serve.sdpa(q, k, v, torch.zeros(*shape, 70, 75, dtype=torch.float16))
    assert len({id(kernel) for _, _, kernel, _ in own}) == 1


def test_a_mask_is_read_in_each_call_and_while_a_graph_is_captured() -> None:
    q, k, v = tensors(rows=70, keys=75)
    mask = random_mask("boolean", (1, 2, 70, 75), None)
    check(q, k, v, mask)
    mask.logical_not_()
    check(q, k, v, mask)
    with capturing():
        check(q, k, v, mask)


def test_masks_of_padding_keep_their_way(own) -> None:
    q, k, v = tensors(batch=2, rows=20, keys=33)
    mask = torch.arange(33) < torch.tensor([[[[20]]], [[[33]]]])
    check(q, k, v, mask)
    assert len(own) == 1
    assert own[0][2].declaration.name == "attention"


@pytest.mark.parametrize("kind", [torch.bool, torch.float16])
def test_a_graph_of_a_mask_of_padding_finds_its_program_loaded(own, kind) -> None:
    """No number of a mask is read in a capture, so that the call before it, on another stream, must not read one either."""
    q, k, v = tensors(batch=2, rows=70, keys=33)
    seen = torch.arange(33) < torch.tensor([[[[20]]], [[[33]]]])
    mask = seen if kind == torch.bool else torch.where(seen, 0.0, -math.inf).half()
    with on_another_stream():
        check(q, k, v, mask)
    with capturing():
        check(q, k, v, mask)
    assert all("mask" in each[2].declaration.name for each in own)


@pytest.mark.parametrize(
    "change",
    [
        {"attn_mask": torch.zeros(20, 33, dtype=torch.float16, requires_grad=True)},
        {"attn_mask": torch.ones(20, 33, dtype=torch.bool), "dropout_p": 1.0},
        {"attn_mask": torch.ones(20, 33, dtype=torch.bool), "softcap": 5.0},
        {"attn_mask": torch.zeros(20, 33, dtype=torch.float64)},
        {"attn_mask": torch.zeros(1, 1, 1, 20, 33)},
    ],
)
def test_what_is_left_to_torch(own, change) -> None:
    with pytest.raises(UnsupportedError, match="a mask tensor is given"):
        serve.sdpa(*tensors(rows=20, keys=33), **change)
    assert own == []


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.zeros(20, 33, device="meta"), r"float32 \(20, 33\) on meta"),
        (torch.zeros(20, 32), r"float32 \(20, 32\) on cpu"),
        (torch.ones(2, 1, 33, 20, dtype=torch.bool), r"bool \(2, 1, 33, 20\) on cpu"),
        (torch.zeros(20, 33, dtype=torch.int64), r"int64 \(20, 33\) on cpu"),
    ],
)
def test_a_mask_that_fits_no_scores_is_refused(own, mask, got) -> None:
    with pytest.raises(ProblemError, match=rf"that broadcasts to \[..., 20 rows, 33 keys\], .*, got {got}"):
        serve.sdpa(*tensors(rows=20, keys=33), mask)
    assert own == []


def test_torch_computes_masks_unless_told_otherwise(own, quiet) -> None:
    q, k, v = tensors(rows=20, keys=33)
    mask = random_mask("boolean", (20, 33), None)
    with configure(masks="torch"), pytest.raises(UnsupportedError, match="a mask tensor is given"):
        serve.sdpa(q, k, v, mask)
    with configure(masks="torch", fallback="torch"):
        torch.testing.assert_close(serve.sdpa(q, k, v, mask), torch_sdpa(q, k, v, mask))
    assert own == []


@pytest.mark.parametrize("masks", ["own", "torch"])
def test_under_torch_compile(own, masks, quiet) -> None:
    q, k, v = tensors(rows=70, keys=75)
    mask = random_mask("boolean", (1, 2, 70, 75), None)
    torch._dynamo.reset()  # what is traced keeps the setting of its first call
    attend = torch.compile(lambda *each: serve.sdpa(*each), backend="aot_eager", fullgraph=True)
    with configure(masks=masks, fallback="torch"):
        torch.testing.assert_close(attend(q, k, v, mask), expected(q, k, v, mask), **TOLERANCE[q.dtype])
    assert len(own) == 2 * (masks == "own")


def test_autocast_casts_the_mask_too(own) -> None:
    q, k, v = (each.float() for each in tensors(rows=20, keys=33))
    mask = random_mask("added in float32", (20, 33), None)  # whose lowest number is minus infinity in bfloat16
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        out, wanted = serve.sdpa(q, k, v, mask), torch_sdpa(q, k, v, mask)
    assert not out[..., 2, :].any()
    torch.testing.assert_close(out, wanted, **TOLERANCE[torch.bfloat16])
    assert len(own) == 1


@pytest.mark.parametrize(
    ("arch", "rows", "dropout_p", "served"),
    [("sm_90", 70, 0.0, True), ("sm_90", 1, 0.0, False), ("sm_90", 70, 0.5, False), ("sm_100", 70, 0.0, False)],
)
def test_our_kernel_computes_masks_where_they_were_faster_unless_told_otherwise(
    arch, rows, dropout_p, served, own, quiet
) -> None:
    q, k, v = tensors(rows=rows, keys=33)
    own.runtime.read_device = lambda index: Device(arch=arch, name="a GPU", sm_count=132)
    with configure(masks="auto", fallback="torch"):
        serve.sdpa(q, k, v, torch.ones(rows, 33, dtype=torch.bool), dropout_p)
    assert len(own) == (2 if served else 0)


def test_another_process_finds_the_kernels_of_masks() -> None:
    """By a place that it is told, and nothing else: torch serves while it compiles them."""
    made = [mask_kernel(True, 4, "uint8"), mask_kernel(False, 3, "float32")]
    kernels = [*made, *map(gradient_of, made), lists_kernel(boolean_mask, [(4, "uint8")])]
    code = "import sys; from tiledsched.core.registry import load_kernel; print(*(load_kernel(each).name for each in sys.argv[1:]))"
    found = subprocess.run(
        [sys.executable, "-c", code, *map(place_of, kernels)], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [each.name for each in kernels]
    own = variant(None, lambda_mask, [(4, "uint8")])
    assert place_of(own) == ""
    with pytest.raises(ConfigError, match="declares no kernel"):
        load_kernel(place_of(made[0]).replace(made[0].identity, "0" * 8))


def lambda_mask(b, h, q_idx, kv_idx, mask):
    """A mask of an author's own."""
    return boolean_mask(b, h, q_idx, kv_idx, mask)
