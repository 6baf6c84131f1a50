"""What the rows of a bench come to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from golden import check_golden
from test_bench import OTHER, PROBLEM, sample_rows

from tiledsched.cli.bench_summary import geometric_mean, summarise, to_markdown
from tiledsched.rivals.methods import FLASH_4

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "h200"
THIRD = PROBLEM.replace(dtype="bfloat16")


def rows():
    return [
        *sample_rows(tiledsched=100.0, torch_flash=150.0, torch_cudnn=80.0, triton=200.0, matmul=500.0),
        *sample_rows(problem=OTHER, tiledsched=100.0, torch_flash=125.0, torch_cudnn=None, triton=None, matmul=500.0),
        *sample_rows(problem=THIRD, tiledsched=None, torch_flash=125.0, torch_cudnn=130.0, triton=90.0, matmul=500.0),
        *sample_rows("sustained", tiledsched=120.0, torch_flash=180.0),
    ]


def test_ours_is_compared_with_the_best_of_torch_in_each_cell() -> None:
    burst, sustained = summarise(rows())
    first, second = burst.cells
    assert (first.problem, first.rival_method, first.ratio) == (PROBLEM, "torch_cudnn", pytest.approx(0.8))
    assert (second.problem, second.rival_method, second.ratio) == (OTHER, "torch_flash", pytest.approx(1.25))
    assert burst.ratio == pytest.approx(1.0)  # sqrt(0.8 * 1.25)
    assert (burst.below, burst.without) == (1, 1)
    assert [cell.problem for cell in burst.worst] == [PROBLEM, OTHER]
    assert first.to_json()["ours_tflops"] == pytest.approx(PROBLEM.tflops(100.0))
    assert (sustained.ratio, sustained.below, sustained.without) == (pytest.approx(1.5), 0, 0)


def test_flash_attention_4_counts_as_a_rival() -> None:
    burst, _ = summarise([*rows(), *sample_rows(**{FLASH_4: 70.0})])
    assert (burst.cells[0].rival_method, burst.cells[0].ratio) == (FLASH_4, pytest.approx(0.7))
    assert "the fastest of torch's backends and FlashAttention-4 takes" in to_markdown([burst])
    assert "FlashAttention-4" not in to_markdown(summarise(rows()))


def test_every_other_method_has_its_mean_and_its_failures() -> None:
    methods = {method.method: method for method in summarise(rows())[0].methods}
    found = {name: (each.cells, each.faster, each.without) for name, each in methods.items()}
    assert found == {"torch_flash": (2, 0, 0), "torch_cudnn": (1, 1, 1), "triton": (1, 0, 1)}
    assert methods["torch_flash"].ratio == pytest.approx((1.5 * 1.25) ** 0.5)


def test_cells_served_what_was_not_measured_for_them_are_named() -> None:
    found = [replace(row, provenance="measured" if row.problem == PROBLEM else "transferred") for row in rows()]
    burst, sustained = summarise(found)
    assert [cell.problem for cell in burst.elsewhere] == [OTHER]
    assert sustained.elsewhere == []
    text = to_markdown([burst])
    assert f"1 cells were not served an entry measured for them: {OTHER} (transferred)." in text
    assert "not served" not in to_markdown([sustained])


def test_nothing_to_compare_is_said() -> None:
    (only,) = summarise(sample_rows(torch_flash=100.0))
    assert (only.ratio, only.cells, only.without) == (None, (), 1)
    assert "no cell has both" in to_markdown([only])
    assert to_markdown([]) == "No rows."
    assert geometric_mean([]) is None


def test_the_markdown_of_the_recorded_results_is_as_it_was(cli) -> None:
    files = [str(RESULTS / name) for name in ("main.csv", "main_sustained.csv")]
    check_golden("bench_summary.txt", cli(["bench", "--summary", files[0], "--summary", files[1]]).out)
