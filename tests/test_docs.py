"""Documents are true: commands are ones that there are, Python parses, and what a tutorial runs without a GPU runs."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest
from golden import leaf_commands
from report_samples import draws_nothing
from serve_on_cpu import using

import tiledsched as ts
from docs.studies import commands_page
from tiledsched.cli import app, problems
from tiledsched.cli.commands import root
from tiledsched.core.errors import TiledschedError
from tiledsched.serve.process import Runtime

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
RUN = ("check", "choosing", "database", "drop-in", "faq", "python", "recipes", "training")
"""Other pages whose commands are run."""
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
WRITE = os.environ.get("WRITE_TABLES") == "1"


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
def test_every_command_of_a_page_is_one_that_there_is(path):
    for words in commands(path):
        if any(word == "..." or word.startswith(("[", "$")) for word in words):
            continue  # a form, or a line of a script
        try:
            parse(words)
        except click.exceptions.Exit:
            continue  # --help
        except (click.UsageError, TiledschedError, KeyError) as error:
            raise AssertionError(f"{' '.join(words)}: {error}") from error


def parse(words):
    """Read a command as the command line would, with attention in the place of kernels in files that are not here."""
    known = [re.sub(r"^\S+\.py:\w+$|^[a-z_.]+:\w+$", "attention", word) for word in words]
    words, is_shipped, command = known, known == words, root
    while isinstance(command, app.CommandGroup) and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    with command.make_context("", words, obj=app.Invocation(), help_option_names=["-h", "--help"]) as context:
        given = context.params
    if command is root.commands["fleet"].commands["run"]:
        return parse(given["words"])
    if isinstance(given.get("kernel"), type) and is_shipped:
        for text in given.get("problem", ()):
            problems.read_values(given["kernel"], text)
        for name in (given.get("suite") or "").split(","):
            assert not name or name.isupper() or name in given["kernel"].suites, f"there is no suite {name}"
    return None


def test_the_page_of_commands_says_what_their_help_says():
    """With WRITE_TABLES=1 its sections are written anew."""
    text, made = commands_page.PAGE.read_text(encoding="utf-8"), commands_page.page()
    if WRITE:
        commands_page.PAGE.write_text(made, encoding="utf-8")
    assert WRITE or text == made
    headings = re.findall(r"^### `tiledsched ([a-z ]+)`$", made, re.MULTILINE)
    assert headings == [name for name, _ in leaf_commands(root)]
    assert commands_page.MORE.keys() <= set(headings)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_parses(path):
    for code in blocks(path, "python"):
        ast.parse(code)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in RUN), *TUTORIALS],
    ids=lambda path: path.stem,
)
def test_a_page_shows_what_its_commands_print(path, tmp_path):
    """The pages that a newcomer follows are run from top to bottom, without a GPU, from an empty home.

    A Python block that begins with `# NAME.py` becomes that file; `# NAME.py, continued` is added to it. A block of `sh` is
    run. A block of `text` behind it is what the last run printed to stdout: numbers may differ, and a line of three dots
    stands for any lines. Blocks without a language need a GPU and are not run. With WRITE_TABLES=1 the page is
    written anew with what was printed.
    """
    folders = {name: str(tmp_path) for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    path_variable = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | folders | {"PATH": path_variable, "COLUMNS": "114", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("TILEDSCHED_")}
    environment["PYTHONPATH"] = draws_nothing(tmp_path / "drawing")
    if path.stem in ("training", "tune-my-model"):
        environment["PATH"] = f"{python_on_a_gpu(tmp_path / 'bin')}:{path_variable}"
    printed = ""

    def run(block):
        nonlocal printed
        language, code = block.groups()
        file = re.match(r"# (\w+\.py)(, continued)?\n", code)
        if language == "python" and file:
            with (tmp_path / file[1]).open("a" if file[2] else "w", encoding="utf-8") as text:
                text.write(f"\n\n{code}" if file[2] else code)
        elif language == "sh":
            command = ["bash", "-ec", code]
            ran = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
                preexec_fn=on_one_cpu,
            )
            assert ran.returncode == 0, f"{code}\n{ran.stdout[-1000:]}\n{ran.stderr[-2000:]}"
            printed = ran.stdout.replace(str(tmp_path), "~")
        elif language == "text" and WRITE:
            return f"```text\n{shortened(printed, code)}```"
        elif language == "text":
            assert pattern(code).fullmatch(without_numbers(printed)), f"the page shows\n{code}\nprinted was\n{printed}"
        return block[0]

    page = BLOCK.sub(run, path.read_text(encoding="utf-8"))
    if WRITE:
        path.write_text(page, encoding="utf-8")


def on_one_cpu():
    """Run this process on one CPU, another for each of pytest's workers: each compile process takes a second to start."""
    worker, cpus = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[worker % len(cpus)]})


