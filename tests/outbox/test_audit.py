"""The audit: no lost lease, no failed attempt and no database error of a publisher passes without a record."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, event, make_url

import outbox
import settings
from models.engine import engine, make_engine, sessions
from models.errors import Unreachable
from models.sql import sql
from outbox import after_commit_publisher as after_commit
from outbox.after_commit_publisher import AfterCommitPublisher, after_commit_publisher
from outbox.audit import DatabaseErrors
from outbox.lease import ClaimedEvent, claim_outbox
from outbox.prune import prune
from outbox.publishers.contract import DestinationDown, Refused, Result, Sent
from outbox.relay import Relay
from tests.outbox.ledger import WAKEUP, arrived, audits, insert, move, rows
from tests.outbox.scripted import audit_counts, scripted
from tests.servers import ServersOfTests


def details(code: str) -> list[tuple[int | None, str, str]]:
    """Return the event, the worker and the detail of each audit row with this code."""
    found = sql("SELECT outbox_id, worker_id, detail FROM ledger.outbox_audit WHERE code = :code ORDER BY id")
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(found, {"code": code})]


def reclaim(stack: ServersOfTests, seconds: float, destination: str) -> None:
    """Let the leases expire, and another worker claim the oldest event."""
    move(stack, seconds + 1)
    with engine().connect() as connection:
        assert len(claim_outbox(connection, "the other one", 1, only=destination)) == 1


def add_wakeup() -> None:
    with sessions()() as session:
        outbox.add(session, WAKEUP, {"type": "t", "ids": [str(uuid.uuid4())], "batch": 100})
        session.commit()


def publisher_that_has_published(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> AfterCommitPublisher:
    """Return the publisher of this process. From now on it calls `then` after each publish, before it settles."""
    ours = after_commit_publisher()
    publish = ours._destinations.open(WAKEUP).publisher.publish

    def publish_then(events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        results = publish(events)
        then()
        return results

    monkeypatch.setattr(ours._destinations.open(WAKEUP).publisher, "publish", publish_then)
    return ours


def test_a_relay_that_lost_a_lease_while_its_destination_was_unreachable_audits_the_failed_release(
    relay: Relay, stack: ServersOfTests
) -> None:
    def refuse(_event: ClaimedEvent) -> Result:
        move(stack, relay.settings.outbox_lease_seconds + 1)
        with engine().connect() as connection:
            assert len(claim_outbox(connection, "the other one", only="hook")) == 3
        raise DestinationDown("connection refused")

    scripted(relay, "hook", refuse)
    ids = insert("hook", 3)
    before = audit_counts()
    assert relay.tick().failed == 0
    assert audit_counts() - before == {"outbox_flush_conflict": 3}
    (probe, *_), (first, *_), (second, *_) = conflicts = details("outbox_flush_conflict")
    assert [probe, first, second] == ids
    assert [detail.partition(" until")[0] for *_, detail in conflicts] == [
        "retry: now NEW, held by the other one",
        "release: now NEW, held by the other one",
        "release: now NEW, held by the other one",
    ]
    assert set(rows("status, attempt_count, locked_by")) == {("NEW", 0, "the other one")}


def test_a_process_that_lost_a_lease_at_insert_audits_the_failed_release(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        reclaim(stack, settings.current().outbox_submit_lease_seconds, WAKEUP)
        raise DestinationDown("connection refused")

    ours = publisher_that_has_published(monkeypatch, refuse)
    before = audit_counts()
    add_wakeup()
    assert ours.wait_until_idle(10)
    assert audit_counts() - before == {"outbox_flush_conflict": 1}
    ((_, worker, detail),) = details("outbox_flush_conflict")
    assert worker == ours.worker_id
    assert detail.startswith("release: now NEW, held by the other one until ")


def with_statement_timeout(url: str) -> Any:
    return make_engine(url, statement_timeout_seconds=0.2)


def with_lock_timeout(url: str) -> Any:
    return make_engine(make_url(url).update_query_dict({"options": "-c lock_timeout=200"}).render_as_string(False))


def at_a_closed_port(url: str) -> Any:
    return make_engine(make_url(url).set(port=1).render_as_string(False))


@pytest.mark.parametrize(
    ("broken", "code", "reason"),
    [
        (with_statement_timeout, "outbox_flush_db_timeout", "statement timeout"),
        (with_lock_timeout, "outbox_flush_db_error", "lock timeout"),
        (at_a_closed_port, "outbox_flush_db_error", "is unreachable"),
    ],
    ids=["timeout", "error", "unreachable"],
)
def test_a_database_error_of_a_publishing_process_is_counted_at_once_and_audited_when_the_database_answers_again(
    *,
    broken: Callable[[str], Any],
    code: str,
    reason: str,
    relay: Relay,
    stack: ServersOfTests,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(after_commit, "AUDIT_RETRY_SECONDS", 0.01)  # no further event arrives
    blocker = engine().connect()
    lock = sql("LOCK TABLE ledger.outbox_event IN ACCESS EXCLUSIVE MODE")

    def block() -> None:
        blocker.execute(lock)

    ours = publisher_that_has_published(monkeypatch, block)
    working = ours._engine
    ours._engine = broken(settings.current().database_url)
    before = audit_counts()
    add_wakeup()
    assert ours.wait_until_idle(10)
    assert audit_counts() - before == {code: 1}
    assert any(record.getMessage().startswith(f"{code}: ") for record in caplog.records)
    blocker.rollback()
    blocker.close()
    if broken is at_a_closed_port:
        assert audits() == {}
    ours._engine.dispose()
    ours._engine = working
    assert ours.wait_until_idle(10)
    ((event_id, worker, detail),) = details(code)
    assert (event_id, worker) == (None, ours.worker_id)
    assert reason in detail
    assert audit_counts() - before == {code: 1}
    move(stack, settings.current().outbox_submit_lease_seconds + 1)
    assert relay.tick().sent == 1  # published twice, not lost
    assert set(arrived(stack).values()) == {2}


def test_a_database_error_of_the_relay_is_counted_at_once_and_audited_when_the_database_answers_again(
    relay: Relay, stack: ServersOfTests
) -> None:
    def lose_the_connection(_event: ClaimedEvent) -> Result:
        end = sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'celeriac-relay'")
        with stack.cluster.superuser.begin() as connection:
            connection.execute(end)
        return Sent()

    publisher = scripted(relay, "hook", lose_the_connection)
    insert("hook")
    before = audit_counts()
    assert relay.tick().sent == 0
    assert audit_counts() - before == {"outbox_flush_db_error": 1}
    assert audits() == {}
    publisher.answer = lambda _event: Sent()
    move(stack, relay.settings.outbox_lease_seconds + 1)
    assert relay.tick().sent == 1
    ((event_id, worker, detail),) = details("outbox_flush_db_error")
    assert (event_id, worker) == (None, relay.worker_id)
    assert "number of errors: 1; the first was 0 s before this entry" in detail


def test_the_wakeups_of_a_batch_are_audited_by_one_entry_with_their_time_and_other_events_by_one_each(
    relay: Relay, stack: ServersOfTests
) -> None:
    wakeups = insert(WAKEUP, 450)  # more than two claims
    scripted(relay, "hook", lambda each: Sent(f"their {each.id}"))
    hooked = insert("hook", 3)
    before = audit_counts()
    assert relay.tick().sent == 453
    assert audit_counts() - before == {"outbox_flush_success": 453}
    entries = details("outbox_flush_success")
    assert {id_: detail for id_, _, detail in entries if id_ in hooked} == {id_: f"their {id_}" for id_ in hooked}
    batches = sorted((id_, detail) for id_, _, detail in entries if id_ not in hooked)
    assert [id_ for id_, _ in batches] == [wakeups[0], wakeups[200], wakeups[400]]
    assert batches[0][1] == f"200 sent to celery:ingest, ids {wakeups[0]} to {wakeups[199]}"
    assert {worker for _, worker, _ in entries} == {relay.worker_id}
    entry = "SELECT FROM ledger.outbox_audit a WHERE a.created_at = sent_at AND a.outbox_id <= outbox_event.id"
    assert rows("id", f"NOT EXISTS ({entry})") == []  # every event has the time of its entry


def test_a_wakeup_that_a_process_publishes_after_its_commit_is_audited_without_a_further_statement(
    stack: ServersOfTests,
) -> None:
    add_wakeup()
    ours = after_commit_publisher()
    assert ours.wait_until_idle(10)
    seen: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(ours._engine, "before_cursor_execute", note)
    add_wakeup()
    assert ours.wait_until_idle(10)
    assert len(seen) == 1
    assert [worker for _, worker, _ in details("outbox_flush_success")] == [ours.worker_id] * 2
    with engine().begin() as connection:
        times = connection.execute(sql("SELECT created_at FROM ledger.outbox_audit ORDER BY id")).scalars().all()
    assert times == [sent_at for (sent_at,) in rows("sent_at")]


def test_a_success_that_comes_too_late_is_audited_as_a_conflict_and_not_as_a_success(
    relay: Relay, stack: ServersOfTests
) -> None:
    def sleep_while_another_reclaims(_event: ClaimedEvent) -> Result:
        reclaim(stack, relay.settings.outbox_lease_seconds, WAKEUP)
        return Sent()

    scripted(relay, WAKEUP, sleep_while_another_reclaims, is_wakeup=True)
    insert(WAKEUP)
    before = audit_counts()
    assert relay.tick().sent == 0
    assert audits() == audit_counts() - before == {"outbox_flush_conflict": 1}


def test_an_event_that_another_worker_has_reclaimed_is_not_dead_because_it_was_refused_here(
    relay: Relay, stack: ServersOfTests
) -> None:
    def refuse_while_another_reclaims(_event: ClaimedEvent) -> Result:
        reclaim(stack, relay.settings.outbox_lease_seconds, "hook")
        return Refused("answered 400")

    scripted(relay, "hook", refuse_while_another_reclaims)
    (id_,) = insert("hook")
    before = audit_counts()
    ticked = relay.tick()
    assert (ticked.sent, ticked.failed, ticked.dead) == (0, 0, 0)
    assert audits() == audit_counts() - before == {"outbox_flush_conflict": 1}
    ((event_id, worker, detail),) = details("outbox_flush_conflict")
    assert (event_id, worker) == (id_, relay.worker_id)
    assert detail.startswith("dead: now NEW, held by the other one until ")
    assert rows("status, attempt_count, last_error, locked_by") == [("NEW", 0, None, "the other one")]


def test_the_audit_of_a_batch_of_wakeups_is_pruned_with_them(relay: Relay, stack: ServersOfTests) -> None:
    insert(WAKEUP, 5)
    assert relay.tick().sent == 5
    move(stack, 3 * 3600)
    assert prune(engine(), hours=1) == 5
    assert audits() == {}


def test_an_outage_of_the_database_is_logged_once_and_counted_each_time(
    stack: ServersOfTests, caplog: pytest.LogCaptureFixture
) -> None:
    errors = DatabaseErrors("relay")
    before = audit_counts()
    for outage in (1, 2):
        for _ in range(3):
            errors.note(Unreachable("PostgreSQL is unreachable"))
        assert [record.levelname for record in caplog.records] == ["ERROR"] * outage
        errors.write(engine())
    assert audit_counts() - before == {"outbox_flush_db_error": 6}
