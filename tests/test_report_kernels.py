"""The report of a kernel that is nothing like attention: its own words everywhere, and nobody else's."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace
from functools import partial

import cuda.tile as ct
import pytest
from report_samples import (
    DEVICE,
    PROBLEM,
    add_builds,
    add_modelled,
    add_times,
    build_of,
    check_report,
    plain,
    report_of,
)

import tiledsched.core.fields as ts
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.kernel import Kernel
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.report import write_report
from tiledsched.report.answer import answer, next_step
from tiledsched.report.axes import axes_of, cell

ATTENTIONS_WORDS = re.compile(
    r"(?i:attention|head|seq|query|key|\bkv|causal|tile_[mn]|accum|persistent|TFLOP)|\b[SDBH]\b"
)


@ct.kernel
def smooth(
    X, Out, length, width: ct.Constant[int], SPAN: ct.Constant[int], LANES: ct.Constant[int], turn: ct.Constant[int]
):
    """Copies a part; nothing of it is run."""
    ct.store(Out, (ct.bid(0), 0), ct.load(X, (ct.bid(0), 0), (SPAN, LANES)))


def numbered(p, s):
    """The turn as tile code knows it."""
    return {"turn": ("left", "right").index(s["turn"])}


class Smooth(Kernel):
    """Two sizes, one of them a constant; limited by memory."""

    name = "report_tests.smooth"
    function = smooth
    length = ts.dim()
    width = ts.dim(constant=True)
    dtype = ts.dtype("float16", "float32")
    X = ts.array("length width")
    Out = ts.out("length width")
    knobs = {"SPAN": [128, 256, 512], "LANES": [1, 2], "turn": ["left", "right"]}
    constants = numbered

    def grid(p, s, device):
        return (-(-p.length // s["SPAN"]),)

    def reference(xp, X):
        return X


class Product(Kernel):
    """Axes and labels of its own, FLOPs, knobs called like a tile's, and names that the report's files have, too."""

    name = "report_tests.product"
    function = smooth
    length = ts.dim()
    inner = ts.dim()
    width = ts.dim(constant=True)
    samples = ts.dim(1)
    repeats = ts.dim(1)
    order = ts.choice("nn", "nt")
    dtype = ts.dtype("float16")
    X = ts.array("length width")
    Out = ts.out("length width")
    knobs = {"BLOCK_M": [64, 128], "BLOCK_N": [64, 128], "threads": [1, 2], "SPAN": [1], "LANES": [1], "turn": ["left"]}
    constants = numbered
    label = {"N": "width", "M": "length"}
    axes = ("width", "samples", "order")

    def grid(p, s, device):
        return (p.length,)

    def reference(xp, X):
        return X

    def flops(p):
        return 2.0 * p.length * p.width * p.inner


class Ragged(Kernel):
    """Sizes in a list, and nothing that problems could share."""

    name = "report_tests.ragged"
    function = smooth
    groups = ts.sizes()
    X = ts.array(lambda p: (sum(p.groups), 8), dtype="float16")
    Out = ts.out(lambda p: (sum(p.groups), 8), dtype="float16")
    knobs = {"SPAN": [1], "LANES": [1], "turn": ["left"]}
    constants = numbered

    def grid(p, s, device):
        return (len(p.groups),)

    def reference(xp, X):
        return X


LONG, SHORT = (Smooth.problem(length=length, width=64) for length in (8192, 512))


def choices(kernel):
    return [
        Schedule(dict(zip(kernel.knobs, values, strict=True))) for values in itertools.product(*kernel.knobs.values())
    ]


def smooth_us(schedule):
    """SPAN matters most, then LANES, then the turn: all twelve differ."""
    us = 100.0 * {128: 2.0, 256: 1.0, 512: 1.5}[schedule["SPAN"]] * {1: 1.0, 2: 1.2}[schedule["LANES"]]
    return us * (1.05 if schedule["turn"] == "right" else 1.0)


def add_smooth(db, problem, factor=1.0, **changes):
    add_times(db, {one: factor * smooth_us(one) for one in choices(Smooth)}, problem=problem, **changes)


def product(width, **more):
    return Product.problem(length=128, inner=32, width=width, **more)


def add_product(db, width, samples):
    """`threads` matters most; the tile is known by its name."""
    times = {one: 1.0 + one["threads"] + one["BLOCK_M"] / 1e3 + one["BLOCK_N"] / 1e4 for one in choices(Product)}
    add_times(db, times, problem=product(width, samples=samples))


def test_its_own_words_and_no_others(db, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    for problem in (LONG, SHORT, LONG.replace(width=128)):
        add_smooth(db, problem)
    add_smooth(db, LONG, 1.5, regime="sustained")
    add_modelled(
        db, choices(Smooth)[0], problem=LONG.replace(dtype="float32"), runner_up=choices(Smooth)[1], margin=0.5
    )
    add_builds(db, [build_of(one, one.id * 2, problem=LONG) for one in choices(Smooth)])
    db.record_failure(
        None,
        Smooth.name,
        "sm_90",
        "measure",
        choices(Smooth)[3],
        Failure(kind=FailureKind.HANG, message="no answer"),
        problem=LONG,
        device=DEVICE,
    )
    add_times(db, {plain(128, 64): 100.0, plain(64, 64): 110.0})  # attention's, in the same database
    add_modelled(db, plain(128, 64), problem=PROBLEM.replace(causal=True))
    written = {
        path.name: path.read_text(encoding="utf-8") for path in write_report(report_of(db, kernel=Smooth), tmp_path)
    }
    assert set(written) == {
        "report.md",
        "report.html",
        "schedules.csv",
        "sensitivity.csv",
        "regimes.csv",
        "knobs.csv",
        "winners.csv",
    }
    written["report.html"] = re.sub(
        r"<style>.*</style>|<script(?: type=.module.)?>.*?</script>|<[^>]*>", " ", written["report.html"], flags=re.S
    )
    for text in written.values():
        assert ATTENTIONS_WORDS.findall(text) == []
    markdown = written["report.md"]
    assert "\n# report_tests.smooth " in markdown
    for section in (
        "Schedules of 3 problems, measured",
        "Schedules of 1 problem, modelled",
        "Burst against sustained",
        "Knobs that do not change the machine code",
        "Candidates that failed",
        "Conditions: NVIDIA H200",
    ):
        assert f"\n## {section}\n" in markdown
    assert re.findall("\n### (.*)", markdown.split("## Schedules of 1 problem, modelled")[0]) == [
        "width=64 float16",
        "width=128 float16",
    ]


KERNELS = {
    "another kernel": (
        Smooth,
        [
            partial(add_smooth, problem=LONG),
            partial(add_smooth, problem=SHORT, factor=0.1),
            partial(add_modelled, schedule=choices(Smooth)[0], problem=LONG.replace(dtype="float32")),
        ],
    ),
    "one schedule of another kernel": (Smooth, [partial(add_times, times={choices(Smooth)[0]: 10.0}, problem=LONG)]),
    "axes labels and named tiles": (
        Product,
        [
            *(partial(add_product, width=width, samples=samples) for width in (4096, 256) for samples in (1, 2)),
            partial(add_times, times={choices(Product)[0]: 5.0}, problem=product(4096, order="nt")),
            partial(add_times, times={choices(Product)[0]: 5.0}, problem=product(256, repeats=3)),
        ],
    ),
    "nothing to share": (
        Ragged,
        [partial(add_times, times={choices(Ragged)[0]: 5.0}, problem=Ragged.problem(groups=[300, 200]))],
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_report_of_a_kernel_is_as_it_was(db, tmp_path, name):
    kernel, steps = KERNELS[name]
    for step in steps:
        step(db)
    check_report(name, report_of(db, kernel=kernel), tmp_path)


def test_hints_are_a_tile_only_where_nothing_else_varies(db):
    base = Schedule(SPAN=128, LANES=1, turn="left")
    times = {
        base.replace(SPAN=span, occupancy=occ, num_ctas=ctas): 100.0 + span / 64 + 50 * occ + ctas
        for span in (128, 256)
        for occ in (1, 2)
        for ctas in (1, 2)
    }
    add_times(db, times, problem=LONG)
    assert report_of(db, kernel=Smooth).tile_knobs == ("SPAN", "occupancy")


def test_what_is_stored_of_other_kernels_is_left_alone(db):
    add_smooth(db, LONG)
    add_times(db, {plain(128, 64): 100.0})
    add_times(db, {plain(128, 64): 150.0}, regime="sustained")
    add_builds(db, [build_of(plain(256, 256), Failure(kind=FailureKind.COMPILE_ERROR, message="too large"))])
    own, other = report_of(db, kernel=Smooth), report_of(db)
    assert [one.problem for one in own.measured.problems] == [LONG]
    assert [one.problem for one in other.measured.problems] == [PROBLEM]
    assert (own.elsewhere, own.regimes, own.failures, own.builds) == (0, (), (), 0)
    assert (other.elsewhere, len(other.regimes), len(other.failures)) == (1, 1, 1)
    nothing = report_of(db, "sm_121", kernel=Smooth)
    assert answer(nothing) == ("Nothing of report_tests.smooth was measured on sm_121, and nothing was modelled.",)
    assert next_step(nothing).startswith("Run `tiledsched tune tests/test_report_kernels.py:Smooth --arch sm_121`")


def test_layout_of_declarations():
    attention = axes_of(Attention)
    assert attention.swept == ("seq_q", "seq_k")
    assert attention.shared == ("head_dim", "dtype", "causal")
    assert list(attention.columns) == ["S", "B", "H"]
    uneven = PROBLEM.replace(seq_q=1)
    assert (cell(PROBLEM, attention.swept), cell(uneven, attention.swept), attention.size(uneven)) == (
        "4096",
        "1/4096",
        4096,
    )
    assert attention.describe_shared(PROBLEM.replace(causal=True)) == "D=64 float16, causal"
    smooth_axes = axes_of(Smooth)
    assert (smooth_axes.swept, smooth_axes.shared, list(smooth_axes.columns)) == (
        ("length",),
        ("width", "dtype"),
        ["length"],
    )
    product = axes_of(type("Both", (Product,), {"name": "report_tests.both", "label": {"E": ("inner", "width")}}))
    assert product.describe_shared(Product.problem(length=1, inner=2, width=3)) == "order=nn float16"
    assert list(product.columns) == ["E", "length", "samples"]  # swept with its label, though the two differ
    lists = replace(smooth_axes, swept=("groups",), columns={"groups": ("groups",)})
    assert lists.size(Ragged.problem(groups=[300, 200])) == 500
    assert cell(Ragged.problem(groups=[300, 200]), ("groups",)) == "300,200"
    assert axes_of(Ragged).swept == ("groups",)
