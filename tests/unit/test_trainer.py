"""The training step: alignment, packing, determinism, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.algorithms.registry import ALGORITHMS, ActorCriticPPO, DecoupledPPO
from areal_flow.core.errors import StorageError, TrainingError
from areal_flow.core.lease import Writer
from areal_flow.core.types import SKIPPED_UPDATES, Tokens, VersionSpan, as_tokens
from areal_flow.policy.checkpoints import CheckpointState, list_checkpoints, prune_checkpoints
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.training import kernels
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import read_checkpoint, take_snapshot, write_checkpoint
from areal_flow.training.metrics import masked_fraction_by_decile
from areal_flow.training.optimizers import PolicyAdamW
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.sequences import (
    TrainingSequence,
    pack_sequences,
    sequences_from_rows,
)
from areal_flow.training.settings import AdamWSettings, StepSettings, TrainerSettings
from areal_flow.training.step import (
    advantage_moments,
    compute_advantages,
    train_step,
)
from tests.policies import served_weights, small_policy

WRITER = Writer(Path("nobody"), 1)


def make_sequences(num: int = 12, *, seed: int = 0, vocabulary: int = 13) -> list[TrainingSequence]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> Tokens:
        drawn = torch.randint(1, vocabulary, (length,), generator=generator)
        return drawn.numpy().astype(np.int32)

    sequences = []
    for index in range(num):
        length = 3 + (index * 5) % 11
        sequences.append(
            TrainingSequence(
                prompt_tokens=tokens(2 + index % 4),
                output_tokens=tokens(length),
                behavior_logprobs=(-torch.rand(length, generator=generator) * 3).numpy(),
                trained=(index + np.arange(length)) % 5 != 0,
                reward=float(index % 3 == 0),
                group=index // 4,
            )
        )
    return sequences


def sequence_of(
    prompt: list[int],
    output: list[int],
    logprobs: list[float],
    trained: list[bool],
    *,
    reward: float = 1.0,
) -> TrainingSequence:
    tokens = as_tokens(prompt), as_tokens(output)
    return TrainingSequence(*tokens, np.array(logprobs, np.float32), np.array(trained), reward, 0)


def settings(**algorithm: Any) -> StepSettings:
    return StepSettings(DecoupledPPO(**algorithm), temperature=1.0, seed=0)


def state(
    seed: int = 0, replicas: ReplicaGroup | None = None, num_ranks: int = 1, **trainer: Any
) -> TrainerBackend:
    """Return a backend; without replicas, that of one process that computes for this many ranks."""
    defaults: dict[str, Any] = {"learning_rate": 1e-3, "tokens_per_micro_batch": 64}
    chosen = TrainerSettings(**{**defaults, **trainer})
    return TrainerBackend(small_policy(seed=seed), chosen, replicas or ReplicaGroup(num_ranks))


def hash_of_optimizer(backend: TrainerBackend) -> str:
    return hash_tensors({name: rows.values for name, rows in backend.save()[1].items()})


def test_advantage_moments_are_of_trained_tokens() -> None:
    """Of 2 and -1 over two tokens and one: mean 1, deviation sqrt(2)."""
    first = replace(sequence_of([1], [2, 3, 4], [0, 0, 0], [True, False, True]), advantage=2.0)
    other = replace(sequence_of([1], [2, 3], [0, 0], [False, True]), advantage=[9.0, -1.0])
    moments = {name: metric.value for name, metric in advantage_moments([first, other]).items()}
    assert moments == pytest.approx({"advantage_mean": 1.0, "advantage_std": 2**0.5})


def test_golden_micro_batch_of_two_sequences() -> None:
    sequences = [
        replace(
            sequence_of([1, 2], [3, 4, 5], [-0.5, -1.5, -2.5], [True, False, True]), advantage=0.25
        ),
        replace(sequence_of([6, 7, 8], [9, 10], [-3.5, -4.5], [False, True]), advantage=-2.0),
    ]
    micro = pack_sequences(sequences)
    assert micro.input_ids_1T.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, *[0] * 54]]
    assert micro.predicting_M.tolist() == [1, 3, 8]
    assert micro.targets_M.tolist() == [3, 5, 10]
    assert micro.behavior_logprobs_M.tolist() == [-0.5, -2.5, -4.5]
    assert micro.advantages_M.tolist() == [0.25, 0.25, -2.0]
    assert micro.sequence_M.tolist() == [0, 0, 1]
    assert micro.versions_M.tolist() == [-1, -1, -1]
    assert micro.layout.position_ids.tolist() == [[*[0, 1, 2, 3, 4] * 12, 0, 1, 2, 3]]
    assert (micro.predicting_M.dtype, micro.targets_M.dtype) == (torch.int64, torch.int64)
    assert (micro.advantages_M.dtype, micro.behavior_logprobs_M.dtype) == (
        torch.float32,
        torch.float32,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sequences_without_a_trained_token_change_nothing_where_they_are_packed(name: str) -> None:
    """With others, or alone in micro-batches that have no token to learn from."""
    algorithm = ALGORITHMS[name](num_minibatches=2)
    sequences = make_sequences(vocabulary=80)
    longest = max(sequence.num_tokens for sequence in sequences)
    sequences = [replace(s, trained=s.trained & (s.num_tokens < longest - 2)) for s in sequences]
    results = []
    for tokens_per_micro_batch in (longest, 1000):
        backend = TrainerBackend(
            small_policy(vocab_size=80),  # as wide as layers that oneDNN multiplies
            TrainerSettings(tokens_per_micro_batch=tokens_per_micro_batch, learning_rate=1e-3),
        )
        if isinstance(algorithm, ActorCriticPPO):
            backend.add_critic(algorithm)
        how = StepSettings(algorithm, temperature=1.0, seed=0)
        results.append(train_step(backend, sequences, step=1, settings=how))
    alone, together = results
    assert len(together.losses) == 2
    assert alone.losses == pytest.approx(together.losses, abs=1e-5)
    assert alone.grad_norms == pytest.approx(together.grad_norms, rel=1e-4)


def test_gradient_equals_the_loss_written_out() -> None:
    """Decoupled PPO with its own forward passes, token by token, in one minibatch."""
    sequences = make_sequences()
    backend = state(learning_rate=1e-12, tokens_per_micro_batch=1000, max_grad_norm=1e9)
    train_step(backend, sequences, step=1, settings=settings(num_minibatches=1))
    gradients = [parameter.grad for parameter in backend.policy.parameters()]
    policy = small_policy()
    policy.set_attn_implementation("eager")
    advantages = compute_advantages(sequences, DecoupledPPO())
    total, count = torch.zeros(()), 0
    for sequence, advantage in zip(sequences, advantages, strict=True):
        tokens = [*sequence.prompt_tokens, *sequence.output_tokens]
        logprobs = policy(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        for offset, token in enumerate(sequence.output_tokens):
            if sequence.trained[offset]:
                logprob = logprobs[len(sequence.prompt_tokens) + offset - 1, token]
                weight = (logprob.detach() - sequence.behavior_logprobs[offset]).exp()
                ratio = (logprob - logprob.detach()).exp()
                total = total - weight * ratio * advantage
                count += 1
    (total / count).backward()
    for a, parameter in zip(gradients, policy.parameters(), strict=True):
        scale = max(1e-6, float(parameter.grad.abs().max()))
        assert float((a - parameter.grad).abs().max()) / scale < 1e-3


def test_step_is_deterministic_to_the_bit() -> None:
    def after() -> tuple[str, str]:
        trained = state()
        for step in (1, 2):
            train_step(trained, make_sequences(seed=step), step=step, settings=settings())
        return trained.fingerprint(), hash_tensors(trained.optimizer.named_state())

    assert after() == after()


def test_second_minibatch_is_clipped_against_the_policy_before_the_step() -> None:
    trained = state(learning_rate=0.5)
    numbers = train_step(
        trained, make_sequences(), step=1, settings=settings(num_minibatches=2, epsilon=1e-4)
    )
    assert len(numbers.losses) == len(numbers.grad_norms) == 2
    assert numbers.metrics["clip_fraction"].total > 0
    backend = state(learning_rate=0.5)
    unclipped = train_step(
        backend, make_sequences(), step=1, settings=settings(num_minibatches=1, epsilon=1e-4)
    )
    assert unclipped.metrics["clip_fraction"].total == 0


def with_loss_that_is_not_finite() -> list[TrainingSequence]:
    broken = make_sequences()
    broken[0].behavior_logprobs[1] = float("-inf")
    return broken


def with_gradient_that_overflows() -> list[TrainingSequence]:
    """The loss stays finite."""
    return [replace(sequence, reward=sequence.reward * 1e30) for sequence in make_sequences()]


@pytest.mark.parametrize("broken", [with_loss_that_is_not_finite, with_gradient_that_overflows])
def test_update_that_is_not_finite_is_skipped_as_if_it_had_never_been(broken: Any) -> None:
    """Weights, moments and AdamW's count of updates: the next update makes the same bits."""
    how, trained, other = settings(num_minibatches=1), state(), state()
    train_step(trained, make_sequences(seed=1), step=1, settings=how)
    skipped = train_step(trained, broken(), step=2, settings=how)
    assert (skipped.losses, skipped.metrics[SKIPPED_UPDATES].value) == ([], 1.0)
    assert skipped.metrics.keys() == {SKIPPED_UPDATES, "advantage_mean", "advantage_std"}
    for backend in (trained, other):
        made = train_step(backend, make_sequences(seed=1), step=1, settings=how)
        assert made.metrics[SKIPPED_UPDATES].value == 0.0
    assert trained.fingerprint() != other.fingerprint()
    train_step(other, make_sequences(seed=1), step=1, settings=how)
    assert trained.fingerprint() == other.fingerprint()
    assert hash_of_optimizer(trained) == hash_of_optimizer(other)


