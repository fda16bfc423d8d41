"""Why a stack did not start."""

from __future__ import annotations

from models.errors import CeleriacError


class StartFailed(CeleriacError):
    """A part of the stack did not start; everything was stopped again."""

    code = "start_failed"


class Interrupted(CeleriacError):
    """Stopped before everything was ready."""

    code = "interrupted"
