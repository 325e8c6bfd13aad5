"""The KL divergence over a reference's likeliest tokens and all others as one, by brute force."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_flow.algorithms.logprobs import bucket_logprobs
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.algorithms.registry import PPO
from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.models.policy import logits_at
from areal_flow.policy.settings import LoraSettings
from areal_flow.training import head
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.head import top_logprobs
from areal_flow.training.sequences import TrainingSequence, pack_sequences
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from tests.policies import served_weights, small_policy
from tests.unit.test_losses import inputs
from tests.unit.test_trainer import make_sequences

VOCABULARY, TEMPERATURE = 13, 0.7


def use_head_of(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute logits as that device does, five tokens at a time; attention as before."""
    kernels = SimpleNamespace(has_fused_kernels=lambda _: device == "gpu")
    monkeypatch.setattr(head, "segments", kernels)
    for name in ("AUTOGRAD_CHUNK_NUMBERS", "CHUNK_NUMBERS"):
        monkeypatch.setattr(head, name, 5 * VOCABULARY)


def brute_force(policy: list[float], reference: list[float], k: int) -> float:
    """Return the divergence of two lists of log-probabilities, by the reference's k largest."""
    ranked = sorted(range(len(policy)), key=lambda v: -reference[v])
    parts = [[v] for v in ranked[:k]] + [ranked[k:]]
    masses = [
        [sum(exp(logprobs[v]) for v in part) for part in parts] for logprobs in (policy, reference)
    ]
    return sum(p * log(p / q) for p, q in zip(*masses, strict=True))


def divergences(policy_TV: Tensor, reference_TV: Tensor, k: int) -> Tensor:
    top_Tk = reference_TV.topk(k).indices
    given = replace(
        inputs(),
        bucket_logprobs_TK=bucket_logprobs(policy_TV, top_Tk),
        reference_bucket_logprobs_TK=bucket_logprobs(reference_TV, top_Tk),
    )
    algorithm = PPO(reference_top_k=k, kl_coefficient=1.0)
    without = PPO().loss(inputs()).losses_T
    return algorithm.loss(given).losses_T - without


def drawn_logprobs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 3, 50, generator=generator, dtype=torch.float64) * 3
    policy_TV, reference_TV = drawn.log_softmax(-1)
    return policy_TV, reference_TV


@pytest.mark.parametrize("k", [1, 2, 7, 49])
def test_golden_divergences(k: int) -> None:
    policy_TV, reference_TV = drawn_logprobs()
    rows = zip(policy_TV.tolist(), reference_TV.tolist(), strict=True)
    expected = [brute_force(*row, k) for row in rows]
    assert divergences(policy_TV, reference_TV, k).tolist() == pytest.approx(expected, rel=1e-12)


def test_merged_tail_bounds_the_divergence_and_is_exact_for_all_but_one_token() -> None:
    policy_TV, reference_TV = drawn_logprobs()
    whole_T = (policy_TV.exp() * (policy_TV - reference_TV)).sum(1)
    last_T = torch.zeros(3)
    for k in (1, 2, 7, 30, 48, 49):
        divergence_T = divergences(policy_TV, reference_TV, k)
        top_Tk = reference_TV.topk(k).indices
        mass_T1, rest = bucket_logprobs(policy_TV, top_Tk)[:, -1:], []
        for of_TV in (policy_TV, reference_TV):
            others_TV = of_TV - bucket_logprobs(of_TV, top_Tk)[:, -1:]
            rest.append(others_TV.scatter(1, top_Tk, -1e9))
        left_T = mass_T1[:, 0].exp() * (rest[0].exp() * (rest[0] - rest[1])).sum(1)
        torch.testing.assert_close(divergence_T + left_T, whole_T)
        assert (divergence_T >= last_T - 1e-12).all()
        last_T = divergence_T
    torch.testing.assert_close(last_T, whole_T)


