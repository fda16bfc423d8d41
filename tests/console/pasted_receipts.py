"""Paste receipts into the page that checks them, and read its verdict."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi.testclient import TestClient

from console.visitors import FORM_FIELD
from receipts.receipt import Receipt
from receipts.signing import sign
from tests.console.forms import page_of
from tests.console.visits import hidden_fields, words

PATH = "/console/receipts"


def signed(receipt: Receipt, **changes: Any) -> str:
    """Return a receipt as it is issued, with other fields if wanted: as the installation would sign them."""
    return json.dumps(sign({**receipt.fields(), **changes}))


def pasted(browser: TestClient, text: str) -> str:
    """Paste a text and press the button; return the page."""
    token = hidden_fields(page_of(browser, PATH))[FORM_FIELD]
    answer = browser.post(PATH, data={FORM_FIELD: token, "receipt": text})
    assert answer.status_code == 200, words(answer.text)
    return str(answer.text)


def verdict(page: str) -> tuple[str, str]:
    """Return the mark of the verdict, and its sentence."""
    found = re.search(r'<section class="card verdict (\w+)".*?<h2[^>]*>(.*?)</h2>', page, re.DOTALL)
    assert found, words(page)
    return found[1], words(found[2])


def lines(page: str) -> dict[str, str]:
    """Return the reasons of the verdict: their titles with mark and sentence."""
    part = page.partition('<ol class="custody">')[2].partition("</ol>")[0]
    found = re.findall(r'<li class="(\w+)">.*?<b>(.*?)</b> <span>(.*?)</span></li>', part, re.DOTALL)
    return {words(title): f"{mark}: {words(text)}" for mark, title, text in found}
