"""Every knob of Celeriac once: its name, type, default and meaning.

A value comes from the environment; the canonical name (the field's, in capitals) wins over the seed's alias. The three
server addresses come, in this order, from DATABASE_URL, BROKER_URL and REDIS_URL, or from the stack that runs under
CELERIAC_HOME. `docs/configuration.md` and `manage.py config` are made from this file.
"""

from __future__ import annotations

import os
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as NotParsed

from home_files import SettingsError as SettingsError  # noqa: PLC0414 - known by this name everywhere
from home_files import read_json, read_stack

ROOT: Final = Path(__file__).resolve().parent
LOOK_UP_SECONDS: Final = 1.0
SERVER_VARIABLES: Final = ("DATABASE_URL", "BROKER_URL", "REDIS_URL")


class NotConfigured(SettingsError):
    """No server is named and no stack runs."""

    code = "not_configured"
    http_status = 503
    exit_code = 3


def _words(value: object) -> object:
    """`a, b` → ("a", "b"); empty → ()."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Home = Annotated[Path, BeforeValidator(lambda given: given or ".celeriac")]  # empty means not set
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]


def knob(default: Any, meaning: str, *names: str, **bounds: Any) -> Any:
    """One setting. `names` is given only where a seed knows it by another name: the canonical name first."""
    if names:
        bounds["validation_alias"] = AliasChoices(*names)
    return Field(default, description=meaning, **bounds)


def _url(*schemes: str) -> AfterValidator:
    def check(value: str) -> str:
        if value and value.partition("://")[0] not in schemes:
            raise ValueError(f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        try:
            _ = urlsplit(value).port
        except ValueError:
            raise ValueError("is not an address: its port is not a number") from None
        return value

    return AfterValidator(check)


def _schema(value: str) -> str:
    """A plain identifier, so that it can stand in statements, key prefixes and queue names as it is."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", value):
        raise ValueError("must be a lower-case identifier of at most 40 letters, digits and _")
    if value.startswith("pg_") or value in ("public", "information_schema"):
        raise ValueError("must be a schema of its own, for Celeriac alone")
    return value


def _hosts(value: str) -> str:
    """Without a scheme and without a login, which the client's own errors would repeat."""
    hosts = [host.strip() for host in value.split(",")] if value.strip() else []
    if not all(re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:@/\[\]]+)(:\d{1,5})?", host) for host in hosts):
        raise ValueError("must be host:port, separated by commas; logins go into KAFKA_OPTIONS")
    return ",".join(hosts)


