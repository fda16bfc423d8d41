"""Servers that somebody else runs: asked once before anything is started, so that a wrong address is one sentence."""

from __future__ import annotations

from urllib.parse import urlsplit

import redis
from kombu import Connection
from kombu.exceptions import KombuError

from models.engine import make_engine
from models.errors import Unreachable
from settings import SERVER_VARIABLES, Settings


def require_given_servers(settings: Settings) -> None:
    """Unreachable, naming the variable, if a server that was given does not answer."""
    for variable in SERVER_VARIABLES:
        url = settings.given(variable)
        try:
            if variable == "DATABASE_URL" and url:
                make_engine(settings.database_url).connect().close()
            elif url.startswith("redis"):
                with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
                    client.ping()
            elif url:
                with Connection(url, connect_timeout=5) as connection:
                    connection.ensure_connection(max_retries=1, interval_start=0)
        except Unreachable as error:
            raise Unreachable(f"{variable}: {error.message}") from None
        except (redis.RedisError, KombuError, OSError, ValueError) as error:
            raise Unreachable(f"{variable}: {_place(url)} does not answer: {str(error).rstrip('.')}.") from None


def _place(url: str) -> str:
    address = urlsplit(url)
    return f"{address.hostname}:{address.port}"
