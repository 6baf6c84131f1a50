"""The ladder from the naive attention kernel to the served one: every rung is right, builds, and is told."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
from test_bench import QUICK, Harness

from tiledsched.bench.job import bench_to_file
from tiledsched.bench.rows import BenchRow, read_rows
from tiledsched.build.compiler import compile_schedule
from tiledsched.cli import main
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.schedule import HINT_KNOBS
from tiledsched.interpreter.checking import check_schedule
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.report.document import Chart, Heading, Paragraph, Table
from tiledsched.studies.ladder import pages, rungs
from tiledsched.studies.ladder.published import RATES, RUNGS, published_problem
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
    problem = PlainAttention.problem(pairs=8, rows=2048, head_dim=16)
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


def tables_of(rows):
    return [block for block in pages.document(rows) if isinstance(block, Table)]


def texts_of(rows):
    return " ".join(block.text for block in pages.document(rows) if isinstance(block, Paragraph))


def test_each_rung_is_one_line_with_its_rate_and_its_gain():
    rows = rows_of()
    (table,) = tables_of(rows)
    assert [row[0] for row in table.rows] == [f"`{name}`" for name in (*rungs.rungs(), "tiledsched")]
    assert [row[2:] for row in table.rows[:2]] == [("100.0", "-"), ("111.1", "1.11x")]
    assert len(table.head) <= 6
    said = texts_of(rows)
    assert said.startswith("Measured on NVIDIA Sample, at full clocks.")
    assert "reaches 100 TFLOP/s and the served schedule 209: 2.09 times that" in said
    assert "geometric mean of 2 lengths" in said
    assert "published such a ladder" in said  # of other problems
    spec = pages.scaling(rows)
    values = spec["data"]["values"]
    assert "measured on NVIDIA Sample" in spec["title"]["subtitle"]
    assert len(values) == 2 * (len(EDITS) + 1)


def test_a_gain_is_the_geometric_mean_of_the_lengths_that_have_both_times():
    """By hand: the second rung takes half of the first at one length and two thirds at the other, and fails at a third."""
    times = {("naive", 1024): 100.0, ("exp2", 1024): 50.0, ("naive", 2048): 300.0, ("exp2", 2048): 200.0}
    rows = [
        BenchRow(
            problem=PROBLEM.replace(seq_q=length, seq_k=length),
            method=method,
            regime="burst",
            status="ok" if (method, length) in times else "out of memory",
            timing=Timing.of([times[method, length]] * 6) if (method, length) in times else None,
            device="x",
        )
        for length in (4096, 1024, 2048)
        for method in ("naive", "exp2", "tiledsched")
    ]
    first, second, served = pages.steps(rows)
    assert (first.gain, first.rate, first.status) == (None, None, "out of memory")
    assert (second.gain, second.lengths) == (pytest.approx((2 * 1.5) ** 0.5), 2)
    assert (served.gain, served.lengths) == (None, 0)
    (table,) = tables_of(rows)
    assert [row[2:] for row in table.rows] == [
        ("out of memory", "-"),
        ("out of memory", "1.73x"),
        ("out of memory", "-"),
    ]
    assert "No length has a time for both `naive` and `tiledsched`." in texts_of(rows)
    assert {value["S"] for value in pages.scaling(rows)["data"]["values"]} == {1024, 2048}


@pytest.mark.parametrize("method", ["naive", "tiledsched"])
@pytest.mark.parametrize("status", ["ok", "out of memory"])
def test_one_rung_of_one_length_makes_a_page(method, status):
    timing = Timing.of([5.0] * 6) if status == "ok" else None
    rows = [BenchRow(problem=PROBLEM, method=method, regime="sustained", status=status, timing=timing, device="x")]
    assert not any(isinstance(block, Chart) for block in pages.document(rows))  # a point is no line over lengths
    assert f"`{method}`, the only" in texts_of(rows)
    assert ("No length has a time for" in texts_of(rows)) == (status != "ok")


def test_gpus_and_problems_have_parts_of_their_own():
    other = [dataclasses.replace(row, device="NVIDIA Other") for row in rows_of()]
    causal = [dataclasses.replace(row, problem=row.problem.replace(causal=False)) for row in rows_of()]
    blocks = pages.document([*rows_of(), *other, *causal])
    assert [block.name for block in blocks if isinstance(block, Chart)] == ["ladder", "ladder2", "ladder3"]
    headings = [block.text for block in blocks if isinstance(block, Heading) and block.level == 2]
    assert len(set(headings)) == 3
    assert not any("S=" in heading for heading in headings)


def test_nvidias_figures_stand_beside_ours_for_their_problem_alone():
    theirs = [dataclasses.replace(row, problem=published_problem(row.problem.seq_q)) for row in rows_of((2048, 4096))]
    ladder, finished = tables_of(theirs)
    assert ladder.head[-1] == "GB10, NVIDIA's"
    assert [row[-1] for row in ladder.rows] == ["62.8", "66.5", "66.3", "66.5", "79.5", "81.1", "-", "-"]
    assert [row[2:] for row in finished.rows] == [("80.9", "770.0"), ("86.2", "999.0")]
    said = texts_of(theirs)
    assert "github.com/NVIDIA/dgx-spark-playbooks" in said
    assert "we did not measure" in said
    drawn = pages.scaling(theirs)["data"]["values"]
    assert {value["kernel"] for value in drawn if value["by"] != "measured here"} == {
        "NVIDIA's, GB10",
        "NVIDIA's, B300",
    }
    assert all("NVIDIA" not in value["kernel"] for value in pages.scaling(rows_of((2048,)))["data"]["values"])


def test_nvidias_figures_are_those_of_the_documentation():
    with (Path(__file__).parent.parent / "docs/results/blackwell/figures.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["source"].startswith("playbook") and "S=" in row["problem"]]
    rates = {gpu: {} for gpu in RATES}
    for row in found:
        length = int(row["problem"].split("S=")[1].split()[0])
        assert row["problem"].replace(" causal", "") + " causal" == str(published_problem(length))
        if "rung" not in row["schedule"]:
            rates[row["device"]][length] = float(row["value"])
    assert rates == RATES
    assert [float(row["value"]) for row in found if "rung" in row["schedule"]] == list(RUNGS.values())
    assert list(RUNGS) == list(rungs.rungs())[: len(RUNGS)]


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
    """The printed file is Python, and its hints decorate a kernel that has nothing to do with ours."""
    problems = "S=4096:16384,D=128,B=1,H=16,causal=no,dtype=float16"
    assert main(["study", "ladder", "--targets", "--problem", problems]) == 0
    said = capsys.readouterr().out
    names = {}
    exec(compile(said, "by_target.py", "exec"), names)
    ct, (first, second) = names["ct"], names["HINTS"]
    assert (first, second) == ("B=1 H=16 S=4096 D=128 float16", "B=1 H=16 S=16384 D=128 float16")
    for hints in names["HINTS"].values():
        assert set(hints) <= set(HINT_KNOBS)
        assert isinstance(ct.kernel(**hints)(lambda X: None), ct.kernel)
    assert isinstance(names["HINTS"][second]["occupancy"], ct.ByTarget)
    assert set(names["TILES"][second]) == set(ARCHS)
    assert names["TILES"][second]["sm_90"]["tile_m"] in (64, 128)
    (origins,) = (line for line in said.splitlines() if line.startswith(f"# {second}: "))
    assert "measured on NVIDIA H200, 2026-" in origins
    assert "modelled, not measured (sm_80" in origins


def test_a_ladder_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path, harness = tmp_path / "ladder.csv", Harness()
    problems = [PROBLEM.replace(seq_q=length, seq_k=length) for length in (1024, 4096)]
    how = {"methods": rungs.methods(), "rounds": 6, "harness": harness, "pace": QUICK}
    bench_to_file(Attention, problems[:1], path, **how)
    bench_to_file(Attention, problems, path, **how)
    assert harness.prepared == [("burst", each) for each in problems]
    assert [row.method for row in read_rows(path)] == [*rungs.rungs(), "tiledsched"] * 2
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # which takes seconds to draw
    assert main(["study", "ladder", "--summary", "--out", str(tmp_path)]) == 0
    assert {"ladder.md", "ladder.html", "by_target.py"} <= {each.name for each in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--summary", "--out", "none"], "holds no ladder"), (["--problem", "S=512,D=96,B=1,H=1"], "a power of two")],
)
def test_wrong_use_is_told(home, capsys, words, message):
    assert main(["study", "ladder", *words]) == 2
    assert message in capsys.readouterr().err
