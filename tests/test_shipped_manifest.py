"""What ships is what was shipped: the manifest."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest

from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.core.errors import DatabaseError
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import load_entries
from tiledsched.serve.transfer import loss_bands
from tiledsched.store import manifest, shipped
from tiledsched.store.exchange import read_table
from tiledsched.store.manifest import published_figures
from tiledsched.store.shipped import copy_path, read_shipped_entries

TABLE = "tables/softmax/sm_90.json"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of some of the shipped data, which may be damaged."""
    folder = tmp_path / "tuning_db"
    for name in (TABLE, "tables/rms_norm/sm_90.json", "manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data_files.tuning_db() / name, folder / name)
        if name.startswith("tables/"):
            shutil.copy(copy_path(data_files.tuning_db() / name), copy_path(folder / name))
    monkeypatch.setattr(data_files, "tuning_db", lambda: folder)
    manifest.listed_files.cache_clear()
    yield folder
    manifest.listed_files.cache_clear()


def test_every_shipped_file_is_listed_and_as_listed() -> None:
    folder = data_files.tuning_db()
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    present = {
        path.relative_to(folder).as_posix() for part in manifest.LISTED for path in (folder / part).rglob("*.json*")
    }
    assert set(listed) == present
    for name in listed:
        manifest.check_shipped(folder / name, (folder / name).read_bytes())


def test_the_command_writes_what_is_there(copied) -> None:
    written = {path: path.read_bytes() for path in [copied / "manifest.json", *copied.rglob("*.serving")]}
    assert len(written) == 3
    for path in written:
        path.unlink()
    assert shipped.write_manifest() == 2
    whole = json.loads(written.pop(copied / "manifest.json"))["files"]
    assert json.loads((copied / "manifest.json").read_text())["files"].items() <= whole.items()
    for path, data in written.items():
        assert path.read_bytes() == data


def test_landscapes_are_known_without_reading_them() -> None:
    found = manifest.shipped_landscapes("attention", "sm_90")
    assert len(found) == 58
    one = next(each for each in found if "sq1_sk8192" in each.path.name)
    assert (one.regime, one.problem.seq_q, one.problem.kv_heads) == ("burst", 1, 8)
    assert read_table(one.path).measurements[0].measurement.problem == one.problem
    assert manifest.shipped_landscapes("attention", "sm_80") == []


def test_a_file_that_is_not_the_one_that_shipped_is_refused(copied, tmp_path) -> None:
    whole = (copied / TABLE).read_text()
    for path, match in (
        (copied / TABLE, r"tables/softmax/sm_90\.json is not the file that shipped .its hash is another"),
        (copied / "tables/softmax/sm_91.json", "the manifest does not list it"),
        (tmp_path / "mine.json", None),  # files elsewhere are the user's own
    ):
        path.write_text(whole.replace('"median_us": ', '"median_us": 1', 1))
        with pytest.raises(DatabaseError, match=match) if match else contextlib.nullcontext():
            assert read_table(path).entries


OF_A_HASH = '{"schema_version": 1, "files": {"a": {"sha256": "' + 64 * "0" + '"%s}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        "\ud800",
        '{"schema_version": 2, "files": {}}',
        '{"schema_version": 1, "files": {"a": {}}}',
        *(OF_A_HASH % more for more in (', "bytes": "1"', ', "problem": "x"', ', "arch": {}')),
    ],
    ids=lambda text: text[-20:],
)
def test_a_damaged_manifest_is_said_to_be_damaged(copied, text) -> None:
    (copied / "manifest.json").write_text(text, errors="surrogatepass")
    manifest.listed_files.cache_clear()
    with pytest.raises(DatabaseError, match=r"manifest\.json is not the file that shipped"):
        read_table(copied / TABLE)


def test_what_a_manifest_leaves_out_is_not_guessed(copied) -> None:
    data = json.loads((copied / "manifest.json").read_text())
    for listed in data["files"].values():
        for name in ("bytes", "arch"):
            listed.pop(name, None)
    (copied / "manifest.json").write_text(json.dumps(data))
    manifest.listed_files.cache_clear()
    assert read_shipped_entries(copied / TABLE)
    assert manifest.shipped_landscapes("attention", "sm_90") == []


@pytest.mark.parametrize(("name", "read", "none"), [("transfer", loss_bands, ()), ("published", published_figures, {})])
def test_a_damaged_model_file_is_left_out(copied, caplog, name, read, none) -> None:
    path = copied / f"model/attention/{name}.json"
    path.parent.mkdir(parents=True)
    for text in ("[" * 100_000, '{"a": 1}', '{"bands": [{}], "devices": 3}'):
        path.write_text(text)
        read.cache_clear()
        assert read("attention") == none
        assert f"{name}.json is not the file that shipped" in caplog.text
        caplog.clear()
    read.cache_clear()


@pytest.mark.parametrize("damage", ["none", "missing", "changed", "of another table"])
def test_a_serving_copy_is_read_where_it_is_that_of_the_table(copied, damage) -> None:
    """A table that has its own copy is not looked at."""
    table = copied / TABLE
    copy = copy_path(table)
    whole = [entry.replace(layer="shipped") for entry in read_table(table).entries]
    if damage == "none":
        table.write_text(" " * table.stat().st_size)
        os.utime(table, (0, 0))
    elif damage == "missing":
        copy.unlink()
    elif damage == "changed":
        copy.write_text(copy.read_text().replace('"median_us":', '"median_us":1', 1))
    else:
        shutil.copy(copy_path(copied / "tables/rms_norm/sm_90.json"), copy)
    assert read_shipped_entries(table) == whole


def test_a_table_changed_since_its_copy_was_made_is_never_served_from_the_copy(copied) -> None:
    table = copied / TABLE
    text = table.read_text()
    os.utime(table, (2**31, 2**31))  # younger than its copy, and the same: a checkout writes files in any order
    assert read_shipped_entries(table)
    for other in (text.replace('"median_us": 1', '"median_us": 2', 1), text + " "):
        table.write_text(other)
        with pytest.raises(DatabaseError, match="is not the file that shipped"):
            read_shipped_entries(table)


def test_serving_goes_on_without_a_refused_table(copied, tmp_path, caplog) -> None:
    whole = {entry.kernel for entry in load_entries(Settings(db=str(tmp_path / "none.db")))}
    assert whole == {"softmax", "rms_norm"}
    path = copied / TABLE
    path.write_text(path.read_text() + " ")
    assert {entry.kernel for entry in load_entries(Settings(db=str(tmp_path / "none.db")))} == {"rms_norm"}
    assert "is not the file that shipped" in caplog.text
    assert Attention.name not in caplog.text
