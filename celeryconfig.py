"""All settings of Celery, each with its reason. Both `celery beat` and `celery -A tasks …` read this file.

The broker only carries wake-ups: a message holds task ids and nothing else, may be lost or arrive twice, and runs
nothing unless the claim in the ledger succeeds. So these settings prefer a duplicate message to a lost one.
"""

from __future__ import annotations

from kombu import Exchange, Queue

from settings import current
from tasks.core.celery_program import broker_url as _broker_url
from tasks.core.celery_program import exit_with_message as _exit_with_message
from tasks.core.tick_intervals import BEAT_SEEN_SECONDS, CONSUME_SECONDS, intervals

with _exit_with_message():
    # Set here and not in tasks/celery.py, because `celery beat` without -A reads this file only.
    broker_url = _broker_url()
_installation = current().ledger_schema  # names everything in the broker, so that installations can share one
_queue = current().broker_queue
_is_redis = broker_url.partition(":")[0] in ("redis", "rediss")

# Only JSON: with pickle, a client that can write to the broker could run code in the workers.
accept_content = ["json"]  # for messages, and for the answers of workers to `inspect`
result_accept_content = ["json"]  # the default is accept_content; stated, so that it does not change with it
task_serializer = "json"  # for the messages that we send
result_serializer = "json"  # workers use it for their answers to `inspect`
event_serializer = "json"  # Flower reads these

# Results are stored in the ledger.
task_ignore_result = True  # there is no result backend
task_store_errors_even_if_ignored = False  # errors are stored in the ledger as well

# A message is acknowledged when its tasks are settled, and returned to the queue when its worker dies.
task_acks_late = True  # a worker that dies has not acknowledged
task_reject_on_worker_lost = True  # otherwise the message of a killed child process is acknowledged and gone
task_acks_on_failure = True  # the failure is in the ledger; the message is not needed any more
task_acks_on_timeout = True  # the same; returned to the queue, the message would time out again and again
worker_prefetch_multiplier = 1  # messages wait in the queue, where they are visible and any free worker gets them
worker_cancel_long_running_tasks_on_connection_loss = False  # a duplicate message is harmless; killing work is not

# A handler's own limits are the only ones (tasks/execution/time_limits.py), and may be hours: a limit per message would
# kill a handler that was promised more. A message that is delivered again meanwhile is refused by the claim.
task_time_limit = None  # the worker's main process kills a handler that never lets another thread run
task_soft_time_limit = None

# With REMAP_SIGTERM=SIGQUIT, SIGTERM returns running and prefetched messages to the queue within seconds.
worker_soft_shutdown_timeout = 5.0  # lets tasks finish that are nearly done; Docker waits ten seconds
worker_enable_soft_shutdown_on_idle = False  # it would wait for tasks with an ETA; there are none

# A worker waits for an unreachable broker without end: by default it gives up after 100 tries.
broker_connection_retry = True  # a worker survives a restart of its broker
broker_connection_retry_on_startup = True  # a worker may be started before its broker
broker_connection_max_retries = None  # retry forever
broker_channel_error_retry = True  # also if only a channel was closed, as by a failover of RabbitMQ
broker_connection_timeout = 5  # a host that drops packets is retried soon
broker_heartbeat = 30  # AMQP: detects a silent peer; for Redis see health_check_interval
broker_pool_limit = 10  # connections of one publishing process; more would not publish faster

if _is_redis:
    broker_transport_options = {
        "visibility_timeout": 3600,  # time until an unacknowledged message is delivered to another worker
        "unacked_restore_interval": 5,  # check for such messages every 5 s instead of about every 100 s
        "unacked_restore_throttle": 1,  # at each interval; the default skips nine of ten
        "health_check_interval": 10,  # detects a dead connection without traffic
        "socket_timeout": 15,  # a frozen Redis is an error instead of an endless wait; longer than any blocking read
        "socket_connect_timeout": 5,  # the Redis transport does not read broker_connection_timeout
        "socket_keepalive": True,  # the kernel detects a peer that vanished while idle
        "global_keyprefix": f"{_installation}:",  # the Redis may be shared with others
        "priority_steps": list(range(10)),  # ten priorities, 0 first; publishers convert ours, where 9 is first
        "queue_order_strategy": "round_robin",  # with "priority", a full `ingest` queue would starve `system`
    }
    _queue_arguments = {}
