"""Messages of each kind, numbered, and the switch that makes deliverers run."""

from __future__ import annotations

from collections.abc import Callable

from models.engine import engine
from models.receipts import Switch
from receipts import kinds, switches
from receipts.chat_messages import ChatMessage
from receipts.receipt import Receipt
from tasks.submission.envelope import NewTask
from tests.receipts.receiving import Receiving
from tests.receipts.saving import connect

Accept = Callable[[Receiving, int], Receipt]


def chat(receiving: Receiving, n: int) -> Receipt:
    return receiving.chat(ChatMessage("ann", "bob", str(n), f"text {n}"))


def task(receiving: Receiving, n: int) -> Receipt:
    return receiving.task(NewTask("test.insert", {"n": n}, key=f"key {n}"))


def document(receiving: Receiving, n: int) -> Receipt:
    return receiving.document(f"{n}.txt", b"text %d \xff\x00" % n, key=f"key {n}")


KINDS: dict[str, Accept] = {kinds.CHAT: chat, kinds.TASKS: task, kinds.DOCUMENTS: document}


def accepted(receiving: Receiving, kind: str, count: int) -> list[Receipt]:
    """Accept so many messages of a kind, one after the other."""
    return [KINDS[kind](receiving, n) for n in range(count)]


def turn(switch: Switch, is_on: bool | None) -> None:
    """Set a switch as `manage.py receipts set` does; None is `default`."""
    with engine().begin() as connection:
        switches.set_switch(connection, switch, is_on=is_on, actor="test")
        found = switches.read_switches(connection)
    with connect() as client:
        switches.copy_to_log(client, found)


def deliver_before_saved(*, is_on: bool = True) -> None:
    turn(Switch.DELIVER_BEFORE_SAVED, is_on)
