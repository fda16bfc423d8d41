"""The broker functions give the same answers on Redis and on RabbitMQ."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from models.errors import Unreachable
from tasks import broker
from tests.tasks.held import Held


@pytest.fixture
def asked(celery_setup: Any, monkeypatch: pytest.MonkeyPatch) -> Celery:
    app: Celery = celery_setup.app
    monkeypatch.setattr(broker, "app", app)
    celery_setup.worker.container.kill()  # it would take the messages
    return app


def test_waiting_messages_are_counted_by_queue_and_can_be_purged(asked: Celery, held: Held) -> None:
    for priority in (0, 5, 9):
        asked.send_task("tests.hold", args=[str(held.folder), 0], priority=priority)
    assert broker.depths(["ingest", "never.declared"]) == {"ingest": 3, "never.declared": 0}
    assert broker.purge("ingest") == 3
    assert broker.purge("never.declared") == 0
    assert broker.depths(["ingest"]) == {"ingest": 0}


def test_an_unreachable_broker_is_reported_without_a_driver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    with pytest.raises(Unreachable, match="does not answer"):
        broker.depths(["ingest"])
