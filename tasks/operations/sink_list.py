"""List the configured sinks, whether they are ready, and their transactions in doubt."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from models.engine import engine
from sinks import transactions
from sinks.configuration import open_sinks
from sinks.contract import Guarantee, Sink


@dataclass(frozen=True, slots=True)
class SinkState:
    """A sink, and how it is at the moment."""

    name: str
    guarantee: Guarantee
    conditions: list[str]
    key_life: timedelta | None
    is_ready: bool
    health: str
    in_doubt: int  # transactions that are not finished
    oldest: timedelta | None


def list_sinks() -> list[SinkState]:
    """Ask every sink whether it is ready."""
    with engine().connect() as connection:
        rows = transactions.unfinished(connection)
    found = []
    for sink in open_sinks().all():
        is_ready, health = _ask(sink)
        ages = [row.age for row in rows if row.sink == sink.name]
        found.append(
            SinkState(
                sink.name,
                sink.guarantee,
                list(sink.conditions),
                sink.key_life,
                is_ready,
                health,
                len(ages),
                max(ages, default=None),
            )
        )
    return found


def _ask(sink: Sink) -> tuple[bool, str]:
    try:
        return True, sink.check()
    except Exception as error:  # client libraries raise many kinds
        return False, str(error).partition("\n")[0] or type(error).__name__
