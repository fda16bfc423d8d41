"""submit: put tasks into the ledger, one or many."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from commands import times
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.output import complain, console, print_json, with_progress
from commands.wakeups import publish_wakeups

if TYPE_CHECKING:
    from tasks.submission.json_lines import Make, SubmittedLine
    from tasks.submission.submit import Submitted


def register(app: typer.Typer) -> None:
    app.command()(submit)


def submit(
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="Whose handler runs it; not needed with --envelopes.")],
    source: Annotated[
        str | None, typer.Argument(metavar="JSON|@FILE|-", help="The payload, a file with it, or stdin.")
    ] = None,
    *,
    key: Annotated[str | None, typer.Option(help="Submitted again with the same key, it is the same task.")] = None,
    queue: Annotated[str | None, typer.Option(help="Another queue than its handler's.")] = None,
    priority: Annotated[int, typer.Option(min=0, max=9, help="9 is the most urgent.")] = 5,
    run_at: Annotated[str | None, typer.Option(help="Not before a time (2026-11-16T10:30), or in 90s, 2h, 3d.")] = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Failures until it is DEAD.")] = None,
    notify: Annotated[str | None, typer.Option(help="A destination that is told the final status.")] = None,
    context: Annotated[str | None, typer.Option(metavar="JSON", help="An object: traceId, user, ….")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line is a payload. All are checked first.")] = False,
    envelopes: Annotated[bool, typer.Option("--envelopes", help="Envelopes (type, payload, …), not payloads.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --lines, one object per line.")] = False,
) -> None:
    """Submit a task, or with --lines one for each line of JSON.

    Example: `manage.py submit demo.flaky '{"fail": 2}' --key "invoice 17"`
    """
    from tasks.submission.json_lines import Template  # noqa: PLC0415 - loads SQLAlchemy

    is_only_source = envelopes and source is None
    given = type_ if is_only_source else source
    if lines and key is not None:
        raise typer.BadParameter("A key belongs to one task, and --lines makes many.", param_hint="--key")
    if lines and (given is None or not (given == "-" or given.startswith("@"))):
        raise typer.BadParameter("With --lines it is @FILE or - (stdin).", param_hint="JSON|@FILE|-")
    template = Template(
        None if is_only_source else type_,
        key,
        queue,
        priority,
        _from_now(run_at),
        max_attempts,
        _context(context),
        notify,
    )
    make = template.of_envelope if envelopes else template.of_payload
    with publish_wakeups():
        if lines:
            _submit_lines(given or "", make, as_json=as_json)
        else:
            _submit_one(given, make, as_json=as_json)


def _submit_one(given: str | None, make: Make, *, as_json: bool) -> None:
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.submission.json_lines import LINE_LIMIT, read_json  # noqa: PLC0415
    from tasks.submission.submit import submit_many  # noqa: PLC0415

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
        console.print(f"Submitted {submitted.task_id}: it is {submitted.status}.")
    else:
        console.print(f"{submitted.task_id} exists already with this key and payload: it is {submitted.status}.")


def _submit_lines(given: str, make: Make, *, as_json: bool) -> None:
    from models.engine import sessions  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.submission.json_lines import check, submit_lines  # noqa: PLC0415

    with _opened(given) as opened, _rewindable(opened) as stream:
        start = stream.tell()
        found = check(stream, make)
        if found.bad:
            for line in found.shown:
                complain(f"line {line.number:,}: {line.reason}")
            complain(f"Nothing was submitted: {found.bad:,} of {found.bad + found.good:,} lines are bad.")
            raise typer.Exit(2)
        stream.seek(start)
        with until_interrupted() as stopped:
            tally = _Tally(found.good, as_json=as_json)
            batches = submit_lines(sessions(), stream, make)
            with_progress(tally.of(batches, stopped), total=found.good, what="submitted")
    tally.say()
    if tally.lines < found.good and stopped.is_set():
        complain(f"Interrupted: the lines after line {tally.last:,} are not submitted.")
        raise typer.Exit(INTERRUPTED)


class _Tally:
    """What was submitted so far, said on stdout; if nobody reads that, on stderr."""

    def __init__(self, total: int, *, as_json: bool) -> None:
        self.total = total
        self.as_json = as_json
        self.lines = self.created = self.last = 0

    def of(self, batches: Iterator[list[SubmittedLine]], stopped: Event) -> Iterator[int]:
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
                self.say()
            raise

    def say(self) -> None:
        if not self.as_json:
            existed = self.lines - self.created
            self._print(f"Submitted {self.lines:,}: {self.created:,} new, {existed:,} existed already.")

    def _print(self, said: str) -> None:
        """At once, so that a reader who has gone is missed before more is submitted."""
        try:
            print(said, flush=True)
        except BrokenPipeError:
            rest = "" if self.lines == self.total else f", the lines after line {self.last:,} are not"
            complain(f"Nobody reads what is printed here: {self.lines:,} lines are submitted{rest}.")
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
    """What comes through a pipe is kept in a file: lines are read twice."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield copy


def _from_now(given: str | None) -> datetime | timedelta | None:
    try:
        return times.moment(given)
    except typer.BadParameter:
        raise typer.BadParameter(
            f"{given!r} is not a time (2026-11-16T10:30, UTC unless it says otherwise) or how long from now (10m, 2h).",
            param_hint="--run-at",
        ) from None


def _context(given: str | None) -> dict[str, Any]:
    from tasks.submission.json_lines import read_json  # noqa: PLC0415 - loads SQLAlchemy

    value = {} if given is None else read_json(given.encode(errors="surrogateescape"))
    if not isinstance(value, dict):
        raise typer.BadParameter("It is a JSON object.", param_hint="--context")
    return value
