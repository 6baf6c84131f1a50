"""Compiles every schedule of the shipped search spaces, so that a report can model whole landscapes without a compiler:
`python -m docs.studies.modelled_programs FOLDER --jobs 16 --minutes 8`.

It needs a checkout and the compiler, no GPU and no database. It writes one file for each kind of problem of the shipped
modelled tables (docs/database.md has the format), and goes on where an earlier run into the same folder stopped. Put the
files into `tuning_db/model/KERNEL/`, have the model's estimates written into them (`FOLDER --times`, again after each change of a
model), and run `python -m tiledsched.store.shipped`.

Of each kind it also compiles a sample for the archs in `--same` and for the other element types in the table. An arch is named
in the file only if all of the sample is the same machine code; an element type only if all of the sample takes the same
registers, threads and shared memory.
"""

from __future__ import annotations

import json
import lzma
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from docs.studies.flags import flag, parser_with
from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.pool import BuildPool, default_jobs
from tiledsched.build.toolchain import Toolchain, installed_toolchain
from tiledsched.core import data_files
from tiledsched.core.device import ARCHS, arch_spec, spilled
from tiledsched.core.errors import TiledschedError
from tiledsched.core.files import write_whole
from tiledsched.core.launches import problem_class
from tiledsched.core.problem import KernelClass, Problem, ProblemClass
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.store.build_files import BuildFile, read_builds
from tiledsched.store.codec import encode
from tiledsched.store.records import BuildRecord
from tiledsched.store.shipped import read_shipped_entries

SAMPLE = 24
"""Programs of each kind of problem that are compiled again for another arch, and for another element type."""
WRITE_S = 30.0
"""Seconds between two writings of all files."""
ORDER = ("attention", "rms_norm", "softmax", "matmul")
Key = tuple[str, str]
"""(schedule id, problem class id)"""


@dataclass(kw_only=True)
class Kind:
    """The problems of a kernel that one file is about, and what is known of their programs."""

    kernel: KernelClass
    arch: str
    name: str
    """Name of the file, without its ending."""
    wanted: dict[Key, tuple[Schedule, Problem]]
    """Every build of the space, with a problem of its class."""
    dtypes: tuple[str, ...] = ()
    """Further element types in the table."""
    serves: dict[str, list[Key]] = field(default_factory=dict)
    """For the id of each problem, the builds that can serve it."""
    found: dict[Key, BuildRecord] = field(default_factory=dict)
    samples: dict[str, list[bool]] = field(default_factory=dict)
    """By arch or element type, whether each program of the sample is the same."""

    def sample(self) -> list[Key]:
        """A few of the wanted builds: the same ones in every run."""
        keys = list(self.wanted)
        return random.Random(0).sample(keys, min(SAMPLE, len(keys)))


def write_builds(path: Path, file: BuildFile) -> None:
    """Write a file of builds. The same builds in the same order give the same bytes."""
    first = file.builds[0]
    classes: dict[ProblemClass, int] = {}
    programs: dict[tuple[Any, ...], int] = {}
    rows = [
        [
            *build.schedule.values(),
            classes.setdefault(build.problem_class, len(classes)),
            programs.setdefault(_outcome(build), len(programs)),
        ]
        for build in file.builds
    ]
    every = list(range(len(rows)))
    data = {
        "kernel": first.kernel,
        "source_hash": first.source_hash,
        "toolchain": asdict(first.toolchain),
        "arch": first.arch,
        "space": file.space,
        "alike": dict(file.alike),
        "serves": {name: None if list(places) == every else list(places) for name, places in file.serves.items()},
        "times": {
            arch: {name: [list(known), list(known.values())] for name, known in of.items()}
            for arch, of in file.times.items()
        },
        "classes": [each.to_json() for each in classes],
        "programs": list(programs),
        "knobs": list(first.schedule),
        "builds": rows,
    }
    write_whole(path, lzma.compress(json.dumps(data, separators=(",", ":")).encode(), preset=9))


