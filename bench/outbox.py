"""Compare the relay with the textbook relay and with its own bare SQL, and `outbox.add` with Celery's `.delay()`.

textbook  one row at a time: SELECT … FOR UPDATE, publish, UPDATE, COMMIT
bare      the statements and messages of our relay without the code around them
ours      Relay.tick with all guarantees
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg2
import redis
from celery import Celery
from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.psycopg2 import dialect

import outbox
from models.engine import make_engine, sessions
from models.sql import sql
from outbox.lease import NO_FLOOR
from outbox.lease_statements import ACK, CLAIM_GIVEN
from outbox.relay import Relay
from settings import Settings

WAKEUP: Final = "celery:ingest"
STREAM: Final = "bench"
BATCH: Final = 200
MESSAGE: Final = 100
FILL: Final = sql("""
    INSERT INTO ledger.outbox_event (destination, payload, created_at)
    SELECT :destination, jsonb_build_object('type', 't', 'ids', jsonb_build_array(gen_random_uuid()), 'batch', 100),
           (SELECT ledger.ledger_now())
    FROM generate_series(1, :count)
""")
Rows = Sequence[Any]  # (id, destination, payload, …), as the claim returns them


@dataclass(frozen=True, slots=True)
class Rates:
    """Events per second to one kind of destination."""

    textbook: float
    bare: float
    ours: float

    @property
    def times_textbook(self) -> float:
        return self.ours / self.textbook

    @property
    def share_of_bare(self) -> float:
        return self.ours / self.bare


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds until the message can be read from the broker."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Way:
    """Functions that publish one event or a batch without the outbox."""

    destination: str
    one: Callable[[Any], None]
    many: Callable[[Rows], None]


def to_celery(settings: Settings, *, count: int) -> Rates:
    """Measure wake-ups to Celery's broker."""
    app = _app(settings)
    with app.producer_pool.acquire() as producer:

        def send(ids: Sequence[str]) -> None:
            app.send_task("tasks.ingest", (ids,), queue=settings.broker_queue("ingest"), producer=producer)

        def send_many(rows: Rows) -> None:
            ids = [one for row in rows for one in row[2]["ids"]]
            for start in range(0, len(ids), MESSAGE):
                send(ids[start : start + MESSAGE])

        return _rates(settings, Way(WAKEUP, lambda payload: send(payload["ids"]), send_many), count)


def to_redis_stream(settings: Settings, *, count: int) -> Rates:
    """Measure events to a Redis stream; `settings` must have the stream among the destinations."""
    with redis.Redis.from_url(settings.redis_url) as client:

        def send_many(rows: Rows) -> None:
            with client.pipeline(transaction=False) as pipeline:
                for row in rows:
                    pipeline.xadd(STREAM, {"id": row[0], "payload": json.dumps(row[2]), "headers": "{}"})
                pipeline.execute()

        one = lambda payload: client.xadd(STREAM, {"payload": json.dumps(payload)})  # noqa: E731
        return _rates(settings, Way(STREAM, one, send_many), count)


def latencies(settings: Settings, *, count: int) -> tuple[Latency, Latency]:
    """Return the latency of `outbox.add`, from its COMMIT, and that of `.delay()`."""
    app = _app(settings)
    delays = _latency(settings, count, lambda: _delay_one(app, settings.broker_queue("ingest")))
    return _latency(settings, count, _add_one), delays


def _app(settings: Settings) -> Celery:
    app = Celery("bench", broker=settings.broker_url, set_as_current=False)
    app.config_from_object("celeryconfig")
    return app


