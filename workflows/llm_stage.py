"""The kind `llm`: a question to the OpenAI-compatible API at LLM_BASE_URL. What the model says is the output.

The address is the operator's own, so it may be private (a model on this machine). LLM_API_KEY goes into one header and
nowhere else: it is in no step, no error and no log, also when the server repeats it.
"""

from __future__ import annotations

from typing import Any

import settings
from outbox.publishers.http_post import Patience, Poster
from tasks.core.outcomes import Permanent
from tasks.submission.json_lines import BadJson, read_json
from workflows.payload import BadWorkflow, LlmStage
from workflows.request import ANSWER_LIMIT, ask
from workflows.stage import StageInput, StageOutput
from workflows.templates import check_size, filled_text


def check(asked: LlmStage) -> None:
    poster = _poster(asked)
    if poster.objection:
        raise BadWorkflow(f"LLM_BASE_URL cannot be asked: {poster.objection}")


def run(asked: LlmStage, given: StageInput) -> StageOutput:
    poster = _poster(asked)
    check_size(asked.question, given.known)
    question = [{**each, "content": filled_text(each["content"], given.known)} for each in asked.question]
    answer = ask(poster, {**asked.options, "model": asked.model, "messages": question}, given)
    return _read(answer.body, poster, asked)


def _poster(asked: LlmStage) -> Poster:
    knobs = settings.current()
    if not knobs.llm_base_url:
        raise BadWorkflow(f"The stage {asked.name!r} asks a language model, and LLM_BASE_URL names none.")
    return Poster(
        knobs.llm_base_url,
        path="/chat/completions",
        bearer=knobs.llm_api_key.get_secret_value().strip() or None,
        allow_private=True,
        allow_http=True,
        patience=Patience(request_seconds=asked.timeout_seconds),
        body_limit=ANSWER_LIMIT,
    )


def _read(body: bytes, poster: Poster, asked: LlmStage) -> StageOutput:
    try:
        said = read_json(body)
        text = said["choices"][0]["message"]["content"]
    except (BadJson, LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise Permanent(f"{poster.origin} answered, but with no message: is LLM_BASE_URL an OpenAI-compatible API?")
    notes: dict[str, Any] = {"model": said.get("model") or asked.model}
    if isinstance(said.get("usage"), dict):
        notes["usage"] = said["usage"]
    return StageOutput(text, notes)
