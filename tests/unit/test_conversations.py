"""Rows of messages: rendered by the chat template, only answers trained, refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from areal_flow.config import build_recipe
from areal_flow.core.errors import ModelError, PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.policy.tokenizer.directory import chat_template_of, stop_token_ids, tokenizer_of
from areal_flow.rollout.prompts.completions import RowEncoder
from areal_flow.training.sft import CompletionRows
from pipelines.jobs.sft import prepare_sft
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.chat_templates import (
    CHATML,
    FORGETS_REASONING,
    HERMES,
    LLAMA_2,
    LLAMA_3,
    give_chat_template,
)

SHOWS_NO_REASONING = CHATML.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content }}",
)
"""As Qwen3's: an answer without reasoning is shown with none."""


def message_of(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, ANSWERED, WRONG = (
    message_of("user", "1 + 1 ="),
    message_of("assistant", "2"),
    message_of("assistant", "3"),
)
AGAIN, SAME = message_of("user", "2 - 1 ="), message_of("assistant", "1")
SYSTEM = message_of("system", "Be brief.")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    write_tiny_model(made.model, max_model_len=512)
    give_chat_template(made.model, CHATML)
    return made


def learn(layout: RunLayout, *rows: dict[str, Any], objective: str = "dpo") -> CompletionRows:
    """Prepare rows as the job does; return the training rows."""
    path = layout.root / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"objective": objective, "path": str(path), "num_steps": 1}
    num_rows = prepare_sft(layout, build_recipe({"sft": sft}, source="test"))
    num_completions = 1 if objective == "cross_entropy" else 2
    completions = CompletionRows.read(layout.sft_rows, num_completions=num_completions)
    assert num_rows == len(completions) == len(rows)
    return completions


def shown(layout: RunLayout, rows: CompletionRows) -> list[tuple[str, list[str]]]:
    """Return prompt and trained texts of each sequence of the first row."""
    tokenizer = tokenizer_of(layout.model)
    return [
        (
            tokenizer.decode(sequence.prompt_tokens.tolist(), skip_special_tokens=False),
            trained_texts(tokenizer, sequence),
        )
        for sequence in rows.sequences(0)
    ]


def trained_texts(tokenizer: Tokenizer, sequence: Any) -> list[str]:
    texts, earlier = list[str](), False
    for token, trained in zip(sequence.output_tokens, sequence.trained, strict=True):
        if trained:
            text = tokenizer.decode([int(token)], skip_special_tokens=False)
            texts = [*texts[:-1], texts[-1] + text] if earlier else [*texts, text]
        earlier = bool(trained)
    return texts


@pytest.mark.parametrize("template", [CHATML, HERMES, LLAMA_2, LLAMA_3])
def test_conversation_is_what_transformers_renders_with_its_answers_trained(
    layout: RunLayout, template: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    give_chat_template(layout.model, template)
    reference = PreTrainedTokenizerFast.from_pretrained(layout.model)
    reference.chat_template = template
    messages = [ASKED, WRONG, AGAIN, SAME]
    rows = learn(layout, {"messages": messages}, objective="cross_entropy")
    (sequence,) = rows.sequences(0)
    tokens = [*sequence.prompt_tokens, *sequence.output_tokens]
    expected = reference.apply_chat_template(messages)["input_ids"]
    assert tokens == expected[: len(tokens)]
    assert not reference.decode(expected[len(tokens) :]).strip()
    end = reference.convert_tokens_to_ids("<|im_end|>")
    assert sequence.output_tokens[sequence.trained].tolist().count(end) == 2
    answers = [text.strip() for text in trained_texts(tokenizer_of(layout.model), sequence)]
    assert [text.replace(" ", "") for text in answers] == ["3<|im_end|>", "1<|im_end|>"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG]},
        {"prompt": [ASKED], "chosen": "2", "rejected": "3"},
        {"prompt": "1 + 1 =", "chosen": [ANSWERED], "rejected": [WRONG]},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
        {"prompt": "1 + 1 =", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
        {
            "chosen": "\n\nHuman: 1 + 1 =\n\nAssistant: 2",
            "rejected": "\n\nHuman: 1 + 1 =\n\nAssistant: 3",
        },
    ],
)
def test_preference_pairs_of_all_published_formats_are_equal(
    layout: RunLayout, row: dict[str, Any]
) -> None:
    prompt = "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"
    rows = learn(layout, row)
    assert shown(layout, rows) == [(prompt, ["2<|im_end|>"]), (prompt, ["3<|im_end|>"])]
    rows = learn(layout, row, objective="reward_model")
    assert shown(layout, rows) == [(prompt, ["2"]), (prompt, ["3"])]


