"""Every table of the ledger in one `Base.metadata`, whole only when all modules that define one are imported."""

from models.base import Base
from models.chats import Chat, ChatMember, ChatMessage
from models.clock import LedgerClock, needed_by_every_table
from models.control import ApiToken, Checkpoint, QueueLimit, QueuePause, ShardLease, Tick
from models.documents import Document, DocumentChunk
from models.outbox import OutboxAudit, OutboxEvent
from models.sinks import SinkTransaction
from models.tasks import IngestTask, IngestTaskTransition, TaskAudit, TaskLease, TaskStep

needed_by_every_table()

__all__ = [
    "ApiToken",
    "Base",
    "Chat",
    "ChatMember",
    "ChatMessage",
    "Checkpoint",
    "Document",
    "DocumentChunk",
    "IngestTask",
    "IngestTaskTransition",
    "LedgerClock",
    "OutboxAudit",
    "OutboxEvent",
    "QueueLimit",
    "QueuePause",
    "ShardLease",
    "SinkTransaction",
    "TaskAudit",
    "TaskLease",
    "TaskStep",
    "Tick",
]
