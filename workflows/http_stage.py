"""The kind `http`: a POST to a named destination. A payload never holds an address, so it cannot lead us anywhere."""

from __future__ import annotations

from typing import Any

import settings
from outbox.destinations import UnknownDestination, open_poster
from outbox.publishers.http_post import Answer, Patience, Poster
from tasks.core.outcomes import Permanent, storable
from tasks.submission.json_lines import BadJson, read_json
from workflows.payload import BadWorkflow, HttpStage
from workflows.request import ANSWER_LIMIT, ask
from workflows.stage import StageInput, StageOutput
from workflows.templates import check_size, filled


def check(asked: HttpStage) -> None:
    poster = _poster(asked)
    if poster.objection:
        raise BadWorkflow(f"The destination {asked.destination!r} cannot be asked: {poster.objection}")


def run(asked: HttpStage, given: StageInput) -> StageOutput:
    poster = _poster(asked)
    answer = ask(poster, _body(asked, given), given)
    return StageOutput(_read(answer, poster), {"httpStatus": answer.status})


def _poster(asked: HttpStage) -> Poster:
    patience = Patience(request_seconds=asked.timeout_seconds)
    try:
        return open_poster(asked.destination, settings.current(), patience=patience, body_limit=ANSWER_LIMIT)
    except UnknownDestination as refused:
        raise BadWorkflow(str(refused)) from None


def _body(asked: HttpStage, given: StageInput) -> Any:
    if "body" in asked.model_fields_set:
        check_size(asked.body, given.known)
        return filled(asked.body, given.known)
    return {
        "workflowId": given.workflow_id,
        "stage": given.name,
        "input": given.input,
        "outputs": dict(given.outputs),
    }


def _read(answer: Answer, poster: Poster) -> Any:
    """JSON if it says so, otherwise text; nothing is null."""
    if not answer.body.strip():
        return None
    if b"json" not in answer.headers.get(b"content-type", b"").lower():
        return storable(answer.body.decode(errors="replace"))
    try:
        return read_json(answer.body)
    except BadJson as refused:
        raise Permanent(f"{poster.origin} answered with what should be JSON. {refused.message}") from None
