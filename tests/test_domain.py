"""Schedules and search spaces: canonical, hashable, round-tripping, and constrained in one place."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace

import pytest

from tiledsched.core import data_files
from tiledsched.core.errors import SpaceError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import Constraint
from tiledsched.core.space_files import load_space, space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import SUITES

SPACE, PROBLEM = space_for("sm_90", Attention), Attention.standard(seq_len=1024, head_dim=64)
DEFAULT = SPACE.default(PROBLEM)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
PLAIN_KNOBS = {
    "tile_m",
    "tile_n",
    "latency_k",
    "latency_v",
    "occupancy",
    "opt_level",
    "accum_mode",
    "num_ctas",
    "num_worker_warps",
    "loop_split",
    "block_order",
    "persistent",
}
MEASURED_ONLY = {
    "pdl",
    "kv_direction",
    "q_subtiles",
    "kv_subtiles",
    "qk_ahead",
    "tma_loads",
    "tma_store",
    "check_bounds",
    "division",
    "lazy_rescale",
    "flat_steps",
    "reload_q",
    "q_ahead",
    "store_late",
    "q_in_registers",
    "unroll",
    "peel_first",
    "kv_splits",
    "kv_combine",
    "page_lookup",
    "pack_gqa",
    "column_parts",
}


def test_schedules_are_values() -> None:
    a = Schedule(tile_m=64, persistent=True)
    assert (a.id, hash(a)) == ("01d13d04ad77", hash(Schedule.from_json(a.to_json())))
    assert a == Schedule({"persistent": True, "tile_m": 64}) != Schedule(tile_m=64, persistent=1)
    assert (a.replace(tile_m=128)["tile_m"], a["tile_m"]) == (128, 64)
    with pytest.raises(SpaceError, match="tile_m"):
        Schedule(tile_m=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch_has_a_space_with_every_knob(arch: str) -> None:
    space = space_for(arch, Attention)
    assert space.arch == arch
    assert set(space.knobs) == PLAIN_KNOBS | MEASURED_ONLY
    for head_dim, causal in ((64, False), (256, True)):
        problem = Attention.standard(seq_len=1024, head_dim=head_dim, causal=causal)
        assert len(set(itertools.islice(space.schedules(problem, pinned={"accum_mode": "fp32"}), 100))) == 100
        assert space.violations(space.default(problem), problem) == []


@pytest.mark.parametrize("arch", [pytest.param("sm_100", marks=pytest.mark.slow), "sm_121"])
def test_enumeration_sampling_and_validation_agree(arch: str) -> None:
    space = space_for(arch, Attention)
    problem = Attention.standard(seq_len=1000, head_dim=256, causal=True)
    listed = set(space.schedules(problem))
    rng = random.Random(3)
    for _ in range(100):
        schedule = space.sample(problem, rng)
        assert schedule in listed
        assert space.violations(schedule, problem) == []
    refused = 0
    for _ in range(400):
        schedule = Schedule({name: rng.choice(knob.choices) for name, knob in space.knobs.items()})
        assert (schedule in listed) == (not space.violations(schedule, problem))
        refused += schedule not in listed
    assert refused > 0


@pytest.mark.parametrize(
    "arch", ["sm_90", "sm_120", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_86", "sm_100"))]
)
@pytest.mark.parametrize(("seq_len", "causal"), [(1000, False), (1024, True)])
def test_the_space_is_large_enough_and_not_too_large(arch: str, seq_len: int, causal: bool) -> None:
    """On sm_90, for every problem of 64 or 128 columns; elsewhere the smaller parts allow less."""
    space = space_for(arch, Attention)
    problem = Attention.standard(seq_len=seq_len, head_dim=128, causal=causal)
    count = sum(1 for _ in space.schedules(problem, pinned={"accum_mode": "fp32"}))
    assert (5000 if arch == "sm_90" else 2000) <= count <= 40_000
    modelled = sum(1 for _ in space.schedules(problem, pinned={"accum_mode": "fp32"} | space.modelled_pins()))
    assert 100 <= modelled <= count / 5


@pytest.mark.slow
def test_at_most_two_departures_from_the_plain_kernel() -> None:
    problem, pins = PROBLEM.replace(causal=True), SPACE.modelled_pins()
    for schedule in itertools.islice(SPACE.schedules(problem), 0, None, 17):
        departures = sum(
            schedule[name] != value
            for name, value in pins.items()
            if name not in ("flat_steps", "reload_q", "q_ahead", "store_late", "q_in_registers", "unroll", "peel_first")
        )
        departures += 2 if schedule["flat_steps"] else schedule["persistent"] == "snake"
        departures += schedule["block_order"] == "swizzled"
        assert departures + bool(schedule["latency_k"] or schedule["latency_v"]) <= 2


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"q_subtiles": 2, "qk_ahead": True, "tile_n": 32}, ""),
        ({"q_subtiles": 2, "qk_ahead": True, "tile_n": 32, "latency_k": 2}, "two departures"),
        ({"division": "ieee", "tma_store": False}, "two departures"),
        ({"loop_split": True}, "nothing to split"),
        ({"tile_m": 96}, "not one of [64, 128, 16, 32]"),
        ({"tma_loads": 1}, "tma_loads = 1 is not one of [True, False]"),
        ({"wings": 2}, "unknown knobs"),
        ({"tile_m": None}, "missing"),
    ],
    ids=str,
)
def test_violations_say_why(knobs, why) -> None:
    """Of the plain kernel for a causal mask, or for none where the loop would be split."""
    problem = PROBLEM.replace(causal="loop_split" not in knobs)
    changed = {**SPACE.default(problem), **knobs}
    found = SPACE.violations(Schedule({name: value for name, value in changed.items() if value is not None}), problem)
    assert (why in " ".join(found), bool(found)) == (True, bool(why))


def test_what_only_a_measurement_shows_is_marked() -> None:
    pins = SPACE.modelled_pins()
    assert set(pins) == MEASURED_ONLY
    assert all(SPACE.knobs[name].measured_only and SPACE.knobs[name].default == value for name, value in pins.items())
    assert all(pins.items() <= dict(schedule).items() for schedule in SPACE.schedules(PROBLEM, pinned=pins))


def test_shares_of_keys_take_two_steps_with_tma_loads() -> None:
    problem = Attention.problem(seq_q=1, seq_k=4096, head_dim=128, heads=8, kv_heads=8)
    schedule = SPACE.default(problem).replace(tile_m=16, tile_n=128, kv_splits=16)
    assert SPACE.unworkable(schedule, problem) == []
    for changed in ({"kv_splits": 8}, {"tile_n": 64}, {"occupancy": 2}, {"tile_m": 32}, {"num_worker_warps": 8}):
        other = schedule.replace(**changed)
        assert any("still being read" in why for why in SPACE.unworkable(other, problem)), changed
        assert SPACE.unworkable(other.replace(tma_loads=False), problem) == []
    for masked in (problem.replace(seq_k=4097), problem.replace(causal=True)):  # masks take the room of the second step
        assert SPACE.unworkable(schedule, masked) != [], masked


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("knob", "values"),
    [("kv_splits", (2, 4, 8, 16, 32, 64)), ("pack_gqa", (True,)), ("column_parts", (2,)), ("tile_m", (16,))],
)
def test_knobs_for_other_problems_rest_on_ordinary_ones(arch: str, knob: str, values: tuple) -> None:
    """A walk that tried small tiles, say, with every value of the rest would not end."""
    space = space_for(arch, Attention)
    decode = Attention.problem(
        seq_q=2, seq_k=4096, head_dim=96, causal=True, alignment="bottom_right", heads=8, kv_heads=2
    )
    for value in values:
        for seq_len, causal in ((1024, False), (4096, True)):
            problem = Attention.standard(seq_len=seq_len, head_dim=128, causal=causal)
            assert next(space.schedules(problem, pinned={knob: value}), None) is None
        assert next(space.schedules(decode, pinned={knob: value}), None) is not None


def test_schedules_of_earlier_versions_are_completed() -> None:
    old = {name: value for name, value in DEFAULT.items() if name not in SPACE.modelled_pins()}
    assert SPACE.complete(Schedule(old)) == DEFAULT
    for whole in (DEFAULT, DEFAULT.replace(persistent="snake", loop_split=True, q_subtiles=2)):
        assert SPACE.complete(whole) == whole
    assert "wings" in SPACE.complete(Schedule(old, wings=2))  # what is unknown stays, to be refused


def test_constraints_are_checked_early_and_late_alike(monkeypatch) -> None:
    """A constraint over more combinations than are tabulated allows the same schedules in the same order."""
    problem = Attention.standard(seq_len=1000, head_dim=128, causal=True)
    pinned = {
        "occupancy": 1,
        "num_worker_warps": 4,
        "tile_m": 64,
        "opt_level": 3,
        "persistent": "no",
        "num_ctas": 1,
        "kv_direction": "forward",
        "division": "approximate",
        "tma_store": True,
    }
    early = list(space_for("sm_90", Attention).schedules(problem, pinned=pinned))
    monkeypatch.setattr("tiledsched.core.space.MOST_COMBINATIONS", 1)
    assert list(space_for("sm_90", Attention).schedules(problem, pinned=pinned)) == early
    assert len(early) > 100


@pytest.mark.slow
def test_samples_take_every_value_that_a_schedule_may_have() -> None:
    problem, rng = Attention.problem(seq_q=2, seq_k=4096, head_dim=96, heads=8, kv_heads=2, batch=2), random.Random(7)
    drawn = [SPACE.sample(problem, rng) for _ in range(300)]
    assert all(SPACE.violations(each, problem) == [] for each in drawn)
    for name, knob in SPACE.knobs.items():
        allowed = {value for value in knob.choices if next(SPACE.schedules(problem, pinned={name: value}), None)}
        assert {schedule[name] for schedule in drawn} == allowed, name


def test_the_default_is_repaired_where_a_constraint_forbids_it() -> None:
    space = space_for("sm_121", Attention)
    problem = Attention.standard(seq_len=512, head_dim=256)
    wanted = Schedule({name: knob.default for name, knob in space.knobs.items()})
    default = space.default(problem)
    assert space.violations(wanted, problem)
    assert not space.violations(default, problem)
    assert sum(default[name] != wanted[name] for name in default) == 1


def test_the_default_keeps_what_is_pinned() -> None:
    assert SPACE.default(PROBLEM, pinned={"accum_mode": "fp16"}) == DEFAULT.replace(accum_mode="fp16")
    for wrong, pinned in ((PROBLEM.replace(dtype="bfloat16"), {"accum_mode": "fp16"}), (PROBLEM, {"pack_gqa": True})):
        with pytest.raises(SpaceError, match="no valid schedule"):
            SPACE.default(wrong, pinned=pinned)


def test_a_constraint_may_end_with_a_comment() -> None:
    for exploring in (False, True):
        refused = Constraint(
            require="tile_m < 0  # never", because="a test", exploring=exploring, names=frozenset({"tile_m"})
        )
        commented = replace(SPACE, constraints=(refused, *SPACE.constraints))
        assert commented.violations(DEFAULT, PROBLEM) == ["tile_m < 0  # never: a test"]
        assert commented.unworkable(DEFAULT, PROBLEM) == ([] if exploring else ["tile_m < 0  # never: a test"])


def test_a_ragged_length_may_split_the_loop_without_a_causal_mask() -> None:
    for length, may in ((1024, False), (1000, True)):
        problem = Attention.standard(seq_len=length, head_dim=64)
        assert any(schedule["loop_split"] for schedule in SPACE.schedules(problem)) is may


def test_space_ids_tell_spaces_apart_by_content() -> None:
    assert space_for("sm_120", Attention).id != space_for("sm_121", Attention).id
    assert SPACE.id == load_space(data_files.search_spaces() / "attention" / "sm_90.toml").id


MINE = """
extends = "attention/sm_90.toml"
[knobs.tile_m]
choices = [64]
"""


def mine(folder, text=MINE):
    (folder / "my.toml").write_text(text)
    return load_space(folder / "my.toml")


def test_a_users_space_extends_a_shipped_one(tmp_path) -> None:
    space = mine(tmp_path)
    assert (space.arch, *(space.knobs[name].choices for name in ("tile_m", "tile_n"))) == (
        "sm_90",
        (64,),
        (32, 64, 128),
    )


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
        (MINE + "[knobs.tile_q]\nchoices = [16]", "attention has no knob 'tile_q'; it has tile_m, tile_n"),
        (
            "kernel = 'attention'\narch = 'sm_90'\n[knobs.tile_m]\nchoices = [64]",
            "the knob 'tile_n' is missing, and attention takes it; extend a file that has it",
        ),
        ("limits = 3", "'limits' must be a table"),
        ("extends = 'my.toml'", "goes round in a circle"),
    ],
)
def test_a_wrong_space_file_names_its_key(tmp_path, text: str, words: str) -> None:
    with pytest.raises(SpaceError, match=re.escape(words)) as error:
        mine(tmp_path, text)
    assert "my.toml" in str(error.value)


def test_an_unknown_arch_is_named() -> None:
    with pytest.raises(SpaceError, match="known are sm_80, sm_86"):
        space_for("sm_75", Attention)


def test_a_space_that_allows_nothing_says_so(tmp_path) -> None:
    space = mine(tmp_path, MINE + "[[constraints]]\nrequire = 'tile_m > 64'\nbecause = 'contrary'")
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
    space = replace(
        space,
        knobs={
            name: knob if name in few else replace(knob, choices=(knob.default,)) for name, knob in space.knobs.items()
        },
    )
    problem = Attention.standard(seq_len=1024, head_dim=64, causal=True)
    start = space.default(problem)
    found = list(space.neighbours(start, problem, pinned=("tile_n",)))

    def changes(schedule) -> int:
        return sum(schedule[name] != start[name] for name in start)

    names = sorted(few)
    everything = (
        start.replace(**dict(zip(names, choices, strict=True)))
        for choices in itertools.product(*(space.knobs[name].choices for name in names))
    )
    near = (each for each in everything if 1 <= changes(each) <= 2 and each["tile_n"] == start["tile_n"])
    expected = {each for each in near if not space.unworkable(each, problem)}
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert [changes(each) for each in found] == sorted(changes(each) for each in found)
    assert any(space.violations(each, problem) for each in found)
    assert set(space.neighbours(start, problem, pinned=("tile_n",), changes=1)) == {x for x in found if changes(x) == 1}


def test_a_space_limited_to_candidates() -> None:
    listed = [{"tile_m": 128, "tile_n": 128}, {"loop_split": True}, {"tile_m": 512}, {"tile_m": 128, "tile_n": 128}]
    limited, large = SPACE.limited_to(listed), DEFAULT.replace(tile_m=128, tile_n=128)
    assert limited.default(PROBLEM) == DEFAULT
    # a split loop needs a mask, no tile has 512 rows, and the same candidate counts once
    for pinned in ({}, {"tile_m": 128}):
        assert list(limited.schedules(PROBLEM, pinned=pinned)) == [limited.default(PROBLEM, pinned=pinned), large]
    assert DEFAULT.replace(loop_split=True) in list(limited.schedules(PROBLEM.replace(causal=True)))
    with pytest.raises(SpaceError, match=r"unknown knobs \['tile_q'\]"):
        SPACE.limited_to([{"tile_q": 64}])


@pytest.mark.parametrize(
    "path", sorted((data_files.tuning_db() / "candidates" / "attention").glob("*.json")), ids=lambda path: path.stem
)
def test_shipped_candidates_name_known_knobs_and_values(path) -> None:
    listed = json.loads(path.read_text())
    arch = "_".join(path.stem.split("_")[:2]) if path.stem.startswith("sm_") else "sm_100"
    space = space_for(arch, Attention).limited_to(listed)
    assert len(space.candidates) == len(listed)
    reached, wanted = set(), set(space.candidates)
    for problem in dict.fromkeys(problem for name in SUITES for problem in Attention.suite(name)):
        reached |= wanted & set(space.schedules(problem))
        if len(reached) > 0.8 * len(listed):
            return
    pytest.fail(f"no suite has a problem for {len(wanted) - len(reached)} of {len(listed)}")
