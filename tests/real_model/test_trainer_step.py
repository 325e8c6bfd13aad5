"""A trainer's step of real weights, held to the same step in plain transformers and torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_flow.config import build_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Rendezvous, VersionSpan
from areal_flow.policy.models.lora import PREFIX, drawn_adapter
from areal_flow.policy.models.policy import load_policy
from areal_flow.policy.settings import LoraSettings
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training.head import token_logprobs
from areal_flow.training.kernels import prepare_layers
from areal_flow.training.rank import TrainerRank
from areal_flow.training.replicas import connect_ranks
from areal_flow.training.sequences import TrainingSequence, pack_sequences
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.step import train_step
from areal_flow.training.tensor_rows import shapes_of
from benchmarks import harness, memory
from tests.policies import served_weights
from tests.real_model.rows import SAMPLE, WRONG

pytestmark = pytest.mark.timeout(1800)

STEP, TEMPERATURE, NUM_GROUPS = 1, 0.8, 2
RATE = 1e-5
"""So high that the second of the two updates has clipped tokens."""
LORA = LoraSettings(rank=4, alpha=8.0)
EXACT = 2e-5
"""Of losses and gradient norms in float32: some 300 roundings of 2^-24, one after the other."""
EXACT_MOVE = 5e-3
"""Of updates, as a length. Adam moves a weight by the rate whatever its gradient: by rounding where
the gradient is no larger than its rounding."""


@dataclass
class Stepped:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    """In float32, an adapter merged."""

    def check_equal(self, expected: Stepped, model: Path) -> None:
        assert self.losses == pytest.approx(expected.losses, rel=EXACT)
        assert self.grad_norms == pytest.approx(expected.grad_norms, rel=EXACT)
        assert self.moved_apart(expected, model) < EXACT_MOVE

    def moved_apart(self, expected: Stepped, model: Path) -> float:
        """Return the norm of the difference of two updates, relative to the expected one."""
        start, apart, moved = load_file(model / "model.safetensors"), 0.0, 0.0
        assert self.weights.keys() == expected.weights.keys() == start.keys()
        for name, weights in expected.weights.items():
            apart += float((self.weights[name] - weights).square().sum())
            moved += float((start[name].float() - weights).square().sum())
        return float((apart / moved) ** 0.5)


def sequences_of(model: Path) -> list[TrainingSequence]:
    """Return groups of a right answer, a wrong one, a part of which is context, and a cut one."""
    encode, random = AutoTokenizer.from_pretrained(model).encode, np.random.default_rng(0)
    sequences = []
    for group, (row, wrong) in enumerate(WRONG[:NUM_GROUPS]):
        prompt, right = encode(SAMPLE[row]["question"] + "\n"), encode(SAMPLE[row]["answer"])
        for answer, reward in ((right[:120], 1.0), (encode(wrong)[:120], 0.0), (right[:24], 0.0)):
            trained = np.ones(len(answer), np.bool_)
            trained[5:9] = answer[:24] == right[:24]
            logprobs = -2 * random.random(len(answer), np.float32)
            tokens = np.array(prompt, np.int32), np.array(answer, np.int32)
            spans = (VersionSpan(0, len(answer)),)
            sequences.append(TrainingSequence(*tokens, logprobs, trained, reward, group, spans))
    return sequences


def stepped(model: Path, ranks: tuple[int, int, Path] | None = None, **trainer: Any) -> Stepped:
    """Take the step as a trainer does: alone, or as a rank of several that meet at a path."""
    torch.set_num_threads(1)
    table = {
        "trainer": {"learning_rate": RATE, "tokens_per_micro_batch": 400, **trainer},
        "algorithm": {"name": "decoupled_ppo", "num_minibatches": NUM_GROUPS},
        "generation": {"temperature": TEMPERATURE, "max_model_len": 400},
    }
    recipe, channel = build_recipe(table, source=""), HashingWriter()
    rank = TrainerRank(
        RunLayout(model), recipe.for_trainer(), channel=channel, read_rows=lambda _: []
    )
    if ranks:
        number, num_ranks, point = ranks
        rank.replicas = connect_ranks(Rendezvous("s", number, num_ranks), point, host="127.0.0.1")
    rank.load_pretrained(model)
    metrics = train_step(rank.backend, sequences_of(model), step=STEP, settings=rank.settings)
    weights = served_weights(rank.backend)
    return Stepped(metrics.losses, metrics.grad_norms, weights if rank.replicas.is_leader else {})


def first_adapter(model: Path) -> dict[str, list[Tensor]]:
    """Return A and B of each matrix, as the trainer draws them."""
    drawn, pairs = drawn_adapter(shapes_of(model), LORA, seed=0), dict[str, list[Tensor]]()
    for name in sorted(drawn):
        matrix = name.removeprefix(PREFIX).replace(".lora_A", "").replace(".lora_B", "")
        pairs.setdefault(matrix, []).append(drawn[name].clone().requires_grad_())
    return pairs


def reference(
    model: Path,
    *,
    dtype: torch.dtype = torch.float32,
    rate: float = RATE,
    adapter: Mapping[str, Sequence[Tensor]] | None = None,
) -> Stepped:
    """The same step with transformers and torch, one sequence at a time."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    weights, pairs = dict(policy.named_parameters()), adapter or {}
    trained = [tensor for pair in pairs.values() for tensor in pair] or [*weights.values()]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def merged() -> dict[str, Tensor]:
        scale = LORA.alpha / LORA.rank
        return {name: weights[name] + scale * (b @ a) for name, (a, b) in pairs.items()}

    def logprobs(sequence: TrainingSequence) -> Tensor:
        tokens = torch.from_numpy(
            np.concatenate([sequence.prompt_tokens, sequence.output_tokens])
        ).long()
        rounded = {name: tensor.to(dtype) for name, tensor in {**weights, **merged()}.items()}
        logits_TV = torch.func.functional_call(policy, rounded, (tokens[None],)).logits[0]
        start = len(sequence.prompt_tokens)
        logprobs_TV = (logits_TV[start - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
        return logprobs_TV.gather(1, tokens[start:, None])[:, 0][torch.from_numpy(sequence.trained)]

    sequences, expected = sequences_of(model), Stepped([], [], {})
    with torch.no_grad():
        proximal = [*map(logprobs, sequences)]
    for group in np.random.default_rng([0, STEP]).permutation(NUM_GROUPS).tolist():
        members = [index for index, each in enumerate(sequences) if each.group == group]
        num_tokens, loss_sum = sum(sequences[index].num_trained for index in members), 0.0
        optimizer.zero_grad()
        for index in members:
            of = sequences[index]
            advantage = of.reward - 1 / 3  # the mean of a group with one right answer of three
            behavior = torch.from_numpy(of.behavior_logprobs[of.trained])
            weight, ratio = (proximal[index] - behavior).exp(), logprobs(of) - proximal[index]
            ratio = ratio.exp()
            best = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -(weight * best).sum() / num_tokens
            loss.backward()
            loss_sum += float(loss.detach())
        expected.losses.append(loss_sum)
        expected.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
    expected.weights = {name: t.detach().clone() for name, t in {**weights, **merged()}.items()}
    return expected


@pytest.fixture(scope="module")
def plain(model: Path) -> Stepped:
    return reference(model)


def test_step_in_float32_is_that_of_transformers(model: Path, plain: Stepped) -> None:
    stepped(model).check_equal(plain, model)


def test_step_of_an_adapter_is_that_of_plain_products(model: Path) -> None:
    expected = reference(model, adapter=first_adapter(model))
    stepped(model, lora=LORA.model_dump()).check_equal(expected, model)


def test_two_ranks_make_what_one_makes(model: Path, plain: Stepped, tmp_path: Path) -> None:
    calls = [(model, (number, 2, tmp_path / "point")) for number in range(2)]
    sharded, _ = harness.in_processes(stepped, calls, {"OMP_NUM_THREADS": "1"})
    sharded.check_equal(plain, model)


def test_step_in_bfloat16_is_as_near_to_float32_as_transformers_is(model: Path) -> None:
    """With weights in bfloat16, and at a rate that clips no token: noise would decide which."""
    rate = RATE / 10
    exact, plain = (
        reference(model, dtype=dtype, rate=rate) for dtype in (torch.float32, torch.bfloat16)
    )
    rounded = stepped(model, dtype="bfloat16", learning_rate=rate)

    def error(step: Stepped) -> float:
        pairs = zip(step.losses + step.grad_norms, exact.losses + exact.grad_norms, strict=True)
        return max(abs(actual / expected - 1) for actual, expected in pairs)

    assert error(rounded) < 1.1 * error(plain)
    assert rounded.moved_apart(exact, model) < 1.1 * plain.moved_apart(exact, model)


def test_passes_in_bfloat16_have_the_numbers_of_an_engine_in_bfloat16(
    model: Path, figure: Callable[[str, str, object], None]
) -> None:
    """With sums of layers in float32 they were 0.03 apart on average."""
    micro = pack_sequences(sequences_of(model))
    policies = [load_policy(model, dtype=dtype) for dtype in ("float32", "bfloat16")]
    prepare_layers(policies[0], TrainerSettings(dtype="bfloat16"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trainer, engine = (token_logprobs(policy, micro, temperature=1.0) for policy in policies)
    gap = float((trainer - engine).abs().mean())
    figure("trainer", "engine gap of passes in bfloat16, mean of absolute values", gap)
    assert gap < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["keep", "recompute", "adapter"])
def test_planned_memory_is_the_memory_used(
    model: Path, case: str, dtype: str, figure: Callable[[str, str, object], None]
) -> None:
    chosen = argparse.Namespace(model=str(model), dtype=dtype, device="cpu", gpu="CPU")
    peaks = [
        harness.in_processes(work, [(case, 1024, chosen)], memory.ENVIRONMENT)[0]
        for work in (memory.predict, memory.measure)
    ]
    figure("trainer", f"peak of 1,024 tokens, {dtype}, {case}, GB", peaks[1])
    figure("trainer", "the same as `plan --memory` predicts it", peaks[0])
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
