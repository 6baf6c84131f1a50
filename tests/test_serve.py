"""Serving: which schedule a problem gets, and what `sdpa` does with what its kernel cannot serve."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
import served_entries
import store_samples

from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.launches import problem_class
from tiledsched.core.problem import Problem
from tiledsched.core.resources import MAX_SPILL_BYTES
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import known_spills, load_entries
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.db import TuningDB
from tiledsched.store.spills import DOES_NOT_BUILD, classes_of, shipped_spills, spills_json

PROBLEM = Attention.standard(seq_len=1024, head_dim=64)


def schedule(**knobs) -> Schedule:
    return served_entries.default(PROBLEM).replace(**knobs)


def entry(problem: Problem = PROBLEM, provenance: str = "measured", *, knobs=None, **more):
    return served_entries.entry(problem, provenance, **({"schedule": schedule(**(knobs or {}))} | more))


def table_of(entries, **settings) -> LookupTable:
    return LookupTable(entries, Attention, **settings)


def test_this_devices_measurement_comes_first() -> None:
    table = table_of(
        [
            entry(knobs={"tile_m": 128}, device="NVIDIA H100"),
            entry(knobs={"occupancy": 2}),
            entry(provenance="modelled", knobs={"tile_n": 128}),
        ]
    )
    served = table.resolve(PROBLEM, "sm_90", "NVIDIA H200")
    assert served.provenance == "measured"
    assert served.schedule["occupancy"] == 2


def test_an_entry_of_an_earlier_version_is_served_as_the_program_it_was() -> None:
    space = space_for("sm_90", Attention)
    old = {name: value for name, value in schedule(tile_m=128).items() if name not in space.modelled_pins()}
    served = table_of([entry(schedule=Schedule(old | {"persistent": True, "k_load": "permute"}))]).resolve(
        PROBLEM, "sm_90", "NVIDIA H200"
    )
    assert served.provenance == "measured"
    assert served.schedule == schedule(tile_m=128, persistent="strided")


def test_what_this_compiler_cannot_build_is_neither_served_nor_named() -> None:
    """An entry of a compiler that takes more warps serves under that one, or as a bundle's program, where there is no compiler."""
    odd, near = entry(knobs={"num_worker_warps": 16}), PROBLEM.replace(seq_q=1280, seq_k=1280)
    for compiler, served in (("13.4.92", 4), ("13.5.37", 16), ("", 16)):
        table = table_of([odd], compiler=compiler)
        assert [table.resolve(each, "sm_90").schedule["num_worker_warps"] for each in (PROBLEM, near)] == [served] * 2
    plain = entry(runner_up=schedule(num_worker_warps=16), margin=0.0)
    (known,) = table_of([plain], compiler="13.4.92")._index(space_for("sm_90", Attention)).measured
    assert known.runner_up is None


def test_another_device_of_the_arch_is_transferred() -> None:
    table = table_of([entry(knobs={"tile_m": 128}, device="NVIDIA H100")])
    served = table.resolve(PROBLEM, "sm_90", "NVIDIA H200")
    assert served.provenance == "transferred"
    assert "NVIDIA H100" in served.reason
    assert table.resolve(PROBLEM, "sm_90").provenance == "measured"  # asked about the arch, not about a device


def test_the_nearest_problem_serves_an_untuned_one() -> None:
    near, far = PROBLEM.replace(seq_q=2048, seq_k=2048), PROBLEM.replace(seq_q=16384, seq_k=16384)
    table = table_of([entry(far, knobs={"tile_m": 128}), entry(near, knobs={"occupancy": 3})])
    served = table.resolve(PROBLEM.replace(seq_q=1500, seq_k=1500), "sm_90", "NVIDIA H200")
    assert served.provenance == "transferred"
    assert served.schedule["occupancy"] == 3
    assert "nearest problem" in served.reason


def test_only_the_shipped_tables_asked_for_are_read(tmp_path) -> None:
    nowhere = str(tmp_path / "none.db")
    assert {each.arch for each in load_entries(Settings(db=nowhere), {"sm_90", "sm_121"})} == {"sm_90", "sm_121"}
    everywhere = {each.arch for each in load_entries(Settings(db=nowhere))}
    assert everywhere == {path.stem for path in (data_files.tuning_db() / "tables").glob("*/*.json")}


