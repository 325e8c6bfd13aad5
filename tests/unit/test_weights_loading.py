"""Every generator loads new weights; a silent one is not waited for."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from areal_flow.cluster.generators import MAX_READING_HOSTS, REPLY_TIMEOUT_S, DaskWeights
from areal_flow.cluster.registry import SILENT_S
from areal_flow.cluster.worker import ENGINE_METRIC
from areal_flow.config.cluster import SLOW_STORAGE_BYTES_PER_S
from areal_flow.core.errors import WeightsError
from areal_flow.core.types import ServedWeights
from areal_flow.planning.virtual_time import run_in_virtual_time
from tests.fakes import MemoryWriter


class Published(MemoryWriter):
    """Published weights of some size."""

    def __init__(self, num_bytes: int = 0) -> None:
        super().__init__()
        self._num_bytes = num_bytes

    def num_bytes(self, version: int) -> int:
        return self._num_bytes


class FakeGenerator:
    """The record of a generator, which is silent some time after it was stopped."""

    def __init__(self, address: str, stopped_at: float | None) -> None:
        self.address = address
        self._stopped_at = stopped_at

    @property
    def is_silent(self) -> bool:
        stopped_at = self._stopped_at
        now = asyncio.get_running_loop().time()
        return stopped_at is not None and now - stopped_at > SILENT_S


class FakeGenerators:
    """A pool of two generators, which take some time to load and report what they serve.

    One of them falls silent when it is stopped.
    """

    def __init__(
        self,
        stopped_at: float | None = None,
        decodes_until: float | None = None,
        served: dict[str, Any] | None = None,
    ) -> None:
        self.stopped_at = stopped_at
        self.load_s: dict[str, float] = {}
        self._decodes_until = decodes_until
        self._draining = ["other"]
        self._served = served or {}
        self.replaced: list[str] = []
        self.why = ""

    @property
    def registry(self) -> FakeGenerators:
        return self

    @property
    def scheduler(self) -> SimpleNamespace:
        """The heartbeats: some generators drain and decode for a while."""
        if self._decodes_until is None:
            return SimpleNamespace(workers={})
        busy_s = min(asyncio.get_running_loop().time(), self._decodes_until)
        engine = {"busy_seconds_total": busy_s, "draining": 1.0}
        heartbeat = SimpleNamespace(metrics={ENGINE_METRIC: engine})
        return SimpleNamespace(workers=dict.fromkeys(self._draining, heartbeat))

    def running(self, role: str) -> list[FakeGenerator]:
        return [FakeGenerator("healthy", None), FakeGenerator("other", self.stopped_at)]

    def host(self, record: FakeGenerator) -> str:
        return record.address

    async def run(self, address: str, function: Any, version: int) -> Any:
        await asyncio.sleep(self.load_s.get(address, 0))
        return self._served.get(address)

    async def replace(self, address: str, *, why: str) -> None:
        self.replaced.append(address)
        self.why = why


def seconds_to_announce(live: FakeGenerators, *, num_bytes: int = 0, **load_s: float) -> float:
    async def announce() -> float:
        live.load_s = load_s
        weights = DaskWeights(Published(num_bytes), live)
        await weights.load_everywhere(1, "recorded")
        return asyncio.get_running_loop().time()

    seconds: float = run_in_virtual_time(announce())
    return seconds


def test_weights_are_announced_when_every_generator_has_loaded() -> None:
    live = FakeGenerators()
    assert seconds_to_announce(live, healthy=0.2, other=2.0) == pytest.approx(2.0)
    assert live.replaced == []


def test_stopped_generator_is_waited_for_three_seconds_and_left_to_the_watch() -> None:
    live = FakeGenerators(stopped_at=0.0)
    assert seconds_to_announce(live, healthy=0.2, other=1e9) == pytest.approx(3.5, abs=0.5)
    assert live.replaced == []


def test_generator_that_is_alive_but_does_not_load_is_replaced() -> None:
    live = FakeGenerators()
    waited = seconds_to_announce(live, healthy=0.2, other=1e9)
    assert waited == pytest.approx(REPLY_TIMEOUT_S, abs=0.5)
    assert live.replaced == ["other"]


def test_time_to_load_follows_from_the_size() -> None:
    live, num_bytes = FakeGenerators(), 64 * 10**9
    expected_s = REPLY_TIMEOUT_S + num_bytes / SLOW_STORAGE_BYTES_PER_S
    assert seconds_to_announce(live, num_bytes=num_bytes, other=expected_s - 1) == expected_s - 1
    assert live.replaced == []
    waited = seconds_to_announce(live, num_bytes=num_bytes, other=1e9)
    assert waited == pytest.approx(expected_s, abs=0.5)
    assert live.replaced == ["other"]


def test_generator_that_drains_is_waited_for_while_it_decodes() -> None:
    live = FakeGenerators(decodes_until=900.0)
    assert seconds_to_announce(live, other=900.0) == 900.0
    assert live.replaced == []
    live = FakeGenerators(decodes_until=900.0)
    waited = seconds_to_announce(live, other=1e9)
    assert waited == pytest.approx(900 + REPLY_TIMEOUT_S, abs=1)
    assert live.replaced == ["other"]


@pytest.mark.parametrize(
    ("reported", "why"),
    [
        (ServedWeights(1, "recorded", 0.2, 0.1), ""),
        (ServedWeights(2, "of the next step", 0.2, 0.1), ""),
        (
            ServedWeights(1, "another", 0.2, 0.1),
            "expected weights recorded of version 1, as the ledger has them, found it serving "
            "another",
        ),
        (ServedWeights(0, "older", 0.2, 0.1), "it serves version 0, expected 1"),
        (WeightsError("no room"), "version 1 was not loaded (no room)"),
        (OSError("its process is gone"), ""),
        (None, ""),
    ],
    ids=str,
)
def test_generator_that_serves_other_weights_than_the_ledger_has_is_replaced(
    reported: Any, why: str
) -> None:
    served = {"healthy": ServedWeights(1, "recorded", 0, 0), "other": reported}
    live = FakeGenerators(served=served)
    weights = DaskWeights(Published(), live)
    loaded = asyncio.run(weights.load_everywhere(1, "recorded"))
    assert live.why == why
    assert live.replaced == ["other"] * bool(why)
    assert len(loaded) == 1 + (isinstance(reported, ServedWeights) and not why)


def test_weights_that_a_restored_trainer_published_again_are_accepted() -> None:
    forked = ServedWeights(1, "made by the replay", 0, 0)
    served = {"healthy": ServedWeights(1, "recorded", 0, 0), "other": forked}
    live = FakeGenerators(served=served)
    weights = DaskWeights(Published(), live)
    weights.note_restored(1, "made by the replay")
    loaded = asyncio.run(weights.load_everywhere(1, "recorded"))
    assert (live.replaced, len(loaded)) == ([], 2)


class ManyHosts(FakeGenerators):
    """Three generators on each of many hosts; notes which hosts read at the same time."""

    def __init__(self, num_hosts: int, **decoding: float) -> None:
        super().__init__(**decoding)
        self._draining = [f"{host}:{port}" for port in range(3) for host in range(num_hosts)]
        self._reading: Counter[str] = Counter()
        self.most_reading = 0

    def running(self, role: str) -> list[FakeGenerator]:
        return [FakeGenerator(address, None) for address in self._draining]

    def host(self, record: FakeGenerator) -> str:
        return record.address.partition(":")[0]

    async def run(self, address: str, function: Any, version: int) -> Any:
        host = address.partition(":")[0]
        self._reading[host] += 1
        self.most_reading = max(self.most_reading, len(+self._reading))
        await asyncio.sleep(2)
        self._reading[host] -= 1
        return ServedWeights(version, "recorded", 0, 0)


def test_few_hosts_read_new_weights_at_a_time_and_the_generators_of_each_together() -> None:
    live = ManyHosts(3 * MAX_READING_HOSTS)
    assert seconds_to_announce(live) == 3 * 2
    assert live.most_reading == MAX_READING_HOSTS


def test_hosts_whose_generators_drain_let_others_read() -> None:
    live = ManyHosts(3 * MAX_READING_HOSTS, decodes_until=900.0)
    assert seconds_to_announce(live) < 3 * 2
    assert live.most_reading > MAX_READING_HOSTS


def test_weights_are_published_beside_the_event_loop() -> None:
    threads: list[int] = []

    class SlowWriter(Published):
        def publish(self, version: int) -> None:
            threads.append(threading.get_ident())

    asyncio.run(DaskWeights(SlowWriter(), FakeGenerators()).publish(1))
    (thread,) = threads
    assert thread != threading.get_ident()
