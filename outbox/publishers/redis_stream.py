"""Publish events as entries of a Redis Stream, a whole batch in one round trip.

An entry has the fields `id` (of the event), `payload` and `headers` (JSON). The id of the entry is the external id.
Redis confirms each XADD separately; one that it rejects fails only its own event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import redis

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import PATIENCE_SECONDS, DestinationDown, Failed, Result, Sent, json_bytes


class RedisStreamPublisher:
    """Publish to one stream."""

    is_slow: ClassVar[bool] = False

    def __init__(self, url: str, stream: str) -> None:
        self.stream = stream
        timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), PATIENCE_SECONDS)
        # The client must not retry by itself: it cannot tell which entries of a batch have arrived.
        self.client = redis.Redis.from_url(url, **timeouts, retry=None)

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        try:
            pipeline: Any = self.client.pipeline(transaction=False)
            with pipeline:
                for event in events:
                    headers = json_bytes(dict(event.headers))
                    fields = ("id", event.id, "payload", json_bytes(event.payload), "headers", headers)
                    pipeline.execute_command("XADD", self.stream, "*", *fields)
                answers = pipeline.execute(raise_on_error=False)
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self.close()
            raise DestinationDown(f"Redis is unreachable: {error}") from None
        return [_result(answer) for answer in answers]

    def close(self) -> None:
        self.client.close()


def _result(answer: object) -> Result:
    if isinstance(answer, Exception):
        return Failed(f"{type(answer).__name__}: {answer}")
    return Sent(answer.decode() if isinstance(answer, bytes) else str(answer))
