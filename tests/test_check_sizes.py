"""How a check on the CPU chooses sizes: from the tiles that a kernel takes, whatever it calls its knobs."""

from __future__ import annotations

import re

import cuda.tile as ct
import numpy as np
import pytest

import tiledsched as ts
from tiledsched.checking.interpreted import check_schedule
from tiledsched.checking.sizes import FEW_ELEMENTS, SizeFinder
from tiledsched.core.kernel import Kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import run
from tiledsched.interpreter.uses import TileUses

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


def found(kernel, schedule=None, **how):
    """The sizes that a schedule gets, by name."""
    space = space_for("sm_90", kernel)
    base = kernel.problem(**next(iter(kernel.suites.values()))[0])
    finder, uses = SizeFinder(kernel=kernel, space=space, base=base), TileUses()
    s = Schedule(schedule) if schedule else space.default(base)
    passed, _, message = check_schedule(kernel, finder.small, s, kinds=(), uses=uses)
    assert passed, message
    return finder.sized(s, uses, **how).values


def copied(X, Out, TM: Int, TN: Int):
    place = ct.bid(0), ct.bid(1)
    ct.store(Out, place, ct.load(X, place, (TM, TN)))


class Copied(Kernel):
    """Two sizes, each cut by a knob."""

    function = copied
    rows, columns = ts.dim(), ts.dim()
    dtype = ts.dtype("float16")
    X, Out = ts.array("rows columns"), ts.out("rows columns")
    knobs = {"TM": [16, 1], "TN": [64, 128]}
    suites = {"one": [{"rows": 8192, "columns": 8192}]}

    def grid(p, s, device):
        return -(-p.rows // s["TM"]), -(-p.columns // s["TN"])

    def reference(xp, X):
        return X


def like(name, **fields):
    """`Copied` with other fields."""
    return type(name, (Copied,), {**fields, "__module__": __name__})


def sizes(**given):
    return {"one": [given]}


# Rows that are one tile, by a constraint.
Whole = like(
    "Whole",
    columns=ts.dim(constant=True),
    constraints={"TN >= columns": "a row is one tile"},
    suites=sizes(rows=8192, columns=64),
)
# A size that must be a multiple, by a constraint that reads no knob.
Multiples = like(
    "Multiples", constraints={"columns % 48 == 0": "whole groups"}, suites=sizes(rows=8192, columns=48 * 64)
)
Square = like("Square", requires={"rows == columns": "it is square"})  # sizes that change only together
Few = like("Few", rows=ts.dim(most=20), suites=sizes(rows=20, columns=8192))  # a size with a largest value


@pytest.mark.parametrize(
    ("kernel", "schedule", "sizes"),
    [
        (Copied, {"TM": 16, "TN": 64}, {"rows": 41, "columns": 227}),
        (Copied, {"TM": 1, "TN": 128}, {"rows": 3, "columns": 451}),
        (Whole, {"TM": 16, "TN": 64}, {"rows": 41, "columns": 47}),  # less than a tile, so that something is padded
        (Whole, {"TM": 16, "TN": 128}, {"rows": 41, "columns": 64}),
        (Multiples, {"TM": 16, "TN": 64}, {"rows": 41, "columns": 240}),
        (Square, {"TM": 16, "TN": 64}, {"rows": 227, "columns": 227}),
        (Few, {"TM": 16, "TN": 64}, {"rows": 20, "columns": 227}),
    ],
)
def test_every_size_is_two_tiles_and_the_rest_of_one_or_what_is_allowed(kernel, schedule, sizes):
    values = found(kernel, schedule)
    assert {name: values[name] for name in sizes} == sizes


def test_compile_time_sizes_are_halved_until_arrays_are_small():
    """Only those that make arrays smaller, down to the first that does: one is of no array, and one cannot be smaller."""
    base = {"rows": 8192, "columns": 1 << 20, "depth": 1 << 21, "groups": 1 << 22}
    fixed = like(
        "Fixed",
        **{name: ts.dim(constant=True) for name in ("columns", "depth", "groups")},
        requires={"groups % 4194304 == 0": "it has no smaller one"},
        suites=sizes(**base),
    )
    small = SizeFinder(kernel=fixed, space=space_for("sm_90", fixed), base=fixed.problem(**base)).small
    assert (small.depth, small.groups) == (1 << 21, 1 << 22)
    assert FEW_ELEMENTS / 2 < 2 * small.rows * small.columns <= FEW_ELEMENTS


def test_sizes_may_be_whole_tiles_or_one_of_them_long():
    assert dict(found(Copied, whole=True)) == {"rows": 32, "columns": 192, "dtype": "float16"}
    assert found(Copied, long="rows", tiles=17)["rows"] == 17 * 16 + 9


def gathered(Table, Ids, Out, TILE: Int):
    place = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    ids = ct.gather(Ids, place)
    for j in range(Table.shape[1]):
        ct.scatter(Out, (place, j), ct.gather(Table, (ids, j)))


class Gathered(Kernel):
    """A tile of indices; and an axis that is taken element by element."""

    function = gathered
    entries, count, width = ts.dim(), ts.dim(), ts.dim()
    Table, Out = ts.array("entries width", dtype="float32"), ts.out("count width", dtype="float32")
    Ids = ts.array("count", dtype="int32", below="entries")
    knobs = {"TILE": [32, 64]}
    suites = {"one": [{"entries": 1000, "count": 1000, "width": 1000}]}

    def grid(p, s, device):
        return -(-p.count // s["TILE"])

    def reference(xp, Table, Ids):
        return Table[Ids]


def test_tiles_of_indices_count_as_tiles():
    values = found(Gathered)
    assert values["count"] >= 2 * 32 + 1
    assert values["width"] >= 3


def halved(X, Out, half: Int):
    row = ct.bid(0)
    first, second = ct.load(X, (row, 0), (1, half)), ct.load(X, (row, 1), (1, half))
    ct.store(Out, (row, 0), first + second)


class Halved(Kernel):
    """A size that must be a power of two, which nothing says."""

    function = halved
    rows, width = ts.dim(), ts.dim(constant=True)
    X, Out = ts.array("rows width", dtype="float32"), ts.out("rows width/2", dtype="float32")
    knobs = {"num_worker_warps": [4, 8]}
    suites = {"one": [{"rows": 1000, "width": 64}]}

    def constants(p, s):
        return {"half": p.width // 2}

    def grid(p, s, device):
        return p.rows

    def reference(xp, X, p):
        return X[:, : p.width // 2] + X[:, p.width // 2 :]


class Grouped(Halved):
    """A size that the reference takes only in groups, which nothing says."""

    name = "grouped_in_check"
    function = copied
    width = ts.dim()
    Out = ts.out("rows width", dtype="float32")
    knobs = {"TM": [4, 8], "TN": [32, 64]}
    constraints = {"width > 3": "no reference for less"}

    def constants(p, s):
        return {}

    def grid(p, s, device):
        return -(-p.rows // s["TM"]), -(-p.width // s["TN"])

    def reference(xp, X, p):
        return X.reshape(p.rows, -1, 4).reshape(p.rows, p.width)


@pytest.mark.parametrize(("kernel", "multiple"), [(Halved, 64), (Grouped, 4)])
def test_sizes_that_the_reference_or_the_compiler_refuses_are_not_taken_for_wrong(kernel, multiple):
    rows = list(ts.check(kernel))
    assert [row.message for row in rows if row.verdict == "wrong"] == []
    assert {row.problem.width % multiple for row in rows if row.passed} == {0}
    (refused,) = {row.skipped for row in rows if row.skipped}  # named once, with its reason
    assert re.search("powers of two|reference: for .* it raises ValueError", refused), refused
    assert {row.verdict for row in rows} == {"right", "not run"}


def test_a_kernel_without_suites_is_checked_too():
    rows = list(ts.check(like("Bare", suites={})))
    assert all(row.passed for row in rows)
    assert max(row.tiles["columns"] for row in rows) > 2


def test_sizes_that_are_given_stay_as_they_are():
    rows = list(ts.check(Copied, [{"rows": 5, "columns": 300}]))
    assert {(row.problem.rows, row.problem.columns) for row in rows} == {(5, 300)}
    assert {row.schedule["TN"]: row.tiles for row in rows if row.schedule["TM"] == 1} == {
        64: {"rows": 5, "columns": 5},
        128: {"rows": 5, "columns": 3},
    }


def test_every_value_of_every_knob_is_checked_and_schedules_with_other_hints_once():
    knobs = {"TM": [16, 1, 2, 4], "TN": [64, 128, 32], "num_worker_warps": [4, 8], "occupancy": [1, 2, 4]}
    schedules = {row.schedule for row in ts.check(like("Many", knobs=knobs))}
    for name in ("TM", "TN"):
        assert {each[name] for each in schedules} == set(knobs[name])
    assert len(schedules) <= 12


def neighbour(X, TILE: Int):
    block = ct.bid(0)
    here = ct.load(X, (block,), (TILE,))
    beside = ct.load(X, (min(block + 1, ct.num_blocks(0) - 1),), (TILE,))
    ct.store(X, (block,), here + beside)


class Neighbour(Kernel):
    """A block reads what another one changes: right only where blocks run in turn."""

    function = neighbour
    count = ts.dim()
    X = ts.inout("count", dtype="float32")
    knobs = {"TILE": [1, 2]}
    constraints = {"count % TILE == 0": "whole tiles"}
    suites = {"one": [{"count": 64}]}

    def grid(p, s, device):
        return p.count // s["TILE"]

    def reference(xp, X):
        return X + xp.concatenate([X[1:], X[-1:]])


def test_blocks_that_read_what_others_change_are_found():
    assert any("right where blocks run in turn" in row.message for row in ts.check(Neighbour, [{"count": 8}]))


def waiting(Turn, Out):
    while ct.atomic_add(Turn, 0, 0) != ct.bid(0):
        pass
    ct.store(Out, (ct.bid(0),), ct.full((1,), 1.0, dtype=ct.float32))


def test_a_loop_that_waits_for_ever_is_given_up():
    uses = TileUses(most_calls=1000)
    with pytest.raises(ts.TiledschedError, match="no end after 1,000 calls"):
        run(waiting, 2, [np.full(1, 5, np.int32), np.zeros(2, np.float32)], uses=uses)


def test_atomics_of_whole_tiles_are_those_of_single_elements():
    def added(X, Index, Out, Before, TILE: Int):
        index = ct.load(Index, (0,), (TILE,))
        ct.store(Before, (0,), ct.atomic_add(Out, index, ct.load(X, (0,), (TILE,))))

    for index in (np.arange(8)[::-1].copy(), np.array([0, 1, 1, 2, 9, 3, 1, 0])):
        x, out, before = np.arange(8, dtype=np.float32), np.full(8, 10, np.float32), np.zeros(8, np.float32)
        run(added, 1, [x, index.astype(np.int32), out, before, 8])
        wanted, seen = np.full(8, 10, np.float32), []
        for place, value in zip(index, x, strict=True):
            seen.append(wanted[place] if place < 8 else np.nan)
            if place < 8:
                wanted[place] += value
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(before, seen)


def summed(X, Out, N: Int, TILE: Int, NARROW: Int):
    total = ct.zeros((1,), ct.bfloat16 if NARROW else ct.float32)
    for j in range((N + TILE - 1) // TILE):
        x = ct.load(X, (ct.bid(0), j), (1, TILE), padding_mode=ZERO).astype(ct.float32)
        total = (total.astype(ct.float32) + ct.sum(x, axis=1)).astype(total.dtype)
    ct.store(Out, (ct.bid(0),), total.astype(Out.dtype))


def multiplied(X, W, Out, TILE: Int, NARROW: Int):
    total = ct.zeros((16, 16), ct.bfloat16 if NARROW else ct.float32)
    for k in range(ct.cdiv(X.shape[1], TILE)):
        x = ct.load(X, (ct.bid(0), k), (16, TILE), padding_mode=ZERO)
        w = ct.load(W, (k, ct.bid(1)), (TILE, 16), padding_mode=ZERO)
        product = ct.mma(x, w, ct.zeros((16, 16), ct.float32))
        total = (total.astype(ct.float32) + product).astype(total.dtype)
    ct.store(Out, (ct.bid(0), ct.bid(1)), total.astype(Out.dtype))


def sums(name, given, made, narrow):
    class Sums(Kernel):
        function = summed
        rows, N = ts.dim(), ts.dim()
        X, Out = ts.array("rows N", dtype=given), ts.out("rows", dtype=made)
        knobs = {"TILE": [256, 64]}
        suites = {"one": [{"rows": 64, "N": 4096}]}

        def constants(p, s):
            return {"NARROW": narrow}

        def grid(p, s, device):
            return p.rows

        def reference(xp, X):
            return X.sum(-1)

    class Products(Sums):
        function = multiplied
        m, n, k = ts.dim(), ts.dim(), ts.dim()
        rows = N = None
        X, W, Out = ts.array("m k", dtype=given), ts.array("k n", dtype=given), ts.out("m n", dtype=made)
        suites = {"one": [{"m": 1024, "n": 1024, "k": 1024}]}

        def grid(p, s, device):
            return -(-p.m // 16), -(-p.n // 16)

        def reference(xp, X, W):
            return X @ W

    return {"sums": Sums, "products": Products}[name]


@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("name", ["sums", "products"])
def test_sums_in_bfloat16_are_found_whatever_the_types_of_inputs_and_outputs(name, types):
    right, wrong = ({row.verdict for row in ts.check(sums(name, *types, narrow))} for narrow in (False, True))
    assert right == {"right"}
    assert "wrong" in wrong


def test_every_schedule_that_is_counted_has_run():
    """A limit of work had left out half of them without a word."""
    twelve = like("Twelve", knobs={"TM": [16, 32, 64, 256], "TN": [64, 128, 256]})
    for most, count in ((100, 12), (5, 5)):
        assert len({row.schedule for row in ts.check(twelve, schedules=most) if row.passed}) == count


@pytest.mark.slow
def test_a_schedule_that_works_for_large_sizes_only_is_checked_on_one_of_these_or_named():
    rows = list(ts.check(like("Large", constraints={"TN <= 64 or rows >= 600": "wide tiles pay for many rows only"})))
    assert {(row.schedule["TN"], row.problem.rows >= 600) for row in rows if row.passed} >= {(128, True), (64, False)}
    too_large = like(
        "TooLarge",
        constraints={"TN <= 64 or rows >= 10000000": "wide tiles pay for very many rows only"},
        suites=sizes(rows=20_000_000, columns=64),
    )
    skipped = [row for row in ts.check(too_large) if row.verdict == "not run"]
    assert {row.schedule["TN"] for row in skipped} == {128}
    assert all("very many rows" in row.skipped for row in skipped)


def first_column_only(X, Out, TM: Int, TN: Int):
    ct.store(Out, (ct.bid(0), ct.bid(1)), ct.load(X, (ct.bid(0), 0), (TM, TN)))


def wrong_in_wide_tiles(X, Out, TM: Int, TN: Int):
    ct.store(Out, (ct.bid(0), ct.bid(1)), ct.load(X, (ct.bid(0), ct.bid(1)), (TM, TN)) + (1 if TN == 128 else 0))


def of_small_sizes(name, **fields):
    """A kernel whose author names one problem, which is smaller than a tile."""
    kernel = like(name, small=lambda: [kernel.problem(rows=3, columns=40)], **fields)
    return kernel


FirstColumn = of_small_sizes("FirstColumn", function=first_column_only)
WrongWide = of_small_sizes(
    "WrongWide", function=wrong_in_wide_tiles, exploring={"TN == 64 or columns >= 4096": "wide tiles are for long rows"}
)


@pytest.mark.parametrize("kernel", [FirstColumn, WrongWide])
def test_schedules_also_run_beyond_the_small_problems_that_the_author_names(kernel):
    """On several tiles, and with values of knobs that are explored on large problems only."""
    assert not all(row.passed for row in ts.check(kernel))
    rows = list(ts.check(kernel, [{"rows": 3, "columns": 40}]))  # sizes that the caller names stay as they are
    assert {(row.passed, row.problem.columns) for row in rows} == {(True, 40)}


def test_a_kernel_of_which_only_the_author_knows_sizes_is_checked_on_these():
    few = of_small_sizes("FewSizes", suites={}, requires={"columns == 40 and rows == 3": "it takes no others"})
    rows = list(ts.check(few))
    assert {(row.passed, row.problem.columns) for row in rows} == {(True, 40)}
