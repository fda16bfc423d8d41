"""Handlers for workers whose tasks fail or are cancelled. Sentry and receivers of signals write into a file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

import sentry_sdk
from celery import signals
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport
from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from models.engine import engine
from tasks import LeaseLost, Task, handler

CREATE: Final[TextClause] = text("CREATE TABLE public.result_effect (task_id uuid NOT NULL, note text NOT NULL)")
INSERT: Final[TextClause] = text("INSERT INTO public.result_effect (task_id, note) VALUES (:task_id, :note)")
FILE: Final = "RESULTS_FILE"  # a variable with the name of the file
SECRET: Final = "card 4711"


class CardRefused(Exception):
    """What a handler of a user raises."""


class FileTransport(Transport):
    """Writes Sentry's events into the file, in the place of a server."""

    def capture_envelope(self, envelope: Envelope) -> None:
        if event := envelope.get_event():
            write("sentry", event)


def write(kind: str, what: Any) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps([kind, what], default=str) + "\n")


def connect() -> None:
    """Start Sentry as its documentation says, and receive signals."""
    sentry_sdk.init(dsn="http://key@localhost/1", transport=FileTransport)
    for name in ("task_prerun", "task_success", "task_retry", "task_failure", "task_postrun"):

        def receive(sender: Any, *, signal: Any, task_id: str | None = None, **_: Any) -> None:
            if sender.name.startswith("results."):
                write("signal", [signal.name, sender.name, task_id])

        getattr(signals, name).connect(receive, weak=False)


if FILE in os.environ:
    connect()


@handler("results.add")
def add(task: Task, _db: Session) -> int:
    return sum(task.payload)


@handler("results.fails", max_attempts=2, backoff=[0])
def fail(_task: Task, _db: Session) -> None:
    raise CardRefused(SECRET)


@handler("results.inside", batch=1)
def wait_inside(task: Task, db: Session) -> None:
    db.execute(INSERT, {"task_id": task.id, "note": "written"})
    _wait(task)


@handler("results.outside", batch=1, transactional=False)
def wait_outside(task: Task) -> None:
    _wait(task)


def _wait(task: Task) -> None:
    """Wait until the task is taken away, and write that down in a transaction of its own."""
    try:
        while True:
            time.sleep(0.02)
    except LeaseLost:
        with engine().begin() as connection:
            connection.execute(INSERT, {"task_id": task.id, "note": "interrupted"})
        raise
