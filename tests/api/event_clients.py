"""Clients of server-sent events, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


def request(token: str, task_id: object) -> bytes:
    return f"GET /api/tasks/{task_id}/events HTTP/1.1\r\nHost: api\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


@dataclass
class EventClient:
    """One open stream. `events` are the data of its events so far, and `ids` their ids."""

    reader: asyncio.StreamReader
    events: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    comments: int = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int, token: str, task_id: object) -> AsyncIterator[EventClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request(token, task_id))
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.split()[1] == b"200", answer
            yield cls(reader)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def read(self, *, until: str | None = None, comments: int | None = None) -> list[str]:
        """Read until the stream ends, or an event with this status or so many comments came; return all statuses."""
        while size := int(await self.reader.readline(), 16):
            text = (await self.reader.readexactly(size + 2)).decode()
            for event in filter(None, text.split("\n\n")):
                self._note(event.strip("\r\n"))
            if until in self.statuses or self.comments == comments:
                break
        return self.statuses

    @property
    def statuses(self) -> list[str]:
        return [each["toStatus"] for each in self.events]

    def _note(self, event: str) -> None:
        if event == ":":
            self.comments += 1
        elif event:
            fields = dict(line.split(": ", 1) for line in event.splitlines())
            self.events.append(json.loads(fields["data"]))
            self.ids.append(int(fields["id"]))
