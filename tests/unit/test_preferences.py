"""Preferences: golden losses, pairs in one micro-batch, scores as transformers reads them."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal_flow.algorithms.protocol import LossInputs, MinibatchSize, PolicyLoss
from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, ModelError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.policy.models.reward_model import describe_reward_model
from areal_flow.training.sequences import plan_micro_batches
from areal_flow.training.settings import SftSettings, TrainerSettings
from areal_flow.training.sft import BY_SEQUENCE, SftTrainer
from areal_flow.training.supervised import dpo_loss, reward_model_loss
from pipelines.jobs.prepare import prepare_run
from tests.policies import completion_rows, served_weights, small_policy, write_model_directory
from tests.reward_models import load_reward_model

ROWS = completion_rows(6, num_completions=2)
LENGTHS = (3, 1, 2, 4)
"""Of two pairs' chosen and rejected completions."""


def inputs_of(logprobs_T: torch.Tensor, reference_T: torch.Tensor) -> LossInputs:
    sequence_T = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    return LossInputs(
        logprobs_T, logprobs_T, reference_T, torch.zeros(10), sequence_T, torch.zeros(10), 4
    )


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)


def aggregated(loss: PolicyLoss, inputs: LossInputs) -> torch.Tensor:
    sequence_T, num_sequences = inputs.sequence_T, inputs.num_sequences
    size = MinibatchSize(10, 4)
    return BY_SEQUENCE.aggregate(loss.losses_T, sequence_T, size, num_sequences=num_sequences)


def by_hand(rewards: list[float], smoothing: float) -> float:
    """Mean over pairs of the smoothed negative log-likelihood, in Python's floats."""
    losses = []
    for chosen, rejected in zip(rewards[0::2], rewards[1::2], strict=True):
        right = 1 / (1 + math.exp(rejected - chosen))
        losses.append(-(1 - smoothing) * math.log(right) - smoothing * math.log(1 - right))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_loss_is_that_of_the_paper(smoothing: float) -> None:
    logprobs_T, reference_T = drawn()
    sums = [
        0.3 * sum(a - b for a, b in zip(p, r, strict=True))
        for p, r in zip(
            torch.split(logprobs_T, LENGTHS), torch.split(reference_T, LENGTHS), strict=True
        )
    ]
    inputs = inputs_of(logprobs_T, reference_T)
    loss = dpo_loss(inputs, SftSettings(objective="dpo", beta=0.3, label_smoothing=smoothing))
    rewards = [float(value) for value in sums]
    assert float(aggregated(loss, inputs)) == pytest.approx(by_hand(rewards, smoothing), abs=1e-12)
    margins = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    assert loss.metrics["pair_margin"].value == pytest.approx(sum(margins) / 2)
    assert loss.metrics["pair_accuracy"].value == sum(m > 0 for m in margins) / 2


def test_dpo_loss_has_golden_numbers() -> None:
    """Chosen -1 against -2 of the reference, rejected -3 against -1: h = 0.5 (1 + 2) = 1.5."""
    sequence_T = torch.tensor([0, 0, 1])
    policy_T = torch.tensor([-0.25, -0.75, -3.0], dtype=torch.float64)
    reference_T = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    inputs = LossInputs(policy_T, policy_T, reference_T, policy_T, sequence_T, sequence_T, 2)
    loss = dpo_loss(inputs, SftSettings(objective="dpo", beta=0.5, label_smoothing=0.0))
    assert loss.losses_T.tolist() == pytest.approx([0.2014132779827524] * 3, abs=1e-12)
    smoothed = dpo_loss(inputs, SftSettings(objective="dpo", beta=0.5, label_smoothing=0.1))
    assert float(smoothed.losses_T[0]) == pytest.approx(0.3514132779827524, abs=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_reward_model_loss_reads_the_score_after_each_last_token(smoothing: float) -> None:
    scores_T, _ = drawn()
    inputs = inputs_of(scores_T, scores_T)
    loss = reward_model_loss(
        inputs, SftSettings(objective="reward_model", label_smoothing=smoothing)
    )
    last = [float(scores_T[at]) for at in (2, 3, 5, 9)]
    assert float(aggregated(loss, inputs)) == pytest.approx(by_hand(last, smoothing), abs=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    logprobs_T, reference_T = (tensor.requires_grad_() for tensor in drawn())

    def dpo(logprobs_T: torch.Tensor) -> torch.Tensor:
        inputs = inputs_of(logprobs_T, reference_T)
        return aggregated(
            dpo_loss(inputs, SftSettings(objective="dpo", beta=0.3, label_smoothing=0.1)), inputs
        )

    def scored(scores_T: torch.Tensor) -> torch.Tensor:
        inputs = inputs_of(scores_T, scores_T.detach())
        return aggregated(
            reward_model_loss(inputs, SftSettings(objective="reward_model", label_smoothing=0.1)),
            inputs,
        )

    assert torch.autograd.gradcheck(dpo, (logprobs_T,))
    assert torch.autograd.gradcheck(scored, (logprobs_T,))


def trainer(policy: Any, objective: Any, *, room: int = 64, **settings: Any) -> SftTrainer:
    chosen = {"num_steps": 4, "batch_size": 4, "learning_rate": 1e-2, "shuffle": False, **settings}
    return SftTrainer(
        policy,
        ROWS,
        SftSettings(objective=objective, num_warmup_steps=0, **chosen),
        TrainerSettings(tokens_per_micro_batch=room),
        seed=3,
    )


def logprob_sums(policy: Any, row: int) -> list[float]:
    """Of a row's completions, through the model's own forward pass."""
    policy.set_attn_implementation("eager")
    sums = []
    for sequence in ROWS.sequences(row):
        tokens = np.concatenate([sequence.prompt_tokens, sequence.output_tokens])
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor(tokens[None])).logits[0].double()
        chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:, None]).long())
        sums.append(float(chosen[len(sequence.prompt_tokens) - 1 :].sum()))
    return sums


