"""Building what is missing and merging what is the same, with a pool that only pretends; the pool; the compiler."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import fake_compiler
import pytest
from fake_builds import FakeBuilds
from store_samples import TOOLCHAIN, artifact

from tiledsched.build import compiler, pool as pool_module
from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.pool import BuildPool
from tiledsched.build.store import ProgramStore
from tiledsched.build.toolchain import compiler_folder
from tiledsched.core import files
from tiledsched.core.canonical import stable_id
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import CompilerError, ConfigError, Failure, FailureKind, NoRoomError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.fleet.clock import is_full
from tiledsched.kernels.attention import Attention
from tiledsched.tuning.builder import Builder

PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
H200 = arch_spec("sm_90")
PLAIN = space_for("sm_90", Attention).default(PROBLEM)


def schedule(**knobs) -> Schedule:
    plain = {"tile_m": 64, "tile_n": 64, "occupancy": 1, "num_worker_warps": 4, "persistent": "no", "opt_level": 3}
    return PLAIN.replace(**{**plain, **knobs})


class StubPool(FakeBuilds):
    """Compiles by looking up `outcomes`, in so many seconds; what is not there gets machine code of its own."""

    def __init__(self, outcomes=None, seconds=1.0):
        super().__init__()
        self.outcomes, self.seconds, self.stopped_early = outcomes or {}, seconds, False

    def outcome(self, schedule):
        return self.outcomes.get(schedule, artifact(stable_id(schedule.id, 24)))

    def build(self, tasks, *, leave=0):
        try:
            for built in super().build(tasks):
                yield replace(built, seconds=self.seconds)
        except GeneratorExit:
            self.stopped_early = True
            raise


@pytest.fixture
def builder(db, tmp_path):
    """A maker of builders over one database and one folder, as if each were a new process."""

    def make(pool, **changes):
        values = {
            "db": db,
            "artifacts": ProgramStore(tmp_path),
            "kernel": Attention,
            "arch": "sm_90",
            "toolchain": TOOLCHAIN,
        } | changes
        return Builder(*values.values(), pool=pool)

    return make


def test_nothing_is_compiled_twice(builder):
    pool, wanted, steps = StubPool(), [schedule(), schedule(tile_m=128), schedule()], []
    shop = builder(pool)
    assert shop.missing(wanted, PROBLEM) == wanted[:2]
    assert shop.build(wanted, PROBLEM, progress=lambda done, record: steps.append((done, record.schedule))) == 2
    assert steps == [(1, wanted[0]), (2, wanted[1])]
    assert shop.build(wanted, PROBLEM) == builder(pool).build(iter(wanted), PROBLEM) == 0
    assert pool.schedules == wanted[:2]


@pytest.mark.parametrize("shared", [True, False], ids=["one cache", "two caches"])
def test_hosts_of_two_kinds_share_a_database_without_building_to_and_fro(builder, db, tmp_path, shared):
    """Each builds what it launches once; the record is the same for both."""
    pool, wanted, found = StubPool(), [schedule(), schedule(tile_m=128)], []
    stores = [ProgramStore(tmp_path / ("" if shared else host), host) for host in ("x86_64", "aarch64")]
    for compiled in (2, 2, 0, 0):
        made = builder(pool, artifacts=stores[len(found) % 2])
        assert made.build(wanted, PROBLEM) == compiled
        records = db.find_builds("attention", made.source_hash, TOOLCHAIN, "sm_90")
        found.append({key: record.fingerprint for key, record in records.items()})
    assert found == [found[0]] * 4


def test_a_cache_that_cannot_be_written_is_said_before_and_after_building(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    shaped, full = ProgramStore(tmp_path / "file"), ProgramStore(tmp_path)
    with pytest.raises(
        ConfigError, match=r"cannot keep machine code in .*; free some space there, or name another folder"
    ):
        shaped.ready()
    assert (shaped.get("sm_90", "ab" * 12), shaped.has("sm_90", "ab" * 12)) == (None, False)
    with pytest.raises(ConfigError, match="cannot keep machine code"):
        shaped.put(artifact("ab" * 12))
    full.ready()
    monkeypatch.setattr("tiledsched.build.sealed.write_whole", raising(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="No space left on device"):
        full.put(artifact("ab" * 12))


def raising(error):
    """A function that raises, whatever it is given."""

    def fail(*given, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("kind", "seconds", "again"),
    [
        (FailureKind.COMPILE_ERROR, 1.0, False),
        (FailureKind.COMPILER_KILLED, 1.0, True),
        (FailureKind.COMPILE_TIMEOUT, 1.0, True),  # the limit is 120 s: a compile that had less may end now
        (FailureKind.COMPILE_TIMEOUT, 140.0, False),
    ],
)
def test_failures_are_stored_and_only_what_the_compiler_says_is_a_fact(builder, db, kind, seconds, again):
    bad, good = schedule(tile_m=128), schedule()
    shop = builder(StubPool({bad: Failure(kind=kind, message="so it was")}, seconds))
    assert shop.build([good, bad], PROBLEM) == 2
    record = shop.record(bad, PROBLEM)
    assert (record.failure.kind, record.fingerprint, record.facts) == (kind, "", None)  # a row
    assert shop.build([good, bad], PROBLEM) == 0  # once a run
    assert [program.schedule for program in shop.programs([bad, good], PROBLEM, H200)] == [good]
    builds = db.find_builds("attention", Attention.source_hash(), TOOLCHAIN, "sm_90")
    assert sorted(build.failure is None for build in builds.values()) == [False, True]
    later = builder(StubPool())
    assert (later.record(bad, PROBLEM) is None) == again
    assert later.build([good, bad], PROBLEM) == again


ONE_TASK = BuildTask(kernel=Attention.locator(), schedule=schedule(), problem=PROBLEM, arch="sm_90", timeout_s=9)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Return code -9\nkilled"), FailureKind.COMPILER_KILLED),
        (RuntimeError("cannot open: Too many open files"), FailureKind.COMPILER_KILLED),
        (FileNotFoundError("TMPDIR"), FailureKind.COMPILER_KILLED),
        (ValueError("Return code 5"), FailureKind.COMPILE_ERROR),
    ],
    ids=str,
)
def test_the_system_is_told_from_the_compiler(monkeypatch, error, kind):
    monkeypatch.setattr(compiler, "compile_schedule", raising(error))
    assert compiler.compile_task(ONE_TASK).failure.kind is kind


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        RuntimeError("Return code 1\nerror: No space left on device"),
        RuntimeError("Return code 1"),
    ],
    ids=str,
)
def test_a_full_disk_is_no_fault_of_what_was_compiled(monkeypatch, tmp_path, error):
    """The last error says nothing of a disk, which is full all the same."""
    monkeypatch.setattr(compiler, "compile_schedule", raising(error))
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "tiledsched-x"))
    if str(error) == "Return code 1":
        (tmp_path / "tiledsched-x").mkdir()
        assert compiler.compile_task(ONE_TASK).failure.kind is FailureKind.COMPILE_ERROR
        full = mock.MagicMock()
        full.return_value.__enter__.side_effect = OSError(28, "No space left on device")
        monkeypatch.setattr(files.tempfile, "TemporaryFile", full)
    with pytest.raises(NoRoomError, match=rf"no room to compile in {tmp_path} of .*Error.* with TMPDIR") as told:
        compiler.compile_task(ONE_TASK)
    assert is_full(told.value)
    assert is_full(NoRoomError("as it comes from another process"))
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one  # a circle ends
    assert not is_full(one)


@pytest.mark.slow
def test_a_full_disk_ends_a_run_and_loses_nothing(processes, builder):
    shop, wanted = builder(processes), [schedule(do=what) for what in ("fine", "full")]
    shop.build(wanted[:1], PROBLEM)
    with pytest.raises(NoRoomError, match="no room to compile in"):
        shop.build(wanted, PROBLEM)
    later = builder(StubPool())
    assert later.record(wanted[0], PROBLEM).fingerprint
    assert later.record(wanted[1], PROBLEM) is None  # no row says that it cannot be compiled
    with pytest.raises(NoRoomError):
        processes.submit(task("full")).result(30)


def test_a_run_in_which_all_fail_alike_ends(builder):
    wanted = [schedule(tile_m=tile, tile_n=other) for tile in (16, 32, 64, 128) for other in (16, 32, 64)]
    dead = Failure(kind=FailureKind.COMPILER_KILLED, message="OSError: no TMPDIR")
    pool = StubPool(dict.fromkeys(wanted, dead))
    with pytest.raises(
        CompilerError, match="first 8 programs all failed to build, and alike: compiler_killed: OSError: no TMPDIR"
    ):
        builder(pool).build(wanted, PROBLEM)
    assert pool.schedules == wanted[:8]
    assert builder(StubPool(dict.fromkeys(wanted[1:], dead))).build(wanted, PROBLEM) == 12  # one is built
    other = replace(dead, message="another")
    assert builder(StubPool({**dict.fromkeys(wanted, dead), wanted[3]: other})).build(wanted[1:], PROBLEM) == 11


def test_problems_of_one_class_share_builds_and_another_toolchain_or_arch_builds_anew(builder):
    shop = builder(StubPool())
    for changes, built in (
        ({}, 1),
        ({"seq_q": 4096, "seq_k": 8192, "batch": 7}, 0),
        ({"seq_k": 1000}, 1),  # needs a column mask
        ({"causal": True}, 1),
    ):
        assert shop.build([schedule()], PROBLEM.replace(**changes)) == built
    for changes in ({"toolchain": replace(TOOLCHAIN, tileiras="13.4.99")}, {"arch": "sm_100"}):
        assert builder(StubPool(), **changes).missing([schedule()], PROBLEM)


def test_what_was_built_is_asked_of_no_problem_that_it_cannot_serve(builder):
    space, shop = space_for("sm_90", Attention), builder(StubPool())
    few = PROBLEM.replace(heads=32, kv_heads=8, seq_q=1, head_dim=128)
    many = few.replace(kv_heads=1)
    packed = next(space.schedules(few, pinned={"tile_m": 16, "pack_gqa": True}))
    shop.build([packed], few)
    assert shop.built(few, space) == [packed]
    with pytest.raises(ZeroDivisionError):  # a tile of 16 rows holds no row of 32 heads
        shop.problem_class(many, packed)
    assert shop.built(many, space) == []


@pytest.mark.parametrize("damage", [None, b"", b"not compressed at all", "cut", "other"])
def test_a_missing_or_damaged_file_is_built_again(builder, damage):
    shop = builder(StubPool())
    shop.build([schedule()], PROBLEM)
    fingerprint = shop.record(schedule(), PROBLEM).fingerprint
    path = shop.artifacts.path("sm_90", fingerprint)
    if damage is None:
        path.unlink()
    elif damage != "other":  # the sample's own contents are no cubin
        path.write_bytes(path.read_bytes()[:-20] if damage == "cut" else damage)
    assert shop.missing([schedule()], PROBLEM) == ([schedule()] if damage is None else [])
    assert shop.artifacts.get("sm_90", fingerprint) is None  # missing from the first look on
    assert shop.missing([schedule()], PROBLEM) == [schedule()]
    assert shop.build([schedule()], PROBLEM) == 1
    assert path.is_file()


def test_equivalents_are_one_program(builder):
    alike, other = [schedule(opt_level=3), schedule(opt_level=2), schedule(latency_k=2)], schedule(tile_m=128)
    shop = builder(StubPool(dict.fromkeys(alike, artifact("a" * 24))))
    shop.build([*alike, other], PROBLEM)
    programs = shop.programs([alike[1], other, alike[0], alike[2], schedule(tile_n=128)], PROBLEM, H200)
    assert [program.schedules for program in programs] == [(alike[1], alike[0], alike[2]), (other,)]
    assert programs[0].schedule == alike[1]
    assert programs[0].key == ("a" * 24, ((1024 // 64 * PROBLEM.batch * PROBLEM.heads, 1, 1),))


def test_one_code_with_two_grids_is_two_programs(builder):
    """Persistent kernels of one machine code launch as many blocks as their occupancy hint says."""
    pair = [schedule(persistent="strided", occupancy=occupancy) for occupancy in (1, 2)]
    shop = builder(StubPool(dict.fromkeys(pair, artifact("a" * 24))))
    shop.build(pair, PROBLEM)
    for problem, grids in ((PROBLEM, [132, 264]), (PROBLEM.replace(batch=1, heads=1, kv_heads=1), [16])):
        assert [program.grids[0][0] for program in shop.programs(pair, problem, H200)] == grids


def test_a_deadline_or_ctrl_c_leaves_the_rest(builder, monkeypatch):
    pool, wanted = StubPool(), [schedule(occupancy=n) for n in range(1, 9)]
    shop = builder(pool)
    monkeypatch.setattr("tiledsched.tuning.builder.time.monotonic", lambda: pool.compiled)
    assert shop.build(wanted, PROBLEM, deadline_s=2.5) == 3
    assert pool.stopped_early
    assert builder(pool).missing(wanted, PROBLEM) == wanted[3:]

    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shop.build(wanted, PROBLEM, progress=interrupt)
    assert builder(pool).missing(wanted, PROBLEM) == wanted[5:]
    assert shop.build(wanted, PROBLEM) == 3
    assert pool.schedules == wanted


# The pool of processes


def task(do, timeout_s=60.0, **knobs) -> BuildTask:
    return BuildTask(
        kernel="attention", schedule=Schedule(do=do, **knobs), problem=PROBLEM, arch="sm_90", timeout_s=timeout_s
    )


@pytest.fixture
def processes(monkeypatch):
    """A pool whose processes run fake_compiler instead of cuTile."""
    monkeypatch.setattr(pool_module, "compile_task", fake_compiler.compile_task)
    monkeypatch.setattr(pool_module, "GRACE_S", 0.2)
    with BuildPool(jobs=2) as pool:
        yield pool


def outcomes(pool, tasks):
    found = {built.task: built for built in pool.build(tasks)}
    return [found[each] for each in tasks]


def test_processes_read_their_tasks_side_by_side(processes, tmp_path):
    """Which imports the modules of kernels."""
    tasks = [replace(task("fine", n=n), problem=fake_compiler.Awaited(tmp_path)) for n in range(2)]
    assert [built.failure for built in processes.build(tasks)] == [None, None]


def test_each_way_to_end_costs_one_task(processes):
    assert list(processes.build([])) == []
    assert processes._pool is None, "no tasks start no process"
    fine = [task("fine", n=n) for n in range(5)]
    ends = [task("kill"), task("error"), task("sleep", timeout_s=0.3), task("exit")]
    found = outcomes(processes, [fine[0], *ends, *fine[1:]])
    kinds = [built.failure and built.failure.kind for built in found]
    killed, stopped = FailureKind.COMPILER_KILLED, FailureKind.COMPILE_TIMEOUT
    assert kinds == [None, killed, FailureKind.COMPILE_ERROR, stopped, killed, None, None, None, None]
    assert ("code 7" in found[4].failure.message, found[3].seconds) == (True, pytest.approx(0.5))
    assert all((built.artifact is None) == (built.failure is not None) for built in found)
    assert outcomes(processes, [task("fine", n=9)])[0].artifact is not None


@pytest.mark.slow
def test_leaving_early_stops_the_processes(processes):
    started = time.monotonic()
    for built in processes.build([task("fine"), *(task("sleep", n=n) for n in range(4))]):
        pid = int(built.seconds)
        break
    assert time.monotonic() - started < 30
    assert not Path(f"/proc/{pid}").exists()
    assert pid != os.getpid()
    assert outcomes(processes, [task("fine")])[0].artifact is not None
    processes.close()
    processes.close()


# The compiler

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or compiler_folder() is None, reason="no cuTile compiler here"
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.compiler
def test_real_compiles(builder, tmp_path):
    """Two archs, equivalents, an error and a compiler stopped at its limit, all through the pool."""
    plain, alike = schedule(), schedule(opt_level=2)
    broken, endless = schedule(tile_m=48), schedule(tile_m=128)
    with BuildPool() as pool:
        for arch in ("sm_90", "sm_121"):
            shop = builder(pool, arch=arch)
            assert shop.build([plain, alike, broken] if arch == "sm_90" else [plain], PROBLEM) == (
                3 if arch == "sm_90" else 1
            )
            record = shop.record(plain, PROBLEM)
            made = shop.artifacts.get(arch, record.fingerprint)
            assert (made.fingerprint, made.facts, len(made.cubin)) == (
                record.fingerprint,
                record.facts,
                record.cubin_bytes,
            )
            assert made.facts.registers > 32
            assert made.facts.threads % 32 == 0
        assert shop.missing([plain], PROBLEM) == []
        hurried = builder(pool)
        hurried._timeout_s = 0.01
        hurried.build([endless], PROBLEM)
    shop = builder(StubPool())
    fingerprints = {shop.record(each, PROBLEM).fingerprint for each in (plain, alike)}
    assert len(shop.programs([plain, alike], PROBLEM, H200)) == len(fingerprints)
    assert shop.record(broken, PROBLEM).failure.kind is FailureKind.COMPILE_ERROR
    assert "\n" not in shop.record(broken, PROBLEM).failure.message
    assert hurried.record(endless, PROBLEM).failure.kind is FailureKind.COMPILE_TIMEOUT
    assert shop.missing([plain, alike, broken, endless], PROBLEM) == [endless]  # it was given too little time


def test_stragglers_go_on_and_come_with_a_later_call(monkeypatch) -> None:
    tasks = [
        BuildTask(kernel="attention", schedule=Schedule(tile_m=16 << i), problem=PROBLEM, arch="sm_90")
        for i in range(5)
    ]
    started: dict[BuildTask, concurrent.futures.Future] = {}

    class Processes:
        def schedule(self, function, *, args, timeout):
            _, task = pickle.loads(*args)
            assert task not in started, "a running task was started again"
            started[task] = concurrent.futures.Future()
            if task != tasks[3]:
                started[task].set_result(Built(task=task, artifact=None, failure=None, seconds=0.1))
            return started[task]

        def stop(self) -> None: ...
        def join(self) -> None: ...

    pool = BuildPool(4)
    processes = Processes()
    monkeypatch.setattr(pool, "_started", lambda: processes)
    assert {built.task for built in pool.build(tasks[:4], leave=1)} == set(tasks[:3])
    assert list(pool.build([tasks[3]], leave=1)) == []  # it is still running
    started[tasks[3]].set_result(Built(task=tasks[3], artifact=None, failure=None, seconds=9.0))
    assert {built.task for built in pool.build([tasks[4]])} >= {tasks[4]}
    assert list(pool.build([])) == []
    assert len(started) == 5
