"""A core in its own process: it dies with its worker, and its callers notice.

On a GPU every engine has one; on the CPU tests alone choose it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from areal_flow.core.errors import EngineError, WeightsError
from areal_flow.core.types import GroupRequest, Sampling, as_tokens
from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from areal_flow.rollout.engines.vllm.core import CoreProcess
from areal_flow.rollout.engines.vllm.engine import start_vllm_engine
from tests.fakes import MemoryReader
from tests.policies import write_model_directory
from tests.vllm.models import SETTINGS, published

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model")


def wait_until(holds: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def children(pid: int) -> list[psutil.Process]:
    return list(psutil.Process(pid).children(recursive=True))


def cores(pid: int) -> list[psutil.Process]:
    """Return the children that vLLM has named so, and that still live."""
    named = [child for child in children(pid) if child.name().startswith("VLLM::EngineCor")]
    return [core for core in named if not is_gone(core)]


@pytest.mark.parametrize("moment", ["it serves", "it starts"])
def test_core_process_is_gone_after_a_kill_9_of_its_worker(model: Path, moment: str) -> None:
    command = [sys.executable, "-m", "tests.vllm.engine_with_core_process", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as worker:
        if moment == "it serves":
            assert worker.stdout is not None
            assert "started\n" in worker.stdout
            assert len(cores(worker.pid)) == 1
        else:
            wait_until(lambda: len(children(worker.pid)) >= 2, seconds=120)
        left = children(worker.pid)
        worker.kill()
    # One that was killed while it started has vLLM to import first.
    wait_until(lambda: all(map(is_gone, left)), seconds=5 if moment == "it serves" else 120)


@pytest.mark.parametrize("waits_for", ["tokens", "weights"])
async def test_dead_core_answers_at_once_and_leaves_nothing(model: Path, waits_for: str) -> None:
    others, reader = cores(os.getpid()), MemoryReader(published(model))
    engine = await start_vllm_engine(model, SETTINGS, reader, make_core=CoreProcess)
    (core,) = (each for each in cores(os.getpid()) if each not in others)
    request = GroupRequest("r", as_tokens([5, 6, 7]), (1,), Sampling(60))
    core.send_signal(signal.SIGSTOP)
    call = engine.generate(request) if waits_for == "tokens" else engine.load_weights(0, reader)
    waiting = asyncio.create_task(call)
    await asyncio.sleep(0.5)
    assert not waiting.done()
    core.kill()
    with pytest.raises(EngineError, match="the engine is down"):
        await asyncio.wait_for(waiting, 2)
    assert engine.broken
    with pytest.raises(EngineError, match="the engine is down"):
        await engine.generate(request)
    engine.close()
    engine.close()
    assert is_gone(core)


async def test_weights_in_shared_memory_are_read_where_they_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> int:
        raise AssertionError("a second copy was made")

    monkeypatch.setattr(os, "memfd_create", refuse)
    channel = ChosenChannel(tmp_path / "weights", "shared_memory")
    try:
        for version in (0, 1):
            policy = load_policy(write_model_directory(tmp_path / str(version), seed=version))
            channel.stage(version, policy_tensors(policy))
            channel.publish(version)
            if version == 0:
                engine = await start_vllm_engine(model, SETTINGS, channel, make_core=CoreProcess)
        await engine.load_weights(1, channel)
        request = GroupRequest("r", as_tokens([5, 6, 7]), (1,), Sampling(8))
        (completion,) = await engine.generate(request)
        engine.close()
    finally:
        free_segments(channel.root)
    assert [version for version, _ in completion.version_spans] == [1]
    policy.set_attn_implementation("eager")
    ids_T = torch.tensor([5, 6, 7, *completion.tokens])
    with torch.no_grad():
        logits_TV = policy(input_ids=ids_T[None]).logits[0, 2:-1]
    expected = logits_TV.log_softmax(-1).gather(1, ids_T[3:, None])[:, 0]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


async def test_core_process_ends_with_its_engine_also_with_one_that_never_served(
    model: Path,
) -> None:
    class Nothing(MemoryReader):
        def newest(self) -> int:
            raise WeightsError("nothing was published")

    others = cores(os.getpid())
    with pytest.raises(WeightsError, match="nothing was published"):
        await start_vllm_engine(model, SETTINGS, Nothing(published(model)), make_core=CoreProcess)
    wait_until(lambda: cores(os.getpid()) == others, seconds=10)
