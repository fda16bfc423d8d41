"""The route for the public keys of receipts. It is open: a verifier needs no account."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from api.documented import Answer, documented
from api.json_responses import JsonResponse
from api.shapes import KeyList
from receipts.keys import public_keys

router = APIRouter(tags=["receipts"])
PATH: Final = "/.well-known/celeriac-keys.json"
CACHE: Final = "public, max-age=60"  # a new key should be published for longer than this before it signs


@router.get(PATH, **documented("List the public keys of receipts", answers={200: Answer("All keys.", KeyList)}))
def read_keys() -> JsonResponse:
    return JsonResponse(public_keys(), headers={"Cache-Control": CACHE})
