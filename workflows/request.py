"""One POST of a stage, through the engine of the webhooks (`http_post.py`), and what its answer means.

2xx                                         the answer
408, 425, 429, 5xx                          tried again, no sooner than Retry-After asks
no answer, one that broke off               tried again: it may have arrived, and the key says so
3xx, all others, a forbidden address        DEAD at once
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

from models.errors import CeleriacError
from outbox.canonical import BadPayload, canonical_json
from outbox.publishers.http_post import TRY_AGAIN, Answer, NoAnswer, NotAsked, Poster
from tasks.core.outcomes import Permanent, TryLater
from workflows.stage import StageInput

ANSWER_LIMIT: Final = 1_048_576


class StageUnanswered(CeleriacError):
    """Nobody has answered."""

    code = "stage_unanswered"


def ask(poster: Poster, body: Any, given: StageInput) -> Answer:
    """A whole answer that says yes."""
    try:
        written = canonical_json(body, what=f"request of the stage {given.name!r}")
    except BadPayload as refused:
        raise Permanent(refused.message) from None
    with closing(poster):
        answer = poster.post(written.encode(), key=given.key, traceparent=given.traceparent)
    match answer:
        case NotAsked(reason=reason):
            raise Permanent(reason)
        case NoAnswer(reason=reason):
            raise StageUnanswered(f"{poster.origin} does not answer: {reason}.")
    if 200 <= answer.status < 300:
        if answer.is_broken_off:
            raise StageUnanswered(f"{poster.origin} answered {answer.status}, and its answer broke off.")
        if answer.is_too_long:
            raise Permanent(f"{poster.origin} answered with more than {poster.body_limit:,} bytes.")
        return answer
    if 300 <= answer.status < 400:
        raise Permanent(f"{poster.origin} answered {answer.status}: redirects are not followed, correct its address.")
    said = f"{poster.origin} answered {answer.status}: {poster.shown(answer.body) or 'without a word'}"
    if answer.status in TRY_AGAIN:
        raise TryLater(said, answer.retry_after_seconds or 0)
    raise Permanent(said)
