"""Documents: hand one in, ask how far its task is, search them all.

Documents are shared: whoever may read them sees the tasks that took them in, whoever handed them in.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request

import documents
import settings
from api.authorization import needs
from api.json_responses import Answer, camel
from api.submission import receipt
from api.tasks import known_id
from api.tokens import Scope
from models.engine import engine, sessions
from models.errors import Misuse
from tasks.operations.listing import UnknownTask
from tasks.operations.task_details import shown
from tasks.submission.submit import Submitted

UPLOAD: Final = "/api/knowledge/documents/upload-async"
TYPE: Final = "document.ingest"
AROUND_A_FILE: Final = 64 * 1024  # boundaries and headers of a multipart body
NO_FILE: Final = "There is no file: send multipart/form-data with one in the field `file`."
SAYS_NOTHING: Final = "application/octet-stream"

router = APIRouter(prefix="/api/knowledge")


def upload_limit() -> int:
    return settings.current().document_max_bytes + AROUND_A_FILE


@router.post(UPLOAD.removeprefix(router.prefix), dependencies=[needs(Scope.DOCUMENTS_WRITE)])
async def upload_async(request: Request) -> Answer:
    async with request.form(max_files=1, max_fields=10) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile) or not file.filename:
            raise Misuse(NO_FILE)
        name, content = file.filename, await file.read()
        media_type = None if file.content_type == SAYS_NOTHING else file.content_type
    made = await run_in_threadpool(_uploaded, name, content, media_type)
    return receipt(made, location="/api/knowledge/tasks/")


@router.get("/tasks/{task_id}", dependencies=[needs(Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)])
def read_task(task_id: str) -> Answer:
    with engine().connect() as connection:
        task = shown(connection, known_id(task_id))
    if task.type != TYPE:
        raise UnknownTask(task.task_id)
    return Answer(task.envelope())


@router.get("/search", dependencies=[needs(Scope.DOCUMENTS_READ)])
def search(
    q: Annotated[str, Query(min_length=1, max_length=1000)],
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> Answer:
    with engine().connect() as connection:
        found = documents.search(connection, q, limit=limit)
    return Answer({"hits": [camel(hit) for hit in found]})


def _uploaded(name: str, content: bytes, media_type: str | None) -> Submitted:
    with sessions().begin() as session:
        return documents.upload(session, name=name, content=content, media_type=media_type)
