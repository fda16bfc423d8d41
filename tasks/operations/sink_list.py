"""List the configured sinks, whether they are ready, and their transactions in doubt."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from models.engine import engine
from sinks.configuration import open_sinks
from sinks.contract import Guarantee, Sink
from sinks.in_doubt import InDoubt, count_by_sink


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
        in_doubt = count_by_sink(connection)
    return [describe(sink, in_doubt.get(sink.name), ask(sink)) for sink in open_sinks().all()]


def ask(sink: Sink) -> tuple[bool, str]:
    """Return whether a sink is ready, and what it found or lacks."""
    try:
        return True, sink.check()
    except Exception as error:  # client libraries raise many kinds
        return False, str(error).partition("\n")[0] or type(error).__name__


def describe(sink: Sink, in_doubt: InDoubt | None, answer: tuple[bool, str]) -> SinkState:
    count, oldest = (in_doubt.count, in_doubt.oldest) if in_doubt else (0, None)
    return SinkState(sink.name, sink.guarantee, list(sink.conditions), sink.key_life, *answer, count, oldest)
