"""Where entries are served from: the user's database over a site's over what ships; and what a layer that is broken does."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
from store_samples import DEVICE, TOOLCHAIN, entry, measurement

from tiledsched.cli import main
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import layers, load_entries, load_table
from tiledsched.store import engine, location
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table

SHIPPED = next(
    each for each in load_entries(Settings(db="/nonexistent/x.db"), {"sm_90"}, "attention") if each.median_us
)


def put(path, us: float, **more) -> str:
    """A database with one measured entry."""
    with TuningDB.open(path) as db:
        number = db.record_measurement(None, "attention", "abc", TOOLCHAIN, measurement(us))
        db.put_entry(entry("measured", device_name=DEVICE.name, regime="burst", measurement_id=number, **more))
    return str(path)


def answers(settings: Settings) -> dict[str, float | None]:
    """Layer -> time of what it answers with."""
    return {
        each.layer: each.median_us
        for each in load_entries(settings, {"sm_100"}, "attention")
        if each.provenance == "measured"
    }


@pytest.fixture
def both(tmp_path) -> Settings:
    return Settings(db=put(tmp_path / "user.db", 100.0), site=put(tmp_path / "site.db", 90.0))


def test_the_users_own_lies_over_the_sites(both) -> None:
    assert answers(both) == {"user": 100.0}
    assert answers(Settings(db="/nonexistent/x.db", site=both.site)) == {"site": 90.0}
    assert [layer.name for layer in layers(both, {"sm_90"}, "attention")] == ["shipped", "site", "user"]


def test_the_sites_lies_over_what_ships(tmp_path) -> None:
    with TuningDB.open(tmp_path / "site.db") as db:
        db.put_entry(SHIPPED.replace(measurement=None, measurement_id=None, run_id=None, provenance="default"))
        number = db.record_measurement(
            None,
            "attention",
            "abc",
            SHIPPED.toolchain,
            measurement(1.0, problem=SHIPPED.problem, schedule=SHIPPED.schedule, fingerprint=SHIPPED.fingerprint),
        )
    settings = Settings(db="/nonexistent/x.db", site=str(tmp_path / "site.db"))

    def found():
        return {each.key: each for each in load_entries(settings, {"sm_90"}, "attention")}[SHIPPED.key]

    assert (found().layer, found().provenance) == ("shipped", "measured")  # the stronger
    with TuningDB.open(tmp_path / "site.db") as db:
        db.put_entry(SHIPPED.replace(measurement=None, measurement_id=number, run_id=None))
    assert (found().layer, found().median_us) == ("site", 1.0)


def test_a_weaker_entry_above_does_not_cover_what_was_measured_below(both) -> None:
    with sqlite3.connect(both.db) as connection:
        connection.execute("UPDATE entries SET provenance = 'modelled'")
    connection.close()
    assert answers(both) == {"site": 90.0}


def test_the_machines_shared_folder_is_looked_into(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path / 'none'}:{tmp_path / 'shared'}")
    assert location.site_location(None) is None
    put(tmp_path / "shared" / "tiledsched" / "tuning.db", 90.0)
    assert answers(Settings(db="/nonexistent/x.db")) == {"site": 90.0}
    assert location.site_location("/elsewhere") == "/elsewhere"


STATEMENTS = {
    "newer": f"UPDATE {engine.VERSION_TABLE} SET version_num = '9999'",
    "unreleased": f"ALTER TABLE {engine.VERSION_TABLE} RENAME TO {engine.UNRELEASED_TABLE}",
    "no JSON": "UPDATE problems SET dims = '{'",
    "no device of ours": "UPDATE devices SET device = '[]'",
}
HOWS = [*STATEMENTS, "gone", "a folder", "no database", "cut short", "a torn page"]


def damage(path: str, how: str) -> None:
    whole = Path(path).read_bytes()
    if how in STATEMENTS:
        with sqlite3.connect(path) as connection:
            connection.execute(STATEMENTS[how])
        connection.close()
        return
    os.remove(path)
    if how == "a folder":
        os.mkdir(path)
    elif how != "gone":
        pages = [whole[place : place + 4096] for place in range(0, len(whole), 4096)]
        torn = b"".join([pages[0], *(page[:100] + os.urandom(3000) + page[3100:] for page in pages[1:])])
        left = {"no database": b"hello", "cut short": whole[: len(whole) // 3], "a torn page": torn}
        Path(path).write_bytes(left[how])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("which", ["db", "site"])
def test_a_layer_that_cannot_be_read_is_left_out_and_the_others_serve_on(both, caplog, which, how) -> None:
    broken = getattr(both, which)
    damage(broken, how)
    other = {"site": 90.0} if which == "db" else {"user": 100.0}
    assert answers(both) == other
    if (which, how) != ("db", "gone"):  # a user need not have one
        (record,) = caplog.records
        assert broken in record.message
        assert record.message.endswith(
            "`tiledsched db check` names them" if how in ("no JSON", "no device of ours") else "it is left out"
        )
    served = load_table(both, kernel=Attention, archs={"sm_90"}).resolve(SHIPPED.problem, "sm_90", SHIPPED.device_name)
    whole = space_for("sm_90", Attention).complete(SHIPPED.schedule)  # with a default for each knob that is younger
    assert (served.entry.layer, served.schedule) == ("shipped", whole)


@pytest.mark.parametrize("how", [how for how in HOWS if how != "gone"])
@pytest.mark.parametrize(
    "command",
    [
        ["show", "--layers"],
        ["db", "check"],
        ["db", "query", "select * from entries"],
        ["db", "export"],
        ["doctor"],
        ["db", "backup", "copy.db"],
    ],
)
def test_no_command_fails_with_a_traceback_on_a_broken_database(
    both, monkeypatch, tmp_path, capsys, how, command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEDSCHED_DB", both.db)
    damage(both.db, how)
    assert main(command) in (0, 1, 2)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.out or said.err
    assert "the check itself failed" not in said.out


def test_show_says_which_layer_answers(both, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TILEDSCHED_DB", both.db)
    monkeypatch.setenv("TILEDSCHED_SITE", both.site)
    assert load_settings().site == both.site
    show = ["show", "attention", "--device", DEVICE.name, "--compiler", TOOLCHAIN.tileiras]
    assert main([*show, "--layers"]) == 0
    out = capsys.readouterr().out
    assert f"user: {both.db}, 1 entry" in out
    assert f"site: {both.site}, 1 entry" in out
    assert "measured, 100.0 us (also in site)" in out
    assert main([*show, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in found["layers"]] == ["shipped", "site", "user"]
    assert [(row["layer"], row["covers"]) for row in found["entries"]] == [("user", ["site"])]


def test_a_site_may_be_a_table_or_a_folder_of_tables(tmp_path) -> None:
    def site(name="site"):
        found = layers(Settings(db="/nonexistent/x.db", site=str(tmp_path / name)), ())[1]
        assert found.name == "site"
        return [each.median_us for each in found.entries], found.error

    (tmp_path / "site" / "attention").mkdir(parents=True)
    assert "no table is in it; `tiledsched db export` writes one" in site()[1]
    with TuningDB.open(put(tmp_path / "a.db", 90.0)) as db:
        export_table(db, tmp_path / "site" / "attention" / "sm_100.json.xz")
        export_table(db, tmp_path / "one.json")
    assert site() == site("one.json") == ([90.0], "")
    assert "layer" not in json.loads((tmp_path / "one.json").read_text())["entries"][0]
    (tmp_path / "site" / "two.json").write_text("{")
    assert (site()[0], "two.json" in site()[1]) == ([90.0], True)  # what is damaged hides nothing else
