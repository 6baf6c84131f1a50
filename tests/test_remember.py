"""`exhaustive_search` with a memory: what is stored, what is measured again, and what is told apart."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections import namedtuple
from contextlib import closing
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cuda.tile as ct
import numpy as np
import postgres
import pytest
from cuda.tile import _compile
from fake_machine import H200, FakeMachine

import tiledsched
from tiledsched.cli import main
from tiledsched.core import data_files
from tiledsched.core.errors import ConfigError, MeasureError
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import format_problem
from tiledsched.remember import machine as machines, replacing
from tiledsched.remember.__main__ import main as run_program
from tiledsched.remember.declaration import stored_kernel
from tiledsched.remember.description import Request
from tiledsched.store.db import TuningDB

SCALE = 2.0


@ct.kernel
def scale(X, Out, factor, TILE: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(Out, (i,), ct.load(X, (i,), (TILE,)) * factor * SCALE)


@ct.kernel(occupancy=4)
def add(X, Out, TILE: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(Out, (i,), ct.load(X, (i,), (TILE,)) + 1)


def make_kernel(number):
    @ct.kernel
    def made(X, Out, factor, TILE: ct.Constant[int]):
        i = ct.bid(0)
        ct.store(Out, (i,), ct.load(X, (i,), (TILE,)) * number)

    return made


X, OUT = np.zeros(4096, np.float32), np.zeros(4096, np.float32)
SPACE = [SimpleNamespace(tile=tile, occupancy=occupancy) for tile in (64, 128, 256) for occupancy in (1, 2)]


def tile_time(program):
    """128 with occupancy 2 is the fastest."""
    config = program.config
    return 60 + abs(config.tile - 128) + 5 * (2 - config.occupancy)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """Making one takes longer than most of these tests."""
    path = tmp_path_factory.mktemp("empty") / "tuning.db"
    TuningDB.open(path).close()
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch, empty_database):
    monkeypatch.setenv("TILEDSCHED_DB", str(shutil.copy(empty_database, tmp_path)))
    made = FakeMachine(tile_time)
    monkeypatch.setattr(machines, "machine", made)
    return made


def ask(space, args, grid=lambda c: (4096 // c.tile,), kernel=scale, hints=None, **more):
    return tiledsched.exhaustive_search(space, 0, grid, kernel, args, hints, quiet=True, **more)


def search(space=SPACE, *, x=X, factor=0.5, hints=lambda c: {"occupancy": c.occupancy}, **more):
    return ask(space, lambda c: (x, OUT, factor, c.tile), hints=hints, **more)


def again(machine, call=search, **more):
    """What another search does: the configurations compiled and the launches made by it."""
    machine.compiled.clear()
    machine.done.clear()
    result = call(**more)
    return result, list(machine.compiled), machine.done["launches"]


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_the_second_call_measures_nothing(machine, monkeypatch, database):
    if database == "postgresql":
        monkeypatch.setenv("TILEDSCHED_DB", postgres.server())
        machine.there = dataclasses.replace(
            H200, name=f"a GPU of process {os.getpid()}"
        )  # others may use the server, too
    first = search()
    assert (first.best.config.tile, first.best.config.occupancy) == (128, 2)
    assert [each.config for each in first.successes] == SPACE
    assert first.best in first.successes
    second, compiled, launches = again(machine)
    assert second == first
    assert (compiled, launches) == ([], 0)
    assert type(first).__module__ == "cuda.tile.tune._tune"


def test_a_larger_space_measures_only_what_is_new_and_the_best_so_far(machine):
    search(SPACE[:4])  # 128 with occupancy 2 is among them
    for part, compiled, best in (
        (SPACE, [128, 256, 256], SPACE[3]),
        (SPACE, [], SPACE[3]),
        (SPACE[::-1], [], SPACE[3]),
        (SPACE[2:], [], SPACE[3]),
        (SPACE[3:4], [], SPACE[3]),
        (SPACE[:2], [], SPACE[1]),  # without the winner
    ):
        found, made, launches = again(machine, space=part)
        assert sorted(config.tile for config in made) == compiled
        assert bool(launches) == bool(compiled)
        assert found.best.config is best
        assert len(found.successes) == len(part)


OTHER = {
    "shape": {"x": np.zeros((2, 4096), np.float32)},
    "type": {"x": np.zeros(4096, np.float16)},
    "strides": {"x": np.zeros(8192, np.float32)[::2]},
    "alignment": {"x": np.zeros(4097, np.float32)[1:]},
    "number": {"factor": 0.25},
    "NumPy's number": {"factor": np.float32(0.125)},
    "word": {"factor": None},
    "captured": {"kernel": make_kernel(2)},
    "decorator": {"kernel": scale.replace_hints(opt_level=2)},
    "hints": {"hints": lambda c: {"occupancy": c.occupancy, "num_ctas": 2}},
    "regime": {"flush_l2": False},
}


def test_other_questions_have_other_answers(machine):
    search()
    search(kernel=make_kernel(1))
    for name, more in OTHER.items():
        for count in (6, 0):
            assert len(again(machine, **more)[1]) == count, name
    assert again(machine)[1] == []


def test_a_global_that_the_kernel_reads_counts(machine, monkeypatch):
    search()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert len(again(machine)[1]) == 6


class Numbers:
    BIAS = 1


dtype = object()
"""Has no lasting identity. Tile code reads attributes of this name, and no such global."""


@ct.kernel
def cast(X, Out, factor, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)).astype(Out.dtype))


def test_the_name_of_an_attribute_is_no_global(machine):
    search(kernel=cast)
    assert again(machine, kernel=cast)[1] == []


@dataclasses.dataclass(frozen=True)
class Shift:
    by: int

    def __call__(self, tile):
        return tile + self.by


def use(other):
    """A kernel that calls a function, an object and a class's constant, all handed in."""

    @ct.kernel
    def used(X, Out, factor, TILE: ct.Constant[int]):
        ct.store(Out, (ct.bid(0),), other(ct.load(X, (ct.bid(0),), (TILE,))) + Numbers.BIAS)

    return used


