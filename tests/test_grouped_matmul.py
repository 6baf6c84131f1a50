"""Grouped products: right in the interpreter over their schedules and offsets, their faults noticed."""

from __future__ import annotations

import numpy as np
import pytest
from tile_checks import check, make_inputs, mutated, run_schedule, sample, searched

import tiledsched as ts
from tiledsched.build.compiler import compile_schedule
from tiledsched.core.errors import ProblemError
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter import InterpreterError
from tiledsched.kernels.grouped_matmul import GroupedMatmul
from tiledsched.kernels.grouped_matmul.declaration import OFFSET_KINDS, group_ends, most_tiles

DEFAULT = {name: each.default for name, each in GroupedMatmul.knob_fields().items()}
SMALL = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64, "num_worker_warps": 4, "GROUP_M": 4, "STORE": "rows"}
NARROW = SMALL | {"TILE_M": 16, "SWAP": True}
VIEW = SMALL | {"STORE": "view", "PERSISTENT": False}


def schedule(**pinned):
    return Schedule(DEFAULT | pinned)


def inputs_of(p, kind):
    return make_inputs(GroupedMatmul, p) | {"Offsets": group_ends(kind, p.tokens, p.experts)}


@pytest.mark.parametrize("p", GroupedMatmul.small(), ids=str)
def test_schedules_are_right(p):
    for s in sample(GroupedMatmul, p, 4, seed=p.tokens):
        check(GroupedMatmul, p, s)


