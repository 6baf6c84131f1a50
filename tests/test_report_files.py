"""What the report writes: Markdown, HTML, CSV and charts."""

from __future__ import annotations

import csv
import html.parser
import io
import sys

import pytest
from report_samples import DEVICE, PROBLEM, add_builds, add_modelled, add_times, build_of, landscape, plain, report_of

from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.report import write_report
from tiledsched.report.csv_files import schedules_csv, sensitivity_csv
from tiledsched.report.document import Chart, Contents, Explorer, Heading, Paragraph, Table, to_html, to_markdown
from tiledsched.report.text import document
from tiledsched.store.db import TuningDB

FIRST_LINE = "Nothing was measured on sm_90: every figure below is the model's estimate"


@pytest.fixture
def db():
    with TuningDB.open(":memory:") as opened:
        yield opened


@pytest.fixture
def nothing_draws(monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def tables_of(markdown):
    """Every table as a list of dicts."""
    found = []
    for block in markdown.split("\n\n"):
        lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.strip().split("\n")]
        if block.startswith("|"):
            found.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return found


def table_with(markdown, *columns):
    return next(table for table in tables_of(markdown) if set(columns) <= set(table[0]))


def test_modelled_only_says_so_first_and_everywhere(db):
    add_modelled(db, plain(128, 64), runner_up=plain(64, 64), margin=0.25)
    markdown = to_markdown(document(report_of(db, "sm_90")))
    assert markdown.startswith("Nothing was measured on sm_90: every figure is the performance model's estimate")
    row = table_with(markdown, "best schedule")[0]
    assert list(row)[2] == "modelled µs"
    assert (row["problem"], row["modelled µs"]) == ("S=4096 B=4 H=32", "90.00")
    for line in markdown.splitlines():
        if line.startswith("## Best"):
            assert "modelled" in line
    assert ", measured" not in markdown
    assert markdown.count("Conditions") == 1


def test_measured_and_modelled_keep_their_own_sections(db):
    add_times(db, {plain(128, 64): 100.0, plain(64, 64): 110.0})
    add_modelled(db, plain(128, 64), problem=PROBLEM.replace(causal=True), runner_up=plain(64, 64), margin=0.25)
    markdown = to_markdown(document(report_of(db, "sm_90")))
    assert markdown.startswith("Measured on NVIDIA H200 (sm_90, ")
    measured, modelled = markdown.split("## Best schedules of 1 problem, modelled")
    assert "## Best schedules of 1 problem, measured" in measured
    assert "112.5" not in measured
    assert "90.00" not in measured
    assert "100.0" not in modelled.split("## Conditions")[0].replace("100.0%", "")


def test_what_other_choices_cost_stands_in_the_tables(db):
    add_times(db, {plain(128, 64): 100.0, plain(128, 128): 110.0, plain(64, 64): 300.0})
    markdown = to_markdown(document(report_of(db, "sm_90")))
    row = table_with(markdown, "best schedule")[0]
    assert row["problem"] == "S=4096 B=4 H=32"
    assert row["best schedule"].startswith("`128x64")
    assert (row["measured µs"], row["default takes longer by"]) == ("100.0", "200.0%")
    assert row["rate"] == f"{PROBLEM.tflops(100.0):,.1f} TFLOP/s"
    row = table_with(markdown, "best tile")[0]
    assert (row["S"], row["best tile"]) == ("medium: 4096", "128x64")


def test_one_schedule_leaves_cells_empty(db):
    add_times(db, {plain(128, 64): 100.0})
    report = report_of(db, "sm_90")
    markdown = to_markdown(document(report))
    row = table_with(markdown, "best schedule")[0]
    assert (row["second best tile takes longer by"], row["default takes longer by"]) == ("-", "-")
    assert "`tiledsched record attention --arch sm_90 -p S=4096,D=64,B=4,H=32`" in markdown
    assert "One problem" not in markdown
    assert "charts are left out" not in markdown
    assert rows_of(sensitivity_csv(report))[0]["runner_up_tile"] == ""


def test_failures_table(db):
    message = "tileiras: error: `a` | <b>\nmore"
    db.record_failure(
        None, "attention", "sm_90", "build", plain(256, 256), Failure(kind=FailureKind.COMPILE_ERROR, message=message)
    )
    blocks = document(report_of(db, "sm_90"))
    row = table_with(to_markdown(blocks).replace("\\|", "/"), "stage", "kind")[0]
    assert (row["stage"], row["kind"], row["candidates"]) == ("build", "compile_error", "1")
    assert row["for example"] == "<code>tileiras: error: 'a' &#124; &lt;b&gt; more</code>"
    assert "&lt;b&gt;" in to_html(blocks, title="t")


