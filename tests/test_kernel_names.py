"""Kernels found by their names: in a file, in a package, in other processes, and in the documentation."""

from __future__ import annotations

import importlib.metadata
import pickle
import re
import sys
from pathlib import Path

import pytest
from store_samples import DEVICE as GPU, TOOLCHAIN, entry, measurement
from test_declaration import DEVICE, RowSums, declare, own_names  # noqa: F401  # a fixture of every test here
from test_refresh import put_measured, toolchain

import tiledsched as ts
from tiledsched import doctor
from tiledsched.build.compiler import BuildTask, compile_schedule, prepare_process
from tiledsched.build.pool import BuildPool
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core import launches, registry
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.report import build_report
from tiledsched.serve.entries import load_entries, load_table
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import contradictions, stale
from tiledsched.store.records import Entry
from tiledsched.tuning.builder import Builder

DOCS = Path(__file__).parents[1] / "docs" / "kernels.md"
ATTENTION_ID = "d5fe3bf5edc5"
"""Of the attention problem of 4096 causal keys in every table and database there is."""


FILE = """
import cuda.tile as ct
import tiledsched as ts


@ct.kernel
def doubled(X, Out, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)) * 2)


class Doubled(ts.Kernel):
    function = doubled
    size = ts.dim()
    dtype = ts.dtype("float32")
    X = ts.array("size")
    Out = ts.out("size")
    knobs = {"TILE": [64, 128]}
    suites = {"all": [dict(size=1000)]}

    def grid(p, s, device):
        return -(-p.size // s["TILE"])

    def reference(xp, X):
        return X * 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "doubling.py"
    path.write_text(FILE)
    return path


def test_a_kernel_is_loaded_from_a_file(file):
    kernel = registry.load_kernel(f"{file}:Doubled")
    assert registry.load_kernel(f"{file}:Doubled") is kernel
    assert (kernel.name, kernel.locator()) == ("doubling:Doubled", f"{file}:Doubled")
    assert registry.load_kernel(kernel.locator()) is kernel
    assert check_schedule(kernel, kernel.problem(size=130), Schedule(TILE=64))[0]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("{file}:Tripled", "declares no kernel 'Tripled'; it declares Doubled"),
        ("{file}x.py:A", "there is no file"),
        ("nowhere.at.all:A", "cannot import nowhere.at.all"),
        ("nobody", "kernel 'nobody' is not known here"),
        ("{folder}/broken.py:A", r"cannot import .*broken\.py.*correct the file"),
    ],
)
def test_what_is_not_there_is_said(file, where, words):
    (file.parent / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=words):
        registry.load_kernel(where.format(file=file, folder=file.parent))


@pytest.mark.compiler
def test_another_process_compiles_a_kernel_of_a_file(file):
    (file.parent / "beside_it.py").write_text("BY = 2\n")
    file.write_text(
        FILE.replace("import tiledsched as ts", "import tiledsched as ts\nfrom beside_it import BY").replace(
            "* 2)", "* BY)"
        )
    )
    kernel = registry.load_kernel(f"{file}:Doubled")
    task = BuildTask(
        kernel=kernel.locator(), schedule=Schedule(TILE=64), problem=kernel.problem(size=1000), arch="sm_90"
    )
    with BuildPool(1) as pool:
        (built,) = pool.build([task])
    assert built.failure is None, built.failure
    assert built.artifact is not None
    assert built.task.problem == task.problem


def test_an_installed_package_ships_kernels_by_name(monkeypatch, file, tmp_path):
    package = tmp_path / "shipping"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(
        FILE.replace("size = ts.dim()", 'name = "doubled by shipping"\n    size = ts.dim()')
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("doubled by shipping", "shipping.kernels:Doubled", registry.ENTRY_POINTS)
    asked = []

    def entry_points(*, group):
        asked.append(group)
        return [point]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry.installed_entry_points.cache_clear()
    found = registry.load_kernel("doubled by shipping")
    assert found.locator() == "shipping.kernels:Doubled"
    assert asked == ["tiledsched.kernels"]
    assert registry.kernel_named("doubled by shipping") is found
    for _ in range(2):
        with pytest.raises(ConfigError, match="'tripled' is not known here"):
            registry.kernel_named("tripled")
    assert asked == ["tiledsched.kernels"]  # packages are not looked through again
    registry.installed_entry_points.cache_clear()


def test_problems_are_pickled_by_value():
    kernel = declare(name="pickled", biased=ts.flag(omit_default=True))
    p = kernel.problem(rows=5, columns=40)
    again = pickle.loads(pickle.dumps(p))
    assert (again, hash(again), again.id, again.to_json()) == (p, hash(p), p.id, p.to_json())


def test_another_process_restores_the_kernel_of_a_problem(file, python):
    """By its name or the place of its declaration; a problem of a kernel that is nowhere to be found has no kernel."""
    problems = [
        registry.load_kernel(f"{file}:Doubled").problem(size=7),
        declare(name="here alone").problem(rows=5, columns=40),
    ]
    code = (
        "import pickle, sys; one, other = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print(one.known, one.declaration.locator(), one.min_bytes, other.known, other)"
    )
    expected = f"True {file}:Doubled {problems[0].min_bytes} False rows=5 columns=40 float32"
    assert python(code, pickle.dumps(problems).hex()).out.strip() == expected


def test_ids_are_the_same_in_every_process(python):
    """Whatever the order of sets and dicts."""
    from tiledsched.kernels.attention import Attention

    sums = launches.problem_class(RowSums, RowSums.problem(rows=7, columns=50), Schedule(SPLITS=4, TILE=16), DEVICE)
    here = [Attention.standard(seq_len=4096, head_dim=128, causal=True).id, sums.id]
    assert here[0] == ATTENTION_ID
    code = (
        "from test_declaration import *; from tiledsched.kernels.attention import Attention;"
        "print(Attention.standard(seq_len=4096, head_dim=128, causal=True).id, launches.problem_class(RowSums,"
        "RowSums.problem(rows=7, columns=50), Schedule(TILE=16, SPLITS=4), DEVICE).id)"
    )
    assert python(code, PYTHONHASHSEED="123").out.split() == here


# ---- the documentation -----------------------------------------------------------------------------------------------


def documented(tmp_path):
    """The first example of docs/kernels.md."""
    text = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL).group(1)
    name = re.match(r"# (\w+\.py)\n", text).group(1)
    (tmp_path / name).write_text(text, encoding="utf-8")
    return registry.load_kernel(f"{tmp_path / name}:RmsNorm")


def test_the_documented_example_is_right(tmp_path):
    kernel = documented(tmp_path)
    p = kernel.problem(rows=5, columns=600, dtype="bfloat16")
    s = space_for("sm_90", kernel).default(p)
    passed, worst, message = check_schedule(kernel, p, s)
    assert passed, message
    assert 0 < worst < 1e-2
    rows = list(ts.check(kernel, [{"rows": 3, "columns": 1000}], schedules=2))
    assert [row.passed for row in rows] == [True, True]


@pytest.mark.compiler
def test_the_documented_example_compiles(tmp_path):
    prepare_process()
    kernel = documented(tmp_path)
    p = kernel.suite("llama")[0]
    assert compile_schedule(kernel, p, space_for("sm_90", kernel).default(p), "sm_90").fingerprint


@pytest.fixture
def twins(tmp_path, own_names):  # noqa: F811  # the fixture of every test here
    """Two kernels of one name, each in its file, and a function that edits the first."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin.py").write_text(FILE.replace("* 2", "* 3") if folder == "b" else FILE)
    first, second = (registry.load_kernel(f"{tmp_path / folder / 'twin.py'}:Doubled") for folder in ("a", "b"))

    def edit():
        (tmp_path / "a" / "twin.py").write_text(FILE.replace("* 2", "+ 0 + 2 * "))

    return first, second, edit


