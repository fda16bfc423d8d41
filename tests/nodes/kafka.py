"""A Kafka cluster for tests: the mock brokers of librdkafka, in a process that tests can stop and kill.

The brokers speak the real protocol over TCP on loopback, and any client can use them. They have no administration API
(topics are created here, or by first use), no SASL, TLS or disks, and do not check the sequence numbers of producers
without transactions, so that a record sent twice is stored twice. A cluster ends with the process that started it.

    cluster = KafkaCluster()
    cluster.make_topic("orders", partitions=3)
    cluster.fail_requests(PRODUCE, [KafkaError.NOT_ENOUGH_REPLICAS] * 2)
    cluster.records("orders")
    cluster.end()
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, Message, TopicPartition, cimpl

ROOT: Final = Path(__file__).parents[2]
PRODUCE: Final = 0  # the protocol's number of the request
INIT_PRODUCER_ID: Final = 22
PR_SET_PDEATHSIG: Final = 1
# functions that tests may call, without their prefix and without their first argument, the cluster
CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "broker_push_request_error_rtts": (ctypes.c_int32, ctypes.c_int16, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    "broker_set_down": (ctypes.c_int32,),
    "broker_set_up": (ctypes.c_int32,),
    "clear_request_errors": (ctypes.c_int16,),
    "group_initial_rebalance_delay_ms": (ctypes.c_int32,),
    "partition_set_leader": (ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32),
    "push_request_errors_array": (ctypes.c_int16, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)),
    "topic_create": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "topic_set_error": (ctypes.c_char_p, ctypes.c_int),
}
WITHOUT_ANSWER: Final = {
    "clear_request_errors",
    "group_initial_rebalance_delay_ms",
    "push_request_errors_array",
    "topic_set_error",
}


class KafkaCluster:
    """A running cluster with the brokers 1 … `brokers`."""

    def __init__(self, brokers: int = 3) -> None:
        self._brokers = brokers
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.nodes.kafka", str(brokers)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.bootstrap_servers = self._line()

    def make_topic(self, name: str, *, partitions: int) -> None:
        """Create a topic; librdkafka chooses the leader of each partition."""
        self._call("topic_create", name, partitions, self._brokers)

    def set_leaders(self, topic: str, brokers: Sequence[int]) -> None:
        for partition, broker in enumerate(brokers):
            self._call("partition_set_leader", topic, partition, broker)

    def fail_topic(self, name: str, code: int) -> None:
        """Answer requests for the topic with this error. Code 0 ends it."""
        self._call("topic_set_error", name, code)

    def fail_requests(self, api: int, codes: Sequence[int]) -> None:
        """Answer the next requests of this kind with these errors, one each. `_TRANSPORT` cuts the connection."""
        self._call("clear_request_errors", api)
        self._call("push_request_errors_array", api, len(codes), list(codes))

    def delay_request(self, broker: int, api: int, code: int, *, milliseconds: int) -> None:
        """Delay the answer to the next request of this kind to this broker; `code` 0 means no error.

        Afterwards `fail_requests` has no effect on this broker.
        """
        self._call("broker_push_request_error_rtts", broker, api, 1, code, milliseconds)

    @contextmanager
    def without_broker(self, number: int) -> Iterator[None]:
        """Stop one broker. It stays the leader of its partitions."""
        self._call("broker_set_down", number)
        try:
            yield
        finally:
            self._call("broker_set_up", number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the cluster: it accepts connections and does not answer."""
        self.popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED)  # the first thread stops at once, the brokers' a little later
        try:
            yield
        finally:
            self.popen.send_signal(signal.SIGCONT)

    def records(self, topic: str) -> list[Message]:
        """Return all records that are there now, by partition and offset."""
        settings = {"bootstrap.servers": self.bootstrap_servers, "group.id": "unused", "fetch.wait.max.ms": 10}
        with Consumer(settings) as consumer:
            numbers = consumer.list_topics(topic, timeout=5).topics[topic].partitions
            partitions = [TopicPartition(topic, number, 0) for number in sorted(numbers)]
            expected = sum(consumer.get_watermark_offsets(one, timeout=5)[1] for one in partitions)
            consumer.assign(partitions)
            found: list[Message] = []
            while len(found) < expected:
                messages = consumer.consume(expected - len(found), timeout=5)
                assert messages, f"{topic} has {expected} records, but only {len(found)} could be read"
                found.extend(messages)
        assert not [message.error() for message in found if message.error()]
        return sorted(found, key=lambda message: (message.partition(), message.offset()))

    def has_unread_requests(self) -> bool:
        """Return whether a suspended cluster was sent a request: the kernel holds bytes that no broker has read."""
        ports = {f"{int(address.rpartition(':')[2]):04X}" for address in self.bootstrap_servers.split(",")}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        established = [row for row in rows if row[1].partition(":")[2] in ports and row[3] == "01"]
        return any(int(row[4].partition(":")[2], 16) for row in established)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        assert self.popen.stdin
        assert self.popen.stdout
        self.popen.stdin.close()
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:  # it is suspended
            self.popen.kill()
            self.popen.wait(5)
        self.popen.stdout.close()

    def _call(self, function: str, *arguments: Any) -> None:
        assert self.popen.stdin
        self.popen.stdin.write(json.dumps([function, *arguments]) + "\n")
        self.popen.stdin.flush()
        answer = self._line()
        assert answer == "0", f"{function}{arguments} answered {answer}"

    def _line(self) -> str:
        assert self.popen.stdout
        line = self.popen.stdout.readline().strip()
        assert line, f"the Kafka cluster ended with code {self.popen.wait(5)}"
        return line


def serve(brokers: int) -> None:
    """Run the cluster: print its addresses, then the result of each call, until the input ends."""
    if sys.platform == "linux":  # a suspended process does not see the end of its input
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    library = ctypes.CDLL(cimpl.__file__)  # librdkafka has functions that the Python binding does not export
    for name in ("conf_new", "new", "mock_cluster_new"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    settings = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(settings, b"log_level", b"3", None, ctypes.c_size_t(0))
    client = ctypes.c_void_p(library.rd_kafka_new(0, settings, None, ctypes.c_size_t(0)))
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(client, brokers))
    for name, types in CALLS.items():
        function = getattr(library, f"rd_kafka_mock_{name}")
        function.argtypes = (ctypes.c_void_p, *types)
        function.restype = None if name in WITHOUT_ANSWER else ctypes.c_int
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 0)
    _say(library.rd_kafka_mock_cluster_bootstraps(cluster).decode())
    for line in sys.stdin:
        name, *given = json.loads(line)
        time.sleep(0.005)  # librdkafka notices a call that follows another at once only a second later
        _say(getattr(library, f"rd_kafka_mock_{name}")(cluster, *map(_as_c, given)) or 0)


def _as_c(value: Any) -> Any:
    match value:
        case str():
            return value.encode()
        case [*codes]:
            return (ctypes.c_int * len(codes))(*codes)
    return value


def _say(answer: object) -> None:
    print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    serve(int(sys.argv[1]))
