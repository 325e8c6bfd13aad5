"""Sample answers of a run's policies to the same held-out prompts, to see how they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_flow.core.pass_rates import passes
from areal_flow.log.queries import Run

MAX_VERSIONS, MAX_PROMPTS = 10, 8
_SHOWN = ["policy_version", "difficulty", "prompt", "answer", "completion", "reward"]


def read_examples(run: Run, made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first answers of policies evenly spaced to one prompt of each difficulty.

    Args:
        made: `evaluation`, `policy_version` and `verifier` of evaluations in their order; only
            those with the last one's verifier count.
    """
    alike = [each for each in made if each["verifier"] == made[-1]["verifier"]]
    by_difficulty = ["held_out", "difficulty"]
    prompts_of_version = run.evaluations(
        "arrow", columns=[*by_difficulty, "prompt_id"], where=_first_answers(made[-1:])
    )
    prompts = prompts_of_version.group_by(by_difficulty).aggregate([("prompt_id", "min")])
    prompts = prompts.sort_by([(name, "ascending") for name in by_difficulty])[:MAX_PROMPTS]
    chosen = ", ".join(
        "'{}'".format(x.replace("'", "''")) for x in prompts["prompt_id_min"].to_pylist()
    )
    answers = run.evaluations(
        "arrow",
        columns=[*_SHOWN, "held_out", "prompt_id", "evaluated_at"],
        where=f"{_first_answers(evenly_spaced(alike, MAX_VERSIONS))} AND prompt_id IN ({chosen})",
    )
    order = [*by_difficulty, "prompt_id", "evaluated_at"]
    rows = answers.sort_by([(name, "ascending") for name in order]).select(_SHOWN).to_pylist()
    threshold = run.pass_threshold
    return [{**row, "passed": passes(row["reward"], threshold=threshold)} for row in rows]


def evenly_spaced(rows: Sequence[Any], max_rows: int) -> list[Any]:
    """Return the first of rows, others evenly spaced, and the last: so many, or one more."""
    spacing = -(-len(rows) // max_rows) or 1
    return [*rows[:-1:spacing], *rows[-1:]]


def answers_of(made: Mapping[str, Any]) -> str:
    return f"evaluation = '{made['evaluation']}' AND policy_version = {made['policy_version']}"


def _first_answers(made: Sequence[Mapping[str, Any]]) -> str:
    return f"sample = 0 AND ({' OR '.join(map(answers_of, made))})"
