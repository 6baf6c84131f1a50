"""The plans of an operator, made once for each kind of call and found again by later ones.

Reading shapes, strides, types and devices in Python costs most of a lookup. So the plans used last are tried first, each
with torch's own comparison of tensors, in C++. It is stricter than the key, and whatever it refuses is looked up by key.
"""

from __future__ import annotations

import functools
import importlib
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from tiledsched.serve.background import Build

MAX_PLANS = 4096
"""Plans in a cache. A model that decodes poses a new problem with every token, so all are forgotten when there are more."""
COMPARED = ((2, 11), (2, 13))
"""Releases of torch whose comparison of tensors was tested. It is private to torch, made for the guards of compiled code; under
any other release every lookup is by key.
"""
MAX_RECENT = 2
"""Plans tried before the key is made: self- and cross-attention take turns."""
lock = threading.RLock()
P = TypeVar("P", bound=Any)
Tensors = tuple[Any, ...]
Options = tuple[Any, ...]
_gradients = torch.is_grad_enabled
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_keys_of = torch._C._dispatch_keys
_SPECIAL_KEYS = ~functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"{kind}{device}")).raw_repr()
        for kind in ("", "Autograd", "Autocast")
        for device in ("CPU", "CUDA")
    ),
    torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr(),
)
"""Every bit of a tensor's dispatch keys but those of an ordinary tensor in the memory of a CPU or GPU."""


def are_ordinary(tensors: Iterable[Any]) -> bool:
    """Whether each tensor is what lies in its memory.

    Others are subclasses (DTensors are), nested, sparse and zero tensors, those with a pending negation or conjugate, and
    wrappers of transforms: what they hold only torch's dispatcher can say. Forward-mode duals are found by
    :func:`tiledsched.serve.execute.is_plain_call`.
    """
    for each in tensors:  # noqa: SIM110  # faster than all()
        if type(each) not in _PLAIN or _keys_of(each).raw_repr() & _SPECIAL_KEYS:
            return False
    return True


def call_key(*call: Any) -> tuple[Any, ...]:
    """What a plan depends on. Strides count where a tensor is not contiguous: they tell its layout and how far it reaches."""
    return tuple(
        [
            each
            if not isinstance(each, torch.Tensor)
            else (each.shape, each.dtype, each.device)
            if each.is_contiguous()
            else (each.shape, each.dtype, each.device, each.stride())
            for each in call
        ]
    )


