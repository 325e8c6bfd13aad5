"""Model directories that cannot be trained are refused when a run is prepared, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from areal_flow.config import build_recipe
from areal_flow.core.errors import ModelError
from areal_flow.core.layout import RunLayout
from areal_flow.policy.models.policy import load_policy, policy_from_config
from areal_flow.policy.models.probe import probe_policy
from areal_flow.policy.tokenizer.directory import (
    check_model_directory,
    check_stop_tokens,
    tokenizer_of,
)
from pipelines.jobs.built_in import prepare_model
from tests.policies import write_model_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model")


def change(file: Path, **settings: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | settings))


def change_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def prepare(directory: Path) -> None:
    check_model_directory(directory)
    probe_policy(directory, max_model_len=64)


def test_whole_directory_is_accepted(model: Path) -> None:
    prepare(model)


def test_stop_token_that_the_tokenizer_lacks_is_refused(model: Path) -> None:
    check_stop_tokens(model, [0, 5])
    with pytest.raises(ModelError, match=r"stop.token_ids: .*found 4711: its tokenizer has \d+"):
        check_stop_tokens(model, [5, 4711])


def test_loading_draws_no_bars_and_leaves_those_of_others(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    load_policy(model)
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()


def test_tokenizer_with_ids_beyond_the_vocabulary_is_refused(model: Path) -> None:
    change(model / "config.json", vocab_size=300)
    with pytest.raises(ModelError, match=r"vocab_size \(300\), found \d+ beyond it"):
        prepare(model)


@pytest.mark.parametrize("stop", [100_000, [1, -1]])
def test_stop_token_outside_the_vocabulary_is_refused(model: Path, stop: Any) -> None:
    change(model / "generation_config.json", eos_token_id=stop)
    with pytest.raises(ModelError, match=r"expected an eos_token_id below .* found (100000|-1)"):
        prepare(model)


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no system') }}"])
def test_chat_template_that_does_not_render_is_refused(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    prepare(model)
    (model / "chat_template.jinja").unlink()
    change(model / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match="chat template does not render"):
        prepare(model)


def test_missing_tensors_are_refused_and_named_rather_than_drawn_at_random(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    for refused in (prepare, load_policy):
        with pytest.raises(ModelError, match=r"lacks 1 .* model\.layers\.1\.mlp\.up_proj\.weight"):
            refused(model)


def test_tensors_of_another_shape_are_refused(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelError, match="expected a Hugging Face model directory"):
        prepare(model)


def test_truncated_weights_are_refused(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="cannot be read"):
        prepare(model)


def test_other_names_of_stored_tensors_are_understood(model: Path, tmp_path: Path) -> None:
    """A base model's names, experts stored one by one, and a tied head are all complete."""
    change_tensors(
        model,
        lambda tensors: [
            tensors.update({name.removeprefix("model."): tensors.pop(name)})
            for name in list(tensors)
        ],
    )
    prepare(model)
    experts = Qwen3MoeConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    policy_from_config(experts).save_pretrained(tmp_path / "experts")
    probe_policy(tmp_path / "experts", max_model_len=64)


def test_directory_with_the_name_of_a_model_made_here_is_refused_and_taken_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layout, settings = RunLayout(tmp_path / "run"), {"generation": {"max_model_len": 128}}
    (tmp_path / "tiny").mkdir()
    prepare_model(build_recipe({"model": "tiny", **settings}, source="test"), layout)
    write_model_directory(tmp_path / "tiny")
    with pytest.raises(ModelError, match=r"model directory .*/tiny: write './tiny' for the dir"):
        prepare_model(build_recipe({"model": "tiny", **settings}, source="test"), layout)
    prepare_model(build_recipe({"model": "./tiny", **settings}, source="test"), layout)
    config = json.loads((layout.model / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048, "the directory's own"


def test_damaged_tokenizer_is_called_damaged_with_what_to_restore(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(
        ModelError, match=r"tokenizer\.json is missing or damaged .*restore it from"
    ):
        tokenizer_of(model)