def test_what_was_measured_outside_the_explored_part_is_served() -> None:
    """A list of candidates may leave it; the constraints that say what cannot work still count."""
    knobs = {"q_subtiles": 2, "block_order": "swizzled", "latency_k": 2, "occupancy": 2}
    known, space = entry(knobs=knobs), space_for("sm_90", Attention)
    assert space.violations(known.schedule, PROBLEM)
    assert space.unworkable(known.schedule, PROBLEM) == []
    served = table_of([known]).resolve(PROBLEM, "sm_90", known.device_name)
    assert (served.schedule, served.provenance) == (known.schedule, "measured")
    near = PROBLEM.replace(batch=PROBLEM.batch + 1)
    assert table_of([known]).resolve(near, "sm_90").schedule == known.schedule
    broken = entry(knobs={"loop_split": True})  # for masks
    assert space.unworkable(broken.schedule, PROBLEM)
    assert table_of([broken]).resolve(PROBLEM, "sm_90", broken.device_name).provenance != "measured"


def test_another_kind_is_asked_last() -> None:
    causal, wide = PROBLEM.replace(causal=True), PROBLEM.replace(head_dim=128)
    others = [entry(causal, knobs={"tile_m": 128, "loop_split": True, "num_worker_warps": 8}), entry(wide)]
    served = table_of(others).resolve(PROBLEM, "sm_90")
    assert served.provenance == "transferred"
    assert "another kind" in served.reason
    assert space_for("sm_90", Attention).violations(served.schedule, PROBLEM) == []  # loop_split is for masks
    modelled = entry(provenance="modelled", knobs={"tile_n": 128})
    assert table_of([*others, modelled]).resolve(PROBLEM, "sm_90").schedule == modelled.schedule
    near = entry(PROBLEM.replace(dtype="bfloat16"), knobs={"occupancy": 3})
    assert table_of([*others, modelled, near]).resolve(PROBLEM, "sm_90").schedule == near.schedule
    padded = PROBLEM.replace(head_dim=104)  # padded to 128 inside the kernel: that of other padded ones alone
    assert "another kind" in table_of(others).resolve(padded, "sm_90").reason
    beside = table_of([*others, entry(PROBLEM.replace(head_dim=96), knobs={"occupancy": 3})]).resolve(padded, "sm_90")
    assert "another kind" not in beside.reason
    assert beside.schedule["occupancy"] == 3


def test_a_near_measurement_beats_the_model_and_the_model_beats_a_far_one_and_the_default() -> None:
    modelled = entry(provenance="modelled", knobs={"tile_n": 128})
    assert table_of([modelled]).resolve(PROBLEM, "sm_90").provenance == "modelled"
    near, far = PROBLEM.replace(dtype="bfloat16"), PROBLEM.replace(seq_q=16384, seq_k=16384)
    assert table_of([modelled, entry(near, knobs={"tile_m": 128})]).resolve(PROBLEM, "sm_90").schedule["tile_m"] == 128
    assert table_of([modelled, entry(far, knobs={"tile_m": 128})]).resolve(PROBLEM, "sm_90").provenance == "modelled"
    assert table_of([entry(far, knobs={"tile_m": 128})]).resolve(PROBLEM, "sm_90").schedule["tile_m"] == 128
    served = table_of([]).resolve(PROBLEM, "sm_90")
    assert (served.provenance, served.schedule) == ("default", space_for("sm_90", Attention).default(PROBLEM))


def test_a_schedule_that_is_not_valid_for_the_problem_is_not_served() -> None:
    ragged = PROBLEM.replace(seq_k=1000)
    table = table_of([entry(ragged, knobs={"loop_split": True})])
    assert table.resolve(ragged, "sm_90").schedule["loop_split"] is True
    assert table.resolve(PROBLEM, "sm_90").schedule["loop_split"] is False  # repaired


def test_accuracy_classes_and_regimes_are_apart() -> None:
    fp16 = entry(accum_mode="fp16", knobs={"accum_mode": "fp16"})
    hot = entry(regime="sustained", knobs={"occupancy": 3})
    assert table_of([fp16]).resolve(PROBLEM, "sm_90").provenance == "default"
    assert table_of([fp16], accum_mode="fp16").resolve(PROBLEM, "sm_90").schedule["accum_mode"] == "fp16"
    assert table_of([], accum_mode="fp16").resolve(PROBLEM, "sm_90").schedule["accum_mode"] == "fp16"
    bfloat16 = PROBLEM.replace(dtype="bfloat16")  # has no fp16 accumulators
    assert table_of([], accum_mode="fp16").resolve(bfloat16, "sm_90").schedule["accum_mode"] == "fp32"
    assert table_of([hot], regime="sustained").resolve(PROBLEM, "sm_90").schedule["occupancy"] == 3


