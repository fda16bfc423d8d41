"""Every command of `manage.py`: its name, the module that defines it, and its line in `manage.py --help`.

`--help` needs only this list, so it imports no command. A test compares each line with the command's own help.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Listed(NamedTuple):
    """A command that is not imported yet."""

    module: str
    summary: str


COMMANDS: Final = {
    "up": Listed(
        "stack", "Start the servers, workers, beat, API and Flower, and follow their logs. Ctrl-C stops everything."
    ),
    "down": Listed("stack", "Stop everything that `up` started."),
    "ps": Listed(
        "stack", "List the parts of the stack: programs and servers, with their addresses and where each login is kept."
    ),
    "env": Listed("stack", "Print the addresses of the stack as shell exports. They contain its passwords."),
    "migrate": Listed("migrate", "Migrate to the latest schema. Safe to run concurrently."),
    "check": Listed(
        "check", "Check servers, schema, durability, clocks, workers and beat, and say how to fix what is wrong."
    ),
    "config": Listed("config", "Print every setting, its value and its source. Passwords are not shown."),
    "handlers": Listed(
        "handlers",
        "List the task types that workers know: their queue, attempts, batch, priority, limits, and the live workers.",
    ),
    "submit": Listed("submit", "Submit a task; with --lines, one task per line of JSON."),
    "tasks": Listed("tasks", "List tasks, the latest change first."),
    "show": Listed("show", "Show a task: its state, its history, its messages, and why it is not running."),
    "stats": Listed(
        "stats",
        "Count tasks by status, queue and type, show the age of the oldest due task, and list the latest changes.",
    ),
    "requeue-dead": Listed("dead_tasks", "Run dead tasks again."),
    "discard-dead": Listed("dead_tasks", "Give up dead tasks."),
    "discard": Listed("dead_tasks", "Cancel a task, even while it runs."),
    "retry-now": Listed(
        "dead_tasks", "Run a task now that waits for its next attempt, is scheduled for later, or is dead."
    ),
    "recover": Listed(
        "sinks", "Finish transactions in two-phase sinks that a lost worker has left. Beat does the same regularly."
    ),
    "ingest": Listed("documents", "Alias of `documents add`."),
    "search": Listed("documents", "Alias of `documents search`."),
    "reclaim": Listed("reclaim", "Recover the tasks of lost workers and tasks whose message was lost, until Ctrl-C."),
    "rebuild-broker": Listed(
        "reclaim", "Fill an empty broker: send a message for every due task, and restore the dead-letter queue."
    ),
    "queues": Listed(
        "queues",
        "List the queues: messages in the broker, due and running tasks, pauses, alerts, workers, "
        "and the dead letters.",
    ),
    "pause": Listed(
        "queues", "Let no further task of a queue start, until `resume`. Tasks that run are not interrupted."
    ),
    "resume": Listed("queues", "End the pauses of a queue, and wake its due tasks."),
    "scale": Listed(
        "queues", "Set the number of processes of each prefork worker that consumes the queue, now and after restarts."
    ),
    "relay": Listed("relay", "Publish due outbox events until Ctrl-C."),
    "worker": Listed(
        "worker", "Run tasks until Ctrl-C, with Celery's worker, or with `kafka-worker` if INGEST_QUEUE=kafka."
    ),
    "kafka-worker": Listed("kafka_worker", "Run tasks until Ctrl-C. Needs INGEST_QUEUE=kafka."),
    "demo": Listed(
        "demo",
        "Run tasks on temporary servers while a worker is killed and the broker loses its messages; count the effects.",
    ),
    "drill": Listed(
        "drill",
        "Take a part of the running development stack away, show what waits, bring it back, and print what was kept.",
    ),
    "schedules": Listed(
        "schedules", "List what runs periodically: rule, state, next run, and the task of the last run."
    ),
    "sinks": Listed("sinks", "List the sinks of SINKS: guarantee, conditions, health, and transactions in doubt."),
    "receipts": Listed(
        "receipts", "Show the switches and the streams of receipts: what waits to be saved, and who saves it."
    ),
    "documents": Listed("documents", "Documents: add, list, search and delete them."),
    "outbox": Listed("outbox", "Count the events that wait, by destination. With --status, list events, newest first."),
    "console": Listed("console", "Log in to the web console: print a link that works once."),
    "token": Listed("token", "Create, list and revoke API tokens."),
    "bench": Listed("bench", "Compare the speed with other systems and with bare SQL, on temporary servers."),
    "chaos": Listed("chaos", "Let processes die on purpose, on temporary servers, and count the effects."),
}
