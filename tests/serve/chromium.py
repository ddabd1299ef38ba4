"""Chromium for tests of the page, where it and playwright are installed: one a test file, a fresh profile a test."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000  # the machine may be busy
IN_DOCS = {
    *("page-1600-light", "page-1600-dark", "page-1600-light-life", "page-1600-light-decision"),
    *("page-360-light-chat", "page-360-dark-cluster"),
}
WIDE, NARROW = {"width": 1600, "height": 1000}, {"width": 360, "height": 740}


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Skips where there is none.

    Not for a whole session: while it runs, this thread has an event loop, and other tests begin one.
    """
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[browser]")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@dataclass
class Reader:
    """A person with one tab. Whatever the page logged as an error or asked of others is in `wrong`."""

    page: Any
    url: str
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("console", lambda line: self._said(line.type, line.text))
        self.page.on("request", lambda request: self._asked(request.url))

    def _said(self, kind: str, text: str) -> None:
        if kind == "error" and "status of 401" not in text and "status of 404" not in text:
            self.wrong.append(f"console: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith(self.url):
            self.wrong.append(f"asked {url}")

    def visit(self) -> None:
        self.page.goto(self.url)

    def ask(self, text: str, tokens: int = 400) -> None:
        self.page.fill("#max-tokens", str(tokens))
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answer(self, index: int = 0) -> Any:
        """The article of an answer."""
        return self.page.locator(".message.assistant").nth(index)

    def await_ledger(self, index: int = 0) -> Any:
        found = self.answer(index).locator(".ledger")
        found.wait_for()
        return found

    def card(self, worker: str) -> Any:
        return self.page.get_by_role("article", name=f"Worker {worker}")

    def show(self, view: str) -> None:
        self.page.click(f".views button[data-view={view}]")

    def overflow(self) -> int:
        """Pixels by which something is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")

    def shoot(self, folder: str, name: str) -> None:
        """A picture for the docs, where the run asks for them; few colours do, in a third of the bytes."""
        if folder and name in IN_DOCS:
            Path(folder).mkdir(parents=True, exist_ok=True)
            whole = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
            whole.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                Path(folder) / f"{name}.png", optimize=True
            )


@contextmanager
def reader(browser: Any, url: str, viewport: dict[str, int] = WIDE, scheme: str = "light") -> Iterator[Reader]:
    """Somebody who looks at `url`; at the end nothing may have gone wrong."""
    profile = browser.new_context(viewport=viewport, color_scheme=scheme)
    try:
        found = Reader(profile.new_page(), url)
        found.visit()
        yield found
        assert not found.wrong
    finally:
        profile.close()
