"""What an operator sees and does: the backlog, dead events, and pruning."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

import commands
from models.engine import engine
from models.sql import sql
from models.status import EventStatus
from outbox import backlog as read
from outbox.dead_events import Choice, count, discard, requeue
from outbox.prune import BATCH, prune
from outbox.publishers.contract import Sent
from outbox.relay import Relay
from tasks import ticks
from tests.outbox.ledger import insert, rows
from tests.outbox.scripted import scripted
from tests.outbox.table import OutboxTable
from tests.servers import ServersOfTests

HOUR = 3600


def backlog(outbox: OutboxTable, *, ceiling: int = read.CEILING) -> list[read.Backlog]:
    with outbox.engine.connect() as connection:
        return read.backlog(connection, ceiling=ceiling)


def audit_of(engine: Engine, outbox_id: int) -> list[tuple[str, str, str]]:
    found = sql("SELECT code, worker_id, detail FROM ledger.outbox_audit WHERE outbox_id = :id ORDER BY id")
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(found, {"id": outbox_id})]


def test_the_backlog_counts_due_scheduled_and_dead_events_separately(outbox: OutboxTable) -> None:
    outbox.add_many(3, "a", created_at=outbox.later(-HOUR))
    outbox.add_many(2, "a", status="RETRYING", next_retry_at=outbox.later(-60), created_at=outbox.later(-2 * HOUR))
    outbox.add_many(4, "a", next_retry_at=outbox.later(HOUR))
    outbox.add_many(5, "a", status="SENT", sent_at=outbox.now())
    outbox.add_many(2, "b", ordering_key="k", created_at=outbox.later(-30))
    outbox.add("b", ordering_key="k", next_retry_at=outbox.later(HOUR))
    outbox.add("c", status="DEAD")
    a, b, c = backlog(outbox)
    assert (a.destination, a.due, a.scheduled, a.dead) == ("a", 5, 4, 0)
    assert a.oldest_due is not None
    assert timedelta(hours=1) <= a.oldest_due < timedelta(hours=1, minutes=1)
    assert (b.destination, b.due, b.scheduled, b.dead) == ("b", 2, 1, 0)
    assert (c.destination, c.due, c.scheduled, c.dead, c.oldest_due) == ("c", 0, 0, 1, None)


def test_counting_stops_at_the_ceiling(outbox: OutboxTable) -> None:
    outbox.add_many(25, "a", created_at=outbox.later(-HOUR))
    outbox.add_many(25, "a", next_retry_at=outbox.later(HOUR))
    (a,) = backlog(outbox, ceiling=10)
    assert (a.due, a.scheduled) == (10, 10)
    assert a.oldest_due is not None
    assert a.oldest_due >= timedelta(hours=1)


def test_a_list_starts_with_the_newest_event(outbox: OutboxTable) -> None:
    dead = outbox.add_many(5, status="DEAD")
    outbox.add_many(3)
    with outbox.engine.connect() as connection:
        page = read.events(connection, statuses=[EventStatus.DEAD], limit=2)
        rest = read.events(connection, statuses=[EventStatus.DEAD], before=page[-1].id)
        assert read.events(connection, statuses=[EventStatus.DEAD], destination="another") == []
    assert [event.id for event in page + rest] == dead[::-1]


def test_a_requeued_event_starts_again_and_keeps_its_history(outbox: OutboxTable) -> None:
    event = outbox.add(status="DEAD", attempt_count=10, last_error="no such host")
    assert list(requeue(outbox.engine, Choice(), actor="me@here", reason="mended")) == [[event]]
    row = outbox.row(event)
    assert (row["status"], row["attempt_count"], row["next_retry_at"]) == ("NEW", 0, None)
    detail = "mended; failures: 10, last error: no such host"
    assert audit_of(outbox.engine, event) == [("outbox_requeued", "me@here", detail)]
    assert list(requeue(outbox.engine, Choice(), actor="me@here")) == []


def test_a_discarded_event_leaves_its_audit(outbox: OutboxTable) -> None:
    event = outbox.add(status="DEAD", attempt_count=1)
    assert list(discard(outbox.engine, Choice([event]), actor="me@here")) == [[event]]
    assert event not in outbox.rows()
    assert audit_of(outbox.engine, event) == [("outbox_discarded", "me@here", "failures: 1, last error: none")]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (Choice(), {"old", "refused", "other"}),
        (Choice(destination="d"), {"old", "refused"}),
        (Choice(error="REFUSED"), {"refused"}),
        (Choice(error="100%"), set()),  # text, not a pattern
    ],
    ids=["all", "destination", "error", "text"],
)
def test_only_the_chosen_events_are_requeued(outbox: OutboxTable, choice: Choice, chosen: set[str]) -> None:
    ids = {
        "old": outbox.add(status="DEAD", last_error="timeout\nat line 1"),
        "refused": outbox.add(status="DEAD", last_error="Connection refused"),
        "other": outbox.add("e", status="DEAD"),
        "alive": outbox.add(),
        "sent": outbox.add(status="SENT", sent_at=outbox.now(), last_error="refused"),
    }
    before = outbox.rows()
    with outbox.engine.connect() as connection:
        assert count(connection, choice).total == len(chosen)
    assert sum(map(len, requeue(outbox.engine, choice, actor="me"))) == len(chosen)
    assert {name for name, event in ids.items() if outbox.row(event) != before[event]} == chosen


def test_since_and_until_choose_by_the_time_of_creation(outbox: OutboxTable) -> None:
    old, new = (outbox.add(status="DEAD", created_at=outbox.later(-age)) for age in (HOUR, 60))
    list(requeue(outbox.engine, Choice(until=outbox.later(-120)), actor="me"))
    assert (outbox.row(old)["status"], outbox.row(new)["status"]) == ("NEW", "DEAD")
    list(requeue(outbox.engine, Choice(since=outbox.later(-120)), actor="me"))
    assert outbox.row(new)["status"] == "NEW"


def test_a_requeue_works_in_batches_and_respects_its_limit(outbox: OutboxTable) -> None:
    dead = outbox.add_many(1200, status="DEAD")
    assert list(map(len, requeue(outbox.engine, Choice(), actor="me", limit=700))) == [500, 200]
    assert [event for event, row in outbox.rows().items() if row["status"] == "NEW"] == dead[:700]
    assert list(map(len, requeue(outbox.engine, Choice(), actor="me"))) == [500]


def test_an_event_that_dies_again_meanwhile_is_not_requeued_for_ever(outbox: OutboxTable) -> None:
    dead = outbox.add_many(3, status="DEAD")
    seen = []
    for batch in requeue(outbox.engine, Choice(), actor="me", batch=1):
        seen += batch
        with outbox.engine.begin() as connection:
            connection.execute(sql("UPDATE ledger.outbox_event SET status = 'DEAD'"))
    assert seen == dead


def test_events_locked_by_another_operator_do_not_end_the_requeue(outbox: OutboxTable) -> None:
    dead = outbox.add_many(6, status="DEAD")
    with outbox.engine.begin() as other:
        other.execute(sql("SELECT FROM ledger.outbox_event WHERE id = ANY(:ids) FOR UPDATE"), {"ids": dead[:2]})
        assert list(requeue(outbox.engine, Choice(), actor="me", batch=2)) == [dead[2:4], dead[4:]]
    assert list(requeue(outbox.engine, Choice(), actor="me", batch=2)) == [dead[:2]]


def test_counting_many_different_errors_returns_only_the_largest_groups(outbox: OutboxTable) -> None:
    for number in range(110):
        outbox.add(status="DEAD", last_error=f"no {number}")
    outbox.add_many(2, status="DEAD", last_error="no")
    with outbox.engine.connect() as connection:
        found = count(connection, Choice())
    assert (found.total, len(found.groups), found.groups[0].count) == (112, 100, 2)


def test_only_events_sent_long_ago_are_pruned_with_their_audit(outbox: OutboxTable) -> None:
    outbox.add_many(BATCH + 5, status="SENT", sent_at=outbox.later(-2 * HOUR), created_at=outbox.later(-3 * HOUR))
    old_but_unsent = [outbox.add(status=status, created_at=outbox.later(-100 * HOUR)) for status in ("NEW", "DEAD")]
    fresh = outbox.add(status="SENT", sent_at=outbox.later(-HOUR / 2), created_at=outbox.later(-100 * HOUR))
    gone = min(outbox.rows())
    audits = sql("""
        INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, created_at)
        SELECT CAST(id AS bigint), 'outbox_flush_success', 'w', ledger.ledger_now() - make_interval(hours => age)
        FROM (VALUES (:gone, 3), (:fresh, 3), (NULL, 3), (NULL, 0)) AS given(id, age)""")
    with outbox.engine.begin() as connection:
        connection.execute(sql("DELETE FROM ledger.outbox_audit"))
        connection.execute(audits, {"gone": gone, "fresh": fresh})
    assert prune(outbox.engine, hours=1) == BATCH + 5
    assert list(outbox.rows()) == [*old_but_unsent, fresh]
    with outbox.engine.begin() as connection:
        kept = connection.execute(sql("DELETE FROM ledger.outbox_audit RETURNING outbox_id")).scalars().all()
    assert sorted(kept, key=str) == sorted([fresh, None], key=str)


def test_pruning_stops_when_its_time_is_over(outbox: OutboxTable) -> None:
    outbox.add_many(2, status="SENT", sent_at=outbox.later(-2 * HOUR))
    assert prune(outbox.engine, hours=1, budget_seconds=0) == 0
    assert len(outbox.rows()) == 2


def test_beat_prunes_by_the_configured_retention(stack: ServersOfTests) -> None:
    insert("d", status="SENT", sent_at="2000-01-01")
    insert("d", status="SENT", sent_at="2100-01-01")
    assert ticks.run("prune")["events"] == 1
    assert len(rows()) == 1


def manage(*arguments: str, **how: Any) -> Result:
    return CliRunner().invoke(commands.app, ["outbox", *arguments], **how)


def test_the_backlog_and_the_events_are_printed_as_a_table_and_as_json(stack: ServersOfTests) -> None:
    insert("orders", 2)
    (dead,) = insert("hook", status="DEAD", last_error="[red]\x1b[31mno", attempt_count=3)
    found = json.loads(manage("--json").stdout)
    assert [(each["destination"], each["due"], each["dead"]) for each in found] == [("hook", 0, 1), ("orders", 2, 0)]
    assert "orders" in manage().stdout
    (event,) = json.loads(manage("--status", "DEAD", "--json").stdout)
    assert (event["id"], event["attemptCount"], event["lastError"]) == (dead, 3, "[red]\x1b[31mno")
    listed = manage("--status", "DEAD").stdout
    assert "[red] [31mno" in listed  # neither markup nor terminal codes are interpreted


def test_nothing_is_requeued_without_a_filter_and_without_a_terminal(stack: ServersOfTests) -> None:
    insert("hook", 2, status="DEAD", last_error="no")
    refused = manage("requeue-dead")
    assert refused.exit_code == 2
    assert "hook" in refused.stdout
    assert "manage.py outbox requeue-dead --all" in refused.stderr
    assert rows("status") == [("DEAD",)] * 2
    assert manage("requeue-dead", "--all").exit_code == 0
    assert rows("status") == [("NEW",)] * 2


def test_a_dry_run_counts_and_changes_nothing(stack: ServersOfTests) -> None:
    insert("hook", 2, status="DEAD", last_error="no")
    said = json.loads(manage("discard-dead", "--destination", "hook", "--dry-run", "--json").stdout)
    assert said == {"total": 2, "dryRun": True, "groups": [{"destination": "hook", "error": "no", "count": 2}]}
    assert len(rows()) == 2
    assert json.loads(manage("discard-dead", "--since", "1h", "--limit", "1", "--json").stdout) == {
        "done": 1,
        "total": 1,
    }
    assert json.loads(manage("discard-dead", "--until", "2000-01-01", "--json").stdout) == {"done": 0, "total": 0}
    assert len(rows()) == 1
    assert manage("discard-dead", "--since", "yesterday").exit_code == 2


def test_a_dry_run_with_a_limit_counts_only_the_events_it_would_change(stack: ServersOfTests) -> None:
    insert("old", 2, status="DEAD", last_error="no")
    insert("hook", 12, status="DEAD", last_error="no")
    said = json.loads(manage("requeue-dead", "--limit", "3", "--dry-run", "--json").stdout)
    assert said["total"] == 3
    assert {each["destination"]: each["count"] for each in said["groups"]} == {"old": 2, "hook": 1}
    assert manage("requeue-dead", "--limit", "3", "--all").exit_code == 0
    assert sorted(rows("destination", "status = 'NEW'")) == [("hook",), ("old",), ("old",)]


def test_a_rate_needs_a_unit(stack: ServersOfTests) -> None:
    insert("hook", 2, status="DEAD")
    assert manage("requeue-dead", "--all", "--rate", "5").exit_code == 2
    assert rows("status") == [("DEAD",)] * 2
    assert manage("requeue-dead", "--all", "--rate", "1000/s").exit_code == 0
    assert rows("status") == [("NEW",)] * 2


def test_a_requeued_event_is_published(relay: Relay) -> None:
    publisher = scripted(relay, "hook", lambda _event: Sent())
    ids = insert("hook", status="DEAD", attempt_count=10)
    list(requeue(engine(), Choice(ids), actor="me"))
    assert relay.tick().sent == 1
    assert publisher.got == ids
