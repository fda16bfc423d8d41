"""Publish events as webhooks: one POST per event (signed_post.py), up to 16 at once, on connections that are kept open.

The body is the payload as JSON. The status of the answer decides the result:

    2xx                  Sent; the external id is the receiver's X-Request-Id, which can be found in its logs
    408, 425, 429, 5xx   Failed; tried again no sooner than Retry-After
    3xx                  Refused: a redirect is never followed, it could lead anywhere
    all others           Refused
    no answer in time    DestinationDown if no event got an answer, otherwise Failed: it may have arrived

`Idempotency-Key` is the id of the event. Headers of the event are not sent, except for a valid `traceparent`.

A forbidden address (address_guard.py) is Refused, not DestinationDown: waiting does not help. An operator must correct
the destination or add allow_private=1, and can then requeue the dead events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent, json_bytes
from outbox.publishers.signed_post import AT_ONCE, TRY_AGAIN, Answer, NoAnswer, NotAsked, Pool, Poster


class HttpPublisher(Poster):
    """Publish to one address."""

    is_slow: ClassVar[bool] = True

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        if self.objection:
            return [Refused(self.objection)] * len(events)
        runner, _, pool = self._open()
        results = runner.run(self._send_all(events, pool))
        silent = [result for result in results if isinstance(result, NoAnswer)]
        if silent and all(isinstance(result, NoAnswer | NotTried) for result in results):
            self.close()
            raise DestinationDown(f"{self.origin} is unreachable: {silent[0].reason}")
        return [Failed(f"no answer: {result.reason}") if isinstance(result, NoAnswer) else result for result in results]

    async def _send_all(self, events: Sequence[ClaimedEvent], pool: Pool) -> list[Result | NoAnswer]:
        """Send all events. Stop early if the first AT_ONCE events get no answer."""
        results: list[Result | NoAnswer] = [NotTried()] * len(events)
        places = iter(range(len(events)))  # shared: each place is taken once
        over_at = time.monotonic() + self.patience.batch_seconds
        silent, has_answer = 0, False

        async def work() -> None:
            nonlocal silent, has_answer
            for place in places:
                results[place] = result = await self._send_one(events[place], pool)
                silent += isinstance(result, NoAnswer)
                has_answer |= not isinstance(result, NoAnswer)
                if time.monotonic() >= over_at or (silent >= AT_ONCE and not has_answer):
                    return

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(AT_ONCE, len(events))):
                workers.create_task(work())
        return results

    async def _send_one(self, event: ClaimedEvent, pool: Pool) -> Result | NoAnswer:
        match await self._send(pool, json_bytes(event.payload), str(event.id), event.headers.get("traceparent")):
            case NotAsked(reason=reason):
                return Refused(reason)
            case NoAnswer() as silence:
                return silence
            case Answer() as answer:
                return self._result(answer)

    def _result(self, answer: Answer) -> Result:
        if 200 <= answer.status < 300:
            return Sent(self.shown(answer.headers.get(b"x-request-id", b"")) or None)
        if 300 <= answer.status < 400:
            return Refused(f"{self.origin} answered {answer.status}: redirects are not followed, correct the address.")
        error = f"{self.origin} answered {answer.status}: {self.shown(answer.body) or '(empty body)'}"
        if answer.status in TRY_AGAIN:
            return Failed(error, answer.retry_after_seconds)
        return Refused(error)
