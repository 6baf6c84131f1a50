"""Where the shipped data lies: the checkout's own copy when run from one, else the copy inside the wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def _folder(name: str) -> Path:
    checkout = PACKAGE.parent / name
    return checkout if (PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir() else PACKAGE / "_data" / name


def search_spaces() -> Path:
    """The folder of search-space TOML files."""
    return _folder("search_spaces")


def tuning_db() -> Path:
    """The folder of migrations, shipped tables and recorded landscapes."""
    return _folder("tuning_db")
