"""Documents are true: commands are ones that there are, Python parses, and what a tutorial runs without a GPU runs."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiledsched.cli.parser import make_parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_WORDS = {"reference": 20_000, "results": 15_000}


def blocks(path, *languages):
    """Code between fences, of those languages (the empty one where none is said)."""
    return [code for language, code in BLOCK.findall(path.read_text(encoding="utf-8")) if language.strip() in languages]


def commands(path):
    """Every `tiledsched ...` line of a page's code, joined where it goes on."""
    found = []
    for code in blocks(path, "", "sh", "shell", "console"):
        for line in code.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True) if "tiledsched " in line else []
            except ValueError:  # a quotation that goes on in the next line
                continue
            while words and "=" in words[0] and not words[0].startswith("-"):
                words = words[1:]  # environment
            if words and words[0] == "tiledsched" and len(words) > 1:
                end = next(
                    (place for place, word in enumerate(words) if word in ("|", ">", "&&", ";", "2>", "||")), len(words)
                )
                found.append(words[1:end])
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_that_there_is(path, monkeypatch, capsys):
    from tiledsched.core.registry import load_kernel

    monkeypatch.setattr("tiledsched.cli.parser.devices", list)
    for words in commands(path):
        known = next(
            (load_kernel(word) for word in words[1:] if word in ("matmul", "rms_norm", "softmax")),
            load_kernel("attention"),
        )
        usual = [re.sub(r"^\S+\.py:\w+$|^[a-z_.]+:\w+$", "attention", word) for word in words]
        if any(word == "..." or word.startswith(("[", "$")) for word in usual):
            continue  # a form, or a line of a script
        parser: argparse.ArgumentParser = make_parser(known)
        unknown, said = usual, ""
        try:
            _, unknown = parser.parse_known_args(usual)
        except SystemExit as ended:
            unknown, said = [] if ended.code == 0 else usual, capsys.readouterr().err
        assert unknown == [], f"{' '.join(words)}: {said or 'there is no such flag'}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_parses(path):
    for code in blocks(path, "python"):
        ast.parse(code)


@pytest.mark.compiler
@pytest.mark.parametrize("path", [path for path in TUTORIALS if blocks(path, "sh")], ids=lambda path: path.stem)
def test_what_a_tutorial_runs_without_a_gpu_runs(path, tmp_path):
    """From an empty home, in order."""
    home = {name: str(tmp_path / "home") for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    environment = {
        **os.environ,
        **home,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TILEDSCHED_DB", None)
    for code in blocks(path, "sh"):
        done = subprocess.run(
            ["bash", "-ec", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def test_every_page_is_in_the_site_and_only_once():
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {*listed} == {str(path.relative_to(ROOT / "docs")) for path in PAGES if path.name != "README.md"}


def test_documents_are_short():
    """What only its authors read is counted apart."""
    words = {"reference": 0, "results": 0}
    for path in PAGES:
        words["results" if "results" in path.parts else "reference"] += len(path.read_text(encoding="utf-8").split())
    for kind, most in MOST_WORDS.items():
        assert words[kind] <= most, f"{kind}: {words[kind]} words, at most {most}"
