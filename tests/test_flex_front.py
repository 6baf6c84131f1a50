"""`flex` as its callers see it, with the kernels run by the interpreter where a GPU would run them."""

from __future__ import annotations

import functools
import gc
import math
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

import flex_mods as mods
from serve_on_cpu import TOLERANCE, capturing, changed, rows_first, tensors
from torch.autograd import forward_ad
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.flop_counter import FlopCounterMode

import tiledsched as ts
from docs.studies import flex_variants
from tiledsched import configure
from tiledsched.core.errors import DeclarationError, LaunchError, ProblemError, UnsupportedError
from tiledsched.ops import block_masks, flex as front, plans
from tiledsched.ops.block_masks import BlockMask

pytestmark = pytest.mark.usefixtures("fresh")
ROWS = 150
"""Two blocks of rows and keys, the second of which is not whole."""
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SEEN = torch.arange(ROWS) < torch.tensor([[40], [130]])


def given(**sizes):
    return tensors(**{"batch": 2, "heads": 4, "kv_heads": 2, "rows": ROWS, "columns": 16} | sizes)


def ids(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (2, ROWS), generator=generator, dtype=torch.int32).sort(1)[0]


def expected(q, k, v, mask=None, bias=0.0, scale=None):
    """The output and the log-sum-exp, by torch's attention with the mask spelled out, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(each.double().repeat_interleave(group, 1) for each in (k, v))
    added = torch.zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=torch.float64) + bias
    added = added if mask is None else added.masked_fill(~mask, -math.inf)
    out = torch_sdpa(q, k, v, attn_mask=added, scale=scale).nan_to_num(0.0)
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[3] ** -0.5)
    return out, torch.logsumexp(scores + added, -1)


def check(found, q, k, v, **how):
    out, lse = expected(q, k, v, **how)
    torch.testing.assert_close(found[0], out.to(q.dtype), **TOLERANCE[q.dtype])
    torch.testing.assert_close(found[1], lse.float(), rtol=1e-4, atol=1e-4)
    assert (found[0].stride(1) < found[0].stride(2)) == (q.stride(1) < q.stride(2))


ROW, KEY = torch.arange(ROWS)[:, None], torch.arange(ROWS)
CALLS = {
    "causal": ({"mask_mod": mods.causal}, {"mask": ROW >= KEY}),
    "a closure": ({"mask_mod": mods.window(9)}, {"mask": (ROW >= KEY) & (ROW - KEY < 9)}),
    "a dataclass": ({"mask_mod": mods.Strided(4)}, {"mask": (ROW - KEY) % 4 == 0}),
    "documents": (
        {"mask_mod": mods.documents, "arrays": (ids(),)},
        {"mask": (ids()[:, :, None] == ids()[:, None])[:, None]},
    ),
    "ids of 64 bits": (
        {"mask_mod": mods.documents, "arrays": [ids().long()]},
        {"mask": (ids()[:, :, None] == ids()[:, None])[:, None]},
    ),
    "a boolean array": ({"mask_mod": mods.unpadded, "arrays": (SEEN,)}, {"mask": SEEN[:, None, None]}),
    "an array that is no block of memory": (
        {"mask_mod": mods.unpadded, "arrays": (torch.stack([SEEN, ~SEEN], -1)[..., 0],)},
        {"mask": SEEN[:, None, None]},
    ),
    "slopes": (
        {"score_mod": mods.alibi, "arrays": (SLOPES,), "scale": 0.3},
        {"bias": SLOPES[:, None, None] * (KEY - ROW), "scale": 0.3},
    ),
    "slopes and causal": (
        {"score_mod": mods.alibi, "mask_mod": mods.causal, "arrays": (SLOPES,)},
        {"bias": SLOPES[:, None, None] * (KEY - ROW), "mask": ROW >= KEY},
    ),
    "a bias for all sequences": (
        {"score_mod": mods.biased, "arrays": ((ROW * KEY % 7).half().expand(2, 4, ROWS, ROWS),)},
        {"bias": ROW * KEY % 7},
    ),
    "no key": ({"mask_mod": mods.nothing}, {"mask": ROW < -KEY}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_computed(launches, name) -> None:
    """Through the operator, by the short way, and with a block mask."""
    how, right = CALLS[name]
    q, k, v = given()
    for _ in range(3):
        check(ts.flex(q, k, v, return_lse=True, **how), q, k, v, **right)
    assert torch.int64 not in {getattr(each, "dtype", None) for launch in launches for each in launch[3]}
    if "mask_mod" in how:
        arrays = how.get("arrays", ())
        mask = ts.block_mask(how["mask_mod"], q, k, arrays)
        more = {each: value for each, value in how.items() if each != "mask_mod"}
        for _ in range(3):
            out = ts.flex(q, k, v, block_mask=mask, **more)
        torch.testing.assert_close(out, expected(q, k, v, **right)[0].half(), **TOLERANCE[q.dtype])


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_few_rows_need_no_lists(launches, rows) -> None:
    q, k, v = given(rows=rows, keys=140)
    mask = (torch.arange(rows)[:, None] >= torch.arange(140)).expand(rows, 140)
    for _ in range(3):
        check(ts.flex(q, k, v, mask_mod=mods.causal, return_lse=True), q, k, v, mask=mask)
    assert len(launches) == 3 + (rows > 64)
    made = ts.block_mask(mods.causal, q, k)
    launches.clear()
    for _ in range(3):
        check(ts.flex(q, k, v, block_mask=made, return_lse=True), q, k, v, mask=mask)
    assert len(launches) == 3


def test_three_axes_value_columns_and_order_in_memory(launches) -> None:
    q, k, v = given(rows=70, columns=24, value_columns=8)
    mask = torch.ones(70, 70, dtype=torch.bool).tril()
    check(ts.flex(rows_first(q), k, v, mask_mod=mods.causal, return_lse=True), rows_first(q), k, v[..., :8], mask=mask)
    out, lse = ts.flex(q[0], k[0], v[0], mask_mod=mods.causal, return_lse=True)
    check((out[None], lse[None]), q[:1], k[:1], v[:1], mask=mask)
    assert torch.equal(ts.flex(q[0], k[0], v[0], mask_mod=mods.causal), out)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"rows": 0, "keys": 5}, {"keys": 0}], ids=str)
def test_empty_tensors(launches, sizes) -> None:
    q, k, v = (
        torch.zeros(sizes.get("batch", 2), heads, count, 16, dtype=torch.float16)
        for heads, count in ((4, sizes.get("rows", 70)), (2, sizes.get("keys", 70)), (2, sizes.get("keys", 70)))
    )
    with configure(fallback="torch"), pytest.warns(UserWarning, match="a tensor is empty"):
        out, lse = ts.flex(q, k, v, mask_mod=mods.causal, return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert lse.shape == q.shape[:3]
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    assert not launches


@pytest.mark.slow
@pytest.mark.parametrize("name", flex_variants.NAMES)
def test_the_twelve_variants_are_those_of_torch(launches, name) -> None:
    of = flex_variants.compared(name, 2, 4, ROWS, device="cpu")
    q, k, v = given(kv_heads=4, rows=of.rows or ROWS, keys=ROWS)
    mask = ts.block_mask(of.mask, q, k, of.arrays) if of.mask else None
    right = of.torch_mask and flex_attention.create_block_mask(of.torch_mask, 2, 4, q.shape[2], ROWS, device="cpu")
    want = flex_attention.flex_attention(
        q.double(), k.double(), v.double(), score_mod=of.torch_score, block_mask=right or None
    )
    for how in ({"mask_mod": of.mask}, {"block_mask": mask}):
        torch.testing.assert_close(
            ts.flex(q, k, v, of.score, arrays=of.arrays, **how), want.half(), **TOLERANCE[q.dtype]
        )


# Plans


def test_new_contents_make_no_plan(launches) -> None:
    """Nor do new tensors of the same shape and type, new closures over equal values, and new block masks."""
    q, k, v = given()
    ts.flex(q, k, v, mask_mod=mods.documents, arrays=(ids(),))
    ts.flex(q, k, v, block_mask=ts.block_mask(mods.documents, q, k, (ids(),)), arrays=(ids(),))
    ts.flex(q, k, v, mask_mod=mods.window(3))
    made = [set(map(id, cache.plans.values())) for cache in (plans.cache, block_masks.cache)]
    kernels = {id(each[2]) for each in launches}
    for seed in (1, 2):
        other = ids(seed)
        mask = (other[:, :, None] == other[:, None])[:, None]
        for how in ({"mask_mod": mods.documents}, {"block_mask": ts.block_mask(mods.documents, q, k, (other,))}):
            torch.testing.assert_close(
                ts.flex(q, k, v, arrays=(other,), **how), expected(q, k, v, mask=mask)[0].half(), **TOLERANCE[q.dtype]
            )
    ts.flex(q, k, v, mask_mod=mods.window(3))
    assert [set(map(id, cache.plans.values())) for cache in (plans.cache, block_masks.cache)] == made
    assert {id(each[2]) for each in launches} == kernels
    ts.flex(q, k, v, mask_mod=mods.window(4))
    assert {id(each[2]) for each in launches} > kernels


def test_values_are_never_read_on_the_host(launches, monkeypatch) -> None:
    """Else each call would wait for the GPU."""
    q, k, v = given()
    run = launches.runtime.launch
    reading = []

    def refuse(*_, **__):
        if not reading:
            raise AssertionError("read")

    def launch(*arguments):
        reading.append(1)
        run(*arguments)
        reading.clear()

    with changed(launch=launch), pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "cpu"):
            patch.setattr(torch.Tensor, name, refuse)
        for seed in range(4):
            array = ids(seed)
            ts.flex(q, k, v, mask_mod=mods.documents, arrays=(array,))
            ts.flex(q, k, v, mods.alibi, ts.block_mask(mods.causal, q, k, (SLOPES,)).mask_mod, arrays=(SLOPES,))


def test_the_short_way_is_taken(launches, monkeypatch) -> None:
    """And only where it computes the same."""
    q, k, v = given(rows=70)
    near, step, mask = mods.window(3), mods.Strided(2), ts.block_mask(mods.causal, q, k)
    calls = [{"mask_mod": near}, {"mask_mod": step}, {"block_mask": mask}, {"mask_mod": mods.causal}]
    right = [ts.flex(q, k, v, **how) for how in calls]
    monkeypatch.setattr(front, "_attend", lambda *_: pytest.fail("the long way"))
    for how, out in zip(calls, right, strict=True):
        for _ in range(3):
            assert torch.equal(ts.flex(q, k, v, **how), out)
    for change in (
        {"mask_mod": mods.Strided(2.0)},
        {"mask_mod": near, "scale": 0.5},
        {"mask_mod": near, "return_lse": True},
    ):
        with pytest.raises(pytest.fail.Exception):
            ts.flex(q, k, v, **change)
    for others in ((q[:, :, :69], k, v), (q, k[:, :, :69], v[:, :, :69]), (q[:1], k[:1], v[:1]), (q, k, v.bfloat16())):
        with pytest.raises(pytest.fail.Exception):
            ts.flex(*others, **calls[2])
    with pytest.raises(pytest.fail.Exception):
        ts.flex(q.clone().requires_grad_(), k, v, **calls[2])


def test_equal_objects_of_other_code_are_told_apart(launches) -> None:
    """1.0 equals 1, and is compiled to other machine code."""
    q, k, v = given(rows=70)
    for step in (2, 2.0, 2):
        ts.flex(q, k, v, mask_mod=mods.Strided(step))
    assert len({plan.problem.kernel for plan in plans.cache.plans.values()}) == 2


def test_no_array_of_a_call_is_held(launches) -> None:
    """Biases are large."""
    q, k, v = given(rows=70)
    array, mask = ids()[:, :70].clone(), None
    for _ in range(3):
        mask = ts.block_mask(mods.documents, q, k, (array,))
        ts.flex(q, k, v, block_mask=mask, arrays=(array,))
        ts.flex(q, k, v, mask_mod=mods.documents, arrays=(array,))
    held = [weakref.ref(each) for each in (array, mask.lists)]
    launches.clear()
    del array, mask
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_lists_of_a_mask_without_arrays_are_made_once_for_each_stream(launches) -> None:
    q, k, v = given(rows=70)
    for _ in range(3):
        ts.flex(q, k, v, mask_mod=mods.causal)
    assert len(launches) == 4
    with changed(current_stream=lambda index: 1):
        ts.flex(q, k, v, mask_mod=mods.causal)
        ts.flex(q, k, v, mask_mod=mods.causal)
    assert len(launches) == 7


def test_cuda_graphs(launches) -> None:
    """A graph holds only what ran before; it makes lists of its own, because it may live longer than those that are kept."""
    q, k, v = given(rows=70)
    with capturing(), pytest.raises(LaunchError, match="has not run in this process yet"):
        ts.flex(q, k, v, mask_mod=mods.causal)
    for _ in range(2):
        want = ts.flex(q, k, v, mask_mod=mods.causal)
    launches.clear()
    with capturing():
        for _ in range(2):
            assert torch.equal(ts.flex(q, k, v, mask_mod=mods.causal), want)
    assert len(launches) == 4


# torch


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiled_whole(launches, backend) -> None:
    """Functions of a module, closures made inside, block masks made inside and outside."""
    q, k, v = given()
    outer, array = ts.block_mask(mods.causal, q, k), ids()

    def model(q, k, v, array, mask):
        first = ts.flex(q, k, v, mods.alibi, mods.causal, arrays=(SLOPES,))
        second = ts.flex(first, k, v, mask_mod=mods.window(5), return_lse=True)
        third = ts.flex(second[0], k, v, mask_mod=mods.documents, arrays=(array,))
        inner = ts.block_mask(mods.documents, q, k, (array,))
        return ts.flex(third, k, v, block_mask=mask), ts.flex(q, k, v, block_mask=inner, arrays=(array,)), second[1]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for one, other in zip(compiled(q, k, v, array, outer), model(q, k, v, array, outer), strict=True):
        assert torch.equal(one, other)
    with torch._dynamo.config.patch(error_on_recompile=True):  # other ids
        compiled(q, k, v, ids(1), outer)


def test_the_operators_are_right_for_torch(launches) -> None:
    q, k, v = given(rows=70)
    name = block_masks.variant_named(None, mods.causal, ())
    lists = block_masks.fill_lists(q, k, (), name)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(front.flex_lse_operator, (q, k, v, lists, [], name, None), test_utils=tests)
    torch.library.opcheck(block_masks.lists_operator, (q, k, [], name), test_utils=tests)
    with FlopCounterMode(display=False) as counter:
        ts.flex(q, k, v, mask_mod=mods.causal)
    assert counter.get_total_flops() == 4 * 2 * 4 * 70 * 70 * 16


def test_autocast_casts_q_k_and_v(launches) -> None:
    q, k, v = given(rows=70)
    want = ts.flex(q.bfloat16(), k.bfloat16(), v.bfloat16(), mods.alibi, arrays=(SLOPES,))
    with torch.autocast("cpu", torch.bfloat16):
        found = ts.flex(q, k, v, mods.alibi, arrays=(SLOPES,))
    assert torch.equal(found, want)


def test_masks_are_not_batch_invariant(launches) -> None:
    """Also where the call was made before, and scores may be changed."""
    q, k, v = given()
    for _ in range(2):
        ts.flex(q, k, v, mask_mod=mods.causal)
    with ts.batch_invariant():
        ts.flex(q, k, v, mods.alibi, arrays=(SLOPES,))
        with pytest.raises(UnsupportedError, match="bits that depend on the batch; call it outside"):
            ts.flex(q, k, v, mask_mod=mods.causal)


@pytest.mark.parametrize("backend", ["", pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_gradients(launches, backend) -> None:
    """Of the output and the log-sum-exp, in q, k and v."""
    torch._dynamo.reset()
    q, k, v = given()  # of two blocks
    doubles = [each.double().requires_grad_() for each in (q, k, v)]
    bias, mask = SLOPES[:, None, None] * (KEY - ROW), ROW >= KEY
    right = expected(*doubles, bias=bias, mask=mask)
    call = lambda q, k, v: ts.flex(q, k, v, mods.alibi, mods.causal, arrays=(SLOPES,), return_lse=True)  # noqa: E731
    call = torch.compile(call, backend=backend, fullgraph=True) if backend else call
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    for _ in range(2):
        found = call(*leaves)
        generator = torch.Generator().manual_seed(0)
        of = [torch.randn(each.shape, generator=generator) for each in found]
        made = torch.autograd.grad(found, leaves, [of[0].half(), of[1]])
        for one, other in zip(
            made, torch.autograd.grad(right, doubles, [of[0].double(), of[1].double()], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(one, other.half(), rtol=5e-3, atol=5e-3)
    leaves[0].requires_grad_(False)
    (out,) = torch.autograd.grad(call(*leaves)[0].sum(), leaves[2])
    assert out.shape == v.shape


def test_what_no_kernel_computes_is_refused(launches) -> None:
    q, k, v = given(rows=70)
    leaf, slopes = q.clone().requires_grad_(), SLOPES.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"arrays\[0\] requires a gradient"):
        ts.flex(q, k, v, mods.alibi, arrays=(slopes,))
    with pytest.raises(DeclarationError, match="score_grad"):  # in the forward pass
        ts.flex(leaf, k, v, mods.halved)
    right = torch.autograd.grad(expected(leaf, k, v, scale=0.125)[0].sum(), leaf)
    own = torch.autograd.grad(ts.flex(leaf, k, v, mods.halved, scale=0.25, score_grad=mods.half).sum(), leaf)
    torch.testing.assert_close(own, right, rtol=5e-3, atol=5e-3)
    with torch.no_grad():
        ts.flex(leaf, k, v, mods.halved)
        ts.flex(q, k, v, mods.alibi, arrays=(slopes,))
    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(UnsupportedError, match=r"not served under vmap, jvp, grad"):
            transform(lambda q: ts.flex(q, k, v, mask_mod=mods.causal))(torch.stack([q, q]))
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"not served under vmap, jvp, grad"):
        ts.flex(forward_ad.make_dual(q, q), k, v, mask_mod=mods.causal)


# Errors


ONE = torch.nested.nested_tensor([torch.zeros(2, 3, 16), torch.zeros(2, 4, 16)])


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({}, DeclarationError, "give score_mod or mask_mod; attention without either is tiledsched.sdpa"),
        ({"mask_mod": lambda b, h, i, j: i >= j}, DeclarationError, "it must be a function with a name in a file"),
        (
            {"mask_mod": functools.partial(mods.causal, 1)},
            DeclarationError,
            "partial.* cannot be compiled; it must be a function with a name in a file",
        ),
        ({"mask_mod": 3}, DeclarationError, "mask_mod: 3 cannot be compiled|3 is not a callable object"),
        ({"mask_mod": print}, DeclarationError, "print.* cannot be compiled; it must be a function with a name"),
        (
            {"mask_mod": mods.documents},
            DeclarationError,
            r"mask_mod must take \(b, h, q_idx, kv_idx\), and documents does not",
        ),
        (
            {"mask_mod": mods.window(3), "arrays": (SLOPES,)},
            DeclarationError,
            r"must take \(b, h, q_idx, kv_idx, array0\), and .*near does not: too many.* or end with \*arrays",
        ),
        ({"score_mod": mods.causal}, DeclarationError, "causal must return scores; give what hides keys as mask_mod"),
        ({"score_mod": mods.turned}, DeclarationError, "flex_mods.py, line .*turned"),
        ({"mask_mod": mods.between}, DeclarationError, "write &, | and ~ in place of and, or, not and chains"),
        (
            {"score_mod": mods.alibi, "arrays": SLOPES},
            ProblemError,
            r"arrays must be a tuple of tensors.* arrays=\(ids,\)",
        ),
        ({"score_mod": mods.alibi, "arrays": (3,)}, ProblemError, r"arrays\[0\] must be a torch.Tensor on.* got int"),
        (
            {"score_mod": mods.alibi, "arrays": (SLOPES.to("meta"),)},
            ProblemError,
            r"on q's device, cpu, got one on meta",
        ),
        (
            {"mask_mod": mods.causal, "v": torch.zeros(2, 2, ROWS, 257).half()},
            ProblemError,
            "no more than that, got 16 and 257",
        ),
        ({"mask_mod": mods.causal, "scale": -1.0}, ProblemError, "softmax scale must be positive"),
        (
            {"mask_mod": mods.causal, "block_mask": 3},
            ProblemError,
            "what tiledsched.block_mask returns, got builtins.int",
        ),
        ({"mask_mod": mods.causal, "q": [1]}, ProblemError, "q must be a torch.Tensor, got list"),
        ({"mask_mod": mods.causal, "q": ONE}, UnsupportedError, "flex takes no nested tensors"),
        ({"mask_mod": mods.causal, "k": given()[1][:1]}, ProblemError, "expand what is to be broadcast|agree in batch"),
        ({"mask_mod": mods.causal, "q": given()[0].float()}, ProblemError, "must have one dtype"),
    ],
)
def test_wrong_arguments(launches, how, error, words) -> None:
    named = dict(zip("qkv", given(), strict=True)) | how
    for _ in range(2):
        with pytest.raises(error, match=words):
            ts.flex(named.pop("q", None), named.pop("k", None), named.pop("v", None), **named)
        named = dict(zip("qkv", given(), strict=True)) | how


def test_other_types_are_refused(launches) -> None:
    with pytest.raises(
        UnsupportedError, match=r"torch.float32 is not served; use torch.float16.*set it to torch to use its ref"
    ):
        ts.flex(*(each.float() for each in given()), mask_mod=mods.causal)


def test_block_masks_of_other_calls_are_refused(launches) -> None:
    q, k, v = given()
    mask = ts.block_mask(mods.causal, q, k)
    ts.flex(q, k, v, block_mask=mask)
    ts.flex(q, k, v, block_mask=mask)
    for others in ((q[:, :, :149], k, v), (q, k[:, :, :149], v[:, :, :149])):  # as many blocks
        for _ in range(2):
            ts.flex(*others, block_mask=ts.block_mask(mods.causal, *others[:2]))
        with pytest.raises(
            ProblemError, match=r"block_mask is for 150 rows and 150 keys.*make one with tiledsched.block_mask"
        ):
            ts.flex(*others, block_mask=mask)
    with pytest.raises(ProblemError, match="another function than that of block_mask"):
        ts.flex(q, k, v, mask_mod=mods.window(3), block_mask=mask)
    ts.flex(q, k, v, mask_mod=mods.causal, block_mask=mask)
    of_ids = ts.block_mask(mods.documents, q, k, (ids(),))
    with pytest.raises(ProblemError, match=r"with lists \(2, 1, 2, 4\) on cpu; these tensors have batch 3"):
        ts.flex(*(each[[0, 1, 1]] for each in (q, k, v)), block_mask=of_ids, arrays=(ids(),))
    with pytest.raises(ProblemError, match=r"lists must be a contiguous int32 tensor .* 2, 4\]"):
        BlockMask(mask.lists.long(), mods.causal, ROWS, ROWS)
    with pytest.raises(ProblemError, match=r"k must be a torch.Tensor"):
        ts.block_mask(mods.causal, q, 3)


# Block masks


def test_pictures(launches) -> None:
    q, k, _ = tensors(rows=400, columns=16)
    assert str(ts.block_mask(mods.causal, q, k)).splitlines() == [
        "400 rows x 400 keys in blocks of 128: 38% seen in full (#),",
        "25% in part (+), 38% not at all (.)",
        "+...",
        "#+..",
        "##+.",
        "###+",
    ]
    lists = torch.zeros(2, 1, 100, 102, dtype=torch.int32)  # no row sees a key
    drawn = str(BlockMask(lists, mods.causal, 12_800, 12_800)).splitlines()
    assert drawn[1:3] == ["0% in part (+), 100% not at all (.), the first of 2 masks", "." * 50]
    assert len(drawn) == 52


def test_given_patterns_are_those_of_the_function(launches) -> None:
    q, k, v = tensors(rows=300, keys=400, columns=16)
    made = ts.block_mask(mods.causal, q, k)
    states = made.states()
    given_mask = BlockMask.from_blocks(mods.causal, 300, 400, states > 0, states == 2)
    assert torch.equal(given_mask.lists, made.lists)
    assert torch.equal(given_mask.states(), states)
    assert torch.equal(ts.flex(q, k, v, block_mask=given_mask), ts.flex(q, k, v, mask_mod=mods.causal))
    everything = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    edge = BlockMask.from_blocks(mods.causal, 300, 400, everything, everything).states()
    assert edge[..., 3].eq(1).all()  # the last block has keys beyond the end
    assert edge[..., :3].eq(2).all()
    with pytest.raises(ProblemError, match="must be boolean tensors of one shape"):
        BlockMask.from_blocks(mods.causal, 300, 400, everything.int())
    with pytest.raises(ProblemError, match=r"lists must be .* 3, 6\]"):
        BlockMask.from_blocks(mods.causal, 300, 400, everything[..., :3])


# Without a GPU


def test_on_the_cpu_the_reference_computes() -> None:
    q, k, v = (each.float() for each in given())
    how = {"score_mod": mods.alibi, "mask_mod": mods.causal, "arrays": (SLOPES,), "scale": 0.3}
    words = "tiledsched.flex uses its reference, in float64 on the CPU: q is on cpu"
    with pytest.warns(UserWarning, match=words):
        check_in_float32(ts.flex(q, k, v, return_lse=True, **how), q, k, v)
    with warnings.catch_warnings(action="error"):  # once
        check_in_float32(ts.flex(q, k, v, return_lse=True, **how), q, k, v)
    assert str(ts.block_mask(mods.causal, q, k)).endswith("+.\n#+")
    compiled = torch.compile(lambda q, k, v: ts.flex(q, k, v, mask_mod=mods.causal), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), ts.flex(q, k, v, mask_mod=mods.causal))
    with configure(fallback="error"), pytest.raises(UnsupportedError, match=r"q is on cpu.*to use its reference"):
        ts.flex(q, k, v, mask_mod=mods.causal)


def check_in_float32(found, q, k, v):
    out, lse = expected(q, k, v, bias=SLOPES[:, None, None] * (KEY - ROW), mask=ROW >= KEY, scale=0.3)
    torch.testing.assert_close(found[0], out.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], lse.float(), rtol=1e-5, atol=1e-5)


def test_explain(launches) -> None:
    q, k, v = given()
    for how in ({"mask_mod": mods.documents}, {"block_mask": ts.block_mask(mods.documents, q, k, (ids(),))}):
        found = ts.explain(q, k, v, arrays=(ids(),), **how)
        ts.flex(q, k, v, arrays=(ids(),), **how)
        assert found.problem.kernel.startswith("flex_documents_")
        assert [each.served for each in plans.cache.ready.values()] == [found.served]
    with pytest.raises(ProblemError, match="say these in one of the functions"):
        ts.explain(q, k, v, mask_mod=mods.causal, window=3, causal=True)
    with (
        changed(device_type="cuda"),
        pytest.raises(UnsupportedError, match=r"q is on cpu.*flex leaves this call to its ref"),
    ):
        ts.explain(q, k, v, mask_mod=mods.causal)


@pytest.mark.parametrize("axis", [0, 1], ids=["sequences", "heads"])
def test_a_block_mask_of_one_head_or_sequence_is_refused_for_more_where_its_function_tells_them_apart(launches, axis):
    """It was taken as that of all, and the output was wrong."""

    def by_head(b, h, q_idx, kv_idx, *arrays):
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= 64 * (b + h))

    q, k, v = tensors(batch=2, heads=2, kv_heads=2, rows=300)
    one = [each.narrow(axis, 0, 1) for each in (q, k)]
    with pytest.raises(ProblemError, match="block_mask is for"):
        ts.flex(q, k, v, block_mask=ts.block_mask(by_head, *one))
    agrees = ts.flex(q, k, v, block_mask=ts.block_mask(by_head, q, k)) - ts.flex(q, k, v, mask_mod=by_head)
    assert not agrees.any()
    assert "0% seen in full" in str(ts.block_mask(mods.causal, q[:, :, :0], k))
