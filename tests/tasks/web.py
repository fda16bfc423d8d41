"""Send one HTTP request to a program on this machine."""

from __future__ import annotations

import base64
import urllib.error
import urllib.request

_without_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(port: int | str, path: str, *, login: str = "") -> tuple[int, str]:
    """Return status and text. The status is 0 if the port is closed."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if login:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with _without_proxies.open(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, ""
    except urllib.error.URLError:
        return 0, ""
