"""OpenAI's tool conversations in SFT and DPO: the template's tokens, and only answers trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_flow.config import build_recipe
from areal_flow.core.errors import ModelError, PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.training.sft import CompletionRows
from pipelines.jobs.sft import check_first_sft_rows, prepare_sft
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.chat_templates import CHATML, HERMES, give_chat_template
from tests.unit.test_conversations import trained_texts

CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}Functions:\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}"
    "{% set is_result = message.role == 'tool' %}"
    "{% if not (is_result and loop.previtem.role == 'tool') %}"
    "<|im_start|>{{ 'user' if is_result else message.role }}\n{% endif %}"
    "{% if is_result %}<result>{{ message.content }}</result>{% else %}{{ message.content }}"
    "{% endif %}{% for call in message.tool_calls or [] %}\n<call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</call>{% endfor %}"
    "{% if not (is_result and not loop.last and loop.nextitem.role == 'tool') %}<|im_end|>\n"
    "{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tools in the system message; results side by side share a turn of the user."""
LLAMA_TOOLS = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end|>\n\n"
    "{% if tools and loop.index0 == 0 %}{% for tool in tools %}{{ tool | tojson(indent=2) }}\n\n"
    "{% endfor %}{% endif %}{% if message.role == 'tool' %}{{ message.content | tojson }}"
    "{% else %}{{ message.content | trim }}{% endif %}{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{{ '; ' if not loop.last else '' }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