def test_a_sent_problem_is_of_the_kernel_it_was_made_of(twins) -> None:
    """Although this process knows another kernel by that name."""
    for kernel in twins[:2]:
        assert pickle.loads(pickle.dumps(kernel.problem(size=64))).declaration is kernel


def answers(settings, kernel):
    """What is served of a kernel: provenance, and whether it is stale; and how many entries of it are told."""
    served = load_table(settings, kernel=kernel, archs={"sm_90"}).resolve(kernel.problem(size=1000), "sm_90")
    return served.provenance, bool(served.stale), len(load_entries(settings, {"sm_90"}, kernel))


def test_an_entry_is_of_one_kernel_and_stale_once_its_source_has_changed(twins, tmp_path) -> None:
    first, second, edit = twins
    assert first.name == second.name

    def entry(kernel, tile, **more):
        values = {"provenance": "modelled", "model_us": 1.0, "source_hash": kernel.evidence_source(), **more}
        schedule = Schedule(TILE=tile)
        return Entry(kernel=kernel.name, arch="sm_90", problem=kernel.problem(size=1000), schedule=schedule, **values)

    with TuningDB.open(str(tmp_path / "t.db")) as db:
        settings = load_settings({"db": str(tmp_path / "t.db")})
        db.put_entry(entry(first, 128, provenance="transferred"))
        assert answers(settings, first) == ("transferred", False, 1)
        assert answers(settings, second) == ("default", False, 0)
        assert stale(db.entries()[0].replace(problem=first.problem(size=1000)), "") is False
        edit()
        assert answers(settings, first) == ("transferred", True, 1)
        assert stale(db.entries()[0].replace(problem=first.problem(size=1000)), "") is True
        assert db.put_entry(entry(second, 64))  # the other's evidence is stronger, and says nothing of this kernel
        for _ in range(2):
            assert answers(settings, second) == ("modelled", False, 1)
            assert answers(settings, first) == ("transferred", True, 1)
            assert db.put_entry(entry(second, 128))  # in the place of its own, although that of the other is stronger
        assert [each.kernel for each in db.entries(kernel=first.name)] == [first.name] * 2
        assert not [each for each in db.check() if "kernel" in each]
    with TuningDB.open(str(tmp_path / "before.db")) as db:
        settings = load_settings({"db": str(tmp_path / "before.db")})
        # Evidence of before entries noted the place counts, as changed where the source is another.
        db.put_entry(entry(first, 128, source_hash="0" * 12))
        assert answers(settings, first) == ("modelled", True, 1)
        db.put_entry(entry(first, 128, source_hash=first.source_hash()))
        assert answers(settings, first) == ("modelled", False, 1)


