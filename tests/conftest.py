"""What the tests of serving share. torch is imported only where a test asks for it: some run without."""

from __future__ import annotations

import os
import warnings

import pytest

# Read when numpy and torch are loaded, here and in the processes that tests start. The products of small tiles end before
# a second thread has begun, and one that waits for work takes a core from another of pytest's processes.
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")


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
