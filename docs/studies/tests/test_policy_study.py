"""The study of the serving policy: what it loses on problems held out, and the losses that ship."""

from __future__ import annotations

import argparse
import json
import lzma

import pytest

from docs.studies import scope
from docs.studies.landscapes import read_landscape
from docs.studies.policy import Study, summary
from docs.studies.policy_losses import all_bands, to_json
from docs.studies.policy_timed import (
    ALIKE,
    COLUMNS,
    Row,
    chosen,
    different,
    numbers_of,
    policy_of,
    problems_of,
    read,
    summary as timed_summary,
    tables_of,
    timed,
)
from tiledsched.core import data_files
from tiledsched.core.files import csv_text
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.rivals.rows import BenchRow
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries
from tiledsched.serve.transfer import NEAR_KIND, TransferParameters
from tiledsched.store.exchange import read_table

PROBLEM = Attention.standard(seq_len=2048, head_dim=64)
RESULTS = data_files.tuning_db().parent / "docs" / "results"
TABLE = RESULTS / "serving" / "sm_90_2026-11-20.json.xz"
"""The table as old as the landscapes: what is younger cannot be looked up in them."""


@pytest.fixture(scope="module")
def study():
    root = data_files.tuning_db()
    landscapes = [
        read_landscape(path) for path in sorted((root / "landscapes" / "attention").glob("h200_burst_*.json.xz"))
    ]
    return Study(landscapes, read_table(TABLE).entries)


def test_held_out_problems_lose_little_on_average(study) -> None:
    one_out, likes_out = study.run(study.policy()), study.run(study.policy(), likes_out=True)
    assert len(one_out) == len(likes_out) == 18
    assert summary(one_out).mean < 0.025
    assert summary([one for one in one_out if one.measured]).mean < 0.025
    assert summary(likes_out).mean < 0.025
    nearest = study.run(study.policies()["winner of the nearest problem"], likes_out=True)
    assert summary(likes_out).mean < summary(nearest).mean
    assert summary(likes_out).worst < summary(nearest).worst


def test_from_one_tuned_problem_alone_the_model_is_better_beyond_its_neighbourhood(study) -> None:
    two = [each for each in study.landscapes if each.problem.tile_d == 128 and not each.problem.causal][:2]
    found = scope.pairs(Study(two, study.entries))
    assert [far.distance for far, _ in found] == [6.5, 6.5]
    assert all(far.loss > near.loss + 0.3 for far, near in found)
    assert "|all,asserved|2|" in scope.document(Study(two, study.entries)).replace(" ", "")


def test_a_held_out_problem_is_not_seen(study) -> None:
    problem = study.landscapes[0].problem
    seen = []
    study.run(lambda asked, entries: seen.append((asked, [e.problem for e in entries])))
    assert dict(seen).keys() == {one.problem for one in study.landscapes}
    assert all(asked not in entries for asked, entries in seen)
    likes = []
    study.run(lambda asked, entries: likes.append((asked, [e.problem for e in entries])), likes_out=True)
    assert problem.seq_k not in {
        e.seq_k for e in dict(likes)[problem] if (e.head_dim, e.causal) == (64, problem.causal)
    } or (problem.head_dim != 64)


def test_a_choice_is_looked_up_by_its_program(study) -> None:
    landscape = study.landscapes[0]
    program = min((p for p in landscape.programs if p.checked), key=lambda p: p.median_us)
    found = study.judge(landscape, program.schedule, 0.0)
    assert (found.loss, found.measured) == (0.0, True)
    unknown = study.judge(landscape, program.schedule.replace(kv_splits=32), 0.0)
    assert not unknown.measured
    assert unknown.loss == 0.0  # one knob away is this program alone


@pytest.mark.slow
def test_the_losses_that_ship_are_those_of_the_study() -> None:
    root = data_files.tuning_db()
    fresh, unknown = all_bands(
        root / "tables" / "attention" / "sm_90.json",
        sorted((root / "landscapes" / "attention").glob("h200_burst_*.json.xz")),
        [RESULTS / "h200" / name for name in ("coverage_tuned.csv.xz", "asked_tuned.csv.xz", "both_regimes.csv.xz")],
        [RESULTS / "h200" / "left_out.csv"],
    )
    assert json.loads(to_json(fresh)) == json.loads((root / "model" / "attention" / "transfer.json").read_text())
    assert unknown > 0


# The policy on a GPU


BEFORE = TransferParameters(distances=4, reach=0.3, model=0.3)


@pytest.fixture(scope="module")
def entries():
    return load_entries(process.settings(), {"sm_90"}, Attention.name)


def row(problem, policy, median_us, **more):
    return Row(problem=problem, policy=policy, choice="64x64", timing=Timing.of([median_us] * 6), status="ok", **more)


def test_a_policy_is_what_is_served_with_some_numbers_changed() -> None:
    assert policy_of("distances=4,reach=0.3,model=0.3") == BEFORE
    assert type(policy_of("distances=4").distances) is int
    assert numbers_of(BEFORE) == "neighbours=4 distances=4 reach=0.3 unnamed=0.05 model=0.3"
    for wrong in ("size=4", "model", "distances=four"):
        with pytest.raises(argparse.ArgumentTypeError, match="names are neighbours, distances, reach, unnamed, model"):
            policy_of(wrong)


def test_policies_choose_differently_and_each_choice_is_timed_once(entries) -> None:
    tables = tables_of([BEFORE], entries)
    assert list(tables) == [NEAR_KIND, BEFORE]
    work = {each: chosen(each, tables, "sm_90") for each in problems_of([101], entries)}
    apart = [problem for problem, choices in work.items() if len(different(choices)) == 2]
    assert 0 < len(apart) < len(work)
    asked = []

    def bench(problems, options, harness):
        asked.append(problems[0])
        return [
            BenchRow(
                problem=problems[0],
                regime="burst",
                method=method.name,
                timing=Timing(median_us=10.0 + place, ci_low_us=9.0, ci_high_us=21.0),
                status="ok",
            )
            for place, method in enumerate(options.methods)
        ]

    harness = argparse.Namespace(device="made up", versions="none")
    rows = [each for found in timed(work, harness, bench) for each in found]
    assert asked == apart
    assert len(rows) == 2 * len(work)
    assert {each.status for each in rows[: -2 * len(apart)]} == {ALIKE}
    for one, other in zip(rows[-2 * len(apart) :: 2], rows[-2 * len(apart) + 1 :: 2], strict=True):
        assert (one.timing.median_us, other.timing.median_us, one.policy) == (10.0, 11.0, numbers_of(NEAR_KIND))
        assert one.choice != other.choice


def test_a_summary_compares_what_all_policies_have(tmp_path) -> None:
    rows = [
        row("a", "x", 10.0),
        row("a", "y", 8.0),
        row("b", "x", 10.0),
        row("b", "y", 10.5),
        row("c", "x", 10.0),
        Row(problem="c", policy="y", choice="64x64", status="it failed"),
        *(Row(problem="d", policy=each, choice="64x64") for each in "xy"),
    ]
    path = tmp_path / "rows.csv.xz"
    with lzma.open(path, "wt", newline="") as file:
        file.write(csv_text([each.to_csv() for each in rows], COLUMNS))
    assert read(path) == rows
    said = timed_summary(rows)
    assert "| x | 1.0000x | 1.1180x | 1 | 1 | 1.25x |" in said
    assert "| y | 0.9165x | 1.0247x | 0 | 0 | 1.05x |" in said
    assert said.endswith("4 problems, in 3 of which choices differ; 2 are timed in all.\n")
