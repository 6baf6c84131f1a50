"""What is baked: the tree, the source of tables that ship, and files that use it without tiledsched."""

from __future__ import annotations

import copy
import math
import random
import shutil
import subprocess
import timeit
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from served_entries import SUMMARY

from tiledsched.bake.baking import DOUBT, ERROR, MODEL, Baking, TableChoice, _measured_losses, choices
from tiledsched.bake.patch import Patch
from tiledsched.bake.text import clauses, conjunction, source
from tiledsched.bake.tree import NEVER, between, grow
from tiledsched.core.config import Settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.measure.runner import Conditions
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_table
from tiledsched.store.records import Entry

SITE = '''"""A user's file."""
import cuda.tile as ct
import torch
from tiledsched import exhaustive_search


@ct.kernel(occupancy=ct.ByTarget(sm_90=8, sm_100=4, default=2))
def scale(X, Out, factor, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)) * factor)


def launch(x, out):
    """é, before what depends on the tile."""

    def inner(x):
        if x.shape[0] > 4096:
            tile = 64
            if x.shape[0] % 128 == 0:
                tile = 128
        grid = (x.shape[0] // tile,)
        ct.launch(torch.cuda.current_stream(), grid, scale, (x, out, 0.5, tile))
        tile = None

    inner(x)


def search(x, out):
    best = exhaustive_search(
        [{"TILE": 64}], 0, lambda c: (4096 // c["TILE"],), scale, lambda c: (x, out, 0.5, c["TILE"])
    ).best.config
    return best["TILE"], best.TILE
'''
DECLARED = """
import importlib.util
import tiledsched as ts
spec = importlib.util.spec_from_file_location("user_file", {path!r})
user_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(user_file)


class Scale(ts.Kernel):
    function = user_file.scale
    size = ts.dim()
    dtype = ts.dtype("float32", "float16")
    X, Out = ts.array("size"), ts.out("size")
    factor = ts.scalar(0.5)
    knobs = {{"TILE": [64, 128, 256], "occupancy": [0, 1, 2]}}
    constraints = {{"size >= TILE": "whole tiles"}}

    def grid(p, s, device):
        return p.size // s["TILE"]

    def reference(xp, X, factor):
        return X * factor


class Hinted(Scale):
    knobs = {{"occupancy": [0, 1, 2]}}
    constraints = {{}}

    def constants(p, s):
        return {{"TILE": 64}}

    def grid(p, s, device):
        return p.size // 64
"""
WITHOUT = """
import sys, types
sys.modules["tiledsched"] = None
import cuda.tile as ct
launched = []
ct.launch = lambda stream, grid, kernel, arguments: launched.append((grid, arguments[3], kernel._compiler_options))
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(current_stream=lambda: 0)
namespace = {}
exec(compile(open(sys.argv[1], encoding="utf-8-sig").read(), sys.argv[1], "exec"), namespace)
for size in (8192, 1 << 20):
    x = types.SimpleNamespace(shape=(size,), dtype="torch.float32")
    namespace["launch"](x, x)
    print(*launched[-1], namespace["search"](x, x))
"""


def case(problem, schedule, arch="sm_90") -> TableChoice:
    """A problem that was measured, with the schedule that won."""
    entry = Entry(
        kernel=problem.kernel,
        arch=arch,
        problem=problem,
        provenance="measured",
        schedule=schedule,
        device_name="NVIDIA H200",
        regime="burst",
        measurement=SUMMARY,
        toolchain=SUMMARY.toolchain,
    )
    served = Served(schedule=schedule, provenance="measured", steps=(), entry=entry, is_own=True)
    return TableChoice(problem=problem, arch=arch, served=served, measured={schedule: 0.0}, estimated={})


def chooser(baking: Baking):
    """The baked function."""
    namespace: dict = {}
    exec(baking.source(), namespace)
    return namespace[f"{baking.name}_schedule"]


@pytest.fixture
def scale(tmp_path):
    """A user's file, and the kernel that declares what is in it."""
    path = tmp_path / "user_file.py"
    path.write_text(SITE, encoding="utf-8")
    (tmp_path / "declared.py").write_text(DECLARED.format(path=str(path)), encoding="utf-8")
    return path, load_kernel(f"{tmp_path}/declared.py:Scale")


