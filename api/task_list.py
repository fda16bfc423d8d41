"""The route that lists tasks, the latest change first, page by page."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from api.bodies import Status, Text, decode_cursor, encode_cursor
from api.documented import Answer, documented
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.principals import sees_all
from api.shapes import ShownListedTask, list_of
from api.tasks import Reader
from api.tokens import Token
from api.visible_errors import show_listed
from models.engine import engine
from tasks.operations.listing import ListedTask, TaskFilter, list_tasks

MOST: Final = 200
FILTER_SECONDS: Final = 10.0  # a filter that matches few of millions of tasks scans all of them

PAGE: Final = {200: Answer("A page of tasks.", list_of("TaskPage", "tasks", ShownListedTask, next_cursor=str | None))}

router = APIRouter(prefix="/api/tasks", tags=["tasks"])
Limit = Annotated[int, Query(ge=1, le=MOST)]
PageCursor = Annotated[str | None, Query(max_length=200)]


@router.get("", **documented("List tasks", answers=PAGE))
async def list_visible_tasks(
    *,
    token: Reader,
    status: Annotated[list[Status], Query(max_length=20)] = [],  # noqa: B006 - FastAPI copies it
    type: Text | None = None,
    queue: Text | None = None,
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
    limit: Limit = 50,
    cursor: PageCursor = None,
) -> JsonResponse:
    """Answer one page of the tasks that the token may see. `since` and `until` are about the last change."""
    principal = None if sees_all(token) else token.name
    chosen = TaskFilter(frozenset(status), type, queue, since=since, until=until, principal=principal)
    return JsonResponse(await read_page(token, chosen, limit=limit, cursor=cursor))


async def read_page(token: Token, chosen: TaskFilter, *, limit: int, cursor: str | None) -> dict[str, Any]:
    """Return one page as JSON objects show it, and the cursor of the next page, or None if there is none."""
    before = decode_cursor(cursor) if cursor else None

    def read() -> list[ListedTask]:
        with engine().connect() as connection:
            return list_tasks(connection, chosen, before=before, limit=limit + 1)

    found = await call_ledger(read, more_seconds=FILTER_SECONDS)
    page = found[:limit]
    following = encode_cursor(page[-1].cursor) if len(found) > limit else None
    return {"tasks": [show_listed(each, token) for each in page], "nextCursor": following}
