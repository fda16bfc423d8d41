"""What `manage.py queues` shows about each queue."""

from __future__ import annotations

import pytest

from outbox.after_commit_publisher import after_commit_publisher
from tasks import ticks
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.command_line import manage
from tests.tasks.deliveries import claimed, delivered, submitted

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def test_operators_see_depth_age_running_and_dead_letters_of_a_queue(ledger: ServersOfTests) -> None:
    claimed(submitted(3))
    delivered(submitted(1, "test.fail", max_attempts=1))
    submitted(2)
    assert after_commit_publisher().wait_until_idle(20)
    ticks.run("relay")
    move(ledger, 90)
    wait_until(lambda: manage("queues", "--json").json["dlqMessages"] == 1, "the dead letter is in its queue")
    shown = manage("queues", "--json").json
    (queue,) = shown["queues"]
    assert (queue["messages"], queue["due"], queue["running"], queue["dead"]) == (3, 2, 3, 1)
    assert queue["oldestDue"] >= 90
    heading, line, _, letters = manage("queues").out.splitlines()
    assert heading.split() == ["queue", "messages", "due", "oldest", "due", "running", "dead", "processes", "state"]
    assert line.split() == ["ingest", "3", "2", "1m", "30s", "3", "1", "no", "worker", "open"]
    assert letters == "dead letters in ingest.dlq: 1"
