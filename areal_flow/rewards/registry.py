"""Rewards by name, their identities, which trajectories carry, and the weighted sum of a recipe."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import isfinite
from pathlib import Path
from typing import Any

from areal_flow.core.errors import RewardError
from areal_flow.core.pass_rates import PASS_THRESHOLD, verdict_of
from areal_flow.core.settings import code_hash, import_function, source_file, text_hash
from areal_flow.core.types import RewardPart, Score
from areal_flow.rewards.code.reward import CodeReward
from areal_flow.rewards.functions import (
    BATCH_ARGUMENTS,
    FAILURES,
    LimitedReward,
    as_score,
    function_reward,
    requires_answer,
)
from areal_flow.rewards.judge import JudgeReward
from areal_flow.rewards.math.reward import MathReward, verify_exact, verify_numeric
from areal_flow.rewards.model_reward import ModelReward
from areal_flow.rewards.protocol import (
    COMPLETION_ARGUMENTS,
    Reward,
    RewardFunction,
    RewardInput,
    RewardSettings,
    max_concurrency,
    part_names,
)
from areal_flow.rewards.reasoning_gym import verify_reasoning_gym
from areal_flow.rewards.shaping import penalize_length, verify_format, verify_regex
from areal_flow.rewards.shipping import SHIPPED, load_shipped

REWARDS: dict[str, RewardFunction | type[Reward]] = {
    "numeric": verify_numeric,
    "exact": verify_exact,
    "regex": verify_regex,
    "format": verify_format,
    "length": penalize_length,
    "math": MathReward,
    "code": CodeReward,
    "judge": JudgeReward,
    "reward_model": ModelReward,
    "reasoning_gym": verify_reasoning_gym,
}
"""A function or a `Reward` class; the recipe's settings are keyword arguments."""
COMPARING = ("numeric", "exact", "regex", "math", "reasoning_gym")
"""Those that compare a completion with the reference answer."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward with its name in the recipe and the identity of its code."""

    name: str
    identity: str
    reward: Reward
    source: str = ""
    """The file of its code, if there is one."""
    judges: tuple[str, ...] = ()
    """Prompt sources whose completions it judges; empty: all."""


def load_reward(
    name: str,
    directory: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
) -> NamedReward:
    """Return a built-in reward, one shipped in `directory`, or one at an import path.

    `timeout_s` limits the time per completion of rewards that are not built in.
    """
    settings = settings or {}
    code = _code_of(name, directory)
    if name.startswith(SHIPPED):
        identity, source = name.removeprefix(SHIPPED), ""
    else:
        identity, source = f"{name}@{code_hash(code)}", source_file(code)
    if settings:
        identity += f"-{text_hash(json.dumps(settings, sort_keys=True, default=str))}"
    _check_settings(name, code, settings)
    reward: Any
    if inspect.isclass(code):
        reward = code(**settings)
        if content_hash := getattr(reward, "content_hash", ""):
            identity += f"-{content_hash}"
        if name not in REWARDS:
            reward = LimitedReward(reward, timeout_s=timeout_s)
    else:
        function = partial(code, **settings) if settings else code
        reward = function_reward(function, timeout_s=timeout_s)
    return NamedReward(name, identity, reward, source)


def _code_of(name: str, directory: Path) -> Any:
    if name.startswith(SHIPPED):
        return load_shipped(name, directory)
    return REWARDS.get(name) or import_function(
        name, setting="rewards.verifier", error=RewardError, built_in=REWARDS
    )


def reads_answer(name: str, directory: Path) -> bool:
    """Return whether a reward cannot score a prompt without a reference answer.

    A function of the user needs one if it has a parameter for it without a default; a class of the
    user is given None.
    """
    if name in REWARDS:
        return name in COMPARING
    code = _code_of(name, directory)
    return not inspect.isclass(code) and requires_answer(code)


def _check_settings(name: str, code: Any, settings: Mapping[str, Any]) -> None:
    not_settings = {} if inspect.isclass(code) else {*COMPLETION_ARGUMENTS, *BATCH_ARGUMENTS}
    parameters = inspect.signature(code).parameters.values()
    named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    takes_any = len(named) < len(parameters)
    setting_names = [key for key in named if key not in not_settings]
    if not takes_any and (unknown := settings.keys() - {*setting_names}):
        takes = ", ".join(setting_names) or "no settings"
        raise RewardError(f"reward {name!r} has no setting {min(unknown)!r}: it takes {takes}")
    missing = [key for key in setting_names if named[key].default is inspect.Parameter.empty]
    missing = [key for key in missing if key not in settings]
    # A user's function may name columns of the prompt's row.
    if missing and (name in REWARDS or inspect.isclass(code)):
        raise RewardError(
            f"reward {name!r} needs the setting {missing[0]!r}: set it in the settings of its "
            "[[rewards]] table"
        )


