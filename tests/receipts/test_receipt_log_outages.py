"""Outages of the receipt log: nothing that was answered is lost, and what cannot be kept is not accepted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import settings
from models.engine import engine
from models.receipts import Level, Switch
from receipts import chat_messages, kinds, log, status, switches, task_messages
from receipts.chat_messages import ChatMessage
from receipts.errors import NotDurable, ReceiptLogUnreachable, ReceiptsFull, ServerBusy
from receipts.receipt import COMMIT, Receipt
from receipts.save import save_any_shard
from tasks.submission.envelope import NewTask
from tests.receipts.accepting import KINDS, accepted, chat, turn
from tests.receipts.log_server import LogServer
from tests.receipts.orders import in_ledger, inversions, numbered
from tests.receipts.receiving import Receiving, saving, sender
from tests.receipts.saving import assert_empty, assert_once, deliver_all, ledger_ids, save_all
from tests.servers import wait_until
from tests.tasks.deliveries import scalar

SENDERS = 4
LIMIT_SECONDS = log.ANSWER_SECONDS + 1.0  # a request must be answered within 5 s, and the ledger may be silent, too
MISCONFIGURED = {
    "appendfsync": "everysec",
    "appendonly": "no",
    "no-appendfsync-on-rewrite": "yes",
    "maxmemory-policy": "allkeys-lru",
}
pytestmark = pytest.mark.guarantee


@pytest.fixture
def site(log_server: LogServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiving]:
    """An installation that answers `accepted` and whose receipt log is `log_server`."""
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    settings.current.cache_clear()
    made = Receiving()
    yield made
    made.close()


def run(site: Receiving, work: Awaitable[Any]) -> Any:
    return site.sender.loop.run_until_complete(work)


def send_until_killed(name: str, got: list[Receipt], enough: threading.Event) -> int:
    """Send messages until the receipt log is gone. Return the number of the one that got no receipt."""
    with sender() as one:
        for n in range(100_000):
            try:
                got.append(one.chat(numbered(name, n)))
            except ServerBusy:
                return n
            if n == 20:
                enough.set()
    raise AssertionError("it was not killed")


def test_a_receipt_log_that_is_killed_under_load_has_everything_that_it_has_answered(
    site: Receiving, log_server: LogServer
) -> None:
    turn(Switch.FAIL_OPEN, False)
    got: list[Receipt] = []
    enough = threading.Event()
    names = [f"sender {n}" for n in range(SENDERS)]
    with ThreadPoolExecutor(SENDERS) as pool:
        sending = [pool.submit(send_until_killed, name, got, enough) for name in names]
        assert enough.wait(30)
        log_server.kill()
        unanswered = [each.result(30) for each in sending]
    log_server.start()
    for receipt in got:
        assert run(site, status.find_claim(site.sender.log, receipt.id)) is not None
    again = [site.chat(numbered(name, n)) for name, n in zip(names, unanswered, strict=True)]
    save_all()
    assert_once(site, [*got, *again])
    assert inversions(in_ledger()) == 0


def test_a_receipt_log_that_is_killed_again_and_again_while_a_saver_works_loses_and_doubles_nothing(
    site: Receiving, log_server: LogServer
) -> None:
    receipts: list[Receipt] = []
    for n in range(4):
        receipts += [KINDS[kind](site, n) for kind in KINDS]
        with log_server.killed(), pytest.raises(Exception, match="unreachable"):
            save_any_shard(5, until_idle=True)
        if n % 2:
            save_all()
    save_all()
    assert_once(site, receipts)


@pytest.mark.parametrize("name", MISCONFIGURED)
def test_a_redis_that_may_lose_its_answers_is_refused_by_the_next_check_and_by_new_connections(
    site: Receiving, log_server: LogServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    turn(Switch.FAIL_OPEN, False)
    receipts = [chat(site, 0)]
    with log_server.configured(name, MISCONFIGURED[name]):
        receipts.append(chat(site, 1))  # the last check was a moment ago
        monkeypatch.setattr(log, "CHECK_SECONDS", 0.0)
        for _ in range(2):
            with pytest.raises(ServerBusy) as busy:
                chat(site, 2)
            assert isinstance(busy.value.__cause__, NotDurable)
            assert name in busy.value.__cause__.message
            site.reconnect()
    receipts.append(chat(site, 2))
    assert (receipts[-1].level, receipts[-1].duplicate) == (Level.ACCEPTED, False), "it was written although refused"
    save_all()
    assert_once(site, receipts)


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [getattr(record, "event", "") for record in caplog.records if record.name == log.__name__]
    return [event for event in found if event]


def test_one_outage_is_one_critical_event_and_not_one_per_request(
    site: Receiving, log_server: LogServer, caplog: pytest.LogCaptureFixture
) -> None:
    receipt = chat(site, 0)
    save_all()
    for n in (1, 2):
        with log_server.killed():
            for k in range(3):
                assert site.chat(ChatMessage("ann", "bob", f"{n} {k}", "text")).level is Level.SAVED
                with pytest.raises(ReceiptLogUnreachable):
                    run(site, status.find_claim(site.sender.log, receipt.id))
        chat(site, n)
        assert outages(caplog) == ["receipt_log_down", "receipt_log_up"] * n
    levels = {record.levelno for record in caplog.records if getattr(record, "event", "") == "receipt_log_down"}
    assert levels == {logging.CRITICAL}


def test_a_redis_that_is_not_durable_is_one_critical_event_although_receipts_are_read_meanwhile(
    site: Receiving, log_server: LogServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "CHECK_SECONDS", 0.0)
    receipt = chat(site, 0)
    with log_server.configured("appendfsync", "everysec"):
        for n in range(1, 4):
            assert chat(site, n).level is Level.SAVED
            assert run(site, status.find_claim(site.sender.log, receipt.id)) is not None, "reading is safe"
    assert outages(caplog) == ["receipt_log_down"]
    assert chat(site, 4).level is Level.ACCEPTED
    assert outages(caplog) == ["receipt_log_down", "receipt_log_up"]


def test_fail_open_saves_at_once_says_that_order_is_lost_and_the_saver_does_not_double_it(
    site: Receiving, log_server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is in the stream, too: the receipt log was killed after it had written the entry."""
    receipts = []
    for n, kind in enumerate(KINDS):
        first = KINDS[kind](site, n)
        with log_server.killed():
            open_ = KINDS[kind](site, n)
            assert (open_.level, open_.ordered, open_.policy) == (Level.SAVED, False, COMMIT)
            assert open_.id == first.id
            new = KINDS[kind](site, 10 + n)
            assert (new.level, new.ordered, new.duplicate) == (Level.SAVED, False, False)
            assert KINDS[kind](site, 10 + n).duplicate
        receipts += [first, new]
    assert not site.is_empty()
    save_all()
    assert_once(site, receipts)
    claim = run(site, status.find_claim(site.sender.log, receipts[0].id))
    assert (claim.level, claim.ledger_seq) == (Level.SAVED, 1)


