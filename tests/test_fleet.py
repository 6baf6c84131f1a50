"""A fleet of made-up GPUs on this machine, from the leases alone: replayed tunes in real processes that crash, hang and are stopped."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fleet_jobs
import pytest
import sqlalchemy as sa
from golden import check_golden
from store_samples import DEVICE, FAILURE, PROBLEM, artifact, build, entry, measurement, new_url, schedule, stored
from test_fleet_leases import away

from tiledsched import fleet
from tiledsched.build.compiler import BuildTask, Built, build_key
from tiledsched.build.cubin import read_artifact
from tiledsched.cli import fleet_output, main
from tiledsched.core import processes
from tiledsched.core.errors import ConfigError, DatabaseError, Failure, FailureKind, MeasureError
from tiledsched.core.space_files import space_for
from tiledsched.fleet import gpus, jobs, local, worker as worker_module
from tiledsched.fleet.builds import SharedBuilds
from tiledsched.fleet.campaign import CampaignPlan, Lease, Outcome, Setup
from tiledsched.fleet.child import Child, why_not
from tiledsched.fleet.clock import Clock
from tiledsched.fleet.gpus import Gpu
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.local import work
from tiledsched.fleet.local_store import LocalStore, bring_home, whole
from tiledsched.fleet.running import plan as plan_campaign
from tiledsched.fleet.status import read_status
from tiledsched.fleet.worker import Heart, Worker
from tiledsched.kernels.softmax import Softmax
from tiledsched.measure import nvml
from tiledsched.measure.runner import Conditions
from tiledsched.store.db import TuningDB
from tiledsched.store.models import AttemptRow
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session

TESTS = str(Path(__file__).parent)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder for everything; workers inherit the environment."""
    for name, value in {
        "TILEDSCHED_FLEET_JOBS": "fleet_jobs",
        "FLEET_FOLDER": str(tmp_path),
        "FLEET_GPUS": "sm_90:1",
        "TILEDSCHED_CACHE": str(tmp_path / "cache"),
        "TILEDSCHED_DB": str(tmp_path / "x.db"),
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), TESTS]),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def leases(home):
    """Those of the folder's database."""
    with TuningDB.open(home / "x.db") as db:
        yield Leases(db)


def plan(count, archs=("sm_90",), **more) -> CampaignPlan:
    return CampaignPlan(
        job="fleet_jobs:tune", kernel="attention", problems={arch: fleet_jobs.problems(count) for arch in archs}, **more
    )


def softmax(columns=64, **more) -> BuildTask:
    """A build of softmax's default schedule."""
    problem = Softmax.problem(rows=64, columns=columns)
    schedule = space_for("sm_90", Softmax).default(problem)
    return BuildTask(kernel=Softmax.locator(), schedule=schedule, problem=problem, arch="sm_90", **more)


def children(folder) -> list[int]:
    """Processes of this test's fleet that run, whoever their parent is."""
    return [int(place.name) for place in Path("/proc").glob("[0-9]*") if _belongs(place, f"FLEET_FOLDER={folder}")]


