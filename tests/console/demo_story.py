"""What the pictures of the single pages show: a task that died, a workflow, documents, schedules and their like.

It is written with SQL into the ledger of `demo_ledger.py`, because it is to look as if it had happened over a day.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

from sqlalchemy import Connection

from console.dead_letters import path_of
from documents import task_key
from documents.store import TYPE as DOCUMENT
from models.sql import sql
from tasks.core.task_ids import keyed_id
from tasks.operations.dead_groups import GroupKey
from workflows import TYPE as WORKFLOW

DESTINATIONS: Final = {
    "orders": "https://orders.example/events",
    "billing-webhook": "https://billing.example/hook",
    "celeriac-receipts": "https://audit.example/receipts",
}
TRACEBACK: Final = """Traceback (most recent call last):
  File "tasks/execution/call_handler.py", line 53, in call_handler
    result = claim.soft_limit.call(handler.function, given)
  File "shop/crm.py", line 41, in sync
    customer = task.step("fetch", fetch_customer, task.payload["customer"])
  File "shop/crm.py", line 23, in fetch_customer
    answer.raise_for_status()
requests.exceptions.HTTPError: 503 Server Error for url: https://crm.example/customers/4711
"""
# Type, queue, error, how many died of it, and over how many hours.
DEATHS: Final = (
    ("crm.sync", "crm", "handler_error", "503 Server Error for url: https://crm.example/customers/{}", 14, 20),
    ("crm.sync", "crm", "timeout", "The handler did not end within its soft limit of {} s.", 5, 7),
    ("mail.send", "mail", "permanent", "The mailbox customer-{}@mail.example does not exist.", 9, 22),
    ("invoice.import", "ingest", "worker_lost", "The process {} was killed while it ran the task.", 2, 3),
)
DEAD: Final = sql("""
    INSERT INTO ledger.ingest_task (id, type, queue, payload, status, attempt_count, error_code, error_message,
        error_fingerprint, last_error, created_at, updated_at, finished_at)
    SELECT gen_random_uuid(), :type, :queue, jsonb_build_object('customer', 4700 + n), 'DEAD', 3, :code,
        replace(:message, '{}', (4700 + n)::text), ledger.ingest_error_fingerprint(:code, :message),
        :traceback, died_at - interval '40 minutes', died_at, died_at
    FROM generate_series(1, :count) AS n CROSS JOIN LATERAL (
        SELECT ledger.ledger_now() - make_interval(secs => 240 + 3600 * :hours * power(n / CAST(:count AS float8), 2))
    ) AS at(died_at)
""")
TASK: Final = sql("""
    INSERT INTO ledger.ingest_task (id, type, queue, payload, context, status, idempotency_key, partition_key, key_seq,
        attempt_count, max_attempts, error_code, error_message, error_fingerprint, last_error, result,
        next_retry_at, lease_token, last_wakeup_at, created_at, updated_at, finished_at)
    SELECT :id, :type, :queue, CAST(:payload AS jsonb), CAST(:context AS jsonb), :status, :key, :partition_key,
        CASE WHEN CAST(:partition_key AS text) IS NOT NULL THEN 12 END, :attempts, 3, :code, :message,
        ledger.ingest_error_fingerprint(:code, :message), :traceback,
        CAST(:result AS jsonb), CASE WHEN :status = 'RETRYING' THEN at + interval '4 minutes' END,
        CASE WHEN :status = 'RUNNING' THEN CAST(:id AS uuid) END, changed,
        changed - make_interval(secs => 60 * :age), changed,
        CASE WHEN :status IN ('DEAD', 'SUCCEEDED') THEN changed END
    FROM (SELECT ledger.ledger_now() AS at, ledger.ledger_now() - make_interval(secs => 60 * :ago) AS changed) AS clock
""")
TRANSITION: Final = sql("""
    INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor,
        created_at)
    SELECT id, :before, :after, :attempts, :message, :actor, created_at + make_interval(secs => :seconds)
    FROM ledger.ingest_task WHERE id = :id
