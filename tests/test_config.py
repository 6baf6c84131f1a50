"""Settings: where they come from, what is refused, and that the documentation lists them all."""

from __future__ import annotations

import itertools
import logging
import pwd
import re
from pathlib import Path

import pytest

from tiledsched.build.store import default_cache_folder
from tiledsched.cli import main
from tiledsched.core import config
from tiledsched.core.config import SETTINGS, configure, knob_kinds, load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import load_table
from tiledsched.store.location import database_exists, location

SERVING = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No settings but a test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("TILEDSCHED_DB", raising=False)


def test_flags_beat_environment_beats_project_beats_user(tmp_path) -> None:
    user, project = tmp_path / "user.toml", tmp_path / "project.toml"
    user.write_text("regime = 'sustained'\ndb = 'user.db'\nlog_level = 'info'\n[knobs]\ntile_m = 64\noccupancy = 1\n")
    project.write_text("db = 'project.db'\nsync = true\n[knobs]\ntile_m = 128\nloop_split = false\n")
    found = load_settings(
        {"accum_mode": None, "fallback": "error"},
        environ={"TILEDSCHED_DB": "env.db", "HOME": "/x", "TILEDSCHED_PERSISTENT": "strided"},
        project=project,
        user=user,
    )
    assert (found.regime, found.db, found.fallback, found.accum_mode) == ("sustained", "env.db", "error", "fp32")
    assert (found.sync, found.log_level) == (True, "info")
    assert found.knobs == {"tile_m": 128, "occupancy": 1, "persistent": "strided", "loop_split": False}
    assert (found.sources["tile_m"], found.sources["db"]) == (str(project), "TILEDSCHED_DB")
    assert load_settings(environ={"TILEDSCHED_SYNC": "0"}, project=project).sync is False


