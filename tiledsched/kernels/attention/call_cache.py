"""FlashAttention-4 called again without what it works out anew in each call.

Before the function that it compiled runs, its Python spends over 100 us on checks, heuristics and the key of a cache. For tensors
of the same shapes and strides all of that comes out the same: what the first call hands to the compiled function is kept, and
later calls hand over the same with other tensors. Where that is not sure to be all that a call does, nothing is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

CACHE = "compile_cache"
"""Attribute of its functions: key -> compiled function."""
ALIGNED = 16
"""Bytes. It copies what lies otherwise."""
_recording = threading.Lock()


class CallCache:
    """Calls of one problem."""

    def __init__(self, call: Callable[..., Any], function: Any) -> None:
        """Of `call`, which calls `function`, theirs, once."""
        self._call = call
        self._function = function
        self._kept: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, q: Any, k: Any, v: Any, *asked: Any, out: Any = None) -> Any:
        """As `call`; only calls into an `out` of ours that are told of no more tensors are kept."""
        if out is None:
            return self._call(q, k, v, *asked)
        tensors = (q, k, v, out)
        if asked or any(each.requires_grad or each.data_ptr() % ALIGNED for each in tensors):
            return self._call(q, k, v, *asked, out=out)
        lie = tuple((each.shape, each.stride(), each.device) for each in tensors)
        kept = self._kept.get(lie)
        if kept is None:
            made, self._kept[lie] = self._first(tensors)
            return made
        kept(*tensors)
        return out

    def _first(self, tensors: tuple[Any, ...]) -> tuple[Any, Callable[..., Any]]:
        """What the whole call returns, and what to call from now on with these four tensors."""

        def whole(q: Any, k: Any, v: Any, out: Any) -> Any:
            return self._call(q, k, v, out=out)

        with _recording:
            cache = getattr(self._function, CACHE, None)
            if cache is None:
                return whole(*tensors), whole
            watched = _Watched(cache)
            setattr(self._function, CACHE, watched)
            try:
                made = whole(*tensors)
            finally:
                setattr(self._function, CACHE, cache)
        if len(watched.calls) != 1:
            return made, whole
        compiled, given, named = watched.calls[0]
        first, rest = given[: len(tensors)], given[len(tensors) :]
        if named or any(_lies(theirs) != _lies(ours) for theirs, ours in zip(first, tensors, strict=True)):
            return made, whole
        if any(_tensor(each) for value in rest for each in (value if isinstance(value, tuple) else (value,))):
            return made, whole
        return made, lambda *tensors: compiled(*tensors, *rest)


class _Watched:
    """A cache of compiled functions that notes what one thread calls them with."""

    def __init__(self, cache: Any) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._cache = cache
        self._thread = threading.get_ident()

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, compiled: Callable[..., Any]) -> None:
        self._cache[key] = compiled

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._cache[key]
        if threading.get_ident() != self._thread:
            return compiled

        def noted(*given: Any, **named: Any) -> Any:
            self.calls.append((compiled, given, named))
            return compiled(*given, **named)

        return noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")


def _lies(value: Any) -> Any:
    return (value.data_ptr(), value.shape, value.stride()) if _tensor(value) else None
