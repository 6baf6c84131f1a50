"""The backward pass of attention before anything is measured: suites, the size of its search, its model and similarity."""

from __future__ import annotations

import pytest

from tiledsched.core.cases import shrunk
from tiledsched.core.device import arch_spec, spilled
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention_backward import AttentionBackward
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import log_us
from tiledsched.store.records import Entry

COST, SIMILARITY = AttentionBackward.cost, AttentionBackward.similarity


def problem(size: int = 4096, head_dim: int = 128, **more):
    heads = {"heads": 2048 // head_dim, "kv_heads": 2048 // head_dim, "batch": max(1, 16384 // size)}
    return AttentionBackward.problem(
        **{"seq_q": size, "seq_k": size, "head_dim": head_dim, "dtype": "bfloat16", **heads, **more}
    )


def schedule(**knobs):
    return Schedule({name: knob.default for name, knob in AttentionBackward.knob_fields().items()} | knobs)


def modelled(p, s, arch="sm_90"):
    return COST.model(p, s, COST.expected(p, s, arch_spec(arch)), arch_spec(arch))


def test_suites_have_the_sizes_of_forward():
    forward = {tuple(Attention.problem(**each).values.items()) for each in Attention.suites["attention"]}
    backward = [AttentionBackward.problem(**each) for each in AttentionBackward.suites["attention"]]
    common = Attention.fields.keys() & AttentionBackward.fields.keys()
    seen = {tuple((name, value) for name, value in p.values.items() if name in common) for p in backward}
    wanted = {tuple((name, value) for name, value in p if name in common) for p in forward}
    assert seen == wanted
    assert len(backward) == 96
    twins = [AttentionBackward.problem(**each) for each in AttentionBackward.suites["deterministic"]]
    assert {p.replace(deterministic=False) for p in twins} <= set(backward)


@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_search_is_small_and_a_first_call_gets_what_works(arch, head_dim):
    space = space_for(arch, AttentionBackward)
    for more in ({"causal": True}, {"deterministic": True}, {"causal": True, "packed": 4, "batch": 1}):
        p = problem(1024, head_dim, **more)
        plain = list(space.schedules(p, pinned=space.modelled_pins()))
        assert 4 <= len(plain) <= 600, p
        served = LookupTable([], AttentionBackward).resolve(p, arch, "")
        assert served.schedule in plain
        assert served.provenance in ("modelled", "default")
        assert p.deterministic <= (served.schedule["structure"] != "atomic")
        default = space.default(p)
        assert log_us(p, served.schedule, arch_spec(arch)) <= log_us(p, default, arch_spec(arch))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_model_follows_the_work(head_dim):
    base = schedule()
    times = [modelled(problem(size, head_dim), base) for size in (1024, 4096, 16384)]
    assert times[0] * 3 < times[1] * 1.2
    assert times[1] * 3 < times[2]
    full, causal = (modelled(problem(16384, head_dim, causal=causal), base) for causal in (False, True))
    assert 0.5 < causal / full < 0.75
    p = problem(4096, head_dim)
    assert modelled(p, base) < modelled(p, schedule(structure="two_pass", tile_m_dq=128))
    grouped = problem(4096, head_dim, kv_heads=2048 // head_dim // 8, causal=True)
    long_first = schedule(block_order="heads_fastest")
    apart = long_first.replace(group_heads="apart")
    assert modelled(grouped, apart) < 1.2 * modelled(problem(4096, head_dim, causal=True), long_first)


@pytest.mark.parametrize(
    ("arch", "knobs", "spills"),
    [
        ("sm_90", {}, 0),
        ("sm_90", {"tile_n": 64}, 0),
        ("sm_100", {}, 0),
        ("sm_100", {"tile_m": 128}, 0),
        ("sm_121", {}, 1008),
        ("sm_121", {"tile_n": 64}, 864),
        ("sm_121", {"tile_m": 32, "tile_n": 64}, 0),
        ("sm_121", {"tile_m": 32}, 584),
        ("sm_80", {}, 2176),
        ("sm_80", {"tile_m": 128}, 4336),
    ],
)
def test_expected_registers_say_what_spills(arch, knobs, spills):
    # tileiras 13.5.37, D=128, causal, bfloat16: the bytes that each program spills.
    facts = COST.expected(problem(causal=True), schedule(**knobs), arch_spec(arch))
    assert bool(spilled(facts.spill_bytes)) == bool(spilled(spills))
    assert facts.ctas_per_sm == 1


def test_problems_with_a_fixed_order_are_of_another_kind():
    p, q = problem(), problem(deterministic=True)
    assert SIMILARITY.kind(p) != SIMILARITY.kind(q)
    assert SIMILARITY.requires_same_kind(q)
    assert (
        SIMILARITY.weight(p, q) < SIMILARITY.weight(p, problem(causal=True)) <= SIMILARITY.weight(p, problem(2048)) < 1
    )
    near = problem(dtype="float16")
    assert SIMILARITY.kind(near) == SIMILARITY.kind(p)
    assert SIMILARITY.distance(near, p) < SIMILARITY.distance(problem(2048), p)
    won = Entry(
        kernel=AttentionBackward.name,
        arch="sm_90",
        problem=p,
        schedule=schedule(block_order="heads_fastest"),
        device_name="NVIDIA H200",
        provenance="measured",
        regime="burst",
        fingerprint="f",
    )
    table = LookupTable([won], AttentionBackward)
    assert table.resolve(near, "sm_90", "NVIDIA H200").provenance == "transferred"
    assert table.resolve(q, "sm_90", "NVIDIA H200").schedule["structure"] != "atomic"


def test_lengths_are_rounded_and_features_are_apart():
    p = problem(1500, batch=2)
    assert SIMILARITY.bucketed(p).seq_q % 16
    assert SIMILARITY.bucketed(problem(4096)) == problem(4096)
    windowed = problem(4096, causal=True, window=512)
    assert SIMILARITY.distance(problem(4096, causal=True), windowed) > 0.3


def test_sizes_of_nothing_stay_nothing_where_check_shrinks_a_problem():
    for p in AttentionBackward.small():
        small = shrunk(AttentionBackward, p)
        assert all(small.values[name] == 0 for name in ("window", "window_right", "packed") if p.values[name] == 0), p
        assert small.seq_q * small.seq_k < p.seq_q * p.seq_k
