"""The Ed25519 keys that sign receipts: files in a folder outside the ledger (RECEIPT_KEYS).

    KEYID.json   the public half, as it is published: keyId, algorithm, publicKey, activeFrom, retiredAt
    KEYID.pem    the private half (PKCS #8), mode 0600; absent after the key was retired
    lock         locked while a process changes the folder

KEYID is the first 16 hexadecimal digits of the SHA-256 of the raw public key. The folder has mode 0700.

A key exists when its JSON file does. The JSON file is written after the PEM file, and a process signs only with keys
that it finds in JSON files, so a key is published before it signs. Its life:

    scheduled    activeFrom is in the future: published, so that verifiers can learn it, and not used yet
    signing      the newest key whose activeFrom has passed, by the clock of the machine that signs
    superseded   a newer key signs; receipts of this one still verify
    retired      retiredAt is set and the private half is deleted; receipts of this one still verify

If no key is active yet, because clocks differ, the one that becomes active first signs. The first signature creates the
first key; processes that start at the same time wait for the lock and find the key of the fastest one. A process that
had keys and finds none raises an error: the folder is probably not mounted. A crash leaves at worst a PEM
file without a JSON file, which is ignored, or a retired key whose PEM file still exists, which does not sign; `retire`
again deletes it. To disown the receipts of a stolen key, delete its JSON file: they no longer verify.

A process looks at the modification time of the folder before each signature, and reads the files again if it changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import settings
from failpoint import failpoint
from models.errors import CeleriacError, Misuse
from receipts.key_list import ALGORITHM, Key, key_id_of, parse_key, reason_of

# Two changes within one tick of the file system's clock leave the same modification time, so it is trusted when older.
SETTLED_SECONDS: Final = 1.0


class KeyFolderUnusable(CeleriacError):
    """The folder of the receipt keys cannot be used.

    RECEIPT_KEYS (default: `receipt-keys` in CELERIAC_HOME) cannot be created, read or written, or its keys are gone.
    """

    code = "receipt_key_folder_unusable"
    remedy = "Set RECEIPT_KEYS to a folder that the process may write to; if the keys are gone, mount or restore it."


class BadKeyFile(CeleriacError):
    """A file in the folder of the receipt keys is damaged.

    A JSON or PEM file there was edited, cut off or renamed, or the two halves of a key do not belong together.
    """

    code = "bad_receipt_key_file"
    remedy = "Restore the file that the message names from a backup, or move it out of the folder."


class NoSigningKey(CeleriacError):
    """There is no key to sign receipts with.

    Every key in the folder RECEIPT_KEYS is retired or has lost its private half.
    """

    code = "no_signing_key"
    remedy = "Create a key with `manage.py receipts keys rotate`."


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key with its private half."""

    key: Key
    private: Ed25519PrivateKey = field(repr=False)

    @property
    def key_id(self) -> str:
        return self.key.key_id


@dataclass(frozen=True, slots=True)
class _Contents:
    """The folder as it was read: all keys, oldest first, and those that can sign, newest first."""

    changed_ns: int = 0
    read_at: float = 0.0
    is_settled: bool = False
    keys: tuple[Key, ...] = ()
    usable: tuple[SigningKey, ...] = ()

    def choose(self, at: datetime) -> SigningKey | None:
        """Return the newest active key; if none is active yet, the one that will be first."""
        active = (each for each in self.usable if each.key.active_from <= at)
        return next(active, self.usable[-1] if self.usable else None)


