"""Traces: the W3C `traceparent` of a task, and OpenTelemetry spans if its packages are installed and set up.

Every task has a trace. `context.traceparent` names it if the submitter gave one, or if the task was submitted inside a
span, an HTTP request or a handler that has a trace. Otherwise the trace is made from the task's id, which has as many
bits as a trace id: nothing is stored for it, and tasks that were submitted in SQL have it, too.

Spans, with OpenTelemetry: `apply_async/<type>` when tasks are submitted, `publish/<destination>` for each batch of the
outbox, `run/<type>` for each call of a handler. Nothing is recorded without the packages, or without a tracer
provider.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Final, Protocol

import settings

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace as otel
except ImportError:  # the packages are optional
    has_packages = False
else:
    has_packages = True

TRACEPARENT: Final = "traceparent"
FORMAT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
TRACE_ID: Final = re.compile("(?!0{32})[0-9a-f]{32}")
LOOK_SECONDS: Final = 1.0
MOST_LINKS: Final = 100  # of one span; OpenTelemetry's own limit is 128


SYSTEMS: Final = {"redis-stream": "redis", "rediss-stream": "redis", "amqp": "rabbitmq", "amqps": "rabbitmq"}


class TracedTask(Protocol):
    """What a trace needs to know about a task."""

    @property
    def id(self) -> uuid.UUID: ...
    @property
    def type(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def traceparent(self) -> str: ...
    @property
    def trace_id(self) -> str: ...


_task: Final[ContextVar[TracedTask | None]] = ContextVar("celeriac_task", default=None)
_joined: Final[ContextVar[str | None]] = ContextVar("celeriac_traceparent", default=None)


def is_traceparent(value: object) -> bool:
    return isinstance(value, str) and FORMAT.fullmatch(value) is not None


def traceparent_of(task_id: uuid.UUID, context: Mapping[str, Any]) -> str:
    """Return the traceparent of a task: the stored one, or one that is made from `context.traceId` or from its id."""
    trace_id = task_id.hex
    if context and isinstance(context, Mapping):
        given = context.get(TRACEPARENT)
        if isinstance(given, str) and FORMAT.fullmatch(given):
            return given
        own = str(context.get("traceId", "")).replace("-", "").lower()
        trace_id = own if TRACE_ID.fullmatch(own) else trace_id
    return f"00-{trace_id}-{task_id.hex[16:]}-01"


def trace_id_of(task_id: uuid.UUID, context: Mapping[str, Any]) -> str:
    return traceparent_of(task_id, context)[3:35]


def running_task() -> TracedTask | None:
    """Return the task whose handler runs here; None outside a handler and in a batch handler."""
    return _task.get()


def joined_traceparent() -> str | None:
    """Return the trace of the HTTP request that is answered here, if it has one."""
    return _joined.get()


def task_fields(event: str, task: TracedTask) -> dict[str, Any]:
    """Return the fields of a log record that states a fact about a task."""
    return {"event": event, "taskId": str(task.id), "type": task.type, "traceId": task.trace_id}


def batch_fields(tasks: Sequence[TracedTask]) -> dict[str, Any]:
    """Return the fields of a record about tasks of one type and queue."""
    fields: dict[str, Any] = {"type": tasks[0].type, "queue": tasks[0].queue, "count": len(tasks)}
    if len(tasks) == 1:
        fields |= {"taskId": str(tasks[0].id), "traceId": tasks[0].trace_id}
    fields["taskIds"] = [str(task.id) for task in tasks]
    fields["traceIds"] = list(dict.fromkeys(task.trace_id for task in tasks))
    return fields


def current_traceparent() -> str | None:
    """Return the trace that a task submitted here belongs to: of the current span, handler or request; or None."""
    if is_on():
        span = otel.get_current_span().get_span_context()
        if span.is_valid:
            return _write(span)
    task = _task.get()
    return _joined.get() if task is None else task.traceparent


@contextmanager
def joining(traceparent: str) -> Iterator[None]:
    """Let tasks that are submitted in the block belong to this trace, unless it is not a valid traceparent."""
    token = _joined.set(traceparent if is_traceparent(traceparent) else None)
    try:
        yield
    finally:
        _joined.reset(token)


def is_on() -> bool:
    """Return whether spans are recorded: the packages are installed, and the program has set a tracer provider."""
    return has_packages and _provider.is_set()


class _Provider:
    """Remembers that the program has set a tracer provider; until then it looks once a second, because that is slow."""

    __slots__ = ("_is_set", "_look_at")

    def __init__(self) -> None:
        self._is_set = False
        self._look_at = 0.0

    def is_set(self) -> bool:
        if not self._is_set and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._is_set = not isinstance(otel.get_tracer_provider(), otel.ProxyTracerProvider)
        return self._is_set


_provider = _Provider()


@contextmanager
def submitting(contexts: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, str]]:
    """Record a span `apply_async/<type>` for each type. Yield the traceparent that tasks of each type get.

    `contexts` has the contexts of the tasks by type, unchecked. If they give one trace, the span belongs to it.
    """
    spans = {}
    for type_, some in contexts.items():
        values = (context.get(TRACEPARENT) for context in some if isinstance(context, Mapping))
        given = {value for value in values if is_traceparent(value)}
        parent = _parent(given.pop() if len(given) == 1 else None)
        attributes = _attributes(_broker(), "send", "apply_async", count=len(some)) | {"celeriac.task.type": type_}
        name = f"apply_async/{type_}"
        spans[type_] = _tracer().start_span(name, parent, kind=otel.SpanKind.PRODUCER, attributes=attributes)
    try:
        yield {type_: _write(span.get_span_context()) for type_, span in spans.items()}
    except BaseException as error:
        for span in spans.values():
            _record_error(span, error, getattr(error, "code", ""))
        raise
    finally:
        for span in spans.values():
            span.end()


@contextmanager
def publishing(destination: str, events: Sequence[Any]) -> Iterator[None]:
    """Record a span `publish/<destination>` for one batch of outbox events, linked with the traces of its events."""
    if not is_on():
        yield
        return
    attributes = _attributes(_system_of(destination), "send", "publish", destination=destination, count=len(events))
    with _tracer().start_as_current_span(
        f"publish/{destination}",
        otel_context.Context(),  # a batch belongs to several traces, so it is a trace of its own
        kind=otel.SpanKind.PRODUCER,
        attributes=attributes,
        links=_links(_traceparent_of_event(event) for event in events),
    ):
        yield


class Run:
    """One call of a handler: the task for log lines and for tasks that it submits, and its span if spans are on.

    It is not a context manager, because `call_handler` must decide between `enter` and `leave` what the error means.
    """

    __slots__ = ("_attached", "_span", "_token")

    def __init__(self, tasks: Sequence[TracedTask], *, is_batch: bool) -> None:
        self._token: Token[TracedTask | None] = _task.set(None if is_batch else tasks[0])
        self._span: Any = None
        self._attached: Any = None
        if is_on():
            self._start_span(tasks, is_batch=is_batch)

    def _start_span(self, tasks: Sequence[TracedTask], *, is_batch: bool) -> None:
        first = tasks[0]
        attributes = _attributes(_broker(), "process", "run", destination=first.queue, count=len(tasks))
        attributes["celeriac.task.type"] = first.type
        if not is_batch:
            attributes["messaging.message.id"] = str(first.id)
        self._span = _tracer().start_span(
            f"run/{first.type}",
            otel_context.Context() if is_batch else _context(first.traceparent),
            kind=otel.SpanKind.CONSUMER,
            attributes=attributes,
            links=_links(task.traceparent for task in tasks) if is_batch else (),
        )
        self._attached = otel_context.attach(otel.set_span_in_context(self._span))

    @property
    def is_recorded(self) -> bool:
        return self._span is not None and bool(self._span.is_recording())

    def fail(self, error: BaseException, code: str) -> None:
        """Record a failed attempt with its error code."""
        _record_error(self._span, error, code)

    def leave(self) -> None:
        _task.reset(self._token)
        if self._span is not None:
            otel_context.detach(self._attached)
            self._span.end()


def _tracer() -> Any:
    return otel.get_tracer("celeriac")


def _broker() -> str:
    """Return `messaging.system` of wake-ups."""
    current = settings.current()
    if current.ingest_queue == "kafka":
        return "kafka"
    return "redis" if current.broker_url.startswith("redis") else "rabbitmq"


def _system_of(destination: str) -> str:
    if destination.startswith("celery:"):
        return _broker()
    scheme = settings.current().outbox_destinations.get(destination, "").partition(":")[0]
    return SYSTEMS.get(scheme, scheme)


def _attributes(system: str, type_: str, name: str, *, destination: str = "", count: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {
        "messaging.system": system,
        "messaging.operation.type": type_,
        "messaging.operation.name": name,
        "messaging.batch.message_count": count,
    }
    return found | ({"messaging.destination.name": destination} if destination else {})


def _record_error(span: Any, error: BaseException, code: str) -> None:
    span.set_attribute("error.type", code or type(error).__qualname__)
    try:
        span.record_exception(error)
    except Exception:  # its text cannot be shown; the task must fail with its own error and not with this one
        span.add_event("exception", {"exception.type": type(error).__qualname__})
    span.set_status(otel.Status(otel.StatusCode.ERROR, type(error).__qualname__))


def _traceparent_of_event(event: Any) -> str | None:
    """Return the traceparent in the headers of an event; for a wake-up without one, that of its first task."""
    given = event.headers.get(TRACEPARENT)
    if given is None and isinstance(event.payload, Mapping) and (ids := event.payload.get("ids")):
        return traceparent_of(uuid.UUID(ids[0]), {})
    return given if is_traceparent(given) else None


def _links(traceparents: Iterable[str | None]) -> list[Any]:
    found = list(dict.fromkeys(each for each in traceparents if each))[:MOST_LINKS]
    return [otel.Link(_read(each)) for each in found]


def _parent(given: str | None) -> Any:
    """Return the OpenTelemetry context with the given trace; without one, with the current trace."""
    current = current_traceparent()
    if given is not None and given != current:
        return _context(given)
    return None if otel.get_current_span().get_span_context().is_valid else _context(current)


def _context(traceparent: str | None) -> Any:
    """Return the OpenTelemetry context of a span whose parent this is; the current context if there is none."""
    if traceparent is None:
        return None
    return otel.set_span_in_context(otel.NonRecordingSpan(_read(traceparent)))


def _read(traceparent: str) -> Any:
    found = FORMAT.fullmatch(traceparent)
    assert found
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return otel.SpanContext(trace_id, span_id, is_remote=True, trace_flags=otel.TraceFlags(flags))


def _write(span: Any) -> str:
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
