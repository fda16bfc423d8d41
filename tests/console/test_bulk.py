"""Bulk actions in the console: everything leaves an audit entry, can be stopped, and is closed to readers."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from html import unescape

import pytest
from fastapi.testclient import TestClient

from api.bulk_threads import BulkThreads
from api.tokens import Scope
from console import bulk as pages
from models.engine import engine
from models.sql import sql
from tasks.operations import bulk_actions
from tasks.operations.listing import TaskFilter
from tests.api.callers import make_token
from tests.console.bulk_forms import HOME, fields_of, form_of, refused, started
from tests.console.forms import XSS, is_escaped, page_of, refuses_reader_and_foreigner, sent
from tests.console.visits import hidden_fields, logged_in, words
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.bulk import claimed, ordered, row, worked_off
from tests.tasks.command_line import buried, statuses
from tests.tasks.deliveries import scalar
from tests.tasks.work import transitions

SECRET = "connection to db.internal failed"


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("rita", Scope.TASKS_READ_ALL))


@pytest.fixture
def api_threads(ledger: ServersOfTests) -> Iterator[None]:
    """Do bulk actions as a running API does."""
    threads = BulkThreads()
    threads.start()
    yield
    asyncio.run(threads.stop())


def test_an_action_shows_its_progress_its_tasks_and_its_audit_entry(browser: TestClient) -> None:
    ids = buried(3)
    id_ = started(browser, form_of(), per_second="100")
    path = f"{HOME}/{id_}"
    assert "It waits for an API process" in words(page_of(browser, path))
    worked_off()
    page = page_of(browser, path)
    text = words(page)
    assert "3 of 3 requeued" in text
    assert 'max="3" value="3"' in page
    assert all(f"/console/tasks/{each}" in page for each in ids)
    assert "Reason the bank is open again Started by console:ann" in text
    assert "Rate 100/s" in text
    assert str(id_) in transitions(ids[0], "message")[-1][0]
    (listed,) = re.findall(r"<tr>\s*<th scope=\"row\">.*?</tr>", page_of(browser, HOME), re.DOTALL)
    assert words(listed).startswith("Requeue done 3 of 3 status:dead the bank is open again console:ann")
    assert path in listed


@pytest.mark.guarantee
def test_an_action_is_stopped_and_continued_on_its_page(browser: TestClient) -> None:
    ids, id_ = buried(3), ordered()
    path = f"{HOME}/{id_}"
    claim = claimed()
    assert "Continue" not in words(page_of(browser, path))
    place, text = sent(browser, f"{path}/stop", page=path)
    assert place == path
    assert "The action is stopped; it changes nothing more." in text
    assert worked_off(claim).changed == 0
    assert "The bulk action is stopped. It has ended already." in sent(browser, f"{path}/stop", page=path)[1]
    assert "The action goes on" in sent(browser, f"{path}/continue", page=path)[1]
    assert worked_off().changed == 3
    assert "is done. It can be continued after it was stopped." in sent(browser, f"{path}/continue", page=path)[1]
    assert "Notes Stopped by console:ann. Continued by console:ann." in words(page_of(browser, path))
    assert set(statuses(ids)) == {"QUEUED"}


def test_an_action_whose_process_is_lost_says_so_and_can_be_continued(
    stack: ServersOfTests, browser: TestClient
) -> None:
    id_ = ordered()
    claimed()
    assert "The tasks are being counted." in words(page_of(browser, f"{HOME}/{id_}"))
    move(stack, 61)
    text = words(page_of(browser, f"{HOME}/{id_}"))
    assert "Its process has given no sign of life" in text
    assert "Stop Continue" in text


def test_an_action_whose_canaries_fail_says_what_became_of_them(browser: TestClient) -> None:
    ids = buried(3)
    id_ = ordered(canary=2, canary_seconds=1)
    worked_off()
    text = words(page_of(browser, f"{HOME}/{id_}"))
    assert "canary failed" in text
    assert "2 of 3 requeued Not all canaries succeeded in time" in text
    assert "Canary 2 tasks, 1 s: 2 queued" in text
    assert "Continue" not in text
    assert sorted(statuses(ids)) == ["DEAD", "QUEUED", "QUEUED"]


def test_tasks_that_another_process_held_are_mentioned(browser: TestClient) -> None:
    ids, id_ = buried(3), ordered()
    with engine().begin() as other:
        other.execute(sql("SELECT FROM ledger.ingest_task WHERE id = :id FOR UPDATE"), {"id": ids[0]})
        worked_off()
    assert "It is done. 1 task was left as it was" in words(page_of(browser, f"{HOME}/{id_}"))


def test_every_action_is_on_one_of_the_pages_of_the_list(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No bulk action was started so far." in words(page_of(browser, HOME))
    ids = [ordered() for _ in range(5)]
    monkeypatch.setattr(pages, "PAGE", 2)
    found, path = [], HOME
    while path:
        page = page_of(browser, path)
        found += [uuid.UUID(each) for each in re.findall(r'<a href="/console/bulk/([0-9a-f-]{36})"', page)]
        older = re.search(r'href="([^"]*)" rel="next"', page)
        path = unescape(older[1]) if older else ""
    assert found == ids[::-1]
    assert browser.get(f"{HOME}?before=x").status_code == 400


def test_an_address_that_names_no_action_is_a_page(browser: TestClient) -> None:
    for name in (str(uuid.uuid4()), "x", "1" * 200):
        answer = browser.get(f"{HOME}/{name}")
        assert answer.status_code == 404
        assert "lists all bulk actions" in words(answer.text)
    form = hidden_fields(page_of(browser, HOME))
    assert browser.post(f"{HOME}/x/stop", data=form).status_code == 404
    browser.post(f"{HOME}/{uuid.uuid4()}/stop", data=form)
    assert "There is no bulk action" in words(page_of(browser, HOME))


# who may do and see what


@pytest.mark.guarantee
def test_a_reader_sees_actions_without_the_words_of_operators_and_can_do_nothing(
    browser: TestClient, reader: TestClient
) -> None:
    buried(3, error_message=SECRET)
    id_ = ordered(query=f'status:dead text:"{SECRET}"', reason="the bank is closed")
    bulk_actions.stop(engine(), id_, actor="console:ann")
    path = f"{HOME}/{id_}"
    for place in (HOME, path):
        page = page_of(reader, place)
        assert "status:dead text:…" in words(page)
        for hidden in (SECRET, "the bank is closed", "console:ann", "Continue", "New …"):
            assert hidden not in words(page)
            assert hidden in words(page_of(browser, HOME)) + words(page_of(browser, path))
    assert reader.get(form_of()).status_code == 403
    for post in (HOME, f"{path}/stop", f"{path}/continue"):
        assert refuses_reader_and_foreigner(reader, browser, post, page=HOME)
    assert row(id_).state == "stopped"
    assert scalar("SELECT count(*) FROM ledger.bulk_action") == 1
    limited = logged_in(make_token("wes", Scope.TASKS_READ))
    assert [limited.get(each).status_code for each in (HOME, path, form_of())] == [403, 403, 403]


def test_a_form_from_another_site_is_refused(browser: TestClient) -> None:
    buried(3)
    fields = {**fields_of(page_of(browser, form_of())), "reason": "r", "confirmation": "3"}
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert browser.post(HOME, data=fields, headers=headers).status_code == 403
    assert scalar("SELECT count(*) FROM ledger.bulk_action") == 0


def test_markup_is_shown_as_text(browser: TestClient) -> None:
    buried(2, type=XSS, error_code=XSS, error_message=XSS)
    quoted = 'text:"' + XSS.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert is_escaped(page_of(browser, form_of(quoted)))
    page = refused(browser, form_of(quoted), reason=XSS, per_second=XSS, canary=XSS, canary_seconds=XSS)
    assert is_escaped(page)
    id_ = ordered(query=quoted, reason=XSS, chosen=TaskFilter(error_text=XSS))
    bulk_actions.stop(engine(), id_, actor=XSS)
    assert is_escaped(page_of(browser, f"{HOME}/{id_}"))
    assert is_escaped(page_of(browser, HOME))


def test_control_characters_are_not_stored(browser: TestClient) -> None:
    buried(1)
    assert row(started(browser, form_of(), reason="a\0b\nc")).reason == "abc"


@pytest.mark.guarantee
def test_a_thousand_dead_tasks_are_requeued_by_a_search(browser: TestClient, api_threads: None) -> None:
    ids = buried(1000, error_message="The bank did not answer.")
    others = buried(5, error_message="No such order.")
    id_ = started(browser, form_of('text:"bank did not"'), confirmation="1,000")
    wait_until(lambda: "1,000 of 1,000 requeued" in words(page_of(browser, f"{HOME}/{id_}")), "all are requeued")
    assert set(statuses(ids)) == {"QUEUED"}
    assert set(statuses(others)) == {"DEAD"}