def test_a_regime_or_class_that_was_not_tried_is_served_as_the_nearest_that_was() -> None:
    cool, hot = entry(knobs={"occupancy": 2}), entry(regime="sustained", knobs={"occupancy": 3})
    for regime, occupancy in (("burst", 2), ("sustained", 3)):
        served = table_of([hot, cool], regime=regime).resolve(PROBLEM, "sm_90", "NVIDIA H200")
        assert (served.provenance, served.schedule["occupancy"]) == ("measured", occupancy)
        assert served.reason == "this problem was measured on this device"
    served = table_of([cool], regime="sustained").resolve(PROBLEM, "sm_90", "NVIDIA H200")
    assert served.reason.endswith("on this device, in the burst regime; nothing was in the sustained one")
    assert served.schedule == cool.schedule
    served = table_of([cool], accum_mode="fp16").resolve(PROBLEM, "sm_90", "NVIDIA H200")
    assert served.reason.endswith("with fp32 accumulators; nothing was with fp16 ones")
    assert served.schedule["accum_mode"] == "fp32"
    near = PROBLEM.replace(seq_q=2048, seq_k=2048)
    served = table_of([cool], regime="sustained").resolve(near, "sm_90", "NVIDIA H200")
    assert served.provenance == "transferred"
    assert "in the burst regime" in served.reason
    guess = entry(provenance="modelled", accum_mode="fp32")  # what no device measured stands for nothing else
    assert table_of([guess], accum_mode="fp16").resolve(PROBLEM, "sm_90").provenance == "default"


def test_forced_knobs_win_and_say_so() -> None:
    served = table_of([entry()], forced={"tile_m": 128, "num_worker_warps": 8}).resolve(PROBLEM, "sm_90", "NVIDIA H200")
    assert served.provenance == "forced"
    assert (served.schedule["tile_m"], served.schedule["num_worker_warps"]) == (128, 8)
    assert "measured on this device" in served.reason
    with pytest.raises(ConfigError, match="cannot work"):
        table_of([], forced={"loop_split": True}).resolve(PROBLEM, "sm_90")


