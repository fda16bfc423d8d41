"""What can never be saved is rejected with a reason, and stops neither its neighbours nor a repetition."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

import settings
from models.engine import engine
from models.receipts import Level
from receipts import kinds, rows, status
from receipts.chat_messages import ChatMessage
from receipts.receipt import Receipt
from receipts.rows import ListedReceipt
from tasks.submission.envelope import NewTask
from tests.outbox.ledger import rows as events
from tests.receipts.accepting import KINDS, deliver_before_saved
from tests.receipts.bad_entries import BAD, TASK, Fields, task
from tests.receipts.receiving import Receiving
from tests.receipts.saving import assert_empty, deliver_all, killed, ledger_ids, save_all, time_passes
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled

pytestmark = pytest.mark.guarantee


def rejected() -> list[ListedReceipt]:
    """Return what was rejected, in the order of its numbers."""
    with engine().connect() as connection:
        found = rows.list_receipts(connection, level=Level.REJECTED, before=None, limit=1000)
    return found[::-1]


def among_good_ones(receiving: Receiving, kind: str, bad: list[Fields], *, good: int = 1) -> list[Receipt]:
    """Add entries by hand, with accepted messages before and behind each of them. Return the receipts of these."""
    receipts: list[Receipt] = []
    for fields in bad:
        receipts += [KINDS[kind](receiving, len(receipts) + n) for n in range(good)]
        receiving.client.xadd(kinds.accepted_stream(kind), dict(fields))
    return [*receipts, KINDS[kind](receiving, len(receipts))]


@pytest.mark.parametrize(("kind", "delivers"), [*((kind, False) for kind in BAD), (kinds.CHAT, True)])
def test_an_entry_that_cannot_be_read_or_stored_stops_neither_saver_nor_deliverer(
    receiving: Receiving, kind: str, delivers: bool
) -> None:
    """Each of them once stopped its stream for ever."""
    if delivers:
        deliver_before_saved()
    receipts = among_good_ones(receiving, kind, BAD[kind])
    if delivers:
        deliver_all()
    save_all()
    assert ledger_ids() == [receipt.id for receipt in receipts]
    found = rejected()
    assert len(found) == len(BAD[kind]), [each.entry for each in found]
    assert all(each.receipt.code and each.receipt.reason and each.entry for each in found)
    assert_empty(receiving)


@pytest.mark.parametrize("kind", [kinds.CHAT, kinds.TASKS])
def test_one_bad_entry_among_a_hundred_good_ones_costs_them_neither_their_order_nor_much_time(
    receiving: Receiving, kind: str
) -> None:
    receipts = among_good_ones(receiving, kind, [{"other": "fields"}], good=100)
    save_all()
    assert ledger_ids() == [receipt.id for receipt in receipts]
    (found,) = rejected()
    assert found.entry == {"other": "fields"}
    assert found.receipt.ledger_seq is not None
    assert_empty(receiving)


def test_an_outage_in_the_middle_of_a_batch_rejects_nothing(receiving: Receiving, ledger: ServersOfTests) -> None:
    receipts = among_good_ones(receiving, kinds.CHAT, [{"other": "fields"}], good=3)
    killed(save_all, "checkpoint.before_commit_of_row=kill")
    assert rejected() == []
    time_passes(ledger, receiving.client)
    save_all()
    assert ledger_ids() == [receipt.id for receipt in receipts]
    assert len(rejected()) == 1


def test_a_rejected_message_may_be_sent_again_and_is_saved_when_its_type_is_known(receiving: Receiving) -> None:
    new = NewTask("late.type", {"n": 1}, key="one")
    first = receiving.task(new)
    save_all()
    assert [each.receipt.code for each in rejected()] == ["unknown_type"]
    claim = find_claim(receiving, first)
    assert (claim.level, claim.code) == (Level.REJECTED, "unknown_type")
    with handled("late.type", lambda _task, _db: None):
        again = receiving.task(new)
        assert (again.level, again.id, again.duplicate) == (Level.ACCEPTED, first.id, False)
        assert receiving.client.ttl(kinds.claim_key(first.id)) == -1, "a claim must not expire before it is saved"
        save_all()
    assert ledger_ids() == [first.id]
    assert find_claim(receiving, first).level is Level.SAVED
    with engine().connect() as connection:
        newest = rows.find(connection, first.id)
    assert newest is not None
    assert newest.level is Level.SAVED
    assert_empty(receiving)


def test_a_type_that_the_api_knew_is_saved_by_a_saver_of_an_older_version(receiving: Receiving) -> None:
    """While a new version is deployed, the API may have a handler that no worker has registered yet."""
    with handled("new.type", lambda _task, _db: None, priority=3, batch=7):
        receipt = receiving.task(NewTask("new.type", {"n": 1}, key="one"))
    save_all()
    assert ledger_ids() == [receipt.id]
    assert rejected() == []


def find_claim(receiving: Receiving, receipt: Receipt) -> Receipt:
    found = receiving.sender.loop.run_until_complete(status.find_claim(receiving.sender.log, receipt.id))
    assert found is not None
    return found


@pytest.fixture
def destination(monkeypatch: pytest.MonkeyPatch, receiving: Receiving) -> str:
    """A destination that tasks may name to be notified."""
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"told": "http://127.0.0.1:1/told"}))
    settings.current.cache_clear()
    return "told"


@pytest.mark.parametrize("window", ["receipts.after_save", "checkpoint.before_ack"])
def test_a_destination_is_notified_once_of_saved_and_rejected_messages(
    receiving: Receiving, ledger: ServersOfTests, destination: str, window: str
) -> None:
    """Also if the saver dies after its commit, and the next one saves and rejects the same entries again."""
    good = receiving.task(NewTask("test.insert", 1, key="good", notify=destination))
    bad = receiving.task(NewTask("no.such.type", 1, key="bad", notify=destination))
    killed(save_all, f"{window}=kill")
    time_passes(ledger, receiving.client)
    save_all()
    told = [payload for (payload,) in events("payload", f"destination = '{destination}'")]
    by_level: dict[str, Any] = {each["level"]: each for each in told}
    assert (len(told), set(by_level)) == (2, {"saved", "rejected"})
    assert uuid.UUID(by_level["saved"]["taskId"]) == good.id
    assert uuid.UUID(by_level["rejected"]["taskId"]) == bad.id
    assert by_level["rejected"]["code"] == "unknown_type"
    assert_empty(receiving)


def test_an_entry_that_names_an_unknown_destination_cannot_add_an_event_for_it(receiving: Receiving) -> None:
    fields = task(json.dumps({**TASK, "type": "no.such.type", "notify": "celery:ingest"}))
    receiving.client.xadd(kinds.accepted_stream(kinds.TASKS), dict(fields))
    save_all()
    assert len(rejected()) == 1
    assert events() == []


def test_a_message_that_was_pushed_to_its_receiver_and_then_rejected_is_told_to_its_sender(
    receiving: Receiving,
) -> None:
    first = ChatMessage("ann", "bob", "1", "first")
    receiving.chat(first)
    save_all()
    receiving.client.delete(kinds.claim_key(first.id))  # it has expired
    deliver_before_saved()
    with receiving.client.pubsub(ignore_subscribe_messages=True) as frames:
        frames.subscribe("celeriac:push:ann")
        frames.get_message(timeout=5)
        receiving.chat(ChatMessage("ann", "bob", "1", "second"))
        deliver_all()
        save_all()
        told = json.loads(frames.get_message(timeout=5)["data"])
    assert (told["type"], told["code"], told["clientMsgId"]) == ("ERROR", "idempotency_conflict", "1")
