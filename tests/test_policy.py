"""The serving policy: its choice on made-up entries, its limits, and what it serves from the shipped tables."""

from __future__ import annotations

import dataclasses
import math

import pytest
import served_entries
from served_entries import SPACE

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core import data_files
from tiledsched.core.device import arch_spec
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.matmul import Matmul
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import (
    EQUIVALENT_LOSS,
    TransferParameters,
    candidate_losses,
    expected_loss,
    loss_bands,
    repaired,
    transfer,
)
from tiledsched.store.exchange import read_table

PROBLEM = Attention.standard(seq_len=2048, head_dim=64)
SIMILARITY = Attention.similarity
TABLES = data_files.tuning_db() / "tables" / "attention"
OLD_TABLE = data_files.tuning_db().parent / "docs" / "results" / "serving" / "sm_90_2026-11-20.json.xz"


def schedule(problem=PROBLEM, **knobs):
    return served_entries.default(problem).replace(**knobs)


def entry(problem=PROBLEM, chosen=None, **more):
    return served_entries.entry(problem, schedule=chosen or schedule(problem), **more)


def at(seq_len, **changes):
    return Attention.standard(seq_len=seq_len, head_dim=64).replace(**changes)


def choice(problem, *entries, **parameters):
    return transfer(problem, entries, SPACE, arch_spec("sm_90"), TransferParameters(**parameters))


