"""The serving policy: its choice on made-up entries, its limits, and what it loses on the shipped landscapes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import served_entries

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core import data_files
from tiledsched.core.device import arch_spec
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve import transfer as policy
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import (
    TransferParameters,
    candidate_losses,
    expected_loss,
    loss_bands,
    repaired,
    transfer,
)
from tiledsched.store.exchange import read_table

SPACE, SPEC = space_for("sm_90", Attention), arch_spec("sm_90")
PROBLEM = Attention.standard(seq_len=2048, head_dim=64)
TABLE = data_files.tuning_db().parent / "docs" / "results" / "serving" / "sm_90_2026-11-20.json.xz"
"""The table as old as the landscapes: what is younger cannot be looked up in them."""


def schedule(problem=PROBLEM, **knobs):
    return served_entries.default(problem).replace(**knobs)


def entry(problem=PROBLEM, chosen=None, **more):
    return served_entries.entry(problem, schedule=chosen or schedule(problem), **more)


def at(seq_len, **changes):
    return Attention.standard(seq_len=seq_len, head_dim=64).replace(**changes)


def choice(problem, *entries, **parameters):
    return transfer(problem, entries, SPACE, SPEC, TransferParameters(**parameters))


def test_nothing_is_chosen_from_nothing() -> None:
    assert choice(PROBLEM) is None


def test_the_nearest_says_most() -> None:
    wide, tall = schedule(tile_n=128, occupancy=2), schedule(tile_n=128, occupancy=2, latency_k=2)
    near, far = entry(at(4096), wide), entry(at(16384), tall)
    found = choice(PROBLEM, far, near, model=0.0)
    assert (found.schedule, found.entry, found.neighbours) == (wide, near, 1)  # the other is too far to count
    assert (
        found.distance
        == Attention.similarity.distance(near.problem, PROBLEM)
        < Attention.similarity.distance(far.problem, PROBLEM)
    )


def test_padded_heads_go_by_those_of_about_their_columns() -> None:
    """But with few rows, which are read at any width, and where the padded width is another."""
    narrow, wide, unpadded = (PROBLEM.replace(head_dim=columns) for columns in (80, 112, 64))
    asked = PROBLEM.replace(head_dim=72)
    assert Attention.similarity.distance(narrow, asked) + 1 < Attention.similarity.distance(wide, asked)
    few = [each.replace(seq_q=1) for each in (narrow, wide, asked)]
    assert Attention.similarity.distance(few[0], few[2]) == Attention.similarity.distance(few[1], few[2])
    assert Attention.similarity.distance(unpadded, asked) == Attention.similarity.distance(unpadded, wide)


def test_what_two_name_beats_what_the_nearest_alone_prefers() -> None:
    alone, shared = schedule(latency_k=2), schedule(latency_v=4)
    near = entry(at(4096), alone, runner_up=shared, margin=0.01)
    others = [entry(at(8192), shared), entry(at(512), shared)]
    assert choice(PROBLEM, near, model=0.0, reach=1.0).schedule == alone
    assert choice(PROBLEM, near, *others, model=0.0, reach=1.0).schedule == shared


def test_the_model_tells_what_fits_few_blocks() -> None:
    """With 8 heads of 1024, tiles of 128 rows leave half of the GPU idle."""
    small = Attention.problem(seq_q=1024, seq_k=1024, head_dim=128, heads=8, kv_heads=8)
    tall = schedule(small, tile_m=128, tile_n=128, num_worker_warps=8)
    large = Attention.standard(seq_len=4096, head_dim=128)
    neighbour = entry(large, tall, runner_up=schedule(small, tile_n=128, occupancy=2, latency_k=2), margin=0.05)
    assert choice(small, neighbour, model=0.0).schedule == tall
    assert choice(small, neighbour).schedule["tile_m"] == 64


def test_a_loss_that_was_not_measured_is_at_least_what_the_model_says() -> None:
    """What is bad everywhere must not win because it is less bad here."""
    bad = schedule(tma_loads=False)
    few = at(1024, batch=1, heads=8, kv_heads=8)
    near, far = entry(at(4096), schedule(tile_n=128, occupancy=2)), entry(few, bad)
    assert choice(PROBLEM, near, far).schedule == near.schedule


def test_ties_and_the_runner_up_are_named_with_their_loss() -> None:
    tie, second = schedule(latency_k=2), schedule(latency_v=4)
    losses = candidate_losses(entry(ties=(tie,), runner_up=second, margin=0.1), PROBLEM, SPACE)
    assert losses == {schedule(): 0.0, tie: 0.0, second: pytest.approx(math.log(1.1))}


def test_where_tiles_are_cut_off_what_masks_them_apart_is_named_beside_what_won_without() -> None:
    cut, short = PROBLEM.replace(seq_q=4000, seq_k=4000), PROBLEM.replace(seq_q=500, seq_k=500)
    twin = schedule(loop_split=True)
    assert candidate_losses(entry(), cut, SPACE) == {schedule(): 0.0, twin: policy.EQUIVALENT_LOSS}
    there = candidate_losses(entry(problem=cut), cut.replace(seq_k=4001), SPACE)
    assert there == {schedule(): 0.0}  # where it is another program already
    assert candidate_losses(entry(), short, SPACE) == {schedule(): 0.0}
    causal = candidate_losses(entry(problem=PROBLEM.replace(causal=True)), cut.replace(causal=True), SPACE)
    assert causal == {schedule(): 0.0}
    assert choice(cut, entry(at(4096))).schedule == twin


def test_repair_resets_only_what_a_constraint_reads() -> None:
    causal = schedule(loop_split=True, block_order="reversed", tile_n=128, occupancy=2)
    mended = repaired(causal, PROBLEM, SPACE)
    assert mended == schedule(tile_n=128, occupancy=2)
    assert repaired(causal, PROBLEM.replace(causal=True), SPACE) == causal
    assert repaired(schedule(tile_m=256, tile_n=256), PROBLEM, SPACE) is not None


ODD = [
    Attention.problem(seq_q=1, seq_k=8192, head_dim=128, batch=8, heads=32, kv_heads=8),
    Attention.problem(seq_q=16, seq_k=4096, head_dim=64, heads=8, kv_heads=8, causal=True),
    *(Attention.standard(seq_len=2048, head_dim=d, causal=c) for d in (80, 96, 160, 192, 256) for c in (False, True)),
    Attention.problem(seq_q=512, seq_k=4096, head_dim=128, heads=16, kv_heads=2, causal=True),
    Attention.problem(seq_q=100, seq_k=77, head_dim=17, batch=2, heads=3, kv_heads=3, dtype="bfloat16"),
]


@pytest.fixture(scope="module")
def shipped():
    return LookupTable(read_table(data_files.tuning_db() / "tables" / "attention" / "sm_90.json").entries, Attention)


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_problems_unlike_all_measured_ones_are_served_within_the_constraints(problem, shipped) -> None:
    served = shipped.resolve(problem, "sm_90", "NVIDIA H200")
    assert SPACE.unworkable(served.schedule, problem) == []
    assert served.provenance in ("transferred", "modelled", "default")
    assert served.expected_loss is None or served.provenance == "transferred"
    assert shipped.resolve(problem, "sm_90", "NVIDIA H200").schedule == served.schedule


def test_few_rows_are_a_kind_of_their_own(shipped) -> None:
    decode = Attention.problem(seq_q=1, seq_k=8192, head_dim=128, heads=8, kv_heads=8)
    assert Attention.similarity.kind(decode) != Attention.similarity.kind(decode.replace(seq_q=8192))
    entries = [each for each in read_table(TABLE).entries if each.problem.seq_q == each.problem.seq_k]
    served = LookupTable(entries, Attention).resolve(decode, "sm_90", "NVIDIA H200")
    assert (served.provenance, served.expected_loss) == ("modelled", None)
    assert served.schedule["kv_splits"] > 1  # 8 blocks would leave 124 SMs idle
    told = shipped.resolve(decode, "sm_90", "NVIDIA H200")
    assert told.provenance == "transferred"  # decoding was measured
    assert told.schedule["kv_splits"] > 1


def test_expected_losses_are_of_the_group_and_given_only_where_measured() -> None:
    near, far = (
        choice(PROBLEM, entry(each))
        for each in (PROBLEM.replace(dtype="bfloat16"), at(1024, batch=16, heads=8, kv_heads=8))
    )
    assert expected_loss(near, PROBLEM).mean < expected_loss(far, PROBLEM).mean
    other = choice(PROBLEM, entry(PROBLEM.replace(causal=True)))
    assert expected_loss(other, PROBLEM).mean > expected_loss(far, PROBLEM).mean
    remote = choice(PROBLEM, entry(at(128, batch=1, heads=1, kv_heads=1)))
    assert expected_loss(remote, PROBLEM) is None
    few = PROBLEM.replace(seq_k=256)
    assert expected_loss(choice(few, entry(few.replace(seq_q=512))), few).mean > expected_loss(far, PROBLEM).mean
    windowed = PROBLEM.replace(causal=True, window=128)
    assert expected_loss(choice(windowed, entry(windowed.replace(dtype="bfloat16"))), windowed) is None


def test_all_that_are_as_near_as_the_nearest_name_candidates() -> None:
    """Five copies of one neighbour do not hide the next, whose winner the model likes better here."""
    few = Attention.problem(
        seq_q=1, seq_k=4096, head_dim=128, dtype="bfloat16", causal=False, batch=8, heads=28, kv_heads=4
    )
    plain = schedule(tile_m=64, tile_n=128, num_worker_warps=4, occupancy=1, latency_k=2, latency_v=4, pack_gqa=True)
    split = plain.replace(latency_k=0, latency_v=0, occupancy=2, kv_splits=4, kv_combine="launch")
    copies = [entry(few.replace(heads=8 * group, kv_heads=8), plain) for group in (2, 3, 4, 5, 12)]
    farther = entry(few.replace(batch=4, seq_k=2048, heads=32), split)
    space, spec = space_for("sm_90", Attention), arch_spec("sm_90")
    assert transfer(few, [*copies, farther], space, spec).schedule == split
    assert transfer(few, copies, space, spec).schedule == plain.replace(kv_splits=4, kv_combine="launch")


def test_without_the_file_no_loss_is_promised(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(data_files, "tuning_db", lambda: tmp_path)
    loss_bands.cache_clear()
    try:
        assert expected_loss(choice(PROBLEM, entry(at(4096))), PROBLEM) is None
    finally:
        loss_bands.cache_clear()


def test_with_few_rows_what_packs_its_heads_goes_by_what_does_and_shares_of_keys_become_fewer(shipped) -> None:
    """Tokens of grouped heads before any number of keys: packed, and by as many shares as leave no SM idle for want of keys."""
    for heads, head_dim in ((32, 128), (64, 64)):
        for keys in (384, 1000, 1040, 4000, 16384):
            one, many = (
                Attention.problem(
                    seq_q=1, seq_k=keys, head_dim=head_dim, batch=batch, heads=heads, kv_heads=8, dtype="bfloat16"
                )
                for batch in (1, 32)
            )
            assert shipped.resolve(many, "sm_90", "NVIDIA H200").schedule["pack_gqa"], many
            assert keys < 1000 or shipped.resolve(one, "sm_90", "NVIDIA H200").schedule["kv_splits"] > 1, one
    sixteen = schedule(ODD[0], kv_splits=16, tile_n=128)
    short = ODD[0].replace(seq_k=1151)
    assert repaired(sixteen, short, SPACE) == sixteen.replace(kv_splits=8)


@pytest.mark.parametrize(("columns", "tile_n"), [(77, 64), (203, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_no_tma_unit_loads_get_a_plain_schedule(columns, tile_n, causal, shipped) -> None:
    """What won on others spills there, and compiled for up to 157 s (13.5.37, D=203)."""
    found = shipped.resolve(PROBLEM.replace(head_dim=columns, causal=causal), "sm_90")
    plain = SPACE.default(PROBLEM.replace(head_dim=columns, causal=causal))
    assert found.schedule == plain.replace(tile_n=tile_n)
    assert found.entry is None
    aligned = shipped.resolve(PROBLEM.replace(head_dim=columns // 8 * 8, causal=causal), "sm_90")
    assert aligned.provenance == "transferred"


GB10, SPARK = "NVIDIA GB10", space_for("sm_121", Attention)
SPARK_TABLE = read_table(data_files.tuning_db() / "tables" / "attention" / "sm_121.json").entries
TUNED = Attention.standard(seq_len=1024, head_dim=128).replace(batch=1, heads=8, kv_heads=8)


def tuned_on(problem, arch="sm_121", device=GB10, **knobs):
    """What a quick tune of one problem stores."""
    summary = served_entries.SUMMARY
    summary = dataclasses.replace(summary, device=dataclasses.replace(summary.device, name=device, arch=arch))
    odd = SPARK.default(problem).replace(tile_m=32, **knobs)
    return entry(problem, odd, arch=arch, device=device, measurement=summary)


def resolved(entries, problem):
    return LookupTable([*SPARK_TABLE, *entries], Attention).resolve(problem, "sm_121", GB10)


def test_one_tuned_problem_serves_its_neighbourhood_and_no_more() -> None:
    """Of a table that the model made, it changes what lies within half an octave, or nearer to it than to the table."""
    one = tuned_on(TUNED)
    for far in (
        TUNED.replace(seq_q=16384, seq_k=16384, heads=32, kv_heads=32),
        TUNED.replace(seq_q=512, seq_k=512, batch=32),
        TUNED.replace(seq_q=3000, seq_k=3000, batch=8, heads=16, kv_heads=16),
    ):
        served = resolved([one], far)
        assert served == dataclasses.replace(resolved([], far), reason=served.reason)
        assert served.provenance == "modelled"
        assert served.reason.startswith("nothing near it was measured")
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


def test_a_loss_says_what_it_was_measured_on() -> None:
    near = PROBLEM.replace(dtype="bfloat16")
    here = explain_problem(LookupTable([entry(near)], Attention), PROBLEM, "sm_90")
    assert (here.served.expected_loss.kernel, here.served.expected_loss.arch) == ("attention", "sm_90")
    assert "choices lose on measured problems of attention on sm_90" in str(here)
    there = explain_problem(LookupTable([tuned_on(TUNED)], Attention), TUNED.replace(batch=2), "sm_121", GB10)
    assert "  expected    not known: on sm_121 no such choice was judged; " in str(there)
    assert "of attention on sm_90 were" in str(there)
    windowed = explain_problem(
        LookupTable([tuned_on(TUNED.replace(causal=True, window=128))], Attention),
        TUNED.replace(causal=True, window=128, batch=2),
        "sm_121",
    )
    assert "  expected    not known: of attention on sm_121 no such choice was judged on problems like it" in str(
        windowed
    )


def test_what_was_measured_on_sm_120_serves_sm_121_whose_machine_code_is_the_same() -> None:
    pro = "NVIDIA RTX PRO 6000 Blackwell"
    other, own = tuned_on(TUNED, "sm_120", pro, occupancy=2), tuned_on(TUNED, occupancy=1)
    served = resolved([other], TUNED)
    assert (served.provenance, served.schedule["occupancy"]) == ("transferred", 2)
    assert f"measured on {pro} (sm_120, whose machine code is the same)" in served.reason
    assert resolved([other], TUNED.replace(batch=2)).provenance == "transferred"
    for both in ([other, own], [own, other]):
        assert resolved(both, TUNED).schedule["occupancy"] == 1
        assert LookupTable(both, Attention).resolve(TUNED, "sm_121").schedule["occupancy"] == 1
    assert LookupTable([tuned_on(TUNED, "sm_100")], Attention).resolve(TUNED, "sm_121").provenance == "default"


def test_the_shipped_tables_of_both_hold_the_same_machine_code() -> None:
    twin = read_table(data_files.tuning_db() / "tables" / "attention" / "sm_120.json").entries
    known = {(each.problem, each.schedule): each.fingerprint for each in twin}
    both = [each for each in SPARK_TABLE if (each.problem, each.schedule) in known]
    assert len(both) >= 60
    assert all(known[each.problem, each.schedule] == each.fingerprint for each in both)


def test_what_no_gate_has_run_is_unverified():
    """Gates are of machine code: sizes that are known only when a call runs share it, those known to the compiler do not."""
    accuracy = Accuracy(max_abs_error=0.0, worst_tile_error=0.0, worst_tile=(0, 0), repeatable=True)
    gated = dataclasses.replace(served_entries.SUMMARY, accuracy=accuracy)

    def unverified(problem, *entries, arch="sm_90"):
        explained = explain_problem(LookupTable(entries, Attention), problem, arch)
        assert (explained.unverified != "") == ("  unverified  " in str(explained))
        assert explained.to_json()["unverified"] == (explained.unverified or None)
        return explained.unverified

    tuned = served_entries.entry(PROBLEM, measurement=gated)
    assert unverified(PROBLEM, tuned) == ""
    assert unverified(PROBLEM.replace(batch=3, seq_q=1024, seq_k=1024), tuned) == "", "the same program"
    assert f"only for {PROBLEM}; run: tiledsched tune attention -p" in unverified(PROBLEM.replace(head_dim=96), tuned)
    assert "for any size" in unverified(PROBLEM, served_entries.entry(PROBLEM, "modelled"))
    assert "for any size" in unverified(PROBLEM, served_entries.entry(PROBLEM)), "it was timed, and not checked"
    assert "for any size" in unverified(PROBLEM), "the default"
