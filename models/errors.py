"""Every error of Celeriac: a sentence, a code, and what the two doors answer.

The docstring of a class is its message when it is raised without one. `code` is what JSON carries and what the ledger
stores in `error_code`; `http_status` is what the API answers; `exit_code` is what `manage.py` returns (0 done,
1 failed, 2 misuse, 3 a server is unreachable). Nothing else in the project maps errors to numbers, but for
`settings.SettingsError`, which has the same three attributes and lives with what raises it, left of this package.
"""

from __future__ import annotations

from typing import ClassVar


class CeleriacError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())

    @property
    def message(self) -> str:
        return str(self.args[0])


class Misuse(CeleriacError):
    """The request cannot be understood as it was given."""

    code = "misuse"
    http_status = 400
    exit_code = 2


class Unreachable(CeleriacError):
    """A server did not answer."""

    code = "unreachable"
    http_status = 503
    exit_code = 3


class SchemaMismatch(CeleriacError):
    """The schema of the database is not the one this code was written for: run `manage.py migrate`."""

    code = "schema_mismatch"
    http_status = 503


class LedgerBusy(CeleriacError):
    """Another transaction holds a lock that this one needs; try again when it has ended."""

    code = "ledger_busy"
    http_status = 503


class LeaseLost(CeleriacError):
    """The lease of this task ran out or was taken over by another holder; nothing more may be written in its name."""

    code = "lease_lost"
    http_status = 409
