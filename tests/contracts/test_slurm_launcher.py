"""Jobs under a real Slurm: cancelled ones start again, and those that wait are waited for."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator

import pytest

from areal_flow.cluster import pool as pools
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import EngineError
from tests.contracts.test_launchers import empty_pool, generator, process_of, run
from tests.slurmd import NUM_CORES, PREEMPTING, job_numbers, running_slurm


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_slurm(tmp_path_factory.mktemp("slurm")):
        yield


def settings(*options: str) -> ClusterSettings:
    return ClusterSettings(launcher="slurm", slurm={"all": options})


async def until_listed() -> str:
    """Wait for the only job to be listed and return its number."""
    while not (numbers := job_numbers(states="PENDING,RUNNING")):
        await asyncio.sleep(0.1)
    (number,) = numbers
    return number


def preempt() -> None:
    everything = (f"--partition={PREEMPTING}", f"--cpus-per-task={NUM_CORES}")
    command = ["sbatch", *everything, "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(command, check=True)


def cancel() -> None:
    subprocess.run(["scancel", "--name=generator-0"], check=True)


@pytest.mark.parametrize(("end", "state"), [(cancel, "CANCELLED"), (preempt, "PREEMPTED")])
def test_job_that_slurm_ends_counts_as_a_death_and_starts_again(
    end: Callable[[], None], state: str
) -> None:
    async def end_one() -> None:
        async with empty_pool(settings()) as pool:
            await pool.start_until_joined([generator(settings())])
            (record,) = pool.registry.all()
            first, number = await process_of(pool), await until_listed()
            end()
            await process_of(pool, other_than=first.pid)
            assert [death.cause for death in record.deaths] == [f"Slurm job {number}: {state}"]

    run(end_one)


def test_time_in_the_queue_does_not_count_as_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "JOIN_TIMEOUT_S", 7.0)

    async def wait() -> None:
        async with empty_pool(settings("--hold")) as pool:
            starting = asyncio.ensure_future(
                pool.start_until_joined([generator(settings("--hold"))])
            )
            number = await until_listed()
            await asyncio.sleep(11)
            subprocess.run(["scontrol", "release", number], check=True)
            await starting

    run(wait)
    assert "generator-0 waits as Slurm job" in caplog.text
    assert "JobHeldUser" in caplog.text


def test_job_in_the_queue_is_cancelled_with_its_run() -> None:
    async def stop() -> None:
        async with empty_pool(settings("--hold")) as pool:
            starting = asyncio.ensure_future(
                pool.start_until_joined([generator(settings("--hold"))])
            )
            await until_listed()
            starting.cancel()
        assert not job_numbers()

    run(stop)


def test_job_that_slurm_refuses_ends_the_start_with_its_message() -> None:
    async def fail() -> None:
        refused = settings("--partition=nowhere")
        async with empty_pool(refused) as pool:
            with pytest.raises(EngineError, match=r"to start on Slurm.*Invalid partition"):
                await pool.start_until_joined([generator(refused)])

    run(fail)


def test_stranger_who_connects_in_place_of_a_job_is_refused() -> None:
    async def connect() -> None:
        held = settings("--hold")
        async with empty_pool(held) as pool:
            starting = asyncio.ensure_future(pool.start_until_joined([generator(held)]))
            number = await until_listed()
            shown = subprocess.run(
                ["scontrol", "write", "batch_script", number, "-"],
                capture_output=True,
                text=True,
                check=True,
            )
            port = int(shown.stdout.partition("--driver 127.0.0.1 ")[2].split()[0])
            tls = pool.scheduler.security.get_connection_args("client")["ssl_context"]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            writer.write(b"generator-0\n")
            assert await reader.read() == b""
            writer.close()
            subprocess.run(["scontrol", "release", number], check=True)
            await starting

    run(connect)
