"""The FastAPI application: probes that are open to all, and routes that need a token.

A request passes, from outside: `answering` (errors become answers), the gate (who are you), the body limit, its route.
There is no page made from the code: docs/api.md has every route, a test holds it, and nothing more is served.
"""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

import metrics
import settings
from api import documents, tasks, workflows
from api.authorization import Gate, require_scopes
from api.body_limit import BodyLimit
from api.error_middleware import Answering
from api.errors import answer_to
from models.errors import CeleriacError
from models.schema import require_ready
from outbox.publishers import celery  # noqa: F401 - by one thread: Celery cannot be loaded by two at once
from tasks.submission.json_lines import LINE_LIMIT

app = FastAPI(
    title="Celeriac",
    docs_url=None,
    redoc_url=None,
    openapi_url=None,
    redirect_slashes=False,
    middleware=[
        Middleware(Answering),
        Middleware(Gate),
        Middleware(BodyLimit, limit=LINE_LIMIT, limits={documents.UPLOAD: documents.upload_limit}),
    ],
    exception_handlers={HTTPException: answer_to, RequestValidationError: answer_to},
)
for resource in (tasks, documents, workflows):
    app.include_router(resource.router)


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process lives. Nothing else is asked, not even a thread: a database that is away gets no API killed."""
    return {"status": "ok"}


@app.get("/readyz")
def readyz() -> Response:
    """The ledger answers and has the schema of this code."""
    try:
        require_ready()
    except (CeleriacError, settings.SettingsError) as error:
        return JSONResponse({"error": {"code": error.code, "message": error.message}}, error.http_status)
    return JSONResponse({"status": "ready"})


@app.get("/metrics")
def read_metrics() -> Response:
    return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)


require_scopes(app)
