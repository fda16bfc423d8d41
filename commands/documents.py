"""documents: add, list, search and delete documents. `ingest` and `search` are aliases."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from commands.complaint import complain
from commands.confirmation import confirm
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.options import Json
from commands.output import camel, console, format_time, on_stderr, plural, print_json, with_progress
from commands.plain_lines import plain, print_lines
from commands.wakeups import publish_wakeups
from models.status import TaskStatus

if TYPE_CHECKING:
    from documents.collect_files import Collected, Failed
    from tasks.operations.wait_final import Statuses
    from tasks.submission.submit import Submitted

SHOWN: Final = 20

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the documents; change nothing.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True,
        help="Documents: add, list, search and delete them.\n\nExample: `manage.py documents add docs/ --wait`",
    )
    group.command()(add)
    group.command("list")(list_)
    group.command()(search)
    group.command()(delete)
    app.add_typer(group, name="documents")
    app.command("ingest", help="Alias of `documents add`.\n\nExample: `manage.py ingest docs/ --wait`")(add)
    app.command("search", help="Alias of `documents search`.\n\nExample: `manage.py search refund policy`")(search)


def add(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Files, and folders with everything in them.")],
    *,
    dry_run: DryRun = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the documents are searchable.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Wait at most this many seconds.")] = 600,
    as_json: Json = False,
) -> None:
    """Upload text, Markdown, HTML and PDF files and make them searchable. Unchanged files are not processed again.

    Hidden files and files of other types are skipped. A document's name is the path of its file relative to the folder.

    Example: `manage.py documents add docs/ --wait`
    """
    import settings
    from documents.collect_files import collect_files

    collected = collect_files(paths, max_bytes=settings.current().document_max_bytes)
    uploads = _Uploads(collected)
    with until_interrupted() as stopped:
        if not dry_run:
            with publish_wakeups():
                with_progress(_upload(uploads, stopped), total=len(collected.files), what="uploaded")
            if wait:
                uploads.statuses = _wait(uploads.submitted, timeout, stopped)
            uploads.dead = _find_dead(uploads.submitted)
    if as_json:
        print_json(_json_of(uploads, dry_run=dry_run))
    else:
        _print_uploads(uploads, dry_run=dry_run)
    has_failures = _report_failures(uploads)
    if stopped.is_set():
        complain("Interrupted. It is safe to run the command again.")
        raise typer.Exit(INTERRUPTED)
    if has_failures:
        raise typer.Exit(1)


def list_(
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="List at most this many.")] = 50,
    before: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Next page: the cursor printed below the previous page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List documents, newest change first, with the status of the task that makes each one searchable.

    Example: `manage.py documents list --limit 20`
    """
    import documents
    from models.engine import engine
    from tasks.operations.listing import Cursor

    cursor = Cursor.parse(before) if before else None
    with engine().connect() as connection:
        after = (cursor.changed_at, cursor.task_id) if cursor else None
        found = documents.list_documents(connection, before=after, limit=limit)
    last = found[-1] if len(found) == limit else None
    older = str(Cursor(last.updated_at, last.document_id)) if last else None
    if as_json:
        print_json({"documents": [camel(each) for each in found], "before": older})
        return
    print_lines(
        ("name", "revision", "bytes", "media type", "chunks", "task", "updated (UTC)", "principal"),
        [
            (
                each.name,
                str(each.revision),
                f"{each.size_bytes:,}",
                each.media_type,
                f"{each.chunks:,}",
                each.status or "",
                format_time(each.updated_at),
                each.principal or "(shared)",
            )
            for each in found
        ],
    )
    if older:
        console.print(f"next page: --before {older}", markup=False)


def search(
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help='Words, "a phrase", or, -without.')],
    limit: Annotated[int, typer.Option(min=1, max=100, help="Show at most this many.")] = 10,
    as_json: Json = False,
) -> None:
    """Search the text of all documents; the best matches come first.

    Example: `manage.py documents search refund policy`
    """
    import documents
    from models.engine import engine

    with engine().connect() as connection:
        hits = documents.search(connection, " ".join(words), limit=limit)
    if as_json:
        print_json([camel(hit) for hit in hits])
        return
    for hit in hits:
        console.print(Text.assemble((plain(hit.name), "bold"), f"  {hit.rank:.3f}"))
        console.print(_highlighted(plain(hit.highlight)))
        console.print()
    console.print(f"{len(hits)} match{'es' if len(hits) > 1 else ''}" if hits else "No matches.")


