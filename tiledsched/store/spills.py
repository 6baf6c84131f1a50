"""Which programs spill registers or do not build: known before a launch, so that what is served never depends on a launch.

A fact is of a schedule and a class of problems. What ships is in `tuning_db/model/KERNEL/spills.json`, by arch and compiler, of
the classes that the kernel says (`spill_class`); `python -m docs.studies.served_programs` writes it. What `tune`, `refresh` and
`warmup` built is in the user's database, of the class of problems that share the machine code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tiledsched.core.canonical import stable_id
from tiledsched.core.device import ResourceFacts, arch_spec, spilled
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.groups import nested
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.store.evidence import nearest_compiler
from tiledsched.store.manifest import model_file
from tiledsched.store.rows import RowReader, quoted, where

Spills = Mapping[str, Mapping[str, int]]
"""By the id of a schedule, then of a class of problems, the bytes of registers that the program spills a thread, where that is
more than may cost time (:func:`tiledsched.core.device.spilled`); `DOES_NOT_BUILD` where the compiler makes no program."""
DOES_NOT_BUILD = 1 << 30
OF_THE_PROGRAM = (FailureKind.COMPILE_ERROR, FailureKind.COMPILE_TIMEOUT)
"""Failures of a build whose cause is the program, and not the day."""
FILE = "spills.json"


def classes_of(problem: Problem, schedule: Schedule, arch: str) -> list[str]:
    """The ids of the classes of a problem, of which something may be known: first the one of which facts ship."""
    from tiledsched.core.launches import problem_class  # imports cuTile, which who only reads entries does without

    kernel = problem.declaration
    shipped = [] if kernel.spill_class is None else [stable_id(kernel.spill_class(problem, schedule))]
    return [*shipped, problem_class(kernel, problem, schedule, arch_spec(arch)).id]


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
    return by_compiler[nearest_compiler(dict.fromkeys(by_compiler, 1), compiler, fullest=False)]


def joined(*of: Spills) -> Spills:
    """What several sources know together; of a program that two know the last one counts."""
    return nested(
        (schedule, problem_class, size)
        for each in of
        for schedule, classes in each.items()
        for problem_class, size in classes.items()
    )


def stored(rows: RowReader, compiler: str, of: Mapping[str, str], schedules: Iterable[str] | None = None) -> Spills:
    """What a database knows of programs under a compiler's version. Of one that several toolchains of that version built, the
    newest build counts.

    Args:
        rows: reads the database.
        compiler: the version.
        of: values of columns of builds.
        schedules: the ids of the schedules that are meant; None for all.
    """
    tables = (
        "JOIN toolchains t ON t.id = r.toolchain_id "
        "LEFT JOIN artifacts a ON a.arch = r.arch AND a.fingerprint = r.fingerprint"
    )
    failed = f"r.failure_kind IN ({quoted(OF_THE_PROGRAM)})"
    lost = f"({failed} OR CAST(a.facts AS TEXT) NOT LIKE :whole)"  # the first look; the facts themselves decide
    some = [] if schedules is None else [f"r.schedule_id IN ({quoted(schedules)})"]
    rest = f"{tables} {where(of, 't.tileiras = :compiler', lost, *some)} ORDER BY r.created_at, r.id"
    return nested(
        (build.schedule.id, build.problem_class.id, size)
        for build in rows.builds({**of, "compiler": compiler, "whole": '%"spill_bytes": 0,%'}, rest)
        if (outcome := build.failure or build.facts) and (size := lost_bytes(outcome))
    )
