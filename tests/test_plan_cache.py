"""Finding the plan of a call: by torch's comparison with calls before it, and by key where torch has no such thing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from serve_on_cpu import TOLERANCE, expected, rows_first, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tiledsched import configure
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.ops import plans, sdpa as serve
from tiledsched.serve import plan_cache, process

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(params=["compared", "by key"])
def served(request, launches, monkeypatch):
    """Launches to come, with torch's comparison and without it."""
    tried = tuple(int(part) for part in torch.__version__.split(".")[:2]) in plan_cache.COMPARED
    assert (plan_cache.comparison() is not None) == tried
    if not tried and request.param == "compared":
        pytest.skip("this torch's comparison was not tried: every lookup is by key")
    if request.param == "by key":
        monkeypatch.setattr(plan_cache, "comparison", lambda: None)
    yield launches
    assert bool(plans.cache.recent) <= (request.param == "compared")


def warm(*given, **flags):
    """Call until the plan is tried first: through the operator, twice by key, by comparison."""
    for _ in range(4):
        out = serve.sdpa(*given, **flags)
    return out


def odd_strides(x):
    """The same tensor, contiguous, with a stride of the axis of size 1 that no new tensor has."""
    assert x.shape[0] == 1
    return x.as_strided(x.shape, (7, *x.stride()[1:]))


def misaligned(x):
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def calls():
    """Calls that differ from the first in one thing each: (tensors, flags)."""
    q, k, v = tensors(rows=8, heads=4)
    longer, grouped = tensors(rows=8, keys=9, heads=4), tensors(rows=8, heads=4, kv_heads=2)
    one_head = tuple(x[:, :1] for x in (k, v))
    return {
        "plain": ((q, k, v), {}),
        "rows": (tensors(rows=9, keys=8, heads=4), {}),
        "keys": (longer, {}),
        "heads": (tensors(rows=8), {}),
        "batch": (tensors(rows=8, heads=4, batch=2), {}),
        "columns": (tensors(rows=8, heads=4, columns=24), {}),
        "value columns": (tensors(rows=8, heads=4, value_columns=24), {}),
        "dtype": (tuple(x.bfloat16() for x in (q, k, v)), {}),
        "rows and heads swapped": (tuple(x.reshape(1, 8, 4, 16) for x in (q, k, v)), {}),
        "grouped": (grouped, {"enable_gqa": True}),
        "transposed": ((rows_first(q), rows_first(k), rows_first(v)), {}),
        "transposed q": ((rows_first(q), k, v), {}),
        "transposed v": ((q, k, rows_first(v)), {}),
        "sliced": ((q, longer[1][:, :, :8], longer[2][:, :, 1:]), {}),
        "expanded": ((q, *(x.expand(1, 4, 8, 16) for x in one_head)), {}),
        "odd strides": (tuple(map(odd_strides, (q, k, v))), {}),
        "misaligned": ((misaligned(q), k, v), {}),
        "top_left": ((q, k, v), {"causal": True}),
        "bottom_right": (longer, {"causal": "bottom_right"}),
        "scale": ((q, k, v), {"scale": 0.5}),
        "other scale": ((q, k, v), {"scale": 0.25000001}),
        "log-sum-exp": ((q, k, v), {"return_lse": True}),
        "one tensor": ((q, q, q), {}),
        "k is v": ((q, k, k), {}),
    }


def arguments(call):
    given, flags = call
    causal = {True: "top_left"}.get(flags.get("causal"), flags.get("causal"))
    return (*given, causal, flags.get("scale"), flags.get("return_lse", False))


def check(call) -> None:
    """One call, against torch."""
    given, flags = call
    out = serve.sdpa(*given, **flags)
    want = expected(*given, arguments(call)[3], flags.get("scale"))
    out = out[0] if flags.get("return_lse") else out
    torch.testing.assert_close(out, want, **TOLERANCE[want.dtype])


@pytest.mark.parametrize("name", calls())
def test_a_call_after_another_gets_its_own_plan(served, name) -> None:
    others, call = calls(), calls()[name]
    warm(*others["plain"][0])
    for _ in range(4):
        check(call)
        check(others["plain"])


def test_any_call_after_any_other_gets_the_plan_of_its_key(served) -> None:
    every = {name: arguments(call) for name, call in calls().items()}
    for given, flags in calls().values():
        serve.sdpa(*given, **flags)
    for before in every.values():
        for after in every.values():
            plans.cache.recent = ()
            for each in (before, before, before, after, after, after, before):
                assert plans.find_ready(*each) is plans.cache.ready[plans.plan_key(*each)]


def test_calls_in_turn_are_not_looked_up_by_key(launches, monkeypatch) -> None:
    kinds = ("plain", "keys")
    for name in kinds:
        warm(*calls()[name][0], **calls()[name][1])
    monkeypatch.setattr(plans, "plan_key", None)
    for _ in range(2):
        for name in kinds:
            check(calls()[name])


@pytest.mark.parametrize("other", ["plain", "odd strides"])
def test_what_a_comparison_refuses_is_compared_anew(launches, monkeypatch, other) -> None:
    """Strides of an axis of size 1 are not in the key, and inference mode is not, either."""
    warm(*calls()["plain"][0])
    with torch.inference_mode(other == "plain"):
        warm(*calls()[other][0])
        monkeypatch.setattr(plans, "plan_key", None)
        check(calls()[other])
    check(calls()["plain"])


def test_few_are_compared_and_many_in_turn_change_nothing(launches) -> None:
    for given, flags in calls().values():
        warm(*given, **flags)
    before = plans.cache.recent
    assert len(before) == plan_cache.MAX_RECENT
    for _ in range(3):
        for name in ("dtype", "keys", "top_left", "scale"):
            check(calls()[name])
    assert plans.cache.recent is before


