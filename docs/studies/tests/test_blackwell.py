"""The scorecard on public figures: the bars that the model is held to, and what its page prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.studies import blackwell

PAGE = Path(__file__).parents[2] / "results" / "blackwell.md"


@pytest.fixture(scope="module")
def groups():
    return blackwell.groups()


@pytest.mark.parametrize(
    ("group", "most"),
    [
        ("TiledAttention, S from 2048", 0.05),
        ("TiledAttention, S below 2048", 0.10),
        ("playbook TileGym", 0.05),
        ("playbook ladder", 0.05),
    ],
)
def test_the_mean_error_on_gb10_is_within_its_bar(groups, group, most):
    assert blackwell.mean_error(groups[group]) < most


def test_no_figure_of_b300_is_a_fifth_off(groups):
    assert len(groups["playbook B300"]) == 5
    assert max(abs(each.error) for each in groups["playbook B300"]) < 0.2


def test_no_order_is_wrong_that_the_published_noise_leaves_decidable(groups):
    verdicts = [each.verdict for each in blackwell.orders()]
    assert verdicts.count("right") >= 15
    assert verdicts.count("a tie") <= 1
    assert "wrong" not in verdicts


def test_the_page_and_the_csv_have_what_the_study_prints(groups, tmp_path):
    """The page has the errors of every source; the study prints the rest, too."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for row in blackwell.summary().rows:
        assert any(line.endswith("|".join(("", *row[1:], ""))) for line in lines)
    assert all(table.rows for table in blackwell.tables())
    blackwell.write_csv(tmp_path / "scored.csv")
    assert (tmp_path / "scored.csv").read_text() == (blackwell.DATA / "scored.csv").read_text()
