"""The command line, run as a person would, on a machine with no GPU."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shlex
import sqlite3
import sys
from pathlib import Path

import pytest
from golden import check_golden, lacking, leaf_commands

from tiledsched.build import toolchain
from tiledsched.cli import Ended, _Stderr, app, main, progress, renamed, tuned_output
from tiledsched.cli.commands import root
from tiledsched.cli.problems import named_problems, read_problems
from tiledsched.core import data_files, errors, registry, space_files
from tiledsched.core.device import ARCHS, PRODUCTS, arch_named, arch_of, describe_gpus
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import format_problem
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Device
from tiledsched.report.sources import WithShipped
from tiledsched.store.db import TuningDB
from tiledsched.tuning.resources import Tools

ROOT = Path(__file__).parent.parent
SPACE = """
extends = "attention/sm_121.toml"
[knobs.tile_m]
choices = [64]
[knobs.tile_n]
choices = [32, 64]
[knobs.occupancy]
choices = [2]
[knobs.opt_level]
choices = [3]
[knobs.num_worker_warps]
choices = [4]
[knobs.latency_k]
choices = [0, 2]
[knobs.latency_v]
choices = [0]
"""
FEWER = SPACE.replace("choices = [0, 2]", "choices = [0]") + '[knobs.block_order]\nchoices = ["natural", "swizzled"]\n'
"""Eight schedules: each one built takes more than a second."""
PLAIN = FEWER + '[knobs.persistent]\nchoices = ["no"]\n'
"""Four of them."""


def for_a_record() -> str:
    """A space of fewer schedules than a record builds at once: without what only a measurement tells apart, too."""
    pins = space_files.space_for("sm_121", Attention).modelled_pins()
    fixed = "".join(f"[knobs.{name}]\nchoices = [{json.dumps(value)}]\n" for name, value in pins.items())
    return FEWER.replace("choices = [32, 64]", "choices = [64]") + fixed


@pytest.fixture
def home(home, monkeypatch):
    monkeypatch.chdir(home)
    (home / "my.toml").write_text(SPACE)
    return home


def valid_schedules() -> int:
    """How many schedules of that space a run without a GPU considers."""
    space, problem = space_files.load_space("my.toml"), Attention.standard(seq_len=1024, head_dim=64)
    pinned = {"accum_mode": "fp32", **space.modelled_pins()}
    return sum(1 for _ in space.schedules(problem, pinned=pinned))


TUNE = ["tune", "--arch", "sm_121", "--space", "my.toml", "--runner", "none", "-p"]
ONE = "B=16,H=32,S=1024,D=64,causal=no"
TWO = "B=16,H=32,S=1024:4096,D=64,causal=no"


@pytest.mark.slow
@pytest.mark.compiler
def test_the_whole_road_without_a_gpu(home, cli) -> None:
    (home / "my.toml").write_text(PLAIN)
    said = cli([*TUNE, TWO, "--json"]).json
    assert said["schema_version"] == 1
    first, second = said["results"]
    assert first["schedules"] == first["compiled"] == valid_schedules() == 4
    assert 1 < first["programs"] <= first["schedules"]
    assert first["left"] == 0 <= min(first["over_default"], first["over_runner_up"])
    assert second["compiled"] == 0  # another length, the same machine code
    assert {entry["provenance"] for entry in said["entries"]} == {"modelled"}

    out = cli([*TUNE, TWO]).out
    assert [words in out for words in ("0 compiled now", "Nothing was measured", "modelled")] == [True] * 3
    rows = cli(["show", "attention", "--arch", "sm_121", "-p", TWO, "--json"]).json["entries"]
    mine = [row for row in rows if row["S"] in (1024, 4096) and row["B"] == 16 and row["dtype"] == "float16"]
    assert {row["S"] for row in mine} >= {1024, 4096}
    assert {(row["arch"], row["provenance"], row["median_us"]) for row in mine} == {("sm_121", "modelled", None)}
    assert "an estimate; nothing was measured" in cli(["explain", "--arch", "sm_121", "-p", ONE]).out
    assert cli(["explain", "--arch", "sm_121", "-p", "S=3000,D=64,causal", "--json"]).json["provenance"] == "modelled"
    for line in (
        "db check",
        "db export --arch sm_121 --out table.json",
        "db import table.json --db other.db",
        "db import other.db --json",
        "db check --upgrade --forget-failures --kind hang --json",
    ):
        cli(line.split())
    assert cli(["show", "--landscapes", "--json"]).json["landscapes"] == []


@pytest.mark.slow
@pytest.mark.compiler
def test_programs_are_built_then_recorded_and_another_run_measures_nothing(home, cli) -> None:
    from test_record import Gpu

    from tiledsched.store.exchange import read_table

    tools = Tools(runner=lambda kernel, seed: Gpu(), devices=lambda: [Device(name="", arch="sm_90", sm_count=0)])
    space = for_a_record().replace("sm_121", "sm_90").replace("choices = [2]", "choices = [1]")
    (home / "my.toml").write_text(space)
    record = [
        "record",
        "--arch",
        "sm_90",
        "--space",
        "my.toml",
        "-p",
        ONE,
        "--programs",
        "3",
        "--sustained-leaders",
        "2",
        "--out",
        "landscapes",
    ]
    said = cli([*record, "--build-only", "--json"], tools=tools)
    (built,) = json.loads(said.out)["problems"]
    assert built["distinct_programs"] == built["wanted"] == 3 <= built["compiled"]
    assert built["landscapes"] == []
    assert "3 programs" in said.err
    assert (
        "3 distinct programs of 3 built, nothing measured, 0 compiled now"
        in cli([*record, "--build-only"], tools=tools).out
    )
    said = cli(record, tools=tools)
    burst, sustained = said.out.splitlines()
    assert re.search(
        r"D=64 float16 burst: 3 distinct programs, 0 failed, best \d+\.\d TFLOP/s, worst \d\.\d\dx; ", burst
    )
    assert " sustained: 2 distinct programs, " in sustained
    assert "sustained, 3 of 3 programs measured" in said.err
    assert [len(read_table(line.split("; ")[-1]).measurements) for line in (burst, sustained)] == [3, 2]

    data = cli([*record, "--json"], tools=tools).json
    (problem,) = data["problems"]
    assert (problem["compiled"], problem["measured"], problem["failed"], problem["complete"]) == (0, 0, 0, True)
    assert [(one["regime"], one["distinct_programs"]) for one in problem["landscapes"]] == [
        ("burst", 3),
        ("sustained", 2),
    ]
    assert all(one["best_tflops"] > 0 and one["worst_ratio"] >= 1 for one in problem["landscapes"])
    with sqlite3.connect(home / "tuning.db") as db:
        assert db.execute("select status from runs").fetchall() == [("done",)] * 4


def test_landscapes_tell_what_is_measured_and_where_the_regimes_disagree(home, cli) -> None:
    from report_samples import DEVICE, PROBLEM, add_times, plain

    with TuningDB.open() as db:
        add_times(db, {plain(128, 64): 100.0, plain(128, 128): 110.0})
        add_times(db, {plain(128, 64): 150.0, plain(128, 128): 120.0}, regime="sustained")
    said = cli(["show", "--landscapes", "--json"]).json
    assert said["schema_version"] == 1
    assert said["landscapes"] == [
        {
            "problem": PROBLEM.to_json(),
            "device": DEVICE.name,
            "arch": "sm_90",
            "regime": regime,
            "distinct_programs": 2,
            "measurements": 2,
        }
        for regime in ("burst", "sustained")
    ]
    (one,) = said["regimes"]
    assert (one["problem"], one["same"], one["burst_loss"]) == (PROBLEM.to_json(), False, pytest.approx(0.25))
    out = cli(["show", "--landscapes"]).out
    assert lacking(out, "+25.0%*", "+10.0%*") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tune --arch sm_75", "known are sm_80"),
        ("explain --arch sm_75 -p S=1024,D=64", "known are sm_80"),
        ("tune --arch sm_121 --space missing.toml", "check the path"),
        ("tune --arch sm_90 --space my.toml", "is for sm_121, not sm_90"),
        ("tune --arch sm_90 --runner gpu", "no sm_90 GPU here"),
        ("tune --arch sm_90 -p H=6/4,S=1024,D=64 --runner none", "multiple of kv_heads"),
        ("tune --arch sm_90 -p S=1024,D=512 --runner none", "at most 256"),
        ("tune --arch sm_90 -p S=1024,D=64,dtype=float8", "must be one of float16, bfloat16"),
        (
            "tune --effort fast",
            "'fast' is not one of 'served', 'race', 'quick', 'default', 'thorough'; see tiledsched tune --help",
        ),
        ("tune --trials 0", "0 is not in the range x>=1; see tiledsched tune --help"),
        ("tune --trials", "requires an argument; see tiledsched tune --help"),
        ("tune attention matmul", "unexpected extra argument (matmul); see tiledsched tune --help"),
        ("compare a", "Missing argument 'B'; see tiledsched compare --help"),
        ("compare a b --threshold 100", "100.0 is not in the range 0<x<100"),
        ("explain -p B=%s,S=%s,D=64" % (2 * (":".join(map(str, range(1, 200))),)), "these values name 39,601 problems"),
        ("show --provenance guessed", "'guessed' is not one of 'measured', 'transferred', 'modelled', 'default'"),
        ("db check --db missing.db", "missing.db"),
        ("db check --kind hang", "pass --forget-failures"),
        ("db export --format t4", "pass --landscapes DIR"),
        ("db import missing.json", "check the path"),
        ("db import missing.db", "there is no database at"),
        ("record --arch sm_90", "-o DIR"),
        ("record --arch sm_90 --out my.toml", "is a file"),
        ("record --arch sm_90 --out my.toml/x", "give another one"),
        ("record --arch sm_90 --out out", "no sm_90 GPU here; run: tiledsched doctor, or use --build-only"),
        ("show --db .", "--db or TILEDSCHED_DB"),
        ("warmup --arch sm_90,sm_100 -o x.zip", "a bundle is of one arch"),
        ("warmup --arch sm_90 --campaign x", "pass -o FILE"),
        ("warmup --arch sm_90 --also group", "group needs a value"),
        ("warmup --arch sm_90 --also odd", "vary by dtype, group, any-length, decode"),
        ("fleet run", "a fleet runs tune, record, refresh, bench"),
        ("fleet run tune softmax --problm x", "Did you mean '--problem'? see tiledsched fleet run tune --help"),
        ("tune --budgt 64", "No such option '--budgt'. Did you mean '--budget'? see tiledsched tune --help"),
        ("report --arch sm_90 --out x --xyz", "No such option '--xyz'; see tiledsched report --help"),
        ("--effort quick tune", "No such option '--effort'; see tiledsched --help"),
        ("fly", "No such command 'fly'; see tiledsched --help"),
        ("db exprt", "No such command 'exprt'. Did you mean 'export'? see tiledsched db --help"),
        ("tune --db", "'--db' requires an argument; see tiledsched tune --help"),
        ("warmup --arch sm_90 --decode", "--decode is gone; use --also decode"),
        ("bench --csv x.csv --resume", "--resume is gone; use --csv FILE alone"),
    ],
)
def test_wrong_use_is_explained_and_exits_with_2(home, cli, line, words) -> None:
    said = cli(line.split(), devices=list, tools=Tools(devices=list), code=2).err
    assert words in said
    assert said.splitlines()[-1].startswith("tiledsched: ")


COMMANDS = dict(leaf_commands(root))


@pytest.mark.parametrize("old", renamed.COMMANDS)
def test_an_old_command_names_the_new_one(cli, old) -> None:
    assert cli([*old.split(), "--json"], code=2).err == f"tiledsched: {old} is gone; use {renamed.COMMANDS[old]}\n"
    new = re.findall(r"tiledsched ((?:[a-z]+ ?)+)", renamed.COMMANDS[old])
    assert [
        name for name in new if " ".join(name.split()[:2]) not in COMMANDS and name.split()[0] not in COMMANDS
    ] == []


@pytest.mark.parametrize("flag", [flag for flag in renamed.FLAGS if flag.startswith("--")])
def test_an_old_flag_of_attention_names_the_problem(cli, flag) -> None:
    assert (
        cli(["tune", flag, "16", "--verbose"], code=2).err == f"tiledsched: {flag} is gone; use {renamed.FLAGS[flag]}\n"
    )
    named = renamed.FLAGS[flag].removeprefix("-p ").split(",")[0]
    if flag not in ("--window-right", "--page"):  # which need another beside them
        usual = [
            each
            for each in ("S=64", "D=32", "causal", "B=1", "heads=16")
            if each.partition("=")[0] != named.partition("=")[0]
        ]
        assert read_problems(Attention, ",".join([*usual, named]))


@pytest.mark.parametrize(
    "line",
    [
        "--db x.db --json db check",
        "db --json --db=x.db check",
        "db check -v --json --db x.db",
        "--db no.db db check --json --db x.db",
        "db check --db x.db --json --",
    ],
)
def test_the_programs_options_stand_anywhere(home, capsys, caplog, line) -> None:
    TuningDB.open("x.db").close()
    with caplog.at_level(logging.WARNING):  # which also puts back what -v sets
        assert main(line.split()) == 0
        assert logging.getLogger().level == (logging.DEBUG if "-v" in line else logging.WARNING)
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert not Path("no.db").exists()


def test_a_wrong_environment_is_explained(home, cli, monkeypatch) -> None:
    monkeypatch.setenv("TILEDSCHED_REGIME", "tropical")
    assert "allowed: burst, sustained" in cli(["show"], code=2).err


@pytest.mark.parametrize("words", [["show", "--json"], ["--help"], ["tune", "--help"]])
def test_it_starts_without_compiler_or_gpu_libraries(home, python, words) -> None:
    heavy = ("torch", "cupy", "ray", "cuda.tile", "optuna", "alembic", "vl_convert", "scipy", "sqlalchemy", "rich")
    code = f"""import sys; from tiledsched.cli import main; main({words})
