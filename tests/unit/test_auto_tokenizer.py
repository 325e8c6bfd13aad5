"""A run tokenises as `AutoTokenizer` does with the model that it exports."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from areal_flow.config import build_recipe
from areal_flow.core.errors import ModelError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import create_run
from areal_flow.policy.models.policy import empty_policy
from areal_flow.policy.tokenizer.auto_tokenizer import (
    auto_tokenizer,
    warn_of_other_tokens,
    write_tokenizer,
)
from areal_flow.policy.tokenizer.chat import tool_schema
from areal_flow.policy.tokenizer.directory import (
    chat_template_of,
    check_model_directory,
    copy_model_description,
    prompt_tokens,
    tokenizer_of,
)
from areal_flow.rollout.prompts.table import PromptTable
from pipelines.jobs.built_in import MODELS, prepare_model, reference_model
from pipelines.jobs.prepare import prepare_run
from pipelines.jobs.sft import prepare_sft_run
from tests.chat_templates import (
    CHATML,
    FORGETS_REASONING,
    HERMES,
    LLAMA_3,
    give_chat_template,
)
from tests.unit.test_distillation import DISTILLATION

SUM, WORDS = "12 + 7 - 3 =", "compute the sum\n of 12 and 30"


def write_own_model(directory: Path, *, tokenizer_class: str | None = None) -> Path:
    """Write a Qwen2 whose tokenizer.json splits text differently from Qwen2's tokenizer."""
    MODELS["tiny"](directory, max_model_len=96)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    named = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    settings = {**named, "eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def prepared(source: Path, target: Path) -> Path:
    copy_model_description(source, target)
    write_tokenizer(source, target)
    return target


@pytest.mark.parametrize("tokenizer_class", [None, "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_run_has_the_tokens_that_auto_tokenizer_has_before_and_after_export(
    tmp_path: Path, tokenizer_class: str | None
) -> None:
    source = write_own_model(tmp_path / "source", tokenizer_class=tokenizer_class)
    run = prepared(source, tmp_path / "run")
    for directory in (source, run):
        expected = AutoTokenizer.from_pretrained(directory)
        for text in (SUM, WORDS):
            tokens = tokenizer_of(run).encode(text).ids
            assert tokens == expected(text)["input_ids"]
            assert tokenizer_of(run).decode(tokens) == expected.decode(tokens) == text
    assert tokenizer_of(source).encode(SUM).ids != tokenizer_of(run).encode(SUM).ids


def trainable_own_model(directory: Path) -> Path:
    file = write_own_model(directory) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": 32, "rope_theta": 1e4}))
    empty_policy(directory).save_pretrained(directory)
    return directory


def test_copy_of_a_model_has_no_token_beyond_its_embedding(tmp_path: Path) -> None:
    """AutoTokenizer adds `<|endoftext|>` to a Qwen2 without it, as a 531st of 530 tokens."""
    layout = RunLayout(tmp_path / "run")
    source = trainable_own_model(tmp_path / "source")
    table = {"model": str(source), "algorithm": {**DISTILLATION, "reference": str(source)}}
    recipe = build_recipe(table, source="test")
    prepare_model(recipe, layout)
    shutil.copy(source / "model.safetensors", layout.model)
    check_model_directory(layout.model)
    tokens = tokenizer_of(layout.model).encode(f"{SUM}<|endoftext|>").ids
    assert max(tokens) < 530
    assert reference_model(recipe, layout) == source, "its own tokens are the policy's"
    again = prepared(layout.model, tmp_path / "again")
    assert tokenizer_of(again).to_str() == tokenizer_of(layout.model).to_str()


@pytest.mark.parametrize("model", MODELS)
def test_auto_tokenizer_takes_the_file_of_a_model_made_here_as_it_is(
    tmp_path: Path, model: str
) -> None:
    MODELS[model](tmp_path, max_model_len=96)
    file, expected = tokenizer_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert auto_tokenizer(tmp_path).to_str() == file.to_str(), "or forks would change it"
    for text in (SUM, WORDS, "(3 + 4) * 2 = <calc>", "def f(x):\n    return x - 1\n"):
        tokens = file.encode(text).ids
        assert tokens == expected(text)["input_ids"]
        assert file.decode(tokens) == expected.decode(tokens)


def test_warning_shows_both_tokenisations_of_the_first_text_that_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = prepared(write_own_model(tmp_path / "source"), tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        warn_of_other_tokens(run, run, [SUM])
        assert not caplog.records
        warn_of_other_tokens(tmp_path / "source", run, ["=", SUM])
    (record,) = caplog.records
    message = record.getMessage()
    assert "1 of the first 2 texts" in message
    assert "tokenizer.json: ['1', '2', 'Ġ+Ġ7'" in message
    assert "AutoTokenizer:  ['1', '2', 'Ġ+', 'Ġ'" in message
    assert "model_type" not in message, "with another one a model may load without its biases"


def test_tokenizer_that_does_not_load_is_refused(tmp_path: Path) -> None:
    source = write_own_model(tmp_path / "source")
    file = source / "tokenizer_config.json"
    file.write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": 5}))
    with pytest.raises(ModelError, match="AutoTokenizer cannot load the tokenizer: "):
        write_tokenizer(source, source)


def llama_like(directory: Path, *, after: str = "") -> Tokenizer:
    """Return the tiny tokenizer with special tokens that it adds around a text."""
    MODELS["tiny"](directory, max_model_len=96)
    tokenizer = tokenizer_of(directory)
    marks = [("<pad>", 0), ("<eos>", 1)]
    tokenizer.post_processor = TemplateProcessing(f"<pad> $A {after}".strip(), special_tokens=marks)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def test_prompt_begins_with_special_tokens_as_transformers_puts_them_but_once(
    tmp_path: Path,
) -> None:
    llama_like(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)(SUM)["input_ids"]
    tokenizer = tokenizer_of(tmp_path)
    assert expected[0] == 0
    assert prompt_tokens(tokenizer, SUM) == expected
    assert prompt_tokens(tokenizer, f"<pad>{SUM}") == expected
    assert prompt_tokens(llama_like(tmp_path, after="<eos>"), SUM) == expected
    assert prompt_tokens(tokenizer, "") == []


TOOLS = [tool_schema("add", "Add.")]


def in_a_list(directory: Path, tool_use: str) -> None:
    templates = [
        {"name": "tool_use", "template": tool_use},
        {"name": "default", "template": CHATML},
    ]
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))


def in_files(directory: Path, tool_use: str) -> None:
    (directory / "chat_template.jinja").write_text(CHATML)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)


