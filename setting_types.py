"""The types of settings: how the text of a variable is read and checked. settings.py has the settings themselves.

A message never shows the given value: addresses may contain passwords.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

SINK_NAME: Final = r"^[a-z][a-z0-9_-]{0,39}$"  # it is part of transaction names, which have at most 199 bytes
GUARANTEES_OF_SINKS: Final = {  # by the scheme of the address
    "ledger": ("atomic",),
    "outbox": ("at_least_once",),
    "postgresql": ("keyed", "two_phase"),
    "file": ("two_phase",),
    "redis": ("keyed", "script"),
    "rediss": ("keyed", "script"),
    "http": ("keyed",),
    "https": ("keyed",),
}
DESTINATION_SCHEMES: Final = ("https", "http", "redis-stream", "rediss-stream", "amqp", "amqps", "kafka")


def split_words(value: object) -> object:
    """Split `a, b` into ("a", "b")."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Home = Annotated[Path, BeforeValidator(lambda given: given or ".celeriac")]  # an empty variable means the default
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_words)]


def url_of(*schemes: str) -> AfterValidator:
    """Accept only addresses with one of these schemes."""

    def check(value: str) -> str:
        if value and value.partition("://")[0] not in schemes:
            raise ValueError(f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        try:
            _ = urlsplit(value).port
        except ValueError:
            raise ValueError("is not an address: its port is not a number") from None
        return value

    return AfterValidator(check)


def check_schema(value: str) -> str:
    """Accept only identifiers that need no quoting in statements, key prefixes and queue names."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", value):
        raise ValueError("must be a lower-case identifier of at most 40 letters, digits and _")
    if value.startswith("pg_") or value in ("public", "information_schema"):
        raise ValueError("must be a schema that only Celeriac uses")
    return value


def check_hosts(value: str) -> str:
    """Accept only host:port, without a login, because the Kafka client repeats the address in its errors."""
    hosts = [host.strip() for host in value.split(",")] if value.strip() else []
    if not all(re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:@/\[\]]+)(:\d{1,5})?", host) for host in hosts):
        raise ValueError("must be host:port, separated by commas; put logins into KAFKA_OPTIONS")
    return ",".join(hosts)


def check_destinations(value: dict[str, str]) -> dict[str, str]:
    """Refuse addresses of unknown kinds. The message does not show the address, which may contain a password."""
    for name, address in value.items():
        scheme, found, _ = address.partition("://")
        if found and scheme.lower() not in DESTINATION_SCHEMES:
            known = ", ".join(f"{known}://" for known in DESTINATION_SCHEMES)
            raise ValueError(f"the address of {name!r} must begin with one of {known}")
    return value


class SinkSetting(BaseModel):
    """One entry of SINKS."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str
    guarantee: Literal["atomic", "keyed", "two_phase", "script", "at_least_once"]
    key_life_hours: float = Field(720, gt=0)

    @model_validator(mode="after")
    def _require_a_guarantee_that_the_sink_can_give(self) -> SinkSetting:
        possible = GUARANTEES_OF_SINKS.get(self.scheme)
        if possible is None:
            raise ValueError(f"its url must begin with one of {', '.join(f'{each}:' for each in GUARANTEES_OF_SINKS)}")
        if self.guarantee not in possible:
            raise ValueError(f"a sink with a {self.scheme}: address has the guarantee {' or '.join(possible)}")
        return self

    @property
    def scheme(self) -> str:
        """The kind of the address; PostgreSQL's has several spellings."""
        scheme = self.url.partition(":")[0].lower()
        return "postgresql" if scheme in ("postgres", "postgresql+psycopg2") else scheme
