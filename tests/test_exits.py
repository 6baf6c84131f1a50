"""What leaves the program: text from data is text, machine code is what was measured, files that cannot be are one line."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import lzma
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
import types

import pytest
from golden import lacking
from rich.console import Console
from sample_kernels import ScaleAdd
from store_samples import fill

from tiledsched.build.compiler import BuildTask
from tiledsched.build.pool import BuildPool
from tiledsched.cli import _Stderr, main
from tiledsched.cli.output import table_lines
from tiledsched.cli.progress import TuneProgress
from tiledsched.core import config, fields, files, problem, processes, registry, space_files
from tiledsched.core.errors import CompilerError, ConfigError, DatabaseError, DeclarationError, SpaceError
from tiledsched.core.files import csv_cell, csv_text, from_csv_cell, printable, read_bounded
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.report.document import Chart, Heading, Paragraph, Table, as_png, to_html, to_markdown
from tiledsched.serve import bundle, entries
from tiledsched.store import codec, db
from tiledsched.tuning.options import TuneOptions

ODD = "a\x1b[31m\x00\u202eb\u200f\u2028\x9b1m\ud800\r"
"""What a terminal obeys, what turns the direction of text, and what no text holds."""


@pytest.fixture
def home(home):
    """A user's folder in which there is a database; commands find nothing else."""
    with db.TuningDB.open(home / "tuning.db") as opened:
        fill(opened)
    return home


def is_plain(text: str) -> bool:
    """Whether nothing in a text is obeyed by who shows it."""
    return all(each.isprintable() or each in "\n\t" for each in text)


# Text from data is text


def test_text_is_spelt_out_where_something_would_obey_it():
    assert printable(ODD) == r"a\x1b[31m\x00\u202eb\u200f\u2028\x9b1m\ud800\r"
    assert printable("Größe → 128x64\n\tüß") == "Größe → 128x64\n\tüß"


def test_a_knobs_text_is_held_to_a_form_at_every_door(tmp_path):
    for text in ("a\nb", *(f"a{each}" for each in ODD if not each.isprintable())):
        with pytest.raises(SpaceError, match="cannot be printed"):
            Schedule(mode=text)
        with pytest.raises(DatabaseError, match=r"x\.mode.*cannot be printed"):
            codec.decode(Schedule, {"mode": text}, "x")
        with pytest.raises(DatabaseError, match=r"x\.mode.*cannot be printed"):
            codec.decode(problem.Problem, {"kernel": "stranger", "mode": text}, "x")
    choices = json.dumps(["plain", "a\x1b[31m"])
    (tmp_path / "s.toml").write_text(f'extends = "attention/sm_90.toml"\n[knobs.tile_m]\nchoices = {choices}\n')
    with pytest.raises(SpaceError, match=r"tile_m\.choices has text that cannot be printed"):
        space_files.load_space(tmp_path / "s.toml", Attention)
    for odd in (
        {"knobs": {"TILE": ["a", "b\x1b[2J"]}},
        {"name": "a\u202eb"},
        {"order": fields.choice("row", "\x9b1m")},
    ):
        with pytest.raises(DeclarationError, match="cannot be printed"):
            type("Odd", (ScaleAdd,), {**odd, "__module__": __name__})
    assert Schedule(mode="größer, [/nope] =1")["mode"] == "größer, [/nope] =1"


@pytest.mark.parametrize("more", [[], ["--csv"], ["--json"]], ids=["table", "csv", "json"])
def test_a_query_prints_no_escapes(home, cli, more):
    sql = "select char(27) || '[31m' || char(8238) || char(0, 155) || 'x' || char(10) as \"a\x1b[2J\", '=1+1' as b"
    out = cli(["db", "query", sql, *more]).out
    assert is_plain(out)
    assert "u202e" in out
    assert more or len(out.splitlines()) == 2


def test_a_damaged_row_is_told_in_plain_text(home, capsys, caplog):
    with sqlite3.connect(home / "tuning.db") as connection:
        connection.execute("UPDATE schedules SET knobs = ?", [json.dumps({"tile_m": "\x1b]0;x\x07", "tile_n": 64})])
        connection.execute("UPDATE builds SET failure_message = 'a' || char(27) || '[2J' || char(8238)")
    connection.close()
    for words in (
        ["show"],
        ["db", "check"],
        ["db", "export", str(home / "t.json")],
        ["db", "query", "select * from builds"],
    ):
        main(words)
        said = capsys.readouterr()
        assert is_plain(said.out + said.err), words
        assert "Traceback" not in said.err


