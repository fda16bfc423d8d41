"""Documents: upload one, watch it become searchable, search what was ingested, and read or delete a document.

What a visitor may do is decided by the scopes of the API: `documents:write` uploads and deletes the documents of the
token's own principal, `documents:read` lists and searches those and the shared ones. `operate` adds nothing to this.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import documents
import settings
from api.documents import read_file, read_upload, upload
from api.ledger_calls import call_ledger
from api.principals import sees_all
from api.tasks import parse_task_id
from api.tokens import Scope, Token
from console.answers import changed, go_to
from console.door import PREFIX
from console.ingestion import Ingestion, ingestion_of
from console.pages import render
from console.visitors import Visitor, require_form, require_visitor
from documents import Hit, ListedDocument, UnknownDocument
from documents.store import TYPE
from models.clock import now
from models.engine import engine, sessions
from models.errors import Misuse
from models.status import TaskStatus
from tasks.core.task_ids import keyed_id
from tasks.operations.listing import Cursor, UnknownTask
from tasks.operations.task_details import StoredTask

PAGE: Final = f"{PREFIX}/documents"
SCOPES: Final = (Scope.OPERATE, Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)
SHOWN: Final = 25  # documents on a page
HITS: Final = 20
CHUNKS: Final = 20
LONGEST_NAME: Final = 100  # in a sentence
CHOOSE: Final = "Choose a file first."
_MARKED: Final = re.compile("⟦([^⟧]*)⟧")
UNFINISHED: Final = (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.RETRYING)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a text that was found, and whether it matches."""

    text: str
    is_match: bool


@dataclass(frozen=True, slots=True)
class ShownHit:
    """A chunk that was found, with the address of the chunk in its document."""

    hit: Hit
    path: str
    parts: list[Part]


async def show(request: Request) -> Response:
    visitor = await require_visitor(request, *SCOPES)
    token = visitor.token
    can_read, can_write = token.has_scope(Scope.DOCUMENTS_READ), token.has_scope(Scope.DOCUMENTS_WRITE)
    words = request.query_params.get("q", "").strip()
    task_id = request.query_params.get("task", "") if can_read or can_write else ""
    cursor = Cursor.parse(given[:100]) if (given := request.query_params.get("before")) else None

    def read() -> dict[str, Any]:
        with engine().connect() as connection:
            listed = _list(connection, token, cursor) if can_read and not words else []
            return {
                "now": now(connection),
                "ingestion": _follow(connection, token, task_id) if task_id else None,
                "hits": _search(connection, token, words) if can_read and words else [],
                "documents": listed[:SHOWN],
                "older": _older(listed),
            }

    found = await call_ledger(read)
    values = {
        "page": "documents",
        "words": words,
        "can_read": can_read,
        "can_write": can_write,
        "sees_tasks": sees_all(token),
        "is_first": cursor is None,
        "largest": settings.current().document_max_bytes,
        "is_gone": bool(task_id) and found["ingestion"] is None,
        "is_moving": any(each.status in UNFINISHED for each in found["documents"]),
        "task_of": _task_of,
        **found,
    }
    return render(request, "documents.html", values)


async def show_document(request: Request) -> Response:
    visitor = await require_visitor(request, Scope.DOCUMENTS_READ)
    document_id, first = _document_id(request), _first_chunk(request)

    def read() -> dict[str, Any]:
        with engine().connect() as connection:
            document = documents.find_document(connection, document_id, visible_to=visitor.token.name)
            return {
                "now": now(connection),
                "document": document,
                "chunks": documents.read_chunks(connection, document_id, first=first, limit=CHUNKS),
                "ingestion": _follow(connection, visitor.token, str(_task_of(document))),
            }

    found = await call_ledger(read)
    values = {
        "page": "documents",
        "first": first,
        "step": CHUNKS,
        "can_delete": _may_delete(visitor, found["document"]),
        "sees_tasks": sees_all(visitor.token),
        "task_of": _task_of,
        **found,
    }
    return render(request, "documents_document.html", values)


