"""A trainer rank: repeats a computed answer, and refuses a step from other weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pytest

from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError, TrainerLost, TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.core.types import StepRequest, StepResult
from areal_flow.log.codec import TRAJECTORIES, array_rows
from areal_flow.log.database import connect, consumption_table
from areal_flow.log.ledger import STEPS
from areal_flow.log.ledger_row import Provenance, StepEntries, step_row
from areal_flow.policy.models.policy import policy_tensors
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.tracking.projection import step_metrics
from areal_flow.training import rank as trainer_rank
from areal_flow.training.metrics import batch_metrics
from areal_flow.training.rank import TrainerRank
from areal_flow.training.tensor_rows import whole_rows
from pipelines.console.summary import summarise
from schemas import StepRow, validate
from tests.policies import small_policy
from tests.rows import group_table

RECIPE: Recipe = build_recipe(
    {
        "algorithm": {"advantage": "batch_norm", "num_minibatches": 2},
        "controller": {"max_staleness": 2},
    },
    source="",
)


def rows(*indices: int) -> list[dict[str, Any]]:
    """Two groups of two completions; one token is masked, one in another row is too old."""
    group_rows = [row for index in indices for row in group_table(index, version=3).to_pylist()]
    group_rows[0]["loss_mask"] = [True, False, True]
    group_rows[1]["version_spans"] = [{"version": 1, "length": 1}, {"version": 2, "length": 2}]
    return group_rows


def rank(path: Path, **arguments: Any) -> TrainerRank:
    log = pa.Table.from_pylist(rows(0, 1), schema=TRAJECTORIES)
    stored = {row["trajectory_id"]: row for row in array_rows(log)}

    def read(identifiers: Sequence[str]) -> list[dict[str, Any]]:
        return [stored[identifier] for identifier in identifiers]

    made = TrainerRank(
        RunLayout(path), RECIPE.for_trainer(), channel=HashingWriter(), read_rows=read, **arguments
    )
    made.adopt(small_policy())
    made.stage_initial_policy()
    return made


def request(parent_hash: str, *, step: int = 5) -> StepRequest:
    identifiers = tuple(row["trajectory_id"] for row in rows(0, 1))
    return StepRequest(step, parent_hash, step - 1, identifiers, f"digest {step}", 2)


def parent_of(made: TrainerRank) -> str:
    return made.stage_initial_policy()[0].weights_hash


def test_repeated_request_is_answered_without_computing_again(tmp_path: Path) -> None:
    made = rank(tmp_path)
    repeated = request(parent_of(made))
    first = made.step(repeated)
    assert made.step(repeated) is first
    assert made.backend.fingerprint() == first.hashes.weights_hash
    with pytest.raises(TrainerLost, match="this rank holds"):
        made.step(request(repeated.parent_hash, step=6))
    assert made.step(request(first.hashes.weights_hash, step=6)).step == 6


class FailsInTheSecondUpdate:
    """A loss that raises once the first minibatch has changed the weights."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, inputs: LossInputs) -> PolicyLoss:
        self.num_calls += 1
        if self.num_calls == 2:
            raise TrainingError("the second update failed")
        return DecoupledPPO().loss(inputs)


def test_rank_whose_step_failed_has_no_policy_that_anybody_knows(tmp_path: Path) -> None:
    """Its weights have changed: under the parent's name they would train the next step wrongly."""
    made = rank(tmp_path, loss=FailsInTheSecondUpdate())
    failing = request(parent_of(made))
    made.require_policy()
    with pytest.raises(TrainingError, match="second update"):
        made.step(failing)
    with pytest.raises(TrainerLost, match="holds nothing"):
        made.require_policy()
    assert made.backend.fingerprint() != failing.parent_hash
    with pytest.raises(TrainerLost, match="this rank holds nothing"):
        made.step(failing)
    with pytest.raises(TrainerLost, match="this rank holds nothing"):
        made.snapshot(weights_hash=failing.parent_hash, next_submission_index=0)


def test_utilisation_counts_a_teacher_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"reference": "teacher", "kl_coefficient": 0.1, "num_minibatches": 2}
    monkeypatch.setattr(trainer_rank, "matrix_rate", lambda *_: 1.0)
    monkeypatch.setitem(globals(), "RECIPE", build_recipe({"algorithm": algorithm}, source=""))

    def flops(intermediate_size: int) -> float:
        config = deepcopy(small_policy().config)
        config.intermediate_size = intermediate_size
        teacher = type(small_policy())(config)
        held = teacher, whole_rows(policy_tensors(deepcopy(teacher)))
        monkeypatch.setattr(trainer_rank, "pretrained_policy", lambda _: held)
        made = rank(tmp_path, find_teacher=lambda: tmp_path)
        metrics = made.step(request(parent_of(made))).metrics
        return metrics.metrics["speed/model_flops_utilization"] * metrics.train_s

    same, wide = flops(96), flops(9600)
    assert wide > 5 * same


