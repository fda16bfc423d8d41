"""receipts: verify signed receipts offline, and list, rotate and retire the keys that sign them."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commands import receipt_streams, times
from commands.options import Json
from commands.output import format_time, format_time_utc, print_json
from commands.plain_lines import plain, print_lines

if TYPE_CHECKING:
    from receipts.key_list import Key
    from receipts.keys import KeyFolder
    from receipts.signing import NotGenuine

KEYS_HELP: Final = """List the keys that sign receipts. The JSON is what `/.well-known/celeriac-keys.json` shows.

Example: `manage.py receipts keys --json > celeriac-keys.json`
"""
NO_PAYLOAD: Final = object()

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A receipt, an array of receipts, or one receipt per line; - is stdin."),
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--keys",
        metavar="FILE",
        help="A saved copy of /.well-known/celeriac-keys.json; repeat the option for several. "
        "Default: the keys of this installation.",
    ),
]
PayloadFile = Annotated[
    Path | None,
    typer.Option(
        "--payload",
        metavar="FILE",
        help="Also check that the receipts are for the payload in this file.",
    ),
]
Delay = Annotated[
    timedelta | None,
    typer.Option(
        "--in",
        parser=times.parse_duration,
        metavar="DURATION",
        help="Publish the key now, and sign with it after this time, such as 90s or 1h. Default: sign with it now.",
    ),
]


def register(app: typer.Typer) -> None:
    group = typer.Typer()
    receipt_streams.add_commands(group)
    add_commands(group)
    app.add_typer(group, name="receipts")


def add_commands(group: typer.Typer) -> None:
    """Add the commands of this file to the group `receipts`, which may have others."""
    group.command()(verify)
    keys = typer.Typer()
    keys.callback(invoke_without_command=True, help=KEYS_HELP)(show_keys)
    keys.command()(rotate)
    keys.command()(retire)
    group.add_typer(keys, name="keys")


def verify(file: File, *, keys: KeyFiles = None, payload: PayloadFile = None, as_json: Json = False) -> None:
    """Verify that receipts are genuine: signed by a known key, and unchanged since. Works offline.

    Exit code 0: all are valid; 1: at least one is not; 2: a file cannot be used.

    Example: `manage.py receipts verify receipts.jsonl --keys celeriac-keys.json --payload payload.json`
    """
    from receipts.signing import parse_receipts

    found = parse_receipts(_read(file, "FILE"))
    if not found:
        raise typer.BadParameter("There is no receipt in it.", param_hint="FILE")
    known = _known_keys(keys or [])
    expected = NO_PAYLOAD if payload is None else _read_payload(payload)
    checked = [_check(number, each, known, expected) for number, each in enumerate(found, 1)]
    if as_json:
        print_json([each.as_json() for each in checked])
    else:
        for each in checked:
            print(plain(each.sentence()))
    if any(each.error for each in checked):
        raise typer.Exit(1)


def show_keys(context: typer.Context, *, as_json: Json = False) -> None:
    from receipts.keys import key_folder

    if context.invoked_subcommand:
        return
    folder = key_folder()
    found = folder.list_keys()
    if as_json:
        print_json({"keys": [_json_of(folder, key) for key in found]})
    elif not found:
        print("There are no keys yet; the first receipt creates one.")
    else:
        print_lines(
            ("key", "state", "active from (UTC)", "retired (UTC)"),
            [
                (key.key_id, folder.state_of(key), format_time(key.active_from), format_time(key.retired_at))
                for key in found
            ],
        )


def rotate(delay: Delay = None, as_json: Json = False) -> None:
    """Create the next key. Running processes use it without a restart; receipts of older keys stay valid.

    Verifiers may have a copy of the keys that is a minute old: with --in they learn the key before it signs.

    Example: `manage.py receipts keys rotate --in 1h`
    """
    from receipts.keys import key_folder

    folder = key_folder()
    key = folder.rotate(delay or timedelta())
    if as_json:
        print_json(_json_of(folder, key))
    else:
        print(f"Created {key.key_id}, which signs from {format_time_utc(key.active_from)}.")


def retire(
    key_id: Annotated[str, typer.Argument(metavar="KEYID", help="The id of a key that no longer signs.")],
    as_json: Json = False,
) -> None:
    """Delete the private half of a key. Its public half stays published, so its receipts still verify.

    The key that signs now cannot be retired: rotate first.

    Example: `manage.py receipts keys retire 91f3c2a06be4d857`
    """
    from receipts.keys import key_folder

    folder = key_folder()
    key = folder.retire(key_id)
    if as_json:
        print_json(_json_of(folder, key))
    else:
        print(f"Retired {key.key_id}. Its private half is deleted; its receipts still verify.")


@dataclass(frozen=True, slots=True)
class _Checked:
    """One receipt of a file, and why it is not genuine or not for the payload."""

    number: int
    receipt: Any
    error: NotGenuine | None

    def sentence(self) -> str:
        if self.error:
            return f"NOT VALID: receipt {self.number}: {self.error.message} ({self.error.code})"
        return f"valid: {describe(self.receipt)}"

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "valid": self.error is None,
            "code": self.error.code if self.error else None,
            "message": self.error.message if self.error else describe(self.receipt),
            "receipt": self.receipt if isinstance(self.receipt, Mapping) else None,
        }


def describe(receipt: Mapping[str, Any]) -> str:
    """Return what a receipt says, as a sentence."""
    name = f"{receipt.get('taskId') or receipt.get('id')}"
    duplicate = " (submitted before)" if receipt.get("duplicate") else ""
    match receipt.get("level"):
        case "accepted":
            said = (
                f"was accepted at {receipt.get('acceptedAt')}, to be saved or rejected by {receipt.get('promisedBy')}"
            )
        case "saved":
            said = f"was saved at {receipt.get('savedAt')} as number {receipt.get('ledgerSeq')} in the ledger"
        case _:
            said = f"was rejected: {receipt.get('reason')} ({receipt.get('code')})"
    return f"{name} {said}{duplicate}; signed by {receipt.get('keyId')}."


def _check(number: int, found: Any, known: Mapping[str, bytes], payload: Any) -> _Checked:
    from receipts.signing import NotGenuine, verify, verify_payload

    try:
        if isinstance(found, NotGenuine):
            raise found
        verify(found, known)
        if payload is not NO_PAYLOAD:
            verify_payload(found, payload)
    except NotGenuine as error:
        return _Checked(number, found, error)
    return _Checked(number, found, None)


def _known_keys(files: list[Path]) -> dict[str, bytes]:
    """Return the keys of the files; without files, those of this installation."""
    from receipts.key_list import read_key_list
    from receipts.keys import key_folder

    if files:
        return {key_id: public for file in files for key_id, public in read_key_list(file).items()}
    folder = key_folder()
    found = {key.key_id: key.public for key in folder.list_keys()}
    if not found:
        raise typer.BadParameter(f"There are no keys in {folder.path}: name a key list.", param_hint="--keys")
    return found


def _read(file: Path, option: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror or error}.", param_hint=option) from None


def _read_payload(file: Path) -> Any:
    from receipts.key_list import reason_of

    try:
        return json.loads(_read(file, "--payload").decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is not JSON: {reason_of(error)}.", param_hint="--payload") from None


def _json_of(folder: KeyFolder, key: Key) -> dict[str, Any]:
    return {**key.published(), "state": folder.state_of(key)}
