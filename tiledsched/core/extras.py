"""The command that installs the packages of an optional extra, and the versions of installed packages."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "tiledsched"


def installing(*extras: str) -> str:
    """The command that adds extras to this installation, e.g. `pip install -e '/home/me/tiledsched[report]'` in a checkout.

    Args:
        extras: those of pyproject.toml; none for the package alone.
    """
    words = f"[{','.join(extras)}]" if extras else ""
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
