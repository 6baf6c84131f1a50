"""Problems, schedules and search spaces: canonical, hashable, round-tripping, and constrained in one place."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledsched import data_files
from tiledsched.data_files import search_spaces
from tiledsched.errors import ProblemError, SpaceError
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.problem import two_parts
from tiledsched.kernels.attention.suites import SUITES
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.space_files import load_space, space_for

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
KNOBS = {
    "tile_m", "tile_n", "latency_k", "latency_v", "occupancy", "opt_level", "accum_mode", "num_ctas",
    "num_worker_warps", "loop_split", "block_order", "persistent", "kv_direction", "q_subtiles", "kv_subtiles", "qk_ahead",
    "k_load", "tma_loads", "tma_store", "check_bounds", "division", "lazy_rescale", "flat_steps", "reload_q",
    "q_ahead", "store_late", "q_in_registers", "unroll", "peel_first", "kv_splits", "pack_gqa", "column_parts",
}  # fmt: skip
PLAIN_ID = "2432e659d1c0"
"""Of a plain causal problem: fields that came later are left out at their defaults, so that it holds."""


def problems() -> st.SearchStrategy[Problem]:
    return st.builds(
        lambda kv, group, **rest: Attention.problem(heads=kv * group, kv_heads=kv, **rest),
        kv=st.integers(1, 8),
        group=st.integers(1, 8),
        seq_q=st.integers(1, 5000),
        seq_k=st.integers(1, 5000),
        head_dim=st.integers(1, 256),
        dtype=st.sampled_from(["float16", "bfloat16"]),
        causal=st.booleans(),
        batch=st.integers(1, 64),
    )


@given(problems())
@settings(derandomize=True, deadline=None)
def test_a_problem_round_trips_and_its_id_is_its_value(problem: Problem) -> None:
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert hash(again) == hash(problem)
    assert again.id == problem.id
    assert problem.replace(batch=problem.batch + 1).id != problem.id


def test_ids_are_stable_across_versions() -> None:
    assert Attention.problem(seq_q=128, seq_k=128, head_dim=64).id == "a0df735db6da"
    assert Schedule(tile_m=64, persistent=True).id == "01d13d04ad77"


def test_flops_and_bytes() -> None:
    problem = Attention.problem(seq_q=1024, seq_k=1024, head_dim=64, batch=2, heads=4, kv_heads=2)
    assert problem.flops == 4 * 2 * 4 * 1024 * 1024 * 64
    assert problem.replace(causal=True).flops == problem.flops / 2
    assert problem.min_bytes == 2 * (2 * 2 * 4 * 1024 * 64 + 2 * 2 * 2 * 1024 * 64)
    assert problem.tflops(1.0) == pytest.approx(problem.flops / 1e6)


def test_causal_pairs_of_unequal_lengths() -> None:
    wide = Attention.problem(seq_q=100, seq_k=1000, head_dim=64, causal=True)
    tall = Attention.problem(seq_q=1000, seq_k=100, head_dim=64, causal=True)
    assert wide.visible_pairs == 100 * 100 / 2
    assert tall.visible_pairs == 100 * 100 / 2 + 900 * 100


def test_the_standard_problem_fills_16k_tokens() -> None:
    problem = Attention.standard(seq_len=4096, head_dim=128)
    assert (problem.batch, problem.heads, problem.kv_heads) == (4, 16, 16)
    assert Attention.standard(seq_len=32768, head_dim=256).batch == 1
    assert Attention.standard(seq_len=512, head_dim=64, heads=32, kv_heads=8).group == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_q": 0}, "seq_q must be a positive integer"),
        ({"head_dim": 257}, "at most 256"),
        ({"dtype": "float32"}, "float16, bfloat16"),
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"causal": 1}, "true or false"),
        ({"batch": True}, "positive integer"),
        ({"alignment": "middle"}, "alignment must be one of top_left, bottom_right"),
        ({"value_dim": 257}, "value_dim must be at most 256"),
        ({"value_dim": -1}, "value_dim must be an integer of 0 or more, got -1"),
        ({"value_dim": True}, "value_dim"),
        ({"lse": 1}, "lse must be true or false"),
    ],
)
def test_wrong_problems_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        Attention.problem(**({"seq_q": 16, "seq_k": 16, "head_dim": 64} | change))


def test_fields_that_came_later_leave_ids_as_they_were() -> None:
    plain = Attention.problem(seq_q=128, seq_k=256, head_dim=64, causal=True)
    assert set(plain.to_json()) == {
        "kernel",
        "seq_q",
        "seq_k",
        "head_dim",
        "dtype",
        "causal",
        "batch",
        "heads",
        "kv_heads",
    }
    assert plain.id == PLAIN_ID
    other = plain.replace(alignment="bottom_right", value_dim=32, lse=True)
    assert other.to_json() == plain.to_json() | {"alignment": "bottom_right", "value_dim": 32, "lse": True}
    assert Problem.from_json(other.to_json()) == other
    assert len({plain.id, other.id, plain.replace(lse=True).id}) == 3
    assert str(plain) == "B=1 H=1 Sq=128 Sk=256 D=64 float16 causal"
    assert str(other) == "B=1 H=1 Sq=128 Sk=256 D=64/32 float16 causal bottom-right +lse"


def test_one_problem_has_one_name() -> None:
    square = Attention.problem(seq_q=128, seq_k=128, head_dim=64, causal=True)
    assert square.replace(alignment="bottom_right") == square
    assert square.replace(value_dim=64) == square
    full = Attention.problem(seq_q=128, seq_k=256, head_dim=64)
    assert full.replace(alignment="bottom_right") == full
    assert full.replace(causal=True, alignment="bottom_right") != full.replace(causal=True)


def test_work_of_other_problems() -> None:
    """Counted pair by pair, but for the half of a pair that the usual count leaves out on the diagonal."""
    for seq_q, seq_k in ((7, 12), (12, 7), (1, 9), (9, 1), (5, 5)):
        for alignment in ("top_left", "bottom_right"):
            problem = Attention.problem(
                seq_q=seq_q, seq_k=seq_k, head_dim=64, causal=True, alignment=alignment, value_dim=32
            )
            offset = seq_k - seq_q if problem.alignment == "bottom_right" else 0
            pairs = sum(column <= row + offset for row in range(seq_q) for column in range(seq_k))
            assert problem.visible_pairs == pairs - min(seq_q, seq_k) / 2
            assert problem.flops == 2 * problem.visible_pairs * (64 + 32)
    problem = Attention.problem(seq_q=100, seq_k=300, head_dim=64, value_dim=32, heads=4, kv_heads=2)
    assert problem.min_bytes == 2 * (4 * 100 * (64 + 32) + 2 * 300 * (64 + 32))
    assert problem.replace(lse=True).min_bytes == problem.min_bytes + 4 * 4 * 100


@pytest.mark.parametrize(
    ("columns", "parts"),
    [(1, (16, 0)), (16, (16, 0)), (17, (32, 0)), (40, (32, 16)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)),
     (96, (64, 32)), (120, (128, 0)), (128, (128, 0)), (160, (128, 32)), (192, (128, 64)), (256, (256, 0))],
)  # fmt: skip
def test_columns_in_two_parts(columns: int, parts: tuple[int, int]) -> None:
    assert two_parts(columns) == parts
    problem = Attention.problem(seq_q=1, seq_k=1, head_dim=columns)
    assert columns <= problem.split_d <= problem.tile_d
    assert problem.split_d == sum(parts)
    assert parts[1] == 0 or parts[0] % parts[1] == 0  # so that the second part starts at a tile's edge


def test_what_32_bits_do_not_reach_is_wide() -> None:
    problem = Attention.problem(seq_q=1 << 15, seq_k=1, head_dim=64, heads=1 << 10)
    assert not problem.replace(heads=(1 << 10) - 1).wide
    assert problem.wide  # 2**31 elements
    assert Attention.problem(seq_q=1, seq_k=1 << 15, head_dim=32, value_dim=64, heads=1 << 10, kv_heads=1 << 10).wide


def test_a_problem_from_json_names_the_wrong_key() -> None:
    with pytest.raises(ProblemError, match=r"unknown problem keys \['sequence'\]; known are \['alignment'"):
        Problem.from_json({"kernel": "attention", "seq_q": 1, "seq_k": 1, "head_dim": 1, "sequence": 3})
    with pytest.raises(ProblemError, match=r"attention needs \['head_dim'\]"):
        Problem.from_json({"kernel": "attention", "seq_q": 1, "seq_k": 1})
    with pytest.raises(ProblemError, match='add "kernel"'):
        Problem.from_json({"seq_q": 1, "seq_k": 1, "head_dim": 1})


def test_a_problem_of_an_unknown_kernel_is_read_as_it_stands() -> None:
    stored = {"kernel": "elsewhere.module:Sort", "rows": 5, "dtype": "int32", "experts": [1, 2]}
    problem = Problem.from_json(stored)
    assert not problem.known
    assert (problem.rows, problem.experts, problem.flops, problem.min_bytes) == (5, (1, 2), 0.0, 0)
    assert problem.to_json() == stored
    assert str(problem) == "rows=5 int32 experts=1,2"
    assert Problem.from_json(json.loads(json.dumps(stored))) == problem


def test_a_problem_cannot_be_changed_and_says_what_it_has() -> None:
    problem = Attention.problem(seq_q=1, seq_k=1, head_dim=40)
    assert (problem.values["head_dim"], problem.head_dim, problem.tile_d) == (40, 40, 64)
    with pytest.raises(AttributeError, match=r"use problem.replace\(batch=...\)"):
        problem.batch = 2
    with pytest.raises(AttributeError, match="attention has no field 'rows'; it has seq_q"):
        _ = problem.rows
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert sorted([problem.replace(batch=3), problem]) == [problem, problem.replace(batch=3)]


def test_schedules_are_values() -> None:
    a = Schedule(tile_m=64, persistent=True)
    assert a == Schedule({"persistent": True, "tile_m": 64})
    assert hash(a) == hash(Schedule.from_json(a.to_json()))
    assert a != Schedule(tile_m=64, persistent=1)
    assert a.replace(tile_m=128)["tile_m"] == 128
    assert a["tile_m"] == 64
    with pytest.raises(SpaceError, match="tile_m"):
        Schedule(tile_m=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch_has_a_space_with_every_knob(arch: str) -> None:
    space = space_for(arch, Attention)
    assert space.arch == arch
    assert set(space.knobs) == KNOBS
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            problem = Attention.standard(seq_len=1024, head_dim=head_dim, causal=causal)
            schedules = list(space.schedules(problem, pinned={"accum_mode": "fp32"}))
            assert len(schedules) == len(set(schedules)) >= 100
            assert space.default(problem) in schedules


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_121"])
def test_enumeration_sampling_and_validation_agree(arch: str) -> None:
    space = space_for(arch, Attention)
    problem = Attention.standard(seq_len=1000, head_dim=96, causal=True)
    listed = set(space.schedules(problem))
    rng = random.Random(3)
    for _ in range(200):
        schedule = space.sample(problem, rng)
        assert schedule in listed
        space.validate(schedule, problem)
    refused = 0
    for _ in range(400):
        schedule = Schedule({name: rng.choice(knob.choices) for name, knob in space.knobs.items()})
        assert (schedule in listed) == (not space.violations(schedule, problem))
        refused += schedule not in listed
    assert refused > 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_space_is_large_enough_and_not_too_large(arch: str, causal: bool) -> None:
    """On sm_90, for every problem of 64 or 128 columns; elsewhere the smaller parts allow less."""
    space = space_for(arch, Attention)
    for seq_len in (1000, 1024):
        problem = Attention.standard(seq_len=seq_len, head_dim=128, causal=causal)
        count = sum(1 for _ in space.schedules(problem, pinned={"accum_mode": "fp32"}))
        assert (5000 if arch == "sm_90" else 2000) <= count <= 40_000
        modelled = sum(1 for _ in space.schedules(problem, pinned={"accum_mode": "fp32"} | space.modelled_pins()))
        assert 100 <= modelled <= count / 5


def test_at_most_two_departures_from_the_plain_kernel() -> None:
    space = space_for("sm_90", Attention)
    problem = Attention.standard(seq_len=1024, head_dim=64, causal=True)
    pins = space.modelled_pins()
    for schedule in itertools.islice(space.schedules(problem), 0, None, 17):
        departures = sum(
            schedule[name] != value for name, value in pins.items()
            if name not in ("flat_steps", "reload_q", "q_ahead", "store_late", "q_in_registers", "unroll", "peel_first")
        )  # fmt: skip
        departures += 2 if schedule["flat_steps"] else schedule["persistent"] == "snake"
        departures += schedule["block_order"] == "swizzled"
        latencies = bool(schedule["latency_k"] or schedule["latency_v"])
        assert departures + latencies <= 2
    plain = space.default(problem)
    space.validate(plain.replace(q_subtiles=2, qk_ahead=True, tile_n=32), problem)
    with pytest.raises(SpaceError, match="two departures"):
        space.validate(plain.replace(q_subtiles=2, qk_ahead=True, tile_n=32, latency_k=2), problem)
    with pytest.raises(SpaceError, match="two departures"):
        space.validate(plain.replace(division="ieee", tma_store=False), problem)


def test_what_only_a_measurement_shows_is_marked() -> None:
    space = space_for("sm_90", Attention)
    pins = space.modelled_pins()
    assert set(pins) == {
        "kv_direction", "q_subtiles", "kv_subtiles", "qk_ahead", "k_load", "tma_loads", "tma_store", "check_bounds",
        "division", "lazy_rescale", "flat_steps", "reload_q", "q_ahead", "store_late", "q_in_registers", "unroll",
        "peel_first", "kv_splits", "pack_gqa", "column_parts",
    }  # fmt: skip
    assert all(space.knobs[name].measured_only and space.knobs[name].default == value for name, value in pins.items())
    problem = Attention.standard(seq_len=1024, head_dim=64)
    assert all(pins.items() <= dict(schedule).items() for schedule in space.schedules(problem, pinned=pins))


def test_shares_of_keys_take_two_steps_with_tma_loads() -> None:
    space = space_for("sm_90", Attention)
    problem = Attention.problem(seq_q=1, seq_k=4096, head_dim=128, heads=8, kv_heads=8)
    schedule = space.default(problem).replace(tile_m=16, tile_n=128, kv_splits=16)
    assert space.unworkable(schedule, problem) == []
    for changed in ({"kv_splits": 8}, {"tile_n": 64}, {"occupancy": 2}, {"tile_m": 32}, {"num_worker_warps": 8}):
        other = schedule.replace(**changed)
        assert any("still being read" in why for why in space.unworkable(other, problem)), changed
        assert space.unworkable(other.replace(tma_loads=False), problem) == []
    assert space.unworkable(schedule, problem.replace(seq_k=4097)) != []
    assert space.unworkable(schedule, problem.replace(causal=True)) != []  # masks take the room of the second step


@pytest.mark.parametrize("arch", ARCHS)
def test_knobs_for_other_problems_rest_on_ordinary_ones(arch: str) -> None:
    space = space_for(arch, Attention)
    for causal in (False, True):
        problem = Attention.standard(seq_len=1024, head_dim=128, causal=causal)
        for schedule in space.schedules(problem, pinned={"check_bounds": True, "opt_level": 3}):
            assert (schedule["kv_splits"], schedule["pack_gqa"], schedule["column_parts"]) == (1, False, 1)
            assert schedule.number("tile_m") >= 64
    decode = Attention.problem(
        seq_q=2, seq_k=4096, head_dim=96, causal=True, alignment="bottom_right", heads=8, kv_heads=2
    )
    for name, values in {"kv_splits": {1, 2, 4, 8, 16, 32}, "pack_gqa": {False, True}, "column_parts": {1, 2}}.items():
        for value in values:
            assert next(space.schedules(decode, pinned={name: value}), None) is not None, (name, value)
    assert next(space.schedules(decode, pinned={"tile_m": 16}), None) is not None


def test_a_value_that_some_constraint_rules_out_is_not_tried() -> None:
    """A walk that tried small tiles with every value of the rest would not end."""
    space = space_for("sm_90", Attention)
    problem = Attention.standard(seq_len=4096, head_dim=128)
    assert list(space.schedules(problem, pinned={"tile_m": 16})) == []
    assert list(space.schedules(problem, pinned={"kv_splits": 4})) == []
    with pytest.raises(SpaceError, match="no valid schedule"):
        space.default(problem, pinned={"pack_gqa": True})


def test_schedules_of_earlier_versions_are_completed() -> None:
    space = space_for("sm_90", Attention)
    problem = Attention.standard(seq_len=1024, head_dim=64)
    default = space.default(problem)
    assert space.complete(default) == default
    old = {name: value for name, value in default.items() if name not in space.modelled_pins()}
    assert space.complete(Schedule(old | {"persistent": False})) == default
    assert space.complete(Schedule(old | {"persistent": True})) == default.replace(persistent="strided")
    changed = default.replace(persistent="snake", loop_split=True, q_subtiles=2)
    assert space.complete(changed) == changed
    assert "wings" in space.complete(Schedule(old, wings=2))  # what is unknown stays, to be refused


def test_constraints_are_checked_early_and_late_alike(monkeypatch) -> None:
    """A constraint over more combinations than are tabulated allows the same schedules in the same order."""
    problem = Attention.standard(seq_len=1000, head_dim=128, causal=True)
    pinned = {"occupancy": 1, "num_worker_warps": 4, "tile_m": 64, "opt_level": 3, "persistent": "no", "num_ctas": 1,
              "kv_direction": "forward", "division": "approximate", "tma_store": True}  # fmt: skip
    early = list(space_for("sm_90", Attention).schedules(problem, pinned=pinned))
    monkeypatch.setattr("tiledsched.space.MOST_COMBINATIONS", 1)
    assert list(space_for("sm_90", Attention).schedules(problem, pinned=pinned)) == early
    assert len(early) > 100


def test_samples_are_uniform() -> None:
    """Drawing the widest constraint's knobs together may not favour anything."""
    space = space_for("sm_121", Attention)
    problem = Attention.standard(seq_len=1024, head_dim=256)
    listed = list(space.schedules(problem))
    rng = random.Random(5)
    drawn = [space.sample(problem, rng) for _ in range(2000)]
    for name, knob in space.knobs.items():
        for choice in knob.choices:
            share = sum(schedule[name] == choice for schedule in listed) / len(listed)
            seen = sum(schedule[name] == choice for schedule in drawn) / len(drawn)
            assert abs(seen - share) <= 5 * (share * (1 - share) / len(drawn)) ** 0.5


