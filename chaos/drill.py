"""Outage drills on a running development stack: take a part away, look, bring it back, and say what was kept.

    postgres      tasks that are running wait for the ledger and lose nothing; submitting is refused meanwhile
    broker        tasks are submitted all the same, and wait in the ledger
    destination   events wait in the outbox, and are sent when the destination answers again

The supervisor of the stack does not restart a server while it is held. The destination is a small HTTP server of the
drill. The relays of the stack do not know it and would mark its events DEAD, so the drill leases the tick `relay` and
runs a relay for its own destination; other events that no process publishes after its commit wait until the drill ends.

A drill that is killed needs no repair: the hold on a server and the lease of the tick expire by themselves. Only events
of the destination may be left; the next drill deletes them.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

import outbox
import settings
from chaos.http_endpoint import HttpEndpoint
from chaos.programs import wait_until
from child_process import OwnProcess
from embedded.home import Home
from embedded.roles import STOP_SIGNALS
from embedded.temporary_servers import environment
from models.engine import engine, sessions
from models.errors import CeleriacError, Misuse
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.circuit import LONGEST_WAIT_SECONDS
from outbox.relay import Relay
from tasks import NewTask, submit_many
from tasks.recovery.tick_rows import renew_tick, single_flight

TYPE: Final = "demo.flaky"
TASKS: Final = 20
EVENTS: Final = 10
DESTINATION: Final = "celeriac-drill"
RELAY: Final = "relay"  # the tick
LEASE_SECONDS: Final = 10.0  # of the tick; renewed several times per second
RETURN_SECONDS: Final = 60.0  # how long a drill waits for what must happen afterwards
ROLES: Final = {"postgres": "postgres", "broker": "redis-broker"}
# found: how many of these tasks exist, have succeeded, wait, and were charged with a failure.
FOUND: Final = sql("""
    SELECT count(*), count(*) FILTER (WHERE status = 'SUCCEEDED'), count(*) FILTER (WHERE status <> 'SUCCEEDED'),
           count(*) FILTER (WHERE attempt_count > 0)
    FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))
""")
# finished_since_start: tasks that were unfinished when PostgreSQL stopped.
FINISHED_SINCE_START: Final = sql("""
    SELECT count(*) FROM ledger.ingest_task
    WHERE id = ANY(CAST(:ids AS uuid[])) AND finished_at >= pg_postmaster_start_time()
""")
# events_found: how many of these events exist, were sent, wait, and were charged with a failed probe.
EVENTS_FOUND: Final = sql("""
    SELECT count(*), count(*) FILTER (WHERE status = 'SENT'), count(*) FILTER (WHERE status <> 'SENT'),
           count(*) FILTER (WHERE attempt_count > 0)
    FROM ledger.outbox_event WHERE id = ANY(CAST(:ids AS bigint[]))
