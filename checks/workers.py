"""Checks the workers and beat: is every queue consumed and every waiting type known, and do the ticks succeed?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlalchemy.exc import ProgrammingError

from checks.consumer_timeout import DEFAULT_SECONDS, read_consumer_timeouts
from checks.result import Finding, fail, ok, warn
from models.engine import engine
from models.errors import Unreachable
from settings import Settings

PATIENCE_SECONDS: Final = 2.0
LATE_TICKS: Final = 4


def check(settings: Settings) -> Iterator[Finding]:
    from receipts.needed_consumers import needed_consumers  # noqa: PLC0415
    from tasks import broker  # noqa: PLC0415 - a foreign `tasks` package must not stop the other checks
    from tasks.celery import app  # noqa: PLC0415

    consumed = broker.consumed(patience_seconds=PATIENCE_SECONDS)
    if not consumed:
        yield fail("workers", "no worker answers", "start one: `celery -A tasks worker`")
    else:
        yield ok("workers", ", ".join(sorted(consumed)))
        declared = {queue.name for queue in app.conf.task_queues}
        queues = settings.ingest_queues if settings.ingest_queue == "kafka" else ()
        unused = () if list(needed_consumers()) else ("receipts",)
        not_needed = {settings.broker_queue(name) for name in (*queues, *unused)}
        yield from _check_queues(consumed, declared, declared - not_needed)
    yield from _check_types()
    yield _check_beat()
    yield from _check_ticks()
    yield from _check_schedules()
    yield from _check_dead_letters(settings)
    yield from _check_long_handlers(settings)


def _check_queues(
    consumed: dict[str, set[str]], declared: set[str], needed: set[str] | None = None
) -> Iterator[Finding]:
    """`needed` leaves out queues whose wake-ups come from Kafka, whose workers cannot be asked; None means all.

    It also leaves out the queue of the consumers of streams while there are no streams.
    """
    needed = declared if needed is None else needed
    served = set().union(*consumed.values())
    if missing := sorted(needed - served):
        yield fail("queues", f"no worker consumes {', '.join(missing)}", "start one: `celery -A tasks worker`")
    else:
        yield ok("queues", f"{', '.join(sorted(needed))} are consumed")
    if unknown := sorted(served - declared):
        remedy = f"known queues are {', '.join(sorted(declared))}; correct the -Q option of your workers"
        yield warn("queues", f"consumed but unknown: {', '.join(unknown)}", remedy)


def _check_types() -> Iterator[Finding]:
    """Report types of waiting tasks that no live worker can run. That is no failure: any SQL client can cause it."""
    from tasks.core.registered_types import live_workers, unhandled_kinds  # noqa: PLC0415 - as above

    try:
        with engine().connect() as connection:
            live, unhandled = live_workers(connection), unhandled_kinds(connection)
    except ProgrammingError:
        return  # the check of the schema has reported it
    if not live:
        return  # the check of the workers has reported it
    if not unhandled:
        yield ok("types", "live workers know every type that waits")
    for queue, type_ in unhandled:
        remedy = (
            "add the module with its handler to INGEST_HANDLERS of a worker, and restart it; see `manage.py handlers`"
        )
        yield warn("types", f"tasks of the type {type_} wait in {queue}, and no live worker knows it there", remedy)


def _check_beat() -> Finding:
    from tasks.core.tick_intervals import BEAT_SEEN_SECONDS  # noqa: PLC0415 - as above
    from tasks.recovery.tick_rows import BEAT, tick_age  # noqa: PLC0415

    remedy = "start `celery -A tasks beat` and a worker for the queue `system`"
    try:
        with engine().connect() as connection:
            age = tick_age(connection, BEAT)
    except ProgrammingError:
        return warn("beat", "cannot be checked: the ledger has no schema", "run `manage.py migrate`")
    if age is None:
        return warn("beat", "was never seen", remedy)
    if age.total_seconds() > LATE_TICKS * BEAT_SEEN_SECONDS:
        return warn("beat", f"was last seen {age.total_seconds():.0f} s ago", remedy)
    return ok("beat", f"seen {age.total_seconds():.1f} s ago")


def _check_ticks() -> Iterator[Finding]:
    """Report ticks whose last run failed; otherwise their failure would only be in a worker's log."""
    from tasks.recovery.tick_rows import failed_ticks  # noqa: PLC0415 - as above

    try:
        with engine().connect() as connection:
            failed = failed_ticks(connection)
    except ProgrammingError:
        return  # the check of the schema has reported it
    for name, error in failed.items():
        yield fail(f"tick.{name}", f"last run failed: {error}", "see the log of the worker that ran it")
    if not failed:
        yield ok("ticks", "last run succeeded")


