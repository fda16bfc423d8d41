"""Run `manage.py` in this process or as a program, and create tasks in a given state."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest

import commands
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from settings import ROOT
from tasks import NewTask, submit_many
from tasks.execution.deliver import deliver
from tests.nodes.programs import environment
from tests.tasks import work

FLAKY = "demo.flaky"
DIES = {"permanent": "it will never work"}


@dataclass(frozen=True, slots=True)
class Done:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def manage(*arguments: object, stdin: bytes = b"") -> Done:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as here, redirect_stdout(out), redirect_stderr(err):
        here.setattr(sys, "argv", ["manage.py", *map(str, arguments)])
        here.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = commands.main()
    return Done(code, out.getvalue(), err.getvalue())


def started(*arguments: str, **how: Any) -> subprocess.Popen[str]:
    """Start `manage.py` as a program."""
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    home = os.environ["CELERIAC_HOME"]
    return subprocess.Popen(
        command,
        env=environment(CELERIAC_HOME=home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def submitted(*payloads: Any, type: str = FLAKY, **options: Any) -> list[uuid.UUID]:
    """Submit tasks, wait until their wake-ups are published, and return the ids."""
    with sessions().begin() as session:
        made = submit_many(session, [NewTask(type, one, **options) for one in payloads])
    assert after_commit_publisher().wait_until_idle(60)
    return [each.task_id for each in made]


def dead(*payloads: Any) -> list[uuid.UUID]:
    """Submit tasks and run them until they are DEAD."""
    ids = submitted(*(payloads or [DIES]))
    deliver(engine(), ids)
    assert set(statuses(ids)) == {"DEAD"}
    return ids


def buried(count: int, **columns: Any) -> list[uuid.UUID]:
    """Insert DEAD tasks with SQL; all died at the same moment."""
    values = {"type": FLAKY, "payload": "{}", "error_code": "handler_error", "error_message": "no", "last_error": "no"}
    values |= columns
    names, places = ", ".join(values), ", ".join(f":{name}" for name in values)
    insert = sql(f"""
        INSERT INTO ledger.ingest_task (id, status, finished_at, error_fingerprint, {names})
        SELECT gen_random_uuid(), 'DEAD', (SELECT ledger.ledger_now()),
               ledger.ingest_error_fingerprint(:error_code, :error_message), {places}
        FROM generate_series(1, :n) RETURNING id""")
    with engine().begin() as connection:
        return list(connection.execute(insert, {**values, "n": count}).scalars())


def change(ids: Sequence[uuid.UUID], changes: str, **values: Any) -> None:
    """Update tasks with SQL."""
    with engine().begin() as connection:
        connection.execute(
            sql(f"UPDATE ledger.ingest_task SET {changes} WHERE id = ANY(CAST(:ids AS uuid[]))"),
            {"ids": list(ids), **values},
        )


def statuses(ids: Sequence[uuid.UUID]) -> list[str]:
    found = dict(work.rows("id, status", "id = ANY(:ids)", ids=list(ids)))
    return [found[id_] for id_ in ids]
