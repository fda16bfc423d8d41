"""The page about workers shows who is live, what each runs, and which types it knows."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from models.engine import engine
from models.sql import sql
from tasks.core.limits import Limits, Rate
from tasks.core.registered_types import LIVE_SECONDS
from tasks.operations.worker_list import LATE_SECONDS
from tests.api.callers import make_token
from tests.console.forms import XSS, is_escaped, page_of
from tests.console.visits import logged_in, words
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, run_claim, submitted
from tests.tasks.registrations import handler_of, registered

PATH = "/console/workers"
WORKER = "far:10-abc"  # the main process of a worker, and a child of it
CHILD = "far:12-abc"
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


def card(page: str, name: str = WORKER) -> str:
    found = re.search(rf'<section class="card unit" id="{name}">.*?</section>', page, re.DOTALL)
    assert found, page
    return words(found[0])


def others(page: str) -> str:
    """Return the words about processes whose worker is not registered."""
    return words(page.partition("Processes whose worker is not registered")[2].partition('id="types-title"')[0])


def test_a_worker_is_shown_with_its_version_queues_types_and_what_it_runs_now(
    browser: TestClient, ledger: ServersOfTests
) -> None:
    registered(handler_of("invoice.import"), name=WORKER)
    ids = submitted(7, "test.many", {})
    claimed(ids, holder=CHILD)
    move(ledger, 5)
    page = page_of(browser, PATH)
    text = card(page)
    assert f"Version Celery {version('celery')}, Python {platform.python_version()}" in text
    assert "Queues ingest" in text
    assert "Types invoice.import" in text
    assert "test.many ingest 7" in text
    assert CHILD in text
    assert "55 s left" in text
    assert "and 2 more" in text
    shown = [str(id_) for id_ in sorted(ids) if f'href="/console/tasks/{id_}"' in page]
    assert shown == [str(id_) for id_ in sorted(ids)[:5]]
    assert "over its lease" not in text


def test_a_batch_that_was_settled_is_no_longer_shown(browser: TestClient) -> None:
    registered(handler_of("a"), name=WORKER)
    claim = claimed(submitted(1), holder=CHILD)
    assert "test.insert" in card(page_of(browser, PATH))
    run_claim(claim)
    assert "It runs nothing now." in card(page_of(browser, PATH))


def test_an_expired_lease_is_flagged(browser: TestClient, ledger: ServersOfTests) -> None:
    worker = registered(handler_of("a"), name=WORKER)
    claimed(submitted(1), holder=CHILD, lease_seconds=10)
    move(ledger, 15)
    worker._due_at = 0.0
    worker.tick()
    text = card(page_of(browser, PATH))
    assert f"{WORKER} live over its lease" in text
    assert "expired 5." in text


def test_a_worker_is_late_then_lost(browser: TestClient, ledger: ServersOfTests) -> None:
    registered(handler_of("a"), name=WORKER)
    move(ledger, LATE_SECONDS - 1)
    assert f"{WORKER} live" in card(page_of(browser, PATH))
    move(ledger, 2)
    assert f"{WORKER} late It gave its last sign of life 2" in card(page_of(browser, PATH))
    move(ledger, LIVE_SECONDS)
    assert f"{WORKER} lost It gave its last sign of life 1 m ago." in card(page_of(browser, PATH))
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.task_worker WHERE worker <> :worker"), {"worker": WORKER})
    assert "No worker has given a sign of life lately" in words(page_of(browser, PATH))


def test_batches_of_a_process_without_a_worker_are_shown_apart(browser: TestClient) -> None:
    registered(handler_of("a"), name=WORKER)
    claimed(submitted(1), holder="far:12-xyz")
    claimed(submitted(1), holder="near:12-abc")
    page = page_of(browser, PATH)
    assert "It runs nothing now." in card(page)
    assert [holder in others(page) for holder in ("far:12-xyz", "near:12-abc")] == [True, True]


def test_types_show_their_settings_and_those_that_no_live_worker_knows_are_marked(
    browser: TestClient, ledger: ServersOfTests
) -> None:
    limits = Limits("crm.sync", 5, Rate(100, "m"), "tenant")
    registered(handler_of("crm.sync", limits=limits, max_attempts=4, priority=7), name=WORKER)
    registered(handler_of("old.type"), name="old:1-x").end()
    page = page_of(browser, PATH)
    found = {words(row).partition(" ")[0]: row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)}
    assert words(found["crm.sync"]).startswith("crm.sync ingest 4 ")
    assert "7 5 at once, 100/m for each tenant far:10-abc" in words(found["crm.sync"])
    assert 'class="wide warn"' in found["old.type"]
    assert "No live worker of the queue" not in words(page)
    submitted(1, "old.type", {})
    page = page_of(browser, PATH)
    assert "No live worker of the queue ingest knows the type old.type , and its tasks wait." in words(page)
    assert "none (its tasks wait)" in words(page)


def test_markup_in_names_is_escaped(browser: TestClient) -> None:
    registered(handler_of(XSS), name=f"{XSS}:1-x", topic=XSS)
    claimed(submitted(1), holder=f"{XSS}:2-x")
    page = page_of(browser, PATH)
    assert page.count("onerror") > 5
    assert is_escaped(page)


def test_a_reader_sees_no_processes_and_a_visitor_without_a_scope_is_refused(ledger: ServersOfTests) -> None:
    registered(handler_of("a"), name=WORKER)
    claimed(submitted(1), holder=CHILD)
    page = page_of(logged_in(make_token("eve", Scope.TASKS_READ_ALL)), PATH)
    assert "test.insert" in card(page)
    assert CHILD not in page
    assert logged_in(make_token("sue", Scope.TASKS_SUBMIT)).get(PATH).status_code == 403


def test_an_empty_ledger_says_how_to_start_a_worker(browser: TestClient) -> None:
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.task_worker"))
        connection.execute(sql("DELETE FROM ledger.task_type"))
    text = words(page_of(browser, PATH))
    assert "so no task starts. Start one: celery -A tasks worker" in text
    assert "No worker has registered its handlers yet." in text