""")
# delete_events: those of this drill, and those that a killed drill has left.
DELETE_EVENTS: Final = sql("DELETE FROM ledger.outbox_event WHERE destination = :destination")


class Part(StrEnum):
    """What a drill takes away."""

    POSTGRES = "postgres"
    BROKER = "broker"
    DESTINATION = "destination"

    @property
    def subject(self) -> str:
        """The part as the subject of a sentence."""
        return "PostgreSQL" if self is Part.POSTGRES else f"the {self}"


class NoStack(Misuse):
    """The drill needs the embedded stack.

    It stops servers, so it runs only against the development stack that `make up` starts, and never against a server
    that DATABASE_URL or BROKER_URL names.
    """

    code = "no_stack"
    remedy = "Start the stack with `make start`, and unset DATABASE_URL and BROKER_URL."


@dataclass(frozen=True, slots=True)
class Drilled:
    """What a drill found: how much was given before and during the outage, and what became of it."""

    part: Part
    away_seconds: float
    given: int
    waited: int  # unfinished when PostgreSQL stopped, or while another part was away
    done: int
    charged: int  # tasks with a counted failure although only the part was away
    recovered_seconds: float  # from its return until everything was done
    probed: int = 0  # events with a counted failure: each probe of the destination counts
    duplicates: int = 0  # requests that the destination got again

    @property
    def is_right(self) -> bool:
        return self.done == self.given and self.charged == 0 and self.duplicates == 0

    def sentences(self) -> str:
        """Return what was kept, for people."""
        if self.part is Part.DESTINATION:
            kept = (
                f"{self.done} of {self.given} events were sent; {self.waited} of them had waited in the outbox."
                f" Sent twice: {self.duplicates}. A failed probe counts as an attempt of: {self.probed}."
            )
        else:
            kept = (
                f"{self.done} of {self.given} tasks have succeeded; {self.waited} of them had waited in the ledger."
                f" Tasks with a counted failure: {self.charged}."
            )
        return f"{kept}\nEverything was done {self.recovered_seconds:.1f} s after {self.part.subject} came back."


Say = Callable[[str], None]


def drill(part: Part, *, seconds: float, say: Say) -> Drilled:
    """Perform one drill."""
    home = _require_stack(part)
    if part is Part.DESTINATION:
        return _drill_destination(seconds, say)
    ids = _submit(sleep=0.2 if part is Part.POSTGRES else 0.0, count=TASKS)
    say(f"submitted {TASKS} tasks")
    waited = 0
    with _taken_away(home, part, seconds):
        say(f"{part.subject} is stopped for {seconds:g} s")
        until = time.monotonic() + seconds
        if part is Part.BROKER:
            ids += _submit(sleep=0.0, count=TASKS)
            say(f"submitted {TASKS} more tasks; the ledger has them")
        else:
            say(_try_to_submit())
        time.sleep(max(0.0, until - time.monotonic()))
        if part is Part.BROKER:
            waited = _read(FOUND, ids)[2]
            say(f"{waited} tasks wait in the ledger")
    returned_at = time.monotonic()
    say(f"{part.subject} comes back")
    wait_until(lambda: _counted(FOUND, ids)[1] == len(ids), "all tasks have succeeded", seconds=RETURN_SECONDS)
    recovered_seconds = time.monotonic() - returned_at
    if part is Part.POSTGRES:
        waited = _read(FINISHED_SINCE_START, ids)[0]
        say(f"{waited} tasks were unfinished when it stopped")
    _, done, _, charged = _read(FOUND, ids)
    return Drilled(part, seconds, len(ids), waited, done, charged, recovered_seconds)


def _require_stack(part: Part) -> Home:
    """Return the home of the running stack, or raise NoStack. Every part needs both servers to be the stack's own."""
    current = settings.current()
    named = [variable for variable in ("DATABASE_URL", "BROKER_URL") if current.given(variable)]
    if named:
        raise NoStack(
            f"The drill takes away the {part} of a development stack, and {' and '.join(named)} may name other servers."
        )
    if not current.stack:
        raise NoStack(f"The drill takes away the {part} of a development stack, and none runs in {current.home}.")
    return Home(current.home)


@contextmanager
def _taken_away(home: Home, part: Part, seconds: float) -> Iterator[None]:
    """Stop a server of the stack, and let the supervisor start it again at the end of the block."""
    role = ROLES[part]
    process = OwnProcess.read(home.pid_file(role))
    if process is None:
        raise NoStack(f"The stack in {home.path} has no {part} of its own.")
    home.hold(role, seconds + RETURN_SECONDS)
    try:
        process.send_signal(STOP_SIGNALS.get(role, signal.SIGTERM))
        wait_until(lambda: not process.is_alive(), f"{part} has stopped", seconds=RETURN_SECONDS)
        yield
    finally:
        home.release(role)


