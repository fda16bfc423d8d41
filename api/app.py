"""The FastAPI application: open probes and public keys, and routes that need a token.

A request passes through `ErrorMiddleware` (errors become responses), `OneLength`, `RequireToken`, `BodyLimit`, and then
its route.
FastAPI's generated pages (/docs, /openapi.json) are switched off: docs/api.md lists every route, and a test compares it
with the code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

import metrics
import settings
from api import chat, documents, keys, receipts, receiving, tasks, workflows
from api.authorization import RequireToken, authenticate_express, require_scopes_on_all_routes
from api.body_limit import BodyLimit, OneLength
from api.error_middleware import ErrorMiddleware
from api.errors import handle_error, response_to
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.startup import CheckSettings
from api.websocket_authorization import WebSocketDoor
from models.errors import CeleriacError
from models.schema import require_ready
from outbox.publishers import celery  # noqa: F401 - loaded here, because two threads cannot load Celery at once
from receipts import stream_metrics
from tasks.submission.json_lines import LINE_LIMIT


@asynccontextmanager
async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
    await receiving.check_log()
    yield
    await receiving.close()


app = FastAPI(
    title="Celeriac",
    lifespan=_lifespan,
    docs_url=None,
    redoc_url=None,
    openapi_url=None,
    redirect_slashes=False,
    middleware=[
        Middleware(CheckSettings),
        Middleware(WebSocketDoor, routes={chat.PATH: chat.ROUTE}, authenticate=authenticate_express),
        Middleware(ErrorMiddleware),
        Middleware(OneLength),
        Middleware(RequireToken),
        Middleware(BodyLimit, limit=LINE_LIMIT, limits={documents.UPLOAD: documents.upload_limit}),
    ],
    exception_handlers={HTTPException: handle_error, RequestValidationError: handle_error},
)
for resource in (tasks, documents, workflows, receipts, keys):
    app.include_router(resource.router)


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer while the process lives, without a thread or the database: an unreachable ledger must not kill the API."""
    return {"status": "ok"}


@app.get("/readyz")
async def readyz() -> Response:
    """Answer 200 if the ledger is reachable and has the schema of this code."""
    try:
        await call_ledger(require_ready)
    except (CeleriacError, settings.SettingsError) as error:
        return response_to(error)  # this route is open, so it must not show an address or a path
    return JsonResponse({"status": "ready"})


@app.get("/metrics")
def read_metrics() -> Response:
    return Response(metrics.exposition() + stream_metrics.exposition(), media_type=metrics.CONTENT_TYPE)


require_scopes_on_all_routes(app)