def test_weight_decay_is_of_matrices_alone() -> None:
    """A norm's weight of 1 is a scale to keep; without a gradient the decay is all that moves."""
    adamw = AdamWSettings(weight_decay=0.5)
    trained = state(learning_rate=1e-2, adamw=adamw)
    before = {name: p.clone() for name, p in trained.policy.named_parameters()}
    for parameter in trained.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trained.optimizer.step()
    for name, parameter in trained.policy.named_parameters():
        kept = 1.0 if parameter.ndim == 1 else 1 - 0.5 * 1e-2
        torch.testing.assert_close(parameter.detach(), before[name].detach() * kept)


def test_old_tokens_are_context_without_gradient() -> None:
    row = {
        "prompt_tokens": np.array([1]),
        "output_tokens": np.array([2, 3, 4, 5]),
        "behavior_logprobs": np.full(4, -1.0),
        "loss_mask": np.array([True, True, True, False]),
        "version_spans": (VersionSpan(1, 2), VersionSpan(3, 2)),
        "reward": 1.0,
        "submission_index": 0,
    }
    (sequence,) = sequences_from_rows([row], policy_version=4, max_staleness=2)
    assert sequence.trained.tolist() == [False, False, True, False]
    assert pack_sequences([sequence]).versions_M.tolist() == [3]
    assert sequence.trained_spans() == ((1, 0), (3, 1))
    assert sequence.num_tokens == 5


