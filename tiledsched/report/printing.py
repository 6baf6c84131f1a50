"""Prints a report's page to a PDF with a browser that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tiledsched.core.errors import ConfigError
from tiledsched.core.files import OwnFolder, partial_path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge")
MISSING = (
    f"none of {', '.join(BROWSERS)} is on PATH; install Chromium, or open the page in a browser and print it there"
)
TIMEOUT_S = 120
DRAWING_MS = 20_000
"""Time that the page has to draw its charts, by its own clock, which runs fast."""


def print_page(page: Path) -> Path:
    """Print a page with all of its charts to a PDF beside it, in its print style; returns the file.

    Raises:
        ConfigError: no browser is installed, or it fails.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ConfigError(MISSING)
    file = page.with_suffix(".pdf")
    printed = partial_path(file.resolve())
    with OwnFolder() as profile:
        flags = [
            "--headless",
            "--disable-gpu",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # as root Chromium starts in no other way
            f"--user-data-dir={profile}",
            "--no-pdf-header-footer",
            "--window-size=1240,1754",
            f"--virtual-time-budget={DRAWING_MS}",
            f"--print-to-pdf={printed}",
        ]
        try:
            done = subprocess.run(
                [browser, *flags, f"{page.resolve().as_uri()}?all"], capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{browser} could not print {page}: {error}; print it from a browser") from error
    try:
        os.replace(printed, file)  # not before it is whole: what was there stays
    except OSError as error:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1][:200]
        raise ConfigError(f"{browser} could not print {page}: {why}; print it from a browser") from error
    return file
