"""Finding the plan of a call: everything its launches need except the tensors, made once for each kind of call and kept.

Reading shapes, strides, dtypes and devices in Python costs most of a lookup. So the plans used last are tried first, each
with torch's own comparison of tensors, in C++; it is stricter than the key, and whatever it refuses is looked up by key.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from cuda.tile import TileError

from tiledsched.core.errors import LaunchError, RivalError
from tiledsched.serve.prebuilt import refusing_spills, spills_error
from tiledsched.serve.rivals import ELSEWHERE

log = logging.getLogger("tiledsched")
MAX_PLANS = 4096
"""Plans kept. A decoding model poses a new problem with every token, so all are forgotten when there are more."""
COMPARED = ((2, 11), (2, 13))
"""Releases of torch whose comparison of tensors was tried. It is torch's own business, made for the guards of compiled code;
under any other release every lookup is by key.
"""
MAX_RECENT = 2
"""Plans tried before the key is made: self- and cross-attention take turns."""
lock = threading.RLock()
P = TypeVar("P", bound=Any)
Tensors = tuple[Any, ...]
Options = tuple[Any, ...]
_gradients = torch.is_grad_enabled


class PlanCache(Generic[P]):
    """The plans of one operator, for any number of threads."""

    __slots__ = ("_found_last", "_key_of", "alike", "plans", "ready", "recent")
    every: list[PlanCache[Any]] = []  # noqa: RUF012

    def __init__(self, key_of: Callable[..., tuple[Any, ...]]) -> None:
        """`key_of(*tensors, *options)` is what a plan depends on."""
        self._key_of = key_of
        self.plans: dict[tuple[Any, ...], P | str] = {}
        """By key; or why there is none."""
        self.alike: dict[Any, tuple[Any, P]] = {}
        """Of each kind of call the last plan made, and what its launches were worked out from: another may have the same."""
        self.ready: dict[tuple[Any, ...], P] = {}
        """Those that have been launched: their programs are compiled and loaded."""
        self.recent: tuple[tuple[Options, Callable[..., bool], P], ...] = ()
        """Plans in `ready` and the calls they are for: options, and torch's comparison with the tensors of such a call, in
        type, sizes, strides, dtype, device, layout, requires_grad and the state of torch's dispatcher. Plain tuples, which
        are read fastest; never changed, only replaced, for threads that read them."""
        self._found_last: P | None = None
        self.every.append(self)

    def find_ready(self, tensors: Tensors, options: Options) -> P | None:
        """The plan for a call that needs nothing but launches; None where there is none yet, or gradients are required.

        Args:
            tensors: plain tensors, not nested ones: torch's comparison would end the process.
            options: everything else that a plan depends on.
        """
        for wanted, alike, plan in self.recent:
            if wanted == options and alike(*tensors):
                return plan
        return self.find_by_key(tensors, options)

    def find_by_key(self, tensors: Tensors, options: Options) -> P | None:
        """The same, where no comparison says yes."""
        if _gradients():
            for each in tensors:
                if each.requires_grad:
                    return None
        key = self._key_of(*tensors, *options)
        found = self.ready.get(key)
        if found is not None and found is self._found_last:  # twice running: many kinds in turn change nothing
            self._try_first(key, found, tensors, options)
        self._found_last = found
        return found

    def find(self, key: tuple[Any, ...], make: Callable[[], P | str]) -> P | str:
        """The plan of `key`, made if there is none, or why there is none."""
        found = self.plans.get(key)
        if found is None:
            with lock:
                found = make()
                if len(self.plans) >= MAX_PLANS:
                    self.forget()
                self.plans[key] = found
        return found

    def launch_first(
        self, key: tuple[Any, ...], plan: P, launch: Callable[[P], Any], instead: Callable[[P], P | None]
    ) -> Any:
        """Launch a plan for the first time and count it as launched; its result.

        Tables hold what compiles for arrays as they are measured. Where that does not compile for the layouts of a call, or was
        not measured and spills, or a rival refuses it, what `instead` makes of the plan is launched and kept; None for nothing
        else.

        Raises:
            LaunchError: of the plan, where there is nothing else, or of what is launched instead.
        """
        while True:
            try:
                with refusing_spills(bool(plan.served.alternatives) and plan.launch_on != ELSEWHERE):
                    result = launch(plan)
                break
            except LaunchError as error:
                refused = isinstance(error, RivalError)
                other = instead(plan) if refused or isinstance(error.__cause__, TileError) else None
                if other is None:
                    raise
                level = logging.INFO if isinstance(error.__cause__, spills_error()) else logging.WARNING
                log.log(level, "%s; %s is served instead", error, "our own kernel" if refused else "the next choice")
                plan = other
                with lock:
                    self.plans[key] = plan
        if not torch.cuda.is_current_stream_capturing():  # what a capture does without is left to the next eager call
            self.keep_ready(key, plan)
        return result

    def keep_ready(self, key: tuple[Any, ...], plan: P) -> None:
        """Count `plan` as launched, unless it was forgotten meanwhile: it may be of other settings than the next call."""
        with lock:
            if self.plans.get(key) is plan:
                self.ready[key] = plan

    def forget(self) -> None:
        """Make every plan again."""
        with lock:
            self.plans.clear()
            self.ready.clear()
            self.alike.clear()
            self.recent, self._found_last = (), None

    def _try_first(self, key: tuple[Any, ...], plan: P, tensors: Tensors, options: Options) -> None:
        """Try `plan` first from now on, where torch's comparison is of use."""
        if (tensors[0] is tensors[-1] and len(tensors) > 1) or len({*map(id, tensors)}) < len(tensors):
            return  # it takes no tensor twice
        compare = comparison()
        if compare is None:
            return
        check = compare(*tensors).check
        if any(each.requires_grad for each in tensors):  # it does not see gradients being enabled
            recent = (options, lambda *given: not _gradients() and check(*given), plan)
        else:
            recent = (options, check, plan)
        with lock:
            if self.ready.get(key) is plan:  # and not forgotten meanwhile
                self.recent = (recent, *self.recent[: MAX_RECENT - 1])


@functools.cache
def comparison() -> Any:
    """What makes torch's comparison with given tensors; None where this torch has none, or none as we know it."""
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
