"""On-policy distillation: its gradient by brute force, and a student that comes closer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.algorithms.registry import M2PO, DecoupledPPO
from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, ModelError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.log.inputs import Verifier, check_inputs, record_inputs, reference_directory
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.sequences import TrainingSequence
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from pipelines.jobs.built_in import reference_model
from tests.policies import served_weights, small_policy, write_model_directory
from tests.unit.test_losses import inputs

DISTILLATION: dict[str, Any] = {
    "advantage": "none",
    "reference": "teacher",
    "kl_coefficient": 1.0,
    "kl_estimator": "k1",
    "kl_in": "advantage",
}
LENGTH = 6


def test_token_advantages_come_from_the_teacher_alone() -> None:
    """With u_t = 1 the gradient of the loss is -(log pi_teacher - log pi), token by token."""
    logprobs, teacher = [-1.0, -0.5, -2.0], [-0.4, -1.5, -2.5]
    given = inputs(logprobs, logprobs, logprobs)
    reference_T = torch.tensor(teacher, dtype=torch.float64)
    loss = DecoupledPPO(**DISTILLATION).loss(replace(given, reference_logprobs_T=reference_T))
    only_teacher = loss.losses_T + given.advantages_T  # of rewards, which `advantages` gives as 0
    expected = [
        logprob - teacher_logprob
        for logprob, teacher_logprob in zip(logprobs, teacher, strict=True)
    ]
    assert only_teacher.tolist() == pytest.approx(expected)
    loss.losses_T.sum().backward()
    assert given.logprobs_T.grad is not None
    both = [e - float(a) for e, a in zip(expected, given.advantages_T, strict=True)]
    assert given.logprobs_T.grad.tolist() == pytest.approx(both)
    assert loss.metrics["kl_policy_reference"].value == pytest.approx(sum(expected) / 3)


@torch.no_grad()
def sampled(policy: Any, num: int, *, seed: int) -> list[TrainingSequence]:
    """Completions that a policy draws, by its own forward pass."""
    generator = torch.Generator().manual_seed(seed)
    policy.set_attn_implementation("eager")
    tokens = torch.randint(1, 13, (num, 2), generator=generator)
    columns = []
    for _ in range(LENGTH):
        logprobs = policy(input_ids=tokens).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
        columns.append(logprobs.gather(1, chosen)[:, 0])
        tokens = torch.cat([tokens, chosen], dim=1)
    behavior = torch.stack(columns, dim=1).numpy()
    rows = tokens.numpy().astype(np.int32)
    trained = np.ones(LENGTH, np.bool_)
    return [
        TrainingSequence(row[:2], row[2:], logprobs, trained, reward=0.0, group=index)
        for index, (row, logprobs) in enumerate(zip(rows, behavior, strict=True))
    ]


def test_student_comes_closer_to_its_teacher() -> None:
    student = small_policy(seed=0)
    backend = TrainerBackend(student, TrainerSettings(learning_rate=3e-3))
    backend.hold_reference(small_policy(seed=1))
    how = StepSettings(DecoupledPPO(num_minibatches=1, **DISTILLATION), temperature=1.0, seed=0)
    divergences = []
    for step in range(1, 31):
        current = small_policy()
        current.load_state_dict(served_weights(backend))
        numbers = train_step(backend, sampled(current, 32, seed=step), step=step, settings=how)
        divergences.append(numbers.metrics["kl_policy_reference"].value)
    assert np.mean(divergences[-5:]) < 0.6 * np.mean(divergences[:5])


def test_teacher_is_identified_by_its_content(tmp_path: Path) -> None:
    layout, teacher = RunLayout(tmp_path / "run"), write_model_directory(tmp_path / "teacher")
    write_model_directory(layout.model)
    table = {"algorithm": {**DISTILLATION, "reference": str(teacher)}}
    recipe = build_recipe(table, source="test")
    reference = reference_model(recipe, layout)
    record_inputs(layout, recipe, verifier=Verifier(), model=layout.model, reference=reference)
    assert reference_directory(layout) == teacher
    assert check_inputs(layout, Verifier(), accept_verifier=False) == []
    (teacher / "model.safetensors").write_bytes(b"another")
    with pytest.raises(RunError, match=r"teacher/model\.safetensors: expected the content"):
        check_inputs(layout, Verifier(), accept_verifier=False)
    with pytest.raises(RunError, match="the reference of run run changed, restore it"):
        reference_directory(layout)


def test_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    layout, teacher = RunLayout(tmp_path / "run"), write_model_directory(tmp_path / "teacher")
    write_model_directory(layout.model)
    file = layout.model / "tokenizer.json"
    file.write_text(file.read_text().replace("<eos>", "<end>"))
    table = {"algorithm": {**DISTILLATION, "reference": str(teacher)}}
    with pytest.raises(ModelError, match="expected the tokens of model 'tiny', found others"):
        reference_model(build_recipe(table, source="test"), layout)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kl_coefficient": 0.0}, "is compared with nothing"),
        ({"reference": ""}, "leaves nothing to learn without a teacher"),
        ({"group_filter": "mixed_rewards"}, "are of rewards"),
        ({"kl_in": "loss"}, "'k1' as a loss has a gradient that is 0 on average"),
        ({"name": M2PO.model_fields["name"].default}, "no sign to choose its tokens by"),
    ],
)
def test_distillation_that_makes_no_sense_is_refused(settings: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_recipe({"algorithm": {**DISTILLATION, **settings}}, source="test")
