"""Which schedule a problem gets, and why; no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import store_samples
from served_entries import SPACE, default, entry

from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.core.device import MAX_SPILL_BYTES, arch_spec
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.launches import problem_class
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve import chain
from tiledsched.serve.entries import known_spills, load_entries
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import log_us
from tiledsched.store.db import TuningDB
from tiledsched.store.spills import DOES_NOT_BUILD, classes_of, shipped_spills

PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
H200 = "NVIDIA H200"


def schedule(**knobs) -> Schedule:
    return default(PROBLEM).replace(**knobs)


def known(problem: Problem = PROBLEM, provenance: str = "measured", *, of=None, **knobs):
    """An entry whose schedule is the default of `PROBLEM` with some knobs; `of` are other fields of it."""
    return entry(problem, provenance, **({"schedule": schedule(**knobs)} | (of or {})))


def table_of(entries, **options) -> LookupTable:
    return LookupTable(entries, Attention, **options)


def long(rows: int, **more) -> Problem:
    return PROBLEM.replace(seq_q=rows, seq_k=rows, **more)


MODEL, CAUSAL, WIDE = known(provenance="modelled", tile_n=128), PROBLEM.replace(causal=True), long(1024, head_dim=128)
OTHERS = [known(CAUSAL, tile_m=128, loop_split=True, num_worker_warps=8), known(WIDE)]
NEAR, FAR = known(PROBLEM.replace(dtype="bfloat16"), occupancy=3), known(long(16384), occupancy=3)
COOL, HOT = known(occupancy=2), known(of={"regime": "sustained"}, occupancy=3)
HALF, PADDED = known(of={"accum_mode": "fp16"}, accum_mode="fp16"), PROBLEM.replace(head_dim=104)
OLD = {name: value for name, value in schedule(tile_m=128).items() if name not in SPACE.modelled_pins()}
OUTSIDE = {"q_subtiles": 2, "block_order": "swizzled", "latency_k": 2, "occupancy": 2}
"""Knobs that no search explores together, and that work."""
ODD = known(num_worker_warps=16)
"""What the compiler 13.4 cannot build."""
HERE, ON_DEVICE = "this problem was measured on this device", {"device": H200}
SERVED = {
    "this device's measurement comes first": (
        [known(tile_m=128, of={"device": "NVIDIA H100"}), known(occupancy=2), MODEL],
        ON_DEVICE,
        ("measured", "Exact", {"occupancy": 2}, f"^{HERE}$"),
    ),
    "another device of the arch": (
        [known(of={"device": "NVIDIA H100"})],
        ON_DEVICE,
        ("transferred", "Exact", {}, "^this problem was measured on NVIDIA H100$"),
    ),
    "no device": ([known(of={"device": "NVIDIA H100"})], {}, ("measured", "Exact", {}, "measured on NVIDIA H100$")),
    "an entry of an earlier version is the program it was": (
        [known(of={"schedule": Schedule(OLD | {"persistent": True, "k_load": "permute"})})],
        ON_DEVICE,
        ("measured", "Exact", schedule(tile_m=128, persistent="strided"), ""),
    ),
    "this compiler cannot build it": (
        [ODD],
        {"compiler": "13.4.92"},
        ("default", "Default", {"num_worker_warps": 4}, ""),
    ),
    "this compiler can": ([ODD], {"compiler": "13.5.37"}, ("transferred", "Neighbours", {"num_worker_warps": 16}, "")),
    "without a compiler a bundle may hold it": ([ODD], {}, ("transferred", "Neighbours", {"num_worker_warps": 16}, "")),
    "nor a neighbour": (
        [ODD],
        {"compiler": "13.4.92", "problem": long(1280)},
        ("default", "Default", {"num_worker_warps": 4}, ""),
    ),
    "the nearest problem": (
        [known(long(16384), tile_m=128), known(long(2048), occupancy=3)],
        {"problem": long(1500)},
        ("transferred", "Neighbours", {"occupancy": 3}, "^the nearest problem is .*S=2048"),
    ),
    "outside the explored part": ([known(**OUTSIDE)], ON_DEVICE, ("measured", "Exact", OUTSIDE, "")),
    "outside the explored part, nearby": (
        [known(**OUTSIDE)],
        {"problem": PROBLEM.replace(batch=5)},
        ("transferred", "Neighbours", OUTSIDE, ""),
    ),
    "what cannot work is repaired": (
        [known(loop_split=True)],
        ON_DEVICE,
        (
            "transferred",
            "Neighbours",
            {"loop_split": False},
            "^this problem was measured on NVIDIA H200, and its winner is",
        ),
    ),
    "what works there": (
        [known(long(1000), loop_split=True)],
        {"problem": long(1000)},
        ("measured", "Exact", {"loop_split": True}, ""),
    ),
    "and does not here": (
        [known(long(1000), loop_split=True)],
        {},
        ("transferred", "Neighbours", {"loop_split": False}, ""),
    ),
    "another kind comes last": (OTHERS, {}, ("transferred", "OtherKinds", {"loop_split": False}, "of another kind")),
    "the model knows better": (
        [*OTHERS, MODEL],
        {},
        ("modelled", "Modelled", MODEL.schedule, "^nothing was measured; the entry for this problem"),
    ),
    "the model's choice for a length that shares answers": (
        [known(long(1000), "modelled"), known(long(1023), "modelled", tile_n=128)],
        {"problem": long(1000)},
        ("modelled", "Modelled", {"tile_n": 64}, "the entry for this problem is the model's choice$"),
    ),
    "and for one without an entry": (
        [known(long(1023), "modelled", tile_n=128)],
        {"problem": long(1000)},
        ("modelled", "Modelled", {"tile_n": 128}, r"the nearest problem \(.*S=1023.*\) is the model's choice$"),
    ),
    "its own kind better still": ([*OTHERS, MODEL, NEAR], {}, ("transferred", "Neighbours", NEAR.schedule, "")),
    "padded heads are a kind": (OTHERS, {"problem": PADDED}, ("transferred", "OtherKinds", {}, "of another kind")),
    "padded heads": (
        [*OTHERS, known(PROBLEM.replace(head_dim=96), occupancy=3)],
        {"problem": PADDED},
        ("transferred", "Neighbours", {"occupancy": 3}, "^the nearest problem is"),
    ),
    "the model beats what is far": (
        [MODEL, FAR],
        {},
        ("modelled", "Modelled", MODEL.schedule, "^nothing near it was measured"),
    ),
    "what is far beats nothing": ([FAR], {}, ("transferred", "Neighbours", FAR.schedule, "")),
    "nothing": ([], {}, ("default", "Default", default(PROBLEM), "^nothing is known about sm_90 for this kind")),
    "the other class": ([HALF], {}, ("default", "Default", {}, "")),
    "the class": ([HALF], {"accum_mode": "fp16"}, ("measured", "Exact", {"accum_mode": "fp16"}, "")),
    "the default of the class": ([], {"accum_mode": "fp16"}, ("default", "Default", {"accum_mode": "fp16"}, "")),
    "a type without it": (
        [],
        {"accum_mode": "fp16", "problem": PROBLEM.replace(dtype="bfloat16")},
        ("default", "Default", {"accum_mode": "fp32"}, ""),
    ),
    "the regime": (
        [HOT, COOL],
        {"regime": "sustained"} | ON_DEVICE,
        ("measured", "Exact", {"occupancy": 3}, f"^{HERE}$"),
    ),
    "the usual regime": ([HOT, COOL], ON_DEVICE, ("measured", "Exact", {"occupancy": 2}, f"^{HERE}$")),
    "a regime that was not tried": (
        [COOL],
        {"regime": "sustained"} | ON_DEVICE,
        ("measured", "Exact", COOL.schedule, f"^{HERE}, in the burst regime; nothing was in the sustained one$"),
    ),
    "a class that was not tried": (
        [COOL],
        {"accum_mode": "fp16"} | ON_DEVICE,
        ("measured", "Exact", {"accum_mode": "fp32"}, f"^{HERE}, with fp32 accumulators; nothing was with fp16 ones$"),
    ),
    "neither was tried, nor the problem": (
        [COOL],
        {"regime": "sustained", "problem": long(2048)},
        ("transferred", "Neighbours", {}, "in the burst regime"),
    ),
    "what no device measured stands for nothing else": (
        [known(provenance="modelled", of={"accum_mode": "fp32"})],
        {"accum_mode": "fp16"},
        ("default", "Default", {}, ""),
    ),
    "forced knobs": (
        [known()],
        {"forced": {"tile_m": 128, "num_worker_warps": 8}} | ON_DEVICE,
        ("forced", "Exact", {"tile_m": 128, "num_worker_warps": 8}, f"^settings force .*; without them: {HERE}$"),
    ),
    "forced knobs that do not go with the rest": (
        [known(tile_m=64, tile_n=128, kv_subtiles=2, num_worker_warps=4, occupancy=3)],
        {"forced": {"tile_m": 128, "tile_n": 64}},
        ("forced", "Exact", schedule(tile_m=128, tile_n=64), "and the rest is the default's; without them: this"),
    ),
}
"""What is known, what is asked, and the answer: provenance, the link that found it, schedule or knobs, and words of the reason."""


@pytest.mark.parametrize("case", SERVED)
def test_the_answer_and_its_reason(case) -> None:
    entries, asked, (provenance, link, knobs, words) = SERVED[case]
    options = {name: value for name, value in asked.items() if name not in ("problem", "device")}
    problem, table = asked.get("problem", PROBLEM), table_of(entries, **options)
    served = table.resolve(problem, "sm_90", asked.get("device", ""))
    assert (served.provenance, {name: served.schedule[name] for name in knobs}) == (provenance, dict(knobs))
    assert re.search(words, served.reason)
    assert next(step.link for step in served.steps if step.said) == link
    passed = [step.link for step in served.steps if not step.said]
    assert passed == ["Exact", "Bucket", "Neighbours", "Modelled", "OtherKinds", "ColdStart"][: len(passed)]
    assert SPACE.unworkable(served.schedule, problem) == [] or ODD in entries
    explained = explain_problem(table, problem, "sm_90", asked.get("device", ""))
    assert f"  provenance  {provenance}: {served.reason}\n" in f"{explained}\n"


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ({"loop_split": True}, "cannot work"),
        ({"tile_q": 48}, "forced knob 'tile_q' is not in"),
        ({"tile_m": 48}, "tile_m = 48; sides of tiles are powers of two, such as"),
        ({"num_worker_warps": 3}, "num_worker_warps = 3 is no such hint; compilers take 0, 1, 2, 4, 8, 16, 32"),
        ({"occupancy": -1}, "occupancy = -1 is no such hint"),
        ({"accum_mode": "fp8"}, "accum_mode = 'fp8'; allowed on sm_90: ['fp32', 'fp16']"),
    ],
)
def test_forced_knobs_that_no_program_can_have_are_refused(forced, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        table_of([known()], forced=forced).resolve(PROBLEM, "sm_90")


def test_a_runner_up_that_this_compiler_cannot_build_is_no_next_choice() -> None:
    plain = known(of={"runner_up": schedule(num_worker_warps=16), "margin": 0.0})
    for compiler, expected in (("13.4.92", ()), ("13.5.37", (plain.runner_up,))):
        assert table_of([plain], compiler=compiler).resolve(long(1280), "sm_90").alternatives == expected


def test_only_the_shipped_tables_asked_for_are_read(tmp_path) -> None:
    nowhere = Settings(db=str(tmp_path / "none.db"))
    assert {each.arch for each in load_entries(nowhere, {"sm_90", "sm_121"})} == {"sm_90", "sm_121"}
    paths = (data_files.tuning_db() / "tables").glob("*/*.json")
    assert {each.arch for each in load_entries(nowhere)} == {path.stem for path in paths}


TWO = {"runner_up": schedule(tile_n=32), "margin": 0.02}
EXPLAINED = {
    "the evidence": (
        [known(of=TWO)],
        {},
        PROBLEM,
        ["  measured    300.0 us", "(2.0% slower)"],
        ["evidence is for", "expected"],
    ),
    "a runner-up that was timed faster, within noise": (
        [known(of=TWO | {"margin": -0.003})],
        {},
        PROBLEM,
        ["(0.3% faster)"],
        [],
    ),
    "the model": ([known(provenance="modelled")], {}, PROBLEM, ["an estimate; nothing was measured"], ["300.0 us"]),
    "whose evidence stands under a forced schedule": (
        [known()],
        {"forced": {"tile_m": 32}},
        PROBLEM,
        [f"evidence is for {PROBLEM}, schedule {schedule().short()}:"],
        [],
    ),
    "what a transfer may lose": (
        [known(long(2048), of=TWO)],
        {},
        PROBLEM,
        [f"evidence is for {long(2048)}", "slower than the best schedule, at worst"],
        [],
    ),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_explain_says(case) -> None:
    entries, options, problem, said, unsaid = EXPLAINED[case]
    found = explain_problem(table_of(entries, **options), problem, "sm_90", H200)
    assert [words for words in said if words not in str(found)] == []
    assert [words for words in unsaid if words in str(found)] == []
    told, loss = found.to_json(), found.served.expected_loss
    assert told["median_us"] == (300.0 if entries[0].measurement else None)
    assert len(told["alternatives"]) == (case == "what a transfer may lose")
    assert (told["expected_loss"] or {}).get("worst") == (loss.worst if loss else None)
    assert loss is None or 0.0 < loss.mean < loss.worst < 0.2


def test_explain_says_which_settings_won() -> None:
    sources = {"tile_m": "TILEDSCHED_TILE_M", "regime": "tiledsched.toml"}
    explanation = explain_problem(table_of([], forced={"tile_m": 128}), PROBLEM, "sm_90", controls=sources)
    assert "settings    tile_m from TILEDSCHED_TILE_M, regime from tiledsched.toml" in str(explanation)
    assert explanation.to_json()["controls"] == sources


# Next choices


def test_what_the_model_chose_gives_way_to_its_runner_up_and_then_to_what_it_chose_nearby() -> None:
    """Where the program of the first choice spills registers, as another compiler may make it."""
    second, third = schedule(tile_n=32), schedule(occupancy=2)
    others = [known(long(8192), "modelled", occupancy=3), known(long(2048), "modelled", occupancy=2)]
    first = known(provenance="modelled", of={"runner_up": second})
    for problem in (PROBLEM, long(1025)):
        table = table_of([known(CAUSAL, "modelled", tile_m=32), *others, first])
        served = table.resolve(problem, "sm_90", H200)
        assert (served.provenance, served.schedule, served.alternatives) == ("modelled", schedule(), (second, third))
        following = table.fallback_for(table.fallback_for(served, problem, "sm_90"), problem, "sm_90")
        assert (following.schedule, following.provenance, following.alternatives) == (third, "modelled", ())
        refused = f"{second.short()} does not compile for arrays laid out like these; the next choice: "
        assert following.reason == refused + served.reason
        last = table.fallback_for(following.then(chain.LinkStep(link="x"), schedule=second), problem, "sm_90")
        assert (last.provenance, last.schedule, last.alternatives) == ("default", default(problem), ())
        assert last.reason == f"{second.short()} (modelled) does not compile for arrays laid out like these"
        assert table.fallback_for(last, problem, "sm_90") is None
    alone = [known(provenance="modelled")]
    assert table_of([others[0], *alone]).resolve(PROBLEM, "sm_90").alternatives == (schedule(occupancy=3),)
    assert table_of(alone).resolve(PROBLEM, "sm_90").alternatives == ()
    assert table_of([known(of=TWO)]).resolve(PROBLEM, "sm_90").alternatives == ()  # measured


def class_of(problem: Problem, chosen: Schedule) -> str:
    return problem_class(Attention, problem, chosen, arch_spec("sm_90")).id


def test_a_choice_that_is_known_to_spill_is_passed_over() -> None:
    """For every problem of the class, offline and at a launch alike; what was measured is served whatever it spills."""
    first, second, third = schedule(), schedule(tile_n=32), schedule(occupancy=2)
    entries = [known(long(2048), "modelled", occupancy=2), known(provenance="modelled", of={"runner_up": second})]
    ragged = long(1025)

    def served(problem, spills, of=entries):
        return table_of(of, spills_of=lambda arch: spills if arch == "sm_90" else {}).resolve(problem, "sm_90")

    one = {first.id: {class_of(PROBLEM, first): 416}}
    two = one | {second.id: {class_of(PROBLEM, second): DOES_NOT_BUILD}}
    three = two | {third.id: {class_of(PROBLEM, third): 500}}
    alike = {first.id: {classes_of(PROBLEM, first, "sm_90")[0]: 416}}
    ragged_one = {first.id: {class_of(Attention.similarity.bucketed(ragged), first): 416}}
    spilled = f"{first.short()} spills 416 bytes of registers a thread"
    for spills, problem, chosen, rest, words in (
        (one, PROBLEM, second, (third,), f"; of its choices {spilled}, so that the next one is served"),
        (one, long(512, batch=3), second, (third,), spilled),
        (one, ragged, first, (second, third), ""),  # whose machine code is another: it cares for the last keys
        (ragged_one, ragged, second, (third,), spilled),
        (two, PROBLEM, third, (), f"{second.short()} does not build, so that"),
        (three, PROBLEM, first, (second, third), ""),  # which spills least
        # What decides whether a program spills is equal.
        *(
            (alike, PROBLEM.replace(**same), second, (third,), "")
            for same in ({}, {"dtype": "bfloat16"}, {"kv_heads": 8})
        ),
        (alike, PROBLEM.replace(softcap=True), first, (second, third), ""),
    ):
        found = served(problem, spills)
        assert (found.schedule, found.alternatives, found.provenance) == (chosen, rest, "modelled")
        assert words in found.reason
    assert served(PROBLEM, one, [known(of={"runner_up": second, "margin": 0.0})]).schedule == first
    known_more = table_of(entries).knowing("sm_90", one)
    assert known_more.resolve(PROBLEM, "sm_90").schedule == second
    assert known_more.knowing("sm_90", two).resolve(PROBLEM, "sm_90").schedule == third


def test_spills_are_those_of_the_nearest_compiler_and_of_the_users_builds(tmp_path, monkeypatch) -> None:
    files = {"spills.json": {"archs": {"sm_90": {"13.4.92": {"a": {"c": 64}}, "13.5.37": {"b": {"c": 80}}}}}}
    monkeypatch.setattr("tiledsched.store.spills.model_file", lambda kernel, name: files.get(name))
    for version, spills in (("13.4.1", {"a": {"c": 64}}), ("13.5.37", {"b": {"c": 80}}), ("", {"b": {"c": 80}})):
        assert shipped_spills("attention", "sm_90", version) == spills
    assert shipped_spills("attention", "sm_80", "13.5.37") == {}
    monkeypatch.setattr("tiledsched.serve.entries.compiler_at_hand", lambda: store_samples.TOOLCHAIN.tileiras)
    shipped = known_spills(Attention, Settings(db=str(tmp_path / "none.db")), "sm_90")
    assert shipped == {"a": {"c": 64}}
    killed = Failure(kind=FailureKind.COMPILER_KILLED, message="of the day")
    with TuningDB.open(str(tmp_path / "x.db")) as db:
        for occupancy, outcome in enumerate((MAX_SPILL_BYTES, MAX_SPILL_BYTES + 8, store_samples.FAILURE, killed)):
            if isinstance(outcome, int):
                made = store_samples.artifact(f"{occupancy:024}")
                outcome = replace(made, facts=replace(made.facts, spill_bytes=outcome))
            for source in (Attention.source_hash(), "another"):
                its = schedule(occupancy=occupancy)
                db.record_builds([store_samples.build(outcome, sched=its, source_hash=source)])
    of = store_samples.problem_class().id
    assert known_spills(Attention, Settings(db=str(tmp_path / "x.db")), "sm_90") == {
        **shipped,
        schedule(occupancy=1).id: {of: MAX_SPILL_BYTES + 8},
        schedule(occupancy=2).id: {of: DOES_NOT_BUILD},
    }


# Problems of about one size


def test_a_choice_does_not_depend_on_what_was_asked_before(monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.serve.lookup.MAX_ANSWERS", 7)
    entries = [known(long(rows), occupancy=1 + rows % 3) for rows in (512, 1000, 4096)]
    problems = [long(rows, batch=rows % 3 + 1) for rows in range(70, 5000, 97)]
    spills = {schedule(occupancy=2).id: {class_of(PROBLEM, schedule(occupancy=2)): 64}}
    first, second = (table_of(entries, spills_of=lambda arch: spills) for _ in range(2))
    forward = [first.resolve(each, "sm_90").schedule for each in problems]
    backward = [second.resolve(each, "sm_90").schedule for each in [*problems[::3], *reversed(problems)]]
    assert forward == backward[: -len(problems) - 1 : -1]


def test_what_was_measured_in_a_bucket_serves_the_problems_of_the_bucket() -> None:
    """With its rivals by its own evidence; a round length is a bucket of its own."""
    about = Attention.similarity.bucketed(long(1500))
    rivals = (replace(store_samples.RIVALS[0], name="torch_flash", host_us=9.0),)
    table = table_of([known(about, occupancy=3, of={"rivals": rivals}), known(occupancy=2)], rivals=True)
    for length in (1501, 1523):
        served = table.resolve(long(length), "sm_90", H200)
        assert (served.provenance, served.schedule["occupancy"], served.entry.problem) == ("transferred", 3, about)
        assert served.reason == f"{about}, which is of about this size, was measured on NVIDIA H200"
        assert [offer.name for offer in served.rivals] == ["torch_flash"]
        assert served.expected_loss is not None
    assert "nearest problem" in table.resolve(long(1504), "sm_90").reason
    other = table_of([known(long(1501), occupancy=3)])
    assert other.resolve(long(1502), "sm_90").schedule["occupancy"] == 3


@pytest.mark.parametrize(
    ("problems", "walks"),
    [
        ([long(rows) for rows in (1921, 1950, 2047)], [2047]),
        ([long(2048), PROBLEM], [2048]),  # round lengths are looked up for themselves
        ([PROBLEM.replace(seq_q=1, seq_k=keys) for keys in range(2049, 2305)], [2303, 2304]),
    ],
    ids=["near lengths", "round lengths", "decoding"],
)
def test_lengths_that_are_near_share_an_answer(monkeypatch, problems, walks) -> None:
    walked, table = [], table_of([known()])
    neighbours = chain.Neighbours.__call__
    monkeypatch.setattr(
        chain.Neighbours, "__call__", lambda link, asked: walked.append(asked.problem.seq_k) or neighbours(link, asked)
    )
    for each in problems:
        table.resolve(each, "sm_90")
    assert walked == walks


@pytest.mark.parametrize("seq_k", [1001, 1002, 1008, 1024, 1056, 5000])
def test_a_shared_answer_is_valid_for_the_problem(seq_k) -> None:
    for table in (table_of([known(long(2048), check_bounds=False)]), table_of([])):
        assert SPACE.violations(table.resolve(long(seq_k), "sm_90", H200).schedule, long(seq_k)) == []


@pytest.mark.parametrize(("name", "arch"), [("attention", "sm_90"), ("matmul", "sm_90"), ("rms_norm", "sm_121")])
def test_a_table_without_a_problem_is_one_made_without_its_measurements_and_those_of_equal_work(name, arch, tmp_path):
    kernel = kernel_named(name)
    known = load_entries(Settings(db=str(tmp_path / "none.db")), {arch}, kernel)
    whole, alike = LookupTable(known, kernel), kernel.similarity
    for problem in sorted({each.problem for each in known})[::25]:
        equal = {
            each.problem
            for each in known
            if alike.kind(each.problem) == alike.kind(problem) and alike.distance(each.problem, problem) == 0
        }
        left = [each for each in known if each.problem not in equal or each.provenance == "modelled"]
        expected, found = (
            table.resolve(problem, arch) for table in (LookupTable(left, kernel), whole.without(problem, arch))
        )
        assert (found.schedule, found.reason) == (expected.schedule, expected.reason)
        assert whole.resolve(problem, arch).entry.problem == problem  # which is as it was


def test_lookup_of_a_large_table_is_quick() -> None:
    table = table_of([known(long(rows, batch=batch)) for rows in range(128, 4224, 128) for batch in range(1, 17)])
    started = time.process_time()
    table.resolve(long(777), "sm_90")
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("name", ["matmul", "rms_norm", "softmax"])
def test_where_an_arch_has_no_table_the_kernels_model_chooses(name) -> None:
    kernel, arch = kernel_named(name), "sm_100"
    problem, space, spec = kernel.suite(next(iter(kernel.suites)))[0], space_for(arch, kernel), arch_spec(arch)
    served, plain = LookupTable([], kernel).resolve(problem, arch), space.default(problem)
    assert space.violations(served.schedule, problem) == []
    assert served.provenance == ("default" if served.schedule == plain else "modelled")
    assert served.steps[-1].link == ("Default" if served.schedule == plain else "ColdStart")
    assert log_us(problem, served.schedule, spec) <= log_us(problem, plain, spec)


# sdpa without a GPU


def test_cpu_tensors_go_to_torch_with_one_warning(fresh) -> None:
    torch = pytest.importorskip("torch")
    from tiledsched.ops.sdpa import sdpa

    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    with pytest.warns(UserWarning, match="q is on cpu") as warned:
        out, _ = [sdpa(q, k, v, causal=True) for _ in range(2)]
    assert [each.filename for each in warned] == [__file__]
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.slow
def test_sdpa_is_public_and_lazy() -> None:
    code = (
        "import sys, tiledsched; assert 'torch' not in sys.modules and 'cuda.tile' not in sys.modules; tiledsched.sdpa; "
        "assert 'torch._dynamo' not in sys.modules"  # which takes longer than all else
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
