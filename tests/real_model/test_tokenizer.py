"""GSM8K's rows as the policy reads them: tokens and template equal `AutoTokenizer`'s."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areal_flow.policy.tokenizer.auto_tokenizer import write_tokenizer
from areal_flow.policy.tokenizer.chat import ChatTemplate, Message, tool_schema
from areal_flow.policy.tokenizer.directory import (
    chat_template_of,
    copy_model_description,
    prompt_tokens,
    stop_token_ids,
    tokenizer_of,
)
from tests.real_model.rows import SAMPLE, WRONG

END = "<|im_end|>"


@pytest.fixture(scope="module")
def auto(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def chat(model: Path) -> ChatTemplate:
    template = chat_template_of(model)
    assert template is not None
    return template


def conversation(*contents: str, second: str = "user") -> list[Message]:
    """Return messages of a user and the policy in turns; of the user's second one, the role."""
    roles = ("user", "assistant", second, "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def test_numbers_are_split_off_before_spaces_as_smollm_was_trained(model: Path, auto: Any) -> None:
    """llama.cpp's rule "smollm", which the GGUF file names; transformers reads it without."""
    golden = {
        "Here:\n\n1. Sum": ["Here", ":", "ĊĊ", "1", ".", "ĠSum"],
        "a  345": ["a", "ĠĠ", "3", "4", "5"],
        f"{END}\n": [END, "Ċ"],
    }
    for text, expected in golden.items():
        assert auto.tokenize(text) == tokenizer_of(model).encode(text).tokens == expected


def test_special_tokens_are_those_of_the_instruct_model(model: Path, auto: Any) -> None:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert [getattr(auto, f"{name}_id") for name in names] == [1, 2, 2, 0]
    assert auto.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", END]
    assert stop_token_ids(model) == (2,)
    assert auto.model_max_length == 8192


def test_rows_have_auto_tokenizers_tokens_in_the_model_and_in_a_run(
    model: Path, auto: Any, tmp_path: Path
) -> None:
    copy_model_description(model, tmp_path)
    write_tokenizer(model, tmp_path)
    for tokenizer in (tokenizer_of(model), tokenizer_of(tmp_path)):
        for text in (row[field] for row in SAMPLE for field in ("question", "answer")):
            tokens = prompt_tokens(tokenizer, text)
            assert tokens == auto(text)["input_ids"]
            assert tokenizer.decode(tokens) == text


def test_questions_and_answers_to_learn_are_rendered_as_apply_chat_template_does(
    auto: Any, chat: ChatTemplate
) -> None:
    render = partial(auto.apply_chat_template, tokenize=False, add_generation_prompt=True)
    for row in SAMPLE:
        messages = conversation(row["question"], row["answer"])
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            for tools in ([], [tool_schema("add", "Add numbers.")]):
                prompt = [*system, *messages[:1]]
                assert chat.render(prompt, tools=tools) == render(prompt, tools=tools or None)
        answer, after = chat.answer(messages)
        assert answer == row["answer"]
        assert render(messages[:1]) + answer + after == render(messages)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_turns_appended_one_by_one_are_the_conversation_rendered_at_once(
    model: Path, auto: Any, chat: ChatTemplate, role: str
) -> None:
    """Messages of tools too, whose role the template writes as it writes any."""
    encode = tokenizer_of(model).encode
    for at, wrong in WRONG:
        question, answer = SAMPLE[at]["question"], SAMPLE[at]["answer"]
        messages = conversation(question, wrong, "72 / 2 = 36", answer, "Is that all?", second=role)
        turns = [chat.render(messages[:1]), wrong + END]
        turns += [chat.next_turn("72 / 2 = 36", ended_by=END, role=role), answer + END]
        turns += [chat.next_turn("Is that all?", ended_by=END)]
        rendered = auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = [token for turn in turns for token in encode(turn).ids]
        assert tokens == auto(rendered, add_special_tokens=False)["input_ids"]


def test_template_that_tells_of_no_tools_is_refused_for_their_calls(chat: ChatTemplate) -> None:
    with pytest.raises(ValueError, match="does not tell the policy of tools"):
        _ = chat.call_start
