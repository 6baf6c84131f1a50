"""The install lines that messages give work as written, wherever the package came from."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

from tiledsched.core.errors import MissingPackageError
from tiledsched.core.extras import installing, missing, required


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (None, "pip install 'tiledsched[gpu,report]'"),
        ({"url": "file:///home/me/a%20b", "dir_info": {"editable": True}}, "pip install -e '/home/me/a b[gpu,report]'"),
        ({"url": "file:///home/me/tiledsched", "dir_info": {}}, "pip install '/home/me/tiledsched[gpu,report]'"),
        (
            {"url": "file:///tmp/tiledsched-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'tiledsched[gpu,report] @ file:///tmp/tiledsched-1-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "pip install 'tiledsched[gpu,report] @ git+https://host/a.git'",
        ),
        ([], "pip install 'tiledsched[gpu,report]'"),
    ],
)
def test_the_line_names_where_the_package_came_from(monkeypatch, source, line):
    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return None if source is None else json.dumps(source)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert installing("gpu", "report") == line


def test_a_checkout_that_was_never_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert installing() == "pip install 'tiledsched'"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), "torch.nn is not installed; run: {gpu}"),
        (
            ImportError("libc10.so is missing", name="torch._C"),
            "torch._C cannot be imported (libc10.so is missing); run: {gpu}",
        ),
        (ModuleNotFoundError("", name="vl_convert"), "vl_convert is not installed; run: {report}"),
        (ModuleNotFoundError("", name="ray"), "ray is not installed; run: {fleet}"),
        (ModuleNotFoundError("", name="cuda.tile"), "cuda.tile is not installed; run: {}"),
        (ModuleNotFoundError("", name="numpy"), "numpy is not installed; run: {}"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(error, said):
    lines = {extra: installing(extra) for extra in ("gpu", "report", "fleet")}
    assert str(missing(error)) == said.replace("{}", installing()).format(**lines)
    with pytest.raises(MissingPackageError) as found, required():
        raise error
    assert str(found.value) == str(missing(error))


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import tiledsched as ts
from tiledsched.cli import main

for line in sys.stdin.read().splitlines():
    print(line, main(line.split()), file=sys.stderr)
for name in ts.__all__:
    try:
        getattr(ts, name)
    except ts.TiledschedError as error:
        print(name, error, file=sys.stderr)
try:
    ts.op("a::b", ts.load_kernel("softmax"))([1.0])
except ts.TiledschedError as error:
    print("op", error, file=sys.stderr)
except RuntimeError:  # of torch, which takes no list
    pass
"""
COMMANDS = """
tune softmax -p rows=8,columns=64 --arch sm_121 --budget 0 --db x.db
check softmax -p rows=8,columns=64 --schedules 1
record softmax -p rows=8,columns=64 --arch sm_121 -o land
refresh softmax --arch sm_121
show
explain -p S=1024,D=64 --arch sm_90
report softmax --arch sm_121
compare shipped shipped --kernel softmax --arch sm_90
bench -p S=1024,D=64
study paper
study ladder
study ablation -p S=1024,D=64 --arch sm_90
study profile -p S=1024,D=64
warmup softmax --arch sm_121 -p rows=8,columns=64 --jobs 1
fleet run tune softmax
fleet work
fleet status
db check
db query
doctor
""".strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ("torch", ["\nsdpa torch is not installed; run: pip", "\nop torch is not installed; run: pip"]),
        ("cuda", ["tiledsched: cuda is not installed; run: pip", "\nop cuda is not installed; run: pip"]),
        ("cupy,vl_convert,ray", ["tiledsched: cupy is not installed; run: pip"]),
    ],
)
def test_without_a_package_every_command_and_name_ends_in_a_line(packages, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, packages], input=COMMANDS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert [words for words in said if words not in done.stderr] == []
