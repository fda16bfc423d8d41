"""A keyed sink behind HTTP: a signed POST with an `Idempotency-Key`, which the service must remember.

    answer = task.sink("psp").post({"amount": 100}, step="charge")    # {"status": 201, "body": {…}}

The key is INSTALLATION-TASK-SINK-STEP, the same in every attempt. The request is guarded, limited and signed like a
webhook (`outbox/publishers/signed_post.py`). The ledger is authoritative about answers: a 2xx answer is stored as a
step of the task, so that a retry returns it and sends nothing. About the effect, only the service knows.

    2xx                                the answer is stored: committed
    408, 409, 425, 429, 5xx            the task fails, and is retried after Retry-After with the same key. 409 is how
                                       services say that the first request with this key is still running
    other answers                      Permanent: the service refuses
    no answer, or an incomplete one    the task fails, and is retried with the same key
    the worker died after the POST     the retry sends again; the service recognises the key
    the address is forbidden           SinkNotReady; nothing was sent

The ledger counts each request as unconfirmed before it is sent, and a refusal takes that back. So, for a task without a
stored answer, an operator is told `unknown` if there are unconfirmed requests, because HTTP cannot be asked, and
otherwise `not committed`.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Protocol, TypedDict
from urllib.parse import quote, urlsplit

from failpoint import failpoint
from models.driver_values import storable
from models.engine import engine
from models.errors import Unreachable
from models.sql import sql
from outbox.canonical_json import BadPayload, canonical_json
from outbox.destinations import poster_of
from outbox.publishers.address_guard import ForbiddenAddress, check_address, look_up
from outbox.publishers.signed_post import DEFAULT_PORTS, TRY_AGAIN, Answer, NoAnswer, NotAsked, Patience, Poster
from sinks.contract import Effect, EffectState, Guarantee, Sink, SinkMisused, SinkNotReady, TaskWithSteps
from tasks.core.outcomes import Permanent, TryLater
from tasks.core.steps import Steps

DEFAULT_STEP: Final = "effect"
LONGEST_KEY: Final = 255  # characters that services accept
PATIENCE: Final = Patience(request_seconds=30.0)
BODY_LIMIT: Final = 65_536
RETRY: Final = TRY_AGAIN | {409}
STEPS_OF_TASK: Final = sql("SELECT name, result FROM ledger.task_step WHERE task_id = :id ORDER BY created_at, name")


class HttpAnswer(TypedDict):
    """A 2xx answer, as the ledger stores it. The body is None if it was empty, or longer than 64 KiB."""

    status: int
    body: Any  # JSON; or text, if it was not JSON


class KeyedHttp(Sink):
    """A service that respects `Idempotency-Key`."""

    guarantee: ClassVar[Guarantee] = Guarantee.KEYED

    def __init__(self, name: str, url: str, *, key_life: timedelta) -> None:
        self.name = name
        self.url = url
        self.key_life: timedelta | None = key_life

    @property
    def conditions(self) -> Sequence[str]:
        assert self.key_life is not None
        hours = f"{self.key_life.total_seconds() / 3600:g}"
        return [
            f"The service remembers each Idempotency-Key for at least {hours} hours, and answers a repetition without "
            "repeating the effect.",
            f"No task runs later than {hours} hours after its first attempt.",
        ]

    def bind(self, task: TaskThatRemembers) -> BoundHttp:
        return BoundHttp(self, task)

    def check(self) -> str:
        """Connect without sending a request."""
        poster = self.open_poster()
        address = urlsplit(self.url)
        port = address.port or DEFAULT_PORTS[address.scheme.lower()]
        try:
            found = look_up(address.hostname or "", port)
            for each in found:
                check_address(each, allow_private=poster.allow_private)
            socket.create_connection((found[0], port), timeout=PATIENCE.connect_seconds).close()
        except ForbiddenAddress as error:
            raise SinkNotReady(f"The sink {self.name} cannot be used: {error}.") from None
        except OSError as error:
            raise Unreachable(f"{poster.origin} is unreachable: {error}.") from None
        return f"{poster.origin} accepts connections"

    def effects(self, installation: uuid.UUID, task_id: uuid.UUID) -> Sequence[Effect]:
        """Return what the ledger knows about the requests of this task."""
        del installation
        with engine().connect() as connection:
            stored = {row.name: row.result for row in connection.execute(STEPS_OF_TASK, {"id": task_id})}
        counted = _unconfirmed_step(self.name, "")
        steps = [name.removeprefix(counted) for name in stored if name.startswith(counted)]
        return [self._effect(step, stored) for step in steps]

    def close(self) -> None:
        """Nothing is open between two requests."""

    def open_poster(self) -> Poster:
        try:
            poster = poster_of(urlsplit(self.url), patience=PATIENCE, body_limit=BODY_LIMIT)
        except ValueError:  # its text would repeat the address
            raise SinkNotReady(f"The address of the sink {self.name} cannot be used: it is not a URL.") from None
        if poster.objection:
            raise SinkNotReady(f"The sink {self.name} cannot be used: {poster.objection}")
        return poster

    def _effect(self, step: str, stored: Mapping[str, Any]) -> Effect:
        if answer := stored.get(_answer_step(self.name, step)):
            return Effect(self.name, EffectState.COMMITTED, step, f"answered {answer['status']}")
        if stored[_unconfirmed_step(self.name, step)]:
            return Effect(self.name, EffectState.UNKNOWN, step, "sent, but not confirmed; the service cannot be asked")
        return Effect(self.name, EffectState.NOT_COMMITTED, step, "refused, or not sent")


class TaskThatRemembers(TaskWithSteps, Protocol):
    """What this sink needs of the running task (`task_sinks.py`)."""

    @property
    def steps(self) -> Steps: ...

    @property
    def traceparent(self) -> object: ...


@dataclass(frozen=True, slots=True)
class BoundHttp:
    """`task.sink(name)` for a service."""

    sink: KeyedHttp
    task: TaskThatRemembers

    def post(self, payload: Any, *, step: str = DEFAULT_STEP) -> HttpAnswer:
        """Send the payload as JSON, unless this step has been answered; return the answer with its status 2xx."""
        key = f"{self.task.installation}-{self.task.task_id}-{self.sink.name}-{quote(step, safe='')}"
        if len(key) > LONGEST_KEY:
            raise SinkMisused(f"The step has too long a name: an Idempotency-Key has at most {LONGEST_KEY} characters.")
        body = canonical_json(payload, what=f"payload for the sink {self.sink.name}").encode()
        with self.task.using_once(self.sink.name, step):
            answer: HttpAnswer = self.task.steps.run(_answer_step(self.sink.name, step), self._send, body, key, step)
            failpoint("http.after_keep")
        return answer

    def _send(self, body: bytes, key: str, step: str) -> HttpAnswer:
        counted = _unconfirmed_step(self.sink.name, step)
        unconfirmed = self.task.steps.read(counted) or 0
        with closing(self.sink.open_poster()) as poster:
            self.task.steps.overwrite(counted, unconfirmed + 1)
            failpoint("http.before_post")
            answer = poster.post(body, key=key, traceparent=self.task.traceparent)
            failpoint("http.after_post")
            try:
                return _read(answer, poster)
            except (Permanent, SinkNotReady):
                self.task.steps.overwrite(counted, unconfirmed)
                raise


def _answer_step(sink: str, step: str) -> str:
    return f"sink {sink}: {step}"


def _unconfirmed_step(sink: str, step: str) -> str:
    return f"unconfirmed requests of sink {sink}: {step}"


def _read(answer: Answer | NoAnswer | NotAsked, poster: Poster) -> HttpAnswer:
    """Return a 2xx answer, or raise what the table above says."""
    match answer:
        case NotAsked(reason=reason):
            raise SinkNotReady(reason)
        case NoAnswer(reason=reason):
            raise Unreachable(f"{poster.origin} did not answer: {reason}.")
    if 200 <= answer.status < 300:
        if answer.broken_off:
            raise Unreachable(f"{poster.origin} answered {answer.status}, but incompletely: {answer.broken_off}.")
        return {"status": answer.status, "body": _body(answer)}
    message = f"{poster.origin} answered {answer.status}: {poster.shown(answer.body) or '(empty body)'}"
    if answer.status in RETRY:
        raise TryLater(message, answer.retry_after_seconds or 0)
    raise Permanent(f"{message}. Redirects are not followed." if answer.status < 400 else message)


def _body(answer: Answer) -> Any:
    """Return a body that the ledger can store: the effect has happened, so this must not fail."""
    if answer.is_too_long or not answer.body.strip():
        return None
    try:
        return json.loads(canonical_json(json.loads(answer.body)))
    except (ValueError, RecursionError, BadPayload):
        return storable(answer.body.decode(errors="replace"))
