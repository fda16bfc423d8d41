"""The errors that users see: a message, a code, and what HTTP and the command line answer.

The first line of a class's docstring is its message when it is raised without one. The next paragraph says when it
happens, and `remedy` says what to do; docs/messages.md is generated from all three. `code` is for programs: JSON has
it, and the ledger stores it in `error_code`. `http_status` is the API's answer, `exit_code` that of `manage.py`: 0
done, 1 failed, 2 wrong input, 3 a server is unreachable. No other module maps errors to numbers. `SettingsError` has
the same attributes; it is in `home_files.py`, because settings.py must not import this package.
"""

from __future__ import annotations

from typing import ClassVar


def shorten(given: object, limit: int = 100) -> str:
    """Return the representation of a value for a message, cut after some characters."""
    text = given if isinstance(given, str) else repr(given)
    return repr(text if len(text) <= limit else f"{text[:limit]}…")


class CeleriacError(Exception):
    """Something went wrong.

    An unexpected failure inside Celeriac.
    """

    code: ClassVar[str] = "internal"
    remedy: ClassVar[str] = "Read the traceback in the log of the process that failed, and report it if it is a bug."
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").partition("\n\n")[0].strip())

    @property
    def message(self) -> str:
        return str(self.args[0])


class Misuse(CeleriacError):
    """The request is invalid.

    An argument, option, parameter or header is missing or has a value that is not allowed.
    """

    code = "misuse"
    remedy = "Correct the value that the message names. Repeating the request unchanged fails again."
    http_status = 400
    exit_code = 2


class Unreachable(CeleriacError):
    """A server did not answer.

    PostgreSQL, Redis, RabbitMQ or Kafka is stopped, restarting, or not at the configured address.
    """

    code = "unreachable"
    remedy = "Start the server or correct its address (`manage.py check` shows which), then try again."
    http_status = 503
    exit_code = 3


class SchemaMismatch(CeleriacError):
    """The database schema does not fit this version of Celeriac: run `manage.py migrate`.

    The database was not migrated yet, or a newer version of Celeriac migrated it.
    """

    code = "schema_mismatch"
    remedy = "Run `manage.py migrate`. If the database is newer than the code, upgrade the code."
    http_status = 503


class LedgerBusy(CeleriacError):
    """Another transaction holds a lock that is needed here; try again.

    A long transaction, a migration or another submit of the same key holds the lock, two transactions deadlocked, or
    all connections of this process are in use.
    """

    code = "ledger_busy"
    remedy = "Try again. If it persists, look for long transactions in `pg_stat_activity`."
    http_status = 503


class LeaseLost(CeleriacError):
    """The lease of this task expired or another holder has it; nothing more may be written for it.

    The worker was suspended, cut off from PostgreSQL, or overloaded for longer than INGEST_LEASE_SECONDS.
    """

    code = "lease_lost"
    remedy = "Nothing: the task runs again. If it happens often, raise INGEST_LEASE_SECONDS or lower the worker's load."
    http_status = 409
