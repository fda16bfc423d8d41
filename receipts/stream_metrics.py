"""The gauges of the streams, read from the receipt log when metrics are scraped."""

from __future__ import annotations

import redis
from prometheus_client import CollectorRegistry, Gauge, generate_latest

import settings
from receipts.needed_consumers import stream_keys

ANSWER_SECONDS = 1.0  # a scrape must not wait for long


def exposition() -> bytes:
    """Return length and pending entries of every stream in Prometheus's text format; nothing if Redis is down."""
    registry = CollectorRegistry()
    length = Gauge("ingest_stream_length", "Entries in a stream", ["stream"], registry=registry)
    pending = Gauge(
        "ingest_stream_pending", "Entries that a group is consuming", ["stream", "group"], registry=registry
    )
    try:
        with redis.Redis.from_url(
            settings.current().redis_url,
            decode_responses=True,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
        ) as client:
            for key in stream_keys():
                length.labels(key).set(client.xlen(key))
                for group in client.xinfo_groups(key) if client.exists(key) else ():
                    pending.labels(key, group["name"]).set(group["pending"])
    except (redis.RedisError, settings.SettingsError):
        return b""
    return generate_latest(registry)
