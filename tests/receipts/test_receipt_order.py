"""The messages of a sender stay in order from `accepted` to the ledger and to the receiver, whatever dies or hangs.

Savers and deliverers are processes that are killed or suspended at windows chosen at random. A suspended one goes on
after its successor has done its work, and must not disturb it.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest

import settings
from receipts import shard_consumers
from receipts.receipt import Receipt
from tests.outbox.ledger import move
from tests.receipts.accepting import deliver_before_saved
from tests.receipts.orders import in_ledger, inversions, numbered, published
from tests.receipts.receiving import Receiving
from tests.receipts.saving import assert_once, deliver_all, save_all, time_passes
from tests.servers import ServersOfTests
from tests.tasks.lost_workers import start_child

SENDERS = [f"sender {n}" for n in range(8)]
ROUNDS = 5
MESSAGES = 12  # of each round
EARLY = 0.3
KILLED = ("stream.after_read", "receipts.before_save", "checkpoint.before_commit_of_row")
BOTH = ("receipts.after_save", "checkpoint.before_ack", "checkpoint.after_ack")
DELIVERING = ("stream.after_read", "receipts.before_push", "receipts.after_push", "receipts.after_move")

pytestmark = pytest.mark.guarantee


@pytest.fixture
def shards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_batches: None) -> int:
    monkeypatch.setenv("RECEIPT_SHARDS", str(request.param))
    settings.current.cache_clear()
    return int(request.param)


class Disturbed:
    """Lets savers and deliverers die or hang, one after the other, while messages are accepted."""

    def __init__(self, receiving: Receiving, servers: ServersOfTests, seed: int) -> None:
        self.receiving = receiving
        self.servers = servers
        self.chance = random.Random(seed)
        self.receipts: list[Receipt] = []
        self.sent = dict.fromkeys(SENDERS, 0)
        self.suspended: list[int] = []
        self.faults = 0

    def send(self, count: int = MESSAGES) -> None:
        for sender in self.chance.choices(SENDERS, k=count):
            self.receipts.append(self.receiving.chat(numbered(sender, self.sent[sender])))
            self.sent[sender] += 1

    def round(self, work: Callable[[], None], windows: tuple[str, ...]) -> None:
        """Run a process that dies or hangs, accept messages meanwhile, and let the time pass that others wait for."""
        window = self.chance.choice(windows)
        action = self.chance.choice(("kill", "pause")) if window not in KILLED else "kill"
        pid = start_child(work, failpoints=f"{window}={action}@{self.chance.randint(1, 4)}")
        self.send()
        _, status = os.waitpid(pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            self.suspended.append(pid)
        self.faults += os.WIFSTOPPED(status) or os.WIFSIGNALED(status)
        if self.chance.random() < EARLY:  # the lease has expired, and Redis does not hand over the entries yet
            move(self.servers, shard_consumers.LEASE_SECONDS + 1)
        else:
            time_passes(self.servers, self.receiving.client)

    def resume(self) -> None:
        """Let those that hang go on; each of them ends, because its shard is lost."""
        while self.suspended:
            pid = self.suspended.pop()
            os.kill(pid, signal.SIGCONT)
            os.waitpid(pid, 0)


@pytest.mark.parametrize(("shards", "seed"), [(1, 1), (1, 2), (4, 3)], indirect=["shards"])
@pytest.mark.parametrize("delivers", [False, True], ids=["saved first", "delivered first"])
def test_no_message_of_a_sender_overtakes_another_while_savers_die_and_hang(
    receiving: Receiving, ledger: ServersOfTests, shards: int, delivers: bool, seed: int
) -> None:
    disturbed = Disturbed(receiving, ledger, seed)
    if delivers:
        deliver_before_saved()
    with published() as frames:
        disturbed.send()
        for _ in range(ROUNDS):
            if delivers:
                disturbed.round(deliver_all, DELIVERING)
            disturbed.round(save_all, (*KILLED, *BOTH))
        time_passes(ledger, receiving.client)
        if delivers:
            deliver_all()
        save_all()
        disturbed.resume()
        if delivers:
            deliver_all()
        save_all()
        pushed = frames.messages()
    assert disturbed.faults >= 2, "too few processes died"
    assert_once(receiving, disturbed.receipts)
    saved = in_ledger()
    assert inversions(saved) == 0
    assert set(pushed) == set(saved)
    assert inversions(pushed) == 0


@pytest.mark.parametrize(("shards", "seed"), [(1, 4), (4, 5)], indirect=["shards"])
def test_no_message_of_a_sender_overtakes_another_while_delivery_is_switched_and_savers_die_and_hang(
    receiving: Receiving, ledger: ServersOfTests, shards: int, seed: int
) -> None:
    disturbed = Disturbed(receiving, ledger, seed)
    with published() as frames:
        disturbed.send()
        for number in range(ROUNDS):
            deliver_before_saved(is_on=number % 2 == 0)
            disturbed.round(deliver_all, DELIVERING)
            disturbed.round(save_all, (*KILLED, *BOTH))
        time_passes(ledger, receiving.client)
        for _ in range(2):  # each waits for what the other has to do first
            deliver_all()
            save_all()
            disturbed.resume()
        pushed = frames.messages()
    assert_once(receiving, disturbed.receipts)
    saved = in_ledger()
    assert inversions(saved) == 0
    assert set(pushed) == set(saved)
    assert inversions(pushed) == 0


def test_a_saver_that_hangs_in_its_transaction_is_replaced(
    receiving: Receiving, ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds a lock on the shard, for which its successor would wait as long as it hangs."""
    monkeypatch.setattr(shard_consumers, "LEASE_SECONDS", 0.5)
    receipts = [receiving.chat(numbered("ann", n)) for n in range(3)]
    pid = start_child(save_all, failpoints="checkpoint.before_commit_of_row=pause")
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    try:
        time_passes(ledger, receiving.client)
        save_all()
        assert_once(receiving, receipts)
    finally:
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)
    assert_once(receiving, receipts)
    assert inversions(in_ledger()) == 0
