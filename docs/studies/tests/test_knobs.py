"""What knob values were worth, on a made-up landscape and on a shipped one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_samples import plain, taken

from docs.studies.knobs import fastest_first, knob_row, problem_row, verdict
from tiledsched.core import data_files
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention

SPACE = space_for("sm_90", Attention)
FIRST = [
    taken(plain(64, 64), 200.0),
    taken(plain(64, 64, kv_subtiles=2), 160.0),
    taken(plain(128, 64), 180.0),
    taken(plain(128, 64, kv_subtiles=2), 240.0),
]
SECOND = [
    taken(plain(64, 64), 100.0),
    taken(plain(64, 64, kv_subtiles=2), 125.0),
    replace(taken(plain(64, 32, kv_subtiles=2), 50.0), accuracy=None),
]
SHIPPED = data_files.tuning_db() / "landscapes" / "attention" / "h200_burst_s4096_d64_float16_full_b4_h32.json.xz"


def test_a_knob_value_is_compared_with_the_plain_one() -> None:
    got = verdict(SPACE, [FIRST, SECOND], "kv_subtiles", 2)
    assert (got.recorded, got.checked, got.in_best, got.ahead) == (4, 3, 1, 1)  # the unchecked 50 us wins nothing
    assert got.over_plain == got.over_others == pytest.approx((180 / 160, 100 / 125))
    assert sorted(got.pairs) == pytest.approx([180 / 240, 100 / 125, 200 / 160])
    row = knob_row(SPACE, [FIRST, SECOND], "kv_subtiles", 2)
    assert row[5:] == ("0.963", "1.125", "0.963", "1.125", "0.800", "3")


def test_the_best_is_compared_with_the_best_without_structure() -> None:
    row = problem_row(SPACE.modelled_pins(), fastest_first(FIRST))
    assert row[1:4] == ("4", "64x64 kv_subtiles=2 warps=4 occ=1", "160.0")
    assert row[5:] == ("1.125x", "yes")