def test_tail_that_one_minus_the_rest_would_lose_in_float32_is_exact() -> None:
    """A confident teacher and an unsure student."""
    logits_TV = torch.zeros(2, 1, 1000)
    logits_TV[1, 0, 0], logits_TV[0, 0, 0] = 40.0, 9.0
    exact_TV = logits_TV.double().log_softmax(-1)
    logprobs_TV = logits_TV.log_softmax(-1)
    expected = brute_force(exact_TV[0, 0].tolist(), exact_TV[1, 0].tolist(), 1)
    top_Tk = logprobs_TV[1].topk(1).indices
    policy_TK, reference_TK = (bucket_logprobs(each, top_Tk) for each in logprobs_TV)
    assert reference_TK[0, 0] == 0, "1 - sum is 0"
    divergence = (policy_TK.exp() * (policy_TK - reference_TK)).sum()
    assert float(divergence) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("k", [1, 4, 12])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_linear_head_has_numbers_and_gradients_of_a_plain_softmax(
    k: int, rows: int, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the likely tokens is a target."""
    monkeypatch.setattr(head, "CHUNK_NUMBERS", rows * VOCABULARY)
    torch.manual_seed(0)
    drawn = ((7, 8), (VOCABULARY, 8), (VOCABULARY,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in drawn]
    hidden_MH, weight_VH, bias_V = leaves
    targets_M = torch.randint(VOCABULARY, (7,))
    top_Mk = torch.randn(7, VOCABULARY).scatter(1, targets_M[:, None], 0.5).topk(k).indices
    linear_head = head.LinearHead(
        weight_VH,
        bias_V,
        lambda logits: torch.tanh(logits / 2) * 2,
        TEMPERATURE,
        needs_entropy=with_entropy,
        entropy_has_gradient=with_entropy,
    )
    actual = head.linear_logprobs(hidden_MH, targets_M, linear_head, top_Mk)
    products_MV = hidden_MH @ weight_VH.T + bias_V
    logprobs_MV = (torch.tanh(products_MV / 2) * 2 / TEMPERATURE).log_softmax(1)
    probs_MV = logprobs_MV.exp()
    entropy_M = -(probs_MV * logprobs_MV).sum(1) if with_entropy else torch.zeros(7).double()
    others_M = 1 - probs_MV.gather(1, top_Mk).sum(1)
    expected = (
        logprobs_MV.gather(1, targets_M[:, None])[:, 0],
        entropy_M,
        torch.cat([logprobs_MV.gather(1, top_Mk), others_M.log()[:, None]], dim=1),
    )
    torch.testing.assert_close(actual, expected)
    weights = [torch.randn(each.shape, dtype=torch.float64) for each in expected]
    gradients, expected_gradients = (
        torch.autograd.grad(sum((e * w).sum() for e, w in zip(each, weights, strict=True)), leaves)
        for each in (actual, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("num_known", [None, 9])
@pytest.mark.parametrize("num_sequences", [0, 12])
def test_likely_tokens_are_those_of_all_logits(
    device: str, num_known: int | None, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_head_of(device, monkeypatch)
    policy, micro = small_policy(), pack_sequences(make_sequences(num_sequences))
    with torch.no_grad():
        logits_MV = logits_at(policy, micro.input_ids_1T, micro.layout, micro.predicting_M)
        options: dict[str, Any] = {"temperature": TEMPERATURE, "num_known": num_known}
        top_Mk, logprobs_MK = top_logprobs(policy, micro, top_k=4, **options)
        all_M, _ = top_logprobs(policy, micro, top_k=1000, **options)
    logprobs_MV = (logits_MV / TEMPERATURE).log_softmax(1)
    assert torch.equal(top_Mk, logits_MV[:, :num_known].topk(4).indices)
    expected_MK = bucket_logprobs(logprobs_MV, top_Mk)
    torch.testing.assert_close(logprobs_MK, expected_MK, atol=1e-5, rtol=1e-5)
    assert all_M.shape == (len(micro.targets_M), (num_known or VOCABULARY) - 1)


def whole_divergence(
    student: Any, teacher: Any, sequences: list[TrainingSequence]
) -> tuple[list[Tensor], float]:
    """Return what `gradients_of_step` does, by a plain softmax of all logits."""
    micro = pack_sequences(sequences)
    forward_inputs = micro.input_ids_1T, micro.layout, micro.predicting_M
    student_MV, teacher_MV = (
        (logits_at(each, *forward_inputs).double() / TEMPERATURE).log_softmax(1)
        for each in (student, teacher)
    )
    kl_M = (student_MV.exp() * (student_MV - teacher_MV.detach())).sum(1)
    kl_M.mean().backward()
    return [p.grad for p in student.parameters()], kl_M.mean().item()


DISTILLATION: dict[str, Any] = {
    "advantage": "none",
    "reference": "teacher",
    "kl_coefficient": 1.0,
    "num_minibatches": 1,
}


def gradients_of_step(
    student: Any, teacher: Any, sequences: list[TrainingSequence], k: int, **settings: Any
) -> tuple[list[Tensor], float]:
    """Return the gradients of one update, and its divergence."""
    trainer = TrainerSettings(max_grad_norm=1e9, **settings)
    backend = TrainerBackend(student, trainer)
    backend.hold_reference(teacher)
    how = StepSettings(PPO(reference_top_k=k, **DISTILLATION), temperature=TEMPERATURE, seed=0)
    numbers = train_step(backend, sequences, step=1, settings=how)
    gradients = [p.grad for p in student.parameters() if p.grad is not None]
    return gradients, numbers.metrics["kl_policy_reference"].value


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("tokens_per_micro_batch", [32, 1024])
def test_all_tokens_give_a_step_the_gradients_of_the_whole_divergence(
    device: str, tokens_per_micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However sequences are packed, and however few tokens have logits at a time."""
    sequences = make_sequences()
    expected_gradients, expected = whole_divergence(small_policy(), small_policy(seed=1), sequences)
    use_head_of(device, monkeypatch)
    gradients, kl = gradients_of_step(
        small_policy(),
        small_policy(seed=1),
        sequences,
        VOCABULARY,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )
    assert kl == pytest.approx(expected, rel=1e-4)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-4 * expected_gradient.norm() + 1e-6


def test_a_teacher_with_more_tokens_than_the_student_is_compared_at_those_of_both() -> None:
    """As those of one family, whose vocabularies are padded to different lengths."""
    _, kl = gradients_of_step(small_policy(), small_policy(vocab_size=17), make_sequences(), 500)
    _, other = gradients_of_step(small_policy(vocab_size=17), small_policy(), make_sequences(), 500)
    assert 0 < kl < 100
    assert 0 < other < 100


def test_adapter_is_compared_with_the_policy_without_it() -> None:
    policy = small_policy()
    add_adapter(policy, LoraSettings(rank=2))
    backend = TrainerBackend(policy, TrainerSettings(learning_rate=0.1))
    how = StepSettings(PPO(reference_top_k=3, kl_coefficient=0.1), temperature=1.0, seed=0)
    first, second = (
        train_step(backend, make_sequences(), step=step, settings=how).metrics for step in (1, 2)
    )
    assert first["kl_policy_reference"].value < 0.1 < second["kl_policy_reference"].value


def test_steps_come_closer_to_the_teacher_and_are_the_same_again() -> None:
    """At given tokens, of which none has an advantage."""
    trained = []
    for _ in range(2):
        student, divergence = small_policy(), []
        backend = TrainerBackend(student, TrainerSettings(learning_rate=3e-3))
        backend.hold_reference(small_policy(seed=1))
        how = StepSettings(PPO(reference_top_k=4, **DISTILLATION), temperature=1.0, seed=0)
        for step in range(1, 21):
            numbers = train_step(backend, make_sequences(), step=step, settings=how)
            divergence.append(numbers.metrics["kl_policy_reference"].value)
        trained.append(served_weights(backend))
    assert divergence[-1] < 0.2 * divergence[0]
    for left, right in zip(trained[0].values(), trained[1].values(), strict=True):
        assert torch.equal(left, right)


def test_a_loss_of_the_user_is_given_both_and_nothing_without_the_setting() -> None:
    seen: list[LossInputs] = []

    def loss(given: LossInputs) -> PolicyLoss:
        seen.append(given)
        return PolicyLoss(given.logprobs_T)

    for k in (0, 5):
        backend = TrainerBackend(small_policy(), TrainerSettings())
        backend.hold_reference(small_policy(seed=1))
        algorithm = PPO(reference_top_k=k, kl_coefficient=1.0, num_minibatches=1)
        how = StepSettings(algorithm, temperature=1.0, seed=0, loss=loss)
        train_step(backend, make_sequences(), step=1, settings=how)
    before, after = seen
    assert before.bucket_logprobs_TK is before.reference_bucket_logprobs_TK is None
    for each in (after.bucket_logprobs_TK, after.reference_bucket_logprobs_TK):
        assert each is not None
        assert each.shape == (len(after.logprobs_T), 6)
        torch.testing.assert_close(each.logsumexp(1), torch.zeros(len(each)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"kl_coefficient": 1.0, "kl_in": "advantage"}])
def test_likely_tokens_of_no_divergence_in_the_loss_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match="is of a divergence in the loss"):
        PPO(reference_top_k=4, **settings)


def test_estimator_without_gradient_is_allowed_where_it_is_unused() -> None:
    PPO(reference_top_k=4, kl_coefficient=1.0, kl_estimator="k1")
