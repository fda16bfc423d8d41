"""Reads from RabbitMQ's management API how long RabbitMQ waits for an acknowledgement: the consumer timeout.

Since RabbitMQ 3.11.15, a policy (`consumer-timeout`) and an argument of a queue (`x-consumer-timeout`) set it for that
queue; of the two the smaller one counts, and RabbitMQ ignores a value that is not a whole number. All other queues have
the `consumer_timeout` of rabbitmq.conf, which neither AMQP nor the management API tells; its default is half an hour.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

from kombu import Connection

from models.errors import Unreachable

DEFAULT_SECONDS: Final = 1800.0
PATIENCE_SECONDS: Final = 2.0
PORT: Final = 15672
TLS_PORT: Final = 15671


def read_consumer_timeouts(broker_url: str, queues: Iterable[str]) -> dict[str, float]:
    """Return the consumer timeout in seconds of each queue that has one of its own.

    The management API is expected on the host of the broker, with the same login. Raise Unreachable if it does not
    answer, or not with the queues: the plugin may be off, or the user may not have the tag `management`.
    """
    address = Connection(broker_url)
    is_encrypted = broker_url.startswith("amqps:")  # then the login must not leave this machine in plain text either
    host, port = address.hostname or "localhost", TLS_PORT if is_encrypted else PORT
    kind = http.client.HTTPSConnection if is_encrypted else http.client.HTTPConnection
    connection = kind(host, port, timeout=PATIENCE_SECONDS)
    login = f"{address.userid or 'guest'}:{address.password or 'guest'}"
    headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
    vhost = quote(address.virtual_host or "/", safe="")
    try:
        found = {
            name: _own_timeout(_get(connection, f"/api/queues/{vhost}/{quote(name, safe='')}", headers))
            for name in queues
        }
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise Unreachable(f"the management API of RabbitMQ at {host}:{port} does not tell it ({reason})") from None
    finally:
        connection.close()
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _get(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> dict[str, Any]:
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status == http.client.NOT_FOUND and body.startswith(b'{"error":"Object Not Found"'):
        return {}  # the queue is declared when its first worker starts
    if answer.status != http.client.OK:
        raise ValueError(f"it answered {answer.status}")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("it answered something else")
    return found


def _own_timeout(queue: dict[str, Any]) -> float | None:
    policy, arguments = (queue.get(name) or {} for name in ("effective_policy_definition", "arguments"))
    given = (policy.get("consumer-timeout"), arguments.get("x-consumer-timeout"))
    return min((each / 1000 for each in given if type(each) is int and each > 0), default=None)
