"""Announce what was committed about tasks: to Flower, in the log, and to receivers of Celery's signals.

An exception of a handler lives until its announcement ends. `drop_errors` then forgets it, because its traceback keeps
all variables of the handler alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tasks.core.outcomes import Dead, Outcome, Retry
from tasks.core.task import Task
from tasks.execution.celery_signals import send_outcomes
from tasks.execution.outcome_log import log_outcomes
from tasks.execution.task_events import report_settled


def announce(
    settled: Mapping[Task, Outcome], followed: Collection[Task], seconds: Mapping[Task, float] | None = None
) -> None:
    """Announce outcomes after their commit. `followed` are the tasks that Flower shows."""
    report_settled(settled, followed, seconds)
    log_outcomes(settled)
    send_outcomes(settled, seconds)


def drop_errors(outcomes: Iterable[Outcome]) -> None:
    """Forget the exceptions of failed attempts."""
    for outcome in outcomes:
        if isinstance(outcome, Retry | Dead):
            outcome.failure.raised.drop()
