"""The study of the serving policy: what it loses on problems held out, and the losses that ship."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import store_samples as samples

from docs.studies import scope
from docs.studies.landscapes import read_landscape
from docs.studies.policy import Judged, Study, summary
from docs.studies.policy_losses import FAR, FEWEST, all_bands, bench_races, judged, medians, near_bands, to_json
from tiledsched.bench.rows import BenchRow, append_rows
from tiledsched.core import data_files
from tiledsched.core.resources import MAX_SPILL_BYTES
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.store.exchange import read_table

PROBLEM = Attention.standard(seq_len=2048, head_dim=64)
RESULTS = data_files.tuning_db().parent / "docs" / "results"
TABLE = RESULTS / "serving" / "sm_90_2026-11-20.json.xz"
"""The table as old as the landscapes: what is younger cannot be looked up in them."""


def schedule(**knobs):
    return space_for("sm_90", Attention).default(PROBLEM).replace(**knobs)


def entry(problem, chosen):
    return samples.entry(
        "measured", problem=problem, schedule=chosen, regime="burst", measurement=samples.stored().summary
    )


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


def test_what_a_call_refuses_is_no_choice(tmp_path) -> None:
    """A program that spills more than a call takes is not served, whatever it took."""
    rows = "".join(
        f"{PROBLEM},{name},1,{spills}\n"
        for name, spills in (("a", ""), ("b", MAX_SPILL_BYTES), ("c", MAX_SPILL_BYTES + 8))
    )
    (tmp_path / "m.csv").write_text(f"problem,schedule,median_us,spill_bytes\n{rows}")
    assert medians(tmp_path / "m.csv") == [(str(PROBLEM), {"a": 1.0, "b": 1.0})]


def test_far_choices_promise_nothing() -> None:
    choices = [
        Judged(problem=PROBLEM, schedule=schedule(), loss=0.1, measured=True, distance=FAR) for _ in range(FEWEST)
    ]
    assert [band.up_to for band in near_bands(choices)] == [FAR]
    assert near_bands([replace(each, distance=FAR + 0.1) for each in choices]) == []


def test_a_choice_loses_what_the_race_says(tmp_path) -> None:
    """The problem's own entry is hidden; a choice that was not in the race is counted."""
    here, there = entry(PROBLEM, schedule(occupancy=3)), entry(PROBLEM.replace(dtype="bfloat16"), schedule(occupancy=2))
    chosen = there.schedule.short()
    (tmp_path / "m.csv").write_text(f"problem,schedule,median_us\n{PROBLEM},{chosen},110\n{PROBLEM},other,100\n")
    ((words, race),) = medians(tmp_path / "m.csv")
    assert words == str(PROBLEM)
    (seen,), unknown = judged([here, there], {PROBLEM: [race]})
    assert (seen.schedule, seen.loss) == (there.schedule, pytest.approx(0.1))
    assert unknown == 0  # with all of its shape hidden, nothing is chosen
    assert judged([here, there], {PROBLEM: [{"other": 1.0}]}) == ([], 1)


def test_medians_of_each_run_are_a_race_and_those_at_the_power_cap_none(tmp_path) -> None:
    rows = ("a,10,burst,1", "b,11,burst,1", "a,7,sustained,1", "a,12,burst,2")
    (tmp_path / "m.csv").write_text("problem,schedule,median_us,regime,run\n" + "\n".join(f"P,{row}" for row in rows))
    assert medians(tmp_path / "m.csv") == [("P", {"a": 10.0, "b": 11.0}), ("P", {"a": 12.0})]


def test_what_a_rival_took_is_no_loss_of_ours(tmp_path) -> None:
    def rows(provenance, schedule) -> list[BenchRow]:
        common = {"problem": PROBLEM, "regime": "burst", "status": "ok"}
        return [
            BenchRow(method="tiledsched", provenance="measured", schedule="a", timing=Timing.of([1.0] * 6), **common),
            BenchRow(
                method="left_out", provenance=provenance, schedule=schedule, timing=Timing.of([2.0] * 6), **common
            ),
        ]

    append_rows(rows("rival", "torch_cudnn"), tmp_path / "rival.csv")
    assert bench_races(tmp_path / "rival.csv") == []
    append_rows(rows("transferred", "b"), tmp_path / "own.csv")
    assert bench_races(tmp_path / "own.csv") == [(str(PROBLEM), {"a": 1.0, "b": 2.0})]
