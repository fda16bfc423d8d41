"""Connections to the ledger: how they are opened, shared within a process, and dropped after a fork.

A server that cannot be reached raises `Unreachable`, wherever the connection was requested. The message has the host
and the port, never the password. A connection that breaks later raises SQLAlchemy's own error: its statement may have
taken effect or not, and only the caller knows how to find out.
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
from models.driver_values import parse_json, register_uuid_parser
from models.errors import Unreachable

# A host that disappears is noticed after 30 + 3 · 5 s on an idle connection, after 30 s if something was sent to it.
CONNECT_ARGS: Final[dict[str, str | int]] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
TRUSTED_SECONDS: Final = 1.0  # a connection used this recently is not pinged at checkout, which saves a round trip
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_OURS: Final = "celeriac_ours"
_USED_AT: Final = "celeriac_used_at"
_AUTOCOMMIT: Final = "celeriac_autocommit"
_engines: dict[str, Engine] = {}
_room: dict[str, Any] = {}  # the pool's size, if `make_room_for` was called
SPARE_CONNECTIONS: Final = 10  # beyond those of the threads, for ticks and for what a handler opens itself
Bind = Engine | Connection


def make_engine(
    url: str, *, application_name: str = "celeriac", statement_timeout_seconds: float | None = None, **options: Any
) -> Engine:
    """Return a new engine. Connection parameters in the URL (`?connect_timeout=2`) win over our defaults."""
    address = make_url(url)
    defaults: dict[str, str | int] = {"application_name": application_name, **CONNECT_ARGS}
    if address.host in LOOPBACK:
        defaults["sslmode"] = "prefer"  # a PGSSLMODE=require in the environment is meant for other servers
    if statement_timeout_seconds is not None:
        defaults["options"] = f"-c statement_timeout={round(statement_timeout_seconds * 1000)}"
    made = create_engine(
        address,
        hide_parameters=True,  # payloads stay out of error messages and logs
        connect_args={name: value for name, value in defaults.items() if name not in address.query},
        execution_options={_OURS: True},
        json_deserializer=parse_json,
        **options,
    )
    event.listen(made, "connect", register_uuid_parser)
    event.listen(made, "handle_error", _translate_connect_error)
    event.listen(made, "checkin", _remember_use)
    event.listen(made, "checkout", partial(_ping_if_doubtful, made.dialect))
    return made


def engine() -> Engine:
    """Return the engine that this process shares, for the database of the settings."""
    url = settings.current().database_url
    if url not in _engines:
        made = make_engine(url, **_room)
        _engines.setdefault(url, made)  # two threads may both make one; neither has connected yet
    return _engines[url]


def make_room_for(threads: int) -> None:
    """Let so many threads share the engine of this process. Call it before they start.

    A thread needs one connection, and for moments a second one. If each waited for its second one, all would wait.
    """
    _room.update(pool_size=threads, max_overflow=threads + SPARE_CONNECTIONS)
    while _engines:
        _engines.popitem()[1].dispose()


def pool_options() -> dict[str, Any]:
    """Return the size of a pool that all threads of this process share."""
    return dict(_room)


def is_ours(bind: Bind) -> bool:
    """Return whether `make_engine` made it: we change the mode of its connections, and prepare statements on them."""
    return bool(bind.get_execution_options().get(_OURS))


def is_autocommit(connection: Connection) -> bool:
    """Return whether `autocommit` yielded this connection."""
    return _AUTOCOMMIT in connection.info


@contextmanager
def autocommit(bind: Bind) -> Iterator[Connection]:
    """Yield a connection on which every statement commits by itself, without the round trips of BEGIN and COMMIT.

    The mode is set in the driver, not through SQLAlchemy, which would send two statements to change it and two to
    change it back. A given connection (of a test that rolls everything back) gets a savepoint instead.
    """
    if isinstance(bind, Connection):
        with bind.begin_nested():
            yield bind
        return
    with bind.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        before = driver.autocommit  # True for an engine with isolation_level="AUTOCOMMIT"
        # If a time limit interrupts the lines below, the next checkout restores the mode.
        connection.info[_AUTOCOMMIT] = before
        driver.autocommit = True
        try:
            yield connection
        finally:
            connection.rollback()  # nothing is open; this tells SQLAlchemy so
            if not driver.closed:
                driver.autocommit = before
                connection.info.pop(_AUTOCOMMIT, None)


def sessions() -> sessionmaker[Session]:
    """Return the session factory that this process shares. Objects stay readable after their commit."""
    return _sessions(engine())


def _drop_inherited_connections() -> None:
    """Drop the parent's connections in a forked child without closing them: the parent still uses them."""
    for inherited in _engines.values():
        inherited.dispose(close=False)


os.register_at_fork(after_in_child=_drop_inherited_connections)  # worker pools fork, and a handler may


def _host_and_port(url: URL) -> str:
    """Return where a database is, without anything secret."""
    host = url.host or url.query.get("host") or "the local socket"
    port = url.port or url.query.get("port") or 5432
    return f"{host}:{port}"


@lru_cache
def _sessions(bind: Engine) -> sessionmaker[Session]:
    return sessionmaker(bind, expire_on_commit=False)


def _remember_use(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info[_USED_AT] = time.monotonic()


def _ping_if_doubtful(
    dialect: Dialect, connection: Any, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection
) -> None:
    """Replace a connection that the server has closed, so that the caller's statement does not fail."""
    used_at = record.info.get(_USED_AT)
    if used_at is None:  # the connection is new
        return
    mode_before = record.info.pop(_AUTOCOMMIT, None)  # set if `autocommit` was interrupted
    if mode_before is not None or time.monotonic() - used_at > TRUSTED_SECONDS or _has_unread_input(connection):
        try:
            if mode_before is not None:
                connection.autocommit = mode_before
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            raise DisconnectionError from error


def _has_unread_input(connection: Any) -> bool:
    """Return True if the server sent something without being asked: that is how it closes a connection."""
    if connection.closed:
        return True
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def _translate_connect_error(context: ExceptionContext) -> Unreachable | None:
    """Return the error to raise if no connection could be opened. A failed ping is not one: the pool connects again."""
    if context.connection is not None or context.engine is None:
        return None
    url = context.engine.url
    reason = str(context.original_exception).strip().partition("\n")[0].rpartition("failed: ")[2].strip()
    if url.password:
        reason = reason.replace(url.password, "***")
    return Unreachable(f"PostgreSQL at {_host_and_port(url)} is unreachable: {reason.rstrip('.') or 'no answer'}.")
