"""The FastAPI application. For now it says whether it lives, whether it can work, and what it counted."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

import metrics
import settings
from models.errors import CeleriacError
from models.readiness import require_ready

app = FastAPI(title="Celeriac", docs_url=None, redoc_url=None, openapi_url=None)


@app.get("/healthz")
def healthz() -> dict[str, str]:
    """The process lives. Nothing else is asked, so that a database that is away does not get the API killed."""
    return {"status": "ok"}


@app.get("/readyz")
def readyz() -> Response:
    """The ledger answers and has the schema of this code."""
    try:
        require_ready()
    except (CeleriacError, settings.SettingsError) as error:
        return JSONResponse({"error": {"code": error.code, "message": error.message}}, error.http_status)
    return JSONResponse({"status": "ready"})


@app.get("/metrics")
def read_metrics() -> Response:
    return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)
