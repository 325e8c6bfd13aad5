"""Architectures: engine and trainer compute what the model computes, or the model is refused."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areal_flow.core.errors import ModelError
from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.policy.models import attention
from areal_flow.policy.models.attention import AttentionRule
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.policy import (
    hidden_at,
    logits_at,
    logits_of,
    policy_from_config,
    policy_tensors,
    policy_with,
)
from areal_flow.policy.models.probe import probe_config, small_copy
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.torch_engine import TorchEngine
from areal_flow.rollout.engines.vllm.weights import check_logprobs
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.head import token_logprobs
from areal_flow.training.sequences import pack_sequences
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.tensor_rows import TensorRows, pretrained_policy
from tests.unit.test_trainer import sequence_of

SMALL = {
    "vocab_size": 41,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
GRANITE = {"logits_scaling": 4.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5}
WINDOW = {"sliding_window": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}

SUPPORTED: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen2 with a window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": EXPERTS,
    "Llama": {},
    "Mistral": WINDOW,
    "Mixtral": {"num_local_experts": 4},
    "Gemma": {"head_dim": 16},
    "Gemma2": {**WINDOW, "head_dim": 16},
    "Gemma3Text": {**WINDOW, "head_dim": 16, "num_hidden_layers": 7},
    "Phi3": {},
    "Olmo2": {},
    "Olmo3": WINDOW,
    "Granite": GRANITE,
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": WINDOW,
    "DeepseekV3": LATENT,
    "GptOss": {**WINDOW, "head_dim": 16, "num_local_experts": 4},
    "GPT2": {},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 64},
}

LIMITED: dict[str, dict[str, Any]] = {
    "GPT2": {"max_position_embeddings": 16},
    "OPT": {**SUPPORTED["OPT"], "max_position_embeddings": 16},
    "Phi3": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 16,
    },
    "Llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": 16,
    },
}
"""Policies of 16 positions, or that compute all tokens otherwise with more."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Lfm2": (
        {"layer_types": ["conv", "full_attention"] * 2},
        "layers of kind conv",
    ),
    "Qwen3Next": (
        {**EXPERTS, "shared_expert_intermediate_size": 32},
        "layers of kind linear_attention",
    ),
    "Mamba": ({}, "layers of kind linear_attention"),
    "RecurrentGemma": ({}, "3 of 4 layers mix tokens by something else"),
    "Bloom": ({}, "4 of 4 layers mix tokens by something else"),
    "Falcon": ({}, "its forward failed with KeyError"),
    "StableLm": ({}, "did not receive `layout`"),
    "DiffLlama": ({}, "in the decoded pass log-probabilities differ by"),
    "Llama4Text": ({}, "layers of kind chunked_attention"),
}


QUICK = ("Qwen2", "Qwen3", "Llama", "Gemma2", "Mixtral", "DeepseekV3", "GptOss", "DiffLlama")
"""One for each mechanism: plain, norms, soft caps, experts, latent attention, sinks, a refusal."""


def quick_first(names: Iterable[str]) -> list[Any]:
    """Mark the tests of all other architectures as slow."""
    slow = pytest.mark.slow
    return [name if name in QUICK else pytest.param(name, marks=slow) for name in names]


def config_of(name: str, settings: dict[str, Any]) -> Any:
    kind = getattr(transformers, f"{name.split()[0]}Config")
    config = kind(**{**SMALL, **settings})
    config.architectures = [name]
    return config