def test_masked_fraction_of_completions_of_any_length() -> None:
    assert masked_fraction_by_decile([]) == (0.0,) * 10
    halves = masked_fraction_by_decile([[False] * 2 + [True] * 8, [True] * 10])
    assert halves == (0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0)
    assert masked_fraction_by_decile([[False]]) == (1.0, *(0.0,) * 9)
    fractions = masked_fraction_by_decile([[False, True, True], [True] * 15 + [False] * 5, [False]])
    assert fractions == (2 / 4, 0, 0, 0, 0, 0, 0, 1 / 2, 1, 1)


def description(trained: TrainerBackend, step: int) -> CheckpointState:
    return CheckpointState(step, trained.fingerprint(), 7, "config")


def test_checkpoint_continues_to_the_bit(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    straight = state()
    train_step(straight, make_sequences(seed=1), step=1, settings=settings())
    snapshot = take_snapshot(straight, description(straight, 1))
    train_step(straight, make_sequences(seed=2), step=2, settings=settings())
    path = write_checkpoint(tmp_path / "checkpoints", model, snapshot, WRITER)
    restored = state(seed=5)
    assert read_checkpoint(path, restored).next_submission_index == 7
    train_step(restored, make_sequences(seed=2), step=2, settings=settings())
    assert restored.fingerprint() == straight.fingerprint()
    assert hash_tensors(restored.optimizer.named_state()) == hash_tensors(
        straight.optimizer.named_state()
    )


def test_changed_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    trained = state()
    snapshot = take_snapshot(trained, description(trained, 0))
    path = write_checkpoint(tmp_path / "checkpoints", tmp_path / "model", snapshot, WRITER)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    with pytest.raises(TrainingError, match="hashes differ"):
        read_checkpoint(path, state())


def test_ranks_that_wrote_other_weights_than_they_hold_make_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    snapshot = take_snapshot(state(), CheckpointState(0, "0" * 32, 0, ""))
    with pytest.raises(StorageError, match="the same directory on all their hosts"):
        write_checkpoint(tmp_path / "checkpoints", tmp_path / "model", snapshot, WRITER)


def test_failed_checkpoint_leaves_the_older_ones(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    root = tmp_path / "checkpoints"
    trained = state()
    snapshot = take_snapshot(trained, description(trained, 0))
    write_checkpoint(root, tmp_path / "model", snapshot, WRITER)
    with pytest.raises(StorageError, match="Older checkpoints are intact"):
        write_checkpoint(
            root, tmp_path / "absent", take_snapshot(trained, description(trained, 1)), WRITER
        )
    assert list_checkpoints(root) == [0]


def test_pruning_keeps_the_first_the_newest_and_the_protected(tmp_path: Path) -> None:
    for step in (0, 5, 10, 15, 20):
        (tmp_path / f"{step:08d}").mkdir()
        (tmp_path / f"{step:08d}" / "state.json").write_text("{}")
    (tmp_path / "00000007").mkdir()  # half removed by a driver that was killed
    pruned = prune_checkpoints(tmp_path, keep=2, protected={tmp_path / "00000005"})
    assert [path.name for path in pruned] == ["00000010"]
    assert list_checkpoints(tmp_path) == [0, 5, 15, 20]


def test_bfloat16_passes_keep_float32_master_weights() -> None:
    """At 2e-5 most bfloat16 weights would round back to what they were."""
    trained = state(learning_rate=2e-5, dtype="bfloat16")
    before = served_weights(trained)
    for step in (1, 2, 3):
        train_step(trained, make_sequences(seed=step), step=step, settings=settings())
    for name, tensor in served_weights(trained).items():
        assert tensor.dtype == torch.float32
        if tensor.dim() == 2 and "embed" not in name:
            assert (tensor != before[name]).float().mean() > 0.9


def test_loaded_optimizer_state_follows_its_parameters_device() -> None:
    """A checkpoint is read to the CPU; AdamW needs moments beside weights, its step on the CPU."""
    trained = state()
    train_step(trained, make_sequences(), step=1, settings=settings())
    elsewhere = PolicyAdamW(small_policy().to("meta").named_parameters(), TrainerSettings())
    elsewhere.load_named_state(trained.optimizer.named_state())
    devices = {
        name.rsplit(".", 1)[1]: tensor.device.type
        for name, tensor in elsewhere.named_state().items()
    }
    assert devices == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"}


def test_offloaded_layers_copy_each_activation_once_and_no_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[torch.Tensor] = []  # holds them: no later tensor has the memory of an earlier one

    class Noted(kernels.MainMemoryCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            copied.append(tensor)

    monkeypatch.setattr(kernels, "MainMemoryCopy", Noted)
    steps = []
    for how in ("keep", "offload"):
        backend = state(activations=how)
        numbers = train_step(backend, make_sequences(), step=1, settings=settings())
        steps.append([numbers.losses, numbers.grad_norms, backend.fingerprint()])
    assert steps[0] == steps[1]
    weights = {weight.data_ptr() for weight in backend.policy.parameters()}
    places = [(each.data_ptr(), each.shape, each.stride()) for each in copied]
    assert copied
    assert not weights & {pointer for pointer, *_ in places}
    assert len(places) == len({*places})
