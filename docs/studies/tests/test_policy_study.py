"""The study of the serving policy: what it loses on problems held out, and the losses that ship."""

from __future__ import annotations

import json

import pytest

from docs.studies import scope
from docs.studies.landscapes import read_landscape
from docs.studies.policy import Study, summary
from docs.studies.policy_losses import all_bands, to_json
from tiledsched.core import data_files
from tiledsched.kernels.attention import Attention
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
