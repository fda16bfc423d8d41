"""Routes for documents: upload, list, search and delete them, and read their tasks.

A document belongs to the principal that uploaded it. Another principal cannot see, replace or delete it, and may use
the same name for a document of its own. Documents that were added from Python or the command line are shared: every
token with `documents:read` finds them, and none can change them.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from fastapi import APIRouter, Query
from sqlalchemy import Connection
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

import documents
import settings
from api.authorization import require_scope
from api.documented import Answer, Body, documented
from api.json_responses import JsonResponse, camel
from api.ledger_calls import call_ledger
from api.principals import PRINCIPAL, sees_all
from api.receiving import receiving
from api.shapes import ShownDocument, ShownHit, list_of
from api.submission import (
    KEY_HEADER,
    SUBMITTED,
    WantedReceipt,
    answer_submitted,
    read_idempotency_key,
    receipt_response,
)
from api.tasks import SHOWN, parse_task_id
from api.tokens import Scope, Token
from api.unsaved import read_or_show_unsaved
from api.visible_errors import show_task
from documents.accepted import Upload
from models.engine import engine, sessions
from models.errors import Misuse
from tasks.operations import task_details
from tasks.operations.listing import Cursor, UnknownTask
from tasks.operations.task_details import StoredTask
from tasks.submission.submit import Submitted

UPLOAD: Final = "/api/knowledge/documents/upload-async"
TYPE: Final = "document.ingest"
MULTIPART_BYTES: Final = 64 * 1024  # boundaries and headers around the file
STORED_BYTES_PER_SECOND: Final = 4 * 1024 * 1024  # by a slow ledger
NO_FILE: Final = "There is no file: send multipart/form-data with one file in the field `file`."
UNKNOWN_TYPE: Final = "application/octet-stream"  # what clients send if they do not know the type

router = APIRouter(prefix="/api/knowledge", tags=["documents"])
Writer = Annotated[Token, require_scope(Scope.DOCUMENTS_WRITE)]
Reader = Annotated[Token, require_scope(Scope.DOCUMENTS_READ)]
Follower = Annotated[Token, require_scope(Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)]
FORM: Final = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "string", "contentMediaType": UNKNOWN_TYPE, "description": "one file"}},
}
PAGE: Final = list_of("Documents", "documents", ShownDocument, before=str | None)
DELETED: Final = list_of("DeletedDocuments", "deleted", str)
HITS: Final = list_of("Hits", "hits", ShownHit)


def upload_limit() -> int:
    """Return the largest body of an upload in bytes."""
    return settings.current().document_max_bytes + MULTIPART_BYTES


@router.post(
    UPLOAD.removeprefix(router.prefix),
    **documented(
        "Upload a document",
        body=Body(FORM, {"a text": {"file": "Roses are red."}}, media_type="multipart/form-data"),
        headers=[KEY_HEADER],
        answers=SUBMITTED,
        errors=[409, 429],
    ),
)
async def upload_async(request: Request, token: Writer, receipt: WantedReceipt | None = None) -> JsonResponse:
    """Store the document and submit a task that reads it. The same file under the same name is stored once."""
    async with request.form(max_files=1, max_fields=10) as form:
        name, content, media_type = await read_file(form)
    if receipt is not None:
        given = Upload.of(token.name, name, content, media_type, read_idempotency_key(request))
        if receipt is WantedReceipt.ACCEPTED:
            documents.check_upload(name, content)
            return receipt_response(await receiving().document(given))
        return receipt_response(await receiving().save_document(given, ordered=True))
    submitted = await upload(token, name, content, media_type)
    return answer_submitted(submitted, location="/api/knowledge/tasks/")


@router.get("/documents", **documented("List documents", answers={200: Answer("One page.", PAGE)}))
async def list_documents(
    token: Reader,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    before: Annotated[str | None, Query(max_length=100)] = None,
) -> JsonResponse:
    """Answer one page, newest change first. `before` of the answer is the cursor of the next page, or null."""
    cursor = Cursor.parse(before) if before else None
    start = (cursor.changed_at, cursor.task_id) if cursor else None

    def read() -> list[documents.ListedDocument]:
        with engine().connect() as connection:
            return documents.list_documents(connection, before=start, limit=limit, visible_to=token.name)

    found = await call_ledger(read)
    last = found[-1] if len(found) == limit else None
    older = str(Cursor(last.updated_at, last.document_id)) if last else None
    return JsonResponse({"documents": [camel(each) for each in found], "before": older})


@router.delete(
    "/documents", **documented("Delete documents", answers={200: Answer("Their names.", DELETED)}, errors=[404])
)
async def delete_documents(
    token: Writer, name: Annotated[list[str], Query(min_length=1, max_length=100, examples=[["README.md"]])]
) -> JsonResponse:
    """Delete documents of the token's principal by name, all or none."""

    def delete() -> list[str]:
        with sessions().begin() as session:
            return documents.delete(session, name, principal=token.name)

    return JsonResponse({"deleted": sorted(await call_ledger(delete))})


@router.get("/tasks/{task_id}", **documented("Read the task of an upload", answers=SHOWN, errors=[404]))
async def read_task(task_id: str, token: Follower) -> JsonResponse:
    """Answer with the task of an upload, named by its own id or by the id of the receipt."""

    def read(id_: uuid.UUID) -> JsonResponse:
        with engine().connect() as connection:
            return JsonResponse(show_task(read_upload(connection, token, id_), token))

    return await read_or_show_unsaved(token, parse_task_id(task_id), read)


@router.get("/search", **documented("Search documents", answers={200: Answer("The best hits.", HITS)}))
async def search(
    token: Reader,
    q: Annotated[str, Query(min_length=1, max_length=1000, examples=["worker"])],
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> JsonResponse:
    """Answer with the best chunks. Every query is valid, and one without words finds nothing."""

    def find() -> list[documents.Hit]:
        with engine().connect() as connection:
            return documents.search(connection, q, limit=limit, visible_to=token.name)

    return JsonResponse({"hits": [camel(hit) for hit in await call_ledger(find)]})


async def read_file(form: FormData) -> tuple[str, bytes, str | None]:
    """Return name, content and media type of the file in a form; raise Misuse if there is none."""
    file = form.get("file")
    if not isinstance(file, UploadFile) or not file.filename:
        raise Misuse(NO_FILE)
    media_type = None if file.content_type == UNKNOWN_TYPE else file.content_type
    return file.filename, await file.read(), media_type


async def upload(token: Token, name: str, content: bytes, media_type: str | None) -> Submitted:
    """Store a document of the token's principal and submit its task."""

    def store() -> Submitted:
        with sessions().begin() as session:
            return documents.upload(session, name=name, content=content, media_type=media_type, principal=token.name)

    return await call_ledger(store, more_seconds=len(content) / STORED_BYTES_PER_SECOND)


def read_upload(connection: Connection, token: Token, task_id: uuid.UUID) -> StoredTask:
    """Return the task of an upload, or raise UnknownTask if there is none or the token may not see it."""
    task = task_details.read_task(connection, task_id)
    is_visible = sees_all(token) or task.context.get(PRINCIPAL, token.name) == token.name
    if task.type != TYPE or not is_visible:
        raise UnknownTask(task.task_id)
    return task