def python_on_a_gpu(folder):
    """A folder with a `python` for which tensors on the CPU are on an H200: launches run in the interpreter."""
    folder.mkdir()
    start = "import sys, runpy; sys.path.insert(0, sys.argv[1]); from serve_on_cpu import Launches; \
from tiledsched.serve import process; process.use_runtime(Launches().runtime); sys.argv = sys.argv[2:]; \
sys.path[0] = '.'; runpy.run_path(sys.argv[0], run_name='__main__')"
    program = f'#!/bin/sh\nexport TILEDSCHED_FALLBACK=error\nexec {sys.executable} -c "{start}" {Path(__file__).parent} "$@"\n'
    (folder / "python").write_text(program, encoding="utf-8")
    (folder / "python").chmod(0o755)
    return folder


def without_numbers(text):
    """Text with every number as `N`, and with single spaces: columns are as wide as the numbers in them."""
    return re.sub(r" +", " ", re.sub(r"\d[\d.,]*", "N", text)).strip()


def pattern(shown):
    """What the output that a page shows stands for: numbers are any numbers, and a line of dots any lines."""
    lines = (re.escape(without_numbers(line)) + r"\s*" for line in shown.splitlines())
    return re.compile("".join(r"(?s:.*)" if line.startswith(re.escape("...")) else line for line in lines))


def shortened(printed, shown):
    """What was printed, as long as what the page shows: lines before its line of dots and behind it, or between two."""
    lines, kept = printed.rstrip().splitlines(), shown.splitlines()
    dots = [n for n, line in enumerate(kept) if line == "..."]
    if len(dots) == 2:  # the lines between them, from the first that is like theirs
        first = [without_numbers(line) for line in lines].index(without_numbers(kept[1]))
        lines = ["...", *lines[first : first + len(kept) - 2], "..."]
    elif dots:
        first, last = dots[0], len(kept) - dots[0] - 1
        lines = [*lines[:first], "...", *lines[len(lines) - last :]]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def test_the_first_page_of_the_site_is_the_readmes_beginning_and_its_path():
    """With WRITE_TABLES=1 it is written anew."""
    page, text = ROOT / "docs" / "index.md", (ROOT / "README.md").read_text(encoding="utf-8")
    title, words, _, what, picture = text.split("\n\n## ")[0].split("\n\n")
    path = text.split("\n## The path\n\n")[1].split("\n\n")[0]
    written = "\n\n".join([title, words, what, picture, path]).replace("](docs/", "](") + "\n"
    if WRITE:
        page.write_text(written, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == written


def test_every_page_is_in_the_site_and_only_once():
    """Those that are not in the navigation are linked from the page on measuring."""
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    beside = re.findall(r"^  /([\w/-]+\.md)$", site, re.MULTILINE)
    listed = re.findall(r": ([\w/-]+\.md)$", site, re.MULTILINE) + beside
    assert len(listed) == len(set(listed))
    measuring = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    assert [page for page in beside if f"]({page})" not in measuring] == []
    assert {*listed} == {str(path.relative_to(ROOT / "docs")) for path in PAGES if path.name != "README.md"}


def test_the_page_on_the_model_says_the_errors_that_ship():
    page = (ROOT / "docs" / "model.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "tuning_db" / "model").glob("*/error.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            assert row["tile"] or f"{row['mean']:.1%}" in page, (path.parent.name, row)


def test_the_page_on_search_spaces_lists_every_knob_of_attention():
    page = (
        (ROOT / "docs" / "search-space.md").read_text(encoding="utf-8").split("## The knobs of the attention kernel")[1]
    )
    first_cells = re.findall(r"^\|(`.*?)\|", page.split("\n\n|")[1], re.MULTILINE)
    listed = re.findall(r"`(\w+)`", " ".join(first_cells))
    knobs = (ROOT / "search_spaces" / "attention" / "base.toml").read_text(encoding="utf-8")
    assert sorted(listed) == sorted(re.findall(r"^\[knobs\.(\w+)\]", knobs, re.MULTILINE))


def test_the_comparison_of_five_tuners_shows_what_its_script_counts():
    folder = ROOT / "docs" / "examples" / "layer_norm"
    counted = subprocess.run([sys.executable, folder / "count.py"], capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "results" / "layer_norm.md").read_text(encoding="utf-8")
    assert counted in page
    assert len(counted.splitlines()) == 2 + len(list(folder.glob("with_*.py")))
    texts = [(folder / f"with_{name}.py").read_text(encoding="utf-8") for name in ("tiledsched", "cuda_tile_tune")]
    ours, theirs = (re.search(r"@ct.kernel\n.*?\n\n\n", text, re.DOTALL)[0] for text in texts)
    assert ours == theirs


def test_the_gradient_of_the_example_is_right(monkeypatch, launches):
    """By its references on the CPU, as the page on kernels says, and by its kernels."""
    import torch

    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    swish = importlib.import_module("swish").swish
    x = torch.linspace(-3, 3, 1500).requires_grad_()
    swish(x).sum().backward()
    assert len(launches) == 2
    exact = x.detach().clone().requires_grad_()
    torch.nn.functional.silu(exact).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad)
    with using(Runtime()), ts.configure(fallback="torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(swish, x.detach()[::200].double().requires_grad_())
    assert len(launches) == 2