def test_the_default_is_repaired_where_a_constraint_forbids_it() -> None:
    space = space_for("sm_121", Attention)
    problem = Attention.standard(seq_len=512, head_dim=256)
    wanted = Schedule({name: knob.default for name, knob in space.knobs.items()})
    assert space.violations(wanted, problem)
    default = space.default(problem)
    assert not space.violations(default, problem)
    assert sum(default[name] != wanted[name] for name in default) == 1


def test_the_default_keeps_what_is_pinned() -> None:
    space = space_for("sm_90", Attention)
    problem = Attention.standard(seq_len=512, head_dim=64)
    assert space.default(problem, pinned={"accum_mode": "fp16"}) == space.default(problem).replace(accum_mode="fp16")
    with pytest.raises(SpaceError, match="no valid schedule"):
        space.default(problem.replace(dtype="bfloat16"), pinned={"accum_mode": "fp16"})


def test_violations_say_why() -> None:
    space = space_for("sm_90", Attention)
    problem = Attention.standard(seq_len=1024, head_dim=64)
    schedule = space.default(problem).replace(loop_split=True)
    with pytest.raises(SpaceError, match="nothing to split"):
        space.validate(schedule, problem)
    assert "not one of [64, 128, 16, 32]" in space.violations(schedule.replace(tile_m=96), problem)[0]
    assert "unknown knobs" in space.violations(Schedule(dict(schedule), wings=2), problem)[0]
    assert "missing" in space.violations(Schedule(tile_m=64), problem)[0]


