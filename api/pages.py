"""The pages for people: `/` says what this is, `/docs` shows the OpenAPI document. All are open and hold no secrets.

Everything that `/docs` loads comes from this server: Swagger UI from the files of the package fastapi-offline, whose
code is not used. The policies forbid scripts inside the pages and every other server, so that text from the ledger that
Swagger UI shows cannot run, and a token that was typed in cannot be sent elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from api.json_responses import JsonResponse

ROOT: Final = "/"
DOCS: Final = "/docs"
OPENAPI: Final = "/openapi.json"
ASSETS: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
}
PATHS: Final = frozenset({ROOT, DOCS, OPENAPI, *(f"{DOCS}/{name}" for name in ASSETS)})
CACHE: Final = "public, max-age=3600"

# validatorUrl: by default Swagger UI sends the address of the document to a server of its makers.
START: Final = """\
SwaggerUIBundle({
  url: document.currentScript.dataset.url,
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""
STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:4rem auto;padding:0 1rem;color-scheme:light dark}"
)
ROOT_PAGE: Final = f"""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Celeriac</title>
<style>{STYLE}</style>
<h1>Celeriac</h1>
<p>Celery tasks whose effects happen once, with a receipt. This is the HTTP API: submit a task, follow it, read its
history. Every route but the pages and the probes needs a token.</p>
<ul>
<li><a href="docs">All routes, to read and to try</a></li>
<li><a href="openapi.json">The same as an OpenAPI 3.1 document</a></li>
<li><a href="healthz">Is the process alive?</a> <a href="readyz">Is it ready?</a> <a href="metrics">Metrics</a></li>
</ul>
</html>
"""
DOCS_PAGE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Celeriac API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js" data-url="openapi.json"></script>
</html>
"""
_NOTHING: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
ROOT_POLICY: Final = f"{_NOTHING}; style-src 'sha256-{_STYLE_HASH}'"
DOCS_POLICY: Final = f"{_NOTHING}; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"

router = APIRouter(include_in_schema=False)


@router.get(ROOT)
async def read_root() -> Response:
    return HTMLResponse(ROOT_PAGE, headers={"Content-Security-Policy": ROOT_POLICY})


@router.get(DOCS)
async def read_docs() -> Response:
    return HTMLResponse(DOCS_PAGE, headers={"Content-Security-Policy": DOCS_POLICY})


@router.get(OPENAPI)
def read_openapi(request: Request) -> Response:
    return JsonResponse(request.app.openapi())


def _asset(name: str) -> None:
    async def read() -> Response:
        return Response(_content(name), media_type=ASSETS[name], headers={"Cache-Control": CACHE})

    router.add_api_route(f"{DOCS}/{name}", read, name=name)


@cache
def _content(name: str) -> bytes:
    if name == "start.js":
        return START.encode()
    return Path(str(distribution("fastapi-offline").locate_file(f"fastapi_offline/static/{name}"))).read_bytes()


for _name in ASSETS:
    _asset(_name)