WRONG = [
    ({"fallback": "numpy"}, "fallback = 'numpy'; allowed: torch, error"),
    ({"regime": "tropical"}, "regime = 'tropical'; allowed: burst, sustained"),
    ({"tile_m": "big"}, "tile_m must be an integer"),
    ({"tile_m": 12.5}, "tile_m must be an integer"),
    ({"loop_split": "perhaps"}, "loop_split must be true or false"),
    ({"sync": 1.5}, "sync must be true or false"),
    ({"colour": "red"}, "unknown setting 'colour'; known are db, site, cache"),
    ({"cache": "a\0b"}, "holds a NUL"),
]


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_wrong_settings_name_the_allowed_values_and_change_nothing(values, words) -> None:
    with pytest.raises(ConfigError, match=f"^configure: .*{re.escape(words)}"):
        configure(accum_mode="fp16", **values)
    assert load_settings().accum_mode == "fp32"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings(environ={f"TILEDSCHED_{name.upper()}": str(value) for name, value in values.items()})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("= 3", "project.toml is not valid TOML"),
        ("knobs = 3", "'knobs' must be a table of knob names and values"),
        ("cache = 'here'", "names the cache, whose programs run as they are"),
    ],
)
def test_a_broken_settings_file_is_named(tmp_path, text, words) -> None:
    (tmp_path / "project.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings(environ={}, project=tmp_path / "project.toml")
    with pytest.raises(ConfigError, match="is not a file, and settings are read from it"):
        load_settings(environ={}, project=tmp_path)


def test_knobs_are_those_of_the_search_space() -> None:
    space = space_for("sm_90", Attention)
    assert set(knob_kinds()) | {"accum_mode"} >= set(space.knobs)
    assert all(type(space.knobs[name].default) is kind for name, kind in knob_kinds().items() if name in space.knobs)
    for name, knob in space.knobs.items():
        found = load_settings(environ={f"TILEDSCHED_{name.upper()}": str(knob.default)})
        assert (found.knobs.get(name) if name != "accum_mode" else found.accum_mode) == knob.default


# configure


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_blocks_of_several_threads_end_in_any_order(order) -> None:
    before = load_settings(environ={})
    blocks = [configure(regime="burst"), configure(tile_m=128), configure(regime="sustained")]
    for block in blocks:
        block.__enter__()
    for number in order:
        assert load_settings(environ={}) != before
        blocks[number].__exit__()
    assert load_settings(environ={}) == before


def test_configure_beats_the_environment_and_is_undone(monkeypatch) -> None:
    monkeypatch.setenv("TILEDSCHED_REGIME", "sustained")

    def found(**flags) -> tuple[str, dict, bool]:
        settings = load_settings(flags)
        return settings.regime, settings.knobs, settings.sync

    with configure(regime="burst", tile_m=128):
        assert (*found(), load_settings().sources["regime"]) == ("burst", {"tile_m": 128}, False, "configure")
        with configure(regime=None, sync="yes"):
            assert found() == ("sustained", {"tile_m": 128}, True)
        assert found(regime="sustained") == ("sustained", {"tile_m": 128}, False)  # a flag beats it
        assert found() == ("burst", {"tile_m": 128}, False)
    assert found() == ("sustained", {}, False)


def test_configure_stays_without_a_block_and_tells_who_watches() -> None:
    told = []
    config.watchers.append(lambda: told.append(load_settings().fallback))
    configure(fallback="error")
    assert load_settings().fallback == "error"
    configure(fallback=None)
    config.watchers.pop()
    assert told == ["error", "torch"]


@pytest.mark.parametrize("time", ["once", "and again, as if never before"])
def test_the_log_level_reaches_the_logger(time) -> None:
    pytest.importorskip("torch")
    from tiledsched.serve import process

    logger = logging.getLogger("tiledsched")
    assert (logger.level, logging.getLogger().level) == (logging.NOTSET, logging.WARNING)
    with configure(log_level="debug"):
        process.settings()
        assert logger.level == logging.DEBUG
        assert logger.hasHandlers()
    assert main(["show", "softmax", "--json", "--verbose"]) == 0
    assert logging.getLogger().level == logging.DEBUG


# The documentation


def documented() -> dict[str, str]:
    """Setting -> the row of the table in docs/serving.md."""
    rows = re.findall(r"^\|`(\w+)`\|`TILEDSCHED_(\w+)`\|(.+)\|$", SERVING, re.MULTILINE)
    assert all(name.upper() == variable for name, variable, _ in rows), rows
    return {name: text for name, _, text in rows}


def test_the_documentation_lists_every_setting_and_every_other_variable() -> None:
    assert set(documented()) == set(SETTINGS)
    for name, allowed in SETTINGS.items():
        if isinstance(allowed, tuple):
            assert re.findall(r"`([\w-]+)`", documented()[name].split(":")[0]) == list(allowed), name
    private = {"TILEDSCHED_WORKER_KEY", "TILEDSCHED_TEST_POSTGRESQL"}
    assert [name for name in config.OTHER_VARIABLES if name not in private and f"`{name}`" not in SERVING] == []


def test_a_declared_kernels_knobs_can_be_forced_and_reach_no_other_kernel() -> None:
    matmul = kernel_named("matmul")
    with configure(TILE_M=64):
        for kernel, forced in ((matmul, {"TILE_M": 64}), (Attention, {})):
            table = load_table(load_settings(), kernel=kernel, archs=("sm_90",))
            assert table.resolve(kernel.suite(next(iter(kernel.suites)))[0], "sm_90").forced == forced
    kernel_named("softmax")  # whose knob has no name in small letters, and attention's has
    set_here = {"TILEDSCHED_TILE_ROWS": "4", "TILEDSCHED_TILE_N": "64", "TILEDSCHED_TILE_M": "64"}
    assert list(load_settings(environ=set_here).knobs.items()) == [("tile_m", 64), ("tile_n", 64), ("TILE_ROWS", 4)]


def test_a_user_without_a_home_or_a_name_has_folders_that_do_not_exist(monkeypatch) -> None:
    """As in a pod. What is named is used; what is not is told where it is needed."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.undo()  # of this file's home, too
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TILEDSCHED_CACHE", "TILEDSCHED_DB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert load_settings({"db": "here.db"}, project=Path("/nonexistent/x")).db == "here.db"
    assert default_cache_folder() == Path("/nonexistent/cache/tiledsched")
    assert location(None) == "/nonexistent/data/tiledsched/tuning.db"
    assert not database_exists(None)


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ("db = 'postgresql://me:secret@host/x'", "db to a server"),
        ("db = 'postgresql+driver_in_this_folder://host/x'", "db to a server"),
        ("site = '/elsewhere/tables'", "site to a place outside its folder"),
        ("site = '../x.json'", "site to a place outside its folder"),
        ("db = '~/x.db'", "db to a place outside its folder"),
        ("db = 'sqlite:////elsewhere/x.db'", "db to a place outside its folder"),
        ("db = 'link/x.db'", "db to a place outside its folder"),
        ("capture = '/elsewhere'", "capture to a place outside its folder"),
        ("capture = '1'", ""),
        ("capture = 'notes'", ""),
        ("db = 'deep/er/x.db'", ""),
        ("db = ':memory:'", ""),
        ("regime = 'sustained'", ""),
    ],
)
def test_a_project_file_names_places_outside_its_folder_only_once_it_is_trusted(
    tmp_path, caplog, text, ignored
) -> None:
    (tmp_path / "link").symlink_to(tmp_path.parent)
    path = tmp_path / "tiledsched.toml"
    path.write_text(text)
    name, value = text.split(" = ")
    config.warn_once.cache_clear()

    def found():
        return getattr(load_settings(environ={}), name) == value.strip("'")

    assert found() == (not ignored)
    assert [f"sets {ignored}, which is ignored" in record.message for record in caplog.records] == [True] * bool(
        ignored
    )
    assert "secret" not in caplog.text
    assert (main(["trust"]), found()) == (0, True)
    path.write_text(f"{text}\nsync = true")
    assert found() == (not ignored)
    assert (main(["trust"]), main(["trust", "--revoke"]), found()) == (0, 0, not ignored)
