"""The addresses of the console: the login page, and links that log in once."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from console import sessions
from console.door import PREFIX
from models.engine import engine
from settings import Settings

EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - an address to listen on, which no browser can open


def console_address(settings: Settings) -> str:
    """Return the address of the running stack's console, or of the one that the settings describe."""
    address = settings.stack.get("API_URL") or f"http://{_bracketed(settings.api_host)}:{settings.api_port}"
    parts = urlsplit(address)
    if (parts.hostname or "") in EVERYWHERE:
        address = f"{parts.scheme}://127.0.0.1:{parts.port}"
    return f"{address}{PREFIX}"


def new_link(settings: Settings, token_name: str | None = None) -> str:
    """Store a link for a token, and return its address. Raises UnknownToken."""
    with engine().begin() as connection:
        code = sessions.create_link(connection, token_name)
    return f"{console_address(settings)}/login?code={code}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
