"""Environments of Prime Intellect's `verifiers` as agents; the only importer of that package.

An environment's tasks become prompt rows (`rows`), and `solve` is the agent of an episode: it plays
the row's task against the session's endpoint, and returns the sum of the environment's rewards.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from areal_flow.core.errors import ArealFlowError


def rows(environment: str, num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield prompt rows of the first tasks of an environment, which `solve` can play.

    Their answer is the environment's name, since only the environment can judge.

    Args:
        environment: a taskset's id in verifiers: an installed module.
    """
    for task in _environment(environment).taskset.take(num_rows):
        played = {"environment": environment, "task": task.data.idx}
        yield {"question": task.data.prompt_text, "answer": environment, **played}


async def solve(environment: str, task: int, base_url: str, api_key: str) -> float:
    """Play a task of an environment, and return the sum of its rewards.

    The chat harness of verifiers is used, which has the task's tools and executes no code.
    """
    played = _environment(environment)
    (chosen,) = played.taskset.include(idx=[str(task)])
    # Verifiers reads keys from nowhere else.
    variable = f"AREAL_FLOW_API_KEY_{secrets.token_hex(8)}"
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    os.environ[variable] = api_key
    try:
        async with played.serving():
            episode = await played.run_episode(
                chosen, vf.ModelContext(client=client, model="policy")
            )
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        causes = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise ArealFlowError(f"the environment {environment} failed: {causes}")
    reward: float = sum(trace.reward for trace in episode.traces)
    return reward


def _environment(name: str) -> vf.Env[Any]:
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return load_environment(resolve_env_config({"taskset": {"id": name}, "agent": agent}))
