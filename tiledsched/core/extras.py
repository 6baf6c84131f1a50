"""The command that installs the packages of an optional extra, and the versions of installed packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from tiledsched.core.errors import MissingPackageError

NAME = "tiledsched"
EXTRAS = {
    **dict.fromkeys(("torch", "cupy", "pynvml"), "gpu"),
    "vl_convert": "report",
    "ray": "fleet",
    "psycopg": "postgresql",
    **{name: name for name in ("transformers", "diffusers", "kernels")},
    "cuda": "",
}
"""Package that may be missing -> the extra that installs it; empty for this package alone."""


def installing(*extras: str) -> str:
    """The command that adds extras to this installation, e.g. `pip install -e '/home/me/tiledsched[report]'` in a checkout.

    Args:
        extras: those of pyproject.toml; none, or an empty one, for the package alone.
    """
    words = f"[{','.join(extras)}]" if any(extras) else ""
    source = _source()
    address = str(source.get("url", ""))
    if "vcs_info" in source:
        return f"pip install '{NAME}{words} @ {source['vcs_info']['vcs']}+{address}'"
    if "dir_info" in source and address.startswith("file:"):
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(address).path)}{words}'"
    if address:
        return f"pip install '{NAME}{words} @ {address}'"
    return f"pip install '{NAME}{words}'"


@contextmanager
def required() -> Iterator[None]:
    """Within the block, an import that fails says what to install. Also decorates functions.

    Raises:
        MissingPackageError: a package is not installed, or cannot be imported.
    """
    try:
        yield
    except MissingPackageError:
        raise
    except ImportError as error:
        raise missing(error) from error


def missing(error: ImportError) -> MissingPackageError:
    """The error for a package of this one whose import failed, with the command that installs it."""
    name = str(error.name or "a package")
    why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
    return MissingPackageError(f"{name} {why}; run: {installing(EXTRAS.get(name.partition('.')[0], ''))}")


def remedy(error: ImportError) -> str:
    """What to do where a user's module cannot import another one."""
    root = str(error.name).partition(".")[0]
    return f"run: {installing(EXTRAS[root])}" if root in EXTRAS else f"install {root}, or correct the import"


def package_version(name: str) -> str:
    """Installed version of a distribution, or an empty string."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _source() -> dict[str, Any]:
    """Where pip installed this package from, as pip recorded it (PEP 610); empty for a package index or another installer."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow, and only asked for advice

    try:
        found = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
