"""Every task has a trace: stored, shown to its handler, in every log line about it, and in OpenTelemetry spans."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import ProxyTracerProvider, SpanKind, StatusCode

import tracing
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from settings import current
from tasks import NewTask, Permanent, submit, submit_many
from tasks.core import batch_size
from tasks.core.logs import JSON, TEXT, TaskFields
from tasks.core.task import Task
from tasks.execution.deliver import deliver
from tasks.operations.task_details import read_task
from tests.tasks.deliveries import handled, scripted, submitted

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
ZERO = GIVEN.replace(TRACE_ID, "0" * 32)
INVALID = ["", "x", GIVEN.upper(), GIVEN[:-1], f"{GIVEN}-1", f"ff{GIVEN[2:]}", ZERO, 7, None]
CONTEXT = sql("SELECT context FROM ledger.ingest_task WHERE id = :id")

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def stored_context(id_: uuid.UUID) -> Any:
    with engine().connect() as connection:
        return connection.execute(CONTEXT, {"id": id_}).scalar_one()


def test_a_given_traceparent_is_stored_and_reaches_the_handler() -> None:
    seen: list[Task] = []
    (id_,) = scripted(lambda task, _db: seen.append(task), context={"traceparent": GIVEN, "user": "Ada"})
    assert stored_context(id_) == {"traceparent": GIVEN, "user": "Ada"}
    deliver(engine(), [id_])
    assert (seen[0].traceparent, seen[0].trace_id) == (GIVEN, TRACE_ID)
    with engine().connect() as connection:
        assert read_task(connection, id_).envelope()["traceparent"] == GIVEN


@pytest.mark.parametrize("invalid", INVALID)
def test_an_invalid_traceparent_is_replaced(invalid: Any) -> None:
    (id_,) = submitted(context={"traceparent": invalid, "user": "Ada"})
    assert stored_context(id_) == {"user": "Ada"}
    assert tracing.is_traceparent(tracing.traceparent_of(id_, {"traceparent": invalid}))


def test_a_task_without_a_traceparent_has_the_trace_of_its_id_also_if_it_was_submitted_in_sql() -> None:
    seen: list[Task] = []
    with handled("test.traced", lambda task, _db: seen.append(task)), engine().begin() as connection:
        in_sql = connection.execute(sql("SELECT ledger.ingest_submit('test.traced', '{}')")).scalar_one()
        connection.commit()
        (in_python,) = submitted(1, "test.traced")
        deliver(engine(), [in_sql, in_python])
    assert {task.trace_id for task in seen} == {in_sql.hex, in_python.hex}
    assert all(tracing.is_traceparent(task.traceparent) for task in seen)
    assert stored_context(in_python) == {}


def test_a_trace_id_in_the_context_names_the_trace_if_it_has_the_form_of_one() -> None:
    id_ = uuid.uuid4()
    own = str(uuid.UUID(TRACE_ID))
    assert tracing.trace_id_of(id_, {"traceId": own}) == TRACE_ID
    assert tracing.trace_id_of(id_, {"traceId": "order 17"}) == id_.hex
    assert tracing.trace_id_of(id_, {"traceId": own, "traceparent": GIVEN.replace("0af", "1af")}).startswith("1af")


def test_a_task_that_a_handler_submits_belongs_to_the_trace_of_its_task() -> None:
    inner: list[uuid.UUID] = []

    def submit_another(_task: Task, db: Any) -> None:
        inner.append(submit(db, "test.insert").task_id)

    (outer,) = scripted(submit_another)
    deliver(engine(), [outer])
    assert stored_context(inner[0])["traceparent"] == tracing.traceparent_of(outer, {})
    assert tracing.running_task() is None


class Lines(logging.Handler):
    """Collects log lines as programs of ours write them."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(TaskFields())
        self.json: list[dict[str, Any]] = []
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.json.append(json.loads(JSON.format(record)))
        self.text.append(TEXT.format(record))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.json if line.get("event") == event]


@pytest.fixture
def lines() -> Iterator[Lines]:
    made, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(made)
    root.setLevel(logging.INFO)
    yield made
    root.setLevel(level)
    root.removeHandler(made)


