"""The sinks that SINKS names, opened once per process.

    ledger:                         atomic         the ledger's own database
    outbox:DESTINATION              at_least_once  an outbox event, in the transaction of SUCCEEDED
    postgresql://…                  keyed          one other PostgreSQL
    postgresql://…                  two_phase      databases that commit together with SUCCEEDED
    file:///srv/exports             two_phase      a folder of files
    redis://…                       keyed          lists of a Redis
    redis://…                       script         lists of the Redis that also has the stream (stream consumers only)
    https://…                       keyed          a service that respects `Idempotency-Key`

A task names a sink and never an address. Opening a sink does not connect to it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import settings
from models.engine import engine
from models.process_singleton import OnePerProcess
from models.sql import sql
from setting_types import SinkSetting
from sinks.contract import Sink, UnknownSink

INSTALLATION: Final = sql("""
    INSERT INTO ledger.installation DEFAULT VALUES ON CONFLICT (only_row) DO UPDATE SET only_row = true RETURNING id
""")


class OpenSinks:
    """The sinks of this process."""

    def __init__(self, current: settings.Settings) -> None:
        self.settings = current
        self.noted: set[tuple[str, str]] = set()  # (type, sink): the ledger knows that the type uses the sink
        self._by_name: dict[str, Sink] = {}
        self._installation: uuid.UUID | None = None

    def find(self, name: str) -> Sink:
        """Return the sink of this name."""
        if name not in self._by_name:
            if name not in self.settings.sinks:
                known = ", ".join(sorted(self.settings.sinks)) or "none"
                raise UnknownSink(f"There is no sink {name!r} in SINKS. Known: {known}.")
            self._by_name[name] = open_sink(name, self.settings.sinks[name])
        return self._by_name[name]

    def all(self) -> Iterator[Sink]:
        """Open and return every sink, by name."""
        return map(self.find, sorted(self.settings.sinks))

    def installation(self) -> uuid.UUID:
        """Return the identity of this ledger in other systems. The first call of all creates it."""
        if self._installation is None:
            with engine().begin() as connection:
                self._installation = connection.execute(INSTALLATION).scalar_one()
        return self._installation

    def close(self) -> None:
        for sink in self._by_name.values():
            sink.close()
        self._by_name.clear()


open_sinks: Final = OnePerProcess(OpenSinks)


def open_sink(name: str, setting: SinkSetting) -> Sink:
    """Return a sink that connects when it is first used."""
    opened: Sink = _OPENERS[setting.scheme, setting.guarantee](
        name, setting.url, key_life=timedelta(hours=setting.key_life_hours)
    )
    return opened


# Each kind is imported when it is first needed, because its client library is slow to import.


def _ledger(name: str, url: str, **_: Any) -> Any:
    from sinks.ledger import LedgerSink  # noqa: PLC0415

    return LedgerSink(name, url)


def _outbox(name: str, url: str, **_: Any) -> Any:
    from sinks.ledger import OutboxSink  # noqa: PLC0415

    return OutboxSink(name, url)


def _keyed_postgres(name: str, url: str, **options: Any) -> Any:
    from sinks.keyed_postgres import KeyedPostgres  # noqa: PLC0415

    return KeyedPostgres(name, url, **options)


def _prepared_postgres(name: str, url: str, **_: Any) -> Any:
    from sinks.prepared_postgres import PreparedPostgres  # noqa: PLC0415

    return PreparedPostgres(name, url)


def _files(name: str, url: str, **_: Any) -> Any:
    from sinks.files import FileSink  # noqa: PLC0415

    return FileSink(name, url)


def _redis_lists(name: str, url: str, **options: Any) -> Any:
    from sinks.redis_list import RedisLists  # noqa: PLC0415

    return RedisLists(name, url, **options)


def _http(name: str, url: str, **options: Any) -> Any:
    from sinks.http import KeyedHttp  # noqa: PLC0415

    return KeyedHttp(name, url, **options)


def _redis_script(name: str, url: str, **options: Any) -> Any:
    from sinks.redis_script import RedisScript  # noqa: PLC0415

    return RedisScript(name, url, **options)


_OPENERS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("ledger", "atomic"): _ledger,
    ("outbox", "at_least_once"): _outbox,
    ("postgresql", "keyed"): _keyed_postgres,
    ("postgresql", "two_phase"): _prepared_postgres,
    ("file", "two_phase"): _files,
    ("redis", "keyed"): _redis_lists,
    ("rediss", "keyed"): _redis_lists,
    ("redis", "script"): _redis_script,
    ("rediss", "script"): _redis_script,
    ("http", "keyed"): _http,
    ("https", "keyed"): _http,
}