def _belongs(place: Path, variable: str) -> bool:
    try:
        told = (place / "environ").read_bytes().split(b"\0")
        runs = (place / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
    return runs and variable.encode() in told and int(place.name) != os.getpid()


def gone(folder) -> bool:
    wait_for(lambda: not children(folder))
    return True


@pytest.mark.slow
def test_what_crashes_hangs_or_fails_costs_its_attempt_and_the_campaign_ends(home, leases) -> None:
    for word in ("crash-1", "hang-2", "error-3", "fail-4"):
        (home / word).touch()
    db, problems, ahead = leases.db, fleet_jobs.problems(4), [0.0]
    options = {"trials": fleet_jobs.PROGRAMS, "sampler": "exhaustive"}
    campaign = leases.open(plan(4, deadline_s=500.0, lease_s=20.0, options=options))

    def pass_the_deadline() -> None:
        wait_for(lambda: not (home / "hang-2").exists())
        ahead[0] = 1000.0

    threading.Thread(target=pass_the_deadline, daemon=True).start()
    worked = work(str(home / "x.db"), campaign.id, clock=Clock(monotonic=lambda: time.monotonic() + ahead[0]))
    assert (worked.gpus, worked.notes) == (1, ())
    status = read_status(leases, campaign.id)
    assert (status.campaign.status, status.done, status.failed, len(status.spread)) == ("done", 3, 1, 1)
    failure = problems[3], "no schedule works; relax the constraints"
    assert [(each.problem, each.message) for each in status.failures] == [failure]
    with db.reading() as session:
        ends, messages = zip(*session.execute(sa.select(AttemptRow.outcome, AttemptRow.message)), strict=True)
    assert Counter(ends) == {"done": 3, "error": 2, "hung": 1, "failed": 1}
    assert all(each in " ".join(messages) for each in ("code -9", "deadline of 500 s", "off the bus"))
    assert fleet_jobs.winners(db).keys() == {(each, "sm_90") for each in problems[:3]}
    replay = fleet_jobs.Replay(problems[0], "sm_90")
    assert db.find_builds("attention", db.entries()[0].source_hash, replay.toolchain, "sm_90")
    assert len(db.measurements()) >= 3 * 4
    assert (db.check(), gone(home)) == ([], True)
    assert list((home / "cache" / "fleet").glob("*/*")) == []  # all was brought home


def child(home, leases, planned=None, *, requests=(), said=None, **more) -> Child:
    """A child of a campaign of one problem, in this process: what it is asked, and where it says what it does."""
    setup = Setup(db=str(home / "x.db"), campaign=leases.open(planned or plan(1)), jobs=1)
    pipe = types.SimpleNamespace(recv=lambda: next(requests), send=([] if said is None else said).append)
    return Child(pipe, setup, **more)


def test_a_cache_that_cannot_be_written_is_said_before_any_work(home, leases, monkeypatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("TILEDSCHED_CACHE", str(home / "file" / "cache"))
    said: list[tuple[str, str]] = []
    child(home, leases, requests=iter([("end",)]), said=said).serve()
    ((_, why),) = said
    assert re.match(r"cannot keep machine code in .*name another folder with TILEDSCHED_CACHE$", why)


@pytest.fixture
def planted(home, monkeypatch):
    """A module that is found, and that leaves a mark when it is imported."""
    (home / "planted.py").write_text(f"open({str(home / 'mark')!r}, 'w')\nraise SystemExit(9)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home), os.environ["PYTHONPATH"]]))
    monkeypatch.syspath_prepend(home)
    yield
    assert not (home / "mark").exists()


@pytest.mark.parametrize(
    "row",
    [
        {"kernel": "planted:Planted"},
        {"job": "planted:tune"},
        {"job": "tune", "options": {"sampler": "planted:Sampler"}},
        {"options": {"sampler": "planted:Sampler"}},
    ],
)
def test_a_campaigns_row_names_no_code_that_the_user_did_not_allow(home, leases, planted, row) -> None:
    with pytest.raises(ConfigError, match=r"if you trust that code, run this with TILEDSCHED_FLEET_JOBS=planted$"):
        child(home, leases, dataclasses.replace(plan(1), **row))


@pytest.mark.slow
def test_a_worker_takes_no_problem_of_a_campaign_whose_code_is_not_allowed(home, leases, planted) -> None:
    campaign = leases.open(dataclasses.replace(plan(1), kernel=f"{home}/planted.py:Planted"))
    (note,) = work(str(home / "x.db"), campaign.id, without_gpu=1, jobs=1).notes
    assert note.endswith(f"run this with TILEDSCHED_FLEET_JOBS={home}/planted.py")
    assert leases.counts(campaign.id)["waiting"] == 1


def started(home, *words) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tiledsched", "fleet", "work", "--jobs", "1", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def join(leases, campaign, gpu, hostname="host") -> str:
    """A worker with a GPU of that name."""
    return leases.join(campaign.id, hostname=hostname, pid=1, gpu=gpu, device_name="NVIDIA Replayed", arch="sm_90")


def wait_for(answer, seconds=60.0) -> None:
    deadline = time.monotonic() + seconds
    while not answer():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_who_is_told_to_stop_ends_in_ten_seconds_and_loses_nothing(home, leases) -> None:
    """Who is killed, test_fleet_commands."""
    campaign = leases.open(plan(1, options={"pause_s": 0.5}))
    child = started(home)
    wait_for(lambda: leases.counts(campaign.id)["leased"] == 1)
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    out = child.communicate(timeout=60)[0]
    assert time.monotonic() - began < (10 if os.getloadavg()[0] < 2 * (os.cpu_count() or 1) else 60)
    assert gone(home)
    assert child.returncode == 130, out
    assert "everything finished so far is stored" in out
    assert leases.counts(campaign.id)["leased"] == 0  # given back, or done at the last moment
    assert leases.db.check() == []
    assert main(["fleet", "work", campaign.id]) == 0
    assert leases.counts(campaign.id)["done"] == 1


def test_the_status_of_a_campaign_is_printed(cli, home, capsys) -> None:
    """One problem is done, one failed, a third is with a worker whose GPU is hot, and nobody has the fourth."""
    assert "there is no database" in cli(["fleet", "status"], code=2).err
    moved = fleet_jobs.MovedClock()
    with TuningDB.open(home / "x.db") as db:
        leases = Leases(db, clock=moved.clock)
        campaign = leases.open(plan(4))
        workers = [join(leases, campaign, f"GPU-{name}", hostname=f"host-{name}") for name in "abc"]
        for worker, us in zip(workers, (100.0, 100.0, 109.0), strict=True):
            told = {"fingerprint": "c" * 24, "median_us": us, "ci_low_us": us - 0.1, "ci_high_us": us + 0.1}
            leases.note_control(campaign.id, worker, f"GPU-{'abc'[workers.index(worker)]}", "sm_90", told)
        taken = [leases.take(campaign, worker, ["sm_90"]) for worker in workers]
        moved.pass_s(36.0)
        leases.finish(taken[0], Outcome.DONE, result={"median_us": 100.0, "schedule": {"tile_m": 64}})
        leases.finish(taken[1], Outcome.FAILED, message="no schedule works")
        hot = {"sm_clock_mhz": 1200, "temperature_c": 88, "power_w": 300.4, "throttle_reasons": ["software thermal"]}
        leases.renew(campaign, {workers[2]: {**hot, "age_s": 7.0, "doing": "races"}})
        leases.leave(workers[0], "gone home")
        print(fleet_output.view(read_status(leases, campaign.id)))
    for words in ("--all", "--stop"):
        assert main(["fleet", "status", words]) == 0
    check_golden("fleet_status.txt", capsys.readouterr().out)
    assert main(["fleet", "work", "nonsense"]) == 2


def test_a_campaign_is_opened_with_the_options_of_its_command(home, cli) -> None:
    words = ["fleet", "run", "tune", "softmax", "--arch", "sm_90,sm_100", "-p", "rows=64,columns=64", "--open-only"]
    opened = cli(words).out.split()[-1]
    with TuningDB.open(home / "x.db") as db:
        told = Leases(db).campaign(opened)
        assert Leases(db).open_archs(opened) == {"sm_90", "sm_100"}
        assert (told.job, told.options["effort"], told.source_hash) == ("tune", "default", Softmax.source_hash())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"compiler": "1.2.3"}, "install tileiras 1.2.3 here"),
        ({"source_hash": "other"}, "bring it up to date"),
        ({"options": {"seeds": [1, 2]}}, "does not know seeds; bring this host up to date"),
        ({}, ""),
    ],
)
def test_a_host_with_another_compiler_source_or_version_takes_nothing(leases, change, why) -> None:
    made = plan_campaign("tune", Softmax, [{"rows": 64, "columns": 64}], ["sm_90"], options={"runner": "none"})
    told = why_not(leases.open(dataclasses.replace(made, **change)), Softmax, jobs.find_job("tune"))
    assert (why in told, bool(told)) == (True, bool(why))


