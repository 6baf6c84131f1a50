"""FlashAttention-4's compiled function called again with what its first call handed over."""

import threading

import pytest
import torch

from tiledsched.kernels.attention.call_cache import CallCache


class Theirs:
    """A function as FlashAttention-4's: Python that finds a compiled function in a cache of its own, and calls it."""

    def __init__(self, compiled, hand_over) -> None:
        self.compile_cache = {}
        self.python = 0
        self.compiled, self.hand_over = compiled, hand_over

    def __call__(self, q, k, v, *, out, **named):
        self.python += 1
        key = "key"
        if key not in self.compile_cache:
            self.compile_cache[key] = self.compiled
        for given in self.hand_over(q, k, v, out):
            self.compile_cache[key](*given)
        return out, None


def compiled(q, k, v, out, lse, scale, cu_q, scalars):
    out.copy_(
        torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), scale=scale
        ).transpose(1, 2)
    )


def plain(q, k, v, out):
    return [(q.detach(), k.detach(), v.detach(), out, None, 0.5, None, (None, None))]


def made(hand_over):
    theirs = Theirs(compiled, hand_over)
    return theirs, CallCache(lambda q, k, v, out: theirs(q, k, v, out=out), [theirs])


def tensors(seed=0, rows_outside=True, rows=8):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn((2, rows, 4, 16), generator=draw) for _ in range(3))
    if not rows_outside:
        q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v))
    return q, k, v, torch.empty_like(q)


def check(call, given):
    q, k, v, out = given
    with torch.no_grad():
        call(q, k, v, out)
    want = torch.empty_like(out)
    compiled(q, k, v, want, None, 0.5, None, None)
    assert torch.equal(out, want.detach())


@pytest.mark.parametrize(
    ("given", "python"),
    [
        ([tensors(seed) for seed in range(3)], 1),
        ([tensors(), tensors(rows_outside=False), tensors(rows=6), tensors(1), tensors(2, rows_outside=False)], 3),
    ],
    ids=["alike", "tensors that lie otherwise"],
)
def test_a_call_like_an_earlier_one_is_of_the_compiled_function_alone(given, python) -> None:
    theirs, call = made(plain)
    cache = theirs.compile_cache
    for each in given:
        check(call, each)
    assert theirs.python == python
    assert theirs.compile_cache is cache


TAIL = (None, 0.5, None, ())
HANDED_OVER = {
    "copied": lambda q, k, v, out: [(q.clone(), k, v, out, *TAIL)],  # because it lay otherwise
    "split": lambda q, k, v, out: [(q, k, v, torch.empty_like(out), *TAIL), (q, k, v, out, *TAIL)],
    "log-sum-exp": lambda q, k, v, out: [(q, k, v, out, torch.empty(3), 0.5, None, ())],
    "scalars": lambda q, k, v, out: [(q, k, v, out, None, 0.5, None, (None, torch.empty(3)))],
    "twice": lambda q, k, v, out: [(k, q, v, out, *TAIL), (q, k, v, out, *TAIL)],
}


@pytest.mark.parametrize("how", HANDED_OVER)
def test_what_is_not_sure_to_be_all_is_not_kept(how) -> None:
    theirs, call = made(HANDED_OVER[how])
    for seed in range(3):
        check(call, tensors(seed))
    assert theirs.python == 3


def test_calls_on_other_tensors_go_the_whole_way() -> None:
    theirs, call = made(plain)
    check(call, tensors())
    q, k, v, out = tensors(1)
    flat = torch.empty(out.numel() + 1)[1:].view_as(out).copy_(q)  # no multiple of 16 bytes
    check(call, (flat, k, v, out))
    check(call, (q.requires_grad_(), k, v, out))
    assert theirs.python == 3


def test_a_failure_leaves_their_cache_and_the_next_call_as_they_were() -> None:
    theirs, call = made(plain)
    theirs.compiled = lambda *given: 1 / 0
    cache = theirs.compile_cache
    q, k, v, out = tensors()
    with pytest.raises(ZeroDivisionError):
        call(q, k, v, out)
    assert theirs.compile_cache is cache
    cache.clear()
    theirs.compiled = compiled
    check(call, (q, k, v, out))


