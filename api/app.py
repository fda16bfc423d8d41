"""The FastAPI application: open pages, probes and public keys, and routes that need a token.

A request for /console goes to the console (`console/app.py`). Any other passes through `ErrorMiddleware` (errors become
responses), `OneLength`, `RequireToken`, `BodyLimit`, and then its route. `pages.py` serves /docs and /openapi.json;
those of FastAPI, which load scripts from elsewhere, are off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

import metrics
import settings
from api import (
    chat,
    documents,
    internal_tasks,
    keys,
    pages,
    queues,
    receipts,
    receiving,
    task_actions,
    task_events,
    task_list,
    tasks,
    workflows,
)
from api.authorization import RequireToken, authenticate_express, require_scopes_on_all_routes
from api.body_limit import BodyLimit, OneLength
from api.bulk_threads import BulkThreads
from api.documented import Answer, documented
from api.error_middleware import ErrorMiddleware
from api.errors import handle_error, response_to
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.openapi import DocumentedApi, operation_id
from api.shapes import Status
from api.startup import CheckSettings
from api.tick_thread import TickThread
from api.trace_context import JoinTrace
from api.websocket_authorization import WebSocketDoor
from console.app import console
from console.door import ConsoleDoor
from models.errors import CeleriacError, Unreachable
from models.schema import require_ready
from outbox.publishers import celery  # noqa: F401 - loaded here, because two threads cannot load Celery at once
from receipts.stream_metrics import read_streams
from tasks.core.logs import configure_uvicorn_logging
from tasks.operations.installation_metrics import exposition, exposition_without_ledger
from tasks.submission.json_lines import LINE_LIMIT

PROBES: Final = ["probes"]

configure_uvicorn_logging()


@asynccontextmanager
async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
    await receiving.check_log()
    if port := settings.current().api_metrics_port:
        metrics.serve(port, settings.current().metrics_host)
    background = (TickThread(), BulkThreads())
    for each in background:
        each.start()
    yield
    await asyncio.gather(*(each.stop() for each in background))
    await receiving.close()


app = DocumentedApi(
    title="Celeriac",
    lifespan=_lifespan,
    docs_url=None,
    redoc_url=None,
    openapi_url=None,
    generate_unique_id_function=operation_id,
    redirect_slashes=False,
    middleware=[
        Middleware(CheckSettings),
        Middleware(WebSocketDoor, routes={chat.PATH: chat.ROUTE}, authenticate=authenticate_express),
        Middleware(JoinTrace),
        Middleware(ConsoleDoor, console=console),
        Middleware(ErrorMiddleware),
        Middleware(OneLength),
        Middleware(RequireToken),
        Middleware(BodyLimit, limit=LINE_LIMIT, limits={documents.UPLOAD: documents.upload_limit}),
    ],
    exception_handlers={HTTPException: handle_error, RequestValidationError: handle_error},
)
for resource in (
    tasks,
    task_list,
    task_events,
    task_actions,
    documents,
    workflows,
    receipts,
    keys,
    pages,
    internal_tasks,
    queues,
):
    app.include_router(resource.router)


@app.get("/healthz", **documented("Is the process alive?", tags=PROBES, answers={200: Answer("It is.", Status)}))
async def healthz() -> Response:
    """Answer while the process lives, without a thread or the database: an unreachable ledger must not kill the API."""
    return JsonResponse({"status": "ok"})


@app.get(
    "/readyz",
    **documented("Is the API ready?", tags=PROBES, answers={200: Answer("It is.", Status)}, errors=[503]),
)
async def readyz() -> Response:
    """Answer 200 if the ledger is reachable and has the schema of this code."""
    try:
        await call_ledger(require_ready)
    except (CeleriacError, settings.SettingsError) as error:
        return response_to(error)  # this route is open, so it must not show an address or a path
    return JsonResponse({"status": "ready"})


@app.get(
    "/metrics",
    **documented("Read the metrics", tags=PROBES, answers={200: Answer("Prometheus text.", also=["text/plain"])}),
)
async def read_metrics() -> Response:
    """Answer with the metrics of the installation. Those of this process are served on API_METRICS_PORT."""
    try:
        body = await call_ledger(lambda: exposition(read_streams))
    except Unreachable:
        body = exposition_without_ledger()
    return Response(body, media_type=metrics.CONTENT_TYPE)


require_scopes_on_all_routes(app)
