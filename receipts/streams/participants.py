"""Turn a sink of SINKS into one that takes part in checkpoints."""

from __future__ import annotations

from receipts.streams.checkpoint_sinks import (
    CheckpointAwareSink,
    LedgerInCheckpoint,
    OpenCheckpoint,
    TwoPhaseInCheckpoint,
)
from receipts.streams.checkpointed_lists import CheckpointedIdempotentList, CheckpointedScript
from sinks.configuration import open_sinks
from sinks.contract import SinkMisused
from sinks.ledger import LedgerSink
from sinks.redis_list import RedisLists
from sinks.redis_script import RedisScript
from sinks.two_phase import TwoPhaseCommitSink


def participant(name: str, checkpoint: OpenCheckpoint) -> CheckpointAwareSink:
    """Return the sink of this name for one run of a consumer."""
    match open_sinks().find(name):
        case TwoPhaseCommitSink() as sink:
            return TwoPhaseInCheckpoint(sink, checkpoint)
        case LedgerSink() as sink:
            return LedgerInCheckpoint(sink, checkpoint)
        case RedisScript() as sink:
            return CheckpointedScript(sink, checkpoint)
        case RedisLists() as sink:
            return CheckpointedIdempotentList(sink)
    raise SinkMisused(f"The sink {name} serves tasks only: its keys are those of tasks, and a stream has entries.")
