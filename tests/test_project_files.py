"""What lies in the current directory decides nothing that its user has not trusted: each way that a file there might."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiledsched.core import config, trust
from tiledsched.core.config import load_settings
from tiledsched.store.db import TuningDB
from tiledsched.store.location import database_file

EVIL = "db = 'postgresql://evil/x'\nsite = '/elsewhere'\ncapture = '/elsewhere'\nregime = 'sustained'\n"
MARK = "raise SystemExit(open('mark', 'w').write('x'))\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder in which a stranger's files lie, as the current directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config.warn_once.cache_clear()
    return folder


def plant(text: str, here: Path) -> None:
    """Write the project file."""
    (here / "tiledsched.toml").write_text(text)


@pytest.mark.parametrize(
    "name",
    [
        "../tiledsched.toml",
        ".tiledsched.toml",
        "tiledsched/tiledsched.toml",
        "config.toml",
        ".config/tiledsched/config.toml",
        "tiledsched.ini",
        ".env",
        "setup.cfg",
        "pyproject.toml",
        "tuning.db",
        "tuning_db/manifest.json",
        "search_spaces/softmax/sm_90.toml",
        "alembic.ini",
    ],
)
def test_other_files_are_not_read(here, name) -> None:
    before = load_settings(environ={})
    path = here / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"pyproject.toml": "[tool.tiledsched]\n", "setup.cfg": "[tiledsched]\n", "tiledsched.ini": "[tiledsched]\n"}
    path.write_text("TILEDSCHED_DB=postgresql://evil/x\n" if name == ".env" else table.get(path.name, "") + EVIL)
    assert load_settings(environ={}) == before


@pytest.mark.parametrize(
    "place",
    [
        "postgresql://evil/x",
        "postgres://evil/x",
        "SQLITE:////elsewhere/x.db",
        "sqlite+pysqlite:////elsewhere/x.db",
        "sqlite:////elsewhere/x.db",
        "sqlite:///../x.db",
        "sqlite:///../x.db?/../project/y",
        "sqlite:///../x.db?mode=ro",
        "sqlite://host/../../x.db",
        "sqlite:///%2e%2e/x.db",
        "sqlite:///%2felsewhere/x.db",
        "sqlite:///a%2f..%2f..%2fx.db",
        "sqlite:///~/x.db",
        "sqlite:///%7e/x.db",
        "sqlite:///a://../../x.db",
        "a/../../x.db",
        "../project/../x.db",
        "~/x.db",
        "link.db",
        "folder/x.db",
        "circle",
        "/proc/self/cwd/../x.db",
    ],
)
@pytest.mark.parametrize("name", trust.PLACES)
def test_no_way_leads_out_of_the_folder(here, name, place) -> None:
    (here / "link.db").symlink_to(here.parent / "x.db")
    (here / "folder").symlink_to(here.parent)
    (here / "circle").symlink_to(here / "circle")
    plant(f"{name} = '{place}'", here)
    found = getattr(load_settings(environ={}), name)
    assert not found or place == "circle"
    plant(f"{name} = '{place}'\n", here)
    assert trust.trust(here / "tiledsched.toml")
    assert getattr(load_settings(environ={}), name) == place


@pytest.mark.parametrize(
    "place",
    [
        "x.db",
        "sqlite:///x.db",
        "sqlite:///a/../x.db?uri=true",
        "sqlite:///file:/elsewhere/x.db?uri=true",
        "file:/elsewhere/x.db?mode=rwc",
        "sqlite:///%252e%252e/x.db",
        "sqlite://host/../x.db",
        "sqlite://me@host:1/../x.db",
        "project/x.db",
    ],
)
def test_what_is_named_inside_the_folder_is_opened_inside(here, place) -> None:
    plant(f"db = '{place}'", here)
    assert load_settings(environ={}).db == place
    (here / "project").mkdir()
    with TuningDB.open(place) as db:
        assert Path(db.url.removeprefix("sqlite:///")).is_relative_to(here)
    assert Path(os.path.realpath(database_file(place))).is_relative_to(here)
    assert sorted(os.listdir(here.parent)) == ["project"]


def test_a_link_to_a_project_file_is_judged_where_it_is_found(here, tmp_path) -> None:
    """Places start at the current directory, wherever the file itself lies."""
    other = tmp_path / "other"
    (other / "data").mkdir(parents=True)
    (other / "tiledsched.toml").write_text("db = 'data/x.db'\nsite = '../tables'\n")
    (here / "tiledsched.toml").symlink_to(other / "tiledsched.toml")
    (here / "data").symlink_to(tmp_path)
    trust.trust(other / "tiledsched.toml")
    assert load_settings(environ={}).db is None
    assert load_settings(environ={}).site is None  # trusted there, not here
    trust.trust(here / "tiledsched.toml")
    assert load_settings(environ={}).site == "../tables"


def test_a_folders_name_trusts_no_other_file(here, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "tiledsched.toml").write_text(EVIL)
    line = trust._line(victim / "tiledsched.toml")
    odd = tmp_path / "x\n" / line.partition("  ")[0]  # a folder whose name goes on in the next line
    odd = tmp_path / f"x\n{line.replace('/', chr(92))}"
    odd.mkdir()
    (odd / "tiledsched.toml").write_text("regime = 'burst'\n")
    listed = trust.trust(odd / "tiledsched.toml")
    assert len(listed.read_text().splitlines()) == 1
    assert trust.is_trusted(odd / "tiledsched.toml")
    assert not trust.is_trusted(victim / "tiledsched.toml")
    assert listed.stat().st_mode & 0o022 == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", ["show softmax", "explain softmax -p rows=64,columns=512 --arch sm_90", "doctor"])
def test_no_code_is_imported_from_there(here, words) -> None:
    """By the command, which looks at no module path of its own; a project file, a distribution and a database name the code."""
    for name in ("sitecustomize", "usercustomize", "psycopg2", "pysqlite3", "evil", "softmax"):
        (here / f"{name}.py").write_text(MARK)
    for name in ("psycopg", "optuna", "tiledsched", "softmax"):
        (here / name).mkdir()
        (here / name / "__init__.py").write_text(MARK)
    info = here / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tiledsched.kernels]\nsoftmax = evil:X\nevil = evil:X\n[sqlalchemy.dialects]\npostgresql.evil = evil:X\n"
    )
    plant("db = 'postgresql+evil://h/x'\nsite = 'postgresql+psycopg2://h/x'\n", here)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TILEDSCHED_")}
    environment["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each and Path(each) != here)
    start = "import sys; from tiledsched.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", f"import sys; sys.path.pop(0); {start}", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert "ignored until you trust it" in done.stderr
    assert not (here / "mark").exists()
