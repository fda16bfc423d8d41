"""Distribute the test files over the processes of pytest-xdist.

Files that take long come first: otherwise one process would still run a long file while the others have nothing to do.
Files that need RabbitMQ are one unit, so that one process starts it and not each of them; it takes 8 s of a processor.
So are the files that need the whole stack, which takes more.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

RABBITMQ: Final = "files that need RabbitMQ"
# The first ones do not need it themselves: it starts while they run.
WITH_RABBITMQ: Final = (
    "tests/tasks/test_worker_metrics.py",
    "tests/tasks/operations/test_why_waiting.py",
    "tests/tasks/operations/test_dead_tasks.py",
    "tests/tasks/test_broker.py",
    "tests/tasks/test_messages.py",
    "tests/tasks/test_worker_events.py",
    "tests/tasks/test_survival.py",
    "tests/tasks/test_installations.py",
    "tests/tasks/test_long_handlers.py",
    "tests/checks/test_consumer_timeout.py",
    "tests/outbox/publishers/test_amqp.py",
    "tests/outbox/publishers/test_celery.py",
    "tests/outbox/publishers/test_contract.py",
)
STACK: Final = "files that need the whole stack"
# The first one starts it, the last one stops it.
WITH_STACK: Final = ("tests/test_up_and_down.py", "tests/chaos/test_drill.py", "tests/test_down.py")
UNITS: Final = {RABBITMQ: WITH_RABBITMQ, STACK: WITH_STACK}
LONGEST_FIRST: Final = (
    STACK,
    RABBITMQ,
    "tests/console/test_in_browser.py",
    "tests/tasks/test_workers.py",
    "tests/tasks/test_async_workers.py",
    "tests/tasks/test_pools.py",
    "tests/tasks/test_levers.py",
    "tests/tasks/test_flower.py",
    "tests/tasks/test_outages.py",
    "tests/api/test_real_workers.py",
    "tests/tasks/test_schedules.py",
    "tests/tasks/kafka/test_kafka_stack.py",
    "tests/tasks/operations/test_installation_metrics.py",
    "tests/deploy/test_dashboard.py",
    "tests/deploy/test_own_image.py",
    "tests/tasks/execution/test_task_machine.py",
    "tests/chaos/test_sinks.py",
    "tests/test_handlers_page.py",
    "tests/outbox/test_lease_races.py",
    "tests/sinks/test_crashes.py",
    "tests/receipts/test_crashes.py",
    "tests/receipts/test_celery_tasks.py",
    "tests/test_compose_runs.py",
    "tests/tasks/kafka/test_kafka_kills.py",
    "tests/tasks/execution/test_key_machine.py",
    "tests/outbox/test_lease_machine.py",
    "tests/tasks/test_celery_programs.py",
    "tests/commands/test_dead_tasks.py",
    "tests/commands/test_commands.py",
    "tests/tasks/execution/test_key_order.py",
    "tests/outbox/test_lease_deadlocks.py",
)


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    """Gives a process the next file when it has almost finished the one before."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    return LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files. The tests of a file keep their order."""
    size: dict[str, int] = {}
    for item in items:
        size[unit_of(item.nodeid)] = size.get(unit_of(item.nodeid), 0) + 1
    items.sort(key=lambda item: _place(item.nodeid, size))


def unit_of(nodeid: str) -> str:
    """Return what is given to one process as a whole: a file, or all files that need the same servers."""
    file = nodeid.partition("::")[0]
    return next((unit for unit, files in UNITS.items() if file in files), file)


def _place(nodeid: str, size: dict[str, int]) -> tuple[int, int, str, int]:
    file, unit = nodeid.partition("::")[0], unit_of(nodeid)
    rank = LONGEST_FIRST.index(unit) if unit in LONGEST_FIRST else len(LONGEST_FIRST)
    return rank, -size[unit], unit, UNITS[unit].index(file) if unit in UNITS else 0
