"""The pictures of the report in the documentation: `python -m docs.studies.screenshots [docs/images]`.

It writes the reports from what ships and from an empty database, opens them in Chromium and photographs the first screens.
The words and numbers of that screen are kept in the picture's description, so that a test can tell whether it is still true.
It needs `pip install -e '.[dev]'` and Chromium (`apt-get install chromium`); the last picture also compiles 24 programs.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLE = "docs/examples/tilegym_softmax.py:Softmax"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture."""

    name: str
    """Its file, without the ending."""
    command: tuple[str, ...]
    """The command that writes the page, without its folder."""
    width: int
    height: int
    scheme: str
    """light or dark."""


def _of(name: str, arch: str, width: int, height: int, scheme: str, kernel: str = "attention") -> Picture:
    command = ("report", kernel, "--arch", arch, "-o")
    return Picture(name=name, command=command, width=width, height=height, scheme=scheme)


PICTURES = (
    _of("report_sm_90", "sm_90", 1280, 1000, "light"),
    _of("report_sm_90_narrow", "sm_90", 400, 1400, "dark"),
    _of("report_sm_121", "sm_121", 1280, 1000, "light"),
    _of("report_sm_121_dark", "sm_121", 1280, 1000, "dark"),
    _of("report_both", "sm_90,sm_121", 1280, 1100, "light"),
    _of("report_both_narrow", "sm_90,sm_121", 400, 1400, "light"),
    _of("report_matmul", "sm_90", 1280, 1000, "light", "matmul"),
    Picture(
        name="report_stranger",
        command=("tune", EXAMPLE, "--arch", "sm_121", "--runner", "none", "--trials", "24", "--report"),
        width=1280,
        height=1000,
        scheme="dark",
    ),
)
"""The README's picture first."""


FIRST_WORDS = (
    ".explorer .measured, .explorer .warning, .next, h1, .facts dt, .facts b, .lead, .view:not(.empty) .chart svg text"
)
"""What the first screen says: the source, the title, the answer, and the views of one problem."""


def photograph(browser: Any, page_file: Path, picture: Picture) -> tuple[bytes, str]:
    """The first screen of a page, as PNG, and its words and numbers."""
    page = browser.new_page(viewport={"width": picture.width, "height": picture.height}, color_scheme=picture.scheme)
    page.goto(page_file.as_uri())
    seen = "[...document.querySelectorAll('.view:not(.empty) .chart, .chart[data-spec]')]"
    page.wait_for_function(
        f"{seen}.every(each => each.getBoundingClientRect().top > innerHeight || each.dataset.drawn)"
    )
    taken = page.screenshot()
    words = "\n".join(page.locator(FIRST_WORDS).all_text_contents()[:40])
    page.close()
    return taken, words


def described(picture: Path) -> str:
    """The words and numbers of the screen that a picture shows."""
    from PIL import Image

    with Image.open(picture) as image:
        return str(image.info["Description"])


def write_page(picture: Picture, folder: Path) -> Path:
    """The page of a picture, written from an empty home and database."""
    home = {"HOME": str(folder / "home"), "TILEDSCHED_DB": str(folder / "none.db")}
    out = folder / "-".join(picture.command[1:4]).replace("/", "_").replace(":", "_")
    if not out.exists():
        command = [sys.executable, "-m", "tiledsched", *picture.command, str(out)]
        subprocess.run(command, check=True, env={**os.environ, **home}, stdout=subprocess.DEVNULL)
    return out / "report.html"


def main(target: Path, wanted: list[str]) -> None:
    """Take the pictures named, or all, and write them to a folder."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES:
            if not wanted or picture.name in wanted:
                file = target / f"{picture.name}.png"
                taken, words = photograph(browser, write_page(picture, Path(folder)), picture)
                text = PngInfo()
                text.add_itxt("Description", words)
                Image.open(io.BytesIO(taken)).save(file, pnginfo=text, optimize=True)
                print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"), sys.argv[2:])
