"""A task that a request submits belongs to the trace of the request, in both lanes."""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tracing
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks.core.logs import JSON, TaskFields
from tests.api.callers import FLAKY, Callers

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CONTEXT = sql("SELECT context FROM ledger.ingest_task WHERE id = :id")


def stored_context(answer: Any) -> Any:
    with engine().connect() as connection:
        return connection.execute(CONTEXT, {"id": uuid.UUID(answer.json()["taskId"])}).scalar_one()


@pytest.mark.parametrize("path", ["/api/tasks", "/api/tasks?receipt=saved"])
def test_the_traceparent_of_a_request_is_stored_with_its_task(callers: Callers, path: str) -> None:
    caller = callers()
    answer = caller.post(path, json={"type": FLAKY}, headers={"traceparent": GIVEN})
    assert stored_context(answer) == {"principal": caller.name, "traceparent": GIVEN}
    own = GIVEN.replace("0af", "1af")
    body = {"type": FLAKY, "context": {"traceparent": own}}
    assert stored_context(caller.post(path, json=body, headers={"traceparent": GIVEN}))["traceparent"] == own
    assert tracing.current_traceparent() is None


def test_an_invalid_traceparent_of_a_request_is_ignored(callers: Callers) -> None:
    caller = callers()
    for invalid in ("x" * 10_000, "00-é", GIVEN.upper()):
        answer = caller.post("/api/tasks", json={"type": FLAKY}, headers={"traceparent": invalid.encode()})
        assert stored_context(answer) == {"principal": caller.name}


def test_a_line_about_a_request_has_its_trace_id() -> None:
    record = logging.Logger("api").makeRecord("api", logging.INFO, __file__, 1, "asked", (), None)
    with tracing.joining(GIVEN):
        assert TaskFields().filter(record)
    assert json.loads(JSON.format(record))["traceId"] == GIVEN[3:35]


def test_with_opentelemetry_the_span_of_submit_lies_between_the_request_and_the_run(
    callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "_provider", tracing._Provider())
    answer = callers().post("/api/tasks", json={"type": FLAKY}, headers={"traceparent": GIVEN})
    assert after_commit_publisher().wait_until_idle(20)
    (span,) = [span for span in exporter.get_finished_spans() if span.name == f"apply_async/{FLAKY}"]
    assert span.parent
    assert span.context
    assert not span.parent.is_remote, "FastAPI has a span for the request itself"
    assert stored_context(answer)["traceparent"] == f"{GIVEN[:36]}{span.context.span_id:016x}-01"
