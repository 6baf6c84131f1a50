"""Settings: flags beat environment variables (`TILEDSCHED_*`), which beat the project's TOML, which beats the user's.

The project's file is `tiledsched.toml` in the working directory; the user's is `config.toml` in the user's configuration
directory. Both hold the setting names of :data:`SETTINGS` as top-level keys, and knob overrides in a table `[knobs]`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from tiledsched.errors import ConfigError
from tiledsched.schedule import KnobValue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "TILEDSCHED_"
PROJECT_FILE = "tiledsched.toml"
SETTINGS: dict[str, tuple[str, ...] | None] = {
    "db": None,
    "cache": None,
    "fallback": ("torch", "error"),
    "regime": ("burst", "sustained"),
    "accum_mode": ("fp32", "fp16"),
}
"""Every setting and its allowed values; None means free text."""
KNOBS: dict[str, type] = {
    "tile_m": int, "tile_n": int, "latency_k": int, "latency_v": int, "occupancy": int, "opt_level": int,
    "num_ctas": int, "num_worker_warps": int, "loop_split": bool, "block_order": str, "persistent": str,
    "kv_direction": str, "q_subtiles": int, "kv_subtiles": int, "qk_ahead": bool, "k_load": str, "tma_loads": bool,
    "tma_store": bool, "check_bounds": bool, "division": str, "lazy_rescale": bool,
}  # fmt: skip
"""Knobs that can be forced at serve time, `TILEDSCHED_TILE_M=128` and so on. accum_mode is a setting of its own."""
OTHER_VARIABLES = ("TILEDSCHED_WORKER_KEY", "TILEDSCHED_TEST_POSTGRESQL")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Resolved settings, and where each came from."""

    db: str | None = None
    """Database URL or path; None for the user data directory."""
    cache: str | None = None
    """Folder for built artifacts; None for the user cache directory."""
    fallback: str = "torch"
    """What `sdpa` does with inputs its kernel cannot serve: torch's attention, or an error."""
    regime: str = "burst"
    """Whose winner is served."""
    accum_mode: str = "fp32"
    """Accuracy class served."""
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)
    """Knobs forced on every schedule served."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Setting or knob name -> where its value was read; absent for defaults."""


def load_settings(flags: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None,
                  project: Path | None = None, user: Path | None = None) -> Settings:  # fmt: skip
    """Settings from every source.

    Args:
        flags: highest priority; None values are skipped.
        environ: os.environ unless given.
        project: project file; ./tiledsched.toml unless given.
        user: user file; config.toml in the user configuration directory unless given.

    Raises:
        ConfigError: unknown name or value; the message says where it stands and what is allowed.
    """
    environ = os.environ if environ is None else environ
    user = user or Path(platformdirs.user_config_dir("tiledsched")) / "config.toml"
    project = project or Path(PROJECT_FILE)
    values: dict[str, Any] = {}
    knobs: dict[str, KnobValue] = {}
    sources: dict[str, str] = {}

    def take(name: str, value: Any, where: str) -> None:
        if name in KNOBS:
            knobs[name] = _knob_value(name, value, where)
        elif name in SETTINGS:
            allowed = SETTINGS[name]
            if not isinstance(value, str) or (allowed and value not in allowed):
                raise ConfigError(f"{where}: {name} = {value!r}; allowed: {', '.join(allowed or ('any text',))}")
            values[name] = value
        else:
            known = ", ".join([*SETTINGS, *KNOBS])
            raise ConfigError(f"{where}: unknown setting {name!r}; known are {known}")
        sources[name] = where

    for path in (user, project):
        for name, value in _read_toml(path).items():
            take(name, value, str(path))
    for variable, text in environ.items():
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and text != "":
            take(variable.removeprefix(PREFIX).lower(), text, variable)
    for name, value in (flags or {}).items():
        if value is not None:
            take(name, value, f"--{name.replace('_', '-')}")
    return Settings(**values, knobs=knobs, sources=sources)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    knobs = table.pop("knobs", {})
    if not isinstance(knobs, dict):
        raise ConfigError(f"{path}: 'knobs' must be a table of knob names and values")
    return {**table, **knobs}


def _knob_value(name: str, value: Any, where: str) -> KnobValue:
    kind = KNOBS[name]
    if isinstance(value, str) and kind is bool:
        lowered = value.lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
    elif isinstance(value, str) and kind is int:
        try:
            return int(value)
        except ValueError:
            pass
    elif type(value) is kind:
        return kind(value)
    words = {int: "an integer", bool: "true or false", str: "a string"}[kind]
    raise ConfigError(f"{where}: {name} must be {words}, got {value!r}")
