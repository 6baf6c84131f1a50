"""Runs of a declared kernel in the interpreter, held against its reference; and copies of its tile code with a fault in them."""

from __future__ import annotations

import importlib
import inspect
import linecache
import random
import re
import sys
import types
from contextlib import contextmanager
from functools import lru_cache
from unittest import mock

import ml_dtypes
import numpy as np

from tiledsched.core.cases import call_reference
from tiledsched.core.launches import steps
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import run

NUMPY = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in ("float16", "bfloat16", "float32", "int32", "float8_e4m3fn", "float8_e5m2")
}
ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6}
"""Largest relative Frobenius error of an output: about twice what rounding to it makes."""


class Device:
    """A GPU of few multiprocessors, so that persistent blocks take several work tiles."""

    arch = "sm_90"
    sm_count = 3


def searched(kernel, p, arch="sm_90"):
    """Every schedule that is searched."""
    return list(space_for(arch, kernel).schedules(p))


def sample(kernel, p, count, seed=0, arch="sm_90"):
    """Schedules that work, searched or not, drawn at random."""
    space, rng, found = space_for(arch, kernel), random.Random(seed), {}
    values = space.constraint_values(p)
    rules = [rule for rule in space.constraints if not rule.exploring]
    while len(found) < count:
        drawn = {name: rng.choice(knob.choices) for name, knob in space.knobs.items()}
        if all(rule.holds(values | drawn) for rule in rules):
            found[tuple(drawn.values())] = Schedule(drawn)
    return list(found.values())


def make_inputs(kernel, p, seed=0):
    """Normal numbers, or what the kernel draws itself, as they lie in memory, by name."""
    rng = np.random.default_rng(seed)
    own, found = kernel.inputs(np, rng, p), {}
    for spec in kernel.arrays(p):
        if spec.role == "in":
            array = own[spec.name] if spec.name in own else rng.standard_normal(spec.shape)
            array = array.astype(NUMPY[spec.dtype])
            found[spec.name] = np.asfortranarray(array) if spec.column else array
    return found


def run_schedule(kernel, p, s, inputs, order="forward"):
    """The outputs by name; what nothing wrote is NaN."""
    arrays = dict(inputs)
    for spec in kernel.arrays(p):
        if spec.role == "out":
            arrays[spec.name] = unwritten(spec)
    for step in steps(kernel, p, s, Device):
        args = []
        for each in step.arguments:
            if each.kind == "array" and each.name not in arrays:
                arrays[each.name] = unwritten(kernel.array_spec(each.name, p, s))
            args.append(arrays[each.name] if each.kind == "array" else each.value)
        run(step.function, step.grid, args, order=order)
    return {spec.name: arrays[spec.name] for spec in kernel.arrays(p) if spec.role == "out"}


def unwritten(spec):
    """An array of NaN, or of the largest integer."""
    kind = NUMPY[spec.dtype]
    return np.full(spec.shape, np.iinfo(kind).max if kind.kind == "i" else np.nan, kind)


def check(kernel, p, s, inputs=None, order="forward"):
    """Run a schedule and compare each output with the reference in float64."""
    inputs = make_inputs(kernel, p) if inputs is None else inputs
    exact = call_reference(kernel, np, p, {name: np.asarray(array, dtype=np.float64) for name, array in inputs.items()})
    for (name, out), right in zip(run_schedule(kernel, p, s, inputs, order).items(), exact, strict=True):
        found, rounding = out.astype(np.float64), ROUNDING[str(out.dtype)]
        assert np.isfinite(found).all(), f"{name}: unwritten elements, or padding that was used"
        error = np.linalg.norm(found - right) / max(np.linalg.norm(right), 1e-30)
        assert error <= rounding, f"{name}: relative error {error:.2g} of {p} with {dict(s)}"
        worst = np.abs(found - right).max() / max(np.abs(right).max(), 1e-30)
        assert worst <= 4 * rounding, f"{name}: an element is off by {worst:.2g} of {p} with {dict(s)}"


@lru_cache
def pattern_of(text):
    """Matches `text` in source code whatever line breaks, indentation and trailing commas a formatter puts into it.

    Text that begins with four spaces stands at the beginning of a line, and text that ends with a line break at the end of one.
    """
    tokens = re.findall(r"\w+|[^\w\s]", text)
    begin = r"^(?P<indent>[ ]*)" if text.startswith("    ") else "(?P<indent>)"
    end = r"(?=[ ]*$)" if text.endswith("\n") else ""
    inner = r"\s*".join(r",?\s*" * (token in ")]}") + re.escape(token) for token in tokens)
    return re.compile(begin + inner + end, re.MULTILINE)


def substituted(sources, old, new):
    """`sources` with `new` in the place of `old`, which must stand in at least one of them."""
    found = {
        name: pattern_of(old).subn(lambda match: match["indent"] + new.strip(), source)
        for name, source in sources.items()
    }
    assert any(times for _, times in found.values()), f"the kernel no longer contains {old!r}: rewrite this"
    return {name: source for name, (source, _) in found.items()}


@contextmanager
def mutated(modules, old, new):
    """While it lasts, the tile code in `modules` (in the order in which they name each other) has `old` replaced by `new`."""
    sources = {name: inspect.getsource(importlib.import_module(name)) for name in modules}
    copies = {name: types.ModuleType(name) for name in modules}
    parents = {}
    with mock.patch.dict(sys.modules, copies):
        for name, source in substituted(sources, old, new).items():
            package, _, leaf = name.rpartition(".")
            parents[name] = mock.patch.object(importlib.import_module(package), leaf, copies[name])
            parents[name].start()
            linecache.cache[f"mutated_{name}"] = (
                len(source),
                None,
                source.splitlines(keepends=True),
                f"mutated_{name}",
            )
            exec(compile(source, f"mutated_{name}", "exec"), copies[name].__dict__)
        try:
            yield
        finally:
            for patch in parents.values():
                patch.stop()
