"""A visitor sees and does what its token allows: on every page and with every form that the console's routes have."""

from __future__ import annotations

import re
from html import unescape

import pytest
from fastapi.testclient import TestClient

from api.event_streams import event
from api.tokens import Scope
from console.pages import NAVIGATION
from console.visitors import FORM_FIELD, READERS
from tests.api.callers import make_token
from tests.console.all_pages import LOGOUT, NAVIGABLE, PAGES, POSTS, address
from tests.console.visits import LOGIN, hidden_fields, logged_in, words
from tests.console.written_ledger import Written, write_everywhere
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar

SECRET = "hunter2 of crm.internal"
CHECK = "/console/receipts"  # its form only asks something
ACTS = [path for path in POSTS if path not in (LOGIN, LOGOUT, CHECK)]
EVENTS = "/console/events?period=15m"
LEAVE = event({}, id=0, name="leave")  # the stream ends, and the browser loads the page again
FORM = re.compile(r'<form (?:[^>]* )?method="post" action="([^"]*)"')
NO_READERS = [scope for scope in Scope if scope not in READERS]


@pytest.fixture
def written(stack: ServersOfTests) -> Written:
    return write_everywhere("a.name", SECRET, owner="all")


def visitor_with(*scopes: Scope) -> TestClient:
    name = "-".join(scopes).replace(":", ".") or "all"
    return logged_in(make_token(name, *scopes))


@pytest.fixture
def reader(written: Written) -> TestClient:
    return visitor_with(Scope.TASKS_READ_ALL)


def pages_of(browser: TestClient, written: Written) -> dict[str, str]:
    """Return the pages that a visitor may see, by address: those of the routes, and those about other things."""
    found = {}
    for path in dict.fromkeys([*(address(route, written) for route in PAGES), *written.pages]):
        answer = browser.get(path)
        is_hidden = answer.status_code == 404 and path.startswith("/console/documents/")  # it belongs to another token
        assert is_hidden or answer.status_code in (200, 403), (path, answer.status_code)
        if answer.status_code == 200:
            found[path] = str(answer.text)
    return found


def shown_navigation(page: str) -> list[str]:
    nav = page.partition('aria-label="Pages"')[2].partition("</nav>")[0]
    return re.findall(r'<a href="([^"]+)"', nav)


def test_every_form_that_acts_is_refused_for_a_reader_and_changes_nothing(written: Written, reader: TestClient) -> None:
    before = scalar("SELECT string_agg(status, ' ' ORDER BY id) FROM ledger.ingest_task")
    token = hidden_fields(reader.get("/console").text)[FORM_FIELD]
    assert len(ACTS) >= 18, "the routes are found"
    for path in ACTS:
        answer = reader.post(address(path, written), data={FORM_FIELD: token})
        assert answer.status_code == 403, path
        assert "lacks the scope" in words(answer.text), path
    assert scalar("SELECT string_agg(status, ' ' ORDER BY id) FROM ledger.ingest_task") == before
    assert reader.post(CHECK, data={FORM_FIELD: token, "receipt": "{}"}).status_code == 200


def test_no_page_shows_a_reader_a_form_that_acts_or_a_link_to_a_page_that_is_closed(
    written: Written, reader: TestClient
) -> None:
    pages = pages_of(reader, written)
    assert len(pages) > 15
    for path, page in pages.items():
        forms = FORM.findall(page) + re.findall(r'formaction="([^"]*)"', page)
        assert set(forms) <= {LOGOUT, CHECK}, path
        assert page.count('method="post"') == len(forms), path
    links = {unescape(each) for page in pages.values() for each in re.findall(r'href="(/console[^"#]*)', page)}
    closed = [each for each in links if reader.get(each).status_code == 403]
    assert closed == []


def test_an_operator_sees_the_forms_that_a_reader_does_not(written: Written) -> None:
    """This is what the test above would find."""
    pages = pages_of(visitor_with(), written)
    shown = {unescape(each).partition("?")[0] for page in pages.values() for each in FORM.findall(page)}
    patterns = {path: re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in ACTS}
    assert [path for path, pattern in patterns.items() if not any(map(pattern.fullmatch, shown))] == []


def test_no_page_shows_a_reader_payloads_of_events_errors_tracebacks_or_the_words_of_operators(
    written: Written, reader: TestClient
) -> None:
    shown = pages_of(visitor_with(), written)
    with_secret = {path for path, page in shown.items() if SECRET in unescape(page)}
    assert len(with_secret) > 12, "the words are where an operator reads them"
    for path, page in pages_of(reader, written).items():
        assert SECRET not in unescape(page), path
        assert "Traceback" not in page, path
    for part in ("payload", "context", "result"):
        assert SECRET not in reader.get(f"/console/tasks/{written.dead}/text/{part}").text


@pytest.mark.parametrize("scope", NO_READERS)
def test_a_token_with_no_scope_of_the_console_sees_no_page(written: Written, scope: Scope) -> None:
    browser = visitor_with(scope)
    opened = pages_of(browser, written)
    documents = {path for path in opened if path.startswith("/console/documents")}
    assert set(opened) == documents
    assert bool(documents) == (scope in (Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE))
    text = browser.get(f"/console/tasks/{written.dead}/text/payload")
    assert text.status_code == 403
    assert browser.get(EVENTS).text == LEAVE
    refused = browser.get("/console")
    assert "lacks the scope operate or tasks:read-all" in words(refused.text)
    assert SECRET not in refused.text + text.text


@pytest.mark.parametrize("scope", Scope)
def test_the_navigation_has_the_pages_that_the_token_opens_and_no_other(stack: ServersOfTests, scope: Scope) -> None:
    browser = visitor_with(scope)
    opened = [entry.path for entry in NAVIGATION if browser.get(entry.path).status_code == 200]
    assert shown_navigation(browser.get("/console").text) == opened


def test_a_guest_is_sent_to_the_login_by_every_page(written: Written, guest: TestClient) -> None:
    for path in [*(address(route, written) for route in PAGES), f"/console/tasks/{written.dead}/text/payload"]:
        answer = guest.get(path)
        assert (answer.status_code, answer.headers.get("location")) == (303, LOGIN), path
    assert guest.get(EVENTS).text == LEAVE


def test_the_lists_of_this_file_follow_the_routes() -> None:
    assert {"/console", "/console/dead", "/console/tasks/{id}", "/console/outbox/{id}"} < set(PAGES)
    assert set(NAVIGABLE) <= set(PAGES)
