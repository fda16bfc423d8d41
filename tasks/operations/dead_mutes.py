"""Mute groups of dead tasks: a note for people, who then see the group at the end of the list. No task is changed.

A mute ends when an operator says so, after MUTE_DAYS, or when a task of the group dies after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import Connection, Engine

from models.driver_values import storable
from models.errors import Misuse
from models.sql import sql
from tasks.operations.dead_groups import GroupKey

MUTE_DAYS: Final = 7
REASON_LIMIT: Final = 500

# mute: → muted. A mute that exists is replaced. Mutes that have expired are deleted.
MUTE: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    expired AS (
        DELETE FROM ledger.dead_mute WHERE expires_at <= (SELECT at FROM clock)
        AND (type, error_fingerprint) <> (:type, :fingerprint))
    INSERT INTO ledger.dead_mute (type, error_fingerprint, reason, actor, until_next_death, expires_at, created_at)
    SELECT :type, :fingerprint, :reason, :actor, :until_next_death, at + make_interval(days => :days), at FROM clock
    ON CONFLICT (type, error_fingerprint) DO UPDATE
    SET reason = excluded.reason, actor = excluded.actor, until_next_death = excluded.until_next_death,
        expires_at = excluded.expires_at, created_at = excluded.created_at
""")
# unmute: muted → not muted.
UNMUTE: Final = sql("DELETE FROM ledger.dead_mute WHERE type = :type AND error_fingerprint = :fingerprint")
# mutes: those that have not expired, the latest first.
MUTES: Final = sql("""
    SELECT type, error_fingerprint, reason, actor, until_next_death, expires_at, created_at FROM ledger.dead_mute
    WHERE coalesce(expires_at > (SELECT ledger.ledger_now()), true) ORDER BY created_at DESC, type, error_fingerprint
""")


class MuteEnd(StrEnum):
    """When a mute ends: the word in a form."""

    UNMUTED = "unmuted"
    NEXT_DEATH = "next-death"
    DAYS = "days"


@dataclass(frozen=True, slots=True)
class Mute:
    """Who has muted a group, why, and until when."""

    key: GroupKey
    reason: str
    actor: str
    until_next_death: bool
    expires_at: datetime | None
    since: datetime

    def is_over(self, last_at: datetime | None) -> bool:
        """Return whether the mute has ended because a task of the group died after it."""
        return self.until_next_death and last_at is not None and last_at > self.since


def mute_group(engine: Engine, key: GroupKey, *, end: MuteEnd, reason: str, actor: str) -> None:
    """Mute a group. Raises Misuse if the reason is missing or too long."""
    reason = storable(reason).strip()
    if not 0 < len(reason) <= REASON_LIMIT:
        raise Misuse(f"Say why the group is muted, in at most {REASON_LIMIT} characters.")
    values = {
        **{"type": key.type, "fingerprint": key.fingerprint, "reason": reason, "actor": actor},
        **{"until_next_death": end is MuteEnd.NEXT_DEATH, "days": MUTE_DAYS if end is MuteEnd.DAYS else None},
    }
    with engine.begin() as connection:
        connection.execute(MUTE, values)


def unmute_group(engine: Engine, key: GroupKey) -> bool:
    """End the mute of a group; return whether it was muted."""
    with engine.begin() as connection:
        return bool(connection.execute(UNMUTE, {"type": key.type, "fingerprint": key.fingerprint}).rowcount)


def read_mutes(connection: Connection) -> dict[GroupKey, Mute]:
    """Return the mutes that have not expired, the latest first. `Mute.is_over` says which have ended otherwise."""
    found = {}
    for type_, fingerprint, *values in connection.execute(MUTES):
        key = GroupKey(type_, fingerprint)
        found[key] = Mute(key, *values)
    return found