def test_forced_knobs_that_do_not_go_with_what_is_tuned_go_with_the_default() -> None:
    tuned = entry(knobs={"tile_m": 64, "tile_n": 128, "kv_subtiles": 2, "num_worker_warps": 4, "occupancy": 3})
    served = table_of([tuned], forced={"tile_m": 128, "tile_n": 64}).resolve(PROBLEM, "sm_90", "NVIDIA H200")
    assert served.schedule == schedule(tile_m=128, tile_n=64)
    assert "the rest is the default's" in served.reason


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ({"tile_m": 48}, "tile_m = 48; sides of tiles are powers of two, such as"),
        ({"num_worker_warps": 3}, "num_worker_warps = 3 is no such hint; compilers take 0, 1, 2, 4, 8, 16, 32"),
        ({"occupancy": -1}, "occupancy = -1 is no such hint"),
        ({"accum_mode": "fp8"}, "allowed on sm_90: ['fp32', 'fp16']"),
    ],
)
def test_forced_knobs_that_no_program_can_have_are_refused(forced, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        table_of([entry()], forced=forced).resolve(PROBLEM, "sm_90")


def test_explain_says_whose_evidence_stands_under_a_forced_schedule() -> None:
    told = str(explain_problem(table_of([entry()], forced={"tile_m": 32}), PROBLEM, "sm_90", "NVIDIA H200"))
    assert f"evidence is for {PROBLEM}, schedule {entry().schedule.short()}:" in told
    assert "evidence is for" not in str(explain_problem(table_of([entry()]), PROBLEM, "sm_90", "NVIDIA H200"))


def test_explain_tells_evidence_and_marks_the_model() -> None:
    measured = explain_problem(
        table_of([entry(margin=0.02, runner_up=schedule(tile_n=32))]), PROBLEM, "sm_90", "NVIDIA H200"
    )
    assert "300.0 us" in str(measured)
    assert "2.0% slower" in str(measured)
    assert measured.to_json()["median_us"] == 300.0
    modelled = explain_problem(table_of([entry(provenance="modelled")]), PROBLEM, "sm_90")
    assert "nothing was measured" in str(modelled)
    assert modelled.to_json()["median_us"] is None


def test_what_the_model_chose_gives_way_to_its_runner_up_and_then_to_what_it_chose_nearby() -> None:
    """Where the program of the first choice spills registers, as another compiler may make it."""
    second, third, fourth = schedule(tile_n=32), schedule(occupancy=2), schedule(occupancy=3)
    near, far = (PROBLEM.replace(seq_q=rows, seq_k=rows) for rows in (2048, 8192))
    others = [entry(far, "modelled", knobs={"occupancy": 3}), entry(near, "modelled", knobs={"occupancy": 2})]
    masked = entry(PROBLEM.replace(causal=True), "modelled", knobs={"tile_m": 32})
    for problem in (PROBLEM, PROBLEM.replace(seq_q=1025, seq_k=1025)):
        table = table_of([masked, *others, entry(provenance="modelled", runner_up=second)])
        served = table.resolve(problem, "sm_90", "NVIDIA H200")
        assert (served.provenance, served.schedule) == ("modelled", schedule())
        assert served.alternatives == (second, third)
        following = table.fallback_for(table.fallback_for(served, problem, "sm_90"), problem, "sm_90")
        assert (following.schedule, following.provenance, following.alternatives) == (third, "modelled", ())
    alone = table_of([*others[:1], entry(provenance="modelled")]).resolve(PROBLEM, "sm_90")
    assert alone.alternatives == (fourth,)
    assert table_of([entry(provenance="modelled")]).resolve(PROBLEM, "sm_90").alternatives == ()
    assert table_of([entry(runner_up=second, margin=0.1)]).resolve(PROBLEM, "sm_90").alternatives == ()  # measured


def class_of(problem: Problem, chosen: Schedule) -> str:
    return problem_class(Attention, problem, chosen, arch_spec("sm_90")).id


def test_a_choice_that_is_known_to_spill_is_passed_over() -> None:
    """For every problem of the class, offline and at a launch alike; what was measured is served whatever it spills."""
    first, second, third = schedule(), schedule(tile_n=32), schedule(occupancy=2)
    near, ragged = PROBLEM.replace(seq_q=2048, seq_k=2048), PROBLEM.replace(seq_q=1025, seq_k=1025)
    entries = [entry(near, "modelled", knobs={"occupancy": 2}), entry(provenance="modelled", runner_up=second)]
    about = Attention.similarity.bucketed(ragged)

    def served(problem, spills, of=entries):
        return table_of(of, spills=lambda arch: spills if arch == "sm_90" else {}).resolve(problem, "sm_90")

    one = {first.id: {class_of(PROBLEM, first): 416}}
    found = served(PROBLEM, one)
    assert (found.schedule, found.alternatives, found.provenance) == (second, (third,), "modelled")
    assert f"{first.short()} spills 416 bytes of registers a thread, so that the next one is served" in found.reason
    assert served(PROBLEM.replace(batch=3, seq_q=512, seq_k=512), one).schedule == second
    assert served(ragged, one).schedule == first  # whose machine code is another: it cares for the last keys
    assert served(ragged, {first.id: {class_of(about, first): 416}}).schedule == second
    two = one | {second.id: {class_of(PROBLEM, second): DOES_NOT_BUILD}}
    found = served(PROBLEM, two)
    assert (found.schedule, found.alternatives) == (third, ())
    assert f"{second.short()} does not build, so that" in found.reason
    alike = {first.id: {classes_of(PROBLEM, first, "sm_90")[0]: 416}}
    for same in (PROBLEM, PROBLEM.replace(dtype="bfloat16"), PROBLEM.replace(kv_heads=8)):
        assert served(same, alike).schedule == second  # what decides whether a program spills is equal
    assert served(PROBLEM.replace(softcap=True), alike).schedule == first
    least = two | {third.id: {class_of(PROBLEM, third): 500}}
    assert served(PROBLEM, least).schedule == first  # which spills least
    assert served(PROBLEM, one, [entry(runner_up=second, margin=0.0)]).schedule == first


def test_spills_are_those_of_the_nearest_compiler_and_of_the_users_builds(tmp_path, monkeypatch) -> None:
    nowhere = Settings(db=str(tmp_path / "none.db"))
    files = {"spills.json": spills_json({"sm_90": {"13.4.92": {"a": {"c": 64}}, "13.5.37": {"b": {"c": 80}}}})}
    monkeypatch.setattr("tiledsched.store.spills.model_file", lambda kernel, name: files.get(name))
    for version, known in (("13.4.1", {"a": {"c": 64}}), ("13.5.37", {"b": {"c": 80}}), ("", {"b": {"c": 80}})):
        assert shipped_spills("attention", "sm_90", version) == known
    assert shipped_spills("attention", "sm_80", "13.5.37") == {}
    monkeypatch.setattr("tiledsched.serve.entries.compiler_at_hand", lambda: store_samples.TOOLCHAIN.tileiras)
    shipped = known_spills(Attention, nowhere, "sm_90")
    assert shipped == {"a": {"c": 64}}
    killed = Failure(kind=FailureKind.COMPILER_KILLED, message="of the day")
    with TuningDB.open(str(tmp_path / "x.db")) as db:
        for occupancy, outcome in enumerate((MAX_SPILL_BYTES, MAX_SPILL_BYTES + 8, store_samples.FAILURE, killed)):
            if isinstance(outcome, int):
                made = store_samples.artifact(f"{occupancy:024}")
                outcome = replace(made, facts=replace(made.facts, spill_bytes=outcome))
            sched = schedule(occupancy=occupancy)
            db.record_build(store_samples.build(outcome, sched=sched, source_hash=Attention.source_hash()))
            db.record_build(store_samples.build(outcome, sched=sched, source_hash="another"))
    of = store_samples.problem_class().id
    assert known_spills(Attention, Settings(db=str(tmp_path / "x.db")), "sm_90") == {
        **shipped,
        schedule(occupancy=1).id: {of: MAX_SPILL_BYTES + 8},
        schedule(occupancy=2).id: {of: DOES_NOT_BUILD},
    }


def test_a_choice_does_not_depend_on_what_was_asked_before(monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.serve.lookup.MAX_ANSWERS", 7)
    entries = [
        entry(PROBLEM.replace(seq_q=rows, seq_k=rows), knobs={"occupancy": 1 + rows % 3}) for rows in (512, 1000, 4096)
    ]
    problems = [PROBLEM.replace(seq_q=rows, seq_k=rows, batch=rows % 3 + 1) for rows in range(70, 5000, 97)]
    spills = {schedule(occupancy=2).id: {class_of(PROBLEM, schedule(occupancy=2)): 64}}
    first, second = (table_of(entries, spills=lambda arch: spills) for _ in range(2))
    forward = [first.resolve(each, "sm_90").schedule for each in problems]
    backward = [second.resolve(each, "sm_90").schedule for each in [*problems[::3], *reversed(problems)]]
    assert forward == backward[: -len(problems) - 1 : -1]


def test_what_was_measured_in_a_bucket_serves_the_problems_of_the_bucket() -> None:
    """With its rivals by its own evidence; a round length is a bucket of its own."""
    about = Attention.similarity.bucketed(PROBLEM.replace(seq_q=1500, seq_k=1500))
    rivals = (replace(store_samples.RIVALS[0], name="torch_flash", host_us=9.0),)
    table = table_of([entry(about, knobs={"occupancy": 3}, rivals=rivals), entry(knobs={"occupancy": 2})], rivals=True)
    for length in (1501, 1523):
        served = table.resolve(PROBLEM.replace(seq_q=length, seq_k=length), "sm_90", "NVIDIA H200")
        assert (served.provenance, served.schedule["occupancy"], served.entry.problem) == ("transferred", 3, about)
        assert "which is of about this size, was measured on NVIDIA H200" in served.reason
        assert [offer.name for offer in served.rivals] == ["torch_flash"]
        assert served.expected_loss is not None
    assert "nearest problem" in table.resolve(PROBLEM.replace(seq_q=1504, seq_k=1504), "sm_90").reason
    other = table_of([entry(PROBLEM.replace(seq_q=1501, seq_k=1501), knobs={"occupancy": 3})])
    assert other.resolve(PROBLEM.replace(seq_q=1502, seq_k=1502), "sm_90").schedule["occupancy"] == 3


def test_explain_says_what_a_transfer_may_lose() -> None:
    near = PROBLEM.replace(seq_q=2048, seq_k=2048)
    told = explain_problem(table_of([entry(near, knobs={"occupancy": 3})]), PROBLEM, "sm_90", "NVIDIA H200")
    loss = told.served.expected_loss
    assert 0.0 < loss.mean < loss.worst < 0.2
    assert f"{loss.mean:.1%} slower than the best schedule, at worst {loss.worst:.1%}" in str(told)
    assert f"evidence is for {near}" in str(told)
    assert told.to_json()["expected_loss"]["worst"] == loss.worst
    two = entry(near, knobs={"occupancy": 3}, runner_up=schedule(tile_n=32), margin=0.02)
    twofold = explain_problem(table_of([two]), PROBLEM, "sm_90", "NVIDIA H200")
    assert len(twofold.to_json()["alternatives"]) == 1
    measured = explain_problem(table_of([entry()]), PROBLEM, "sm_90", "NVIDIA H200")
    assert measured.to_json()["expected_loss"] is None
    assert "expected" not in str(measured)


def test_explain_says_which_settings_won() -> None:
    sources = {"tile_m": "TILEDSCHED_TILE_M", "regime": "tiledsched.toml"}
    explanation = explain_problem(table_of([], forced={"tile_m": 128}), PROBLEM, "sm_90", controls=sources)
    assert "settings    tile_m from TILEDSCHED_TILE_M, regime from tiledsched.toml" in str(explanation)
    assert explanation.to_json()["controls"] == sources


class Counting(LookupTable):
    """A table that notes which problems it looks up among others."""

    def __init__(self, entries) -> None:
        super().__init__(entries, Attention)
        self.looked_up: list = []

    def _from_others(self, problem, space):
        self.looked_up.append(problem.seq_k)
        return super()._from_others(problem, space)


def test_lengths_that_are_near_share_an_answer() -> None:
    table = Counting([entry()])
    answers = [table.resolve(PROBLEM.replace(seq_q=s, seq_k=s), "sm_90") for s in (1921, 1950, 2047)]
    assert len(table.looked_up) == 1
    assert all(answer is answers[0] for answer in answers)
    round_one = table.resolve(PROBLEM.replace(seq_q=2048, seq_k=2048), "sm_90")
    assert table.looked_up[1:] == [2048]  # round lengths are looked up for themselves
    assert round_one.provenance == "transferred"
    assert table.resolve(PROBLEM, "sm_90", "NVIDIA H200").provenance == "measured"


def test_a_model_that_decodes_stops_for_an_answer_at_few_lengths() -> None:
    table, row = Counting([entry()]), PROBLEM.replace(seq_q=1, causal=False)
    for keys in range(2049, 2305):
        table.resolve(row.replace(seq_k=keys), "sm_90")
    assert table.looked_up == [2303, 2304]


@pytest.mark.parametrize("seq_k", [1001, 1002, 1008, 1024, 1056, 5000])
def test_a_shared_answer_is_valid_for_the_problem(seq_k) -> None:
    problem = PROBLEM.replace(seq_q=seq_k, seq_k=seq_k)
    even = entry(problem.replace(seq_q=2048, seq_k=2048), knobs={"check_bounds": False})
    for table in (table_of([even]), table_of([])):
        served = table.resolve(problem, "sm_90", "NVIDIA H200")
        assert space_for("sm_90", Attention).violations(served.schedule, problem) == []


def test_lookup_of_a_large_table_is_quick() -> None:
    entries = [entry(PROBLEM.replace(seq_q=s, seq_k=s, batch=b)) for s in range(128, 4224, 128) for b in range(1, 17)]
    table = table_of(entries)
    started = time.process_time()
    table.resolve(PROBLEM.replace(seq_q=777, seq_k=777), "sm_90")
    assert time.process_time() - started < 1.0


# sdpa without a GPU


def test_cpu_tensors_go_to_torch_with_one_warning(fresh) -> None:
    torch = pytest.importorskip("torch")
    from tiledsched.ops.sdpa import sdpa

    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    with pytest.warns(UserWarning, match="q is on cpu") as warned:
        out, _ = [sdpa(q, k, v, causal=True) for _ in range(2)]
    assert [each.filename for each in warned] == [__file__]
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_sdpa_is_public_and_lazy() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tiledsched; assert 'torch' not in sys.modules and 'cuda.tile' not in sys.modules; tiledsched.sdpa; "
        "assert 'torch._dynamo' not in sys.modules"  # which takes longer than all else
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
