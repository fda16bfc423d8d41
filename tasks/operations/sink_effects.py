"""What tasks have done in sinks, for an operator who decides whether to run them again.

For each sink that the task's type uses, the answer is `committed`, `not committed`, or `unknown`. The ledger and the
sink decide it together: a keyed sink is asked for the task's keys, and the ledger knows its decision about a two-phase
transaction. An effect is unknown only while its sink cannot be reached, or if the sink cannot be asked at all.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection

from models.errors import CeleriacError
from models.sql import sql
from models.status import TaskStatus
from sinks.configuration import open_sinks
from sinks.contract import Effect, EffectState, Guarantee, UnknownSink

IN_TRANSACTION: Final = (Guarantee.ATOMIC, Guarantee.AT_LEAST_ONCE)
WORST_FIRST: Final = (EffectState.COMMITTED, EffectState.UNKNOWN, EffectState.NOT_COMMITTED)  # to repeat
DETAIL_LIMIT: Final = 200
USES: Final = sql("SELECT type, sink FROM ledger.sink_use ORDER BY type, sink")


@dataclass(frozen=True, slots=True)
class EffectCount:
    """How many tasks have a committed, a not committed or an unknown effect in a sink."""

    sink: str
    committed: int
    not_committed: int
    unknown: int


class KeysForgotten(CeleriacError):
    """The sinks of this task no longer remember its effects, so running it again could repeat them.

    `retry-now` was called for a DEAD task that is older than the key life of a sink that its type uses.
    """

    code = "keys_forgotten"
    remedy = "See what it did with `manage.py show ID`; then `manage.py requeue-dead --id ID --accept-duplicates`."
    http_status = 409


def sinks_by_type(connection: Connection) -> dict[str, list[str]]:
    """Return the sinks that tasks of each type have used so far."""
    found: dict[str, list[str]] = {}
    for type_, sink in connection.execute(USES):
        found.setdefault(type_, []).append(sink)
    return found


def effects_of(task_id: uuid.UUID, status: str, sinks: Iterable[str]) -> list[Effect]:
    """Return what the task has done in each of these sinks. Asks them, so no transaction should be open."""
    return [effect for sink in sinks for effect in _effects_in(sink, task_id, status)]


def count_effects(tasks: Iterable[tuple[uuid.UUID, str, str]], sinks: dict[str, list[str]]) -> list[EffectCount]:
    """Count, by sink, what tasks (id, type, status) have done. Of several effects the worst for a repetition counts."""
    counts: dict[str, Counter[EffectState]] = {}
    for task_id, type_, status in tasks:
        for sink in sinks.get(type_, ()):
            states = {effect.state for effect in _effects_in(sink, task_id, status)}
            counts.setdefault(sink, Counter())[next(state for state in WORST_FIRST if state in states)] += 1
    return [EffectCount(sink, *(found[state] for state in EffectState)) for sink, found in sorted(counts.items())]


def key_lives(connection: Connection) -> dict[str, timedelta]:
    """Return, for each type that uses keyed sinks, how long the first of them remembers an effect."""
    lives: dict[str, timedelta] = {}
    for type_, sinks in sinks_by_type(connection).items():
        for name in sinks:
            try:
                life = open_sinks().find(name).key_life
            except UnknownSink:
                continue
            if life is not None:
                lives[type_] = min(life, lives.get(type_, life))
    return lives


def _effects_in(name: str, task_id: uuid.UUID, status: str) -> list[Effect]:
    try:
        sink = open_sinks().find(name)
        if sink.guarantee in IN_TRANSACTION:  # committed together with SUCCEEDED, or not at all
            is_done = status == TaskStatus.SUCCEEDED
            return [Effect(name, EffectState.COMMITTED if is_done else EffectState.NOT_COMMITTED)]
        found = list(sink.effects(open_sinks().installation(), task_id))
    except Exception as error:  # client libraries raise many kinds
        reason = (str(error).partition("\n")[0] or type(error).__name__)[:DETAIL_LIMIT]
        return [Effect(name, EffectState.UNKNOWN, detail=reason)]
    return found or [Effect(name, EffectState.NOT_COMMITTED)]
