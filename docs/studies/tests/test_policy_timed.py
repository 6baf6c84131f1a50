"""Policies timed beside each other: which problems and choices, how they are timed, and what is made of the rows; no GPU."""

from __future__ import annotations

import argparse
import lzma

import pytest

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
    summary,
    tables_of,
    timed,
)
from tiledsched.core.files import csv_text
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.rivals.rows import BenchRow
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries
from tiledsched.serve.transfer import NEAR_KIND, TransferParameters

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
    said = summary(rows)
    assert "| x | 1.0000x | 1.1180x | 1 | 1 | 1.25x |" in said
    assert "| y | 0.9165x | 1.0247x | 0 | 0 | 1.05x |" in said
    assert said.endswith("4 problems, in 3 of which choices differ; 2 are timed in all.\n")