def functions_of_text(text):
    """Functions of a module that has no file, as of a notebook's."""
    names = {"__name__": "notebook"}
    exec(text, names)
    return names["double"]


def test_what_a_kernel_calls_counts(machine, monkeypatch):
    double, triple = (functions_of_text(f"def double(x):\n    return x * {number}") for number in (2, 3))
    kernels = [use(double), use(triple), use(Shift(1)), use(Shift(2))]
    for kernel in kernels:
        search(kernel=kernel)
        assert again(machine, kernel=kernel)[1] == []
    assert machine.done["compiles"] == 0
    monkeypatch.setattr(Numbers, "BIAS", 2)
    assert len(again(machine, kernel=kernels[0])[1]) == 6
    before = again(machine, kernel=kernels[2])[1]
    monkeypatch.setattr(Shift, "__call__", lambda self, tile: tile - self.by)
    assert (len(before), len(again(machine, kernel=kernels[2])[1])) == (6, 6)


def test_another_grid_is_another_program(machine):
    def compiled(factor):
        grid = lambda c: (max(factor, c.tile),)  # noqa: E731
        found = again(machine, ask, space=SPACE, args=lambda c: (X, OUT, 1.0, c.tile), grid=grid)[1]
        return [config.tile for config in found]

    assert len(compiled(1)) == 6
    assert compiled(2) == []
    assert set(compiled(128)) >= {64}, "a grid of 64 blocks became one of 128"