@pytest.mark.parametrize("put", [in_a_list, in_files])
def test_template_for_tools_is_chosen_as_apply_chat_template_does(
    tmp_path: Path, put: Callable[[Path, str], None]
) -> None:
    source, messages = tmp_path / "source", [{"role": "user", "content": "1 + 1 ="}]
    MODELS["tiny"](source, max_model_len=96)
    give_chat_template(source, CHATML)
    plain = chat_template_of(source)
    put(source, HERMES)
    run = prepared(source, tmp_path / "run")
    chat, transformers_s = chat_template_of(run), AutoTokenizer.from_pretrained(run)
    assert chat is not None
    assert plain is not None
    for tools in ([], TOOLS):
        assert chat.render(messages, tools=tools) == transformers_s.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    assert '"name": "add"' in chat.render(messages, tools=TOOLS)
    assert "<tool_response>" in chat.next_turn("2", ended_by="<|im_end|>", role="tool")
    assert chat.call_start == "<tool_call>"
    assert chat.sha256 != plain.sha256


def test_template_for_tools_that_rewrites_answers_is_refused_with_tools_alone(
    tmp_path: Path,
) -> None:
    MODELS["tiny"](tmp_path, max_model_len=96)
    give_chat_template(tmp_path, CHATML)
    in_a_list(tmp_path, FORGETS_REASONING)
    chat = chat_template_of(tmp_path)
    assert chat is not None
    messages = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    assert chat.following(messages, 1, ended_by="<|im_end|>")
    with pytest.raises(ValueError, match="rewrites earlier answers"):
        chat.following(messages, 1, ended_by="<|im_end|>", tools=TOOLS)


def with_other_default(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "default.jinja").write_text("other")


@pytest.mark.parametrize(("spoil", "is_refused"), [(None, False), (with_other_default, True)])
def test_chat_template_is_rendered_as_apply_chat_template_does(
    tmp_path: Path, spoil: Callable[[Path], None] | None, is_refused: bool
) -> None:
    MODELS["tiny"](tmp_path / "source", max_model_len=96)
    give_chat_template(tmp_path / "source", LLAMA_3)
    if spoil is None:
        prepared(tmp_path / "source", tmp_path / "run")
        return
    spoil(tmp_path / "source")
    with pytest.raises(ModelError, match="as apply_chat_template does, 'other', found '<s>"):
        prepared(tmp_path / "source", tmp_path / "run")


@pytest.mark.parametrize("condition", ["messages[0].role == 'system'", "tools"])
def test_chat_template_is_compared_with_a_system_message_and_with_tools(
    tmp_path: Path, condition: str
) -> None:
    """`unk_token` is in no file: only the class of the tokenizer has one."""
    source = write_own_model(tmp_path / "source")
    named = "{% if " + condition + " %}{{ unk_token }}{% endif %}"
    (source / "chat_template.jinja").write_text(named + CHATML)
    with pytest.raises(ModelError, match=r"as apply_chat_template does, '<\|endoftext\|>"):
        prepared(source, tmp_path / "run")


@pytest.mark.parametrize("job", ["train", "sft"])
def test_prepared_run_has_auto_tokenizers_tokens_and_a_warning(
    tmp_path: Path, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = trainable_own_model(tmp_path / "source")
    sums = [{"question": SUM, "answer": str(n), "prompt": SUM, "completion": f" {n}"} for n in "12"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
    table = {
        "model": str(source),
        "prompts": {"path": str(rows), "source": "file", "num_held_out": 0},
        "sft": {"path": str(rows), "num_steps": int(job == "sft"), "batch_size": 1},
        "generation": {"max_model_len": 96, "max_new_tokens": 8},
    }
    recipe, layout = build_recipe(table, source="test"), RunLayout(tmp_path / "run")
    create_run(layout, recipe)
    with caplog.at_level(logging.WARNING):
        (prepare_sft_run if job == "sft" else prepare_run)(layout, recipe)
    warnings = [
        r.getMessage() for r in caplog.records if "otherwise than tokenizer.json" in r.message
    ]
    assert len(warnings) == 1
    expected = AutoTokenizer.from_pretrained(source)(SUM)["input_ids"]
    if job == "sft":
        assert np.load(layout.sft_rows)["tokens"][: len(expected)].tolist() == expected
    else:
        assert PromptTable(layout.train_prompts, seed=0).row(0).tokens.tolist() == expected