def test_a_ragged_length_may_split_the_loop_without_a_causal_mask() -> None:
    space = space_for("sm_90", Attention)
    even, ragged = Attention.standard(seq_len=1024, head_dim=64), Attention.standard(seq_len=1000, head_dim=64)
    assert not any(schedule["loop_split"] for schedule in space.schedules(even))
    assert any(schedule["loop_split"] for schedule in space.schedules(ragged))


def test_bfloat16_never_accumulates_in_fp16() -> None:
    space = space_for("sm_90", Attention)
    problem = Attention.standard(seq_len=1024, head_dim=64, dtype="bfloat16")
    assert {schedule["accum_mode"] for schedule in space.schedules(problem)} == {"fp32"}


def test_space_ids_tell_spaces_apart_by_content() -> None:
    assert space_for("sm_120", Attention).id != space_for("sm_121", Attention).id
    assert space_for("sm_90", Attention).id == load_space(search_spaces() / "attention" / "sm_90.toml").id


MINE = """
extends = "attention/sm_90.toml"
[knobs.tile_m]
choices = [64]
"""


def test_a_users_space_extends_a_shipped_one(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(MINE)
    space = load_space(path)
    assert space.arch == "sm_90"
    assert space.knobs["tile_m"].choices == (64,)
    assert space.knobs["tile_n"].choices == (32, 64, 128)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends = 'attention/sm_90.toml'\ntile = 3", "unknown key 'tile'; allowed are extends, kernel"),
        ("extends = 'nowhere.toml'", "neither beside it nor among the shipped"),
        ("extends = 3", "'extends' must be a file name"),
        ("= broken", "not valid TOML"),
        ("kernel = 'attention'\narch = 'sm_90'", "no knobs"),
        ("kernel = 'attention'\n[knobs.tile_m]\nchoices = [64]", "key 'arch' must be a string"),
        (MINE.replace("[64]", "[]"), "knobs.tile_m.choices must be a list with at least one value"),
        (MINE.replace("[64]", "[64, 'big']"), "must all be of one kind"),
        (MINE.replace("[64]", "[128]"), "knobs.tile_m.default = 64 is not one of its choices"),
        (
            MINE + "colour = 1",
            "knobs.tile_m has unknown key 'colour'; allowed are choices, default, about, measured_only",
        ),
        (MINE + "measured_only = 'yes'", "knobs.tile_m.measured_only must be true or false, got 'yes'"),
        (MINE + "[[constraints]]\nrequire = 'tile_q < 3'\nbecause = 'x'", "unknown name 'tile_q'; known are"),
        (MINE + "[[constraints]]\nrequire = 'open(1)'\nbecause = 'x'", "uses Call"),
        (MINE + "[[constraints]]\nrequire = 'tile_m <'\nbecause = 'x'", "is not an expression"),
        (MINE + "[[constraints]]\nrequire = 'tile_m < 3'", "must have the keys 'require' and 'because'"),
        (
            MINE + "[[constraints]]\nrequire = 'tile_m < 3'\nbecause = ''\nexploring = 1",
            "exploring must be true or false",
        ),
        (MINE + "[limits]\nregisters_per_sm = 'many'", "limits.registers_per_sm must be an integer"),
        ("limits = 3", "'limits' must be a table"),
        ("extends = 'my.toml'", "goes round in a circle"),
    ],
)
def test_a_wrong_space_file_names_its_key(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(SpaceError) as error:
        load_space(path)
    assert words in str(error.value)
    assert "my.toml" in str(error.value)


def test_an_unknown_arch_or_file_is_named() -> None:
    with pytest.raises(SpaceError, match="known are sm_80, sm_86"):
        space_for("sm_75", Attention)
    with pytest.raises(SpaceError, match="check the path"):
        load_space("/nowhere/at/all.toml")


def test_a_draw_that_rejection_does_not_find_is_from_all_of_them() -> None:
    space, problem = space_for("sm_90", Attention), Attention.standard(seq_len=100, head_dim=256)
    drawn = space.sample(problem, random.Random(0), tries=0)
    assert space.violations(drawn, problem) == []
    assert drawn != space.sample(problem, random.Random(1), tries=0)


def test_a_space_that_allows_nothing_says_so(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(MINE + "[[constraints]]\nrequire = 'tile_m > 64'\nbecause = 'contrary'")
    space = load_space(path)
    problem = Attention.standard(seq_len=64, head_dim=64)
    assert list(space.schedules(problem)) == []
    with pytest.raises(SpaceError, match="holds no valid schedule"):
        space.default(problem)
    with pytest.raises(SpaceError, match="relax its constraints"):
        space.sample(problem, random.Random(0))


def test_neighbours_are_all_that_work_within_two_knobs() -> None:
    """Fewest changes first, also where the space does not explore; against trying every schedule of a small space."""
    space = space_for("sm_90", Attention)
    few = {"tile_m", "tile_n", "occupancy", "num_worker_warps", "num_ctas", "latency_k", "loop_split", "persistent"}
    space = replace(space, knobs={name: knob if name in few else replace(knob, choices=(knob.default,))
                                  for name, knob in space.knobs.items()})  # fmt: skip
    problem = Attention.standard(seq_len=1024, head_dim=64, causal=True)
    start = space.default(problem)
    found = list(space.neighbours(start, problem, pinned=("tile_n",)))

    def changes(schedule) -> int:
        return sum(schedule[name] != start[name] for name in start)

    names = sorted(few)
    everything = (start.replace(**dict(zip(names, choices, strict=True)))
                  for choices in itertools.product(*(space.knobs[name].choices for name in names)))  # fmt: skip
    near = (each for each in everything if 1 <= changes(each) <= 2 and each["tile_n"] == start["tile_n"])
    expected = {each for each in near if not space.unworkable(each, problem)}
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert [changes(each) for each in found] == sorted(changes(each) for each in found)
    assert any(space.violations(each, problem) for each in found)
    assert set(space.neighbours(start, problem, pinned=("tile_n",), changes=1)) == {x for x in found if changes(x) == 1}


def test_a_space_limited_to_candidates() -> None:
    space, problem = space_for("sm_90", Attention), Attention.standard(seq_len=1024, head_dim=64)
    listed = [{"tile_m": 128, "tile_n": 128}, {"loop_split": True}, {"tile_m": 512}, {"tile_m": 128, "tile_n": 128}]
    limited = space.limited_to(listed)
    default = space.default(problem)
    assert limited.default(problem) == default
    # a split loop needs a mask, no tile has 512 rows, and the same candidate counts once
    assert list(limited.schedules(problem)) == [default, default.replace(tile_m=128, tile_n=128)]
    assert default.replace(loop_split=True) in list(limited.schedules(problem.replace(causal=True)))
    assert list(limited.schedules(problem, pinned={"tile_m": 128})) == [limited.default(problem, pinned={"tile_m": 128}),
                                                                       default.replace(tile_m=128, tile_n=128)]  # fmt: skip
    with pytest.raises(SpaceError, match=r"unknown knobs \['tile_q'\]"):
        space.limited_to([{"tile_q": 64}])


@pytest.mark.parametrize(
    "path", sorted((data_files.tuning_db() / "candidates" / "attention").glob("*.json")), ids=lambda path: path.stem
)
def test_shipped_candidates_name_known_knobs_and_values(path) -> None:
    listed = json.loads(path.read_text())
    arch = "_".join(path.stem.split("_")[:2]) if path.stem.startswith("sm_") else "sm_100"
    space = space_for(arch, Attention).limited_to(listed)
    assert len(space.candidates) == len(listed)
    reached = {
        schedule for name in SUITES for problem in Attention.suite(name) for schedule in space.schedules(problem)
    }
    assert len(reached & set(space.candidates)) > 0.8 * len(listed)