class KeyFolder:
    """The keys in one folder. Threads may share it: what was read is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._contents = _Contents()

    def list_keys(self) -> tuple[Key, ...]:
        """Return all keys, oldest first. Nothing is created."""
        return self._read().keys

    def signing_key(self, at: datetime | None = None) -> SigningKey:
        """Return the key that signs now, or `at` a time. Create the first key if there is none."""
        contents = self._read()
        if not contents.keys:
            contents = self._create_first()
        chosen = contents.choose(at or datetime.now(UTC))
        if chosen is None:
            raise NoSigningKey(f"No key in {self.path} can sign: run `manage.py receipts keys rotate`.")
        return chosen

    def state_of(self, key: Key, at: datetime | None = None) -> str:
        """Return `scheduled`, `signing`, `superseded`, `retired`, or `public half only` if its PEM file is missing."""
        contents, at = self._read(), at or datetime.now(UTC)
        if key.retired_at:
            return "retired"
        if key.key_id not in {each.key_id for each in contents.usable}:
            return "public half only"
        chosen = contents.choose(at)
        if chosen is not None and chosen.key_id == key.key_id:
            return "signing"
        return "scheduled" if key.active_from > at else "superseded"

    def rotate(self, delay: timedelta = timedelta()) -> Key:
        """Create the next key, which signs after the delay. It is published at once; older keys stay published."""
        if not self.list_keys():
            first = self._create_first().keys[0]
            if not delay:
                return first
        with self._locked():
            return self._create(datetime.now(UTC) + delay)

    def retire(self, key_id: str) -> Key:
        """Delete the private half of a key and keep its public half. The signing key is refused."""
        with self._locked():
            found = next((each for each in self.list_keys() if each.key_id == key_id), None)
            if found is None:
                raise Misuse(f"There is no key {key_id[:100]!r}: `manage.py receipts keys` lists them.")
            if self.state_of(found) == "signing":
                raise Misuse(f"{key_id} signs the receipts: run `manage.py receipts keys rotate` first.")
            retired = found if found.retired_at else replace(found, retired_at=datetime.now(UTC))
            self._write(f"{key_id}.json", _json(retired))
            (self.path / f"{key_id}.pem").unlink(missing_ok=True)
            self._sync()
        return retired

    def _read(self) -> _Contents:
        """Return the contents of the folder; read the files only if it has changed since the last time."""
        known, now = self._contents, time.monotonic()
        try:
            changed_ns = self._changed_ns()
            if changed_ns == known.changed_ns and (known.is_settled or now - known.read_at < SETTLED_SECONDS):
                return known
            is_settled = time.time() - changed_ns / 1e9 > SETTLED_SECONDS
            found = map(_read_public, self.path.glob(f"{'[0-9a-f]' * 16}.json"))
            keys = sorted(found, key=lambda key: (key.active_from, key.key_id))
            usable = [each for key in reversed(keys) if not key.retired_at and (each := self._with_private(key))]
        except OSError as error:
            raise _unusable(self.path, error) from None
        if known.keys and not keys:
            raise KeyFolderUnusable(
                f"{self.path} had keys and has none now: is it mounted? Restart this process if you deleted them."
            )
        self._contents = _Contents(changed_ns, now, is_settled, tuple(keys), tuple(usable))
        return self._contents

    def _changed_ns(self) -> int:
        """Return when a file was last created, replaced or deleted in the folder; 0 if the folder does not exist."""
        try:
            return os.stat(self.path).st_mtime_ns  # noqa: PTH116 - faster than Path.stat; it precedes each signature
        except FileNotFoundError:
            return 0

    def _with_private(self, key: Key) -> SigningKey | None:
        """Return the key with its private half, or None if that is missing."""
        path = self.path / f"{key.key_id}.pem"
        try:
            written = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            private = serialization.load_pem_private_key(written, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # their texts may quote the file
            raise BadKeyFile(f"{path} is not an unencrypted private key in PEM.") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise BadKeyFile(f"{path} is not an {ALGORITHM} key.")
        if private.public_key().public_bytes_raw() != key.public:
            raise BadKeyFile(f"{path} does not belong to the public half beside it.")
        return SigningKey(key, private)

    def _create_first(self) -> _Contents:
        """Create a key unless another process does, and return the contents of the folder."""
        failpoint("receipt_keys.none_found")
        with self._locked():
            if not self._read().keys:
                self._create(datetime.now(UTC))
        return self._read()

    def _create(self, active_from: datetime) -> Key:
        private = Ed25519PrivateKey.generate()
        public = private.public_key().public_bytes_raw()
        key = Key(key_id_of(public), public, active_from)
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._write(f"{key.key_id}.pem", pem)
        failpoint("receipt_keys.private_written")
        self._write(f"{key.key_id}.json", _json(key))
        return key

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process change the folder at a time. The kernel releases the lock of a process that dies."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._forget()
                yield
            finally:
                self._forget()
                os.close(descriptor)
        except OSError as error:
            raise _unusable(self.path, error) from None

    def _forget(self) -> None:
        """Read the files next time, even if the folder was changed twice within one tick of its clock."""
        self._contents = replace(self._contents, changed_ns=0)

    def _write(self, name: str, content: bytes) -> None:
        """Replace a file atomically and durably, with mode 0600."""
        descriptor, beside = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).replace(self.path / name)
        self._sync()

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def key_folder() -> KeyFolder:
    """Return the key folder of this installation."""
    return _folder_at(settings.current().receipt_key_folder)


def public_keys() -> dict[str, list[dict[str, str | None]]]:
    """Return the published list of keys. Create the first key if there is none, to publish it before it signs."""
    folder = key_folder()
    if not folder.list_keys():
        folder.signing_key()
    return {"keys": [key.published() for key in folder.list_keys()]}


@lru_cache(maxsize=8)
def _folder_at(path: Path) -> KeyFolder:
    return KeyFolder(path)


def _read_public(path: Path) -> Key:
    try:
        key = parse_key(json.loads(path.read_bytes()))
        if key.key_id != path.stem:
            raise ValueError(f"it holds the key {key.key_id}")
    except (ValueError, RecursionError) as error:
        raise BadKeyFile(f"{path} is not the public half of a receipt key: {reason_of(error)}.") from None
    return key


def _json(key: Key) -> bytes:
    return json.dumps(key.published(), indent=1).encode() + b"\n"


def _unusable(path: Path, error: OSError) -> KeyFolderUnusable:
    return KeyFolderUnusable(f"{path} cannot be used: {error.strerror or error}.")
