"""Predicted memory follows from the trainer's own step: its state and its activations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.layout import RunLayout
from areal_flow.planning import memory
from areal_flow.planning.costs import model_config
from areal_flow.planning.gpus import GIB, gpu_bytes
from areal_flow.planning.memory import (
    FRAGMENTATION,
    MemoryPlan,
    RankMemory,
    fitting_share,
    longest_rows,
    memory_of_step,
    plan_memory,
    staged_bytes,
    trainer_memory,
)
from areal_flow.policy.models.huggingface import AutoConfig
from areal_flow.policy.models.policy import policy_from_config
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training import head
from areal_flow.training.head import chunk_numbers_in
from areal_flow.training.kernels import RESERVED_BYTES
from areal_flow.training.rank import TrainerRank
from pipelines.cli.main import main

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def config(*, num_layers: int = 2) -> Any:
    return AutoConfig.for_model("qwen2", **{**SHAPE, "num_hidden_layers": num_layers})


def recipe(
    num_trainers: int = 1, algorithm: Mapping[str, Any] | None = None, **trainer: Any
) -> Recipe:
    trainer = {"tokens_per_micro_batch": 512, **trainer}
    cluster = {"num_trainers": num_trainers}
    return build_recipe(
        {"trainer": trainer, "cluster": cluster, "algorithm": algorithm or {}}, source=""
    )


def num_weights(shape: Any) -> int:
    with torch.device("meta"):
        policy = policy_from_config(shape, device="meta")
    return sum(parameter.numel() for parameter in policy.parameters())


@pytest.fixture(scope="module")
def kept() -> RankMemory:
    (rank,) = trainer_memory(recipe(), config())
    return rank


def test_a_step_holds_weights_gradients_and_two_moments_in_float32(kept: RankMemory) -> None:
    rank, weights = kept, num_weights(config())
    assert rank.by_kind["parameters"] == pytest.approx(4 * weights, rel=0.02)
    assert rank.by_kind["gradients"] == pytest.approx(4 * weights, rel=0.02)
    assert rank.by_kind["optimizer"] == pytest.approx(8 * weights, rel=0.02)
    assert sum(rank.by_kind.values()) == rank.peak_bytes
    assert rank.kept_bytes == pytest.approx(12 * weights, rel=0.02), "gradients are given back"


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"activations": "recompute"},
        {"lora": {"rank": 4}},
        {"dtype": "bfloat16"},
        {"algorithm": {"name": "ppo_critic"}},
    ],
    ids=["plain", "recompute", "adapter", "bfloat16", "critic"],
)
def test_a_meta_step_predicts_the_memory_of_a_real_one(changed: dict[str, Any]) -> None:
    chosen, shape = recipe(**changed), config(num_layers=1)
    real = TrainerRank(
        RunLayout(Path()), chosen.for_trainer(), channel=HashingWriter(), read_rows=lambda _: []
    )
    real.adopt(policy_from_config(shape))
    measured, kept_bytes = memory_of_step(real, longest_rows(chosen))
    (rank,) = trainer_memory(chosen, shape)
    assert rank.peak_bytes == pytest.approx(sum(measured.values()), rel=0.02)
    assert rank.kept_bytes == pytest.approx(kept_bytes, rel=0.02)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("float32", 0)])
def test_weights_that_are_converted_to_be_served_take_memory_of_their_own(
    dtype: str, num_bytes: int
) -> None:
    settings = replace(recipe().for_trainer(), served_dtype=dtype)
    rank = TrainerRank(RunLayout(Path()), settings, channel=HashingWriter(), read_rows=lambda _: [])
    rank.adopt(policy_from_config(config(num_layers=1)))
    embedding, of_mlp = (
        SHAPE[n] * SHAPE["hidden_size"] for n in ("vocab_size", "intermediate_size")
    )
    assert staged_bytes(rank) == num_bytes * (embedding + of_mlp)


def test_three_chunks_of_the_head_predict_the_memory_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 64 * SHAPE["vocab_size"])
    chosen = recipe(device="cuda", dtype="bfloat16")
    estimate = trainer_memory(chosen, config())
    numbers: list[int] = []
    monkeypatch.setattr(
        memory, "_first_and_last", lambda every: numbers.append(len(every)) or every
    )
    assert estimate == trainer_memory(chosen, config())
    assert max(numbers) > 3


def test_a_plan_for_a_gpu_has_a_teachers_likeliest_tokens() -> None:
    chosen = {"kl_coefficient": 1.0, "reference_top_k": 8}
    (rank,) = trainer_memory(recipe(device="cuda", dtype="bfloat16", algorithm=chosen), config())
    assert rank.peak_bytes > 12 * num_weights(config())


def test_a_plan_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.optimizer = 'muon': expected 'adamw'"):
        trainer_memory(recipe(optimizer="muon"), config())


@pytest.mark.slow
def test_sharded_ranks_hold_their_part_of_the_state_each() -> None:
    shape = config(num_layers=1)
    weights = num_weights(shape)
    ranks = trainer_memory(recipe(num_trainers=4), shape)
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert ranks[0].by_kind["optimizer"] == pytest.approx(8 * weights / 4, rel=0.03)
    two_copies = {"shard_ranks": 2, "context_ranks": 2}
    rank, *_ = trainer_memory(recipe(num_trainers=4, parallel=two_copies), shape)
    assert rank.by_kind["optimizer"] == pytest.approx(8 * weights / 2, rel=0.03)
    assert not distributed.is_initialized(), "the fake group is left"


def test_recomputed_activations_take_less_and_an_adapter_has_little_state(
    kept: RankMemory,
) -> None:
    (recomputed,) = trainer_memory(recipe(activations="recompute"), config())
    (selective,) = trainer_memory(recipe(activations="selective"), config())
    all_bytes, selective_bytes, recomputed_bytes = (
        rank.by_kind["activations"] for rank in (kept, selective, recomputed)
    )
    assert recomputed_bytes < 0.6 * all_bytes
    assert 1.2 * recomputed_bytes < selective_bytes < 0.9 * all_bytes
    (adapter,) = trainer_memory(recipe(lora={"rank": 2}), config())
    assert adapter.by_kind["optimizer"] < 0.1 * kept.by_kind["optimizer"]


def test_longest_rows_fill_a_micro_batch() -> None:
    def rows(tokens: int, longest: int) -> list[int]:
        generation = {"max_model_len": longest, "max_new_tokens": longest // 2}
        trainer = {"tokens_per_micro_batch": tokens}
        return longest_rows(build_recipe({"trainer": trainer, "generation": generation}, source=""))

    assert rows(32_768, 28_672) == [28_672, 4096]
    assert rows(4096, 1536) == [1536, 1536, 1024]
    assert rows(4097, 2048) == [2048, 2048]


@pytest.mark.slow
def test_offloaded_activations_take_no_gpu_memory() -> None:
    on_gpu = {"device": "cuda", "dtype": "bfloat16"}
    shape = config(num_layers=12)  # they take more than a chunk of the head's logits
    (kept,) = trainer_memory(recipe(**on_gpu), shape)
    (offloaded,) = trainer_memory(recipe(**on_gpu, activations="offload"), shape)
    assert offloaded.by_kind["activations"] < 0.5 * kept.by_kind["activations"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2.5-7B", 7.616),
        ("Qwen2.5-32B", 32.764),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.777),
        ("DeepSeek-R1-Distill-Qwen-14B", 14.770),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.1345),
    ],
)
def test_shapes_of_named_models_have_the_published_number_of_weights(
    name: str, billions: float
) -> None:
    with torch.device("meta"):
        policy = policy_from_config(model_config(name), device="meta")
    num_weights = sum(parameter.numel() for parameter in policy.parameters())
    assert num_weights / 1e9 == pytest.approx(billions, abs=0.001)


def test_a_trainer_on_a_shared_gpu_has_the_memory_the_generator_leaves() -> None:
    with torch.device("meta"):
        policy = policy_from_config(config(), device="meta")
    device = {"device": "cuda"}
    vllm = {"gpu_memory_utilization": 0.5}
    generation = {**device, "engine": "vllm", "max_model_len": 2048, "vllm": vllm}
    trainer = {**device, "tokens_per_micro_batch": 4096}
    parts = {"generation": generation, "trainer": trainer}
    half = gpu_bytes("H100-80GB") // 2
    rank = RankMemory(0, int(0.8 * half), {"parameters": int(0.8 * half)})
    shared, apart = (
        build_recipe({**parts, "cluster": {"num_gpus": num}}, source="") for num in (1, 2)
    )
    of_one = plan_memory(shared, [rank], policy, gpu="H100-80GB")
    of_two = plan_memory(apart, [rank], policy, gpu="A100-40GB")
    assert of_one.trainer_bytes == pytest.approx(half, abs=1)
    assert of_one.fits
    assert of_one.generator
    assert of_one.generator.cache_token_bytes == 2 * 2 * 2 * 32 * 2
    assert of_two.trainer_bytes == of_two.gpu_bytes
    larger = RankMemory(0, half, {"parameters": half})
    assert not plan_memory(shared, [larger], policy, gpu="H100-80GB").fits


@pytest.mark.parametrize(
    ("kept_share", "expected"), [(0.5, 0.0), (0.94, 0.0), (1.1, 0.25), (1.3, 0.5), (2.0, 0.75)]
)
def test_as_few_layers_are_recomputed_as_memory_allows(kept_share: float, expected: float) -> None:
    """With all of them recomputed a rank needs two fifths of the GPU."""
    gpu = gpu_bytes("H100-80GB")
    peaks = (
        int((share * gpu - RESERVED_BYTES) / (1 + FRAGMENTATION)) for share in (0.4, kept_share)
    )
    plans = (MemoryPlan(gpu, [RankMemory(0, peak, {})], None, shares_gpu=False) for peak in peaks)
    assert fitting_share(*plans) == expected


def test_gpus_with_more_memory_have_larger_chunks_of_the_head() -> None:
    numbers = [chunk_numbers_in(gib * 2**30) for gib in (0, 16, 24, 48, 80, 141, 288)]
    assert numbers == [2**26, 2**26, 2**26, 2**27, 2**28, 2**29, 2**29]


def test_a_gpu_in_turns_fits_either_role_and_what_the_other_keeps() -> None:
    with torch.device("meta"):
        policy = policy_from_config(config(), device="meta")
    gpu = gpu_bytes("H100-80GB")

    def fits(needed: float, kept: float, taken: float, schedule: str = "sync") -> bool:
        vllm = {"gpu_memory_utilization": taken}
        table = {
            "schedule": schedule,
            "generation": {"device": "cuda", "engine": "vllm", "max_model_len": 2048, "vllm": vllm},
            "trainer": {"device": "cuda"},
            "cluster": {"num_gpus": 1},
        }
        rank = RankMemory(0, int(needed * gpu), {}, kept_bytes=int(kept * gpu))
        chosen = build_recipe(table, source="")
        return plan_memory(chosen, [rank], policy, gpu="H100-80GB").fits

    assert fits(0.8, 0.2, taken=0.7)
    assert not fits(0.8, 0.2, taken=0.7, schedule="async"), "both at a time"
    assert not fits(0.8, 0.4, taken=0.7), "the trainer keeps too much for the generator"
    assert not fits(0.95, 0.2, taken=0.7), "vLLM keeps its context"


def test_the_command_prints_what_a_rank_takes_and_fails_where_it_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config().save_pretrained(tmp_path)
    arguments = ["plan", "--memory", "arithmetic", "--model", str(tmp_path)]
    arguments += ["--generation.max-model-len", "64", "--gpu", "L4-24GB"]
    assert main([*arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert {"recipe", "gpu_bytes", "fits", "ranks"} <= output.keys()
    assert (output["recipe"], output["fits"]) == ("arithmetic", True)
    assert output["gpu_bytes"] == 22 * GIB
    (rank,) = output["ranks"]
    assert rank["peak_bytes"] == sum(rank["by_kind"].values())
    assert list(rank["by_kind"])[:3] == ["parameters", "gradients", "optimizer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "deepseek-ai/unknown"], "whose shapes are known"),
        (["--model", "Qwen2.5-7B", "--gpu", "A100"], "expected one of RTX4080-16GB"),
    ],
)
def test_an_unknown_model_or_gpu_is_refused_with_a_list_of_known_ones(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--memory", "arithmetic", *arguments]) == 2
    assert message in capsys.readouterr().err
