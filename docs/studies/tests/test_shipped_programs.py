"""What shipped tables serve, compiled: each program counts once, and those that fail or spill are named."""

from __future__ import annotations

from types import SimpleNamespace

import store_samples as samples

from docs.studies.shipped_programs import HEAD, row
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.resources import MAX_SPILL_BYTES


def test_each_program_counts_once_and_those_that_fail_or_spill_are_named() -> None:
    problems = [samples.PROBLEM.replace(batch=number) for number in range(1, 5)]
    spills = {1: 0, 2: MAX_SPILL_BYTES + 8, 3: None}
    entries = [
        samples.entry("modelled", problem=problem, schedule=samples.schedule(occupancy=occupancy))
        for problem, occupancy in zip(problems, (1, 2, 2, 3), strict=True)
    ]

    def record(schedule, problem):
        kept = spills[schedule["occupancy"]]
        failure = Failure(kind=FailureKind.COMPILE_TIMEOUT, message="stopped") if kept is None else None
        facts = None if kept is None else SimpleNamespace(spill_bytes=kept)
        return SimpleNamespace(key=schedule.id, facts=facts, failure=failure)

    builder = SimpleNamespace(arch="sm_121", kernel=SimpleNamespace(name="attention"), record=record)
    cells, lines = row(builder, entries)
    assert dict(zip(HEAD[2:], map(int, cells[2:]), strict=True)) == {
        "entries": 4,
        "programs": 3,
        "fail": 1,
        "spill more than the limit": 1,
        "most bytes spilled": MAX_SPILL_BYTES + 8,
        "entries of those": 3,
    }
    assert [line.partition(": ")[2] for line in lines] == [
        f"{entries[1].schedule.short()} spills {MAX_SPILL_BYTES + 8} bytes",
        f"{entries[3].schedule.short()} compile_timeout: stopped",
    ]
