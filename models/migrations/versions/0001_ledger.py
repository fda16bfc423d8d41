"""Create the ledger: clock, tasks, outbox, sinks, documents, chats, receipts, and the tables that coordinate processes.

The statements are in `0001_ledger.sql`. The reasons for tables, CHECKs and indexes are beside the models. A migration
imports nothing of ours, because our code changes and a migration must not.
"""

from __future__ import annotations

from pathlib import Path

from alembic import context, op
from sqlalchemy import text

revision = "0001"
down_revision = None

EVERYTHING = """
DROP AGGREGATE ledger.tally_histogram(bigint[], bigint);
DROP FUNCTION ledger.tally_add;
DROP TABLE ledger.tally_period, ledger.task_tally;
DROP FUNCTION ledger.ingest_submit, ledger.ingest_submit_many, ledger.ingest_fill_in, ledger.ingest_known_queues,
    ledger.ingest_payload_fault, ledger.ingest_draw_turns, ledger.ingest_key_lock, ledger.ingest_give_way,
    ledger.ingest_fresh_id, ledger.ingest_task_id, ledger.ingest_payload_sha, ledger.ingest_error_fingerprint;
DROP TABLE ledger.dead_mute, ledger.bulk_action, ledger.console_link, ledger.console_session, ledger.api_token, ledger.queue_alert, ledger.queue_scale, ledger.queue_pause, ledger.tick, ledger.shard_lease, ledger.checkpoint,
    ledger.receipt_switch, ledger.receipt, ledger.chat_message, ledger.chat_member, ledger.chat, ledger.document_chunk, ledger.document,
    ledger.sink_use, ledger.installation, ledger.sink_transaction, ledger.outbox_audit, ledger.outbox_event, ledger.schedule, ledger.task_worker, ledger.task_queue,
    ledger.task_limit, ledger.task_type, ledger.task_step, ledger.task_audit, ledger.task_tombstone,
    ledger.wakeup_horizon, ledger.task_lease, ledger.ingest_task_transition, ledger.ingest_task;
DROP SEQUENCE ledger.ingest_task_key_seq;
DROP FUNCTION ledger.outbox_event_payload_sha, ledger.outbox_canonical_json, ledger.outbox_event_in_turn,
    ledger.ledger_now;
DROP TABLE ledger.ledger_clock;
DROP FUNCTION ledger.ledger_clock_guard;
"""


def upgrade() -> None:
    _execute(Path(__file__).with_suffix(".sql").read_text())


def downgrade() -> None:
    _execute(EVERYTHING)


def _execute(statements: str) -> None:
    schema: str = context.config.attributes["version_table"]["version_table_schema"]
    op.execute(text(statements.replace("ledger.", f'"{schema}".').replace(":", r"\:")))
