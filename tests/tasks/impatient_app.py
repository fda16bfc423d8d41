"""The Celery application with a Redis that delivers messages again after two seconds instead of an hour."""

from __future__ import annotations

from tasks.celery import app

app.conf.broker_transport_options = {
    **app.conf.broker_transport_options,
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
}