def test_an_option_that_there_is_not_opens_no_campaign() -> None:
    with pytest.raises(ConfigError, match="tune has no option efort; its options are effort, trials"):
        plan_campaign("tune", Softmax, "llama", ["sm_90"], options={"efort": "quick"})


def test_a_campaign_for_other_gpus_keeps_nobody_from_the_next(home, leases, monkeypatch) -> None:
    said, gpus = [], [Gpu(uuid="GPU-1", name="", arch="sm_90")]
    real = local.work_on

    def ended(leases, db, campaign, here, **more):
        if "sm_100" in leases.open_archs(campaign.id):
            return real(leases, db, campaign, here, **more)
        leases.end(campaign.id, why="so")
        return []

    monkeypatch.setattr(local, "work_on", ended)
    other = leases.open(plan(1, archs=("sm_100",)))
    with pytest.raises(ConfigError, match="start workers where such GPUs are"):
        work(str(home / "x.db"), gpus=gpus)
    mine = leases.open(plan(1))
    worked = work(str(home / "x.db"), gpus=gpus, say=said.append)
    assert (worked.campaigns, worked.notes) == ((mine.id,), ())
    assert [other.id in line for line in said] == [True]
    with pytest.raises(ConfigError, match="sm_100"):
        work(str(home / "x.db"), other.id, gpus=gpus)