@pytest.mark.parametrize("kind", OFFSET_KINDS)
@pytest.mark.parametrize("pinned", [SMALL, NARROW, VIEW], ids=["rows", "narrow", "view"])
def test_groups_may_be_empty_and_may_have_all_rows(kind, pinned):
    p = GroupedMatmul.problem(tokens=150, experts=6, n=72, k=80, b_layout="column")
    check(GroupedMatmul, p, schedule(**pinned), inputs_of(p, kind))


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (7, 40), (200, 3), (64, 64)])
@pytest.mark.parametrize("tile", [16, 128])
def test_the_list_of_tiles_is_as_long_as_any_offsets_make_it(tokens, experts, tile):
    p, s = GroupedMatmul.problem(tokens=tokens, experts=experts, n=8, k=8), schedule(TILE_M=tile)
    rng, most = np.random.default_rng(tokens), 0
    for _ in range(200):
        ends = np.sort(rng.integers(0, tokens + 1, experts - 1))
        rows = np.diff(np.concatenate([[0], ends, [tokens]]))
        most = max(most, int((-(-rows // tile)).sum()))
    groups = min(tokens, experts)  # the worst: one row for each group but the last
    worst = groups - 1 + -(-(tokens - groups + 1) // tile)
    assert most <= worst <= most_tiles(p, s) <= worst + 1


def test_rows_behind_the_last_group_are_left_alone():
    p = GroupedMatmul.problem(tokens=100, experts=3, n=64, k=64)
    inputs = make_inputs(GroupedMatmul, p) | {"Offsets": np.array([10, 10, 70], np.int32)}
    for pinned in (SMALL, NARROW, VIEW):
        out = run_schedule(GroupedMatmul, p, schedule(**pinned), inputs)["C"].astype(np.float32)
        assert np.isfinite(out[:70]).all()
        assert np.isnan(out[70:]).all()


@pytest.mark.parametrize("ends", [[50, 900, 2000], [90, 10, 10], [-70, 20, 64], [0, 100, -5]], ids=str)
def test_no_offsets_make_it_touch_what_is_not_there(ends):
    """The interpreter refuses accesses beyond the arrays; blocks in both orders see the same list."""
    p = GroupedMatmul.problem(tokens=100, experts=3, n=64, k=64)
    inputs = make_inputs(GroupedMatmul, p) | {"Offsets": np.array(ends, np.int32)}
    for pinned in (NARROW, VIEW):
        run_schedule(GroupedMatmul, p, schedule(**pinned), inputs)


@pytest.mark.parametrize(("tokens", "experts"), [(512, 128), (8192, 32), (65536, 8)])
def test_as_many_schedules_are_searched_as_a_tune_can_learn_from(tokens, experts):
    found = searched(GroupedMatmul, GroupedMatmul.problem(tokens=tokens, experts=experts, n=4096, k=4096))
    assert 80 <= len(found) <= 400


MUTATIONS = {
    "the next group's rows overwritten": ("mask=(rows < group.end) & (columns < width)", "mask=columns < width"),
    "columns beyond the edge": ("mask=(rows < group.end) & (columns < width)", "mask=rows < group.end"),
    "the view goes on": ("C.slice(0, 0, group.end)", "C.slice(0, 0, C.shape[0])"),
    "every group from row 0": ("begins + (slot - before) * TILE_M", "(slot - before) * TILE_M"),
    "a group begins where it ends": ("ct.maximum(groups - 1, 0)", "groups"),
    "the first group begins late": ("begins = ct.where(groups > 0, begins, 0)", "begins = begins"),
    "tiles rounded down": ("(ct.maximum(ends - begins, 0) + (TILE_M - 1)) // TILE_M", "(ends - begins) // TILE_M"),
    "the next group's matrix": ("columns.load((group.index, step", "columns.load((group.index * 0, step"),
    "a group too many": ("(slot < before + tiles)", "(slot <= before + tiles)"),
    "tiles counted from the end of their group": ("ct.cumsum(tiles, axis=0) - tiles", "ct.cumsum(tiles, axis=0)"),
    "sum not transposed back": ("ct.transpose(acc) if const.SWAP else acc", "acc"),
    "steps rounded down": ("range(ct.cdiv(A.shape[1], const.TILE_K))", "range(A.shape[1] // const.TILE_K)"),
    "k not padded": ("padding_mode=ct.PaddingMode.ZERO, traversal_steps=steps", "traversal_steps=steps"),
    "tiles of A begin at multiples of their size": (
        "steps = (1, const.TILE_K)",
        "steps = (const.TILE_M, const.TILE_K)",
    ),
    "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
    "blocks without work": ("elif ct.bid(0) < used * tiles_n:", "else:"),
}


def battery():
    """Cases that between them notice every mutation above."""
    p = GroupedMatmul.problem(tokens=210, experts=17, n=80, k=104, b_layout="column")
    for pinned in (NARROW, VIEW, SMALL | {"PERSISTENT": False}):
        check(GroupedMatmul, p, schedule(**pinned))
    odd = GroupedMatmul.problem(tokens=90, experts=4, n=75, k=70)
    check(GroupedMatmul, odd, schedule(**SMALL), inputs_of(odd, "alternate"))


def test_the_battery_passes_the_kernel():
    battery()


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    modules = ["tiledsched.kernels.products", "tiledsched.kernels.grouped_matmul.tiles"]
    with mutated(modules, *MUTATIONS[name]), pytest.raises((AssertionError, InterpreterError)):
        battery()


@pytest.mark.parametrize("column", [False, True])
def test_the_function_takes_what_torchs_takes(launches, quiet, column):
    torch = pytest.importorskip("torch")
    a, w = torch.randn(70, 48).bfloat16(), torch.randn(3, 48, 32).bfloat16()
    b = w.transpose(1, 2).contiguous().transpose(1, 2) if column else w
    offsets = torch.tensor([20, 20, 70], dtype=torch.int32)
    wanted = torch.cat([a[:20].float() @ w[0].float(), a[20:].float() @ w[2].float()])
    torch.testing.assert_close(ts.grouped_matmul(a, b, offsets).float(), wanted, rtol=2e-2, atol=2e-1)
    assert ts.grouped_matmul(a[:0], b, offsets * 0).shape == (0, 32)
    with pytest.raises(ProblemError, match="Offsets must be int32, got int64"):
        ts.grouped_matmul(a, b, offsets.long())


@pytest.mark.compiler
@pytest.mark.parametrize(("store", "persistent"), [("view", True), ("rows", False)])
def test_hopper_spills_nothing(store, persistent):
    p = GroupedMatmul.problem(tokens=8192, experts=8, n=4096, k=4096, b_layout="column")
    facts = compile_schedule(GroupedMatmul, p, schedule(STORE=store, PERSISTENT=persistent), "sm_90").facts
    assert (facts.threads, facts.spill_bytes) == (384, 0)


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_100", "sm_121"])
def test_compiles_for_blackwell(arch):
    p = GroupedMatmul.problem(tokens=512, experts=128, n=1536, k=2048)
    facts = compile_schedule(GroupedMatmul, p, schedule(**SMALL), arch).facts
    assert facts.spill_bytes <= 48
