"""Chromium for tests of the page: what it shows, what it complains of, and what axe finds."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

WAIT_SECONDS, POLL_MILLISECONDS = 280.0, 30
NAMES = ("chromium", "chromium-browser", "google-chrome")
SERIOUS = {"serious", "critical"}


# Whether every experiment of the guide shows the answer for where its sliders are.
IS_SHOWN = """
[...document.querySelectorAll('[data-lab]')].every(
  (lab) => lab.dataset.shown === JSON.stringify(values(lab.id)))
"""
MOVE = """
([lab, name, end]) => {
  const input = document.querySelector(`#${lab} input[data-name=${name}]`);
  input.value = input[end];
  input.dispatchEvent(new Event('input', { bubbles: true }));
}
"""
SLIDERS = """
[...document.querySelectorAll('input[data-name]')].map(
  (input) => [input.closest('.lab').id, input.dataset.name])
"""


@dataclass(kw_only=True)
class Tab:
    """An open page, and what its console said."""

    page: Page
    console: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """Return what a part of the page says."""
        return self.page.locator(selector).inner_text()

    def wait_for(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true.

        Playwright's own wait is made of ``eval``, which the page's policy forbids.
        """
        end = time.monotonic() + WAIT_SECONDS
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"{condition}: {self.page.inner_text('body')}"
            self.page.wait_for_timeout(POLL_MILLISECONDS)

    def take_picture(self, name: str, *, height: int | None = None) -> None:
        """Write a picture of the page, cut to a height, if HEADWATER_PICTURES names a folder."""
        folder = os.environ.get("HEADWATER_PICTURES")
        if folder is not None:
            size = None if height is None else {"x": 0, "y": 0, "width": 1440, "height": height}
            self.page.screenshot(
                path=Path(folder) / f"{name}.png",
                full_page=True,
                clip=size,  # type: ignore[arg-type]
            )

    def faults(self) -> list[str]:
        """Return what axe finds to be serious, with the first element of each."""
        # Without its preload, axe fetches no style sheet again, which a page of a file may not.
        found = Axe().run(self.page, options={"preload": False}).response["violations"]
        return [
            f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in SERIOUS
        ]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a headless Chromium, the system's own."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path is not None, "tests of the page need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=1000 * WAIT_SECONDS
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(
    browser: Browser, url: str, *, width: int = 1440, theme: str = "light", **options: bool
) -> Iterator[Tab]:
    """Open a page, and hold at its end that its console is empty."""
    scheme = "dark" if theme == "dark" else "light"
    page = browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
        ignore_https_errors=options.get("ignore_https_errors", False),
    )
    opened = Tab(page=page)
    page.on("console", lambda message: opened.console.append(message.text))
    page.on("pageerror", lambda error: opened.console.append(str(error)))
    try:
        page.set_default_timeout(1000 * WAIT_SECONDS)
        page.goto(url)
        yield opened
        assert opened.console == []
    finally:
        page.close()


def move_slider(page: Tab, lab: str, name: str, end: str) -> None:
    """Move a slider of the guide to its "min" or "max", and wait for the answer."""
    page.page.evaluate(MOVE, [lab, name, end])
    page.wait_for(IS_SHOWN)


def move_all_sliders(page: Tab) -> int:
    """Move each slider of the guide to both ends; return how many there are."""
    sliders = page.page.evaluate(SLIDERS)
    for end in ("max", "min"):
        for lab, name in sliders:
            move_slider(page, lab, name, end)
    return len(sliders)
