"""The install lines that messages give work as written, wherever the package came from."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from tiledsched.core.extras import installing


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
