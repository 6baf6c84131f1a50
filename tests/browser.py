"""Opens pages in a real browser: Debian's Chromium, driven by Playwright. Tests that need it are skipped where it is missing."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser():
    """A headless browser, one for all tests of a file."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with driver.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def opened(browser, path, *, width=1280, scheme="light"):
    """A page with every fold open and every chart drawn; fails where the page raised an error or a chart was not drawn."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.route("http*://**", lambda route: (errors.append(route.request.url), route.abort()))
    try:
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        draw_all(page)
        assert not errors
        yield page
        assert not errors
    finally:
        page.close()


def draw_all(page):
    """Scrolls through the page until each chart is drawn."""
    for place in page.locator(".view:not(.empty) .chart, .chart[data-spec]").all():
        place.scroll_into_view_if_needed()
        place.and_(page.locator("[data-drawn]")).wait_for(timeout=10_000)


def ids(page):
    """The ids on the page, as often as they stand there."""
    return page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")


def texts(place):
    """Each text of a chart, with the middle of the place where it stands on the page."""
    return place.evaluate(
        """place => [...place.querySelectorAll('svg text')].filter(each => each.textContent && each.getAttribute('opacity') != '0')
            .map(each => { const box = each.getBoundingClientRect();
                           return {text: each.textContent, x: box.x + box.width / 2, y: box.y + box.height / 2}; })"""
    )
