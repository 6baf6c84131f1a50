"""Whatever deletes or replaces files deletes ours: each such function works in a folder that holds strangers' files, too."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cubins import ARCH, MADE
from store_samples import DEVICE, PROBLEM, fill

import tiledsched
from tiledsched.build import pool
from tiledsched.build.store import ProgramStore
from tiledsched.cli import main
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import MARK, OwnFolder, write_whole
from tiledsched.fleet.local_store import LocalStore, whole
from tiledsched.report import printing
from tiledsched.store.captured_calls import VERSION, WORDS
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_landscape, export_table

HERE = MADE["x86_64"]
NOTE = json.dumps({"v": VERSION, "problem": {}, "sample": {}, **dict.fromkeys(WORDS, "")}) + "\n"
STRANGERS = {
    "notes.jsonl": '{"v": 1, "problem": "mine"}\n',
    "host-1-00000000.jsonl": '{"calls": {}}\n' + NOTE,  # whose first line is none of ours
    "empty.jsonl": "",
    "tuning.db": "no database",
    "tuning.db-wal": "x",
    "report.pdf": "%PDF mine",
    "report.html": "mine",
    "table.json.part": "mine",
    ".tiledsched-notes.part": "mine",
    "tiledsched-folder/lock": "12345",
    "tiledsched-folder/notes.txt": "mine",
    "b.zip": "PK mine",
    "programs/README": "mine",
    "programs/sm_90/ab/abcd.txt": "mine",
    "entries/notes": "mine",
    "host_code/notes": "mine",
    "fleet/notes.db": "mine",
}


def planted(folder: Path) -> Callable[[], None]:
    """Fill a folder with strangers' files, and with links to files outside; the function checks that all are as they were."""
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (outside / "note.jsonl").write_text(NOTE)
    (outside / "folder").mkdir()
    (outside / "folder" / "lock").write_bytes(MARK)
    for name, text in STRANGERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        os.utime(folder / name, (0, 0))
    (folder / "link.jsonl").symlink_to(outside / "note.jsonl")
    (folder / "tiledsched-link0000").symlink_to(outside / "folder")

    def check(*replaced: str) -> None:
        assert {name for name, text in STRANGERS.items() if (folder / name).read_text() != text} == {*replaced}
        assert (folder / "link.jsonl").read_text() == NOTE
        assert (folder / "tiledsched-link0000" / "lock").read_bytes() == MARK

    return check


def seen(folder: Path) -> None:
    """`show --seen FOLDER --clear`."""
    (folder / "ours.jsonl").write_text(NOTE)
    assert main(["show", "--seen", str(folder), "--clear"]) == 0
    assert not (folder / "ours.jsonl").exists()


def seen_in_none(folder: Path) -> None:
    """The same where nothing is ours: neither the folder nor anything in it goes."""
    assert main(["show", "--seen", str(folder), "--clear"]) == 0


def programs(folder: Path) -> None:
    """A damaged program in the cache folder."""
    store = ProgramStore(folder)
    store.put(HERE)
    path = store.path(ARCH, HERE.fingerprint)
    path.write_text("damaged")
    assert store.get(ARCH, HERE.fingerprint) is None
    assert not path.exists()


def linked_program(folder: Path) -> None:
    """A link in its place: the link goes, and not what it leads to."""
    path = ProgramStore(folder).path(ARCH, HERE.fingerprint)
    path.parent.mkdir(parents=True)
    path.symlink_to(folder / "tuning.db")
    assert ProgramStore(folder).get(ARCH, HERE.fingerprint) is None


def temporary(folder: Path) -> None:
    """Temporary folders, with what they sweep."""
    with OwnFolder() as mine:
        assert Path(mine).parent == folder


def written(folder: Path) -> None:
    """A file that is written whole, with what is swept beside it."""
    write_whole(folder / "new.txt", "new")


def backup(folder: Path) -> None:
    """`db backup`, which replaces nothing, and one that fails half way."""
    with TuningDB.open(folder / "ours.db") as db:
        fill(db)
    assert main(["--db", str(folder / "ours.db"), "db", "backup", str(folder / "tuning.db")]) == 2
    assert main(["--db", str(folder / "ours.db"), "db", "backup", str(folder / "copy.db")]) == 0


def exported(folder: Path) -> None:
    """`db export` to a file that is there, and a landscape."""
    with TuningDB.open(folder / "ours.db") as db:
        fill(db)
        export_table(db, folder / "ours.json")
        export_landscape(db, folder / "landscape.json", PROBLEM, DEVICE.name, "burst")
    assert main(["--db", str(folder / "ours.db"), "db", "export", "-o", str(folder / "ours.json")]) == 0


def forgotten(folder: Path) -> None:
    """`db check --upgrade --forget-failures`, in a database with a table and a view of somebody else."""
    with TuningDB.open(folder / "ours.db") as db:
        fill(db)
    with closing(sqlite3.connect(folder / "ours.db")) as connection:
        connection.executescript(
            "CREATE TABLE mine(a); INSERT INTO mine VALUES (1); CREATE VIEW seen AS SELECT * FROM mine"
        )
    assert main(["--db", str(folder / "ours.db"), "db", "check", "--upgrade", "--forget-failures"]) == 0
    with closing(sqlite3.connect(folder / "ours.db")) as connection:
        assert connection.execute("SELECT * FROM seen").fetchall() == [(1,)]
        assert connection.execute("SELECT count(*) FROM failures").fetchone() == (0,)


