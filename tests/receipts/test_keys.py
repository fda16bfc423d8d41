"""The keys that sign receipts: the first one, rotation, retirement, and damaged files."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from fastapi import FastAPI
from fastapi.testclient import TestClient

import settings
from api import keys as keys_route
from failpoint import FailpointHit, arm
from models.errors import Misuse
from receipts.key_list import BadKeyList, decode, key_id_of, read_key_list
from receipts.keys import BadKeyFile, KeyFolder, KeyFolderUnusable, NoSigningKey, public_keys
from settings import ROOT
from tests.nodes.programs import environment
from tests.receipts.key_folders import key_folder_at
from tests.servers import wait_until

HOUR = timedelta(hours=1)
SIGN_ONCE = "from receipts.keys import key_folder; print(key_folder().signing_key().key_id)"
SIGN_ON_REQUEST = """
import sys
from receipts.keys import key_folder
for line in sys.stdin:
    print(key_folder().signing_key().key_id, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[KeyFolder]:
    with key_folder_at(tmp_path / "keys") as made:
        yield made


def program(code: str, path: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a process that uses the key folder."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(RECEIPT_KEYS=str(path), **variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def ids(folder: KeyFolder) -> list[str]:
    return [key.key_id for key in folder.list_keys()]


# the first key


def test_the_private_half_is_readable_by_its_owner_only(folder: KeyFolder) -> None:
    before = os.umask(0)
    try:
        key_id = folder.signing_key().key_id
    finally:
        os.umask(before)
    assert mode(folder.path) == 0o700
    assert {path.name: mode(path) for path in folder.path.iterdir()} == {
        f"{key_id}.pem": 0o600,
        f"{key_id}.json": 0o600,
        "lock": 0o600,
    }


def test_the_mode_of_a_folder_that_exists_is_not_changed(folder: KeyFolder) -> None:
    """RECEIPT_KEYS may name a folder that others use, too."""
    folder.path.mkdir()
    folder.path.chmod(0o755)
    folder.signing_key()
    assert mode(folder.path) == 0o755


def test_processes_that_start_at_once_use_one_key(folder: KeyFolder, tmp_path: Path) -> None:
    """All of them have found no key before the first one may create one."""
    trace = tmp_path / "trace"
    folder.path.mkdir()
    with (folder.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = [program(SIGN_ONCE, folder.path, FAILPOINT_TRACE=str(trace)) for _ in range(6)]
        wait_until(lambda: trace.exists() and trace.read_text().count("none_found") == 6, "all have found no key")
    used = {process.communicate(timeout=30)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 6
    assert used == set(ids(folder))
    assert len(list(folder.path.glob("*.pem"))) == 1


def test_threads_that_start_at_once_use_one_key(folder: KeyFolder) -> None:
    together, used = threading.Barrier(8), set[str]()

    def use() -> None:
        together.wait()
        used.add(folder.signing_key().key_id)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used == set(ids(folder))
    assert len(used) == 1


def test_a_process_that_is_killed_while_it_creates_a_key_leaves_nothing_that_signs(folder: KeyFolder) -> None:
    killed = program(SIGN_ONCE, folder.path, FAILPOINTS="receipt_keys.private_written=kill")
    killed.communicate(timeout=30)
    assert killed.returncode == -signal.SIGKILL
    assert (len(list(folder.path.glob("*.pem"))), folder.list_keys()) == (1, ())
    assert ids(folder) == [] != [folder.signing_key().key_id] == ids(folder)


def test_listing_keys_creates_none_and_publishing_them_does(folder: KeyFolder) -> None:
    """A verifier that fetches the list before the first receipt must find the key of that receipt in it."""
    assert folder.list_keys() == ()
    assert not folder.path.exists()
    (published,) = public_keys()["keys"]
    assert published["keyId"] == folder.signing_key().key_id


def test_keys_that_vanish_are_not_replaced_by_a_new_one(folder: KeyFolder) -> None:
    """A volume that is not mounted looks like an empty folder."""
    folder.signing_key()
    aside = folder.path.rename(folder.path.with_name("unmounted"))
    with pytest.raises(KeyFolderUnusable, match="has none now"):
        folder.signing_key()
    folder.path.mkdir()
    with pytest.raises(KeyFolderUnusable, match="has none now"):
        public_keys()
    folder.path.rmdir()
    aside.rename(folder.path)
    assert ids(folder) == [folder.signing_key().key_id]


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeyFolderUnusable, match=r"file/keys cannot be used: Not a directory\."):
        KeyFolder(tmp_path / "file" / "keys").signing_key()


def test_the_default_folder_is_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERIAC_HOME", str(tmp_path))
    assert settings.Settings().receipt_key_folder == tmp_path / "receipt-keys"


# rotation


def test_a_new_key_is_published_before_it_signs(folder: KeyFolder) -> None:
    old = folder.signing_key().key_id
    new = folder.rotate(HOUR)
    assert [key["keyId"] for key in public_keys()["keys"]] == [old, new.key_id]
    assert folder.signing_key().key_id == old
    before, after = new.active_from - timedelta(seconds=1), new.active_from + timedelta(seconds=1)
    assert (folder.signing_key(before).key_id, folder.signing_key(after).key_id) == (old, new.key_id)
    assert [folder.state_of(key) for key in folder.list_keys()] == ["signing", "scheduled"]
    assert [folder.state_of(key, after) for key in folder.list_keys()] == ["superseded", "signing"]


def test_a_delayed_rotation_of_an_empty_folder_leaves_a_key_that_signs_now(folder: KeyFolder) -> None:
    scheduled = folder.rotate(HOUR)
    assert len(folder.list_keys()) == 2
    assert folder.signing_key().key_id != scheduled.key_id


def test_a_machine_whose_clock_is_late_signs_with_the_first_key_instead_of_failing(folder: KeyFolder) -> None:
    first = folder.signing_key().key_id
    folder.rotate()
    assert folder.signing_key(datetime.now(UTC) - HOUR).key_id == first


def test_changes_within_one_tick_of_the_file_system_are_seen(folder: KeyFolder) -> None:
    """They leave the same modification time, by which a process would recognise that nothing has changed."""
    folder.signing_key()
    tick = folder.path.stat().st_mtime_ns
    own = folder.rotate()
    os.utime(folder.path, ns=(tick, tick))
    assert folder.signing_key().key_id == own.key_id
    of_another_process = KeyFolder(folder.path).rotate()
    os.utime(folder.path, ns=(tick, tick))
    wait_until(lambda: folder.signing_key().key_id == of_another_process.key_id, "the new key signs", seconds=10)


def test_a_process_that_runs_uses_a_new_key_without_a_restart(folder: KeyFolder) -> None:
    first = folder.signing_key().key_id
    with program(SIGN_ON_REQUEST, folder.path) as running:
        assert running.stdin is not None
        assert running.stdout is not None

        def ask() -> str:
            print(file=running.stdin, flush=True)
            return str(running.stdout.readline()).strip()  # type: ignore[union-attr]

        assert ask() == first
        second = folder.rotate().key_id
        wait_until(lambda: ask() == second, "the new key signs", seconds=10)
        running.stdin.close()


# retirement


def test_a_retired_key_loses_its_private_half_and_stays_published(folder: KeyFolder) -> None:
    old = folder.signing_key().key_id
    new = folder.rotate().key_id
    retired = folder.retire(old)
    assert not (folder.path / f"{old}.pem").exists()
    published = {key["keyId"]: key["retiredAt"] for key in public_keys()["keys"]}
    assert retired.retired_at is not None
    assert published == {old: retired.retired_at.isoformat(), new: None}
    assert folder.state_of(retired) == "retired"
    assert folder.retire(old).retired_at == retired.retired_at  # repeating it changes nothing


def test_the_key_that_signs_cannot_be_retired(folder: KeyFolder) -> None:
    old = folder.signing_key().key_id
    folder.rotate(HOUR)
    with pytest.raises(Misuse, match="rotate` first"):
        folder.retire(old)
    assert folder.signing_key().key_id == old
    with pytest.raises(Misuse, match="There is no key"):
        folder.retire("0123456789abcdef")


def test_a_retired_key_whose_private_half_was_left_by_a_crash_does_not_sign(folder: KeyFolder) -> None:
    old = folder.signing_key().key_id
    private = folder.path / f"{old}.pem"
    content = private.read_bytes()
    folder.rotate()
    folder.retire(old)
    private.write_bytes(content)
    long_ago = datetime.now(UTC) - HOUR
    assert folder.signing_key(long_ago).key_id != old
    folder.retire(old)
    assert not private.exists()


def test_a_folder_without_a_private_half_says_how_to_get_one(folder: KeyFolder) -> None:
    key_id = folder.signing_key().key_id
    (folder.path / f"{key_id}.pem").unlink()
    assert [folder.state_of(key) for key in folder.list_keys()] == ["public half only"]
    with pytest.raises(NoSigningKey, match="keys rotate"):
        folder.signing_key()
    assert folder.rotate().key_id == folder.signing_key().key_id


# damaged files


def another_kind_of_key(_: bytes) -> bytes:
    return generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def a_key_with_a_password(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, password=None)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("pem", lambda pem: pem[:60]),
        ("pem", lambda _: b""),
        ("pem", another_kind_of_key),
        ("pem", a_key_with_a_password),
        ("json", lambda text: text[:60]),
        ("json", lambda _: b"\xff"),
        ("json", lambda _: b"[" * 200_000),
        ("json", lambda _: b"[]"),
        ("json", lambda text: text.replace(b"Ed25519", b"RSA")),
        ("json", lambda text: text.replace(b"publicKey", b"public")),
        ("json", lambda text: text.replace(b'"activeFrom": "2', b'"activeFrom": "x')),
        ("json", lambda text: text.replace(b"+00:00", b"")),
    ],
)
def test_a_damaged_file_is_named_and_its_content_is_not(
    folder: KeyFolder, suffix: str, damage: Callable[[bytes], bytes]
) -> None:
    key_id = folder.signing_key().key_id
    secret = (folder.path / f"{key_id}.pem").read_text().splitlines()[1]
    file = folder.path / f"{key_id}.{suffix}"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadKeyFile) as caught:
        KeyFolder(folder.path).signing_key()
    assert str(file) in caught.value.message
    assert secret[:20] not in caught.value.message
    assert caught.value.__cause__ is None


