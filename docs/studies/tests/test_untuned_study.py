"""The study of drawn problems: what is drawn, how rows are judged, and that what ships are the rows' times; no GPU."""

from __future__ import annotations

import dataclasses
import json

import pytest

from docs.studies import untuned
from docs.studies.untuned import Row, cross_validated, judged, read, shipped_times, summary
from tiledsched.core import data_files
from tiledsched.kernels.matmul import Matmul
from tiledsched.kernels.scaled_matmul import ScaledMatmul

RESULTS = data_files.tuning_db().parent / "docs" / "results" / "h200"
DRAWN = [RESULTS / f"untuned_{seed}.csv.xz" for seed in (4901, 4902, 20261127, 2, 20261128)]


def rows(served="torch", graph=None, problem=None, **times):
    """Rows of a product; each method's times on the GPU and on the host."""
    text = json.dumps((problem or Matmul.problem(m=64, n=64, k=64)).to_json(), sort_keys=True)
    row = Row(seed=1, kernel="matmul", problem=text, method="")
    found = [
        dataclasses.replace(row, method=name.replace("_", " "), us=us, host_us=host_us)
        for name, (us, host_us) in times.items()
    ]
    return [*found, dataclasses.replace(row, method="served", eager=served, graph=graph or served, host_us=12.0)]


def test_a_caller_sees_the_gpu_in_graphs_and_the_slower_of_host_and_gpu_in_eager_calls() -> None:
    (found,) = judged(rows("ours 0", "torch", torch=(10.0, 15.0), ours_0=(20.0, 11.0)))
    assert (found.graph, found.eager) == (1.0, 15 / 20)
    (found,) = judged(rows("ours 0", torch=(10.0, 15.0), ours_0=(8.0, 11.0)))
    assert (found.graph, found.eager) == (10 / 8, 15 / 12)  # what is served takes the host 12 us
    assert judged(rows("ours 0", torch=(10.0, 15.0))) == []  # what was served was not timed
    text = summary(judged(rows("ours 0", torch=(10.0, 15.0), ours_0=(20.0, 11.0))))
    assert "matmul graph: 1 problems, geometric mean 0.500x, below 0.95x 1" in text
    assert "  graph 0.500 eager 0.750 ours 0 against torch 10.0 us: m=64" in text


def test_what_ships_are_the_times_of_the_rows_in_the_results() -> None:
    every = [row for path in DRAWN for row in read(path)]
    for kernel in {row.kernel for row in every}:
        path = data_files.tuning_db() / "model" / kernel / "timed_sm_90.json"
        assert json.loads(path.read_text()) == shipped_times(every, kernel), kernel
    losses = data_files.tuning_db() / "model" / "matmul" / "transfer.json"
    assert json.loads(losses.read_text()) == untuned.drawn_losses(every, "matmul")


def test_of_products_nothing_that_is_served_is_slower_than_cublas_in_graphs() -> None:
    found = cross_validated(read(DRAWN[1]), "matmul")
    assert len(found) == 103
    assert min(each.graph for each in found) >= 0.95


def test_drawn_products_of_8_bits_are_computed_as_they_are_timed(launches, quiet, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    for name in ("randn", "rand"):
        drawing = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *size, drawing=drawing, **more: drawing(*size, **(more | {"device": "cpu"}))
        )
    assert {(p.scales, p.fast_accum, p.n % 128) for p in untuned.drawn("scaled_matmul", 1, 40)} == {
        (scales, fast, 0) for scales in ("row", "tensor") for fast in (False, True)
    }
    for values in ({"scales": "row"}, {"scales": "tensor", "fast_accum": True}):
        p = ScaledMatmul.problem(m=5, n=32, k=48, **values)
        a, b, scale_a, scale_b = tensors = untuned.tensors_of(torch, p)
        public, make, find = untuned.public_call(p, tensors)
        wanted = (a.float() @ b.float()) * scale_a[:, None] * scale_b
        torch.testing.assert_close(public().float(), wanted, rtol=1e-2, atol=1e-2)
        assert find().problem == make(find().served).problem == p