def not_ours(folder: Path) -> None:
    """Every command on `--db FILE`, where the file is another program's."""
    with closing(sqlite3.connect(folder / "other.db")) as connection:
        connection.executescript("CREATE TABLE failures(a); INSERT INTO failures VALUES (1)")
    before = (folder / "other.db").read_bytes()
    for words in ("check --upgrade --forget-failures", f"import {folder}/ours.json", "export -o x.json"):
        for name in ("other.db", "tuning.db"):
            with suppress(SystemExit):
                assert main(["--db", str(folder / name), "db", *words.split()]) == 2
    assert (folder / "other.db").read_bytes() == before


def fleet(folder: Path) -> None:
    """A worker's databases of processes that are gone."""
    store = LocalStore(folder, "home")
    strangers = store._folder / "notes.db", store._folder / "my-notes.db"
    for each in strangers:
        each.write_text("mine")
    left = store._folder / "tune-1.0.db"
    left.write_text("torn")
    assert store.left_behind() == [left]
    assert not whole(left)
    store.close()
    assert [each.read_text() for each in strangers] == ["mine", "mine"]


def compile_process(folder: Path) -> None:
    """A compile process, of a script that had cuTile write to a folder of its own; a folder that cuTile made goes."""
    made = folder / "tmpabcd"
    made.mkdir()
    (folder / "own").mkdir()
    code = (
        "import sys, os, types\nfrom tiledsched.build import pool\n"
        "import cuda.tile\nfrom cuda.tile._cext import default_tile_context as context\n"
        "context.config.temp_dir = sys.argv[1]\npool.start_process(sys.argv[2], os.getppid())\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_TILE_TEMP_DIR"}
    for each in (folder, made):
        command = [pool.sys.executable, "-c", code, str(each), str(folder / "own")]
        subprocess.run(command, check=True, env={**environment, "PYTHONPATH": os.pathsep.join(pool.sys.path)})
    assert not made.exists()


def printed(folder: Path) -> None:
    """`report --pdf` where the browser prints nothing."""
    browser = folder / "browser"
    browser.write_text("#!/bin/sh\necho no >&2\nexit 1\n")
    browser.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(printing, "BROWSERS", (str(browser),))
        with pytest.raises(ConfigError, match="could not print"):
            printing.print_page(folder / "report.html")


def reported(folder: Path) -> None:
    """`report -o FOLDER`, which writes its own page over an older one."""
    assert main(["report", "softmax", "--arch", "sm_90", "-o", str(folder)]) == 0


WORK = {
    seen: (),
    seen_in_none: (),
    programs: (),
    linked_program: (),
    temporary: (),
    written: (),
    backup: (),
    exported: (),
    forgotten: (),
    not_ours: (),
    fleet: (),
    printed: (),
    compile_process: (),
    reported: ("report.html",),
}
"""What deletes -> the strangers' files that it is asked to replace."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    found = tmp_path / "folder"
    found.mkdir()
    monkeypatch.chdir(found)
    monkeypatch.setattr("tiledsched.core.files.tempfile.tempdir", str(found))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return found


@pytest.mark.parametrize(
    "work",
    [pytest.param(each, marks=pytest.mark.slow if each in (compile_process, reported) else ()) for each in WORK],
    ids=lambda each: each.__name__,
)
def test_strangers_files_stay(work, folder) -> None:
    check = planted(folder)
    work(folder)
    check(*WORK[work])


DELETES = re.compile(
    r"\.unlink\(|rmtree\(|rmdir\(|os\.remove\(|os\.replace\(|os\.rename\(|\.rename\(|truncate\(|DROP |delete\(\w+Row"
)
KNOWN = {
    "build/pool.py": 1,  # compile_process
    "build/sealed.py": 1,  # programs
    "core/files.py": 6,  # written, temporary
    "core/processes.py": 1,  # the folder of its own process
    "fleet/local_store.py": 1,  # fleet
    "measure/lock.py": 2,  # the lock file of a GPU, which is no link and holds only who has it
    "measure/worker.py": 1,  # the folder of its own process
    "report/printing.py": 1,  # printed
    "serve/warmup.py": 1,  # a bundle that it has just written gets its name
    "store/captured_calls.py": 1,  # seen
    "store/database.py": 2,  # backup
    "store/db.py": 2,  # forgotten
    "store/views.py": 3,  # forgotten; tests/test_store_views.py
}
"""Where the package deletes or replaces, how often, and which test above does it."""


def test_everything_that_deletes_is_in_the_table() -> None:
    package = Path(tiledsched.__file__).parent
    found = {
        str(path.relative_to(package)): count
        for path in package.rglob("*.py")
        if (count := len(DELETES.findall(path.read_text())))
    }
    assert found == KNOWN
