"""Tasks as JSON text: one value, or many lines. All lines are checked before the first one is submitted.

The lines are read twice, once to check and once to submit, so memory does not grow with their number. A thousand lines
are one transaction: they are submitted all or not at all. If submitting stops, the error says which lines are
submitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, BinaryIO, Final

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from models.errors import CeleriacError, Misuse
from outbox.canonical_json import MAX_BYTES, MAX_DEPTH, NumberTooLong, PayloadTooDeep, PayloadTooLarge
from tasks.core.registry import find
from tasks.core.task_ids import keyed_id
from tasks.submission.envelope import FIELDS, BadTask, NewTask, TaskEnvelope, UnknownField, check_task
from tasks.submission.submit import CHUNK, IdempotencyConflict, Submitted, submit_many

LINE_LIMIT: Final = 4 * MAX_BYTES  # of the text; MAX_BYTES is the limit of the payload as it is stored
SHOWN: Final = 20
TOO_LONG: Final = f"It has more than {LINE_LIMIT:,} bytes."
_BOM: Final = b"\xef\xbb\xbf"
Make = Callable[[Any], NewTask]


class BadJson(Misuse):
    """The text is not valid JSON.

    It is not UTF-8, or it breaks a rule of JSON.
    """

    code = "bad_json"
    remedy = "Correct the text at the place that the message names."


class SubmitStopped(CeleriacError):
    """Some lines were submitted, and the others were not.

    A line conflicts with an existing key, or the database failed after some lines were committed.
    """

    code = "submit_stopped"
    remedy = "Correct the cause, then submit the rest from the line that the message names. Keys prevent duplicates."


@dataclass(frozen=True, slots=True)
class BadLine:
    """Why one line cannot be submitted."""

    number: int
    reason: str


@dataclass(slots=True)
class CheckedLines:
    """The number of good and of bad lines, and the first bad ones."""

    good: int = 0
    bad: int = 0
    shown: list[BadLine] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SubmittedLine:
    """A line that was submitted."""

    number: int
    submitted: Submitted


def read_json(raw: bytes) -> Any:
    """Parse JSON, or raise BadJson. JSON that is too large for us raises the error of a payload that is too large."""
    if len(raw) > LINE_LIMIT:
        raise PayloadTooLarge(TOO_LONG)
    try:
        return json.loads(raw.removeprefix(_BOM))
    except RecursionError:
        raise PayloadTooDeep(f"It is nested too deeply: more than {MAX_DEPTH} levels.") from None
    except UnicodeDecodeError:
        raise BadJson("It is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise BadJson(f"It is not JSON: {error}.") from None
    except ValueError:  # `int` refuses very long numbers, because it would be slow
        raise NumberTooLong from None


def read_envelope(raw: bytes) -> NewTask:
    """Parse the JSON text of an envelope, or raise Misuse."""
    return task_from_envelope(NewTask(""), read_json(raw))


def task_from_payload(defaults: NewTask, payload: Any) -> NewTask:
    """Return the defaults with this payload."""
    return replace(defaults, payload=payload)


def task_from_envelope(defaults: NewTask, value: Any) -> NewTask:
    """Return the task of an envelope. What the envelope does not say comes from the defaults."""
    given = {"type": defaults.type, **value} if defaults.type and isinstance(value, dict) else value
    try:
        envelope = TaskEnvelope.model_validate(given)
    except ValidationError as error:
        raise _translate(error.errors()) from None
    new = envelope.new_task()
    return replace(
        new,
        key=defaults.key if new.key is None else new.key,  # an empty key is refused later, not replaced here
        queue=new.queue or defaults.queue,
        priority=defaults.priority if new.priority is None else new.priority,
        run_at=new.run_at or defaults.run_at,
        max_attempts=new.max_attempts or defaults.max_attempts,
        context={**defaults.context, **new.context},
        notify=defaults.notify if new.notify is None else new.notify,
        expires=new.expires or defaults.expires,
    )


def _translate(errors: Sequence[Any]) -> Misuse:
    unknown = next((error for error in errors if error["type"] == "extra_forbidden"), None)
    if unknown is None:
        return BadTask(f"The task is invalid: {describe_invalid(errors)}.")
    name = ".".join(map(str, unknown["loc"]))[:100]
    return UnknownField(f"There is no field {name!r}. Known: {FIELDS}.")


def describe_invalid(errors: Sequence[Any], *, skip: int = 0) -> str:
    """Return what is wrong with the first invalid field, without its value. `skip` cuts the head of its path."""
    first = errors[0]
    name = ".".join(str(part) for part in first["loc"][skip:])
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"`{name}` must be a JSON object" if name else "it must be a JSON object"
    if first["type"] == "missing":
        return f"`{name}` is required"
    message = first["msg"].removeprefix("Value error, ")
    return f"`{name}`: {message[0].lower()}{message[1:]}" if name else message


def check_lines(stream: BinaryIO, make: Make, *, registered: Collection[str] = ()) -> CheckedLines:
    """Check every line without submitting any. `registered`: the types that the ledger knows."""
    found = CheckedLines()
    for number, raw in _lines(stream):
        try:
            task = make(read_json(raw))
            if check_task(task).batch is None and task.type not in registered:
                find(task.type)  # raises UnknownType
            found.good += 1
        except Misuse as error:
            found.bad += 1
            if len(found.shown) < SHOWN:
                found.shown.append(BadLine(number, error.message))
    return found


def submit_lines(sessions: sessionmaker[Session], stream: BinaryIO, make: Make) -> Iterator[list[SubmittedLine]]:
    """Submit the lines and yield those of each transaction after its commit.

    SubmitStopped says which lines are submitted.
    """
    last = 0
    lines = _lines(stream)
    while chunk := list(islice(lines, CHUNK)):
        try:
            tasks = [make(read_json(raw)) for _, raw in chunk]
            with sessions.begin() as session:
                submitted = submit_many(session, tasks)
        except IdempotencyConflict as conflict:
            numbers = [
                f"{number:,}"
                for (number, _), task in zip(chunk, tasks, strict=True)
                if task.key and keyed_id(task.type, task.key) == conflict.task_id
            ]
            named = f"Line{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            raise SubmitStopped(f"{named}: {conflict.message} {_how_far(last)}") from None
        except DBAPIError as error:
            reason = str(error).partition("\n")[0]
            doubt = (
                f" Lines {chunk[0][0]:,} to {chunk[-1][0]:,} may or may not be." if error.connection_invalidated else ""
            )
            raise SubmitStopped(f"The database refused: {reason} {_how_far(last)}{doubt}") from None
        except CeleriacError as error:
            if not last:
                raise
            raise SubmitStopped(f"{error.message} {_how_far(last)}") from None
        last = chunk[-1][0]
        yield [SubmittedLine(number, each) for (number, _), each in zip(chunk, submitted, strict=True)]


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers. Only the beginning of a line that is too long is read."""
    number = 0
    while raw := stream.readline(LINE_LIMIT + 1):
        number += 1
        if raw.strip():
            yield number, raw.strip()
        while len(raw) > LINE_LIMIT and not raw.endswith(b"\n"):
            raw = stream.readline(LINE_LIMIT + 1)  # the rest of the same line


def _how_far(last: int) -> str:
    if not last:
        return "Nothing was submitted."
    return f"The lines up to {last:,} are submitted, those from {last + 1:,} on are not."
