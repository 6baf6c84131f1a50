"""The report of a kernel that is nothing like attention: its own words everywhere, and nobody else's."""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from dataclasses import replace

import cuda.tile as ct
import pytest
from report_samples import DEVICE, PROBLEM, add_builds, add_modelled, add_times, build_of, plain, report_of

import tiledsched.core.fields as ts
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.kernel import Kernel
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.report import write_report
from tiledsched.report.answer import answer, next_step
from tiledsched.report.axes import axes_of, cell
from tiledsched.report.document import to_markdown
from tiledsched.report.text import document
from tiledsched.report.views import tile_rows
from tiledsched.store.db import TuningDB

ATTENTIONS_WORDS = re.compile(
    r"(?i:attention|head|seq|query|key|\bkv|causal|tile_[mn]|accum|persistent|TFLOP)|\b[SDBH]\b"
)


@ct.kernel
def smooth(
    X, Out, length, width: ct.Constant[int], SPAN: ct.Constant[int], LANES: ct.Constant[int], turn: ct.Constant[int]
):
    """Copies a part; nothing of it is run."""
    ct.store(Out, (ct.bid(0), 0), ct.load(X, (ct.bid(0), 0), (SPAN, LANES)))


@pytest.fixture
def charts_are_no_files(monkeypatch):
    """tests/test_report_files.py draws those of every kind."""
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})


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


LONG, SHORT = (Smooth.problem(length=length, width=64) for length in (8192, 512))


@pytest.fixture
def db():
    with TuningDB.open(":memory:") as opened:
        yield opened


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


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def table_under(markdown, heading):
    """The first table after a heading, as a list of dicts."""
    block = next(block for block in markdown.split(heading, 1)[1].split("\n\n") if block.startswith("|"))
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in block.strip().split("\n"))
    return [dict(zip(head, row, strict=True)) for row in rows]


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
    assert "\n# How much the schedule of report_tests.smooth matters on NVIDIA H200 (sm_90)\n" in markdown
    for section in (
        "Best schedules of 3 problems, measured",
        "Best and second best tile by size, measured",
        "Best schedules of 1 problem, modelled",
        "Burst against sustained",
        "Knobs that do not change the machine code",
        "Candidates that failed",
        "Conditions: NVIDIA H200",
    ):
        assert f"\n## {section}\n" in markdown
    assert re.findall("\n### (.*)", markdown.split("## Best and second")[0]) == [
        "width=64 float16",
        "width=128 float16",
    ]


def test_tables(db):
    add_smooth(db, LONG)
    add_smooth(db, SHORT, 0.1)
    markdown = to_markdown(document(report_of(db, kernel=Smooth)))
    short, long = table_under(markdown, "### width=64 float16")
    assert (short["problem"], long["problem"], long["measured µs"]) == ("length=512", "length=8192", "100.0")
    assert long["rate"] == f"{2 * 8192 * 64 * 2 / 100e-6 / 1e9:.1f} GB/s"  # once in, once out, two bytes each
    assert long["default takes longer by"] == "100.0%"  # of the declaration's first choices
    lines = table_under(markdown, "## Best and second best tile by size, measured")
    assert [(line["problems"], line["length"], line["best tile"]) for line in lines] == [
        ("width=64, dtype=float16, NVIDIA H200", "short: 512", "256x1"),
        ("width=64, dtype=float16, NVIDIA H200", "long: 8192", "256x1"),
    ]
    assert "Each tile (SPAN x LANES) is judged" in markdown
    assert "Short is length up to 1024" in markdown


def test_csv_columns(db, tmp_path, charts_are_no_files):
    add_smooth(db, LONG)
    add_modelled(db, choices(Smooth)[0], problem=SHORT)
    write_report(report_of(db, kernel=Smooth), tmp_path)
    rows = rows_of((tmp_path / "schedules.csv").read_text())
    assert list(rows[0]) == [
        "arch",
        "device",
        "regime",
        "provenance",
        "problem_id",
        "length",
        "width",
        "dtype",
        "schedule_id",
        "LANES",
        "SPAN",
        "turn",
        "median_us",
        "ci_low_us",
        "ci_high_us",
        "samples",
        "gbps",
        "relative",
        "modelled_us",
        "modelled_gbps",
        "modelled_relative",
        "same_program_as",
        "fingerprint",
        "registers",
        "threads",
        "shared_bytes",
        "spill_bytes",
        "code_bytes",
        "ctas_per_sm",
    ]
    assert (len(rows), rows[0]["length"], rows[0]["width"], rows[0]["SPAN"], rows[0]["turn"]) == (
        13,
        "8192",
        "64",
        "256",
        "left",
    )
    assert float(rows[0]["gbps"]) == pytest.approx(LONG.gbps(100.0), rel=1e-5)
    assert float(rows[12]["modelled_gbps"]) == pytest.approx(SHORT.gbps(90.0), rel=1e-5)
    assert rows[12]["gbps"] == rows[0]["modelled_gbps"] == ""
    lines = rows_of((tmp_path / "sensitivity.csv").read_text())
    assert list(lines[0]) == [
        "arch",
        "device",
        "provenance",
        "scope",
        "width",
        "dtype",
        "size_regime",
        "sizes",
        "problems",
        "problem_id",
        "best_tile",
        "runner_up_tile",
        "drop_percent",
        "worst_drop_percent",
        "modelled_drop_percent",
        "modelled_worst_drop_percent",
    ]
    assert (lines[1]["scope"], lines[1]["sizes"], lines[1]["worst_drop_percent"]) == ("regime", "8192", "140.000")