@pytest.fixture
def result(tmp_path: Path) -> StepResult:
    made = rank(tmp_path)
    return made.step(request(parent_of(made)))


def ledger_table(result: StepResult) -> pa.Table:
    row = step_row(
        request("parent"),
        result,
        entries=StepEntries(),
        watermark=4,
        next_submission_index=0,
        num_waiting_tokens=0,
        provenance=Provenance(1, "", ""),
        wait_s=0.0,
        step_s=0.0,
        num_generators=2,
    )
    return pa.Table.from_pylist([row], schema=STEPS)


def test_trainer_and_view_agree_on_trained_tokens_and_their_staleness(result: StepResult) -> None:
    """A masked token and one too old count neither as trained nor for staleness."""
    log = pa.Table.from_pylist(rows(0, 1), schema=TRAJECTORIES)
    steps = ledger_table(result)
    tables = {"stored": log, "steps": steps, "consumption": consumption_table(steps, log)}
    with closing(
        connect(tables, decode=lambda tokens: pa.array([""]), max_staleness=2)
    ) as connection:
        by_view = connection.sql(
            "SELECT sum(num_trained_tokens), sum(num_masked_tokens), "
            "sum(staleness * num_trained_tokens) / sum(num_trained_tokens), "
            "sum(importance_weight_mean * num_trained_tokens) / sum(num_trained_tokens), "
            "max(importance_weight_max) FROM trajectories"
        ).fetchall()[0]
    metrics = result.metrics
    assert (metrics.num_trained_tokens, metrics.num_masked_tokens) == by_view[:2] == (10, 2)
    shares = [metrics.metrics[f"masked_{reason}_fraction"] for reason in ("environment", "stale")]
    assert shares == pytest.approx([1 / 12, 1 / 12])
    assert sum(share > 0 for share in metrics.masked_fraction_by_decile) == 1
    summary = summarise({}, steps, num_generators=1)
    assert summary["masked_fraction"] == pytest.approx(1 / 11), "the environment's are not masked"
    # Versions at version 4: two tokens 1 old, two 2 old, six 1 old.
    assert metrics.staleness_mean == pytest.approx(by_view[2]) == pytest.approx(1.2)
    assert metrics.staleness_max == 2
    assert metrics.metrics["importance_weight_mean"] == pytest.approx(by_view[3])
    assert metrics.metrics["importance_weight_max"] == pytest.approx(by_view[4])
    by_age = [metrics.metrics[f"staleness/trained_tokens_{age}"] for age in (1, 2)]
    assert by_age == [8, 2]


def test_metrics_of_the_algorithm_go_through_the_ledger_to_the_tracker(result: StepResult) -> None:
    metrics = result.metrics.metrics
    of_batch = batch_metrics(rows(0, 1), pass_threshold=RECIPE.pass_threshold)
    assert of_batch.items() <= metrics.items()
    assert set(metrics).difference(of_batch) == {
        *("speed/model_flops_utilization", "speed/matrix_tflops"),
        *("staleness/trained_tokens_1", "staleness/trained_tokens_2"),
        *("entropy_mean", "skipped_updates_fraction"),
        *("clip_fraction", "clip_low_fraction", "clip_high_fraction"),
        *("ratio_mean", "ratio_max", "ratio_ess_fraction", "ratio_overflow_fraction"),
        *(f"importance_weight_{name}" for name in ("mean", "max", "ess_fraction")),
        *("importance_weight_masked_fraction", "kl_proximal_behavior", "kl_policy_proximal"),
        *("advantage_mean", "advantage_std"),
        *("masked_environment_fraction", "masked_stale_fraction"),
    }
    given = [row["reward"] for row in rows(0, 1)]
    assert metrics[PASS_RATE] == fmean(reward > RECIPE.pass_threshold for reward in given)
    table = validate(ledger_table(result), StepRow)
    (row,) = table.to_pylist(maps_as_pydicts="strict")
    assert row["metrics"] == metrics
    tracked = step_metrics(row)
    assert tracked["train/importance_weight_max"] == metrics["importance_weight_max"]
    assert tracked["train/loss"] == result.metrics.loss
    assert tracked["rollout/pass_rate"] == metrics[PASS_RATE]


def test_policy_whose_heads_do_not_split_among_ranks_is_refused(tmp_path: Path) -> None:
    recipe = build_recipe(
        {"trainer": {"parallel": {"context_ranks": 3}}, "cluster": {"num_trainers": 3}}, source=""
    )
    made = TrainerRank(
        RunLayout(tmp_path), recipe.for_trainer(), channel=HashingWriter(), read_rows=lambda _: []
    )
    with pytest.raises(ConfigError, match="policy's 2 attention heads"):
        made.adopt(small_policy())
