"""Gradients of `sdpa` and `sdpa_varlen`: what they are, and that everything torch does with gradients works."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from attention_gradients import errors, exact_gradients
from serve_on_cpu import capturing, rows_first, tensors
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tiledsched as ts
from tiledsched import configure
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention_backward import AttentionBackward
from tiledsched.ops import backward, operator, plans, sdpa as serve
from tiledsched.ops.backward import sdpa_backward_operator
from tiledsched.ops.operator import sdpa_lse_operator
from tiledsched.ops.varlen import sdpa_paged, sdpa_varlen
from tiledsched.rivals.offers import Offer, Rival
from tiledsched.serve import plan as plan_module
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.captured_calls import read_seen

pytestmark = pytest.mark.usefixtures("fresh")

LARGEST = 4e-3
"""Relative error of gradients in float16."""
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])
STARTS, LENGTHS = torch.tensor([3, 0, 40]), torch.tensor([40, 20, 40])
"""Of three sequences; the last sees no key."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def leaves(**sizes):
    return [each.requires_grad_() for each in tensors(**sizes)]


def taken(out, given, dout=None):
    """The gradients of `given`."""
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype) if dout is None else dout
    return dout, torch.autograd.grad(out, given, dout)


def right(found, wanted) -> None:
    assert max(errors(found, wanted)) < LARGEST, errors(found, wanted)


# What they are


@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ({}, {"causal": True}),
        ({"dtype": torch.bfloat16}, {}),
        ({"heads": 4, "kv_heads": 2, "keys": 40, "value_columns": 24}, {"causal": "bottom_right", "scale": 0.4}),
        ({"keys": 12}, {"causal": "bottom_right"}),
        ({"batch": 3, "heads": 4, "kv_heads": 1, "keys": 40}, {"window": (6, 5), "softcap": 2.0, "sinks": SINKS}),
        ({"batch": 3, "heads": 4, "keys": 40}, {"key_starts": STARTS, "key_lengths": LENGTHS, "causal": True}),
    ],
    ids=lambda given: "-".join(map(str, given)),
)
@pytest.mark.parametrize("lse", [False, True])
def test_gradients_are_those_of_float64(launches, sizes, asked, lse) -> None:
    q, k, v = given = leaves(**sizes)
    if "sinks" in asked:
        asked = {**asked, "sinks": asked["sinks"].clone().requires_grad_()}
        given = [*given, asked["sinks"]]
    found = serve.sdpa(q, k, v, return_lse=lse, **asked)
    out, sums = found if lse else (found, None)
    dout = torch.randn_like(out)
    dlse = torch.randn_like(sums) if lse else None
    dlse = torch.where(sums.isfinite(), dlse, 0.0) if lse else None
    made = torch.autograd.grad(found, given, (dout, dlse) if lse else dout)
    assert [each.dtype for each in made] == [each.dtype for each in given]
    largest = 2e-2 if out.dtype == torch.bfloat16 else LARGEST
    wanted = exact_gradients(q, k, v, dout, dlse=dlse, **{**asked, "sinks": asked.get("sinks")})
    assert max(errors(made, wanted)) < largest, errors(made, wanted)


