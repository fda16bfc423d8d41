"""Webhooks: an event is one POST (`http_post.py`), up to 16 of them at once on connections that are kept.

The body is the payload as JSON, and the status alone says what became of it:

    2xx                  Sent; the external id is the receiver's X-Request-Id, by which its logs can be searched
    408, 425, 429, 5xx   Failed, to be tried again no sooner than Retry-After
    3xx                  Refused: a redirect is never followed, it could lead anywhere
    all others           Refused
    no answer in time    DestinationDown if nobody has answered at all, otherwise Failed: it may have arrived

`Idempotency-Key` is the id of the event. No header comes from a row, but for a `traceparent` that is one.

A forbidden address (`address_guard`) is Refused and not DestinationDown: somebody has to correct the destination or to
write allow_private=1, waiting changes nothing. The dead events say so and can be requeued.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import ClassVar

import httpcore2

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent
from outbox.publishers.http_post import AT_ONCE, TRY_AGAIN, Answer, NoAnswer, NotAsked, Poster


class HttpPublisher(Poster):
    """One address."""

    is_slow: ClassVar[bool] = True

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        if self.objection:
            return [Refused(self.objection)] * len(events)
        line = self._open()
        results = line.runner.run(self._send_all(events, line.pool))
        silent = [result for result in results if isinstance(result, NoAnswer)]
        if silent and all(isinstance(result, NoAnswer | NotTried) for result in results):
            self.close()
            raise DestinationDown(f"{self.origin} does not answer: {silent[0].reason}")
        return [Failed(f"no answer: {result.reason}") if isinstance(result, NoAnswer) else result for result in results]

    async def _send_all(
        self, events: Sequence[ClaimedEvent], pool: httpcore2.AsyncConnectionPool
    ) -> list[Result | NoAnswer]:
        """Ends early if as many as are sent at once got no answer, and nobody else has got one."""
        results: list[Result | NoAnswer] = [NotTried()] * len(events)
        places = iter(range(len(events)))  # shared: each place is taken once
        over_at = time.monotonic() + self.patience.batch_seconds
        silent = 0
        somebody_is_there = False

        async def work() -> None:
            nonlocal silent, somebody_is_there
            for place in places:
                results[place] = result = await self._send_one(events[place], pool)
                if isinstance(result, NoAnswer):
                    silent += 1
                else:
                    somebody_is_there = True
                if time.monotonic() >= over_at or (silent >= AT_ONCE and not somebody_is_there):
                    return

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(AT_ONCE, len(events))):
                workers.create_task(work())
        return results

    async def _send_one(self, event: ClaimedEvent, pool: httpcore2.AsyncConnectionPool) -> Result | NoAnswer:
        body = json.dumps(event.payload, ensure_ascii=False, separators=(",", ":")).encode()
        match await self._send(pool, body, str(event.id), event.headers.get("traceparent")):
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
            return Refused(f"{self.origin} answered {answer.status}: redirects are not followed, correct its address.")
        error = f"{self.origin} answered {answer.status}: {self.shown(answer.body) or 'without a word'}"
        if answer.status in TRY_AGAIN:
            return Failed(error, answer.retry_after_seconds)
        return Refused(error)
