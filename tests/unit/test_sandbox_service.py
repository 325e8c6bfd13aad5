"""Sandboxes of a reward worker, used from another worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest
from distributed import Scheduler, Worker

from areal_flow.cluster.sandbox_service import OPERATION, RemoteSandbox, SandboxService
from areal_flow.core.errors import ConfigError
from areal_flow.sandboxes import protocol
from areal_flow.sandboxes.protocol import Sandbox
from areal_flow.sandboxes.registry import SandboxSettings
from areal_flow.sandboxes.run import SandboxError

HOST = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}


@pytest.fixture
async def workers() -> AsyncIterator[tuple[Worker, Worker]]:
    """A generator's worker and a reward worker."""
    async with (
        Scheduler(port=0, **HOST) as scheduler,
        Worker(scheduler.address, nthreads=1, **HOST) as generator,
        Worker(scheduler.address, nthreads=1, **HOST) as reward,
    ):
        reward.handlers[OPERATION] = SandboxService(max_live=2).serve
        yield generator, reward


def opened(
    workers: tuple[Worker, Worker], **settings: object
) -> AbstractAsyncContextManager[Sandbox]:
    generator, reward = workers
    chosen = SandboxSettings.model_validate(settings)
    return protocol.opened(RemoteSandbox(generator, reward.address, chosen))


async def test_commands_and_files_pass_over_the_connection(workers: tuple[Worker, Worker]) -> None:
    async with opened(workers) as sandbox:
        await sandbox.write_file("a/b", bytes(range(256)))
        assert await sandbox.read_file("a/b") == bytes(range(256))
        await sandbox.run("cd a; x=1", timeout_s=30)
        result = await sandbox.run("ls; (exit $((x + 1)))", timeout_s=30)
        assert (result.output, result.exit_code) == ("b\n", 2)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            await sandbox.read_file("nowhere")
        assert (await sandbox.run("echo next", timeout_s=30)).output == "next\n"


async def test_settings_are_refused_where_the_sandbox_would_be(
    workers: tuple[Worker, Worker],
) -> None:
    with pytest.raises(ConfigError, match="the provider 'local' has none"):
        async with opened(workers, image="debian"):
            pass


class Broken:
    """A provider that cannot be made, or cannot be started."""

    def __init__(self, limits: object, *, fails: str, **_: object) -> None:
        if fails == "made":
            raise KeyError("E2B_API_KEY")

    async def start(self) -> None:
        raise OSError("no such image")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fails", "message"), [("made", "KeyError: .E2B_API_KEY"), ("started", "no such")]
)
async def test_a_failed_start_says_why_and_frees_its_place(
    workers: tuple[Worker, Worker], fails: str, message: str
) -> None:
    broken = {"provider": f"{__name__}:Broken", "provider_settings": {"fails": fails}}
    async with asyncio.timeout(30):
        for _ in range(3):
            failed = opened(workers, **broken)
            with pytest.raises(SandboxError, match=message):
                async with failed:
                    pass
        async with opened(workers) as sandbox:
            assert (await sandbox.run("echo a", timeout_s=30)).output == "a\n"


async def test_an_episode_waits_where_enough_sandboxes_are_in_use(
    workers: tuple[Worker, Worker],
) -> None:
    async with opened(workers), opened(workers) as second:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), opened(workers):
                pass
        await second.close()
        async with asyncio.timeout(30), opened(workers) as third:
            assert (await third.run("echo third", timeout_s=30)).output == "third\n"


async def test_a_sandbox_ends_in_the_middle_of_a_command_with_its_connection(
    workers: tuple[Worker, Worker],
) -> None:
    async with opened(workers), opened(workers) as sandbox:
        running = asyncio.create_task(sandbox.run("sleep 600", timeout_s=900))
        await asyncio.sleep(0.2)
        running.cancel()
        async with asyncio.timeout(30), opened(workers) as following:
            assert (await following.run("echo *", timeout_s=30)).output == "*\n"
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.run("true", timeout_s=1)


async def test_a_lost_reward_worker_is_an_error_of_the_infrastructure(
    workers: tuple[Worker, Worker],
) -> None:
    async with opened(workers) as sandbox:
        running = asyncio.create_task(sandbox.run("sleep 600", timeout_s=900))
        await asyncio.sleep(0.2)
        await workers[1].close()
        async with asyncio.timeout(30):
            with pytest.raises(SandboxError, match="was lost"):
                await running
    with pytest.raises(SandboxError, match="no connection"):
        async with opened(workers):
            pass