def baked(kernel, command="tiledsched bake declared.py:Scale", **more) -> Baking:
    """Small sizes take small tiles."""
    sizes = {
        8192: Schedule(TILE=64, occupancy=2),
        1 << 16: Schedule(TILE=128, occupancy=0),
        1 << 20: Schedule(TILE=256, occupancy=1),
    }
    return Baking(kernel, [case(kernel.problem(size=size), each) for size, each in sizes.items()], command, **more)


def test_a_tree_is_exact_or_as_small_as_asked_and_never_leads_where_nothing_runs():
    rng = random.Random(3)
    problems = [
        {"m": rng.randint(1, 99), "n": rng.randint(1, 99), "dtype": rng.choice("ab"), "causal": rng.random() < 0.5}
        for _ in range(80)
    ]
    right = [(p["m"] * p["n"] > 900) + 2 * (p["dtype"] == "b" and p["causal"]) for p in problems]
    losses = numpy.array([[0.0 if each == best else 0.5 for each in range(4)] for best in right])
    losses[:, 3] = NEVER
    wrong = numpy.array([[float(each != best) for each in range(4)] for best in right])

    def missed(tree):
        found = {row: leaf.best for leaf in tree.leaves() for row in leaf.rows}
        assert sorted(found) == list(range(80))
        return sum(found[row] != best for row, best in enumerate(right))

    assert missed(grow(problems, wrong)) == 0
    few = grow(problems, losses, 4)
    assert len(few.leaves()) <= 4
    assert few.loss == pytest.approx(sum(losses[row, leaf.best] for leaf in few.leaves() for row in leaf.rows))
    assert few.loss <= grow(problems, losses, 2).loss < grow(problems, losses, 1).loss
    assert 3 not in {leaf.best for leaf in few.leaves()}
    assert [between(16, 512), between(3000, 4000), between(5, 6), between(0, 1)] == [128, 3464, 5, 0]


@pytest.mark.slow
def test_more_questions_and_more_leaves_never_lose_more(monkeypatch):
    problems = [{"m": m, "k": k} for k in (1, 2, 3) for m in (1, 2, 3, 4)]
    rng, gains = random.Random(1), []
    for _ in range(20):
        losses = numpy.array([[rng.choice((0, 0, 0.1, 0.2, 0.5)) for _ in range(4)] for _ in problems])
        wide = [grow(problems, losses, most).loss for most in range(1, 13)]
        with monkeypatch.context() as patched:
            patched.setattr("tiledsched.bake.tree.WIDTH", 1)
            narrow = [grow(problems, losses, most).loss for most in range(1, 13)]
        assert wide == sorted(wide, reverse=True)
        assert all(one <= other for one, other in zip(wide, narrow, strict=True))
        gains.append(max(other - one for one, other in zip(wide, narrow, strict=True)))
    assert max(gains) > 0.25


@pytest.mark.parametrize(
    ("name", "most"), [("matmul", 95), ("rms_norm", 45), pytest.param("attention", 760, marks=pytest.mark.slow)]
)
def test_what_ships_is_chosen_on_every_problem_within_a_microsecond(name, most):
    kernel = load_kernel(name)
    cases = choices(kernel, ["sm_90"], [], Settings(), losses=False)
    baking = Baking(kernel, cases, f"tiledsched bake {name}")
    choose, text = chooser(baking), baking.source()
    for each, facts in zip(cases, baking.names, strict=True):
        assert {"pdl": 0, **choose(**facts)} == {"pdl": 0, **each.served.schedule}
    assert ("pdl" in text) == any(
        each.served.schedule.get("pdl") for each in cases
    )  # sources without stay as they were
    assert len(text.splitlines()) <= most
    assert "tiledsched." not in text
    needed = {key: value for key, value in facts.items() if key in baking.needed_facts}
    assert min(timeit.repeat(lambda: choose(**needed), number=1000, repeat=9)) < 1000 * 3e-6  # of a busy machine


