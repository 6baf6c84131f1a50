"""The study of mask tensors, on a CPU: that its masks are what they are called, and that it finds a wrong mask."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from docs.studies import attention_masks as study
from tiledsched import configure
from tiledsched.ops.masks import read_mask_tensor


@pytest.mark.parametrize("cell", study.CELLS)
def test_a_cell_has_a_mask_that_our_kernel_takes(cell):
    kind, content, axes, sizes = study.read(cell)
    small = [min(each, most) for each, most in zip(sizes, (8, 6, 2, 130, 200, 64), strict=True)]
    mask = study.mask_of(f"{kind} {content} {axes} {'x'.join(map(str, small))}", device="cpu")
    batch, heads, kv_heads, rows, keys, width = small
    q, k = (torch.zeros(batch, *shape, width, dtype=torch.bfloat16) for shape in ((heads, rows), (kv_heads, keys)))
    assert read_mask_tensor(mask, q, k) is not None
    hides = mask == 0 if kind == "boolean" else mask < -1e30
    assert hides.any() == (content != "bias")
    assert not hides.all(-1).any()  # of rows that see nothing a backend may make anything


def test_there_are_24_cells_of_both_kinds():
    assert len(set(study.CELLS)) == 24
    assert sum("boolean" in each for each in study.CELLS) == 12


def test_masks_are_right_by_torchs_criterion_on_the_interpreter(launches):
    with configure(masks="own"):
        rows = list(study.right(["of keys", "two axes"], device="cpu", sizes=((1, 1), (63, 65))))
    assert len(rows) == 12
    assert [row for row in rows if not row["good"]] == []
    assert study.conclusion("right", rows)[-1] == "equal by torch's test: 12 of 12"
    assert launches


@pytest.mark.parametrize("wrong", ["one key off", "no gradient of v"])
def test_a_mistake_is_found(wrong):
    def attend(q, k, v, mask):
        mask = mask.roll(1, -1) if wrong == "one key off" else mask
        return study.torch_call("MATH", q, k, v.detach() + 0 * v if wrong == "no gradient of v" else v, mask)

    rows = list(study.right(["random"], device="cpu", sizes=((63, 65),), own=attend))
    assert [row["good"] for row in rows] == [False] * 7


def test_the_last_line_counts_cells_that_are_ahead():
    rows = [
        {"cell": name, "over_efficient": ratio, "over_cudnn": "", "over_auto": "", "good": ratio > 1}
        for name, ratio in (("a", 2.0), ("b", 0.5))
    ]
    assert study.conclusion("times", rows) == [
        "over efficient: 1.000 in 2 cells, least 0.500 (b)",
        "right, and faster than the efficient backend: 1 of 2",
    ]