def test_a_child_that_is_told_to_stop_too_early_begins_nothing(home, leases, monkeypatch) -> None:
    class Store:
        """Databases on a host that cannot reach the campaign's."""

        def __init__(self, *given) -> None: ...

        def left_behind(self):
            return []

        def database(self, *given):
            return home / "local.db"

        def bring_home(self, *given, **named):
            raise DatabaseError("away")

    class Away(Store):
        database = Store.bring_home

    class Full(Store):
        def database(self, *given):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lease = Lease(
        id=1, campaign_id="c", worker_id="w", attempt=1, arch="sm_90", problem=fleet_jobs.problems(1)[0], last=False
    )

    class Brief(Store):
        """Away for a moment, as what was found is brought home."""

        def bring_home(self, *given, **named):
            brought.append(1)
            if len(brought) == 1:
                raise away()

    brought: list[int] = []
    never, told = threading.Event(), threading.Event()
    told.set()
    for store, stop, outcome in (
        (Store, told, "released"),
        (Away, told, "released"),
        (Away, never, "error"),
        (Full, never, "full"),
    ):
        assert child(home, leases, stop=stop, local_store=store).work(lease, None)[0] == outcome
    assert not (home / "jobs.log").exists()
    monkeypatch.setattr("tiledsched.fleet.child.STOPPING_S", 0.0)  # who is told to stop waits no longer; others do
    waiting = child(home, leases, stop=never, local_store=Brief)
    waiting._job = dataclasses.replace(waiting._job, run=lambda *given, **more: {"us": 1.0})
    assert (waiting.work(lease, None), len(brought)) == (("done", {"us": 1.0}, ""), 2)


CHILD = """
import os, signal, sys, time
from multiprocessing.connection import Connection
pipe, act = Connection(int(sys.argv[1])), os.environ["ACT"]
pipe.recv_bytes()
if act == "fails":
    sys.exit(3)
pipe.send(("ready", "another compiler" if act == "refuses" else ""))
pipe.recv_bytes()
if act == "dies":
    sys.exit(7)
if act == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
pipe.send(("say", "builds 3"))
pipe.send(("answer", "done", {"us": 1.0}, ""))
"""


@pytest.fixture
def process(home, leases, monkeypatch):
    """Start a child that does as it is told. Each look at the clock takes 250 s."""
    (home / "child.py").write_text(CHILD)
    monkeypatch.setattr(processes, "python_command", lambda module: [sys.executable, str(home / "child.py")])
    moved, setup = fleet_jobs.MovedClock(), Setup(db="", campaign=leases.open(plan(1)), jobs=1)
    clock = Clock(monotonic=lambda: moved.pass_s(250.0) or moved.seconds)
    return lambda act: worker_module._Process(setup, {"ACT": act}, clock)


@pytest.mark.parametrize(
    ("act", "stops", "answer"),
    [
        ("answers", False, ("done", {"us": 1.0}, "")),
        ("dies", False, ("error", None, "the working process ended with code 7")),
        ("hangs", False, ("hung", None, "no answer within its deadline of 500 s; its process was killed")),
        ("hangs", True, ("released", None, "stopped, and killed because it did not end in time")),
        ("dies", True, ("released", None, "")),
    ],
)
def test_a_child_that_does_not_answer_is_killed_and_its_end_is_the_answer(process, act, stops, answer) -> None:
    child, stop, stages = process(act), threading.Event(), []
    if stops:
        stop.set()
    assert child.ask(("work",), deadline_s=500.0, stop=stop, on_stage=stages.append) == answer
    assert (child.wrong, child.lost, stages) == ("", act != "answers", ["builds 3"] * (act == "answers"))
    child.end()


def test_a_child_that_does_not_start_says_why(process) -> None:
    with pytest.raises(worker_module.ChildLostError, match="ended with code 3 as it started"):
        process("fails")
    refused = process("refuses")
    assert refused.wrong == "another compiler"
    refused.kill()


class FakeChild:
    """A child that gives these answers in turn, the last of them for ever; an error is raised."""

    wrong, lost = "", False

    def __init__(self, *answers) -> None:
        self.answers, self.killed = list(answers), False

    def ask(self, *given, **named):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]

    def kill(self) -> None:
        self.killed = True


