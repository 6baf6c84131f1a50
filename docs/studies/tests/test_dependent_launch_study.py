"""The study of dependent launches notices a call that reads what the one before has left."""

from __future__ import annotations

import math
import types

import numpy
import pytest
import serve_on_cpu
import torch

from docs.studies import dependent_launch
from docs.studies.dependent_launch import BURST, EARLY, LATE, WITHOUT, Chain, Row, replayed, table

CUDA = types.SimpleNamespace(synchronize=lambda: None, _sleep=lambda cycles: None)
NAMES = ("zeros", "int64", "int32", "int16", "uint8")
TORCH = types.SimpleNamespace(cuda=CUDA, **{name: getattr(torch, name) for name in NAMES})
RIGHT = [[torch.tensor([0.0, math.nan])], [torch.tensor([1.0, 2.0])]]


@pytest.mark.parametrize(("stale", "wrong"), [(False, 0), (True, 2)])
def test_outputs_are_compared_bit_by_bit(stale: bool, wrong: int) -> None:
    made: list[int] = []

    def call(place: int) -> list[torch.Tensor]:
        made.append(place)
        late = stale and len(made) in (
            BURST + 2,
            3 * BURST,
        )  # the second call of the first burst that counts, and another
        return [each.clone() for each in RIGHT[place - 1 if late else place]]

    done, found = replayed(TORCH, call, RIGHT, 5 * BURST, False, 60.0)
    assert (done, found) == (5 * BURST, wrong)
    assert len(made) == done + BURST  # the first burst only loads


def test_variants_are_programs_of_their_own() -> None:
    launched: list[tuple[int, str]] = []

    def launch(stream, grid, kernel, arguments, **options) -> None:
        values = kernel._pyfunc.__globals__
        launched.append((values.get("WAITS"), values.get("RELEASES"), bool(options)))

    with serve_on_cpu.using(serve_on_cpu.runtime_on_cpu(launch)):
        chain = Chain(numpy, "matmul", {"m": 64, "n": 64, "k": 1003}, {"PAD": True})
        for plan in chain.plans((WITHOUT, EARLY, LATE)).values():
            chain.call(plan, 1, first=True)
    first, early, late = launched[:3], launched[3:6], launched[6:]
    assert [each[2] for each in first] == [False] * 3
    assert early == [(False, True, False), (True, True, True), (True, False, True)]
    assert late == [(False, False, False), (True, False, True), (True, False, True)]


def test_the_table_names_each_chain() -> None:
    row = Row(
        chain="matmul m=1",
        schedule="",
        **{name: 2 for name in Row.__dataclass_fields__ if name not in ("chain", "schedule")},
    )
    assert "matmul m=1" in table([row])
    assert len(dependent_launch.CHAINS) >= 10
