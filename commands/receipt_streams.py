"""receipts, receipts list, receipts set: what waits to be saved, what was rejected, and the switches."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commands.complaint import complain
from commands.confirmation import operator
from commands.options import Json
from commands.output import (
    camel,
    console,
    format_duration,
    format_time,
    on_stderr,
    plural,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from models.receipts import Switch
    from receipts.rows import ListedReceipt
    from receipts.shard_states import ShardState
    from receipts.switches import Switches

GROUP_HELP: Final = """Show the switches and the streams of receipts: what waits to be saved, and who saves it.

Example: `manage.py receipts --json`
"""
DRAIN_SECONDS: Final = 60.0


class SwitchName(StrEnum):
    """The switches as the command line names them."""

    TWO_PHASE = "two-phase"
    DELIVER_BEFORE_SAVED = "deliver-before-saved"
    FAIL_OPEN = "fail-open"

    @property
    def switch(self) -> Switch:
        from models.receipts import Switch

        return Switch[self.name]


class Position(StrEnum):
    ON = "on"
    OFF = "off"
    DEFAULT = "default"  # what the setting says


def add_commands(group: typer.Typer) -> None:
    """Add the commands of this file to the group `receipts`."""
    group.callback(invoke_without_command=True, help=GROUP_HELP)(show)
    group.command("list")(list_receipts)
    group.command("set")(set_switch)


def show(context: typer.Context, *, as_json: Json = False) -> None:
    from models.engine import engine
    from receipts.shard_states import read_shards
    from receipts.switches import read_switches

    if context.invoked_subcommand:
        return
    with engine().connect() as connection:
        switches = read_switches(connection)
    shards = read_shards()
    if as_json:
        print_json({"switches": _switches_json(switches), "shards": [_shard_json(shard) for shard in shards]})
        return
    for name in SwitchName:
        console.print(f"{name.value}: {_position(switches, name)}", markup=False)
    rows = [row for shard in shards for row in _rows(shard)]
    print_table(("stream", "entries", "oldest", "group", "pending", "consumed by"), rows)


def list_receipts(
    *,
    rejected: Annotated[bool, typer.Option("--rejected", help="Only messages that can never be saved.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many, the newest first.")] = 50,
    before: Annotated[int | None, typer.Option(min=1, help="Only receipts with a smaller number.")] = None,
    as_json: Json = False,
) -> None:
    """List receipts of the ledger, newest first. Rejected ones are shown with their reason and their entry.

    Example: `manage.py receipts list --rejected --json`
    """
    from models.engine import engine
    from models.receipts import Level
    from receipts import rows

    with engine().connect() as connection:
        level = Level.REJECTED if rejected else None
        found = rows.list_receipts(connection, level=level, before=before, limit=limit)
    if as_json:
        print_json([_receipt_json(each) for each in found])
        return
    columns = ("number", "level", "kind", "id", "principal", "at (UTC)", "reason")
    print_table(columns, [_receipt_row(each) for each in found])


def set_switch(
    name: Annotated[SwitchName, typer.Argument(help="The switch.")],
    position: Annotated[Position, typer.Argument(help="`default` is what the setting says.")],
    *,
    wait: Annotated[bool, typer.Option(help="After two-phase was switched off, wait until all is saved.")] = True,
    as_json: Json = False,
) -> None:
    """Change a switch while everything runs. Nothing in the streams is lost; switching off drains them first.

    Example: `manage.py receipts set two-phase on`
    """
    from models.engine import engine
    from models.receipts import Switch
    from receipts import shard_states, switches
    from receipts.errors import ReceiptLogUnreachable
    from receipts.log_client import connected

    chosen = name.switch
    is_on = {Position.ON: True, Position.OFF: False, Position.DEFAULT: None}[position]
    with engine().begin() as connection:
        switches.set_switch(connection, chosen, is_on=is_on, actor=operator())
        found = switches.read_switches(connection)
    try:
        with connected() as client:
            switches.copy_to_log(client, found)
    except ReceiptLogUnreachable as error:
        complain(f"The switch is set in the ledger; savers copy it to Redis when they reach it. {error.message}")
        raise typer.Exit(3) from None
    shards = shard_states.read_shards()
    if chosen is Switch.TWO_PHASE and found.two_phase and not shard_states.has_saver(shards):
        complain("No saver runs yet. One starts within seconds if a worker consumes the queue `receipts`.")
    left = _drain() if chosen is Switch.TWO_PHASE and not found.two_phase and wait else None
    if as_json:
        print_json({"switches": _switches_json(found), "waiting": left})
    else:
        console.print(f"{name.value}: {_position(found, name)}", markup=False)
    if left:
        complain(f"{plural(left, 'message')} could not be saved yet; `manage.py receipts` shows why.")
        raise typer.Exit(1)


def _drain() -> int:
    from receipts.shard_states import wait_until_drained

    left = 0
    with on_stderr.status("Saving what was accepted …") as status:
        for left in wait_until_drained(DRAIN_SECONDS):
            status.update(f"Saving what was accepted: {plural(left, 'message')} left …")
    return left


def _position(switches: Switches, name: SwitchName) -> str:
    word = "on" if switches.is_on(name.switch) else "off"
    for row in switches.set_by_operators:
        if row.name is name.switch:
            return f"{word} (set by {row.actor} at {format_time(row.changed_at)} UTC)"
    return f"{word} (by its setting)"


def _switches_json(switches: Switches) -> list[dict[str, Any]]:
    set_by = {row.name: row for row in switches.set_by_operators}
    shown = []
    for name in SwitchName:
        row = set_by.get(name.switch)
        told = {"setBy": row.actor if row else None, "setAt": row.changed_at if row else None}
        shown.append({"name": name.value, "on": switches.is_on(name.switch), **told})
    return shown


def _shard_json(shard: ShardState) -> dict[str, Any]:
    return {**camel(shard), "groups": [camel(group) for group in shard.groups]}


def _rows(shard: ShardState) -> list[tuple[str, ...]]:
    age = format_duration(timedelta(seconds=shard.lag_seconds)) if shard.length else ""
    about = (shard.stream, str(shard.length), age)
    if not shard.groups:
        return [(*about, "", "", "")]
    return [(*about, group.group, str(group.pending), group.holder or "") for group in shard.groups]


def _receipt_json(listed: ListedReceipt) -> dict[str, Any]:
    receipt = listed.receipt
    return {**receipt.fields(), "kind": receipt.kind, "principal": receipt.principal, "entry": listed.entry}


def _receipt_row(listed: ListedReceipt) -> tuple[str, ...]:
    receipt = listed.receipt
    reason = f"{receipt.code}: {receipt.reason}" if receipt.code else ""
    at = format_time(receipt.saved_at)
    shown = (receipt.level.value, receipt.kind, str(receipt.id), receipt.principal)
    return (str(receipt.ledger_seq), *shown, at, reason)