def _rates(settings: Settings, way: Way, count: int) -> Rates:
    engine = make_engine(settings.database_url)
    relay = Relay.of(settings)
    few = max(200, count // 40)  # the textbook relay is slow
    rates = Rates(
        _rate(engine, settings, way, few, lambda: _textbook(settings, way, few)),
        _rate(engine, settings, way, count, lambda: _bare(settings, way)),
        _rate(engine, settings, way, count, lambda: relay.tick(600)),
    )
    relay.close()
    engine.dispose()
    return rates


def _rate(engine: Engine, settings: Settings, way: Way, count: int, drain: Callable[[], Any]) -> float:
    """Return events per second, starting with a full outbox and empty servers."""
    with engine.begin() as connection:
        connection.execute(sql("TRUNCATE ledger.outbox_event, ledger.outbox_audit"))
        connection.execute(FILL, {"destination": way.destination, "count": count})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sql("VACUUM ANALYZE ledger.outbox_event"))
    for url in (settings.broker_url, settings.redis_url):
        with redis.Redis.from_url(url) as server:
            server.flushall()
    started_at = time.perf_counter()
    drain()
    seconds = time.perf_counter() - started_at
    with engine.begin() as connection:
        sent = connection.execute(sql("SELECT count(*) FROM ledger.outbox_event WHERE status = 'SENT'")).scalar_one()
    assert sent == count, f"{sent} of {count} events were sent"
    return count / seconds


def _textbook(settings: Settings, way: Way, count: int) -> None:
    next_event = sql(
        "SELECT id, payload FROM ledger.outbox_event WHERE status = 'NEW' ORDER BY id LIMIT 1 FOR UPDATE"
    ).text
    mark_sent = sql("UPDATE ledger.outbox_event SET status = 'SENT', sent_at = now() WHERE id = %s").text
    with _raw(settings) as connection, connection.cursor() as cursor:
        for _ in range(count):
            cursor.execute(next_event)
            id_, payload = cursor.fetchone()
            way.one(payload)
            cursor.execute(mark_sent, (id_,))
            connection.commit()


def _bare(settings: Settings, way: Way) -> None:
    psycopg2_style = dialect()  # type: ignore[no-untyped-call]
    claim, ack = (str(statement.compile(dialect=psycopg2_style)) for statement in (CLAIM_GIVEN, ACK))
    with _raw(settings) as connection, connection.cursor() as cursor:
        while True:
            values = {"worker_id": "bare", "limit": BATCH, "lease_seconds": 60, "lease_token": str(uuid.uuid4())}
            cursor.execute(claim, values | {"only": way.destination, **NO_FLOOR.values})
            rows = cursor.fetchall()
            connection.commit()
            if not rows:
                return
            way.many(rows)
            cursor.execute(ack, values | {"id": [row[0] for row in rows], "external_id": [None] * len(rows)})
            connection.commit()


def _raw(settings: Settings) -> Any:
    return psycopg2.connect(settings.database_url.replace("+psycopg2", ""))


def _delay_one(app: Celery, queue: str) -> float:
    """Publish one message. Return the time before the call, since the message may arrive before it returns."""
    began_at = time.perf_counter()
    app.send_task("tasks.ingest", ([str(uuid.uuid4())],), queue=queue)
    return began_at


def _add_one() -> float:
    """Add one event. Return the time when the COMMIT was confirmed."""
    with sessions()() as session:
        outbox.add(session, WAKEUP, {"type": "t", "ids": [str(uuid.uuid4())]})
        session.commit()
        return time.perf_counter()


def _latency(settings: Settings, count: int, send_one: Callable[[], float]) -> Latency:
    times = []
    with redis.Redis.from_url(settings.broker_url) as broker:
        for _ in range(count + 20):
            broker.flushall()
            began_at = send_one()
            assert broker.blpop(_lists(settings), timeout=5), "the message did not arrive"
            times.append((time.perf_counter() - began_at) * 1000)
    times = sorted(times[20:])  # the first calls open connections
    return Latency(times[len(times) // 2], times[int(len(times) * 0.99)])


def _lists(settings: Settings) -> list[str]:
    """Return the keys of the queue in Redis, one for each priority."""
    key = f"{settings.ledger_schema}:{settings.broker_queue('ingest')}"
    return [key, *(f"{key}\x06\x16{priority}" for priority in range(1, 10))]
