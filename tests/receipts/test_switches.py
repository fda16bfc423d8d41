"""Switches that are turned while messages are in flight: nothing is lost, doubled or overtaken.

Savers and deliverers run in processes of their own, senders in threads, as on a site under load.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import settings
from models.engine import engine
from models.receipts import Level, Switch
from receipts import kinds, switches
from receipts.deliver import deliver_any_shard
from receipts.errors import ReceiptsFull
from receipts.needed_consumers import needed_consumers
from receipts.receipt import COMMIT, Receipt
from receipts.save import save_any_shard
from receipts.streams import fenced_read
from receipts.switches import read_switches
from tests.receipts.accepting import accepted, deliver_before_saved, turn
from tests.receipts.orders import in_ledger, inversions, numbered, published
from tests.receipts.receiving import Receiving, sender
from tests.receipts.saving import (
    assert_empty,
    assert_once,
    begin,
    begin_delivering,
    deliver_all,
    ledger_ids,
    save_all,
    time_passes,
)
from tests.servers import ServersOfTests, wait_until
from tests.tasks.lost_workers import start_child

SENDERS = [f"sender {n}" for n in range(4)]
MESSAGES = 40  # of each sender
TURNS = 6
pytestmark = [pytest.mark.guarantee, pytest.mark.usefixtures("small_batches")]


@contextmanager
def consumers(*works: Callable[[float], object]) -> Iterator[None]:
    """Run savers and deliverers until the end of the block. Begin no thread before."""

    def run(work: Callable[[float], object]) -> None:
        while True:
            work(0.5)

    pids = [start_child(lambda work=work: run(work)) for work in works]  # type: ignore[misc]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Load:
    """Senders that send one message after the other, each in a thread."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.receipts: list[Receipt] = []
        self._stop = threading.Event()
        self._sending: list[Future[None]] = [pool.submit(self._send, name) for name in SENDERS]

    def _send(self, name: str) -> None:
        with sender() as one:
            for n in range(MESSAGES):
                self.receipts.append(self._receive(lambda n=n: one.chat(numbered(name, n))))  # type: ignore[misc]

    def _receive(self, receive: Callable[[], Receipt]) -> Receipt:
        while not self._stop.is_set():
            try:
                return receive()
            except ReceiptsFull:  # the streams were not empty in time; a client tries again
                continue
        raise AssertionError("stopped")

    def wait_for(self, count: int) -> None:
        """Wait until so many messages were received."""
        try:
            wait_until(lambda: len(self.receipts) >= count or self.is_over(), f"{count} messages were received")
        except BaseException:
            self._stop.set()
            raise

    def is_over(self) -> bool:
        return all(each.done() for each in self._sending)

    def finish(self) -> list[Receipt]:
        for each in self._sending:
            each.result(60)
        return self.receipts