@pytest.mark.parametrize("asked", [{}, {"causal": True, "window": 7, "sinks": SINKS}, {"softcap": 2.0, "scale": 0.3}])
def test_gradients_of_packed_sequences(launches, asked) -> None:
    generator = torch.Generator().manual_seed(7)
    rows, keys = torch.tensor([0, 9, 9, 10, 40]), torch.tensor([0, 4, 37, 37, 67])
    shapes = ((40, 4, 16), (67, 2, 16), (67, 2, 32))
    given = [torch.randn(shape, generator=generator).half().requires_grad_() for shape in shapes]
    asked = dict(asked)
    if "sinks" in asked:
        asked["sinks"] = asked["sinks"].clone().requires_grad_()
    out, lse = sdpa_varlen(*given, rows, keys, return_lse=True, **asked)
    every = [*given, *([asked["sinks"]] if "sinks" in asked else [])]
    dout, dlse = torch.randn_like(out), torch.where(lse.isfinite(), torch.randn_like(lse), 0.0)
    found = torch.autograd.grad((out, lse), every, (dout, dlse))
    dense = [each.transpose(0, 1)[None] for each in (*given, dout)]
    asked["causal"] = "bottom_right" if asked.get("causal") else False
    wanted = exact_gradients(*dense, dlse=dlse[None], cu_q=rows, cu_k=keys, **asked)
    right([*(each.transpose(0, 1)[None] for each in found[:3]), *found[3:]], wanted)


def side_by_side(q, k, v):
    """Parts of one tensor `[batch, rows, 3, heads, columns]`, as one projection makes them."""
    return torch.stack([each.transpose(1, 2) for each in (q, k, v)], 2).transpose(1, 3).unbind(2)


LAYOUTS = {
    "rows first": lambda *given: [each.transpose(1, 2).contiguous().transpose(1, 2) for each in given],
    "parts of one": side_by_side,
    "expanded keys": lambda q, k, v: (q, *(each[:, :1].expand(-1, q.shape[1], -1, -1) for each in (k, v))),
    "the same": lambda q, k, v: (q, q, q),
    "columns apart": lambda *given: [each.mT.contiguous().mT for each in given],
}
GRADIENTS = {
    "of a sum": lambda out: torch.ones((), dtype=out.dtype).expand(out.shape),
    "of a mean over rows": lambda out: torch.randn(2, 2, 1, 16).to(out.dtype).expand(out.shape),
    "columns apart": lambda out: torch.randn(out.mT.shape).to(out.dtype).mT,
    "rows first": lambda out: torch.randn(out.transpose(1, 2).shape).to(out.dtype).transpose(1, 2),
    "part of more": lambda out: torch.randn(*out.shape[:3], 40).to(out.dtype)[..., 8:24],
}


@pytest.mark.parametrize(("layout", "kind"), [*zip(LAYOUTS, GRADIENTS, strict=True)])
def test_tensors_may_lie_in_any_way(launches, layout, kind) -> None:
    given = LAYOUTS[layout](*tensors(batch=2))
    q, k, v = (
        (each.detach().requires_grad_() for each in given) if layout != "the same" else [given[0].requires_grad_()] * 3
    )
    out = serve.sdpa(q, k, v, causal=True)
    dout = GRADIENTS[kind](out)
    found = sdpa_backward_operator(
        dout, q, k, v, *sdpa_lse_operator(*(x.detach() for x in (q, k, v)), "top_left"), "top_left"
    )
    for each, like in zip(found, (q, k, v), strict=False):
        assert each.stride() == torch.empty_like(like).stride()
    wanted = exact_gradients(q, k, v, dout, causal=True)
    right(found[:3], wanted)
    if layout == "the same":
        right(taken(out, [q], dout)[1], [sum(wanted)])
    else:
        right(taken(out, (q, k, v), dout)[1], wanted)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True)])
def test_only_what_requires_gradients_gets_them(launches, wanted) -> None:
    q, k, v = given = [each.requires_grad_(needed) for each, needed in zip(tensors(), wanted, strict=True)]
    serve.sdpa(q, k, v).sum().backward()
    assert [each.grad is not None for each in given] == list(wanted)
    exact = exact_gradients(q, k, v, torch.ones_like(q))
    right([each.grad for each in given if each.grad is not None], [e for e, n in zip(exact, wanted, strict=True) if n])


def test_three_axes_and_the_log_sum_exp_alone(launches) -> None:
    q, k, v = leaves()
    _, lse = serve.sdpa(q[0], k[0], v[0], return_lse=True)
    dlse = torch.randn_like(lse)
    found = torch.autograd.grad(lse, (q, k, v), dlse)
    wanted = exact_gradients(q, k, v, torch.zeros_like(q), dlse=dlse[None])
    right(found[:2], wanted[:2])
    assert not found[2].any()


