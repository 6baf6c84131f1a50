"""What ships is what was shipped: the manifest."""

from __future__ import annotations

import json
import shutil

import pytest

from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.core.errors import DatabaseError
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import load_entries
from tiledsched.store import shipped
from tiledsched.store.exchange import read_table

TABLE = "tables/softmax/sm_90.json"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of some of the shipped data, which may be damaged."""
    folder = tmp_path / "tuning_db"
    for name in (TABLE, "tables/rms_norm/sm_90.json", "manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data_files.tuning_db() / name, folder / name)
    monkeypatch.setattr(data_files, "tuning_db", lambda: folder)
    shipped._files.cache_clear()
    yield folder
    shipped._files.cache_clear()


def test_every_shipped_file_is_listed_and_as_listed() -> None:
    folder = data_files.tuning_db()
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    present = {
        path.relative_to(folder).as_posix() for part in shipped.LISTED for path in (folder / part).rglob("*.json*")
    }
    assert set(listed) == present
    for name in listed:
        shipped.check_shipped(folder / name, (folder / name).read_bytes())


def test_the_manifest_is_what_the_command_writes(tmp_path, monkeypatch) -> None:
    before = shipped.manifest_path().read_text()
    monkeypatch.setattr(shipped, "manifest_path", lambda: tmp_path / "manifest.json")
    assert shipped.write_manifest() == len(json.loads(before)["files"])
    assert (tmp_path / "manifest.json").read_text() == before


def test_landscapes_are_known_without_reading_them() -> None:
    found = shipped.shipped_landscapes("attention", "sm_90")
    assert len(found) == 40
    one = next(each for each in found if "sq1_sk8192" in each.path.name)
    assert (one.regime, one.problem.seq_q, one.problem.kv_heads) == ("burst", 1, 8)
    assert read_table(one.path).measurements[0].measurement.problem == one.problem
    assert shipped.shipped_landscapes("attention", "sm_80") == []


def test_a_tampered_file_is_refused(copied) -> None:
    path = copied / TABLE
    read_table(path)
    path.write_text(path.read_text().replace('"median_us": ', '"median_us": 1', 1))
    with pytest.raises(
        DatabaseError, match=r"tables/softmax/sm_90\.json is not the file that shipped .its hash is another"
    ):
        read_table(path)


def test_a_file_that_nobody_shipped_is_refused(copied) -> None:
    path = copied / "tables" / "softmax" / "sm_91.json"
    shutil.copy(copied / TABLE, path)
    with pytest.raises(DatabaseError, match="the manifest does not list it"):
        read_table(path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema_version": 2, "files": {}}', '{"schema_version": 1, "files": {"a": {}}}']
)
def test_a_damaged_manifest_is_said_to_be_damaged(copied, text) -> None:
    (copied / "manifest.json").write_text(text)
    shipped._files.cache_clear()
    with pytest.raises(DatabaseError, match=r"manifest\.json is not the file that shipped"):
        read_table(copied / TABLE)


def test_files_elsewhere_are_nobodys_business(copied, tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text((copied / TABLE).read_text().replace('"median_us": ', '"median_us": 1', 1))
    assert read_table(path).entries


def test_serving_goes_on_without_a_refused_table(copied, tmp_path, caplog) -> None:
    whole = {entry.kernel for entry in load_entries(Settings(db=str(tmp_path / "none.db")))}
    assert whole == {"softmax", "rms_norm"}
    path = copied / TABLE
    path.write_text(path.read_text() + " ")
    assert {entry.kernel for entry in load_entries(Settings(db=str(tmp_path / "none.db")))} == {"rms_norm"}
    assert "is not the file that shipped" in caplog.text
    assert Attention.name not in caplog.text
