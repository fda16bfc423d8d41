"""The hash of a payload is the same, whether Python or a plain INSERT writes the event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as how
from hypothesis import strategies as st
from sqlalchemy import Connection

import outbox as events
from models.engine import engine, sessions
from models.sql import sql
from outbox.canonical_json import canonical_json, payload_sha
from outbox.publishers.contract import Sent
from outbox.relay import Relay
from tasks.operations.dead_tasks import Choice, discard
from tests.outbox.ledger import WAKEUP, insert, rows
from tests.outbox.scripted import scripted
from tests.outbox.table import OutboxTable
from tests.servers import ServersOfTests
from tests.tasks.command_line import buried

INSERT = sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('d', :payload) RETURNING payload_sha")
# PostgreSQL stores no NUL, and Python's own encoder writes no unpaired surrogate.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
PAYLOADS = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


def inserted_sha(connection: Connection, written: str) -> str | None:
    sha: str | None = connection.execute(INSERT, {"payload": written}).scalar_one()
    return sha


@how(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=PAYLOADS)
def test_a_plain_insert_of_any_payload_gets_the_hash_that_outbox_add_computes(
    outbox: OutboxTable, payload: Any
) -> None:
    with outbox.engine.connect() as connection:  # nothing is committed
        assert inserted_sha(connection, json.dumps(payload)) == payload_sha(canonical_json(payload))


@pytest.mark.parametrize(
    "payload",
    [
        1e16,
        1.5e300,
        -1e-5,
        5e-324,
        1e22,
        123456789012345680.0,
        0.1,
        -0.0,
        0.0,
        100.0,
        10**40,
        "1e+16 -0.0 \\",
        "\x7f\x1f\u2028é😀",
    ],
)
def test_numbers_and_text_that_databases_write_differently_have_one_hash(outbox: OutboxTable, payload: Any) -> None:
    values = [payload, [payload, payload], {"a": payload, "aa": [payload], "b": payload, "é": 1, "z": 2, "": 0}]
    with outbox.engine.connect() as connection:
        for value in values:
            assert inserted_sha(connection, json.dumps(value)) == payload_sha(canonical_json(value)), value


@pytest.mark.parametrize(
    ("one", "other"),
    [('{"b": 1.50, "a": 2.0}', '{ "a" : 2.000, "b": 1.5 }'), ('{"a": 1e2}', '{"a": 100}'), ('["\\u00e9"]', '["é"]')],
)
def test_one_payload_in_two_spellings_has_one_hash(outbox: OutboxTable, one: str, other: str) -> None:
    with outbox.engine.connect() as connection:
        assert inserted_sha(connection, one) == inserted_sha(connection, other) is not None
        assert inserted_sha(connection, '{"a": 1}') != inserted_sha(connection, '{"a": "1"}')


def test_a_payload_that_is_nested_too_deeply_for_a_hash_is_still_inserted(outbox: OutboxTable) -> None:
    with outbox.engine.connect() as connection:
        assert inserted_sha(connection, "[" * 64 + "]" * 64) == payload_sha("[" * 64 + "]" * 64)
        assert inserted_sha(connection, "[" * 65 + "]" * 65) is None
        assert inserted_sha(connection, '{"a": 1, "b": ' + "[" * 2000 + "]" * 2000 + "}") is None


def test_a_hash_that_the_program_gives_is_kept_and_a_wakeup_has_none(stack: ServersOfTests) -> None:
    insert("hook", payload_sha="its own")
    insert(WAKEUP)
    with sessions()() as session:
        events.add(session, WAKEUP, {"type": "t", "ids": ["x"]})
        session.commit()
    assert [row[0] for row in rows("payload_sha")] == ["its own", None, None]


def test_a_plain_insert_is_recognised_as_a_duplicate_of_an_event_of_outbox_add(
    relay: Relay, stack: ServersOfTests
) -> None:
    publisher = scripted(relay, "hook", lambda _event: Sent("theirs"), dedup=True)
    with engine().begin() as connection:
        events.add(connection, "hook", {"order": 7, "total": 12.5})
    assert relay.tick().sent == 1
    with engine().begin() as connection:
        plain = sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('hook', :payload)")
        connection.execute(plain, {"payload": '{"total": 12.50, "order": 7}'})
    relay.tick()
    assert len(publisher.got) == 1
    assert rows("status, external_id") == [("SENT", "theirs")] * 2


def test_the_notification_of_a_task_carries_the_hash_of_its_payload(stack: ServersOfTests) -> None:
    buried(1, notify="orders")
    assert len(list(discard(engine(), Choice(), actor="operator", reason="cancelled"))) == 1
    ((payload, sha),) = rows("payload, payload_sha", "destination = 'orders'")
    assert sha == payload_sha(canonical_json(payload))


def test_the_hash_costs_a_wakeup_nothing(outbox: OutboxTable) -> None:
    """The trigger's condition leaves wake-ups out, so its function is not called for them."""
    db = outbox.superuser()
    db.execute(sql("SET track_functions = 'all'"))
    add = sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES (:destination, '{}')")
    found = sql(
        "SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'outbox_event_payload_sha'"
    )
    calls = []
    for destination in ("celery:ingest", "celery:ingest", "hook"):
        db.execute(add, {"destination": destination})
        db.execute(sql("SELECT pg_stat_force_next_flush()"))
        db.commit()
        calls.append(db.execute(found).scalar_one())
        db.commit()
    assert [int(each - calls[0]) for each in calls] == [0, 0, 1]