async def send(request: Request) -> Response:
    """Store the file of a form, and go to the page that shows how its task proceeds."""
    visitor, form = await require_form(request, Scope.DOCUMENTS_WRITE, max_files=1)
    try:
        file_name, content, media_type = await read_file(form)
        name = str(form.get("name", "")).strip() or file_name
    except Misuse:
        return go_to(request, PAGE, say=CHOOSE, is_refusal=True)
    finally:
        await form.close()
    try:
        submitted = await upload(visitor.token, name, content, media_type)
    except documents.BadDocumentName as refused:
        return go_to(request, PAGE, say=f"{refused.message} {refused.remedy}", is_refusal=True)
    did = "was uploaded" if submitted.created else "has not changed since it was uploaded before"
    return go_to(request, f"{PAGE}?task={submitted.task_id}", say=f"{_short(name)} {did}.")


async def delete(request: Request) -> Response:
    """Delete a document of the visitor's own principal."""
    visitor, _ = await require_form(request, Scope.DOCUMENTS_WRITE)
    document_id, principal = _document_id(request), visitor.token.name

    def change() -> str:
        with sessions().begin() as session:
            document = documents.find_document(session, document_id, visible_to=principal)
            if document.principal != principal:  # shared; the principal may have a document of the same name
                raise UnknownDocument
            documents.delete(session, [document.name], principal=principal)
        return f"{_short(document.name)} was deleted."

    return await changed(request, change, back=PAGE)


def _list(connection: Connection, token: Token, before: Cursor | None) -> list[ListedDocument]:
    """Return the documents of a page, and one more if there is another page."""
    start = (before.changed_at, before.task_id) if before else None
    return documents.list_documents(connection, before=start, limit=SHOWN + 1, visible_to=token.name)


def _older(listed: list[ListedDocument]) -> str:
    """Return the address of the next page, or nothing."""
    if len(listed) <= SHOWN:
        return ""
    last = listed[SHOWN - 1]
    return f"{PAGE}?{urlencode({'before': str(Cursor(last.updated_at, last.document_id))})}"


def _search(connection: Connection, token: Token, words: str) -> list[ShownHit]:
    return [
        ShownHit(hit, _path_of(hit), list(_parts(hit.highlight)))
        for hit in documents.search(connection, words, limit=HITS, visible_to=token.name)
    ]


def _path_of(hit: Hit) -> str:
    first = hit.position - hit.position % CHUNKS
    return f"{PAGE}/{hit.document_id}{f'?from={first}' if first else ''}#chunk-{hit.position}"


def _parts(highlight: str) -> Iterator[Part]:
    """Split a text at ⟦ and ⟧. Only the template turns the parts into markup, and it escapes them."""
    for number, text in enumerate(_MARKED.split(highlight)):
        if text:
            yield Part(text, is_match=number % 2 == 1)


def _follow(connection: Connection, token: Token, task_id: str) -> Ingestion | None:
    """Return how the task of an upload proceeds; None if there is none that the token may see."""
    try:
        task = read_upload(connection, token, parse_task_id(task_id))
    except UnknownTask:
        return None
    return ingestion_of(task, token, _find(connection, token, task))


def _find(connection: Connection, token: Token, task: StoredTask) -> ListedDocument | None:
    """Return the document that a task reads, if the token may read it."""
    payload = task.payload if isinstance(task.payload, dict) else {}
    with suppress(UnknownDocument, ValueError):
        if token.has_scope(Scope.DOCUMENTS_READ):
            id_ = uuid.UUID(str(payload.get("documentId")))
            return documents.find_document(connection, id_, visible_to=token.name)
    return None


def _task_of(document: ListedDocument) -> uuid.UUID:
    return keyed_id(TYPE, documents.task_key(document.document_id, document.revision))


def _may_delete(visitor: Visitor, document: ListedDocument) -> bool:
    return visitor.token.has_scope(Scope.DOCUMENTS_WRITE) and document.principal == visitor.token.name


def _document_id(request: Request) -> uuid.UUID:
    try:
        return uuid.UUID(request.path_params["id"])
    except ValueError:
        raise UnknownDocument from None


def _first_chunk(request: Request) -> int:
    given = request.query_params.get("from", "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 9 else 0


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"


ROUTES: Final = [
    Route(PAGE, show, methods=["GET"]),
    Route(PAGE, send, methods=["POST"]),
    Route(f"{PAGE}/{{id}}", show_document, methods=["GET"]),
    Route(f"{PAGE}/{{id}}/delete", delete, methods=["POST"]),
]
