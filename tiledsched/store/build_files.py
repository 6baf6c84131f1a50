"""Files of builds: what compiling every schedule of a search space gave, so that a report can model whole landscapes on a
machine without a compiler.

The keys of a file are `kernel`, `source_hash`, `toolchain` and `arch` (what was compiled, with which compiler, for which arch);
`knobs`, `classes` and `programs`, lists to whose places the others refer: names of knobs, what of a problem the machine code
depends on, and for each piece of machine code its fingerprint, its size and its resources, or of a failed build the kind and
message; `builds`, each the values of its knobs, then the places of its class and of its program; and what the fields of
:class:`BuildFile` hold.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tiledsched.build.toolchain import Toolchain
from tiledsched.core.device import ResourceFacts, arch_spec
from tiledsched.core.errors import DatabaseError, Failure, FailureKind
from tiledsched.core.files import read_bounded, unpacked
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.schedule import Schedule
from tiledsched.store.codec import decode
from tiledsched.store.manifest import check_shipped
from tiledsched.store.records import BuildRecord


@dataclass(frozen=True, kw_only=True)
class BuildFile:
    """The builds of one kernel, source, compiler and arch."""

    builds: Sequence[BuildRecord]
    """One build or more."""
    serves: Mapping[str, Sequence[int]]
    """For the id of each problem that was looked at, the places in `builds` of those that can serve it."""
    space: int
    """How many builds there would be of the whole space."""
    times: Mapping[str, Mapping[str, Mapping[int, float]]]
    """By arch and by the id of each problem: for places in `builds`, the model's estimate in microseconds, to six digits, because
    the model takes seconds for all of them.
    """
    alike: Mapping[str, int]
    """Further archs, and element types, that the builds stand for, and on how many of them that was tried: on an arch each was
    the same machine code; with an element type each took the same registers, threads and shared memory.
    """

    def builds_for(self, problem: Problem, arch: str) -> list[BuildRecord]:
        """The builds that can serve a problem on an arch.

        For an element type that was not compiled, a fingerprint begins with the one that was. A problem that was not looked at
        takes a tenth of a millisecond for each build that may be its own.
        """
        from tiledsched.core.launches import problem_class

        ours = self._as_ours(problem, arch)
        if ours is None:
            return []
        builds = self.builds if ours is problem else self._like_ours
        problem = ours
        if problem.id in self.serves:
            return [builds[place] for place in self.serves[problem.id]]
        kernel, spec, known = problem.declaration, arch_spec(arch), {**problem.values, "signature": None}
        near = {
            kind
            for kind in {each.problem_class for each in builds}
            if all(known[name] in (value, None) for name, value in kind.values.items())
        }
        return [
            each
            for each in builds
            if each.problem_class in near and each.problem_class == problem_class(kernel, problem, each.schedule, spec)
        ]

    def times_for(self, problem: Problem, arch: str) -> dict[Schedule, tuple[ResourceFacts | None, float]]:
        """The estimates for a problem on an arch that the file holds: resources and microseconds, by schedule."""
        ours = self._as_ours(problem, arch)
        known = self.times.get(arch, {}).get(ours.id, {}) if ours is not None else {}
        return {self.builds[place].schedule: (self.builds[place].facts, us) for place, us in known.items()}

    def _as_ours(self, problem: Problem, arch: str) -> Problem | None:
        """The problem with the element type that was compiled; None where the builds do not stand for it on that arch."""
        first = self.builds[0]
        if problem.kernel != first.kernel or (arch != first.arch and arch not in self.alike):
            return None
        own, dtype = first.problem_class.values.get("dtype"), problem.values.get("dtype")
        if dtype == own:
            return problem
        return problem.replace(dtype=own) if dtype in self.alike else None

    @cached_property
    def _like_ours(self) -> list[BuildRecord]:
        """The builds with fingerprints that say whose they are."""
        dtype = self.builds[0].problem_class.values["dtype"]
        return [
            replace(build, fingerprint=build.fingerprint and f"{dtype}:{build.fingerprint}") for build in self.builds
        ]


def read_builds(path: Path) -> BuildFile:
    """The contents of a file of builds.

    Raises:
        DatabaseError: the file cannot be read, is not the one that shipped, or none that `docs.studies.modelled_programs` wrote.
    """
    try:
        packed = read_bounded(path)
    except OSError as error:
        raise DatabaseError(f"cannot read {path.name}: {error.strerror}; check the path") from error
    check_shipped(path, packed)
    try:
        return _read(json.loads(unpacked(packed)))
    except (*WRONG, DatabaseError) as error:
        raise DatabaseError(f"{path.name} is no file of builds: {error!r}; install tiledsched again") from error


WRONG = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, RecursionError, lzma.LZMAError)
"""What reading a file of something else may raise."""


def _read(data: Any) -> BuildFile:
    shared = {name: data[name] for name in ("kernel", "source_hash", "arch")}
    shared |= {"toolchain": decode(Toolchain, data["toolchain"], "toolchain"), "seconds": 0.0}
    classes = [ProblemClass(dict(each)) for each in data["classes"]]
    outcomes = [_fields(each) for each in data["programs"]]
    builds = [
        BuildRecord(
            schedule=Schedule(dict(zip(data["knobs"], values, strict=True))),
            problem_class=classes[kind],
            **outcomes[program],
            **shared,
        )
        for *values, kind, program in data["builds"]
    ]
    every = range(len(builds))
    serves = {name: every if places is None else places for name, places in data["serves"].items()}
    times = {
        arch: {name: dict(zip(*known, strict=True)) for name, known in of.items()}
        for arch, of in data.get("times", {}).items()
    }
    return BuildFile(builds=builds, serves=serves, times=times, space=data["space"], alike=data["alike"])


def _fields(outcome: Sequence[Any]) -> dict[str, Any]:
    """The fields of a build record that say what came of the build."""
    if len(outcome) == 2:
        failure = Failure(kind=FailureKind(outcome[0]), message=str(outcome[1]))
        return {"fingerprint": "", "cubin_bytes": 0, "facts": None, "failure": failure}
    fingerprint, cubin_bytes, *facts = outcome
    named = dict(zip(ResourceFacts.__dataclass_fields__, facts, strict=True))
    known = decode(ResourceFacts, named, "facts")
    return {"fingerprint": fingerprint, "cubin_bytes": cubin_bytes, "facts": known, "failure": None}