def test_calls_of_another_thread_are_not_taken_for_ours() -> None:
    theirs, call = made(plain)
    begun, done = threading.Event(), threading.Event()

    def slow(*given):
        if not begun.is_set():
            begun.set()
            done.wait(10)
        compiled(*given)

    def elsewhere():
        begun.wait(10)
        q, k, v, out = tensors(7)
        theirs(q, k, v, out=out)
        done.set()

    theirs.compiled = slow
    other = threading.Thread(target=elsewhere)
    other.start()
    check(call, tensors())
    other.join()
    check(call, tensors(1))
    assert theirs.python == 2  # ours once, and the other thread's


def test_a_function_without_such_a_cache_is_called_as_it_is() -> None:
    called = []

    def function(q, k, v, out):
        called.append(1)
        compiled(q, k, v, out, None, 0.5, None, None)
        return out

    for seed in range(2):
        check(CallCache(function, [function]), tensors(seed))
    assert len(called) == 2


# A backward pass: several compiled functions


class Gradients:
    """Functions as FlashAttention-4's for the backward pass: one prepares sums, one adds to them, one rounds them."""

    def __init__(self, changed=None) -> None:
        self.compile_cache, self.python, self.zeros = {}, 0, []
        self.before, self.after = (type("", (), {"compile_cache": {}})() for _ in range(2))
        self.changed = changed or (lambda *given: given)

    def __call__(self, q, out, dq, dk) -> None:
        self.python += 1
        q, out = self.changed(q.detach(), out)
        sums, counts = torch.full_like(q, 7.0), torch.zeros(q.shape[0], dtype=torch.int32)
        for function, compiled in ((self.before, self.prepare), (self, self.add), (self.after, self.round)):
            function.compile_cache.setdefault("key", compiled)
        self.before.compile_cache["key"](out, sums, 0.5)
        self.compile_cache["key"](q, sums, counts, dk, (None, None))
        self.after.compile_cache["key"](sums, dq, 2.0, None)

    @staticmethod
    def prepare(out, sums, scale):
        sums.copy_(scale * out)

    def add(self, q, sums, counts, dk, aux):
        self.zeros.append(not counts.any())
        counts += 1
        sums += q
        dk.copy_(q + 1)

    @staticmethod
    def round(sums, dq, scale, ends):
        dq.copy_(scale * sums)


PASSES = {
    "several functions": (Gradients(), range(3), (8, 8, 6, 8, 6), 2),
    "queries copied": (Gradients(lambda q, out: (q.clone(), out)), range(3), (8,) * 3, 3),
    "output copied": (Gradients(lambda q, out: (q, out.clone())), range(3), (8,) * 3, 3),
    "a function unknown": (Gradients(), (0, None), (8,) * 2, 2),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_repeated_where_all_its_functions_are_known_and_copy_nothing(name) -> None:
    theirs, known, calls, python = PASSES[name]
    functions = [theirs, theirs.before, theirs.after]
    call = CallCache(theirs, [None if place is None else functions[place] for place in known])
    for seed, rows in enumerate(calls):
        q, out, _, dq = tensors(seed, rows=rows)
        dk = torch.empty_like(q)
        call(q, out, dq, dk)
        torch.testing.assert_close(dq, 2 * q + out)
        torch.testing.assert_close(dk, q + 1)
    assert (theirs.python, theirs.zeros) == (python, [True] * len(calls))
    assert all(type(each.compile_cache) is dict for each in functions)


def test_a_pass_on_one_tensor_twice_is_not_repeated() -> None:
    theirs = Gradients()
    call = CallCache(theirs, [theirs, theirs.before, theirs.after])
    for _ in range(2):
        q, _, dk, dq = tensors()
        call(q, q, dq, dk)
        torch.testing.assert_close(dq, 3 * q)
    assert theirs.python == 2
