"""Settings: flags beat `configure`, which beats environment variables (`TILEDSCHED_*`), which beat TOML files.

Of those the project's, `tiledsched.toml` in the working directory, beats the user's, `config.toml` in the user's
configuration directory. Until the user trusts it (:mod:`tiledsched.core.trust`), a project's file names no servers, and no places
outside its folder. Both hold the setting names of :data:`SETTINGS` as top-level keys, and knob overrides in a table `[knobs]`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiledsched.core import data_files, trust
from tiledsched.core.errors import ConfigError, did_you_mean
from tiledsched.core.files import kind_of_file, read_toml, user_folder
from tiledsched.core.schedule import KnobValue

log = logging.getLogger("tiledsched")
"""Where every part of the package says what people may want to know."""
PREFIX = "TILEDSCHED_"
PROJECT_FILE = "tiledsched.toml"
SETTINGS: dict[str, tuple[str, ...] | type] = {
    "db": str,
    "site": str,
    "cache": str,
    "fallback": ("torch", "error"),
    "regime": ("burst", "sustained", "graph", "graph-cold"),
    "accum_mode": ("fp32", "fp16"),
    "numerics": ("any", "invariant"),
    "rivals": ("serve", "record", "off"),
    "compile": ("background", "wait"),
    "sync": bool,
    "gpu_wait": int,
    "capture": str,
    "remember": ("on", "new", "off"),
    "masks": ("auto", "own", "torch"),
    "log_level": ("debug", "info", "warning", "error"),
}
"""Every setting and its allowed values, or their type where any will do. docs/serving.md has the same list."""
EXACT, INVARIANT = "fp32", "invariant"
"""Classes of schedules, as entries have them in `accum_mode`: the accuracy class that may be served for any other, and what is
chosen so that the bits of a row do not depend on the number of rows; its accumulators are exact."""
TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""How text says true and false."""
OTHER_VARIABLES = (
    "TILEDSCHED_WORKER_KEY",
    "TILEDSCHED_TEST_POSTGRESQL",
    "TILEDSCHED_BUNDLE",
    "TILEDSCHED_GPU_LABEL",
    "TILEDSCHED_FLEET_JOBS",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Resolved settings, and where each came from."""

    db: str | None = None
    """Database URL or path; None for the user data directory."""
    site: str | None = None
    """Path or URL of a database or table that many users read beneath their own; None for that of the machine, if it has one."""
    cache: str | None = None
    """Folder for built artifacts; None for the user cache directory."""
    fallback: str = "torch"
    """What `sdpa` does with inputs that its kernel cannot serve: torch computes them, or an error is raised."""
    regime: str = "burst"
    """The regime whose winner is served. Calls that a CUDA graph captures take winners of graph or graph-cold, where there are
    any."""
    accum_mode: str = "fp32"
    """The accuracy class that is served."""
    numerics: str = "any"
    """any: the fastest right schedule of each problem is served; invariant: one order of sums for all sizes of a kernel's batch
    dims, so that the bits of a row do not depend on how many rows are computed with it."""
    rivals: str = "serve"
    """serve: a tune times rivals, and faster ones serve; record: a tune times them only; off: neither."""
    compile: str = "background"
    """What a call does whose program has yet to be compiled. background: torch computes it, where it can, and another process
    compiles; wait: the call waits."""
    sync: bool = False
    """Whether `sdpa` waits for each launch, so that an error names the call that caused it."""
    gpu_wait: int | None = None
    """Seconds to wait for a GPU on which another process measures; None for as long as it takes, 0 for not at all."""
    capture: str = ""
    """Where the problems that are served are noted: a folder, 1 for the folder `seen` beside the database, or nowhere."""
    remember: str = "on"
    """What :func:`tiledsched.exhaustive_search` does with stored results. on: it answers from them and adds to them; new: it
    measures again and replaces them; off: it neither reads nor stores any."""
    masks: str = "auto"
    """What computes `sdpa` with a mask tensor or dropout. torch: torch's attention; own: our kernel; auto: our kernel for mask
    tensors where it was measured to be faster, and torch for the rest."""
    log_level: str | None = None
    """Least level of messages that the logger `tiledsched` prints to stderr; None leaves logging to the program."""
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)
    """Knobs that are forced on every schedule served."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Setting or knob -> where its value was read; settings at their defaults are absent."""

    @property
    def schedule_class(self) -> str:
        """What entries must be of to be served: the accuracy class, or `invariant`."""
        return INVARIANT if self.numerics == INVARIANT else self.accum_mode


_configured: dict[str, Any] = {}
watchers: list[Callable[[], None]] = []
"""Functions that are called after `configure` has changed something, so that caches that depend on settings are cleared."""


class CalledFirst(type):
    """The class of context managers that say so where they are used without being called."""

    def __enter__(cls) -> None:
        raise ConfigError(f"{cls.__name__} is called first; write: with tiledsched.{cls.__name__}():")

    def __exit__(cls, *error: object) -> None: ...


def take_off(holding: list[Any], change: Any) -> bool:
    """Take a change that ends off the list of those that hold, in whatever order they end. Whether it was the latest, so that
    what was before it is put back; else the next later one takes over what was before."""
    place = holding.index(change)
    del holding[place]
    if place < len(holding):
        holding[place]._before = change._before
    return place == len(holding)


_entered: list[configure] = []
"""Blocks of `configure` that hold, the latest last; those of several threads end in any order."""


class configure(metaclass=CalledFirst):  # noqa: N801
    """Set settings and knobs for this process: at once, and until the end of the block where used as a context manager.

    `configure(regime="sustained")` stays; `with configure(tile_m=128, tile_n=64): ...` is undone at the end of the block. None
    resets a setting to what the environment and the files say. Settings hold for all threads.

    Raises:
        ConfigError: a name or value is unknown. Nothing is changed.
    """

    def __init__(self, **values: Any) -> None:
        self._before = dict(_configured)
        after = {name: value for name, value in (_configured | values).items() if value is not None}
        for name, value in after.items():
            check_setting(name, value, "configure")
        _replace_configured(after)

    def __enter__(self) -> None:
        _entered.append(self)

    def __exit__(self, *error: object) -> None:
        if take_off(_entered, self):
            _replace_configured(self._before)


def _replace_configured(values: Mapping[str, Any]) -> None:
    _configured.clear()
    _configured.update(values)
    for watcher in watchers:
        watcher()


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    project: Path | None = None,
    user: Path | None = None,
) -> Settings:
    """The settings from all sources.

    Args:
        flags: settings of the highest priority; None values are skipped.
        environ: environment variables; os.environ unless given.
        project: project file; ./tiledsched.toml unless given.
        user: user file; config.toml in the user configuration directory unless given.

    Raises:
        ConfigError: a name or value is unknown. The message says where it stands and what is allowed.
    """
    environ = os.environ if environ is None else environ
    user = user or user_folder("config") / "config.toml"
    project = project or Path(PROJECT_FILE)
    values: dict[str, Any] = {}
    knobs: dict[str, KnobValue] = {}
    sources: dict[str, str] = {}

    def take(name: str, value: Any, where: str) -> None:
        (values if name in SETTINGS else knobs)[name] = check_setting(name, value, where)
        sources[name] = where

    for path in (user, project):
        for name, value in _read_toml(path).items():
            if name == "cache" and path == project:
                raise ConfigError(
                    f"{path} names the cache, whose programs run as they are, and a file that lies in the working directory "
                    f"does not choose what code runs; set {PREFIX}CACHE, or write it into {user}"
                )
            value = check_setting(name, value, str(path))
            if path == project and (what := trust.outside(name, value, path)) and not trust.is_trusted(path):
                warn_once(
                    f"{path} sets {name} to {what}, which is ignored until you trust it as it is: `tiledsched trust`, or set "
                    f"{PREFIX}{name.upper()}"
                )
                continue
            take(name, value, str(path))
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and text != "":
            name = variable.removeprefix(PREFIX)
            is_lower = name.lower() in SETTINGS or name.lower() in knob_kinds() or name not in knob_kinds()
            take(name.lower() if is_lower else name, text, variable)
    for name, value in _configured.items():
        take(name, value, "configure")
    for name, value in (flags or {}).items():
        if value is not None:
            take(name, value, f"--{name.replace('_', '-')}")
    return Settings(**values, knobs=knobs, sources=sources)