def _drill_destination(seconds: float, say: Say) -> Drilled:
    with HttpEndpoint() as endpoint:
        address = f"{endpoint.url}?allow_private=1&allow_http=1"
        given = {"OUTBOX_DESTINATIONS": json.dumps({DESTINATION: address})}
        with environment({**os.environ, **given}), _relaying() as publish:
            ids = _add_events(1)
            wait_until(
                lambda: publish() and _read(EVENTS_FOUND, ids)[1], "the first event is sent", seconds=RETURN_SECONDS
            )
            say("the destination answers: one event was sent")
            posted = endpoint.posted_keys()
            endpoint.stop()
            say(f"{Part.DESTINATION.subject} is stopped for {seconds:g} s")
            ids += _add_events(EVENTS)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                publish()
                time.sleep(0.2)
            waited = _read(EVENTS_FOUND, ids)[2]
            say(f"{waited} events wait in the outbox")
            endpoint.start()
            returned_at = time.monotonic()
            say(f"{Part.DESTINATION.subject} comes back; the next probe finds that out")

            def is_sent() -> bool:
                publish()
                return _read(EVENTS_FOUND, ids)[1] == len(ids)

            wait_until(is_sent, "all events are sent", seconds=LONGEST_WAIT_SECONDS + RETURN_SECONDS)
            recovered_seconds = time.monotonic() - returned_at
            _, done, _, probed = _read(EVENTS_FOUND, ids)
            posted += endpoint.posted_keys()
            return Drilled(
                Part.DESTINATION,
                seconds,
                len(ids),
                waited,
                done,
                0,
                recovered_seconds,
                probed=probed,
                duplicates=len(posted) - len(set(posted)),
            )


@contextmanager
def _relaying() -> Iterator[Callable[[], object]]:
    """Keep the relays of the stack away, and yield a function that publishes the drill's own events.

    The function renews the lease, so it must be called every few seconds. All events of the drill are deleted at the
    end, before the relays of the stack return: they would mark unsent ones DEAD.
    """
    token = uuid.uuid4()
    with ExitStack() as stack:

        def is_ours() -> bool:
            return stack.enter_context(
                single_flight(engine(), RELAY, holder="drill", seconds=LEASE_SECONDS, token=token)
            )

        wait_until(is_ours, "no relay of the stack runs", seconds=RETURN_SECONDS)  # one may have died in an outage
        _delete_events()
        relay = Relay.of(settings.current(), only=DESTINATION)

        def publish() -> object:
            if not renew_tick(engine(), RELAY, token=token, seconds=LEASE_SECONDS):
                raise CeleriacError("Another process has taken over the tick `relay`; repeat the drill.")
            return relay.tick(1.0)

        try:
            yield publish
        finally:
            relay.close()
            _delete_events()


def _delete_events() -> None:
    with engine().begin() as connection:
        connection.execute(DELETE_EVENTS, {"destination": DESTINATION})


def _add_events(count: int) -> list[int]:
    with sessions().begin() as session:
        return [outbox.add(session, DESTINATION, {"drill": str(uuid.uuid4())}) for _ in range(count)]


def _submit(*, sleep: float, count: int) -> list[uuid.UUID]:
    with sessions().begin() as session:
        ids = [each.task_id for each in submit_many(session, [NewTask(TYPE, {"sleep": sleep})] * count)]
    after_commit_publisher().wait_until_idle(5)
    return ids


def _try_to_submit() -> str:
    try:
        _submit(sleep=0.0, count=1)
    except (SQLAlchemyError, CeleriacError) as error:
        return f"submitting is refused: {str(error).partition(chr(10))[0]}"
    return "a task was submitted although PostgreSQL is unreachable"


def _read(statement: Any, ids: Sequence[Any]) -> tuple[int, ...]:
    with engine().connect() as connection:
        return tuple(connection.execute(statement, {"ids": list(ids)}).one())


def _counted(statement: Any, ids: Sequence[Any]) -> tuple[int, ...]:
    """Read the counts; zeros while PostgreSQL is still starting."""
    try:
        return _read(statement, ids)
    except (SQLAlchemyError, CeleriacError):
        return 0, 0, 0, 0
