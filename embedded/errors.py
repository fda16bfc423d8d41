"""Errors of the embedded stack that do not belong to one program."""

from __future__ import annotations

from models.errors import CeleriacError


class Interrupted(CeleriacError):
    """The start was interrupted; everything was stopped again.

    Ctrl-C or SIGTERM arrived before all programs of the stack were ready.
    """

    code = "interrupted"
    remedy = "Run `manage.py up` again."
