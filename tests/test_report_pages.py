"""Every page, opened in a real browser: no error, every chart drawn, and every label and number equal to the data."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from browser import browser, draw_all, ids, opened, texts  # noqa: F401
from report_samples import PROBLEM, add_modelled, landscape, plain, report_of

from docs.studies.screenshots import PICTURES, described, photograph
from tiledsched.cli import main
from tiledsched.report.charts import panel_names
from tiledsched.report.document import Chart, Explorer, to_html, write_document
from tiledsched.report.text import document
from tiledsched.report.views import shown_problems, tile_rows
from tiledsched.store.db import TuningDB

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
CASES = [
    PROBLEM,
    PROBLEM.replace(causal=True),
    PROBLEM.replace(seq_q=1024, seq_k=1024, batch=16),
    PROBLEM.replace(seq_q=512, seq_k=512, batch=32, causal=True),
    PROBLEM.replace(seq_q=16384, seq_k=16384, batch=1, head_dim=128, dtype="bfloat16"),
]


@pytest.fixture(scope="module")
def reports():
    """A measured report on several problems, one of which has tiles that the others lack, and a modelled one."""
    with TuningDB.open(":memory:") as db:
        for place, problem in enumerate(CASES):
            landscape(db, problem, every=1 + place % 2)
        add_modelled(db, plain(128, 64), arch="sm_121", runner_up=plain(64, 128), margin=0.25)
        yield [report_of(db, "sm_90"), report_of(db, "sm_121")]


@pytest.fixture(scope="module")
def folder(reports, tmp_path_factory):
    """The pages of these reports: one arch, and both."""
    found = tmp_path_factory.mktemp("pages")
    (found / "one.html").write_text(to_html(document(reports[0]), title="one"))
    (found / "both.html").write_text(to_html(document(reports), title="both"))
    return found


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [("one", "light", 1280), ("one", "dark", 400), ("both", "light", 400), ("both", "dark", 1280)],
)
def test_every_chart_is_drawn_within_the_page(browser, folder, name, scheme, width):  # noqa: F811
    with opened(browser, folder / f"{name}.html", width=width, scheme=scheme) as page:
        assert page.locator(".chart svg").count() > 5
        assert len(set(ids(page))) == len(ids(page))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for place in page.locator(".chart:has(svg)").all():
            room, drawn = place.bounding_box(), place.locator("svg").first.bounding_box()
            assert drawn["x"] + drawn["width"] <= room["x"] + room["width"] + 1, place.inner_text()


def test_each_panel_stands_under_its_own_problem(browser, folder, reports):  # noqa: F811
    report = reports[0]
    problems = [one for one in shown_problems(report) if len(one.tiles) > 1]
    assert len(problems) == len(CASES)
    names = panel_names(report, problems)
    assert len({*names}) == len(names)
    for width in (1280, 400):
        with opened(browser, folder / "one.html", width=width) as page:
            found = texts(page.locator(".chart[data-spec^=chart-tiles]"))
        heads = {name: next(each for each in found if each["text"] == name.replace("|", "")) for name in names}
        cells = defaultdict(list)
        for each in found:
            if re.fullmatch(r"[0-9]+\.[0-9]+\??", each["text"]):
                above = [name for name, head in heads.items() if head["y"] < each["y"]]
                cells[
                    min(above, key=lambda name: abs(heads[name]["x"] - each["x"]) + each["y"] - heads[name]["y"])
                ].append(each["text"])
        for name, one in zip(names, problems, strict=True):
            assert sorted(cells[name]) == sorted(row["said"] for row in tile_rows(one)), name


def test_the_reader_chooses_a_problem_and_sees_its_numbers(browser, folder, reports):  # noqa: F811
    wanted = next(block for block in document(reports) if isinstance(block, Explorer)).cases
    with opened(browser, folder / "both.html") as page:
        labels = page.locator(".choices label").all()
        choices = {each.evaluate("each => each.firstChild.textContent"): each.locator("select") for each in labels}
        seen = set()
        for case in wanted:
            for title, value in [*case.values.items()] * 2:  # a choice brings the problem that is most like the last
                if title in choices and choices[title].input_value() != value:
                    choices[title].select_option(value)
            draw_all(page)
            chosen = {title: choice.input_value() for title, choice in choices.items()}
            assert chosen.items() <= case.values.items()
            view = page.locator(".view[data-view=tile-map] .chart")
            found = [each["text"] for each in texts(view)]
            words = page.locator(".view[data-view=tile-map] .chart").inner_text().replace("\n", " ")
            assert case.title in words
            assert case.source in words
            assert {row["said"] for row in case.rows["tiles"]} <= {*found}
            effects = [each["text"] for each in texts(page.locator(".view[data-view=knob-effects] .chart"))]
            assert {row["said"] for row in case.rows["knobs"]} <= {*effects}
            seen.add(case.title)
        assert len(seen) == len({case.title for case in wanted}) > 4


def test_pictures_are_saved_with_their_problem_on_white_paper(browser, folder, tmp_path):  # noqa: F811
    with opened(browser, folder / "one.html", scheme="dark") as page:
        for kind in ("SVG", "PNG"):
            with page.expect_download() as waiting:
                page.locator(".view[data-view=tile-map] .save a", has_text=kind).click()
            waiting.value.save_as(tmp_path / f"saved.{kind}")
    drawn = (tmp_path / "saved.SVG").read_text()
    for words in ("Which tile is best", "attention B=", "measured on NVIDIA H200 (sm_90), 20", 'fill="white"'):
        assert words in drawn
    assert (tmp_path / "saved.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_chart_that_fails_says_so_and_the_others_are_drawn(browser, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})
    good = {"data": {"values": [{"a": 1}]}, "mark": "bar", "encoding": {"x": {"field": "a", "type": "quantitative"}}}
    blocks = [Chart(name="bad", spec={"mark": 7, "layer": 1}, text="b"), Chart(name="good", spec=good, text="g")]
    write_document(tmp_path, blocks, title="t", markdown="m.md", page="p.html")
    page = browser.new_page()
    page.goto(Path(tmp_path / "p.html").as_uri())
    page.locator("[data-spec=chart-good] svg").wait_for()
    assert "could not be drawn" in page.locator("[data-spec=chart-bad]").inner_text()
    page.close()


def test_the_readmes_picture_shows_todays_report(browser, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "none.db"))
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})
    picture = PICTURES[0]
    assert main([*picture.command, str(tmp_path / "page")]) == 0
    _, words = photograph(browser, tmp_path / "page" / "report.html", picture)
    assert words == described(ROOT / "docs" / "images" / f"{picture.name}.png"), (
        "run python -m docs.studies.screenshots"
    )
