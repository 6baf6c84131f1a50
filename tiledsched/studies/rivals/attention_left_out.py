"""What `sdpa` would do had nobody tuned a problem's suite: the policy beside the table, on problems that it does not know."""

from __future__ import annotations

import functools

from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import ALL_MODELS
from tiledsched.problem import Problem
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.lookup import Served
from tiledsched.store.records import EntryRecord


def left_out(problem: Problem) -> frozenset[Problem]:
    """The problem, and all of each suite that has it: a model is new as a whole."""
    suites = (Attention.suite(name) for name in Attention.suites if name != ALL_MODELS)
    return frozenset([problem]).union(*(suite for suite in suites if problem in suite))


def serve_left_out(problem: Problem, device: process.DeviceFacts) -> Served:
    """The answer of the table without `left_out` of the problem."""
    hidden = left_out(problem)
    entries = [entry for entry in _entries(device.arch) if entry.problem not in hidden]
    return table_of(entries, process.settings(), kernel=Attention).resolve(problem, device.arch, device.name)


@functools.cache
def _entries(arch: str) -> list[EntryRecord]:
    return load_entries(process.settings(), {arch}, Attention.name)