class WeightedRewards:
    """A `Reward` that is the sum of others, each times its weight."""

    def __init__(
        self,
        settings: Sequence[RewardSettings],
        directory: Path,
        *,
        pass_threshold: float = PASS_THRESHOLD,
        agent: str = "",
        environment: str = "",
    ) -> None:
        """Load each reward.

        Args:
            agent: the import path of an agent that returns rewards itself.
            environment: the name of an environment that does.
        """
        self._parts = [
            replace(
                load_reward(
                    chosen.verifier, directory, settings=chosen.settings, timeout_s=chosen.timeout_s
                ),
                name=name,
                judges=chosen.sources,
            )
            for chosen, name in zip(settings, part_names(settings), strict=True)
        ]
        self._weights = [chosen.weight for chosen in settings]
        self._pass_threshold = pass_threshold
        at_once = [max_concurrency(part.reward) for part in self._parts]
        self.max_concurrency = max(at_once, default=1)
        self._turns = [asyncio.Lock() if num == 1 else nullcontext() for num in at_once]
        self._opened = ExitStack()
        identities = [*map(_weighted_identity, self._parts, self._weights)]
        files = [part.source for part in self._parts]
        if agent:
            identity, source = _identity_of_agent(agent, directory)
            identities.insert(0, f"agent:{identity}")
            files.insert(0, source)
        if environment:
            identities.insert(0, environment)
        self.identity = " + ".join(identities)
        """Name and code hash of the agent and of each reward; an environment."""
        self.files = tuple(dict.fromkeys(filter(None, files)))
        """The files of their code."""

    def open(self) -> None:
        with ExitStack() as opened:
            for part in self._parts:
                part.reward.open()
                opened.callback(part.reward.close)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()
        FAILURES.sum_up()

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        parts = zip(self._parts, self._turns, strict=True)
        columns = await asyncio.gather(*(_scores(part, inputs, turn) for part, turn in parts))
        return [self._sum(scores) for scores in zip(*columns, strict=True)]

    def _sum(self, scores: Sequence[Score]) -> Score:
        """Return the sum, with verdict and extracted answer of the first reward that gave a score.

        If that is a bare number, the verdict says whether the sum passes.
        """
        parts = tuple(
            each
            for part, score in zip(self._parts, scores, strict=True)
            for each in (RewardPart(part.name, score.reward), *score.parts)
        )
        extra = {name: value for score in scores for name, value in score.extra.items()}
        rewarded = [score for score in scores if score.verdict != "no_reward"]
        if failed := [score for score in rewarded if score.reward is None]:
            verdict = failed[0].verdict or "error"
            return Score(None, verdict, error=failed[0].error, parts=parts, extra=extra)
        if not rewarded:
            error = "no verifier gave a reward"
            return Score(None, "no_reward", error=error, parts=parts, extra=extra)
        total = sum(w * (s.reward or 0.0) for w, s in zip(self._weights, scores, strict=True))
        if not isfinite(total):
            return Score(None, "error", error=f"the sum of rewards is {total}", parts=parts)
        message = next((score.message for score in scores if score.message), "")
        first = rewarded[0]
        verdict = first.verdict or verdict_of(total, threshold=self._pass_threshold)
        return Score(total, verdict, first.extracted, message=message, parts=parts, extra=extra)


def _identity_of_agent(agent: str, directory: Path) -> tuple[str, str]:
    """Return the identity of an agent's code, and its file if it was not shipped."""
    if agent.startswith(SHIPPED):
        load_shipped(agent, directory)  # checks the hash in its name
        return agent.removeprefix(SHIPPED), ""
    code = import_function(agent, setting="workflow.path", error=RewardError)
    return f"{agent}@{code_hash(code)}", source_file(code)


def _weighted_identity(part: NamedReward, weight: float) -> str:
    factor = f"{weight:g}*" if weight != 1 else ""
    judges = f" of {','.join(part.judges)}" if part.judges else ""
    return f"{factor}{part.identity}{judges}"


async def _scores(
    part: NamedReward, inputs: Sequence[RewardInput], turn: AbstractAsyncContextManager[Any]
) -> Sequence[Score]:
    """Score the inputs that a part judges; the others get `no_reward`."""
    is_judged = [not part.judges or item.prompt_source in part.judges for item in inputs]
    judged = [*compress(inputs, is_judged)]
    try:
        async with turn:
            results = await part.reward.score(judged) if judged else []
        if len(results) != len(judged):
            raise ValueError(
                f"reward {part.name!r} returned {len(results)} scores, expected {len(judged)}"
            )
    except Exception as error:  # noqa: BLE001 - `as_score` counts it
        results = [as_score(error)] * len(judged)
    scores = map(as_score, results)
    return [next(scores) if each else Score(None, "no_reward") for each in is_judged]