def _check_schedules() -> Iterator[Finding]:
    """Report schedules that should run and do not. Pausing one is an operator's decision."""
    from tasks.operations.schedules import ScheduleState, list_schedules  # noqa: PLC0415 - as above

    try:
        with engine().connect() as connection:
            found = list_schedules(connection)
    except ProgrammingError:
        return  # the check of the schema has reported it
    failing = [each for each in found if each.state is ScheduleState.FAILING]
    idle = [each for each in found if each.state is ScheduleState.NO_WORKER]
    for each in failing:
        yield fail(
            "schedules", f"{each.name} cannot be submitted: {each.error}", "it runs as soon as this is corrected"
        )
    for each in idle:
        remedy = "start a worker with its handler; a schedule that is not needed is forgotten after 30 days"
        yield warn("schedules", f"{each.name} does not run: no live worker has its handler", remedy)
    if found and not failing and not idle:
        yield ok("schedules", f"{len(found)} declared")


def _check_dead_letters(settings: Settings) -> Iterator[Finding]:
    """Report a dead-letter queue that differs from the DEAD tasks, as after a broker that has lost its content."""
    from tasks.operations.dead_letter_queue import difference  # noqa: PLC0415 - as above

    try:
        found = difference(engine(), settings)
    except ProgrammingError:
        return  # the check of the schema has reported it
    if found is not None:
        letters, dead = found
        remedy = "wait a minute: the tick `prune` writes the queue again; if it does not, look at the line of the ticks"
        yield warn("dead letters", f"{settings.ingest_dlq_queue} has {letters}, and {dead} tasks are DEAD", remedy)


def _check_long_handlers(settings: Settings) -> Iterator[Finding]:
    """Tell what the log of a worker shows while a handler runs for longer than RabbitMQ waits. It does no harm."""
    from tasks.core.registry import BadHandler, handlers  # noqa: PLC0415 - as above

    if settings.broker_url.partition(":")[0] in ("redis", "rediss"):
        return  # it delivers a message again after an hour, which does no harm
    try:
        known = handlers().values()
    except BadHandler:
        return  # no worker starts with it, and says so
    queues = {each.type: settings.broker_queue(each.queue) for each in known}
    own: dict[str, float] = {}
    default = "unless rabbitmq.conf has another value"
    try:
        own = read_consumer_timeouts(settings.broker_url, set(queues.values()))
    except Unreachable as error:
        default = f"by default; {error.message}"
    long: dict[str, list[str]] = {}
    for each in sorted(known, key=lambda handler: handler.type):
        seconds = own.get(queues[each.type])
        if each.hard_limit_seconds > (seconds or DEFAULT_SECONDS):
            source = "by a policy or an argument of its queue" if seconds else default
            long.setdefault(f"{(seconds or DEFAULT_SECONDS) / 60:g} minutes {source}", []).append(each.type)
    for timeout, types in long.items():
        yield ok(
            "handlers.limits",
            f"{', '.join(types)} may run for longer than the consumer_timeout of RabbitMQ ({timeout}): a worker then"
            " reconnects that often; messages that come again are refused, and nothing runs twice",
        )
