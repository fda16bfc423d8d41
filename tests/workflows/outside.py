"""A real HTTP server that stages call: a CRM and a language model that count requests by idempotency key."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.outbox.publishers.http_cases import Exchange, Receiver, Request

KEY = "Idempotency-Key"
CHAT = "/v1/chat/completions"
API_KEY = "sk-a-very-secret-key"
SECRET = "a key to sign with"


class Outside(Receiver):
    """Performs one effect per key, and repeats the answer when a key comes again."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(port=port)
        self.behaviour = self.answer_normally
        self.effects: dict[str, Any] = {}  # by key
        self.before_answering: Callable[[], object] = lambda: None

    def answer_normally(self, exchange: Exchange) -> None:
        body = json.loads(exchange.request_.body)
        key = exchange.request_.headers[KEY]
        if exchange.request_.target == CHAT:
            answer = self.effects.setdefault(key, make_reply(f"A summary of: {body['messages'][-1]['content']}"))
        else:
            answer = self.effects.setdefault(key, {"customer": "Ada", "asked": body})
        self.before_answering()
        exchange.answer(200, json.dumps(answer).encode(), Content_Type="application/json")

    @property
    def calls(self) -> Counter[str]:
        """The number of requests per key."""
        return Counter(request.headers[KEY] for request in self.requests)

    def requests_to(self, target: str) -> list[Request]:
        return [request for request in self.requests if request.target == target]


def make_reply(text: Any, **more: Any) -> dict[str, Any]:
    """Return an answer in the format of a language model's API."""
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    return {
        "model": "small-2",
        "choices": [{"message": {"role": "assistant", "content": text}}],
        "usage": usage,
        **more,
    }


def answering(status: int, body: bytes = b"", **headers: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(status, body, **headers)
