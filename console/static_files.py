"""The stylesheet, the script and the icon. Their addresses name their content, so browsers may keep them for ever."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.errors import NotFound
from console.door import PREFIX

FOLDER: Final = Path(__file__).parent / "static"
MEDIA_TYPES: Final = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
CACHE: Final = "public, max-age=31536000, immutable"


async def read(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in MEDIA_TYPES:
        raise NotFound
    return Response(_content(name), media_type=MEDIA_TYPES[name], headers={"Cache-Control": CACHE})


@cache
def address_of(name: str) -> str:
    return f"{PREFIX}/static/{name}?v={hashlib.sha256(_content(name)).hexdigest()[:12]}"


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


ROUTES: Final = [Route(f"{PREFIX}/static/{{name}}", read)]
