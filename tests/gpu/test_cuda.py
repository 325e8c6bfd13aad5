"""Engine and trainer on a GPU: the promises of the CPU, with a GPU's tolerances."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.core.types import Completion, GroupRequest, PolicyHashes, Sampling, as_tokens
from areal_flow.policy.checkpoints import CheckpointState
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.policy import policy_tensors
from areal_flow.policy.weights.channel import StreamedTensors
from areal_flow.policy.weights.device_copies import DeviceCopier, on_device
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.torch_engine import TorchEngine
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import take_snapshot
from areal_flow.training.kernels import set_precision
from areal_flow.training.ranked_model import wait_for_copies
from areal_flow.training.sequences import TrainingSequence
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_logprobs_equal_a_full_forward_across_an_interruption() -> None:
    policies = [small_policy(seed=seed).cuda() for seed in (0, 1)]
    generation = GenerationSettings(max_num_seqs=8, max_model_len=64, max_new_tokens=24)
    engine = TorchEngine(small_policy(seed=0).cuda(), generation, version=0)
    request = GroupRequest("r", as_tokens([1, 2, 3]), tuple(range(8)), Sampling(max_new_tokens=24))
    engine.add(request)
    completions: list[Completion] = []
    for step in range(40):
        if step == 9:
            engine.load_weights(policy_tensors(policies[1]), version=1)
        completions += [completion for _, group in engine.step() for completion in group]
    assert len(completions) == 8
    for completion in completions:
        ids = torch.tensor([[1, 2, 3, *completion.tokens]], device="cuda")
        layout = PackedLayout([ids.shape[1]], "cuda")
        by_version = []
        for policy in policies:
            with torch.no_grad():
                logits = policy(
                    input_ids=ids, position_ids=layout.position_ids, use_cache=False, layout=layout
                ).logits[0, 2:-1]
            by_version.append(logits.log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0].tolist())
        versions = [v for v, length in completion.version_spans for _ in range(length)]
        assert set(versions) == {0, 1}
        expected = [by_version[version][at] for at, version in enumerate(versions)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-3)


def test_hash_of_weights_on_a_gpu_is_that_of_their_copies() -> None:
    """Also while they are still being computed: a copy waits only for its tensor."""
    tensors = {f"{n}": torch.randn(512, 512 + n, device="cuda").mT for n in range(8)}
    for _ in range(64):
        tensors = {name: tensor / tensor.norm() for name, tensor in tensors.items()}
    hashes = hash_tensors(tensors)
    assert hashes == hash_tensors({name: tensor.cpu() for name, tensor in tensors.items()})


def test_streamed_tensors_may_leave_a_gpu_before_their_copies_are_hashed() -> None:
    """The memory of each tensor can be reused as soon as its last reference is gone."""
    tensors = {f"{n}": torch.randn(2048, 2048, device="cuda") for n in range(16)}
    like = {name: tensor.bfloat16().to("meta") for name, tensor in tensors.items()}
    halves = StreamedTensors(like, read=lambda name: tensors[name].bfloat16())
    expected = {name: tensor.cpu().bfloat16() for name, tensor in tensors.items()}
    for _ in range(8):
        assert hash_tensors(halves) == hash_tensors(expected)


def test_staged_weights_are_those_of_the_step_before_while_the_next_one_runs(
    tmp_path: Path,
) -> None:
    """Bytes and hashes are those of copies, also through the pages of a retired version."""
    backend = TrainerBackend(
        small_policy(vocab_size=100_000).cuda(), TrainerSettings(device="cuda", learning_rate=1e-2)
    )
    channel = ChosenChannel(tmp_path / "weights", "shared_memory")
    try:
        for step in range(1, 9):
            train_step(backend, make_sequences(seed=step), step=step, settings=settings())
            hashes = backend.stage(step, channel, dtype=torch.bfloat16)
            copies = {n: t.cpu().clone() for n, t in policy_tensors(backend.policy).items()}
            train_step(backend, make_sequences(seed=99), step=step, settings=settings())
            channel.publish(step)
            served = {name: tensor.bfloat16() for name, tensor in copies.items()}
            assert hashes == PolicyHashes(hash_tensors(copies), hash_tensors(served))
            assert hash_tensors(channel.load(step)) == hashes.served_hash
    finally:
        free_segments(channel.root)


def test_tensors_reach_the_gpu_in_pieces_while_their_memory_is_reused() -> None:
    """What was computed with a tensor before it is freed has its values, and none of a later."""
    tensors = {f"{n}": torch.randn(3000, 1000 + n) for n in range(40)}
    sums = {}
    with torch.inference_mode():
        for name, tensor in on_device(tensors.items(), torch.device("cuda")):
            sums[name] = tensor.double().sum()
            del tensor
    for name, tensor in tensors.items():
        assert float(sums[name]) == pytest.approx(float(tensor.double().sum()), rel=1e-9, abs=1e-6)
    with DeviceCopier(torch.device("cuda")) as copier:
        for tensor in tensors.values():
            device, host = tensor.cuda(), torch.empty_like(tensor)
            device += 1  # still runs when the copy begins
            for copy in copier.begin(device, host):
                copy.result()
            assert torch.equal(host, tensor + 1)


def test_a_snapshot_is_of_the_step_before_although_the_next_one_begins_at_once() -> None:
    sequences, how = make_sequences(seed=2), settings()
    trainer = TrainerSettings(device="cuda", learning_rate=1e-2)

    def backend(*, seed: int) -> TrainerBackend:
        return TrainerBackend(small_policy(seed=seed, vocab_size=200_000).cuda(), trainer)

    first, second = backend(seed=0), backend(seed=1)
    train_step(first, make_sequences(seed=1), step=1, settings=how)
    fingerprint = first.fingerprint()
    state = {name: tensor.cpu().clone() for name, tensor in first.optimizer.named_state().items()}
    snapshot = take_snapshot(first, CheckpointState(1, "", 0, ""))
    train_step(first, sequences, step=2, settings=how)
    assert first.fingerprint() != fingerprint
    wait_for_copies(snapshot.copies)
    assert hash_tensors({n: rows.values for n, rows in snapshot.optimizer.items()}) == (
        hash_tensors(state)
    )
    second.load(snapshot.weights, snapshot.optimizer)
    assert second.fingerprint() == fingerprint


def test_step_on_a_gpu_equals_the_step_on_the_cpu() -> None:
    sequences = [
        TrainingSequence(
            as_tokens([1, 2]),
            as_tokens([3 + i % 5] * (4 + i)),
            np.full(4 + i, -2.0, np.float32),
            np.ones(4 + i, np.bool_),
            i % 2,
            i // 4,
        )
        for i in range(8)
    ]
    how = StepSettings(DecoupledPPO(), temperature=1.0, seed=0)
    losses = []
    for device in ("cpu", "cuda"):
        trainer = TrainerSettings(device=device, learning_rate=1e-4)
        backend = TrainerBackend(small_policy().to(device), trainer)
        losses.append(train_step(backend, sequences, step=1, settings=how).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_step_in_bfloat16_is_about_that_of_float32() -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        trainer = TrainerSettings(device="cuda", dtype=dtype, learning_rate=1e-4)
        backend = TrainerBackend(small_policy().cuda(), trainer)
        losses.append(train_step(backend, make_sequences(), step=1, settings=settings()).losses)
    assert losses[0] == pytest.approx(losses[1], rel=5e-2, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_completions_that_share_prompts_have_the_same_bits_again(dtype: str) -> None:
    sequences = [replace(s, prompt_tokens=as_tokens([1, 2, 3, 4])) for s in make_sequences(32)]
    fingerprints = []
    for _ in range(2):
        trainer = TrainerSettings(device="cuda", dtype=dtype, learning_rate=1e-2)
        backend = TrainerBackend(small_policy().cuda(), trainer)
        for step in range(1, 4):
            train_step(backend, sequences, step=step, settings=settings())
        fingerprints.append(backend.fingerprint())
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("activations", ["keep", "selective", "recompute", "offload"])
def test_compiled_layers_make_the_step_of_uncompiled_ones(activations: Any) -> None:
    losses = []
    for kernels in ("eager", "compiled"):
        trainer = TrainerSettings(
            device="cuda",
            dtype="bfloat16",
            learning_rate=1e-3,
            kernels=kernels,  # type: ignore[arg-type]
            activations=activations,
        )
        backend = TrainerBackend(small_policy().cuda(), trainer)
        numbers = [
            train_step(backend, make_sequences(), step=step, settings=settings())
            for step in (1, 2, 3)
        ]
        losses.append([loss for metrics in numbers for loss in metrics.losses])
    assert losses[0] == pytest.approx(losses[1], rel=5e-2, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16"])
def test_deterministic_kernels_repeat_the_bits_of_long_rows(dtype: Any) -> None:
    random = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            as_tokens(random.integers(1, 13, 8)),
            as_tokens(random.integers(1, 13, 2000)),
            np.full(2000, -2.0, np.float32),
            np.ones(2000, np.bool_),
            index % 2,
            index // 2,
        )
        for index in range(4)
    ]
    trainer = TrainerSettings(device="cuda", dtype=dtype, kernels="deterministic")
    fingerprints = []
    try:
        for _ in range(3):
            backend = TrainerBackend(small_policy().cuda(), trainer)
            train_step(backend, sequences, step=1, settings=settings())
            fingerprints.append(backend.fingerprint())
    finally:
        set_precision(TrainerSettings())
    assert len(set(fingerprints)) == 1
