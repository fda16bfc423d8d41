"""Connections to the ledger: how they are made, shared within a process, and forgotten after a fork.

A server that cannot be reached is `Unreachable`, one sentence with its host and port and never its password, wherever
in the project the connection was asked for. A connection that breaks later stays SQLAlchemy's error: what it was doing
may have been done or not, and only the caller knows how to find out.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final

from sqlalchemy import URL, Connection, Dialect, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

import settings
from models.driver_values import read_ids, read_json
from models.errors import Unreachable

# A host that vanished without a word is noticed after 30 + 3 · 5 s when idle, after 30 s when something was sent to it.
CONNECT_ARGS: Final[dict[str, str | int]] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

REST_SECONDS: Final = (
    1.0  # a connection that was used a moment ago is not asked whether it lives: it costs a round trip
)
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_OURS: Final = "celeriac_ours"
_USED_AT: Final = "celeriac_used_at"
_AT_ONCE: Final = "celeriac_at_once"
_engines: dict[str, Engine] = {}
Bind = Engine | Connection


def make_engine(
    url: str, *, application_name: str = "celeriac", statement_timeout_seconds: float | None = None, **options: Any
) -> Engine:
    """An engine of its own. What the URL's query says (`?connect_timeout=2`) wins over our defaults."""
    address = make_url(url)
    ours: dict[str, str | int] = {"application_name": application_name, **CONNECT_ARGS}
    if address.host in LOOPBACK:
        ours["sslmode"] = "prefer"  # PGSSLMODE=require in somebody's shell is about other servers
    if statement_timeout_seconds is not None:
        ours["options"] = f"-c statement_timeout={round(statement_timeout_seconds * 1000)}"
    made = create_engine(
        address,
        hide_parameters=True,  # payloads stay out of error texts and logs
        connect_args={name: value for name, value in ours.items() if name not in address.query},
        execution_options={_OURS: True},
        json_deserializer=read_json,
        **options,
    )
    event.listen(made, "connect", read_ids)
    event.listen(made, "handle_error", _say_who_is_unreachable)
    event.listen(made, "checkin", _note_use)
    event.listen(made, "checkout", partial(_ping_if_in_doubt, made.dialect))
    return made


def engine() -> Engine:
    """The engine that this process shares, for the database of the settings."""
    url = settings.current().database_url
    if url not in _engines:
        _engines.setdefault(url, make_engine(url))  # two threads may both make one; neither has connected yet
    return _engines[url]


def is_ours(bind: Bind) -> bool:
    """Of our own making: we may do with its connections what another owner would not expect."""
    return bool(bind.get_execution_options().get(_OURS))


def is_at_once(connection: Connection) -> bool:
    return _AT_ONCE in connection.info


@contextmanager
def at_once(bind: Bind) -> Iterator[Connection]:
    """A connection on which every statement commits itself: no BEGIN and no COMMIT to wait for.

    The driver is told and SQLAlchemy is not: its own way sends two statements to change the mode, and two to go back.
    A connection that is given, by a test that rolls everything back, gets a savepoint instead.
    """
    if isinstance(bind, Connection):
        with bind.begin_nested():
            yield bind
        return
    with bind.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        before = driver.autocommit  # True for an engine of isolation_level="AUTOCOMMIT"
        connection.info[_AT_ONCE] = {"before": before}  # a time limit may strike below: the next checkout looks
        driver.autocommit = True
        try:
            yield connection
        finally:
            connection.rollback()  # nothing is open; SQLAlchemy believes so too
            if not driver.closed:
                driver.autocommit = before
                connection.info.pop(_AT_ONCE, None)


def sessions() -> sessionmaker[Session]:
    """The session factory that this process shares. Objects stay readable after their commit."""
    return _sessions(engine())


def _forget_inherited_connections() -> None:
    """In a child after fork: drop the parent's connections without closing them under its feet."""
    for inherited in _engines.values():
        inherited.dispose(close=False)


os.register_at_fork(after_in_child=_forget_inherited_connections)  # a server with workers forks, and so may a handler


def place(url: URL) -> str:
    """Where a database is, for people: host and port, nothing secret."""
    host = url.host or url.query.get("host") or "the local socket"
    port = url.port or url.query.get("port") or 5432
    return f"{host}:{port}"


@lru_cache
def _sessions(bind: Engine) -> sessionmaker[Session]:
    return sessionmaker(bind, expire_on_commit=False)


def _note_use(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info[_USED_AT] = time.monotonic()


def _ping_if_in_doubt(
    dialect: Dialect, connection: Any, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection
) -> None:
    """A server that was restarted meanwhile costs a new connection, and not the caller's statement."""
    used_at = record.info.get(_USED_AT)
    if used_at is None:  # it is new
        return
    was_interrupted = record.info.pop(_AT_ONCE, None)
    if was_interrupted or time.monotonic() - used_at > REST_SECONDS or _was_spoken_to(connection):
        try:
            if was_interrupted:
                connection.autocommit = was_interrupted["before"]
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            raise DisconnectionError from error


def _was_spoken_to(connection: Any) -> bool:
    """Nobody asked the server anything: if it says something all the same, that is goodbye."""
    if connection.closed:
        return True
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def _say_who_is_unreachable(context: ExceptionContext) -> Unreachable | None:
    """Only a failure to connect has no connection; a failed ping is followed by the pool's own new attempt."""
    if context.connection is not None or context.engine is None:
        return None
    url = context.engine.url
    reason = str(context.original_exception).strip().partition("\n")[0].rpartition("failed: ")[2].strip()
    if url.password:
        reason = reason.replace(url.password, "***")
    return Unreachable(f"PostgreSQL at {place(url)} cannot be reached: {reason.rstrip('.') or 'no answer'}.")
