"""The custody line of a task: each hop is done, now, later or none, and the one that is missing is red."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import settings
from api.app import app
from api.tokens import Scope
from console import slow_answers
from models.engine import engine
from models.sql import sql
from receipts.save import save_any_shard
from tasks.execution.deliver import deliver
from tasks.operations.pauses import pause_queue
from tasks.submission.envelope import NewTask
from tests.api.callers import FLAKY, Callers, make_token
from tests.console.task_pages import consumed, execute, hops, shown
from tests.console.visits import logged_in, words
from tests.outbox.ledger import move
from tests.receipts.receiving import Receiving
from tests.servers import ServersOfTests
from tests.tasks.command_line import DIES, dead, submitted
from tests.tasks.deliveries import change, claimed, scalar

NAMES = ["Row", "Outbox", "Broker", "Lease", "Effect", "Receipt"]


@pytest.fixture(autouse=True)
def _asks_each_time(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_answers, "KEPT_SECONDS", 0.0)


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def callers(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callers]:
    set_(monkeypatch, "RECEIPT_TWO_PHASE_ENABLED", "true")
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Callers(client)


def set_(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    settings.current.cache_clear()


def states(page: str) -> list[str]:
    found = hops(page)
    assert list(found) == NAMES
    return [each.partition(":")[0] for each in found.values()]


def late(ledger: ServersOfTests) -> None:
    """Let the time pass after which a wake-up counts as lost."""
    move(ledger, settings.current().ingest_wakeup_grace_ms / 1000 + 1)


def test_a_wakeup_that_no_relay_publishes_is_the_missing_hop(browser: TestClient, ledger: ServersOfTests) -> None:
    with engine().begin() as connection:
        id_ = connection.execute(sql(f"SELECT ledger.ingest_submit('{FLAKY}', '{{}}')")).scalar_one()
    assert states(shown(browser, id_)) == ["done", "now", "later", "later", "later", "unneeded"]
    late(ledger)
    page = shown(browser, id_)
    assert states(page)[:3] == ["done", "missing", "later"]
    assert "does beat or manage.py relay run?" in hops(page)["Outbox"]


def test_a_wakeup_that_waits_for_a_paused_queue_is_not_missing(browser: TestClient, ledger: ServersOfTests) -> None:
    pause_queue(engine(), settings.current(), "ingest", actor="me", reason=None)
    (id_,) = submitted({})
    late(ledger)
    page = shown(browser, id_)
    assert states(page)[:3] == ["done", "now", "later"]
    assert "waits until the queue is resumed" in hops(page)["Outbox"]


def test_a_dead_wakeup_that_was_replaced_is_not_missing(browser: TestClient) -> None:
    (id_,) = submitted({})
    execute("""
        INSERT INTO ledger.outbox_event (id, destination, payload, status, attempt_count, last_error)
        OVERRIDING SYSTEM VALUE
        SELECT id - 1, destination, payload, 'DEAD', 3, 'refused' FROM ledger.outbox_event
    """)
    page = shown(browser, id_)
    assert "refused" in words(page)
    assert states(page)[:2] == ["done", "done"]


def test_a_task_that_may_not_run_yet_has_its_later_hops_before_it(browser: TestClient) -> None:
    consumed()
    (first,), (second,) = (submitted({"n": n}, partition_key="customer 5") for n in range(2))
    claimed([first], keyed=True)
    assert "when it may run" in hops(shown(browser, second))["Broker"]
    (waits,) = submitted({})
    pause_queue(engine(), settings.current(), "ingest", actor="me", reason=None)
    assert states(shown(browser, waits)) == ["done", "done", "later", "later", "later", "unneeded"]
    change(waits, "limit_key = '', limited_at = ledger.ledger_now(), last_wakeup_at = NULL")
    assert hops(shown(browser, waits))["Outbox"] == "later: It gets a wake-up when it may run."


def test_a_wakeup_for_later_waits_in_the_outbox(browser: TestClient) -> None:
    (id_,) = submitted({"fail": 1})
    deliver(engine(), [id_])
    page = shown(browser, id_)
    assert states(page)[:4] == ["done", "now", "later", "later"]
    assert "waits until" in hops(page)["Outbox"]
    assert hops(page)["Lease"] == "later: No worker has it. It had 1 before."


def test_a_running_task_whose_lease_is_gone_is_marked(browser: TestClient) -> None:
    (id_,) = submitted({})
    claimed([id_])
    assert states(shown(browser, id_)) == ["done", "done", "done", "now", "later", "unneeded"]
    execute("DELETE FROM ledger.task_lease")
    assert hops(shown(browser, id_))["Lease"].startswith("missing: It runs without a lease")


def test_a_task_that_was_discarded_before_it_ran_needed_no_worker(browser: TestClient) -> None:
    (id_,) = submitted({})
    change(id_, "status = 'DISCARDED', finished_at = ledger.ledger_now()")
    assert states(shown(browser, id_)) == ["done", "done", "unneeded", "unneeded", "unneeded", "unneeded"]


def test_the_effect_is_what_the_sink_and_the_ledger_say(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_(monkeypatch, "SINKS", json.dumps({"exports": {"url": tmp_path.as_uri(), "guarantee": "two_phase"}}))
    execute("INSERT INTO ledger.sink_use (type, sink) VALUES (:type, 'exports')", type=FLAKY)
    (died,), (runs,) = dead(), submitted({})
    assert hops(shown(browser, runs))["Effect"] == "later: exports: not committed."
    claimed([runs])
    assert hops(shown(browser, died))["Effect"] == "unneeded: exports: not committed."
    assert hops(shown(browser, runs))["Effect"] == "now: exports: not committed so far."
    for id_ in (died, runs):
        execute(
            "INSERT INTO ledger.sink_transaction (gid, task_id, sink, decision, decided_at, state) "
            "VALUES (gen_random_uuid(), :id, 'exports', 'commit', ledger.ledger_now(), 'committed')",
            id=id_,
        )
        assert hops(shown(browser, id_))["Effect"] == "done: exports: committed."
    set_(monkeypatch, "SINKS", "{}")
    assert hops(shown(browser, died))["Effect"] == "missing: exports: unknown."


def test_effects_of_a_transactional_handler_end_with_its_task(browser: TestClient) -> None:
    (good,) = submitted({})
    deliver(engine(), [good])
    assert "were committed with SUCCEEDED" in hops(shown(browser, good))["Effect"]
    (died,) = dead()
    assert hops(shown(browser, died))["Effect"].startswith("unneeded: ")
    assert "were rolled back" in hops(shown(browser, died))["Effect"]


def test_a_dead_or_pruned_notification_is_missing_or_unknown(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_(monkeypatch, "OUTBOX_DESTINATIONS", json.dumps({"orders": "redis-stream://127.0.0.1:1/0?stream=orders"}))
    (id_,) = submitted(DIES, notify="orders")
    deliver(engine(), [id_])
    execute("UPDATE ledger.outbox_event SET status = 'DEAD', next_retry_at = NULL WHERE destination = 'orders'")
    number = scalar("SELECT id FROM ledger.outbox_event WHERE destination = 'orders'")
    page = shown(browser, id_)
    assert hops(page)["Receipt"] == f"missing: The event {number} for orders is dead."
    assert f'href="/console/outbox/{number}"' in page
    execute("DELETE FROM ledger.outbox_event")
    assert hops(shown(browser, id_))["Receipt"].startswith("unknown: The event for orders is not among the latest")


def test_a_task_in_the_receipt_log_has_its_row_now_and_is_missing_after_its_promise(
    browser: TestClient, callers: Callers, ledger: ServersOfTests
) -> None:
    id_ = callers().post("/api/tasks?receipt=accepted", json={"type": FLAKY, "payload": 1}).json()["taskId"]
    page = shown(browser, id_)
    assert "Accepted, and waits to be saved" in words(page)
    assert states(page) == ["now", *["later"] * 5]
    move(ledger, 61)
    assert hops(shown(browser, id_))["Row"].startswith("missing: It should have been saved ")
    assert save_any_shard(10, until_idle=True)
    page = shown(browser, id_)
    assert states(page)[0] == "done"
    assert hops(page)["Receipt"].startswith("done: Saved as number ")
    assert browser.get(f"/console/tasks/{'0' * 8}-{id_[9:]}").status_code == 404


def test_a_rejected_task_has_a_receipt_and_nothing_else(browser: TestClient, callers: Callers) -> None:
    receiving = Receiving()
    receipt = receiving.task(NewTask("no.such.type"))
    receiving.close()
    assert save_any_shard(10, until_idle=True)
    page = shown(browser, receipt.id)
    assert states(page) == [*["unneeded"] * 5, "done"]
    assert hops(page)["Receipt"].startswith("done: Rejected as number 1 at ")
    assert "It can never be saved" in words(page)