print([name for name in {heavy if words[-1] == "--json" else heavy[:3]} if name in sys.modules])"""
    assert python(code).out.splitlines()[-1] == "[]"


SUM = """
import cuda.tile as ct
import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel

@ct.kernel
def add(X, Y, Out, TILE: ct.Constant[int]):
    row, column = ct.bid(0), ct.bid(1)
    x = ct.load(X, (row, column), (1, TILE), padding_mode=ct.PaddingMode.ZERO)
    y = ct.load(Y, (row, column), (1, TILE), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (row, column), x + y * FACTOR)

class Add(Kernel):
    function = add
    rows, columns = ts.dim(), ts.dim()
    scaled = ts.flag()
    dtype = ts.dtype("float32", "float16")
    X, Y, Out = ts.array("rows columns"), ts.array("rows columns"), ts.out("rows columns")
    knobs = {"TILE": [64, 128, 256], "occupancy": [1, 2]}
    label = {"N": ("rows", "columns")}
    suites = {"square": [dict(rows=64, columns=64), dict(rows=256, columns=256)]}

    def grid(p, s, device):
        return (p.rows, -(-p.columns // s["TILE"]))

    def reference(xp, X, Y):
        return X + Y

    def rivals(p):
        import torch

        return {"torch": torch.add, "torch_swapped": lambda X, Y: Y + X}
"""


@pytest.fixture
def added(home) -> str:
    """The locator of a kernel in a file of its own, right; `wrong.py` has one that is not."""
    (home / "sums.py").write_text(SUM.replace("FACTOR", "1"))
    (home / "wrong.py").write_text(SUM.replace("FACTOR", "2"))
    return "sums.py:Add"


def test_a_kernel_is_found_wherever_it_stands_and_its_problems_go_by_name(added) -> None:
    def named(name: str, line: str) -> list[str]:
        command = COMMANDS[name]
        with command.make_context(
            name, line.split(), obj=app.Invocation(), help_option_names=["-h", "--help"]
        ) as context:
            given = context.params
        assert given["kernel"].name == "sums:Add"
        return [str(problem) for problem in named_problems(given["kernel"], given["problem"], given["suite"])]

    small, large = "rows=64 columns=64 float32", "rows=256 columns=256 float32"
    assert named("tune", f"{added} --arch sm_90") == [small, large]
    assert named("tune", f"--arch sm_90 --suite square -v {added}") == [small, large]
    every = named("bench", f"--csv a:b -p rows=64:256,columns=64,dtype=float16,scaled=yes:no {added}")
    assert every == [f"rows={rows} columns=64 {flag}float16" for rows in (64, 256) for flag in ("scaled ", "")]
    assert named("record", f"{added} --arch sm_90 --problem N=64 -p N=256") == [small, large]


def test_without_a_problem_the_default_suite_is_meant() -> None:
    assert named_problems(Attention, ()) == Attention.suite("standard")
    softmax = registry.kernel_named("softmax")
    assert named_problems(softmax, ()) == softmax.suite("widths")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sums.py:Add -p row=1", "the keys of sums:Add are N, rows, columns, scaled, dtype"),
        ("sums.py:Add -p rows=many,columns=1", "rows must be a positive integer, got 'many'"),
        ("sums.py:Add -p rows=0,columns=1", "rows must be a positive integer"),
        ("sums.py:Add -p rows=1", "needs columns"),
        ("sums.py:Add -p N=1,scaled=maybe", "scaled must be true or false, got 'maybe'"),
        ("sums.py:Add -p N=1,dtype=int8", "dtype must be one of float32, float16"),
        ("matmull", "'matmull' is not known here"),
        ("none.py:Add", "there is no file"),
        ("sums.py:Sub", "it declares Add"),
    ],
)
def test_a_wrong_kernel_or_problem_says_what_is_allowed(added, cli, line, words) -> None:
    assert words in cli(["check", *line.split()], code=2).err


def test_check_tells_right_from_wrong(added, cli) -> None:
    said, progress = cli(["check", added, "--schedules", "3", "--problem", "rows=3,columns=67"])
    assert re.match(
        r"rows=3 columns=67 float32: 3 of 3 .*\n  tiles that every schedule took, at least: \d+ of rows, ", said
    )
    assert progress.startswith("rows=3 columns=67 float32: schedule 1 of 3")
    said = cli(["check", "wrong.py:Add", "--schedules", "2", "--json"], code=1).json
    assert said["schema_version"] == 1
    assert said["rows"]
    assert not any(row["passed"] for row in said["rows"])


@pytest.mark.parametrize("name", sorted([*COMMANDS, "fleet", "db", "study", ""]))
def test_help_is_short_and_starts_with_a_sentence(home, cli, monkeypatch, name) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = cli([*name.split(), "-h"]).out
    assert said.startswith(f"Usage: tiledsched {name}".rstrip())
    assert max(map(len, said.splitlines())) <= 80
    if name in COMMANDS:
        assert f"  tiledsched {name}" in said, "an example"
    assert main(name.split() if name not in COMMANDS else ["-h"]) == 0  # a group alone shows its help


def test_the_help_of_a_kernel_shows_its_keys_and_suites(added, cli) -> None:
    said = cli(["tune", added, "--help"]).out
    assert lacking(said, "Problems of sums:Add", "N, rows, columns, scaled, dtype", "print the result as JSON") == []
    assert re.search(r"suites +square", said)
    said = cli(["fleet", "run", "bench", "--help"]).out
    assert lacking(said, "--ray-address", "--methods") == []


def test_options_are_those_of_the_options_classes() -> None:
    from tiledsched.tuning import options

    classes = ("TuneOptions", "CheckOptions", "RecordOptions", "RefreshOptions")
    for name, made in zip(("tune", "check", "record", "refresh"), classes, strict=True):
        params = {param.name: param for param in COMMANDS[name].params}
        for each in options.options_of(getattr(options, made)):
            assert each.flag in params[each.name].opts
            assert params[each.name].default == each.default
    assert len(COMMANDS) - 3 == 22  # study NAME counts once


@pytest.mark.compiler
def test_any_kernel_is_tuned_shown_and_explained_without_a_gpu(added, cli, monkeypatch) -> None:
    (entry,) = cli(["tune", added, "--arch", "sm_90", "--problem", "N=256", "--runner", "none", "--json"]).json[
        "entries"
    ]
    assert (entry["kernel"], entry["N"], entry["rows"], entry["dtype"]) == ("sums:Add", 256, 256, "float32")
    assert (entry["provenance"], entry["tflops"]) == ("modelled", None)
    out = cli(["show", added]).out
    assert "tuned schedules of sums:Add" in out
    assert "attention" not in out
    assert len(cli(["show", "sums:Add", "--json"]).json["entries"]) == 1
    said = cli(["explain", added, "--arch", "sm_90", "--problem", "N=256", "--json"]).json
    assert said["provenance"] == said["rows"][0]["provenance"] == "modelled"
    monkeypatch.setenv("COLUMNS", "80")
    assert "sm_90 rows=256 columns=256 float32: not measured (modelled)\n    " in cli(["show", added]).out


def test_progress_off_a_terminal_is_a_few_lines(capsys) -> None:
    clock = 0.0
    with progress.TuneProgress(clock=lambda: clock) as watcher:
        watcher.stage(Attention.problem(seq_q=1, seq_k=1, head_dim=16), "compiling", 100)
        watcher.best(12.5, Schedule(tile_m=64, tile_n=64))
        for done in range(1, 101):
            clock += 0.12
            watcher.step(done)
        watcher.stage(Attention.problem(seq_q=1, seq_k=1, head_dim=16), "compiling", 0)
    said = capsys.readouterr()
    assert said.out == ""
    check_golden("progress.txt", said.err)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("[]", "must hold a list of schedules"), ("{", "cannot read candidates"), ('[{"tile_q": 1}]', "unknown knobs")],
)
def test_candidates_that_cannot_be_read(tmp_path, cli, text, wanted) -> None:
    path = tmp_path / "candidates.json"
    path.write_text(text)
    assert (
        wanted
        in cli(["tune", "--arch", "sm_90", "--candidates", str(path), "--db", str(tmp_path / "a.db")], code=2).err
    )


@pytest.mark.parametrize("budget_s", [None, 30.0])
def test_a_terminal_shows_a_bar_the_best_so_far_and_the_time_left(budget_s) -> None:
    from rich.console import Console

    clock, screen = 0.0, io.StringIO()
    console = Console(file=screen, width=80, force_terminal=True)
    problem = Attention.problem(seq_q=1, seq_k=1, head_dim=16)
    long = Schedule(tile_m=64, tile_n=64, **{f"a_knob_with_a_long_name_{i}": i for i in range(1, 6)})
    with progress.TuneProgress(2, budget_s, console=console, clock=lambda: clock) as watcher:
        watcher.stage(problem, "measuring", 64)
        clock = 20.0
        watcher.step(8)
        watcher.best(12.5, long)
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert f"[1/2] {problem}" in said
    assert ("8/64 0:02:20 left" if budget_s is None else "8/64 0:00:10 left") in said
    assert f"best so far 12.5 us: {long.short()}" in " ".join(said.split())


@pytest.mark.parametrize("said", ["sm_90", "SM90", "9.0", "h200", "NVIDIA H200", "NVIDIA GeForce RTX 4090"])
def test_an_arch_is_known_by_its_gpus(said) -> None:
    assert arch_named(said) == app.ArchType().convert(said, None, None) == ("sm_89" if "4090" in said else "sm_90")


@pytest.mark.parametrize("here", [[], ["sm_90"], ["sm_89", "sm_90"]])
def test_without_an_arch_it_is_that_of_the_gpu_here(home, here, cli) -> None:
    found = [Device(name="", arch=arch, sm_count=0) for arch in here]
    arch = (here or ["sm_121"])[0]
    said = cli(["explain", "-p", ONE], devices=lambda: found)
    assert f"for {arch}; --arch names another" in said.err
    assert arch in said.out
    assert "--arch" not in cli(["show", "-p", ONE], devices=lambda: found).err


def test_every_product_is_of_an_arch_that_is_known() -> None:
    assert set(PRODUCTS) == set(ARCHS)
    for arch, spec in ARCHS.items():
        assert (
            arch_named(spec.device.removesuffix("-SXM4-80GB").removesuffix(" Blackwell"))
            == arch
            == arch_of(spec.device)
        )
    assert [arch_named(name) for name in ("DGX Spark", "thor")] == ["sm_121", "sm_110"]
    assert [arch_of(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA Fake")] == ["sm_90", "sm_89", ""]


@pytest.mark.parametrize(
    ("arch", "measured", "named"),
    [
        ("sm_90", ["NVIDIA H200", "", "NVIDIA H200"], "NVIDIA H200 (sm_90)"),
        ("sm_90", ["NVIDIA H200", "NVIDIA H20"], "NVIDIA H20 and NVIDIA H200 (sm_90)"),
        ("sm_90", [], "H100, H200, H800, H20 or GH200 (sm_90)"),
        ("sm_121", [], "GB10 (sm_121)"),
        ("sm_999", [], "sm_999"),
    ],
)
def test_an_arch_of_several_products_is_named_by_all_and_a_measured_gpu_by_its_own_name(arch, measured, named) -> None:
    assert describe_gpus(arch, measured) == named


ANSWER = """
B=16 H=32 S=1024 D=64 float16 on NVIDIA Sample
  128x64 a_knob_with_a_long_name_1=1 a_knob_with_a_long_name_2=2
    a_knob_with_a_long_name_3=3
  250.0 us measured, 550 TFLOP/s; the compiler defaults take 25.0% longer; the
    runner-up takes as long; 1 tied
  40 schedules built, 30 distinct programs; 35 compiled now, 20 measured, 0
    failed, 12.3 s
"""


@pytest.mark.parametrize("stored", [True, False])
def test_what_was_measured_is_answered_at_80_columns(capsys, monkeypatch, stored) -> None:
    """Without a GPU: see the next test."""
    import store_samples

    from tiledsched.tuning.results import TuneReport, TuneResult

    long = Schedule(tile_m=128, tile_n=64, **{f"a_knob_with_a_long_name_{i}": i for i in range(1, 4)})
    entry = store_samples.entry(
        "measured",
        schedule=long,
        device_name="NVIDIA Sample",
        ties=(store_samples.schedule(),),
        measurement=store_samples.stored(median_us=250.0).summary,
    )
    result = TuneResult(
        entry=entry,
        stored=stored,
        schedules=40,
        programs=30,
        compiled=35,
        measured=20,
        failed=0,
        seconds=12.34,
        over_default=0.25,
        over_runner_up=1e-4,
    )
    monkeypatch.setenv("COLUMNS", "80")
    tuned_output.print_tuned(
        TuneReport(kernel=Attention, arch="sm_90", run_id=1, results=[result], entries=[entry], measured=True)
    )
    said = capsys.readouterr().out
    assert said == ANSWER if stored else "kept: a measured entry stands above" in said


@pytest.mark.slow
@pytest.mark.compiler
def test_a_newcomers_tune_ends_with_the_answer_and_commands_that_work(cli, home, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (home / "my.toml").write_text(PLAIN)
    said = cli(["tune", *TUNE[3:], ONE, "--trials", "3"], devices=list)
    assert "tiledsched: for sm_121" in said.err
    assert re.search(r"compiling 3/3, best so far [\d.]+ us \(modelled\): 64x", said.err)
    answer, _, rest = said.out.partition("\nNext:\n")
    assert max(map(len, said.out.splitlines()[:-4])) <= 80
    entry = list_entries(cli, "--arch", "sm_121", "--problem", "B=16,S=1024,D=64,dtype=float16,causal=no")[0]
    flat = " ".join(answer.split())
    assert (
        lacking(flat, f"{' '.join(shown(entry))} ", "Nothing was measured", "the model's favourites were built") == []
    )
    assert re.search(r"us modelled, \d+ TFLOP/s; the compiler defaults take .*; the runner-up takes", flat)
    assert f"3 of {valid_schedules()} schedules built" in flat
    commands = [shlex.split(command) for command in re.findall(r"^    tiledsched (.*)$", rest, re.MULTILINE)]
    assert [words[0] for words in commands] == ["explain", "report", "tune"]
    assert commands[1] == ["report", "--arch", "sm_121", "-o", "report"]
    cli(commands[0])
    monkeypatch.setattr(WithShipped, "_build_files", ())  # else a chart of each of 72 problems that ship
    for draw in ("as_svg", "as_png"):  # tests/test_report_files.py draws
        monkeypatch.setattr(f"tiledsched.report.document.{draw}", lambda spec: b"")
    flat = " ".join(cli([*commands[2], "--report", "report"]).out.split())
    assert f"{valid_schedules()} of {valid_schedules()} schedules built" in flat
    page, text = ((home / "report" / f"report.{suffix}").read_text() for suffix in ("html", "md"))
    assert "Nothing was measured on sm_121" in page
    assert text.startswith("**Nothing was measured: the performance model estimated")
    charts = int(re.search(r"Report with (\d+) charts:", flat)[1])
    assert page.count('class="chart"') >= charts > 3


def shown(entry) -> list[str]:
    return Schedule(entry["schedule"]).short().split()


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> list[dict]:
    """What is shown without a filter and without a database."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("TILEDSCHED_DB", str(tmp_path_factory.mktemp("none") / "tuning.db"))
        assert main(["show", "attention", "--json"]) == 0
    return json.loads(out.getvalue())["entries"]


def list_entries(cli, *filters) -> list[dict]:
    return cli(["show", "attention", *filters, "--json"]).json["entries"]


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        (["-p", "D=128"], lambda one: one["head_dim"] == 128),
        (["-p", "D=64:128,causal"], lambda one: one["head_dim"] in (64, 128) and one["causal"]),
        (["-p", "bfloat16"], lambda one: one["dtype"] == "bfloat16"),
        (
            ["--arch", "h200", "--regime", "burst"],
            lambda one: one["evidence"]["regime"] == "burst" and one["arch"] == "sm_90",
        ),
        (["--provenance", "modelled,default"], lambda one: one["provenance"] in ("modelled", "default")),
        (["--device", "h200"], lambda one: one["evidence"]["device_name"] == "NVIDIA H200"),
        (
            ["--problem", "S=4096,head_dim=64:128", "--problem", "D=96"],
            lambda one: one["D"] == 96 or (one["S"] == 4096 and one["head_dim"] in (64, 128)),
        ),
    ],
)
def test_filters_show_what_is_like_them_and_nothing_else(cli, everything, home, filters, holds) -> None:
    found = list_entries(cli, *filters)
    assert found == [one for one in everything if holds(one)]
    assert 0 < len(found) < len(everything)


