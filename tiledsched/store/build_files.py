"""Files of builds: what compiling every schedule of a search space gave, so that a report can model whole landscapes on a
machine without a compiler. docs/landscapes.md describes the format.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tiledsched.build.toolchain import Toolchain
from tiledsched.core.errors import DatabaseError, Failure
from tiledsched.core.files import read_bounded, unpacked, write_whole
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.registry import problem_from_json
from tiledsched.core.resources import ResourceFacts
from tiledsched.core.schedule import Schedule
from tiledsched.store.codec import decode, encode
from tiledsched.store.manifest import check_shipped
from tiledsched.store.records import BuildRecord

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BuildFile:
    """The builds of one kernel, source, compiler and arch."""

    builds: Sequence[BuildRecord]
    """One build or more."""
    problems: Sequence[Problem]
    """For each build a problem of its class."""
    space: int
    """How many builds there would be of the whole space."""
    alike: Mapping[str, int]
    """Further archs, and element types, that the builds stand for, and for how many of them that was looked at: on an arch each
    was the same machine code; with an element type each took the same registers, threads and shared memory.
    """


def write_builds(path: Path, file: BuildFile) -> None:
    """Write a file of builds. The same builds in the same order give the same bytes."""
    first = file.builds[0]
    problems, classes, programs = _Numbered(), _Numbered(), _Numbered()
    rows = [
        [problems.place(problem), classes.place(build.problem_class), programs.place(_program(build))]
        for build, problem in zip(file.builds, file.problems, strict=True)
    ]
    data = {
        "kernel": first.kernel,
        "source_hash": first.source_hash,
        "toolchain": first.toolchain.to_json(),
        "arch": first.arch,
        "space": file.space,
        "alike": dict(file.alike),
        "problems": [problem.to_json() for problem in problems],
        "classes": [each.to_json() for each in classes],
        "programs": list(programs),
        "knobs": list(first.schedule),
        "schedules": [list(build.schedule.values()) for build in file.builds],
        "builds": rows,
    }
    write_whole(path, lzma.compress(json.dumps(data, separators=(",", ":")).encode(), preset=9))


class _Numbered(dict[Any, int]):
    """Values in the order in which they were first seen."""

    def place(self, value: Any) -> int:
        """The number of a value."""
        return self.setdefault(value, len(self))


def _program(build: BuildRecord) -> tuple[Any, ...]:
    """What a file says of the machine code, or of why there is none."""
    if build.facts is None:
        return tuple(encode(build.failure).values())
    return build.fingerprint, build.cubin_bytes, *build.facts.to_json().values()


def read_builds(path: Path) -> BuildFile:
    """The contents of a file of builds.

    Raises:
        DatabaseError: the file cannot be read, or is not one that `write_builds` wrote.
    """
    try:
        packed = read_bounded(path)
        check_shipped(path, packed)
        return _read(json.loads(unpacked(packed)))
    except OSError as error:
        raise DatabaseError(f"cannot read {path.name}: {error.strerror}; check the path") from error
    except (ValueError, KeyError, TypeError, IndexError, EOFError, RecursionError, lzma.LZMAError) as error:
        raise DatabaseError(f"{path.name} is no file of builds: {error!r}; install tiledsched again") from error


def _read(data: Any) -> BuildFile:
    problems = [problem_from_json(each) for each in data["problems"]]
    classes = [ProblemClass(each) for each in data["classes"]]
    toolchain = decode(Toolchain, data["toolchain"], "toolchain")
    outcomes = [_outcome(each) for each in data["programs"]]
    knobs = data["knobs"]
    builds = [
        BuildRecord(
            kernel=data["kernel"],
            source_hash=data["source_hash"],
            toolchain=toolchain,
            arch=data["arch"],
            schedule=Schedule(dict(zip(knobs, values, strict=True))),
            problem_class=classes[kind],
            seconds=0.0,
            **outcomes[program],
        )
        for values, (_, kind, program) in zip(data["schedules"], data["builds"], strict=True)
    ]
    return BuildFile(
        builds=builds,
        problems=[problems[place] for place, _, _ in data["builds"]],
        space=data["space"],
        alike=data["alike"],
    )


def _outcome(row: Sequence[Any]) -> dict[str, Any]:
    """The fields of a build record that say what came of the build."""
    if len(row) == 2:
        failure = decode(Failure, dict(zip(("kind", "message"), row, strict=True)), "failure")
        return {"fingerprint": "", "cubin_bytes": 0, "facts": None, "failure": failure}
    fingerprint, cubin_bytes, *facts = row
    names = list(ResourceFacts.__dataclass_fields__)
    known = decode(ResourceFacts, dict(zip(names, facts, strict=True)), "facts")
    return {"fingerprint": fingerprint, "cubin_bytes": cubin_bytes, "facts": known, "failure": None}
