"""The Celery application of this process reads its settings once, and tests come with more than one broker."""

from __future__ import annotations

import sys
from typing import Any


def point_app_at(broker_url: str) -> None:
    """Whatever an earlier test has made of it: another broker, closed pools. If nobody has used it yet, it reads its
    settings by itself, and they may have been loaded for that earlier test.
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