class Settings(BaseSettings):
    """The environment, read once and checked."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)
    _looked_up: dict[str, tuple[float, str]] = PrivateAttr(default_factory=dict)  # addresses of servers, and when

    # servers: empty means the stack under CELERIAC_HOME
    given_database_url: Annotated[str, _url("postgresql", "postgres", "postgresql+psycopg2")] = knob(
        "", "PostgreSQL that holds the ledger; empty: the embedded one", "DATABASE_URL"
    )
    given_broker_url: Annotated[str, _url("redis", "rediss", "amqp", "amqps")] = knob(
        "", "Redis or RabbitMQ that wake-ups the bell; empty: the embedded Redis", "BROKER_URL"
    )
    given_redis_url: Annotated[str, _url("redis", "rediss")] = knob(
        "", "Redis that keeps accepted receipts; empty: the embedded one", "REDIS_URL"
    )
    ledger_schema: Annotated[str, AfterValidator(_schema)] = knob(
        "celeriac", "PostgreSQL schema of this installation; its broker keys, queues and exchange are named after it"
    )
    ledger_prepared_statements: bool = knob(
        True, "plan the busiest statements once per connection; false behind a pooler that shares connections"
    )
    celeriac_home: Home = knob(Path(".celeriac"), "data, logs, secrets of the embedded stack; relative to this project")
    celeriac_redis_server: str = knob("", "path of a redis-server or valkey-server ≥ 6.2 for the embedded stack")

    # tasks
    ingest_max_attempts: int = knob(
        10, "failures until a task is DEAD", "INGEST_MAX_ATTEMPTS", "INGEST_REDIS_MAX_ATTEMPTS", ge=1
    )
    ingest_retry_base_backoff_ms: int = knob(
        1000,
        "wait after the first failure",
        "INGEST_RETRY_BASE_BACKOFF_MS",
        "INGEST_REDIS_RETRY_BASE_BACKOFF_MS",
        ge=0,
    )
    ingest_retry_max_backoff_ms: int = knob(
        600_000, "longest wait", "INGEST_RETRY_MAX_BACKOFF_MS", "INGEST_REDIS_RETRY_MAX_BACKOFF_MS", ge=0
    )
    ingest_retry_jitter: float = knob(0.0, "share by which a wait varies at random", ge=0, lt=1)
    ingest_lease_seconds: int = knob(60, "how long a claim of tasks holds unless it is renewed", ge=1)
    ingest_redis_reclaim_idle_ms: int | None = knob(
        None, "the seed's name for INGEST_LEASE_SECONDS, in milliseconds; rounded up to at least one second", ge=0
    )
    ingest_wakeup_grace_ms: int = knob(10_000, "age after which a wake-up that nobody answered may count as lost", ge=0)
    ingest_reclaim_enabled: bool = knob(
        True,
        "take over the tasks of lost workers",
        "INGEST_RECLAIM_ENABLED",
        "INGEST_REDIS_RECLAIM_ENABLED",
    )
    ingest_reclaim_interval_ms: int = knob(
        5000,
        "time between two looks for lost tasks",
        "INGEST_RECLAIM_INTERVAL_MS",
        "INGEST_REDIS_RECLAIM_INTERVAL_MS",
        ge=100,
    )
    ingest_reclaim_batch_size: int = knob(
        500,
        "lost tasks taken over at once",
        "INGEST_RECLAIM_BATCH_SIZE",
        "INGEST_REDIS_RECLAIM_BATCH_SIZE",
        ge=1,
    )
    ingest_dlq_queue: str = knob(
        "ingest.dlq",
        "queue that shows DEAD tasks; empty: only their status shows it",
        "INGEST_DLQ_QUEUE",
        "INGEST_REDIS_DLQ_STREAM_KEY",
    )
    ingest_handlers: Words = knob((), "modules with your handlers, separated by commas")
    ingest_queues: Words = knob(
        ("ingest",), "queues for tasks, separated by commas; a bare worker consumes them all", min_length=1
    )
    ingest_succeeded_retention_hours: int = knob(168, "how long SUCCEEDED and DISCARDED tasks are kept", ge=1)
    ingest_dead_retention_hours: int = knob(0, "how long DEAD tasks are kept; 0: for ever", ge=0)
    ingest_tombstone_retention_hours: int = knob(720, "how long the key of a pruned task is remembered", ge=1)
    ingest_queue: Literal["celery", "kafka"] = knob("celery", "what carries the wake-ups to the workers")

    # outbox
    outbox_max_attempts: int = knob(
        10, "failed publishes until an event is DEAD", "OUTBOX_MAX_ATTEMPTS", "INGEST_KAFKA_MAX_ATTEMPTS", ge=1
    )
    outbox_retry_base_backoff_ms: int = knob(
        1000,
        "wait after the first failed publish",
        "OUTBOX_RETRY_BASE_BACKOFF_MS",
        "INGEST_KAFKA_RETRY_BASE_BACKOFF_MS",
        ge=0,
    )
    outbox_retry_max_backoff_ms: int = knob(
        600_000, "longest wait", "OUTBOX_RETRY_MAX_BACKOFF_MS", "INGEST_KAFKA_RETRY_MAX_BACKOFF_MS", ge=0
    )
    outbox_retry_jitter: float = knob(0.3, "share by which a wait varies at random", ge=0, lt=1)
    outbox_lease_seconds: int = knob(60, "how long a relay's claim holds unless it is renewed", ge=1)
    outbox_submit_lease_seconds: int = knob(5, "lease of an event at birth, held by its submitter", ge=1)
    outbox_publish_batch_size: int = knob(
        200,
        "events that a relay claims at once",
        "OUTBOX_PUBLISH_BATCH_SIZE",
        "INGEST_KAFKA_PUBLISH_BATCH_SIZE",
        ge=1,
        le=10_000,
    )
    outbox_publish_interval_ms: int = knob(
        1000,
        "time between two ticks of the relay",
        "OUTBOX_PUBLISH_INTERVAL_MS",
        "INGEST_KAFKA_PUBLISH_INTERVAL_MS",
        ge=50,
    )
    outbox_destinations: dict[str, str] = knob(
        {}, 'addresses by name, as JSON: {"orders": "redis-stream://:password@host:6379/0?stream=orders"}'
    )
    outbox_sent_retention_hours: int = knob(72, "how long SENT events are kept, and duplicates recognised", ge=1)

    # Kafka
    kafka_bootstrap_servers: Annotated[str, AfterValidator(_hosts)] = knob(
        "", "host:port of Kafka, separated by commas; empty: no Kafka"
    )
    kafka_topic: str = knob(
        "ingest.tasks",
        "topic that carries the wake-ups when INGEST_QUEUE=kafka",
        pattern=r"^[A-Za-z0-9._-]{1,249}$",
    )
    kafka_group: str = knob("ingest-workers", "consumer group of the workers", min_length=1)
    kafka_options: dict[str, SecretStr] = knob(
        {}, 'further options of librdkafka for these servers, as JSON: {"security.protocol": "SASL_SSL"}'
    )

    # receipts
    receipt_two_phase_enabled: bool = knob(False, "answer `accepted` before the ledger has saved")
    receipt_deliver_before_saved: bool = knob(False, "deliver a message before it is saved")
    receipt_fail_open: bool = knob(True, "when the receipt Redis is down: save at once (true), or refuse (false)")
    receipt_stream_accepted: str = knob("im:stream:single_chat:accepted", "stream of accepted messages")
    receipt_stream_to_save: str = knob("im:stream:single_chat:to_save", "stream of messages to be saved")
    receipt_group_deliver: str = knob("deliver", "consumer group that delivers")
    receipt_group_save: str = knob("save", "consumer group that saves")
    receipt_batch_size: int = knob(200, "entries that a consumer takes at once", ge=1)
    receipt_block_ms: int = knob(1000, "how long a consumer waits for entries", ge=1)
    receipt_shards: int = knob(1, "streams per kind; one sender always has the same", ge=1)
    receipt_banned_words: Words = knob((), "words that refuse a message, separated by commas")

    # checkpoints and sinks
    checkpoint_defer_ack: bool = knob(False, "acknowledge stream entries only when their checkpoint is complete")
    checkpoint_interval_ms: int = knob(1000, "time between two checkpoints", ge=1)
    checkpoint_drain_ms: int = knob(5000, "how long a checkpoint waits for work under way", ge=0)
    checkpoint_claim_idle_ms: int = knob(60_000, "idle time after which an entry may be taken over", ge=1)
    sink_dedup_enabled: bool = knob(True, "let sinks remember what they have already done")

    # backlog
    backlog_alert_threshold: int = knob(10_000, "waiting tasks of one queue that raise an alert", ge=1)
    backlog_policy: Literal["alert", "refuse", "scale"] = knob("alert", "what else a backlog does")

    # documents
    document_max_bytes: int = knob(
        20 * 1024 * 1024, "size of the largest document, and characters of the longest text", ge=1, le=256 * 1024 * 1024
    )
    document_max_pages: int = knob(5000, "pages of the longest PDF", ge=1)
    document_max_seconds: int = knob(120, "processor time that reading one document may take", ge=1, le=280)

    # outside services
    llm_base_url: Annotated[str, _url("http", "https")] = knob(
        "", "address of an OpenAI-compatible API for `llm` stages, as https://host/v1"
    )
    llm_api_key: SecretStr = knob(SecretStr(""), "its key")
    chroma_base_url: Annotated[str, _url("http", "https")] = knob(
        "", "address of a Chroma server that gets a copy of each chunk; empty: none"
    )

    # doors
    api_host: str = knob("127.0.0.1", "address the API listens on")
    api_port: int = knob(8000, "port the API listens on", ge=1, le=65535)
    api_run_ticks: bool = knob(False, "run relay and reclaim inside the API process too")
    worker_run_ticks: bool = knob(True, "a worker of the system queue runs the ticks itself while beat is silent")
    worker_metrics_port: int = knob(
        0, "port of a worker's own /metrics on loopback (the stack's system worker: the next); 0: none", ge=0, le=65534
    )
    log_format: Literal["text", "json"] = knob("text", "how log lines are written")

    @model_validator(mode="before")
    @classmethod
    def _idle_time_is_a_lease(cls, values: dict[str, Any]) -> dict[str, Any]:
        idle = str(values.get("ingest_redis_reclaim_idle_ms", ""))
        if idle.isdecimal():
            values.setdefault("ingest_lease_seconds", max(1, -(-int(idle) // 1000)))
        return values

    @model_validator(mode="after")
    def _no_entry_is_taken_over_inside_its_checkpoint(self) -> Settings:
        least = self.checkpoint_interval_ms + self.checkpoint_drain_ms
        if self.checkpoint_claim_idle_ms <= least:
            raise ValueError(
                f"CHECKPOINT_CLAIM_IDLE_MS must be more than CHECKPOINT_INTERVAL_MS + CHECKPOINT_DRAIN_MS ({least})"
            )
        return self

    @model_validator(mode="after")
    def _kafka_has_an_address(self) -> Settings:
        if self.ingest_queue == "kafka" and not self.kafka_bootstrap_servers:
            raise ValueError("KAFKA_BOOTSTRAP_SERVERS must name a Kafka (host:port) when INGEST_QUEUE=kafka")
        return self

    @property
    def home(self) -> Path:
        return ROOT / self.celeriac_home.expanduser()  # an absolute path stays as it is

    @property
    def database_url(self) -> str:
        """The ledger, as SQLAlchemy wants it: plain `postgresql://` would mean psycopg 3 there."""
        url = self.server_url("DATABASE_URL")
        scheme, _, rest = url.partition("://")
        return f"postgresql+psycopg2://{rest}" if scheme in ("postgresql", "postgres") else url

    @property
    def broker_url(self) -> str:
        return self.server_url("BROKER_URL")

    @property
    def redis_url(self) -> str:
        return self.server_url("REDIS_URL")

    def given(self, variable: str) -> str:
        """What the environment says; nothing if it only repeats what `manage.py env` printed for this home."""
        url: str = getattr(self, f"given_{variable.lower()}").strip()
        return "" if url and _password(url) in self.secrets.values() else url

    def server_url(self, variable: str) -> str:
        """Looked up anew now and then, since a stack that was started again may have moved; not for every statement."""
        looked_up_at, url = self._looked_up.get(variable, (0.0, ""))
        if not url or time.monotonic() - looked_up_at > LOOK_UP_SECONDS:
            url = self._look_up(variable)
            self._looked_up[variable] = (time.monotonic(), url)
        return url

    def _look_up(self, variable: str) -> str:
        url = self.given(variable) or self.stack.get(variable, "")
        if not url:
            raise NotConfigured(
                f"{variable} is not set and no stack runs in {self.home}: "
                f"run `make up`, or set {_listed(SERVER_VARIABLES)}."
            )
        return url

    @property
    def stack(self) -> dict[str, str]:
        """Where the stack of this home runs; empty when it does not. Written by `embedded/`."""
        return read_stack(self.home)

    @property
    def secrets(self) -> dict[str, str]:
        """The generated secrets of this home; empty when it was never started. Written by `embedded/`."""
        return read_json(self.home / "secrets.json")


@lru_cache(maxsize=1)
def current() -> Settings:
    """The settings of this process."""
    try:
        return Settings()
    except ValidationError as error:
        raise SettingsError(" ".join(map(_sentence, error.errors()))) from None
    except NotParsed as error:  # it names the field, and nothing of the value
        fields = [field for field in Settings.model_fields if f'"{field}"' in str(error)]
        raise SettingsError(f"{', '.join(fields).upper()}: it is no JSON.") from None


def variables(field: str) -> tuple[str, ...]:
    """The variables that set a field: the canonical name, then the seed's."""
    alias = Settings.model_fields[field].validation_alias
    names = alias.choices if isinstance(alias, AliasChoices) else [field]
    return tuple(str(name).upper() for name in names)


def place(url: str) -> str:
    """Host and port of an address, for people: nothing secret."""
    address = urlsplit(url)
    return f"{address.hostname or 'localhost'}:{address.port}" if address.port else address.hostname or "localhost"


def _sentence(error: Any) -> str:
    if not error["loc"]:
        return f"{error['msg'].removeprefix('Value error, ')}."
    name = str(error["loc"][0]).upper()
    names = next((names for names in map(variables, Settings.model_fields) if name in names), (name,))
    name = next((known for known in names if known in os.environ), name)
    message = error["msg"].removeprefix("Value error, ")
    return f"{name}: {message[0].lower()}{message[1:]}."


def _password(url: str) -> str:
    try:
        return unquote(urlsplit(url).password or "")
    except ValueError:
        return ""


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