def test_calls_that_differ_only_in_their_grids_have_answers_of_their_own(machine, monkeypatch, tmp_path):
    machine.time_us = lambda program: 60 + abs(program.config.tile - (64 if program.grid[0] > 1000 else 256))
    best, compiled, file = [], [], str(tmp_path / "table.json")
    for rows, settings in zip([4096, 1 << 20] * 4, ["on"] * 3 + ["new"] + ["on"] * 4, strict=True):
        if len(best) == 6:
            assert main(["db", "export", f"{scale._pyfunc.__module__}:scale", "-o", file]) == 0
            monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "other.db"))
            assert main(["db", "import", file]) == 0
        monkeypatch.setenv("TILEDSCHED_REMEMBER", settings)
        grid = lambda c, rows=rows: (rows // c.tile,)  # noqa: E731
        found, made, _ = again(machine, ask, space=SPACE, args=lambda c: (X, OUT, 1.0, c.tile), grid=grid)
        best.append((found.best.config.tile, found.best.mean_us))
        compiled.append(len(made))
    assert best == [(256, 60), (64, 60)] * 4
    assert compiled == [6, 6, 0, 6, 0, 0, 0, 0]


def searches_of_flashinfer():
    """The forms in which the 16 searches of flashinfer-python 0.7.4 are written, in gemm/kernels/cutile, attention/kernels/cutile
    and quantization/kernels/cutile: six arguments by position, and what becomes of the answer."""
    from cuda.tile.tune import exhaustive_search

    stream, kernels = SimpleNamespace(cuda_stream=0), {True: scale, False: make_kernel(3)}

    def attention(rows):
        found = exhaustive_search(
            [SimpleNamespace(tile=tile, occupancy=2, num_ctas=1) for tile in (64, 128) if rows % tile == 0],
            stream,
            lambda c: ((rows + c.tile - 1) // c.tile, 2, 1),
            scale,
            lambda c: (X, OUT, 1.0, c.tile),
            lambda c: {"occupancy": c.occupancy},
        )
        return scale.replace_hints(occupancy=found.best.config.occupancy)

    def product(rows):
        buffer, kernel = np.empty_like(OUT), kernels[rows > 4096]

        def grid_fn(c):
            return (min(132 // c.num_ctas, rows // c.tile) * c.occupancy, 1, 1)

        def args_fn(c):
            return (X, buffer, float(rows), c.tile)

        def hints_fn(c):
            return {"num_ctas": c.num_ctas, "occupancy": c.occupancy}

        space = [SimpleNamespace(**vars(each), num_ctas=ctas) for each in SPACE for ctas in (1, 2)]
        found = exhaustive_search(space, stream, grid_fn, kernel, args_fn, hints_fn)
        ranked = sorted(found.successes, key=lambda each: (each.mean_us - each.error_margin_us, each.config.tile))
        return ct.kernel(kernel._pyfunc, **hints_fn(ranked[0].config))

    return attention, product


@pytest.mark.parametrize("form", [0, 1])
def test_searches_as_flashinfer_writes_them_are_answered(machine, form):
    with tiledsched.remember():
        search = searches_of_flashinfer()[form]
        for rows, known in ((4096, False), (8192, False), (4096, True), (8192, True)):
            tuned, compiled, launches = again(machine, search, rows=rows)
            assert (tuned._compiler_options.occupancy, bool(compiled), bool(launches)) == (2, not known, not known)


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int
    ratio: float = 0.5


class Mode(Enum):
    FAST = 1


Pair = namedtuple("Pair", "tile mode")


@pytest.mark.parametrize(
    ("space", "tile"),
    [
        ([{"tile": 64, "extra": None}, {"tile": 128, "extra": [1, 2]}], lambda c: c["tile"]),
        ([(64, 1), (128, "a")], lambda c: c[0]),
        ([64, 128], lambda c: c),
        ([Config(64), Config(64, 0.25), Config(128)], lambda c: c.tile),
        ([Pair(64, Mode.FAST), Pair(128, None)], lambda c: c.tile),
        ([SimpleNamespace(tile=64, make=make_kernel), SimpleNamespace(tile=128, make=tile_time)], lambda c: c.tile),
    ],
)
def test_any_kind_of_configuration(machine, space, tile):
    machine.time_us = lambda program: 100.0 + tile(program.config) / 10
    call = functools.partial(ask, space, lambda c: (X, OUT, tile(c)), lambda c: (4096 // tile(c),), add)
    first = call()
    assert first.best.config is space[0]
    assert again(machine, call) == (first, [], 0)


def test_a_kernel_for_each_configuration(machine):
    made = {64: make_kernel(1), 128: make_kernel(2), 256: make_kernel(3)}
    result = search(kernel=lambda c: made[c.tile])
    assert again(machine, kernel=lambda c: made[c.tile])[1:] == ([], 0)
    made[64] = make_kernel(7)
    found, compiled, _ = again(machine, kernel=lambda c: made[c.tile])
    assert {config.tile for config in compiled} == {64, 128}, "what changed, and the best so far"
    assert found.best.config == result.best.config


def test_hints_for_other_gpus_do_not_count(machine):
    first = search(hints=lambda c: {"occupancy": ct.ByTarget(sm_90=c.occupancy, sm_120=1), "num_ctas": None})
    assert again(machine)[0] == first
    assert again(machine)[1] == []


def test_equal_programs_are_measured_once(machine):
    machine.code = lambda program: program.config.tile
    result = search()
    assert len({config.tile for config in machine.launched}) == 3
    assert len({id(config) for config in machine.launched}) == 3
    assert [each.mean_us for each in result.successes[0::2]] == [each.mean_us for each in result.successes[1::2]]
    assert result.best.config is SPACE[2], "the first of equals in the caller's order"
    assert again(machine) == (result, [], 0)


def test_numbers_that_vary_make_programs_of_one_machine_code_different(machine):
    machine.code = lambda program: "one"
    machine.time_us = lambda program: 200.0 - program.config
    call = functools.partial(ask, args=lambda c: (X, OUT, float(c), 64), grid=lambda c: (1,))
    assert call([1, 2, 3]).best.config == 3
    result, _, launches = again(machine, call, space=[3, 1, 2])
    assert ([each.mean_us for each in result.successes], launches) == ([197.0, 199.0, 198.0], 0)


def test_ties_go_to_the_first_unless_another_is_served(machine):
    machine.time_us = lambda program: 100.0
    assert search(SPACE[2:]).best.config is SPACE[2]
    assert again(machine, space=SPACE)[0].best.config is SPACE[2], "served before the others came"


def test_failures_are_rows_and_are_not_tried_again(machine):
    def compile_it(program):
        if program.config.tile == 256:
            raise RuntimeError("tile side is too large\nsecond line")
        return program.schedule.id

    def run(program):
        if program.config.tile == 64:
            raise ValueError("cannot launch 64")
        return 100.0

    machine.code, machine.time_us = compile_it, run
    wanted = [(64, ValueError, "cannot launch 64")] * 2 + [(256, RuntimeError, "tile side is too large")] * 2
    for _ in range(2):
        result, *_, launches = again(machine)
        assert [each.config.tile for each in result.successes] == [128, 128]
        assert [(config.tile, kind, text.splitlines()[0]) for config, kind, text in result.failures] == wanted
    assert (machine.compiled, launches) == ([], 0)
    with TuningDB.open(os.environ["TILEDSCHED_DB"]) as db:
        assert {each.failure.message for each in db.failures()} == {"ValueError: cannot launch 64"}


def test_when_nothing_works_the_first_reason_is_named_and_all_is_tried_again(machine):
    def run(program):
        raise ValueError("no")

    machine.time_us = run
    with pytest.raises(
        ValueError, match=r"No valid config found in search space.\nConfig: namespace\(tile=64.*\nValueError: no"
    ):
        search()
    machine.time_us = tile_time
    assert search().best.config is SPACE[3]
    with pytest.raises(ValueError, match="Search space is empty"):
        search([])


@pytest.mark.parametrize("in_list", [False, True])
def test_whole_outputs_are_compared(machine, in_list):
    out = np.zeros((64, 64), np.float32)

    def compute(program, args):
        target = args[1][0] if in_list else args[1]
        target[...] = 1.0
        if program.config == 2:
            target[63] = 1.01
        if program.config == 3:
            target[0, 0] = np.nan
        if program.config == 4:
            target[...] = np.frombuffer(b"\0" * 16384, np.float32).reshape(64, 64)

    machine.compute, machine.time_us = compute, lambda program: 200.0 - 10 * program.config

    args = lambda c: (X, [out] if in_list else out, c)  # noqa: E731
    call = functools.partial(ask, [1, 2, 3, 4], args, lambda c: (1,), add)
    assert call(check=False).best.config == 4
    result = call(check=True)
    assert result.best.config == 1
    assert [config for config, _, _ in result.failures] == [2, 3, 4]
    message = result.failures[0][2]
    assert "differs from that of config=1 occ=4: relative error 0.01 above 0.002, largest difference 0.01" in message
    found, _, launches = again(machine, call, check=True)
    assert (found.best.config, launches) == (1, 0)
    assert call(check=False).best.config == 1, "what is known to be wrong stays out"


def test_arguments_are_made_anew_for_each_launch_and_once_for_a_stored_answer(machine):
    made = []

    def args(c):
        made.append(c)
        return X, OUT, 1.0, c.tile

    first = ask(SPACE, args)
    assert len(made) > machine.done["launches"]
    made.clear()
    assert ask(SPACE, args) == first
    assert len(made) == 1


def test_a_value_without_identity_is_measured_each_time_with_a_warning(machine, caplog):
    class Opaque:
        __slots__ = ()

    results = [search(factor=Opaque()) for _ in range(2)]
    assert results[0].best.config is SPACE[3]
    assert machine.done["measuring"] == 2
    assert sum("are not stored: the call depends on argument 2" in each.message for each in caplog.records) == 1


BESIDE = """
import numpy as np
X, OUT = np.zeros(4096, np.float32), np.zeros(4096, np.float32)
def first(search): result = search(lambda c: (X, OUT, 0.5, c.tile), lambda c: 4096 // c.tile); return result
def second(search): searched = "é"; return search(lambda c: (X, OUT, 0.5, c.tile), lambda c: 4096 // c.tile)
def other(search): return search(lambda c: (X, OUT, 0.25 * 2, c.tile), lambda c: 4096 // c.tile)
def larger(search):
    return search(
        lambda c: (X, OUT, 0.5,
                   c.tile), lambda c: 4096 // c.tile)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not tell columns")
def test_what_stands_beside_a_lambda_is_not_part_of_it(machine, tmp_path, monkeypatch):
    """A call at another place of a program is answered, also in a capture; a lambda with another text is another call."""
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.syspath_prepend(tmp_path)
    beside = importlib.import_module("beside")

    search = functools.partial(ask, SPACE)
    found = beside.first(search)
    machine.graph = True
    assert beside.second(search) == found
    for call in (beside.other, beside.larger):
        with pytest.raises(MeasureError, match="while a CUDA graph is captured; call it once before"):
            call(search)


@pytest.mark.parametrize(
    ("lacking", "match"),
    [("there", "there is no GPU to measure on"), ("graph", "while a CUDA graph is captured; call it once before")],
)
def test_where_nothing_can_be_measured_what_is_stored_is_answered(machine, lacking, match):
    first = search()
    setattr(machine, lacking, None if lacking == "there" else True)
    assert search() == first
    with pytest.raises(MeasureError, match=match):
        search(factor=9.0)


def test_other_compilers_and_gpus_have_answers_of_their_own(machine):
    search()
    for gpu, version, count in (
        (H200, "13.6.1", 6),
        (dataclasses.replace(H200, name="NVIDIA H100"), "13.6.1", 6),
        (H200, "13.5.37", 0),
    ):
        machine.there, machine.version = gpu, version
        assert len(again(machine)[1]) == count


def test_settings_measure_anew_or_not_at_all(machine, monkeypatch):
    search()
    machine.time_us = lambda program: 300.0 - tile_time(program)
    for setting, time_us, best in (
        ("new", machine.time_us, SPACE[4]),
        ("on", machine.time_us, SPACE[4]),
        ("off", tile_time, SPACE[3]),
    ):
        monkeypatch.setenv("TILEDSCHED_REMEMBER", setting)
        machine.time_us = time_us
        assert again(machine)[0].best.config is best


def test_where_nothing_can_be_stored_the_answer_is_given(machine, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "file" / "tuning.db"))
    for _ in range(2):
        assert search().best.config is SPACE[3]
    assert sum("cannot be stored" in each.message for each in caplog.records) == 1


def test_what_was_timed_beside_others_is_not_stored(machine, caplog):
    for others in ((77,), ()):
        machine.others = others
        assert len(again(machine)[1]) == 6
        assert "another process ran on the GPU" in caplog.text


def test_of_two_processes_that_measure_at_once_both_give_one_answer(machine):
    winners, plain = [], machine.build

    def build(programs, request):
        machine.build = plain
        machine.time_us = lambda program: (
            300.0 - tile_time(program)
        )  # another process is faster, and finds another winner
        winners.append(search().best.config)
        machine.time_us = tile_time
        plain(programs, request)

    machine.build = build
    winners += [search().best.config, again(machine)[0].best.config]
    assert winners == [SPACE[4]] * 3


def as_printed(name) -> str:
    """The problem that was searched, as commands and reports print it for `-p`."""
    (problem,) = stored_kernel(name, None).default_problems()
    return format_problem(problem)


def test_results_are_shown_as_any_other_without_the_code(machine, tmp_path, capsys):
    search()
    name = f"{scale._pyfunc.__module__}:scale"
    for words, said in (
        (["explain", name, "--arch", "sm_90"], "factor=0.5"),
        (["explain", name, "--arch", "sm_90", "-p", "factor=0.5", "--json"], '"provenance": "measured"'),
        (["explain", name, "--arch", "sm_90", "-p", as_printed(name)], "measured: this problem was measured"),
        (["show", name], "tile=128"),
        (["db", "export", name, "-o", str(tmp_path / "table.json")], ""),
        (["db", "check"], ""),
    ):
        assert main(words) == 0
        assert said in capsys.readouterr().out


PROGRAM = """
from cuda.tile.tune import exhaustive_search
raise SystemExit("it was run")
def scale(): ...
"""


def test_a_program_is_named_by_its_file_and_not_run(machine, tmp_path, capsys, monkeypatch):
    """Also where its results were imported, by way of the sample that ships."""
    search()
    name = f"{scale._pyfunc.__module__}:scale"
    program, samples = tmp_path / f"{name.partition(':')[0]}.py", tmp_path / "ships" / "samples"
    program.write_text(PROGRAM)
    samples.mkdir(parents=True)
    assert main(["db", "export", name, "-o", str(samples / "table.json")]) == 0
    assert main(["db", "export", name, "--landscapes", str(samples)]) == 0
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(data_files, "tuning_db", lambda: tmp_path / "ships")
        assert main(["db", "import", "sample", "--db", "sample.db"]) == 0
    of_program, arch = f"{program}:scale", ["--arch", "sm_90"]
    for words, code, said in (
        (["explain", of_program, *arch], 0, "measured: this problem was measured"),
        (["explain", of_program, *arch, "--db", str(tmp_path / "sample.db")], 0, "measured: this problem was measured"),
        (["show", of_program, "--db", str(tmp_path / "sample.db")], 0, "tile=128"),
        (["db", "export", of_program], 0, '"tile": 128'),
        (["tune", of_program, *arch], 2, "run that program with TILEDSCHED_REMEMBER=new"),
        (["explain", of_program, *arch, "--db", "none.db"], 2, "declares no kernel 'scale'; it declares none"),
        (["explain", f"{program}:other", *arch], 2, "the file is not run"),
    ):
        assert main(words) == code
        out, err = capsys.readouterr()
        assert said in out + err


@pytest.mark.parametrize("way", ["table", "bundle", "site"])
def test_what_is_shipped_elsewhere_answers(machine, monkeypatch, tmp_path, way):
    best = search().best
    name = f"{scale._pyfunc.__module__}:scale"
    if way == "bundle":
        assert main(["warmup", name, "--arch", "sm_90", "-o", str(tmp_path / "scale.zip")]) == 0
        monkeypatch.setenv("TILEDSCHED_BUNDLE", str(tmp_path / "scale.zip"))
    elif way == "site":
        monkeypatch.setenv("TILEDSCHED_SITE", str(tmp_path / "tuning.db"))
    assert main(["db", "export", name, "-o", str(tmp_path / "table.json")]) == 0
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "other.db"))
    if way == "table":
        assert main(["db", "import", str(tmp_path / "table.json")]) == 0
    found, compiled, launches = again(machine)
    assert (found.best, compiled, launches) == (best, [], 0)


def test_a_function_with_wrappers_and_partials_is_read(machine):
    counts = {"wrapped": 0, "method": 0}
    plain = lambda c: (X, OUT, 1.0, c.tile)  # noqa: E731

    @functools.wraps(plain)
    def wrapped(*args):
        counts["wrapped"] += 1
        return plain(*args)

    class Owner:
        def args(self, c):
            counts["method"] += 1
            return X, OUT, 1.0, c.tile

    for function in (wrapped, functools.partial(lambda x, c: (x, OUT, 1.0, c.tile), X), Owner().args):
        for count in (6, 0):
            assert len(again(machine, ask, space=SPACE, args=function)[1]) == count


class Kernel:
    """A kernel whose machine code is made under cuTile's lock, as cuTile makes it."""

    def __init__(self, number):
        self.number = number

    def _compile(self, signature, context):
        with _compile._compiler_lock:
            if self.number < 0:
                raise ValueError("too small")
            return f"{signature} {_compile.compile_cubin(self.number)}".encode(), "symbol", None, ()


class WithoutGpu(machines.SearchMachine):
    def gpu(self):
        return "sm_90", "a GPU"


def test_compilers_run_side_by_side_and_launches_use_what_they_made(monkeypatch):
    together = threading.Barrier(2, timeout=60)

    def compiler(number):
        together.wait()  # breaks unless another one runs meanwhile
        return number

    monkeypatch.setattr(_compile, "compile_cubin", compiler)
    monkeypatch.setattr("tiledsched.build.pool.default_jobs", lambda: 4)
    monkeypatch.setattr(ct, "launch", lambda stream, grid, kernel, args: kernel._compile(f"types of {args}", "context"))
    request = Request(
        configs=(1, 2, -1),
        stream=0,
        grid_fn=lambda c: (1,),
        kernel=None,
        args_fn=lambda c: (c * c,),
        hints_fn=None,
        timeout_s=None,
        flush_l2=True,
        check=False,
    )
    programs = [
        machines.CallProgram(config=c, schedule=Schedule(c=c), grid=(1,), kernel=Kernel(c)) for c in request.configs
    ]
    WithoutGpu().build(programs, request)
    assert [type(each.error) for each in programs] == [type(None), type(None), ValueError]
    assert len({each.artifact.fingerprint for each in programs[:2]}) == 2
    assert ct.launch(0, (1,), programs[1].kernel, (4,))[0] == b"types of (4,) 2", "nothing is compiled again"
    assert _compile.compile_cubin is compiler


def test_arguments_are_made_before_a_launch_is_timed(monkeypatch):
    told = []
    late = iter([True, False])

    def event(enable_timing):
        record = functools.partial(told.append, "event")
        return SimpleNamespace(
            record=record, query=lambda: next(late), synchronize=lambda: None, elapsed_time=lambda other: 0.02
        )

    cuda = SimpleNamespace(Event=event, _sleep=lambda cycles: told.append("spin"))
    flush = SimpleNamespace(zero_=lambda: told.append("flush"))
    monkeypatch.setattr(ct, "launch", lambda stream, grid, kernel, args: told.append(f"launch {args}"))

    def args(config):
        told.append("arguments")
        return (config, told.count("arguments"))

    program = machines.CallProgram(config="c", schedule=Schedule(c=1), grid=(1,), kernel=None)
    request = SimpleNamespace(args_fn=args, stream=0)
    watch = machines.CallStopwatch(SimpleNamespace(cuda=cuda), [program], request, flush)
    assert watch.read(watch.queue(0, paced=True)) == 20.0
    once = ["arguments", "flush", "spin", "event", "launch ('c', 1)", "event"]
    again = [word.replace("1)", "2)") for word in once]
    assert told == once + again, "the spin was over too soon, so that it is launched again, on new arguments"


def test_remember_puts_it_in_place_and_takes_it_away(monkeypatch):
    import cuda.tile.tune as tune

    import tiledsched.remember as package

    before = tune.exhaustive_search
    module = ModuleType("imported_before")
    module.search = before
    monkeypatch.setitem(sys.modules, "imported_before", module)
    with tiledsched.remember(check=True):
        assert tune.exhaustive_search is module.search is not before
        assert tune.exhaustive_search.keywords == {"check": True}
    assert tune.exhaustive_search is module.search is before
    made = package()
    assert tune.exhaustive_search is module.search is not before
    made.undo()
    made.undo()
    assert tune.exhaustive_search is module.search is before


@pytest.mark.slow
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_what_holds_several_times_is_undone_in_any_order(order):
    from cuda.tile import tune

    before = tune.exhaustive_search
    made = [tiledsched.remember(check=bool(number)) for number in range(3)]
    for count, number in enumerate(order, 1):
        made[number].undo()
        made[number].undo()
        holding = [each._ours for each in made if each not in [made[other] for other in order[:count]]]
        assert tune.exhaustive_search is (holding[-1] if holding else before)


@pytest.mark.slow
def test_an_edited_kernel_is_another_and_a_program_runs_under_remember(tmp_path):
    """In processes of their own: `python -m tiledsched.remember` runs a program that cannot be edited."""
    (tmp_path / "fake_machine.py").symlink_to(os.path.join(os.path.dirname(__file__), "fake_machine.py"))
    program = """
        import sys
        import numpy as np
        import cuda.tile as ct
        from cuda.tile.tune import exhaustive_search
        from fake_machine import FakeMachine
        from tiledsched.remember import machine as machines

        @ct.kernel
        def copy(X, Out, TILE: ct.Constant[int]):
            ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)) + NUMBER)

        x = np.zeros(64, np.float32)
        made = machines.machine = FakeMachine()
        found = exhaustive_search([1, 2, 4], 0, lambda c: (64 // c,), copy, lambda c: (x, x, c), quiet=True)
        print(sys.argv[1:], found.best.config, made.done["launches"] > 0)
    """

    def run(number, *words):
        (tmp_path / "prog.py").write_text(textwrap.dedent(program).replace("NUMBER", number))
        done = subprocess.run(
            [sys.executable, "-m", "tiledsched.remember", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "TILEDSCHED_DB": str(tmp_path / "t.db")},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1:]

    (first,) = run("1.0", "prog.py", "a", "-b")
    assert first.startswith("['a', '-b']")
    assert first.endswith("True")
    assert run("2.0", "--check", "-m", "prog", "a", "-b") == [first]
    with TuningDB.open(tmp_path / "t.db") as db:
        assert {entry.kernel for entry in db.entries()} == {"prog:copy"}, "a program and a module have one name"


@pytest.fixture
def remembers_no_more():
    """cuTile's search is in its place again after the test."""
    from cuda.tile import tune

    before = tune.exhaustive_search
    yield
    for each in [*replacing._holding]:
        each.undo()
    assert tune.exhaustive_search is before


TELLS = """
import json, sys
from cuda.tile import tune
print(json.dumps([__name__, sys.argv, sys.path[0], tune.exhaustive_search.keywords["check"]]))
"""


def test_a_program_finds_its_words_and_its_folder(tmp_path, monkeypatch, capsys, remembers_no_more):
    """A program is started as Python starts it: its folder is the first to import from, unless Python was started with `-P`."""
    path = tmp_path / "its_words.py"
    path.write_text(TELLS)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["first", str(tmp_path), *sys.path])

    def run(*words):
        assert run_program([*words]) == 0
        return json.loads(capsys.readouterr().out)

    assert run("-m", "its_words", "a", "-b") == ["__main__", [str(path), "a", "-b"], "first", False]
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=True))
    assert run(str(path)) == ["__main__", [str(path)], "first", False]
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=False))
    assert run("--check", str(path), "-h") == ["__main__", [str(path), "-h"], str(tmp_path), True]


def test_what_runs_programs_says_how_it_is_used(capsys, remembers_no_more):
    for words, code in (
        ([], ConfigError.exit_code),
        (["--check"], ConfigError.exit_code),
        (["-h"], 0),
        (["--help"], 0),
    ):
        assert run_program(words) == code
        out, error = capsys.readouterr()
        said, nothing = (error, out) if code else (out, error)
        assert said.startswith("usage: python -m tiledsched.remember [--check] PROGRAM.py")
        assert not nothing
    with pytest.raises(ConfigError, match="-m needs the name of a module"):
        run_program(["--check", "-m"])
    with pytest.raises(ConfigError, match=r"there is no program gone\.py; name a Python file"):
        run_program(["gone.py"])


@pytest.mark.slow
def test_a_session_of_tilegym_is_answered_in_the_next_process(tmp_path):
    """TileGym's own files, unedited: nineteen of its call sites, up to the launches that need a GPU."""
    pytest.importorskip("tilegym")
    path = os.path.join(os.path.dirname(__file__), "tilegym_session.py")

    done = subprocess.run(
        [sys.executable, "-m", "tiledsched.remember", path],
        capture_output=True,
        text=True,
        env={**os.environ, "TILEDSCHED_DB": str(tmp_path / "tuning.db")},
    )
    assert done.returncode == 0, done.stderr
    first, again = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"found"'))
    assert len(first["found"]) == 19
    assert all(count > 0 for *_, count, _ in first["found"]), first["found"]
    assert [row[:4] for row in again["found"]] == [row[:4] for row in first["found"]]
    assert first["done"]["measuring"] == 19
    assert again["done"] == {}, "nothing was compiled, launched or timed"
    # CPU time, so that other work on the machine does not count; the first search of a process imports what it needs.
    milliseconds = sorted(row[4] for row in again["found"][1:])
    assert milliseconds[len(milliseconds) // 2] < 50


DAMAGE = ("abc", -5, float("inf"), None, b"\xff", "[" * 5000, "[3]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [
        "problems",
        "schedules",
        "devices",
        "toolchains",
        "entries",
        "measurements",
        "builds",
        "artifacts",
        "failures",
        "runs",
    ],
)
def test_damaged_rows_are_left_out_and_measured_again(machine, tmp_path, table):
    """Whatever stands in a column, the search gives an answer whose times are positive numbers."""

    def fail_one(program):
        if program.config.tile == 64:
            raise ValueError("cannot launch 64")
        return tile_time(program)

    machine.time_us = fail_one
    search()
    path, kept = Path(os.environ["TILEDSCHED_DB"]), tmp_path / "whole.db"
    with TuningDB.open(path) as db:
        db.back_up(kept)
    with closing(sqlite3.connect(kept)) as connection:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_xinfo({table})") if row[6] == 0]
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    for column, value in itertools.product(columns, DAMAGE):
        for left in (f"{path}-wal", f"{path}-shm"):
            Path(left).unlink(missing_ok=True)
        shutil.copy(kept, path)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection, contextlib.suppress(sqlite3.Error):
            connection.execute("PRAGMA ignore_check_constraints=ON")
            connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
        result = search()
        assert [each.config.tile for each in result.successes] == [128, 128, 256, 256], (column, value)
        assert all(0 < each.mean_us < 1e12 for each in result.successes), (column, value)