def test_few_leaves_say_what_they_lose():
    kernel = load_kernel("rms_norm")
    cases = choices(kernel, ["sm_90"], [], Settings(), losses=True)
    baking = Baking(kernel, cases, "tiledsched bake rms_norm --max-leaves 3", 3)
    lost = [baking.losses(leaf) for leaf in baking.tree.leaves()]
    assert len(lost) == 3
    logs = [each.loss(Schedule(chooser(baking)(**facts))) for each, facts in zip(cases, baking.names, strict=True)]
    assert math.fsum(logs) == pytest.approx(math.fsum(math.log1p(each) for one in lost for each in one))
    assert f"takes {math.expm1(math.fsum(logs) / len(logs)):.1%} longer" in baking.said
    assert all(each.measured[each.served.schedule] == 0 for each in cases)
    with pytest.raises(ValueError, match="bake again"):
        chooser(baking)(rows=8, columns=1 << 30, residual=False)


def test_an_estimate_counts_as_wrong_as_estimates_are():
    kernel = load_kernel("rms_norm")
    (case, *_) = choices(kernel, ["sm_90"], [], Settings(), losses=True)
    timed, good, bad, never = (case.served.schedule.replace(num_worker_warps=each) for each in (97, 98, 99, 100))
    case = replace(case, measured={timed: 0.01}, estimated={good: -0.2, bad: 1.0})
    assert case.risk(case.served.schedule) == 0
    assert case.risk(timed) == 0.01
    assert case.risk(good) == pytest.approx(ERROR / math.sqrt(2 * math.pi))  # the mean of what errors add to 0
    assert case.risk(bad) == pytest.approx(1.0)
    assert case.risk(never) == case.loss(never) >= 1e3


def test_values_are_written_as_they_are():
    words = [
        Schedule(word="a b " * 40, none="None", rate="0.5", fixed="c d", flag=True),
        Schedule(word="e", none="None", rate="1.5", fixed="c d", flag=True),
    ]
    tree = grow([{"m": 1}, {"m": 2}], numpy.array([[0.0, 1.0], [1.0, 0.0]]))
    namespace: dict = {}
    exec(source("f", tree, words, {}, {"m"}, ["said"]), namespace)
    assert namespace["f_schedule"](m=1) == {
        "word": "a b " * 40,
        "none": None,
        "rate": 0.5,
        "fixed": "c d",
        "flag": True,
    }
    second = namespace["f_schedule"](m=2)
    assert second.rate == 1.5
    with pytest.raises(AttributeError, match="no attribute 'rates'"):
        _ = second.rates
    assert copy.deepcopy(second) == second
    assert not hasattr(second, "__fspath__")
    exec(source("f", grow([{"m": 1}], numpy.array([[1.0, 0.0]])), words, {}, {"m"}, []), namespace)
    assert namespace["f_schedule"]() == dict(words[1], none=None, rate=1.5)


def test_leaves_that_are_too_few_are_an_error():
    kernel = load_kernel("rms_norm")
    problems = [kernel.problem(rows=8, columns=each) for each in (8, 4096)]
    one, other = (space_for("sm_90", kernel).default(each) for each in problems)
    cases = [case(problems[0], one), case(problems[1], other)]
    assert len(Baking(kernel, cases, "", 2).tree.leaves()) == 2
    with pytest.raises(ConfigError, match="allow more leaves"):
        Baking(kernel, cases, "", 1)
    with pytest.raises(ConfigError, match="tell apart"):
        Baking(kernel, [case(problems[0], each) for each in (one, other)], "")


def test_what_is_left_of_a_condition():
    import ast

    def left(text, **known):
        return conjunction(clauses(ast.parse(text, mode="eval").body, known))

    assert left("n <= 32 * TILE", TILE=4) == "n <= 32 * 4"
    assert left("not FLAG or n == 1", FLAG=False) == ""
    assert left("word == 'word' and n > 1 and (n < 9 or TILE > 3)", word="word", TILE=2) == "n < 9 and n > 1"
    assert left("TILE > 3 and n", TILE=2) == "False"
    assert left("TILE > 1 and TILE < 3", TILE=2) == ""
    assert left("TILE > 2 or TILE < 2", TILE=2) == "False"
    assert left("n < 9 and (n < 9 or flag) and (TILE > 2 or flag or m)", TILE=2) == "(m or flag) and n < 9"