@pytest.mark.parametrize("room", [24, 200])
def test_dpo_step_has_the_loss_of_each_pair_alone_against_the_first_policy(room: int) -> None:
    dpo_trainer = trainer(small_policy(), "dpo", room=room, beta=0.2)
    assert dpo_trainer.take_step() == pytest.approx(math.log(2), abs=1e-5)
    now = small_policy(seed=1)
    now.load_state_dict(served_weights(dpo_trainer.backend))
    rewards = []
    for row in (4, 5, 0, 1):  # what the second step trains
        pairs = zip(logprob_sums(now, row), logprob_sums(small_policy(), row), strict=True)
        rewards += [0.2 * (policy - reference) for policy, reference in pairs]
    assert dpo_trainer.take_step() == pytest.approx(by_hand(rewards, 0.0), abs=2e-5)


def test_pairs_are_never_split_between_micro_batches() -> None:
    dpo_trainer = trainer(small_policy(), "dpo", room=24)
    sequences = dpo_trainer._sequences(dpo_trainer._rows_of(0))
    ((planned,),) = plan_micro_batches(
        sequences, step=0, settings=dpo_trainer._step_settings, max_tokens=24
    )
    assert len(planned) > 1
    for micro in planned:
        assert [index % 2 for index in micro] == [0, 1] * (len(micro) // 2)
        assert [index + 1 for index in micro[0::2]] == micro[1::2]
    assert sorted(chain.from_iterable(planned)) == [*range(8)]


def test_dpo_learns_and_measures_held_out_pairs_at_checkpoints() -> None:
    dpo_trainer = trainer(
        small_policy(), "dpo", num_steps=12, num_held_out=2, checkpoint_every_steps=5
    )
    for _ in range(12):
        dpo_trainer.take_step()
    assert dpo_trainer.metrics[-1]["loss"] < 0.3 < dpo_trainer.metrics[0]["loss"]
    assert dpo_trainer.metrics[-1]["pair_accuracy"] == 1.0
    measured = [row["step"] for row in dpo_trainer.metrics if "held_out_pair_accuracy" in row]
    assert measured == [5, 10, 12]
    assert {*dpo_trainer._rows_of(0), *dpo_trainer._rows_of(1)} == {0, 1, 2, 3}


def reward_model(root: Path) -> Any:
    policy, description = write_model_directory(root / "policy"), root / "described"
    write_model_directory(description)
    (description / "model.safetensors").unlink()
    describe_reward_model(description, pad_token_id=0)
    return load_reward_model(policy, description)


def test_reward_model_is_trained_at_the_scores_that_transformers_reads(tmp_path: Path) -> None:
    """Through the saved checkpoint and the model's own forward pass over padded rows."""
    model_trainer = trainer(reward_model(tmp_path), "reward_model", learning_rate=1e-3)
    model_trainer.take_step()
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    (tmp_path / "described").rename(layout.model)
    path = model_trainer.save(layout, Writer(Path("nobody"), 1))
    saved = AutoModelForSequenceClassification.from_pretrained(path)
    assert saved.config.num_labels == 1
    scores = []
    for row in (4, 5, 0, 1):
        texts = [
            np.concatenate([s.prompt_tokens, s.output_tokens])
            for s in model_trainer.rows.sequences(row)
        ]
        padded = np.zeros((2, max(map(len, texts))), np.int64)
        for at, text in enumerate(texts):
            padded[at, : len(text)] = text
        with torch.no_grad():
            output = saved(torch.tensor(padded), attention_mask=torch.tensor(padded != 0))
        scores += output.logits[:, 0].tolist()
    assert model_trainer.take_step() == pytest.approx(by_hand(scores, 0.0), abs=1e-5)


def test_architecture_without_a_reward_model_is_refused(tmp_path: Path) -> None:
    write_model_directory(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text('{"model_type": "bert", "num_labels": 2}')
    with pytest.raises(ModelError, match="can make a reward model of, found 'bert'"):
        describe_reward_model(tmp_path / "m", pad_token_id=0)


def test_settings_that_contradict_the_objective_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.label_smoothing \(0\.1\) is of pairs"):
        build_recipe({"sft": {"label_smoothing": 0.1}}, source="test")
    recipe = build_recipe({"sft": {"objective": "reward_model", "num_steps": 1}}, source="test")
    with pytest.raises(ConfigError, match="makes no policy to train"):
        prepare_run(RunLayout(tmp_path), recipe)
