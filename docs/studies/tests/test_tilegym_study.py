"""The study of TileGym's call sites, as far as it goes without a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

from docs.studies.tilegym import SITES, Recorder, answers, run


def test_answers_are_noted_by_their_place():
    space = [SimpleNamespace(tile=tile) for tile in (1, 2, 4)]
    recorder = Recorder(lambda configs, *given, quiet: SimpleNamespace(best=SimpleNamespace(config=configs[2])))
    recorder(iter(space), 0)
    (row,) = recorder.take()
    assert (row["configs"], row["winner"]) == (3, 2)
    assert recorder.take() == []


def test_the_answers_of_two_files_are_paired():
    lines = [json.dumps({"site": "a", "calls": [{"winner": place}, {"winner": 0}]}) for place in (1, 2)]
    assert answers(lines[:1], lines[1:]) == {"a": [(1, 2), (0, 0)]}


def test_a_function_that_does_not_run_costs_one_row(tmp_path, monkeypatch):
    monkeypatch.setitem(SITES, "missing", ("no.such.module", lambda module: None))
    run(Recorder(print), ["missing", "missing"], tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["site"] for row in rows] == ["missing", "missing"]
    assert all(row["failure"].startswith("ModuleNotFoundError") for row in rows)
