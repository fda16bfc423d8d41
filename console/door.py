"""Middleware that gives every request for /console to the console, and all others to the API.

So the two have nothing in common that could be confused: a session of the console opens no route of the API, and a
bearer token opens no page.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX: Final = "/console"


class ConsoleDoor:
    def __init__(self, app: ASGIApp, *, console: ASGIApp) -> None:
        self.app = app
        self.console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and (scope["path"] == PREFIX or scope["path"].startswith(f"{PREFIX}/"))
        await (self.console if is_ours else self.app)(scope, receive, send)
