"""Tile code of launches that follow one another closely: programmatic dependent launch, PDL for short.

Where the knob `pdl` is 1 or 2, each launch behind the first one of a call is queued with CUDA's attribute for programmatic stream
serialization: its blocks may take their places before the launch ahead of it is complete. With 1 they may once all blocks of that
launch have ended, with 2 once all have begun. Each launch that may do so begins by waiting until the one ahead of it is complete
and its writes are visible, before it touches memory. The first launch of a call is an ordinary one. So whatever ends a chain or
follows it finds all of it complete, and workspaces may be used again by the next call.
"""

from __future__ import annotations

import functools
import linecache
from types import FunctionType
from typing import get_type_hints

import cuda.tile as ct

SOURCE = """def {name}({parameters}):
    if WAITS:
        _cutile.grid_dependency_control_wait()
    if RELEASES:
        _cutile.grid_dependency_control_launch_dependents()
    _tile_code({parameters})
"""
"""A tile function in a chain. cuTile takes no entry with a variable number of parameters, so that each needs its own."""


@functools.lru_cache(maxsize=1024)
def in_chain(function: FunctionType, waits: bool, releases: bool) -> FunctionType:
    """A tile function with the parameters and annotations of `function`, which it calls.

    Args:
        function: the undecorated tile function of one launch.
        waits: whether it first waits for the launch ahead of it.
        releases: whether it lets the launch behind it start before its own end.
    """
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    source = SOURCE.format(name=function.__name__, parameters=", ".join(names))
    file = f"<{function.__module__}.{function.__qualname__} in a chain>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where cuTile reads the source
    made = {
        "__name__": function.__module__,
        "WAITS": waits,
        "RELEASES": releases,
        "_cutile": ct,
        "_tile_code": function,
    }
    exec(compile(source, file, "exec"), made)
    found: FunctionType = made[function.__name__]
    found.__annotations__ = get_type_hints(function, include_extras=True)
    return found