def test_filters_reach_all_kernels_and_say_when_nothing_is_like_them(cli, home, capsys) -> None:
    assert main(["show", "--problem", "columns=4096", "--json"]) == 0
    rows = {"rms_norm", "softmax", "rms_norm_backward", "softmax_backward"}
    assert {one["kernel"] for one in json.loads(capsys.readouterr().out)["entries"]} == rows
    assert cli(["show", "--problem", "columns=7"]) == ("", "no tuned problem matches; leave out a filter\n")
    assert "the keys of" in cli(["show", "--problem", "colour=red"], code=2).err


def test_show_without_a_filter_is_a_summary_or_of_the_gpu_here(cli, home, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    check_golden("show.txt", cli(["show"], devices=list).out)
    said = cli(["show"], devices=lambda: [Device(name="NVIDIA L4", arch="sm_89", sm_count=58)])
    assert "for sm_89; --arch names another" in said.err
    assert ("sm_90" in said.out, "sm_89" in said.out) == (False, True)

    def broken() -> list[Device]:
        raise errors.MeasureError("the driver does not answer")

    assert "attention on sm_90: " in cli(["show", "attention"], devices=broken).out


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("show h200", "--arch h200"),
        ("show sm_121", "--arch sm_121"),
        ("show attention h200", "--arch h200"),
        ("show D=128", "-p D=128"),
        ("show measured", "--provenance measured"),
        ("show --kernel attention", "show attention"),
        ("explain gb10", "--arch gb10"),
        ("report sm_90", "--arch sm_90"),
    ],
)
def test_a_word_that_wants_a_flag_is_told_which(home, cli, line, flag) -> None:
    assert flag in cli(line.split(), code=2).err


