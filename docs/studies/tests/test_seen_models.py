"""The study of models that are tuned by what they call: which processes run, in which home, and what is made of their rows."""

from __future__ import annotations

import csv
import json
import sys

import pytest

pytest.importorskip("torch")

from docs.studies import seen_models, whole_models

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
    from docs.studies.tests.test_whole_models import USUAL

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