def delete(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names, as `documents list` shows them.")],
    *,
    principal: Annotated[
        str, typer.Option(metavar="NAME", help="Delete documents that this API token uploaded, not shared ones.")
    ] = "",
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete documents and everything that was extracted from them. If one does not exist, nothing is deleted.

    Example: `manage.py documents delete notes/old.md --yes`
    """
    import documents
    from documents.store import lock_documents
    from models.engine import sessions

    with sessions().begin() as session:
        chosen = sorted(lock_documents(session, names, principal=principal).values())
    if not dry_run:
        if not yes:
            shown = plain(", ".join(chosen[:SHOWN])) + (", …" if len(chosen) > SHOWN else "")
            confirm(f"Delete {plural(len(chosen), 'document')} ({shown})?", remedy="add --yes.", as_json=as_json)
        with sessions().begin() as session:
            documents.delete(session, names, principal=principal)
    if as_json:
        print_json({"dryRun": dry_run, "documents": chosen})
        return
    for name in chosen:
        console.print(f"{'would be deleted' if dry_run else 'deleted'}: {plain(name)}", markup=False)


@dataclass(slots=True)
class _Uploads:
    """The files of one `add`, and what has happened to them so far."""

    collected: Collected
    submitted: dict[str, Submitted] = field(default_factory=dict)  # by name
    statuses: Statuses | None = None  # after waiting
    dead: dict[str, str] = field(default_factory=dict)  # error message by name; the task may be of an earlier upload

    @property
    def failed(self) -> list[Failed]:
        return self.collected.failed


def _upload(uploads: _Uploads, stopped: Event) -> Iterator[int]:
    """Upload each file in a transaction of its own, so that a rejected file does not affect the others."""
    import documents
    from documents.collect_files import Failed, printable
    from models.engine import sessions
    from models.errors import Misuse

    for done, (name, path) in enumerate(uploads.collected.files.items(), 1):
        try:
            content = path.read_bytes()
            with sessions().begin() as session:
                uploads.submitted[name] = documents.upload(session, name=name, content=content)
        except Misuse as error:
            uploads.failed.append(Failed(printable(path), error.message))
        except OSError as error:
            uploads.failed.append(Failed(printable(path), error.strerror or str(error)))
        yield done
        if stopped.is_set():
            return


def _wait(submitted: dict[str, Submitted], seconds: float, stopped: Event) -> Statuses:
    """Wait for the tasks that are not final yet. A task that was final before may have been pruned since."""
    from models.engine import engine
    from tasks.operations.listing import FINAL
    from tasks.operations.wait_final import Statuses, in_words, watch

    statuses: Statuses = Statuses()
    if ids := [each.task_id for each in submitted.values() if each.status not in FINAL]:
        with on_stderr.status("…") as shown:
            for statuses in watch(engine(), ids, seconds=seconds, stopped=stopped):
                shown.update(in_words(statuses))
    return statuses


def _find_dead(submitted: dict[str, Submitted]) -> dict[str, str]:
    from documents.store import find_dead
    from models.engine import engine

    with engine().connect() as connection:
        found = find_dead(connection, [each.task_id for each in submitted.values()])
    return {name: found[each.task_id] for name, each in submitted.items() if each.task_id in found}


def _report_failures(uploads: _Uploads) -> bool:
    """Print what failed, and return whether anything did. DISCARDED is not a failure: a newer upload took its place."""
    from tasks.operations.wait_final import Statuses, in_words

    for name, message in list(uploads.dead.items())[:SHOWN]:
        task_id = uploads.submitted[name].task_id
        complain(f"{plain(name)} is dead: {plain(message)} To try again: manage.py retry-now {task_id}")
    for each in uploads.failed[:SHOWN]:
        complain(f"{plain(each.path)}: {plain(each.reason)}.")
    statuses: Statuses = uploads.statuses or Statuses()
    is_unfinished = bool(set(statuses) - {TaskStatus.SUCCEEDED, TaskStatus.DISCARDED})
    if is_unfinished:
        complain(f"Not all tasks succeeded: {in_words(statuses)}. See: manage.py tasks --type document.ingest")
    return bool(uploads.failed or uploads.dead or is_unfinished)


def _print_uploads(uploads: _Uploads, *, dry_run: bool) -> None:
    if dry_run:
        for name in uploads.collected.files:
            console.print(Text(plain(name)))
        console.print(f"{len(uploads.collected.files):,} files would be uploaded")
    else:
        changed = sum(each.created for each in uploads.submitted.values())
        console.print(f"uploaded: {len(uploads.submitted):,} ({changed:,} new or changed)")
    skipped = [(f"skipped, {reason}", number) for reason, number in sorted(uploads.collected.skipped.items())]
    for label, number in (*skipped, ("failed", len(uploads.failed)), ("dead", len(uploads.dead))):
        if number:
            console.print(f"{label}: {number:,}")
    if uploads.statuses is not None:
        for status, number in sorted(uploads.statuses.items(), key=str):
            console.print(f"{status or 'gone'}: {number:,}")


def _json_of(uploads: _Uploads, *, dry_run: bool) -> dict[str, Any]:
    submitted = {name: camel(each) for name, each in uploads.submitted.items()}
    report: dict[str, Any] = {
        "dryRun": dry_run,
        "files": [{"name": name, **submitted.get(name, {})} for name in uploads.collected.files],
        "skipped": +uploads.collected.skipped,
        "failed": [camel(each) for each in uploads.failed],
        "dead": uploads.dead,
    }
    if uploads.statuses is not None:
        report["statuses"] = Counter({status or "gone": number for status, number in uploads.statuses.items()})
    return report


def _highlighted(text: str) -> Text:
    """Make the matches bold. Their brackets stay, because copied or piped text is not bold."""
    shown = Text()
    for part in re.split("(⟦[^⟧]*⟧)", text):
        shown.append(part, style="bold yellow" if part.startswith("⟦") else "")
    return shown
