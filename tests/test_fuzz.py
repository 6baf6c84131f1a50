"""Whatever a file, a variable or a command line holds: it is taken, or refused in words; soon, in little memory, and in its folder.

Valid inputs are changed where they stand: values replaced, keys dropped or renamed, parts wrapped and doubled. Few examples each;
more with FUZZ_EXAMPLES=3000 pytest tests/test_fuzz.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import lzma
import os
import random
import resource
import sqlite3
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies
from store_samples import PROBLEM, fill

from tiledsched.build.store import ProgramStore
from tiledsched.cli.problems import read_problems
from tiledsched.core.config import load_settings
from tiledsched.core.errors import TiledschedError
from tiledsched.core.files import csv_text
from tiledsched.core.space_files import load_space, space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.matmul import Matmul
from tiledsched.kernels.rms_norm import RmsNorm
from tiledsched.kernels.softmax import Softmax
from tiledsched.measure.replay import ReplayRunner
from tiledsched.serve.bundle import INDEX, SCHEMA_VERSION, read_bundle
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import (
    export_landscape,
    export_table,
    import_table,
    landscape_file_name,
    merge_database,
    read_table,
)
from tiledsched.store.t4 import export_foreign, recorded
from tiledsched.tuning import resources
from tiledsched.tuning.recording import Recording

MANY = os.environ.get("FUZZ_EXAMPLES")
pytestmark = pytest.mark.timeout(0 if MANY else 120)
FUZZ = settings(
    max_examples=int(MANY or 8),
    deadline=None,
    derandomize=not MANY,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
SECONDS, MEBIBYTES = 2.0, 512
SPACE = {
    "extends": "attention/sm_90.toml",
    "kernel": "attention",
    "arch": "sm_90",
    "about": "x",
    "limits": {"max_ctas": 4},
    "knobs": {"tile_m": {"choices": [64, 128], "default": 64, "about": "rows", "measured_only": False}},
    "constraints": [
        {"require": "tile_m * tile_n <= 128 * 128 and causal in (True, False)", "because": "x", "exploring": True}
    ],
}
CONFIG = {"db": "x.db", "fallback": "torch", "regime": "burst", "sync": True, "gpu_wait": 3, "knobs": {"tile_m": 64}}
CANDIDATES = [{"tile_m": 128, "tile_n": 64, "occupancy": 2}, {"tile_m": 64, "loop_split": True}]


def deep(levels: int) -> list:
    return [deep(levels - 1)] if levels else []


LEAVES = strategies.one_of(
    strategies.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            1,
            2**31,
            2**63 - 1,
            2**63,
            -(2**63),
            10**400,
            0.5,
            1e308,
            5e-324,
            float("nan"),
            float("inf"),
            "",
            "x" * 5000,
            "../../../x",
            "/../x",
            "a/b",
            "\x00",
            "\ud800",
            "é",
            "<b>",
            "{}",
            "9" * 5000,
            "sm_90",
            "sm_999",
            "attention",
            "float16",
            "measured",
            "0001-01-01T00:00:00+23:59",
            [],
            {},
            [1],
            {"": 0},
            {"kernel": "x"},
            deep(300),
            "tile_m // (tile_n - 64)",
            "attention/sm_90.toml",
        ]
    ),
    strategies.integers(),
    strategies.floats(),
    strategies.text(max_size=8),
)


@strategies.composite
def changed(draw, document):
    """`document`, with up to three changes at places drawn."""
    root = [json.loads(json.dumps(document))]
    for _ in range(draw(strategies.integers(1, 3))):
        holder, key = root, 0
        while isinstance(holder[key], (dict, list)) and holder[key] and draw(strategies.integers(0, 9)):
            holder = holder[key]
            key = draw(strategies.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        how = draw(strategies.sampled_from(["replace", "replace", "replace", "drop", "wrap", "rename", "again"]))
        if how == "replace" or holder is root:
            holder[key] = json.loads(json.dumps(draw(LEAVES)))  # a copy: the next change may be inside
        elif how == "wrap":
            holder[key] = [holder[key]]
        elif how == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(strategies.text(max_size=5))] = holder.pop(key) if how == "rename" else holder[key]
        else:
            holder.append(holder[key])
    return root[0]


def toml(value) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return "''" if value is None else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def written(kind: str, document) -> bytes:
    """The bytes of a file of a kind, which its name says, that holds a document."""
    if kind.endswith(".xz"):
        return lzma.compress(written("t.json", document), preset=0)
    if kind.endswith(".zip"):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as file:
            file.writestr(INDEX, json.dumps(document))
            file.writestr(f"cubins/sm_90/{'f' * 24}.cubin", b"\x7fELF" * 20)
        return made.getvalue()
    if not kind.endswith(".toml"):
        return json.dumps(document).encode()
    lines = (
        (f"{json.dumps(key)} = {toml(value)}" for key, value in document.items()) if isinstance(document, dict) else ()
    )
    return ("\n".join(lines) or toml(document)).encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def in_bounds():
    """What happens inside ends well or in one of our errors, soon, and in little memory."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with contextlib.suppress(TiledschedError):
        yield
    assert time.process_time() - started < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < MEBIBYTES << 10


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a test, in which it stays."""
    work = tmp_path / "a" / "b" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    yield work
    assert [
        path for path in tmp_path.rglob("*") if work not in path.parents and path not in (work, *work.parents)
    ] == []


@functools.lru_cache
def in_one_file(fill_it: Callable[[TuningDB], None]) -> bytes:
    """The bytes of an SQLite file that was filled: migrations take a quarter of a second."""
    with tempfile.TemporaryDirectory() as folder:
        with TuningDB.open(Path(folder) / "x.db") as db:
            fill_it(db)
        with contextlib.closing(sqlite3.connect(Path(folder) / "x.db")) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
        return (Path(folder) / "x.db").read_bytes()


def empty(path: Path) -> TuningDB:
    """A database with nothing in it, in place of what was there."""
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    path.write_bytes(in_one_file(TuningDB.close))
    return TuningDB.open(path)


@functools.lru_cache
def table() -> dict:
    """A table with an entry measured and one modelled, as JSON."""
    with tempfile.TemporaryDirectory() as folder, TuningDB.open(":memory:") as db:
        fill(db)
        export_table(db, Path(folder) / "t.json")
        return json.loads((Path(folder) / "t.json").read_text())


@functools.lru_cache
def foreign() -> dict[str, str]:
    """The landscape of that table as T4 results, and its schedules as CSV."""
    with tempfile.TemporaryDirectory() as folder, TuningDB.open(":memory:") as db:
        fill(db)
        (line,) = db.landscapes()
        place = line.problem, line.device_name, line.regime
        (results, _) = export_foreign(recorded(db, *place), folder, "t4")
        return {
            "c.csv": csv_text(each.measurement.schedule for each in db.measurements()),
            "t.json": results.read_text(),
        }


def take_in(path: Path) -> None:
    """Read a table, and go on with one that reads well."""
    with in_bounds():
        read_table(path)
        with in_bounds():
            go_on_with(path)


def go_on_with(path: Path) -> None:
    """Take in a table that reads well, and do with it what is done with one."""
    folder = path.parent
    with empty(folder / "x.db") as db, empty(folder / "other.db") as other:
        import_table(db, path)
        assert db.check() == []
        export_table(db, folder / "again.json")
        import_table(other, folder / "again.json")
        assert [each.key for each in other.entries()] == [each.key for each in db.entries()]
        known = [each for each in db.entries() if each.kernel == "attention"]
        LookupTable(known, kernel=Attention).resolve(PROBLEM, "sm_90")
        for line in db.landscapes():
            name = landscape_file_name(line.problem, line.device_name, line.regime)
            export_landscape(db, folder / name, line.problem, line.device_name, line.regime)
            for form in ("t4", "kernel-tuner-cache"):
                with contextlib.suppress(TiledschedError):
                    export_foreign(recorded(db, line.problem, line.device_name, line.regime), folder, form)
        for one in db.measurements():
            ProgramStore(folder).get(one.measurement.device.arch, one.measurement.fingerprint or "0")
        with contextlib.suppress(TiledschedError):
            ReplayRunner(Attention, Recording([str(path)]).measurements).begin(PROBLEM)


@FUZZ
@given(data=strategies.data())
def test_tables_and_landscapes(folder, data) -> None:
    whole = {**table(), "entries": []} if data.draw(strategies.booleans()) else table()
    path = folder / data.draw(strategies.sampled_from(["t.json", "t.json.xz"]))
    path.write_bytes(written(path.name, data.draw(changed(whole))))
    take_in(path)


@FUZZ
@given(data=strategies.data())
def test_t4_results(folder, data) -> None:
    whole = json.loads(foreign()["t.json"])
    (record,) = (each for each in whole["results"][0]["measurements"] if each["name"] == "tiledsched")
    if data.draw(strategies.booleans()):
        record["value"] = json.dumps(data.draw(changed(json.loads(record["value"]))))
    else:
        whole = data.draw(changed(whole))
    path = folder / "t.json"
    path.write_text(json.dumps(whole))
    take_in(path)
    with in_bounds():
        use_candidates(path)


def documents() -> dict:
    """A document of each kind of file that is right."""
    whole = {"s.toml": SPACE, "tiledsched.toml": CONFIG, "c.json": CANDIDATES, "b.zip": index_of()}
    return {**whole, "t.json": table(), "t.json.xz": table()}


@FUZZ
@given(data=strategies.data())
def test_bytes_of_any_file(folder, data) -> None:
    """Bits flipped, cut short, put together wrongly."""
    files = {kind: written(kind, document) for kind, document in documents().items()}
    files["c.csv"] = foreign()["c.csv"].encode()
    kind = data.draw(strategies.sampled_from(sorted(files)))
    at = data.draw(strategies.integers(0, len(files[kind])))
    end = data.draw(strategies.integers(at, min(len(files[kind]), at + 40)))
    path = folder / kind
    path.write_bytes(files[kind][:at] + data.draw(strategies.binary(max_size=6)) + files[kind][end:])
    with in_bounds():
        read_any(path)


@pytest.mark.parametrize("kind", ["s.toml", "tiledsched.toml", "c.json", "b.zip"])
@FUZZ
@given(data=strategies.data())
def test_documents(folder, kind, data) -> None:
    (folder / kind).write_bytes(written(kind, data.draw(changed(documents()[kind]))))
    with in_bounds():
        read_any(folder / kind)


def test_what_is_changed_was_right(folder) -> None:
    """Else nothing would be tried but the first refusal."""
    for name, whole in documents().items():
        (folder / name).write_bytes(written(name, whole))
        read_any(folder / name)
    go_on_with(folder / "t.json")
    for name, text in foreign().items():
        (folder / name).write_text(text)
        read_any(folder / name)
    go_on_with(folder / "t.json")
    assert len(read_bundle(folder / "b.zip").entries) == len(read_bundle(folder / "b.zip").programs) == 1
    assert all(read_problems(kernel, words) for kernel, words in WORDS.items())
    assert take_apart(folder / "x.db", in_one_file(fill)) == []


def take_apart(path: Path, content: bytes) -> list[str]:
    """Read a database whole; what `db check` finds."""
    path.write_bytes(content)
    with TuningDB.open(path, read_only=True) as db:
        found = db.check()
        for read in (db.entries, db.measurements, db.landscapes, db.failures, db.artifacts):
            with contextlib.suppress(TiledschedError):
                read()
    return found


def read_any(path: Path) -> None:
    """What reads a file of this name, without asking whether it should."""
    if path.name.startswith("t."):
        read_table(path)
    elif path.suffix == ".zip":
        found = read_bundle(path)
        known = [each for each in found.entries if each.kernel == "attention"]
        LookupTable(known, kernel=Attention).resolve(PROBLEM, "sm_90")
        for program in found.programs:
            with contextlib.suppress(TiledschedError):
                found.artifact(program)
    elif path.name == "s.toml":
        use_space(path)
    elif path.suffix == ".toml":
        serve_forced(environ={}, project=path)
    else:
        use_candidates(path)


def index_of() -> dict:
    entry = table()["entries"][0]
    program = {
        "kernel": "attention",
        "arch": "sm_90",
        "schedule": entry["schedule"],
        "problem": entry["problem"],
        "fingerprint": "f" * 24,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "source_hashes": {"attention": "abc"},
        "compiler": "13.4",
        "hashes": {f"cubins/sm_90/{'f' * 24}.cubin": "0" * 64},
        "programs": [program],
        "entries": [{**entry, "measurement": None, "measurement_id": None, "run_id": None}],
    }


@FUZZ
@given(
    name=strategies.sampled_from(
        ["TILE_M", "TILE_N", "OCCUPANCY", "KV_SPLITS", "PERSISTENT", "LOOP_SPLIT", "GPU_WAIT", "SYNC", "X"]
    ),
    value=LEAVES.map(str) | strategies.sampled_from(["64", "-64", "0", "1_0", "٣", "+64", "true", "1" * 5000]),
)
def test_settings_from_variables(folder, name, value) -> None:
    with in_bounds():
        serve_forced(environ={f"TILEDSCHED_{name}": value}, project=folder / "none")


def serve_forced(**sources) -> None:
    """Serve with the knobs that settings force."""
    found = load_settings(**sources, user=sources["project"].with_name("nobody"))
    LookupTable([], kernel=Attention, forced=found.knobs).resolve(PROBLEM, "sm_90")


def use_space(path: Path) -> None:
    space = load_space(path)
    problem = PROBLEM if space.kernel == "attention" else Softmax.problem(rows=4096, columns=1024)
    default = space.default(problem)
    space.violations(default, problem)
    list(itertools.islice(space.schedules(problem), 3))
    space.sample(problem, random.Random(0))
    list(itertools.islice(space.neighbours(default, problem), 3))


def use_candidates(path: Path) -> None:
    space = space_for("sm_90", Attention)
    space = space.limited_to(*resources.read_candidates(path, space))
    list(space.schedules(PROBLEM))


WORDS = {
    Attention: "S=1024,head_dim=64,B=16,H=32,causal=yes:no,dtype=bfloat16",
    Matmul: "m=64:128,n=64,k=64",
    RmsNorm: "rows=4096,columns=4096:8192",
    Softmax: "rows=4096,columns=1000:1016,dtype=float16",
}


@FUZZ
@given(kernel=strategies.sampled_from(list(WORDS)), data=strategies.data())
def test_problems_of_a_command(kernel, data) -> None:
    parts = [part.partition("=") for part in WORDS[kernel].split(",")]
    for _ in range(data.draw(strategies.integers(1, 3))):
        at = data.draw(strategies.integers(0, len(parts) - 1))
        key, equals, words = parts[at]
        parts[at] = data.draw(
            strategies.sampled_from(
                [
                    (key, equals, str(data.draw(LEAVES))),
                    (key, equals, words + ":" + str(data.draw(LEAVES))),
                    (str(data.draw(LEAVES)), equals, words),
                    (key, "", words),
                    (key, equals, ":".join(map(str, range(1, 400)))),
                    (key, equals, words + "+7"),
                ]
            )
        )
    with in_bounds():
        for problem in read_problems(kernel, ",".join(map("".join, parts)))[:3]:
            assert str(problem)
            assert problem.flops >= 0
            assert problem.min_bytes >= 0
            space_for("sm_90", kernel).default(problem)


@FUZZ
@given(data=strategies.data())
def test_rows_of_a_database(folder, data) -> None:
    path = folder / "x.db"
    path.write_bytes(in_one_file(fill))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        for _ in range(data.draw(strategies.integers(1, 3))):
            name = data.draw(strategies.sampled_from(tables))
            column = data.draw(
                strategies.sampled_from([row[1] for row in connection.execute(f"PRAGMA table_info({name})")])
            )
            value = data.draw(LEAVES | strategies.binary(max_size=4))
            if not isinstance(value, (str, bytes)) or data.draw(strategies.booleans()):
                value = value if isinstance(value, bytes) else json.dumps(value)
            with contextlib.suppress(sqlite3.Error, UnicodeError):  # SQLite refuses it itself
                connection.execute(f"UPDATE {name} SET {column} = ?", (value,))
    with in_bounds():
        assert all(isinstance(line, str) for line in take_apart(path, path.read_bytes()))
    if data.draw(strategies.integers(0, 4)) == 0:
        with in_bounds(), empty(folder / "other.db") as other:
            merge_database(other, path)
            assert other.check() == []
