"""Let the tasks that a request submits belong to the trace of the request: its header `traceparent`."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

import tracing


class JoinTrace:
    """Middleware that reads the header `traceparent` of HTTP requests. One that is not valid is ignored."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        values = [value for name, value in scope.get("headers", ()) if name == b"traceparent"]
        if len(values) != 1:
            await self.app(scope, receive, send)
            return
        with tracing.joining(values[0].decode("latin-1")):
            await self.app(scope, receive, send)