def test_prompt_of_whole_conversations_goes_to_where_they_part(layout: RunLayout) -> None:
    """Earlier answers are context; later messages belong to each completion."""
    beginning = [SYSTEM, ASKED, ANSWERED, AGAIN]
    chosen, rejected = [*beginning, SAME], [*beginning, WRONG, message_of("user", "No."), SAME]
    rows = learn(layout, {"chosen": chosen, "rejected": rejected})
    chat = chat_template_of(layout.model)
    assert chat is not None
    prompt = chat.render(beginning)
    trained = [["1<|im_end|>"], ["3<|im_end|>", "1<|im_end|>"]]
    assert shown(layout, rows) == [(prompt, texts) for texts in trained]


def test_answer_is_as_the_template_shows_it(layout: RunLayout) -> None:
    give_chat_template(layout.model, SHOWS_NO_REASONING)
    row = {"prompt": [ASKED], "completion": [ANSWERED]}
    ((_, texts),) = shown(layout, learn(layout, row, objective="cross_entropy"))
    assert texts == ["<think></think>2<|im_end|>"]


@pytest.mark.parametrize("content", [None, "I ask."])
def test_calls_of_tools_are_an_answer_with_or_without_content(
    layout: RunLayout, content: str | None
) -> None:
    give_chat_template(layout.model, HERMES)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asks = {"role": "assistant", "content": content, "tool_calls": [call]}
    messages = [ASKED, asks, message_of("tool", "2"), ANSWERED]
    rows = learn(layout, {"messages": messages}, objective="cross_entropy")
    prompt, answered = trained_texts(tokenizer_of(layout.model), *rows.sequences(0))
    function = '{"name": "add", "arguments": {"a": 1}}'
    assert prompt == f"{content or ''}<tool_call>\n{function}\n</tool_call><|im_end|>"
    assert answered == "2<|im_end|>"


def test_answer_ends_with_the_stop_token_that_the_template_has_there(layout: RunLayout) -> None:
    """Llama 3 names `<|end_of_text|>` first, and ends answers with `<|eot_id|>`."""
    tokenizer = tokenizer_of(layout.model)
    end, other = (tokenizer.token_to_id(text) for text in ("<|im_end|>", "<s>"))
    assert stop_token_ids(layout.model) == (end,)
    encoder = RowEncoder(
        tokenizer, stop_token_ids=(other, end), chat=chat_template_of(layout.model)
    )
    of_messages = {"prompt": [ASKED], "completion": [ANSWERED]}
    _, ((turn,),) = encoder.encode(of_messages, ("completion",))
    assert turn[-1] == end
    _, ((turn,),) = encoder.encode({"prompt": "1 +", "completion": "2"}, ("completion",))
    assert turn[-1] == other


