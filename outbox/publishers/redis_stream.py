"""Events as entries of a Redis Stream, a whole batch in one round trip.

An entry has the fields `id` (the event's), `payload` and `headers` (JSON). The entry's own id is the external id. Each
XADD is confirmed by itself; what the server refuses is that event's failure and nobody else's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import redis

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, Result, Sent

PATIENCE_SECONDS: Final = 3


class RedisStreamPublisher:
    """One stream of one Redis."""

    is_slow: ClassVar[bool] = False

    def __init__(self, url: str, stream: str) -> None:
        self.stream = stream
        # no retry of the client's own: it could not tell what of a batch has arrived
        self.client = redis.Redis.from_url(
            url, socket_timeout=PATIENCE_SECONDS, socket_connect_timeout=PATIENCE_SECONDS, retry=None
        )

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        try:
            pipeline: Any = self.client.pipeline(transaction=False)
            with pipeline:
                for event in events:
                    pipeline.execute_command("XADD", self.stream, "*", *_fields(event))
                answers = pipeline.execute(raise_on_error=False)
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self.close()
            raise DestinationDown(f"Redis does not answer: {error}") from None
        return [_result(answer) for answer in answers]

    def close(self) -> None:
        self.client.close()


def _fields(event: ClaimedEvent) -> tuple[str | int, ...]:
    headers = json.dumps(dict(event.headers), ensure_ascii=False) if event.headers else "{}"
    return ("id", event.id, "payload", json.dumps(event.payload, ensure_ascii=False), "headers", headers)


def _result(answer: object) -> Result:
    if isinstance(answer, Exception):
        return Failed(f"{type(answer).__name__}: {answer}")
    return Sent(answer.decode() if isinstance(answer, bytes) else str(answer))