def test_successes_are_one_record_per_batch_with_their_ids(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "BATCH_SECONDS", 60.0)  # the batches are full, however slow this machine is
    ids = submitted(150)
    deliver(engine(), ids)
    records = lines.of("tasks_succeeded")
    assert sum(record["count"] for record in records) == 150
    assert [len(record["taskIds"]) for record in records] == [record["count"] for record in records]
    assert len(records) < 10
    assert sorted(id_ for record in records for id_ in record["taskIds"]) == sorted(map(str, ids))
    assert {record["type"] for record in records} == {"test.insert"}
    assert records[0]["traceIds"][0] == records[0]["taskIds"][0].replace("-", "")


def test_each_failed_attempt_is_one_record_with_code_and_attempt_and_without_the_payload(lines: Lines) -> None:
    def fail(task: Task, _db: Any) -> None:
        raise Permanent("hunter2") if task.payload["n"] else ValueError("hunter2")

    retried, dead = scripted(fail, 2, context={"traceparent": GIVEN})
    deliver(engine(), [retried, dead])
    (failed,) = lines.of("task_failed")
    assert (failed["taskId"], failed["code"], failed["attempt"], failed["level"]) == (
        *(str(retried), "handler_error", 1),
        "WARNING",
    )
    (buried,) = lines.of("task_dead")
    assert (buried["taskId"], buried["code"], buried["level"]) == (str(dead), "permanent", "ERROR")
    for record in (failed, buried):
        assert (record["type"], record["traceId"]) == ("test.scripted", TRACE_ID)
    assert "hunter2" not in str(lines.json) + str(lines.text)


def test_a_line_that_a_handler_logs_names_its_task_in_both_formats(lines: Lines) -> None:
    def log(_task: Task, _db: Any) -> None:
        logging.getLogger("shop").warning("sold out")

    (id_,) = scripted(log, context={"traceparent": GIVEN})
    deliver(engine(), [id_])
    (line,) = [line for line in lines.json if line["logger"] == "shop"]
    assert (line["taskId"], line["type"], line["traceId"]) == (str(id_), "test.scripted", TRACE_ID)
    (text,) = [text for text in lines.text if "sold out" in text]
    assert text.endswith(f"[task {id_} test.scripted trace {TRACE_ID}]")
    logging.getLogger("shop").warning("closed")
    assert "taskId" not in lines.json[-1]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Set up OpenTelemetry as a program would. Its API allows that once per process, so the provider is replaced."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "_provider", tracing._Provider())
    yield exporter
    assert after_commit_publisher().wait_until_idle(20)


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name.startswith("messaging.")}


def test_spans_of_submit_publish_and_run_are_linked_and_follow_the_messaging_conventions(
    spans: InMemorySpanExporter,
) -> None:
    inside: list[str | None] = []
    (id_,) = scripted(lambda *_: inside.append(tracing.current_traceparent()))
    assert after_commit_publisher().wait_until_idle(20)
    deliver(engine(), [id_])
    (submitted_,), (published,), (ran,) = (
        named(spans, name) for name in ("apply_async/test.scripted", "publish/celery:ingest", "run/test.scripted")
    )
    assert [span.kind for span in (submitted_, published, ran)] == [SpanKind.PRODUCER] * 2 + [SpanKind.CONSUMER]
    assert submitted_.context
    assert ran.context
    assert ran.parent
    assert ran.parent.span_id == submitted_.context.span_id
    assert [link.context.span_id for link in published.links] == [submitted_.context.span_id]
    assert inside[0]
    assert f"{ran.context.span_id:016x}" in inside[0], "the handler runs inside its span"
    trace_id = f"{submitted_.context.trace_id:032x}"
    assert tracing.trace_id_of(id_, stored_context(id_)) == trace_id == f"{ran.context.trace_id:032x}"
    expected = {"messaging.system": "redis", "messaging.batch.message_count": 1}
    sends = expected | {"messaging.operation.type": "send"}
    assert attributes(submitted_) == sends | {"messaging.operation.name": "apply_async"}
    assert attributes(published) == sends | {
        "messaging.operation.name": "publish",
        "messaging.destination.name": "celery:ingest",
    }
    assert attributes(ran) == expected | {
        "messaging.operation.type": "process",
        "messaging.operation.name": "run",
        "messaging.destination.name": "ingest",
        "messaging.message.id": str(id_),
    }