""")
# The history of the dead task: status, failures so far, what was said, by whom, seconds after the submit.
HISTORY: Final = (
    (None, "QUEUED", 0, None, "api:shop", 0),
    ("QUEUED", "RUNNING", 0, None, "web-2:3984", 0.4),
    ("RUNNING", "RETRYING", 1, "503 Server Error for url: https://crm.example/customers/4711", "web-2:3984", 31),
    ("RETRYING", "RUNNING", 1, None, "web-2:3985", 93),
    ("RUNNING", "RETRYING", 2, "The handler did not end within its soft limit of 120 s.", "web-2:3985", 214),
    ("RETRYING", "RUNNING", 2, None, "web-2:3984", 451),
    ("RUNNING", "DEAD", 3, "503 Server Error for url: https://crm.example/customers/4711", "web-2:3984", 482),
)
LEASE: Final = sql("""
    INSERT INTO ledger.task_lease (token, holder, lease_until, task_ids, type, queue, priority, claimed_at)
    SELECT lease_token, 'web-1:4131-worker', ledger.ledger_now() + interval '1 hour', ARRAY[id], type, queue, 5,
        updated_at
    FROM ledger.ingest_task WHERE id = :id AND status = 'RUNNING'
""")
STEP: Final = sql("""
    INSERT INTO ledger.task_step (task_id, name, result, created_at)
    VALUES (:id, :name, CAST(:result AS jsonb), ledger.ledger_now() - make_interval(secs => 60 * :ago))
