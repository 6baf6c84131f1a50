"""Small declared kernels, one for each thing that a launch may need, and a way to run them on the CPU."""

# Declarations are not classes as ruff knows them.

from __future__ import annotations

import types
from typing import Annotated, Any

import cuda.tile as ct
import ml_dtypes
import numpy

import tiledsched.core.fields as ts
from tiledsched.checking.errors import OutputErrors, case_errors
from tiledsched.checking.inputs import make_cases
from tiledsched.core.kernel import Kernel
from tiledsched.core.launches import scratch, steps
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter import run
from tiledsched.measure.arrays import ProblemArrays, each

Int = ct.Constant[int]
DEVICE = types.SimpleNamespace(sm_count=2, arch="sm_90")


@ct.kernel
def scale_add(X, Y, Out, factor: float, TILE: Int):
    place = (ct.bid(0), ct.bid(1))
    x = ct.load(X, place, (16, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    y = ct.load(Y, place, (16, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(Out, place, (x * factor + y).astype(Out.dtype))


class ScaleAdd(Kernel):
    """A scalar, and an array whose columns may be what is contiguous."""

    function = scale_add
    rows = ts.dim()
    columns = ts.dim()
    dtype = ts.dtype("float16", "bfloat16", "float32")
    order = ts.choice("row", "column")
    X = ts.array("rows columns")
    Y = ts.array("rows columns", layout="order")
    Out = ts.out("rows columns")
    factor = ts.scalar(2.5)
    knobs = {"TILE": [64, 128]}
    suites = {"small": [{"rows": 40, "columns": 200}]}

    def grid(p, s, device):
        return -(-p.rows // 16), -(-p.columns // s["TILE"])

    def reference(xp, X, Y, factor):
        return X * factor + Y


class ScaleAddWrong(ScaleAdd):
    """What is declared is not what the machine code does."""

    def reference(xp, X, Y, factor):
        return X * factor + 1.05 * Y


@ct.kernel
def accumulate(X, Y, TILE: Int):
    place = (ct.bid(0), ct.bid(1))
    x = ct.load(X, place, (1, TILE), padding_mode=ct.PaddingMode.ZERO)
    y = ct.load(Y, place, (1, TILE), padding_mode=ct.PaddingMode.ZERO)
    ct.store(X, place, x * 0.5 + y)


class Accumulate(Kernel):
    """An array that is changed in place: a second launch on what the first left would give something else."""

    function = accumulate
    rows = ts.dim()
    columns = ts.dim()
    X = ts.inout("rows columns", dtype="float32")
    Y = ts.array("rows columns", dtype="float32")
    knobs = {"TILE": [128, 256]}
    suites = {"small": [{"rows": 7, "columns": 300}]}

    def grid(p, s, device):
        return p.rows, -(-p.columns // s["TILE"])

    def reference(xp, X, Y):
        return X * 0.5 + Y


@ct.kernel
def double_each(Xs, Outs, TILE: Int):
    """One block for each array of the list."""
    x, out = Xs[ct.bid(0)], Outs[ct.bid(0)]
    for tile in range(ct.cdiv(x.shape[0], TILE)):
        for column in range(ct.cdiv(x.shape[1], 32)):
            values = ct.load(x, (tile, column), (TILE, 32), padding_mode=ct.PaddingMode.ZERO)
            ct.store(out, (tile, column), values + values)


class DoubleEach(Kernel):
    """Lists of arrays of several sizes."""

    function = double_each
    groups = ts.sizes()
    columns = ts.dim()
    Xs = ts.arrays(lambda p: [(rows, p.columns) for rows in p.groups], dtype="float16")
    Outs = ts.outs(lambda p: [(rows, p.columns) for rows in p.groups], dtype="float16")
    knobs = {"TILE": [16, 32]}
    suites = {"small": [{"groups": (40, 3, 17), "columns": 48}]}

    def grid(p, s, device):
        return (len(p.groups),)

    def reference(xp, Xs):
        return ([2 * x for x in Xs],)


@ct.kernel
def partial_sums(X, Partial, TILE: Int):
    x = ct.load(X, (ct.bid(0), ct.bid(1)), (1, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(Partial, (ct.bid(1), ct.bid(0)), ct.sum(x, axis=1, keepdims=True))


@ct.kernel
def add_partial_sums(Partial, Out, parts: Int):
    total = ct.full((1, 1), 0.0, dtype=ct.float32)
    for part in range(parts):
        total += ct.load(Partial, (part, ct.bid(0)), (1, 1))
    ct.store(Out, (ct.bid(0),), total.reshape((1,)))


class RowSums(Kernel):
    """Two launches in a row, and a workspace between them whose shape follows from a knob."""

    rows = ts.dim()
    columns = ts.dim()
    X = ts.array("rows columns", dtype="float16")
    Out = ts.out("rows", dtype="float32")
    Partial = ts.workspace("columns/TILE rows")
    knobs = {"TILE": [64, 128]}
    suites = {"small": [{"rows": 300, "columns": 500}]}

    def constants(p, s):
        return {"parts": -(-p.columns // s["TILE"])}

    def launches(p, s, device):
        return [(partial_sums, (p.rows, -(-p.columns // s["TILE"]))), (add_partial_sums, (p.rows,))]

    def reference(xp, X):
        return X.sum(-1)


@ct.kernel
def pick(Table, Index, Out, TILE: Int):
    index = ct.load(Index, (ct.bid(0),), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (ct.bid(0),), ct.gather(Table, index))


class Pick(Kernel):
    """Integers, which must be right to the last."""

    function = pick
    entries = ts.dim()
    count = ts.dim()
    Table = ts.array("entries", dtype="int32", below=1000)
    Index = ts.array("count", dtype="int32", below="entries")
    Out = ts.out("count", dtype="int32")
    knobs = {"TILE": [128, 256]}
    suites = {"small": [{"entries": 77, "count": 1000}]}

    def grid(p, s, device):
        return -(-p.count // s["TILE"])

    def reference(xp, Table, Index):
        return Table[Index]


@ct.kernel
def dequantize(X, Scale, Out, TILE: Int):
    place = (ct.bid(0), ct.bid(1))
    x = ct.load(X, place, (16, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    scale = ct.load(Scale, (ct.bid(0), 0), (16, 1), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, place, (x * scale).astype(Out.dtype))


class Dequantize(Kernel):
    """8-bit floating-point numbers with a scale for each row."""

    function = dequantize
    rows = ts.dim()
    columns = ts.dim()
    quantized = ts.dtype("float8_e4m3fn", "float8_e5m2")
    X = ts.array("rows columns", dtype="quantized")
    Scale = ts.array("rows 1", dtype="float32")
    Out = ts.out("rows columns", dtype="bfloat16")
    knobs = {"TILE": [64, 128]}
    suites = {"small": [{"rows": 40, "columns": 160}]}

    def grid(p, s, device):
        return -(-p.rows // 16), -(-p.columns // s["TILE"])

    def reference(xp, X, Scale):
        return X * Scale


Wide = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]


@ct.kernel
def count_up(X, Out, Counter: Wide, TILE: Int):
    """The last block to come resets the counter, so that the next launch finds zero."""
    before = ct.atomic_add(Counter, 0, 1, memory_order=ct.MemoryOrder.ACQ_REL)
    if before == ct.num_blocks(0) - 1:
        ct.scatter(Counter, 0, 0)
    x = ct.load(X, (ct.bid(0),), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (ct.bid(0),), x + 1.0)


class CountUp(Kernel):
    """A workspace that is zero before each launch, and left zero."""

    function = count_up
    count = ts.dim()
    X = ts.array("count", dtype="float32")
    Out = ts.out("count", dtype="float32")
    Counter = ts.workspace("1", dtype="int32", zeroed=True)
    knobs = {"TILE": [128, 256]}
    suites = {"small": [{"count": 1000}]}

    def grid(p, s, device):
        return -(-p.count // s["TILE"])

    def reference(xp, X):
        return X + 1.0


KERNELS: tuple[KernelClass, ...] = (ScaleAdd, Accumulate, DoubleEach, RowSums, Pick, Dequantize, CountUp)


def first(kernel: KernelClass) -> tuple[Problem, Schedule]:
    """A problem and a schedule of a kernel."""
    return kernel.suite("small")[0], Schedule({name: choices[0] for name, choices in kernel.knobs.items()})


def cases_of(kernel: KernelClass, p: Problem) -> list[Any]:
    """What a kernel is checked on."""
    return list(make_cases(kernel, numpy, numpy.random.default_rng(0), p))


def run_on_cpu(kernel: KernelClass, p: Problem, s: Schedule, case: Any) -> list[OutputErrors]:
    """The errors of one launch in the interpreter over poisoned outputs."""
    found = steps(kernel, p, s, DEVICE)
    wanted = scratch(kernel, p, s, found)
    arrays = ProblemArrays(kernel, numpy, p, [case])
    arrays.poison(wanted)
    arrays.restore(arrays.cases[0])
    specs = {spec.name: spec for spec in (*kernel.arrays(p), *wanted)}
    named = {**arrays.cases[0].inputs, **arrays.outputs, **arrays.scratch(wanted)}
    for name, value in named.items():
        typed = [
            array.view(getattr(ml_dtypes, specs[name].dtype)) if hasattr(ml_dtypes, specs[name].dtype) else array
            for array in each(value)
        ]
        named[name] = typed if specs[name].listed else typed[0]
    for step in found:
        run(
            step.function,
            step.grid,
            [named.get(one.name, one.value) if one.kind in ("array", "list") else one.value for one in step.arguments],
        )
    return case_errors(
        numpy, arrays.output_specs, arrays.outputs, case, kernel.tolerance(p, s), kernel.check_tile(p, s)
    )
