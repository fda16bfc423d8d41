"""ingest: files and folders into the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

import settings
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.output import camel, complain, console, on_stderr, print_json, with_progress
from commands.plain_lines import plain
from commands.wakeups import publish_wakeups
from models.status import TaskStatus

if TYPE_CHECKING:
    from documents.collect import Failed, Found
    from tasks.operations.wait_final import Statuses
    from tasks.submission.submit import Submitted

SHOWN: Final = 20

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command()(ingest)


def ingest(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files, and folders with all below them.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which files.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until their tasks are done.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait at most.")] = 600,
    as_json: Json = False,
) -> None:
    """Upload text, Markdown, HTML and PDF files, to be searched. The same file again is not read again.

    Hidden files and other kinds are skipped. A file's name is its path below the folder that was given.

    Example: `manage.py ingest docs/ --wait`
    """
    from documents.collect import find  # noqa: PLC0415 - loads SQLAlchemy

    found = find(paths, most_bytes=settings.current().document_max_bytes)
    uploaded = _Uploaded(found)
    with until_interrupted() as stopped:
        if not dry_run:
            with publish_wakeups():
                with_progress(_upload(uploaded, stopped), total=len(found.files), what="uploaded")
            if wait:
                uploaded.statuses = _wait(uploaded.submitted, timeout, stopped)
            uploaded.dead = _dead(uploaded.submitted)
    if as_json:
        print_json(_json_of(uploaded, dry_run=dry_run))
    else:
        _print(uploaded, dry_run=dry_run)
    is_failed = _complain(uploaded)
    if stopped.is_set():
        complain("Interrupted: it is safe to run it again.")
        raise typer.Exit(INTERRUPTED)
    if is_failed:
        raise typer.Exit(1)


@dataclass(slots=True)
class _Uploaded:
    """What became of the files so far."""

    found: Found
    submitted: dict[str, Submitted] = field(default_factory=dict)  # by name
    statuses: Statuses | None = None  # after waiting
    dead: dict[str, str] = field(default_factory=dict)  # by name: of what; since an earlier upload, or since now

    @property
    def failed(self) -> list[Failed]:
        return self.found.failed


def _upload(uploaded: _Uploaded, stopped: Event) -> Iterator[int]:
    """A transaction for each: one that is refused costs the others nothing."""
    import documents  # noqa: PLC0415
    from documents.collect import Failed, shown  # noqa: PLC0415
    from models.engine import sessions  # noqa: PLC0415 - loads SQLAlchemy
    from models.errors import Misuse  # noqa: PLC0415

    for done, (name, path) in enumerate(uploaded.found.files.items(), 1):
        try:
            content = path.read_bytes()
            with sessions().begin() as session:
                uploaded.submitted[name] = documents.upload(session, name=name, content=content)
        except Misuse as refused:
            uploaded.failed.append(Failed(shown(path), refused.message))
        except OSError as error:
            uploaded.failed.append(Failed(shown(path), error.strerror or str(error)))
        yield done
        if stopped.is_set():
            return


def _wait(submitted: dict[str, Submitted], seconds: float, stopped: Event) -> Statuses:
    """Of those that were not done already: nobody waits for a task that was pruned."""
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations.listing import FINAL  # noqa: PLC0415
    from tasks.operations.wait_final import Statuses, in_words, watch  # noqa: PLC0415

    statuses: Statuses = Statuses()
    if ids := [each.task_id for each in submitted.values() if each.status not in FINAL]:
        with on_stderr.status("…") as shown:
            for statuses in watch(engine(), ids, seconds=seconds, stopped=stopped):
                shown.update(in_words(statuses))
    return statuses


def _dead(submitted: dict[str, Submitted]) -> dict[str, str]:
    from documents.store import deaths  # noqa: PLC0415
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy

    with engine().connect() as connection:
        found = deaths(connection, [each.task_id for each in submitted.values()])
    return {name: found[each.task_id] for name, each in submitted.items() if each.task_id in found}


def _complain(uploaded: _Uploaded) -> bool:
    """Says what failed, if something did. What a newer upload has replaced (DISCARDED) is no failure."""
    from tasks.operations.wait_final import Statuses, in_words  # noqa: PLC0415 - loads SQLAlchemy

    for name, said in list(uploaded.dead.items())[:SHOWN]:
        task_id = uploaded.submitted[name].task_id
        complain(f"{plain(name)} is dead: {plain(said)} To try again: manage.py retry-now {task_id}")
    for each in uploaded.failed[:SHOWN]:
        complain(f"{plain(each.path)}: {plain(each.reason)}.")
    statuses: Statuses = uploaded.statuses or Statuses()
    is_unfinished = bool(set(statuses) - {TaskStatus.SUCCEEDED, TaskStatus.DISCARDED})
    if is_unfinished:
        complain(f"Not all succeeded: {in_words(statuses)}. See: manage.py tasks --type document.ingest")
    return bool(uploaded.failed or uploaded.dead or is_unfinished)


def _print(uploaded: _Uploaded, *, dry_run: bool) -> None:
    if dry_run:
        for name in uploaded.found.files:
            console.print(Text(plain(name)))
        console.print(f"{len(uploaded.found.files):,} files would be uploaded")
    else:
        new = sum(each.created for each in uploaded.submitted.values())
        console.print(f"uploaded: {len(uploaded.submitted):,} ({new:,} new or changed)")
    skipped = [(f"skipped, {reason}", number) for reason, number in sorted(uploaded.found.skipped.items())]
    for what, number in (*skipped, ("failed", len(uploaded.failed)), ("dead", len(uploaded.dead))):
        if number:
            console.print(f"{what}: {number:,}")
    if uploaded.statuses is not None:
        for status, number in sorted(uploaded.statuses.items(), key=str):
            console.print(f"{status or 'gone'}: {number:,}")


def _json_of(uploaded: _Uploaded, *, dry_run: bool) -> dict[str, Any]:
    submitted = {name: camel(each) for name, each in uploaded.submitted.items()}
    told: dict[str, Any] = {
        "dryRun": dry_run,
        "files": [{"name": name, **submitted.get(name, {})} for name in uploaded.found.files],
        "skipped": +uploaded.found.skipped,
        "failed": [camel(each) for each in uploaded.failed],
        "dead": uploaded.dead,
    }
    if uploaded.statuses is not None:
        told["statuses"] = Counter({status or "gone": number for status, number in uploaded.statuses.items()})
    return told
