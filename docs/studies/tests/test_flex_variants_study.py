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


WORKER = """
import json, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if words["--variants"] == "softcap":
    time.sleep(60)
print([], flush=True)
for line in sys.stdin:
    if words["--variants"] == "tree":
        sys.exit(1)
    keys = int(line)
    print(json.dumps({"variant": words["--variants"], "keys": keys, "width": int(words["--widths"])} if keys < 4096 else None), flush=True)
"""


def test_what_ends_or_delays_one_process_takes_no_other_variant_with_it(tmp_path, capfd) -> None:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    asked = list(study.cells(["causal", "tree", "softcap", "alibi"], [1024, 2048, 4096], [64]))
    rows = list(study.apart(asked, 6.0, (study.sys.executable, str(program))))
    assert [(row["variant"], row["keys"]) for row in rows] == [
        ("causal", 1024),
        ("alibi", 1024),
        ("causal", 2048),
        ("alibi", 2048),
    ]
    said = capfd.readouterr().err
    assert "('tree', 64): ended" in said
    assert "('softcap', 64): no answer by 5 s" in said


def test_a_bias_that_torch_cannot_address_is_one_for_all_heads() -> None:
    assert study.compared("dense_bias", 1, 2, 64, device="cpu").arrays[0].shape == (1, 2, 64, 64)
    assert study.compared("dense_bias", 1, 1 << 17, 128, device="cpu").arrays[0].shape == (1, 1, 128, 128)
