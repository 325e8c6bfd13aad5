"""The interface of rewards, whose contract is `tests/contracts/test_rewards.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any, Protocol

from pydantic import Field

from areal_flow.core.settings import Settings
from areal_flow.core.types import Score


class RewardSettings(Settings):
    """One of the rewards whose weighted sum is the reward of a completion."""

    verifier: str = "numeric"
    """A built-in verifier, an import path `package.module:function`, or a shipped function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""
    weight: float = 1.0
    """Weight in the sum."""
    sources: tuple[str, ...] = Field((), strict=False)
    """The `[[sources]]` whose completions it scores; none: all."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit per completion for your own verifiers."""


def part_names(rewards: Sequence[RewardSettings]) -> list[str]:
    """Return the name of each part of a sum: its verifier, numbered from the second one on."""
    verifiers = [reward.verifier for reward in rewards]
    names: list[str] = []
    for verifier in verifiers:
        numbered = (f"{verifier}_{number}" for number in count(2))
        free = (name for name in numbered if name not in {*verifiers, *names})
        names.append(next(free) if verifier in names else verifier)
    return names


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of training: the fields of transformers' `TrainerState`, with its defaults."""

    global_step: int = 0
    """The newest policy version that sampled a token of the completion."""
    max_steps: int = 1
    """The recipe's `num_steps`."""
    epoch: float = 0.0
    """Passes over the prompts up to then, had every group been used."""
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: Sequence[Mapping[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: Mapping[str, Any] | None = None
    stateful_callbacks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One completion to be judged.

    Args:
        prompt: the text that the policy was given.
        completion: the text that it produced, without special tokens.
        answer: the reference answer, as in the prompt's row: text, a number or a list.
        metadata: the columns of the prompt's row: tests, an entry point, anything.
        completion_ids: the tokens of the completion, with special ones.
        prompt_source: the name of the prompt's source, if a run has several.
        messages: the prompt as the messages of its row; empty if the row has text.
        trainer_state: progress of training.
    """

    prompt: str
    completion: str
    answer: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = ()
    prompt_source: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    trainer_state: TrainerState = TrainerState()


COMPLETION_ARGUMENTS = (
    *("prompt", "completion", "answer", "metadata"),
    *("completion_ids", "prompt_source", "trainer_state"),
)
"""What a function may name, besides columns of the row and its own settings."""


MAX_COMPLETION_CHARS = 2**22


def overlong(completion: str) -> Score | None:
    """Return the score of a completion that is too long to be judged; None for any other."""
    if len(completion) <= MAX_COMPLETION_CHARS:
        return None
    return Score(0.0, "output_limit", message=f"more than {MAX_COMPLETION_CHARS} characters")


def reads_completion(function: Callable[..., Score]) -> Callable[..., Score]:
    """Give completions that are too long their score without calling the verifier."""

    @wraps(function)
    def verify(*, completion: str, **arguments: Any) -> Score:
        return overlong(completion) or function(completion=completion, **arguments)

    return verify


class Reward(Protocol):
    """Judges completions, many at a time. Opened once on each reward worker, and closed there.

    A reward that waits rather than computes may have an attribute `max_concurrency`: it then scores
    several groups at once, up to that many completions. Any other scores one group after the other.
    """

    def open(self) -> None:
        """Acquire resources: a connection, a model, a sandbox."""

    def close(self) -> None:
        """Release the resources."""

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        """Return one score per input, in order.

        The event loop is shared: move computations to `asyncio.to_thread`.

        Raises:
            Exception: counted and stored as an error of every input; none of them gets a reward.
        """


RewardFunction = Callable[..., "float | Score | Awaitable[float | Score]"]
"""Receives those `COMPLETION_ARGUMENTS` and columns that it names; with `**columns` all columns."""


def max_concurrency(reward: Reward) -> int:
    """Return how many completions of several groups a reward judges at the same time."""
    return int(getattr(reward, "max_concurrency", 1))