""")
STATEMENTS: Final = (
    """INSERT INTO ledger.task_type (type, queue, max_attempts, batch, priority, max_running, rate, limit_by) VALUES
        ('invoice.import', 'ingest', 5, 1000, 5, NULL, NULL, NULL),
        ('document.ingest', 'ingest', 3, 1, 5, NULL, NULL, NULL),
        ('mail.send', 'mail', 8, 100, 3, NULL, '20/s', NULL), ('crm.sync', 'crm', 3, 1, 5, 4, '60/m', 'customer'),
        ('report.nightly', 'reports', 2, 1, 7, 1, NULL, NULL), ('workflow.execute', 'ingest', 3, 1, 5, NULL, NULL, NULL)
    """,
    """INSERT INTO ledger.task_limit (type, limit_key, tokens, refilled_at)
        VALUES ('mail.send', '', 3, ledger.ledger_now()), ('crm.sync', 'acme', 0, ledger.ledger_now())""",
    """INSERT INTO ledger.schedule (name, type, rule, timezone, catch_up, payload, next_at, last_at, paused, paused_by,
        paused_reason, paused_at) VALUES
        ('nightly report', 'report.nightly', '30 2 * * *', 'Europe/Berlin', 'once', '{}',
         ledger.ledger_now() + interval '9 hours', ledger.ledger_now() - interval '15 hours', false, NULL, NULL, NULL),
        ('crm delta', 'crm.sync', '*/10 * * * *', 'UTC', 'none', '{"since": "last"}',
         ledger.ledger_now() + interval '4 minutes', ledger.ledger_now() - interval '6 minutes', false, NULL, NULL,
         NULL),
        ('newsletter', 'mail.send', '0 9 * * 1', 'Europe/Berlin', 'all', '{"list": "weekly"}',
         ledger.ledger_now() + interval '4 days', ledger.ledger_now() - interval '3 days', true, 'api:ann',
         'the new template is not approved yet', ledger.ledger_now() - interval '5 hours')
    """,
    """INSERT INTO ledger.queue_pause (queue, intake, reason, actor)
        VALUES ('reports', false, 'the warehouse is being moved', 'api:ann')""",
    """INSERT INTO ledger.queue_scale (queue, processes, actor) VALUES ('mail', 12, 'api:ann')""",
    """INSERT INTO ledger.outbox_event (destination, payload, headers, status, attempt_count, last_error, created_at)
        SELECT 'billing-webhook', jsonb_build_object('invoice', 900 + n), '{}', 'DEAD', 8,
            'http: 410 Gone: this hook was moved', ledger.ledger_now() - make_interval(mins => 35 + n)
        FROM generate_series(1, 4) AS n""",
    """INSERT INTO ledger.outbox_event (destination, payload, status, attempt_count, last_error, created_at,
        next_retry_at)
        SELECT 'orders', jsonb_build_object('order', 5100 + n), 'RETRYING', 2, 'http: 503 Service Unavailable',
            ledger.ledger_now() - make_interval(secs => 90 + n), ledger.ledger_now() + make_interval(secs => 20 + n)
        FROM generate_series(1, 5) AS n""",
    """INSERT INTO ledger.bulk_action (action, query, filter, as_of, reason, actor, per_second, state, matched,
        left_out, changed, sample, canary, canary_seconds, canary_ids, canary_statuses, created_at, started_at,
        finished_at)
        VALUES ('requeue', 'type:crm.sync status:dead error:timeout since:1d', '{}',
            ledger.ledger_now() - interval '31 minutes', 'the CRM answers again', 'console:ann', 50, 'done', 412, 0,
            412, ARRAY(SELECT id FROM ledger.ingest_task WHERE type = 'crm.sync' LIMIT 6), 5, 60,
            ARRAY(SELECT id FROM ledger.ingest_task WHERE type = 'crm.sync' LIMIT 5), '{"SUCCEEDED": 5}',
            ledger.ledger_now() - interval '30 minutes', ledger.ledger_now() - interval '30 minutes',
            ledger.ledger_now() - interval '29 minutes'),
        ('discard', 'type:mail.send text:"does not exist"', '{}', ledger.ledger_now() - interval '3 hours',
            'mailboxes that were closed', 'console:ben', NULL, 'done', 38, 0, 38, '{}', NULL, NULL, NULL, NULL,
            ledger.ledger_now() - interval '3 hours', ledger.ledger_now() - interval '3 hours',
            ledger.ledger_now() - interval '3 hours')
    """,
    """INSERT INTO ledger.task_audit (task_id, code, worker_id, detail, created_at)
        SELECT id, (ARRAY['late_success', 'lease_lost'])[1 + n % 2], 'web-1:' || 4128 + n,
            (ARRAY['SUCCEEDED was refused: another worker has the task', 'the lease was lost while it ran'])[1 + n % 2],
            ledger.ledger_now() - make_interval(mins => 7 * (4 - n))
        FROM (SELECT id, CAST(row_number() OVER () AS int) AS n FROM ledger.ingest_task WHERE type = 'invoice.import'
              AND status = 'SUCCEEDED' LIMIT 3) AS late""",
    """INSERT INTO ledger.receipt_switch (name, is_on, actor) VALUES ('two_phase', true, 'cli:ann')
        ON CONFLICT (name) DO UPDATE SET is_on = true, actor = excluded.actor""",
    """INSERT INTO ledger.receipt (id, level, kind, principal, client_id, payload_sha, policy, accepted_at, promised_by,
        code, reason, entry)
        VALUES (gen_random_uuid(), 'rejected', 'tasks', 'shop', 'order-5077', repeat('ab', 32), 'aof-always',
            ledger.ledger_now() - interval '50 minutes', ledger.ledger_now() - interval '49 minutes', 'unknown_queue',
            'There is no queue billing.', '{"type": "invoice.import", "queue": "billing"}')""",
    """INSERT INTO ledger.sink_use (type, sink) VALUES ('crm.sync', 'crm-log'), ('invoice.import', 'exports')""",
)  # fmt: skip
SAVED: Final = sql("""
    INSERT INTO ledger.receipt (id, level, kind, principal, client_id, payload_sha, policy, accepted_at, promised_by,
        saved_at)
    SELECT id, 'saved', 'tasks', 'shop', 'sync-4711', repeat('9f', 32), 'aof-always',
        created_at - interval '80 milliseconds', created_at + interval '1 minute', created_at
    FROM ledger.ingest_task WHERE id = :id
""")
ACCEPTED: Final = sql("""
    SELECT id, accepted_at, promised_by FROM ledger.receipt WHERE level = 'saved' AND client_id = 'sync-4711'
