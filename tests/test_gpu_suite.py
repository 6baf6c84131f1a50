"""The GPU suite without a GPU: what it would run, how it goes on after faults, and whether its last run still says something."""

from __future__ import annotations

import ast
import csv
import json
import lzma
import pickle
import random
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import fake_worker
import gpu_programs
import gpu_suite
import numpy
import pytest
from gpu_programs import ARCH, class_of, code_of, drawn, hashes, programs, sizes_of
from tile_checks import check

from tiledsched.core.device import arch_spec
from tiledsched.core.registry import SHIPPED, kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.arrays import launch_of
from tiledsched.serve.lookup import LookupTable

RUN = "on a machine with an H100 or H200: make test-gpu (its programs can be built elsewhere: python tests/gpu_suite.py build)"


def test_the_last_run_was_of_this_tile_code_and_these_tables():
    """What it found stands in the record, too."""
    with gpu_suite.RECORD.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows, f"the GPU suite never ran; run {RUN}"
    last = rows[-1]
    same = list(csv.DictReader(gpu_suite.SAME_CODE.open(newline=""))) if gpu_suite.SAME_CODE.is_file() else []
    ran = gpu_suite.ran_hashes(last, same)
    changed = [name for name, digest in hashes().items() if digest not in ran.get(name, ())]
    assert not changed, f"tile code or tables of {', '.join(changed)} changed since the GPU suite ran; run {RUN}"
    assert int(last["cases"]) >= 2000
    assert int(last["tests"]) >= 10


def hash_of(source: str) -> str:
    return code_of(ast.parse(textwrap.dedent(source)))


def test_only_what_the_compiler_sees_counts():
    plain = hash_of("def tile(x):\n    return x + 1")
    assert plain == hash_of(
        '"""A module."""\ndef tile(x):  # a comment\n    "A docstring."\n    return (x\n        + 1)'
    )
    assert plain != hash_of("def tile(x):\n    return x + 2")
    known = gpu_programs.tile_code(Path(gpu_programs.PACKAGE) / "kernels" / "softmax" / "tiles.py")
    assert [path.name for path in known[1]] == ["rows.py"]  # whose code is the kernel's, too
    assert len(set(hashes().values())) == len(SHIPPED)


@pytest.mark.slow
def test_every_kernel_is_run_on_odd_sizes():
    """Of some programs of each kernel the sizes, from which the number of all follows."""
    total = 0
    served = {name: programs(name) for name in SHIPPED}
    for name, found in served.items():
        some = random.Random(name).sample(found, min(4, len(found)))
        counts = []
        for program in some:
            space, of = space_for(ARCH, program.kernel), class_of(program.problem, program.schedule)
            problems = sizes_of(program)
            counts.append(len(problems))
            for problem in problems:
                assert class_of(problem, program.schedule) == of
                assert not space.unworkable(program.schedule, problem)
        assert sum(counts) >= 2 * len(some), name
        total += len(found) * sum(counts) / len(some)
    assert total > 2500
    assert sum(map(len, served.values())) > 700


def test_sizes_are_around_a_tile_and_more_than_a_wave():
    program = next(
        each for each in programs("matmul") if each.schedule["TILE_M"] == 128 and each.problem.a_layout == "row"
    )
    sizes = {problem.m for problem in sizes_of(program)}
    assert {1, 127, 128, 129} < sizes
    assert max(sizes) > 5000
    rows = {problem.rows for problem in sizes_of(programs("rms_norm")[0])}
    assert {1, 2} < rows


def test_drawn_problems_hold_all_pairs_of_values():
    found = drawn(kernel_named("cross_entropy"))
    pairs = {(each.columns, each.dtype) for each in found}
    assert len(pairs) == 21
    assert {each.smoothed for each in found} == {True, False}


@pytest.mark.parametrize("name", ["softmax", "rms_norm_backward"])
def test_some_combinations_are_right_in_the_interpreter(name):
    """The same schedules and problems as on the GPU: an untuned narrow one, and rows around a tile."""
    some = sorted(programs(name), key=lambda each: each.problem.columns)[:8:4]
    for program in some:
        for problem in [each for each in sizes_of(program) if each.rows <= 16][:3]:
            check(program.kernel, problem, program.schedule)


