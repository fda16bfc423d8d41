"""Check servers that are configured by address before anything starts, so that a wrong address is one clear error."""

from __future__ import annotations

import redis
from kombu import Connection

from models.engine import make_engine
from models.errors import Unreachable
from settings import SERVER_VARIABLES, Settings, place


def require_external_servers(settings: Settings) -> None:
    """Raise Unreachable, naming the variable, if a configured server does not answer."""
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
        except Exception as error:  # each client library raises errors of its own
            reason = str(error).rstrip(".") or type(error).__name__
            raise Unreachable(f"{variable}: {place(url)} does not answer: {reason}.") from None
