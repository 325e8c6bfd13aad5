"""A program that tries each verifier of a recipe on a prompt row, as a reward worker would.

A verifier may exit, crash or hang, so it runs in a separate process, which imports it as a worker
does. Standard input is JSON: `rewards` (a recipe's tables), `num_steps`, and `rows`, the first row
of each source and of all. A line of JSON is written before and after each verifier. Built-in
verifiers are not tried.

    python -m areal_flow.rewards.trial RUN_DIRECTORY OUTPUT < input.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from areal_flow.core.failures import cause_of
from areal_flow.core.layout import RunLayout
from areal_flow.core.settings import search_here_last
from areal_flow.core.types import answer_text
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.rewards.protocol import RewardInput, RewardSettings, TrainerState, part_names
from areal_flow.rewards.registry import REWARDS, WeightedRewards

ANY_SOURCE = ""


def main(run_directory: Path, output: Path) -> None:
    """Judge `trial_completion` and an empty completion with each verifier of the user."""
    request: dict[str, Any] = json.load(sys.stdin)
    layout = RunLayout(run_directory)
    rewards = [RewardSettings.model_validate_json(json.dumps(each)) for each in request["rewards"]]
    with output.open("w", buffering=1) as lines:
        for name, settings in zip(part_names(rewards), rewards, strict=True):
            if not is_foreign(settings):
                continue
            record: dict[str, Any] = {"verifier": name, "scores": None, "error": ""}
            lines.write(json.dumps(record) + "\n")
            try:
                row = request["rows"][settings.sources[0] if settings.sources else ANY_SOURCE]
                row["trainer_state"] = TrainerState(0, request["num_steps"])
                record["scores"] = asyncio.run(_judge(settings, layout, row))
            except Exception as error:  # noqa: BLE001 - whatever prevents it from being opened
                record["error"] = cause_of(error)
            lines.write(json.dumps(record) + "\n")


def is_foreign(reward: RewardSettings) -> bool:
    return reward.verifier not in REWARDS


def trial_completion(answer: Any, prompt: str) -> str:
    """Return a row's answer as text, or its prompt if it has none."""
    return prompt if answer is None else answer_text(answer)


async def _judge(
    settings: RewardSettings, layout: RunLayout, row: dict[str, Any]
) -> list[dict[str, Any]]:
    rewards = WeightedRewards([settings.model_copy(update={"weight": 1.0})], layout.rewards)
    rewards.open()
    scores: list[dict[str, Any]] = []
    tokenizer = tokenizer_of(layout.model)
    for completion in (trial_completion(row["answer"], row["prompt"]), ""):
        tokens = tokenizer.encode(completion, add_special_tokens=False).ids
        began = perf_counter()
        (score,) = await rewards.score(
            [RewardInput(**row, completion=completion, completion_ids=tokens)]
        )
        seconds = perf_counter() - began
        error = "" if score.verdict == "no_reward" else score.error
        scores.append({"reward": score.reward, "error": error, "seconds": seconds})
        if seconds > settings.timeout_s:
            break
    rewards.close()
    return scores


if __name__ == "__main__":
    search_here_last()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