def test_logs_and_errors_are_plain(home, cli):
    assert is_plain(cli(["db", "import", str(home / f"x{ODD.replace(chr(0), '')}.json")], code=2).err)
    assert is_plain(_Stderr().format(logging.makeLogRecord({"msg": ODD})))


def test_markup_in_a_stage_is_not_read():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=200, color_system=None)
    with TuneProgress(console=console) as progress:
        for what in ("[/nope]", "[bold]x[/bold]", "\x1b[2J"):
            progress.stage(problem.Problem("k[/nope]", {"n": 1}), what, 4)
            progress.best(1.0, Schedule(mode="[red]x[/nope]"))
            console.print(progress)
    assert all(word in shown.getvalue() for word in ("[/nope]", "[bold]x[/bold]", "\\x1b[2J", "[red]x[/nope]"))


def test_a_report_of_odd_text_is_drawn_and_holds_none(monkeypatch):
    chart = Chart(
        name="c",
        spec={"data": {"values": [{"a": ODD, "b": 1}]}, "mark": "bar", "encoding": {"x": {"field": "a"}}},
        text=ODD,
    )
    blocks = [Heading(text=ODD), Paragraph(text=ODD), Table(head=(ODD,), rows=((ODD,),)), chart]
    for text in (to_markdown(blocks, ["c.svg"]), to_html(blocks[:3], title=ODD)):
        assert is_plain(text)
        text.encode()
    drawn = []
    drawing = types.SimpleNamespace(
        javascript_bundle=lambda **given: "", vegalite_to_png=lambda spec, **given: drawn.append(spec) or b"PNG"
    )
    monkeypatch.setitem(
        sys.modules, "vl_convert", drawing
    )  # the real one takes seconds, and refuses control characters
    assert "\\u001b" not in to_html(blocks, title="t")  # nor in the data of the chart
    assert as_png(chart.spec) == b"PNG"
    assert drawn[0]["data"]["values"] == [{"a": printable(ODD), "b": 1}]


@pytest.mark.parametrize("text", ["=1+1", "@x", "+x", "-x", "\tx", "'=x", "''-x", "-1+cmd|' /C calc'!A0"])
def test_a_cell_that_a_spreadsheet_would_compute_is_text(text):
    cell = csv_cell(text)
    assert (cell[0], from_csv_cell(cell)) == ("'", printable(text))
    assert csv_text([{"=a": text}]).splitlines()[0] == "'=a"


@pytest.mark.parametrize("value", ["-1.5", "+3", "-inf", "x=1", "'x", "", "-", -1, 2.5, True, None])
def test_other_cells_stay_as_they_are(value):
    assert csv_cell(value) is value or csv_cell(value) == value
    if isinstance(value, str):
        assert from_csv_cell(value) == value


def test_cells_of_tables_are_one_line():
    assert table_lines(["a"], [["x\ny\tz"]]) == ["a", "x\\ny\\tz"]


# Files that cannot be


