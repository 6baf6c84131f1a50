"""Writes what is served on each arch as hints that can be pasted above a kernel."""

from __future__ import annotations

from tiledsched.core.device import ARCHS
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import HINT_KNOBS
from tiledsched.serve.lookup import LookupTable

LEFT = {"num_ctas": 0, "occupancy": 0, "num_worker_warps": 0}
"""For each hint the value that leaves it to the compiler."""


def by_target(kernel: KernelClass, problem: Problem, table: LookupTable) -> str:
    """Python text: a constant for each knob that differs between archs, and a `ct.kernel` line with a `ct.ByTarget` for
    each hint.

    Args:
        kernel: whose hints.
        problem: what is computed.
        table: what is served.
    """
    served = {arch: table.resolve(problem, arch) for arch in ARCHS}
    provenance = ", ".join(f"{arch} {each.provenance}" for arch, each in served.items())
    names = list(dict.fromkeys(knob for each in served.values() for knob in each.schedule))
    lines = [f"# {problem}: {provenance}"]
    for knob in (name for name in names if name not in HINT_KNOBS):
        values = {arch: each.schedule[knob] for arch, each in served.items() if knob in each.schedule}
        if len(set(map(repr, values.values()))) > 1:
            lines.append(f"{knob.upper()} = {values!r}")
    hints = []
    for knob in (name for name in names if name in HINT_KNOBS):
        values = {
            arch: each.schedule[knob]
            for arch, each in served.items()
            if knob in each.schedule and each.schedule[knob] != LEFT.get(knob)
        }
        if len(set(values.values())) == 1 and len(values) == len(served):
            hints.append(f"    {knob}={next(iter(values.values()))},")
        elif values:
            hints.append(
                f"    {knob}=ct.ByTarget({', '.join(f'{arch}={value}' for arch, value in values.items())}, default=None),"
            )
    return "\n".join([*lines, "", "", "@ct.kernel(", *hints, ")"]) + "\n"
