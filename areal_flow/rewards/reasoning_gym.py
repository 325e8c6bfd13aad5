"""The verifier `reasoning_gym`: each task of that package judges the answers to its questions.

A row's metadata names the task as `source_dataset`, as the package's entries do. Tasks whose code
evaluates text as Python, such as `countdown`, are refused: they would run the policy's text.
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
from areal_flow.core.errors import RewardError
from areal_flow.core.program import how_to_install
from areal_flow.core.thinking import after_thinking
from areal_flow.core.types import Score
from areal_flow.rewards.math import text as math_text
from areal_flow.rewards.math.text import marked_text
from areal_flow.rewards.protocol import reads_completion

_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympy|pickle)\b")
"""Ways to evaluate text, SymPy's parser included; none may occur in a scorer's module."""


@reads_completion
def verify_reasoning_gym(
    *, prompt: str, completion: str, answer: Any, metadata: Mapping[str, Any]
) -> Score:
    r"""Return the result of the task's `score_answer`, from 0 to 1.

    It judges the last `<answer>`, else `\boxed{}` or `####`, else the whole completion. The row
    holds the entry's `metadata`, or its keys as columns.
    """
    entry_metadata = metadata.get("metadata") or metadata
    is_mapping = isinstance(entry_metadata, Mapping)
    task = entry_metadata.get("source_dataset") if is_mapping else None
    if not task:
        raise RewardError(
            "reward 'reasoning_gym': expected the name of a task as 'source_dataset' in the row's "
            f"metadata, found {sorted(metadata)}"
        )
    entry = {"question": prompt, "answer": answer, "metadata": dict(entry_metadata)}
    extracted = extract_answer(after_thinking(completion, prompt))
    reward = float(scorer_of(str(task))(extracted, entry))
    return Score(reward, "correct" if reward >= 1 else "incorrect", extracted=extracted[:80])


def extract_answer(text: str) -> str:
    _, tag, tagged = text.rpartition("<answer>")
    return (tagged.partition("</answer>")[0] if tag else marked_text(text) or text).strip()


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
    except (ValueError, AssertionError) as error:  # unknown, or it needs settings
        raise RewardError(f"reward 'reasoning_gym': task {task!r}: {error}") from error
    source = inspect.getsource(sys.modules[scorer.__module__])
    if match := _EVALUATES.search(source):
        raise RewardError(
            f"reward 'reasoning_gym': the code of task {task!r} uses {match[0]!r}, which may run "
            "what the policy wrote outside a sandbox: choose another task"
        )
    return scorer  # type: ignore[no-any-return]