@pytest.fixture
def unreadable(tmp_path, monkeypatch):
    """A folder of another user: of what lies in it the system does not even tell whether it is there."""
    folder, stat = tmp_path / "theirs", os.stat
    folder.mkdir()

    def refused(path, *given, **more):
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(f"{folder}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *given, **more)

    monkeypatch.setattr(os, "stat", refused)
    return folder


LONG = "x" * 300
IMPOSSIBLE = {"long": f"{LONG}.db", "no folder": f"/dev/null/{LONG}/x.db", "a device": "/dev/zero", "NUL": "a\0b.db"}


@pytest.mark.parametrize("name", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize(
    "words", [["show"], ["db", "check"], ["db", "query", "select 1"], ["db", "check", "--upgrade"]]
)
def test_a_database_that_cannot_be_is_one_line(tmp_path, monkeypatch, cli, name, words):
    monkeypatch.chdir(tmp_path)
    missing = words == ["show"] and name.startswith("/dev/null/")  # a layer that is not there is no fault
    said = cli([*words, "--db", name], code=0 if missing else 2)
    assert missing or len(said.err.splitlines()) == 1


@pytest.mark.parametrize("kernel", ["/etc/x.py:K", "../tables/*", "**", "soft*", "[s]oftmax", LONG])
def test_a_kernel_that_a_filter_names_is_no_pattern_of_files(home, cli, kernel):
    assert cli(["show", kernel, "--json"]).json["entries"] == []


def test_a_pipe_is_no_file_of_ours_and_nobody_waits_for_it(home, cli):
    os.mkfifo(home / "pipe")
    for words in (
        ["show", "--db"],
        ["db", "check", "--db"],
        ["db", "check", "--upgrade", "--db"],
        ["db", "backup", "--force"],
    ):
        assert "no regular file" in cli([*words, str(home / "pipe")], code=2).err
    with pytest.raises(ConfigError, match="not a regular file"):
        bundle.read_bundle(home / "pipe")
    with pytest.raises(ConfigError, match=r"^\S+pipe is not a file, and settings are read from it"):
        config.load_settings(environ={}, project=home / "pipe", user=home / "none")
    assert (read_bounded(home / "pipe"), (home / "pipe").is_fifo()) == (b"", True)  # nobody writes to it


def test_layers_in_another_users_home_are_left_out(unreadable, monkeypatch, caplog, cli):
    monkeypatch.setenv("HOME", str(unreadable))
    for name in ("TILEDSCHED_DB", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    settings = config.load_settings()
    assert settings.sources == {}
    assert {entry.layer for entry in entries.load_entries(settings, archs=["sm_90"])} == {"shipped"}
    assert lacking(caplog.text, "Permission denied", "left out") == []
    for words in (["show"], ["db", "check"]):  # which name it
        assert "Permission denied" in cli([*words, "--db", str(unreadable / "x.db")], code=2).err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('cache = "planted"', "does not choose what code runs; set TILEDSCHED_CACHE"),
        ('db = "a\\u0000b"', "holds a NUL"),
        ('site = "x\\u0000"', "holds a NUL"),
    ],
)
def test_a_file_in_the_working_directory_that_must_not_be_read_is_said(tmp_path, monkeypatch, cli, text, words):
    (tmp_path / "tiledsched.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert words in cli(["db", "check"], code=2).err


def test_links_in_a_circle_and_names_that_cannot_be_are_one_line(tmp_path, monkeypatch, cli):
    loop = tmp_path / "loop.py"
    loop.symlink_to("loop.py")
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("TILEDSCHED_FLEET_JOBS", f"{loop},{loop}/x.py")
    for name in (f"{loop}/k.py:K", "a\0b.py:K"):
        with pytest.raises(ConfigError, match="data does not choose what code runs"):
            registry.kernel_of_data(name, "a row")
    assert TuneOptions(space=str(loop)).to_json()["space"] == str(loop)
    for words in (["check", f"{loop}:K"], ["explain", "--space", str(loop), "--arch", "sm_90"]):
        assert len(cli(words, code=2).err.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["db", "query", "select 1", "--timeout"], ["fleet", "work", "--wait"], ["tune", "-p", "S=1", "--budget"]]
)
def test_seconds_are_numbers_that_clocks_take(home, cli, words):
    for seconds in ("nan", "-1", "-inf", "x"):
        assert f"Invalid value for '{words[-1]}'" in cli([*words, seconds], code=2).err
    if words[0] == "db":
        assert [main([*words, seconds]) for seconds in ("inf", "1e300", "60")] == [0, 0, 0]


def test_a_working_directory_that_is_gone_is_said(tmp_path, monkeypatch, cli):
    """There `multiprocessing` starts nothing."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    why = "tiledsched: the folder that this was called in is gone; change to one that is there\n"
    assert cli(["doctor"], code=2).err == why
    monkeypatch.syspath_prepend("")
    task = BuildTask(kernel="softmax", schedule=Schedule({}), problem=problem.Problem("softmax", {}), arch="sm_90")
    with BuildPool(1) as pool:
        for use in (pool.start, lambda: pool.submit(task)):
            with pytest.raises(CompilerError, match=r"cannot start compile processes.*folder must still be there"):
                use()
    assert str(tmp_path) not in processes.child_environment()["PYTHONPATH"]


@pytest.mark.parametrize("output", ["/dev/full", None], ids=["full", "closed"])
def test_output_that_cannot_be_written_is_one_line(monkeypatch, cli, output):
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(sys, "stdout", output and stack.enter_context(open(output, "w", buffering=1)))
        monkeypatch.setattr("tiledsched.cli._drop", lambda stream: None)
        assert cli(["--version"], code=2).err.startswith(
            ("tiledsched: cannot write to", "tiledsched: standard output is")
        )
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stack.close()


@pytest.mark.parametrize(
    "data",
    [b"\xff\n", b"x" * 200_000 + b"\n", b'"' + b"a," * 100_000 + b"\n", b"method,a\nx\n", b"a\0b\n1\n", None],
    ids=["not UTF-8", "a long name", "an open quote", "no cells", "NUL", "a pipe"],
)
@pytest.mark.parametrize("words", [["bench", "--summary"], ["compare", "shipped"]], ids=lambda words: words[0])
def test_rows_that_nobody_wrote_are_one_line(tmp_path, capsys, words, data):
    path = tmp_path / "schedules.csv"
    path.write_bytes(data) if data is not None else os.mkfifo(path)
    code, said = main([*words, str(path)]), capsys.readouterr()
    if data is None and words[0] == "bench":  # nobody waits for who might write
        assert (code, said.out) == (0, "No rows.\n")
    else:
        assert (code, "schedules.csv" in said.err, len(said.err.splitlines())) == (2, True, 1)


@pytest.mark.parametrize(
    "closed",
    [pytest.param("2>&-", marks=pytest.mark.slow), pytest.param("2>/dev/full", marks=pytest.mark.slow), ">&- 2>&-"],
)
def test_a_command_ends_as_usual_where_nobody_reads_its_errors(tmp_path, closed):
    """Nor does what they would have read stand in the result."""
    for words, code in (["show", "--nope"], 2), (["explain", "softmax", "--json"], 2 if closed.startswith(">") else 0):
        command = [sys.executable, "-m", "tiledsched", *words]
        shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
        environment = {**os.environ, "TILEDSCHED_DB": str(tmp_path / "none.db"), "PYTHONUNBUFFERED": ""}
        done = subprocess.run(shell, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert not done.stdout or json.loads(done.stdout)


# Nothing is left behind


def test_what_unpacks_to_too_much_is_refused_before_it_takes_twice_the_limit(monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 1 << 16)
    bomb = lzma.compress(bytes(64 << 20), preset=0)
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match="larger than 8 MiB"):
            files.unpacked(bomb, 8 << 20)
        assert tracemalloc.get_traced_memory()[1] < 9 << 20
    finally:
        tracemalloc.stop()
    for size in (0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1 << 18):
        packed = lzma.compress(bytes(size))
        assert files.unpacked(packed) == bytes(size)
        for cut in (packed[:-1], packed[: len(packed) // 2], b""):
            with pytest.raises(EOFError):
                files.unpacked(cut)


def test_a_backup_that_fails_leaves_nothing(home):
    """A copy larger than SQLite's cache has a journal, which SQLite cannot roll back where no more may be written."""
    with contextlib.closing(sqlite3.connect(home / "tuning.db")) as connection:
        connection.execute("CREATE TABLE big AS SELECT zeroblob(1000000) FROM (VALUES (1), (2), (3), (4))")
        connection.commit()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with db.TuningDB.open(home / "tuning.db", read_only=True) as opened:
        before = set(home.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            with pytest.raises(DatabaseError, match="cannot write"):
                opened.back_up(home / "copy.db")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert set(home.iterdir()) == before


@pytest.fixture
def killed(tmp_path, monkeypatch, python):
    """Run a program that kills itself: of what it leaves in its folder for temporary files the next command leaves nothing."""
    for name in ("TILEDSCHED_DB", "CUDA_TILE_TEMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    folders = {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path), "TILEDSCHED_CACHE": str(tmp_path / "cache")}

    def run(code, **more):
        python(f"import os, signal, sys\n{code}", code=-signal.SIGKILL, **folders, **more)
        python("from tiledsched.cli import main\nmain(['--version'])", **folders, **more)
        assert list((tmp_path / "tmp").iterdir()) == []

    return run


@pytest.mark.parametrize("named", [False, True])
def test_a_compile_process_has_all_files_of_cutile_in_its_folder(tmp_path, killed, named):
    """Also where a script imported cuTile before: the folder that this made is gone, one that the user named stays."""
    (tmp_path / "own").mkdir()
    theirs = tmp_path / "named"
    killed(
        f"""
import cuda.tile
from cuda.tile._cext import default_tile_context
from tiledsched.build.pool import start_process
start_process({str(tmp_path / "own")!r}, os.getppid())
assert default_tile_context.config.temp_dir == {str(tmp_path / "own")!r}
os.kill(os.getpid(), signal.SIGKILL)
""",
        CUDA_TILE_TEMP_DIR=str(theirs) if named else "",
    )
    assert theirs.exists() is named


def test_a_warmup_that_is_killed_leaves_nothing(tmp_path, killed):
    killed(
        """
from tiledsched.cli import main
from tiledsched.serve import entries
entries.load_table = lambda *given, **more: (sys.modules["cuda.tile"], os.kill(os.getpid(), signal.SIGKILL))
main(["warmup", "softmax", "--arch", "sm_90", "-o", "b.zip"])
"""
    )
    assert [each.name for each in tmp_path.iterdir()] == ["tmp"]
