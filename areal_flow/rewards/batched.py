"""Functions with TRL's signature: many completions at a time, and each column as a list.

    def f(prompts, completions, **columns) -> list[float]

As in TRL, `completion_ids` and single columns may be named as well, and a None in the list says
that the function gives that completion no reward. Prompts and completions are text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from areal_flow.rewards.calls import call_in_thread
from areal_flow.rewards.protocol import FunctionReward, RewardInput, judged
from areal_flow.rewards.verifier_loop import call_on_loop
from areal_flow.types import Score


def is_batched(function: Callable[..., Any]) -> bool:
    """Return whether a function names `completions`, and no single `completion`."""
    names = inspect.signature(function).parameters
    return "completions" in names and "completion" not in names


class BatchedFunctionReward(FunctionReward):
    """Calls a function once for many completions, in a thread or, if it is `async`, on the loop.

    It may take `timeout_s` over each completion of a call. One that raises, or returns another
    number of rewards, has failed on all of them.
    """

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        if not inputs:
            return []
        call = partial(self.function, **self._batch_arguments(inputs))
        limit_s = self.timeout_s * len(inputs)
        try:
            if inspect.iscoroutinefunction(self.function):
                returned = await call_on_loop(call, limit_s=limit_s)
            else:
                (returned,) = await call_in_thread([call], limit_s=limit_s)
            rewards = _listed(returned, len(inputs))
        except Exception as error:  # noqa: BLE001 - `judged` counts it
            return [judged(error)] * len(inputs)
        return [Score(None, "no_reward") if r is None else judged(r) for r in rewards]

    def _batch_arguments(self, inputs: Sequence[RewardInput]) -> dict[str, list[Any]]:
        names = dict.fromkeys(name for given in inputs for name in given.metadata)
        columns = {name: [given.metadata.get(name) for given in inputs] for name in names}
        columns |= {
            "prompts": [given.prompt for given in inputs],
            "completions": [given.completion for given in inputs],
            "completion_ids": [list(given.completion_ids) for given in inputs],
            "answer": [given.answer for given in inputs],
        }
        if self._takes_columns:
            return columns
        return {name: values for name, values in columns.items() if name in self._names}


def _listed(returned: Any, num: int) -> list[Any]:
    if isinstance(returned, BaseException):
        raise returned
    try:
        rewards = list(returned)
    except TypeError:
        rewards = None
    if rewards is None or len(rewards) != num:
        found = repr(returned) if rewards is None else f"{len(rewards)} of them"
        raise TypeError(f"the verifier must return a list of {num} rewards, found {found:.80}")
    return rewards
