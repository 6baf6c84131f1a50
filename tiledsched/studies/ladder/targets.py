"""Writes what is served on each arch as Python that can be pasted beside a kernel in cuTile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiledsched.core.device import ARCHS
from tiledsched.core.groups import grouped
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import COMPILER_HINTS, KnobValue
from tiledsched.serve.chain import Served
from tiledsched.serve.lookup import LookupTable

TO_COMPILER = {"num_ctas": 0, "occupancy": 0, "num_worker_warps": 0}
"""For each hint the value that leaves it to the compiler."""
TILES = ("tile_m", "tile_n")
"""Knobs that any kernel of this kind has: the rows of queries and of keys of a tile. All others are our kernel's own."""


def by_target(kernel: KernelClass, problems: Sequence[Problem], table: LookupTable) -> str:
    """A Python module: for each problem its tiles by arch, and the hints for `ct.kernel(**HINTS)`, with a comment that says where
    they come from. Names end with what distinguishes the problem from the others.

    Args:
        kernel: whose hints.
        problems: what is computed.
        table: what is served.
    """
    words = [str(problem).replace("=", "").replace("/", "_").split() for problem in problems]
    shared = set(words[0]).intersection(*words)
    lines = ["import cuda.tile as ct"]
    for problem, own in zip(problems, words, strict=True):
        suffix = "".join(f"_{word}" for word in own if word not in shared)
        served = {arch: table.resolve(problem, arch) for arch in ARCHS}
        lines += ["", *_of_problem(f"{kernel.name} {problem}", suffix, served)]
    return "\n".join(lines) + "\n"


def _of_problem(problem: str, suffix: str, served: Mapping[str, Served]) -> list[str]:
    sources = grouped((source_of(each), arch) for arch, each in served.items())
    said = "; ".join(f"{source} ({', '.join(archs)})" for source, archs in sources.items())
    values = {
        knob: {arch: each.schedule[knob] for arch, each in served.items() if knob in each.schedule}
        for knob in (*TILES, *COMPILER_HINTS)
    }
    tiles = [f"{knob.upper()}{suffix} = {values[knob]!r}" for knob in TILES if values[knob]]
    hints = {knob: _hint(knob, values[knob]) for knob in COMPILER_HINTS}
    lines = [f'    "{knob}": {hint},' for knob, hint in hints.items() if hint]
    return [f"# {problem}: {said}", *tiles, f"HINTS{suffix} = {{", *lines, "}"]


def _hint(knob: str, values: Mapping[str, KnobValue]) -> str:
    """A hint as Python; empty where the compiler chooses it on every arch."""
    chosen = {arch: value for arch, value in values.items() if value != TO_COMPILER.get(knob)}
    if not chosen:
        return ""
    if len(chosen) == len(ARCHS) and len({*chosen.values()}) == 1:
        return repr(next(iter(chosen.values())))
    return f"ct.ByTarget({', '.join(f'{arch}={value!r}' for arch, value in chosen.items())}, default=None)"


def source_of(served: Served) -> str:
    """Where a schedule comes from: measured, on which GPU and when, or not measured."""
    one = served.entry.measurement if served.entry else None
    if one is not None:
        where = f"measured on {one.device.name}, {one.created_at:%Y-%m-%d}"
        return where if served.provenance == "measured" else f"from other problems or GPUs, {where}"
    if served.provenance == "modelled":
        return "modelled, not measured"
    return f"neither measured nor modelled ({served.provenance})"
