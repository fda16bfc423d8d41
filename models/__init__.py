"""The ledger: its tables, its states, its errors, its clock, and the way to reach and to migrate it.

`models.engine` is the module; its function of that name is imported from there.
"""

from models.base import Base
from models.chats import Chat, ChatMember, ChatMessage
from models.clock import LedgerClock, needed_by_every_table
from models.control import ApiToken, Checkpoint, QueueLimit, QueuePause, ShardLease, Tick
from models.documents import Document, DocumentChunk
from models.engine import forget_inherited_connections, make_engine, sessions
from models.errors import CeleriacError, LeaseLost, LedgerBusy, Misuse, SchemaMismatch, Unreachable
from models.outbox import OutboxAudit, OutboxEvent
from models.schema import current_revision, head_revision, known_revisions, migrate
from models.sinks import Decision, SinkState, SinkTransaction
from models.status import TASK_TRANSITIONS, EventStatus, TaskStatus
from models.tasks import IngestTask, IngestTaskTransition, TaskAudit, TaskLease, TaskStep

needed_by_every_table()

__all__ = [
    "TASK_TRANSITIONS",
    "ApiToken",
    "Base",
    "CeleriacError",
    "Chat",
    "ChatMember",
    "ChatMessage",
    "Checkpoint",
    "Decision",
    "Document",
    "DocumentChunk",
    "EventStatus",
    "IngestTask",
    "IngestTaskTransition",
    "LeaseLost",
    "LedgerBusy",
    "LedgerClock",
    "Misuse",
    "OutboxAudit",
    "OutboxEvent",
    "QueueLimit",
    "QueuePause",
    "SchemaMismatch",
    "ShardLease",
    "SinkState",
    "SinkTransaction",
    "TaskAudit",
    "TaskLease",
    "TaskStatus",
    "TaskStep",
    "Tick",
    "Unreachable",
    "current_revision",
    "forget_inherited_connections",
    "head_revision",
    "known_revisions",
    "make_engine",
    "migrate",
    "sessions",
]
