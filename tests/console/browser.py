"""A real browser that visits the console, for tests and for pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

import settings
from console.links import new_link

OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 375, "height": 812}


@contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        yield browser
        browser.close()


@dataclass
class Visit:
    """One page of a browser, and what its console has complained about."""

    page: Page
    port: int
    complaints: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def begin(cls, browser: Browser, port: int, **how: Any) -> Iterator[Visit]:
        """Open a page in a profile of its own. `how` is what Playwright calls the options of a context."""
        context = browser.new_context(**{"viewport": WIDE, **how})
        visit = cls(context.new_page(), port)
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.on("console", lambda said: visit._note(said.type, said.text))
        try:
            yield visit
        finally:
            context.close()

    def go(self, path: str = "/console") -> None:
        self.page.goto(f"http://127.0.0.1:{self.port}{path}")

    def log_in(self, token_name: str | None = None) -> None:
        """Use a link, as the one that `make up` prints."""
        self.go(new_link(settings.current(), token_name).partition("8000")[2])
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url("**/console")

    def figure(self, status: str) -> str:
        """Return what the visible picture shows for a status."""
        return self.page.locator(f".pipeline:visible [data-status={status}]").text_content() or ""

    def wait_for_figure(self, status: str, expected: str) -> None:
        found = self.page.locator(f".pipeline:visible [data-status={status}]", has_text=expected)
        found.wait_for(timeout=20_000)

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)
