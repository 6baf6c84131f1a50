"""The ladder from the naive attention kernel to the served one: every rung is right, builds, and is told."""

from __future__ import annotations

import pytest
from test_bench import QUICK, Harness

from tiledsched.bench.job import bench_to_file
from tiledsched.bench.rows import BenchRow, read_rows
from tiledsched.build.compiler import compile_schedule
from tiledsched.cli import main
from tiledsched.core.errors import UnsupportedError
from tiledsched.interpreter.checking import check_schedule
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.report.document import Table
from tiledsched.studies.ladder import pages, rungs
from tiledsched.studies.ladder.rungs import EDITS, NAIVE, PlainAttention, plain_problem

PROBLEM = Attention.problem(
    batch=2, heads=3, kv_heads=3, seq_q=200, seq_k=200, head_dim=64, dtype="float16", causal=True
)


def test_each_rung_is_the_one_before_with_one_edit():
    found = rungs.rungs()
    schedules = [schedule for _, schedule in found.values()]
    assert schedules[0] == NAIVE
    assert dict(NAIVE) | {knob: value for _, _, changes in EDITS for knob, value in changes.items()} == dict(
        schedules[-1]
    )
    assert len(set(schedules)) == len(schedules) == len(EDITS)
    for (_, _, changes), before, after in zip(EDITS[1:], schedules, schedules[1:], strict=False):
        assert {knob for knob in after if after[knob] != before[knob]} == set(changes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name, _, _ in EDITS])
def test_every_rung_is_right(name, causal):
    """In the interpreter, against float64, where no tile divides the rows."""
    problem = PlainAttention.problem(pairs=2, rows=150, head_dim=32, causal=causal)
    passed, error, message = check_schedule(PlainAttention, problem, rungs.rungs()[name][1])
    assert passed, message
    assert 0 < error < 2e-3


def test_a_wrong_rung_is_noticed(monkeypatch):
    import tiledsched.studies.ladder.tiles as tiles

    monkeypatch.setattr(tiles, "LOG2_E", 1.0)
    passed, _, _ = check_schedule(
        PlainAttention, PlainAttention.problem(pairs=1, rows=70, head_dim=16), rungs.rungs()["exp2"][1]
    )
    assert not passed


@pytest.mark.compiler
def test_every_rung_builds():
    """For an arch that it is not run on. A compiler may make nothing of a hint, or one program of both ways to load keys."""
    problem = PlainAttention.problem(pairs=8, rows=2048, head_dim=128)
    found = {
        name: compile_schedule(PlainAttention, problem, schedule, "sm_121").fingerprint
        for name, (_, schedule) in rungs.rungs().items()
    }
    assert len(set(found.values())) >= 5
    for first, second in (("naive", "exp2"), ("occupancy", "division"), ("division", "tiles")):
        assert found[first] != found[second]


def rows_of(lengths=(1024, 4096)):
    """A ladder on which each rung takes a tenth less than the one before."""
    found = []
    for length in lengths:
        problem = PROBLEM.replace(seq_q=length, seq_k=length)
        us = problem.flops / 100e6
        for place, method in enumerate(rungs.methods()):
            found.append(
                BenchRow(
                    problem=problem,
                    method=method.name,
                    regime="burst",
                    status="ok",
                    device="NVIDIA Sample",
                    timing=Timing.of([us * 0.9**place] * 6),
                )
            )
    return found


def test_the_table_and_the_chart():
    blocks = pages.document(rows_of())
    (table,) = (block for block in blocks if isinstance(block, Table))
    assert [row[0] for row in table.rows] == [*rungs.rungs(), "tiledsched"]
    assert table.rows[0][3:5] == ("100.0", "-")
    assert table.rows[1][3:5] == ("111.1", "1.11x")
    assert table.rows[-1][1] == "what is served"
    values = pages.scaling(rows_of())["data"]["values"]
    assert len(values) == 2 * (len(EDITS) + 1)


def test_what_failed_says_why():
    rows = [BenchRow(problem=PROBLEM, method="naive", regime="burst", status="out of memory", device="x")]
    (table,) = (block for block in pages.document(rows) if isinstance(block, Table))
    assert table.rows[0][2:] == ("out of memory", "-", "-")


@pytest.mark.parametrize("changes", [{"kv_heads": 1}, {"seq_k": 300}, {"head_dim": 96}])
def test_what_the_plain_kernel_has_not_is_told(changes):
    with pytest.raises(UnsupportedError, match="the plain kernel"):
        plain_problem(PROBLEM.replace(**changes))


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("TILEDSCHED_DB", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hints_for_every_arch_can_be_pasted(home, capsys):
    assert main(["study", "ladder", "--targets", "--problem", "S=4096,D=128,B=4,H=16,causal=no,dtype=float16"]) == 0
    said = capsys.readouterr().out
    assert "sm_90 measured" in said
    import cuda.tile as ct

    names = {"ct": ct}
    exec(said.replace("@ct.kernel(", "hints = dict("), names)
    assert names["TILE_M"]["sm_90"] in (64, 128)
    assert isinstance(names["hints"]["occupancy"], ct.ByTarget)
    assert names["hints"]["opt_level"] == 3


def test_a_ladder_goes_on_where_it_stopped(tmp_path):
    path, harness = tmp_path / "ladder.csv", Harness()
    problems = [PROBLEM.replace(seq_q=length, seq_k=length) for length in (1024, 4096)]
    how = {"methods": rungs.methods(), "rounds": 6, "harness": harness, "pace": QUICK}
    bench_to_file(Attention, problems[:1], path, **how)
    bench_to_file(Attention, problems, path, **how)
    assert harness.prepared == [("burst", each) for each in problems]
    assert [row.method for row in read_rows(path)] == [*rungs.rungs(), "tiledsched"] * 2
    assert main(["study", "ladder", "--summary", "--out", str(tmp_path)]) == 0
    assert {"ladder.md", "ladder.html", "ladder.svg", "by_target.py"} <= {each.name for each in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--summary", "--out", "none"], "holds no ladder"), (["--problem", "S=512,D=96,B=1,H=1"], "a power of two")],
)
def test_wrong_use_is_told(home, capsys, words, message):
    assert main(["study", "ladder", *words]) == 2
    assert message in capsys.readouterr().err