def sharp_policy(config: Any) -> Any:
    torch.manual_seed(1)
    policy = policy_from_config(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
    return policy


def plain_logprobs(policy: Any, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities `[T, V]` by the model's own eager forward."""
    own = deepcopy(policy)
    own.set_attn_implementation("eager")
    logits = own(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", quick_first(SUPPORTED))
def test_engine_and_trainer_compute_what_the_model_computes(name: str) -> None:
    config = config_of(name, SUPPORTED[name])
    probe_config(config, max_model_len=64)
    policy = sharp_policy(config)
    settings = GenerationSettings(max_num_seqs=3, max_model_len=64, max_new_tokens=16)
    engine = TorchEngine(policy, settings, version=0)
    prompts = {"a": as_tokens([1, 2, 3, 4, 5]), "b": as_tokens(range(6, 18))}
    for request_id, prompt in prompts.items():
        engine.add(GroupRequest(request_id, prompt, (1, 2), Sampling(max_new_tokens=16)))
    by_request: dict[str, list[Completion]] = {}
    while engine.has_work():
        by_request.update(engine.step())
    with torch.no_grad():
        sequences = [[*prompts[r], *c.tokens] for r, group in by_request.items() for c in group]
        expected = [plain_logprobs(policy, tokens) for tokens in sequences]
        layout = PackedLayout([len(tokens) for tokens in sequences])
        row_1T = torch.tensor([list(chain(*sequences))])
        everywhere = torch.arange(row_1T.shape[1])
        packed_TV = logits_at(policy, row_1T, layout, everywhere)
        hidden_TH = hidden_at(policy, row_1T, layout, everywhere)
        assert torch.equal(logits_of(policy, hidden_TH), packed_TV)
    assert float((packed_TV.log_softmax(-1) - torch.cat(expected)).abs().max()) < 1e-4
    completions = [completion for group in by_request.values() for completion in group]
    for logprobs_TV, tokens, completion in zip(expected, sequences, completions, strict=True):
        start = len(tokens) - len(completion.tokens)
        exact = [float(logprobs_TV[at - 1, tokens[at]]) for at in range(start, len(tokens))]
        assert completion.logprobs == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("name", quick_first(SUPPORTED))
def test_check_of_an_engine_computes_with_the_weights_where_they_are(
    name: str, tmp_path: Path
) -> None:
    """Drawing a 1.5B policy first took 30 s and its memory at each engine start."""
    policy = sharp_policy(config_of(name, SUPPORTED[name]))
    policy.config.save_pretrained(tmp_path)
    tensors = policy_tensors(policy)
    settings = GenerationSettings(max_num_seqs=3, max_model_len=64, max_new_tokens=16)
    before = torch.get_rng_state()
    check_logprobs(TorchEngine(policy, settings, version=0), tmp_path, tensors, settings)
    assert torch.equal(torch.get_rng_state(), before), "something was drawn"
    taken = policy_tensors(policy_with(tmp_path, tensors, dtype="float32"))
    assert {n: t.data_ptr() for n, t in taken.items()} == {
        n: t.data_ptr() for n, t in tensors.items()
    }
    changed = {**tensors, next(iter(tensors)): torch.randn_like(next(iter(tensors.values())))}
    with pytest.raises(ModelError, match=r"log-probabilities differ by"):
        check_logprobs(TorchEngine(policy, settings, version=0), tmp_path, changed, settings)


@pytest.mark.parametrize("name", quick_first(SUPPORTED))
def test_policy_whose_rows_were_read_computes_what_the_written_one_does(
    name: str, tmp_path: Path
) -> None:
    """Buffers that no file has, such as frequencies of positions, are the same too."""
    written = sharp_policy(config_of(name, SUPPORTED[name]))
    written.save_pretrained(tmp_path)
    policy, weights = pretrained_policy(tmp_path)
    for tensor, rows in weights.items():
        assert not isinstance(rows, TensorRows), "no rank reads the model whole"
        full = policy_tensors(written)[tensor]
        half = len(full) // 2
        parts = [rows(0, half), rows(half, 0), rows(half, len(full) - half)]
        assert torch.equal(torch.cat(parts), full)
    backend = TrainerBackend(policy, TrainerSettings())
    backend.load_weights(weights)
    row_1T, layout = torch.arange(1, 30)[None], PackedLayout([12, 17])
    with torch.no_grad():
        actual, expected = (
            logits_at(model, row_1T, layout, torch.arange(29)) for model in (policy, written)
        )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", quick_first(LIMITED))
def test_trainer_computes_what_the_model_computes_at_the_limit_of_its_positions(name: str) -> None:
    """Padding of packed rows must have no position beyond those of the sequences."""
    policy = sharp_policy(config_of(name, LIMITED[name]))
    sequences = [
        sequence_of([1, 2], [*range(3, length + 1)], [0.0] * (length - 2), [True] * (length - 2))
        for length in (5, 16)
    ]
    micro = pack_sequences(sequences)
    assert micro.input_ids_1T.shape[1] > 2 * 16
    with torch.no_grad():
        logprobs = token_logprobs(policy, micro, temperature=1.0)
        for at, sequence in enumerate(sequences):
            tokens = [*sequence.prompt_tokens, *sequence.output_tokens]
            logprobs_TV = plain_logprobs(policy, tokens)
            expected = [float(logprobs_TV[n - 1, tokens[n]]) for n in range(2, len(tokens))]
            assert logprobs[micro.sequence_M == at].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", quick_first(REFUSED))
def test_other_architectures_are_refused_by_name(name: str) -> None:
    settings, reason = REFUSED[name]
    config = config_of(name, settings)
    with pytest.raises(ModelError, match=f"(?s)^{name} .*{reason}"):
        probe_config(config, max_model_len=64)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("Mistral", "window"),
        ("Gemma2", "softcap"),
        ("GptOss", "sinks"),
        pytest.param("Qwen2 with a window", "window", marks=pytest.mark.slow),
        pytest.param("Gemma3Text", "window", marks=pytest.mark.slow),
    ],
)
def test_probe_notices_what_attention_would_drop(
    name: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(**settings: Any) -> AttentionRule:
        return AttentionRule(**{**settings, lost: None})

    monkeypatch.setattr(attention, "AttentionRule", rule)
    with pytest.raises(ModelError, match="log-probabilities differ"):
        probe_config(config_of(name, SUPPORTED[name]), max_model_len=64)


def test_small_copy_keeps_every_kind_of_layer_and_the_model_s_own_widths() -> None:
    config = config_of(
        "Gemma3Text", {"num_hidden_layers": 26, "hidden_size": 1152, "sliding_window": 512}
    )
    small = small_copy(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers == 6
    assert (small.hidden_size, small.num_attention_heads) == (1152, 4)
    assert small.sliding_window < 10
    assert config.num_hidden_layers == 26


def test_longer_contexts_than_a_model_was_made_for_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"at most 256 tokens, found generation.max_model_len = 257"
    ):
        probe_config(config_of("GPT2", {}), max_model_len=257)
    config = config_of(
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    )
    probe_config(config, max_model_len=64)
    with pytest.raises(ModelError, match="at most 64 tokens"):
        probe_config(config, max_model_len=65)