def test_the_messaging_system_of_a_span_is_the_broker_in_use(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent_with(variables: dict[str, str]) -> list[Any]:
        spans.clear()
        with monkeypatch.context() as changed:
            for name, value in variables.items():
                changed.setenv(name, value)
            current.cache_clear()
            with sessions()() as session:
                submit(session, "test.insert")
                session.rollback()
        current.cache_clear()
        return [attributes(span)["messaging.system"] for span in named(spans, "apply_async/test.insert")]

    assert sent_with({}) == ["redis"]
    assert sent_with({"BROKER_URL": "amqp://127.0.0.1:1//"}) == ["rabbitmq"]
    assert sent_with({"INGEST_QUEUE": "kafka", "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}) == ["kafka"]


def test_a_given_traceparent_is_the_parent_of_the_run_and_a_failure_has_its_code(spans: InMemorySpanExporter) -> None:
    def fail(_task: Task, _db: Any) -> None:
        raise Permanent("no")

    (id_,) = scripted(fail, context={"traceparent": GIVEN})
    assert stored_context(id_) == {"traceparent": GIVEN}
    deliver(engine(), [id_])
    (ran,), (sent,) = named(spans, "run/test.scripted"), named(spans, "apply_async/test.scripted")
    assert ran.parent
    assert sent.parent == ran.parent
    assert f"{ran.parent.trace_id:032x}-{ran.parent.span_id:016x}" in GIVEN
    assert ran.status.status_code is StatusCode.ERROR
    assert (ran.attributes or {})["error.type"] == "permanent"
    assert [event.name for event in ran.events] == ["exception"]


def test_an_error_that_cannot_be_printed_keeps_its_meaning_and_is_in_the_span(spans: InMemorySpanExporter) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail(_task: Task, _db: Any) -> None:
        raise Unprintable

    with handled("test.unprintable", fail, permanent=[Unprintable]):
        (id_,) = submitted(1, "test.unprintable")
        deliver(engine(), [id_])
    (ran,) = named(spans, "run/test.unprintable")
    assert (ran.attributes or {})["error.type"] == "permanent"
    (event,) = ran.events
    assert str((event.attributes or {})["exception.type"]).endswith("Unprintable")
    with engine().connect() as connection:
        assert read_task(connection, id_).error_code == "permanent"


def test_a_batch_handler_has_one_span_with_a_link_to_every_task(spans: InMemorySpanExporter) -> None:
    with sessions().begin() as session:
        news = [NewTask("test.many", context={"traceparent": GIVEN}), NewTask("test.many"), NewTask("test.insert")]
        ids = [each.task_id for each in submit_many(session, news)]
    assert len(named(spans, "apply_async/test.many")) == len(named(spans, "apply_async/test.insert")) == 1
    deliver(engine(), ids)
    (ran,) = named(spans, "run/test.many")
    assert attributes(ran)["messaging.batch.message_count"] == 2
    (of_submit,) = named(spans, "apply_async/test.many")
    assert of_submit.context
    found = {link.context.trace_id for link in ran.links}
    assert found == {int(TRACE_ID, 16), of_submit.context.trace_id}


def test_the_relay_records_one_span_per_batch_with_links_to_its_tasks(spans: InMemorySpanExporter) -> None:
    with engine().begin() as connection:
        ids = [
            connection.execute(sql("SELECT ledger.ingest_submit('test.insert', '{}')")).scalar_one() for _ in range(3)
        ]
    relay = Relay.of(current())
    relay.tick()
    relay.close()
    (published,) = named(spans, "publish/celery:ingest")
    assert attributes(published)["messaging.batch.message_count"] == 3
    assert {link.context.trace_id for link in published.links} == {id_.int for id_ in ids}


def test_nothing_is_recorded_without_a_provider_or_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(trace.get_tracer_provider(), ProxyTracerProvider)
    assert not tracing.is_on()
    monkeypatch.setattr(tracing, "has_packages", False)
    monkeypatch.delattr(tracing, "otel")
    monkeypatch.delattr(tracing, "otel_context")
    (id_,) = submitted()
    deliver(engine(), [id_])
    assert stored_context(id_) == {}
