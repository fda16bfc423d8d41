"""Point the Celery application of the test process at another broker."""

from __future__ import annotations

import sys
from typing import Any

import kombu.pools

from outbox.after_commit_publisher import after_commit_publisher


def close_broker_connections() -> None:
    """Close the pools of kombu, and forget the publishing thread, which may wait for one of their connections."""
    kombu.pools.reset()
    if made := after_commit_publisher.made:
        made.close()
        after_commit_publisher.made = None


def point_app_at(broker_url: str) -> None:
    """Make the application use this broker, also if an earlier test has used another one or closed its pools.

    Celery reads its settings once, when the application is first used. Before that, only a `celeryconfig` that was
    imported for an earlier test is corrected.
    """
    if loaded := sys.modules.get("celeryconfig"):
        vars(loaded)["broker_url"] = broker_url
    module: Any = sys.modules.get("tasks.celery")
    if module is None or not module.app.configured:
        return
    app = module.app
    app._pool = app.amqp._producer_pool = None
    if app.conf.broker_url != broker_url:
        app.conf.update(broker_url=broker_url, broker_read_url=broker_url, broker_write_url=broker_url)
