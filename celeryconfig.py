"""All settings of Celery, so that bare `celery beat` and `celery -A tasks …` mean the same. Each line says why.

The broker only wake-ups the bell: a message carries task ids and nothing else, may be lost or come twice, and is presumed
a duplicate until the guard admits it. So these settings prefer "again" over "never", and "soon" over "late".
"""

from __future__ import annotations

from kombu import Exchange, Queue

from settings import current
from tasks.core.celery_program import broker_url as _broker_url
from tasks.core.celery_program import exit_with_message as _exit_with_message
from tasks.core.tick_intervals import BEAT_SEEN_SECONDS, intervals

with _exit_with_message():
    # Said here and not in tasks/celery.py, since bare `celery beat` reads this file alone.
    broker_url = _broker_url()
_is_redis = broker_url.partition(":")[0] in ("redis", "rediss")

# Only JSON, in both directions: a pickled message is code from whoever reached the broker.
accept_content = ["json"]  # what a worker takes from a queue, and whoever asks a worker takes as its answer
result_accept_content = ["json"]  # None would mean accept_content: said, so that changing that one changes one thing
task_serializer = "json"  # what we send
result_serializer = "json"  # answers to `inspect`, too, are sent with it
event_serializer = "json"  # Flower reads these

# Results live in the ledger.
task_ignore_result = True  # no backend, and no work for one
task_store_errors_even_if_ignored = False  # errors, too, are settled in the ledger

# A message is acknowledged when its work is settled, and given back when the process that held it dies.
task_acks_late = True  # a worker that dies has not acknowledged
task_reject_on_worker_lost = True  # else the message of a killed child is acknowledged as failed, and gone
task_acks_on_failure = True  # a failure is settled in the ledger; the broker's copy has done its duty
task_acks_on_timeout = True  # so is a timeout; given back, it would time out for ever
worker_prefetch_multiplier = 1  # one message in hand: waiting ones stay visible and go to whoever is free
worker_cancel_long_running_tasks_on_connection_loss = False  # the duplicate is harmless (guard); killing work is not

# Nothing scheduled sits in a worker's memory: due times live in the ledger, and no ETA outlives a visibility timeout.
task_time_limit = 1800  # below visibility_timeout, or a long task would be delivered again while it runs
task_soft_time_limit = 1740  # a minute to settle the failure before the process is killed

# SIGTERM gives running and prefetched messages back within seconds (with REMAP_SIGTERM=SIGQUIT).
worker_soft_shutdown_timeout = 5.0  # what is nearly done may end; half of the ten seconds that Docker waits
worker_enable_soft_shutdown_on_idle = False  # it would wait for ETA tasks; there are none

# A broker that is away is waited for, always: the default gives up after 100 tries.
broker_connection_retry = True  # a worker outlives a restart of its broker
broker_connection_retry_on_startup = True  # and may be started before it
broker_connection_max_retries = None  # for ever
broker_channel_error_retry = True  # also when only a channel was closed, as by a failover of RabbitMQ
broker_connection_timeout = 5  # a host that swallows packets is tried again soon
broker_heartbeat = 30  # AMQP: notices a silent peer; Redis has health_check_interval
broker_pool_limit = 10  # connections of one publishing process; more would only wait in the broker

if _is_redis:
    broker_transport_options = {
        "visibility_timeout": 3600,  # how long an unacknowledged message waits before another worker gets it
        "unacked_restore_interval": 5,  # look for such messages every 5 s instead of about every 100 s
        "unacked_restore_throttle": 1,  # on each look: the default skips nine of ten
        "health_check_interval": 10,  # a dead connection is noticed without traffic
        "socket_timeout": 15,  # a frozen Redis is an error, not a wait for ever; longer than any blocking read
        "socket_connect_timeout": 5,  # as broker_connection_timeout, which Redis does not read
        "socket_keepalive": True,  # a peer that vanished while idle is noticed by the kernel
        "global_keyprefix": "celeriac:",  # the broker may be shared with others
        "priority_steps": list(range(10)),  # ten priorities, 0 first; publishers translate ours (9 most urgent)
        "queue_order_strategy": "round_robin",  # queues take turns: with "priority" a full `ingest` starves `system`
    }
    _queue_arguments = {}  # Redis has lists, and nothing to choose
else:
    broker_transport_options = {
        "confirm_publish": True,  # without it a publish into a full or closing RabbitMQ is lost in silence
        "connect_timeout": 5,  # as above
        "read_timeout": 60,  # twice the heartbeat
        "write_timeout": 15,  # a RabbitMQ that blocks publishers (alarm) is an error that the ledger survives
    }
    _queue_arguments = {"x-queue-type": "quorum"}  # replicated and on disk; classic mirrored queues are gone
    task_default_queue_type = "quorum"  # for queues that Celery itself would declare
    worker_detect_quorum_queues = True  # they refuse a global prefetch: the worker then asks for one per consumer

_exchange = Exchange("celeriac", type="direct", durable=True)
# Work and ticks apart, so that a full work queue never delays the relay. The dead-letter queue is not here on purpose:
# a worker without -Q consumes every queue in this list.
task_queues = [
    Queue(name, _exchange, routing_key=name, durable=True, queue_arguments=_queue_arguments)
    for name in dict.fromkeys((*current().ingest_queues, "system"))
]
task_default_queue = "ingest"  # what has no route is work, not a tick
task_default_exchange = "celeriac"  # Celery's default would be an exchange named after the queue
task_default_routing_key = "ingest"  # queues without a key of their own would all bind to this one
task_create_missing_queues = False  # a misspelt queue is an error, not a place where messages wait for ever
task_routes = {  # the first match counts
    "tasks.ingest": {"queue": "ingest", "routing_key": "ingest"},
    "tasks.*": {"queue": "system", "routing_key": "system"},
    "outbox.*": {"queue": "system", "routing_key": "system"},
    "receipts.*": {"queue": "system", "routing_key": "system"},
}

# Flower and `celery events` see the workers. Events carry ids: messages have nothing else in them.
worker_send_task_events = False  # three messages for each; Flower asks the workers for them while it runs
task_send_sent_event = False  # a second message for each; what no worker has taken yet is in the ledger

worker_hijack_root_logger = False  # LOG_FORMAT is ours (tasks/celery.py)
worker_redirect_stdouts = False  # what a handler prints stays what it printed
enable_utc = True  # `expires` is compared between machines
timezone = "UTC"  # a day of 23 hours would move ticks
imports = ("tasks.celery_tasks", "tasks.worker")  # `-A tasks` alone does not find the tasks

# Ticks expire with their interval: while no system worker runs, they do not pile up.
beat_scheduler = "celery.beat:Scheduler"  # needs no file: what was last run is in the ledger
beat_max_loop_interval = 1  # a clock that was set back delays a tick by a second, not by minutes
beat_schedule = {  # every tick may be sent twice or not at all
    name: {"task": task, "schedule": seconds, "options": {"expires": seconds, "ignore_result": True}}
    for name, task, seconds in (
        ("beat-seen", "tasks.beat_seen", BEAT_SEEN_SECONDS),
        ("relay", "outbox.relay", intervals()["relay"]),
        ("reclaim", "tasks.reclaim", intervals()["reclaim"]),
        ("prune", "tasks.prune", intervals()["prune"]),
    )
}
