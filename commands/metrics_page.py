"""The page docs/metrics.md, generated from the metrics themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import metrics

HEAD: Final = """# Metrics

`make docs` generates this page; a test fails if it is out of date.

## The installation

`/metrics` of the API shows the whole installation. Counters come from a tally in the ledger: settling a task counts
it in the same transaction, so the numbers are exact, survive restarts and never fall. Deliveries that settle nothing
(`skipped`, `not_due`), publishes and reclaims are counted in each process and appended once a second; a process that
is killed loses its last second of them. Histograms follow within five seconds, when a tick has folded the tally.
Gauges are read from PostgreSQL and the broker when the page is asked for. Every process of the API answers with the
same numbers: let Prometheus scrape one of them.

"""
PROGRAMS: Final = """
## One program

Workers, the relay and the API serve their own metrics on `METRICS_HOST`, each on its port: `WORKER_METRICS_PORT`,
`API_METRICS_PORT`. They are right across the child processes of a worker, and start from zero with the program.

"""
CELERY: Final = """
## The names of celery-exporter

With `METRICS_CELERY_NAMES=true` the API also shows the names of
[celery-exporter](https://github.com/danihodovic/celery-exporter), so that its dashboards work. They choose series by
the name of the job: give Prometheus a second job `celery-exporter` with the same address.

| | Metrics | Labels |
|---|---|---|
| attempts that succeeded, left the task DEAD, are repeated, discarded the task | `celery_task_succeeded_total`, \
`celery_task_failed_total`, `celery_task_retried_total`, `celery_task_revoked_total` | `name`, `queue_name` |
| attempts; each is counted when it has ended, so the three are equal | `celery_task_sent_total`, \
`celery_task_received_total`, `celery_task_started_total` | `name`, `queue_name` |
| time in the handler | `celery_task_runtime` | `name`, `queue_name` |
| messages in a queue of the broker | `celery_queue_length` | `queue_name` |
| workers for tasks, as they are registered in the ledger, and what they run | `celery_worker_up`, \
`celery_worker_tasks_active` | `hostname` |
| live workers and their processes | `celery_active_worker_count`, `celery_active_process_count` | `queue_name` |

`name` is the type of a task. There is no label `exception`: `manage.py stats` counts failures by their error code.
"""


def metrics_page() -> str:
    """Return the text of docs/metrics.md."""
    return f"{HEAD}{_table(_of_installation())}{PROGRAMS}{_table(_of_programs())}{CELERY}"


def _table(rows: Iterator[tuple[str, str, tuple[str, ...], str]]) -> str:
    lines = ["| Metric | Kind | Labels | Meaning |", "|---|---|---|---|"]
    for name, kind, labels, meaning in sorted(rows):
        lines.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _of_installation() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    from tasks.operations.installation_metrics import COUNTERS, GAUGES, HISTOGRAMS  # noqa: PLC0415 - loads Celery

    for name, (meaning, labels) in COUNTERS.items():
        yield f"{name}_total", "counter", labels, meaning
    for name, (meaning, labels) in HISTOGRAMS.items():
        yield name, "histogram", labels, meaning
    for name, (meaning, labels) in GAUGES.items():
        yield name, "gauge", labels, meaning


def _of_programs() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    for metric in metrics.all_metrics():
        described: Any = next(iter(metric.describe()))
        name = f"{described.name}_total" if described.type == "counter" else described.name
        yield name, described.type, tuple(metric._labelnames), described.documentation