def _outcome(build: BuildRecord) -> tuple[Any, ...]:
    """What a file says of the machine code, or of why there is none."""
    if build.facts is None:
        return tuple(encode(build.failure).values())
    return build.fingerprint, build.cubin_bytes, *asdict(build.facts).values()


def words_of(kernel: KernelClass, problem: Problem) -> str:
    """The part of a file's name that says which problems it is about: attention has a file for each head dimension and mask."""
    if kernel.name != "attention":
        return ""
    return f"_d{problem.head_dim}" + ("_causal" if problem.causal else "")


def kinds_of(kernel: KernelClass, arch: str, limit: int | None) -> list[Kind]:
    """What is to be compiled for the problems of the shipped table of a kernel on an arch, in the order of the table."""
    space, spec = space_for(arch, kernel), arch_spec(arch)
    entries = read_shipped_entries(data_files.tuning_db() / "tables" / kernel.name / f"{arch}.json")
    problems = list(dict.fromkeys(entry.problem for entry in entries))
    dtypes = sorted({str(problem.values["dtype"]) for problem in problems}, key=lambda each: each != "float16")
    pins = space.modelled_pins() | ({"accum_mode": "fp32"} if "accum_mode" in space.knobs else {})
    kinds: dict[str, Kind] = {}
    for problem in problems:
        if problem.values["dtype"] != dtypes[0]:
            continue
        name = arch + words_of(kernel, problem)
        kind = kinds.setdefault(name, Kind(kernel=kernel, arch=arch, name=name, wanted={}, dtypes=tuple(dtypes[1:])))
        for schedule in space.schedules(problem, pinned=pins):
            key = schedule.id, problem_class(kernel, problem, schedule, spec).id
            kind.wanted.setdefault(key, (schedule, problem))
            kind.serves.setdefault(problem.id, []).append(key)
    for kind in kinds.values():  # whatever part is compiled shows the whole space
        keys = list(kind.wanted)
        random.Random(1).shuffle(keys)
        kind.wanted = {key: kind.wanted[key] for key in keys[:limit]}
    return list(kinds.values())


def tasks_of(kind: Kind, archs: Sequence[str]) -> Iterator[tuple[Kind, str, Key, BuildTask]]:
    """What is left to compile: the sample first, for this arch, the others and the other element types."""

    def task(key: Key, arch: str, dtype: str = "") -> BuildTask:
        schedule, problem = kind.wanted[key]
        problem = problem.replace(dtype=dtype) if dtype else problem
        return BuildTask(kernel=kind.kernel.locator(), schedule=schedule, problem=problem, arch=arch)

    sample = kind.sample()
    for key in dict.fromkeys([*sample, *kind.wanted]):
        if key not in kind.found:
            yield kind, "", key, task(key, kind.arch)
    for other in archs:
        if other not in kind.samples:
            yield from ((kind, other, key, task(key, other)) for key in sample)
    for dtype in kind.dtypes:
        if dtype not in kind.samples:
            yield from ((kind, dtype, key, task(key, kind.arch, dtype)) for key in sample)


def record_of(kind: Kind, built: Built, toolchain: Toolchain) -> BuildRecord:
    """The record of a build."""
    task = built.task
    outcome = built.artifact or built.failure
    assert outcome is not None
    return BuildRecord.of(
        outcome,
        kernel=kind.kernel.name,
        source_hash=kind.kernel.source_hash(),
        toolchain=toolchain,
        arch=task.arch,
        schedule=task.schedule,
        problem_class=problem_class(kind.kernel, task.problem, task.schedule, arch_spec(task.arch)),
        seconds=0.0,  # of the machine at hand, so that files of two machines are the same
    )


def same(ours: BuildRecord, other: BuildRecord) -> bool:
    """Whether two builds are the same machine code, or, where their element types differ, take the same resources but for the
    bytes spilled and the code's size."""
    if ours.facts is None or other.facts is None:
        return ours.facts is other.facts
    if ours.problem_class == other.problem_class:
        return ours.fingerprint == other.fingerprint
    return all(
        getattr(ours.facts, name) == getattr(other.facts, name)
        for name in ("registers", "threads", "shared_bytes", "num_ctas")
    )


