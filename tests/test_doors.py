"""What comes in from a file or another database is held to its form; what goes out is whole and stays where it belongs."""

from __future__ import annotations

import contextlib
import functools
import json
import lzma
import operator
import os
import re
import sqlite3
import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from store_samples import DEVICE, PROBLEM, TOOLCHAIN, fill, measurement

from tiledsched.build.store import ProgramStore
from tiledsched.core import files, problem, processes, registry
from tiledsched.core.errors import ConfigError, DatabaseError
from tiledsched.kernels import attention, softmax
from tiledsched.measure.runner import Device
from tiledsched.report.document import Heading, Paragraph, Table, to_html, to_markdown
from tiledsched.serve import bundle, lookup
from tiledsched.store.codec import decode, encode
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table, import_table, landscape_file_name, merge_database
from tiledsched.tuning.samplers import SAMPLERS, check_sampler


@pytest.fixture
def db(tmp_path):
    with TuningDB.open(tmp_path / "tuning.db") as opened:
        fill(opened)
        yield opened


TAKEN = ("measurements", 0, "measurement")
SERVED = ("entries", 0)
WRONG = [
    (*TAKEN, "device", "name", "../../../x"),
    (*TAKEN, "device", "name", "<script>"),
    (*TAKEN, "device", "name", ".x"),
    (*TAKEN, "device", "name", "a\nb"),
    (*TAKEN, "device", "arch", "sm_90/.."),
    (*TAKEN, "fingerprint", "../../victim"),
    (*TAKEN, "regime", "../burst"),
    (*TAKEN, "runner", "<i>"),
    ("measurements", 0, "uid", "../x"),
    ("measurements", 0, "source_hash", "<b>"),
    ("measurements", 0, "kernel", "a/b"),
    (*TAKEN, "problem", {"kernel": "../../etc", "n": 1}),
    (*TAKEN, "problem", {"kernel": "stranger", "<b>": 1}),
    (*TAKEN, "schedule", "<img src=x>", 1),
    (*TAKEN, "schedule", "tile_m", 2**63),
    (*TAKEN, "problem", {"kernel": "stranger", "n": [1, 2**64]}),
    ("artifacts", 0, "fingerprint", "../../victim"),
    ("artifacts", 0, "cubin_bytes", 2**63),
    (*SERVED, "device_name", "../../../x"),
    (*SERVED, "fingerprint", "F" * 24),
    (*SERVED, "arch", "<b>"),
    (*SERVED, "kernel", ".."),
    (*SERVED, "provenance", ""),
    (*SERVED, "provenance", "proven"),
    (*SERVED, "accum_mode", "<b>"),
    (*SERVED, "runner_up", "a b", 1),
    (*SERVED, "candidates", 10**400),
    (*SERVED, "model_us", 0),
    (*SERVED, "margin", float("nan")),
    (*SERVED, "schedule", "tile_m", 32),
    *(
        (*TAKEN, name, value)
        for name in ("median_us", "ci_low_us", "ci_high_us")
        for value in (0, -1, float("inf"), float("nan"), 10**400)
    ),
    *((*TAKEN, "samples_us", 1, value) for value in (0.0, -1, float("inf"), float("nan"))),
]


def refusal_of_a_table_with(db, folder, path) -> str:
    """Why a table is not imported in which the last of `path` stands at the place to which the others lead."""
    export_table(db, folder / "t.json")
    data = json.loads((folder / "t.json").read_text())
    *way, last, value = path
    functools.reduce(operator.getitem, way, data)[last] = value
    (folder / "t.json").write_text(json.dumps(data))
    with TuningDB.open(":memory:") as other, pytest.raises(DatabaseError) as error:
        import_table(other, folder / "t.json")
    return str(error.value)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: f"{path[-2]}-{str(path[-1])[:12]}")
def test_a_table_is_held_to_its_form_by_key(db, tmp_path, path):
    key = next(step for step in reversed(path[:-1]) if isinstance(step, str))
    assert re.match(f"t.json: .*{key}", refusal_of_a_table_with(db, tmp_path, path), re.DOTALL)


