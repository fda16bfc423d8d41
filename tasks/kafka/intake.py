"""The intake: records of KAFKA_TOPIC become ids of tasks, and offsets are committed when the ledger owns them.

    poll ─► ids ─► guard, synchronously committed ─► `owned`: the offset is committed ─► the batch runs

Authority. Kafka knows a task until its offset is committed; from then on the ledger alone does, and a worker that dies
is reclaim's affair. Nothing is committed by itself. A commit is asked for and not waited for: a handler need not wait
for Kafka, and one that is lost only means that the record comes again, to a guard that refuses it.

A record that holds no ids is logged, counted and passed over.

Long handlers. Whoever does not poll for `max.poll.interval.ms` is thrown out of its group, and whoever polls late keeps
all others waiting when one comes or goes. So when the tasks of a poll run for longer than some seconds, a thread polls
in the place of the worker's. The partitions are paused for that: what was fetched ahead is fetched again, and
librdkafka needs up to a second to begin. Those that are taken away meanwhile are forgotten: their records go to
others, and the guard refuses there what is claimed here.
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
from tasks.core.result_metrics import count
from tasks.execution.deliver import known_ids
from tasks.kafka.client import make_consumer
from tasks.kafka.offsets import Offsets

logger = logging.getLogger(__name__)

MOST_IDS: Final = 500  # of one poll; a record is never divided, and may name more
MOST_RECORDS: Final = 1000
KEEP_SECONDS: Final = 5.0  # far below max.poll.interval.ms, and long enough for the second that it costs
COMPLAIN_SECONDS: Final = 60.0


class Intake:
    """One consumer of the group. `take` and `owned` are called by one thread."""

    def __init__(self, settings: Settings) -> None:
        self.topic = settings.kafka_topic
        self._offsets = Offsets()
        self._lock = threading.RLock()  # of the consumer's polls: callbacks run inside them
        self._closed = threading.Event()
        self._is_paused = False
        self._took_at = time.monotonic()
        self._early: deque[Message] = deque()  # came to the thread that keeps us in the group
        self._complained_at: dict[str, float] = {}
        self._consumer: Consumer = make_consumer(settings, on_commit=self._committed)
        self._consumer.subscribe([self.topic], on_revoke=self._taken_away, on_lost=self._taken_away)
        self._keeper = threading.Thread(target=self._keep, name="kafka-keeper", daemon=True)
        self._keeper.start()

    def take(self, seconds: float, *, most: int = MOST_IDS) -> list[uuid.UUID]:
        """Ids, as many records as there are up to a limit; waits for the first one. Empty: none came."""
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
            self._commit(self._offsets.waiting())  # what names nobody
            self._took_at = time.monotonic()
        return list(ids)

    def owned(self, left: Sequence[uuid.UUID]) -> None:
        """Everything that was taken, but for what is left, is the ledger's now."""
        failpoint("kafka.before_commit")
        with self._lock:
            self._commit(left)

    def waiting(self) -> list[uuid.UUID]:
        """What was taken and is not the ledger's yet."""
        with self._lock:
            return self._offsets.waiting()

    def assigned(self) -> list[int]:
        """The partitions that are ours at this moment."""
        return [each.partition for each in self._consumer.assignment()]

    def close(self) -> None:
        """Waits for the commits that are under way, and leaves the group, so that others go on at once."""
        self._closed.set()
        self._keeper.join()
        with self._lock:
            self._consumer.close()

    def _next(self, seconds: float) -> Message | None:
        """A record, or an error that is said and passed over."""
        return self._early.popleft() if self._early else self._consumer.poll(seconds)

    def _read(self, message: Message) -> list[uuid.UUID]:
        if error := message.error():
            if error.fatal():
                raise KafkaException(error)
            self._complain(error)
            return []
        partition, offset = message.partition(), message.offset()
        if partition is None or offset is None:
            return []
        ids = ids_of(message.value())
        if not ids:
            logger.warning("%s/%d/%d names no task and is passed over", self.topic, partition, offset)
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
        """Called by a poll. A partition may have been taken away meanwhile: its records come to others."""
        for failure in {error, *(partition.error for partition in partitions)} - {None}:
            logger.info("offsets were not committed, their records may come again: %s", failure)
        if not error:
            failpoint("kafka.after_commit")

    def _taken_away(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = {partition.partition for partition in partitions}
        logger.info("given up: partitions %s", sorted(numbers))
        self._offsets.forget(numbers)
        self._early = deque(message for message in self._early if message.partition() not in numbers)

    def _keep(self) -> None:
        """While the other thread works: stay in the group, and let others come and go."""
        while not self._closed.wait(KEEP_SECONDS / 2):
            if time.monotonic() - self._took_at < KEEP_SECONDS or not self._lock.acquire(blocking=False):
                continue  # it polls itself
            try:
                self._pause()
                if message := self._consumer.poll(0):
                    self._early.append(message)
            except (KafkaException, RuntimeError) as error:
                self._complain(error)
            finally:
                self._lock.release()

    def _pause(self) -> None:
        self._consumer.pause(self._consumer.assignment())  # also what was assigned since
        self._is_paused = True

    def _resume(self) -> None:
        if self._is_paused:
            self._consumer.resume(self._consumer.assignment())
            self._is_paused = False

    def _complain(self, error: Any) -> None:
        """Once a minute: a Kafka that is away is said several times a second."""
        sentence = error.str() if isinstance(error, KafkaError) else str(error)
        now = time.monotonic()
        if now - self._complained_at.get(sentence, -COMPLAIN_SECONDS) >= COMPLAIN_SECONDS:
            self._complained_at[sentence] = now
            logger.warning("Kafka: %s", sentence)


def ids_of(value: str | bytes | None) -> list[uuid.UUID]:
    """What a record names; nobody, if it is none of ours, which is counted."""
    try:
        match json.loads(value or b""):
            case {"ids": [_, *_] as ids}:
                return [uuid.UUID(one) for one in known_ids(ids)]
    except (ValueError, RecursionError):
        pass
    count("skipped", 1)
    return []
