"""The overview shows what the ledger says, in every state of an installation."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from console import overview_feed
from models.engine import engine
from models.sql import sql
from tally.fold import fold
from tasks.core.registry import handlers
from tasks.execution.claim import claim
from tasks.execution.deliver import deliver
from tasks.operations.pauses import pause_queue
from tests.api.callers import make_token
from tests.console.demo_ledger import add_tasks, fill, give_signs_of_life
from tests.console.visits import figures, logged_in, words
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import DIES, manage, submitted
from tests.tasks.registrations import handler_of, registered

XSS = "<img src=x onerror=alert(1)>\"'><script>alert(1)</script>&amp;"


@pytest.fixture(autouse=True)
def _reads_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test see what it has just changed."""
    monkeypatch.setattr(overview_feed, "READ_SECONDS", 0.0)
    monkeypatch.setattr(overview_feed, "HISTORY_SECONDS", 0.0)


@pytest.fixture
def browser(stack: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


def overview(browser: TestClient, period: str = "15m") -> str:
    answer = browser.get(f"/console?period={period}")
    assert answer.status_code == 200, answer.text
    return str(answer.text)


def attention(page: str) -> list[str]:
    return [words(each) for each in re.findall(r'<li class="(?:warn|bad)">.*?</li>', page, re.DOTALL)]


def execute(statement: str, **values: object) -> None:
    with engine().begin() as connection:
        connection.execute(sql(statement), values)


def beat_runs() -> None:
    with engine().begin() as connection:
        give_signs_of_life(connection)


def test_its_numbers_are_those_of_stats(stack: ServersOfTests, browser: TestClient) -> None:
    deliver(engine(), submitted({}, DIES, DIES, {"fail": 1}, {"discard": "why"}))
    (running,) = submitted({})
    with engine().begin() as connection:
        claim(connection, [running], handlers=handlers(), holder="w", lease_seconds=60)
    submitted({}, {}, run_at=timedelta(days=1))
    submitted(*[{}] * 1100)
    page, stats = overview(browser), manage("stats", "--json").json
    counts = {each["status"]: f"{'' if each['exact'] else '≈ '}{each['count']:,}" for each in stats["statuses"]}
    assert len(counts) == 6
    assert f"{counts.pop('DISCARDED')} discarded" in words(page)
    assert figures(page) == counts
    assert counts["DEAD"] == "2"


def test_a_new_installation_shows_what_to_do_instead_of_empty_charts(browser: TestClient) -> None:
    text = words(overview(browser))
    assert "First steps" in text
    assert [command in text for command in ("manage.py submit demo.flaky", "manage.py tasks", "manage.py handlers")]
    assert "Throughput" not in text
    submitted({})
    assert "First steps" not in words(overview(browser))


def test_the_three_commands_of_the_first_steps_work(browser: TestClient) -> None:
    commands = re.findall(r"<pre><code>\./manage\.py (.*?)</code></pre>", overview(browser))
    assert len(commands) == 3
    assert [manage(*shlex.split(command)).code for command in commands] == [0, 0, 0]
    assert figures(overview(browser))["QUEUED"] == "1"


def test_a_quiet_installation_says_that_nothing_needs_attention(browser: TestClient) -> None:
    beat_runs()
    assert "Nothing needs attention." in words(overview(browser))


def test_a_task_without_a_worker_or_with_an_unknown_type_is_named(browser: TestClient) -> None:
    submitted({})
    beat_runs()
    execute("DELETE FROM ledger.task_worker")
    assert "No worker is running, and 1 task may start. celery -A tasks worker" in attention(overview(browser))
    registered(handler_of("other.type"))
    told = "No worker that runs knows the type demo.flaky, which waits in the queue ingest."
    assert any(each.startswith(told) for each in attention(overview(browser)))
    execute("UPDATE ledger.task_worker SET queues = '{elsewhere}'")
    told = "No worker consumes the queue ingest, and 1 task may start."
    assert any(each.startswith(told) for each in attention(overview(browser)))


def test_what_has_waited_for_minutes_is_marked_and_said(stack: ServersOfTests, browser: TestClient) -> None:
    submitted({})
    execute("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('orders', '{}')")
    move(stack, 61)
    page = overview(browser)
    assert any("A task of the queue ingest has waited for 1 m" in each for each in attention(page))
    assert any("An event for orders has waited for 1 m" in each for each in attention(page))
    assert re.search(r'class="station queued warn"', page)
    move(stack, 300)
    page = overview(browser)
    assert re.search(r'class="station queued bad"', page)
    assert re.search(r'class="station outbox bad"', page)


def test_dead_tasks_pauses_and_silent_ticks_are_said(stack: ServersOfTests, browser: TestClient) -> None:
    deliver(engine(), submitted(DIES))
    pause_queue(engine(), settings.current(), "ingest", actor="bob", reason="the bank is closed")
    beat_runs()
    move(stack, 150)
    page = overview(browser)
    found = attention(page)
    assert any("1 task is dead" in each for each in found)
    assert any(
        "The queue ingest is paused and starts no tasks" in each and "the bank is closed" in each for each in found
    )
    assert any("Beat was last seen" in each for each in found)
    assert not any("Prune was last seen" in each for each in found), "it runs once a minute"
    execute("UPDATE ledger.tick SET error = 'connection to db.internal failed' WHERE name = 'relay'")
    assert any(
        "The last run of relay failed: connection to db.internal failed" in each
        for each in attention(overview(browser))
    )


def test_a_reader_sees_neither_the_words_of_operators_nor_those_of_errors(browser: TestClient) -> None:
    pause_queue(engine(), settings.current(), "ingest", actor="bob", reason="the bank is closed")
    beat_runs()
    execute("UPDATE ledger.tick SET error = 'connection to db.internal failed' WHERE name = 'relay'")
    page = overview(logged_in(make_token("reader", Scope.TASKS_READ_ALL)))
    assert "db.internal" in overview(browser)
    for hidden in ("db.internal", "the bank is closed", "bob"):
        assert hidden not in page
    assert "The last run of relay failed" in words(page)


def test_markup_in_names_is_shown_as_text(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine().begin() as connection:
        for status in ("QUEUED", "RUNNING", "RETRYING", "DEAD"):
            add_tasks(connection, XSS, XSS, status, 2)
    execute("INSERT INTO ledger.outbox_event (destination, payload) VALUES (:name, '{}')", name=XSS)
    execute("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('x', '{}')")
    execute(
        "INSERT INTO ledger.sink_transaction (gid, task_id, sink) VALUES ('g', gen_random_uuid(), :name)", name=XSS[:60]
    )
    execute("INSERT INTO ledger.queue_pause (queue, reason, actor) VALUES (:name, :name, :name)", name=XSS)
    execute("INSERT INTO ledger.queue_alert (queue) VALUES (:name)", name=XSS)
    execute(
        "INSERT INTO ledger.task_worker (worker, queues, types) VALUES (:name, CAST(:names AS text[]), '{}')",
        name=XSS,
        names=[XSS],
    )
    beat_runs()
    execute("UPDATE ledger.tick SET error = :name WHERE name = 'relay'", name=XSS)
    page = overview(browser)
    assert "onerror=alert(1)&gt;" in page
    assert page.count("&lt;script&gt;") > 10
    assert "<img src=x" not in page
    assert len(re.findall("<script", page)) == 1


def test_a_large_ledger_has_charts_for_each_period(browser: TestClient) -> None:
    with engine().begin() as connection:
        fill(connection)
    for period, unit, count in (("15m", "minute", 15), ("24h", "hour", 24), ("30d", "day", 30)):
        page = overview(browser, period)
        assert f"tasks per {unit}" in page
        assert page.count('class="hover"') == 3 * count
        assert re.search(r"Tasks per \w+ in the last [^:]+: [\d,]+ succeeded, [\d,]+ retried", page)
    assert re.search(r'aria-current="true">15 minutes', overview(browser, "7y")), "an unknown period is the shortest"
    assert re.search(r'data-flow="running-succeeded">[\d.]+/s', page)
    assert figures(page)["SUCCEEDED"] == "9,179"


def test_a_chart_shows_what_the_tally_has_counted(browser: TestClient) -> None:
    deliver(engine(), submitted({}, {}, DIES))
    fold(engine(), budget_seconds=10)
    page = overview(browser)
    (summary,) = re.findall(r'aria-label="(Tasks per minute[^"]+)"', page)
    assert summary == "Tasks per minute in the last 15 minutes: 2 succeeded, 1 dead."
    assert re.search(r"<title>\d\d:\d\d UTC, so far: 2 succeeded, 1 dead</title>", page) or "so far: nothing" in page
    assert re.search(r'data-flow="running-dead">(\d|&lt;1)/min', page)


def test_the_ledgers_silence_is_a_page_and_not_an_error(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nowhere:1@127.0.0.1:1/x")
    settings.current.cache_clear()
    answer = browser.get("/console")
    assert answer.status_code == 503
    assert "The ledger does not answer" in words(answer.text)
    assert "127.0.0.1" not in answer.text
