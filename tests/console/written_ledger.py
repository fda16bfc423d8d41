"""A ledger in which every text is a given one, written with SQL where no program of ours would accept it."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from console.dead_letters import path_of
from console.task_search import Name, Term
from documents import task_key
from documents.store import TYPE as DOCUMENT
from models.engine import engine
from models.sql import sql
from tasks.core.task_ids import keyed_id
from tasks.operations.dead_groups import GroupKey
from workflows import TYPE as WORKFLOW

TASK: Final = """
    INSERT INTO ledger.ingest_task (id, type, queue, payload, context, status, idempotency_key, partition_key, key_seq,
        notify, attempt_count, error_code, error_message, error_fingerprint,
        last_error, result, next_retry_at, lease_token, finished_at)
    VALUES (:{id}, :{type}, :name, :{payload}, jsonb_build_object('principal', :name, 'x', :name),
        '{status}', :name, :name, {number}, :name, 1, :name, :words,
        ledger.ingest_error_fingerprint(:name, :words), :words, to_jsonb(:name),
        {retry_at}, {token}, {finished_at})
"""
IDS: Final = (
    "dead", "waiting", "running", "limited", "workflow", "bad_workflow", "document", "bulk", "stopped_bulk",
    "running_bulk", "token", "rejected",
)  # fmt: skip
PLACE: Final = re.compile(r"(?<!:):(\w+)")
TEXTS: Final = ("name", "words", "owner", "holder", "workflow_type", "document_type")
TYPES: Final = {"json": "jsonb", "words_json": "jsonb", "flow": "jsonb", "ingestion_json": "jsonb"}
NOW: Final = "ledger.ledger_now()"
LATER: Final = "ledger.ledger_now() + interval '1 hour'"
STATEMENTS: Final = (
    TASK.format(id="dead", type="name", payload="json", status="DEAD", number=1, retry_at="NULL", token="NULL",
                finished_at=NOW),
    TASK.format(id="waiting", type="name", payload="json", status="RETRYING", number=2, retry_at=LATER, token="NULL",
                finished_at="NULL"),
    TASK.format(id="running", type="name", payload="json", status="RUNNING", number=3, retry_at="NULL",
                token=":token", finished_at="NULL"),
    TASK.format(id="workflow", type="workflow_type", payload="flow", status="RETRYING", number=4, retry_at=NOW,
                token="NULL", finished_at="NULL"),
    TASK.format(id="bad_workflow", type="workflow_type", payload="json", status="DEAD", number=5, retry_at="NULL",
                token="NULL", finished_at=NOW),
    TASK.format(id="ingestion", type="document_type", payload="ingestion_json", status="DEAD", number=6,
                retry_at="NULL", token="NULL", finished_at=NOW),
    """
    INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, message, actor)
    SELECT id, 'RUNNING', CASE status WHEN 'RUNNING' THEN 'QUEUED' ELSE status END, :words, :words
    FROM ledger.ingest_task WHERE idempotency_key = :name
    """,
    """
    INSERT INTO ledger.task_lease (token, holder, lease_until, task_ids, type, queue, priority)
    VALUES (:token, :holder, ledger.ledger_now() + interval '1 hour', ARRAY[:running], :name, :name, 5)
    """,
    """
    INSERT INTO ledger.task_step (task_id, name, result)
    SELECT id, CASE type WHEN :workflow_type THEN 'one' ELSE :name END, jsonb_build_object('output', :words,
        'kind', 'python', 'seconds', 1, 'attempt', 1) FROM ledger.ingest_task WHERE idempotency_key = :name
    """,
    """
    INSERT INTO ledger.task_audit (task_id, code, worker_id, detail)
    SELECT id, code, :words, :words FROM ledger.ingest_task, unnest(ARRAY['late_success', 'lease_lost', :name]) AS code
    WHERE idempotency_key = :name
    """,
    """
    INSERT INTO ledger.task_type (type, queue, max_attempts, batch, priority, max_running, rate, limit_by)
    VALUES (:name, :name, 3, 1, 5, 2, '1/m', :name)
    """,
    """
    INSERT INTO ledger.ingest_task (id, type, queue, payload, limit_key, limited_at)
    VALUES (:limited, :name, :name, '{}', :name, ledger.ledger_now())
    """,
    """
    INSERT INTO ledger.task_worker (worker, queues, types, processes, topic, version)
    VALUES (:name, ARRAY[:name], ARRAY[:name], 2, :name, :name)
    """,
    """
    INSERT INTO ledger.schedule (name, type, rule, timezone, catch_up, payload, next_at, paused, paused_by,
        paused_reason, paused_at)
    VALUES (:name, :name, '0 * * * *', :name, 'once', to_jsonb(:name), ledger.ledger_now(), true, :words, :words,
        ledger.ledger_now())
    """,
    """
    INSERT INTO ledger.schedule (name, type, rule, timezone, catch_up, error, next_at)
    VALUES ('failing ' || :name, :name, :name, 'UTC', 'once', :words, ledger.ledger_now())
    """,
    """
    INSERT INTO ledger.outbox_event (destination, payload, headers, ordering_key, dedup_key, status, attempt_count,
        next_retry_at, last_error, locked_by, external_id, sent_at)
    SELECT :name, :words_json, :words_json, :name,
        :name || place, status, 1, CASE status WHEN 'RETRYING' THEN ledger.ledger_now() END, 'unreachable: ' || :words,
        :words, :name, CASE status WHEN 'SENT' THEN ledger.ledger_now() END
    FROM unnest(ARRAY['DEAD', 'NEW', 'RETRYING', 'SENT']) WITH ORDINALITY AS given(status, place)
    """,
    """
    INSERT INTO ledger.outbox_event (destination, payload, last_error, locked_by, status)
    SELECT 'celery:' || :name, jsonb_build_object('type', :name, 'ids', jsonb_build_array(:waiting),
        'batch', 1), :words, :words, status FROM unnest(ARRAY['NEW', 'DEAD']) AS status
    """,
    """
    INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
    SELECT id, code, :words, :words
    FROM ledger.outbox_event, unnest(ARRAY['outbox_flush_retry', 'outbox_flush_conflict', :name]) AS code
    WHERE destination = :name
    """,
    """
    INSERT INTO ledger.sink_transaction (gid, task_id, sink, state)
    VALUES (left(:name, 150), :running, :name, 'failed'), ('2' || left(:name, 150), :dead, :name, 'prepared')
    """,
    "INSERT INTO ledger.sink_use (type, sink) VALUES (:name, :name)",
    """
    INSERT INTO ledger.document (id, principal, name, media_type, sha256, content, size_bytes)
    VALUES (:document, :owner, :name, :name, sha256('x'), 'x', 1)
    """,
    "INSERT INTO ledger.document_chunk (document_id, position, text) VALUES (:document, 0, 'lease ' || :name)",
    """
    INSERT INTO ledger.receipt (id, level, kind, principal, client_id, payload_sha, policy, accepted_at, promised_by,
        code, reason, entry)
    VALUES (:rejected, 'rejected', :name, :name, :name, 'x', 'x', ledger.ledger_now(), ledger.ledger_now(), :name,
        :name, :words_json)
    """,
    """
    INSERT INTO ledger.receipt_switch (name, is_on, actor) VALUES ('fail_open', true, :words)
    ON CONFLICT (name) DO UPDATE SET actor = excluded.actor
    """,
    """
    INSERT INTO ledger.queue_pause (queue, intake, reason, actor)
    SELECT queue, intake, :words, :words FROM unnest(ARRAY[:name, 'ingest']) AS queue,
        unnest(ARRAY[true, false]) AS intake
    ON CONFLICT (queue, intake) DO UPDATE SET reason = excluded.reason
    """,
    "INSERT INTO ledger.queue_alert (queue, waiting) VALUES (:name, 7)",
    """
    INSERT INTO ledger.dead_mute (type, error_fingerprint, reason, actor)
    SELECT type, error_fingerprint, :words, :words FROM ledger.ingest_task
    WHERE id IN (:ingestion, :bad_workflow)
    ON CONFLICT (type, error_fingerprint) DO NOTHING
    """,
    """
    INSERT INTO ledger.tick (name, holder, started_at, finished_at, error)
    VALUES ('relay', :words, ledger.ledger_now(), ledger.ledger_now(), :words)
    ON CONFLICT (name) DO UPDATE SET error = excluded.error
    """,
    """
    INSERT INTO ledger.bulk_action (id, action, query, filter, as_of, reason, actor, state, matched, left_out, changed,
        sample, message, canary, canary_seconds, canary_ids, canary_statuses, finished_at)
    SELECT id, 'requeue', 'type:"' || :name || '"', '{}', ledger.ledger_now(), :words, :words, state, 1, 0, 1,
        ARRAY[:dead], :words, 1, 5, ARRAY[:dead], '{"DEAD": 1}', ledger.ledger_now()
    FROM (VALUES (:bulk, 'canary failed'), (:stopped_bulk, 'stopped')) AS given(id, state)
    """,
    """
    INSERT INTO ledger.bulk_action (id, action, query, filter, as_of, reason, actor, state, token, seen_at)
    VALUES (:running_bulk, 'discard', 'type:"' || :name || '"', '{}', ledger.ledger_now(), :words, :words, 'running',
        :token, ledger.ledger_now())
    """,
)  # fmt: skip
EVENT: Final = sql("SELECT max(id) FROM ledger.outbox_event WHERE destination = :name AND status = 'DEAD'")
FINGERPRINT: Final = sql("SELECT error_fingerprint FROM ledger.ingest_task WHERE id = :id")


@dataclass(frozen=True, slots=True)
class Written:
    """The things that were written, and the pages about them."""

    dead: str  # a task
    document: str
    workflow: str
    bulk: str
    event: int
    group: str  # the address of its page
    pages: list[str]


def write_everywhere(name: str, words: str | None = None, *, owner: str = "") -> Written:
    """Write a text in every place of the ledger that has one.

    `words` is written where only operators may read it: errors, payloads of events, who did something and why. The
    document belongs to the token `owner`.
    """
    words = name if words is None else words
    ids = {each: str(uuid.uuid4()) for each in IDS}
    ids["ingestion"] = str(keyed_id(DOCUMENT, task_key(uuid.UUID(ids["document"]), 1)))
    values: dict[str, Any] = {
        "name": name,
        "words": words,
        "owner": owner,
        "workflow_type": WORKFLOW,
        "document_type": DOCUMENT,
        "holder": f"{words}:12-abc",
        "json": json.dumps({name: [name], "workflowId": name, "stages": [{"name": name, "kind": name}]}),
        "words_json": json.dumps({words: [words]}),
        "flow": json.dumps(_workflow(name)),
        "ingestion_json": json.dumps({"documentId": ids["document"], "revision": 1}),
    }
    with engine().begin() as connection:
        for statement in STATEMENTS:
            connection.execute(sql(PLACE.sub(_cast, statement)), {**values, **ids})
        event = connection.execute(EVENT, {"name": name}).scalar_one()
        fingerprint = connection.execute(FINGERPRINT, {"id": ids["dead"]}).scalar_one()
    groups = [path_of(GroupKey(type_, fingerprint)) for type_ in (name, WORKFLOW)]
    pages = [
        *(f"/console/tasks/{ids[id_]}" for id_ in ("dead", "waiting", "running", "limited", "ingestion")),
        f"/console/tasks/{ids['dead']}/edit",
        *groups,
        f"/console/outbox/{event}",
        f"/console/outbox?{urlencode({'status': 'dead', 'destination': name})}",
        f"/console/documents/{ids['document']}",
        f"/console/documents?task={ids['ingestion']}",
        "/console/documents?q=lease",
        f"/console/workflows/{ids['workflow']}",
        f"/console/workflows/{ids['bad_workflow']}",
        *(f"/console/tasks?{urlencode({'q': query})}" for query in ("status:dead", str(Term(Name.KEY, name)))),
        f"/console/bulk/new?{urlencode({'action': 'requeue', 'q': 'status:dead'})}",
        *(f"/console/bulk/{ids[id_]}" for id_ in ("bulk", "stopped_bulk", "running_bulk")),
    ]
    return Written(ids["dead"], ids["document"], ids["workflow"], ids["bulk"], event, groups[0], pages)


def _cast(place: re.Match[str]) -> str:
    """Give a parameter its type, which PostgreSQL cannot always infer."""
    name = place[1]
    return f"CAST(:{name} AS {'text' if name in TEXTS else TYPES.get(name, 'uuid')})"


def _workflow(name: str) -> dict[str, Any]:
    printable = "".join(each for each in name if " " <= each <= "~").strip()[:200]
    return {
        "workflowId": printable or "x",
        "input": {name: name},
        "stages": [
            {"name": "one", "kind": "python", "function": name[:100]},
            {"name": "two", "kind": "http", "destination": name[:200], "body": {name: name}},
            {"name": "three", "kind": "llm", "model": name[:200], "prompt": name},
        ],
    }
