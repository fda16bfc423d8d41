"""The doctor: looks at everything that Celeriac stands on, in order, and says what to do where it is not right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from checks import kafka, ledger, project, servers, workers
from checks.result import Finding, fail
from models.errors import CeleriacError
from settings import Settings, SettingsError

CHECKS: tuple[tuple[str, Callable[[Settings], Iterable[Finding]]], ...] = (
    ("project", project.check),
    ("ledger", ledger.check),
    ("broker", servers.check_broker),
    ("kafka", kafka.check),
    ("receipts", servers.check_receipts),
    ("workers", workers.check),
)


def examine(settings: Settings) -> Iterator[Finding]:
    """One after the other; a subject that cannot be looked at is a finding, and the others are still looked at."""
    for subject, check in CHECKS:
        try:
            yield from check(settings)
        except SettingsError as error:
            yield fail(subject, error.message, "")
        except CeleriacError as error:
            yield fail(subject, error.message, "make the server reachable, or correct its address")
        except Exception as error:  # a doctor who faints is no help; clients of servers raise errors of many kinds
            reason = str(error).partition("\n")[0] or type(error).__name__
            yield fail(subject, f"could not be looked at: {reason}", "see the other lines")
