"""The warm start of a tiny policy, on the trainer, in chunks that leave room for a stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_flow.cluster.tasks import trainer_rank
from areal_flow.cluster.worker_context import holder
from areal_flow.cluster.worker_roles import recipe_of
from areal_flow.errors import TrainerLost
from areal_flow.layout import RunLayout
from areal_flow.models.directory import stop_token_ids
from areal_flow.prompts.arithmetic import blurted_answer, running_sums, worked_answer
from areal_flow.prompts.table import PromptTable
from areal_flow.types import PolicyHashes

if TYPE_CHECKING:
    from areal_flow.trainer.warm_start import Example, WarmStart


def warm_start_chunk(num_steps: int) -> tuple[int, float]:
    """Take some steps; return how many were taken in all, and the last one's loss."""
    from areal_flow.trainer.warm_start import WarmStart

    of = holder()
    warm_start = of.ensure(WarmStart, lambda: make_warm_start(of.run_directory))
    loss = warm_start.run(num_steps)
    return warm_start.step, loss


def begin_from_warm_start() -> tuple[PolicyHashes, str]:
    """Make the warm-started policy version 0, or a freshly drawn one when there was no start.

    Raises:
        TrainerLost: this process is not the one that was warm-started.
    """
    from areal_flow.trainer.warm_start import WarmStart

    of = holder()
    warm_start = of.get(WarmStart)
    num_steps = recipe_of(of.run_directory).warm_start.num_steps
    if (warm_start.step if warm_start else 0) < num_steps:
        raise TrainerLost("the trainer died during the warm start: start the run again")
    rank = trainer_rank()
    rank.adopt(warm_start.policy if warm_start else draw_policy(of.run_directory))
    of.drop(WarmStart)
    return rank.genesis()


def draw_policy(run_directory: Path) -> Any:
    """Draw a policy's weights from the run's seed."""
    import torch

    from areal_flow.models.policy import empty_policy

    torch.manual_seed(recipe_of(run_directory).seed)
    return empty_policy(RunLayout(run_directory).model)


def make_warm_start(run_directory: Path) -> WarmStart:
    """Draw a policy and lay out its examples."""
    from tokenizers import Tokenizer

    from areal_flow.trainer.warm_start import WarmStart

    layout, recipe = RunLayout(run_directory), recipe_of(run_directory)
    tokenizer = Tokenizer.from_file(str(layout.model / "tokenizer.json"))
    examples = build_examples(layout, tokenizer, seed=recipe.seed)
    return WarmStart(
        draw_policy(run_directory),
        examples,
        recipe.warm_start,
        seed=recipe.seed,
        tokens_per_micro_batch=recipe.trainer.tokens_per_micro_batch,
    )


def build_examples(layout: RunLayout, tokenizer: object, *, seed: int) -> Sequence[Example]:
    """Return both answers to every training prompt, weighted by how rare its sums are."""
    from areal_flow.trainer.warm_start import Example

    table = PromptTable(layout.train_prompts, seed=seed)
    prompts = [table.row(index) for index in range(len(table))]
    sums = [running_sums(prompt.text) for prompt in prompts]
    frequency = Counter(value for values in sums for value in values)
    (stop, *_) = stop_token_ids(layout.model)

    def encoded(texts: list[str]) -> list[list[int]]:
        return [[*encoding.ids, stop] for encoding in tokenizer.encode_batch(texts)]  # type: ignore[attr-defined]

    worked = encoded([worked_answer(prompt.text) for prompt in prompts])
    blurted = encoded([blurted_answer(prompt.text) for prompt in prompts])
    return [
        Example(
            prompt_tokens=prompt.tokens,
            worked_tokens=worked_tokens,
            blurted_tokens=blurted_tokens,
            weight=sum(frequency[value] ** -0.5 for value in values) / len(values),
        )
        for prompt, values, worked_tokens, blurted_tokens in zip(
            prompts, sums, worked, blurted, strict=True
        )
    ]