def test_schedules_csv(db):
    a, b = plain(128, 64), plain(128, 64, latency_k=2)
    add_builds(db, [build_of(a, "f" * 24), build_of(b, "f" * 24)])
    add_times(db, {a: 100.0, plain(64, 64): 125.0}, fingerprints={a: "f" * 24})
    add_modelled(db, plain(128, 64), problem=PROBLEM.replace(causal=True))
    rows = rows_of(schedules_csv(report_of(db, "sm_90")))
    assert [row["provenance"] for row in rows] == ["measured", "measured", "measured", "modelled"]
    first, same, slower, modelled = rows
    assert (first["arch"], first["device"], first["regime"]) == ("sm_90", DEVICE.name, "burst")
    assert (first["seq_q"], first["head_dim"], first["causal"]) == ("4096", "64", "false")
    assert (first["tile_m"], first["tile_n"], first["latency_k"]) == ("128", "64", "0")
    assert [float(first[name]) for name in ("median_us", "ci_low_us", "ci_high_us", "samples")] == [100, 99.5, 100.5, 5]
    assert float(first["tflops"]) == pytest.approx(PROBLEM.tflops(100.0), rel=1e-5)
    assert (first["fingerprint"], first["registers"], first["spill_bytes"]) == ("f" * 24, "128", "16")
    assert (same["same_program_as"], same["latency_k"]) == (first["schedule_id"], "2")
    assert float(slower["relative"]) == 1.25
    assert (modelled["modelled_us"], modelled["median_us"], modelled["tflops"], modelled["samples"]) == (
        "90",
        "",
        "",
        "",
    )
    assert first["modelled_us"] == ""


def test_sensitivity_csv(db):
    add_times(db, {plain(128, 64): 100.0, plain(64, 64): 110.0})
    add_modelled(db, plain(128, 64), problem=PROBLEM.replace(causal=True), runner_up=plain(64, 64), margin=0.25)
    rows = rows_of(sensitivity_csv(report_of(db, "sm_90")))
    assert [(row["provenance"], row["scope"]) for row in rows] == [
        ("measured", "problem"),
        ("measured", "regime"),
        ("modelled", "problem"),
        ("modelled", "regime"),
    ]
    for row in rows[:2]:
        assert (row["best_tile"], row["runner_up_tile"], row["drop_percent"]) == ("128x64", "64x64", "10.000")
        assert row["modelled_drop_percent"] == ""
    for row in rows[2:]:
        assert (row["drop_percent"], row["modelled_drop_percent"]) == ("", "25.000")


def test_where_nothing_draws_the_report_says_what_does(db, tmp_path, nothing_draws):
    landscape(db)
    written = write_report(report_of(db, "sm_90"), tmp_path / "out")
    assert {path.suffix for path in written} == {".md", ".html", ".csv"}
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert markdown.count("[report]'") == 1
    assert "![" not in markdown
    assert "data-spec" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_every_chart_is_a_file_twice_and_on_the_page(db, tmp_path):
    landscape(db)
    add_modelled(db, plain(128, 64), problem=PROBLEM.replace(causal=True), runner_up=plain(64, 128), margin=0.25)
    report = report_of(db, "sm_90")
    written = {path.name: path.read_bytes() for path in write_report(report, tmp_path)}
    charts = {block.name for block in document(report) if isinstance(block, Chart)}
    (explorer,) = (block for block in document(report) if isinstance(block, Explorer))
    views = {view.name for view, _ in explorer.drawn()}
    assert {"tiles-measured-sm_90", "costs-measured-sm_90", "rates-sm_90"} <= charts
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
    for name in ("tile-map.svg", "tiles-measured-sm_90.svg"):  # a picture alone says what it is of
        assert "measured on NVIDIA H200 (sm_90)" in written[name].decode()
    assert document(report_of(db, "sm_90")) == document(report)  # the same numbers, the same page


def test_modelled_times_are_called_so_on_their_charts(db):
    with_model = {plain(m, n): 90.0 + m + n for m in (64, 128) for n in (32, 64, 128)}
    add_builds(db, [build_of(each, each.id * 2) for each in with_model])
    add_modelled(db, plain(128, 64), runner_up=plain(64, 128), margin=0.25)
    times = {each.id: us for each, us in with_model.items()}
    blocks = document(report_of(db, "sm_90", model_times=lambda problem, builds: times))
    specs = [block.spec for block in blocks if isinstance(block, Chart)]
    specs += [spec for block in blocks if isinstance(block, Explorer) for _, spec in block.drawn()]
    assert len(specs) > 3
    for spec in specs:
        said = " ".join(spec["title"]["subtitle"])
        assert "modelled" in said
        assert "measured on" not in said


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
    assert (tmp_path / "report.md").read_text().startswith("Measured on")


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


def test_burst_against_sustained(db, tmp_path):
    add_times(db, {plain(128, 64): 100.0, plain(128, 128): 110.0})
    assert "Burst against sustained" not in to_markdown(document(report_of(db, "sm_90")))
    add_times(db, {plain(128, 64): 150.0, plain(128, 128): 120.0}, regime="sustained")
    written = write_report(report_of(db, "sm_90"), tmp_path)
    row = table_with((tmp_path / "report.md").read_text(), "burst winner", "sustained winner")[0]
    assert (row["programs in both"], row["burst winner when sustained"]) == ("2", "25.0%*")
    assert row["sustained winner in a burst"] == "10.0%*"
    assert row["burst winner"].startswith("`128x64")
    assert row["sustained winner"].startswith("`128x128")
    assert "1 have another winner" in (tmp_path / "report.md").read_text()
    assert "Burst against sustained" in (tmp_path / "report.html").read_text()
    assert tmp_path / "regimes.csv" in written
    (line,) = rows_of((tmp_path / "regimes.csv").read_text())
    assert (line["same"], line["burst_loss_percent"], line["sustained_loss_percent"]) == ("false", "25.000", "10.000")
    assert (line["burst_loss_distinct"], line["problem_id"]) == ("true", PROBLEM.id)