def test_conditions_are_checked_for_the_schedules_that_need_them():
    problems = [{"m": each} for each in range(5)]
    words = [Schedule(word=str(each)) for each in range(5)]
    tree = grow(problems, 1.0 - numpy.eye(5))
    needs = {1: "n > 1", 2: "n > 2", 4: "n > 1"}
    namespace: dict = {}
    exec(source("f", tree, words, needs, {"m", "n"}, []), namespace)
    for m, least in ((0, 0), (1, 2), (2, 3), (3, 0), (4, 2)):
        assert namespace["f_schedule"](m=m, n=least) == {"word": m}
        if least:
            with pytest.raises(ValueError, match="bake again"):
                namespace["f_schedule"](m=m, n=least - 1)


def test_a_file_uses_what_is_baked_and_needs_no_tiledsched(scale, python):
    path, kernel = scale
    patch = Patch(baked(kernel))
    assert "import exhaustive_search" not in patch.after
    assert "sm_90=each.occupancy or None, sm_100=4, default=2" in " ".join(patch.after.split())
    path.write_text(patch.after, encoding="utf-8")
    first, second = python(WITHOUT, str(path)).out.splitlines()
    assert first.startswith("(128,) 64 ")
    assert first.endswith("(64, 64)")
    assert second.startswith("(4096,) 256 ")
    assert "ByTarget(sm_90=2, sm_100=4, default=2)" in first
    assert "ByTarget(sm_90=1, sm_100=4, default=2)" in second
    again = Patch(baked(kernel))
    assert again.before == again.after
    path.write_text(SITE, encoding="utf-8")
    tiles = [case(kernel.problem(size=size), Schedule(TILE=tile)) for size, tile in ((8192, 64), (1 << 20, 128))]
    path.write_text(Patch(Baking(kernel, tiles, "")).after, encoding="utf-8")
    assert "scale, (x, out, 0.5, tile))" in path.read_text(encoding="utf-8")
    bare = Patch(Baking(kernel, tiles, ""))
    assert bare.before == bare.after
    path.write_text(patch.after, encoding="utf-8")
    other = Patch(baked(kernel, command="tiledsched bake another"))
    assert other.after == again.after.replace("bake declared.py:Scale", "bake another")


def test_hints_alone_go_to_the_launch(scale):
    path, _ = scale
    kernel = load_kernel(f"{path.parent}/declared.py:Hinted")
    cases = [case(kernel.problem(size=size), Schedule(occupancy=each)) for size, each in ((64, 1), (1 << 20, 2))]
    after = Patch(Baking(kernel, cases, "")).after
    lines = after.splitlines()
    place = next(number for number, line in enumerate(lines) if "ct.launch(" in line)
    assert lines[place - 1 : place + 1] == [
        "        schedule = hinted_schedule(dtype=str(x.dtype)[6:], size=x.shape[0])",
        "        ct.launch(torch.cuda.current_stream(), grid, schedule.kernel, (x, out, 0.5, tile))",
    ]
    overlapping = case(kernel.problem(size=64), Schedule(occupancy=1, pdl=1))  # the compiler knows no such hint
    with pytest.raises(ConfigError, match="pdl is no parameter of scale"):
        Patch(Baking(kernel, [overlapping], ""))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("            tile = 64\n", "            tile, grid = 64, 0\n", ""),
        ("0.5, tile)", "0.5, 128)", "inner assigns no variable that is passed for TILE"),
        ("ct.launch(torch", "run(torch", ""),
        ("(x, out, 0.5, tile)", "arguments", "must be a tuple of 4"),
        ("TILE: ct.Constant[int]):", "TILE: ct.Constant[int], SIDES: ct.Constant[int]):", "must be a tuple of 5"),
        ("        tile = None", "        tile = ct.tile", ""),
        ("0.5, tile)", "0.5, torch.tile)", "tile = torch.tile, and pass that"),
        ("        grid = (", "        tile = 64; grid = (", "grid depends on tile; move this below line 20"),
        (
            "        ct.launch",
            "        if x:\n            tile = 3\n        ct.launch",
            "grid depends on tile; move this below",
        ),
        ("        ct.launch", "        tile = 64; ct.launch", "a line of its own"),
        ("    def inner(x):\n", "    def inner(y):\n", ""),
        ("        grid = (", "        x = x * 1\n        grid = (", ""),
        ("        ct.launch", "        z = x * 1\n        ct.launch", ""),
        ("(x, out, 0.5, tile))\n        tile", "(z, out, 0.5, tile))\n        tile", ""),
    ],
)
def test_places_that_cannot_be_edited_are_named(scale, old, new, message):
    path, kernel = scale
    path.write_text(SITE.replace(old, new), encoding="utf-8")
    if message:
        with pytest.raises(ConfigError, match=message):
            Patch(baked(kernel))
    else:
        assert "def scale_schedule" in Patch(baked(kernel)).after


