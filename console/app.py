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
from starlette.routing import Route

from api.body_limit import BodyLimit, OneLength
from api.error_middleware import ErrorMiddleware
from console import login, overview, static_files
from console.door import PREFIX
from console.error_pages import SECURITY_HEADERS, handle_error, response_to

FORM_LIMIT: Final = 64 * 1024  # bytes

console: Final = Starlette(
    routes=[
        Route(PREFIX, overview.show),
        Route(f"{PREFIX}/events", overview.follow),
        Route(f"{PREFIX}/login", login.show, methods=["GET"]),
        Route(f"{PREFIX}/login", login.log_in, methods=["POST"]),
        Route(f"{PREFIX}/logout", login.log_out, methods=["POST"]),
        Route(f"{PREFIX}/static/{{name}}", static_files.read),
    ],
    middleware=[
        Middleware(ErrorMiddleware, headers=SECURITY_HEADERS, answer=response_to),
        Middleware(OneLength),
        Middleware(BodyLimit, limit=FORM_LIMIT, limits={}),
    ],
    exception_handlers={HTTPException: handle_error},
)
console.router.redirect_slashes = False
