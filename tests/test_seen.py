"""The problems that programs called: ranked by what tuning them would win, and tuned within one budget. No GPU, no compiler."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fake_builds import FakeBuilds
from golden import lacking
from served_entries import SUMMARY, entry
from test_search_tuner import LANDSCAPES, Recorded

from tiledsched.build.cubin import Artifact
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.checking.accuracy import Accuracy
from tiledsched.cli import main
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.registry import load_kernel
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Batch, Checked, Conditions, Device, RivalTime
from tiledsched.rivals.offers import Offer
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import ExpectedLoss
from tiledsched.store.captured_calls import SeenProblem
from tiledsched.store.db import TuningDB
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

    def __init__(self, broken=()) -> None:
        super().__init__()
        self.broken, self.began, self.raced = broken, [], []
        self.device, self.device_name, self.name, self.regimes = H200, H200.name, "gpu", frozenset({"burst"})
        facts = next(iter(Recorded(LANDSCAPES[0]).facts.values()))
        self.facts = dataclasses.replace(facts, spill_bytes=0)

    @property
    def tools(self) -> Tools:
        return Tools(
            toolchain=lambda: dataclasses.replace(SUMMARY.toolchain, tileiras=compiler_at_hand() or "13.5"),
            artifacts=lambda folder: self,
            pool=lambda jobs: self,
            devices=lambda: [H200],
            lacking=lambda: "",
            runner=lambda kernel, seed: self,
            rivals=lambda kernel, runner, regime: SimpleNamespace(
                race=self.race, close=self.close, versions=lambda problem: {}
            ),
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
        ours = self.us(candidate)
        same = {"ratio": 0.9, "ratio_low": 0.9, "ratio_high": 0.9}
        return [RivalTime(name="other", median_us=0.9 * ours, ours_us=ours, samples=9, **same)]


@pytest.fixture
def home(home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("First", "Second"):
        (home / f"{name.lower()}.py").write_text(SCALE.replace("NAME", name))
    return home


@pytest.fixture
def kernels(home):
    return [load_kernel(f"{home}/{name.lower()}.py:{name}") for name in ("First", "Second")]


def seen_problem(problem, calls=1, **more):
    values = {
        "sample": problem,
        "place": "",
        "arch": "sm_90",
        "device": H200.name,
        "layouts": ("contiguous",),
        "processes": 1,
        "provenance": "default",
        "schedule": {},
        "rival": "",
    }
    return SeenProblem(problem=problem, calls=calls, **(values | more))


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
    offers = (Offer(name="r", ratio=rival, capturable=True, only_captured=False, reason=""),) if rival else ()
    served = Served(
        schedule=its.schedule if measured else its.schedule.replace(occupancy=4),
        provenance="measured" if measured else "transferred",
        steps=(),
        entry=its,
        forced={},
        expected_loss=None if measured else expected,
        rivals=offers,
    )
    taken = (0.0 if searched else ASSUMED_LOSSES["measured"]) if measured else loss
    seen = seen_problem(problem, calls)
    found = worth_of(seen, SimpleNamespace(resolve=lambda *given: served, regime="burst"))
    now = (us if measured else found.us) * (rival or 1.0)
    ours = us / (1 + taken) if measured else now / (1 + RIVAL_LOSS) if rival else found.us / (1 + taken)
    best = min(now, ours)
    return seen, served, calls * (now - best)


def test_problems_are_ranked_by_what_tuning_would_win():
    rng = random.Random(0)
    cases = [made_up(rng) for _ in range(60)]
    served = {seen.problem: its for seen, its, _ in cases}
    table = SimpleNamespace(resolve=lambda problem, arch, device: served[problem], regime="burst")
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


def tuned(machine, rows, watcher=None, **options):
    with Session("sm_90", tools=machine.tools) as session:
        return tune_by_worth(session, rows, TuneOptions(**options), watcher=watcher)


def test_every_problem_races_rivals_before_the_most_worthwhile_is_searched_first(kernels):
    first, second = kernels
    problems = [(first.problem(rows=64), 9), (first.problem(rows=640), 900), (second.problem(rows=128), 9)]
    machine, watcher = Machine(), Mock()
    done = tuned(machine, ranked(problems), watcher)
    assert watcher.stage.call_args_list[0].args[1:] == ("building what is served", 4), (
        "two problems, default and served"
    )
    assert machine.began == [640, 64, 128, 640, 64, 128]
    assert machine.raced == machine.began
    assert not done.left
    assert not done.raced
    best = {each.problem.rows: each.schedule["TILE"] for report in done.reports for each in report.entries}
    assert best == {64: 32, 640: 32, 128: 32}
    with TuningDB.open(None) as db:
        assert {each.provenance for each in db.entries()} == {"measured"}


def test_a_race_without_a_search_is_what_a_short_budget_gives_and_the_rest_is_named(kernels):
    problems = [(kernels[0].problem(rows=rows), rows) for rows in (64, 128, 640)]
    done = tuned(Machine(), ranked(problems), budget_s=0.0)
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
    assert len(done.reports) == 1
    assert {each.rows for each in done.left} == {64, 128, 640} - {done.reports[0].entries[0].problem.rows}
    with pytest.raises(ConfigError, match=r"a race needs a GPU of sm_90.* leave out --effort race"):
        tuned(machine, ranked(problems), runner="none", effort="race")


def test_a_problem_that_fails_costs_no_other_its_tune(kernels):
    problems = [(kernels[0].problem(rows=rows), rows) for rows in (64, 128, 640)]
    done = tuned(Machine(broken=(640,)), ranked(problems))
    ((problem, why),) = done.left.items()
    assert problem.rows == 640
    assert "no schedule of 1 works" in why
    assert [each.problem.rows for each in done.reports[0].entries] == [128, 64]


def test_the_budget_is_shared_by_worth(kernels, monkeypatch):
    problems, given = [kernels[0].problem(rows=rows) for rows in (64, 128, 640, 6400)], []

    class Noted(Tuner):
        def _run(self, problem, deadline_s):
            given.append(deadline_s - now[0])
            now[0] += deadline_s - now[0]
            return problem

    from tiledsched.tuning import tuner as tuners

    now = [0.0]
    monkeypatch.setattr(tuners, "time", SimpleNamespace(monotonic=lambda: now[0]))
    machine = Machine()
    with Session("sm_90", tools=machine.tools) as session:
        tuner = Noted(
            session.builder(kernels[0]),
            session.space(kernels[0]),
            TuneOptions(budget_s=200.0),
            run_id=1,
            runner=machine,
        )
        assert tuner.tune(problems, [60.0, 39.0, 1.0, 0.0]) == problems[:3]
    assert given == pytest.approx([120.0, 78.0, 2.0])
    assert list(tuner.left) == problems[3:]
    assert given[1] > LEAST_SEARCH_S


# The command line


def said(printed):
    return " ".join(printed.out.split()), " ".join(printed.err.split())


def test_one_command_tunes_what_was_seen_and_then_nothing_is_left(cli, home, kernels):
    first, second = kernels
    note(home, (first.problem(rows=64), 9), (second.problem(rows=640), 5000))
    note(home, (second.problem(rows=640), 5000), (second.problem(rows=128), 1))
    machine = Machine()
    given = {"tools": machine.tools, "devices": lambda: [H200]}
    out, _ = said(cli(["show", "--seen"], **given))
    assert "~10,000" in out
    assert out.index("rows=640") < out.index("rows=64 ")
    assert "tiledsched tune --seen --budget 600" in out
    found = cli(["tune", "--seen", "--budget", "600", "--effort", "quick", "--json"], **given).json
    assert found["schema_version"] == 1
    assert {each["schedule"]["TILE"] for each in found["entries"]} == {32}
    assert (len(found["entries"]), found["left"], found["only_raced"], found["already_tuned"]) == (3, [], [], 0)
    assert machine.began[0] == 640
    rows = cli(["show", "--seen", "--json"], **given).json["seen"]
    assert {(each["now"]["provenance"], each["now_rival"], each["us_is"]) for each in rows} == {
        ("measured", "other", "measured")
    }


def test_what_a_search_found_is_not_tuned_again(home, kernels, cli):
    problem = kernels[0].problem(rows=64)
    note(home, (problem, 3))
    with Session("sm_90", tools=Machine().tools) as session:
        session.tune(kernels[0], [problem])
    machine = Machine()
    assert "1 tuned before" in said(cli(["tune", "--seen"], tools=machine.tools, devices=lambda: [H200]))[0]
    assert machine.began == []


def test_ctrl_c_keeps_what_was_found(home, kernels, cli):
    note(home, *((kernels[0].problem(rows=rows), rows) for rows in (64, 128)))

    class Stopped(Machine):
        def begin(self, problem):
            super().begin(problem)
            if len(self.began) == 2:
                raise KeyboardInterrupt

    given = {"tools": Stopped().tools, "devices": lambda: [H200]}
    assert (
        "what was found until now is stored. The same command goes on"
        in said(cli(["tune", "--seen", "--budget", "600"], code=130, **given))[1]
    )
    with TuningDB.open(None) as db:
        assert [(each.problem.rows, each.source) for each in db.entries()] == [(128, f"tune run 1, {NO_SEARCH}")]


def test_refresh_and_report_are_of_what_was_seen(home, kernels, cli, monkeypatch):
    first, second = kernels
    note(home, (first.problem(rows=64), 9), (second.problem(rows=128), 9))
    machine = Machine()
    given = {"tools": machine.tools, "devices": lambda: [H200]}
    with Session("sm_90", tools=machine.tools) as session:
        session.tune(first, [first.problem(rows=64), first.problem(rows=640)])
    found = cli(["refresh", "--seen", "--json"], **given)
    (one,) = json.loads(found.out)["kernels"]
    assert (one["kernel"], one["current"]) == (first.name, 1)
    assert f"nothing of {second.name} that was seen is measured; run: tiledsched tune --seen" in found.err
    for draw in ("as_svg", "as_png"):  # tests/test_report_files.py draws
        monkeypatch.setattr(f"tiledsched.report.document.{draw}", lambda spec: b"")
    cli(["report", first.locator(), "--seen", "-o", str(home / "report"), "--json"], **given)
    page = (home / "report" / "report.md").read_text()
    assert ("rows=640" in page, "rows=64" in page) == (False, True)


def test_problems_that_a_budget_does_not_reach_are_named_with_what_to_do(home, kernels, cli):
    note(home, *((kernels[0].problem(rows=rows), 1) for rows in (64, 128)))
    machine = Machine()
    out, _ = said(cli(["tune", "--seen", "--budget", "0"], tools=machine.tools, devices=lambda: [H200]))
    assert (
        lacking(
            out,
            "left: ",
            "rows=64 float16: the budget ended first",
            "only raced against rivals, not searched",
            "The same command goes on with these",
        )
        == []
    )


@pytest.mark.parametrize("command", ["tune", "warmup", "refresh", "report", "show", "fleet run tune"])
def test_nothing_seen_says_how_to_capture(command, home, cli):
    _, err = said(cli([*command.split(), "--seen"], devices=lambda: [H200], code=2))
    assert lacking(err, "nothing was seen", "TILEDSCHED_CAPTURE=1 python your_model.py") == []


@pytest.mark.parametrize(
    ("line", "here", "words"),
    [
        ("tune --seen", [H200], "nothing was seen on sm_90, only on sm_100; pass --arch sm_100"),
        ("tune softmax --seen --arch sm_100", [H200], "nothing of softmax was seen, only of first:First"),
        ("show FIRST --seen --arch sm_100 -p rows=3", [H200], "no problem that was seen matches -p"),
        ("tune --seen --suite x", [H200], "leave out --suite"),
        ("tune --seen softmax", [H200], "a kernel stands before the flag: softmax --seen"),
        ("show --clear", [H200], "pass --seen, too"),
        ("tune --seen", [], "there is no GPU here, and problems were seen on sm_100, sm_90; pass --arch sm_100"),
    ],
)
def test_each_kind_of_nothing_has_its_own_sentence(home, kernels, cli, line, here, words):
    note(home, (kernels[0].problem(rows=64), 3), arch="sm_100", device="NVIDIA B200")
    if not here:
        note(home, (kernels[0].problem(rows=64), 3))
    line = line.replace("FIRST", kernels[0].locator())
    assert words in cli(line.split(), devices=lambda: here, code=2).err


def test_a_kernel_of_a_file_is_left_out_until_it_is_named(home, kernels, cli, monkeypatch):
    from tiledsched.core import registry

    note(home, (kernels[0].problem(rows=64), 3))
    place = kernels[0].locator()
    for each in kernels:
        monkeypatch.delitem(registry._known, each.name)
        monkeypatch.delitem(sys.modules, each.__module__)
    machine = Machine()
    given = {"tools": machine.tools, "devices": lambda: [H200]}
    assert f"is not known here; name it: tiledsched tune {place} --seen" in said(cli(["show", "--seen"], **given))[0]
    assert f"name it: tiledsched tune {place} --seen" in said(cli(["tune", "--seen"], code=2, **given))[1]
    assert main(["tune", place, "--seen", "--effort", "race"], **given) == 0
    assert machine.began == [64]


def test_a_folder_may_be_named_and_forgotten(home, kernels, cli):
    note(home, (kernels[0].problem(rows=64), 3), folder="elsewhere")
    where = str(home / "elsewhere")
    assert (
        f"tiledsched tune --seen {where} --budget 600"
        in said(cli(["show", "--seen", where, "--arch", "sm_90"], devices=list))[0]
    )
    others = {
        "a.jsonl": '{"v": 1, "text": "mine"}\n',
        "b.jsonl": "not JSON\n",
        "c.jsonl": "",
        "d.txt": "notes",
        "e.jsonl": "[]",
    }
    for name, text in others.items():
        (home / "elsewhere" / name).write_text(text)
    (home / "elsewhere" / "f.jsonl").mkdir()
    assert said(cli(["show", "--seen", where, "--clear"], devices=list))[0] == f"1 file removed from {where}"
    assert {path.name for path in (home / "elsewhere").iterdir()} == {*others, "f.jsonl"}


def test_damaged_lines_are_counted_and_a_line_fits_the_terminal(home, kernels, cli):
    note(home, (Attention.problem(seq_q=4096, seq_k=4096, head_dim=64, heads=16), 12345), layout="strided")
    (home / "seen" / "damaged.jsonl").write_text("{\n[]\n")
    found = cli(["show", "--seen"], devices=lambda: [H200])
    assert "2 damaged lines or files" in found.err
    assert max(map(len, found.out.splitlines())) <= 80
    assert lacking(found.out, "(strided arrays)", "A tune measures contiguous arrays") == []


def test_an_arch_without_a_search_space_is_told(home, kernels, cli):
    note(home, (Attention.problem(seq_q=64, seq_k=64, head_dim=64), 3), arch="sm_70", device="NVIDIA V100")
    assert (
        "?: nothing can be served for attention on sm_70, which has no search space."
        in said(cli(["show", "--seen"], devices=list))[0]
    )
    assert (
        "no kernel that was seen has a search space for sm_70" in said(cli(["tune", "--seen"], devices=list, code=2))[1]
    )


def test_a_fleet_does_what_was_seen_on_each_arch_most_worthwhile_first(home, kernels, cli):
    from tiledsched.fleet.leases import Leases

    one, two = kernels[0].problem(rows=64), kernels[0].problem(rows=8192)
    note(home, (one, 9000), (two, 1))
    note(home, (two, 3), arch="sm_100", device="NVIDIA B200")
    words = ["fleet", "run", "tune", kernels[0].locator(), "--seen", "--arch", "sm_90,sm_100", "--open-only"]
    name = cli(words, devices=list).out.strip()
    taken = {}
    with TuningDB.open(None) as db:
        leases = Leases(db)
        campaign = leases.campaign(name)
        for arch in ("sm_90", "sm_100"):
            worker = leases.join(name, hostname="h", pid=1, gpu=arch, device_name="", arch=arch)
            taken[arch] = [leases.take(campaign, worker, {arch}) for _ in range(3)]
    assert [each.problem for each in taken["sm_90"] if each] == [one, two]
    assert [each.problem for each in taken["sm_100"] if each] == [two]
