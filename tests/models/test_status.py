"""The Python enums and the CHECKs of the schema allow the same values and the same transitions."""

from __future__ import annotations

from enum import StrEnum
from itertools import product

import pytest
from psycopg2.errors import CheckViolation
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from models.sinks import Decision, SinkState
from models.sql import sql
from models.status import TASK_TRANSITIONS, EventStatus, TaskStatus

TASK = """
    INSERT INTO ledger.ingest_task (id, type, payload, status, lease_token, next_retry_at, finished_at)
    SELECT gen_random_uuid(), 't', '{}', s, CASE WHEN s = 'RUNNING' THEN gen_random_uuid() END,
           CASE WHEN s = 'RETRYING' THEN ledger.ledger_now() END,
           CASE WHEN s IN ('SUCCEEDED', 'DEAD', 'DISCARDED') THEN ledger.ledger_now() END
    FROM (SELECT :value AS s) AS given"""
EVENT = """
    INSERT INTO ledger.outbox_event (destination, payload, status, sent_at)
    SELECT 'd', '{}', s, CASE WHEN s = 'SENT' THEN ledger.ledger_now() END FROM (SELECT :value AS s) AS given"""
DECISION = """
    INSERT INTO ledger.sink_transaction (gid, task_id, sink, decision, decided_at)
    VALUES (gen_random_uuid()::text, gen_random_uuid(), 's', :value, ledger.ledger_now())"""
STATE = """
    INSERT INTO ledger.sink_transaction (gid, task_id, sink, state, decision, decided_at)
    SELECT gen_random_uuid()::text, gen_random_uuid(), 's', s, CASE s WHEN 'aborted' THEN 'abort' ELSE 'commit' END,
           ledger.ledger_now() FROM (SELECT :value AS s) AS given"""


def is_accepted(connection: Connection, insert: str, **values: object) -> bool:
    try:
        with connection.begin_nested():
            connection.execute(sql(insert), values)
    except IntegrityError as error:
        if not isinstance(error.orig, CheckViolation):
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("insert", "enum"),
    [(TASK, TaskStatus), (EVENT, EventStatus), (DECISION, Decision), (STATE, SinkState)],
    ids=["ingest_task", "outbox_event", "sink_transaction.decision", "sink_transaction.state"],
)
def test_a_status_outside_the_enum_is_refused(connection: Connection, insert: str, enum: type[StrEnum]) -> None:
    every = {value for known in (TaskStatus, EventStatus, Decision, SinkState) for value in known}
    others = {"", "PENDING", *(str(value).swapcase() for value in every)}
    assert {value for value in every | others if is_accepted(connection, insert, value=value)} == set(enum)


def test_a_transition_that_the_state_machine_does_not_have_is_refused(connection: Connection) -> None:
    insert = (
        "INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status) VALUES (gen_random_uuid(), :f, :t)"
    )
    pairs = product([None, *TaskStatus, "BOGUS"], [*TaskStatus, "BOGUS"])
    assert {(source, target) for source, target in pairs if is_accepted(connection, insert, f=source, t=target)} == {
        (source, target) for source, targets in TASK_TRANSITIONS.items() for target in targets
    }
