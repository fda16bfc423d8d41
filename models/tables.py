"""Every table of the ledger in one `Base.metadata`, whole only when all modules that define one are imported."""

from models.api_tokens import ApiToken
from models.base import Base
from models.chats import Chat, ChatMember, ChatMessage
from models.clock import LedgerClock, needed_by_every_table
from models.documents import Document, DocumentChunk
from models.outbox import OutboxAudit, OutboxEvent
from models.queues import QueueLimit, QueuePause
from models.sinks import SinkTransaction
from models.streams import Checkpoint, ShardLease
from models.submit_function import SUBMIT
from models.tasks import IngestTask, IngestTaskTransition, RingHorizon, TaskAudit, TaskLease, TaskStep, TaskTombstone
from models.ticks import Tick

needed_by_every_table()

__all__ = [
    "SUBMIT",
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
    "RingHorizon",
    "ShardLease",
    "SinkTransaction",
    "TaskAudit",
    "TaskLease",
    "TaskStep",
    "TaskTombstone",
    "Tick",
]