else:
    broker_transport_options = {
        "confirm_publish": True,  # without it a full or closing RabbitMQ loses messages silently
        "connect_timeout": 5,  # as broker_connection_timeout
        "read_timeout": 60,  # twice the heartbeat
        "write_timeout": 15,  # a RabbitMQ that blocks publishers (alarm) is an error, and the outbox retries
    }
    _queue_arguments = {"x-queue-type": "quorum"}  # replicated and on disk; RabbitMQ has no mirrored classic queues
    task_default_queue_type = "quorum"  # for queues that Celery declares itself
    worker_detect_quorum_queues = True  # quorum queues reject a global prefetch; Celery then sets it per consumer

_exchange = Exchange(_installation, type="direct", durable=True)
# Ticks have a queue of their own, so that a full task queue does not delay the relay. So have the consumers of streams,
# which run for long and need a worker of their own (`-Q receipts`). The dead-letter queue must not be in this list: a
# worker without -Q consumes every queue in it.
task_queues = [
    Queue(_queue(name), _exchange, routing_key=_queue(name), durable=True, queue_arguments=_queue_arguments)
    for name in dict.fromkeys((*current().ingest_queues, "system", "receipts"))
]
task_default_queue = _queue("ingest")  # for messages without a route
task_default_exchange = _installation  # Celery's default would be an exchange named after the queue
task_default_routing_key = _queue("ingest")  # the routing key of the default queue
task_create_missing_queues = False  # a misspelt queue is an error, instead of a new queue without a consumer
control_exchange = _installation  # `inspect` and Flower reach the workers of this installation only
event_exchange = f"{_installation}.events"
event_queue_prefix = f"{_installation}.events"
task_routes = {  # the first match wins
    "tasks.ingest": {"queue": _queue("ingest"), "routing_key": _queue("ingest")},
    "tasks.*": {"queue": _queue("system"), "routing_key": _queue("system")},
    "outbox.*": {"queue": _queue("system"), "routing_key": _queue("system")},
    "receipts.tick": {"queue": _queue("system"), "routing_key": _queue("system")},
    "receipts.*": {"queue": _queue("receipts"), "routing_key": _queue("receipts")},
}

# Events for Flower and `celery events` are about the tasks of the ledger (tasks/execution/task_events.py).
worker_send_task_events = False  # Flower switches them on when it starts
task_annotations = {"*": {"send_events": False}}  # Celery's own would be about wake-ups and ticks, and always green
task_send_sent_event = False  # one more event per message; the ledger knows which tasks are waiting

worker_hijack_root_logger = False  # tasks/celery.py configures logging, for LOG_FORMAT
worker_redirect_stdouts = False  # what a handler prints goes to stdout, not to the log
enable_utc = True  # `expires` is compared between machines
timezone = "UTC"  # ticks must not shift with daylight saving time
imports = ("tasks.celery_tasks", "tasks.worker", "receipts.celery_tasks")  # `-A tasks` does not import these

# Ticks expire after their interval, so that they do not pile up while no worker consumes the system queue.
beat_scheduler = "tasks.beat:TickScheduler"  # needs no file: the ledger records when each tick last ran
beat_max_loop_interval = 1  # a clock that is set back delays a tick by a second, not by minutes
beat_schedule = {  # a tick may be sent twice or get lost; both are harmless
    name: {"task": task, "schedule": seconds, "options": {"expires": seconds, "ignore_result": True}}
    for name, task, seconds in (
        ("beat-seen", "tasks.beat_seen", BEAT_SEEN_SECONDS),
        ("relay", "outbox.relay", intervals()["relay"]),
        ("reclaim", "tasks.reclaim", intervals()["reclaim"]),
        ("tally", "tasks.tally", intervals()["tally"]),
        ("prune", "tasks.prune", intervals()["prune"]),
        ("schedules", "tasks.schedules", intervals()["schedules"]),
        ("receipts", "receipts.tick", CONSUME_SECONDS),
    )
}