def test_tiles_are_drawn_over_the_two_knobs_that_matter_most(db):
    add_smooth(db, LONG)
    report = report_of(db, kernel=Smooth)
    assert report.tile_knobs == ("SPAN", "LANES")
    (one,) = report.measured.problems
    assert {tile.tile: round(tile.relative, 3) for tile in one.tiles} == {
        (256, 1): 1.0,
        (256, 2): 1.2,
        (512, 1): 1.5,
        (512, 2): 1.8,
        (128, 1): 2.0,
        (128, 2): 2.4,
    }
    rows = tile_rows(one)
    assert {(row["rows"], row["columns"]): row["said"] for row in rows}[128, 2] == "2.40"
    assert [row["rows"] for row in rows if row["best"]] == [256]


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


def test_one_schedule_makes_no_tile(db, tmp_path, charts_are_no_files):
    add_times(db, {choices(Smooth)[0]: 10.0}, problem=LONG)
    report = report_of(db, kernel=Smooth)
    assert (report.tile_knobs, report.measured.sensitivity) == (None, ())
    write_report(report, tmp_path)
    assert "Tiles" not in (tmp_path / "report.md").read_text()


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
    assert next_step(nothing).startswith("Run `tiledsched tune report_tests.smooth --arch sm_121`")


def test_axes_labels_and_named_tiles(db, tmp_path, charts_are_no_files):
    wide, narrow = (Product.problem(length=128, inner=32, width=width) for width in (4096, 256))
    for problem, samples in itertools.product((wide, narrow), (1, 2)):
        add_times(
            db,
            {one: 1.0 + one["threads"] + one["BLOCK_M"] / 1e3 + one["BLOCK_N"] / 1e4 for one in choices(Product)},
            problem=problem.replace(samples=samples),
        )
    add_times(db, {choices(Product)[0]: 5.0}, problem=wide.replace(order="nt"))
    report = report_of(db, kernel=Product)
    assert report.tile_knobs == ("BLOCK_M", "BLOCK_N")  # by name, though `threads` matters more
    markdown = to_markdown(document(report))
    table = table_under(markdown, "### order=nn float16")
    # `repeats` is at its default everywhere: nothing to tell apart.
    assert [row["problem"] for row in table] == [
        f"N={width} M=128 inner=32 samples={samples}" for width in (256, 4096) for samples in (1, 2)
    ]
    assert table[0]["rate"] == f"{2 * 128 * 256 * 32 / (float(table[0]['measured µs']) * 1e-6) / 1e12:.1f} TFLOP/s"
    add_times(db, {choices(Product)[0]: 5.0}, problem=narrow.replace(repeats=3))
    markdown = to_markdown(document(report_of(db, kernel=Product)))
    table = table_under(markdown, "### order=nn float16")
    repeats = [re.search("repeats=([0-9])", row["problem"])[1] for row in table]
    assert repeats == ["1", "3", "1", "1", "1"]
    assert "repeats" not in table_under(markdown, "### order=nt float16")[0]["problem"]
    write_report(report, tmp_path)
    row = rows_of((tmp_path / "schedules.csv").read_text())[0]
    assert (row["problem_samples"], row["samples"], row["knob_threads"], row["threads"]) == ("1", "5", "1", "")


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


def test_problems_with_nothing_to_share(db):
    add_times(db, {choices(Ragged)[0]: 5.0}, problem=Ragged.problem(groups=[300, 200]))
    markdown = to_markdown(document(report_of(db, kernel=Ragged)))
    assert table_under(markdown, "### report_tests.ragged")[0]["problem"] == "groups=300,200"
