"""What the report writes: Markdown, HTML, CSV and charts."""

from __future__ import annotations

import html.parser
import sys
from functools import partial

import pytest
from report_samples import (
    PROBLEM,
    add_builds,
    add_entry,
    add_failure,
    add_modelled,
    add_raced,
    add_times,
    build_of,
    check_report,
    grid,
    landscape,
    plain,
    report_of,
)

from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.report import write_report
from tiledsched.report.document import Chart, Contents, Explorer, Heading, Paragraph, Table, to_html, to_markdown
from tiledsched.report.text import document
from tiledsched.store.records import RivalTime

CAUSAL = PROBLEM.replace(causal=True)
TWO = {plain(128, 64): 100.0, plain(64, 64): 110.0}
RIVALS = tuple(
    RivalTime(name=name, version="1", median_us=98.0 * ratio, ours_us=98.0, ratio=ratio)
    for name, ratio in (("torch", 1.08), ("fa4", 0.9))
)
CODES = {plain(128, 64): "f" * 24}
FLIPPING = {
    plain(tile, n, occupancy=occupancy): 100.0 * (1.15 if (tile == 128) == (occupancy == 2) else 1)
    for tile in (64, 128)
    for n in (32, 64)
    for occupancy in (1, 2)
}
ALL = {plain(m, n): 90.0 + m + n for m in (64, 128) for n in (32, 64, 128)}
TWIN = plain(128, 64, latency_k=2)
ONLY_HINTS = {
    Schedule(occupancy=occ, num_worker_warps=warps): 50.0 + 3 * occ + warps for occ in (1, 2, 3) for warps in (4, 8)
}
OLDER = Schedule({knob: value for knob, value in plain(64, 64).items() if knob != "flat_steps"})
HALF = plain(128, 64, accum_mode="fp16")
SAME = {plain(128, 64): "a" * 24, plain(128, 64, latency_k=2): "a" * 24}
REGISTERS = Failure(kind=FailureKind.COMPILE_ERROR, message="tileiras: error: out of registers")
SLOWLY = {"clock": 1200, "reasons": ("power cap",)}
CASES = {
    "one problem with rivals and failures": [
        partial(add_raced, times=grid(), winner=plain(128, 64), rivals=RIVALS),
        partial(
            add_builds, builds=[build_of(plain(128, 64), "f" * 24), build_of(plain(128, 64, latency_v=4), "f" * 24)]
        ),
        partial(
            add_failure, stage="build", schedule=plain(256, 256), kind="compile_error", message="error: `a` | <b>\nmore"
        ),
        partial(add_failure, stage="measure", schedule=plain(64, 64), kind="hang", message="", problem=PROBLEM),
    ],
    "several problems, GPUs, regimes and estimates": [
        partial(add_times, times=grid()),
        partial(add_times, times=grid((1.0, 1.1, 1.5, 2.3), (1.3, 1.0)), problem=CAUSAL),
        partial(add_times, times={plain(64, 64): 9.0}, problem=PROBLEM.replace(batch=1)),
        partial(add_modelled, schedule=plain(128, 64), problem=PROBLEM.replace(batch=2)),
        partial(add_times, times=grid(), device="NVIDIA H100"),
        partial(add_times, times={plain(128, 64): 150.0, plain(128, 128): 120.0}, regime="sustained"),
    ],
    "measured and modelled": [
        partial(add_times, times=TWO, fingerprints=CODES),
        partial(
            add_builds, builds=[build_of(plain(128, 64), "f" * 24), build_of(plain(128, 64, latency_k=2), "f" * 24)]
        ),
        partial(add_modelled, schedule=plain(128, 64), problem=CAUSAL, runner_up=plain(64, 64), margin=0.25),
    ],
    "a winner alone": [partial(add_times, times={plain(64, 64): 100.0}, problem=CAUSAL)],
    "modelled alone": [partial(add_modelled, schedule=plain(128, 64), runner_up=plain(64, 64), margin=0.25)],
    "a modelled landscape": [
        partial(add_builds, builds=[build_of(each, each.id * 2) for each in ALL]),
        partial(add_modelled, schedule=plain(128, 64)),
    ],
    "what is served stands for its program": [
        partial(add_builds, builds=[build_of(each, plain(128, 64).id * 2) for each in (plain(128, 64), TWIN)]),
        partial(add_builds, builds=[build_of(plain(64, 64), "e" * 24), build_of(plain(64, 128), "f" * 24)]),
        partial(add_modelled, schedule=TWIN),
    ],
    "untried and unclear knobs": [partial(add_times, times=FLIPPING | {plain(64, 32, latency_k=2): 100.0})],
    "a tile that was hardly searched": [
        partial(
            add_times,
            times={each: us for each, us in grid().items() if (each["tile_m"], each["tile_n"]) == (128, 64)}
            | {plain(64, 64): 150.0, plain(128, 128): 106.0, plain(64, 128): 210.0},
        )
    ],
    "a clock that was held down": [partial(add_times, times=TWO, **SLOWLY)],
    "hints in place of a tile": [partial(add_times, times=ONLY_HINTS)],
    "regimes that disagree": [
        partial(
            add_times, times={plain(128, 64): 100.0, plain(128, 128): 110.0, plain(64, 64): 130.0, plain(64, 32): 50.0}
        ),
        partial(
            add_times, times={plain(128, 64): 150.0, plain(128, 128): 120.0, plain(64, 64): 300.0}, regime="sustained"
        ),
    ],
    "regimes that cannot be told apart": [
        partial(add_times, times={plain(128, 64): 100.0, plain(128, 128): 110.0}),
        partial(add_times, times={plain(128, 64): 120.0, plain(128, 128): 120.5}, regime="sustained"),
        partial(add_times, times={plain(128, 128): 119.5}, regime="sustained"),  # the newest counts
    ],
    "programs and accuracy classes in both regimes": [
        partial(add_times, times={plain(128, 64): 100.0, plain(64, 64): 200.0, HALF: 10.0}, fingerprints=SAME),
        partial(
            add_times,
            times={plain(128, 64, latency_k=2): 100.0, plain(64, 64): 200.0, HALF: 10.0},
            fingerprints=SAME,
            regime="sustained",
        ),
    ],
    "several sizes": [
        partial(
            add_times,
            times={plain(128, 64): first, plain(64, 64): second},
            problem=Attention.standard(seq_len=size, head_dim=64),
        )
        for size, first, second in ((2048, 100.0, 110.0), (4096, 100.0, 121.0), (8192, 130.0, 100.0))
    ],
    "knobs without effect on the machine code": [
        partial(add_times, times={plain(128, 64): 100.0}),
        partial(
            add_builds,
            builds=[
                build_of(plain(m, 64, latency_k=k), code * 24)
                for m, k, code in ((128, 0, "a"), (128, 2, "a"), (64, 0, "b"), (64, 2, "c"))
            ],
        ),
        partial(add_entry, schedule=plain(128, 64), problem=CAUSAL, provenance="transferred", source="nearest problem"),
        partial(add_modelled, schedule=plain(64, 64)),  # which is measured, and so not modelled, too
    ],
    "failures that count once": [
        partial(add_times, times={plain(128, 64): 100.0}),
        partial(add_builds, builds=[build_of(plain(256, each), REGISTERS) for each in (256, 128)]),
        partial(add_failure, stage="build", schedule=plain(256, 256), kind=REGISTERS.kind, message=REGISTERS.message),
        *[
            partial(
                add_failure,
                stage="measure",
                schedule=plain(64, 64),
                kind="hang",
                message="no answer for 5 s",
                problem=PROBLEM,
            )
        ]
        * 2,
    ],
    "an older space, a tile as good as the best, a race": [
        partial(
            add_times,
            times={each: us for each, us in grid().items() if (each["tile_m"], each["tile_n"]) == (128, 64)}
            | {plain(64, 128): 100.4, OLDER: 150.0},
        ),
        partial(add_raced, times={plain(128, 64): 100.0}, winner=plain(128, 64), runner_up=plain(64, 64), margin=0.03),
        partial(add_times, times={plain(128, 64, kv_splits=2): 70.0}, problem=CAUSAL),
    ],
    "a race of which the winner is known": [
        partial(add_raced, times={plain(128, 64): 100.0}, winner=plain(128, 64), runner_up=plain(64, 64), margin=0.03)
    ],
    "schedules that were timed on one problem alone": [
        partial(
            add_times, times={each.replace(latency_v=4 * place): us for each, us in grid().items()}, problem=problem
        )
        for place, problem in enumerate((PROBLEM, CAUSAL))
    ],
    "few schedules serve all": [
        partial(
            add_times,
            times={
                plain(64, 64, occupancy=occ, latency_k=k): 104.0 if (occ, k) == (1, 0) else 200.0
                for occ in (1, 2, 3)
                for k in range(7)
            }
            | {plain(128, 32 * 2**place): 100.0},
            problem=problem,
        )
        for place, problem in enumerate((PROBLEM, CAUSAL, PROBLEM.replace(batch=8)))
    ],
    "nothing": [],
}