def test_faults_cost_one_case_each():
    """On a made-up GPU: a wrong result, a fault that ends the process, and a program that would hang come out as failures, and the
    other programs run.
    """
    first, second = (Attention.problem(seq_q=8, seq_k=8, head_dim=16, dtype=dtype) for dtype in ("float16", "bfloat16"))
    acts = {"one": {}, "two": {"check": "wrong"}, "three": {"check": "illegal"}, "four": {"load": "crash"}, "five": {}}
    schedule = space_for(ARCH, Attention).default(first)
    cases = [
        (p, [(schedule, launch_of(Attention, p, schedule, arch_spec(ARCH), name)) for name in names])
        for p, names in ((first, acts), (second, ("five", "two")))
    ]
    bundle = {"codes": {name: fake_worker.cubin(**act) for name, act in acts.items()}, "cases": cases}
    command = (sys.executable, fake_worker.__file__, "ready")
    found, device, left = gpu_suite.run_cases(bundle, 1, 60.0, command)
    assert (device.name, left) == ("Made-up GPU", 0)
    assert [each.program for each in found] == [*acts, "five", "two"]
    kinds = [each.message.partition(":")[0] for each in found]
    assert kinds == ["", "wrong_result", "illegal_address", "worker_killed", "", "", "wrong_result"]
    lines = gpu_suite.table(found).splitlines()
    assert lines[-1].split()[:4] == ["attention", "5", "7", "4"]
    assert gpu_suite.run_cases(bundle, 1, 0.0, command) == ([], None, 2)


@pytest.fixture
def worker_on_numpy(monkeypatch):
    """The module of the measuring process, with NumPy for CuPy."""
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "cupy", numpy)
    import gpu_worker

    yield gpu_worker
    for name in ("gpu_worker", "tiledsched.measure.worker"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("swapped", [False, True])
def test_writing_beside_an_output_is_found(worker_on_numpy, monkeypatch, swapped):
    state = SimpleNamespace(guards={})
    array = numpy.zeros((3, 5), numpy.float16)
    made = worker_on_numpy.guarded(state, "Out[0]", array.T if swapped else array)
    assert (made.shape, made.strides) == (
        (array.T if swapped else array).shape,
        (array.T if swapped else array).strides,
    )
    monkeypatch.setattr(worker_on_numpy.worker, "check", lambda state, launch: "right")
    assert worker_on_numpy.check(state, None) == "right"
    state.guards["Out[0]"][1][0] = 0
    assert worker_on_numpy.check(state, None).message == "0 bytes before Out[0] were written, and 1 behind it"
    assert worker_on_numpy.check(state, None) == "right"


def test_calls_with_nothing_to_do_give_nothing(launches, monkeypatch, quiet):
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "torch")
    found = gpu_suite.run_empty("cpu")
    assert [each for each in found if each.message] == []
    assert {each.kernel for each in found} == set(SHIPPED)
    assert json.dumps([vars(each) for each in found])


def test_a_run_is_recorded(tmp_path):
    path = tmp_path / "runs.csv"
    for cases in (3, 4):
        gpu_suite.record(path, dict.fromkeys(gpu_suite.HEAD, "x") | {"cases": cases})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cases"] for row in rows] == ["3", "4"]
    assert tuple(rows[0]) == gpu_suite.HEAD
    assert {path.stem for path in gpu_suite.gpu_tests()} > {"test_gpu", "test_gpu_backward", "test_repeatability"}


def test_changed_text_of_the_same_machine_code_needs_no_new_run(tmp_path, capsys, monkeypatch):
    """And one program that differs is enough to need one."""
    kernel = kernel_named("softmax")
    problem = kernel.problem(rows=3, columns=8)
    schedule = LookupTable([], kernel).resolve(problem, ARCH).schedule

    def bundle(name, digest, fingerprint, compiler="13.5"):
        about = {"compiler": compiler, "commit": "c0ffee", "kernels": {"softmax": digest, "glu": "same"}, "left_out": 0}
        launch = launch_of(kernel, problem, schedule, arch_spec(ARCH), fingerprint)
        contents = {"codes": {}, "cases": [(problem, [(schedule, launch)])]}
        path = tmp_path / name
        path.write_bytes(lzma.compress(json.dumps(about).encode() + b"\n" + pickle.dumps(contents)))
        return path

    former, record = bundle("former", "aaaa", "one"), tmp_path / "same.csv"
    monkeypatch.setattr(gpu_suite, "SAME_CODE", record)
    for other in (bundle("other", "bbbb", "two"), bundle("newer", "bbbb", "one", "13.6")):
        assert gpu_suite.main(["same", "--former", str(former), "--bundle", str(other)]) == 1
        assert not record.exists()
    assert "different compilers" in capsys.readouterr().out
    present = bundle("present", "bbbb", "one")
    assert gpu_suite.main(["same", "--former", str(former), "--bundle", str(present)]) == 0
    with record.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["kernel"], row["former"], row["present"], row["programs"]) == ("softmax", "aaaa", "bbbb", "1")
    last = {"compiler": "13.5", "kernels": "softmax=aaaa glu=same"}
    assert gpu_suite.ran_hashes(last, [row]) == {"softmax": {"aaaa", "bbbb"}, "glu": {"same"}}
    assert gpu_suite.ran_hashes(last | {"compiler": "13.4"}, [row])["softmax"] == {"aaaa"}
    assert gpu_suite.ran_hashes(last | {"kernels": "softmax=cccc"}, [row]) == {"softmax": {"cccc"}}