def test_doctor_tells_edited_kernels_from_other_compilers(twins, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    _, kernel, _ = twins
    p, s = kernel.problem(size=1000), Schedule(TILE=64)
    with TuningDB.open(tmp_path / "x.db") as db:
        put_measured(db, measurement(), toolchain("13.4.92"))
        put_measured(
            db, measurement(problem=p, schedule=s), toolchain("13.4.92"), kernel.evidence_source(), kernel=kernel.name
        )

    def evidence(compiler):
        monkeypatch.setattr("tiledsched.build.toolchain.compiler_at_hand", lambda: compiler)
        found = doctor._evidence(doctor.Machine(list_devices=lambda: [GPU]))
        return found.status, found.detail.partition("; ")[2], found.remedy

    assert evidence("13.4.92") == evidence("") == ("ok", "", "")
    (tmp_path / "b" / "twin.py").write_text(FILE)
    source = f"1 are stale: the source of {kernel.name} has changed since"
    again = "tune them again, or run: tiledsched refresh KERNEL"
    assert evidence("13.4.92") == evidence("") == ("warn", source, again)
    status, detail, remedy = evidence("13.6.1")
    assert (status, detail) == ("warn", f"{source}; 1 are stale: the compiler here is tileiras 13.6.1")
    assert remedy.startswith(
        f"{again}; tiledsched refresh attention, or install the compiler they were measured with: pip"
    )


@pytest.mark.parametrize("places", [True, False], ids=["noted", "of before"])
def test_measurements_are_of_one_kernel(twins, tmp_path, places) -> None:
    """Of two kernels of one name, also where both made the same machine code; without a note of the place they are of either."""
    first, second, edit = twins
    with TuningDB.open(str(tmp_path / "t.db")) as db:

        def keep(kernel, tile, us, code):
            p, s = kernel.problem(size=1000), Schedule(TILE=tile)
            taken = measurement(us, problem=p, schedule=s, fingerprint=code * 24)
            if places:
                return Builder(db, None, kernel, "sm_90", TOOLCHAIN, None).keep(taken, None, p, taken.device)
            return db.record_measurement(None, kernel.name, kernel.source_hash(), TOOLCHAIN, taken)

        def told(kernel):
            landscape = db.landscape(kernel.problem(size=1000), "NVIDIA Sample", "burst")
            found = build_report(db, "sm_90", kernel).measured
            assert [each.best.us for each in found.problems] == [landscape[0].measurement.median_us]
            return [one.measurement.median_us for one in landscape]

        number = keep(first, 64, 90.0, "a")
        keep(first, 128, 100.0, "b")
        keep(second, 64, 50.0, "c")  # another program
        keep(second, 128, 101.0, "b")  # the same one, newer
        edit()
        assert (told(first), told(second)) == (([90.0, 100.0], [50.0, 101.0]) if places else ([50.0, 90.0, 101.0],) * 2)
        (line,) = db.landscapes()  # of the one that this process loaded last
        assert (line.distinct_programs, line.measurements) == ((2, 2) if places else (2, 4))
        everything = db.measurements(disturbed=True)
        assert len(everything) == 4
        schedule, noted = Schedule(TILE=64), first.evidence_source() if places else ""
        served = {"schedule": schedule, "fingerprint": "a" * 24, "source_hash": noted}
        mine = entry("measured", kernel=first.name, problem=first.problem(size=1000), measurement_id=number, **served)
        assert db.put_entry(mine)
        assert bool([*contradictions(db.entries(), lambda _: everything)]) is not places


def test_an_edit_of_whatever_a_kernel_is_made_of_changes_its_source(tmp_path, monkeypatch, own_names) -> None:  # noqa: F811
    """Also of a number in a module that is imported by an imported one."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "made.py").write_text(
        FILE.replace("import tiledsched as ts", "import tiledsched as ts\nfrom made_of import BY", 1)
    )
    (tmp_path / "made_of.py").write_text("from made_of_this import BY\n")
    (tmp_path / "made_of_this.py").write_text("BY = 2\n")
    kernel, before = registry.load_kernel(f"{tmp_path / 'made.py'}:Doubled"), set()
    for name in ("made", "made_of", "made_of_this"):
        before.add(kernel.source_hash())
        with (tmp_path / f"{name}.py").open("a") as file:
            file.write("# edited\n")
    assert len(before | {kernel.source_hash()}) == 4
    for name in ("made_of", "made_of_this"):
        sys.modules.pop(name, None)


def test_what_ships_notes_the_hash_of_its_source_only() -> None:
    softmax = registry.kernel_named("softmax")
    assert softmax.evidence_source() == softmax.source_hash()


def test_a_process_without_torch_gets_it_where_a_declaration_needs_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "summed.py").write_text(
        """
import cuda.tile as ct
import tiledsched as ts


@ct.kernel
def doubled(X, Out, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)) * 2)


