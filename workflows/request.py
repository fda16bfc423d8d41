"""Send the POST of a stage with the webhook client (`outbox/publishers/signed_post.py`) and interpret the answer.

2xx                                         return the answer
408, 425, 429, 5xx                          retry, not before the time in Retry-After
no answer, or an incomplete one             retry with the same key, because the request may have arrived
3xx, other statuses, a forbidden address    DEAD at once
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

from models.errors import CeleriacError
from outbox.canonical_json import BadPayload, canonical_json
from outbox.publishers.signed_post import TRY_AGAIN, Answer, NoAnswer, NotAsked, Poster
from tasks import Permanent, TryLater
from workflows.stage import StageInput

MAX_BYTES: Final = 1_048_576  # of an answer


class StageUnanswered(CeleriacError):
    """The receiver of a stage's request did not answer.

    The receiver is unreachable, its answer broke off, or the request took longer than the stage's `timeoutSeconds`. The
    message says which.
    """

    code = "stage_unanswered"
    remedy = "Start the receiver, correct its address or raise the limit, and requeue the task if it is DEAD."


def send(poster: Poster, body: Any, given: StageInput) -> Answer:
    """Return the complete answer if its status is 2xx; otherwise raise what makes the task retry or DEAD."""
    try:
        written = canonical_json(body, what=f"request of the stage {given.name!r}")
    except BadPayload as error:
        raise Permanent(error.message) from None
    with closing(poster):
        answer = poster.post(written.encode(), key=given.key, traceparent=given.traceparent)
    match answer:
        case NotAsked(reason=reason):
            raise Permanent(reason)
        case NoAnswer(reason=reason):
            raise StageUnanswered(f"{poster.origin} did not answer: {reason}{_limit(answer)}.")
    if 200 <= answer.status < 300:
        if answer.broken_off:
            incomplete = f"the answer is incomplete: {answer.broken_off}{_limit(answer)}"
            raise StageUnanswered(f"{poster.origin} answered {answer.status}, but {incomplete}.")
        if answer.is_too_long:
            raise Permanent(f"{poster.origin} answered with more than {poster.body_limit:,} bytes.")
        return answer
    if 300 <= answer.status < 400:
        raise Permanent(f"{poster.origin} answered {answer.status}. Redirects are not followed: correct the address.")
    message = f"{poster.origin} answered {answer.status}: {poster.shown(answer.body) or '(empty body)'}"
    if answer.status in TRY_AGAIN:
        raise TryLater(message, answer.retry_after_seconds or 0)
    raise Permanent(message)


def _limit(answer: Answer | NoAnswer) -> str:
    """Name the limit that ended a request."""
    return " (timeoutSeconds of the stage)" if answer.is_late else ""
