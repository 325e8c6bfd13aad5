"""The verifier `reasoning_gym`: each task of that package judges the answers to its own questions.

A row's metadata names the task as `source_dataset`, as the package's own entries do. Tasks whose
code evaluates text as Python are refused: `countdown` and others would run what the policy wrote.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from areal_flow.core import thinking
from areal_flow.core.code_version import how_to_install
from areal_flow.core.errors import RewardError
from areal_flow.core.thinking import after_thinking
from areal_flow.core.types import Score
from areal_flow.rewards.math import text as math_text
from areal_flow.rewards.math.text import marked_text
from areal_flow.rewards.protocol import reads_completion

_ANSWER = ("<answer>", "</answer>")
"""The package's own mark of a final answer."""

_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympy|pickle)\b")
"""What evaluates text, SymPy's parser included; a scorer's whole module has none of it."""


@reads_completion
def verify_reasoning_gym(
    *, prompt: str, completion: str, answer: Any, metadata: Mapping[str, Any]
) -> Score:
    r"""Give what the task's `score_answer` gives, from 0 to 1.

    The last `<answer>` is judged, else `\boxed{}` or `####`, else the whole completion. The row has
    the entry's own `metadata`, or its keys as columns.
    """
    of_entry = metadata.get("metadata") or metadata
    task = of_entry.get("source_dataset") if isinstance(of_entry, Mapping) else None
    if not task:
        raise RewardError(
            "reward 'reasoning_gym': expected the name of a task as 'source_dataset' in the row's "
            f"metadata, found {sorted(metadata)}"
        )
    entry = {"question": prompt, "answer": answer, "metadata": dict(of_entry)}
    extracted = final_answer(after_thinking(completion, prompt))
    reward = float(scorer_of(str(task))(extracted, entry))
    return Score(reward, "right" if reward >= 1 else "wrong", extracted=extracted[:80])


def final_answer(completion: str) -> str:
    begin, end = _ANSWER
    _, mark, after = completion.rpartition(begin)
    if mark:
        return after.partition(end)[0].strip()
    return (marked_text(completion) or completion).strip()


vars(verify_reasoning_gym)["made_of"] = (Path(math_text.__file__), Path(thinking.__file__))


@cache
def scorer_of(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ImportError as error:
        raise RewardError(
            "reward 'reasoning_gym' needs the package of this name: "
            f"{how_to_install('reasoning-gym')}"
        ) from error
    try:
        scorer = get_score_answer_fn(task)
    except (ValueError, AssertionError) as error:  # unknown, or it needs settings of its own
        raise RewardError(f"reward 'reasoning_gym': task {task!r}: {error}") from error
    source = inspect.getsource(sys.modules[scorer.__module__])
    if match := _EVALUATES.search(source):
        raise RewardError(
            f"reward 'reasoning_gym': the code of task {task!r} uses {match[0]!r}, which may run "
            "what the policy wrote outside a sandbox: choose another task"
        )
    return scorer  # type: ignore[no-any-return]
