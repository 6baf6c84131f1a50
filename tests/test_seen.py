"""The problems that programs called: ranked by what tuning them would win, and tuned within one budget. No GPU, no compiler."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from types import SimpleNamespace

import pytest
from fake_builds import FakeBuilds
from served_entries import SUMMARY, entry
from test_search_tuner import LANDSCAPES, Recorded

from tiledsched.build.cubin import Artifact
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.checking.accuracy import Accuracy
from tiledsched.cli import main
from tiledsched.core import registry
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.registry import load_kernel
from tiledsched.fleet.leases import Leases
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Batch, Checked, Conditions, Device, RivalTime
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import LookupTable, Served
from tiledsched.serve.rivals import RivalOffer
from tiledsched.serve.transfer import ExpectedLoss
from tiledsched.store.db import TuningDB
from tiledsched.store.seen import SeenProblem
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.search import NO_SEARCH
from tiledsched.tuning.session import Session
from tiledsched.tuning.tuner import LEAST_SEARCH_S, Tuner
from tiledsched.tuning.worth import ASSUMED_LOSSES, RIVAL_LOSS, SeenWorth, rank, tune_by_worth, worth_of

H200 = Device(name="NVIDIA H200", arch="sm_90", sm_count=132)
SCALE = '''
import cuda.tile as ct
import tiledsched as ts


@ct.kernel
def scale(X, Out, TILE: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(Out, (i, 0), ct.load(X, (i, 0), (TILE, 64), padding_mode=ct.PaddingMode.ZERO))


class NAME(ts.Kernel):
    """Every element as it is."""

    function = scale
    rows = ts.dim()
    dtype = ts.dtype("float16", "bfloat16")
    X, Out = ts.array("rows 64"), ts.out("rows 64")
    knobs = {"TILE": [16, 32, 64], "occupancy": [1, 2]}

    def grid(p, s, device):
        return -(-p.rows // s["TILE"])

    def rivals(p):
        return {"other": lambda X: X}
'''


class Machine(FakeBuilds):
    """A compiler, a GPU and rivals, for any kernel. Tiles of 32 rows are fastest; `broken` rows run on no schedule."""

    device, device_name, name, regimes = H200, H200.name, "gpu", frozenset({"burst"})

    def __init__(self, broken=()) -> None:
        super().__init__()
        self.broken, self.began, self.raced = broken, [], []
        facts = next(iter(Recorded(LANDSCAPES[0]).facts.values()))
        self.facts = dataclasses.replace(facts, spill_bytes=0)

    @property
    def tools(self) -> Tools:
        rivals = SimpleNamespace(race=self.race, close=self.close, versions=lambda problem: {})
        return Tools(
            toolchain=lambda: dataclasses.replace(SUMMARY.toolchain, tileiras=compiler_at_hand() or "13.5"),
            artifacts=lambda folder: self,
            pool=lambda jobs: self,
            devices=lambda: [H200],
            lacking=lambda: "",
            runner=lambda kernel, seed: self,
            rivals=lambda kernel, runner, regime: rivals,
        )

    def get(self, arch, fingerprint) -> Artifact:
        return Artifact(arch=arch, fingerprint=fingerprint, facts=self.facts, cubin=b"")

    def outcome(self, schedule) -> Artifact:
        return self.get("sm_90", f"{schedule.id}".ljust(24, "0"))

    def begin(self, problem) -> None:
        self.problem = problem
        if problem.rows > 3 and self.began[-1:] != [problem.rows]:  # not those at the borders of a winner's tiles
            self.began.append(problem.rows)

    def us(self, candidate) -> float:
        return self.problem.rows * {16: 1.5, 32: 1.0, 64: 2.0}[candidate.schedule["TILE"]]

    def probe(self, candidate):
        return self.us(candidate)

    def check(self, candidate):
        if self.problem.rows in self.broken:
            return Failure(kind=FailureKind.WRONG_RESULT, message="wrong")
        exact = Accuracy(max_abs_error=0.0, worst_tile_error=0.0, worst_tile=(0, 0, 0), repeatable=True)
        return Checked(accuracy=exact, first_look_us=self.us(candidate))

    def sample(self, candidates, *, rounds, regime):
        return [Batch(samples_us=(self.us(each),) * rounds, conditions=Conditions()) for each in candidates]

    def race(self, problem, candidate):
        self.raced.append(problem.rows)
        ours, same = self.us(candidate), {"ratio": 0.9, "ratio_low": 0.9, "ratio_high": 0.9}
        return [RivalTime(name="other", median_us=0.9 * ours, ours_us=ours, samples=9, **same)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("First", "Second"):
        (tmp_path / f"{name.lower()}.py").write_text(SCALE.replace("NAME", name))
    return tmp_path


@pytest.fixture
def kernels(home):
    return [load_kernel(f"{home}/{name.lower()}.py:{name}") for name in ("First", "Second")]


def seen_problem(problem, calls=1):
    return SeenProblem(
        problem=problem,
        calls=calls,
        sample=problem,
        place="",
        arch="sm_90",
        device=H200.name,
        layouts=("contiguous",),
        processes=1,
        provenance="default",
        schedule={},
        rival="",
    )


def note(home, *problems, folder="seen", **more):
    """Write a file as a process that captured does: problems, and pairs of a problem and its calls."""
    (home / folder).mkdir(exist_ok=True)
    lines = []
    for number, (problem, calls) in enumerate(problems):
        kernel = problem.declaration
        words = {"layout": "contiguous", "arch": "sm_90", "device": H200.name, "provenance": "default", "rival": ""}
        line = {"v": 1, "id": number, "place": kernel.locator(), "schedule": {}, **words, **more}
        lines.append(line | {"problem": problem.to_json(), "sample": problem.to_json()})
        lines.append({"v": 1, "calls": {str(number): calls}})
    (home / folder / f"{random.random()}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


# Ranking


def made_up(rng) -> tuple[SeenProblem, Served, float]:
    """A problem, what is served for it, and what tuning it would win, worked out by hand."""
    problem = Attention.problem(seq_q=rng.randrange(64, 5000), seq_k=4096, head_dim=64, heads=rng.randrange(1, 99))
    us, calls, loss = rng.uniform(1, 500), rng.randrange(1, 10_000), rng.choice([0.0, 0.01, 0.3])
    measured, rival = rng.random() < 0.5, rng.choice([None, 0.5, 0.95])
    searched = rng.random() < 0.5
    its = entry(problem, source="tune run 1" if searched else f"tune run 1, {NO_SEARCH}")
    its = its.replace(measurement=dataclasses.replace(SUMMARY, median_us=us))
    expected = ExpectedLoss(mean=loss, worst=1.0, cases=3, kernel="attention", arch="sm_90")
    offers = (RivalOffer(name="r", ratio=rival, capturable=True, only_captured=False, reason=""),) if rival else ()
    served = Served(
        schedule=its.schedule if measured else its.schedule.replace(occupancy=4),
        provenance="measured" if measured else "transferred",
        reason="",
        entry=its,
        forced={},
        expected_loss=None if measured else expected,
        rivals=offers,
    )
    taken = (0.0 if searched else ASSUMED_LOSSES["measured"]) if measured else loss
    seen = seen_problem(problem, calls)
    found = worth_of(seen, SimpleNamespace(resolve=lambda *given: served))
    now = (us if measured else found.us) * (rival or 1.0)
    ours = us / (1 + taken) if measured else now / (1 + RIVAL_LOSS) if rival else found.us / (1 + taken)
    best = min(now, ours)
    return seen, served, calls * (now - best)


def test_problems_are_ranked_by_what_tuning_would_win():
    rng = random.Random(0)
    cases = [made_up(rng) for _ in range(60)]
    served = {seen.problem: its for seen, its, _ in cases}
    table = SimpleNamespace(resolve=lambda problem, arch, device: served[problem])
    found = rank([seen for seen, _, _ in cases], lambda kernel: table)
    by_hand = {seen.problem: win for seen, _, win in cases}
    wins = [by_hand[each.seen.problem] for each in found]
    assert wins == sorted(wins, reverse=True)
    assert [each.win_us for each in found] == pytest.approx(wins)
    assert len(found) == len(cases)


def test_what_is_not_known_is_assumed_and_said_to_be(kernels):
    problem = kernels[0].problem(rows=640)
    table = load_table(load_settings({}), kernel=kernels[0])
    found = worth_of(seen_problem(problem, 7), table)
    assert (found.is_known, found.is_measured, found.loss) == (False, False, ASSUMED_LOSSES["default"])
    assert found.us
    unknown = rank([seen_problem(type(problem)("nobodys:Kernel", {"rows": 3}))], lambda kernel: table)
    assert unknown == [SeenWorth(seen=unknown[0].seen)]


def test_a_time_that_was_not_measured_is_in_proportion_to_a_similar_one():
    problem = Attention.problem(seq_q=4096, seq_k=4096, head_dim=64, heads=16, batch=2)
    its = entry(problem).replace(schedule=entry(problem).schedule)
    table = LookupTable([its], Attention)
    same = worth_of(seen_problem(problem), table)
    more = worth_of(seen_problem(problem.replace(batch=4)), table)
    assert (same.us, same.is_measured) == (300.0, True)
    assert not more.is_measured
    assert 1.5 * same.us < more.us < 2.5 * same.us


# Tuning


def ranked(problems) -> list[SeenWorth]:
    tables = {}
    return rank(
        [seen_problem(problem, calls) for problem, calls in problems],
        lambda kernel: tables.setdefault(kernel, load_table(load_settings({}), kernel=kernel)),
    )


def tuned(machine, rows, **options):
    with Session("sm_90", tools=machine.tools) as session:
        return tune_by_worth(session, rows, TuneOptions(**options))


def test_every_problem_races_rivals_before_the_most_worthwhile_is_searched_first(kernels):
    first, second = kernels
    problems, machine = (
        [(first.problem(rows=64), 9), (first.problem(rows=640), 900), (second.problem(rows=128), 9)],
        Machine(),
    )
    done = tuned(machine, ranked(problems))
    assert machine.raced == machine.began == [640, 64, 128, 640, 64, 128]
    assert not done.left
    assert not done.raced
    best = {each.problem.rows: each.schedule["TILE"] for report in done.reports for each in report.entries}
    assert best == {64: 32, 640: 32, 128: 32}
    with TuningDB.open(None) as db:
        assert {each.provenance for each in db.entries()} == {"measured"}


def test_a_race_without_a_search_is_what_a_short_budget_gives_and_the_rest_is_named(kernels):
    done = tuned(Machine(), ranked([(kernels[0].problem(rows=rows), rows) for rows in (64, 128, 640)]), budget_s=0.0)
    assert [each.rows for each in done.raced] == [640]
    assert {each.rows: why for each, why in done.left.items()} == dict.fromkeys((128, 64), "the budget ended first")
    (report,) = done.reports
    assert [each.entry.rivals[0].name for each in report.results] == ["other"]


def test_without_a_gpu_the_model_ranks_and_no_race_is_run(kernels):
    problems = [(kernels[0].problem(rows=64), 9), (kernels[0].problem(rows=128), 9), (kernels[1].problem(rows=640), 1)]
    machine = Machine()
    done = tuned(machine, ranked(problems), runner="none")
    assert (machine.began, len(done.reports), done.left, done.raced) == ([], 2, {}, [])
    assert {each.provenance for report in done.reports for each in report.entries} == {"modelled"}
    done = tuned(Machine(), ranked(problems), runner="none", budget_s=0.0)
    (report,) = done.reports
    assert {each.rows for each in done.left} == {64, 128, 640} - {report.entries[0].problem.rows}
    with pytest.raises(ConfigError, match=r"a race needs a GPU of sm_90.* leave out --effort race"):
        tuned(machine, ranked(problems), runner="none", effort="race")


def test_a_problem_that_fails_costs_no_other_its_tune(kernels):
    problems = [(kernels[0].problem(rows=rows), rows) for rows in (64, 128, 640)]
    done = tuned(Machine(broken=(640,)), ranked(problems))
    ((problem, why),) = done.left.items()
    assert (problem.rows, "no schedule of 1 works" in why) == (640, True)
    assert [each.problem.rows for each in done.reports[0].entries] == [128, 64]


def test_the_budget_is_shared_by_worth(kernels, monkeypatch):
    problems, given, now = [kernels[0].problem(rows=rows) for rows in (64, 128, 640, 6400)], [], [0.0]

    class Noted(Tuner):
        def _run(self, problem, deadline_s):
            given.append(deadline_s - now[0])
            now[0] = deadline_s
            return problem

    monkeypatch.setattr("tiledsched.tuning.tuner.time", SimpleNamespace(monotonic=lambda: now[0]))
    machine, options = Machine(), TuneOptions(budget_s=200.0)
    with Session("sm_90", tools=machine.tools) as session:
        builder, space = session.builder(kernels[0]), session.space(kernels[0])
        tuner = Noted(builder, space, options, run_id=1, runner=machine)
        assert tuner.tune(problems, [60.0, 39.0, 1.0, 0.0]) == problems[:3]
    assert given == pytest.approx([120.0, 78.0, 2.0])
    assert list(tuner.left) == problems[3:]
    assert given[1] > LEAST_SEARCH_S


# The command line


@pytest.fixture
def say(capsys):
    """Runs a command on this machine, or another one; what it prints, its spaces made one."""

    def run(*words, code=0, machine=None, devices=(H200,)):
        tools = {"tools": machine.tools} if machine else {}
        assert main([*map(str, words)], devices=lambda: list(devices), **tools) == code
        found = capsys.readouterr()
        run.out, run.err = found
        return " ".join("".join(found).split())

    return run


def test_one_command_tunes_what_was_seen_and_then_nothing_is_left(home, kernels, say):
    first, second = kernels
    note(home, (first.problem(rows=64), 9), (second.problem(rows=640), 5000))
    note(home, (second.problem(rows=640), 5000), (second.problem(rows=128), 1))
    machine = Machine()
    said = say("show", "--seen", machine=machine)
    assert "~10,000" in said
    assert "tiledsched tune --seen --budget 600" in said
    assert said.index("rows=640") < said.index("rows=64 ")
    say("tune", "--seen", "--budget", "600", "--effort", "quick", "--json", machine=machine)
    found = json.loads(say.out)
    assert (found["schema_version"], {each["schedule"]["TILE"] for each in found["entries"]}) == (1, {32})
    assert (len(found["entries"]), found["left"], found["only_raced"], found["already_tuned"]) == (3, [], [], 0)
    assert machine.began[0] == 640
    say("show", "--seen", "--json", machine=machine)
    rows = json.loads(say.out)["seen"]
    assert {(each["now"]["provenance"], each["now_rival"], each["us_is"]) for each in rows} == {
        ("measured", "other", "measured")
    }
    later = Machine()
    assert "3 tuned before" in say("tune", "--seen", machine=later)
    assert later.began == []


def test_ctrl_c_keeps_what_was_found(home, kernels, say):
    note(home, *((kernels[0].problem(rows=rows), rows) for rows in (64, 128)))

    class Stopped(Machine):
        def begin(self, problem):
            super().begin(problem)
            if len(self.began) == 2:
                raise KeyboardInterrupt

    said = say("tune", "--seen", "--budget", "600", code=130, machine=Stopped())
    assert "what was found until now is stored. The same command goes on" in said
    with TuningDB.open(None) as db:
        assert [(each.problem.rows, each.source) for each in db.entries()] == [(128, f"tune run 1, {NO_SEARCH}")]


def test_refresh_and_report_are_of_what_was_seen(home, kernels, say):
    first, second = kernels
    note(home, (first.problem(rows=64), 9), (second.problem(rows=128), 9))
    machine = Machine()
    with Session("sm_90", tools=machine.tools) as session:
        session.tune(first, [first.problem(rows=64), first.problem(rows=640)])
    said = say("refresh", "--seen", "--json", machine=machine)
    (one,) = json.loads(say.out)["kernels"]
    assert (one["kernel"], one["current"]) == (first.name, 1)
    assert f"nothing of {second.name} that was seen is measured; run: tiledsched tune --seen" in said
    say("report", first.locator(), "--seen", "-o", home / "report", "--json", machine=machine)
    text = (home / "report" / "report.md").read_text()
    assert ("rows=64" in text, "rows=640" in text) == (True, False)


def test_problems_that_a_budget_does_not_reach_are_named_with_what_to_do(home, kernels, say):
    note(home, *((kernels[0].problem(rows=rows), 1) for rows in (64, 128)))
    said = say("tune", "--seen", "--budget", "0", machine=Machine())
    for words in (
        "left: ",
        "rows=64 float16: the budget ended first",
        "only raced against rivals, not searched",
        "The same command goes on with these",
    ):
        assert words in said


@pytest.mark.parametrize("command", ["tune", "warmup", "refresh", "report", "show", "fleet run tune"])
def test_nothing_seen_says_how_to_capture(command, home, say):
    said = say(*command.split(), "--seen", code=2)
    assert "nothing was seen" in said
    assert "TILEDSCHED_CAPTURE=1 python your_model.py" in said


def test_each_kind_of_nothing_has_its_own_sentence(home, kernels, say):
    problem, place = kernels[0].problem(rows=64), kernels[0].locator()
    note(home, (problem, 3), arch="sm_100", device="NVIDIA B200")
    for command, words in (
        ("tune --seen", "nothing was seen on sm_90, only on sm_100; pass --arch sm_100"),
        ("tune softmax --seen --arch sm_100", f"nothing of softmax was seen, only of {problem.kernel}"),
        (f"show {place} --seen --arch sm_100 -p rows=3", "no problem that was seen matches -p"),
        ("tune --seen --suite x", "leave out --suite"),
        ("tune --seen softmax", "a kernel stands before the flag: softmax --seen"),
        ("show --clear", "pass --seen, too"),
    ):
        assert words in say(*command.split(), code=2)
    note(home, (problem, 3))
    said = say("tune", "--seen", code=2, devices=())
    assert "there is no GPU here, and problems were seen on sm_100, sm_90; pass --arch sm_100" in said


def test_a_kernel_of_a_file_is_left_out_until_it_is_named(home, kernels, say, monkeypatch):
    note(home, (kernels[0].problem(rows=64), 3))
    place, machine = kernels[0].locator(), Machine()
    for each in kernels:
        monkeypatch.delitem(registry._known, each.name)
        monkeypatch.delitem(sys.modules, each.__module__)
    for code, command in enumerate(("show", "tune")):
        assert f"name it: tiledsched tune {place} --seen" in say(command, "--seen", code=2 * code, machine=machine)
    say("tune", place, "--seen", "--effort", "race", machine=machine)
    assert machine.began == [64]


def test_a_folder_may_be_named_and_forgotten(home, kernels, say):
    note(home, (kernels[0].problem(rows=64), 3), folder="elsewhere")
    where = home / "elsewhere"
    said = say("show", "--seen", where, "--arch", "sm_90", devices=())
    assert f"tiledsched tune --seen {where} --budget 600" in said
    assert say("show", "--seen", where, "--clear", devices=()) == f"1 file removed from {where}"
    assert not where.exists()


def test_damaged_lines_are_counted_and_a_line_fits_the_terminal(home, kernels, say):
    note(home, (Attention.problem(seq_q=4096, seq_k=4096, head_dim=64, heads=16), 12345), layout="strided")
    (home / "seen" / "damaged.jsonl").write_text("{\n[]\n")
    said = say("show", "--seen")
    for words in ("2 damaged lines or files", "(strided arrays)", "A tune measures contiguous arrays"):
        assert words in said
    assert max(map(len, say.out.splitlines())) <= 80


def test_an_arch_without_a_search_space_is_told(home, kernels, say):
    note(home, (Attention.problem(seq_q=64, seq_k=64, head_dim=64), 3), arch="sm_70", device="NVIDIA V100")
    said = say("show", "--seen", devices=())
    assert "?: nothing can be served for attention on sm_70, which has no search space." in said
    said = say("tune", "--seen", code=2, devices=())
    assert "no kernel that was seen has a search space for sm_70" in said


def test_a_fleet_does_what_was_seen_on_each_arch_most_worthwhile_first(home, kernels, say):
    one, two = kernels[0].problem(rows=64), kernels[0].problem(rows=8192)
    note(home, (one, 9000), (two, 1))
    note(home, (two, 3), arch="sm_100", device="NVIDIA B200")
    words = ("fleet", "run", "tune", kernels[0].locator(), "--seen", "--arch", "sm_90,sm_100", "--open-only")
    say(*words, devices=())
    name = say.out.strip()
    with TuningDB.open(None) as db:
        leases = Leases(db)
        campaign = leases.campaign(name)
        for arch, expected in (("sm_90", [one, two]), ("sm_100", [two])):
            worker = leases.join(name, hostname="h", pid=1, gpu=arch, device_name="", arch=arch)
            taken = [leases.take(campaign, worker, {arch}) for _ in range(3)]
            assert [each.problem for each in taken if each] == expected
