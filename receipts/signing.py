"""Sign receipts, and verify them with public keys only.

    {"level": "accepted", "id": "…", "taskId": "…", "clientId": null, "sha256": "…", …, "keyId": "…", "signature": "…"}

`signature` is Ed25519 (RFC 8032) over the canonical JSON of all other fields, `keyId` included, in UTF-8: keys sorted,
no spaces, no escapes that JSON does not require. Values are text, whole numbers below 2^53, booleans and null, so that
any language writes the same bytes. It is base64url without padding. `sha256` is the hash of the payload's canonical
JSON. Fields that this version does not know are signed and verified like the others.

A genuine receipt proves that a holder of the private key made this promise. It does not prove that the promise was
kept: an `accepted` receipt that is neither saved nor rejected after its `promisedBy` is evidence of a broken one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from models.errors import CeleriacError, shorten
from models.receipts import Level
from outbox.canonical_json import BadPayload, canonical_json, payload_sha
from receipts.key_list import decode, encode, key_id_of, reason_of
from receipts.keys import key_folder

LARGEST_INTEGER: Final = 2**53 - 1  # larger ones lose digits in languages whose numbers are floating-point
LEVELS: Final = tuple(map(str, Level))


class NotGenuine(CeleriacError):
    """The receipt was changed after it was signed, or it was never signed with this key.

    A field of the receipt or its signature is not as it was issued, or the receipt was made up.
    """

    code = "receipt_not_genuine"
    remedy = "Trust nothing in it. Ask its sender for the original, or read the receipt again by its id."
    http_status = 400


class NotAReceipt(NotGenuine):
    """This is not a receipt.

    The text is not JSON, or not an object with the fields of a receipt: a known `level`, and a `signature`.
    """

    code = "not_a_receipt"
    remedy = "Pass the receipt exactly as it was issued, as one JSON object."


class UnknownReceiptKey(NotGenuine):
    """The key that signed the receipt is not in the list of keys.

    Another installation signed the receipt, the list of keys is older than the key, or the receipt was made up.
    """

    code = "receipt_key_unknown"
    remedy = "Fetch `/.well-known/celeriac-keys.json` of the installation that signed the receipt, and verify again."


class OtherPayload(NotGenuine):
    """The receipt is for another payload.

    The SHA-256 of the payload's canonical JSON is not the `sha256` of the receipt.
    """

    code = "receipt_for_other_payload"
    remedy = "Compare with the payload exactly as it was submitted, without its envelope."


def sign(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with `keyId` and `signature`. Those of an earlier signature are replaced."""
    key = key_folder().signing_key()
    signed = {name: value for name, value in fields.items() if name != "signature"} | {"keyId": key.key_id}
    return {**signed, "signature": encode(key.private.sign(_message(signed)))}


def verify(receipt: Mapping[str, Any], keys: Mapping[str, bytes]) -> None:
    """Raise NotGenuine unless one of these keys signed exactly this receipt. `keys`: raw public keys by their ids."""
    if not isinstance(receipt, Mapping):
        raise NotAReceipt("A receipt must be a JSON object.")
    fields = dict(receipt)
    signature = fields.pop("signature", None)
    if not isinstance(signature, str):
        raise NotAReceipt("It has no signature.")
    message = _message(fields)
    public = _find_key(fields.get("keyId"), keys)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(decode(signature), message)
    except (InvalidSignature, ValueError):
        raise NotGenuine from None


def verify_payload(receipt: Mapping[str, Any], payload: Any) -> None:
    """Raise OtherPayload unless the receipt is for this payload."""
    if receipt.get("sha256") != payload_sha(canonical_json(payload)):
        raise OtherPayload


def parse_receipts(raw: bytes) -> list[Any]:
    """Return what a file holds: one receipt, an array of receipts, or one receipt per line.

    A line that is not JSON is returned as the NotAReceipt that says why. Fields that occur twice are refused, because a
    reader might look at the one that was not signed.
    """
    try:
        found = _parse_json(raw)
    except NotAReceipt as error:
        lines = [_parse_line(line) for line in raw.splitlines() if line.strip()]
        is_json_lines = any(isinstance(line, dict) for line in lines)
        return lines if is_json_lines else [error] if lines else []
    return found if isinstance(found, list) else [found]


def _message(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes that are signed, or raise NotAReceipt."""
    if fields.get("level") not in LEVELS:
        raise NotAReceipt(f"Its level is not one of {', '.join(LEVELS)}.")
    for name, value in fields.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise NotAReceipt(f"Its field {shorten(name)} is not text, a whole number below 2^53, a boolean or null.")
    try:
        return canonical_json(fields, what="receipt").encode()
    except BadPayload as error:
        raise NotAReceipt(error.message) from None


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return -LARGEST_INTEGER <= value <= LARGEST_INTEGER
    return value is None or isinstance(value, str)


def _find_key(key_id: Any, keys: Mapping[str, bytes]) -> bytes:
    if not isinstance(key_id, str):
        raise UnknownReceiptKey("The receipt does not say which key signed it.")
    public = keys.get(key_id)
    if public is None or key_id_of(public) != key_id:
        raise UnknownReceiptKey(f"The key {shorten(key_id)} is not in the list of keys.")
    return public


def _parse_line(line: bytes) -> Any:
    try:
        return _parse_json(line)
    except NotAReceipt as error:
        return error


def _parse_json(raw: bytes) -> Any:
    """Return the value of JSON text, or raise NotAReceipt."""
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_refuse_repeated_fields)
    except UnicodeDecodeError:
        raise NotAReceipt("It is not UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise NotAReceipt(f"It is not JSON: {reason_of(error)}.") from None


def _refuse_repeated_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field occurs twice")
    return found
