"""Which programs spill registers or do not build: known before a launch, so that what is served never depends on a launch.

A program is a schedule and a problem class: the part of a problem that machine code depends on. What ships is in
`tuning_db/model/KERNEL/spills.json`, by arch and compiler; `python -m docs.studies.served_programs` writes it. What `tune`,
`refresh` and `warmup` built is in the user's database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.resources import ResourceFacts, spilled
from tiledsched.store.evidence import nearest_compiler
from tiledsched.store.manifest import model_file

Spills = Mapping[str, Mapping[str, int]]
"""By the id of a schedule, and then of a problem class, the bytes of registers that the program spills a thread, where these are
more than may cost time (:func:`tiledsched.core.resources.spilled`); `DOES_NOT_BUILD` where the compiler makes no program."""
DOES_NOT_BUILD = 1 << 30
OF_THE_PROGRAM = (FailureKind.COMPILE_ERROR, FailureKind.COMPILE_TIMEOUT)
"""Failures of a build whose cause is the program, and not the day."""
FILE = "spills.json"
SCHEMA_VERSION = 1


def lost_bytes(outcome: ResourceFacts | Failure) -> int:
    """What a build says against its program, as :data:`Spills` has it; 0 for nothing."""
    if isinstance(outcome, Failure):
        return DOES_NOT_BUILD if outcome.kind in OF_THE_PROGRAM else 0
    return spilled(outcome.spill_bytes)


def shipped_spills(kernel: str, arch: str, compiler: str) -> Spills:
    """What ships about the programs of a kernel on an arch under a compiler, or under the nearest one that something is known of.

    Args:
        kernel: the kernel's name.
        arch: for example sm_90.
        compiler: the version, for example 13.5.37; empty where there is none: then the newest counts.
    """
    found = model_file(kernel, FILE)
    by_compiler = found["archs"].get(arch) if found else None
    if not by_compiler:
        return {}
    known: Spills = by_compiler[nearest_compiler(dict.fromkeys(by_compiler, 1), compiler, fullest=False)]
    return known


def spills_json(archs: Mapping[str, Mapping[str, Spills]]) -> dict[str, Any]:
    """The contents of a file of spills, by arch and compiler, in an order that does not depend on how they were found."""
    return {
        "schema_version": SCHEMA_VERSION,
        "archs": {
            arch: {
                compiler: {schedule: dict(sorted(classes.items())) for schedule, classes in sorted(known.items())}
                for compiler, known in sorted(compilers.items())
            }
            for arch, compilers in sorted(archs.items())
        },
    }


def joined(*of: Spills) -> Spills:
    """What several sources know together; of a program that two know the last one counts."""
    found: dict[str, dict[str, int]] = {}
    for each in of:
        for schedule, classes in each.items():
            found.setdefault(schedule, {}).update(classes)
    return found
