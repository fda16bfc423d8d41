"""What the API checks before it serves: its settings. A wrong one ends the start with one sentence in the log."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

import settings


class CheckSettings:
    """Middleware that refuses to start with settings that cannot be used."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                settings.current()
            except settings.SettingsError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": error.message})
                return
        await self.app(scope, receive, send)
