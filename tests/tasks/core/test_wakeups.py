"""Wake-ups on their way to the broker."""

from __future__ import annotations

import settings
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tasks.core import wakeups
from tasks.recovery.reclaim import Reclaimed, reclaim_leases
from tests.outbox.ledger import woken
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, submitted


def test_each_task_of_a_lost_batch_has_a_message_of_its_own(ledger: ServersOfTests) -> None:
    """In one message they would run one after the other in one process, and each would wait for the slow ones."""
    ids = submitted(10, "test.many")
    claimed(ids)
    assert after_commit_publisher().wait_until_idle(10)
    ledger.flush_redis()
    found = reclaim_leases(engine(), settings.current(), holders=["another:1"])
    assert found == Reclaimed(leases=1, isolated=10)
    assert after_commit_publisher().wait_until_idle(10)
    relay = Relay.of(settings.current())
    relay.tick()
    relay.close()
    assert sorted(woken(ledger)) == sorted([str(id_)] for id_ in ids)


def test_isolated_tasks_that_are_woken_again_with_others_have_messages_of_their_own(ledger: ServersOfTests) -> None:
    ids = submitted(6)
    assert after_commit_publisher().wait_until_idle(10)
    ledger.flush_redis()
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.ingest_task SET isolated = true WHERE id = ANY(:ids)"), {"ids": ids[:3]})
    with sessions().begin() as session:
        wakeups.wake_again(session, ids, queues=["ingest"])
    assert after_commit_publisher().wait_until_idle(10)
    alone, together = [[str(id_)] for id_ in ids[:3]], sorted(map(str, ids[3:]))
    assert sorted(map(sorted, woken(ledger))) == sorted([*alone, together])
