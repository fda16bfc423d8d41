"""The page of a task shows what the ledger, the broker and the sinks know about it, and says why it waits."""

from __future__ import annotations

import json
import re
import uuid
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from console import slow_answers
from models.engine import engine
from models.sql import sql
from tasks.core.registered_types import LIVE_SECONDS
from tasks.execution.deliver import deliver
from tasks.operations.pauses import pause_queue
from tests.api.callers import FLAKY, make_token
from tests.app import point_app_at
from tests.console.forms import XSS, is_escaped, page_of, sent
from tests.console.task_pages import consumed, execute, hops, reasons, shown
from tests.console.visits import logged_in, words
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import DIES, buried, dead, submitted
from tests.tasks.deliveries import change, claimed, statements
from tests.tasks.work import task

MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _asks_each_time(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test see what it has just changed in the broker."""
    monkeypatch.setattr(slow_answers, "KEPT_SECONDS", 0.0)


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE, Scope.TASKS_SUBMIT))


@pytest.fixture
def reader(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


def test_a_task_that_succeeded_shows_its_way_result_and_payload(browser: TestClient) -> None:
    (id_,) = submitted({"customer": 4711}, key="invoice 17", context={"traceId": "t1"})
    deliver(engine(), [id_])
    page = shown(browser, id_)
    said = words(page)
    assert 'class="status succeeded"' in page
    assert "What became of it?" in said
    assert str(id_) in said
    assert "invoice 17" in said
    assert '"customer": 4711' in said
    assert re.findall(r'class="visit (\w+)', page) == ["queued", "running", "succeeded"]
    assert [state.partition(":")[0] for state in hops(page).values()] == [*["done"] * 5, "unneeded"]
    assert f"{FLAKY}</a>" in page
    assert "/requeue" not in page


def test_each_failed_attempt_is_shown_with_its_error_and_the_last_traceback(browser: TestClient) -> None:
    (id_,) = submitted({"fail": 2}, max_attempts=2)
    for _ in range(2):
        deliver(engine(), [id_])
        move_on(id_)
    page = shown(browser, id_)
    said = words(page)
    assert "attempt 1 of 2 failed" in said
    assert "attempt 2 of 2 failed" in said
    assert "run 2" in said
    assert task(id_)["error_message"] in said
    assert "Traceback" in said
    assert 'class="status dead"' in page
    assert re.search(r'class="state-box dead current"', page)
    assert re.search(r'class="state-box succeeded unvisited"', page)


def move_on(id_: uuid.UUID) -> None:
    """Let the next attempt of a task be due."""
    if task(id_)["status"] == "RETRYING":
        change(id_, "next_retry_at = ledger.ledger_now()")


def test_a_running_task_shows_its_lease_and_an_expired_lease_is_marked(browser: TestClient, ledger: Any) -> None:
    (id_,) = submitted({})
    claimed([id_], holder="web-2:3981-a1b2c3")
    page = shown(browser, id_)
    assert "3981 on web-2" in words(page)
    assert list(reasons(page)) == ["running"]
    assert hops(page)["Lease"].startswith("now: web-2:3981-a1b2c3 holds it until")
    assert "expired" not in words(page)
    execute("UPDATE ledger.task_lease SET holder = 'my own program'")
    assert "my own program" in words(shown(browser, id_))
    assert "Process" not in words(shown(browser, id_).partition('id="lease-title"')[2].partition("</section>")[0])
    move(ledger, 61)
    page = shown(browser, id_)
    assert list(reasons(page)) == ["worker_lost"]
    assert hops(page)["Lease"].startswith("missing: It expired")
    assert re.search(r'class="expired">expired', page)


def test_a_task_that_is_not_due_says_so_and_offers_to_run_it_now(browser: TestClient) -> None:
    consumed()
    (id_,) = submitted({}, run_at=10 * MINUTE)
    found = reasons(shown(browser, id_))
    assert list(found) == ["not_due"]
    assert "It is due at" in found["not_due"]
    assert f"/console/tasks/{id_}/run-now" in found["not_due"]


def test_a_blocked_task_links_to_the_task_that_blocks_it(browser: TestClient) -> None:
    consumed()
    (first,), (second,) = (submitted({"n": n}, partition_key="customer 5") for n in range(2))
    claimed([first], keyed=True)
    found = reasons(shown(browser, second))
    assert "ahead of it in partition key" in found["not_its_turn"]
    assert found["not_its_turn"].endswith(f"/console/tasks/{first}")


def test_a_task_of_a_paused_queue_links_to_the_queue(browser: TestClient) -> None:
    consumed()
    (id_,) = submitted({})
    pause_queue(engine(), settings.current(), "ingest", actor="me@here", reason="a move")
    found = reasons(shown(browser, id_))
    assert "paused" in found["queue_paused"]
    assert "a move" in found["queue_paused"]
    assert "/console/queues#ingest" in found["queue_paused"]
    place, said = sent(browser, "/console/queues/resume", page=f"/console/tasks/{id_}", queue="ingest")
    assert (place, "The queue ingest is resumed" in said) == ("/console/queues#ingest", True)
    assert "queue_paused" not in reasons(shown(browser, id_))


def test_a_task_that_waits_for_its_limit_links_to_the_limits(browser: TestClient) -> None:
    consumed()
    (id_,) = submitted({})
    execute(
        "INSERT INTO ledger.task_type (type, queue, max_attempts, batch, priority, max_running) "
        "VALUES (:type, 'ingest', 3, 1, 5, 2) ON CONFLICT (type) DO UPDATE SET max_running = 2",
        type=FLAKY,
    )
    change(id_, "limit_key = '', limited_at = ledger.ledger_now(), last_wakeup_at = NULL")
    page = shown(browser, id_)
    assert "0 of 2" in reasons(page)["over_limit"]
    assert reasons(page)["over_limit"].endswith("/console/queues#limits-title")


def test_a_task_without_a_worker_and_one_of_an_unknown_type_link_to_the_workers(
    browser: TestClient, ledger: ServersOfTests
) -> None:
    (id_,) = submitted({})
    found = reasons(shown(browser, id_))
    assert "No worker consumes its queue ingest" in found["no_worker"]
    assert found["no_worker"].endswith("/console/workers")
    consumed("another.type")
    found = reasons(shown(browser, id_))
    assert f"No live worker knows the type '{FLAKY}'" in found["unknown_handler"]
    assert found["unknown_handler"].endswith("/console/workers")
    assert "no_worker" not in found
    move(ledger, LIVE_SECONDS + 1)
    assert "no_worker" in reasons(shown(browser, id_))


def test_a_wakeup_that_cannot_be_published_is_named_and_is_the_missing_hop(browser: TestClient) -> None:
    consumed()
    with engine().begin() as connection:
        id_ = connection.execute(sql(f"SELECT ledger.ingest_submit('{FLAKY}', '{{}}')")).scalar_one()
    assert hops(shown(browser, id_))["Outbox"].startswith("now: ")
    execute("""
        INSERT INTO ledger.outbox_event (destination, payload, status, attempt_count, last_error, next_retry_at)
        VALUES ('celery:ingest', jsonb_build_object('ids', jsonb_build_array()), 'RETRYING', 3,
                'unreachable: redis refused', ledger.ledger_now())
    """)
    page = shown(browser, id_)
    assert "The circuit of ingest is open" in reasons(page)["wakeup_in_outbox"]
    assert reasons(page)["wakeup_in_outbox"].endswith("/console/outbox")
    assert hops(page)["Outbox"].startswith("missing: ")
    assert hops(page)["Broker"].startswith("later: ")


def test_a_dead_wakeup_is_shown_and_is_the_missing_hop(browser: TestClient) -> None:
    (id_,) = submitted({})
    execute("UPDATE ledger.outbox_event SET status = 'DEAD', sent_at = NULL, last_error = 'refused by me'")
    page = shown(browser, id_)
    assert "is dead: it was given up" in hops(page)["Outbox"]
    assert "refused by me" in words(page)


def test_a_message_that_waits_in_the_broker_and_one_that_is_lost(browser: TestClient, ledger: ServersOfTests) -> None:
    consumed()
    (id_,) = submitted({})
    page = shown(browser, id_)
    assert hops(page)["Broker"] == "now: Its message is the only message in the queue."
    assert list(reasons(page)) == ["wakeup_in_broker"]
    assert "celery:ingest sent" in words(page)
    ledger.flush_redis()
    assert hops(shown(browser, id_))["Broker"].startswith("now: The queue is empty")
    move(ledger, settings.current().ingest_wakeup_grace_ms / 1000 + 1)
    consumed()
    page = shown(browser, id_)
    assert hops(page)["Broker"].startswith("missing: ")
    assert list(reasons(page)) == ["wakeup_lost"]


def test_an_unreachable_broker_is_a_sentence_on_the_page(browser: TestClient, ledger: ServersOfTests) -> None:
    (id_,) = submitted({})
    point_app_at("redis://127.0.0.1:1/0")
    page = shown(browser, id_)
    point_app_at(ledger.addresses["BROKER_URL"])
    assert "The broker does not answer" in reasons(page)["broker_unreachable"]
    assert "no_worker" in reasons(page)
    assert hops(page)["Broker"].startswith("unknown: ")


def test_a_discarded_and_a_retrying_task(browser: TestClient) -> None:
    consumed()
    (id_,) = submitted({"fail": 1})
    deliver(engine(), [id_])
    page = shown(browser, id_)
    assert 'class="status retrying"' in page
    assert list(reasons(page)) == ["not_due"]
    change(id_, "status = 'DISCARDED', next_retry_at = NULL, finished_at = ledger.ledger_now()")
    assert "It has been DISCARDED since" in reasons(shown(browser, id_))["final"]


def test_steps_audits_and_notifications_are_shown(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"orders": "redis-stream://127.0.0.1:1/0?stream=orders"}))
    settings.current.cache_clear()
    (id_,) = submitted(DIES, notify="orders")
    execute("INSERT INTO ledger.task_step (task_id, name, result) VALUES (:id, 'charge', '{\"paid\": 12}')", id=id_)
    execute("INSERT INTO ledger.task_audit (task_id, code, worker_id) VALUES (:id, 'late_success', 'old:1')", id=id_)
    assert hops(shown(browser, id_))["Receipt"] == "later: orders will be told how it ends."
    deliver(engine(), [id_])
    page = shown(browser, id_)
    assert hops(page)["Receipt"] == "now: orders is to be told how it ended."
    assert "orders new" in words(page)
    assert '{ "paid": 12 }' in words(page)
    assert "late_success" in words(page)
    execute(
        "UPDATE ledger.outbox_event SET status = 'SENT', sent_at = ledger.ledger_now() WHERE destination = 'orders'"
    )
    assert hops(shown(browser, id_))["Receipt"] == "done: orders was told how it ended."


def test_large_results_of_steps_are_not_read_and_long_ones_are_cut(browser: TestClient) -> None:
    (id_,) = submitted({})
    execute(
        "INSERT INTO ledger.task_step (task_id, name, result) SELECT :id, 'step ' || n, "
        "(SELECT jsonb_agg(md5(x::text)) FROM generate_series(1, CASE n WHEN 1 THEN 20 ELSE 5000 END) AS x) "
        "FROM generate_series(1, 100) AS n",
        id=id_,
    )
    page = shown(browser, id_)
    assert words(page).count("bytes, too large to be shown") == 99
    assert page.count("c4ca4238a0b923820dcc509a6f75849b") == 1
    assert "…</code>" in page
    assert len(page) < 60_000


def test_a_reader_sees_no_button_and_no_details_of_errors(reader: TestClient) -> None:
    (died,) = dead()
    change(died, "error_message = 'secret one', last_error = 'Traceback secret two'")
    execute("UPDATE ledger.ingest_task_transition SET message = 'secret three', actor = 'secret four'")
    execute("INSERT INTO ledger.task_audit (task_id, code, worker_id) VALUES (:id, 'late', 'secret five')", id=died)
    (runs,) = submitted({})
    claimed([runs], holder="secret six:12-abc")
    (waits,) = submitted({})
    pause_queue(engine(), settings.current(), "ingest", actor="secret seven", reason="secret eight")
    execute(
        "UPDATE ledger.outbox_event SET status = 'DEAD', sent_at = NULL, last_error = 'secret nine', "
        "locked_by = 'secret ten'"
    )
    for id_ in (died, runs, waits):
        page = shown(reader, id_)
        assert "secret" not in page
        assert "Traceback" not in page
        assert page.count('<form method="post"') == 1  # to log out
        assert "/edit" not in page
    assert "The task can never succeed." in words(shown(reader, died))
    assert "Its queue is paused." in words(shown(reader, waits))


def test_markup_in_every_text_is_escaped(browser: TestClient, reader: TestClient) -> None:
    (id_,) = submitted({"text": XSS}, key=XSS, partition_key=XSS, context={"origin": XSS, "principal": XSS, XSS: XSS})
    claimed([id_], keyed=True, holder=f"{XSS}:12-worker")
    execute("UPDATE ledger.ingest_task_transition SET message = :xss, actor = :xss", xss=XSS)
    execute("INSERT INTO ledger.task_audit (task_id, code, worker_id, detail) VALUES (:id, :x, :x, :x)", id=id_, x=XSS)
    execute(
        "INSERT INTO ledger.task_step (task_id, name, result) VALUES (:id, :x, to_jsonb(CAST(:x AS text)))",
        id=id_,
        x=XSS,
    )
    (old,) = buried(1, type=XSS, queue=XSS, last_error=XSS, error_message=XSS, error_code=XSS, notify=XSS)
    for each in (id_, old):
        assert is_escaped(shown(browser, each))
        assert is_escaped(shown(reader, each))
    assert is_escaped(page_of(browser, f"/console/tasks/{id_}/edit"))
    raw = browser.get(f"/console/tasks/{id_}/text/payload")
    assert raw.headers["content-type"].startswith("text/plain")


def test_an_unknown_and_a_malformed_id_are_not_found(browser: TestClient) -> None:
    for id_ in (uuid.uuid4(), "x", "%3Cscript%3E", "0" * 300):
        for path in (f"/console/tasks/{id_}", f"/console/tasks/{id_}/edit", f"/console/tasks/{id_}/text/payload"):
            answer = browser.get(path)
            assert answer.status_code == 404, path
            assert "There is no task" in words(answer.text)
            assert "<script>" not in answer.text
    (id_,) = submitted({})
    assert browser.get(f"/console/tasks/{id_}/text/lease_token").status_code == 404


def test_a_long_history_is_cut_in_the_middle(browser: TestClient) -> None:
    (id_,) = buried(1)
    execute(
        """
        INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor)
        SELECT :id, CASE n % 2 WHEN 0 THEN CASE n WHEN 0 THEN NULL ELSE 'RUNNING' END ELSE 'QUEUED' END,
               CASE n % 2 WHEN 0 THEN 'QUEUED' ELSE 'RUNNING' END, 0, 'change ' || n, 'w'
        FROM generate_series(0, 999) AS n
        """,
        id=id_,
    )
    page = shown(browser, id_)
    assert re.findall(r"change (\d+)<", page) == [str(n) for n in (*range(5), *range(955, 1000))]
    assert "950 more changes are left out" in words(page)
    assert "500×" in page
    assert "499×" in page


@pytest.mark.parametrize("answers_in_time", [True, False])
def test_effects_are_shown_before_the_requeue_button(
    browser: TestClient, reader: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, answers_in_time: bool
) -> None:
    sinks = {
        "exports": {"url": tmp_path.as_uri(), "guarantee": "two_phase"},
        "here": {"url": "ledger:", "guarantee": "atomic"},
    }
    monkeypatch.setenv("SINKS", json.dumps(sinks))
    settings.current.cache_clear()
    if not answers_in_time:
        monkeypatch.setattr(slow_answers, "PATIENCE_SECONDS", 0.0)
    (id_,) = dead()
    for sink in (*sinks, "gone"):
        execute("INSERT INTO ledger.sink_use (type, sink) VALUES (:type, :sink)", type=FLAKY, sink=sink)
    page = shown(browser, id_)
    said = words(page)
    assert page.index("Effects in sinks") < page.index("/requeue")
    if answers_in_time:
        assert "exports not committed" in said
        assert "here not committed" in said
        assert "gone unknown There is no sink 'gone'" in said
        assert hops(page)["Effect"].startswith("missing: ")
        assert "There is no sink" not in words(shown(reader, id_))
    else:
        assert "has not answered in time" in said
        assert hops(page)["Effect"].startswith("unknown: ")


def test_the_page_of_a_task_asks_few_questions(browser: TestClient) -> None:
    (id_,) = submitted({})
    shown(browser, id_)
    with statements() as sent:
        shown(browser, id_)
    assert len(sent) <= 22, sent