def test_conversation_without_a_system_message_has_that_of_the_recipe(layout: RunLayout) -> None:
    path = layout.root / "rows.jsonl"
    own = message_of("system", "Ramble.")
    for messages, expected in (([ASKED, SAME], SYSTEM), ([own, ASKED, SAME], own)):
        path.write_text(json.dumps({"messages": messages}) + "\n")
        table = {
            "sft": {"path": str(path), "num_steps": 1},
            "prompts": {"chat_template": True, "system_prompt": SYSTEM["content"]},
        }
        prepare_sft(layout, build_recipe(table, source="test"))
        ((prompt, _),) = shown(layout, CompletionRows.read(layout.sft_rows))
        assert prompt.startswith(f"<|im_start|>system\n{expected['content']}<|im_end|>\n")
        assert prompt.count("system") == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"chosen": [ASKED, ANSWERED], "rejected": [AGAIN, WRONG]},
            "part at message 1, which is user and user",
        ),
        (
            {"chosen": [ASKED, ANSWERED, ASKED, SAME], "rejected": [ASKED, ANSWERED, AGAIN, SAME]},
            "part at message 3, which is user and user",
        ),
        (
            {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, ANSWERED, AGAIN, SAME]},
            "part at message 3, which is the end and user",
        ),
        (
            {"chosen": [ASKED, ANSWERED], "rejected": [WRONG]},
            "part at message 1, which is user and assistant",
        ),
        (
            {"prompt": [ASKED], "chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
            "field 'chosen': expected the assistant's message first, since the row has a prompt",
        ),
        (
            {"prompt": "?", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
            "field 'prompt': expected a message of the conversation in field 'chosen'",
        ),
        (
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG, AGAIN]},
            "field 'rejected': expected the assistant's message at the end, found user",
        ),
        (
            {"prompt": [ASKED, ANSWERED], "chosen": [ANSWERED], "rejected": [WRONG]},
            "field 'prompt': expected the user's message at the end, found assistant",
        ),
        (
            {"chosen": [ANSWERED], "rejected": [WRONG]},
            "field 'prompt' is missing; found fields: chosen, rejected",
        ),
        ({"prompt": [ASKED], "chosen": [ANSWERED]}, "field 'rejected' is missing"),
        (
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": []},
            "field 'rejected': expected messages, found none",
        ),
        (
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [message_of("assistant", " ")]},
            "field 'rejected': expected non-empty text",
        ),
        (
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]},
            "fields 'chosen' and 'rejected': found the same text twice",
        ),
        (
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [{"role": "assistant"}]},
            "field 'rejected': expected messages with role and content as text",
        ),
    ],
)
def test_invalid_pair_is_reported_by_line(
    layout: RunLayout, row: dict[str, Any], expected: str
) -> None:
    good = {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG]}
    with pytest.raises(PromptError) as raised:
        learn(layout, good, row)
    assert "rows.jsonl, line 2: " in str(raised.value)
    assert expected in str(raised.value)


def test_template_that_rewrites_answers_is_refused_where_that_changes_them(
    layout: RunLayout,
) -> None:
    give_chat_template(layout.model, FORGETS_REASONING)
    learn(layout, {"messages": [ASKED, ANSWERED]}, objective="cross_entropy")
    thought = message_of("assistant", "<think>1</think>2")
    with pytest.raises(PromptError, match="field 'messages': the chat template rewrites the answ"):
        learn(layout, {"messages": [ASKED, thought]}, objective="cross_entropy")
    with pytest.raises(PromptError, match="field 'messages': the chat template rewrites the answ"):
        learn(layout, {"messages": [ASKED, thought, AGAIN, SAME]}, objective="cross_entropy")
    rows = learn(layout, {"messages": [ASKED, ANSWERED, AGAIN, SAME]}, objective="cross_entropy")
    assert [texts for _, texts in shown(layout, rows)] == [["2<|im_end|>", "1<|im_end|>"]]
    give_chat_template(layout.model, SHOWS_NO_REASONING)
    with pytest.raises(PromptError, match="field 'messages': the chat template rewrites earlier"):
        learn(layout, {"messages": [ASKED, ANSWERED, AGAIN, SAME]}, objective="cross_entropy")


def test_messages_are_refused_where_there_is_no_chat_template(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_tiny_model(layout.model, max_model_len=512)
    expected = r"no chat template.*use a chat model's tokenizer.*text: prompt and chosen and reject"
    with pytest.raises(ModelError, match=expected):
        learn(layout, {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG]})


def test_text_prompts_beside_a_messages_column_stay_text(layout: RunLayout) -> None:
    row = {"prompt": "1 + 1 =", "completion": "2", "messages": [ASKED, WRONG]}
    ((prompt, texts),) = shown(layout, learn(layout, row, objective="cross_entropy"))
    assert (prompt, texts) == ("1 + 1 =", ["2<|im_end|>"])
