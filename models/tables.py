"""Every table of the ledger in one `Base.metadata`, whole only when all modules that define one are imported."""

from models.api_tokens import ApiToken
from models.base import Base
from models.chats import Chat, ChatMember, ChatMessage
from models.clock import LedgerClock
from models.documents import Document, DocumentChunk
from models.outbox import OutboxAudit, OutboxEvent
from models.queues import QueueLimit, QueuePause
from models.sinks import SinkTransaction
from models.streams import Checkpoint, ShardLease
from models.tasks import IngestTask, IngestTaskTransition, TaskAudit, TaskLease, TaskStep, TaskTombstone, WakeupHorizon
from models.ticks import Tick

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
    "TaskTombstone",
    "Tick",
    "WakeupHorizon",
]