PLAIN = """import cuda.tile as ct
import torch


@ct.kernel
def scale(X, Out, factor, /, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)) * factor)


def launch(x, out):
    tile = 512
    grid = (x.shape[0] // tile,)
    ct.launch(torch.cuda.current_stream(), grid, scale, (x, out, 0.5, tile))
"""
NESTED = PLAIN[PLAIN.index("@ct.kernel") : PLAIN.index("\n\ndef launch")].replace("\n", "\n    ").rstrip()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("    ", "\t"),
        lambda text: text.rstrip("\n"),
        lambda text: f"\ufeff{text}",
        lambda text: text.replace("    grid", "    \x0c\n    grid"),
        lambda text: text.replace("import cuda.tile as ct", "import cuda.tile as t").replace("ct.", "t."),
        lambda text: text.replace(
            PLAIN[PLAIN.index("@ct.kernel") : PLAIN.index("\n\ndef launch")], f"if ct:\n    {NESTED}\nelse:\n    0\n"
        ),
        lambda text: (
            text.replace("    tile = 512\n", "    tile = 512\n    schedule = 1\n")
            + "    assert schedule == 1\n" * text.endswith("\n")
        ),
        lambda text: text.replace("    grid", "    def inner():\n        tile = 1\n\n    grid"),
        lambda text: (
            text.replace("def launch(x, out):", "def launch(x, out, self=torch):")
            .replace("    tile", "    self.tile")
            .replace(" tile", " self.tile")
        ),
    ],
    ids=["plain", "crlf", "tabs", "no_end", "bom", "form_feed", "alias", "branch", "schedule", "inner", "attribute"],
)
def test_a_patch_fits_a_file_however_it_is_written(scale, cli, python, monkeypatch, change):
    path, _ = scale
    monkeypatch.chdir(path.parent)
    path.write_bytes(change(PLAIN).encode())
    words = ["bake", "declared.py:Scale", "--arch", "sm_90", "-p", "size=8192"]
    cli([*words, "-o", "b.patch"])
    for tool in (["git", "apply", "--check", "b.patch"], ["patch", "-p1", "--binary", "-i", "b.patch"]):
        subprocess.run(tool, check=True, capture_output=True)
    assert "is what the table says" in cli([*words, "--check"]).out
    assert python(WITHOUT.replace(', namespace["search"](x, x)', ""), str(path)).out.startswith("(128,) 64 ")


def test_the_command_writes_and_checks(home, cli, monkeypatch):
    monkeypatch.chdir(home)
    words = ["bake", "rms_norm", "--arch", "sm_90", "--max-leaves", "4", "-o", "rms.py"]
    said = cli(words).out
    assert said.startswith("4 leaves, 4 schedules, 14 problems. A problem takes ")
    assert said.endswith("\nrms.py\n")
    text = Path("rms.py").read_text(encoding="utf-8")
    assert text.splitlines()[1] == "# tiledsched bake rms_norm --arch sm_90 --max-leaves 4"
    assert cli([*words, "--check"]).out == "rms.py is what the table says\n"
    Path("rms.py").write_text(text.replace("return 0", "return 1").replace("(0 if", "(1 if"), encoding="utf-8")
    assert cli([*words, "--check"], code=1).out.endswith("\nrms.py is not what the table says; bake it again\n")
    assert text == cli(words[:-2]).out
    assert "of one `function`" in cli([*words[:-1], "rms.patch"], code=2).err
    Path("mine.py").write_text("mine = 1\n", encoding="utf-8")
    assert "holds something else" in cli([*words[:-1], "mine.py"], code=2).err
    assert Path("mine.py").read_text(encoding="utf-8") == "mine = 1\n"
    assert "no/x.py: No such file" in cli([*words[:-1], "no/x.py"], code=2).err
    text = cli(
        ["bake", "rms_norm", "--arch", "sm_90", "-p", "rows=8192,columns=16384", "-p", "rows=65,columns=4097"]
    ).out
    assert "# 1 of 2 problems were measured.\n" in text
    assert "ends in .py" in cli([*words[:-1], "rms.txt"], code=2).err
    assert "nothing was measured" in cli(["bake", "rms_norm", "--arch", "sm_120"], code=2).err