def test_a_task_without_a_key_whose_reply_is_lost_for_good_has_the_same_id_in_the_ledger_and_in_the_stream(
    site: Receiving, log_server: LogServer
) -> None:
    new = NewTask("test.insert", {"n": 1})
    message = task_messages.message_of(new, principal="ann", client_id=None)
    run(site, site.sender.receiver.accept(message))  # its reply is lost
    with log_server.killed():
        receipt = site.receive(message, saving(task_messages.save_now, message, new))
    assert receipt.level is Level.SAVED
    save_all()
    assert_once(site, [receipt])


def test_fail_closed_refuses_and_writes_nothing(site: Receiving, log_server: LogServer) -> None:
    turn(Switch.FAIL_OPEN, False)
    chat(site, 0)
    with log_server.killed():
        for kind in KINDS:
            with pytest.raises(ServerBusy):
                KINDS[kind](site, 1)
    save_all()
    assert len(ledger_ids()) == 1


def test_two_phase_off_does_not_need_the_receipt_log(
    site: Receiving, log_server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    log_server.kill()
    receipt = chat(site, 0)
    assert (receipt.level, receipt.ordered) == (Level.SAVED, True), "nothing was ever accepted that it could overtake"
    receipt = chat(site, 1)
    assert receipt.level is Level.SAVED


def test_a_silent_receipt_log_is_answered_in_time_and_not_asked_by_every_request(
    site: Receiving, log_server: LogServer
) -> None:
    chat(site, 0)
    with log_server.silent():
        started_at = time.monotonic()
        assert chat(site, 1).ordered is False
        assert time.monotonic() - started_at < LIMIT_SECONDS
        with engine().begin() as connection:
            switches.set_switch(connection, Switch.FAIL_OPEN, is_on=False, actor="test")
        started_at = time.monotonic()
        for _ in range(3):
            with pytest.raises(ServerBusy):
                chat(site, 2)
        assert time.monotonic() - started_at < LIMIT_SECONDS
    turn(Switch.FAIL_OPEN, True)
    wait_until(lambda: chat(site, 3).level is Level.ACCEPTED, "it answers again")
    receipts = [chat(site, n) for n in range(4)]
    save_all()
    assert_once(site, receipts)


def test_a_full_stream_refuses_new_messages_and_knows_the_old_ones(
    site: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_STREAM_LIMIT", "3")
    settings.current.cache_clear()
    receipts = accepted(site, kinds.CHAT, 3)
    with pytest.raises(ReceiptsFull):
        chat(site, 3)
    assert chat(site, 1).duplicate
    assert KINDS[kinds.TASKS](site, 0).level is Level.ACCEPTED, "each kind has a stream of its own"
    save_all()
    receipts += [chat(site, 3), KINDS[kinds.TASKS](site, 0)]
    save_all()
    assert_once(site, receipts)


def test_a_receipt_log_whose_memory_is_nearly_full_refuses_new_messages_and_knows_the_old_ones(
    site: Receiving, log_server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "CHECK_SECONDS", 0.0)
    accepted(site, kinds.CHAT, 3)
    used = int(site.client.info("memory")["used_memory"])
    with log_server.configured("maxmemory", str(round(used * 1.01))):
        with pytest.raises(ReceiptsFull, match="memory"):
            chat(site, 3)
        assert chat(site, 1).duplicate
        turn(Switch.TWO_PHASE, False)
        save_all()
        assert chat(site, 3).level is Level.SAVED, "what is saved at once needs no memory there"
    assert len(ledger_ids()) == 4
    assert_empty(site)


@pytest.mark.parametrize("delivers", [False, True])
def test_a_receipt_log_without_any_memory_left_is_emptied_by_the_saver(
    site: Receiving, log_server: LogServer, delivers: bool
) -> None:
    """Otherwise it would stay full: only the saver makes room."""
    if delivers:
        turn(Switch.DELIVER_BEFORE_SAVED, True)
    turn(Switch.TWO_PHASE, True)
    receipts = [KINDS[kind](site, n) for kind in KINDS for n in range(3)]
    used = int(site.client.info("memory")["used_memory"])
    with log_server.configured("maxmemory", str(used // 2)):
        site.sender.log._checked_at = time.monotonic()  # the next check is due in a while
        with pytest.raises(ReceiptsFull):
            chat(site, 3)
        if delivers:
            deliver_all()
        save_all()
        assert_once(site, receipts)
    assert chat(site, 3).level is Level.ACCEPTED


def test_more_requests_at_once_than_connections_are_not_mistaken_for_an_outage(site: Receiving) -> None:
    """They would be saved at once, out of order, and load the ledger when it can least bear it."""

    async def one(n: int) -> Receipt:
        message = ChatMessage(f"sender {n}", "bob", "1", "text")
        return await site.sender.receiver.receive(message.message(), saving(chat_messages.save_now, message))

    async def all_at_once() -> list[Receipt]:
        return list(await asyncio.gather(*(one(n) for n in range(log.CONNECTIONS * 10))))

    receipts = run(site, all_at_once())
    assert {receipt.level for receipt in receipts} == {Level.ACCEPTED}
    assert int(site.client.info("clients")["connected_clients"]) <= log.CONNECTIONS + 10
    save_all()
    assert_once(site, receipts)
    assert scalar("SELECT count(DISTINCT from_user_id) FROM ledger.chat_message") == log.CONNECTIONS * 10
