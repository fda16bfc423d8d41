"""Signed receipts: every change is noticed, and a receipt stays verifiable after its key was rotated or retired."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from models.errors import CeleriacError
from receipts.key_list import decode, encode, key_id_of
from receipts.keys import BadKeyFile, KeyFolder
from receipts.signing import (
    NotAReceipt,
    NotGenuine,
    OtherPayload,
    UnknownReceiptKey,
    parse_receipts,
    sign,
    verify,
    verify_payload,
)
from tests.receipts.key_folders import key_folder_at

ACCEPTED: Final = {
    "level": "accepted",
    "id": "0191d6a0-0000-7000-8000-000000000001",
    "taskId": "0191d6a0-0000-7000-8000-000000000001",
    "clientId": "Bestellung № 17",
    "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",  # of {}
    "duplicate": False,
    "ordered": True,
    "policy": "aof-always",
    "acceptedAt": "2026-11-16T10:30:00.000+00:00",
    "promisedBy": "2026-11-16T10:31:00.000+00:00",
}
SAVED: Final = {**ACCEPTED, "level": "saved", "savedAt": "2026-11-16T10:30:01.000+00:00", "ledgerSeq": 4711}
REJECTED: Final = {**ACCEPTED, "level": "rejected", "clientId": None, "code": "bad_task", "reason": 'no "type"\n'}
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[KeyFolder]:
    with key_folder_at(tmp_path / "keys") as made:
        yield made


def keys_of(folder: KeyFolder) -> dict[str, bytes]:
    return {key.key_id: key.public for key in folder.list_keys()}


def changed(value: Any) -> list[Any]:
    """Return other values for a field, some of which look equal."""
    others: list[Any] = [None, "", 0, 1, True, False, str(value), f"{value} "]
    if isinstance(value, str):
        others += [value.upper(), value[:-1], value.replace("0", "O")]
    return [other for other in others if (type(other), other) != (type(value), value)]


@pytest.mark.guarantee
@pytest.mark.parametrize("fields", [ACCEPTED, SAVED, REJECTED], ids=["accepted", "saved", "rejected"])
def test_a_receipt_with_any_field_changed_removed_or_added_is_not_genuine(
    folder: KeyFolder,
    fields: dict[str, Any],
) -> None:
    receipt = sign(fields)
    keys = keys_of(folder)
    verify(receipt, keys)
    verify(dict(reversed(receipt.items())), keys)  # the order of fields has no meaning
    assert {name: receipt[name] for name in fields} == fields
    forged = [{**receipt, name: other} for name, value in receipt.items() for other in changed(value)]
    forged += [{name: value for name, value in receipt.items() if name != left_out} for left_out in receipt]
    forged += [{**receipt, "note": None}, {**receipt, "ledgerSeq": 1}]
    forged += [sign(REJECTED) | {"level": "saved"}, {**receipt, "level": "promised"}]
    assert len(forged) > 80
    for each in forged:
        with pytest.raises(NotGenuine):
            verify(each, keys)


@pytest.mark.guarantee
def test_a_signature_with_any_character_changed_is_refused(folder: KeyFolder) -> None:
    """Two spellings of the same bytes would be two receipts for one promise."""
    receipt = sign(ACCEPTED)
    signature, keys = receipt["signature"], keys_of(folder)
    for place, character in enumerate(signature):
        other = next(each for each in "ABgw-_" if each != character)
        with pytest.raises(NotGenuine):
            verify({**receipt, "signature": signature[:place] + other + signature[place + 1 :]}, keys)
    last_bits = {signature[:-1] + each for each in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"} - {signature}
    for other in (*last_bits, signature + "==", f" {signature}", signature.replace(signature[5], "é"), signature[:-2]):
        with pytest.raises(NotGenuine):
            verify({**receipt, "signature": other}, keys)


def test_a_receipt_of_an_unknown_key_is_refused(folder: KeyFolder) -> None:
    receipt = sign(ACCEPTED)
    stranger = Ed25519PrivateKey.generate()
    public = stranger.public_key().public_bytes_raw()
    fields = {**ACCEPTED, "keyId": key_id_of(public)}
    written = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    forged = {**fields, "signature": encode(stranger.sign(written.encode()))}
    verify(forged, {key_id_of(public): public})
    with pytest.raises(UnknownReceiptKey, match=key_id_of(public)):
        verify(forged, keys_of(folder))
    with pytest.raises(UnknownReceiptKey):
        verify(receipt, {})
    with pytest.raises(UnknownReceiptKey, match="which key"):
        verify({**receipt, "keyId": None}, keys_of(folder))
    with pytest.raises(NotGenuine):  # the stranger's signature under our key's name
        verify({**forged, "keyId": receipt["keyId"]}, keys_of(folder))
    with pytest.raises(UnknownReceiptKey):  # the stranger's key under our key's name
        verify({**forged, "keyId": receipt["keyId"]}, {receipt["keyId"]: public})


@pytest.mark.guarantee
def test_old_receipts_verify_after_their_key_was_rotated_and_retired(folder: KeyFolder) -> None:
    old = sign(ACCEPTED)
    known_before = keys_of(folder)
    new_key = folder.rotate()
    new = sign(ACCEPTED)
    assert (old["keyId"] != new["keyId"]) is (new["keyId"] == new_key.key_id) is True
    folder.retire(old["keyId"])
    verify(old, keys_of(folder))
    verify(new, keys_of(folder))
    with pytest.raises(UnknownReceiptKey):
        verify(new, known_before)


def test_a_verifier_knows_a_scheduled_key_before_its_first_receipt(folder: KeyFolder) -> None:
    sign(ACCEPTED)
    scheduled = folder.rotate(timedelta(hours=1))
    known_before = keys_of(folder)
    assert sign(ACCEPTED)["keyId"] != scheduled.key_id
    key = folder.signing_key(scheduled.active_from)
    fields = {"level": "accepted", "keyId": key.key_id}
    message = f'{{"keyId":"{key.key_id}","level":"accepted"}}'.encode()
    verify({**fields, "signature": encode(key.private.sign(message))}, known_before)


def test_a_receipt_that_is_signed_again_forgets_its_first_signature(folder: KeyFolder) -> None:
    accepted = sign(ACCEPTED)
    folder.rotate()
    saved = sign({**accepted, "level": "saved", "ledgerSeq": 1})
    assert saved["keyId"] != accepted["keyId"]
    verify(saved, keys_of(folder))


def test_the_signed_bytes_are_those_that_any_language_would_write(folder: KeyFolder) -> None:
    receipt = sign({"level": "rejected", "reason": 'ü "/" \n\x7f\u2028', "ledgerSeq": 2**53 - 1, "z": None, "ok": True})
    written = (
        f'{{"keyId":"{receipt["keyId"]}","ledgerSeq":9007199254740991,"level":"rejected","ok":true,'
        '"reason":"ü \\"/\\" \\n\x7f\u2028","z":null}'
    )
    folder.signing_key().private.public_key().verify(decode(receipt["signature"]), written.encode())


@pytest.mark.parametrize(
    "value",
    [1.0, 1.5, float("nan"), 2**53, -(2**53), [], {}, b"x", ("a",), object(), "\ud800", "\0", "x" * 2_000_000],
    ids=lambda value: repr(value)[:20],
)
def test_values_that_other_languages_write_differently_are_not_signed(folder: KeyFolder, value: Any) -> None:
    with pytest.raises(NotAReceipt):
        sign({**ACCEPTED, "clientId": value})
    with pytest.raises(NotAReceipt):
        verify({**sign(ACCEPTED), "clientId": value}, keys_of(folder))


@pytest.mark.parametrize("other", [None, 7, "text", [], [ACCEPTED], {}, ACCEPTED, {"signature": "x"}, {1: 2}])
def test_other_json_is_not_a_receipt(folder: KeyFolder, other: Any) -> None:
    sign(ACCEPTED)
    with pytest.raises(NotAReceipt):
        verify(other, keys_of(folder))


def test_every_error_has_a_code_a_sentence_and_a_remedy() -> None:
    for error in (NotGenuine, NotAReceipt, UnknownReceiptKey, OtherPayload):
        assert issubclass(error, CeleriacError)
        assert error().message.endswith(".")
        assert (error.exit_code, error.http_status) == (1, 400)
        assert error.remedy


def test_a_receipt_for_another_payload_is_refused() -> None:
    receipt = sign(ACCEPTED)
    verify_payload(receipt, {})
    others: list[Any] = [{"a": 1}, [], None, "{}"]
    for other in others:
        with pytest.raises(OtherPayload):
            verify_payload(receipt, other)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'\xef\xbb\xbf[{"a": 1}, {"a": 2}]',
        b'\n {"a": 1}\r\n\r\n{"a": 2}',
        b'[\n  {"a": 1},\n  {"a": 2}\n]\n',
    ],
)
def test_receipts_come_as_an_array_or_as_lines(raw: bytes) -> None:
    assert parse_receipts(raw) == [{"a": 1}, {"a": 2}]


def test_a_broken_line_does_not_hide_the_others() -> None:
    first, broken, last = parse_receipts(b'{"a": 1}\n{"a": 2\n{"a": 3}\n')
    assert (first, last) == ({"a": 1}, {"a": 3})
    assert isinstance(broken, NotAReceipt)


@pytest.mark.parametrize(
    "raw", [b"hello", b'{"a": 1', b"\xff\xfe", b"[" * 100_000, b'{\n "a": 1,\n "b":\n', b"1" * 5000, b'{"a":1,"a":2}']
)
def test_a_file_that_is_not_json_is_one_complaint(raw: bytes) -> None:
    (error,) = parse_receipts(raw)
    assert isinstance(error, NotAReceipt)
    assert "\n" not in error.message


def test_an_empty_file_has_no_receipt() -> None:
    assert parse_receipts(b" \n") == []


@pytest.mark.guarantee
def test_a_field_that_occurs_twice_is_refused(folder: KeyFolder) -> None:
    """A reader might look at the first one, and the signature covers the last one."""
    receipt = json.dumps(sign(REJECTED))
    (found,) = parse_receipts(receipt.replace("{", '{"level": "saved", ', 1).encode())
    assert isinstance(found, NotAReceipt)
    assert "twice" in found.message


def test_signing_does_not_read_the_key_again(folder: KeyFolder) -> None:
    """Reading and checking the files for each signature would take longer than signing."""
    key_id = sign(ACCEPTED)["keyId"]
    long_ago = time.time() - 60
    os.utime(folder.path, (long_ago, long_ago))
    receipt = sign(ACCEPTED)  # notices the other time, and reads the files once more
    (folder.path / f"{key_id}.pem").write_text("damaged in place, which does not change the time of the folder")
    assert sign(ACCEPTED) == receipt
    os.utime(folder.path)
    with pytest.raises(BadKeyFile):
        sign(ACCEPTED)