def test_a_scale_whose_gradient_is_required_is_refused(launches) -> None:
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(ProblemError, match="scale requires gradients, and attention has none of it; multiply q by it"):
        serve.sdpa(*tensors(), scale=scale)
    with torch.no_grad():
        serve.sdpa(*tensors(), scale=scale)


@pytest.mark.parametrize("shapes", [((1, 2, 0, 16), (1, 2, 5, 16)), ((1, 2, 5, 16), (1, 2, 0, 16))])
def test_empty_tensors_have_gradients(launches, left_to_torch, shapes) -> None:
    q, k, v = (torch.randn(shape).half().requires_grad_() for shape in (shapes[0], shapes[1], shapes[1]))
    serve.sdpa(q, k, v).sum().backward()
    for each in (q, k, v):
        assert torch.equal(each.grad, torch.zeros_like(each))


# Calls like earlier ones, which torch's dispatcher does not see


def casting(call):
    def cast(*given):
        with torch.autocast("cpu", dtype=torch.float16):
            return call(*given)

    return cast


def saving_elsewhere(call):
    def saved(*given):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            return call(*given)

    return saved


AROUND = {
    "nothing": lambda call: call,
    "autocast": casting,
    "hooks": saving_elsewhere,
    "checkpoint": lambda call: functools.partial(checkpoint, call, use_reentrant=False),
    "reentrant checkpoint": lambda call: functools.partial(checkpoint, call, use_reentrant=True),
}
ASKED = {"plain": {}, "features": {"window": 7, "sinks": SINKS}}


@pytest.fixture
def warm(launches, monkeypatch):
    """Makes calls until their plans are tried first, and then has calls of the dispatcher fail."""

    def make(given, dout, **asked):
        for _ in range(4):
            taken(serve.sdpa(*given, causal=True, **asked), given, dout)
        dispatched = operator.sdpa_operator
        monkeypatch.setattr(
            operator, "sdpa_operator", lambda *all: None if torch.is_grad_enabled() else dispatched(*all)
        )
        monkeypatch.setattr("tiledsched.ops.backward.differentiate", None)
        launches.clear()

    return make


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("around", AROUND)
def test_a_call_like_earlier_ones_is_not_dispatched(launches, warm, around, asked) -> None:
    q, k, v = given = [rows_first(each).requires_grad_() for each in tensors(heads=4)]
    dout = torch.randn(1, 24, 4, 16).half().transpose(1, 2)
    warm(given, dout, **ASKED[asked])
    call = functools.partial(serve.sdpa, causal=True, **ASKED[asked])
    found = AROUND[around](call)(*given)
    found.backward(dout)
    right([each.grad for each in given], exact_gradients(q, k, v, dout, causal=True, **ASKED[asked])[:3])
    assert len(launches) == 4 + ("sinks" in ASKED[asked]) + ("checkpoint" in around)
    assert found.stride() == q.stride()


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True)])
def test_a_call_like_earlier_ones_of_which_others_require_gradients(launches, warm, wanted) -> None:
    q, k, v = given = leaves()
    warm(given, dout := torch.randn_like(q))
    for each, needed in zip(given, wanted, strict=True):
        each.requires_grad_(needed)
    for _ in range(3):
        out, sums = serve.sdpa(q, k, v, is_causal=True, return_lse=True)
        found = torch.autograd.grad(out, [each for each in given if each.requires_grad], dout)
    exact = exact_gradients(q, k, v, dout, causal=True)
    right(found, [each for each, needed in zip(exact, wanted, strict=True) if needed])
    with pytest.raises(RuntimeError, match="second time"):
        sums.sum().backward()
    with torch.no_grad():
        assert not serve.sdpa(q, k, v, is_causal=True, return_lse=True)[0].requires_grad


