"""A cache of FlashAttention-4's calls, which skips what its Python code works out anew in each call.

Before FlashAttention-4 calls the function that it compiled, its Python spends over 100 us on checks, heuristics and the key of a
cache. The results are the same for tensors of the same shapes and strides. The cache records the arguments that the first call
passes to the compiled function, and later calls pass the same arguments with other tensors. Calls that may do more than that are
not cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

CACHE = "compile_cache"
"""Attribute of FlashAttention-4's functions: key -> compiled function."""
ALIGNED = 16
"""Bytes of which addresses must be multiples; FlashAttention-4 copies other tensors."""
_recording = threading.Lock()


class CallCache:
    """The cached calls of one problem, in which one compiled function is called, or several take turns, with arrays of
    FlashAttention-4 between them.

    Such an array is allocated anew in each call. One that the first of several functions is given is written by it, as sums are
    set to zero there; the others hold zeros. One function alone is given no such arrays, and is called once.
    """

    def __init__(self, call: Callable[..., Any], functions: Sequence[Any]) -> None:
        """Cache `call`, which calls each of FlashAttention-4's `functions` and writes into tensors that it is given."""
        self._call = call
        self._functions = functions
        self._calls: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Any) -> None:
        """Call `call`, or what it called for tensors of the same shapes and strides."""
        if any(each.requires_grad or each.data_ptr() % ALIGNED for each in tensors):
            self._call(*tensors)
            return
        lie = tuple((each.shape, each.stride(), each.device) for each in tensors)
        call = self._calls.get(lie)
        if call is None:
            self._calls[lie] = self._first(tensors)
        else:
            call(*tensors)

    def _first(self, tensors: tuple[Any, ...]) -> Callable[..., Any]:
        """Make the whole call; returns the function to call from now on with such tensors."""
        calls: list[Recorded] = []
        with _recording:
            caches = [getattr(each, CACHE, None) for each in self._functions]
            known = all(cache is not None for cache in caches)
            for function, cache in zip(self._functions if known else (), caches, strict=False):
                setattr(function, CACHE, _RecordingCache(cache, calls))
            try:
                self._call(*tensors)
            finally:
                for function, cache in zip(self._functions if known else (), caches, strict=False):
                    setattr(function, CACHE, cache)
        arrays, launches = _launches(calls, tensors) or ([], [])
        if not launches or (len(self._functions) == 1 and (arrays or len(launches) > 1)):
            return self._call
        compiled, arguments = launches[0]
        rest = [value for place, value in arguments if place is None]
        if len(launches) == 1 and [place for place, _ in arguments] == [*range(len(tensors)), *[None] * len(rest)]:
            return lambda *tensors: compiled(*tensors, *rest)
        return partial(_launch, arrays, launches)


def _launches(calls: list[Recorded], tensors: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """(the arrays between the launches, the launches) of recorded calls; None if the same calls may not do for other tensors.

    An array is its shape, its type and whether it must hold zeros; a launch is a compiled function and, for each argument, its
    place among the tensors and arrays, or None and its value.
    """
    places = {_lies(each): place for place, each in enumerate(tensors)}
    if len({each.data_ptr() for each in tensors}) < len(tensors):
        return None  # which of two is meant cannot be told
    handed: set[int] = set()
    arrays: list[Any] = []
    launches: list[Any] = []
    for compiled, given, named in calls:
        arguments: list[tuple[int | None, Any]] = []
        for value in given:
            if not _tensor(value):
                arguments.append((None, value))
                continue
            if _lies(value) not in places:
                places[_lies(value)] = len(places)
                arrays.append((value.shape, value.dtype, bool(launches)))
            handed.add(places[_lies(value)])
            arguments.append((places[_lies(value)], None))
        within = (each for value in given if isinstance(value, tuple | list) for each in value)
        if named or any(_tensor(each) for each in within):
            return None
        launches.append((compiled, arguments))
    # Instead of a tensor that is not handed over, a copy was.
    return (arrays, launches) if handed >= set(range(len(tensors))) else None


def _launch(arrays: list[Any], launches: list[Any], *tensors: Any) -> None:
    new = tensors[0]
    every = [
        *tensors,
        *((new.new_zeros if zeros else new.new_empty)(shape, dtype=dtype) for shape, dtype, zeros in arrays),
    ]
    for compiled, arguments in launches:
        compiled(*[value if place is None else every[place] for place, value in arguments])


Recorded = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A compiled function and its arguments."""


class _RecordingCache:
    """A cache of compiled functions that records the arguments with which one thread calls them."""

    def __init__(self, cache: Any, calls: list[Recorded]) -> None:
        self.calls = calls
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

        def recorded(*given: Any, **named: Any) -> Any:
            self.calls.append((compiled, given, named))
            return compiled(*given, **named)

        return recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")


def _lies(value: Any) -> Any:
    return (value.data_ptr(), value.shape, value.stride()) if _tensor(value) else None