@functools.cache
def warn_once(message: str) -> None:
    """Warn of something, once in the life of this process."""
    log.warning("%s", message)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        kind = kind_of_file(path)
        table = read_toml(path) if kind == "file" else {}
    except (FileNotFoundError, PermissionError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; remove it or make it readable") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct the file") from error
    if kind not in ("", "file"):
        raise ConfigError(f"{path} is not a file, and settings are read from it; remove or rename it")
    knobs = table.pop("knobs", {})
    if not isinstance(knobs, dict):
        raise ConfigError(f"{path}: 'knobs' must be a table of knob names and values")
    return {**table, **knobs}


def knob_kinds() -> Mapping[str, type]:
    """Knobs that can be forced when a schedule is served, as in `TILEDSCHED_TILE_M=128`, and the types of their values.

    They are the knobs of every shipped search-space file and of every kernel that this process knows, except accum_mode, which is
    a setting.
    """
    from tiledsched.core.registry import known_kernels

    declared = {name: type(knob.default) for kernel in known_kernels() for name, knob in kernel.knob_fields().items()}
    return {**declared, **file_knobs()}


@functools.cache
def file_knobs() -> Mapping[str, type]:
    """The knobs of kernels whose search space is in files only, and the types of their values."""
    files = sorted(data_files.search_spaces().glob("*/base.toml"))
    tables = [read_toml(path)["knobs"] for path in files]
    return {name: type(knob["default"]) for table in tables for name, knob in table.items() if name not in SETTINGS}