""")
DOCUMENTS: Final = (
    (
        "house-rules.md",
        "Every right to write is a lease with a fence. A worker that has lost its lease writes nothing.",
    ),
    ("onboarding.txt", "Ask Ann for a token. Each handler runs in a lease, and its effects happen once."),
    ("terms-2026.md", "Orders are confirmed by a receipt. The receipt can be checked later."),
)
ADD_DOCUMENT: Final = sql("""
    WITH added AS (
        INSERT INTO ledger.document (id, principal, name, media_type, sha256, content, size_bytes, created_at,
            updated_at)
        SELECT :id, 'console', :name, 'text/markdown', sha256(body), body, octet_length(body), at, at
        FROM (SELECT convert_to(repeat(:text, 40), 'UTF8') AS body,
                     ledger.ledger_now() - make_interval(secs => 60 * :ago) AS at) AS given RETURNING id)
    INSERT INTO ledger.document_chunk (document_id, position, text) SELECT id, 0, :text FROM added
""")
FINGERPRINT: Final = sql("SELECT error_fingerprint FROM ledger.ingest_task WHERE id = :id")
EVENT: Final = sql("SELECT max(id) FROM ledger.outbox_event WHERE destination = 'billing-webhook' AND status = 'DEAD'")
BULK: Final = sql("SELECT id FROM ledger.bulk_action ORDER BY created_at DESC LIMIT 1")
FLOW: Final = {
    "workflowId": "order 5077",
    "input": {"order": 5077},
    "stages": [
        {"name": "fetch", "kind": "http", "destination": "orders", "body": {"order": "{input}"}},
        {"name": "summarize", "kind": "llm", "model": "small", "prompt": "In one sentence: {fetch}"},
        {"name": "check", "kind": "python", "function": "check_summary"},
        {"name": "store", "kind": "python", "function": "store_summary"},
    ],
}


def tell(connection: Connection) -> dict[str, str]:
    """Add the story to a ledger that `demo_ledger.fill` has filled, and return its pages by name."""
    for type_, queue, code, message, count, hours in DEATHS:
        values = {"type": type_, "queue": queue, "code": code, "message": message, "count": count, "hours": hours}
        connection.execute(DEAD, values | {"traceback": TRACEBACK})
    for statement in STATEMENTS:
        connection.execute(sql(statement))
    dead = _dead_task(connection)
    workflow = _workflow(connection, "RETRYING", FLOW, done=2, ago=3)
    for number in range(3):
        flow = FLOW | {"workflowId": f"order {5074 + number}"}
        _workflow(
            connection, ("SUCCEEDED", "SUCCEEDED", "RUNNING")[number], flow, done=(4, 4, 1)[number], ago=9 - number
        )
    documents = [_document(connection, *each, ago=30 * number) for number, each in enumerate(DOCUMENTS, 1)]
    fingerprint = connection.execute(FINGERPRINT, {"id": dead}).scalar_one()
    event, bulk = connection.execute(EVENT).scalar_one(), connection.execute(BULK).scalar_one()
    return {
        "task": f"/console/tasks/{dead}",
        "tasks": "/console/tasks?q=status:dead+since:1d",
        "dead-group": path_of(GroupKey("crm.sync", fingerprint)),
        "dead": "/console/dead",
        "queues": "/console/queues",
        "schedules": "/console/schedules",
        "outbox": "/console/outbox?status=retrying",
        "event": f"/console/outbox/{event}",
        "sinks": "/console/sinks",
        "workers": "/console/workers",
        "refused-writes": "/console/workers/refused",
        "receipts": "/console/receipts",
        "documents": "/console/documents?q=lease",
        "document": f"/console/documents/{documents[0]}",
        "workflows": "/console/workflows",
        "workflow": f"/console/workflows/{workflow}",
        "bulk-actions": "/console/bulk",
        "bulk-action": f"/console/bulk/{bulk}",
        "bulk-new": "/console/bulk/new?action=requeue&q=type:crm.sync+status:dead",
    }


def _dead_task(connection: Connection) -> uuid.UUID:
    """Write the task whose page is shown: three attempts, one finished step, a key, and a sink."""
    message = "503 Server Error for url: https://crm.example/customers/4711"
    id_ = _task(connection, "crm.sync", "crm", {"customer": 4711, "fields": ["name", "address", "orders"]}, "DEAD",
                attempts=3, code="handler_error", message=message, traceback=TRACEBACK, key="shop:sync-4711",
                partition_key="customer-4711", age=8.03, ago=4)  # fmt: skip
    for before, after, attempts, said, actor, seconds in HISTORY:
        values = {"before": before, "after": after, "attempts": attempts, "message": said, "actor": actor}
        connection.execute(TRANSITION, {**values, "id": id_, "seconds": seconds})
    result = json.dumps({"name": "Acme", "orders": 12})
    connection.execute(STEP, {"id": id_, "name": "login", "result": result, "ago": 11})
    connection.execute(SAVED, {"id": id_})
    return id_


def _workflow(connection: Connection, status: str, flow: dict[str, Any], *, done: int, ago: float) -> uuid.UUID:
    has_failed = status == "RETRYING"
    id_ = _task(connection, WORKFLOW, "ingest", flow, status, age=2, ago=ago, key=f"shop:{flow['workflowId']}",
                attempts=int(has_failed), code="handler_error" if has_failed else None,
                message="check: the summary has no amount" if has_failed else None,
                traceback="ValueError: the summary has no amount" if has_failed else None)  # fmt: skip
    _history(connection, id_, status)
    for stage in flow["stages"][:done]:
        notes = {"kind": stage["kind"], "seconds": 1.4, "attempt": 1}
        output = (
            {"customer": "Acme", "items": 3, "amount": "412.50"}
            if stage["name"] == "fetch"
            else "Acme ordered 3 items."
        )
        result = json.dumps(notes | {"output": output})
        connection.execute(STEP, {"id": id_, "name": stage["name"], "result": result, "ago": ago})
    return id_


def _document(connection: Connection, name: str, text: str, *, ago: float) -> uuid.UUID:
    id_ = uuid.uuid4()
    connection.execute(ADD_DOCUMENT, {"id": id_, "name": name, "text": text, "ago": ago})
    payload = {"documentId": str(id_), "revision": 1}
    task_id = keyed_id(DOCUMENT, task_key(id_, 1))
    _task(connection, DOCUMENT, "ingest", payload, "SUCCEEDED", id_=task_id, age=0.1, ago=ago, result={"chunks": 1})
    _history(connection, task_id, "SUCCEEDED")
    return id_


def _task(connection: Connection, type_: str, queue: str, payload: Any, status: str, *, age: float, ago: float,
          id_: uuid.UUID | None = None, attempts: int = 0, code: str | None = None, message: str | None = None,
          traceback: str | None = None, key: str | None = None, partition_key: str | None = None,
          result: Any = None) -> uuid.UUID:  # fmt: skip
    id_ = id_ or uuid.uuid4()
    values: dict[str, Any] = {
        "type": type_,
        "queue": queue,
        "payload": json.dumps(payload),
        "context": '{"principal": "shop"}',
    }
    values |= {"status": status, "attempts": attempts, "code": code, "message": message, "traceback": traceback}
    values |= {"key": key, "partition_key": partition_key, "result": json.dumps(result) if result else None}
    connection.execute(TASK, {**values, "id": id_, "age": age, "ago": ago})
    connection.execute(LEASE, {"id": id_})
    return id_


def _history(connection: Connection, id_: uuid.UUID, status: str) -> None:
    ways = [(None, "QUEUED", 0.0), ("QUEUED", "RUNNING", 0.3)]
    if status != "RUNNING":
        ways.append(("RUNNING", status, 5.1))
    for before, after, seconds in ways:
        values = {"before": before, "after": after, "attempts": int(after == "RETRYING"), "message": None}
        connection.execute(TRANSITION, {**values, "id": id_, "actor": "web-1:4131", "seconds": seconds})
