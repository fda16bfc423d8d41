"""The schema refuses nonsense, and rows written by hand get sensible defaults."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from models import tables
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
CHAT = "INSERT INTO ledger.chat (first_user_id{0}) VALUES ('b'{1})"
LIMIT = "INSERT INTO ledger.queue_limit (queue{0}) VALUES ('q'{1})"
CHECKPOINT = "INSERT INTO ledger.checkpoint (stream{0}) VALUES ('s'{1})"
LEASE = (
    "INSERT INTO ledger.task_lease (token, holder, lease_until, task_ids, type, queue{0})"
    " VALUES (gen_random_uuid(), 'h', now(), '{{}}', 't', 'q'{1})"
)
TRANSITION = "INSERT INTO ledger.ingest_task_transition (task_id, to_status{0}) VALUES (gen_random_uuid(), 'QUEUED'{1})"
HASH = "sha256('x')"
UUID = "gen_random_uuid()"

# what is broken, where, and the columns that break it
NONSENSE = [
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
    ("max_running", LIMIT, {"max_running": "-1"}),
    ("token_sha256", TOKEN, {"token_sha256": "'cleartext'"}),
    ("user_order", CHAT, {"second_user_id": "'a'"}),
]

SENSE = [
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
    (CHAT, {"second_user_id": "'b'"}),
    (LEASE, {"priority": "5"}),
    (LIMIT, {"max_running": "0"}),
    (CHECKPOINT, {}),
]


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    engine = make_engine(database)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture(scope="module")
def unemptied(postgres: Cluster) -> Iterator[Engine]:
    """The migrated database with whatever is in it, for tests that only see rows refused."""
    engine = make_engine(postgres.url(postgres.migrated))
    yield engine
    engine.dispose()


def insert(connection: Connection, template: str, columns: dict[str, str]) -> None:
    """The row that the template stands for, with further columns; values are SQL."""
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", {value}" for value in columns.values())
    connection.execute(sql(template.format(names, values)))


def label(case: object) -> str | None:
    """Test ids that can be read: the table, the rule, the columns."""
    if isinstance(case, str) and case.startswith("INSERT"):
        return case.split()[2]
    return "+".join(case) if isinstance(case, dict) else None


@pytest.mark.parametrize(("rule", "template", "columns"), NONSENSE, ids=label)
def test_nonsense_is_refused_by_the_rule_that_it_breaks(
    unemptied: Engine, rule: str, template: str, columns: dict[str, str]
) -> None:
    refusal = f'violates check constraint "ck_{template.split()[2]}_{rule}"'
    with unemptied.connect() as connection, pytest.raises(DBAPIError, match=refusal):
        insert(connection, template, columns)


def test_what_makes_sense_is_accepted(connection: Connection) -> None:
    for template, columns in SENSE:
        with connection.begin_nested() as savepoint:
            insert(connection, template, columns)
            savepoint.rollback()


def test_every_check_of_the_schema_is_broken_by_one_of_these_rows_or_elsewhere(
    connection: Connection,
) -> None:
    broken = {f"ck_{template.split()[2]}_{rule}" for rule, template, _ in NONSENSE}
    elsewhere = {
        "ck_ingest_task_status",
        "ck_ingest_task_transition_way",
        "ck_outbox_event_status",
        "ck_sink_transaction_decision",
        "ck_sink_transaction_state",
        "ck_ledger_clock_only_row",
    }
    checks = connection.scalars(sql("SELECT conname FROM pg_constraint WHERE contype = 'c' AND conname ~ '^ck_'"))
    assert set(checks) == broken | elsewhere


def test_a_plain_insert_into_the_outbox_is_a_complete_event(connection: Connection) -> None:
    row = connection.execute(
        sql("""INSERT INTO ledger.outbox_event (destination, payload) VALUES ('webhook', '{"a": 1}') RETURNING *""")
    ).one()
    assert (row.status, row.attempt_count, row.headers) == ("NEW", 0, {})
    assert row.id >= 1
    assert row.created_at is not None
    for column in ("next_retry_at", "locked_by", "locked_at", "lease_token", "lease_until", "last_error", "sent_at"):
        assert getattr(row, column) is None


def test_a_plain_update_takes_an_event_through_its_life(connection: Connection) -> None:
    insert(connection, EVENT, {"id": "1000"})
    for change in (
        "locked_by = 'w', locked_at = now()",
        "status = 'RETRYING', attempt_count = attempt_count + 1, next_retry_at = now(), last_error = 'refused'",
        "status = 'DEAD', next_retry_at = NULL, locked_by = NULL, locked_at = NULL",
        "status = 'NEW', attempt_count = 0",
        "status = 'SENT', sent_at = now(), external_id = 'x-1'",
    ):
        connection.execute(sql(f"UPDATE ledger.outbox_event SET {change} WHERE id = 1000"))


def test_a_task_without_an_id_is_refused_because_its_id_says_who_it_is(connection: Connection) -> None:
    with pytest.raises(DBAPIError, match='null value in column "id"'):
        connection.execute(sql("INSERT INTO ledger.ingest_task (type, payload) VALUES ('t', '{}')"))


def test_the_same_client_message_of_one_sender_is_saved_once(connection: Connection) -> None:
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


def test_every_table_of_the_owner_can_be_written_and_read_through_its_model(connection: Connection) -> None:
    one, now = uuid.uuid4(), datetime.now(UTC)
    rows: list[Base] = [
        tables.IngestTask(id=one, type="t", payload=[1, "two"], result={"a": None}),
        tables.IngestTaskTransition(task_id=one, to_status=TaskStatus.QUEUED),
        tables.TaskLease(token=one, holder="h", lease_until=now, task_ids=[one], type="t", queue="q", priority=5),
        tables.TaskAudit(task_id=one, code="late_success", worker_id="w"),
        tables.TaskStep(task_id=one, name="fetch", result=None),
        tables.TaskTombstone(id=one, status=TaskStatus.SUCCEEDED, payload_sha="a"),
        tables.WakeupHorizon(queue="q", priority=5, seen_wakeup_at=now, seen_at=now),
        tables.OutboxEvent(destination="d", payload={"ids": [str(one)]}),
        tables.OutboxAudit(code="outbox_flush_db_error", worker_id="w"),
        tables.SinkTransaction(gid="g", task_id=one, sink="s"),
        tables.Document(id=one, name="n", media_type="m", sha256=bytes(32), content=b"abc", size_bytes=3),
        tables.DocumentChunk(document_id=one, position=0, text="words"),
        tables.Chat(id=one, first_user_id="a", second_user_id="b"),
        tables.ChatMember(chat_id=one, user_id="a"),
        tables.ChatMessage(id=one, chat_id=one, client_msg_id="c", from_user_id="a", to_user_id="b", body="hello"),
        tables.Checkpoint(stream="s"),
        tables.ShardLease(stream="s", shard=0),
        tables.Tick(name="relay"),
        tables.QueuePause(queue="q"),
        tables.QueueLimit(queue="q", max_running=1),
        tables.ApiToken(name="n", token_sha256=bytes(32), scopes=["tasks:write"]),
    ]
    assert {type(row).__tablename__ for row in rows} | {"ledger_clock"} == {
        table.name for table in Base.metadata.tables.values()
    }
    with Session(connection) as session:
        for row in rows:  # one by one: models have no relationships that would order them
            session.add(row)
            session.flush()
        session.expire_all()
        task, event = session.get_one(tables.IngestTask, one), session.scalars(select(tables.OutboxEvent)).one()
        assert (task.payload, task.result, task.status) == ([1, "two"], {"a": None}, TaskStatus.QUEUED)
        assert (event.status, event.headers, event.created_at.tzinfo is not None) == (EventStatus.NEW, {}, True)
        assert session.get_one(tables.TaskLease, one).task_ids == [one]
