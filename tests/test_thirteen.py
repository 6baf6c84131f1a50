"""Thirteen kernels as strangers write them, each with three mistakes: a plain check finds every mistake and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from thirteen.mistakes import MISTAKES

import tiledsched as ts

FOLDER = Path(__file__).parent / "thirteen"


def checked(path):
    """What the command computes for a file, up to the first wrong result: it is told by this row."""
    (name,) = re.findall(r"^class (\w+)\(ts\.Kernel\):", path.read_text(), re.MULTILINE)
    for row in ts.check(f"{path}:{name}"):
        yield row
        if row.verdict == "wrong":
            return


SLOW = {
    "online_softmax",
    "histogram",
    "rope_in_place",
    "grouped_gemm",
    "fp8_product",
    "int4_product",
    "swiglu",
    "stencil",
    "fft",
}
"""Of which a whole check takes seconds."""


@pytest.mark.parametrize("stem", [pytest.param(stem, marks=[pytest.mark.slow] * (stem in SLOW)) for stem in MISTAKES])
def test_a_right_kernel_passes(stem):
    rows = list(checked(FOLDER / f"{stem}.py"))
    assert [row.message for row in rows if row.verdict == "wrong"] == []


@pytest.mark.parametrize(("stem", "mistake"), [(stem, mistake) for stem, some in MISTAKES.items() for mistake in some])
def test_a_planted_mistake_is_found(stem, mistake, tmp_path):
    old, new = MISTAKES[stem][mistake]
    text = (FOLDER / f"{stem}.py").read_text()
    assert text.count(old) == 1
    wrong = tmp_path / f"{stem}.py"
    wrong.write_text(text.replace(old, new))
    *_, last = checked(wrong)
    assert last.verdict == "wrong"
    print(last.problem, last.schedule.short(), last.message)
