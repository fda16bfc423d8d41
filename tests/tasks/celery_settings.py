"""Read `celeryconfig.py` again for a given broker, and make a Celery application with it."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from celery import Celery

import settings
from tests.app import close_broker_connections


def celery_settings(broker_url: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BROKER_URL", broker_url)
        settings.current.cache_clear()
        config = runpy.run_path(str(settings.ROOT / "celeryconfig.py"))
    settings.current.cache_clear()
    return {name: value for name, value in config.items() if name.islower() and _is_setting(name, value)}


@contextmanager
def application(broker_url: str) -> Iterator[Celery]:
    with Celery("test", set_as_current=False) as app:
        app.config_from_object(celery_settings(broker_url))
        yield app
    close_broker_connections()


def _is_setting(name: str, value: object) -> bool:
    return not name.startswith("_") and not callable(value) and not isinstance(value, ModuleType)