def test_halves_of_different_keys_are_refused(folder: KeyFolder) -> None:
    first, second = folder.signing_key().key_id, folder.rotate().key_id
    (folder.path / f"{first}.pem").replace(folder.path / f"{second}.pem")
    with pytest.raises(BadKeyFile, match=f"{second}.pem does not belong"):
        folder.signing_key()


def test_a_file_under_the_name_of_another_key_is_refused(folder: KeyFolder) -> None:
    first, second = folder.signing_key().key_id, folder.rotate().key_id
    (folder.path / f"{first}.json").replace(folder.path / f"{second}.json")
    with pytest.raises(BadKeyFile, match=f"{second}.json is not .*: it holds the key {first}"):
        folder.list_keys()


def test_a_write_that_fails_half_way_leaves_the_old_keys(folder: KeyFolder) -> None:
    old = folder.signing_key().key_id
    arm("receipt_keys.private_written=raise")
    try:
        with pytest.raises(FailpointHit):
            folder.rotate()
    finally:
        arm()
    assert ids(folder) == [old]


# the published list


def test_the_published_list_says_all_that_a_verifier_needs(folder: KeyFolder) -> None:
    app = FastAPI()
    app.include_router(keys_route.router)
    with TestClient(app) as client:
        answer = client.get("/.well-known/celeriac-keys.json")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "public, max-age=60")
    assert answer.headers["content-type"] == "application/json"
    (key,) = answer.json()["keys"]
    assert key.keys() == {"keyId", "algorithm", "publicKey", "activeFrom", "retiredAt"}
    assert (key["algorithm"], key["retiredAt"]) == ("Ed25519", None)
    assert key["keyId"] == key_id_of(decode(key["publicKey"])) == folder.signing_key().key_id
    assert datetime.fromisoformat(key["activeFrom"]) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda key: {**key, "keyId": "0" * 16}, "do not belong together"),
        (lambda key: {**key, "publicKey": key["publicKey"] + "="}, "base64url without padding"),
        (lambda key: {**key, "publicKey": 7}, "base64url without padding"),
        (lambda key: {**key, "publicKey": "AAAA", "keyId": key_id_of(b"\0\0\0")}, "do not belong together"),
        (lambda _: "key", "must be an object"),
    ],
)
def test_a_key_list_cannot_give_an_id_to_another_key(
    folder: KeyFolder, tmp_path: Path, change: Callable[[dict[str, str]], object], reason: str
) -> None:
    file = tmp_path / "list.json"
    (key,) = json.loads(json.dumps(public_keys()["keys"]))
    file.write_text(json.dumps({"keys": [key], "later": 1}))
    assert list(read_key_list(file)) == [key["keyId"]]
    file.write_text(json.dumps({"keys": [change(key)]}))
    with pytest.raises(BadKeyList, match=reason):
        read_key_list(file)