@pytest.mark.parametrize(
    "path",
    [(*TAKEN, "median_us", 50.0), (*TAKEN, "ci_low_us", 98.5), (*TAKEN, "samples_us", [98.0, 102.0])],
    ids=lambda path: path[-2],
)
def test_an_estimate_that_its_samples_do_not_give_is_not_taken(db, tmp_path, path):
    assert "of its samples" in refusal_of_a_table_with(db, tmp_path, path)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "Quadro RTX 5000 with Max-Q Design",
        "Orin (nvgpu)",
        "NVIDIA A100-SXM4-80GB",
        "Tesla T4",
        "GeForce GTX™ 1660 Ti",
    ],
)
def test_names_that_devices_have_are_taken(name):
    device = Device(name=name, arch="sm_90", sm_count=1)
    assert decode(Device, encode(device), "x") == device


def damage(path, statement):
    """Change a database as no program of ours does: sqlite3 alone heeds no foreign keys."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


ANOTHER_SCHEDULE = "(SELECT id FROM schedules WHERE id != schedule_id LIMIT 1)"


@pytest.mark.parametrize("change", ["fingerprint = '../../victim'", "median_us = 0", "uid = 'x'"])
def test_damaged_rows_of_another_database_stay_there(db, tmp_path, change):
    damage(tmp_path / "tuning.db", f"UPDATE measurements SET {change} WHERE id = 2")
    with TuningDB.open(":memory:") as other:
        merge_database(other, tmp_path / "tuning.db")
        assert [each.uid for each in other.measurements()] == [db.measurements(run_id=None)[-1].uid]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("measurements SET kernel = 'a/b' WHERE id = 2", "kernel"),
        *(
            (f"entries SET {each} WHERE provenance = 'measured'", f"the entry of .* on sm_90.*{said}")
            for each, said in (
                ("fingerprint = '0'", "fingerprint: 0 is not that of its measurement"),
                (f"schedule_id = {ANOTHER_SCHEDULE}", "schedule: .* is not that of its"),
            )
        ),
    ],
    ids=lambda each: each[:30],
)
def test_another_database_is_held_to_the_same_and_its_entries_to_their_evidence(db, tmp_path, change, said):
    damage(tmp_path / "tuning.db", f"UPDATE {change}")
    with TuningDB.open(":memory:") as other:
        with pytest.raises(DatabaseError, match=said):
            merge_database(other, tmp_path / "tuning.db")
        assert other.measurements() == other.entries() == []


def test_a_provenance_that_is_none_is_refused_or_weaker_than_all(db, tmp_path):
    (known,) = (each for each in db.entries() if each.provenance == "modelled")
    index = {"schema_version": 2, "source_hashes": {}, "compiler": "13.4", "hashes": {}, "programs": [], "entries": []}
    index["entries"].append({**encode(known.replace(provenance="")), "measurement": None})
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
        file.writestr("bundle.json", json.dumps(index))
    with pytest.raises(DatabaseError, match=r"entries\[0\].provenance: .* is not allowed here"):
        list(bundle.read_bundle(tmp_path / "b.zip").entries)
    lookup.LookupTable([known.replace(provenance="proven")], kernel=attention.Attention).resolve(PROBLEM, "sm_90")
    damage(tmp_path / "tuning.db", "UPDATE entries SET provenance = 'proven'")
    assert db.entries() == []


def test_a_file_name_is_made_of_its_parts():
    for device in ("../../../x", "/etc/x", "..", "a\\b", "x" * 500, "é" * 300):
        name = landscape_file_name(problem.Problem("../k", {"n": "../../y"}), device, "../burst")
        assert re.fullmatch(rb"[^./][^/]{0,253}", name.encode()), name
    assert landscape_file_name(PROBLEM, DEVICE.name, "burst").startswith("sample_burst_s1024_d64")


def test_the_artifact_store_stays_in_its_folder(tmp_path):
    victim = tmp_path / "victim.cubin.xz"
    victim.write_text("mine")
    store = ProgramStore(tmp_path)
    for arch, fingerprint in (("sm_90", "../../victim"), ("..", "ab" * 12), ("sm_90/..", "ab" * 12), ("sm_90", "")):
        with pytest.raises(DatabaseError, match="no machine code"):
            store.get(arch, fingerprint)
    assert victim.read_text() == "mine"


def test_markup_in_data_is_shown_not_taken():
    for text in ("<img src=x>", "```<img src=x>`", "\\`<img src=x>`", "`` <img src=x>", "`a` <img src=x> `b`"):
        blocks = [Heading(text=text), Paragraph(text=text), Table(head=("a",), rows=((text,),))]
        assert "<img" not in to_markdown(blocks) + to_html(blocks, title=text)
    assert not re.search(r"\]\(|\n#", to_markdown([Paragraph(text="[a](javascript:b)\n\n# c")]))
    assert to_markdown([Paragraph(text="`tile_m=64` [1.0, 2.0] (a)")]) == "`tile_m=64` [1.0, 2.0] (a)\n"


@pytest.fixture
def full(monkeypatch):
    """The disk is full."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)