"""Tools before the first message; results as JSON, for the role ipython."""
MISTRAL_TOOLS = (
    "{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and message == last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {{ message.content }}[/INST]{% elif message.role == 'tool' %}"
    "{% if loop.previtem.role not in ('tool', 'assistant') %}{{ raise_exception('no call') }}"
    "{% endif %}[TOOL_RESULTS] {{ {'content': message.content, 'call_id': message.tool_call_id} "
    "| tojson }}[/TOOL_RESULTS]{% elif message.tool_calls %}{{ message.content }}[TOOL_CALLS] ["
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{{ ', ' if not loop.last "
    "else '' }}{% endfor %}]<|im_end|>{% elif message.role == 'assistant' %} {{ message.content }}"
    "<|im_end|>{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
)
"""Tools before the user's last message, wherever that is."""
TEMPLATES = {"chatml": CHATML_TOOLS, "llama": LLAMA_TOOLS, "mistral": MISTRAL_TOOLS}


def message(role: str, content: str | None, **rest: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **rest}


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "number"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": [*arguments]}
    function = {"name": name, "description": f"To {name}.", "parameters": schema}
    return {"type": "function", "function": function}


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(number: int, content: str) -> dict[str, Any]:
    return message("tool", content, tool_call_id=f"call{number:05d}")


TOOLS = [tool("add", "a", "b"), tool("negate", "a")]
ADD, NEGATE = {"a": 1, "b": 2}, {"a": 3}
CONVERSATION = [
    message("user", "1 + 2 ="),
    message("assistant", "", tool_calls=[call(1, "add", ADD), call(2, "negate", NEGATE)]),
    result(1, "3"),
    result(2, 'Error: "a" is\nmissing'),
    message("assistant", None, tool_calls=[call(3, "negate", NEGATE)]),
    result(3, "-3"),
    message("assistant", "3 and -3"),
    message("user", "1 + 2 ="),
    message("assistant", "3"),
]


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI writes them: arguments are JSON in a text."""
    return json.loads(json.dumps(messages), object_hook=_as_text)


def _as_text(value: dict[str, Any]) -> dict[str, Any]:
    arguments = value.get("arguments")
    return {**value, "arguments": json.dumps(arguments)} if arguments else value


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    write_tiny_model(made.model, max_model_len=512)
    return made


def learn(layout: RunLayout, path: Path, objective: str = "cross_entropy") -> CompletionRows:
    sft = {"objective": objective, "path": str(path), "num_steps": 1}
    recipe = build_recipe({"sft": sft}, source="test")
    check_first_sft_rows(recipe)
    prepare_sft(layout, recipe)
    return CompletionRows.read(layout.sft_rows, num_completions=1 if "cross" in objective else 2)


def write(layout: RunLayout, *rows: dict[str, Any]) -> Path:
    path = layout.root.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reference_tokens(layout: RunLayout, template: str, messages: Any, tools: Any) -> list[int]:
    """Return what transformers makes of a conversation, without what follows its last answer."""
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(layout.model)
    shown = [{**each, "content": each["content"] or ""} for each in messages]
    tokens: list[int] = reference.apply_chat_template(shown, tools=tools, chat_template=template)[
        "input_ids"
    ]
    end = reference.convert_tokens_to_ids("<|im_end|>")
    return tokens[: len(tokens) - tokens[::-1].index(end)]


ANSWERS = {
    "chatml": (
        '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>'
        '<call>{"name": "negate", "arguments": {"a": 3}}</call>',
        '<call>{"name": "negate", "arguments": {"a": 3}}</call>',
    ),
    "llama": (
        '{"name": "add", "parameters": {"a": 1, "b": 2}}; '
        '{"name": "negate", "parameters": {"a": 3}}',
        '{"name": "negate", "parameters": {"a": 3}}',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, '
        '{"name": "negate", "arguments": {"a": 3}}]',
        '[TOOL_CALLS] [{"name": "negate", "arguments": {"a": 3}}]',
    ),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_the_template_and_the_mask_is_the_answers(
    layout: RunLayout, name: str, kind: str
) -> None:
    """Two calls side by side, an error, a second round, and another question of the same words."""
    give_chat_template(layout.model, TEMPLATES[name])
    row: dict[str, Any] = {"messages": CONVERSATION, "tools": TOOLS}
    path = write(layout, row)
    if kind == "text":
        path = write(
            layout,
            {"messages": with_text_arguments(CONVERSATION), "tools": json.dumps(TOOLS)},
        )
    if kind == "parquet":  # every call has the arguments of all calls, with nulls
        path = path.with_suffix(".parquet")
        pq.write_table(pa.Table.from_pylist([row]), path)
    (sequence,) = learn(layout, path).sequences(0)
    tokens = [*sequence.prompt_tokens, *sequence.output_tokens]
    assert tokens == reference_tokens(layout, TEMPLATES[name], CONVERSATION, TOOLS)
    space = " " if name == "mistral" else ""
    answers = [*ANSWERS[name], f"{space}3 and -3", f"{space}3"]
    texts = trained_texts(tokenizer_of(layout.model), sequence)
    assert texts == [f"{answer}<|im_end|>" for answer in answers]


@pytest.mark.parametrize("name", TEMPLATES)
def test_pairs_of_tool_conversations_share_their_prompt(layout: RunLayout, name: str) -> None:
    give_chat_template(layout.model, TEMPLATES[name])
    prompt, chosen = CONVERSATION[:1], CONVERSATION[1:7]
    rejected = [message("assistant", None, tool_calls=[call(1, "add", {"a": 2, "b": 2})])]
    rejected += [result(1, "4"), message("assistant", "4")]
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected},
        {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]},
    ]
    expected = [
        reference_tokens(layout, TEMPLATES[name], [*prompt, *completion], TOOLS)
        for completion in (chosen, rejected)
    ]
    for row in rows:
        pair = learn(layout, write(layout, {**row, "tools": TOOLS}), objective="dpo")
        sequences = pair.sequences(0)
        assert [[*s.prompt_tokens, *s.output_tokens] for s in sequences] == expected
        first, second = (
            trained_texts(tokenizer_of(layout.model), sequence) for sequence in sequences
        )
        assert (len(first), len(second)) == (3, 2)
        assert '"b": 2' in second[0]
    scored = learn(layout, write(layout, {**rows[0], "tools": TOOLS}), objective="reward_model")
    for sequence, tokens in zip(scored.sequences(0), expected, strict=True):
        assert [*sequence.prompt_tokens, *sequence.output_tokens] == tokens[:-1]


def test_pairs_that_part_at_a_call_share_the_messages_before_it(layout: RunLayout) -> None:
    give_chat_template(layout.model, CHATML_TOOLS)
    wrong = message("assistant", None, tool_calls=[call(3, "negate", {"a": 9})])
    row = {"chosen": CONVERSATION[:5], "rejected": [*CONVERSATION[:4], wrong], "tools": TOOLS}
    sequences = learn(layout, write(layout, row), objective="dpo").sequences(0)
    texts = [trained_texts(tokenizer_of(layout.model), sequence) for sequence in sequences]
    assert ['"a": 3' in texts[0][0], '"a": 9' in texts[1][0]] == [True, True]
    assert [len(each) for each in texts] == [1, 1]


NO_CALLS = CHATML_TOOLS.replace("message.tool_calls or []", "[]")
NO_RESULTS = CHATML_TOOLS.replace("<result>{{ message.content }}</result>", "")


@pytest.mark.parametrize(
    ("template", "change", "error", "expected"),
    [
        (CHATML, {}, ModelError, "does not tell the policy of the tools add, negate: give"),
        (
            NO_CALLS,
            {},
            PromptError,
            "line 1: field 'messages': the chat template does not show the ",
        ),
        (NO_RESULTS, {}, PromptError, "does not show the tool's result '3'"),
        (HERMES, {"tools": 3}, PromptError, "field 'tools': expected a list of JSON schemas"),
        (HERMES, {"tools": "[1]"}, PromptError, "field 'tools': expected a list of JSON schemas"),
        (
            HERMES,
            {"messages": [*CONVERSATION[:1], message("assistant", "", tool_calls=[{"id": 1}])]},
            PromptError,
            "expected a call of a function with a name and JSON arguments",
        ),
        (
            HERMES,
            {
                "messages": [
                    *CONVERSATION[:1],
                    message("assistant", "", tool_calls=[call(1, "add", '{"a": ')]),
                ]
            },
            PromptError,
            "expected a call of a function with a name and JSON arguments",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    layout: RunLayout, template: str, change: dict[str, Any], error: Any, expected: str
) -> None:
    give_chat_template(layout.model, template)
    with pytest.raises(error) as raised:
        learn(layout, write(layout, {"messages": CONVERSATION, "tools": TOOLS, **change}))
    assert expected in str(raised.value)