def test_the_landscapes_that_ship_are_listed_without_a_database(home, cli) -> None:
    said = cli(["show", "--landscapes", "attention", "--json"]).json
    assert (said["landscapes"], said["regimes"]) == ([], [])
    files = (data_files.tuning_db() / "landscapes" / "attention").rglob("*.json.xz")
    assert {one["file"] for one in said["shipped"]} == set(map(str, files))
    out = cli(["show", "--landscapes", "--arch", "sm_121"]).out
    files = [path.name for path in (data_files.tuning_db() / "model" / "attention").glob("programs_*.json.xz")]
    assert "measured landscapes" not in out
    assert "(modelled)" in out
    assert all(name in out for name in files)
    out = cli(["show", "--landscapes", "--arch", "sm_90", "matmul"]).out
    assert "matmul on sm_90: m=3072 n=5120 k=2560 bfloat16" in out
    assert "attention" not in out


def test_show_hides_no_schedule_at_80_columns(cli, home, monkeypatch) -> None:
    entries = list_entries(cli, "--arch", "sm_90", "-p", "D=128")
    monkeypatch.setenv("COLUMNS", "80")
    out = cli(["show", "attention", "--arch", "sm_90", "-p", "D=128"]).out
    assert max(map(len, out.splitlines())) <= 80
    flat = " ".join(out.split())
    assert all(" ".join(shown(entry)) in flat for entry in entries)


