"""Stages of kind `http`: POST to a named destination. A payload holds no address, so it cannot choose the host."""

from __future__ import annotations

import json
from typing import Any

import settings
from outbox.destinations import UnknownDestination, open_poster
from outbox.publishers.signed_post import Answer, Patience, Poster
from tasks import Permanent
from workflows.payload import BadWorkflow, HttpStage
from workflows.request import MAX_BYTES, send
from workflows.stage import StageInput, StageOutput
from workflows.templates import check_size, fill


def check(stage: HttpStage) -> None:
    poster = _open_poster(stage)
    if poster.objection:
        raise BadWorkflow(f"The destination {stage.destination!r} cannot be used: {poster.objection}")


def run(stage: HttpStage, given: StageInput) -> StageOutput:
    poster = _open_poster(stage)
    answer = send(poster, _make_body(stage, given), given)
    return StageOutput(_read(answer, poster), {"httpStatus": answer.status})


def _open_poster(stage: HttpStage) -> Poster:
    patience = Patience(request_seconds=stage.timeout_seconds)
    try:
        return open_poster(stage.destination, settings.current(), patience=patience, body_limit=MAX_BYTES)
    except UnknownDestination as error:
        raise BadWorkflow(str(error)) from None


def _make_body(stage: HttpStage, given: StageInput) -> Any:
    if "body" in stage.model_fields_set:
        check_size(stage.body, given.known)
        return fill(stage.body, given.known)
    return {
        "workflowId": given.workflow_id,
        "stage": given.name,
        "input": given.input,
        "outputs": dict(given.outputs),
    }


def _read(answer: Answer, poster: Poster) -> Any:
    """Return JSON if the content type says so, otherwise text; an empty answer is None."""
    if not answer.body.strip():
        return None
    if b"json" not in answer.headers.get(b"content-type", b"").lower():
        return answer.body.decode(errors="replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")  # not storable
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise Permanent(f"{poster.origin} answered with invalid JSON: {error}.") from None
