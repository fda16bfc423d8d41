"""A dead wake-up is replaced when its task is woken again, so that repetitions do not pile up in the outbox."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pytest

from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks.core.wakeups import wake_again
from tests.outbox.ledger import rows
from tests.tasks.deliveries import submitted

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def kill_wakeups() -> None:
    """Make all wake-ups DEAD, with an audit, as a relay does when the broker refuses them."""
    assert after_commit_publisher().wait_until_idle(20)
    with engine().begin() as connection:
        connection.execute(
            sql("""
            WITH dead AS (
                UPDATE ledger.outbox_event SET status = 'DEAD', sent_at = NULL, last_error = 'There is no queue.',
                    attempt_count = 1 RETURNING id)
            INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id)
            SELECT id, 'outbox_flush_dead', 'relay' FROM dead""")
        )


def wake(ids: Sequence[uuid.UUID]) -> None:
    with sessions()() as session:
        assert wake_again(session, ids, queues=[]).tasks == len(ids)
        session.commit()


def named() -> list[tuple[str, list[str]]]:
    return [(status, sorted(payload["ids"])) for status, payload in rows("status, payload")]


def audited() -> set[int]:
    with engine().begin() as connection:
        return set(connection.execute(sql("SELECT outbox_id FROM ledger.outbox_audit")).scalars())


def test_a_task_that_is_woken_again_and_again_leaves_at_most_one_dead_wakeup() -> None:
    (task,) = submitted()
    for _ in range(3):
        kill_wakeups()
        wake([task])
        assert named() == [("NEW", [str(task)])]
        assert audited() == set()  # the audit of the event that was replaced is deleted with it


def test_a_dead_wakeup_that_also_names_a_task_that_was_not_woken_stays() -> None:
    one, other = submitted(2)
    kill_wakeups()
    wake([one])
    assert named() == [("DEAD", sorted([str(one), str(other)])), ("NEW", [str(one)])]
    wake([one, other])
    assert [status for status, _ in named()] == ["NEW", "NEW"]


def test_waking_a_task_reads_only_its_own_dead_wakeups() -> None:
    (task,) = submitted()
    kill_wakeups()
    with engine().begin() as connection:
        connection.execute(
            sql("""
            INSERT INTO ledger.outbox_event (destination, payload, status)
            SELECT 'celery:ingest', jsonb_build_object('type', 't', 'ids', jsonb_build_array(gen_random_uuid())), 'DEAD'
            FROM generate_series(1, 5000)""")
        )
        connection.execute(sql("ANALYZE ledger.outbox_event"))
        plan = connection.execute(
            sql("""EXPLAIN SELECT FROM ledger.outbox_event WHERE status = 'DEAD' AND destination LIKE 'celery:%'
                AND payload -> 'ids' ?| ARRAY(SELECT CAST(id AS text) FROM ledger.ingest_task)""")
        )
        assert "ix_outbox_event_dead_wakeups" in "\n".join(plan.scalars())
    wake([task])
    assert sum(status == "DEAD" for status, _ in named()) == 5000
