"""Receipts: check one that was pasted, and see the shards of the receipt log, the switches, rejections and the keys.

A pasted receipt is not stored. Readers do not see what was rejected, and neither the names of processes nor folders.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import settings
from api.ledger_calls import call_ledger
from console.door import PREFIX
from console.pages import render
from console.receipt_check import ANSWER_SECONDS, LONGEST, Checked, Line, check
from console.visitors import READERS, Visitor, require_form, require_visitor
from models.clock import now
from models.engine import engine
from models.errors import CeleriacError
from models.receipts import Level, Switch
from receipts import rows
from receipts.errors import ReceiptLogUnreachable
from receipts.key_list import Key
from receipts.keys import BadKeyFile, KeyFolderUnusable, key_folder
from receipts.rows import ListedReceipt
from receipts.shard_states import ShardState, read_shards
from receipts.switches import SETTINGS, SetSwitch, read_switches

HOME: Final = f"{PREFIX}/receipts"
MOST_REJECTED: Final = 20
MOST_SHARDS: Final = 30
KEYS_UNUSABLE: Final = "The keys of this installation cannot be read; the log of the API and `manage.py check` say why."
SWITCHES: Final = {
    Switch.TWO_PHASE: ("two-phase", "Answer accepted at once, and save later.", "Save at once, and answer saved."),
    Switch.DELIVER_BEFORE_SAVED: (
        "deliver-before-saved",
        "Chat messages reach their receiver before they are saved.",
        "Chat messages reach their receiver after they are saved.",
    ),
    Switch.FAIL_OPEN: (
        "fail-open",
        "If the receipt log is down, messages are saved at once and may lose their order.",
        "If the receipt log is down, messages are refused (503).",
    ),
}


@dataclass(frozen=True, slots=True)
class ShownSwitch:
    """A switch, and who has set it; None: its setting applies."""

    name: str
    is_on: bool
    meaning: str
    setting: str
    set_by: SetSwitch | None


@dataclass(frozen=True, slots=True)
class ShownKeys:
    """The keys with their states, or why they cannot be read."""

    keys: list[tuple[Key, str]]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the page shows from the ledger and from the folder of the keys."""

    at: datetime
    switches: list[ShownSwitch]
    rejected: list[ListedReceipt]
    keys: ShownKeys


@dataclass(frozen=True, slots=True)
class Log:
    """What the page shows from the receipt log, or why it cannot."""

    shards: list[ShardState]
    error: str = ""


async def show(request: Request) -> Response:
    visitor = await require_visitor(request, *READERS)
    return await _page(request, visitor)


async def check_pasted(request: Request) -> Response:
    """Say what is known about a receipt. It is in a form, so that it stands in no address and in no log."""
    visitor, form = await require_form(request, *READERS)
    given = form.get("receipt")
    text = given if isinstance(given, str) else ""
    checked = await call_ledger(lambda: _check(text, visitor))
    return await _page(request, visitor, text=text[:LONGEST], checked=checked)


async def _page(request: Request, visitor: Visitor, *, text: str = "", checked: Checked | None = None) -> Response:
    ledger, log = await asyncio.gather(call_ledger(lambda: _read(visitor)), call_ledger(lambda: _read_log(visitor)))
    busy = [each for each in log.shards if each.length or any(group.pending for group in each.groups)]
    shown = sorted(log.shards, key=lambda each: each not in busy)[: max(len(busy), MOST_SHARDS)]
    values = {
        "page": "receipts",
        "text": text,
        "checked": checked,
        "longest": LONGEST,
        "ledger": ledger,
        "log": log,
        "shards": shown,
        "promise_seconds": settings.current().receipt_promise_seconds,
        "most_rejected": MOST_REJECTED,
    }
    return render(request, "receipts.html", values)


def _check(text: str, visitor: Visitor) -> Checked:
    try:
        return check(text, key_folder())
    except (KeyFolderUnusable, BadKeyFile) as error:
        return Checked("bad", "The signature cannot be checked.", [Line("bad", "Keys", _about_keys(error, visitor))])


def _read(visitor: Visitor) -> Ledger:
    with engine().connect() as connection:
        at, found = now(connection), read_switches(connection)
        rejected = rows.list_receipts(connection, level=Level.REJECTED, before=None, limit=MOST_REJECTED)
    set_by = {each.name: each for each in found.set_by_operators}
    switches = [
        ShownSwitch(
            name, found.is_on(switch), on if found.is_on(switch) else off, SETTINGS[switch].upper(), set_by.get(switch)
        )
        for switch, (name, on, off) in SWITCHES.items()
    ]
    return Ledger(at, switches, rejected, _read_keys(visitor))


def _read_keys(visitor: Visitor) -> ShownKeys:
    folder = key_folder()
    try:
        return ShownKeys([(key, folder.state_of(key)) for key in reversed(folder.list_keys())])
    except (KeyFolderUnusable, BadKeyFile) as error:
        return ShownKeys([], _about_keys(error, visitor))


def _about_keys(error: CeleriacError, visitor: Visitor) -> str:
    """Return why the keys cannot be read. The message names a folder of the server."""
    return f"{error.message} {error.remedy}" if visitor.can_operate else KEYS_UNUSABLE


def _read_log(visitor: Visitor) -> Log:
    try:
        return Log(read_shards(answer_seconds=ANSWER_SECONDS))
    except ReceiptLogUnreachable as error:
        told = error.message if visitor.can_operate else "The receipt log does not answer."
        return Log([], f"{told} Accepted messages are safe on its disk, and are saved when it answers again.")


ROUTES: Final = [Route(HOME, show), Route(HOME, check_pasted, methods=["POST"])]