def turned_under_load(switch: Switch) -> list[Receipt]:
    """Turn a switch on and off while senders send, and return the receipts that they got."""
    with ThreadPoolExecutor(len(SENDERS)) as pool:
        load = Load(pool)
        for number in range(1, TURNS + 1):
            load.wait_for(number * len(SENDERS) * MESSAGES // (TURNS + 1))
            turn(switch, number % 2 == 1)
        return load.finish()


@pytest.mark.parametrize("switch", Switch)
def test_a_switch_that_is_turned_again_and_again_loses_doubles_and_overtakes_nothing(
    receiving: Receiving, switch: Switch
) -> None:
    if switch is Switch.TWO_PHASE:
        turn(switch, False)
    with consumers(save_any_shard, deliver_any_shard), published() as frames:
        receipts = turned_under_load(switch)
        wait_until(lambda: len(ledger_ids()) == len(receipts) and receiving.is_empty(), "all is saved")
        pushed = frames.messages()
    assert len(receipts) == len(SENDERS) * MESSAGES
    assert_once(receiving, receipts)
    saved = in_ledger()
    assert inversions(saved) == 0
    levels = {receipt.level for receipt in receipts}
    if switch is Switch.TWO_PHASE:
        assert levels == {Level.ACCEPTED, Level.SAVED}, "it was not turned while messages were sent"
    else:
        assert levels == {Level.ACCEPTED}
        assert set(pushed) == set(saved)
        assert inversions(pushed) == 0


@pytest.mark.parametrize("delivers", [False, True])
def test_a_switch_that_is_turned_between_the_question_and_the_read_stops_the_read(
    receiving: Receiving, delivers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate was open when Redis was asked; before it reads, the stream belongs to the other group."""
    deliver_before_saved(is_on=delivers)
    receipts = accepted(receiving, kinds.CHAT, 2)
    run = begin_delivering() if delivers else begin()
    ask = fenced_read._ask

    def ask_and_switch(connection: object, commands: Sequence[Sequence[object]]) -> list[object]:
        answers = ask(connection, commands)
        if commands[0][0] == "WATCH" and commands[-1][0] == "EVAL":
            deliver_before_saved(is_on=not delivers)
        return answers

    with monkeypatch.context() as patched:
        patched.setattr(fenced_read, "_ask", ask_and_switch)
        assert not run.collect()
    assert run.source.is_closed
    assert receiving.client.xpending(run.shard.key, run.shard.group)["pending"] == 0
    run.end()
    deliver_all()
    save_all()
    assert_once(receiving, receipts)


def test_all_switches_that_are_turned_at_once_with_several_shards_lose_and_overtake_nothing(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_SHARDS", "2")
    settings.current.cache_clear()
    with consumers(*[save_any_shard, deliver_any_shard] * 2), ThreadPoolExecutor(len(SENDERS)) as pool:
        load = Load(pool)
        for number in range(1, TURNS + 1):
            load.wait_for(number * len(SENDERS) * MESSAGES // (TURNS + 1))
            turn(Switch.DELIVER_BEFORE_SAVED, number % 2 == 1)
            turn(Switch.TWO_PHASE, number % 3 != 1)
        turn(Switch.TWO_PHASE, True)
        receipts = load.finish()
        wait_until(lambda: len(ledger_ids()) == len(receipts) and receiving.is_empty(), "all is saved")
    assert_once(receiving, receipts)
    assert inversions(in_ledger()) == 0


def test_rollback_procedure_switches_two_phase_off_drains_and_then_saves_at_once(receiving: Receiving) -> None:
    """Section 8 of the design: after the switch is off, the path is that of before, and nothing is left behind."""
    turn(Switch.TWO_PHASE, True)
    deliver_before_saved()
    first = accepted(receiving, kinds.CHAT, 5)
    deliver_all()  # now they are in the second stream
    deliver_before_saved(is_on=False)
    more = [receiving.chat(numbered("ann", n)) for n in range(5, 10)]
    assert {receipt.level for receipt in first + more} == {Level.ACCEPTED}
    turn(Switch.TWO_PHASE, False)
    with consumers(save_any_shard), ThreadPoolExecutor(1) as pool:

        def send() -> list[Receipt]:
            with sender() as one:
                return [one.chat(numbered("ann", n)) for n in range(10, 13)]

        at_once = pool.submit(send).result(30)
    assert [(receipt.level, receipt.policy, receipt.ordered) for receipt in at_once] == [
        (Level.SAVED, COMMIT, True)
    ] * 3
    assert_once(receiving, [*first, *more, *at_once])
    assert inversions(in_ledger()) == 0
    turn(Switch.TWO_PHASE, None)
    with engine().connect() as connection:
        assert read_switches(connection).set_by_operators[0].name is Switch.DELIVER_BEFORE_SAVED
    assert list(needed_consumers()) == ["save", "deliver"], "the setting is on"


def test_while_a_stream_is_drained_messages_of_its_shard_wait_and_are_refused_if_it_takes_too_long(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("receipts.accept.DRAIN_SECONDS", 0.2)
    receipts = [receiving.chat(numbered("ann", 0))]
    turn(Switch.TWO_PHASE, False)
    with pytest.raises(ReceiptsFull, match="earlier messages are not saved yet"):
        receiving.chat(numbered("ann", 1))
    save_all()
    receipts.append(receiving.chat(numbered("ann", 1)))
    assert receipts[1].level is Level.SAVED
    assert_once(receiving, receipts)


def positions(receiving: Receiving) -> dict[str, str]:
    """Return the last entry that each group has read of the accepted stream of chats."""
    found = receiving.client.xinfo_groups(kinds.accepted_stream(kinds.CHAT))
    return {group["name"]: group["last-delivered-id"] for group in found}


def test_delivery_is_handed_over_at_the_entry_where_the_other_has_stopped(receiving: Receiving) -> None:
    receipts = accepted(receiving, kinds.CHAT, 2)
    save_all()
    for is_on in (True, False, True, False):
        before = positions(receiving)
        deliver_before_saved(is_on=is_on)
        old, new = ("save", "deliver") if is_on else ("deliver", "save")
        assert positions(receiving)[new] == before[old]
        receipts += [receiving.chat(numbered("ann", len(receipts) + n)) for n in range(3)]
        if is_on:
            deliver_all()
        save_all()
        assert len(ledger_ids()) == len(receipts)
        assert positions(receiving)[new] > before[old]
    assert_once(receiving, receipts)
    assert inversions(in_ledger()) == 0


def test_who_reads_next_waits_for_what_the_other_has_read_and_not_finished(
    receiving: Receiving, ledger: ServersOfTests
) -> None:
    """On: the deliverer waits for the saver. Off: the saver waits for the deliverer, and for the second stream."""
    receipts = [receiving.chat(numbered("ann", n)) for n in range(4)]
    saver = begin("saver")
    assert saver.collect()  # two messages
    deliver_before_saved()
    deliver_all()
    assert receiving.streams() == {kinds.accepted_stream(kinds.CHAT): 4}, "the deliverer must not overtake the saver"
    saver.commit()
    saver.end()
    deliver_all()
    assert receiving.streams() == {settings.current().receipt_stream_to_save: 2}
    deliver_before_saved(is_on=False)
    receipts += [receiving.chat(numbered("ann", n)) for n in range(4, 6)]
    saver = begin("saver")
    assert not saver.collect(), "the saver must not overtake what was delivered"
    saver.end()
    time_passes(ledger, receiving.client)
    save_all()
    save_all()
    assert_once(receiving, receipts)
    assert inversions(in_ledger()) == 0


def test_default_returns_to_the_setting(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in Switch:
        for is_on in (True, False):
            turn(switch, is_on)
            with engine().connect() as connection:
                assert read_switches(connection).is_on(switch) is is_on
        turn(switch, None)
    with engine().connect() as connection:
        found = read_switches(connection)
    assert found.set_by_operators == ()
    assert (found.two_phase, found.deliver_before_saved, found.fail_open) == (True, False, True)
    assert receiving.chat(numbered("ann", 0)).level is Level.ACCEPTED
    save_all()
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    assert receiving.chat(numbered("ann", 1)).level is Level.SAVED, "the setting applies, and it is off"
    turn(Switch.TWO_PHASE, True)
    assert receiving.chat(numbered("ann", 2)).level is Level.ACCEPTED, "the switch wins over the setting"
    save_all()
    assert_empty(receiving)


def test_a_saver_brings_a_switch_to_redis_that_the_command_could_not_write(receiving: Receiving) -> None:
    with engine().begin() as connection:
        switches.set_switch(connection, Switch.TWO_PHASE, is_on=False, actor="test")
    assert receiving.chat(numbered("ann", 0)).level is Level.ACCEPTED, "Redis does not have it yet"
    save_all()
    assert receiving.chat(numbered("ann", 1)).level is Level.SAVED


def test_messages_that_were_accepted_are_saved_although_the_setting_was_switched_off_before_anything_was_saved(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger was down all the time, so that it knows of no receipt and no switch."""
    receipts = [receiving.chat(numbered("ann", 0))]
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    assert list(needed_consumers()) == ["save", "deliver"]
    save_all()
    assert_once(receiving, receipts)
    receiving.client.delete(kinds.switches_key())
    with engine().begin() as connection:
        connection.exec_driver_sql("DELETE FROM celeriac.receipt")
    assert list(needed_consumers()) == []