def check_setting(name: str, value: Any, where: str) -> Any:
    """The value of a setting or knob, converted to its type. Text is read as in an environment variable.

    Args:
        name: a key of :data:`SETTINGS` or :func:`knob_kinds`.
        value: a value of its type, or text.
        where: the place of the value, for the error message.

    Raises:
        ConfigError: the name is unknown, or the value is not allowed. The message says what is allowed.
    """
    allowed = SETTINGS.get(name) or knob_kinds().get(name)
    if allowed is None:
        known = [*SETTINGS, *knob_kinds()]
        raise ConfigError(f"{where}: unknown setting {name!r}; known are {', '.join(known)}{did_you_mean(name, known)}")
    if isinstance(allowed, type):
        return _read_value(name, value, allowed, where)
    if value not in allowed:
        raise ConfigError(f"{where}: {name} = {value!r}; allowed: {', '.join(allowed)}{did_you_mean(value, allowed)}")
    return value


def _read_value(name: str, value: Any, kind: type, where: str) -> KnobValue:
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(
            f"{where}: {name} = {value!r} holds a NUL, which no name of a file and no knob has; take it out"
        )
    if name == "capture" and isinstance(value, (bool, os.PathLike)):
        value = os.fspath(value) if isinstance(value, os.PathLike) else str(int(value))
    if type(value) is kind:
        return kind(value)
    if isinstance(value, str) and kind is bool and value.lower() in TRUTHS:
        return TRUTHS[value.lower()]
    if isinstance(value, str) and kind is int:
        with contextlib.suppress(ValueError):
            return int(value)
    words = {int: "an integer", bool: "true or false", str: "a string"}[kind]
    raise ConfigError(f"{where}: {name} must be {words}, got {value!r}")
