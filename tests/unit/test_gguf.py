"""GGUF is refused wherever a model is named, with code that converts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import areal_flow
from areal_flow.core.errors import ModelError
from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.policy.tokenizer.directory import check_model_directory, resolve_model, tokenizer_of
from pipelines.cli.main import main
from tests.policies import write_model_directory

HIDDEN, VOCAB = 32, 256
Q8 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """Write a one-layer Llama; return its weights as dequantized from eight bits."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "a", "b", "ab", *(f"t{at}" for at in range(4, VOCAB))])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    drawn, weights = np.random.default_rng(0), {}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in ("token_embd", *(f"blk.0.{name}" for name in matrices)):
        shape = (VOCAB if name == "token_embd" else HIDDEN, HIDDEN)
        packed = gguf.quants.quantize(drawn.normal(size=shape).astype(np.float32), Q8)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=Q8)
        weights[name] = gguf.quants.dequantize(packed, Q8)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def train(model: str) -> None:
    areal_flow.train(model=model)


def fine_tune(model: str) -> None:
    rows = [{"prompt": "1 + 1 =", "completion": " 2"}] * 2
    areal_flow.sft(model=model, rows=rows, sft={"num_steps": 1})


def evaluate(model: str) -> None:
    areal_flow.evaluate(model)


@pytest.mark.parametrize("use", [train, fine_tune, evaluate])
@pytest.mark.parametrize("name", ["models", "models/tiny.gguf"])
def test_gguf_is_refused_wherever_a_model_is_named(
    use: Callable[[str], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"GGUF is not trained: (.*\n)+.*gguf_file='tiny.gguf'"):
        use(name)


def test_folder_with_safetensors_too_is_a_model(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path / "model")
    (model / "tiny.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(model)) == model


def test_lines_of_the_message_convert_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--memory", "--model", "tiny.gguf"]) == 1
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()[1:]]
    # In a process of its own: in this one transformers takes accelerate for missing.
    script = "\n".join(["from transformers import AutoModelForCausalLM, AutoTokenizer", *lines])
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    check_model_directory(tmp_path / "NEW")
    assert tokenizer_of(tmp_path / "NEW").get_vocab_size() == VOCAB
    tensors = policy_tensors(load_policy(tmp_path / "NEW"))
    for name, ours in (("token_embd", "embed_tokens"), ("blk.0.ffn_up", "layers.0.mlp.up_proj")):
        in_bfloat16 = torch.from_numpy(weights[name]).bfloat16().float()
        assert torch.equal(tensors[f"model.{ours}.weight"], in_bfloat16)
