"""Adding events: they exist exactly if the caller's transaction commits, and are published right after the commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

import outbox
import settings
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.canonical_json import MAX_BYTES, BadPayload, canonical_json, payload_sha
from outbox.publishers.contract import DestinationDown
from outbox.relay import Relay
from settings import ROOT
from tests.outbox.ledger import WAKEUP, arrived, insert, move, rows
from tests.servers import ServersOfTests

pytestmark = pytest.mark.usefixtures("stack")


def wakeup() -> dict[str, Any]:
    return {"type": "t", "ids": [str(uuid.uuid4())], "batch": 100}


@pytest.fixture
def session(stack: ServersOfTests) -> Iterator[Session]:
    with sessions()() as session:
        yield session


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = [value]
    return value


def wait_until_published() -> None:
    assert after_commit_publisher().wait_until_idle(10)


def test_an_event_is_published_right_after_its_commit_without_a_relay(session: Session, stack: ServersOfTests) -> None:
    payload = wakeup()
    outbox.add(session, WAKEUP, payload)
    wait_until_published()
    assert arrived(stack) == {}  # not before the commit
    session.commit()
    wait_until_published()
    assert arrived(stack) == {payload["ids"][0]: 1}
    assert rows("status, attempt_count, lease_token, sent_at IS NOT NULL") == [("SENT", 0, None, True)]


def test_a_rolled_back_event_is_neither_stored_nor_published(session: Session, stack: ServersOfTests) -> None:
    outbox.add(session, WAKEUP, wakeup())
    session.rollback()
    outbox.add(session, WAKEUP, wakeup())
    session.close()
    wait_until_published()
    assert rows() == []
    assert arrived(stack) == {}


def test_events_of_a_rolled_back_savepoint_are_dropped_and_those_of_a_released_one_are_published(
    session: Session, stack: ServersOfTests
) -> None:
    kept, inner, lost, late = wakeup(), wakeup(), wakeup(), wakeup()
    outbox.add(session, WAKEUP, kept)
    with session.begin_nested():
        with session.begin_nested():
            outbox.add(session, WAKEUP, inner)
        wait_until_published()
        assert arrived(stack) == {}  # a released savepoint is not a commit
    nested = session.begin_nested()
    with session.begin_nested():
        outbox.add(session, WAKEUP, lost)
    nested.rollback()
    outbox.add(session, WAKEUP, late)
    session.commit()
    wait_until_published()
    assert arrived(stack).keys() == {one["ids"][0] for one in (kept, inner, late)}
    assert len(rows()) == 3


def test_a_session_can_be_used_again_after_its_commit(session: Session, stack: ServersOfTests) -> None:
    for _ in range(3):
        outbox.add(session, WAKEUP, wakeup())
        session.commit()
    wait_until_published()
    assert [status for status, _ in rows()] == ["SENT"] * 3


def test_events_of_a_plain_connection_are_published_by_the_relay(relay: Relay, stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        outbox.add(connection, WAKEUP, wakeup())
    assert rows("status, lease_token") == [("NEW", None)]
    assert relay.tick().sent == 1


def test_outbox_begin_publishes_after_a_commit_and_not_after_a_rollback(stack: ServersOfTests) -> None:
    payload = wakeup()
    with outbox.begin(engine()) as connection:
        outbox.add(connection, WAKEUP, payload)
    with suppress(RuntimeError), outbox.begin(engine()) as connection:
        outbox.add(connection, WAKEUP, wakeup())
        raise RuntimeError
    wait_until_published()
    assert arrived(stack) == {payload["ids"][0]: 1}
    assert len(rows()) == 1


def test_a_rolled_back_savepoint_inside_outbox_begin_publishes_nothing(relay: Relay, stack: ServersOfTests) -> None:
    with outbox.begin(engine()) as connection:
        savepoint = connection.begin_nested()
        outbox.add(connection, WAKEUP, wakeup())
        savepoint.rollback()
        with connection.begin_nested():
            outbox.add(connection, WAKEUP, wakeup())
    wait_until_published()
    assert relay.tick().sent == 1
    assert sum(arrived(stack).values()) == 1


def test_a_session_that_joined_an_outer_transaction_publishes_nothing_at_its_own_commit(
    relay: Relay, stack: ServersOfTests
) -> None:
    with engine().connect() as connection:
        transaction = connection.begin()
        with Session(bind=connection, join_transaction_mode="create_savepoint") as joined:
            outbox.add(joined, WAKEUP, wakeup())
            joined.commit()
        wait_until_published()
        transaction.rollback()
    assert arrived(stack) == {}
    assert rows() == []


def test_scheduled_and_ordered_events_are_published_by_the_relay(session: Session, relay: Relay) -> None:
    later = session.execute(sql("SELECT ledger.ledger_now()")).scalar_one() + timedelta(hours=1)
    outbox.add(session, WAKEUP, wakeup(), due_at=later)
    outbox.add(session, WAKEUP, wakeup(), ordering_key="k")
    session.commit()
    wait_until_published()
    assert rows("status, lease_token") == [("NEW", None), ("NEW", None)]
    assert relay.tick().sent == 1


@pytest.mark.parametrize(("place", "copies"), [("after_commit.handed_over", 1), ("after_commit.published", 2)])
@pytest.mark.guarantee
def test_a_process_killed_right_after_its_commit_loses_no_event(
    place: str, copies: int, relay: Relay, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_SUBMIT_LEASE_SECONDS", "60")  # five seconds may pass on a busy machine
    settings.current.cache_clear()
    code = (
        "import outbox; from models.engine import sessions\n"
        "from outbox.after_commit_publisher import after_commit_publisher\n"
        "with sessions()() as session:\n"
        "    outbox.add(session, 'celery:ingest', {'type': 't', 'ids': ['one']}); session.commit()\n"
        "after_commit_publisher().wait_until_idle(20)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"FAILPOINTS": f"{place}=kill"}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert relay.tick().sent == 0  # the lease has not expired yet
    assert rows("lease_until > ledger.ledger_now() + interval '30 s'") == [(True,)]
    move(stack, settings.current().outbox_submit_lease_seconds + 1)
    assert relay.tick().sent == 1
    assert arrived(stack) == {"one": copies}


@pytest.mark.guarantee
def test_a_process_killed_before_its_commit_publishes_nothing(relay: Relay, stack: ServersOfTests) -> None:
    code = (
        "import os, outbox; from models.engine import sessions\n"
        "session = sessions()()\n"
        "outbox.add(session, 'celery:ingest', {'type': 't', 'ids': ['one']})\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    move(stack, 600)
    assert relay.tick().sent == 0
    assert rows() == []
    assert arrived(stack) == {}


def test_events_for_an_unreachable_broker_are_released_and_the_next_ones_are_not_leased_at_insert(
    session: Session, relay: Relay, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.add(session, WAKEUP, wakeup())
    session.commit()
    wait_until_published()

    def refuse(_events: Any) -> Any:
        raise DestinationDown("connection refused")

    monkeypatch.setattr(after_commit_publisher()._destinations.by_name[WAKEUP].publisher, "publish", refuse)
    outbox.add(session, WAKEUP, wakeup())
    session.commit()
    wait_until_published()
    assert rows("status, lease_token")[1] == ("NEW", None)  # released; the relay need not wait for the lease to expire
    outbox.add(session, WAKEUP, wakeup())
    session.commit()
    assert rows("status, lease_token")[2] == ("NEW", None)  # the circuit is open
    assert relay.tick().sent == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publishing_thread_that_an_exception_has_ended_is_started_again(
    session: Session, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_thread(*_: Any) -> None:
        raise SystemExit

    publisher = after_commit_publisher()
    with monkeypatch.context() as broken:
        broken.setattr(publisher, "_publish_fresh", end_thread)
        outbox.add(session, WAKEUP, wakeup())
        session.commit()
        assert publisher._thread is not None
        publisher._thread.join(10)
    payload = wakeup()
    outbox.add(session, WAKEUP, payload)
    session.commit()
    wait_until_published()
    assert payload["ids"][0] in arrived(stack)


def test_a_forked_child_publishes_with_its_own_thread_and_token(session: Session, stack: ServersOfTests) -> None:
    outbox.add(session, WAKEUP, wakeup())
    session.commit()
    wait_until_published()
    parent_token = after_commit_publisher().lease_token
    pid = os.fork()
    if pid == 0:
        with sessions()() as own:
            outbox.add(own, WAKEUP, wakeup())
            own.commit()
        ours = after_commit_publisher()
        os._exit(0 if ours.wait_until_idle(10) and ours.lease_token != parent_token else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [status for status, _ in rows()] == ["SENT", "SENT"]


def test_ten_thousand_events_are_added_in_ten_round_trips(session: Session) -> None:
    statements: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine(), "before_cursor_execute", note)
    ids = outbox.add_many(session, [outbox.NewEvent("hook", {"n": n}) for n in range(10_000)])
    assert len(statements) == 10
    statements.clear()
    outbox.add(session, "hook", {})
    assert len(statements) == 1
    event.remove(engine(), "before_cursor_execute", note)
    assert ids == sorted(ids)
    assert [row[0]["n"] for row in rows_of(session)] == [*range(10_000)]


def rows_of(session: Session) -> list[tuple[Any, ...]]:
    statement = sql("SELECT payload FROM ledger.outbox_event WHERE payload ? 'n' ORDER BY id")
    return [tuple(row) for row in session.execute(statement)]


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        ({"a": object()}, "payload_not_json"),
        ({"a": float("nan")}, "payload_not_json"),
        ({"a": "\ud800"}, "payload_not_json"),
        ({"a": "x\x00y"}, "payload_has_nul"),
        ({"a\x00": 1}, "payload_has_nul"),
        ({"a": "x" * 10_000_000}, "payload_too_large"),
        (nested(64), "payload_too_deep"),
        (nested(100_000), "payload_too_deep"),
        ([{str(n): n} for n in range(10_001)], "payload_too_many_keys"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_bad_payload_is_refused_before_any_event_is_stored(payload: Any, code: str, session: Session) -> None:
    with pytest.raises(BadPayload) as refused:
        outbox.add_many(session, [outbox.NewEvent("hook", {"good": True}), outbox.NewEvent("hook", payload)])
    assert refused.value.code == code
    session.commit()
    assert rows() == []


def test_a_payload_just_within_the_limits_is_stored(session: Session) -> None:
    outbox.add(session, "hook", nested(63))
    outbox.add(session, "hook", [{str(n): "{[:"} for n in range(10_000)])
    session.commit()
    assert len(rows()) == 2


def test_text_that_looks_like_an_escaped_nul_is_stored_unchanged(session: Session) -> None:
    outbox.add(session, "hook", {"a": "\\u0000"})
    session.commit()
    wait_until_published()
    assert rows("payload") == [({"a": "\\u0000"},)]


def test_a_payload_that_would_break_celerys_decoder_is_never_sent_to_the_broker(
    relay: Relay, stack: ServersOfTests
) -> None:
    with engine().begin() as connection:
        outbox.add(connection, WAKEUP, {"__type__": "uuid", "__value__": "x"})
    assert relay.tick().dead == 1
    assert arrived(stack) == {}


def test_equal_payloads_have_the_same_hash_in_any_order_of_keys() -> None:
    one, other = canonical_json({"b": 1, "a": ["é", None]}), canonical_json({"a": ["é", None], "b": 1})
    assert one == other == '{"a":["é",null],"b":1}'
    assert payload_sha(one) == payload_sha(other) != payload_sha(canonical_json({"b": 1}))
    assert len(canonical_json("x" * (MAX_BYTES - 2)).encode()) == MAX_BYTES


def test_a_plain_insert_from_any_program_is_published_by_the_relay(relay: Relay) -> None:
    insert(WAKEUP, 2)
    assert relay.tick().sent == 2
