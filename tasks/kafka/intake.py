"""Read task ids from KAFKA_TOPIC, and commit offsets after the ledger has claimed the tasks.

    poll ─► ids ─► claim, durably committed ─► `owned`: commit the offset ─► run the batch

Authority. Until its offset is committed, Kafka remembers a record. From then on only the ledger knows its tasks, and
reclaim takes care of a worker that dies. Offsets are never committed automatically. The commit is asynchronous, so that
a handler need not wait for Kafka; if it is lost, the record is delivered again and the claim refuses its tasks.

A record without task ids is logged, counted and skipped.

Long handlers. Kafka removes a consumer from its group if it does not poll for `max.poll.interval.ms`, and a consumer
that polls late delays every rebalance. So when the tasks of one poll run for longer than a few seconds, a second thread
polls instead. It pauses the partitions first; librdkafka then discards the records that it has fetched ahead, and
needs up to a second to fetch them again. Partitions that move away meanwhile are forgotten: their records go to other
workers, where the claim refuses the tasks that are claimed here.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from failpoint import failpoint
from settings import Settings
from tally.counts import count
from tally.subjects import Subject
from tasks.execution.deliver import known_ids
from tasks.kafka.client import make_consumer
from tasks.kafka.offsets import Offsets

logger = logging.getLogger(__name__)

MOST_IDS: Final = 500  # of one poll; a record is never split and may have more
MOST_RECORDS: Final = 1000
KEEP_SECONDS: Final = 5.0  # far below max.poll.interval.ms; pausing costs up to a second
REPEAT_LOG_SECONDS: Final = 60.0


class Intake:
    """One consumer of the group. Call `take` and `owned` from one thread only."""

    def __init__(self, settings: Settings) -> None:
        self.topic = settings.kafka_topic
        self._offsets = Offsets()
        self._lock = threading.RLock()  # held while polling; librdkafka calls our callbacks inside a poll
        self._closed = threading.Event()
        self._is_paused = False
        self._took_at = time.monotonic()
        self._early: deque[Message] = deque()  # records that the second thread received
        self._logged_at: dict[str, float] = {}
        self._consumer: Consumer = make_consumer(settings, on_commit=self._committed)
        self._consumer.subscribe([self.topic], on_revoke=self._revoked, on_lost=self._revoked)
        self._keeper = threading.Thread(target=self._keep, name="kafka-keeper", daemon=True)
        self._keeper.start()

    def take(self, seconds: float, *, most: int = MOST_IDS) -> list[uuid.UUID]:
        """Wait for a record and return the ids of all records that are there, up to a limit. Empty if none came."""
        ids: dict[uuid.UUID, None] = {}
        with self._lock:
            self._resume()
            message = self._next(seconds)
            for _ in range(MOST_RECORDS):
                if message is None:
                    break
                ids.update(dict.fromkeys(self._read(message)))
                if len(ids) >= most:
                    break
                message = self._next(0)
            self._commit(self._offsets.waiting())  # records without ids
            self._took_at = time.monotonic()
        return list(ids)

    def owned(self, left: Sequence[uuid.UUID]) -> None:
        """Commit the offsets of all records whose tasks are claimed or refused; the tasks in `left` are not."""
        failpoint("kafka.before_commit")
        with self._lock:
            self._commit(left)

    def waiting(self) -> list[uuid.UUID]:
        """Return the tasks that were taken and are neither claimed nor refused."""
        with self._lock:
            return self._offsets.waiting()

    def assigned(self) -> list[int]:
        """Return the partitions that are assigned to this consumer now."""
        return [each.partition for each in self._consumer.assignment()]

    def close(self) -> None:
        """Wait for pending commits and leave the group, so that other workers get the partitions at once."""
        self._closed.set()
        self._keeper.join()
        with self._lock:
            self._consumer.close()

    def _next(self, seconds: float) -> Message | None:
        """Return the next record, or an error event, or None."""
        return self._early.popleft() if self._early else self._consumer.poll(seconds)

    def _read(self, message: Message) -> list[uuid.UUID]:
        if error := message.error():
            if error.fatal():
                raise KafkaException(error)
            self._log_error(error)
            return []
        partition, offset = message.partition(), message.offset()
        if partition is None or offset is None:
            return []
        ids = ids_of(message.value())
        if not ids:
            logger.warning(
                "%s/%d/%d has no task ids and is skipped",
                self.topic,
                partition,
                offset,
                extra={"event": "kafka_record_skipped"},
            )
        self._offsets.delivered(partition, offset, ids)
        return ids

    def _commit(self, left: Sequence[uuid.UUID]) -> None:
        done = self._offsets.owned(left)
        if not done:
            return
        offsets = [TopicPartition(self.topic, partition, offset) for partition, offset in done.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._committed(error.args[0], offsets)

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Log a failed commit. A poll calls this; the partition may have moved to another worker meanwhile."""
        for failure in {error, *(partition.error for partition in partitions)} - {None}:
            logger.info(
                "offsets were not committed, so records may be delivered again: %s",
                failure,
                extra={"event": "kafka_offsets_not_committed"},
            )
        if not error:
            failpoint("kafka.after_commit")

    def _revoked(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = {partition.partition for partition in partitions}
        logger.info("partitions %s were revoked", sorted(numbers), extra={"event": "kafka_partitions_revoked"})
        self._offsets.forget(numbers)
        self._early = deque(message for message in self._early if message.partition() not in numbers)

    def _keep(self) -> None:
        """Poll while the worker's thread is busy, to stay in the group and to take part in rebalances."""
        while not self._closed.wait(KEEP_SECONDS / 2):
            if time.monotonic() - self._took_at < KEEP_SECONDS or not self._lock.acquire(blocking=False):
                continue  # the worker's thread polls
            try:
                self._pause()
                if message := self._consumer.poll(0):
                    self._early.append(message)
            except (KafkaException, RuntimeError) as error:
                self._log_error(error)
            finally:
                self._lock.release()

    def _pause(self) -> None:
        self._consumer.pause(self._consumer.assignment())  # includes partitions that were assigned since
        self._is_paused = True

    def _resume(self) -> None:
        if self._is_paused:
            self._consumer.resume(self._consumer.assignment())
            self._is_paused = False

    def _log_error(self, error: Any) -> None:
        """Log an error at most once a minute; while Kafka is unreachable, it repeats several times a second."""
        sentence = error.str() if isinstance(error, KafkaError) else str(error)
        now = time.monotonic()
        if now - self._logged_at.get(sentence, -REPEAT_LOG_SECONDS) >= REPEAT_LOG_SECONDS:
            self._logged_at[sentence] = now
            logger.warning("Kafka: %s", sentence, extra={"event": "kafka_error"})


def ids_of(value: str | bytes | None) -> list[uuid.UUID]:
    """Return the task ids of a record. A record that is not a wake-up is counted as skipped and has none."""
    try:
        match json.loads(value or b""):
            case {"ids": [_, *_] as ids}:
                return [uuid.UUID(one) for one in known_ids(ids)]
    except (ValueError, RecursionError):
        pass
    count(Subject.TASK, "skipped")
    return []