STUCK = MeasureError("a working process cannot be killed: its GPU is stuck")


def worker_of(leases, campaign, name="GPU-well", arch="", **more) -> Worker:
    gpu = Gpu(uuid=name, name="", arch=arch)
    return Worker(leases, "", campaign, gpu, jobs=1, stop=threading.Event(), **more)


def test_a_full_disk_is_waited_for_and_after_that_the_failure_names_it(home) -> None:
    """Briefly full, it costs no attempt, though it is all that a campaign has."""
    full, moved, said = (Outcome.FULL, None, "No space left on device"), fleet_jobs.MovedClock(), []
    with TuningDB.open(home / "x.db") as db:
        leases = Leases(db, clock=moved.clock)
        campaign = leases.open(plan(2, most_attempts=1))
        child = FakeChild(full, full, (Outcome.DONE, {}, ""), full)
        worker = worker_of(leases, campaign, say=said.append, start=lambda *given: child)
        assert [worker.one() for _ in range(3)] == ["released", "released", "done"]
        assert moved.seconds == 2.0  # one second, and then another
        ends = [worker.one() for _ in range(12)]
    assert ends[-2:] == ["failed", None]
    assert set(ends[:-2]) == {"released"}
    assert 62.0 <= moved.seconds <= 72.0
    assert sum("waits for room on its disk: No space left" in line for line in said) == len(ends)


def test_an_odd_gpu_stores_under_a_name_of_its_own(leases) -> None:
    campaign, environments, said = leases.open(plan(2)), [], []

    def timed(us: float) -> dict[str, object]:
        return {"fingerprint": "c" * 24, "median_us": us, "ci_low_us": us - 0.1, "ci_high_us": us + 0.1}

    for place, us in enumerate((100.0, 100.1, 102.0, 100.2)):  # what others took
        gpu = f"GPU-{place}"
        leases.note_control(campaign.id, join(leases, campaign, gpu), gpu, "sm_90", timed(us))
    children = [FakeChild((Outcome.DONE, timed(120.0), "")), FakeChild((Outcome.DONE, {}, ""))]

    def start(setup, environment, clock):
        environments.append(environment)
        return children[len(environments) - 1]

    assert worker_of(leases, campaign, "GPU-odd", "sm_90", say=said.append, start=start).one() is Outcome.DONE
    assert [each.get(nvml.LABEL_VARIABLE) for each in environments] == [None, "GPU-odd"]
    assert children[0].killed
    assert "its evidence is kept apart" in said[0]


def test_who_gives_up_says_what_went_wrong(leases) -> None:
    campaign = leases.open(plan(5))
    failed = Outcome.ERROR, None, "cannot keep machine code; free some space there"
    worker = worker_of(leases, campaign, start=lambda *given: FakeChild(failed))
    worker.run()
    assert worker.note == "3 attempts in a row failed here, the last: cannot keep machine code; free some space there"
    assert leases.counts(campaign.id)["leased"] == 0


def test_a_gpu_that_is_stuck_beyond_help_holds_nothing_back(leases, monkeypatch) -> None:
    """Nor does a database that is away just then: the process lives on, but renews no lease for a worker that ended."""
    campaign = leases.open(plan(2, lease_s=0.4))
    workers = [
        worker_of(leases, campaign, f"GPU-{name}", start=lambda *_: FakeChild(STUCK))
        for name in ("stuck", "well", "next")
    ]
    for is_away in (False, True):
        with monkeypatch.context() as patched:
            if is_away:
                workers[0].note = ""
                patched.setattr(leases, "leave", lambda *given: (_ for _ in ()).throw(DatabaseError("away")))
            with pytest.raises(MeasureError, match="stuck"):
                workers[0].run()
        assert workers[0].note.startswith("a working process cannot be killed")
        assert leases.counts(campaign.id)["leased"] == int(is_away)
    heart = Heart(leases, campaign, workers[:2])
    heart.start()
    seen = [leases.take(campaign, workers[1].id, ["sm_90"])]
    wait_for(lambda: seen.append(leases.take(campaign, workers[2].id, ["sm_90"])) or seen[-1], 5.0)
    assert seen[-1].id != seen[0].id  # the stuck one's ran out; the other's is renewed
    heart.end()


