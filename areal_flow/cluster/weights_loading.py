"""Publishes weights and has generators load them; one that does not is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from typing import Any

from distributed import Client

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.types import ServedWeights
from areal_flow.weights.channel import WeightsWriter

ACKNOWLEDGE_TIMEOUT_S = 30.0
"""How long a generator may take to load weights before it is replaced and its tasks run again."""

LISTEN_EVERY_S = 0.5


class DaskWeights:
    """Publishes in the channel, then asks every generator to load."""

    def __init__(self, client: Client, channel: WeightsWriter, pool: WorkerPool) -> None:
        self._client = client
        self._channel = channel
        self._pool = pool
        self._forked: dict[int, set[str]] = {}

    def note_restored(self, version: int, served_hash: str) -> None:
        """Accept these weights of a version, too: a restored trainer has published them."""
        self._forked.setdefault(version, set()).add(served_hash)

    async def publish(self, version: int) -> None:
        await asyncio.shield(asyncio.to_thread(self._channel.publish, version))

    async def load_everywhere(self, version: int, served_hash: str) -> list[ServedWeights]:
        """Return when all generators that are not silent have loaded.

        `health` replaces a silent one; the new process loads the newest weights.
        """
        generators = self._pool.registry.present("generator")
        loads = (self._load(version, served_hash, record) for record in generators)
        return [served for served in await asyncio.gather(*loads) if served]

    async def _load(
        self, version: int, served_hash: str, record: WorkerRecord
    ) -> ServedWeights | None:
        """Wait for one generator; replace it if it loads other weights than the trainer's."""
        address = record.address
        load = await answer_of(self._client, record, generator_tasks.load_weights, version)
        accepted = {served_hash, *self._forked.get(version, ())}
        served, refusal = _acknowledged(load, version, accepted)
        if refusal and not record.is_silent:
            await self._pool.replace(address, why=refusal)
        return served


async def answer_of(
    client: Client, record: WorkerRecord, function: Callable[..., Any], *arguments: Any
) -> asyncio.Future[dict[str, Any]]:
    """Return a generator's answer; it is not done if the generator is silent, or takes too long."""
    asked = client.run(function, *arguments, workers=[record.address], on_error="return")
    answer: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(asked)
    clock = asyncio.get_running_loop().time
    deadline = clock() + ACKNOWLEDGE_TIMEOUT_S
    try:
        while not answer.done() and clock() < deadline and not record.is_silent:
            await asyncio.wait([answer], timeout=LISTEN_EVERY_S)
    except asyncio.CancelledError:
        answer.cancel()  # else it ends with the cluster, and its error is printed
        raise
    return answer


def _acknowledged(
    load: asyncio.Future[dict[str, Any]], version: int, accepted: Set[str]
) -> tuple[ServedWeights | None, str]:
    """Return what a generator serves, and why it must be replaced; "" if its process died."""
    if not load.done():
        load.cancel()
        return None, f"version {version} was not loaded"
    if load.exception() is not None:
        return None, ""
    for found in load.result().values():
        if isinstance(found, BaseException) and not isinstance(found, OSError):
            return None, f"version {version} was not loaded ({found})"
        if isinstance(found, ServedWeights):
            if found.policy_version < version:
                return None, f"it serves version {found.policy_version}, expected {version}"
            if found.policy_version == version and found.served_hash not in accepted:
                return None, (
                    f"expected weights {' or '.join(sorted(accepted))} of version {version}, as "
                    f"the ledger has them, found it serving {found.served_hash}"
                )
            return found, ""
    return None, ""