WIDE, TALL = schedule(tile_n=128, occupancy=2), schedule(tile_n=128, occupancy=2, latency_k=2)
ALONE, SHARED = schedule(latency_k=2), schedule(latency_v=4)
PREFERRED = entry(at(4096), ALONE, runner_up=SHARED, margin=0.01)
CUT, SPLIT = PROBLEM.replace(seq_q=4000, seq_k=4000), schedule(loop_split=True)
SMALL = Attention.problem(seq_q=1024, seq_k=1024, head_dim=128, heads=8, kv_heads=8)
"""With 8 heads, tiles of 128 rows leave half of the GPU idle."""
BIG_TILES = schedule(SMALL, tile_m=128, tile_n=128, num_worker_warps=8)
LARGE = entry(
    Attention.standard(seq_len=4096, head_dim=128),
    BIG_TILES,
    runner_up=schedule(SMALL, tile_n=128, occupancy=2, latency_k=2),
    margin=0.05,
)
FEW = Attention.problem(seq_q=1, seq_k=4096, head_dim=128, dtype="bfloat16", batch=8, heads=28, kv_heads=4)
PLAIN = schedule(tile_m=64, tile_n=128, num_worker_warps=4, occupancy=1, latency_k=2, latency_v=4, pack_gqa=True)
SHARES = PLAIN.replace(latency_k=0, latency_v=0, occupancy=2, kv_splits=4, kv_combine="launch")
COPIES = [entry(FEW.replace(heads=8 * group, kv_heads=8), PLAIN) for group in (2, 3, 4, 5, 12)]
NARROW = schedule(tile_m=16, tile_n=128, num_worker_warps=4, occupancy=2, pack_gqa=True)
PROMPT = Attention.problem(
    seq_q=1024, seq_k=8192, head_dim=128, dtype="bfloat16", causal=True, alignment="bottom_right", heads=32, kv_heads=8
)
PAGED = PROMPT.replace(page=16, lengths=True)
FOUR_PAGES = PAGED.replace(page=32)
MASKS_APART = schedule(PROMPT, tile_m=64, tile_n=128, num_worker_warps=4, occupancy=2, loop_split=True)
BY_SCALARS = MASKS_APART.replace(page_lookup="scalar")
HINTED = MASKS_APART.replace(latency_k=2)
CHOSEN = {
    "the nearest says most": (PROBLEM, [entry(at(16384), TALL), entry(at(4096), WIDE)], {"model": 0.0}, WIDE),
    "what the nearest alone prefers": (PROBLEM, [PREFERRED], {"model": 0.0, "reach": 1.0}, ALONE),
    "what more than one name": (
        PROBLEM,
        [PREFERRED, entry(at(8192), SHARED), entry(at(512), SHARED)],
        {"model": 0.0, "reach": 1.0},
        SHARED,
    ),
    "without the model big tiles": (SMALL, [LARGE], {"model": 0.0}, BIG_TILES),
    "the model tells what fits few blocks": (SMALL, [LARGE], {}, LARGE.runner_up),
    # What is bad everywhere must not win because it is less bad here.
    "a loss that was not measured is at least what the model says": (
        PROBLEM,
        [entry(at(4096), WIDE), entry(at(1024, batch=1, heads=8, kv_heads=8), schedule(tma_loads=False))],
        {},
        WIDE,
    ),
    "where tiles are cut off, masks apart": (CUT, [entry(at(4096))], {}, SPLIT),
    # Five copies of one neighbour do not hide the next, whose winner the model likes better here.
    "all that are as near as the nearest name candidates": (
        FEW,
        [*COPIES, entry(FEW.replace(batch=4, seq_k=2048, heads=32), SHARES)],
        {},
        SHARES,
    ),
    "the copies alone, with shares by the model": (FEW, COPIES, {}, PLAIN.replace(kv_splits=4, kv_combine="launch")),
    "other shares by the model than those whose launches overlap": (
        FEW.replace(batch=64),
        [entry(FEW, SHARES.replace(kv_splits=16, pdl=1))],
        {},
        SHARES.replace(kv_splits=64, kv_combine="in_order"),
    ),
    "keys in 16 bits do not go by those in 8": (
        FEW,
        [entry(FEW.replace(kv8="head"), NARROW), entry(FEW.replace(seq_k=16384, batch=2), SHARES)],
        {},
        SHARES,
    ),
    "keys in 8 bits go by those in 16, in tiles of 16 rows": (
        FEW.replace(kv8="head"),
        [entry(FEW, SHARES)],
        {},
        SHARES.replace(tile_m=16, kv_splits=8),
    ),
    # Without its hint, or with one where there are four pages, the program takes 2 to 3.5 times as long on an H200.
    "many rows find four pages by scalars": (FOUR_PAGES, [entry(PROMPT, HINTED)], {}, BY_SCALARS),
    "many rows find eight pages by scalars, with a hint": (
        PAGED,
        [entry(PROMPT, MASKS_APART)],
        {},
        BY_SCALARS.replace(latency_k=2),
    ),
    "many rows over pages are not persistent": (
        PAGED.replace(page=64),
        [entry(PROMPT, MASKS_APART.replace(persistent="snake", store_late=True, latency_k=2))],
        {},
        BY_SCALARS,
    ),
    "few rows find eight pages by scalars, in one tile of keys": (
        FEW.replace(page=16, lengths=True),
        [entry(FEW, PLAIN.replace(kv_subtiles=2))],
        {},
        PLAIN.replace(occupancy=2, loop_split=True, page_lookup="scalar", kv_splits=4, kv_combine="in_order"),
    ),
    "few rows find four pages by scalars, and have one loop": (
        FEW.replace(page=32, lengths=True),
        [entry(FEW, PLAIN.replace(loop_split=True))],
        {},
        PLAIN.replace(page_lookup="scalar", latency_k=0, kv_splits=4, kv_combine="launch"),
    ),
    "also where masks had no loop of their own": (
        FOUR_PAGES,
        [entry(PROMPT, MASKS_APART.replace(loop_split=False))],
        {},
        BY_SCALARS,
    ),
    "a tile within one page finds it at once": (PAGED.replace(page=128), [entry(PROMPT, BY_SCALARS)], {}, MASKS_APART),
    "what was measured with such pages stays": (PAGED, [entry(PAGED.replace(heads=16), MASKS_APART)], {}, MASKS_APART),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_choice_among_made_up_entries(case) -> None:
    problem, entries, parameters, wanted = CHOSEN[case]
    found = choice(problem, *entries, **parameters)
    assert found.schedule == wanted
    assert found.distance == min(SIMILARITY.distance(each.problem, problem) for each in entries)
    assert found.entry in entries
    assert case != "the nearest says most" or found.neighbours == 1  # the other is too far to count
    assert choice(problem) is None


def test_padded_heads_go_by_those_of_about_their_columns() -> None:
    """But with few rows, which are read at any width, and where the padded width is another."""
    narrow, wide, unpadded, wanted = (PROBLEM.replace(head_dim=columns) for columns in (80, 112, 64, 72))
    assert SIMILARITY.distance(narrow, wanted) + 1 < SIMILARITY.distance(wide, wanted)
    few = [each.replace(seq_q=1) for each in (narrow, wide, wanted)]
    assert SIMILARITY.distance(few[0], few[2]) == SIMILARITY.distance(few[1], few[2])
    assert SIMILARITY.distance(unpadded, wanted) == SIMILARITY.distance(unpadded, wide)


SHORT = PROBLEM.replace(seq_q=500, seq_k=500)
NAMED = {
    "ties and the runner-up": (
        entry(ties=(ALONE,), runner_up=SHARED, margin=0.1),
        PROBLEM,
        {schedule(): 0.0, ALONE: 0.0, SHARED: pytest.approx(math.log(1.1))},
    ),
    "what masks cut tiles apart": (entry(), CUT, {schedule(): 0.0, SPLIT: EQUIVALENT_LOSS}),
    "unless it is another program there already": (entry(CUT), CUT.replace(seq_k=4001), {schedule(): 0.0}),
    "unless the loop is short": (entry(), SHORT, {schedule(): 0.0}),
    "unless a mask is there": (entry(PROBLEM.replace(causal=True)), CUT.replace(causal=True), {schedule(): 0.0}),
}


@pytest.mark.parametrize("case", NAMED)
def test_schedules_are_named_with_their_loss(case) -> None:
    known, problem, losses = NAMED[case]
    assert candidate_losses(known, problem, SPACE) == losses


DECODE = Attention.problem(seq_q=1, seq_k=8192, head_dim=128, batch=8, heads=32, kv_heads=8)
MASKED = schedule(loop_split=True, block_order="reversed", tile_n=128, occupancy=2)
SIXTEEN = schedule(DECODE, kv_splits=16, tile_n=128)


def test_repair_resets_only_what_a_constraint_reads_and_moves_numbers_no_further_than_it_must() -> None:
    assert repaired(MASKED, PROBLEM, SPACE) == schedule(tile_n=128, occupancy=2)
    assert repaired(MASKED, PROBLEM.replace(causal=True), SPACE) == MASKED
    assert repaired(schedule(tile_m=256, tile_n=256), PROBLEM, SPACE) is not None
    assert repaired(SIXTEEN, DECODE.replace(seq_k=1151), SPACE) == SIXTEEN.replace(kv_splits=8)
    assert repaired(schedule(block_order="of yore"), PROBLEM, SPACE) is None


ODD = [
    DECODE,
    Attention.problem(seq_q=16, seq_k=4096, head_dim=64, heads=8, kv_heads=8, causal=True),
    *(Attention.standard(seq_len=2048, head_dim=d, causal=c) for d in (80, 96, 160, 192, 256) for c in (False, True)),
    Attention.problem(seq_q=512, seq_k=4096, head_dim=128, heads=16, kv_heads=2, causal=True),
    Attention.problem(seq_q=100, seq_k=77, head_dim=17, batch=2, heads=3, kv_heads=3, dtype="bfloat16"),
]


@pytest.fixture(scope="module")
def shipped():
    return LookupTable(read_table(TABLES / "sm_90.json").entries, Attention)


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_problems_unlike_all_measured_ones_are_served_within_the_constraints(problem, shipped) -> None:
    served = shipped.resolve(problem, "sm_90", "NVIDIA H200")
    assert SPACE.unworkable(served.schedule, problem) == []
    assert served.provenance in ("transferred", "modelled", "default")
    assert served.expected_loss is None or served.provenance == "transferred"


def test_few_rows_are_a_kind_of_their_own(shipped) -> None:
    decode = Attention.problem(seq_q=1, seq_k=8192, head_dim=128, heads=8, kv_heads=8)
    assert SIMILARITY.kind(decode) != SIMILARITY.kind(decode.replace(seq_q=8192))
    entries = [each for each in read_table(OLD_TABLE).entries if each.problem.seq_q == each.problem.seq_k]
    for table, provenance in ((LookupTable(entries, Attention), "modelled"), (shipped, "transferred")):
        served = table.resolve(decode, "sm_90", "NVIDIA H200")
        assert (served.provenance, served.expected_loss is None) == (provenance, provenance == "modelled")
        assert served.schedule["kv_splits"] > 1  # 8 blocks would leave 124 SMs idle


def test_with_few_rows_what_packs_its_heads_goes_by_what_does_and_shares_of_keys_become_fewer(shipped) -> None:
    """Tokens of grouped heads before any number of keys: packed, and by as many shares as leave no SM idle for want of keys."""
    for heads, head_dim in ((32, 128), (64, 64)):
        for keys in (384, 1000, 1040, 4000, 16384):
            one = FEW.replace(seq_k=keys, head_dim=head_dim, batch=1, heads=heads, kv_heads=8)
            assert shipped.resolve(one.replace(batch=32), "sm_90", "NVIDIA H200").schedule["pack_gqa"], one
            assert keys < 1000 or shipped.resolve(one, "sm_90", "NVIDIA H200").schedule["kv_splits"] > 1, one


@pytest.mark.parametrize(("columns", "tile_n"), [(77, 64), (203, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_no_tma_unit_loads_get_a_plain_schedule(columns, tile_n, causal, shipped) -> None:
    """What won on others spills there, and compiled for up to 157 s (13.5.37, D=203)."""
    odd = PROBLEM.replace(head_dim=columns, causal=causal)
    found = shipped.resolve(odd, "sm_90")
    assert (found.schedule, found.entry) == (SPACE.default(odd).replace(tile_n=tile_n), None)
    assert shipped.resolve(odd.replace(head_dim=columns // 8 * 8), "sm_90").provenance == "transferred"


# Expected losses


def mean_loss(problem, known) -> float | None:
    loss = expected_loss(entry(known), SIMILARITY.distance(known, problem), problem)
    return loss and loss.mean


def test_expected_losses_are_of_the_group_and_given_only_where_measured() -> None:
    near, far = (
        mean_loss(PROBLEM, each)
        for each in (PROBLEM.replace(dtype="bfloat16"), at(1024, batch=16, heads=8, kv_heads=8))
    )
    few, windowed = PROBLEM.replace(seq_k=256), PROBLEM.replace(causal=True, window=128)
    assert near < far < mean_loss(PROBLEM, PROBLEM.replace(causal=True))  # of another kind
    assert mean_loss(few, few.replace(seq_q=512)) > far
    assert mean_loss(PROBLEM, at(128, batch=1, heads=1, kv_heads=1)) is None
    assert mean_loss(windowed, windowed.replace(dtype="bfloat16")) is None


def test_without_the_file_no_loss_is_promised(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(data_files, "tuning_db", lambda: tmp_path)
    loss_bands.cache_clear()
    try:
        assert mean_loss(PROBLEM, at(4096)) is None
    finally:
        loss_bands.cache_clear()


# Other archs

GB10, SPARK = "NVIDIA GB10", space_for("sm_121", Attention)
SPARK_TABLE = read_table(TABLES / "sm_121.json").entries
TUNED = Attention.standard(seq_len=1024, head_dim=128).replace(batch=1, heads=8, kv_heads=8)


def tuned_on(problem, arch="sm_121", device=GB10, **knobs):
    """What a quick tune of one problem stores."""
    summary = served_entries.SUMMARY
    summary = dataclasses.replace(summary, device=dataclasses.replace(summary.device, name=device, arch=arch))
    odd = SPARK.default(problem).replace(tile_m=32, **knobs)
    return entry(problem, odd, arch=arch, device=device, measurement=summary)


def resolved(entries, problem, device=GB10):
    return LookupTable([*SPARK_TABLE, *entries], Attention).resolve(problem, "sm_121", device)


def test_one_tuned_problem_serves_its_neighbourhood_and_no_more() -> None:
    """Of a table that the model made, it changes what lies within half an octave, or nearer to it than to the table."""
    one = tuned_on(TUNED)
    for far in (
        TUNED.replace(seq_q=16384, seq_k=16384, heads=32, kv_heads=32),
        TUNED.replace(seq_q=512, seq_k=512, batch=32),
        TUNED.replace(seq_q=3000, seq_k=3000, batch=8, heads=16, kv_heads=16),
    ):
        served = resolved([one], far)
        assert served == dataclasses.replace(resolved([], far), steps=served.steps)
        assert (served.provenance, served.reason[:29]) == ("modelled", "nothing near it was measured;")
    for near in (TUNED.replace(batch=2), TUNED.replace(dtype="bfloat16"), TUNED.replace(seq_q=1280, seq_k=1280)):
        assert (resolved([one], near).provenance, resolved([one], near).entry.problem) == ("transferred", TUNED)


@pytest.mark.parametrize("place", range(3, 72, 7))
def test_of_the_table_one_tuned_problem_changes_only_its_neighbours(place) -> None:
    """Ten problems of the shipped table, each tuned alone."""
    problem = SPARK_TABLE[place].problem
    table = LookupTable([*SPARK_TABLE, tuned_on(problem)], Attention)
    alike = [each.problem for each in SPARK_TABLE if each.problem.causal == problem.causal]
    changed = {each for each in alike if table.resolve(each, "sm_121", GB10).entry.problem != each}
    assert changed <= {problem.replace(dtype="float16" if problem.dtype == "bfloat16" else "bfloat16")}


@pytest.mark.parametrize(
    ("known", "problem", "arch", "words"),
    [
        (
            entry(PROBLEM.replace(dtype="bfloat16")),
            PROBLEM,
            "sm_90",
            ["such choices were on other measured problems of attention on sm_90"],
        ),
        (
            tuned_on(TUNED),
            TUNED.replace(batch=2),
            "sm_121",
            ["  expected    not known: on sm_121 no such choice was judged; ", "of attention on sm_90 were"],
        ),
        (
            tuned_on(TUNED.replace(causal=True, window=128)),
            TUNED.replace(causal=True, window=128, batch=2),
            "sm_121",
            ["  expected    not known: of attention on sm_121 no such choice was judged on problems like it"],
        ),
    ],
    ids=["this arch", "another arch", "no group"],
)
def test_a_loss_says_what_it_was_measured_on(known, problem, arch, words) -> None:
    explained = str(explain_problem(LookupTable([known], Attention), problem, arch))
    assert [each for each in words if each not in explained] == []


def test_what_was_measured_on_sm_120_serves_sm_121_whose_machine_code_is_the_same() -> None:
    pro = "NVIDIA RTX PRO 6000 Blackwell"
    other, own = tuned_on(TUNED, "sm_120", pro, occupancy=2), tuned_on(TUNED, occupancy=1)
    served = resolved([other], TUNED)
    assert (served.provenance, served.schedule["occupancy"]) == ("transferred", 2)
    assert f"measured on {pro} (sm_120, whose machine code is the same)" in served.reason
    assert resolved([other], TUNED.replace(batch=2)).provenance == "transferred"
    for both in ([other, own], [own, other]):
        assert {resolved(both, TUNED, device).schedule["occupancy"] for device in (GB10, "")} == {1}
    assert LookupTable([tuned_on(TUNED, "sm_100")], Attention).resolve(TUNED, "sm_121").provenance == "default"


def test_the_shipped_tables_of_both_hold_the_same_machine_code() -> None:
    known = {(each.problem, each.schedule): each.fingerprint for each in read_table(TABLES / "sm_120.json").entries}
    both = [each for each in SPARK_TABLE if (each.problem, each.schedule) in known]
    assert len(both) >= 60
    assert all(known[each.problem, each.schedule] == each.fingerprint for each in both)


GATED = served_entries.entry(
    PROBLEM,
    measurement=dataclasses.replace(
        served_entries.SUMMARY,
        accuracy=Accuracy(max_abs_error=0.0, worst_tile_error=0.0, worst_tile=(0, 0), repeatable=True),
    ),
)


@pytest.mark.parametrize(
    ("problem", "entries", "words"),
    [
        (PROBLEM, [GATED], ""),
        (PROBLEM.replace(batch=3, seq_q=1024, seq_k=1024), [GATED], ""),
        (PROBLEM.replace(head_dim=96), [GATED], f"only for {PROBLEM}; run: tiledsched tune attention -p"),
        (PROBLEM, [served_entries.entry(PROBLEM, "modelled")], "for any size"),
        (PROBLEM, [served_entries.entry(PROBLEM)], "for any size"),
        (PROBLEM, [], "for any size"),
    ],
    ids=["gated", "the same program", "another program", "modelled", "timed and not checked", "the default"],
)
def test_what_no_gate_has_run_is_unverified(problem, entries, words):
    """Gates are of machine code: sizes that are known only when a call runs share it, those known to the compiler do not."""
    explained = explain_problem(LookupTable(entries, Attention), problem, "sm_90")
    assert words in explained.unverified
    assert bool(words) == bool(explained.unverified) == ("  unverified  " in str(explained))
    assert explained.to_json()["unverified"] == (explained.unverified or None)


@pytest.mark.parametrize(
    ("asked", "flag"), [("invariant", " --numerics invariant"), ("fp16", " --accum-mode fp16"), ("fp32", "")]
)
def test_a_tune_of_what_is_served_is_named_whole(asked, flag):
    p = Matmul.problem(m=5, n=8, k=8)
    said = explain_problem(LookupTable([], p.declaration, accum_mode=asked), p, "sm_90").unverified
    assert said.endswith(f"run: tiledsched tune matmul -p m=5,n=8,k=8{flag}")