def hanging_nvml(well: threading.Event) -> types.SimpleNamespace:
    """NVML of a host where no question about the GPU of that name comes back unless it is well."""

    def ask(handle: str, *about: int) -> int:
        if handle == "GPU-stuck":
            well.wait()
        return 50_000

    told = ("ClockInfo", "Temperature", "PowerUsage", "CurrentClocksThrottleReasons", "CudaComputeCapability")
    return types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: "GPU-stuck",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid.decode(),
        **dict.fromkeys((f"nvmlDeviceGet{what}" for what in told), ask),
        **dict.fromkeys(("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU"), 0),
    )


def test_a_gpu_whose_driver_hangs_holds_up_no_heartbeat(leases, monkeypatch) -> None:
    """What it told last is told again, with its age; a list of GPUs that does not come ends with an error."""
    well = threading.Event()
    well.set()
    monkeypatch.setitem(sys.modules, "pynvml", hanging_nvml(well))
    campaign = leases.open(plan(2, lease_s=1.0))
    workers = [worker_of(leases, campaign, name, "sm_90") for name in ("GPU-stuck", "GPU-well")]
    held = {leases.take(campaign, worker.id, ["sm_90"]).id for worker in workers}
    heart = Heart(leases, campaign, workers)
    heart.start()

    def told() -> dict[str, tuple[int | None, float]]:
        return {each.gpu: (each.sm_clock_mhz, each.age_s) for each in read_status(leases, campaign.id).workers}

    wait_for(lambda: told() == {"GPU-stuck": (50_000, 0.0), "GPU-well": (50_000, 0.0)}, 5.0)
    well.clear()
    try:
        wait_for(lambda: told()["GPU-stuck"][1] > 1.5 * campaign.lease_s, 10.0)
        assert told()["GPU-stuck"][0] == 50_000
        assert told()["GPU-well"] == (50_000, 0.0)
        assert leases.take(campaign, join(leases, campaign, "GPU-2"), ["sm_90"]) is None
        assert leases.renew(campaign, {worker.id: {} for worker in workers}) == held
        monkeypatch.setattr(nvml, "LISTED_S", 0.05)
        with pytest.raises(
            MeasureError, match=r"GPU 0 \(as nvidia-smi counts\) of .*is stuck; see what nvidia-smi says"
        ):
            gpus.gpus_here()
    finally:
        well.set()
    wait_for(lambda: told()["GPU-stuck"] == (50_000, 0.0), 5.0)
    heart.end()


class Runner:
    """Runs no program; what it times takes 2 us."""

    device = types.SimpleNamespace(arch="sm_90", name="NVIDIA Sample")

    def __init__(self, checked) -> None:
        self.checked = checked

    def begin(self, problem) -> None: ...

    def check(self, candidate):
        return self.checked

    def sample(self, candidates, *, rounds, regime):
        assert (len(candidates), rounds, regime) == (1, jobs.CONTROL_ROUNDS, "burst")
        return [types.SimpleNamespace(samples_us=(2.0,) * rounds, conditions=Conditions())]


@pytest.mark.parametrize(
    ("built", "checked"), [(1, 2.0), (0, 2.0), (1, Failure(kind=FailureKind.HANG, message="hangs"))]
)
def test_the_control_program_is_timed_or_it_is_said_why_not(built, checked) -> None:
    candidates = [types.SimpleNamespace(artifact=types.SimpleNamespace(fingerprint="f"))] * built
    session = types.SimpleNamespace(
        space=lambda kernel, file: space_for("sm_90", kernel),
        open_runner=lambda kernel, runner: Runner(checked),
        builder=lambda kernel: types.SimpleNamespace(
            build=lambda schedules, problem: None, programs=lambda *given: [], candidates=lambda programs: candidates
        ),
    )
    problem = Softmax.problem(rows=64, columns=64)
    if built and checked == 2.0:
        told = jobs.control(session, Softmax, problem)
        assert (told["fingerprint"], told["median_us"], told["ci_low_us"]) == ("f", 2.0, 2.0)
    else:
        with pytest.raises(MeasureError, match="hangs; run" if built else "does not build"):
            jobs.control(session, Softmax, problem)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_real_tune_without_a_gpu_is_the_single_commands(home) -> None:
    """No job of tests takes part: a worker that needs no GPU, and every program compiled once, though each problem has a database."""
    problems = [{"rows": 4096, "columns": 256}, {"rows": 8192, "columns": 256}]
    planned = fleet.plan("tune", Softmax, problems, ["sm_90"], options={"runner": "none", "trials": 1})
    status = fleet.run(planned, without_gpu=1, jobs=1)
    assert (status.done, status.failed) == (2, 0)
    with TuningDB.open(home / "x.db") as db:
        assert [each.provenance for each in db.entries()] == ["modelled"] * 2
        results = [result for _, _, result, _ in Leases(db).results(status.campaign.id)]
        assert [result["provenance"] for result in results] == ["modelled"] * 2
        digits = Counter(len(path.name) for path in (home / "cache" / "programs").rglob("*") if path.is_file())
        assert 0 < digits[40] == digits[24]  # what became of each build, and its machine code
    assert gone(home)


