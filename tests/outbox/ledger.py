"""Write and read events of the ledger, and read messages from the broker."""

from __future__ import annotations

import base64
import json
from collections import Counter
from datetime import timedelta
from typing import Any

import redis

from models.engine import engine
from models.sql import sql
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests

WAKEUP = "celery:ingest"


def insert(destination: str, count: int = 1, **columns: Any) -> list[int]:
    """Insert events with plain SQL, as any program may do. Return their ids."""
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", :{name}" for name in columns)
    statement = sql(f"""
        INSERT INTO ledger.outbox_event (destination, payload{names})
        SELECT :d, jsonb_build_object('type', 't', 'ids', jsonb_build_array(gen_random_uuid()), 'batch', 100){values}
        FROM generate_series(1, :n) RETURNING id""")
    with engine().begin() as connection:
        return list(connection.execute(statement, {"d": destination, "n": count, **columns}).scalars())


def rows(columns: str = "status, attempt_count", where: str = "true") -> list[tuple[Any, ...]]:
    statement = sql(f"SELECT {columns} FROM ledger.outbox_event WHERE {where} ORDER BY id")
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(statement)]


def audits() -> Counter[str]:
    with engine().begin() as connection:
        return Counter(connection.execute(sql("SELECT code FROM ledger.outbox_audit")).scalars())


def woken(stack: ServersOfTests, queue: str = "ingest") -> list[list[str]]:
    """Return the ids in each message that waits in the broker."""
    with redis.Redis.from_url(stack.addresses["BROKER_URL"], decode_responses=True) as client:
        keys = [key for key in client.keys(f"celeriac:{queue}*") if key.partition("\x06")[0] == f"celeriac:{queue}"]
        messages = [json.loads(body) for key in keys for body in client.lrange(key, 0, -1)]
    return [json.loads(base64.b64decode(message["body"]))[0][0] for message in messages]


def arrived(stack: ServersOfTests) -> Counter[str]:
    """Return how often each id is in a message of the broker."""
    return Counter(one for ids in woken(stack) for one in ids)


def stored_ids() -> set[str]:
    return {one for (payload,) in rows("payload") for one in payload["ids"]}


def move(stack: ServersOfTests, seconds: float) -> None:
    with stack.cluster.superuser.begin() as connection:
        move_clock(connection, timedelta(seconds=seconds))
