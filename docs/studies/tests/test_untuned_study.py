"""The study of drawn problems: what is drawn, how rows are judged, and that what ships are the rows' times; no GPU."""

from __future__ import annotations

import dataclasses
import json

from docs.studies import untuned
from docs.studies.untuned import DRAWS, Row, cross_validated, judged, read, shipped_times, summary
from tiledsched.core import data_files
from tiledsched.kernels.matmul import Matmul

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
    for kernel in DRAWS:
        path = data_files.tuning_db() / "model" / kernel / "timed_sm_90.json"
        assert json.loads(path.read_text()) == shipped_times(every, kernel), kernel
    losses = data_files.tuning_db() / "model" / "matmul" / "transfer.json"
    assert json.loads(losses.read_text()) == untuned.drawn_losses(every, "matmul")


def test_of_products_nothing_that_is_served_is_slower_than_cublas_in_graphs() -> None:
    found = cross_validated(read(DRAWN[1]), "matmul")
    assert len(found) == 103
    assert min(each.graph for each in found) >= 0.95
