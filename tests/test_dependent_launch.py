"""Programmatic dependent launch: which launches of a chain wait for the one ahead, and how each is queued."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace

import numpy
import pytest
import serve_on_cpu
from cuda.tile._compile import compile_tile

from tiledsched.core.device import arch_spec
from tiledsched.core.launches import signature, steps, tile_kernels
from tiledsched.core.space_files import space_for
from tiledsched.kernels.matmul import Matmul
from tiledsched.measure.arrays import launch_of
from tiledsched.measure.dependent import launch_dependent
from tiledsched.serve import process

DEVICE = arch_spec("sm_90")
PROBLEM = Matmul.problem(m=100, n=101, k=1003)
SCHEDULE = space_for("sm_90", Matmul).default(PROBLEM).replace(PAD=True)  # two copies, and the product of the copies


def operations(schedule) -> list[list[str]]:
    """The operations of each launch's tile code that have an order, those of its main block."""
    objects = tile_kernels(Matmul, {"sm_90": schedule}, PROBLEM, DEVICE)
    found = []
    for made, step in zip(objects, steps(Matmul, PROBLEM, schedule, DEVICE), strict=True):
        given = [signature(Matmul, PROBLEM, schedule, step)]
        (block,) = compile_tile(
            made._annotated_function, given, "sm_90", made._compiler_options, return_final_ir=True, return_cubin=False
        ).final_ir
        names = [type(each).__name__ for each in block.operations]
        found.append(
            [
                name
                for name in names
                if name.startswith(("GridDependency", "TileLoad", "TileStore", "Loop", "Store", "Load"))
            ]
        )
    return found


def test_each_launch_but_the_first_waits_before_all_else_and_with_2_each_but_the_last_releases() -> None:
    wait, release = "GridDependencyControlWait", "GridDependencyControlLaunchDependents"
    plain = operations(SCHEDULE)
    assert all(plain)
    assert operations(SCHEDULE.replace(pdl=0)) == plain
    assert operations(SCHEDULE.replace(pdl=1)) == [plain[0], [wait, *plain[1]], [wait, *plain[2]]]
    assert operations(SCHEDULE.replace(pdl=2)) == [[release, *plain[0]], [wait, release, *plain[1]], [wait, *plain[2]]]


def test_a_single_launch_is_what_it_was() -> None:
    schedule = SCHEDULE.replace(PAD=False)
    assert operations(schedule.replace(pdl=2)) == operations(schedule)


def test_launches_behind_the_first_are_queued_as_dependent_ones() -> None:
    for value, wanted in ((0, [False] * 3), (1, [False, True, True]), (2, [False, True, True])):
        schedule = SCHEDULE.replace(pdl=value)
        measured = launch_of(Matmul, PROBLEM, schedule, DEVICE, "f")
        assert [each.dependent for each in measured.steps] == wanted
        assert [bool(launch) for launch in served(schedule)] == wanted


def served(schedule) -> list[dict]:
    """The options with which a call launches, in their order."""
    from docs.studies.dependent_launch import Chain

    options: list[dict] = []
    with serve_on_cpu.using(serve_on_cpu.runtime_on_cpu(lambda *launch, **given: options.append(given))):
        chain = Chain(numpy, "matmul", {name: PROBLEM.values[name] for name in "mnk"}, {})
        chain.call(chain.plan(schedule), 0, first=True)
        process.forget_kernels()
    return options


class Config(ctypes.Structure):
    """CUDA's CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(ctypes.c_int * 18)),
        ("count", ctypes.c_uint),
    )


class Driver:
    """Notes a launch."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer

    def cuLaunchKernelEx(self, config, function, places, extra) -> int:  # noqa: N802
        self.config = Config.from_buffer_copy(config)
        self.attribute = list(self.config.attributes.contents)
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float)
        self.values = [ctypes.cast(each, ctypes.POINTER(kind))[0] for each, kind in zip(places, kinds, strict=True)]
        self.function = function.value
        return self.answer


def test_the_driver_is_told_grid_stream_arguments_and_that_the_launch_may_begin_early() -> None:
    driver, array = Driver(), numpy.zeros(3)
    launch_dependent(7, (5, 6, 1), (array, numpy.int32(-4), numpy.float32(0.5)), 9, driver)
    assert driver.values == [array.ctypes.data, -4, 0.5]
    assert (list(driver.config.sizes), driver.config.stream, driver.function) == ([5, 6, 1, 1, 1, 1, 0], 9, 7)
    assert (driver.config.count, driver.attribute) == (1, [6, 0, 1, *[0] * 15])


def test_a_refused_launch_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="error 801"):
        launch_dependent(7, (1, 1, 1), (numpy.zeros(1), numpy.int32(1), numpy.float32(1)), 0, Driver(801))


def test_a_dependent_launch_follows_on_the_stream_of_the_launch_ahead(monkeypatch) -> None:
    stream = SimpleNamespace(ptr=9)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "tiledsched.measure.worker", raising=False)
    worker = importlib.import_module("tiledsched.measure.worker")
    monkeypatch.delitem(sys.modules, "tiledsched.measure.worker")
    queued = []
    monkeypatch.setattr(worker, "launch_dependent", lambda *given: queued.append(given))
    state = worker.State(
        "", stream=SimpleNamespace(ptr=1), functions={"f": [SimpleNamespace(kernel=SimpleNamespace(ptr=7))]}
    )
    step = SimpleNamespace(grid=(1, 1, 1), dependent=True)
    state.run(SimpleNamespace(fingerprint="f", steps=[step]), [()])
    assert queued == [(7, (1, 1, 1), (), 9)]
