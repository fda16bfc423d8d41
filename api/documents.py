"""Routes for documents: upload one, read its task, search all of them.

Documents are shared: every token that may read documents may read the task of each document.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request

import documents
import settings
from api.authorization import require_scope
from api.json_responses import JsonResponse, camel
from api.submission import receipt
from api.tasks import parse_task_id
from api.tokens import Scope
from models.engine import engine, sessions
from models.errors import Misuse
from tasks.operations import task_details
from tasks.operations.listing import UnknownTask
from tasks.submission.submit import Submitted

UPLOAD: Final = "/api/knowledge/documents/upload-async"
TYPE: Final = "document.ingest"
MULTIPART_BYTES: Final = 64 * 1024  # boundaries and headers around the file
NO_FILE: Final = "There is no file: send multipart/form-data with one file in the field `file`."
UNKNOWN_TYPE: Final = "application/octet-stream"  # what clients send if they do not know the type

router = APIRouter(prefix="/api/knowledge")


def upload_limit() -> int:
    """Return the largest body of an upload in bytes."""
    return settings.current().document_max_bytes + MULTIPART_BYTES


@router.post(UPLOAD.removeprefix(router.prefix), dependencies=[require_scope(Scope.DOCUMENTS_WRITE)])
async def upload_async(request: Request) -> JsonResponse:
    async with request.form(max_files=1, max_fields=10) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile) or not file.filename:
            raise Misuse(NO_FILE)
        name, content = file.filename, await file.read()
        media_type = None if file.content_type == UNKNOWN_TYPE else file.content_type
    submitted = await run_in_threadpool(_upload, name, content, media_type)
    return receipt(submitted, location="/api/knowledge/tasks/")


@router.get("/tasks/{task_id}", dependencies=[require_scope(Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)])
def read_task(task_id: str) -> JsonResponse:
    with engine().connect() as connection:
        task = task_details.read_task(connection, parse_task_id(task_id))
    if task.type != TYPE:
        raise UnknownTask(task.task_id)
    return JsonResponse(task.envelope())


@router.get("/search", dependencies=[require_scope(Scope.DOCUMENTS_READ)])
def search(
    q: Annotated[str, Query(min_length=1, max_length=1000)],
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> JsonResponse:
    with engine().connect() as connection:
        hits = documents.search(connection, q, limit=limit)
    return JsonResponse({"hits": [camel(hit) for hit in hits]})


def _upload(name: str, content: bytes, media_type: str | None) -> Submitted:
    with sessions().begin() as session:
        return documents.upload(session, name=name, content=content, media_type=media_type)