def test_what_changes_after_a_call_is_noticed_by_the_next(launches, monkeypatch) -> None:
    """The dispatcher, modes, other numerics, another type under autocast, and second derivatives."""
    q, k, v = given = leaves()
    for _ in range(4):
        out = serve.sdpa(q, k, v)
        out.backward(torch.ones_like(out))
    plan = operator.trained.ready[plans.plan_key(q, k, v, None, None, True)]
    with ts.batch_invariant():
        assert operator.trained.find_ready(given, (None, None, True), True) is None
        right(taken(serve.sdpa(q, k, v), given, torch.ones_like(q))[1], exact_gradients(q, k, v, torch.ones_like(q)))
    assert operator.trained.find_ready(given, (None, None, True), True) is plan
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert serve.sdpa(q, k, v).dtype == torch.bfloat16
    with capturing():
        taken(serve.sdpa(q, k, v), given, torch.ones_like(q))
    first = torch.autograd.grad(serve.sdpa(q, k, v), given, torch.ones_like(q), create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        first[0].sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        taken(serve.sdpa(q, k, v), given, torch.ones_like(q))
    finally:
        torch.use_deterministic_algorithms(False)
    assert {each.deterministic for each in plans_made()} == {False, True}
    with configure(compile="wait"):
        assert operator.trained.ready == {}


# Under torch's machinery


def test_the_operator_is_well_made(launches) -> None:
    q, k, v = tensors(rows=8, keys=12, value_columns=24, heads=4, kv_heads=2)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = sdpa_lse_operator(q, k, v, "bottom_right", 0.3, 5, 2.0, SINKS)
    given = (torch.randn_like(out), q, k, v, out, lse, "bottom_right", 0.3, 5, 2.0, SINKS)
    torch.library.opcheck(sdpa_backward_operator, given, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lse", [False, True])
def test_compiled_whole_they_are_the_same(launches, lse) -> None:
    """By the backend that divides the joint graph as inductor does."""

    def model(q, k, v):
        found = serve.sdpa(q * 2, k, v, causal=True, return_lse=lse)
        return found[0] + found[1][..., None] if lse else found + 1

    given = leaves(rows=8, keys=16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")(*given)
    dout, found = taken(out, given)
    right(found, [each.double() for each in taken(model(*given), given, dout)[1]])
    assert all(each.numel() < 8 * 16 * 16 for each in saved)


def test_one_graph_serves_many_lengths(launches) -> None:
    compiled = torch.compile(
        lambda *given: serve.sdpa(*given, causal=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows, stance in ((7, "default"), (19, "fail_on_recompile"), (33, "fail_on_recompile")):
        q, k, v = given = leaves(rows=rows)
        with torch.compiler.set_stance(stance):
            dout, found = taken(compiled(*given), given)
        right(found, exact_gradients(q, k, v, dout, causal=True))


def plans_made():
    return [plan.problem for plan in backward.cache.plans.values()]


@pytest.mark.parametrize("compiled", [False, True])
def test_deterministic_is_what_was_asked_for_or_what_torch_says_when_they_are_computed(launches, compiled) -> None:
    q, k, v = leaves()

    def attend(deterministic):
        call = lambda *given: serve.sdpa(*given, deterministic=deterministic)  # noqa: E731
        return torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call

    asked = ((None, False, False), (None, True, True), (True, False, True), (False, True, False))
    for given, torchs, wanted in asked[1:3] if compiled else asked:
        serve.reload()
        torch.use_deterministic_algorithms(torchs and compiled)  # in compiled code it may not change meanwhile
        out = attend(given)(q, k, v)
        torch.use_deterministic_algorithms(torchs)
        try:
            out.sum().backward()
            plan = serve.plan_for(q, k, v, backward=True, deterministic=given)
        finally:
            torch.use_deterministic_algorithms(False)
        assert [each.deterministic for each in plans_made()] == [wanted]
        assert plan.problem.deterministic is wanted


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_they_are_the_same(launches, reentrant) -> None:
    q, k, v = given = leaves()
    out = checkpoint(lambda *x: serve.sdpa(*x, causal=True) * 2, *given, use_reentrant=reentrant)
    out.sum().backward()
    right([each.grad for each in given], exact_gradients(q, k, v, torch.full_like(q, 2.0), causal=True))


def test_checkpoints_may_save_the_operator_and_not_what_it_reads(launches) -> None:
    given = leaves()
    saves = functools.partial(create_selective_checkpoint_contexts, [sdpa_lse_operator])
    out = checkpoint(lambda *x: serve.sdpa(*x) * 2, *given, use_reentrant=False, context_fn=saves)
    forward = [each[2] for each in launches]
    dout, found = taken(out, given)
    right(found, exact_gradients(*given, 2 * dout))
    assert not {id(each) for each in forward} & {id(each[2]) for each in launches[len(forward) :]}


def test_the_backward_pass_may_be_compiled_by_itself(launches) -> None:
    given = leaves()
    out = serve.sdpa(*given, causal=True)
    counter = torch._dynamo.testing.CompileCounter()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True)):
        out.sum().backward()
    assert counter.frame_count == 1
    right([each.grad for each in given], exact_gradients(*given, torch.ones_like(out), causal=True))


def test_nothing_of_the_size_of_the_scores_is_saved(launches) -> None:
    saved = []
    given = leaves(rows=64, columns=16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        serve.sdpa(*given, causal=True)
    assert sorted(saved) == [2 * 64] + 4 * [2 * 64 * 16]
    with torch.autograd.graph.save_on_cpu():
        out = serve.sdpa(*given, causal=True)
    dout, found = taken(out, given)
    right(found, exact_gradients(*given, dout, causal=True))


@pytest.mark.parametrize("which", ["q", "v", "out", "sinks"])
def test_what_was_saved_may_not_be_changed(launches, which) -> None:
    q, k, v = leaves(heads=4)
    named = {"q": q * 1, "k": k * 1, "v": v * 1, "sinks": SINKS.clone().requires_grad_() * 1}
    named["out"] = serve.sdpa(named["q"], named["k"], named["v"], sinks=named["sinks"])
    named["out"].sum().backward(retain_graph=True)
    with torch.no_grad():
        named[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        named["out"].sum().backward()


def test_autocast_and_gradients_in_float32(launches) -> None:
    q, k, v = given = leaves(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            out = serve.sdpa(q, k, v, causal=True)
            out.float().square().sum().backward()
    wanted = exact_gradients(q, k, v, 2 * out.float().detach(), causal=True)
    assert [each.grad.dtype for each in given] == [torch.float32] * 3
    assert max(errors([each.grad / 2 for each in given], wanted)) < 2e-2


def test_second_derivatives_are_refused_where_they_are_computed(launches) -> None:
    q, k, v = leaves()
    first = torch.autograd.grad(serve.sdpa(q, k, v).sum(), (q, k, v), create_graph=True)
    right(first, exact_gradients(q, k, v, torch.ones_like(q)))
    with pytest.raises(UnsupportedError, match=r"second derivatives .*SDPBackend\.MATH"):
        first[0].square().sum().backward()


def test_torch_func_is_torchs_and_vmap_is_ours(launches, left_to_torch) -> None:
    q, k, v = tensors(batch=3)
    with configure(fallback="error"), pytest.raises(UnsupportedError, match=r"torch.func"):
        torch.func.grad(lambda q: serve.sdpa(q, k, v).sum())(q)
    found = torch.func.grad(lambda q: serve.sdpa(q, k, v).sum())(q)
    assert launches == []
    wanted = exact_gradients(q, k, v, torch.ones_like(q))
    right([found], wanted[:1])
    given = [each.requires_grad_() for each in (q, k, v)]
    with configure(fallback="error"):
        out = torch.func.vmap(lambda *x: serve.sdpa(*(each[None] for each in x))[0])(*given)
        right(taken(out, given, torch.ones_like(out))[1], wanted)
        dout = torch.randn(2, *q.shape).half()  # two gradients of one output
        many = torch.autograd.grad(serve.sdpa(*given), given, dout, is_grads_batched=True)
    for at in range(2):
        right([each[at] for each in many], exact_gradients(*given, dout[at]))


# What torch computes instead, what is said and noted


def test_calls_without_our_gradients_are_torchs_from_the_start(launches, left_to_torch, monkeypatch) -> None:
    q, k, v = given = leaves()
    with monkeypatch.context() as patch:
        patch.setattr(LookupTable, "known_arch", lambda table, arch: table.kernel is Attention)
        dout, found = taken(serve.sdpa(*given, causal=True), given)
        right(found, exact_gradients(q, k, v, dout, causal=True))
        with configure(fallback="error"), pytest.raises(UnsupportedError, match="has no search space for sm_90"):
            serve.sdpa(*given)
    table, lengths = torch.tensor([[0, 1]]), torch.tensor([24])
    pages = [torch.randn(2, 16, 2, 16).half().requires_grad_() for _ in "kv"]
    sdpa_paged(torch.randn(1, 1, 2, 16).half(), *pages, table, lengths).sum().backward()
    assert pages[0].grad.any()
    with configure(fallback="error"), pytest.raises(UnsupportedError, match="keys lie in pages"):
        sdpa_paged(torch.randn(1, 1, 2, 16).half(), *pages, table, lengths)
    assert launches == []


def test_views_beyond_32_bits_are_torchs_or_copied(launches, left_to_torch, monkeypatch) -> None:
    q, k, v = given = leaves(keys=200)
    monkeypatch.setattr(plan_module, "LARGEST_INT32", k[:, :, :100].numel() + 1)
    with (
        configure(fallback="error"),
        pytest.raises(UnsupportedError, match=r"spans more than 2\*\*31 elements; call \.cont"),
    ):
        serve.sdpa(q, k[:, :, :100], v[:, :, :100])
    out = serve.sdpa(q, k[:, :, :100], v[:, :, :100])
    assert launches == []
    out = serve.sdpa(q, *(each[:, :, :100].contiguous() for each in (k, v)))
    dout, found = taken(out, given, torch.randn(1, 2, 24, 900).half()[..., :16])
    assert len(launches) > 1
    right(found[:1], exact_gradients(q, k[:, :, :100], v[:, :, :100], dout)[:1])


def test_where_the_kernel_refuses_torch_computes_the_gradients_again(launches, left_to_torch, monkeypatch) -> None:
    """As of a problem that is too large, in a graph that was traced for any sizes."""
    q, k, v = given = leaves(batch=3, heads=4, keys=40)
    asked = {"key_starts": STARTS, "sinks": SINKS.clone().requires_grad_(), "causal": True}
    out = serve.sdpa(*given, **asked)
    monkeypatch.setattr(backward.BackwardCall, "make_plan", lambda call: "no")
    launched = len(launches)
    every = [*given, asked["sinks"]]
    dout, found = taken(out, every)
    assert len(launches) == launched
    right(found, exact_gradients(q, k, v, dout, **asked))


@pytest.mark.parametrize("packed", [False, True])
def test_a_rival_that_serves_takes_what_the_kernel_takes(launches, monkeypatch, packed) -> None:
    calls = []

    def compute(q, k, v, out, dout, lse, *more):
        calls.append(more)
        if packed:
            return exact_gradients(q, k, v, dout, cu_q=more[0].long(), cu_k=more[1].long())
        return [each.half().contiguous() for each in exact_gradients(q, k, v, dout)]

    def choose(served, make):
        offer = Offer(name="other", ratio=0.5, capturable=False, reason="it is faster")
        call = make().get("other")
        return call and Rival(offer=offer, call=call), None

    monkeypatch.setattr(plan_module, "choose_rivals", choose)
    monkeypatch.setattr(backward, "raced", lambda problem, scale, cap, late: {"other": compute})
    q, k, v = given = [each.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for each in tensors()]
    begins = torch.tensor([0, 10, 24], dtype=torch.int32)
    for at in range(3):
        if packed:
            out = sdpa_varlen(*(each[0].transpose(0, 1) for each in given), begins, max_seqlen_q=14)
            dout = torch.randn(24, 2, 16).half()
            wanted = exact_gradients(q, k, v, dout.transpose(0, 1)[None], cu_q=begins.long(), cu_k=begins.long())
        else:
            out, dout = serve.sdpa(q, k, v), torch.randn(q.shape).half()
            wanted = exact_gradients(q, k, v, dout)
        found = torch.autograd.grad(out, given, dout)
        right(found, wanted)
        assert packed or all(each.stride() == q.stride() for each in found)
        assert len(calls) == at + 1
    assert not packed or calls[0][2:] == (14, 14)


def test_results_that_are_not_of_the_call_are_refused(launches) -> None:
    q, k, v = tensors()
    out, lse = sdpa_lse_operator(q, k, v)
    for wrong in ((out.float(), out, lse), (out, out[..., :8], lse), (out, out, lse.half())):
        with pytest.raises(ProblemError, match=r"must be torch\.float"):
            sdpa_backward_operator(wrong[0], q, k, v, *wrong[1:])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operators_launch_known_plans_at_once(launches, monkeypatch) -> None:
    """What compiled code calls looks for a plan before anything else."""
    given = [each.detach() for each in tensors()]
    dout = torch.randn_like(given[0])

    def called():
        with torch.no_grad():
            out, lse = sdpa_lse_operator(*given, "top_left")
            return out, lse, *sdpa_backward_operator(dout, *given, out, lse, "top_left")

    wanted = [called() for _ in range(3)][-1]
    monkeypatch.setattr(backward, "differentiate", None)
    monkeypatch.setattr(operator, "attend", None)
    for found, each in zip(called(), wanted, strict=True):
        assert torch.equal(found, each)
    nested = torch.nested.as_nested_tensor(given[0])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="'NestedTensorCPU' backend"):
        sdpa_lse_operator(nested, nested, nested)
    for each, error in ((nested, NotImplementedError), (dout.float(), TypeError)):  # of which no plan is known
        with torch.no_grad(), pytest.raises(error):
            sdpa_backward_operator(each, *given, *wanted[:2], "top_left")


def test_explain_and_plan_for_tell_what_backward_does(launches) -> None:
    q, k, v = leaves()
    plan = serve.plan_for(q, k, v, causal=True, backward=True)
    assert plan.problem.declaration is AttentionBackward
    assert serve.explain(q, k, v, causal=True, backward=True).problem == plan.problem
    assert "deterministic" in str(serve.explain(q, k, v, backward=True, deterministic=True))
    assert serve.explain(q, k, v, return_lse=True).problem.lse
    with configure(structure="two_pass"):
        assert serve.plan_for(q, k, v, backward=True).served.schedule["structure"] == "two_pass"
    serve.sdpa(q, k, v, causal=True).sum().backward()
    assert plan.problem in plans_made()


def test_backward_calls_are_seen(launches, tmp_path) -> None:
    given = leaves()
    with ts.capture(tmp_path):
        for _ in range(3):
            serve.sdpa(*given).sum().backward()
    found = {each.problem.kernel: each.calls for each in read_seen(tmp_path).problems}
    assert found == {"attention": 3, "attention_backward": 3}
