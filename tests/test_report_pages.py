"""Every page, opened in a real browser: no error, every chart drawn, and every label and number equal to the data."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from browser import browser, draw_all, ids, opened, texts  # noqa: F401
from report_samples import PROBLEM, add_modelled, landscape, plain, report_of

from docs.studies.screenshots import PICTURES, described, photograph
from tiledsched.cli import main
from tiledsched.report.document import Chart, Explorer, to_html, write_document
from tiledsched.report.first_screen import opened_on, shown_problems
from tiledsched.report.text import document
from tiledsched.report.views import KNOB, listed, pair_rows
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


def test_the_first_screen_answers(browser, folder, reports):  # noqa: F811
    """Whether it was measured stands in line one, the next command in line two, and a chart on the screen, also of a phone."""
    case = next(block for block in document(reports[0]) if isinstance(block, Explorer))
    opened_on = case.cases[case.first]
    for width in (1280, 400):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto((folder / "one.html").as_uri())
        page.locator(".view[data-view=tile-map] svg").first.wait_for()
        lines = [page.locator(f".explorer .{name}").bounding_box() for name in ("measured", "next")]
        assert lines[0]["y"] < lines[1]["y"] < 140
        words = page.locator(".explorer").inner_text()
        for said in (
            opened_on.status,
            opened_on.next.split("`")[1],
            opened_on.title,
            *(fact[0] for fact in opened_on.facts),
        ):
            assert said in words
        assert page.locator(".view[data-view=tile-map] svg").first.bounding_box()["y"] < 700
        page.close()


def test_a_program_is_shown_in_full_and_its_commands_can_be_run(browser, folder, reports, tmp_path):  # noqa: F811
    explorer = next(block for block in document(reports[0]) if isinstance(block, Explorer))
    case = explorer.cases[explorer.first]
    with opened(browser, folder / "one.html") as page:
        page.locator(".view[data-view=tile-map] .mark-rect path").nth(1).dispatch_event("click")
        page.locator(".picked").wait_for()
        shown, tune, compare = page.locator(".picked code").all_inner_texts()
    schedule = json.loads(shown)
    row = {f"{KNOB}{knob}": value for knob, value in schedule.items()}
    assert any(row.items() <= program.items() for program in case.rows["programs"])
    for command, words in ((tune, ["tune"]), (compare, ["study", "profile"])):
        parsed = shlex.split(command)
        assert parsed[: 1 + len(words)] == ["tiledsched", *words]
        listed = json.loads(parsed[parsed.index("--candidates") + 1])
        assert schedule in listed
        assert main([*parsed[1:], "--db", str(tmp_path / "x.db"), "--help"]) == 0  # the flags exist
    assert len(listed) == 2


def test_the_map_of_two_knobs_is_the_same_in_both_languages(browser, folder, reports):  # noqa: F811
    """The rows that the page makes of two knobs are those that the report makes."""
    report = reports[0]
    one = shown_problems(report)[opened_on(shown_problems(report))]
    explorer = next(block for block in document(report) if isinstance(block, Explorer))
    places = listed(one, 10_000)
    with opened(browser, folder / "one.html") as page:
        view = page.locator(".view[data-view=pairs]")
        for pair in (explorer.cases[explorer.first].pair, [f"{KNOB}tile_m", f"{KNOB}occupancy"]):
            for select, knob in zip(view.locator("select").all(), pair, strict=True):
                select.select_option(knob)
            draw_all(page)
            found = sorted(
                each["text"]
                for each in texts(view.locator(".chart"))
                if re.fullmatch(r"[0-9.]+\.[0-9]+\??", each["text"])
            )
            rows = pair_rows(one, [knob.removeprefix(KNOB) for knob in pair], places)
            assert len(rows) > 1
            for row in rows:
                assert row["said"] in found


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
            assert page.locator("h1").inner_text() == case.title
            assert case.status in page.locator(".explorer .top").inner_text()
            assert {row["said"] for row in case.rows["tiles"]} <= {*found}
            effects = [each["text"] for each in texts(page.locator(".view[data-view=knob-effects] .chart"))]
            assert {row["said"] for row in case.rows["effects"]} <= {*effects}
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
