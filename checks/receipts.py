"""Checks receipts: are accepted messages saved in time, and can only this user read the keys that sign?"""

from __future__ import annotations

from collections.abc import Iterator

from checks.result import Finding, fail, ok, warn
from settings import Settings


def check(settings: Settings) -> Iterator[Finding]:
    from models.engine import engine  # noqa: PLC0415 - as in checks/kafka.py
    from receipts.shard_states import read_shards  # noqa: PLC0415
    from receipts.switches import read_switches  # noqa: PLC0415

    with engine().connect() as connection:
        switches = read_switches(connection)
    if not switches.was_two_phase:
        return
    waiting = [shard for shard in read_shards() if shard.length]
    late = [shard for shard in waiting if shard.lag_seconds > settings.receipt_promise_seconds]
    for shard in late:
        message = f"{shard.length} entries wait in {shard.stream}, the oldest for {shard.lag_seconds:.0f} s"
        yield fail("receipts.lag", message, "see `manage.py receipts`: does a worker consume the queue `receipts`?")
    if not late:
        yield ok("receipts.lag", f"{sum(shard.length for shard in waiting)} messages wait to be saved")
    yield from _check_keys(settings)


def _check_keys(settings: Settings) -> Iterator[Finding]:
    folder = settings.receipt_key_folder
    for path in (folder, *folder.glob("*.pem")) if folder.is_dir() else ():
        if path.stat().st_mode & 0o077:
            yield warn("receipts.keys", f"{path} can be read by other users", f"run `chmod go= {path}`")
