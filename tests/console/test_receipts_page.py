"""The page about receipts says whether a receipt is genuine, and what became of its message."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from console.receipt_check import LONGEST
from console.visitors import FORM_FIELD
from models.engine import engine
from receipts import custody
from receipts.chat_messages import ChatMessage
from receipts.log_client import connected
from receipts.receipt import Receipt
from tasks.execution.deliver import deliver
from tasks.submission.envelope import NewTask
from tests.api.callers import FLAKY, make_token
from tests.console.forms import XSS, is_escaped, page_of
from tests.console.pasted_receipts import PATH, lines, pasted, signed, verdict
from tests.console.task_pages import execute
from tests.console.visits import hidden_fields, logged_in, words
from tests.outbox.ledger import move
from tests.receipts.key_folders import key_folder_at
from tests.receipts.receiving import Receiving
from tests.receipts.saving import save_all
from tests.servers import ServersOfTests
from tests.tasks.command_line import DIES

NOWHERE = "redis://127.0.0.1:1/0"
STREAM = "celeriac:stream:tasks:accepted"


@pytest.fixture
def receiving(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiving]:
    """An installation that answers `accepted`."""
    set_(monkeypatch, "RECEIPT_TWO_PHASE_ENABLED", "true")
    made = Receiving()
    yield made
    made.close()


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


def set_(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    settings.current.cache_clear()


def shards(page: str) -> dict[str, str]:
    """Return what the table says about each stream."""
    found = re.findall(r'<tr id="([^"]+)">(.*?)</tr>', page, re.DOTALL)
    return {name: words(row) for name, row in found}


def accepted(receiving: Receiving, payload: Any = None, **how: Any) -> Receipt:
    return receiving.task(NewTask(FLAKY, payload, **how))


def test_each_stream_shows_how_much_waits_how_long_and_who_consumes_it(
    receiving: Receiving, browser: TestClient, reader: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shards(page_of(browser, PATH))[STREAM].endswith("0 – –")
    for n in range(3):
        accepted(receiving, n)
    set_(monkeypatch, "RECEIPT_PROMISE_SECONDS", "0.0001")
    page = page_of(browser, PATH)
    assert re.search(rf"{STREAM} 3 \d+ ms nothing has read it so far", shards(page)[STREAM])
    assert '<td class="n bad">' in page.partition(f'id="{STREAM}"')[2].partition("</tr>")[0]
    receiving.client.xgroup_create(STREAM, "save", id="0")
    receiving.client.xreadgroup("save", "a", {STREAM: ">"}, count=2)
    assert "save : 2 read, not held by a process" in shards(page_of(browser, PATH))[STREAM]
    execute(
        "INSERT INTO ledger.shard_lease (stream, shard, holder, lease_token, lease_until) "
        "VALUES (:stream, 0, 'web-7:12', gen_random_uuid(), ledger.ledger_now() + interval '1 minute')",
        stream=f"{STREAM}@save",
    )
    assert "held by web-7:12 until in 1 m" in shards(page_of(browser, PATH))[STREAM]
    assert "held by a process" in shards(page_of(reader, PATH))[STREAM]
    assert "web-7" not in page_of(reader, PATH)


def test_a_receipt_of_a_message_that_waits_is_valid_until_its_promise_is_missed(
    receiving: Receiving, browser: TestClient, ledger: ServersOfTests
) -> None:
    text = signed(accepted(receiving, key="order 17"))
    page = pasted(browser, text)
    assert verdict(page) == ("ok", "This receipt is valid, and the records agree with it.")
    assert lines(page)["Signature"].startswith("ok: Valid. The key ")
    assert "the client's id 'order 17' was on the disk of the receipt log" in lines(page)["Level accepted"]
    assert "as promised, and will be saved or rejected in 1 m at the latest" in lines(page)["Waits to be saved"]
    assert text.replace('"', "&#34;") in page, "the text stays in the form"
    move(ledger, 61)
    page = pasted(browser, text)
    assert verdict(page)[0] == "bad"
    assert lines(page)["Waits to be saved"].startswith("bad: The promise is missed: its time was over ")
    assert f'href="{PATH}#shards-title"' in page
    save_all()
    page = pasted(browser, text)
    assert verdict(page)[0] == "bad"
    assert lines(page)["Promise"].startswith("bad: Missed: it was saved ")


def test_a_receipt_of_a_saved_task_leads_to_the_task(receiving: Receiving, browser: TestClient) -> None:
    receipt = accepted(receiving, DIES)
    text = signed(receipt)
    save_all()
    page = pasted(browser, text)
    assert verdict(page)[0] == "ok"
    assert lines(page)["Saved"].endswith("as number 1 in the ledger, with the same payload.")
    assert lines(page)["Promise"].startswith("ok: Kept: it was saved ")
    assert lines(page)["Task"] == f"ok: {FLAKY} is queued."
    assert f'href="/console/tasks/{receipt.id}"' in page
    saved_at, number = "2026-01-01T00:00:00.000+00:00", 1
    as_saved = signed(receipt, level="saved", savedAt=saved_at, ledgerSeq=number)
    assert lines(pasted(browser, as_saved))["Level saved"].endswith("is number 1 in the ledger.")
    assert verdict(pasted(browser, as_saved))[0] == "ok"
    deliver(engine(), [receipt.id])
    page = pasted(browser, text)
    assert lines(page)["Task"] == f"warn: {FLAKY} is dead."
    assert verdict(page) == ("warn", "The signature is valid. Look at what is marked.")
    execute("DELETE FROM ledger.ingest_task")
    assert lines(pasted(browser, text))["Task"].startswith("off: Its task is no longer in the ledger")


def test_a_message_that_is_saved_while_it_is_looked_up_does_not_look_lost(
    receiving: Receiving, browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = signed(accepted(receiving))

    def connected_after_saving(**how: Any) -> AbstractContextManager[Any]:
        save_all()
        return connected(**how)

    monkeypatch.setattr(custody, "connected", connected_after_saving)
    assert verdict(pasted(browser, text))[0] == "ok"


def test_receipts_of_chats_and_of_uploads_lead_to_what_became_of_them(
    receiving: Receiving, browser: TestClient
) -> None:
    chat = receiving.chat(ChatMessage("ann", "bob", "1", "hello"))
    upload = receiving.document("a.txt", b"some text")
    save_all()
    assert "complete when it is saved" in lines(pasted(browser, signed(chat)))["Message"]
    page = pasted(browser, signed(upload))
    assert lines(page)["Task"] == "ok: document.ingest is queued."
    task_id = re.findall(r'href="/console/tasks/([0-9a-f-]{36})"', page)[0]
    assert task_id != str(upload.id)
    assert "Saved as number 2" in words(page_of(browser, f"/console/tasks/{task_id}"))


def test_a_receipt_with_a_changed_field_is_not_genuine(receiving: Receiving, browser: TestClient) -> None:
    receipt = json.loads(signed(accepted(receiving)))
    for changes in ({"promisedBy": "2030-01-01T00:00:00+00:00"}, {"level": "saved"}, {"signature": "AA"}, {"n": 1}):
        page = pasted(browser, json.dumps({**receipt, **changes}))
        assert verdict(page) == ("bad", "This receipt is not genuine.")
        assert list(lines(page)) == ["Signature"], "nothing in it is trusted"
        assert "Trust nothing in it" in lines(page)["Signature"]


def test_a_receipt_of_another_installation_cannot_be_verified(
    receiving: Receiving, browser: TestClient, tmp_path: Path
) -> None:
    receipt = accepted(receiving)
    with key_folder_at(tmp_path / "keys"):
        text = signed(receipt)
    page = pasted(browser, text)
    assert verdict(page) == ("bad", "This receipt cannot be verified here: its key is unknown.")
    assert json.loads(text)["keyId"] in lines(page)["Signature"]


def test_a_rejected_message_says_why_and_its_content_is_for_operators(
    receiving: Receiving, browser: TestClient, reader: TestClient
) -> None:
    receipt = receiving.task(NewTask("no.such.type", {"secret": "of a bank"}))
    save_all()
    text = signed(receipt)
    page = pasted(browser, text)
    assert verdict(page)[0] == "warn"
    assert "no.such.type" in lines(page)["Rejected"]
    rejection = {"level": "rejected", "ledgerSeq": 1, "rejectedAt": "2026-01-01T00:00:00+00:00", "code": "c"}
    as_rejected = signed(receipt, **rejection, reason="It is bad.")
    assert verdict(pasted(browser, as_rejected))[0] == "ok"
    assert "can never be saved: It is bad. (c)" in lines(pasted(browser, as_rejected))["Level rejected"]
    listed = words(page_of(browser, PATH).partition('id="rejected-title"')[2])
    assert str(receipt.id) in listed
    assert "of a bank" in listed
    assert str(receipt.id) in page_of(reader, PATH)
    assert "of a bank" not in page_of(reader, PATH)
    # The cause is removed, and the message is submitted again: both receipts stay true.
    execute("""
        INSERT INTO ledger.receipt (id, level, kind, principal, payload_sha, policy, accepted_at, promised_by, task_id)
        SELECT id, 'saved', kind, principal, payload_sha, policy, accepted_at, promised_by, id FROM ledger.receipt
    """)
    assert verdict(pasted(browser, as_rejected))[0] == "ok"
    assert "was saved under this id" in lines(pasted(browser, as_rejected))["Saved as well"]
    assert lines(pasted(browser, text))["Saved"].startswith("ok: ")


def test_records_that_disagree_with_a_valid_receipt_are_marked(receiving: Receiving, browser: TestClient) -> None:
    receipt = accepted(receiving)
    other = signed(receipt, sha256="0" * 64)
    assert lines(pasted(browser, other))["Receipt log"].startswith("bad: The receipt log has another payload")
    save_all()
    assert "another payload under this id" in lines(pasted(browser, other))["Saved"]
    number = signed(receipt, level="saved", savedAt="2026-01-01T00:00:00+00:00", ledgerSeq=9)
    assert "has it as number 1, and the receipt says 9" in lines(pasted(browser, number))["Saved"]
    rejected = signed(receipt, level="rejected", code="c", reason="r")
    assert "The ledger says saved, and the receipt says rejected" in lines(pasted(browser, rejected))["Saved"]
    nameless = pasted(browser, signed(receipt, id="17"))
    assert verdict(nameless) == ("warn", "The signature is valid. Look at what is marked.")


def test_a_message_that_is_nowhere_is_missing_and_after_its_retention_pruned(
    receiving: Receiving, browser: TestClient, ledger: ServersOfTests
) -> None:
    receipt = accepted(receiving)
    text = signed(receipt)
    save_all()
    execute("DELETE FROM ledger.receipt")
    assert "The receipt log says that it was saved" in lines(pasted(browser, text))["Missing"]
    ledger.flush_redis()
    for each in (text, signed(receipt, level="saved", ledgerSeq=1)):
        page = pasted(browser, each)
        assert verdict(page)[0] == "bad"
        assert "The message was lost" in lines(page)["Missing"]
    move(ledger, 3600 * settings.current().receipt_retention_hours + 60)
    page = pasted(logged_in(make_token("bob", Scope.OPERATE)), text)  # sessions ended meanwhile, too
    assert lines(page)["Pruned"].startswith("off: ")
    assert verdict(page)[0] == "ok"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "There is no receipt in it."),
        (" \n ", "There is no receipt in it."),
        ("hello", "It is not JSON"),
        ("17", "A receipt must be a JSON object."),
        ("null", "A receipt must be a JSON object."),
        ("[]", "There is no receipt in it."),
        ("{}", "It has no signature."),
        ('[{"level": "saved"}, {"level": "saved"}]', "Paste one receipt at a time."),
        ('{"a": 1}\n{"a": 1}', "Paste one receipt at a time."),
        ('{"a": 1, "a": 2}', "a field occurs twice"),
        ('{"level": "paid", "signature": "x"}', "Its level is not one of"),
        ('{"level": "saved", "signature": "x", "a": 1.5}', "Its field 'a' is not text"),
        ('{"level": "saved", "signature": "x", "\\ud800": 1.5}', "Its field"),
        ('{"level": "saved", "signature": "x", "a": "\\ud800"}', ""),
        ('{"level": "saved", "signature": "x", "a": "\\u0000\0"}', "It is not JSON"),
        ('{"level": "saved", "signature": 1}', "It has no signature."),
        ("[" * 10_000, "It is not JSON"),
        ("9" * 10_000, ""),
        (XSS, "It is not JSON"),
        ("x" * (LONGEST + 1), "It has more than 20,000 characters"),
    ],
    ids=lambda each: repr(each[:30]),
)
def test_a_text_that_is_not_a_receipt_is_said_in_a_sentence(browser: TestClient, text: str, told: str) -> None:
    page = pasted(browser, text)
    assert verdict(page) == ("bad", "This is not a receipt.")
    assert told in lines(page)["Text"]
    assert len(page) < 3 * LONGEST
    assert XSS not in page


def test_a_form_that_is_too_large_or_has_no_text_is_refused_in_a_sentence(browser: TestClient) -> None:
    token = hidden_fields(page_of(browser, PATH))[FORM_FIELD]
    answer = browser.post(PATH, data={FORM_FIELD: token, "receipt": "x" * 70_000})
    assert answer.status_code == 413
    assert "Too large" in words(answer.text)
    assert verdict(browser.post(PATH, data={FORM_FIELD: token}).text)[1] == "This is not a receipt."
    file = browser.post(PATH, data={FORM_FIELD: token}, files={"receipt": ("a.json", b"{}")})
    assert file.status_code == 400


def test_without_the_receipt_log_the_signature_is_checked_and_the_rest_is_not_known(
    receiving: Receiving, browser: TestClient, reader: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = signed(accepted(receiving, 1))
    save_all()
    waits = signed(accepted(receiving, 2))
    set_(monkeypatch, "REDIS_URL", NOWHERE)
    page = page_of(browser, PATH)
    assert "The receipt log at 127.0.0.1:1 is unreachable" in words(page)
    assert "Accepted messages are safe on its disk" in words(page)
    assert "two-phase on" in words(page)
    assert verdict(pasted(browser, saved))[0] == "ok"
    page = pasted(browser, waits)
    assert verdict(page)[0] == "warn"
    assert lines(page)["Not known"].startswith("warn: The ledger does not have it, and the receipt log")
    assert "127.0.0.1:1" not in pasted(reader, waits)
    assert "The receipt log does not answer." in words(page_of(reader, PATH))


def test_without_the_ledger_the_page_says_that_it_does_not_answer(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = hidden_fields(page_of(browser, PATH))[FORM_FIELD]
    set_(monkeypatch, "DATABASE_URL", "postgresql://nowhere:1@127.0.0.1:1/x")
    for answer in (browser.get(PATH), browser.post(PATH, data={FORM_FIELD: token, "receipt": "{}"})):
        assert answer.status_code == 503
        assert "The ledger does not answer" in words(answer.text)
        assert "127.0.0.1" not in answer.text


def test_keys_that_cannot_be_read_are_a_sentence_and_their_folder_is_for_operators(
    browser: TestClient, reader: TestClient, tmp_path: Path
) -> None:
    (tmp_path / f"{'a' * 16}.json").write_text("{}")
    with key_folder_at(tmp_path):
        for each, is_told in ((browser, True), (reader, False)):
            for page in (page_of(each, PATH), pasted(each, "{}")):
                assert (str(tmp_path) in page) == is_told
                assert ("`manage.py check` say why" in words(page)) != is_told
        assert verdict(pasted(reader, "{}")) == ("bad", "The signature cannot be checked.")


def test_keys_show_their_states(receiving: Receiving, browser: TestClient, tmp_path: Path) -> None:
    with key_folder_at(tmp_path / "keys") as folder:
        assert "There are no keys yet" in words(page_of(browser, PATH))
        text = signed(accepted(receiving))
        old = folder.list_keys()[0].key_id
        new = folder.rotate().key_id
        assert re.search(f"{new} signing .* {old} superseded", words(page_of(browser, PATH)))
        assert "which was replaced by a newer one" in lines(pasted(browser, text))["Signature"]
        folder.retire(old)
        assert "which is retired; its receipts stay valid" in lines(pasted(browser, text))["Signature"]


def test_a_switch_says_who_has_set_it(receiving: Receiving, browser: TestClient, reader: TestClient) -> None:
    assert "two-phase on Answer accepted at once" in words(page_of(browser, PATH))
    assert "By the setting RECEIPT_TWO_PHASE_ENABLED" in words(page_of(browser, PATH))
    execute("INSERT INTO ledger.receipt_switch (name, is_on, actor) VALUES ('two_phase', false, 'carla@db.internal')")
    page = words(page_of(browser, PATH))
    assert "two-phase off Save at once, and answer saved." in page
    assert "by carla@db.internal" in page
    assert "manage.py receipts set two-phase on" in page
    assert "carla" not in page_of(reader, PATH)
    assert "manage.py receipts set" not in page_of(reader, PATH)


def test_a_reader_may_check_receipts_and_other_tokens_and_forged_forms_may_not(
    receiving: Receiving, browser: TestClient, reader: TestClient, guest: TestClient
) -> None:
    text = signed(accepted(receiving))
    assert verdict(pasted(reader, text))[0] == "ok"
    assert guest.get(PATH).headers["location"] == "/console/login"
    limited = logged_in(make_token("wes", Scope.TASKS_SUBMIT))
    assert limited.get(PATH).status_code == 403
    assert browser.post(PATH, data={"receipt": text}).status_code == 403
    token = hidden_fields(page_of(browser, PATH))[FORM_FIELD]
    foreign = {"Origin": "https://elsewhere.example"}
    assert browser.post(PATH, data={FORM_FIELD: token, "receipt": text}, headers=foreign).status_code == 403


def test_markup_in_receipts_and_rejected_messages_is_escaped(
    receiving: Receiving, browser: TestClient, reader: TestClient
) -> None:
    receipt = receiving.task(NewTask("no.such.type", {XSS: XSS}, key=XSS), principal=XSS)
    client = redis.Redis.from_url(settings.current().redis_url)
    client.xadd(STREAM, {"id": str(uuid.uuid4()), "principal": XSS, "sha256": XSS, XSS: XSS})
    client.close()
    save_all()
    execute("INSERT INTO ledger.receipt_switch (name, is_on, actor) VALUES ('two_phase', true, :x)", x=XSS)
    execute("UPDATE ledger.receipt SET code = :x, reason = :x", x=XSS)
    for page in (page_of(browser, PATH), page_of(reader, PATH), pasted(browser, XSS)):
        assert is_escaped(page)
    texts = [signed(receipt), signed(receipt, clientId=XSS, policy=XSS, acceptedAt=XSS, id=XSS, promisedBy=XSS)]
    for text in (*texts, signed(receipt, level="rejected", reason=XSS, code=XSS)):
        page = pasted(browser, text)
        assert len(lines(page)) >= 3
        assert is_escaped(page)
