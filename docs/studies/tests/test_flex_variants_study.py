"""The study of attention variants: which problems a second run times, and what is put beside built-in masks."""

from __future__ import annotations

import numpy as np
import pytest

from docs.studies import flex_variants as study
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import evaluate
from tiledsched.kernels.attention.variants import flex_attention


def row(name, keys, width):
    return {"variant": name, "keys": keys, "width": width, "tiledsched_us": 1.0}


def test_a_second_run_keeps_rows_and_times_what_is_lacking(tmp_path) -> None:
    path = str(tmp_path / "rows.csv")
    assert study.rows_of(path) == []
    study.collected([row("causal", 1024, 64), row("alibi", 1024, 64)], path)
    known = study.rows_of(path)
    asked = list(study.cells(["causal", "alibi"], [1024, 4096], [64, 128]))
    left = study.lacking(asked, known)
    assert [cell for cell in asked if cell not in left] == [("causal", 16, 32, 1024, 64), ("alibi", 16, 32, 1024, 64)]
    rows = study.collected([row("causal", 4096, 64)], path, known)
    assert [(each["variant"], int(each["keys"])) for each in rows] == [
        ("causal", 1024),
        ("alibi", 1024),
        ("causal", 4096),
    ]
    assert len(study.rows_of(path)) == 3


def test_a_row_is_written_before_the_next_is_measured(tmp_path) -> None:
    path = str(tmp_path / "rows.csv")

    def found():
        yield row("causal", 1024, 64)
        assert len(study.rows_of(path)) == 1
        yield row("causal", 1024, 128)

    assert len(study.collected(found(), path)) == 2


def test_the_causal_window_is_that_of_its_definition() -> None:
    rows, keys = np.arange(40, dtype=np.int32)[:, None], np.arange(40, dtype=np.int32)[None]
    found = evaluate(study.causal_window(7), 0, 0, rows, keys, arrays=[])
    assert np.array_equal(found, (keys <= rows) & (keys > rows - 7))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", study.SCHEDULES)
def test_schedules_beside_built_in_masks_work(name, width) -> None:
    kernel = flex_attention(mask_mod=study.causal_window(study.WINDOW))
    p = kernel.problem(batch=4, heads=2048 // width, kv_heads=2048 // width, seq_q=4096, seq_k=4096, head_dim=width)
    space = space_for("sm_90", kernel)
    assert space.unworkable(space.default(p).replace(**study.SCHEDULES[name]), p) == []
