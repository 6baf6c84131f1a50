"""The study of dependent launches notices a call that reads what the one before has left."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy
import pytest
import serve_on_cpu
import torch

from docs.studies.dependent_launch import BURST, Chain, Row, not_waiting, replayed, table
from tiledsched.serve import process

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


def test_chains_that_do_not_wait_are_programs_of_their_own() -> None:
    launched: list[tuple[Any, ...]] = []

    def launch(stream, grid, kernel, arguments, **options) -> None:
        values = kernel._pyfunc.__globals__
        launched.append((values.get("WAITS"), values.get("RELEASES"), bool(options)))

    with serve_on_cpu.using(serve_on_cpu.runtime_on_cpu(launch)):
        chain = Chain(numpy, "matmul", {"m": 64, "n": 64, "k": 1003}, {"PAD": True})
        plans = chain.plans()
        process.forget_kernels()
        with not_waiting():
            plans.append(chain.plan(chain.schedule.replace(pdl=2)))
        for plan in plans:
            chain.call(plan, 1, first=True)
    assert launched[:3] == [(None, None, False)] * 3
    assert launched[3:6] == [(None, None, False), (True, False, True), (True, False, True)]
    assert launched[6:9] == [(False, True, False), (True, True, True), (True, False, True)]
    assert launched[9:] == [(False, True, False), (False, True, True), (False, False, True)]


def test_the_value_that_makes_a_chain_fastest_is_compared() -> None:
    for times_us, wanted in (((9.0, 9.1, 8.0), 2), ((9.0, 8.0, 8.5), 1), ((9.0, 9.0, 9.5), 0)):
        row = Row(chain="matmul m=1", schedule="", launches=2, graph_us=times_us, eager_us=(20.0, 20.0, 20.0))
        assert row.fastest() == wanted
    assert "matmul m=1" in table([row])
