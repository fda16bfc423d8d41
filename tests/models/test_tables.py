"""The schema refuses rows that make no sense, and rows inserted by hand get defaults."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from models import (
    api_tokens,
    bulk_actions,
    chats,
    console,
    dead_mutes,
    documents,
    limits,
    outbox,
    queues,
    receipts,
    schedules,
    sinks,
    streams,
    tally,
    task_types,
    tasks,
    ticks,
)
from models.engine import make_engine
from models.sql import sql
from models.status import EventStatus, TaskStatus
from models.tables import Base
from tests.servers import Cluster

TASK = "INSERT INTO ledger.ingest_task (id, type, payload{0}) VALUES (gen_random_uuid(), 't', '{{}}'{1})"
EVENT = "INSERT INTO ledger.outbox_event (destination, payload{0}) VALUES ('d', '{{}}'{1})"
SINK = "INSERT INTO ledger.sink_transaction (sink{0}) VALUES ('s'{1})"
DOCUMENT = "INSERT INTO ledger.document (name, media_type{0}) VALUES ('n', 'm'{1})"
CHUNK = "INSERT INTO ledger.document_chunk (document_id, text{0}) VALUES (gen_random_uuid(), 'x'{1})"
TICK = "INSERT INTO ledger.tick (name{0}) VALUES ('t'{1})"
SHARD = "INSERT INTO ledger.shard_lease (stream{0}) VALUES ('s'{1})"
TOKEN = "INSERT INTO ledger.api_token (name{0}) VALUES ('n'{1})"
SESSION = "INSERT INTO ledger.console_session (expires_at{0}) VALUES (now(){1})"
LINK = "INSERT INTO ledger.console_link (expires_at{0}) VALUES (now(){1})"
MUTE = "INSERT INTO ledger.dead_mute (type, error_fingerprint, reason{0}) VALUES ('t', 'f', 'r'{1})"
BULK = "INSERT INTO ledger.bulk_action (query, filter, as_of, reason{0}) VALUES ('', '{{}}', now(), 'r'{1})"
CHAT = "INSERT INTO ledger.chat (first_user_id{0}) VALUES ('b'{1})"
PERIOD = (
    "INSERT INTO ledger.tally_period (subject, queue, type, result, count, run_seconds, wait_seconds{0})"
    " VALUES ('task', 'q', 't', 'dead', 1, 0, 0{1})"
)
SCHEDULE = "INSERT INTO ledger.schedule (name, type, rule, timezone{0}) VALUES ('n', 't', '* * * * *', 'UTC'{1})"
SCALE = "INSERT INTO ledger.queue_scale (queue{0}) VALUES ('q'{1})"
ALERT = "INSERT INTO ledger.queue_alert (queue{0}) VALUES ('q'{1})"
TYPE = "INSERT INTO ledger.task_type (type, queue{0}) VALUES ('t', 'q'{1})"
QUEUE = "INSERT INTO ledger.task_queue (queue{0}) VALUES ('q'{1})"
CHECKPOINT = "INSERT INTO ledger.checkpoint (stream{0}) VALUES ('s'{1})"
RECEIPT = (
    "INSERT INTO ledger.receipt (id, kind, principal, payload_sha, policy, accepted_at{0})"
    " VALUES (gen_random_uuid(), 'chat', 'ann', 'x', 'aof-always', now(){1})"
)
SWITCH = "INSERT INTO ledger.receipt_switch (is_on{0}) VALUES (true{1})"
LEASE = (
    "INSERT INTO ledger.task_lease (token, holder, lease_until, task_ids, type, queue{0})"
    " VALUES (gen_random_uuid(), 'h', now(), '{{}}', 't', 'q'{1})"
)
TRANSITION = "INSERT INTO ledger.ingest_task_transition (task_id, to_status{0}) VALUES (gen_random_uuid(), 'QUEUED'{1})"
HASH = "sha256('x')"
UUID = "gen_random_uuid()"

# The constraint that is violated, the table, and the columns that violate it.
INCONSISTENT = [
    ("running_is_leased", TASK, {"status": "'RUNNING'"}),
    ("running_is_leased", TASK, {"lease_token": UUID}),
    ("running_is_leased", TASK, {"status": "'SUCCEEDED'", "finished_at": "now()", "lease_token": UUID}),
    ("final_is_finished", TASK, {"status": "'SUCCEEDED'"}),
    ("final_is_finished", TASK, {"status": "'DEAD'"}),
    ("final_is_finished", TASK, {"status": "'DISCARDED'"}),
    ("final_is_finished", TASK, {"finished_at": "now()"}),
    ("final_is_finished", TASK, {"status": "'RETRYING'", "next_retry_at": "now()", "finished_at": "now()"}),
    ("next_retry_at", TASK, {"status": "'RETRYING'"}),
    ("next_retry_at", TASK, {"status": "'DEAD'", "finished_at": "now()", "next_retry_at": "now()"}),
    ("next_retry_at", TASK, {"status": "'SUCCEEDED'", "finished_at": "now()", "next_retry_at": "now()"}),
    ("priority", TASK, {"priority": "-1"}),
    ("priority", TASK, {"priority": "10"}),
    ("attempt_count", TASK, {"attempt_count": "-1"}),
    ("max_attempts", TASK, {"max_attempts": "0"}),
    ("limited_waits", TASK, {"limited_at": "now()"}),
    ("limited_waits", TASK, {"limited_at": "now()", "limit_key": "'a'", "status": "'RUNNING'", "lease_token": UUID}),
    ("expires_before_start", TASK, {"expires_at": "now()", "status": "'RUNNING'", "lease_token": UUID}),
    ("partition_key", TASK, {"partition_key": "'k'"}),
    ("partition_key", TASK, {"key_seq": "1"}),
    ("error_together", TASK, {"last_error": "'Traceback'"}),
    ("error_together", TASK, {"error_message": "'It failed.'"}),
    ("last_error", TASK, {"last_error": "repeat('é', 4001)", "error_message": "'It failed.'"}),
    ("error_message", TASK, {"last_error": "'Traceback'", "error_message": "repeat('é', 501)"}),
    ("attempt_count", TRANSITION, {"attempt_count": "-1"}),
    ("priority", LEASE, {"priority": "10"}),
    ("sent_has_a_time", EVENT, {"status": "'SENT'"}),
    ("sent_has_a_time", EVENT, {"sent_at": "now()"}),
    ("lease", EVENT, {"lease_token": UUID}),
    ("lease", EVENT, {"lease_until": "now()"}),
    ("final_holds_no_lease", EVENT, {"status": "'DEAD'", "lease_token": UUID, "lease_until": "now()"}),
    (
        "final_holds_no_lease",
        EVENT,
        {"status": "'SENT'", "sent_at": "now()", "lease_token": UUID, "lease_until": "now()"},
    ),
    ("attempt_count", EVENT, {"attempt_count": "-1"}),
    ("gid", SINK, {"gid": "repeat('é', 100)", "task_id": UUID}),
    ("gid", SINK, {"gid": "''", "task_id": UUID}),
    ("has_an_origin", SINK, {"gid": "'g'"}),
    ("decision_has_a_time", SINK, {"gid": "'g'", "task_id": UUID, "decision": "'commit'"}),
    ("decision_has_a_time", SINK, {"gid": "'g'", "task_id": UUID, "decided_at": "now()"}),
    ("state_follows_decision", SINK, {"gid": "'g'", "task_id": UUID, "state": "'committed'"}),
    ("state_follows_decision", SINK, {"gid": "'g'", "task_id": UUID, "state": "'aborted'"}),
    (
        "state_follows_decision",
        SINK,
        {"gid": "'g'", "task_id": UUID, "state": "'aborted'", "decision": "'commit'", "decided_at": "now()"},
    ),
    ("sha256", DOCUMENT, {"sha256": "'x'", "content": "'abc'", "size_bytes": "3"}),
    ("size_bytes", DOCUMENT, {"sha256": HASH, "content": "'abc'", "size_bytes": "4"}),
    ("revision", DOCUMENT, {"sha256": HASH, "content": "'abc'", "size_bytes": "3", "revision": "0"}),
    ("position", CHUNK, {"position": "-1"}),
    ("lease", TICK, {"holder": "'h'", "lease_token": UUID}),
    ("lease", TICK, {"lease_token": UUID, "lease_until": "now()"}),
    ("lease", SHARD, {"shard": "0", "lease_token": UUID, "lease_until": "now()"}),
    ("shard", SHARD, {"shard": "-1"}),
    ("shard", CHECKPOINT, {"shard": "-1"}),
    ("span", PERIOD, {"span": "'week'", "start": "now()"}),
    ("ever", PERIOD, {"span": "'ever'", "start": "now()"}),
    ("catch_up", SCHEDULE, {"catch_up": "'twice'"}),
    ("moves_forward", SCHEDULE, {"catch_up": "'once'", "next_at": "now()", "last_at": "now()"}),
    ("paused_by_an_operator", SCHEDULE, {"catch_up": "'once'", "paused": "true"}),
    ("paused_by_an_operator", SCHEDULE, {"catch_up": "'once'", "paused": "true", "paused_at": "now()"}),
    ("paused_by_an_operator", SCHEDULE, {"catch_up": "'once'", "paused_by": "'ann'", "paused_at": "now()"}),
    ("processes", SCALE, {"processes": "0"}),
    ("processes", SCALE, {"processes": "129"}),
    ("processes", ALERT, {"processes": "0"}),
    ("max_attempts", TYPE, {"max_attempts": "0", "batch": "1", "priority": "5"}),
    ("batch", TYPE, {"max_attempts": "1", "batch": "0", "priority": "5"}),
    ("priority", TYPE, {"max_attempts": "1", "batch": "1", "priority": "10"}),
    ("max_attempts", QUEUE, {"max_attempts": "0"}),
    ("token_sha256", TOKEN, {"token_sha256": "'cleartext'"}),
    ("session_sha256", SESSION, {"session_sha256": "'cleartext'", "token_sha256": HASH}),
    ("code_sha256", LINK, {"code_sha256": "'cleartext'", "token_sha256": HASH}),
    ("one_end", MUTE, {"until_next_death": "true", "expires_at": "now()"}),
    ("action", BULK, {"action": "'delete'"}),
    ("state", BULK, {"action": "'requeue'", "state": "'lost'"}),
    ("running_is_claimed", BULK, {"action": "'requeue'", "state": "'running'"}),
    ("running_is_claimed", BULK, {"action": "'requeue'", "token": UUID}),
    ("ended_is_finished", BULK, {"action": "'requeue'", "state": "'done'"}),
    ("per_second", BULK, {"action": "'discard'", "per_second": "0"}),
    ("canary", BULK, {"action": "'requeue'", "canary": "0", "canary_seconds": "1"}),
    ("canary_seconds", BULK, {"action": "'requeue'", "canary": "1"}),
    ("changed", BULK, {"action": "'run-now'", "changed": "-1"}),
    ("user_order", CHAT, {"second_user_id": "'a'"}),
    ("level", RECEIPT, {"level": "'accepted'", "promised_by": "now()"}),
    ("rejected_has_a_reason", RECEIPT, {"level": "'rejected'", "promised_by": "now()"}),
    ("rejected_has_a_reason", RECEIPT, {"level": "'saved'", "promised_by": "now()", "code": "'c'", "reason": "'r'"}),
    ("promise", RECEIPT, {"level": "'saved'", "promised_by": "now() - interval '1 s'"}),
    ("name", SWITCH, {"name": "'unknown'"}),
]

CONSISTENT = [
    (TASK, {}),
    (TASK, {"status": "'RUNNING'", "lease_token": UUID, "next_retry_at": "now()"}),
    (TASK, {"status": "'DISCARDED'", "finished_at": "now()", "next_retry_at": "now()"}),
    (TASK, {"last_error": "repeat('é', 4000)", "error_message": "repeat('é', 500)", "priority": "0"}),
    (TASK, {"partition_key": "'k'", "key_seq": "1", "priority": "9", "max_attempts": "1"}),
    (EVENT, {}),
    (EVENT, {"id": "9", "next_retry_at": "now()", "lease_token": UUID, "lease_until": "now()"}),
    (EVENT, {"locked_by": "'me'", "locked_at": "now()"}),
    (SINK, {"gid": "repeat('x', 199)", "checkpoint_id": "1"}),
    (SINK, {"gid": "'g'", "task_id": UUID, "state": "'aborted'", "decision": "'abort'", "decided_at": "now()"}),
    (DOCUMENT, {"sha256": HASH, "content": "''", "size_bytes": "0"}),
    (TICK, {"holder": "'who ran last'"}),
    (TICK, {"holder": "'h'", "lease_token": UUID, "lease_until": "now()"}),
    (SHARD, {"shard": "0"}),
    (TOKEN, {"token_sha256": HASH}),
    (SESSION, {"session_sha256": HASH, "token_sha256": HASH}),
    (LINK, {"code_sha256": HASH, "token_sha256": HASH}),
    (MUTE, {}),
    (MUTE, {"expires_at": "now()"}),
    (MUTE, {"until_next_death": "true"}),
    (BULK, {"action": "'run-now'", "state": "'running'", "token": UUID, "canary": "1", "canary_seconds": "60"}),
    (BULK, {"action": "'requeue'", "state": "'canary failed'", "finished_at": "now()"}),
    (CHAT, {"second_user_id": "'b'"}),
    (RECEIPT, {"level": "'saved'", "promised_by": "now()"}),
    (RECEIPT, {"level": "'rejected'", "promised_by": "now()", "code": "'c'", "reason": "'r'", "entry": "'{}'"}),
    (SWITCH, {"name": "'two_phase'"}),
    (LEASE, {"priority": "5"}),
    (PERIOD, {"span": "'ever'", "start": "'-infinity'"}),
    (SCHEDULE, {"catch_up": "'once'", "last_at": "now()"}),
    (SCHEDULE, {"catch_up": "'all'", "paused": "true", "paused_by": "'ann'", "paused_at": "now()"}),
    (SCALE, {"processes": "1"}),
    (ALERT, {"processes": "128"}),
    (TYPE, {"max_attempts": "1", "batch": "1", "priority": "0"}),
    (QUEUE, {"max_attempts": "1"}),
    (CHECKPOINT, {}),
]


@pytest.fixture(scope="module")
def unemptied(postgres: Cluster) -> Iterator[Engine]:
    """An engine for the migrated database, which is not emptied: the tests that use it insert nothing."""
    engine = make_engine(postgres.url(postgres.migrated))
    yield engine
    engine.dispose()


def insert(connection: Connection, template: str, columns: dict[str, str]) -> None:
    """Insert the row of the template with additional columns, whose values are SQL."""
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", {value}" for value in columns.values())
    connection.execute(sql(template.format(names, values)))


def table(template: str) -> str:
    return template.split()[2].removeprefix("ledger.")


def label(case: object) -> str | None:
    """Return the part of a test id: the table, the rule, or the columns."""
    if isinstance(case, str) and case.startswith("INSERT"):
        return table(case)
    return "+".join(case) if isinstance(case, dict) else None


@pytest.mark.parametrize(("rule", "template", "columns"), INCONSISTENT, ids=label)
def test_an_inconsistent_row_is_refused(unemptied: Engine, rule: str, template: str, columns: dict[str, str]) -> None:
    refusal = f'violates check constraint "ck_{table(template)}_{rule}"'
    with unemptied.connect() as connection, pytest.raises(DBAPIError, match=refusal):
        insert(connection, template, columns)


def test_a_consistent_row_is_accepted(connection: Connection) -> None:
    for template, columns in CONSISTENT:
        with connection.begin_nested() as savepoint:
            insert(connection, template, columns)
            savepoint.rollback()


def test_every_check_of_the_schema_has_a_test(
    connection: Connection,
) -> None:
    broken = {f"ck_{table(template)}_{rule}" for rule, template, _ in INCONSISTENT}
    elsewhere = {
        "ck_ingest_task_status",
        "ck_ingest_task_transition_way",
        "ck_outbox_event_status",
        "ck_sink_transaction_decision",
        "ck_sink_transaction_state",
        "ck_ledger_clock_only_row",
        "ck_installation_only_row",
    }
    checks = connection.scalars(sql("SELECT conname FROM pg_constraint WHERE contype = 'c' AND conname ~ '^ck_'"))
    assert set(checks) == broken | elsewhere


def test_a_ledger_has_one_identity(connection: Connection) -> None:
    connection.execute(sql("INSERT INTO ledger.installation DEFAULT VALUES"))
    second = {"DEFAULT VALUES": "pk_installation", "(only_row) VALUES (false)": "ck_installation_only_row"}
    for values, rule in second.items():
        with pytest.raises(IntegrityError, match=rule), connection.begin_nested():
            connection.execute(sql(f"INSERT INTO ledger.installation {values}"))


def test_a_plain_insert_into_the_outbox_is_a_complete_event(connection: Connection) -> None:
    row = connection.execute(
        sql("""INSERT INTO ledger.outbox_event (destination, payload) VALUES ('webhook', '{"a": 1}') RETURNING *""")
    ).one()
    assert (row.status, row.attempt_count, row.headers) == ("NEW", 0, {})
    assert row.id >= 1
    assert row.created_at is not None
    for column in ("next_retry_at", "locked_by", "locked_at", "lease_token", "lease_until", "last_error", "sent_at"):
        assert getattr(row, column) is None


def test_plain_updates_take_an_event_through_its_life(connection: Connection) -> None:
    insert(connection, EVENT, {"id": "1000"})
    for change in (
        "locked_by = 'w', locked_at = now()",
        "status = 'RETRYING', attempt_count = attempt_count + 1, next_retry_at = now(), last_error = 'refused'",
        "status = 'DEAD', next_retry_at = NULL, locked_by = NULL, locked_at = NULL",
        "status = 'NEW', attempt_count = 0",
        "status = 'SENT', sent_at = now(), external_id = 'x-1'",
    ):
        connection.execute(sql(f"UPDATE ledger.outbox_event SET {change} WHERE id = 1000"))


def test_a_task_without_an_id_is_refused(connection: Connection) -> None:
    with pytest.raises(DBAPIError, match='null value in column "id"'):
        connection.execute(sql("INSERT INTO ledger.ingest_task (type, payload) VALUES ('t', '{}')"))


def test_a_repeated_message_of_one_sender_is_saved_once(connection: Connection) -> None:
    connection.execute(
        sql("INSERT INTO ledger.chat (id, first_user_id, second_user_id) VALUES (gen_random_uuid(), 'a', 'b')")
    )
    message = sql(
        "INSERT INTO ledger.chat_message (id, chat_id, client_msg_id, from_user_id, to_user_id, body)"
        " SELECT gen_random_uuid(), id, 'c-1', :sender, 'b', 'hello' FROM ledger.chat"
    )
    connection.execute(message, {"sender": "a"})
    connection.execute(message, {"sender": "b"})
    with pytest.raises(DBAPIError, match="uq_chat_message_from_user_id_client_msg_id"):
        connection.execute(message, {"sender": "a"})


def test_the_words_of_a_chunk_are_found(connection: Connection) -> None:
    insert(connection, DOCUMENT, {"sha256": HASH, "content": "'abc'", "size_bytes": "3"})
    connection.execute(sql("INSERT INTO ledger.document_chunk SELECT id, 0, 'Celeriac is a root' FROM ledger.document"))
    found = "SELECT count(*) FROM ledger.document_chunk WHERE words @@ websearch_to_tsquery('simple', 'celeriac root')"
    assert connection.scalar(sql(found)) == 1


def test_no_queue_table_has_a_foreign_key() -> None:
    queues = ("ingest_task", "task_", "outbox_", "sink_transaction")
    assert not [
        name for name, table in Base.metadata.tables.items() if table.name.startswith(queues) and table.foreign_keys
    ]


def test_every_table_can_be_written_and_read_through_its_model(connection: Connection) -> None:
    one, now = uuid.uuid4(), datetime.now(UTC)
    rows: list[Base] = [
        tasks.IngestTask(id=one, type="t", payload=[1, "two"], result={"a": None}),
        tasks.IngestTaskTransition(task_id=one, to_status=TaskStatus.QUEUED),
        tasks.TaskLease(token=one, holder="h", lease_until=now, task_ids=[one], type="t", queue="q", priority=5),
        tasks.TaskAudit(task_id=one, code="late_success", worker_id="w"),
        tasks.TaskStep(task_id=one, name="fetch", result=None),
        tasks.TaskTombstone(id=one, status=TaskStatus.SUCCEEDED, payload_sha="a"),
        tasks.WakeupHorizon(queue="q", priority=5, seen_wakeup_at=now, seen_at=now),
        outbox.OutboxEvent(destination="d", payload={"ids": [str(one)]}),
        outbox.OutboxAudit(code="outbox_flush_db_error", worker_id="w"),
        sinks.SinkTransaction(gid="g", task_id=one, sink="s"),
        sinks.Installation(),
        sinks.SinkUse(type="t", sink="s"),
        documents.Document(id=one, name="n", media_type="m", sha256=bytes(32), content=b"abc", size_bytes=3),
        documents.DocumentChunk(document_id=one, position=0, text="words"),
        chats.Chat(id=one, first_user_id="a", second_user_id="b"),
        chats.ChatMember(chat_id=one, user_id="a"),
        chats.ChatMessage(id=one, chat_id=one, client_msg_id="c", from_user_id="a", to_user_id="b", body="hello"),
        receipts.Receipt(
            **{"id": one, "level": receipts.Level.SAVED, "kind": "chat", "principal": "ann", "payload_sha": "a"},
            **{"policy": "aof-always", "accepted_at": now, "promised_by": now},
        ),
        receipts.ReceiptSwitch(name=receipts.Switch.TWO_PHASE, is_on=True),
        streams.Checkpoint(stream="s"),
        streams.ShardLease(stream="s", shard=0),
        ticks.Tick(name="relay"),
        limits.TaskLimit(type="t", limit_key="", tokens=1.0, refilled_at=now),
        schedules.Schedule(name="n", type="n", rule="* * * * *", timezone="UTC", catch_up=schedules.CatchUp.ONCE),
        queues.QueuePause(queue="q"),
        queues.QueueScale(queue="q", processes=1),
        queues.QueueAlert(queue="q"),
        task_types.TaskType(type="t", queue="q", max_attempts=3, batch=1, priority=5),
        task_types.TaskQueue(queue="q", max_attempts=10),
        task_types.TaskWorker(worker="w", queues=["q"], types=["t"]),
        tally.TaskTally(
            **{"minute": now, "subject": "task", "queue": "q", "type": "t", "result": "dead", "count": 1},
            **{"run_seconds": 0.0, "run": [1], "wait_seconds": 0.0, "wait": [], "kind": 1},
        ),
        tally.TallyPeriod(
            **{"span": "day", "start": now, "subject": "task", "queue": "q", "type": "t", "result": "dead"},
            **{"count": 1, "run_seconds": 0.0, "run": [1], "wait_seconds": 0.0, "wait": []},
        ),
        api_tokens.ApiToken(name="n", token_sha256=bytes(32), scopes=["tasks:write"]),
        console.ConsoleSession(session_sha256=bytes(32), token_sha256=bytes(32), expires_at=now),
        console.ConsoleLink(code_sha256=bytes(32), token_sha256=bytes(32), expires_at=now),
        dead_mutes.DeadMute(type="t", error_fingerprint="f", reason="r"),
        bulk_actions.BulkAction(action=bulk_actions.BulkVerb.REQUEUE, query="", filter={}, as_of=now, reason="r"),
    ]
    assert {type(row).__tablename__ for row in rows} | {"ledger_clock"} == {
        table.name for table in Base.metadata.tables.values()
    }
    with Session(connection.execution_options(schema_translate_map={"ledger": "celeriac"})) as session:
        for row in rows:  # one by one: models have no relationships that would order them
            session.add(row)
            session.flush()
        session.expire_all()
        task, event = session.get_one(tasks.IngestTask, one), session.scalars(select(outbox.OutboxEvent)).one()
        assert (task.payload, task.result, task.status) == ([1, "two"], {"a": None}, TaskStatus.QUEUED)
        assert (event.status, event.headers, event.created_at.tzinfo is not None) == (EventStatus.NEW, {}, True)
        assert session.get_one(tasks.TaskLease, one).task_ids == [one]
