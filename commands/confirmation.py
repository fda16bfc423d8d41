"""Before something is done to everything: ask on a terminal; without one, say which word is missing and exit 2."""

from __future__ import annotations

import getpass
import socket
import sys
from contextlib import redirect_stdout

import typer

from commands.output import complain


def require_consent(question: str, *, chosen: bool, everything: bool, as_json: bool = False) -> None:
    """A filter or `--all` is consent; otherwise somebody must answer. Stdout is a program's if it gets JSON."""
    if chosen or everything:
        return
    if sys.stdin.isatty():
        with redirect_stdout(sys.stderr if as_json else sys.stdout):  # `err=True` leaves a space on stdout
            typer.confirm(question, abort=True)
        return
    complain("Nothing was changed: give a filter, or --all for all of them.")
    raise typer.Exit(2)


def operator() -> str:
    """Who did it, for the ledger: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
