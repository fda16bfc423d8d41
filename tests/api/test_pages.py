"""The pages for people load nothing from other servers and run no script that is not a file of ours."""

from __future__ import annotations

import re
import sys

import pytest
from fastapi.testclient import TestClient

from api import pages


@pytest.mark.parametrize("path", [pages.ROOT, pages.DOCS])
def test_a_page_is_open_and_loads_from_this_server_only(client: TestClient, path: str) -> None:
    page = client.get(path)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy + page.text
    assert "//" not in policy + page.text.replace("<!doctype html>", "")
    assert not re.search(r"<script(?! src=)|\son\w+=", page.text)
    for address in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        assert client.get(f"/{address}").status_code == 200, address


def test_the_style_of_the_root_page_is_the_one_that_its_policy_allows(client: TestClient) -> None:
    page = client.get("/")
    (style,) = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    assert style == pages.STYLE
    assert "'sha256-" in page.headers["content-security-policy"]
    assert "Celery tasks whose effects happen once" in page.text


@pytest.mark.parametrize(("name", "media_type"), pages.ASSETS.items())
def test_the_files_of_the_page_have_their_types(client: TestClient, name: str, media_type: str) -> None:
    file = client.get(f"/docs/{name}")
    assert file.headers["content-type"].startswith(media_type)
    assert file.headers["cache-control"] == pages.CACHE
    assert file.headers["x-content-type-options"] == "nosniff"


def test_the_page_sends_no_address_to_the_makers_of_swagger_ui() -> None:
    assert "validatorUrl: null" in pages.START
    assert "connect-src 'self'" in pages.DOCS_POLICY


def test_the_code_of_the_package_with_the_files_is_not_imported(client: TestClient) -> None:
    """It patches FastAPI's own pages, which load scripts from other servers."""
    assert len(client.get("/docs/swagger-ui-bundle.js").content) > 100_000
    assert "fastapi_offline" not in sys.modules
