"""An evaluation is a rollout of held-out prompts: one answer a prompt, whatever the workflow."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from areal_flow.config import EvaluationSettings, build_recipe
from areal_flow.core.errors import (
    ArealFlowError,
    ConfigError,
    EngineError,
    EpisodeError,
    RewardError,
    StorageError,
    WeightsError,
)
from areal_flow.core.pass_rates import tabulate
from areal_flow.core.types import EngineStats, Episode, Prompt, Score
from areal_flow.flow.answers import answer_held_out
from areal_flow.log.codec import rollout_rows, scored_table
from areal_flow.log.ledger_row import member_seed
from areal_flow.rollout.workflows.episode import (
    EpisodeContext,
    TrajectoryDraft,
    Workflow,
    run_group,
)
from areal_flow.rollout.workflows.turns import MultiTurn, SingleTurn
from pipelines.jobs.evaluate import held_out_sets
from schemas import EvaluationRow, arrow_schema, validate
from tests.episodes import PROMPT, FakeServices

PROMPTS = [replace(PROMPT, prompt_id=f"p{index}", difficulty=1 + index % 3) for index in range(150)]


class Answering:
    """Answers without a cluster."""

    def __init__(self, workflow: Workflow, **services: Any) -> None:
        self.workflow = workflow
        self.services = services
        self.episodes: list[Sequence[Episode]] = []

    async def answer(self, episodes: Sequence[Episode], *, name: str) -> pa.Table:
        self.episodes.append(episodes)
        services = FakeServices(max_model_len=200, **self.services)
        groups = [await run_group(self.workflow, episode, services) for episode in episodes]
        table, notes = rollout_rows(
            list(zip(episodes, groups, strict=True)),
            generator="g",
            started_at=datetime.now(UTC),
            engine_stats=EngineStats(),
        )
        scores = [
            score or Score(float(len(tokens) % 2), "incorrect")
            for score, tokens in zip(notes.scores, table["output_tokens"].to_pylist(), strict=True)
        ]
        return scored_table(table, scores, verifier="v@0")


def answers_of(
    answering: Answering,
    *,
    seed: int = 0,
    prompts: Sequence[Prompt] = tuple(PROMPTS),
    **settings: Any,
) -> list[dict[str, Any]]:
    return asyncio.run(
        answer_held_out(
            answering.answer,
            prompts,
            settings=EvaluationSettings(**settings),
            name="before",
            seed=seed,
            writer_epoch=3,
            decode=lambda lists: [" ".join(map(str, tokens)) for tokens in lists],
        )
    )


@pytest.mark.parametrize("workflow", [SingleTurn(), MultiTurn(num_branches=3)])
def test_each_prompt_has_one_answer_in_the_order_of_the_request(workflow: Workflow) -> None:
    answering = Answering(workflow)
    rows = answers_of(answering)
    assert [row["prompt_id"] for row in rows] == [prompt.prompt_id for prompt in PROMPTS]
    assert [len(episodes) for episodes in answering.episodes] == [64, 64, 22]
    assert all(len(row["completion"].split()) == row["num_output_tokens"] for row in rows)
    assert {(row["evaluation"], row["writer_epoch"]) for row in rows} == {("before", 3)}
    for row in rows:
        assert sum(span["length"] for span in row["version_spans"]) == row["num_output_tokens"]
    assert {row["verifier"] for row in rows} == {"v@0"}
    assert {row["evaluated_at"].tzinfo for row in rows} == {UTC}
    validate(pa.Table.from_pylist(rows, schema=arrow_schema(EvaluationRow)), EvaluationRow)


def test_seeds_are_the_runs_and_none_of_trainings() -> None:
    answering = Answering(SingleTurn())
    answers_of(answering, seed=5)
    seeds = [episode.seeds for episodes in answering.episodes for episode in episodes]
    assert seeds == [(member_seed(5, index, -1),) for index in range(150)]


class FailsAtTimes(SingleTurn):
    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        if prompt.difficulty == 2:
            raise ValueError("no tool for this")
        return await super().run(prompt, context)


def test_failed_answers_count_as_not_passed() -> None:
    rows = answers_of(Answering(FailsAtTimes()))
    failed = [row for row in rows if row["finish_reason"] == "error"]
    assert len(rows) == 150
    assert [row["difficulty"] for row in failed] == [2] * 50
    assert all("no tool for this" in json.loads(row["reward_detail"])["error"] for row in failed)
    validate(pa.Table.from_pylist(rows, schema=arrow_schema(EvaluationRow)), EvaluationRow)
    table = tabulate(rows, threshold=0.5)
    assert table.overall.passed.n == 150
    assert table.by_difficulty[2].passed.pass_rate == 0.0
    assert table.by_difficulty[1].passed.pass_rate > 0.0


class FailsAlone(SingleTurn):
    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        if prompt.prompt_id == "p64":
            raise ValueError("no tool for this")
        return await super().run(prompt, context)


def test_answer_that_failed_in_its_own_task_counts_as_not_passed_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = answers_of(Answering(FailsAlone()), prompts=PROMPTS[:65])
    assert [row["prompt_id"] for row in rows if row["reward"] is None] == ["p64"]
    assert "no tool for this" in json.loads(rows[64]["reward_detail"])["error"]
    validate(pa.Table.from_pylist(rows, schema=arrow_schema(EvaluationRow)), EvaluationRow)
    assert "before: 1 of 65 answers have no reward" in caplog.text
    assert "no tool for this" in caplog.text
    with pytest.raises(EpisodeError, match="no tool for this"):
        answers_of(Answering(FailsAlone()), prompts=PROMPTS[64:65])


@pytest.mark.parametrize("kind", [EngineError, WeightsError, RewardError, StorageError])
def test_failure_that_is_no_fault_of_an_answer_is_not_recorded_as_one(
    kind: type[ArealFlowError],
) -> None:
    class Lost(Answering):
        async def answer(self, episodes: Sequence[Episode], *, name: str) -> pa.Table:
            if episodes[0].submission_index:
                raise kind("each worker died")
            return await super().answer(episodes, name=name)

    with pytest.raises(kind, match="each worker died"):
        answers_of(Lost(SingleTurn()))


def test_answers_are_decoded_beside_the_event_loop() -> None:
    threads: list[int] = []

    def decode(lists: Sequence[Any]) -> list[str]:
        threads.append(threading.get_ident())
        return [""] * len(lists)

    answering = Answering(SingleTurn())
    made = {"name": "before", "seed": 0, "writer_epoch": 3, "decode": decode}
    asyncio.run(
        answer_held_out(answering.answer, PROMPTS[:2], settings=EvaluationSettings(), **made)
    )
    (thread,) = threads
    assert thread != threading.get_ident()


def test_evaluation_beside_training_says_which_versions_answered() -> None:
    rows = answers_of(Answering(SingleTurn(), tokens_per_version=30))
    assert {row["policy_version"] for row in rows} == {0}, "no token is older"
    versions = [[span["version"] for span in row["version_spans"]] for row in rows]
    assert versions[0] == [0]
    assert any(len(answer_versions) > 1 for answer_versions in versions), (
        "newer weights arrived in mid-answer"
    )
    assert versions[63][-1] > 0


def test_several_samples_are_members_with_seeds_of_their_own() -> None:
    answering = Answering(SingleTurn())
    rows = answers_of(answering, num_samples=3)
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [
        (prompt.prompt_id, sample) for prompt in PROMPTS for sample in range(3)
    ]
    episodes = [episode for request in answering.episodes for episode in request]
    assert [episode.seeds for episode in episodes] == [
        tuple(member_seed(0, index, -1 - sample) for sample in range(3)) for index in range(150)
    ]
    assert max(len(request) for request in answering.episodes) == 64 // 3
    first = [row for row in rows if row["sample"] == 0]
    assert [row["completion"] for row in first] == [
        row["completion"] for row in answers_of(Answering(SingleTurn()))
    ]
    validate(pa.Table.from_pylist(rows, schema=arrow_schema(EvaluationRow)), EvaluationRow)


def test_held_out_set_may_have_its_own_number_of_samples() -> None:
    """It does not change the seeds of a prompt."""
    sources = ["", "code", "math", "code"]
    prompts = [replace(p, source=source) for p, source in zip(PROMPTS, sources, strict=False)]
    sets = [{"name": "code", "path": "c.jsonl", "num_samples": 40}, {"name": "math", "path": "m"}]
    answering = Answering(SingleTurn())
    rows = answers_of(answering, prompts=prompts, num_samples=2, held_out=sets)
    assert [*Counter((row["held_out"], row["prompt_id"]) for row in rows).items()] == [
        (("held_out", "p0"), 2),
        (("code", "p1"), 40),
        (("math", "p2"), 2),
        (("code", "p3"), 40),
    ]
    assert [len(episodes) for episodes in answering.episodes] == [3, 1], "64 answers at most"
    seeds = [episode.seeds for episodes in answering.episodes for episode in episodes]
    assert seeds[3] == tuple(member_seed(0, 3, -1 - sample) for sample in range(40))
    validate(pa.Table.from_pylist(rows, schema=arrow_schema(EvaluationRow)), EvaluationRow)


def test_temperature_is_that_of_generation_unless_the_evaluation_has_its_own() -> None:
    def completions(**settings: Any) -> set[str]:
        return {row["completion"] for row in answers_of(Answering(SingleTurn()), **settings)}

    assert completions() == completions(temperature=1.0) != completions(temperature=0.7)
    assert len(completions(temperature=0.0)) == 1, "one question, the likeliest answer"


@pytest.mark.parametrize(
    "own", [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}, {"repetition_penalty": 3.0}]
)
def test_held_out_answers_are_sampled_as_the_evaluation_says(own: dict[str, float]) -> None:
    answering = Answering(SingleTurn())
    answers = answers_of(answering, **own)
    assert answers != answers_of(Answering(SingleTurn()))
    (episode, *_) = answering.episodes[0]
    assert own.items() <= episode.sampling.items()


def test_held_out_answers_have_their_own_minimum_of_tokens() -> None:
    rows = answers_of(Answering(SingleTurn()), min_new_tokens=5)
    assert min(row["num_output_tokens"] for row in rows) > 5
    assert min(row["num_output_tokens"] for row in answers_of(Answering(SingleTurn()))) < 5


def test_several_samples_of_the_likeliest_answer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.num_samples \(2\) must be 1"):
        build_recipe({"evaluation": {"temperature": 0.0, "num_samples": 2}}, source="test")
    held_out_set = {"name": "math", "path": "m.jsonl", "num_samples": 4}
    with pytest.raises(ConfigError, match=r"held_out 'math': num_samples \(4\) must be 1"):
        build_recipe(
            {"evaluation": {"temperature": 0.0, "held_out": [held_out_set]}}, source="test"
        )


def test_held_out_set_has_a_name_of_its_own() -> None:
    held_out_set = {"name": "math", "path": "m.jsonl"}
    with pytest.raises(ConfigError, match="a name stands twice in"):
        build_recipe({"evaluation": {"held_out": [held_out_set, held_out_set]}}, source="test")
    sets = held_out_sets(["d/math.jsonl", "code=d/rows.parquet"])
    assert {name: Path(path).name for name, path in sets.items()} == {
        "math": "math.jsonl",
        "code": "rows.parquet",
    }
    with pytest.raises(ConfigError, match="--data: expected another name for each file"):
        held_out_sets(["a/math.jsonl", "b/math.jsonl"])