class PlanCache(Generic[P]):
    """The plans of one operator, for any number of threads."""

    __slots__ = ("_found_last", "_key_of", "_others", "building", "last_of_kind", "plans", "ready", "recent", "trained")
    every: list[PlanCache[Any]] = []  # noqa: RUF012

    def __init__(self, key_of: Callable[..., tuple[Any, ...]]) -> None:
        """`key_of(*tensors, *options)` is what a plan depends on."""
        self._key_of = key_of
        self.plans: dict[tuple[Any, ...], P | str] = {}
        """Plans by key, or the reason why there is none."""
        self.last_of_kind: dict[Any, tuple[Any, P]] = {}
        """For each kind of call the plan made last, and what its launches follow from: another call may have the same."""
        self.ready: dict[tuple[Any, ...], P] = {}
        """Plans that have been launched: their programs are compiled and loaded."""
        self.building: dict[tuple[Any, ...], Sequence[Build]] = {}
        """The programs that plans were launched without, because they were being compiled."""
        self.recent: tuple[tuple[Options, Callable[..., bool], P], ...] = ()
        """Plans in `ready` and the calls they are for: options, and torch's comparison with the tensors of such a call, in
        type, sizes, strides, dtype, device, layout, requires_grad and the state of torch's dispatcher. Plain tuples, which
        are read fastest; never changed, only replaced, for threads that read them."""
        self.trained: tuple[tuple[Options, Callable[..., bool], P], ...] = ()
        """Plans and calls, as in `recent`, of calls whose gradients are required."""
        self._found_last: P | None = None
        self._others: tuple[Any, ...] = ({}, {}, {}, {}, (), ())
        """The plans, last plans of kinds, ready plans, programs being built and recent plans of the other numerics."""
        self.every.append(self)

    def swap(self) -> None:
        """Exchange the plans of calls whose bits must not depend on the batch with those of other calls."""
        mine = self.plans, self.last_of_kind, self.ready, self.building, self.recent, self.trained
        self.plans, self.last_of_kind, self.ready, self.building, self.recent, self.trained = self._others
        self._others, self._found_last = mine, None

    def find_ready(self, tensors: Tensors, options: Options, trains: bool = False) -> P | None:
        """The plan for a call that needs nothing but launches; None where there is none yet, gradients are
        required, or a tensor is not ordinary.

        Args:
            tensors: plain tensors, not nested ones: torch's comparison would end the process.
            options: everything else that a plan depends on.
            trains: find it also where gradients are required; for callers that have seen that gradients are enabled.
        """
        for wanted, matches, plan in self.trained if trains else self.recent:
            if wanted == options and matches(*tensors):
                return plan
        return self.find_by_key(tensors, options, trains)

    def find_by_key(self, tensors: Tensors, options: Options, trains: bool = False) -> P | None:
        """The plan for a call that needs nothing but launches, where no recent plan matches."""
        if _gradients() and not trains:
            for each in tensors:
                if each.requires_grad:
                    return None
        key = self._key_of(*tensors, *options)
        found = self.ready.get(key)
        if found is not None and not are_ordinary(tensors):
            return None
        if found is not None and found is self._found_last:  # twice running: many kinds in turn change nothing
            self._try_first(key, found, tensors, options, trains)
        self._found_last = found
        return found

    def find(self, key: tuple[Any, ...], make: Callable[[], P | str]) -> P | str:
        """The plan of `key`, made if there is none, or the reason why there is none."""
        found = self.plans.get(key)
        if found is None:
            with lock:
                found = make()
                if len(self.plans) >= MAX_PLANS:
                    self.forget()
                self.plans[key] = found
        return found

    def exchange(self, key: tuple[Any, ...], plan: P, other: P) -> None:
        """Put another plan in the place of one, unless that was forgotten meanwhile, or other numerics hold now."""
        with lock:
            if self.plans.get(key) is plan:
                self.plans[key] = other

    def keep_ready(self, key: tuple[Any, ...], plan: P) -> None:
        """Note that `plan` was launched, unless it was forgotten meanwhile: the settings may have changed."""
        with lock:
            if self.plans.get(key) is plan:
                self.ready[key] = plan

    def forget(self) -> None:
        """Have every plan made anew."""
        with lock:
            self.plans.clear()
            self.ready.clear()
            self.building.clear()
            self.last_of_kind.clear()
            self.recent, self.trained, self._found_last = (), (), None
            self._others = ({}, {}, {}, {}, (), ())

    def _try_first(self, key: tuple[Any, ...], plan: P, tensors: Tensors, options: Options, trains: bool) -> None:
        """Try `plan` first from now on, where torch's comparison can be used."""
        if len({*map(id, tensors)}) < len(tensors):
            return  # the comparison takes no tensor twice
        compare = comparison()
        if compare is None:
            return
        check = compare(*tensors).check
        if not trains and any(each.requires_grad for each in tensors):  # it does not see that gradients are enabled
            recent = (options, lambda *given: not _gradients() and check(*given), plan)
        else:
            recent = (options, check, plan)
        name = "trained" if trains else "recent"
        with lock:
            if self.ready.get(key) is plan:  # and not forgotten meanwhile
                setattr(self, name, (recent, *getattr(self, name)[: MAX_RECENT - 1]))


@functools.cache
def comparison() -> Any:
    """What makes torch's comparison with given tensors; None where this torch has none that is known to work."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release not in COMPARED:
        return None
    try:
        guards = importlib.import_module("torch._C._dynamo.guards").TensorGuards
        compare = functools.partial(guards, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        one, other = (torch.empty(shape, device="cpu") for shape in ((2, 3), (3, 2)))
        check = compare(one, other).check
        return compare if check(one, other) is True and check(other, one) is False else None
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return None
