"""Count the rows of tasks that a statement reads, with EXPLAIN ANALYZE. The statement is executed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection

from models.sql import sql


def rows_read(connection: Connection, statement: Any, values: dict[str, Any], *, part: str | None = None) -> int:
    """Return how many rows of tasks a statement, or its `WITH part`, reads, including those that a filter removes."""
    explain = sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.text}")
    plan: dict[str, Any] = connection.execute(explain, values).scalar_one()[0]["Plan"]
    if part:
        (plan,) = (node for node in plan["Plans"] if node.get("Subplan Name") == f"CTE {part}")
    return sum(_read(plan))


def _read(node: dict[str, Any]) -> Iterator[int]:
    if node.get("Relation Name") == "ingest_task" and "Scan" in node["Node Type"]:
        yield int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
    for below in node.get("Plans", ()):
        yield from _read(below)