# Scratch databases and shared builds


def fail(db, tile) -> None:
    """Record a failure of a schedule of the sample problem."""
    where = None, "attention", "sm_90", "measure", schedule(tile, 8)
    db.record_failure(*where, FAILURE, problem=PROBLEM, device=DEVICE)


@pytest.mark.parametrize("backend", ["file", "postgresql"])
def test_what_a_scratch_database_found_comes_home_once(backend, tmp_path) -> None:
    """It begins with what is served and measured of its problem on its arch, and of no other."""
    best = entry("measured", device_name=DEVICE.name, regime="burst")
    old, also = stored("a" * 24), stored("b" * 24, median_us=120.0, schedule=schedule(8, 8), fingerprint="e" * 24)
    others = [
        stored("c" * 24, problem=PROBLEM.replace(batch=3)),
        stored("d" * 24, device=dataclasses.replace(DEVICE, arch="sm_100")),
    ]
    with new_url(backend, tmp_path) as url, TuningDB.open(url) as home:
        home.merge([old, also, *others], [best.replace(measurement=old.summary)])
        fail(home, 8)
        scratch = LocalStore(tmp_path / "cache", str(url))
        path = scratch.database(home, PROBLEM, "sm_90", "one")
        with TuningDB.open(path) as db:
            assert {each.uid for each in db.measurements()} == {old.uid, also.uid}
            assert (db.entries()[0].measurement.uid, len(db.failures())) == (old.uid, 1)
            number = db.record_measurement(None, "attention", "abc", old.toolchain, measurement(50.0))
            db.record_builds([build(artifact())])
            db.put_entry(best.replace(measurement_id=number))
            fail(db, 16)
            uid = db.entries()[0].measurement.uid
        for _ in range(2):  # a second time changes nothing
            bring_home(path, home, replaces=True)
            assert {each.uid for each in home.measurements()} == {uid, *(each.uid for each in (old, also, *others))}
            assert (home.entries()[0].measurement.uid, len(home.failures())) == (uid, 2)
            assert len(home.find_builds("attention", "abc", old.toolchain, "sm_90")) == 1
        assert home.check() == []
        scratch.bring_home(path, home, replaces=False)
        assert not path.exists()
        scratch.close()


def test_what_a_process_that_is_gone_left_behind_is_found_once(leases, tmp_path) -> None:
    scratch, again, other = (LocalStore(tmp_path, name) for name in ("x", "x", "another database"))
    left = scratch.database(leases.db, PROBLEM, "sm_90", "two")
    assert scratch.left_behind() == []
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as where nobody listens
    left = left.rename(left.with_name(f"two-{ended.pid}.db"))
    successor = left.with_name(f"three-{os.getpid()}.1.db")  # of a killed container, whose numbers come again
    successor.touch()
    assert other.left_behind() == []
    assert scratch.left_behind() == [successor, left]
    assert scratch.left_behind() == []  # what could not be brought home once is another process's matter
    assert again.left_behind() == [successor, left]
    assert whole(left)
    left.write_bytes(b"torn")
    assert not whole(left)
    ended.wait()
    for each in (scratch, again, other):
        each.close()
        assert not Path(each._own.path).exists()


class Builds(SharedBuilds):
    """Compiles nothing: every task comes to one program, and is counted."""

    def __init__(self, cubin, folder) -> None:
        super().__init__(2, folder)
        self.built: list[BuildTask] = []
        self._cubin = cubin

    def submit(self, task) -> Future[Built]:
        self.built.append(task)
        failure = None if self._cubin else Failure(kind=FailureKind.COMPILE_ERROR, message="no")
        outcome: Future[Built] = Future()
        outcome.set_result(Built(task=task, artifact=self._cubin, failure=failure, seconds=1.0))
        return outcome

    def start(self) -> None: ...