def file_of(kind: Kind, folder: Path) -> Path:
    """The file of a kind of problem."""
    return folder / kind.kernel.name / f"programs_{kind.name}.json.xz"


def write(kind: Kind, folder: Path) -> None:
    """Write what is known of a kind of problem."""
    if kind.found:
        path = file_of(kind, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        place = {key: place for place, key in enumerate(sorted(kind.wanted.keys() & kind.found.keys()))}
        serves = {name: sorted(place[key] for key in keys if key in place) for name, keys in kind.serves.items()}
        alike = {name: len(equal) for name, equal in sorted(kind.samples.items()) if all(equal)}
        builds = [kind.found[key] for key in place]
        write_builds(path, BuildFile(builds=builds, serves=serves, times={}, space=len(kind.wanted), alike=alike))


def with_times(file: BuildFile) -> BuildFile:
    """A file with the model's estimates of the programs that do not spill, for the shipped problems on each of its archs."""
    from tiledsched.report.model import plainness  # which needs more than the compiler

    first = file.builds[0]
    kernel = load_kernel(first.kernel)
    times: dict[str, dict[str, dict[int, float]]] = {}
    for arch in (first.arch, *(name for name in file.alike if name in ARCHS)):
        entries = read_shipped_entries(data_files.tuning_db() / "tables" / first.kernel / f"{arch}.json")
        for problem in sorted({entry.problem for entry in entries if entry.problem.id in file.serves}):
            spec, default = arch_spec(arch), space_for(arch, kernel).default(problem)
            programs: dict[object, list[tuple[int, BuildRecord]]] = {}
            for place in file.serves[problem.id]:
                build = file.builds[place]
                if build.facts and not spilled(build.facts.spill_bytes):
                    program = build.fingerprint, kernel.grids(problem, build.schedule, spec)
                    programs.setdefault(program, []).append((place, build))
            plainest = (
                min(alike, key=lambda each: plainness(each[1].schedule, default)) for alike in programs.values()
            )
            times.setdefault(arch, {})[problem.id] = {
                place: float(f"{kernel.cost.model(problem, build.schedule, build.facts, spec):.6g}")
                for place, build in sorted(plainest, key=lambda each: each[0])
                if build.facts
            }
    return replace(file, times=times)


def resume(kind: Kind, folder: Path, toolchain: Toolchain) -> None:
    """Take over what an earlier run wrote for the same source and compiler."""
    path = file_of(kind, folder)
    if path.is_file():
        known = read_builds(path)
        same_tools = {(each.source_hash, each.toolchain) for each in known.builds} == {
            (kind.kernel.source_hash(), toolchain)
        }
        if same_tools:
            kind.found = {each.key: each for each in known.builds if each.key in kind.wanted}
            kind.samples = {name: [True] * count for name, count in known.alike.items()}


def compile_all(kinds: Sequence[Kind], archs: Sequence[str], folder: Path, pool: BuildPool, ends: float) -> None:
    """Compile what is left until `ends` (`time.monotonic()`), and write the files now and then, and at the end."""
    toolchain = installed_toolchain()
    for kind in kinds:
        resume(kind, folder, toolchain)
    left = [each for kind in kinds for each in tasks_of(kind, archs)]
    where = {task: (kind, sample, key) for kind, sample, key, task in left}
    compared: dict[tuple[str, str, str], list[bool]] = {}
    waiting: list[tuple[Kind, str, Key, BuildRecord]] = []
    written = time.monotonic()
    print(f"{toolchain.compiler}: {len(left)} programs to compile", flush=True)
    try:
        for count, built in enumerate(pool.build(where), start=1):
            kind, sample, key = where[built.task]
            record = record_of(kind, built, toolchain)
            if sample:
                waiting.append((kind, sample, key, record))
            else:
                kind.found[key] = record
            if time.monotonic() > written + WRITE_S:
                settle(waiting, compared)
                for each in kinds:
                    write(each, folder)
                written = time.monotonic()
                print(f"{count} of {len(left)}", flush=True)
            if time.monotonic() > ends:
                break
    finally:
        settle(waiting, compared)
        for kind in kinds:
            write(kind, folder)
    for kind in kinds:
        programs = len({each.fingerprint for each in kind.found.values() if each.fingerprint})
        failed = sum(each.failure is not None for each in kind.found.values())
        samples = ", ".join(f"{name} {sum(equal)} of {len(equal)} alike" for name, equal in kind.samples.items())
        print(
            f"{kind.kernel.name} {kind.name}: {len(kind.found)} of {len(kind.wanted)} built, {programs} programs, "
            f"{failed} failed; {samples}"
        )


def settle(
    waiting: Sequence[tuple[Kind, str, Key, BuildRecord]], compared: dict[tuple[str, str, str], list[bool]]
) -> None:
    """Compare each whole sample with the builds of its own arch and element type."""
    by_sample: dict[tuple[str, str, str], list[tuple[Kind, Key, BuildRecord]]] = {}
    for kind, sample, key, record in waiting:
        by_sample.setdefault((kind.kernel.name, kind.name, sample), []).append((kind, key, record))
    for place, members in by_sample.items():
        kind = members[0][0]
        whole = len(members) == len(kind.sample()) and all(key in kind.found for _, key, _ in members)
        if whole and place not in compared:
            compared[place] = kind.samples[place[2]] = [same(kind.found[key], record) for _, key, record in members]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, and write the files."""
    parser = parser_with(
        flag("folder", type=Path, help="where the files go; a second run goes on there"),
        flag("--arch", default="sm_121", help="the arch that is compiled for (sm_121)"),
        flag("--same", default="sm_120", help="archs whose machine code may be the same, between commas (sm_120)"),
        flag("--kernels", default=",".join(ORDER), help=f"kernels, between commas, in order ({','.join(ORDER)})"),
        flag("--only", default="", help="only files whose name contains this"),
        flag("--jobs", type=int, default=default_jobs(), help="compile processes (one for each CPU)"),
        flag("--minutes", type=float, default=8.0, help="stop after so long; what is done is kept (8)"),
        flag("--limit", type=int, default=None, help="at most so many schedules of each file, for a trial"),
        flag("--times", action="store_true", help="compile nothing: write the model's estimates into the files"),
        prog="python -m docs.studies.modelled_programs",
        description="compile the shipped search spaces",
    )
    options = parser.parse_args(arguments)
    if options.times:
        for path in sorted(options.folder.glob("*/programs_*.json.xz")):
            write_builds(path, with_times(read_builds(path)))
        return 0
    ends = time.monotonic() + options.minutes * 60
    try:
        kinds = [
            kind
            for name in options.kernels.split(",")
            for kind in kinds_of(load_kernel(name), options.arch, options.limit)
            if options.only in f"{name}_{kind.name}"
        ]
        kinds.sort(key=wanted_first)
        same_archs = [each for each in options.same.split(",") if each]
        with BuildPool(options.jobs) as pool:
            compile_all(kinds, same_archs, options.folder, pool, ends)
    except TiledschedError as error:
        parser.exit(error.exit_code, f"{error}\n")
    return 0


def wanted_first(kind: Kind) -> tuple[int, ...]:
    """The order of the files: attention with 128 and 64 columns, the other kernels' small spaces, attention's other columns,
    matrix products."""
    if kind.kernel.name == "attention":
        columns = next(iter(kind.wanted.values()))[1].head_dim
        return (0 if columns in (64, 128) else 2), len(kind.wanted)
    return (1 if len(kind.wanted) < 1000 else 3), len(kind.wanted)


if __name__ == "__main__":
    raise SystemExit(main())
