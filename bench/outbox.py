"""The relay beside the textbook's and beside its own bare statements; an event's way to the broker beside `.delay()`.

textbook  one row at a time: SELECT … FOR UPDATE, publish, UPDATE, COMMIT
bare      the relay's own claim and ack statements and the same messages, with nothing of ours around them
ours      Relay.tick, every guarantee on
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import psycopg2
import redis
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.dialects.postgresql.psycopg2 import dialect

import outbox
from models.engine import make_engine, sessions
from outbox.lease import NO_FLOOR
from outbox.relay import Relay
from outbox.statements import ACK, CLAIM_GIVEN
from settings import Settings

RING: Final = "celery:ingest"
BATCH: Final = 200
MESSAGE: Final = 100
FILL: Final = text("""
    INSERT INTO outbox_event (destination, payload, created_at)
    SELECT :destination, jsonb_build_object('type', 't', 'ids', jsonb_build_array(gen_random_uuid()), 'batch', 100),
           (SELECT ledger_now())
    FROM generate_series(1, :count)
""")


@dataclass(frozen=True, slots=True)
class Measured:
    """Events per second, and latencies in milliseconds."""

    textbook: float
    bare: float
    ours: float
    add_p50_ms: float
    add_p99_ms: float
    delay_p50_ms: float
    delay_p99_ms: float

    @property
    def times_textbook(self) -> float:
        return self.ours / self.textbook

    @property
    def share_of_bare(self) -> float:
        return self.ours / self.bare


def measure(settings: Settings, *, count: int, singles: int, tell: Callable[[str], None]) -> Measured:
    engine = make_engine(settings.database_url)
    app = Celery("bench", broker=settings.broker_url, set_as_current=False)
    app.config_from_object("celeryconfig")
    tell("the textbook's relay")
    textbook = _rate(engine, settings, max(200, count // 40), lambda n: _textbook(settings, app, n))
    tell("the bare statements")
    bare = _rate(engine, settings, count, lambda _n: _bare(settings, app))
    tell("our relay")
    relay = Relay.of(settings)
    ours = _rate(engine, settings, count, lambda _n: relay.tick(600))
    relay.close()
    tell("single events")
    delays = _latencies(settings, singles, lambda: _delay_one(app))
    adds = _latencies(settings, singles, _add_one)
    engine.dispose()
    return Measured(textbook, bare, ours, *adds, *delays)


def _rate(engine: Engine, settings: Settings, count: int, drain: Callable[[int], Any]) -> float:
    """Events per second, from a full outbox and an empty broker."""
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE outbox_event, outbox_audit"))
        connection.execute(FILL, {"destination": RING, "count": count})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE outbox_event"))
    with redis.Redis.from_url(settings.broker_url) as broker:
        broker.flushall()
    started_at = time.perf_counter()
    drain(count)
    seconds = time.perf_counter() - started_at
    with engine.begin() as connection:
        sent = connection.execute(text("SELECT count(*) FROM outbox_event WHERE status = 'SENT'")).scalar_one()
    assert sent == count, f"{sent} of {count} events were sent"
    return count / seconds


def _textbook(settings: Settings, app: Celery, count: int) -> None:
    with _raw(settings) as connection, connection.cursor() as cursor, app.producer_pool.acquire() as producer:
        for _ in range(count):
            cursor.execute("SELECT id, payload FROM outbox_event WHERE status = 'NEW' ORDER BY id LIMIT 1 FOR UPDATE")
            id_, payload = cursor.fetchone()
            app.send_task("tasks.ingest", (payload["ids"],), queue="ingest", producer=producer)
            cursor.execute("UPDATE outbox_event SET status = 'SENT', sent_at = now() WHERE id = %s", (id_,))
            connection.commit()


def _bare(settings: Settings, app: Celery) -> None:
    psycopg2_style = dialect()  # type: ignore[no-untyped-call]
    claim, ack = (str(statement.compile(dialect=psycopg2_style)) for statement in (CLAIM_GIVEN, ACK))
    with _raw(settings) as connection, connection.cursor() as cursor, app.producer_pool.acquire() as producer:
        while True:
            values = {"worker_id": "bare", "limit": BATCH, "lease_seconds": 60, "lease_token": str(uuid.uuid4())}
            cursor.execute(claim, values | {"only": [RING], "without": [], **asdict(NO_FLOOR)})
            rows = cursor.fetchall()
            connection.commit()
            if not rows:
                return
            ids = [one for row in rows for one in row[2]["ids"]]
            for start in range(0, len(ids), MESSAGE):
                app.send_task("tasks.ingest", (ids[start : start + MESSAGE],), queue="ingest", producer=producer)
            cursor.execute(ack, values | {"id": [row[0] for row in rows], "external_id": [None] * len(rows)})
            connection.commit()


def _raw(settings: Settings) -> Any:
    return psycopg2.connect(settings.database_url.replace("+psycopg2", ""))


def _delay_one(app: Celery) -> float:
    """Returns when it began: `.delay()` promises when it returns, and the message may be there before."""
    began_at = time.perf_counter()
    app.send_task("tasks.ingest", ([str(uuid.uuid4())],), queue="ingest")
    return began_at


def _add_one() -> float:
    """Returns when the COMMIT was confirmed."""
    with sessions()() as session:
        outbox.add(session, RING, {"type": "t", "ids": [str(uuid.uuid4())]})
        session.commit()
        return time.perf_counter()


def _latencies(settings: Settings, count: int, ring: Callable[[], float]) -> tuple[float, float]:
    """Until the message can be popped from the broker: median and 99th percentile."""
    times = []
    with redis.Redis.from_url(settings.broker_url) as broker:
        for _ in range(count + 20):
            broker.flushall()
            began_at = ring()
            assert broker.blpop(_lists(), timeout=5), "the message did not arrive"
            times.append((time.perf_counter() - began_at) * 1000)
    times = sorted(times[20:])  # the first ones open connections
    return times[len(times) // 2], times[int(len(times) * 0.99)]


def _lists() -> list[str]:
    """The keys of one queue: one for each priority."""
    return ["celeriac:ingest", *(f"celeriac:ingest\x06\x16{priority}" for priority in range(1, 10))]
