"""Checks, before a run starts, that engine and trainer compute what the model computes.

A small copy of the model, with its own widths, heads, scales and rotary settings and random
weights, runs a packed pass, as the trainer does, and a prefilled and decoded one, as the engine
does; both are compared with the model's own plain forward. The copy has fewer layers (of every
kind), a smaller vocabulary, smaller MLPs, and a window that is shorter than the probe.

Letters: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_flow.core.errors import ModelError
from areal_flow.policy.models.huggingface import (
    AutoConfig,
    AutoModelForCausalLM,
    revert_weight_conversion,
)
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.paged import Chunk, PagedCache, decode, prefill
from areal_flow.policy.models.policy import load_policy, logits_at, policy_from_config

SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
ROTARY_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies depend on the longest sequence of a batch."""

TOLERANCE = 1e-3
"""Maximum difference of log-probabilities from rounding in float32."""

_PREFIX_LENGTHS = (2, 9, 4)
_NUM_DECODED = 12
_PAGE_TOKENS = 32
_WINDOW = 5
_VOCABULARY = 64
_MLP_WIDTH = 64
_MIN_LAYERS = 4
_WEIGHT_GAIN = 3.0
"""Factor on random weights, so that caps, scales and windows matter."""


def probe_policy(directory: Path, *, max_model_len: int = 0) -> None:
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}/config.json describes no known model: {error}") from error
    probe_config(config, max_model_len=max_model_len)
    check_weights(directory, config)


def probe_config(config: Any, *, max_model_len: int) -> None:
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    try:
        _check_config(config, max_model_len)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            _compare(small_copy(config))
    except ModelError as error:
        raise ModelError(f"{name} is not supported: {error}") from error
    except Exception as error:
        # A model's code may fail in any way when it gets a layout, and it means the same to users.
        raise ModelError(
            f"{name} is not supported: its forward failed with {type(error).__name__}: {error}"
        ) from error


def _check_config(config: Any, max_model_len: int) -> None:
    if config.get_text_config() is not config:
        raise ModelError("it is more than a language model; give its text model's directory")
    if unsupported := set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS:
        raise ModelError(
            f"it has layers of kind {', '.join(sorted(unsupported))}, expected only "
            f"{' and '.join(sorted(SUPPORTED_LAYERS))}"
        )
    longest = getattr(config, "max_position_embeddings", None) or max_model_len
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in (rotary, *(each for each in rotary.values() if isinstance(each, dict))):
        if settings.get("rope_type") in ROTARY_BY_LENGTH:
            longest = settings.get("original_max_position_embeddings") or longest
    if max_model_len > longest:
        raise ModelError(
            f"it was made for at most {longest} tokens, found generation.max_model_len = "
            f"{max_model_len}: lower it"
        )


def _compare(config: Any) -> None:
    policy = policy_from_config(config)
    if "logits_to_keep" not in inspect.signature(policy.forward).parameters:
        raise ModelError("its forward cannot be asked for the logits of some positions")
    _enlarge_weights(policy)
    lengths = [length + _NUM_DECODED for length in _PREFIX_LENGTHS]
    sequences = [torch.randint(_VOCABULARY, (length,)) for length in lengths]
    passes = {"packed": _packed(policy, sequences), "decoded": _decoded(policy, sequences)}
    policy.set_attn_implementation("eager")
    expected = [policy(input_ids=ids_T[None], use_cache=False).logits[0] for ids_T in sequences]
    for name, logits in passes.items():
        difference = max(
            float((f_TV.log_softmax(-1) - e_TV[-len(f_TV) :].log_softmax(-1)).abs().max())
            for f_TV, e_TV in zip(logits, expected, strict=True)
        )
        if not difference <= TOLERANCE:
            raise ModelError(
                f"in the {name} pass log-probabilities differ by {difference:.2g} from its own "
                f"forward, expected at most {TOLERANCE:g}"
            )


def small_copy(config: Any) -> Any:
    """Return a configuration with few layers, a short window and small vocabulary and MLPs."""
    small = deepcopy(config)
    kinds = list(getattr(config, "layer_types", None) or ())
    num_layers = max([_MIN_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))])
    num_layers = min(num_layers, config.num_hidden_layers)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(small, key, value[:num_layers])
        elif isinstance(value, int) and key.endswith(("intermediate_size", "ffn_dim")):
            setattr(small, key, min(value, _MLP_WIDTH))
        elif key.endswith("token_id"):
            setattr(small, key, None)
    small.num_hidden_layers = num_layers
    small.vocab_size = _VOCABULARY
    if getattr(config, "sliding_window", None):
        small.sliding_window = min(config.sliding_window, _WINDOW)
    return small


def _enlarge_weights(policy: Any) -> None:
    for parameter in policy.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=_WEIGHT_GAIN * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _packed(policy: Any, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return logits `[T, V]` of each sequence, from one row with all of them."""
    lengths, row_T = [len(ids_T) for ids_T in sequences], torch.cat([*sequences])
    logits_TV = logits_at(policy, row_T[None], PackedLayout(lengths), torch.arange(len(row_T)))
    return list(torch.split(logits_TV, lengths))


def _decoded(policy: Any, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return logits of each sequence's last tokens, decoded after a joint prefill."""
    cache = PagedCache(policy, num_pages=len(sequences), page_tokens=_PAGE_TOKENS)
    num_layers = policy.config.num_hidden_layers
    if len(cache.layers) != num_layers:
        raise ModelError(
            f"{num_layers - len(cache.layers)} of {num_layers} layers mix tokens by something else "
            "than the attention that transformers lets us choose"
        )
    tables_SW = np.arange(len(sequences))[:, None]
    chunks = [
        Chunk(ids_T[:-_NUM_DECODED].numpy(), 0, pages)
        for ids_T, pages in zip(sequences, tables_SW, strict=True)
    ]
    prefill(policy, cache, chunks)
    logits = []
    for remaining in range(_NUM_DECODED, 0, -1):
        tokens_S = np.array([int(ids_T[-remaining]) for ids_T in sequences])
        positions_S = np.array([len(ids_T) - remaining for ids_T in sequences])
        logits.append(decode(policy, cache, tokens_S, positions_S, tables_SW))
    return list(torch.stack(logits, dim=1))


def check_weights(directory: Path, config: Any) -> None:
    """Refuse a directory that lacks tensors of the model: they would be drawn at random.

    Names and shapes in the headers of files suffice if a model is stored as the installed
    transformers would store it. Otherwise (an old model, or a base model) it is loaded.
    """
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
    required = {
        name: tuple(tensor.shape)
        for name, tensor in revert_weight_conversion(policy, policy.state_dict()).items()
        if name not in policy.all_tied_weights_keys
    }
    stored: dict[str, tuple[int, ...]] = {}
    try:
        for file in directory.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                names = set(tensors.keys())
                stored |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Copy it again") from error
    if not required.items() <= stored.items():
        load_policy(directory, dtype="bfloat16")
