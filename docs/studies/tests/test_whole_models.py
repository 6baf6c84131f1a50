"""Whole models: what is run, in which processes, and what is made of the rows; small models on the CPU."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from golden import check_golden
from test_integrations import serving, transformers  # fixtures

from docs.studies import seen_models, whole_models

__all__ = ["serving", "transformers"]
SMALL = {"hidden": 64, "intermediate": 96, "layers": 1, "heads": 4, "kv_heads": 1, "head_dim": 16, "vocabulary": 64}
ON_THE_CPU = ["--device", "cpu", "--dtype", "float32", "--layers", "1", "--new-tokens", "3", "--rounds", "2"]


@pytest.fixture
def small_models(transformers, monkeypatch):
    small = {
        name: whole_models.ModelShape(**{**SMALL, "family": shape.family})
        for name, shape in whole_models.MODELS.items()
    }
    monkeypatch.setattr(whole_models, "MODELS", small)
    return whole_models


def test_models_run_under_both_and_tell_how_far_apart_they_are(small_models, capsys, tmp_path) -> None:
    arguments = [*ON_THE_CPU, "--batch", "1,2", "--prompt", "12", "--csv", str(tmp_path / "rows.csv"), "--json"]
    assert small_models.main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    rows = said["rows"]
    assert [(row["model"], row["method"], row["phase"], row["tokens"]) for row in rows[:8]] == [
        ("llama", method, phase, batch * tokens)
        for batch in (1, 2)
        for method in ("sdpa", "tiledsched")
        for phase, tokens in (("prefill", 12), ("decode", 3))
    ]
    assert len(rows) == 24
    for row in rows:
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert (row["run"], row["rounds"], row["dtype"]) == (1, 2, "float32")
        assert row["first_ms"] > 0
        assert f"torch {torch.__version__.split('+')[0]}" in row["versions"]
        if row["method"] == "sdpa":
            assert row["ratio"] is None
            assert row["fallbacks"] == ""
        else:
            assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
            assert "cpu" in row["fallbacks"]
    assert [each["model"] for each in said["comparisons"]] == ["llama", "qwen3", "qwen2"]
    for comparison in said["comparisons"]:
        assert comparison["same_tokens"]
        assert comparison["agreement"] == 1.0
        assert comparison["prompt_error"] < 1e-6
        assert comparison["step_error"] < 1e-6
        assert comparison["control_first_difference"] is None
    assert "cpu" in " ".join(said["comparisons"][0]["fallbacks"])
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 25


USUAL = {
    "batch": 16,
    "tokens": 8,
    "median_ms": 1.0,
    "low_ms": 1.0,
    "high_ms": 1.0,
    "tokens_per_s": 1.0,
    "rounds": 5,
    "growing": False,
    "ratio_low": 0.5,
    "ratio_high": 3.0,
    "shape": "",
    "dtype": "bfloat16",
    "device": "GPU",
    "versions": "torch 1",
    "date": "2026-11-30",
}
"""Of a row of whole models."""


def test_repeated_runs_are_fresh_processes_with_empty_homes(small_models, capsys, tmp_path, monkeypatch) -> None:
    """Here they only tell what they see; the third fails, and what the others found stays."""
    rows = [
        {
            **USUAL,
            "model": "qwen2",
            "method": method,
            "phase": phase,
            "prompt": 8,
            "first_ms": 5.0,
            "fallbacks": "",
            "ratio": None if method == "sdpa" else 1.0,
        }
        for method in small_models.METHODS
        for phase in small_models.PHASES
    ]
    script, seen = tmp_path / "small.py", tmp_path / "seen.txt"
    script.write_text(f"""
import json, os, sys
homes = [os.environ[name] for name in {small_models.HOMES!r}]
with open({str(seen)!r}, "a") as file:
    print(json.dumps([os.getcwd(), homes, [os.listdir(each) for each in homes], os.environ.get("TILEDSCHED_DB"), sys.argv]),
          file=file)
if sys.argv[2] == "3":
    sys.exit(7)
print("somebody else prints")
for row in json.loads({json.dumps(rows)!r}):
    print(json.dumps({{"Row": {{**row, "run": int(sys.argv[2])}}}}))