class Doubled(ts.Kernel):
    function = doubled
    rows, dtype = ts.dim(), ts.dtype("float32")
    X, Out = ts.array("rows"), ts.out("rows")
    knobs = {"TILE": [64, 128]}
    suites = {"one": [dict(rows=256)]}

    def grid(p, s, device):
        return (-(-p.rows // s["TILE"]),)

    def reference(xp, X):
        import torch

        return torch.twice(X)
"""
    )
    (tmp_path / "torch.py").write_text("def twice(x):\n    return 2 * x\n")  # the real one can be imported only once
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(registry.BESIDE, str(tmp_path), {})
    with monkeypatch.context() as alone:
        alone.syspath_prepend(str(tmp_path))
        alone.setitem(sys.modules, "torch", None)  # as in processes that compile
        assert registry.load_kernel("summed.py:Doubled").__name__ == "Doubled"
        assert sys.modules["torch"] is not None


def test_a_process_without_torch_makes_an_operator_when_it_is_first_used(tmp_path, monkeypatch) -> None:
    import torch

    from tiledsched.serve.op import Operator

    (tmp_path / "copied.py").write_text(
        """
import cuda.tile as ct
import tiledsched as ts


@ct.kernel
def copied(X, Out, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)))


class Copied(ts.Kernel):
    function = copied
    rows, dtype = ts.dim(), ts.dtype("float32")
    X, Out = ts.array("rows"), ts.out("rows")
    knobs = {"TILE": [64, 128]}
    suites = {"one": [dict(rows=256)]}

    def grid(p, s, device):
        return (-(-p.rows // s["TILE"]),)

    def reference(xp, X):
        return X


copy = ts.op("tests::copied_later", Copied)


@ct.kernel
def copied_back(dOut, dX, TILE: ct.Constant[int]):
    ct.store(dX, (ct.bid(0),), ct.load(dOut, (ct.bid(0),), (TILE,)))


class CopiedBackward(ts.Kernel):
    function = copied_back
    rows, dtype = ts.dim(), ts.dtype("float32")
    dOut, dX = ts.array("rows"), ts.out("rows")
    knobs = {"TILE": [64, 128]}
    suites = {"one": [dict(rows=256)]}

    def grid(p, s, device):
        return (-(-p.rows // s["TILE"]),)

    def reference(xp, dOut):
        return dOut


copy.register_autograd(ts.op("tests::copied_later_backward", CopiedBackward))
"""
    )
    monkeypatch.delattr(ts, "op")  # which is imported once
    monkeypatch.setitem(sys.modules, "torch", None)  # as in processes that compile
    kernel = registry.load_kernel(f"{tmp_path}/copied.py:Copied")
    assert sys.modules["torch"] is None
    operator = sys.modules[kernel.__module__].copy
    monkeypatch.setitem(sys.modules, "torch", torch)  # it can be imported only once
    made = operator._operator()
    assert isinstance(made, Operator)
    assert made.kernel is kernel
    assert made._backward is not None
