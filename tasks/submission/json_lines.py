"""Tasks as JSON text: one value, or many lines of it. All lines are checked before the first is submitted.

Memory does not grow with the number of lines: they are read twice, once to check and once to submit, a thousand in one
transaction. Each thousand is there as a whole or not at all, and whoever is stopped says which lines are submitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, BinaryIO, Final

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from models.errors import CeleriacError, Misuse
from outbox.canonical import MAX_BYTES
from tasks.core.task_ids import keyed_id
from tasks.submission.envelope import NewTask, Submission, checked
from tasks.submission.submit import CHUNK, IdempotencyConflict, Submitted, submit_many

LINE_LIMIT: Final = 4 * MAX_BYTES  # before parsing; as it is stored, MAX_BYTES is the most
SHOWN: Final = 20
TOO_LONG: Final = f"It has more than {LINE_LIMIT:,} bytes."
_BOM: Final = b"\xef\xbb\xbf"
Make = Callable[[Any], NewTask]


class BadJson(Misuse):
    """This is not JSON."""

    code = "bad_json"


class SubmitStopped(CeleriacError):
    """Some lines are submitted, and the others are not."""

    code = "submit_stopped"


@dataclass(frozen=True, slots=True)
class Template:
    """What all tasks of one command have in common."""

    type: str | None = None
    key: str | None = None
    queue: str | None = None
    priority: int = 5
    run_at: datetime | timedelta | None = None
    max_attempts: int | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    notify: str | None = None

    def of_payload(self, payload: Any) -> NewTask:
        return NewTask(
            self.type or "",
            payload,
            self.key,
            self.queue,
            self.priority,
            self.run_at,
            None,
            self.max_attempts,
            self.context,
            self.notify,
        )

    def of_envelope(self, value: Any) -> NewTask:
        """What the envelope says goes before what the command says."""
        given = {"type": self.type, **value} if self.type and isinstance(value, dict) else value
        try:
            envelope = Submission.model_validate(given)
        except ValidationError as error:
            raise BadJson(f"It is no envelope: {said(error)}.") from None
        new = envelope.new_task()
        return replace(
            new,
            key=self.key if new.key is None else new.key,  # an empty one is refused, not replaced
            queue=new.queue or self.queue,
            priority=new.priority if "priority" in envelope.model_fields_set else self.priority,
            run_at=new.run_at or self.run_at,
            max_attempts=new.max_attempts or self.max_attempts,
            context={**self.context, **new.context},
            notify=self.notify if new.notify is None else new.notify,
        )


@dataclass(frozen=True, slots=True)
class BadLine:
    """Why one line cannot be submitted."""

    number: int
    reason: str


@dataclass(slots=True)
class CheckedLines:
    """How many lines there are, how many of them are bad, and the first few of those."""

    good: int = 0
    bad: int = 0
    shown: list[BadLine] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SubmittedLine:
    """A line that is in the ledger."""

    number: int
    submitted: Submitted


def read_json(raw: bytes) -> Any:
    """Raises BadJson, in a sentence."""
    if len(raw) > LINE_LIMIT:
        raise BadJson(TOO_LONG)
    try:
        return json.loads(raw.removeprefix(_BOM))
    except RecursionError:
        raise BadJson("It is nested too deeply.") from None
    except UnicodeDecodeError:
        raise BadJson("It is not UTF-8.") from None
    except ValueError as error:
        raise BadJson(f"It is not JSON: {error}.") from None


def read_envelope(raw: bytes) -> NewTask:
    """Raises Misuse, in a sentence."""
    return Template().of_envelope(read_json(raw))


def said(error: ValidationError) -> str:
    """What is wrong and where; never what was given."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


def check(stream: BinaryIO, make: Make) -> CheckedLines:
    """Every line, to the end; nothing is written."""
    found = CheckedLines()
    for number, raw in _lines(stream):
        try:
            checked(_made(raw, make))
            found.good += 1
        except Misuse as error:
            found.bad += 1
            if len(found.shown) < SHOWN:
                found.shown.append(BadLine(number, error.message))
    return found


def submit_lines(sessions: sessionmaker[Session], stream: BinaryIO, make: Make) -> Iterator[list[SubmittedLine]]:
    """Yields the lines of each transaction after its commit. SubmitStopped says what is submitted and what is not."""
    last = 0
    for chunk in _chunks(_lines(stream)):
        try:
            tasks = [_made(raw, make) for _, raw in chunk]
            with sessions.begin() as session:
                submitted = submit_many(session, tasks)
        except IdempotencyConflict as conflict:
            twins = [number for (number, _), task in zip(chunk, tasks, strict=True) if _id_of(task) == conflict.task_id]
            raise SubmitStopped(f"{_named(twins)}: {conflict.message} {_how_far(last)}") from None
        except DBAPIError as error:
            reason = str(error).partition("\n")[0]
            numbers = f"{chunk[0][0]:,} to {chunk[-1][0]:,}"
            doubt = f" Nobody knows whether lines {numbers} are." if error.connection_invalidated else ""
            raise SubmitStopped(f"The database refused: {reason} {_how_far(last)}{doubt}") from None
        except CeleriacError as error:
            if not last:
                raise
            raise SubmitStopped(f"{error.message} {_how_far(last)}") from None
        last = chunk[-1][0]
        yield [SubmittedLine(number, each) for (number, _), each in zip(chunk, submitted, strict=True)]


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each line with its number; an empty one is none. Of one that is too long only the beginning is read."""
    number = 0
    while raw := stream.readline(LINE_LIMIT + 1):
        number += 1
        if raw.strip():
            yield number, raw.strip()
        while len(raw) > LINE_LIMIT and not raw.endswith(b"\n"):
            raw = stream.readline(LINE_LIMIT + 1)  # the rest of the same line


def _chunks(lines: Iterator[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    chunk: list[tuple[int, bytes]] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _made(raw: bytes, make: Make) -> NewTask:
    return make(read_json(raw))


def _id_of(task: NewTask) -> Any:
    return keyed_id(task.type, task.key) if task.key else None


def _named(numbers: Sequence[int]) -> str:
    return f"Line {numbers[0]:,}" if len(numbers) == 1 else f"Lines {', '.join(f'{number:,}' for number in numbers)}"


def _how_far(last: int) -> str:
    if not last:
        return "Nothing was submitted."
    return f"Up to line {last:,} all are submitted, from line {last + 1:,} on none is."
