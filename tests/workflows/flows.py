"""A workflow with one stage of each kind, the tables that it writes, and functions that run it and read its steps."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

from models.engine import engine
from models.sql import sql
from tests.tasks.deliveries import delivered, submitted
from tests.tasks.work import task
from workflows import TYPE, StageInput, stage

ID = "order 17"
FETCH: dict[str, Any] = {"name": "fetch", "kind": "http", "destination": "crm", "body": {"order": "{input}"}}
SUMMARIZE = {"name": "summarize", "kind": "llm", "model": "small", "prompt": "In short: {fetch}"}
STORE = {"name": "store", "kind": "python", "function": "test.store"}
ASK = {"name": "ask", "kind": "llm", "model": "m", "prompt": "Hi"}
STAGES: list[dict[str, Any]] = [FETCH, SUMMARIZE, STORE]
FLOW = {"workflowId": ID, "input": {"number": 17}, "stages": STAGES}
KEYS = [f"{ID}:{each['name']}" for each in STAGES]
CUSTOMER = {"customer": "Ada", "asked": {"order": {"number": 17}}}
SUMMARY = 'A summary of: In short: {"asked": {"order": {"number": 17}}, "customer": "Ada"}'
CALL = sql("INSERT INTO public.test_stage_call (key) VALUES (:key)")
STORED = sql("INSERT INTO public.test_stored (key, summary) VALUES (:key, :summary) ON CONFLICT DO NOTHING")


def create_tables() -> None:
    """Create the tables that the stage "store" writes, empty: one row per call, and one row per key (its effect)."""
    with engine().begin() as connection:
        connection.execute(sql("CREATE TABLE IF NOT EXISTS public.test_stage_call (key text)"))
        connection.execute(sql("CREATE TABLE IF NOT EXISTS public.test_stored (key text PRIMARY KEY, summary text)"))
        connection.execute(sql("DELETE FROM public.test_stage_call; DELETE FROM public.test_stored"))


@stage("test.store")
def store(given: StageInput) -> Any:
    with engine().begin() as connection:
        connection.execute(CALL, {"key": given.key})
        connection.execute(STORED, {"key": given.key, "summary": given.outputs.get("summarize")})
    return {"stored": given.outputs.get("summarize"), "for": given.input}


def read_stored() -> list[tuple[Any, ...]]:
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(sql("SELECT key, summary FROM public.test_stored"))]


def count_store_calls() -> Counter[str]:
    with engine().begin() as connection:
        return Counter(connection.execute(sql("SELECT key FROM public.test_stage_call")).scalars())


def flow(*stages: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"stages": list(stages), **more}


def run_workflow(payload: Any, **options: Any) -> dict[str, Any]:
    """Submit a workflow, deliver it once and return its task."""
    (id_,) = submitted(1, TYPE, payload, **options)
    delivered([id_])
    return task(id_)


def read_steps(task_id: uuid.UUID) -> dict[str, Any]:
    """Return what the ledger keeps of each stage, in the order in which they finished."""
    statement = sql("SELECT name, result FROM ledger.task_step WHERE task_id = :id ORDER BY created_at")
    with engine().begin() as connection:
        return {name: result for name, result in connection.execute(statement, {"id": task_id})}  # noqa: C416
