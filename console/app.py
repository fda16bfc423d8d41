"""The application of the console: its routes, and what every request passes through.

A request passes through `ErrorMiddleware` (errors become pages, every response gets its security headers), `OneLength`
and `BodyLimit`, and then its route. A route asks `visitors.py` who is logged in; a route that changes something asks it
to check the form, too.
"""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from api.body_limit import BodyLimit, OneLength
from api.documents import upload_limit
from api.error_middleware import ErrorMiddleware
from console import (
    bulk,
    dead_letters,
    documents,
    login,
    outbox,
    overview,
    queues,
    receipts,
    refused_writes,
    schedules,
    sinks,
    static_files,
    task_page,
    tasks,
    workers,
    workflows,
)
from console.error_pages import SECURITY_HEADERS, handle_error, response_to

FORM_LIMIT: Final = 64 * 1024  # bytes
PAGES: Final = (
    overview,
    bulk,
    dead_letters,
    documents,
    queues,
    schedules,
    workers,
    refused_writes,
    tasks,
    task_page,
    outbox,
    sinks,
    receipts,
    workflows,
    login,
    static_files,
)

console: Final = Starlette(
    routes=[route for module in PAGES for route in module.ROUTES],
    middleware=[
        Middleware(ErrorMiddleware, headers=SECURITY_HEADERS, answer=response_to),
        Middleware(OneLength),
        Middleware(BodyLimit, limit=FORM_LIMIT, limits={documents.PAGE: upload_limit}),
    ],
    exception_handlers={HTTPException: handle_error},
)
console.router.redirect_slashes = False
