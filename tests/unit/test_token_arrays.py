"""Tokens on their way from a completion to tensors: always arrays, without copies."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import Completion, EngineStats, VersionSpan
from areal_flow.log import trajectories
from areal_flow.log.codec import TRAJECTORIES, array_rows, rollout_rows, row_arrays
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.log.trajectories import TrainingRows
from areal_flow.policy.tokenizer import directory
from areal_flow.policy.tokenizer.directory import texts_of
from areal_flow.rollout.workflows.episode import RolledOutGroup, TrajectoryDraft
from areal_flow.training.sequences import MicroBatches, pack_sequences
from tests.episodes import PROMPT, episode_of
from tests.rows import commit, written_group
from tests.unit.test_trainer import make_sequences

LENGTHS = (5, 1, 300, 2)


def drafts() -> list[TrajectoryDraft]:
    """Return drafts of several lengths, each with tokens of its environment in between."""
    random, made = np.random.default_rng(0), []
    for length in LENGTHS:
        draft = TrajectoryDraft(PROMPT.tokens)
        for version in (3, 7):
            completion = Completion(
                random.integers(0, 50_000, length, dtype=np.int32),
                -random.random(length, dtype=np.float32),
                (VersionSpan(version, length),),
                "stop",
            )
            draft = draft.with_completion(completion).with_environment([9, 8])
        made.append(draft)
    return made


def table_of(made: list[TrajectoryDraft]) -> pa.Table:
    group = RolledOutGroup(tuple(enumerate(made)))
    started = datetime.now(UTC)
    table, _ = rollout_rows(
        [(episode_of(), group)], generator="g", started_at=started, engine_stats=EngineStats()
    )
    return table


def test_rows_hold_the_drafts_to_the_bit() -> None:
    made = drafts()
    table = table_of(made)
    chunked = pa.concat_tables([table.slice(2, 2), table.slice(0, 1), table.slice(0, 0)])
    for rows, expected in (
        (array_rows(table), made),
        (array_rows(chunked), [made[2], made[3], made[0]]),
    ):
        for row, draft in zip(rows, expected, strict=True):
            for name in ("prompt_tokens", "output_tokens", "behavior_logprobs", "loss_mask"):
                assert row[name].dtype == getattr(draft, name).dtype
                assert row[name].tolist() == getattr(draft, name).tolist()
            assert row["version_spans"] == draft.version_spans


def test_rows_hold_the_parts_of_their_rewards_as_the_log_does() -> None:
    """Not as version spans, which are also lists of pairs."""
    parts = [[{"name": "length", "reward": 0.5}, {"name": "numeric", "reward": None}], []]
    field = TRAJECTORIES.field("reward_parts")
    rows = array_rows(pa.table({"reward_parts": pa.array(parts, field.type)}))
    assert [row["reward_parts"] for row in rows] == parts


def test_rows_are_slices_of_their_table() -> None:
    table = table_of(drafts())
    values = table["output_tokens"].chunk(0).values.to_numpy()
    assert all(np.shares_memory(row["output_tokens"], values) for row in array_rows(table))


def test_first_completion_of_a_draft_is_not_copied() -> None:
    tokens = np.arange(4, dtype=np.int32)
    completion = Completion(tokens, np.zeros(4, np.float32), (VersionSpan(0, 4),), "stop")
    draft = TrajectoryDraft(PROMPT.tokens).with_completion(completion)
    assert draft.output_tokens is tokens


def test_micro_batch_is_the_same_whenever_it_is_laid_out() -> None:
    sequences = make_sequences(6)
    proximal = [torch.zeros(1), torch.ones(1)]
    batches = MicroBatches(sequences, [[4, 0], [2]])
    with_proximal = replace(batches, proximal_logprobs=proximal)
    assert len(batches) == len(list(batches)) == 2
    for micro_batch in (batches[0], with_proximal[0], next(iter(batches))):
        expected = pack_sequences([sequences[4], sequences[0]])
        assert torch.equal(micro_batch.input_ids_1T, expected.input_ids_1T)
        assert torch.equal(micro_batch.targets_M, expected.targets_M)
    assert batches[1].proximal_logprobs_M is None
    assert with_proximal[1].proximal_logprobs_M is proximal[1]


def test_rows_are_read_a_bounded_number_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    path = layout.trajectories
    create_logs(layout)
    receipts = [written_group(path, index, length=50) for index in range(8)]
    commit(RunLog(layout, Writer(layout.writers, 1)), *receipts)
    ids = [trajectory.trajectory_id for receipt in receipts for trajectory in receipt.trajectories]
    all_rows = TrainingRows(layout)(ids)
    monkeypatch.setattr(trajectories, "BYTES_AT_ONCE", 1000)
    read = TrainingRows(layout)
    for _ in range(2):
        rows = read(ids)
        assert [row["content_hash"] for row in rows] == [row["content_hash"] for row in all_rows]
    assert read._rows_at_once == 1


class CountingTokenizer:
    """Decodes to numbers, and counts how many tokens it is given at a time."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def decode_batch(self, lists: list[list[int]]) -> list[str]:
        assert all(type(token) is int for tokens in lists for token in tokens)
        self.num_tokens.append(sum(map(len, lists)))
        return [" ".join(map(str, tokens)) for tokens in lists]


def test_texts_are_decoded_a_bounded_number_of_tokens_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "TOKENS_AT_ONCE", 10)
    tokenizer: Any = CountingTokenizer()
    tokens = [*row_arrays(pa.chunked_array([[[1, 2], [], [3] * 9], [[4] * 25, [5], [6] * 8]]))]
    assert texts_of(tokenizer, tokens) == [" ".join(map(str, row.tolist())) for row in tokens]
    assert sum(tokenizer.num_tokens) == 45
    assert max(tokenizer.num_tokens) <= 25 + 10
    assert texts_of(tokenizer, []) == []
