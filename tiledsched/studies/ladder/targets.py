"""Writes what is served on each arch as Python that can be pasted into another kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tiledsched.core.device import ARCHS
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import HINT_KNOBS
from tiledsched.serve.lookup import LookupTable, Served

LEFT = {"num_ctas": 0, "occupancy": 0, "num_worker_warps": 0}
"""For each hint the value that leaves it to the compiler."""


def by_target(kernel: KernelClass, problems: Sequence[Problem], table: LookupTable) -> str:
    """A Python file with the compiler hints and the tiles of every arch, for each problem, under one line that says where
    they come from. Knobs that mean something in this package's kernel alone are left out.

    Args:
        kernel: whose schedules.
        problems: what is computed.
        table: what is served.
    """
    example = f'@ct.kernel(**HINTS["{problems[0]}"])'
    lines = [f"# Paste a block above your kernel, and decorate it: {example}", "import cuda.tile as ct", ""]
    lines += ["HINTS, TILES = {}, {}"]
    for problem in problems:
        served = {arch: table.resolve(problem, arch) for arch in ARCHS}
        tiles = {arch: _tile(each) for arch, each in served.items()}
        lines += ["", f"# {problem}: {_origins(served)}", f'HINTS["{problem}"] = dict(', *_hints(served), ")"]
        if any(tiles.values()):
            lines += [
                f'TILES["{problem}"] = {{',
                *(f'    "{arch}": {json.dumps(tile)},' for arch, tile in tiles.items()),
                "}",
            ]
    return "\n".join(lines) + "\n"


def _tile(served: Served) -> dict[str, int]:
    return {knob: int(value) for knob, value in served.schedule.items() if knob.lower().startswith("tile")}


def _hints(served: Mapping[str, Served]) -> list[str]:
    """A line for each hint that some arch sets; archs that leave a hint to the compiler are not named in it."""
    lines = []
    for knob in HINT_KNOBS:
        values = {
            arch: each.schedule[knob]
            for arch, each in served.items()
            if knob in each.schedule and each.schedule[knob] != LEFT.get(knob)
        }
        if len(set(values.values())) == 1 and len(values) == len(served):
            lines.append(f"    {knob}={next(iter(values.values()))},")
        elif values:
            lines.append(f"    {knob}=ct.ByTarget(")
            lines += [f"        {arch}={value}," for arch, value in values.items()]
            lines += ["        default=None,", "    ),"]
    return lines


def _origins(served: Mapping[str, Served]) -> str:
    """Where the schedules come from, such as `measured on NVIDIA H200, 2026-11-24 (sm_90); modelled, not measured (sm_121)`."""
    archs: dict[str, list[str]] = {}
    for arch, each in served.items():
        archs.setdefault(_origin(each), []).append(arch)
    return "; ".join(f"{origin} ({', '.join(named)})" for origin, named in archs.items())


def _origin(served: Served) -> str:
    taken = served.entry.measurement if served.entry else None
    if taken is None or served.provenance not in ("measured", "transferred"):
        return f"{served.provenance}, not measured"
    where = f"measured on {taken.device.name}, {taken.created_at:%Y-%m-%d}"
    return where if served.provenance == "measured" else f"chosen by a similar problem {where}"
