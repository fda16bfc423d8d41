"""Read a page as a user sees it: a real browser loads it and runs its scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

SCRIPT_MILLISECONDS = 5000  # of the page's own time, which passes as fast as its requests are answered


def page_in_browser(url: str, profile: Path) -> str:
    """Return the HTML of the page after its scripts have run."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", f"--user-data-dir={profile}"]
    return subprocess.run(
        [program, *options, f"--virtual-time-budget={SCRIPT_MILLISECONDS}", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def table_of(page: str) -> list[list[str]]:
    """Return the text of each cell of the rows in the bodies of the page's tables."""
    rows = [row for body in re.findall(r"<tbody.*?</tbody>", page, re.DOTALL) for row in body.split("</tr>")]
    return [[_text(cell) for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)] for row in rows]


def _text(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())
