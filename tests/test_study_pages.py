"""The pages of the studies, opened in a real browser at 400 pixels: no error, every chart drawn, and nothing wider than the page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from browser import browser, opened  # noqa: F401
from report_samples import check_golden, specs_of
from test_ablation import LANDSCAPE
from test_ladder import rows_of
from test_profile import PROBLEM, raw
from test_study import rows as study_rows

from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.report.document import Block, Chart, Paragraph, Table, to_html, to_markdown
from tiledsched.report.records import TileTime
from tiledsched.studies.ablation import pages as ablation
from tiledsched.studies.ablation.ladder import AblationRow
from tiledsched.studies.ablation.run import replay_ablation
from tiledsched.studies.evaluation import pages as evaluation
from tiledsched.studies.evaluation.rows import TilingRow
from tiledsched.studies.ladder import pages as ladder
from tiledsched.studies.ladder.rungs import PROBLEM as THEIRS
from tiledsched.studies.profile import pages as profile
from tiledsched.studies.profile.metrics import MethodProfile, read_raw

TILES = TilingRow(
    regime="Short S",
    problem=Attention.standard(seq_len=1024, head_dim=64),
    **{
        name: TileTime(tile=tile, us=us, relative=us / 122.75, schedule=Schedule(), programs=1, searched=True)
        for name, tile, us in (("best", (64, 128), 122.75), ("runner_up", (64, 64), 126.88))
    },
)
PLAYBOOK = Attention.problem(seq_q=2048, seq_k=2048, **THEIRS)


def failed(rows):
    """The same rows, without a time."""
    return [replace(row, timing=None, status="launch_failed: an illegal address") for row in rows]


def ablated() -> list[AblationRow]:
    return [row for rows in replay_ablation(Attention, [LANDSCAPE], "sm_90", rounds=6) for row in rows]


def profiled(count):
    kernels = tuple(read_raw(raw(("flash_fwd<128, 64>", {}))))
    return [MethodProfile(method=f"method_{place}", kernels=kernels) for place in range(count)]


PAGES = {
    "ladder": lambda: ladder.document(rows_of()),
    "ladder of NVIDIA's problems": lambda: ladder.document(rows_of((1024, 2048), PLAYBOOK)),
    "ladder of one length": lambda: ladder.document(rows_of((2048,), PLAYBOOK)),
    "ladder of one rung": lambda: ladder.document(rows_of()[1:2]),
    "ladder without a time": lambda: ladder.document(failed(rows_of())),
    "study": lambda: evaluation.document(study_rows(triton="not installed: triton"), []),
    "study of two problems": lambda: evaluation.document(
        study_rows(triton="not installed: triton", torch_math="out of memory")[:16], [TILES]
    ),
    "study without a time": lambda: evaluation.document(failed(study_rows()[:8]), []),
    "profile": lambda: profile.document(PROBLEM, profiled(2), device="NVIDIA Sample"),
    "profile of many": lambda: profile.document(PROBLEM, profiled(7), device="NVIDIA Sample"),
    "profile of none": lambda: profile.document(PROBLEM, [MethodProfile(method="eager", status="it does not run")]),
    "ablation": lambda: ablation.document(ablated()),
    "ablation without a time": lambda: ablation.document(
        [replace(row, speedup_over_previous=None, speedup_over_plain=None) for row in failed(ablated())]
    ),
}


@pytest.fixture(scope="module")
def documents() -> dict[str, list[Block]]:
    return {name: make() for name, make in PAGES.items()}


@pytest.mark.parametrize("name", PAGES)
def test_the_first_line_says_what_was_measured_and_tables_are_narrow(documents, name):
    first = next(block for block in documents[name] if isinstance(block, Paragraph))
    none = name.endswith(("without a time", "of none"))
    assert (first.warning, first.measured) == (none, not none)
    assert first.text.startswith("Nothing was measured" if none else "Measured on NVIDIA")
    assert all(len(block.head) <= 6 for block in documents[name] if isinstance(block, Table))


@pytest.mark.parametrize("name", [name for name in PAGES if name != "study"])
def test_a_page_is_as_it_was(documents, name):
    """Sentences, tables, and what each chart draws."""
    charts = [f"{block.name}.svg" for block in documents[name] if isinstance(block, Chart)]
    text = to_markdown(documents[name], charts) + specs_of(documents[name])
    check_golden(
        f"studies/{re.sub(r'[^a-zA-Z]+', '_', name)}.txt",
        re.sub(r"tiledsched \| [0-9.a-z]+", "tiledsched | VERSION", text),
    )


@pytest.mark.slow
def test_every_page_is_drawn_within_400_pixels(browser, documents, tmp_path):  # noqa: F811
    """All pages in one: their headings and charts do not collide either, and the drawing code is read once."""
    blocks = [block for document in documents.values() for block in document]
    path = tmp_path / "page.html"
    path.write_text(to_html(blocks, title="studies"))
    with opened(browser, path, width=400, scheme="dark") as page:
        assert page.locator(".chart svg").count() == page.locator(".chart").count() > 15
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        wide = (
            "[...document.querySelectorAll('.scroll, .chart')].filter(each => each.scrollWidth > each.clientWidth + 1)"
        )
        assert page.evaluate(f"{wide}.map(each => each.innerText)") == []
