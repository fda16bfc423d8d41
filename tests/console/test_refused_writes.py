"""The page about refused writes lists who tried what after its lease was lost, page by page."""

from __future__ import annotations

import re
import uuid

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from models.engine import engine
from models.sql import sql
from outbox import audit
from tasks.core.holders import actor
from tasks.operations import refused_writes
from tests.api.callers import make_token
from tests.console.forms import XSS, is_escaped, page_of
from tests.console.visits import logged_in, words
from tests.outbox.ledger import insert
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, scalar, scripted, submitted

PATH = "/console/workers/refused"
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


def lines(page: str) -> list[str]:
    return [words(row) for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)[1:]]


def take_away(task_id: uuid.UUID) -> None:
    """Give the task to another worker."""
    with engine().begin() as connection:
        statement = "UPDATE ledger.ingest_task SET lease_token = gen_random_uuid() WHERE id = :id"
        connection.execute(sql(statement), {"id": task_id})


def add_audits(count: int, code: str = "late_success", detail: str = "now SUCCEEDED") -> None:
    statement = sql("""
        INSERT INTO ledger.task_audit (task_id, code, worker_id, detail)
        SELECT gen_random_uuid(), :code, 'far:' || n, :detail FROM generate_series(1, :count) AS n""")
    with engine().begin() as connection:
        connection.execute(statement, {"code": code, "detail": detail, "count": count})


def test_a_worker_that_succeeds_after_its_lease_was_lost_is_listed_with_its_task(browser: TestClient) -> None:
    (task_id,) = scripted(lambda each, _db: take_away(each.id))
    delivered([task_id])
    page = page_of(browser, PATH)
    (line,) = lines(page)
    assert "late_success Its handler succeeded, but the lease had been lost." in line
    assert "test.scripted" in line
    assert f"{actor()} now RUNNING running" in line
    assert f'href="/console/tasks/{task_id}"' in page


def test_the_list_can_be_narrowed_to_a_code_and_other_audits_are_not_in_it(browser: TestClient) -> None:
    add_audits(2)
    add_audits(3, "lease_lost", "gone")
    add_audits(4, "retry_now")
    assert len(lines(page_of(browser, PATH))) == 5
    for code, count in (("late_success", 2), ("lease_lost", 3), ("retry_now", 5), ("outbox_flush_conflict", 0)):
        found = lines(page_of(browser, f"{PATH}?code={code}"))
        assert len(found) == count, code
    assert lines(page_of(browser, f"{PATH}?code=lease_lost"))[0].endswith("far:3 gone gone")


def test_lost_leases_of_outbox_events_are_listed_with_their_destination(browser: TestClient) -> None:
    (event,) = insert("orders")
    with engine().begin() as connection:
        audit.write(connection, audit.AuditCode.SUCCESS, {event: "sent"}, worker_id="relay:1")
        audit.write_conflicts(connection, [event], "while it was sent", worker_id="relay:1")
    (line,) = lines(page_of(browser, f"{PATH}?code=outbox_flush_conflict"))
    assert f"{event} orders outbox_flush_conflict The event was published" in line
    assert line.endswith("relay:1 while it was sent: now NEW, held by no worker until - new")


def test_every_entry_is_on_one_page_in_both_directions(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_writes, "PAGE", 4)
    add_audits(10)
    down, path, way = [], PATH, []
    while path:
        page = page_of(browser, path)
        down.append([line.split("far:")[1].split()[0] for line in lines(page)])
        way.append(page)
        older = re.search(r'href="([^"]*)" rel="next"', page)
        path = older[1].replace("&amp;", "&") if older else ""
    assert down == [["10", "9", "8", "7"], ["6", "5", "4", "3"], ["2", "1"]]
    assert 'rel="prev"' not in way[0]
    newer = re.search(r'href="([^"]*)" rel="prev"', way[-1])
    assert newer
    page = page_of(browser, newer[1].replace("&amp;", "&"))
    assert [line.split("far:")[1].split()[0] for line in lines(page)] == ["6", "5", "4", "3"]
    assert ('rel="prev"' in page, 'rel="next"' in page) == (True, True)
    newer = re.search(r'href="([^"]*)" rel="prev"', page)
    assert newer
    page = page_of(browser, newer[1].replace("&amp;", "&"))
    assert ('rel="prev"' in page, 'rel="next"' in page) == (False, True)


def test_an_address_with_nonsense_shows_the_latest(browser: TestClient) -> None:
    add_audits(1)
    for nonsense in ("before=x", f"before={'9' * 30}", "after=-1", "code=%00", "after=²", f"code={XSS}"):
        assert len(lines(page_of(browser, f"{PATH}?{nonsense}"))) == 1, nonsense


def test_the_statements_read_the_index_of_refused_writes_among_many_other_audits(ledger: ServersOfTests) -> None:
    add_audits(5)
    add_audits(3000, "retry_now")
    with engine().begin() as connection:
        connection.execute(sql("ANALYZE ledger.task_audit"))
        explain = f"EXPLAIN {refused_writes.TASKS_OLDER.text}"
        plan = connection.execute(sql(explain), {"id": None, "code": None, "limit": 51}).scalars().all()
    assert any("ix_task_audit_refused" in line for line in plan), "\n".join(plan)


def test_a_reader_does_not_see_processes_and_details(ledger: ServersOfTests) -> None:
    add_audits(1, detail="held by db.internal")
    page = page_of(logged_in(make_token("eve", Scope.TASKS_READ_ALL)), PATH)
    assert "late_success" in page
    assert not [hidden for hidden in ("far:1", "db.internal") if hidden in page]
    assert logged_in(make_token("sue", Scope.TASKS_SUBMIT)).get(PATH).status_code == 403


def test_markup_in_details_and_names_is_escaped(browser: TestClient) -> None:
    submitted(1)
    add_audits(1, detail=XSS)
    task_id = scalar("SELECT id FROM ledger.ingest_task")
    with engine().begin() as connection:
        values = {"id": task_id, "xss": XSS}
        connection.execute(sql("UPDATE ledger.task_audit SET task_id = :id, worker_id = :xss"), values)
        connection.execute(sql("UPDATE ledger.ingest_task SET type = :xss"), {"xss": XSS})
    page = page_of(browser, PATH)
    assert page.count("onerror") == 3
    assert is_escaped(page)


def test_an_empty_list_says_what_would_be_in_it(browser: TestClient) -> None:
    assert "No write was refused." in words(page_of(browser, PATH))