@pytest.mark.parametrize("name", registry.SHIPPED)
def test_what_a_problem_is_told_as_is_read_as_that_problem(name) -> None:
    kernel = registry.kernel_named(name)
    for problem in dict.fromkeys(each for suite in kernel.suites for each in kernel.suite(suite)):
        assert read_problems(kernel, format_problem(problem)) == [problem]
        assert read_problems(kernel, str(problem)) == [problem], "as it is printed"


def test_problems_are_read_as_people_write_them() -> None:
    def read(text: str) -> list[str]:
        return [str(each) for each in read_problems(Attention, text)]

    both = [f"B=1 H=1 S={length} D=64 float16" for length in (1024, 2048)]
    assert read("S=1024,2048, D=64") == read("S=1024:2048 D=64") == both
    assert read("B=2 H=32/8:28/4 Sq=2 Sk=300 D=192/128 bfloat16 causal bottom-right +lse") == [
        f"B=2 H={heads} Sq=2 Sk=300 D=192/128 bfloat16 causal bottom-right +lse" for heads in ("32/8", "28/4")
    ]
    for flag in ("causal", "causal=1", "causal=True", "causal=on", "causal = yes", " causal=YES ,"):
        assert read(f"S = 64, D= 32,{flag}") == ["B=1 H=1 S=64 D=32 float16 causal"]
    assert read("S=64,D=32,causal=0,dtype = float16:bfloat16,") == [
        "B=1 H=1 S=64 D=32 float16",
        "B=1 H=1 S=64 D=32 bfloat16",
    ]
    assert read("S=64,seq_k=128,D=32") == ["B=1 H=1 Sq=64 Sk=128 D=32 float16"]
    for text, words in {
        "H=32/8/4": "write H=heads/kv_heads, or one value",
        "heads=4/2": "heads takes one value, without slashes",
        "hed_dim=64": r"\(did you mean 'head_dim'\?\), which takes whole numbers; the keys of attention are",
        "casual=1": r"\(did you mean 'causal'\?\), which takes yes or no",
        "algnment=x": r"\(did you mean 'alignment'\?\), which takes top_left or bottom_right",
        "causal=maybe": "causal must be true or false, got 'maybe'",
        "S=64,D=32,S=128": "'S=128': S is given twice; write several values as S=VALUE:VALUE",
        "seq_q=64,D=32,S=128": "'S=128': S is given twice",
        "causal,causal=no": "causal is given twice",
        "dtype=float16,bfloat16": "'bfloat16': dtype is given twice; write several values as dtype=VALUE:VALUE",
        "S=": "S must be a positive integer, got ''",
        "H=32/few": "must be a positive integer",
        "S=64 causl": "'causl': write key=value",
        "2048": "'2048': write key=value",
    }.items():
        with pytest.raises(errors.TiledschedError, match=words):
            read(text)


