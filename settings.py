"""All settings of Celeriac: name, type, default and meaning.

Values come from environment variables named like the fields, in capitals; some have an alias, which the canonical name
overrides. The addresses of the servers come from DATABASE_URL, BROKER_URL and REDIS_URL, or from the stack that runs in
CELERIAC_HOME. docs/configuration.md and `manage.py config` are generated from this file. `setting_types.py` checks the
values.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as NotParsed

from home_files import SettingsError as SettingsError  # noqa: PLC0414 - other modules import it from here
from home_files import is_printed, read_json, read_stack
from setting_types import (
    SINK_NAME,
    Home,
    SinkSetting,
    Words,
    check_destinations,
    check_hosts,
    check_schema,
    url_of,
)

ROOT: Final = Path(__file__).resolve().parent
LOOK_UP_SECONDS: Final = 1.0
DEFAULT_SCHEMA: Final = "celeriac"
# Other names under which a setting is read; the canonical name wins.
ALIASES: Final = {
    "ingest_max_attempts": "INGEST_REDIS_MAX_ATTEMPTS",
    "ingest_retry_base_backoff_ms": "INGEST_REDIS_RETRY_BASE_BACKOFF_MS",
    "ingest_retry_max_backoff_ms": "INGEST_REDIS_RETRY_MAX_BACKOFF_MS",
    "ingest_reclaim_enabled": "INGEST_REDIS_RECLAIM_ENABLED",
    "ingest_reclaim_interval_ms": "INGEST_REDIS_RECLAIM_INTERVAL_MS",
    "ingest_reclaim_batch_size": "INGEST_REDIS_RECLAIM_BATCH_SIZE",
    "ingest_dlq_queue": "INGEST_REDIS_DLQ_STREAM_KEY",
    "outbox_max_attempts": "INGEST_KAFKA_MAX_ATTEMPTS",
    "outbox_retry_base_backoff_ms": "INGEST_KAFKA_RETRY_BASE_BACKOFF_MS",
    "outbox_retry_max_backoff_ms": "INGEST_KAFKA_RETRY_MAX_BACKOFF_MS",
    "outbox_publish_batch_size": "INGEST_KAFKA_PUBLISH_BATCH_SIZE",
    "outbox_publish_interval_ms": "INGEST_KAFKA_PUBLISH_INTERVAL_MS",
}
SERVER_VARIABLES: Final = ("DATABASE_URL", "BROKER_URL", "REDIS_URL")


class NotConfigured(SettingsError):
    """No server address is configured and no stack is running.

    DATABASE_URL, BROKER_URL or REDIS_URL is not set, and no embedded stack runs in CELERIAC_HOME.
    """

    code = "not_configured"
    remedy = "Start the embedded stack with `make up`, or set DATABASE_URL, BROKER_URL and REDIS_URL."
    http_status = 503
    exit_code = 3


def setting(default: Any, meaning: str, **bounds: Any) -> Any:
    """Declare a setting with its default, its meaning for the documentation, and the bounds of its values."""
    return Field(default, description=meaning, **bounds)


def _name_variables(field: str) -> AliasChoices:
    names = [field.removeprefix("given_"), ALIASES.get(field, "")]
    return AliasChoices(*(name.upper() for name in names if name))


class Settings(BaseSettings):
    """The settings of one process, read from the environment and checked."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
        alias_generator=AliasGenerator(validation_alias=_name_variables),
    )
    _looked_up: dict[str, tuple[float, str]] = PrivateAttr(default_factory=dict)  # variable → (when, address)

    # servers
    given_database_url: Annotated[str, url_of("postgresql", "postgres", "postgresql+psycopg2")] = setting(
        "", "PostgreSQL database with the ledger; empty: the embedded one"
    )
    given_broker_url: Annotated[str, url_of("redis", "rediss", "amqp", "amqps")] = setting(
        "", "broker, Redis or RabbitMQ, for wake-ups; empty: the embedded Redis"
    )
    given_redis_url: Annotated[str, url_of("redis", "rediss")] = setting(
        "", "Redis that stores accepted receipts; empty: the embedded one"
    )
    ledger_schema: Annotated[str, AfterValidator(check_schema)] = setting(
        DEFAULT_SCHEMA,
        "PostgreSQL schema of this installation; its broker keys, queues and exchange are named after it",
    )
    ledger_prepared_statements: bool = setting(
        True, "prepare frequent statements once per connection; false behind PgBouncer in transaction mode"
    )
    celeriac_home: Home = setting(
        Path(".celeriac"), "the embedded stack's data, logs and secrets; relative to the project"
    )
    celeriac_redis_server: str = setting("", "redis-server or valkey-server (6.2 or newer) for the embedded stack")

    # tasks
    ingest_max_attempts: int = setting(10, "failures after which a task is DEAD", ge=1)
    ingest_retry_base_backoff_ms: int = setting(
        1000, "delay after the first failure; it doubles with each further one", ge=0
    )
    ingest_retry_max_backoff_ms: int = setting(600_000, "longest delay between two attempts", ge=0)
    ingest_retry_jitter: float = setting(0.0, "random variation of the delay, as a fraction of it", ge=0, lt=1)
    ingest_lease_seconds: int = setting(60, "lifetime of a worker's lease on its tasks; renewed while they run", ge=1)
    ingest_redis_reclaim_idle_ms: int | None = setting(
        None, "alias of INGEST_LEASE_SECONDS, in milliseconds; rounded up to full seconds", ge=0
    )
    ingest_wakeup_grace_ms: int = setting(10_000, "age at which an unanswered wake-up may be sent again", ge=0)
    ingest_reclaim_enabled: bool = setting(True, "reclaim the tasks of lost workers")
    ingest_reclaim_interval_ms: int = setting(5000, "time between two searches for lost tasks", ge=100)
    ingest_reclaim_batch_size: int = setting(500, "lost tasks reclaimed in one batch", ge=1)
    ingest_dlq_queue: str = setting("ingest.dlq", "queue that mirrors the DEAD tasks; empty: none")
    ingest_handlers: Words = setting((), "modules with your handlers, separated by commas")
    ingest_queues: Words = setting(
        ("ingest",), "queues for tasks, separated by commas; a worker without -Q consumes all", min_length=1
    )
    ingest_succeeded_retention_hours: int = setting(168, "hours to keep SUCCEEDED and DISCARDED tasks", ge=1)
    ingest_dead_retention_hours: int = setting(0, "hours to keep DEAD tasks; 0: forever", ge=0)
    ingest_tombstone_retention_hours: int = setting(720, "hours to remember the idempotency key of a pruned task", ge=1)
    ingest_queue: Literal["celery", "kafka"] = setting("celery", "what carries wake-ups to the workers")

    # outbox
    outbox_max_attempts: int = setting(10, "failed attempts after which an event is DEAD", ge=1)
    outbox_retry_base_backoff_ms: int = setting(
        1000, "delay after the first failed attempt; it doubles with each further one", ge=0
    )
    outbox_retry_max_backoff_ms: int = setting(600_000, "longest delay between two attempts", ge=0)
    outbox_retry_jitter: float = setting(0.3, "random variation of the delay, as a fraction of it", ge=0, lt=1)
    outbox_lease_seconds: int = setting(
        60, "lifetime of a relay's lease on its events; renewed while it publishes", ge=1
    )
    outbox_submit_lease_seconds: int = setting(
        5, "lifetime of the lease with which a process inserts the events that it publishes itself", ge=1
    )
    outbox_publish_batch_size: int = setting(200, "events that a relay claims at once", ge=1, le=10_000)
    outbox_publish_interval_ms: int = setting(1000, "time between two runs of the relay", ge=50)
    outbox_destinations: Annotated[dict[str, str], AfterValidator(check_destinations)] = setting(
        {}, 'named destinations, as JSON: {"orders": "redis-stream://:password@host:6379/0?stream=orders"}'
    )
    outbox_sent_retention_hours: int = setting(72, "hours to keep SENT events and recognise their duplicates", ge=1)

    # Kafka
    kafka_bootstrap_servers: Annotated[str, AfterValidator(check_hosts)] = setting(
        "", "Kafka servers as host:port, separated by commas; empty: no Kafka"
    )
    kafka_topic: str = setting(
        "ingest.tasks",
        "topic for wake-ups if INGEST_QUEUE=kafka",
        pattern=r"^[A-Za-z0-9._-]{1,249}$",
    )
    kafka_group: str = setting("ingest-workers", "consumer group of the workers", min_length=1)
    kafka_options: dict[str, SecretStr] = setting(
        {}, 'more options for librdkafka, as JSON: {"security.protocol": "SASL_SSL"}'
    )

    # receipts
    receipt_two_phase_enabled: bool = setting(False, "answer `accepted` before the message is saved in the ledger")
    receipt_deliver_before_saved: bool = setting(False, "deliver a message before it is saved")
    receipt_fail_open: bool = setting(
        True, "if the receipt Redis is unreachable: save directly (true) or reject (false)"
    )
    receipt_stream_accepted: str = setting("im:stream:single_chat:accepted", "stream of accepted messages")
    receipt_stream_to_save: str = setting("im:stream:single_chat:to_save", "stream of messages to save")
    receipt_group_deliver: str = setting("deliver", "consumer group that delivers messages")
    receipt_group_save: str = setting("save", "consumer group that saves messages")
    receipt_batch_size: int = setting(1000, "entries that a consumer reads at once; fewer if they are large", ge=1)
    receipt_block_ms: int = setting(1000, "how long a consumer waits for entries", ge=1)
    receipt_shards: int = setting(1, "number of streams of each kind; a sender always uses the same one", ge=1, le=256)
    receipt_stream_limit: int = setting(100_000, "entries in one stream beyond which nothing is accepted (429)", ge=1)
    receipt_max_bytes: int = setting(1_048_576, "largest message that gets a receipt `accepted`, in bytes", ge=1)
    receipt_promise_seconds: float = setting(60, "time within which an accepted message is saved or rejected", gt=0)
    receipt_claim_seconds: int = setting(3600, "how long Redis remembers a message after it was saved", ge=1)
    receipt_retention_hours: int = setting(720, "hours to keep the receipts of saved and rejected messages", ge=1)
    receipt_token_seconds: int = setting(300, "how long a token is trusted while the ledger is unreachable", ge=0)
    receipt_origins: Words = setting((), "origins, such as https://app.example.com, whose pages may open /ws/chat")
    receipt_banned_words: Words = setting((), "words for which a message is rejected, separated by commas")
    receipt_keys: str = setting("", "folder of the keys that sign receipts; empty: `receipt-keys` in CELERIAC_HOME")

    # checkpoints and sinks
    checkpoint_defer_ack: bool = setting(False, "acknowledge stream entries when their checkpoint is complete")
    checkpoint_interval_ms: int = setting(1000, "time between two checkpoints", ge=1)
    checkpoint_drain_ms: int = setting(5000, "longest wait of a checkpoint for running work", ge=0)
    checkpoint_claim_idle_ms: int = setting(60_000, "idle time after which another consumer may claim an entry", ge=1)
    sinks: dict[Annotated[str, Field(pattern=SINK_NAME)], SinkSetting] = setting(
        {},
        'where effects of tasks go, as JSON: {"billing": {"url": "postgresql://…", "guarantee": "keyed"}}; '
        "see docs/exactly-once.md",
    )
    sink_dedup_enabled: bool = setting(
        True, "drop stream entries that repeat a message (x-original-message-id); an insurance beside the keys of sinks"
    )

    # backlog
    backlog_alert_threshold: int = setting(10_000, "number of waiting tasks in one queue that raises an alert", ge=1)
    backlog_policy: Literal["alert", "refuse", "scale"] = setting(
        "alert", "what happens above that number: only the alert, new tasks are refused, or workers get more processes"
    )
    backlog_max_processes: int = setting(8, "processes of each worker while BACKLOG_POLICY is scale", ge=1, le=128)
    backlog_notify: str = setting("", "destination that is told when a backlog alert begins and ends; empty: none")

    # documents
    document_max_bytes: int = setting(
        20 * 1024 * 1024, "largest document in bytes, and longest text in characters", ge=1, le=256 * 1024 * 1024
    )
    document_max_pages: int = setting(5000, "largest number of pages in a PDF", ge=1)
    document_max_seconds: int = setting(120, "CPU seconds allowed for reading one document", ge=1, le=280)

    # outside services
    llm_base_url: Annotated[str, url_of("http", "https")] = setting(
        "", "OpenAI-compatible API for `llm` stages, such as https://host/v1"
    )
    llm_api_key: SecretStr = setting(SecretStr(""), "key of that API")
    chroma_base_url: Annotated[str, url_of("http", "https")] = setting(
        "", "Chroma server that gets a copy of each chunk; empty: none"
    )

    # processes
    api_host: str = setting("127.0.0.1", "address on which the API listens")
    api_port: int = setting(8000, "port on which the API listens", ge=1, le=65535)
    api_run_ticks: bool = setting(
        False, "run the ticks (relay, reclaim, …) in the API process, too; beat may then be absent"
    )
    worker_run_ticks: bool = setting(True, "let a worker of the system queue run the ticks while beat does not")
    metrics_host: str = setting("127.0.0.1", "address on which programs serve their own metrics")
    worker_metrics_port: int = setting(
        0,
        "port of a worker's /metrics; the stack's system and receipts workers use the next two; 0: none",
        ge=0,
        le=65533,
    )
    api_metrics_port: int = setting(
        0, "port of the metrics of the API process itself; its /metrics shows the installation; 0: none", ge=0, le=65535
    )
    metrics_celery_names: bool = setting(False, "also show the installation's metrics under celery-exporter's names")
    log_format: Literal["text", "json"] = setting("text", "format of log lines")

    @model_validator(mode="before")
    @classmethod
    def _read_idle_time_as_lease(cls, values: dict[str, Any]) -> dict[str, Any]:
        idle = str(values.get("INGEST_REDIS_RECLAIM_IDLE_MS", ""))
        if idle.isdecimal():
            values.setdefault("INGEST_LEASE_SECONDS", max(1, -(-int(idle) // 1000)))
        return values

    @model_validator(mode="after")
    def _require_idle_time_longer_than_a_checkpoint(self) -> Settings:
        least = self.checkpoint_interval_ms + self.checkpoint_drain_ms
        if self.checkpoint_claim_idle_ms <= least:
            raise ValueError(
                f"CHECKPOINT_CLAIM_IDLE_MS must be more than CHECKPOINT_INTERVAL_MS + CHECKPOINT_DRAIN_MS ({least})"
            )
        return self

    @model_validator(mode="after")
    def _require_kafka_address(self) -> Settings:
        if self.ingest_queue == "kafka" and not self.kafka_bootstrap_servers:
            raise ValueError("KAFKA_BOOTSTRAP_SERVERS must name a Kafka (host:port) when INGEST_QUEUE=kafka")
        return self

    @model_validator(mode="after")
    def _require_known_destination(self) -> Settings:
        if self.backlog_notify and self.backlog_notify not in self.outbox_destinations:
            raise ValueError("BACKLOG_NOTIFY must name a destination of OUTBOX_DESTINATIONS")
        return self

    def broker_queue(self, name: str) -> str:
        """Return the name of a queue in the broker, where several installations may share one virtual host."""
        return name if self.ledger_schema == DEFAULT_SCHEMA else f"{self.ledger_schema}.{name}"

    @property
    def home(self) -> Path:
        return ROOT / self.celeriac_home.expanduser()  # an absolute path replaces ROOT

    @property
    def receipt_key_folder(self) -> Path:
        return ROOT / Path(self.receipt_keys).expanduser() if self.receipt_keys else self.home / "receipt-keys"

    @property
    def database_url(self) -> str:
        """Return the address for SQLAlchemy with psycopg2 as its driver; plain `postgresql://` may mean psycopg 3."""
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
        """Return the address in the environment; empty if it is one that `manage.py env` printed for this home."""
        url: str = getattr(self, f"given_{variable.lower()}").strip()
        return "" if url and is_printed(variable, url, self.secrets) else url

    def server_url(self, variable: str) -> str:
        """Return an address, looked up again every second: a stack that was restarted may have other ports."""
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
        """Return the addresses of the stack in this home; empty if it does not run."""
        return read_stack(self.home)

    @property
    def secrets(self) -> dict[str, str]:
        """Return the generated secrets of this home; empty if it was never started."""
        return read_json(self.home / "secrets.json")


@lru_cache(maxsize=1)
def current() -> Settings:
    """Return the settings of this process, or raise SettingsError."""
    try:
        return Settings()
    except ValidationError as error:
        raise SettingsError(" ".join(map(_sentence, error.errors()))) from None
    except NotParsed as error:  # its text names the field and not the value
        fields = [field for field in Settings.model_fields if f'"{field}"' in str(error)]
        raise SettingsError(f"{', '.join(fields).upper()}: it is not valid JSON.") from None


def variables(field: str) -> tuple[str, ...]:
    """Return the variables that set a field: the canonical name, then its aliases."""
    alias = Settings.model_fields[field].validation_alias
    names = alias.choices if isinstance(alias, AliasChoices) else [field]
    return tuple(str(name).upper() for name in names)


def place(url: str) -> str:
    """Return host and port of an address, for messages: no login, no password."""
    address = urlsplit(url)
    return f"{address.hostname or 'localhost'}:{address.port}" if address.port else address.hostname or "localhost"


def _sentence(error: Any) -> str:
    if not error["loc"]:
        return f"{error['msg'].removeprefix('Value error, ')}."
    name = str(error["loc"][0]).upper()
    names = next((names for names in map(variables, Settings.model_fields) if name in names), (name,))
    name = next((known for known in names if known in os.environ), name)
    message = error["msg"].removeprefix("Value error, ")
    parts = "".join(f"{part}: " for part in error["loc"][1:] if part != "[key]")  # of a setting in JSON
    return f"{name}: {parts}{message[0].lower()}{message[1:]}."


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
