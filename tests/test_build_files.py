"""Files of builds, and the modelled reports that are made of those that ship."""

from __future__ import annotations

import functools
import json
import lzma
from dataclasses import replace

import pytest
from report_samples import PROBLEM, build_of, report_of

from docs.studies.modelled_programs import write_builds
from tiledsched.core import data_files
from tiledsched.core.device import ARCHS, spilled
from tiledsched.core.errors import DatabaseError, Failure, FailureKind
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.report import WithShipped
from tiledsched.report.answer import answer, least_sure
from tiledsched.report.records import MODELLED
from tiledsched.store.build_files import BuildFile, read_builds
from tiledsched.store.db import TuningDB
from tiledsched.store.records import Entry
from tiledsched.store.shipped import read_shipped_entries
from tiledsched.tuning.tuner import modelled_times

SPACE = space_for("sm_121", Attention)
DEFAULT = SPACE.default(PROBLEM)
CRASH = Failure(kind=FailureKind.COMPILE_ERROR, message="tileiras: error: out of registers")


def a_build(fingerprint, problem=PROBLEM, **knobs):
    return replace(build_of(DEFAULT.replace(**knobs), fingerprint, problem=problem, arch="sm_121"), seconds=0.0)


BUILDS = [
    a_build("a" * 24),
    a_build("a" * 24, latency_k=2),
    a_build("b" * 24, tile_n=128),
    a_build(CRASH, tile_m=128),
    a_build("c" * 24, PROBLEM.replace(causal=True)),
]
TIMES = {"sm_121": {PROBLEM.id: {0: 50.0, 2: 60.0}}}
FILE = BuildFile(
    builds=BUILDS, serves={PROBLEM.id: (0, 1, 2, 3)}, times=TIMES, space=9, alike={"sm_120": 2, "bfloat16": 2}
)


def test_a_file_holds_what_was_written(tmp_path):
    path = tmp_path / "programs_sm_121.json.xz"
    write_builds(path, FILE)
    found = read_builds(path)
    assert found.builds == BUILDS
    assert {name: tuple(places) for name, places in found.serves.items()} == FILE.serves
    assert (found.space, found.alike, found.times) == (9, FILE.alike, TIMES)
    before = path.read_bytes()
    write_builds(path, found)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("problem", "arch", "places", "begins"),
    [
        (PROBLEM, "sm_121", [0, 1, 2, 3], ""),
        (PROBLEM, "sm_120", [0, 1, 2, 3], ""),
        (PROBLEM, "sm_90", [], ""),
        (PROBLEM.replace(dtype="bfloat16"), "sm_121", [0, 1, 2, 3], "float16:"),
        (PROBLEM.replace(batch=3), "sm_121", [0, 1, 2, 3], ""),
        (PROBLEM.replace(causal=True), "sm_121", [4], ""),
        (PROBLEM.replace(causal=True, dtype="bfloat16"), "sm_120", [4], "float16:"),
        (PROBLEM.replace(head_dim=128), "sm_121", [], ""),
    ],
    ids=str,
)
def test_builds_serve_the_problems_of_their_classes(problem, arch, places, begins):
    found = FILE.builds_for(problem, arch)
    assert [each.schedule for each in found] == [BUILDS[place].schedule for place in places]
    assert [each.fingerprint for each in found] == [
        BUILDS[place].fingerprint and begins + BUILDS[place].fingerprint for place in places
    ]


def test_estimates_that_ship_are_those_of_the_arch_and_stand_for_both_element_types():
    wanted = {BUILDS[0].schedule: (BUILDS[0].facts, 50.0), BUILDS[2].schedule: (BUILDS[2].facts, 60.0)}
    for problem in (PROBLEM, PROBLEM.replace(dtype="bfloat16")):
        assert FILE.times_for(problem, "sm_121") == wanted
    assert FILE.times_for(PROBLEM, "sm_120") == FILE.times_for(PROBLEM.replace(batch=3), "sm_121") == {}


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "programs_sm_121.json.xz"
    write_builds(path, FILE)
    whole = path.read_bytes()
    data = json.loads(lzma.decompress(whole))
    damaged = [b"", whole[:-9], b"{}", lzma.compress(b"[]"), lzma.compress(b"{")]
    for key, value in {"builds": [[1, 2]], "programs": [["x"]], "toolchain": {}, "classes": [], "serves": 3}.items():
        damaged.append(lzma.compress(json.dumps({**data, key: value}).encode()))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(DatabaseError, match=r"programs_sm_121\.json\.xz"):
            read_builds(path)


def modelled(problem, schedule=DEFAULT, **more):
    return Entry(
        kernel="attention",
        arch="sm_121",
        problem=problem,
        provenance=MODELLED,
        schedule=schedule,
        model_us=90.0,
        toolchain=BUILDS[0].toolchain,
        source_hash=BUILDS[0].source_hash,
        **more,
    )


@pytest.fixture
def with_files(db, tmp_path, monkeypatch):
    """Makes a database beneath which a file of builds ships."""

    def make(entries, content=None):
        folder = tmp_path / "tuning_db"
        path = folder / "model" / "attention" / "programs_sm_121.json.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_builds(path, FILE)
        if content is not None:
            path.write_bytes(content)
        (folder / "manifest.json").write_text('{"schema_version": 1, "files": {}}')
        monkeypatch.setattr(data_files, "tuning_db", lambda: folder)
        monkeypatch.setattr("tiledsched.store.build_files.check_shipped", lambda path, data: None)
        return WithShipped(db, Attention, "sm_121", entries)

    return make


