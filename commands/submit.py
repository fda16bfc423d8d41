"""submit: submit one task, or many from a file of JSON lines."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from commands import times
from commands.complaint import complain
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.output import console, print_json, with_progress
from commands.wakeups import publish_wakeups

if TYPE_CHECKING:
    from tasks.submission.json_lines import Make, SubmittedLine
    from tasks.submission.submit import Submitted

RUN_AT_HELP: Final = "a time such as 2026-11-16T10:30 (UTC), or a duration from now: 10m, 2h, 3d"


def register(app: typer.Typer) -> None:
    app.command()(submit)


def submit(
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="The type of the task; omit it with --envelopes.")],
    source: Annotated[
        str | None, typer.Argument(metavar="JSON|@FILE|-", help="The payload: JSON, a file, or stdin.")
    ] = None,
    *,
    key: Annotated[str | None, typer.Option(help="Idempotency key: submitting it again returns the same task.")] = None,
    queue: Annotated[str | None, typer.Option(help="Queue, instead of the handler's own.")] = None,
    priority: Annotated[
        int | None, typer.Option(min=0, max=9, help="From 0 to 9, instead of the handler's own; 9 is the most urgent.")
    ] = None,
    run_at: Annotated[str | None, typer.Option(metavar="TIME", help=f"Do not run before TIME: {RUN_AT_HELP}.")] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help=f"Discard the task if it has not started before TIME: {RUN_AT_HELP}."),
    ] = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="The task is DEAD after this many failures.")] = None,
    notify: Annotated[str | None, typer.Option(help="Send the final status to this destination.")] = None,
    context: Annotated[
        str | None, typer.Option(metavar="JSON", help="An object to store with the task: traceId, user, ….")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Submit one task per line. All lines are checked first.")
    ] = False,
    envelopes: Annotated[
        bool, typer.Option("--envelopes", help="Read objects with type, payload, …, not payloads.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --lines, one object per line.")] = False,
) -> None:
    """Submit a task; with --lines, one task per line of JSON.

    Example: `manage.py submit demo.flaky '{"fail": 2}' --key "invoice 17"`
    """
    from tasks.submission.envelope import NewTask
    from tasks.submission.json_lines import task_from_envelope, task_from_payload

    is_only_source = envelopes and source is None
    given = type_ if is_only_source else source
    if lines and key is not None:
        raise typer.BadParameter(
            "--key names one task, but --lines submits many. Put a key into each line with --envelopes.",
            param_hint="--key",
        )
    if lines and (given is None or not (given == "-" or given.startswith("@"))):
        raise typer.BadParameter("--lines needs @FILE, or - for stdin.", param_hint="JSON|@FILE|-")
    defaults = NewTask(
        "" if is_only_source else type_,
        key=key,
        queue=queue,
        priority=priority,
        run_at=times.parse_time(run_at, "--run-at", RUN_AT_HELP),
        max_attempts=max_attempts,
        context=_context(context),
        notify=notify,
        expires=times.parse_time(expires, "--expires", RUN_AT_HELP),
    )
    make = partial(task_from_envelope if envelopes else task_from_payload, defaults)
    with publish_wakeups():
        if lines:
            _submit_lines(given or "", make, as_json=as_json)
        else:
            _submit_one(given, make, as_json=as_json)


def _submit_one(given: str | None, make: Make, *, as_json: bool) -> None:
    from models.engine import engine
    from tasks.submission.json_lines import LINE_LIMIT, read_json
    from tasks.submission.submit import submit_many

    if given is None:
        raw = b"null"
    elif given == "-" or given.startswith("@"):
        with _opened(given) as stream:
            raw = stream.read(LINE_LIMIT + 1)
    else:
        raw = given.encode(errors="surrogateescape")
    task = make(read_json(raw))
    (submitted,) = submit_many(engine(), [task])
    if as_json:
        print_json(_json_of(submitted))
    elif submitted.created:
        console.print(f"Submitted {submitted.task_id}: {submitted.status}.")
    else:
        console.print(f"{submitted.task_id} exists already with this key and payload: {submitted.status}.")


def _submit_lines(given: str, make: Make, *, as_json: bool) -> None:
    from models.engine import engine, sessions
    from tasks.core.registered_types import registered_type_names
    from tasks.submission.json_lines import check_lines, submit_lines

    with engine().connect() as connection:
        registered = registered_type_names(connection)
    with _opened(given) as opened, _rewindable(opened) as stream:
        start = stream.tell()
        found = check_lines(stream, make, registered=registered)
        if found.bad:
            for line in found.shown:
                complain(f"line {line.number:,}: {line.reason}")
            complain(f"Nothing was submitted: {found.bad:,} of {found.bad + found.good:,} lines are invalid.")
            raise typer.Exit(2)
        stream.seek(start)
        with until_interrupted() as stopped:
            tally = _Tally(found.good, as_json=as_json)
            batches = submit_lines(sessions(), stream, make)
            with_progress(tally.count(batches, stopped), total=found.good, what="submitted")
    tally.print_total()
    if tally.lines < found.good and stopped.is_set():
        complain(f"Interrupted: the lines after line {tally.last:,} were not submitted.")
        raise typer.Exit(INTERRUPTED)


class _Tally:
    """Count the submitted lines and print them on stdout; if stdout is closed, print the count on stderr."""

    def __init__(self, total: int, *, as_json: bool) -> None:
        self.total = total
        self.as_json = as_json
        self.lines = self.created = self.last = 0

    def count(self, batches: Iterator[list[SubmittedLine]], stopped: Event) -> Iterator[int]:
        try:
            for batch in batches:
                self.lines += len(batch)
                self.created += sum(line.submitted.created for line in batch)
                self.last = batch[-1].number
                if self.as_json:
                    lines = [{"line": line.number, **_json_of(line.submitted)} for line in batch]
                    self._print("\n".join(json.dumps(line, default=str) for line in lines))
                yield self.lines
                if stopped.is_set():
                    return
        except BaseException:
            with suppress(BrokenPipeError):
                self.print_total()
            raise

    def print_total(self) -> None:
        if not self.as_json:
            existed = self.lines - self.created
            self._print(f"Submitted {self.lines:,}: {self.created:,} new, {existed:,} existed already.")

    def _print(self, text: str) -> None:
        """Flush at once, to notice a closed pipe before more lines are submitted."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            rest = "" if self.lines == self.total else f", the lines after line {self.last:,} were not"
            complain(f"stdout was closed: {self.lines:,} lines were submitted{rest}.")
            raise


def _json_of(submitted: Submitted) -> dict[str, Any]:
    return {"taskId": submitted.task_id, "status": submitted.status, "created": submitted.created}


@contextmanager
def _opened(given: str) -> Iterator[BinaryIO]:
    if given == "-":
        yield sys.stdin.buffer
    else:
        with Path(given.removeprefix("@")).open("rb") as stream:
            yield stream


@contextmanager
def _rewindable(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Copy a pipe into a temporary file, because the lines are read twice."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield copy


def _context(given: str | None) -> dict[str, Any]:
    from tasks.submission.json_lines import read_json

    value = {} if given is None else read_json(given.encode(errors="surrogateescape"))
    if not isinstance(value, dict):
        raise typer.BadParameter("Give a JSON object.", param_hint="--context")
    return value
