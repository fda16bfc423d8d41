"""receipts verify and receipts keys: a receipt is checked anywhere, and its keys are rotated without a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from receipts.keys import KeyFolder, public_keys
from receipts.signing import sign
from settings import ROOT
from tests.receipts.key_folders import key_folder_at
from tests.receipts.test_signing import ACCEPTED, REJECTED, SAVED
from tests.tasks.command_line import manage


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[KeyFolder]:
    with key_folder_at(tmp_path / "keys") as made:
        yield made


@pytest.fixture
def place(tmp_path: Path, folder: KeyFolder) -> Path:
    """A folder with a saved copy of the public keys."""
    (tmp_path / "celeriac-keys.json").write_text(json.dumps(public_keys()))
    return tmp_path


def written(place: Path, *receipts: dict[str, Any]) -> Path:
    """Write the receipts as JSON lines."""
    file = place / "receipts.jsonl"
    file.write_text("".join(f"{json.dumps(receipt)}\n" for receipt in receipts))
    return file


# verify


@pytest.mark.guarantee
def test_a_receipt_is_verified_offline_without_settings_servers_or_a_home(place: Path, folder: KeyFolder) -> None:
    """Only PATH is set. Unreadable settings would be an error if they were read."""
    (place / "payload.json").write_text("{}")
    receipt = sign(SAVED)
    file = written(place, receipt)
    arguments = ["receipts", "verify", str(file), "--keys", "celeriac-keys.json", "--payload", "payload.json"]

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "manage.py"), *arguments]
        variables |= {"PATH": os.environ["PATH"]}
        return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, check=False)

    folder.path.rename(place / "keys that a verifier does not have")
    home_before = (ROOT / ".celeriac" / "receipt-keys").exists()
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"valid: {SAVED['taskId']} was saved at {SAVED['savedAt']} as number 4711")
    written(place, receipt, {**receipt, "ledgerSeq": 4712})
    done = run(CELERIAC_HOME="/nowhere", API_PORT="not a number")
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["valid", "NOT VALID"]
    assert (ROOT / ".celeriac" / "receipt-keys").exists() is home_before


def test_what_each_receipt_says_is_one_line_in_words(place: Path) -> None:
    receipts = [sign({**ACCEPTED, "duplicate": True}), sign(SAVED), sign({**REJECTED, "reason": "a\nb\x1b[2J"})]
    done = manage("receipts", "verify", written(place, *receipts))
    assert (done.code, done.err) == (0, "")
    key = receipts[0]["keyId"]
    task = ACCEPTED["taskId"]
    assert done.out.splitlines() == [
        f"valid: {task} was accepted at 2026-11-16T10:30:00.000+00:00, to be saved or rejected by "
        f"2026-11-16T10:31:00.000+00:00 (submitted before); signed by {key}.",
        f"valid: {task} was saved at 2026-11-16T10:30:01.000+00:00 as number 4711 in the ledger; signed by {key}.",
        f"valid: {task} was rejected: a b [2J (bad_task); signed by {key}.",
    ]


@pytest.mark.parametrize("form", ["one", "array", "lines", "stdin"])
def test_receipts_are_read_in_every_form(place: Path, form: str) -> None:
    receipts = [sign(ACCEPTED)] if form == "one" else [sign(ACCEPTED), sign(SAVED)]
    file = written(place, *receipts)
    if form in ("one", "array"):
        file.write_text(json.dumps(receipts[0] if form == "one" else receipts, indent=2))
    source, stdin = ("-", file.read_bytes()) if form == "stdin" else (str(file), b"")
    done = manage("receipts", "verify", source, "--json", stdin=stdin)
    assert done.code == 0
    assert [(each["number"], each["valid"], each["code"]) for each in done.json] == [
        (number, True, None) for number in range(1, len(receipts) + 1)
    ]
    assert [each["receipt"] for each in done.json] == receipts


@pytest.mark.guarantee
def test_one_forged_receipt_among_genuine_ones_fails_and_is_named(place: Path) -> None:
    file = written(place, sign(ACCEPTED), {**sign(SAVED), "ledgerSeq": 1}, {"hello": 1}, sign(REJECTED))
    with file.open("a") as lines:
        lines.write("broken\n")
    done = manage("receipts", "verify", file)
    assert done.code == 1
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "valid", "NOT VALID", "NOT VALID", "valid", "NOT VALID",
    ]  # fmt: skip
    found = manage("receipts", "verify", file, "--json").json
    assert [(each["number"], each["code"]) for each in found if not each["valid"]] == [
        (2, "receipt_not_genuine"), (3, "not_a_receipt"), (5, "not_a_receipt"),
    ]  # fmt: skip


def test_a_genuine_receipt_for_another_payload_fails(place: Path) -> None:
    file, payload = written(place, sign(ACCEPTED)), place / "payload.json"
    payload.write_text("\ufeff{ }\n")
    assert manage("receipts", "verify", file, "--payload", payload).code == 0
    payload.write_text('{"amount": 1}')
    done = manage("receipts", "verify", file, "--payload", payload, "--json")
    assert (done.code, done.json[0]["code"]) == (1, "receipt_for_other_payload")


def test_a_key_list_from_before_the_rotation_does_not_know_the_new_key(place: Path, folder: KeyFolder) -> None:
    old = sign(ACCEPTED)
    folder.rotate()
    file, before, after = written(place, old, sign(SAVED)), place / "celeriac-keys.json", place / "after.json"
    done = manage("receipts", "verify", file, "--keys", before, "--json")
    assert (done.code, [each["code"] for each in done.json]) == (1, [None, "receipt_key_unknown"])
    after.write_text(manage("receipts", "keys", "--json").out)
    assert manage("receipts", "verify", file, "--keys", before, "--keys", after).code == 0
    folder.retire(old["keyId"])
    assert manage("receipts", "verify", file).code == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.json"], "cannot be read"),
        (["."], "cannot be read"),
        (["empty.json"], "no receipt"),
        (["receipts.jsonl", "--keys", "missing.json"], "cannot be read"),
        (["receipts.jsonl", "--keys", "receipts.jsonl"], "is not a list of receipt keys"),
        (["receipts.jsonl", "--keys", "empty.json"], "is not a list of receipt keys"),
        (["receipts.jsonl", "--payload", "missing.json"], "cannot be read"),
        (["receipts.jsonl", "--payload", "empty.json"], "is not JSON"),
        (["receipts.jsonl", "--payload", "nan.json"], "not valid JSON"),
        ([], "Missing argument"),
    ],
)
def test_a_file_that_cannot_be_used_is_misuse_and_not_a_forged_receipt(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    written(place, sign(ACCEPTED))
    (place / "empty.json").touch()
    (place / "nan.json").write_text("NaN")
    monkeypatch.chdir(place)
    done = manage("receipts", "verify", *arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in " ".join(done.err.replace("│", " ").split())


def test_a_private_key_that_is_given_as_a_key_list_is_not_printed(place: Path, folder: KeyFolder) -> None:
    (private,) = folder.path.glob("*.pem")
    done = manage("receipts", "verify", written(place, sign(ACCEPTED)), "--keys", private)
    assert done.code == 2
    assert private.read_text().splitlines()[1] not in done.err


def test_an_installation_without_keys_asks_for_a_list_and_creates_no_key(tmp_path: Path, folder: KeyFolder) -> None:
    done = manage("receipts", "verify", written(tmp_path, ACCEPTED))
    assert (done.code, "There are no keys" in done.err) == (2, True)
    assert not folder.path.exists()


# keys


def test_listing_keys_creates_none(folder: KeyFolder) -> None:
    assert "no keys yet" in manage("receipts", "keys").out
    assert manage("receipts", "keys", "--json").json == {"keys": []}
    assert not folder.path.exists()


def test_a_key_is_rotated_and_retired_from_the_command_line(folder: KeyFolder) -> None:
    old = sign(ACCEPTED)["keyId"]
    scheduled = manage("receipts", "keys", "rotate", "--in", "1h", "--json").json
    assert (scheduled["state"], sign(ACCEPTED)["keyId"]) == ("scheduled", old)
    refused = manage("receipts", "keys", "retire", old)
    assert (refused.code, "rotate` first" in refused.err) == (2, True)

    new = manage("receipts", "keys", "rotate").out.split()[1].rstrip(",")
    assert sign(ACCEPTED)["keyId"] == new
    assert manage("receipts", "keys", "retire", old).out.startswith(f"Retired {old}.")
    assert not (folder.path / f"{old}.pem").exists()
    lines = [line.split() for line in manage("receipts", "keys").out.splitlines()[1:]]
    assert [line[:2] for line in lines] == [[old, "retired"], [new, "signing"], [scheduled["keyId"], "scheduled"]]
    listed = manage("receipts", "keys", "--json").json["keys"]
    assert [{name: key[name] for name in key if name != "state"} for key in listed] == public_keys()["keys"]


@pytest.mark.parametrize("arguments", [["rotate", "--in", "soon"], ["retire"], ["retire", "0123456789abcdef"]])
def test_wrong_arguments_of_keys_are_misuse_and_create_no_key(folder: KeyFolder, arguments: list[str]) -> None:
    assert manage("receipts", "keys", *arguments).code == 2
    assert folder.list_keys() == ()


def test_no_command_prints_a_private_key(place: Path, folder: KeyFolder) -> None:
    secrets = [file.read_text().splitlines()[1] for file in folder.path.glob("*.pem")]
    (key,) = folder.list_keys()
    for arguments in (["keys"], ["keys", "--json"], ["keys", "rotate", "--json"], ["keys", "retire", key.key_id]):
        done = manage("receipts", *arguments)
        assert [secret for secret in secrets if secret in done.out + done.err] == []
