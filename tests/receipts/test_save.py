"""From `accepted` to `saved`: every message that was accepted is in the ledger once, or has a receipt `rejected`."""

from __future__ import annotations

import uuid

import pytest

import settings
from models.engine import engine, sessions
from models.receipts import Level
from receipts import rows
from receipts.chat_messages import ChatMessage
from receipts.deliver import deliver_any_shard
from receipts.receipt import COMMIT, milliseconds
from receipts.save import save_any_shard
from receipts.signing import verify_payload
from tasks.submission.envelope import NewTask
from tasks.submission.submit import submit
from tests.receipts.receiving import Receiving
from tests.tasks.deliveries import scalar


def test_a_chat_message_is_accepted_and_then_saved(receiving: Receiving) -> None:
    message = ChatMessage("ann", "bob", "1", "hello")
    receipt = receiving.chat(message)
    assert (receipt.level, receipt.id, receipt.duplicate) == (Level.ACCEPTED, message.id, False)
    assert save_any_shard(10, until_idle=True)
    assert scalar("SELECT body FROM ledger.chat_message") == "hello"
    with engine().connect() as connection:
        saved = rows.find(connection, message.id)
    assert saved is not None
    assert (saved.level, saved.sha256, saved.client_id) == (Level.SAVED, receipt.sha256, "1")
    again = receiving.chat(message)
    assert (again.level, again.duplicate, again.ledger_seq) == (Level.SAVED, True, saved.ledger_seq)
    assert receiving.is_empty()


def test_a_task_is_accepted_and_then_saved(receiving: Receiving) -> None:
    receipt = receiving.task(NewTask("demo.flaky", {"n": 1}, key="one"))
    assert receipt.level is Level.ACCEPTED
    assert save_any_shard(10, until_idle=True)
    assert scalar("SELECT count(*) FROM ledger.ingest_task WHERE id = :id", id=receipt.id) == 1
    assert receiving.is_empty()


def test_a_receipt_promises_to_save_within_the_time_of_the_settings(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_PROMISE_SECONDS", "90")
    settings.current.cache_clear()
    message, new = ChatMessage("ann", "bob", "1", "hello"), NewTask("demo.flaky", {"n": 1}, key="one")
    accepted = [receiving.chat(message), receiving.task(new)]
    assert save_any_shard(10, until_idle=True)
    saved = [receiving.chat(message), receiving.task(new)]
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    at_once = [
        receiving.chat(ChatMessage("ann", "bob", "2", "hello")),
        receiving.task(NewTask("demo.flaky", key="two")),
    ]
    levels = [receipt.level for receipt in (*accepted, *saved, *at_once)]
    assert levels == [Level.ACCEPTED] * 2 + [Level.SAVED] * 4
    for receipt in (*accepted, *saved, *at_once):
        assert (receipt.promised_by - receipt.accepted_at).total_seconds() == pytest.approx(90, abs=0.01)
    for before, after in zip(accepted, saved, strict=True):
        assert milliseconds(after.promised_by) == milliseconds(before.promised_by)


def test_a_task_that_was_submitted_without_a_receipt_is_a_duplicate_for_those_who_ask_for_one(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = NewTask("demo.flaky", {"n": 1}, key="one")
    with sessions().begin() as session:
        task = submit(session, new.type, new.payload, key=new.key)
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    receipts = [receiving.task(new), receiving.task(new), receiving.task(NewTask("demo.flaky", {"n": 2}, key="two"))]
    assert [(receipt.level, receipt.duplicate) for receipt in receipts] == [
        (Level.SAVED, True),
        (Level.SAVED, True),
        (Level.SAVED, False),
    ]
    assert receipts[0].id == task.task_id


def test_a_chat_entry_has_exactly_the_fields_of_the_specification(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_DELIVER_BEFORE_SAVED", "true")
    settings.current.cache_clear()
    receipt = receiving.chat(ChatMessage("ann", "bob", "1", "hello", sent_ms=1_700_000_000_000))
    ((_, entry),) = receiving.client.xrange("im:stream:single_chat:accepted")
    assert entry.pop("producerServerId")
    assert entry == {
        "serverMsgId": str(receipt.id),
        "clientMsgId": "1",
        "fromUserId": "ann",
        "toUserId": "bob",
        "msgType": "text",
        "body": "hello",
        "sendTs": "1700000000000",
        "createdAtMs": str(milliseconds(receipt.accepted_at)),
    }
    assert deliver_any_shard(10, until_idle=True)
    ((_, moved),) = receiving.client.xrange("im:stream:single_chat:to_save")
    assert moved.pop("deliveredAttemptTs") >= entry["createdAtMs"]
    assert moved.pop("producerServerId")
    assert moved == entry
    assert save_any_shard(10, until_idle=True)
    assert receiving.is_empty()


@pytest.mark.parametrize(
    "payload", [{"a": 1e30}, {"a": -0.0}, {"b": 1, "a": "é"}, [1.50, "\N{OGHAM SPACE MARK}"], None]
)
def test_the_hash_of_a_receipt_is_the_one_that_verify_computes(receiving: Receiving, payload: object) -> None:
    verify_payload(receiving.task(NewTask("demo.flaky", payload)).fields(), payload)


def test_receipts_of_which_some_exist_already_get_their_own_numbers(receiving: Receiving) -> None:
    """The ledger answers with the numbers of new receipts only; a wrong pair would be told to another client."""
    ids = [uuid.uuid4() for _ in range(6)]
    given = [rows.Row(id_, "tasks", "ann", None, "0", None, COMMIT) for id_ in ids]
    with sessions().begin() as db:
        rows.insert(db, [given[4], given[1]], 60)
    with sessions().begin() as db:
        found = rows.insert(db, given, 60)
    with engine().connect() as connection:
        stored = {id_: rows.find(connection, id_) for id_ in ids}
    assert {id_: saved.seq for id_, saved in found.items()} == {
        id_: receipt.ledger_seq for id_, receipt in stored.items() if receipt
    }
    assert [found[id_].is_new for id_ in ids] == [True, False, True, True, False, True]
    with sessions().begin() as db:
        assert {id_: saved.is_new for id_, saved in rows.insert(db, given, 60).items()} == dict.fromkeys(ids, False)