""")
    monkeypatch.setattr(small_models, "COMMAND", (sys.executable, str(script)))
    arguments = [
        "--model",
        "qwen2",
        "--batch",
        "16",
        "--prompt",
        "8",
        "--repeat",
        "4",
        "--csv",
        str(tmp_path / "rows.csv"),
    ]
    assert small_models.main(arguments) == 7
    found = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(found) == len({folder for folder, *_ in found}) == 3
    for folder, homes, files, database, _ in found:
        assert {Path(each).parent for each in homes} == {Path(folder)}
        assert files == [[]] * len(small_models.HOMES)
        assert database is None
        assert not Path(folder).exists()
    assert ["--no-compare" in given for *_, given in found] == [False, True, True]
    said = capsys.readouterr()
    assert "somebody else prints" in said.err
    assert "run 3 ended with 7" in said.err
    assert "2 of 4 were not measured" in said.out
    written = [line.split(",") for line in (tmp_path / "rows.csv").read_text().splitlines()]
    assert [line[written[0].index("run")] for line in written[1:]] == ["1"] * 4 + ["2"] * 4


def test_the_summary_is_of_all_runs(small_models) -> None:
    rows = [
        small_models.Row(
            **USUAL,
            model="qwen2",
            method=method,
            phase=phase,
            prompt=prompt,
            run=run,
            first_ms=100.0 * run,
            ratio=None if method == "sdpa" else ratio * scale,
            fallbacks="why" if (method, prompt, phase) == ("tiledsched", 8192, "decode") else "",
        )
        for run, scale in ((1, 1.0), (2, 1.25), (3, 0.8))
        for prompt in (1024, 8192)
        for method in small_models.METHODS
        for phase, ratio in (("prefill", 1.0), ("decode", 1.21))
    ]
    check_golden("studies/whole_models.txt", small_models.to_text(rows, 6))
    short = small_models.to_text([row for row in rows if (row.run, row.prompt) != (3, 8192)], 6)  # a budget was spent
    assert "1 of 6 were not measured" in short


# Models that are tuned by what they call: which processes run, in which home, and what is made of their rows


pytest.importorskip("torch")


CHILD = """
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({seen!r}, "a") as file:
    print(json.dumps([given["--run"], os.environ["HOME"], os.environ.get("TILEDSCHED_CAPTURE", ""), given["--model"]]), file=file)
for method in {methods!r}:
    for phase in {phases!r}:
        row = dict({usual!r}, model=given["--model"], method=method, phase=phase, prompt=int(given["--prompt"].split(",")[0]))
        row |= dict(run=int(given["--run"]), first_ms=7.0, fallbacks="", ratio=None if method == "sdpa" else 1.25)
        print(json.dumps({{"Row": row}}))
"""
COMMAND_LINE = """
import json, os, sys
with open({seen!r}, "a") as file:
    print(json.dumps([sys.argv[1:], os.environ["HOME"]]), file=file)
sys.exit({code} if sys.argv[1] == "tune" else 0)
"""


@pytest.mark.parametrize("code", [0, 2])
def test_models_run_before_and_after_a_tune_of_what_they_call(code, tmp_path, monkeypatch, capsys) -> None:
    seen = str(tmp_path / "seen.txt")
    child, command = tmp_path / "child.py", tmp_path / "command.py"
    names = {"methods": whole_models.METHODS, "phases": whole_models.PHASES}
    child.write_text(CHILD.format(seen=seen, usual=USUAL, **names))
    command.write_text(COMMAND_LINE.format(seen=seen, code=code))
    monkeypatch.setattr(whole_models, "COMMAND", (sys.executable, str(child)))
    monkeypatch.setattr(seen_models, "CLI", (sys.executable, str(command)))
    file = tmp_path / "rows.csv"
    assert seen_models.main(["--model", "llama", "--budget", "5", "--csv", str(file)]) == code
    found = [json.loads(line) for line in (tmp_path / "seen.txt").read_text().splitlines()]
    homes = {each[1] for each in found}
    assert len(homes) == 1
    ran = [each[0] if isinstance(each[0], list) else [each[0], *each[2:]] for each in found]
    first = [["2", "", "llama"], ["1", "1", "llama"], ["show", "--seen"], ["tune", "--budget", "5", "--seen"]]
    assert ran == [*first, *([] if code else [["warmup", "--seen"], ["1", "", "llama"]])]
    rows = list(csv.DictReader(file.open()))
    assert [row["state"] for row in rows] == ["torch first"] * 4 + ["before"] * 4 + ([] if code else ["after"] * 4)
    said = capsys.readouterr()
    if code:
        assert "tune --seen ended with 2" in said.err
    else:
        assert "1.250x" in said.out
        assert "First prefill of a process, llama: 7 ms with torch, 7 ms before, 7 ms after." in said.out