def test_explain_takes_what_decides_as_tune_does(added, cli) -> None:
    (Path("narrow.toml")).write_text(
        'kernel = "sums:Add"\narch = "sm_90"\n[knobs.TILE]\nchoices = [256]\ndefault = 256\n'
    )
    words = ["--problem", "N=64", "--accum-mode", "fp32", "--regime", "sustained"]
    assert "TILE=64" in cli(["explain", added, "--arch", "sm_90", *words]).out
    assert "TILE=256" in cli(["explain", added, "--arch", "sm_90", *words, "--space", "narrow.toml"]).out
    assert (
        "pass --arch sm_90" in cli(["explain", added, "--arch", "sm_80", *words, "--space", "narrow.toml"], code=2).err
    )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("tiledsched tu", "tune"),
        ("tiledsched tune --eff", "--effort"),
        ("tiledsched tune mat", "matmul"),
        ("tiledsched tune --effort q", "quick"),
        ("tiledsched db check --js", "--json"),
    ],
)
def test_a_shell_completes_commands_flags_and_their_words(cli, monkeypatch, line, wanted) -> None:
    monkeypatch.setenv("_TILEDSCHED_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert f"plain,{wanted}\n" in cli([]).out


def test_the_log_goes_above_the_bars_and_is_silent_about_interrupted_cleanup(monkeypatch) -> None:
    handler, said = _Stderr(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)  # as rich does where bars are drawn
    handler.emit(logging.makeLogRecord({"msg": "waiting for GPU"}))
    for error in (Ended(15), OSError("broken")):
        handler.emit(logging.makeLogRecord({"msg": "Exception during reset", "exc_info": (type(error), error, None)}))
    assert said.getvalue() == "waiting for GPU\nException during reset\nOSError: broken\n"


def test_a_replay_tells_nothing_as_measured_and_keeps_nothing(tmp_path, monkeypatch, cli) -> None:
    """Nor does it need a compiler or a GPU: whoever wants to see a tune can see one."""
    for name in ("DB", "CACHE"):
        monkeypatch.setenv(f"TILEDSCHED_{name}", str(tmp_path / name))
    monkeypatch.setattr(toolchain, "compiler_folder", lambda: None)
    (file,) = map(str, (ROOT / "tuning_db/landscapes/rms_norm/held_out").iterdir())
    words = ["tune", "--replay", file, "--trials", "6"]
    told = " ".join(cli(words, devices=lambda: pytest.fail("a GPU is looked for")).out.split())
    assert told.startswith(
        "Nothing was measured or stored: times are drawn from those that were recorded on NVIDIA H200. What is served "
        "stays as it is. rows=12288 columns=6144 bfloat16 residual"
    )
    assert re.search(r" on replay of NVIDIA H200 .* us replayed, .* distinct programs, \d+ replayed, \d+ failed", told)
    (entry,) = cli([*words, "--json"]).json["entries"]
    assert {found for key, found in flattened(entry) if key == "provenance"} == {"replayed"}
    assert {found for key, found in flattened(entry) if key == "runner"} == {"replay"}
    assert not any(tmp_path.iterdir())
    for more in (["--db", "x.db"], ["--report", "r"], ["--arch", "sm_90"], ["-p", "rows=8"], ["--suite", "models"]):
        assert "leave out -p, --suite, --seen, --arch, --db and --report" in cli([*words, *more], code=2).err


def flattened(value):
    """Every key of nested JSON, and what it holds."""
    for key, found in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flattened(found) if isinstance(found, dict | list) else [(key, found)]


def test_an_export_of_nothing_says_so(home, cli):
    cli(["db", "import", str(Path(__file__).parent.parent / "tuning_db" / "tables" / "rope" / "sm_90.json")])
    found = cli("db export atention")
    assert json.loads(found.out)["entries"] == []
    assert "nothing of atention is tuned in this database (did you mean 'attention'?); -o names a file" in found.err