def test_a_file_is_written_whole(tmp_path):
    """Not at all where the disk is full: see the next test."""
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write_whole(link, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "link.json"]
    with pytest.raises(OSError, match="directory"):
        files.write_whole(tmp_path, "new")


def test_an_export_that_fails_leaves_the_table_that_was_there(db, tmp_path, full):
    (tmp_path / "t.json").write_text("old")
    with pytest.raises(DatabaseError, match="cannot write"):
        export_table(db, tmp_path / "t.json", arch="sm_80")
    assert (tmp_path / "t.json").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE entries SET schedule_id = runner_up_id WHERE provenance = 'measured'", "of another schedule"),
        ("UPDATE measurements SET median_us = median_us / 2 WHERE id = 1", "measurements 1: its median 50.0"),
        ("UPDATE measurements SET median_us = 'x' WHERE id = 1", "measurements 1: its median_us 'x': expected `float`"),
        ("UPDATE measurements SET samples_us = '[1.0, 2.0, 3.0]' WHERE id = 1", "it has 3 samples, not the 5"),
        ("UPDATE measurements SET samples_us = '[98.0, 99.0, 100.0, 101.5, 102.0]' WHERE id = 1", "its interval"),
        ("UPDATE measurements SET samples_us = '[\"x\"]' WHERE id = 1", "measurements 1: its samples_us"),
        (
            "UPDATE measurements SET samples_us = '[0.0]' WHERE id = 1",
            "measurements 1: its samples_us '[0.0]': Expected `float` > 0.0",
        ),
        (
            "UPDATE measurements SET samples_us = '[Infinity]' WHERE id = 1",
            "measurements 1: its samples_us '[Infinity]': JSON is malformed",
        ),
        (
            "UPDATE measurements SET samples_us = '[1.0' WHERE id = 1",
            "measurements 1: its samples_us '[1.0': Input data was truncated",
        ),
        ("UPDATE measurements SET conditions = '{' WHERE id = 2", "measurements 2: its conditions '{'"),
        ("UPDATE problems SET dims = '[1]'", "its dims '[1]': Expected `object`"),
        ("UPDATE entries SET updated_at = 'never'", "entries 1: its updated_at 'never'"),
        ("UPDATE entries SET ties = '{{'", "its ties '{{'"),
        ("DROP TABLE failures", "table failures is missing"),
        ("DROP TABLE entries", "table entries is missing"),
    ],
)
def test_damage_is_reported_not_raised(db, tmp_path, statement, expected):
    assert db.check() == []
    damage(tmp_path / "tuning.db", statement)
    assert expected in "\n".join(db.check())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE problems SET dims = 'null'",
        "UPDATE schedules SET knobs = '[1]'",
        "UPDATE devices SET device = '{}'",
        "UPDATE entries SET ties = '[1]'",
    ],
)
def test_a_row_that_cannot_be_read_is_said_and_left_out(db, tmp_path, statement, caplog):
    damage(tmp_path / "tuning.db", statement)
    assert len(db.entries()) < 2
    db.measurements()
    (record,) = caplog.records
    assert re.search(
        r"^\d+ damaged rows? of /.*tuning.db left out; `tiledsched db check` names (it|them)$", record.message
    )