@pytest.mark.parametrize("name", CASES)
def test_a_report_is_as_it_was(db, tmp_path, monkeypatch, name):
    """Sentences, tables and files of numbers; what each chart draws is in them, too."""
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})
    for step in CASES[name]:
        step(db)
    times = {each.id: us for each, us in ALL.items()} | {TWIN.id: ALL[plain(128, 64)]}
    report = report_of(db, model_times=lambda problem, builds: times)
    check_report(name, report, tmp_path)


def test_where_nothing_draws_the_report_says_what_does(db, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    landscape(db)
    written = write_report(report_of(db, "sm_90"), tmp_path / "out")
    assert {path.suffix for path in written} == {".md", ".html", ".csv"}
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert markdown.count("[report]'") == 1
    assert "![" not in markdown
    assert "data-spec" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_chart_is_a_file_twice_and_on_the_page(db, tmp_path):
    landscape(db)
    add_modelled(db, plain(128, 64), problem=PROBLEM.replace(causal=True), runner_up=plain(64, 128), margin=0.25)
    report = report_of(db, "sm_90")
    written = {path.name: path.read_bytes() for path in write_report(report, tmp_path)}
    charts = {block.name for block in document(report) if isinstance(block, Chart)}
    (explorer,) = (block for block in document(report) if isinstance(block, Explorer))
    views = {view.name for view, _ in explorer.drawn()}
    assert {"costs-measured-sm_90", "rates-sm_90"} <= charts
    assert {"tile-map", "programs"} <= views
    markdown, page = written["report.md"].decode(), written["report.html"].decode()
    for name in charts | views:
        assert written[f"{name}.svg"].startswith(b"<svg")
        assert written[f"{name}.png"].startswith(b"\x89PNG")
        assert f"]({name}.svg)" in markdown
    for name in charts:
        assert f'data-spec="chart-{name}"' in page
    for name in views:
        assert f'data-view="{name}"' in page
    opened = explorer.cases[explorer.first]  # the modelled problem, which was tuned last
    for name, said in (
        ("tile-map.svg", opened.source[:40]),
        ("costs-measured-sm_90.svg", "measured on NVIDIA H200 (sm_90)"),
    ):
        assert said in written[name].decode()  # a picture alone says what it is of
    assert document(report_of(db, "sm_90")) == document(report)  # the same numbers, the same page


def test_html_is_whole_and_offline(db, tmp_path):
    landscape(db)
    write_report(report_of(db, "sm_90"), tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    open_tags, void = [], {"meta", "img", "input", "!doctype"}
    targets, anchors = set(), set()

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            for name, value in attrs:
                assert name != "src"
                assert name != "href" or value.startswith("#"), value
                targets.update([value[1:]] if name == "href" else [])
                anchors.update([value] if name == "id" else [])
            if tag not in void:
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Checker().feed(text)
    assert open_tags == []
    assert targets <= anchors
    assert "import(" not in text.split("</style>")[0]


def test_foreign_files_stay(db, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "report.md").write_text("old")
    add_times(db, {plain(128, 64): 100.0})
    write_report(report_of(db, "sm_90"), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "report.md").read_text().startswith("**Measured on")


def test_a_file_in_place_of_the_folder(db, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        write_report(report_of(db, "sm_90"), tmp_path / "out")


def test_document_blocks():
    blocks = [
        Paragraph(text="Mind `this` & <that>", warning=True),
        Heading(text="T", level=1),
        Contents(),
        Heading(text="More, folded", folded=True),
        Table(head=("a", "b"), rows=(("1.5%", "128x64"), ("-", "-"))),
        Chart(name="i", spec={"mark": "</script>"}, text='say "x"'),
    ]
    markdown = to_markdown(blocks, {"i.svg"})
    assert markdown.splitlines()[0] == "Mind `this` &amp; &lt;that&gt;"
    assert "| ---: | --- |" in markdown
    assert '![say "x"](i.svg)' in markdown
    assert "![" not in to_markdown(blocks)
    text = to_html(blocks, title="a < b")
    assert '<p class="warning">Mind <code>this</code> &amp; &lt;that&gt;</p>' in text
    assert '<td class="number">1.5%</td>' in text
    assert '{"mark":"\\u003c/script>"}</script>' in text
    assert 'aria-label="say &quot;x&quot;"' in text
    assert '<nav><a href="#more-folded">More, folded</a></nav>' in text
    assert '<details><summary id="more-folded">' in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert "<title>a &lt; b</title>" in text