@pytest.fixture(scope="module")
def cubin():
    """Machine code of one softmax."""
    from tiledsched.build.pool import BuildPool

    with BuildPool(1) as pool:
        (built,) = pool.build([softmax()])
    return read_artifact(built.artifact.cubin, "sm_90")


@pytest.mark.compiler
def test_a_build_is_made_once_by_all_that_see_a_folder(tmp_path, cubin) -> None:
    shared = [Builds(cubin, tmp_path) for _ in range(3)]
    (first,), (second,) = (list(each.build([softmax()])) for each in shared[:2])
    assert first.artifact == second.artifact == cubin
    assert [len(each.built) for each in shared] == [1, 0, 0]
    # What another process has claimed is waited for, and built once that process is gone.
    claimed = [sys.executable, "-c", CLAIMS, str(tmp_path / "programs"), shared[2]._note(softmax(256))]
    with ThreadPoolExecutor(1) as thread, subprocess.Popen(claimed, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        waits = thread.submit(lambda: [*shared[1].build([softmax(256)])])
        time.sleep(0.3)
        assert not waits.done()
        other.kill()
        assert [each.artifact for each in waits.result()] == [cubin]
    # What does not build is known, too.
    refusing = [Builds(None, tmp_path) for _ in range(2)]
    for each in refusing:
        (built,) = each.build([softmax(300)])
        assert built.failure.message == "no"
    assert [len(each.built) for each in refusing] == [1, 0]


CLAIMS = """
import sys, time
from pathlib import Path
from tiledsched.build.store import Claims
claims = Claims(Path(sys.argv[1]))
print(claims.claim(Path(sys.argv[2])), flush=True)
time.sleep(60)
"""


def test_builds_for_hosts_of_two_kinds_are_two_builds(tmp_path, monkeypatch) -> None:
    """Whatever machine of a cluster compiles them: a task says who will launch its program."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    tasks, shared = [softmax(), softmax(host_arch="aarch64")], [Builds(None, tmp_path) for _ in range(2)]
    assert len({build_key(task) for task in tasks}) == 2
    for each in shared:
        for task in tasks:
            assert [built.task for built in each.build([task])] == [task]
    assert [each.built for each in shared] == [tasks, []]


@pytest.mark.compiler
def test_processes_stay_from_one_problem_to_the_next(tmp_path, cubin) -> None:
    task, ended = softmax(), list[str]()

    class Noted(Builds):
        def close(self) -> None:
            ended.append("builds")
            super().close()

    tools = Tools(
        pool=lambda jobs: Noted(cubin, tmp_path),
        devices=lambda: [types.SimpleNamespace(arch="sm_90", name="NVIDIA H100")],
        runner=lambda kernel, seed: types.SimpleNamespace(close=lambda: ended.append("runner")),
        rivals=lambda kernel, runner, regime: types.SimpleNamespace(close=lambda: ended.append("rivals")),
    )
    session = Session("sm_90", tools=tools)

    def one_problem(*columns: int, leaves: bool = False):
        """Build one program of each width, or only the first that comes."""
        with session.using_database(str(tmp_path / f"{columns[0]}.db")), session.noted_run({}):
            runner, rivals = session.open_runner(Softmax), session.open_rivals(Softmax, "burst")
            wanted = [dataclasses.replace(task, problem=Softmax.problem(rows=64, columns=each)) for each in columns]
            building = session.pool.build(wanted)
            next(building)
            if not leaves:
                assert len([*building]) == len(columns) - 1
            return runner, rivals, session.pool

    first = one_problem(64, 65)
    assert one_problem(66, 67) == first
    assert ended == []
    # A claim that nobody works on would be waited for: it is given up, and with it what was running.
    for columns in ((192, 64), (128, 129)):  # 64 is known, and comes before the other is begun
        assert one_problem(*columns, leaves=True) == first
        assert set(ended) == {"builds"}
        assert not first[2]._claims.paths
        ended.clear()
    # Another regime wants another process for the rivals, another seed another one for the GPU.
    assert session.open_rivals(Softmax, "sustained") is not first[1]
    assert session.open_runner(Softmax, seed=1) is not first[0]
    assert ended == ["rivals", "rivals", "runner"]
    # After a failure all of it starts anew, the rivals' process first: it runs under the runner's hold of the GPU.
    session.open_rivals(Softmax, "burst")
    session.close()
    session.close()
    assert ended[3:] == ["rivals", "runner", "builds"]
    assert not set(map(id, one_problem(64, 65))) & set(map(id, first))
