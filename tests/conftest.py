"""What the tests of serving share. torch is imported only where a test asks for it: some run without."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture
def fresh():
    """No plan, warning or setting from another test."""
    from tiledsched.attention import sdpa as serve

    serve.reload()
    yield
    serve.reload()


@pytest.fixture
def launches(fresh, monkeypatch, tmp_path):
    """The list of launches to come, on CPU tensors; what the kernel does not serve is an error."""
    from serve_on_cpu import serve_on_cpu

    from tiledsched.attention import sdpa as serve

    monkeypatch.setenv("TILEDSCHED_FALLBACK", "error")
    found = serve_on_cpu(monkeypatch, tmp_path)
    serve.reload()
    return found


@pytest.fixture
def quiet():
    """No warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
