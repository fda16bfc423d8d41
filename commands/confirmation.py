"""Ask before changing or deleting many things, and name the operator for the ledger."""

from __future__ import annotations

import getpass
import socket
import sys
from contextlib import redirect_stdout

import typer

from commands.complaint import complain


def confirm(question: str, *, remedy: str, as_json: bool) -> None:
    """Ask on a terminal, and exit unless the answer is yes. Without a terminal, print the remedy and exit with 2."""
    if not sys.stdin.isatty():
        complain(f"Nothing was changed: {remedy}")
        raise typer.Exit(2)
    # With --json, stdout is for the result only. confirm(err=True) would still print a space there.
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        typer.confirm(question, abort=True)


def operator() -> str:
    """Return who runs the command: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
