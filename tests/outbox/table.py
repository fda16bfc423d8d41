"""The table `outbox_event` in a test: write and read rows, open connections, move the clock, wait for locks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

from models.sql import sql
from tests.models.moving_clock import move_clock
from tests.servers import Cluster

T = TypeVar("T")
LEASE = ("locked_by", "locked_at", "lease_token", "lease_until")
WAITING = sql("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND pid = ANY(:pids)")


@dataclass
class OutboxTable:
    """The outbox of one PostgreSQL server."""

    cluster: Cluster
    engine: Engine
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))
    _connections: list[Connection] = field(default_factory=list)
    _futures: list[Future[Any]] = field(default_factory=list)

    def empty(self) -> None:
        with self.cluster.superuser.begin() as connection:
            # faster than TRUNCATE
            connection.execute(sql("DELETE FROM ledger.outbox_event; DELETE FROM ledger.ledger_clock"))

    def close(self) -> None:
        """Close everything. Statements that a failed test left waiting for each other are ended first."""
        if not all(future.done() for future in self._futures):
            with self.cluster.superuser.begin() as connection:
                connection.execute(
                    sql("SELECT pg_terminate_backend(pid) FROM unnest(:pids) AS pid"),
                    {"pids": list(map(pid, self._connections))},
                )
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def connect(self, **server_settings: str) -> Connection:
        """Return a connection with its own settings. It is closed at the end of the test."""
        connection = self._opened(self.engine.connect())
        if server_settings:
            connection.detach()
            for name, value in server_settings.items():
                connection.execute(sql("SELECT set_config(:name, :value, false)"), {"name": name, "value": value})
            connection.commit()
        return connection

    def superuser(self) -> Connection:
        return self._opened(self.cluster.superuser.connect())

    def now(self) -> datetime:
        with self.engine.connect() as connection:
            at: datetime = connection.execute(sql("SELECT ledger.ledger_now()")).scalar_one()
        return at

    def later(self, seconds: float) -> datetime:
        return self.now() + timedelta(seconds=seconds)

    def move_clock(self, seconds: float) -> None:
        with self.cluster.superuser.begin() as connection:
            move_clock(connection, timedelta(seconds=seconds))

    def add(self, destination: str = "d", payload: Any = None, **columns: Any) -> int:
        values = {"destination": destination, "payload": json.dumps(payload), **columns}
        names, places = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self.engine.begin() as connection:
            insert = sql(f"INSERT INTO ledger.outbox_event ({names}) VALUES ({places}) RETURNING id")
            added: int = connection.execute(insert, values).scalar_one()
        return added

    def add_many(self, count: int, destination: str = "d", **columns: Any) -> list[int]:
        values = {"destination": destination, "payload": "{}", **columns}
        names, places = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self.engine.begin() as connection:
            insert = (
                f"INSERT INTO ledger.outbox_event ({names}) SELECT {places} FROM generate_series(1, :n) RETURNING id"
            )
            return list(connection.execute(sql(insert), {**values, "n": count}).scalars())

    def change(self, outbox_id: int, changes: str, connection: Connection | None = None, **values: Any) -> None:
        """Update a row. On a given connection the update is not committed."""
        update = sql(f"UPDATE ledger.outbox_event SET {changes} WHERE id = :id")
        if connection is not None:
            connection.execute(update, {"id": outbox_id, **values})
            return
        with self.engine.begin() as own:
            own.execute(update, {"id": outbox_id, **values})

    def row(self, outbox_id: int) -> dict[str, Any]:
        return self.rows()[outbox_id]

    def rows(self) -> dict[int, dict[str, Any]]:
        with self.engine.connect() as connection:
            found = connection.execute(sql("SELECT * FROM ledger.outbox_event ORDER BY id")).mappings()
            return {row["id"]: dict(row) for row in found}

    def in_thread(self, call: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        self._futures.append(future := self._threads.submit(call, *arguments, **keywords))
        return future

    def wait_until_blocked(self, *connections: Connection) -> None:
        """Wait until every connection waits for a lock."""
        pids = [pid(connection) for connection in connections]
        deadline = time.monotonic() + 20
        while True:
            with self.cluster.superuser.connect() as watcher:
                if watcher.execute(WAITING, {"pids": pids}).scalar_one() == len(pids):
                    return
            assert time.monotonic() < deadline, "a connection does not wait for a lock"
            time.sleep(0.001)

    def _opened(self, connection: Connection) -> Connection:
        self._connections.append(connection)
        return connection


def pid(connection: Connection) -> int:
    """Return the id of the server process without using the connection, which may be busy."""
    found: int = connection.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
    return found


def without_lease(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in LEASE}
