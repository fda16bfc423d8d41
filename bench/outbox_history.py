"""Measure the outbox with a long history, and while an open transaction prevents every vacuum."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine

from bench.outbox import FILL, WAKEUP
from models.engine import make_engine
from models.sql import sql
from outbox.lease import NO_FLOOR, claim_outbox
from outbox.relay import Relay
from settings import Settings

CLAIMS: Final = 25
DRAINED: Final = 5000
PER_SECOND: Final = 1000
STEPS_PER_SECOND: Final = 10
SENT: Final = sql("""
    INSERT INTO ledger.outbox_event (destination, payload, status, sent_at)
    SELECT :destination, '{"type": "t", "ids": ["x"]}', 'SENT', (SELECT ledger.ledger_now())
    FROM generate_series(1, :count)
""")
SCHEDULED: Final = sql("""
    INSERT INTO ledger.outbox_event (destination, payload, next_retry_at)
    SELECT :destination, '{"type": "t", "ids": ["x"]}', (SELECT ledger.ledger_now()) + interval '1 day'
    FROM generate_series(1, :count)
""")


@dataclass(frozen=True, slots=True)
class ClaimCost:
    """The median time to claim one batch, in milliseconds."""

    without_history_ms: float
    with_history_ms: float

    @property
    def ratio(self) -> float:
        return self.with_history_ms / self.without_history_ms


@dataclass(frozen=True, slots=True)
class Held:
    """Events per second and claim times, in milliseconds, at the start and the end of a long transaction."""

    first_rate: float
    last_rate: float
    first_claim_ms: float
    last_claim_ms: float
    passed: int  # events that were added and published in between

    @property
    def ratio(self) -> float:
        return self.last_rate / self.first_rate


def claim_cost(settings: Settings, *, history: int) -> ClaimCost:
    """Measure claims with and without `history` SENT and as many scheduled events; a tenth of that is due."""
    engine = make_engine(settings.database_url)
    due = history // 10
    _fill(engine, due=due, history=0)
    light = _claim_ms(engine, settings)
    _fill(engine, due=due, history=history)
    heavy = _claim_ms(engine, settings)
    _fill(engine, due=0, history=0)
    engine.dispose()
    return ClaimCost(light, heavy)


def held_transaction(settings: Settings, *, seconds: int) -> Held:
    """Publish 1,000 events a second while an open transaction prevents that dead rows are vacuumed."""
    engine = make_engine(settings.database_url)
    _fill(engine, due=0, history=0)
    relay = Relay.of(settings)
    _drain(engine, relay)  # opens connections and plans statements
    with engine.connect() as holder:
        holder.execute(sql("SELECT pg_current_xact_id()"))
        first_claim, first = _one_claim_ms(engine, settings), _drain(engine, relay)
        passed = _throttled(engine, relay, seconds)
        last_claim, last = _one_claim_ms(engine, settings), _drain(engine, relay)
    relay.close()
    engine.dispose()
    return Held(first, last, first_claim, last_claim, passed)


def _fill(engine: Engine, *, due: int, history: int) -> None:
    with engine.begin() as connection:
        connection.execute(sql("TRUNCATE ledger.outbox_event, ledger.outbox_audit"))
        connection.execute(SENT, {"destination": WAKEUP, "count": history})
        connection.execute(SCHEDULED, {"destination": WAKEUP, "count": history})
        connection.execute(FILL, {"destination": WAKEUP, "count": due})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sql("VACUUM ANALYZE ledger.outbox_event"))


def _claim_ms(engine: Engine, settings: Settings) -> float:
    """Return the median time of consecutive claims, as in a drain."""
    times, floor = [], NO_FLOOR
    with engine.connect() as connection:
        for _ in range(CLAIMS):
            started_at = time.perf_counter()
            events = claim_outbox(connection, "bench", settings.outbox_publish_batch_size, only=WAKEUP, after=floor)
            times.append((time.perf_counter() - started_at) * 1000)
            assert len(events) == settings.outbox_publish_batch_size, "there were fewer events than a batch"
            floor = floor.above(events)
    return sorted(times)[len(times) // 2]


def _one_claim_ms(engine: Engine, settings: Settings) -> float:
    """Return the time of a claim from the start of the index, where the dead entries are."""
    with engine.connect() as connection:
        started_at = time.perf_counter()
        claim_outbox(connection, "bench", settings.outbox_publish_batch_size, only=WAKEUP)
        return (time.perf_counter() - started_at) * 1000


def _throttled(engine: Engine, relay: Relay, seconds: int) -> int:
    count = PER_SECOND // STEPS_PER_SECOND
    passed, began_at = 0, time.monotonic()
    while time.monotonic() < began_at + seconds:
        with engine.begin() as connection:
            connection.execute(FILL, {"destination": WAKEUP, "count": count})
        passed += relay.tick(60).sent
        time.sleep(max(0.0, began_at + passed / PER_SECOND - time.monotonic()))
    return passed


def _drain(engine: Engine, relay: Relay) -> float:
    with engine.begin() as connection:
        connection.execute(FILL, {"destination": WAKEUP, "count": DRAINED})
    started_at = time.perf_counter()
    sent = relay.tick(600).sent
    assert sent == DRAINED, f"{sent} of {DRAINED} events were sent"
    return DRAINED / (time.perf_counter() - started_at)
