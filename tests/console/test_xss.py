"""Texts from the ledger are texts on every page: no browser runs them, whatever they contain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page

from console import overview_feed
from tests.api.server import Server
from tests.console.all_pages import LISTS
from tests.console.browser import Visit, chromium
from tests.console.written_ledger import write_everywhere

# An element that a text has become would have the attribute data-xss, and a script would change the title.
RUN = "document.title=1"
CORPUS = {
    "tag": f'<img data-xss src=x onerror="{RUN}"><script data-xss>{RUN}</script>&lt;b data-xss&gt;&#60;b data-xss&#62;',
    "quote": f"\" data-xss autofocus onfocus=\"{RUN}\" x=\"><b data-xss>' data-xss autofocus onfocus='{RUN}' x='><b>",
    "address": f"javascript:{RUN}//{{{{191*193}}}}{{% raw %}}${{191*193}}#{{191*193}} data-xss",
    "svg": f'\\"}}}}]</title></script></textarea></code><svg data-xss onload={RUN}><set data-xss>\\u003cb>',
}
FOUND = """() => ({
    elements: document.querySelectorAll("[data-xss]").length,
    addresses: [...document.querySelectorAll("[href], [action], [formaction], [src]")]
        .map((each) => each.getAttribute("href") ?? each.getAttribute("action") ?? each.getAttribute("src") ?? "")
        .filter((each) => !/^(\\/|#|\\?)/.test(each)),
    handlers: [...document.querySelectorAll("*")].flatMap((each) => [...each.attributes])
        .filter((each) => /^on/.test(each.name) || each.name === "style").length,
    computed: document.documentElement.outerHTML.includes("36863"),
    title: document.title,
})"""
NOTHING: dict[str, Any] = {"elements": 0, "addresses": [], "handlers": 0, "computed": False}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(autouse=True)
def _reads_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_feed, "READ_SECONDS", 0.0)


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    with Visit.begin(browser, server.port) as visit:
        visit.page.on("dialog", lambda dialog: visit.complaints.append(f"dialog: {dialog.message}"))
        visit.page.clock.install()  # so that no page waits before it is loaded again
        visit.log_in()
        yield visit


def refresh(page: Page) -> None:
    """Let the page load itself again, as it does every few seconds, and put what has changed in place."""
    seconds = page.locator("[data-refresh]").get_attribute("data-refresh")
    with page.expect_response(page.url.partition("#")[0]) as answered:
        page.clock.run_for(1000 * int(seconds or 0))
    answered.value.finished()


def shown_in(page: Page) -> int:
    """Check that no text has become markup; return how often the texts are shown."""
    found = page.evaluate(FOUND)
    assert found.pop("title") != "1", page.url
    assert found == NOTHING, page.url
    return page.content().count("data-xss")


@pytest.mark.guarantee
def test_no_text_of_the_ledger_runs_or_becomes_markup_on_any_page(visit: Visit) -> None:
    written = [write_everywhere(text, owner="console") for text in CORPUS.values()]
    for path in LISTS:
        visit.go(path)
        if visit.page.locator("[data-refresh]").count():
            refresh(visit.page)
        assert shown_in(visit.page) >= len(CORPUS), path
        assert visit.complaints == [], path
    for each in written:
        for path in each.pages:
            visit.go(path)
            assert shown_in(visit.page) > 0, path
            assert visit.complaints == [], path


def test_what_a_visitor_types_does_not_run_either(visit: Visit) -> None:
    for text in CORPUS.values():
        for path in ("/console/documents", "/console/outbox", "/console/receipts", "/console/tasks"):
            visit.go(f"{path}?{urlencode({'q': text, 'destination': text, 'error': text, 'status': 'dead'})}")
            shown_in(visit.page)
    visit.complaints = [each for each in visit.complaints if "400" not in each and "404" not in each]
    assert visit.complaints == []


@pytest.mark.parametrize("kind", ["tag", "quote", "svg"])
def test_a_text_that_is_not_escaped_would_be_found(visit: Visit, kind: str) -> None:
    text = CORPUS[kind]
    html = f'<input value="{text}">' if kind == "quote" else text
    visit.page.evaluate("(html) => document.querySelector('main').insertAdjacentHTML('beforeend', html)", html)
    visit.page.wait_for_timeout(50)
    assert any("Content Security Policy" in each for each in visit.complaints), visit.complaints
    assert visit.page.title() != "1", "the policy of the page is the second wall"
    assert visit.page.evaluate(FOUND)["elements"] > 0