def test_measurements_of_one_sample_are_sound(db):
    hopeless = measurement(7.0, samples_us=(7,), ci_low_us=7.0, ci_high_us=7.0, accuracy=None)  # JSON may say 7 for 7.0
    db.record_measurement(None, "attention", "abc", TOOLCHAIN, hopeless)
    assert db.check() == []


def test_a_schema_of_no_version_is_said(db, tmp_path):
    damage(tmp_path / "tuning.db", "UPDATE tiledsched_schema SET version_num = x'78'")
    with pytest.raises(DatabaseError, match="schema"):
        TuningDB.open(tmp_path / "tuning.db", read_only=True)


# Sizes


def test_a_small_file_that_unpacks_to_much_is_refused(db, tmp_path, monkeypatch):
    """A megabyte of xz may hold gigabytes; nothing of it is taken in."""
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    for function in (files.read_bounded, files.unpacked):
        monkeypatch.setattr(function, "__defaults__", (1 << 20,))
    bomb, store = lzma.compress(b" " * (8 << 20), preset=0), ProgramStore(tmp_path / "cache")
    store.path("sm_90", "f" * 24).parent.mkdir(parents=True)
    store.path("sm_90", "f" * 24).write_bytes(bomb)
    assert (store.get("sm_90", "f" * 24), len(bomb) < 1 << 20) == (None, True)
    for name, content in (("table.json.xz", bomb), ("table.json", b" " * (2 << 20))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DatabaseError, match="larger than 1 MiB"):
            import_table(db, tmp_path / name)
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bundle.json", b" " * (8 << 20))
    monkeypatch.setattr("tiledsched.serve.bundle.MOST_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        bundle.read_bundle(tmp_path / "b.zip")


@pytest.mark.parametrize("content", [b"", b"\xfd7zXZ\x00", lzma.compress(b"{}")[:-9], lzma.compress(b"[" * 100000)])
def test_a_packed_file_that_is_cut_short_or_nested_deeply_is_said(db, tmp_path, content):
    (tmp_path / "table.json.xz").write_bytes(content)
    with pytest.raises(DatabaseError, match=r"table\.json\.xz"):
        import_table(db, tmp_path / "table.json.xz")


# Data never names code that runs


PLANTED = """from pathlib import Path
Path({mark!r}).touch()
from optuna.samplers import RandomSampler
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.softmax import Softmax
class Planted(Softmax): name = "planted"
class Sampler(RandomSampler): pass
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A folder on the module path with a module that leaves a mark when it is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(registry.ALLOWED_VARIABLE, raising=False)
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    monkeypatch.delitem(sys.modules, "planted_code", raising=False)
    (tmp_path / "planted_code.py").write_text(PLANTED.format(mark=str(tmp_path / "mark")))
    return tmp_path


@pytest.mark.parametrize("place", ["planted_code:Planted", "{}/planted_code.py:Planted", "{}/planted_code:Planted"])
def test_data_names_no_kernel_that_the_user_did_not_allow(planted, monkeypatch, place):
    place = place.format(planted)
    module = place.rpartition(":")[0]
    with pytest.raises(
        ConfigError, match=rf"a row names '{place}'.*run this with {registry.ALLOWED_VARIABLE}={module}$"
    ):
        registry.kernel_of_data(place, "a row")
    assert not (planted / "mark").exists()
    monkeypatch.setenv(registry.ALLOWED_VARIABLE, f"other, {module}")
    assert registry.kernel_of_data(place, "a row").name == "planted"


@pytest.mark.parametrize("kernel", ["tiledsched.kernels.softmax:Softmax", softmax.Softmax.locator(), "softmax"])
def test_data_may_name_kernels_that_ship_or_are_registered(planted, monkeypatch, kernel):
    assert registry.kernel_of_data(kernel, "a row") is softmax.Softmax
    registered = EntryPoint("planted", "planted_code:Planted", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "installed_entry_points", lambda: (registered,))
    assert registry.kernel_of_data("planted_code:Planted", "a row").name == "planted"
    assert registry.kernel_of_data(f"{planted}/planted_code.py:Planted", "a row").name == "planted"


@pytest.mark.parametrize("name", ["planted_code:Sampler", "optuna.samplers.x:Y", "os:system", ":", 5])
def test_data_names_no_sampler_that_the_user_did_not_allow(planted, monkeypatch, name):
    for ours in (None, *SAMPLERS, "optuna.samplers:RandomSampler"):
        check_sampler(ours, "a row")
    with pytest.raises(ConfigError, match=registry.ALLOWED_VARIABLE):
        check_sampler(name, "a row")
    assert not (planted / "mark").exists()
    monkeypatch.setattr(registry, "_allowed", {"planted_code:Sampler"})
    check_sampler("planted_code:Sampler", "a row")


# Children import from where they should


def test_no_child_imports_from_the_current_directory(tmp_path):
    """Files called like modules of the standard library lie there; all kinds of processes are started by a program that lies
    elsewhere."""
    here, program = tmp_path / "here", tmp_path / "program.py"
    here.mkdir()
    for name in {*sys.stdlib_module_names, "tiledsched", "cupy", "msgspec"} - {*sys.builtin_module_names, "__future__"}:
        (here / f"{name}.py").write_text(
            f"open({str(tmp_path / 'mark')!r}, 'a').write({name + ' '!r})\nraise SystemExit(9)\n"
        )
    program.write_text(
        "import os, subprocess\n"
        "from tiledsched.core.processes import SAFE_PATH, SafeSpawnContext, child_environment, python_command\n"
        "if __name__ == '__main__':\n"
        "    worker = [*python_command('tiledsched.measure.worker'), '-1', '/nonexistent', '0']\n"
        "    running = subprocess.Popen(worker, stderr=subprocess.DEVNULL, env=child_environment())\n"
        "    context = SafeSpawnContext()\n"
        "    lock, spawned = context.Lock(), context.Process(target=os.getpid)\n"
        "    spawned.start()\n"
        "    spawned.join()\n"
        "    assert spawned.exitcode == 0\n"
        "    assert running.wait(60) == 1\n"
    )
    done = subprocess.run([sys.executable, str(program)], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()


def test_every_process_is_started_so():
    ways = re.compile(r"sys\.executable|get_context|ProcessPoolExecutor|multiprocessing import .*Process|Popen\(")
    package = Path(registry.__file__).parent.parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if ways.search(path.read_text())}
    started = {"measure/gpu.py", "fleet/worker.py"}  # their commands are `python_command`s
    assert found == {"core/processes.py", "doctor.py", *started}


def test_the_command_by_minus_m_imports_nothing_from_the_current_directory(tmp_path):
    for name in ("random", "lzma", "sqlite3", "click", "rich", "decimal", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    command = [sys.executable, "-m", "tiledsched", "db", "query", "--db", "none.db"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "there is no database" in done.stderr


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (["", "/first", "second"], ["/first", "{here}/second", "{here}"]),
        (["{here}", "/first"], ["{here}", "/first"]),  # of PYTHONPATH, or an editable install
    ],
)
def test_a_child_finds_what_its_parent_finds(monkeypatch, tmp_path, path, found):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each.format(here=tmp_path) for each in path])
    assert processes.child_environment()["PYTHONPATH"] == os.pathsep.join(found).format(here=tmp_path)
