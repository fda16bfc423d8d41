"""Accepting: one message per id of a client, however often it is sent, and no id is forgotten before it is saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

import documents
import settings
from chaos.fault_proxy import EVALSHA, Fault, FaultProxy
from models.engine import engine, sessions
from models.receipts import Level, Switch
from models.sql import sql
from receipts import chat_messages, kinds, rows, task_messages
from receipts.chat_messages import ChatMessage
from receipts.receipt import COMMIT, Receipt
from tasks.submission.envelope import NewTask
from tasks.submission.submit import IdempotencyConflict
from tests.receipts.accepting import KINDS, accepted, deliver_before_saved, turn
from tests.receipts.consuming import point_at, void
from tests.receipts.receiving import Receiving, Sender, saving, sender
from tests.receipts.saving import assert_empty, assert_once, deliver_all, killed, ledger_ids, save_all, time_passes
from tests.receipts.test_rejected import rejected
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar, statements

CLIENTS = 50
Send = Callable[[Sender, str], Receipt]
pytestmark = pytest.mark.guarantee


def chat(one: Sender, body: str) -> Receipt:
    return one.chat(ChatMessage("ann", "bob", "the same", body))


def task(one: Sender, body: str) -> Receipt:
    new = NewTask("test.insert", {"body": body}, key="the same")
    message = task_messages.message_of(new, principal="ann", client_id="the same")
    return one.receive(message, saving(task_messages.save_now, message, new))


def at_once(send: Send, bodies: list[str]) -> list[Receipt | IdempotencyConflict]:
    """Let clients with connections of their own send at the same moment, one text each."""
    start = threading.Barrier(len(bodies))

    def run(body: str) -> Receipt | IdempotencyConflict:
        with sender() as one:
            one.loop.run_until_complete(one.log.require_durable())  # connects
            start.wait(30)
            try:
                return send(one, body)
            except IdempotencyConflict as conflict:
                return conflict

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(run, bodies))


@pytest.mark.parametrize("send", [chat, task])
@pytest.mark.parametrize("two_phase", [True, False], ids=["two-phase", "saved at once"])
def test_fifty_clients_with_the_same_id_get_one_message_and_one_of_them_is_first(
    receiving: Receiving, send: Send, two_phase: bool
) -> None:
    turn(Switch.TWO_PHASE, two_phase)
    answers = at_once(send, ["text"] * CLIENTS)
    receipts = [answer for answer in answers if isinstance(answer, Receipt)]
    assert len({receipt.id for receipt in receipts}) == 1
    assert [receipt.duplicate for receipt in receipts].count(False) == 1
    assert len(receipts) == CLIENTS
    save_all()
    assert_once(receiving, receipts)


@pytest.mark.parametrize("send", [chat, task])
def test_of_fifty_clients_with_the_same_id_and_two_texts_those_with_the_other_text_are_refused(
    receiving: Receiving, send: Send
) -> None:
    answers = at_once(send, ["one", "other"] * (CLIENTS // 2))
    receipts = [answer for answer in answers if isinstance(answer, Receipt)]
    assert (len(receipts), len(answers) - len(receipts)) == (CLIENTS // 2, CLIENTS // 2)
    assert len({receipt.sha256 for receipt in receipts}) == 1
    assert [receipt.duplicate for receipt in receipts].count(False) == 1
    save_all()
    assert_once(receiving, receipts)


FIRST: dict[str, Callable[[Receiving], Receipt]] = {
    kinds.CHAT: lambda receiving: receiving.chat(ChatMessage("ann", "bob", "1", "first")),
    kinds.TASKS: lambda receiving: receiving.task(NewTask("test.insert", "first", key="1")),
    kinds.DOCUMENTS: lambda receiving: receiving.document("a.txt", b"first", key="1"),
}
OTHER: dict[str, Callable[[Receiving], Receipt]] = {
    kinds.CHAT: lambda receiving: receiving.chat(ChatMessage("ann", "bob", "1", "other")),
    kinds.TASKS: lambda receiving: receiving.task(NewTask("test.insert", "other", key="1")),
    kinds.DOCUMENTS: lambda receiving: receiving.document("a.txt", b"other", key="1"),
}
STORED = {
    kinds.CHAT: "SELECT body FROM ledger.chat_message",
    kinds.TASKS: "SELECT payload FROM ledger.ingest_task",
    kinds.DOCUMENTS: "SELECT convert_from(content, 'UTF8') FROM ledger.document",
}


@pytest.mark.parametrize("kind", FIRST)
def test_another_payload_under_a_known_id_never_replaces_the_first(receiving: Receiving, kind: str) -> None:
    """It is refused before and after the first is saved, and rejected by the saver when Redis has forgotten the id."""
    first = FIRST[kind](receiving)
    for _ in range(2):
        with pytest.raises(IdempotencyConflict, match=str(first.id)):
            OTHER[kind](receiving)
        save_all()
    receiving.client.delete(kinds.claim_key(first.id))  # it has expired
    other = OTHER[kind](receiving)
    assert (other.level, other.id, other.duplicate) == (Level.ACCEPTED, first.id, False)
    save_all()
    (listed,) = rejected()
    assert (listed.receipt.id, listed.receipt.code) == (first.id, "idempotency_conflict")
    assert (listed.receipt.sha256, listed.receipt.client_id) == (other.sha256, "1")
    assert str(first.id) in (listed.receipt.reason or "")
    assert scalar(STORED[kind]) == "first"
    assert_once(receiving, [first])
    assert FIRST[kind](receiving).level is Level.ACCEPTED  # the rejected claim does not stand in its way
    save_all()
    assert FIRST[kind](receiving).level is Level.SAVED
    assert_once(receiving, [first])


@pytest.mark.parametrize("kind", FIRST)
def test_a_repetition_that_is_saved_at_once_gets_the_first_receipt_although_a_later_payload_was_rejected(
    receiving: Receiving, kind: str
) -> None:
    first = FIRST[kind](receiving)
    save_all()
    receiving.client.delete(kinds.claim_key(first.id))
    OTHER[kind](receiving)
    save_all()
    turn(Switch.TWO_PHASE, False)
    receiving.client.delete(kinds.claim_key(first.id))
    again = FIRST[kind](receiving)
    assert (again.level, again.duplicate, again.sha256) == (Level.SAVED, True, first.sha256)
    receiving.client.delete(kinds.claim_key(first.id))
    with pytest.raises(IdempotencyConflict):
        OTHER[kind](receiving)
    assert scalar(STORED[kind]) == "first"


def test_a_task_without_a_key_is_a_new_task_each_time(receiving: Receiving) -> None:
    receipts = [receiving.task(NewTask("test.insert", "the same")) for _ in range(3)]
    assert len({receipt.id for receipt in receipts}) == 3
    save_all()
    assert_once(receiving, receipts)


def test_tasks_of_a_partition_key_keep_the_order_in_which_they_were_accepted(
    receiving: Receiving, small_batches: None
) -> None:
    """Their idempotency keys sort the other way round, and batches divide them."""
    receipts = [receiving.task(NewTask("test.insert", n, key=f"{9 - n}", partition_key="p")) for n in range(7)]
    save_all()
    with engine().connect() as connection:
        found = connection.execute(sql("SELECT id FROM ledger.ingest_task ORDER BY key_seq")).scalars().all()
    assert found == [receipt.id for receipt in receipts]
    assert_once(receiving, receipts)


def test_saving_an_upload_again_does_not_bring_it_back_after_a_newer_one(
    receiving: Receiving, ledger: ServersOfTests
) -> None:
    receipt = receiving.document("a.txt", b"old", key="1")
    killed(save_all, "receipts.after_save=kill")
    with sessions().begin() as session:
        documents.upload(session, name="a.txt", content=b"new", principal="ann")
    time_passes(ledger, receiving.client)
    save_all()
    assert scalar(STORED[kinds.DOCUMENTS]) == "new"
    assert ledger_ids() == [receipt.id]
    assert_empty(receiving)


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_expires_only_after_its_message_is_saved(
    receiving: Receiving, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_CLAIM_SECONDS", "500")
    settings.current.cache_clear()
    (receipt,) = accepted(receiving, kind, 1)
    key = kinds.claim_key(receipt.id)
    assert receiving.client.ttl(key) == -1
    save_all()
    assert 400 < receiving.client.ttl(key) <= 500


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_whose_api_is_killed_before_it_answers_repeats_and_has_one_message(
    receiving: Receiving, kind: str
) -> None:
    killed(lambda: void(accepted(Receiving(), kind, 1)), "receipts.after_accept=kill")
    (receipt,) = accepted(receiving, kind, 1)
    assert (receipt.level, receipt.duplicate) == (Level.ACCEPTED, True)
    save_all()
    assert_once(receiving, [receipt])


@pytest.fixture
def redis_line(receiving: Receiving, ledger: ServersOfTests) -> Iterator[FaultProxy]:
    """The way of the API to Redis."""
    address = settings.current().redis_url
    with FaultProxy(address) as proxy:
        point_at(ledger, REDIS_URL=proxy.url)
        receiving.reconnect()
        yield proxy
        point_at(ledger, REDIS_URL=address)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.RESET])
def test_a_reply_of_the_receipt_log_that_is_lost_is_asked_for_again(
    receiving: Receiving, redis_line: FaultProxy, kind: str, fault: Fault
) -> None:
    receipts = accepted(receiving, kind, 1)  # connects, and loads the script
    redis_line.arm(fault, EVALSHA)
    receipts.append(KINDS[kind](receiving, 1))
    assert redis_line.strikes
    assert receipts[1].duplicate is (fault is Fault.LOSE_REPLY)
    save_all()
    assert_once(receiving, receipts)


@pytest.mark.parametrize("delivers", [False, True], ids=["saver", "deliverer"])
def test_an_entry_stays_until_every_group_has_passed_it_also_one_that_is_not_ours(
    receiving: Receiving, delivers: bool
) -> None:
    if delivers:
        deliver_before_saved()
    stream = kinds.accepted_stream(kinds.CHAT)
    receiving.client.xgroup_create(stream, "foreign", id="0", mkstream=True)
    receipts = accepted(receiving, kinds.CHAT, 3)
    if delivers:
        deliver_all()
    save_all()
    assert receiving.streams() == {stream: 3}
    ((_, read),) = receiving.client.xreadgroup("foreign", "one", {stream: ">"}, count=2)
    receiving.client.xack(stream, "foreign", read[0][0])
    save_all()  # a new run deletes what has been passed
    if delivers:
        deliver_all()
    assert receiving.streams() == {stream: 2}, "one is not acknowledged, one was not read"
    receiving.client.xgroup_destroy(stream, "foreign")
    if delivers:
        deliver_all()
    save_all()
    assert_once(receiving, receipts)


def test_a_hundred_chat_messages_are_saved_by_one_insert(receiving: Receiving) -> None:
    receipts = accepted(receiving, kinds.CHAT, 100)
    with statements() as sent:
        save_all()
    inserts = [statement for statement in sent if "INSERT INTO" in statement and "shard_lease" not in statement]
    assert len(inserts) == 1
    assert_once(receiving, receipts)


def test_the_receipts_of_saved_messages_say_what_they_were_accepted_with(receiving: Receiving) -> None:
    message = ChatMessage("ann", "bob", "1", "text", sent_ms=1)
    receipt = receiving.chat(message)
    save_all()
    with engine().connect() as connection:
        saved = rows.find(connection, receipt.id)
    assert saved is not None
    told = replace(saved, level=receipt.level, saved_at=None, ledger_seq=None)
    assert told == receipt
    with sessions().begin() as session:
        again: Any = chat_messages.save_now(session, message, ordered=False)
    assert (again.level, again.duplicate, again.policy) == (Level.SAVED, True, receipt.policy)
    assert again.policy != COMMIT
