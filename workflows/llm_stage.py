"""Stages of kind `llm`: send messages to the OpenAI-compatible API at LLM_BASE_URL. The model's reply is the output.

The operator chose the address, so it may be private (a model on this machine). LLM_API_KEY is sent in one header and
appears in no step, error or log, even if the server repeats it.
"""

from __future__ import annotations

import json
from typing import Any

import settings
from outbox.publishers.signed_post import Patience, Poster
from tasks import Permanent
from workflows.payload import BadWorkflow, LlmStage
from workflows.request import MAX_BYTES, send
from workflows.stage import StageInput, StageOutput
from workflows.templates import check_size, fill_text


def check(stage: LlmStage) -> None:
    poster = _open_poster(stage)
    if poster.objection:
        raise BadWorkflow(f"LLM_BASE_URL cannot be used: {poster.objection}")


def run(stage: LlmStage, given: StageInput) -> StageOutput:
    poster = _open_poster(stage)
    check_size(stage.conversation, given.known)
    messages = [{**each, "content": fill_text(each["content"], given.known)} for each in stage.conversation]
    answer = send(poster, {**stage.options, "model": stage.model, "messages": messages}, given)
    return _read(answer.body, poster, stage)


def _open_poster(stage: LlmStage) -> Poster:
    options = settings.current()
    if not options.llm_base_url:
        raise BadWorkflow(f"The stage {stage.name!r} needs a language model: set LLM_BASE_URL.")
    return Poster(
        options.llm_base_url,
        path="/chat/completions",
        bearer=options.llm_api_key.get_secret_value().strip() or None,
        allow_private=True,
        allow_http=True,
        patience=Patience(request_seconds=stage.timeout_seconds),
        body_limit=MAX_BYTES,
    )


def _read(body: bytes, poster: Poster, stage: LlmStage) -> StageOutput:
    try:
        answer = json.loads(body)
        text = answer["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise Permanent(f"{poster.origin} answered without a message. Is LLM_BASE_URL an OpenAI-compatible API?")
    notes: dict[str, Any] = {"model": answer.get("model") or stage.model}
    if isinstance(answer.get("usage"), dict):
        notes["usage"] = answer["usage"]
    return StageOutput(text, notes)
