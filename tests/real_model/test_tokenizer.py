"""What the policy reads of GSM8K's rows: the tokens and the template that `AutoTokenizer` has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areal_flow.tokenizer.auto_tokenizer import write_tokenizer
from areal_flow.tokenizer.chat import ChatTemplate, Message, tool_schema
from areal_flow.tokenizer.directory import (
    chat_template_of,
    copy_model_description,
    prompt_tokens,
    stop_token_ids,
    tokenizer_of,
)
from tests.real_model.rows import SAMPLE, WRONG

END = "<|im_end|>"
TEXTS = [row[field] for row in SAMPLE for field in ("question", "answer")]
ADD = tool_schema("add", "Add numbers.")


@pytest.fixture(scope="module")
def auto(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def chat(model: Path) -> ChatTemplate:
    found = chat_template_of(model)
    assert found is not None
    return found


def said(*contents: str, first: str = "user", then: str = "assistant") -> list[Message]:
    roles = (first, then)
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]


def conversations() -> list[list[Message]]:
    """Of each row the question, its answer, and the next question after a wrong one."""
    by_row = [said(row["question"]) for row in SAMPLE]
    by_row += [said(row["question"], row["answer"]) for row in SAMPLE]
    after = [said(SAMPLE[at]["question"], wrong, "Try again.") for at, wrong in WRONG]
    brief: list[Message] = [{"role": "system", "content": "Be brief."}]
    return [*by_row, *after, *([*brief, *messages] for messages in by_row)]


def test_numbers_are_split_off_before_spaces_as_smollm_was_trained(model: Path, auto: Any) -> None:
    """llama.cpp's rule "smollm", which the GGUF file names; transformers reads it without."""
    golden = {
        "Here:\n\n1. Sum": ["Here", ":", "ĊĊ", "1", ".", "ĠSum"],
        "a  345": ["a", "ĠĠ", "3", "4", "5"],
        f"{END}\n": [END, "Ċ"],
    }
    for text, expected in golden.items():
        assert auto.tokenize(text) == expected
        assert tokenizer_of(model).encode(text).tokens == expected


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
    for directory in (model, tmp_path):
        tokenizer = tokenizer_of(directory)
        for text in TEXTS:
            tokens = prompt_tokens(tokenizer, text)
            assert tokens == auto(text)["input_ids"]
            assert tokenizer.decode(tokens) == auto.decode(tokens) == text


def test_conversations_are_rendered_as_apply_chat_template_does(
    auto: Any, chat: ChatTemplate
) -> None:
    for messages in conversations():
        for tools in ([], [ADD]):
            assert chat.render(messages, tools=tools) == auto.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=True
            )


def turns(chat: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    """Return a conversation as a run appends it: the prompt, then answers and what follows each."""
    parts = [chat.render(messages[:1])]
    for at in range(1, len(messages), 2):
        parts.append(messages[at]["content"] + END)
        following = [messages[at + 1]["content"]]
        parts.append(chat.next_turn(*following, ended_by=END, role=messages[at + 1]["role"]))
    return parts


@pytest.mark.parametrize("role", ["user", "tool"])
def test_turns_appended_one_by_one_are_the_conversation_rendered_at_once(
    model: Path, auto: Any, chat: ChatTemplate, role: str
) -> None:
    """Messages of tools too, whose role the template writes as it writes any."""
    tokenizer = tokenizer_of(model)
    for at, wrong in WRONG:
        row = SAMPLE[at]
        messages = said(row["question"], wrong, "72 / 2 = 36", row["answer"], "Is that all?")
        messages = [{**each, "role": role} if n == 2 else each for n, each in enumerate(messages)]
        whole = auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = [token for part in turns(chat, messages) for token in tokenizer.encode(part).ids]
        assert tokens == auto(whole, add_special_tokens=False)["input_ids"]


def test_answers_to_learn_are_what_the_template_shows(auto: Any, chat: ChatTemplate) -> None:
    for row in SAMPLE:
        messages = said(row["question"], row["answer"])
        answer, after = chat.answer(messages)
        assert answer == row["answer"]
        before = auto.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        assert after.startswith(END)
        assert before + answer + after == auto.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


def test_template_that_tells_of_no_tools_is_refused_for_agents_with_tools(
    chat: ChatTemplate,
) -> None:
    with pytest.raises(ValueError, match="does not tell the policy of tools"):
        _ = chat.call_start