# What differs in one tensor


def test_each_device_has_its_plan() -> None:
    """With fake tensors, which are of any device."""
    with FakeTensorMode():
        places = [[torch.empty(1, 2, 8, 16, device=f"cuda:{index}") for _ in "qkv"] for index in (0, 1)]
    mixed = [places[0][0], places[1][1], places[0][2]]
    assert len({plans.plan_key(*given, None, None, False) for given in (*places, mixed)}) == 3
    assert plans.find_ready(*places[0], None, None, False) is None  # what they hold lies nowhere


CHANGES = {
    "device": (lambda x: x.to("meta"), ProblemError, "must be on one device"),
    "nested": (lambda x: torch.nested.nested_tensor([x]), UnsupportedError, "nested tensors are given"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_unlike_the_others_is_noticed(served, change, place) -> None:
    given = list(calls()["plain"][0])
    warm(*given)
    other, error, words = CHANGES[change]
    given[place] = other(given[place])
    with pytest.raises(error, match=words):
        serve.sdpa(*given)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_gradients_are_noticed(served, place) -> None:
    given = list(calls()["plain"][0])
    warm(*given)
    given[place] = given[place].clone().requires_grad_()
    for without in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with without():
            warm(*given)
        assert serve.sdpa(*given).requires_grad


# Settings


def test_settings_hold_at_once(served) -> None:
    given = calls()["plain"][0]
    warm(*given)
    with configure(tile_m=128, tile_n=32):
        warm(*given)
    with configure(accum_mode="fp16"):
        warm(*given)
    warm(*given)
    serve.reload()
    warm(*given)
    sizes = [launch[3][5:7] for launch in served]
    assert set(sizes[4:8]) == {(128, 32)}
    assert (128, 32) not in (sizes[:4] + sizes[12:])
    assert len({id(launch[2]) for launch in served[16:]}) == 1  # a kernel object of the time after the reload
    assert served[16][2] is not served[15][2]


@pytest.mark.parametrize("during", ["lookup", "launch"])
def test_what_is_forgotten_meanwhile_stays_forgotten(launches, monkeypatch, during) -> None:
    def reload_meanwhile(*given):
        process.forget_plans()
        return found(*given)

    given = calls()["plain"][0]
    if during == "lookup":
        serve.sdpa(*given)
        serve.sdpa(*given)
        found = plan_cache.comparison
        monkeypatch.setattr(plan_cache, "comparison", reload_meanwhile)
    else:
        found, launches.runtime.launch = launches, reload_meanwhile
    serve.sdpa(*given)
    assert (plans.cache.recent, plans.cache.ready) == ((), {})
    assert len(launches) == (3 if during == "lookup" else 1)


# Threads


def test_threads_with_calls_of_their_own(served) -> None:
    def repeat(names) -> None:
        for _ in range(5):
            for name in names:
                check(calls()[name])

    names = list(calls())
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(repeat, [names[start::4] for start in range(4)])) == [None] * 4


# Tensors and states that a comparison must refuse

SPECIAL = {
    "meta": lambda q: q.to("meta"),
    "fake": lambda q: FakeTensorMode().from_tensor(q),
    "functional": torch._to_functional_tensor,
    "parameter": lambda q: torch.nn.Parameter(q, requires_grad=False),
    "negated": torch._neg_view,
    "sparse": torch.Tensor.to_sparse,
    "compressed": lambda q: torch.sparse_csr_tensor([0, 1], [0], q[0, 0, 0, :1], (1, 8)),
    "zeros without memory": lambda q: torch._efficientzerotensor(q.shape, dtype=q.dtype),
    "no tensor": lambda q: None,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", SPECIAL)
def test_special_tensors_are_refused(launches, name) -> None:
    q, k, v = calls()["plain"][0]
    warm(q, k, v)
    alike, odd = plans.cache.recent[0][1], SPECIAL[name](q)
    assert alike(q, k, v)
    assert not any(alike(*given) for given in ((odd, k, v), (q, odd, v), (q, k, odd)))


def test_autocast_is_noticed(served) -> None:
    given = calls()["plain"][0]
    warm(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert warm(*given).dtype == torch.bfloat16
    assert serve.sdpa(*given).dtype == torch.float16


def test_tracing_and_transforms_are_noticed(served) -> None:
    given = calls()["plain"][0]
    want = warm(*given)
    graph = make_fx(lambda *x: serve.sdpa(*x))(*given)
    assert any("tiledsched.sdpa" in str(node.target) for node in graph.graph.nodes)
    both = torch.func.vmap(lambda *x: serve.sdpa(*x))(*(torch.stack([x, x + 1]) for x in given))
    torch.testing.assert_close(both, torch.stack([want, serve.sdpa(*(x + 1 for x in given))]))


# Where torch has no comparison, or another


@pytest.mark.parametrize(
    "found",
    ["9.9.0", None, object, lambda *given, **named: SimpleNamespace(check=lambda *tensors: True)],
    ids=["unknown release", "none", "refuses its arguments", "accepts everything"],
)
def test_a_torch_with_another_comparison_is_looked_up_by_key(launches, monkeypatch, found) -> None:
    if found == "9.9.0":
        monkeypatch.setattr(torch, "__version__", found)
    else:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", found)
    plan_cache.comparison.cache_clear()
    try:
        for name in ("plain", "transposed", "plain"):
            warm(*calls()[name][0])
            check(calls()[name])
        assert plans.cache.recent == ()
    finally:
        plan_cache.comparison.cache_clear()
