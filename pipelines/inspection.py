"""A run and a trajectory's id in, everything there is to know of it out. No terminal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from areal_flow.algorithms.registry import AlgorithmSettings
from areal_flow.config import load_recipe
from areal_flow.errors import RunError
from areal_flow.store.queries import Run
from areal_flow.store.selection import read_rows
from areal_flow.store.training_rows import TrainingRows


@dataclass(frozen=True, slots=True)
class InspectedToken:
    """One token of a completion; `staleness` is None while no step has trained it."""

    text: str
    token_id: int
    version: int
    logprob: float
    staleness: int | None
    trained: bool | None
    chosen: bool


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What the step that trained a trajectory made of it."""

    advantage: float
    advantage_rule: str
    num_trajectories: int
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class Inspected:
    """A trajectory with its tokens, its group and its step; `row` is of `Run.database`'s view."""

    run_name: str
    row: dict[str, Any]
    tokens: tuple[InspectedToken, ...]
    answer: str | None
    group: tuple[tuple[str, float | None], ...]
    batch: TrainedBatch | None
    max_staleness: int


def inspect_trajectory(run: Run, identifier: str, *, at: int | None = None) -> Inspected:
    """Read one trajectory and, if a step trained it, that step's batch.

    Raises:
        RunError: there is no such trajectory.
    """
    recipe = load_recipe(run.layout.config)
    max_staleness = recipe.controller.max_staleness
    with closing(run.database(at=at)) as database:
        found = read_rows(database, [identifier]).to_pylist()
        row = found[0]
        if row["trajectory_id"] is None:
            raise RunError(f"{run.layout.name} has no trajectory {identifier!r}")
        group = database.sql(
            "SELECT trajectory_id, reward FROM trajectories WHERE group_id = ? ORDER BY 1",
            params=[row["group_id"]],
        ).fetchall()
        answers = database.sql(
            "SELECT answer FROM prompts WHERE prompt_id = ? LIMIT 1", params=[row["prompt_id"]]
        ).fetchall()
    tokenizer = Tokenizer.from_file(str(run.layout.model / "tokenizer.json"))
    return Inspected(
        run_name=run.layout.name,
        row=row,
        tokens=_tokens(row, token_texts(tokenizer, row["output_tokens"]), max_staleness),
        answer=answers[0][0] if answers else None,
        group=tuple(group),
        batch=_batch(run, row, recipe.algorithm, max_staleness),
        max_staleness=max_staleness,
    )


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a part of a character comes with its last token."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens]


def _tokens(
    row: dict[str, Any], texts: Sequence[str], max_staleness: int
) -> tuple[InspectedToken, ...]:
    columns = ("output_tokens", "token_versions", "behavior_logprobs", "loss_mask")
    parent = row["policy_version"] if row["status"] == "trained" else None
    tokens = []
    for text, token, version, logprob, chosen in zip(
        texts, *(row[name] for name in columns), strict=True
    ):
        staleness = None if parent is None else parent - version
        trained = None if staleness is None else chosen and staleness <= max_staleness
        tokens.append(InspectedToken(text, token, version, logprob, staleness, trained, chosen))
    return tuple(tokens)


def _batch(
    run: Run, row: dict[str, Any], algorithm: AlgorithmSettings, max_staleness: int
) -> TrainedBatch | None:
    """Compute the advantages of the step that trained the row, as the trainer did."""
    if row["status"] != "trained":
        return None
    from areal_flow.trainer.sequences import sequences_from_rows
    from areal_flow.trainer.step import compute_advantages

    step = run.steps(
        "arrow", columns=["trajectory_ids", "committed_at"], where=f"step = {row['step']}"
    ).to_pylist()[0]
    identifiers = step["trajectory_ids"]
    read = TrainingRows(run.layout.trajectories, run.layout.writers)
    sequences = sequences_from_rows(
        read(identifiers), policy_version=row["policy_version"], max_staleness=max_staleness
    )
    advantages = compute_advantages(sequences, algorithm)
    return TrainedBatch(
        advantage=advantages[identifiers.index(row["trajectory_id"])],
        advantage_rule=algorithm.advantage,
        num_trajectories=len(identifiers),
        committed_at=step["committed_at"],
    )
