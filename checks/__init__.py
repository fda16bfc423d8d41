"""The checks of `manage.py check`: look at everything that Celeriac depends on, and say how to fix what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from checks import destinations, kafka, ledger, project, receipts, servers, sinks, workers
from checks.result import Finding, fail
from models.errors import CeleriacError
from settings import Settings, SettingsError

CHECKS: tuple[tuple[str, Callable[[Settings], Iterable[Finding]]], ...] = (
    ("project", project.check),
    ("ledger", ledger.check),
    ("broker", servers.check_broker),
    ("kafka", kafka.check),
    ("destinations", destinations.check),
    ("sinks", sinks.check),
    ("receipts", servers.check_receipts),
    ("receipts", receipts.check),
    ("workers", workers.check),
)


def run_checks(settings: Settings) -> Iterator[Finding]:
    """Yield the findings of all checks. A check that fails to run is a finding itself, and the others still run."""
    for subject, check in CHECKS:
        try:
            yield from check(settings)
        except (CeleriacError, SettingsError) as error:
            yield fail(subject, error.message, error.remedy)
        except Exception as error:  # clients of servers raise many kinds of errors
            reason = str(error).partition("\n")[0] or type(error).__name__
            yield fail(subject, f"could not be checked: {reason}", "see the other lines")
