"""The ladder from the naive attention kernel to the served one: every rung is right, builds, and is told."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from test_bench import QUICK, Harness

from tiledsched.build.compiler import compile_schedule
from tiledsched.checking.interpreted import check_schedule
from tiledsched.cli import main
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import UnsupportedError
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.ops.bench import bench_here
from tiledsched.rivals.rows import BenchRow
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
    monkeypatch.setattr("tiledsched.studies.ladder.tiles.LOG2_E", 1.0)
    passed, _, _ = check_schedule(
        PlainAttention, PlainAttention.problem(pairs=1, rows=70, head_dim=16), rungs.rungs()["exp2"][1]
    )
    assert not passed


@pytest.mark.slow
@pytest.mark.compiler
def test_every_rung_builds():
    """For an arch that it is not run on. A compiler may make nothing of a hint, or one program of both ways to load keys."""
    problem = PlainAttention.problem(pairs=8, rows=2048, head_dim=32)
    found = {
        name: compile_schedule(PlainAttention, problem, schedule, "sm_121").fingerprint
        for name, (_, schedule) in rungs.rungs().items()
    }
    assert len(set(found.values())) >= 5
    for first, second in (("naive", "exp2"), ("occupancy", "division"), ("division", "tiles")):
        assert found[first] != found[second]


def rows_of(lengths=(1024, 4096), like=PROBLEM):
    """A ladder on which each rung takes a tenth less than the one before, which begins at 100 TFLOP/s."""
    found = []
    for length in lengths:
        problem = like.replace(seq_q=length, seq_k=length)
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


def test_gains_and_charts_equal_brute_force_and_draw_nothing_untimed():
    """Random times, some missing: a gain is of two times of one length, and a mean is over as many as it says."""
    rng = random.Random(4)
    rows = []
    for row in rows_of((512, 1024, 2048)):
        timing = Timing.of([rng.uniform(50, 500)] * 6) if rng.random() < 0.7 else None
        rows.append(replace(row, timing=timing, status="ok" if timing else "out of memory"))
    us = {(row.method, row.problem.seq_q): row.median_us for row in rows}
    names = [*rungs.rungs(), "tiledsched"]
    found = pages.climbed(rows)
    assert [rung.name for rung in found] == names
    for before, rung in zip(["", *names], found, strict=False):
        both = [length for length in (512, 1024, 2048) if us[rung.name, length] and us.get((before, length))]
        assert rung.gains == {length: us[before, length] / us[rung.name, length] for length in both}
        assert rung.gain == (pytest.approx(math.prod(rung.gains.values()) ** (1 / len(both))) if both else None)
    values = pages.rates(found, {})["data"]["values"]
    assert {(value["rung"], value["S"]) for value in values} == {key for key, time in us.items() if time}
    assert sum(time is None for time in us.values()) > 3


def test_nvidias_figures_stand_beside_ours_only_where_the_problem_is_theirs():
    csv_file = Path(__file__).parent.parent / "docs" / "results" / "blackwell" / "figures.csv"
    with csv_file.open(newline="") as file:
        theirs = [
            line
            for line in csv.DictReader(file)
            if line["source"] in ("playbook ladder", "playbook TileGym", "playbook B300")
        ]
    assert sorted((gpu, seq, tflops) for (gpu, seq, _), tflops in rungs.PUBLISHED.items()) == sorted(
        (line["device"], int(line["problem"].split("S=")[1].split()[0]), float(line["value"])) for line in theirs
    )
    problem = Attention.problem(seq_q=2048, seq_k=2048, **rungs.PROBLEM)
    for change in ({"causal": False}, {"batch": 1}, {"dtype": "bfloat16"}, {"seq_q": 512, "seq_k": 512}):
        assert not rungs.published_for(problem.replace(**change))


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 1}, {"seq_k": 300}, {"head_dim": 96}, {"window": 64}, {"softcap": True}]
)
def test_what_the_plain_kernel_has_not_is_told(changes):
    with pytest.raises(UnsupportedError, match="the plain kernel"):
        plain_problem(PROBLEM.replace(**changes))


def test_hints_for_every_arch_can_be_pasted(new_home, capsys):
    """The text is a module by itself, and cuTile takes its hints; a comment of one line says where they come from."""
    words = ["-p", "S=1024:4096,D=128,B=4,H=16,causal=no,dtype=float16"]
    assert main(["study", "ladder", "--targets", *words]) == 0
    said = capsys.readouterr().out
    comments = [line for line in said.splitlines() if line.startswith("#")]
    assert [line.partition(":")[0] for line in comments] == [
        f"# attention B=4 H=16 S={s} D=128 float16" for s in (1024, 4096)
    ]
    assert "measured on NVIDIA H200, 20" in comments[1]
    assert "modelled, not measured (sm_80" in comments[1]
    names = {}
    exec(said, names)
    import cuda.tile as ct

    def halve(X, Out):
        ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (64,)) * 0.5)

    assert names["TILE_M_S4096"]["sm_90"] in (64, 128)
    assert set(names["TILE_M_S4096"]) == set(names["TILE_N_S1024"]) == set(ARCHS)
    options = ct.kernel(**names["HINTS_S4096"])(halve)._compiler_options
    assert isinstance(options.occupancy, ct.ByTarget)
    assert options.opt_level == 3


def test_a_ladder_is_benched_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})  # drawing takes seconds
    problems = [PROBLEM.replace(seq_q=length, seq_k=length) for length in (1024, 4096)]
    how = {"methods": rungs.methods(), "rounds": 6, "harness": Harness(), "pace": QUICK}
    rows = bench_here(Attention, problems, path=tmp_path / "ladder.csv", **how)
    assert [row.method for row in rows] == [*rungs.rungs(), "tiledsched"] * 2
    assert main(["study", "ladder", "--summary", "--out", str(tmp_path), "-p", "B=2,H=3,S=1024,D=64,causal"]) == 0
    assert {"ladder.md", "ladder.html", "by_target.py"} <= {each.name for each in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--summary", "--out", "none"], "holds no ladder"), (["--problem", "S=512,D=96,B=1,H=1"], "a power of two")],
)
def test_wrong_use_is_told(new_home, capsys, words, message):
    assert main(["study", "ladder", *words]) == 2
    assert message in capsys.readouterr().err
