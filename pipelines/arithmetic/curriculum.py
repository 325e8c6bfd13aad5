"""The answers that the tiny policy imitates, in the order of training.

Chain-of-thought answers come first, so that the skill is there; direct ones are mixed in late, so
that the policy has a habit for reinforcement learning to change. Sums with rare running sums are
drawn more often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from pipelines.arithmetic.sums import chain_of_thought_answer, direct_answer, running_sums

CHAIN_OF_THOUGHT_FRACTION = 0.24
"""Of the rows in the mixed phase; before it, all."""
MIXED_PHASE = 0.12
"""The last part of the steps."""
_STREAM = 7


def curriculum(
    questions: Sequence[str], *, num_steps: int, batch_size: int, seed: int
) -> Iterator[dict[str, str]]:
    """Yield `num_steps` times `batch_size` rows of a prompt and its completion.

    A question's weight is the mean of `frequency ** -0.5` over its running sums.
    """
    sums = [running_sums(question) for question in questions]
    frequency = Counter(value for values in sums for value in values)
    weights = np.array(
        [sum(frequency[value] ** -0.5 for value in values) / len(values) for values in sums]
    )
    cumulative = np.cumsum(weights / weights.sum())
    random = np.random.default_rng([seed, _STREAM])
    for step in range(num_steps):
        drawn = np.searchsorted(cumulative, random.random(batch_size), side="right")
        fraction = CHAIN_OF_THOUGHT_FRACTION if step >= num_steps * (1 - MIXED_PHASE) else 1.0
        reasoned = random.random(batch_size) < fraction
        for index, shows_steps in zip(np.minimum(drawn, len(sums) - 1), reasoned, strict=True):
            question = questions[index]
            answer = chain_of_thought_answer if shows_steps else direct_answer
            yield {"prompt": question, "completion": answer(question)}
