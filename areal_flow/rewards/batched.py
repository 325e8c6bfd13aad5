"""Functions with TRL's signature: many completions at a time, and each column as a list.

    def f(prompts, completions, **columns) -> list[float]

As in TRL 1.16, `completion_ids`, `trainer_state`, `log_extra`, `log_metric` and single columns may
be named as well, and a None in the list says that the function gives that completion no reward.
Prompts and completions are text, or lists of messages where the prompts' rows have those.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from areal_flow.core.types import RewardPart, Score
from areal_flow.rewards.calls import call_in_thread, call_on_loop
from areal_flow.rewards.protocol import FunctionReward, RewardInput, is_async, judged

BATCH_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "answer"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""What a function may name beside columns of the rows and its own settings."""


def is_batched(function: Callable[..., Any]) -> bool:
    """Return whether a function has TRL's signature.

    It names `completions` and no `completion`; or neither of them and no `prompt`, but `prompts`
    or `**columns`.
    """
    parameters = inspect.signature(function).parameters
    if "completion" in parameters or "completions" in parameters:
        return "completion" not in parameters
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "prompt" not in parameters and (takes_columns or "prompts" in parameters)


class BatchedFunctionReward(FunctionReward):
    """Calls a function once for many completions; if it fails, it has failed on all of them."""

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        if not inputs:
            return []
        logged = _Logged(len(inputs))
        call = partial(self._call_batch, inputs, logged)
        limit_s = self.timeout_s * len(inputs)
        try:
            if is_async(self.function):
                returned = await call_on_loop(call, limit_s=limit_s)
            else:
                (returned,) = await call_in_thread([call], limit_s=limit_s)
            rewards = _listed(returned, len(inputs))
        except Exception as error:  # noqa: BLE001 - `judged` counts it
            return [judged(error)] * len(inputs)
        scores = (Score(None, "no_reward") if r is None else judged(r) for r in rewards)
        return [logged.onto(score, place) for place, score in enumerate(scores)]

    def _call_batch(self, inputs: Sequence[RewardInput], logged: _Logged) -> Any:
        names = dict.fromkeys(name for given in inputs for name in given.metadata)
        columns = {name: [given.metadata.get(name) for given in inputs] for name in names}
        states = (given.trainer_state for given in inputs)
        given = columns | {
            "prompts": [[*given.messages] or given.prompt for given in inputs],
            "completions": [
                [{"role": "assistant", "content": given.completion}]
                if given.messages
                else given.completion
                for given in inputs
            ],
            "completion_ids": [list(given.completion_ids) for given in inputs],
            "answer": [given.metadata.get("answer", given.answer) for given in inputs],
            "trainer_state": max(states, key=lambda state: state.global_step),
            "log_extra": logged.log_extra,
            "log_metric": logged.log_metric,
        }
        named = self._named(given)
        return self.function(**(given if self._takes_columns else named))


@dataclass(frozen=True, slots=True)
class _Logged:
    num: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self.num:
            raise ValueError(
                f"log_extra({column!r}): expected {self.num} values, one a completion, found "
                f"{len(values)}"
            )
        self.columns[column] = [*values]

    def log_metric(self, name: str, value: float) -> None:
        """Log a number of the whole call; of one that is logged twice the mean counts."""
        self.metrics[re.sub(r"[^\w.-]", "-", name)].append(float(value))

    def onto(self, score: Score, place: int) -> Score:
        means = {name: fmean(values) for name, values in self.metrics.items()}
        parts = (RewardPart(n, mean if math.isfinite(mean) else None) for n, mean in means.items())
        extra = {column: values[place] for column, values in self.columns.items()}
        return replace(score, parts=(*score.parts, *parts), extra={**score.extra, **extra})


def _listed(returned: Any, num: int) -> list[Any]:
    if isinstance(returned, BaseException):
        raise returned
    try:
        rewards = list(returned)
    except TypeError:
        rewards = None
    if rewards is None or len(rewards) != num:
        description = repr(returned) if rewards is None else f"{len(rewards)} of them"
        raise TypeError(
            f"the verifier must return a list of {num} rewards, found {description:.80}"
        )
    return rewards
