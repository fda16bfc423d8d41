"""The switches of receipts, which operators change at run time (`manage.py receipts set`).

The ledger is authoritative: a row of `receipt_switch` overrides the setting. The scripts of the receipt log read a copy
in Redis (`copy_to_log`), which `set` and every saver write. In Redis, `delivering` says which group reads the accepted
stream of chats; it changes together with the positions of both groups, so no entry is skipped or read by both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection

import settings
from models.receipts import Switch
from models.sql import sql
from receipts import kinds, lua

READ: Final = sql("SELECT name, is_on, actor, changed_at FROM ledger.receipt_switch ORDER BY name")
# has_receipts: an operator has turned a switch, a receipt was written, or a saver has held a shard: savers run while
# two-phase is on by its setting, also if nothing was saved.
HAS_RECEIPTS: Final = sql("""
    SELECT EXISTS (SELECT FROM ledger.receipt_switch) OR EXISTS (SELECT FROM ledger.receipt)
        OR EXISTS (SELECT FROM ledger.shard_lease WHERE right(stream, length(:saver)) = :saver)
""")
SET: Final = sql("""
    INSERT INTO ledger.receipt_switch (name, is_on, actor, changed_at)
    VALUES (:name, :is_on, :actor, (SELECT ledger.ledger_now()))
    ON CONFLICT (name) DO UPDATE
    SET is_on = excluded.is_on, actor = excluded.actor, changed_at = excluded.changed_at
""")
FORGET: Final = sql("DELETE FROM ledger.receipt_switch WHERE name = :name")
SETTINGS: Final = {
    Switch.TWO_PHASE: "receipt_two_phase_enabled",
    Switch.DELIVER_BEFORE_SAVED: "receipt_deliver_before_saved",
    Switch.FAIL_OPEN: "receipt_fail_open",
}


@dataclass(frozen=True, slots=True)
class SetSwitch:
    """A switch that an operator has set."""

    name: Switch
    is_on: bool
    actor: str
    changed_at: datetime


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches in force, and those that an operator has set."""

    two_phase: bool
    deliver_before_saved: bool
    fail_open: bool
    was_two_phase: bool  # messages may have been accepted at some time
    set_by_operators: tuple[SetSwitch, ...] = ()

    def is_on(self, switch: Switch) -> bool:
        return bool(getattr(self, switch.value))


def read_switches(connection: Connection) -> Switches:
    """Return the switches of the ledger, or the settings where the ledger has none."""
    rows = [SetSwitch(Switch(name), is_on, actor, at) for name, is_on, actor, at in connection.execute(READ)]
    current = settings.current()
    values = {switch.value: bool(getattr(current, name)) for switch, name in SETTINGS.items()}
    values |= {row.name.value: row.is_on for row in rows}
    saver = {"saver": f"@{kinds.group_of(current.receipt_group_save)}"}  # the end of `Shard.stream`
    was_two_phase = values[Switch.TWO_PHASE] or bool(connection.execute(HAS_RECEIPTS, saver).scalar())
    return Switches(**values, was_two_phase=was_two_phase, set_by_operators=tuple(rows))


def set_switch(connection: Connection, switch: Switch, *, is_on: bool | None, actor: str) -> None:
    """Set a switch; None removes the row, so that the setting applies again."""
    if is_on is None:
        connection.execute(FORGET, {"name": switch.value})
    else:
        connection.execute(SET, {"name": switch.value, "is_on": is_on, "actor": actor})


def copy_to_log(client: Any, switches: Switches) -> bool:
    """Write the switches into Redis, and hand the accepted stream over if delivery was switched.

    Return True if that has changed who reads it.
    """
    current = settings.current()
    is_set = any(row.name is Switch.TWO_PHASE for row in switches.set_by_operators)
    changed = client.eval(
        lua.SWITCH,
        1 + current.receipt_shards,
        *[kinds.switches_key(), *_chat_shards()],
        *[_word(switches.deliver_before_saved), kinds.group_of(current.receipt_group_save)],
        *[kinds.group_of(current.receipt_group_deliver), _word(switches.two_phase) if is_set else ""],
    )
    return bool(changed)


def _chat_shards() -> Iterator[str]:
    stream = kinds.accepted_stream(kinds.CHAT)
    return (kinds.shard_key(stream, number) for number in range(settings.current().receipt_shards))


def _word(is_on: bool) -> str:
    return "on" if is_on else "off"