def test_what_was_timed_counts_and_what_was_not_is_estimated(home):
    kernel = load_kernel("matmul")
    known, other, _ = choices(
        kernel, ["sm_90"], [kernel.problem(m=m, n=4096, k=4096) for m in (4096, 3000, 16)], Settings(), losses=True
    )
    assert known.served.is_own
    assert not other.measured
    assert known.served.schedule in other.estimated
    assert len(known.measured) > 1
    assert [each.loss(each.served.schedule) for each in (known, other)] == [0.0, 0.0]
    assert known.loss(Schedule(TILE_M=1)) == NEVER
    table = load_table(Settings(), kernel=kernel, archs={"sm_90"})
    whole, half = (table.nearby(other.problem, "sm_90", model=share) for share in (1.0, MODEL))
    estimates = [
        [judge.mean_loss(each) - judge.mean_loss(other.served.schedule) for each in other.estimated]
        for judge in (whole, half)
    ]
    assert sum(map(abs, estimates[1])) < sum(map(abs, estimates[0]))
    surcharges = [found - each for found, each in zip(other.estimated.values(), estimates[1], strict=True)]
    assert {round(each, 6) for each in surcharges} == {0.0, DOUBT}


def test_only_times_beside_the_choices_own_count():
    problem = load_kernel("rms_norm").problem(rows=64, columns=64)
    fast, slow = Schedule(TILE=1), Schedule(TILE=2)
    served = case(problem, fast).served

    def row(schedule, us, device="NVIDIA H200", regime="burst"):
        taken = SimpleNamespace(
            schedule=schedule,
            median_us=us,
            device=SimpleNamespace(name=device),
            regime=regime,
            problem=problem,
            conditions=Conditions(),
        )
        return SimpleNamespace(measurement=taken, toolchain=SUMMARY.toolchain, uid=str(us))

    others = [row(slow, 5.0, device="other"), row(fast, 1.0, regime="sustained")]
    rows = [*others, row(slow, 20.0), row(fast, 10.0), row(slow, 30.0)]
    assert _measured_losses(served, problem, rows) == {fast: 0.0, slow: math.log(2)}
    assert _measured_losses(served, problem, rows[:3]) == {}


SILU = """
import sys, types
sys.modules["tiledsched"] = None
import cuda.tile as ct
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(current_stream=lambda: 0)
namespace = {"__name__": "silu"}
exec(open("silu.py", encoding="utf-8").read(), namespace)
for size in (1 << 20, 1 << 26):
    x = types.SimpleNamespace(shape=(size,), dtype="torch.float16")
    print(sorted(namespace["best_tile"](x, x).config.items()))
"""


def test_a_search_that_was_remembered_is_baked(home, cli, python, monkeypatch):
    monkeypatch.chdir(home)
    shutil.copy(Path(__file__).parent.parent / "docs/examples/silu.py", home)
    cli(["db", "import", "sample"])
    words = ["bake", "silu.py:silu", "--arch", "sm_90"]
    said = cli([*words, "-o", "silu.patch"]).out
    assert said.startswith("2 leaves, 2 schedules, 3 problems: for each of them what the table chooses.\n")
    patched = [each for each in Path("silu.patch").read_text(encoding="utf-8").splitlines() if "+++" not in each]
    assert "+    return silu_schedule(Out=out, X=x).best" in patched
    assert "-from tiledsched import exhaustive_search" in patched
    assert "silu.py is not what the table says" in cli([*words, "--check"], code=1).out
    subprocess.run(["patch", "-p1", "-i", "silu.patch"], check=True, capture_output=True)
    assert cli([*words, "--check"]).out == "silu.py is what the table says\n"
    assert python(SILU).out.splitlines() == [
        "[('num_worker_warps', 8), ('occupancy', 2), ('tile', 1024)]",
        "[('num_worker_warps', 4), ('occupancy', 2), ('tile', 1024)]",
    ]