def modelled_report(source, arch="sm_121"):
    return report_of(source, arch, model_times=modelled_times(arch, Attention))


def test_a_damaged_file_that_ships_is_left_out(with_files, caplog):
    report = modelled_report(with_files([modelled(PROBLEM)], b"damaged"))
    assert [one.programs for one in report.modelled.problems] == [1]
    assert "it is left out" in caplog.text


def test_own_builds_and_shipped_ones_of_a_program_are_one(with_files, db):
    """The user's own compile of one schedule says which of the shipped programs it is, whatever the element type."""
    like = PROBLEM.replace(dtype="bfloat16")
    for problem, own in ((PROBLEM, "a" * 24), (like, "d" * 24)):
        db.record_builds([a_build(own, problem, latency_k=2)])
    report = modelled_report(with_files([modelled(PROBLEM), modelled(like)]))
    for one in report.modelled.problems:
        assert (one.programs, one.default.schedule, one.provenance) == (2, DEFAULT, MODELLED)
        assert [timed.same_program_as for timed in one.timed] == [None, None]
        own = {timed.schedule: timed.fingerprint for timed in one.timed}[DEFAULT]
        assert own == ("d" if one.problem == like else "a") * 24


@pytest.mark.parametrize(("own", "programs"), [(1, 2), (3, 3)], ids=["fewer", "more"])
def test_builds_of_two_compilers_are_not_mixed(with_files, db, own, programs):
    tools = replace(BUILDS[0].toolchain, tileiras="13.4.92")
    for place, occupancy in enumerate((1, 2, 4)[:own]):
        db.record_builds([replace(a_build(f"{place:024}", occupancy=occupancy), toolchain=tools)])
    report = modelled_report(with_files([replace(modelled(PROBLEM), toolchain=tools)]))
    assert [one.programs for one in report.modelled.problems] == [programs]
    assert report.model_compilers == (tools.compiler if own > 1 else BUILDS[0].toolchain.compiler,)


# What ships.


@functools.cache
def shipped(arch):
    """What ships for an arch: its modelled entries, a report's source with those of a few problems, and that report."""
    entries = read_shipped_entries(data_files.tuning_db() / "tables" / "attention" / f"{arch}.json")
    few = [entry for entry in entries if (entry.problem.seq_q, entry.problem.head_dim) == (2048, 128)]
    with TuningDB.open(":memory:") as db:
        source = WithShipped(db, Attention, arch, few)
        return entries, source, modelled_report(source, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_121", "sm_120"])
def test_the_report_of_an_empty_home_has_every_modelled_problem_whole(arch):
    entries, source, report = shipped(arch)
    space, model = space_for(arch, Attention), modelled_times(arch, Attention)
    for problem in {entry.problem for entry in entries}:
        schedules = {build.schedule for build in source.shipped_builds(problem)}
        served = {space.complete(entry.schedule) for entry in entries if entry.problem == problem}
        assert served | {space.default(problem)} <= schedules
        assert len(schedules) >= 150
    assert answer(report)[0].startswith(
        f"Nothing was measured on {arch}: every figure is the performance model's estimate"
    )
    assert not report.measured.problems
    found = {(one.problem.causal, one.problem.dtype): one for one in report.modelled.problems}
    assert set(found) == {(causal, dtype) for causal in (False, True) for dtype in ("float16", "bfloat16")}
    for one in found.values():
        assert one.provenance == MODELLED
        assert one.programs >= 90
        assert one.served.schedule in {timed.schedule for timed in one.timed}
        named = {one.served.schedule, one.default.schedule}
        assert {timed.schedule for timed in one.timed if spilled(timed.facts.spill_bytes)} <= named
        best = [build for build in source.shipped_builds(one.problem) if build.schedule == one.best.schedule]
        assert one.best.us == pytest.approx(model(one.problem, best)[one.best.schedule.id], rel=1e-5)
    assert [each.us for each in found[False, "float16"].timed] == [each.us for each in found[False, "bfloat16"].timed]


def test_the_least_sure_problem_is_measured_first():
    report = shipped("sm_121")[2]
    said = least_sure(report)
    close = [one for one in report.modelled.problems if one.tiles[1].relative - 1 <= one.error.mean]
    assert said.startswith(f"For {len(close)} of 4 modelled problems")
    assert "`tiledsched tune attention --arch sm_121 -p S=2048,D=128,B=8,H=16" in said
    assert least_sure(replace(report, modelled=replace(report.modelled, problems=()))) == ""


@pytest.mark.parametrize(
    "path",
    sorted((data_files.tuning_db() / "model").glob("*/programs_*.json.xz")),
    ids=lambda path: f"{path.parent.name}-{path.name[9:-8]}",
)
def test_estimates_that_ship_are_those_of_the_model(path):
    """After a change of a model: python -m docs.studies.modelled_programs tuning_db/model --times"""
    file = read_builds(path)
    assert set(file.times) == {"sm_120", "sm_121"}
    assert len(file.builds) == file.space
    for arch, times in file.times.items():
        entries = read_shipped_entries(data_files.tuning_db() / "tables" / path.parent.name / f"{arch}.json")
        problem = next(entry.problem for entry in entries if entry.problem.id in times)
        for place, us in list(times[problem.id].items())[::40]:
            build = file.builds[place]
            model = problem.declaration.cost.model(problem, build.schedule, build.facts, ARCHS[arch])
            assert us == pytest.approx(model, rel=1e-5)
