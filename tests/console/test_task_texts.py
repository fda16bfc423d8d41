"""Payload, context and result on the page of a task: cut if they are long, and searched as a whole."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from console.task_texts import LONGEST_SEARCH
from tests.api.callers import make_token
from tests.console.forms import XSS, is_escaped, page_of
from tests.console.task_pages import shown
from tests.console.visits import logged_in, words
from tests.servers import ServersOfTests
from tests.tasks.command_line import submitted


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE, Scope.TASKS_SUBMIT))


def found(browser: TestClient, id_: object, search: str) -> list[str]:
    """Search in the texts of a task; return the lines that the page shows, with the match in brackets."""
    page = str(browser.get(f"/console/tasks/{id_}", params={"find": search}).text)
    part = "".join(re.findall(r'<ol class="found-lines">(.*?)</ol>', page, re.DOTALL))
    marked = part.replace("<mark>", "[").replace("</mark>", "]")
    return [words(each) for each in re.findall(r"<li\b.*?</li>", marked, re.DOTALL)]


def test_a_large_payload_is_cut_on_the_page_and_complete_on_its_own(browser: TestClient) -> None:
    (id_,) = submitted({"text": "a" * 1_000_000, "the last": "the end"})
    page = shown(browser, id_)
    assert len(page) < 60_000
    assert "the end" not in page
    assert "the payload is longer than" in words(page)
    assert "/edit" not in page
    complete = browser.get(f"/console/tasks/{id_}/text/payload")
    assert complete.json() == {"text": "a" * 1_000_000, "the last": "the end"}
    assert browser.get(f"/console/tasks/{id_}/edit").status_code == 400


def test_a_search_finds_lines_of_every_text_also_behind_the_cut(browser: TestClient) -> None:
    (id_,) = submitted({"text": "a" * 100_000, "zz last": "THE (end"}, context={"note": "the (end of it"})
    in_payload, in_context = found(browser, id_, "the (end")
    assert in_payload == 'line 3 "zz last": "[THE (end]"'
    assert '"note": "[the (end] of it"' in in_context
    assert found(browser, id_, "nowhere") == []
    page = words(page_of(browser, f"/console/tasks/{id_}?find=nowhere"))
    assert "0 lines with “nowhere”" in page
    assert len(page_of(browser, f"/console/tasks/{id_}?find={'a' * 5 * LONGEST_SEARCH}")) < 70_000


def test_a_search_that_matches_many_lines_shows_the_first_and_counts_the_others(browser: TestClient) -> None:
    (id_,) = submitted({"lines": [f"n{n}" for n in range(100)]})
    shown_lines = found(browser, id_, "N")
    assert shown_lines[0] == 'line 2 "li[n]es": ['
    assert shown_lines[-1] == "and 81 more lines"
    assert "payload" in shown(browser, id_).lower()


def test_markup_in_a_search_and_in_what_it_finds_is_escaped(browser: TestClient) -> None:
    (id_,) = submitted({"text": f"before {XSS} after"})
    page = str(browser.get(f"/console/tasks/{id_}", params={"find": "<img src=x onerror"}).text)
    assert "<mark>&lt;img src=x onerror</mark>" in page
    assert is_escaped(page)
    assert is_escaped(str(browser.get(f"/console/tasks/{id_}", params={"find": XSS}).text))


def test_a_deeply_nested_payload_is_not_many_times_as_long_as_it_was_submitted(browser: TestClient) -> None:
    payload: object = [1] * 300_000
    for _ in range(60):
        payload = [payload]
    (id_,) = submitted(payload)
    complete = browser.get(f"/console/tasks/{id_}/text/payload")
    assert complete.json() == payload
    assert len(complete.content) < 1_048_576
    assert found(browser, id_, "1")[-1] == "and 299,980 more lines"
