"""Giving back tasks that were claimed and never started."""

from __future__ import annotations

import logging
import uuid
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from models.errors import CeleriacError
from models.sql import sql
from settings import Settings
from tasks.core.outcomes import Released, Snoozed
from tasks.core.registry import find_or_default
from tasks.execution.claim import columns, task_of
from tasks.execution.settle import Settlement

logger = logging.getLogger(__name__)

# running: the tasks that are still held under these tokens, without their payloads.
RUNNING: Final = sql(f"""
    SELECT lease_token, {columns("NULL, NULL")}
    FROM ledger.ingest_task
    WHERE id IN (SELECT unnest(task_ids) FROM ledger.task_lease WHERE token = ANY(CAST(:tokens AS uuid[])))
      AND lease_token = ANY(CAST(:tokens AS uuid[])) AND status = 'RUNNING'
    ORDER BY id
""")


def give_back(engine: Engine, settings: Settings, token: uuid.UUID, outcome: Released | Snoozed) -> None:
    """Release the tasks that were claimed under this token and never started. This does not count as an attempt."""
    try:
        with Session(engine) as db:
            tasks = [task_of(found) for _, *found in db.execute(RUNNING, {"tokens": [token]})]
            if tasks:
                settlement = Settlement(token, find_or_default(tasks[0].type), settings)
                settlement.settle(db, [(task, outcome) for task in tasks], is_last=True)
            db.commit()
    except (SQLAlchemyError, CeleriacError) as error:
        logger.warning("left to reclaim, if it was claimed: %s", str(error).partition("\n")[0])
