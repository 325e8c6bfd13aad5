"""Chats: rendered by the model's own template, tokenised once, refused where they cannot be."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_flow.config import Recipe, build_recipe, load_recipe
from areal_flow.core.errors import ConfigError, ModelError, PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Prompt
from areal_flow.log.audit.files import changed_chat_template
from areal_flow.log.directory import create_run
from areal_flow.log.lineage import Lineage
from areal_flow.policy.tokenizer.chat import ToolCall
from areal_flow.policy.tokenizer.directory import chat_template_of, tokenizer_of
from areal_flow.rollout.prompts.prepare import Prepared, prepare_prompts
from areal_flow.rollout.prompts.rendering import why_chat_template
from areal_flow.rollout.prompts.rows import messages_in
from areal_flow.rollout.prompts.table import PromptTable
from pipelines.jobs.built_in import MODELS
from pipelines.jobs.evaluate import evaluate_model
from pipelines.jobs.prepare import describe_prompts, prepare_run
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.chat_templates import (
    CHATML,
    FORGETS_REASONING,
    HERMES,
    LLAMA_2,
    LLAMA_3,
    give_chat_template,
)
from tests.policies import write_model_directory

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "1 + 1 ="}
TOOLS = {"name": "tool_use", "tools": ["calculator"]}
GAME = {"name": "openenv", "server": "http://127.0.0.1:8000"}
ONE_TURN_OF_TOOLS = (
    HERMES.replace(
        "{% for message in messages %}<|im_start|>",
        "{% for message in messages %}"
        "{% if message.role != 'tool' or loop.previtem.role != 'tool' %}<|im_start|>",
    )
    .replace("message.role }}\n", "message.role }}\n{% endif %}")
    .replace(
        "{% endfor %}<|im_end|>\n{% endfor %}",
        "{% endfor %}{% if message.role != 'tool' or loop.last or loop.nextitem.role != 'tool' %}"
        "<|im_end|>\n{% endif %}{% endfor %}",
    )
)
"""As Qwen2.5's: tools that answer side by side share a turn of the user's."""
CHAT = [
    {"role": "user", "content": "2 + 2 ="},
    {"role": "assistant", "content": " #### 4"},
    ASKED,
]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    write_tiny_model(made.model, max_model_len=512)
    give_chat_template(made.model, CHATML)
    return made


def recipe(path: Path, *, workflow: Any = None, **prompts: Any) -> Recipe:
    given = {"source": "file", "path": str(path), "num_held_out": 0, "chat_template": True}
    table: dict[str, Any] = {
        "prompts": {**given, **prompts},
        "generation": {"max_model_len": 512, "max_new_tokens": 32},
    }
    return build_recipe(table | ({"workflow": workflow} if workflow else {}), source="test")


def prepared(layout: RunLayout, row: dict[str, Any], **prompts: Any) -> Prompt:
    """Return the prompt of one row, written as JSONL and as Parquet."""
    path = layout.root.parent / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    pq.write_table(pa.Table.from_pylist([row]), path.with_suffix(".parquet"))
    tokens = []
    for file in (path, path.with_suffix(".parquet")):
        prepare_prompts(recipe(file, **prompts).prompt_plan(), layout)
        prompt = PromptTable(layout.train_prompts, seed=0).row(0)
        tokens.append(prompt.tokens.tolist())  # its file is about to be replaced
    assert tokens[0] == tokens[1]
    return prompt


def test_question_becomes_the_chat_that_transformers_renders(layout: RunLayout) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(layout.model)
    for template in (CHATML, LLAMA_3):
        give_chat_template(layout.model, template)
        reference.chat_template = template
        prompt = prepared(
            layout, {"question": "1 + 1 =", "answer": 2}, system_prompt=SYSTEM["content"]
        )
        expected = reference.apply_chat_template([SYSTEM, ASKED], add_generation_prompt=True)
        assert list(prompt.tokens) == expected["input_ids"]
        assert prompt.text == reference.decode(expected["input_ids"])


def test_special_tokens_stand_where_the_template_has_them_and_once(layout: RunLayout) -> None:
    give_chat_template(layout.model, LLAMA_3)
    prompt = prepared(layout, {"question": "1 + 1 =", "answer": 2})
    tokenizer = tokenizer_of(layout.model)
    assert prompt.tokens[0] == tokenizer.token_to_id("<s>")
    tokens = prompt.tokens.tolist()
    assert tokens.count(tokenizer.token_to_id("<s>")) == 1
    assert tokens.count(tokenizer.token_to_id("<|im_end|>")) == 1


def test_template_in_use_is_stored_shown_and_audited(layout: RunLayout) -> None:
    path = layout.root / "rows.jsonl"
    path.write_text(json.dumps({"question": "1 + 1 =", "answer": 2}) + "\n")
    prepared = prepare_prompts(recipe(path).prompt_plan(), layout)
    description = describe_prompts(prepared, layout)
    digest = hashlib.sha256(CHATML.encode()).hexdigest()
    assert json.loads(layout.chat_template.read_text()) == {"sha256": digest, "template": CHATML}
    assert (
        f"The first prompt by the chat template {digest[:12]} ({layout.chat_template}):"
        in description
    )
    assert description.endswith(
        "  <|im_start|>user\n  1 + 1 =<|im_end|>\n  <|im_start|>assistant\n"
    )
    assert Lineage(SimpleNamespace(layout=layout), 0).chat_template_hash == digest
    assert [*changed_chat_template(layout)] == []
    give_chat_template(layout.model, LLAMA_3)
    (finding,) = changed_chat_template(layout)
    assert finding.expected == digest
    layout.chat_template.write_text("{")
    assert [finding.rule for finding in changed_chat_template(layout)] == ["unreadable"]


TEXT = {"question": "1 + 1 =", "answer": 2}
MESSAGES = {"question": CHAT, "answer": 2}


@pytest.mark.parametrize(
    ("rows", "held_out", "chat_template", "recognised"),
    [
        ([MESSAGES, TEXT], [], None, True),
        ([TEXT, MESSAGES], [], None, False),
        (["no row", MESSAGES], [], None, True),
        ([TEXT], [MESSAGES], None, True),
        ([MESSAGES], [], False, False),
        ([MESSAGES], [], True, False),
        ([{"question": [1, 2], "answer": 2}], [], None, False),
        ([{"question": [], "answer": 2}], [], None, False),
    ],
)
def test_rows_of_messages_are_recognised_where_the_recipe_leaves_it_open(
    tmp_path: Path, rows: Any, held_out: Any, chat_template: bool | None, recognised: bool
) -> None:
    table: dict[str, Any] = {"prompts": {"source": "file", "path": str(tmp_path / "rows.jsonl")}}
    if held_out:
        path = str(tmp_path / "set.jsonl")
        table["evaluation"] = {"held_out": [{"name": "set", "path": path}]}
    if chat_template is not None:
        table["prompts"]["chat_template"] = chat_template
    for name, content in (("rows", rows), ("set", held_out)):
        lines = (json.dumps(row) if isinstance(row, dict) else row for row in content)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert bool(why_chat_template(build_recipe(table, source="test").prompt_plan())) == recognised
    if held_out:
        table["prompts"]["held_out_path"] = table.pop("evaluation")["held_out"][0]["path"]
        assert (
            bool(why_chat_template(build_recipe(table, source="test").prompt_plan())) == recognised
        )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"prompts": {"system_prompt": "Be brief."}}, "prompts.system_prompt is a message"),
        ({"workflow": {"name": "agent", "path": "m:f"}}, "an agent asks in messages"),
        ({"workflow": {**GAME, "mcp": True}}, "an environment's tools are shown in messages"),
        ({"workflow": GAME}, ""),
    ],
)
def test_reason_for_using_the_chat_template_is_given(given: Any, reason: str) -> None:
    assert why_chat_template(build_recipe(given, source="test").prompt_plan()) == reason


UNUSED = (
    "  This model has a chat template, but prompts are sent as plain text. Set "
    "prompts.chat_template = true to use it, or = false to silence this message."
)


@pytest.mark.parametrize(
    ("row", "chosen", "note", "is_on"),
    [
        (
            MESSAGES,
            None,
            "  prompts.chat_template = true, since the rows of rows.jsonl are messages",
            True,
        ),
        (TEXT, None, UNUSED, None),
        (TEXT, False, "The first prompt:", False),
    ],
)
def test_a_run_of_a_chat_model_says_whether_its_chat_template_is_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
    chosen: bool | None,
    note: str,
    is_on: bool | None,
) -> None:
    def chatty(directory: Path, *, max_model_len: int) -> None:
        write_tiny_model(directory, max_model_len=max_model_len)
        give_chat_template(directory, CHATML)

    monkeypatch.setitem(MODELS, "chatty", chatty)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    prompts = {"source": "file", "path": str(path), "num_held_out": 0}
    table = {
        "model": "chatty",
        "prompts": prompts if chosen is None else {**prompts, "chat_template": chosen},
        "generation": {"max_model_len": 256, "max_new_tokens": 32},
    }
    built = build_recipe(table, source="test")
    layout = RunLayout(tmp_path / "run")
    create_run(layout, built)
    output = prepare_run(layout, built).splitlines()
    assert output[:2] == ["1 prompts to train on, 0 held out", note]
    assert load_recipe(layout.config).prompts.chat_template is is_on
    text = PromptTable(layout.train_prompts, seed=0).row(0).text
    assert ("<|im_start|>" in text) == bool(is_on)


def test_first_prompt_is_shown_without_its_middle_and_cannot_move_the_cursor(
    layout: RunLayout,
) -> None:
    text = "\x1b[2J" + "a" * 5000 + "="
    description = describe_prompts(Prepared(1, 0, 0, "", [], text, ""), layout)
    assert "\x1b" not in description
    assert "The first prompt:\n  ␛[2Jaaa" in description
    assert "aaa … 3005 characters more … aaa" in description
    assert description.endswith("a=")


def test_messages_are_put_as_they_are_after_the_recipes_system_message(layout: RunLayout) -> None:
    row = {"messages": CHAT, "answer": 2}
    settings = {"question_field": "messages", "template": "{question} Answer:"}
    prompt = prepared(layout, row, **settings, system_prompt="Be brief.")
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2 =<|im_end|>\n"
        "<|im_start|>assistant\n #### 4<|im_end|>\n<|im_start|>user\n1 + 1 = Answer:<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt.metadata == {"messages": CHAT}
    own = prepared(
        layout, {"messages": [SYSTEM, ASKED], "answer": 2}, **settings, system_prompt="Ramble."
    )
    assert "Ramble." not in own.text
    assert "Be brief." in own.text


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALLED = {"role": "assistant", "content": None, "tool_calls": [called("add", a=1), called("neg")]}


def test_keys_that_only_other_calls_have_are_not_rendered(layout: RunLayout) -> None:
    """Columns of Parquet give every call the keys of all calls, with nulls; content may be null."""
    from transformers import PreTrainedTokenizerFast

    give_chat_template(layout.model, HERMES)
    reference = PreTrainedTokenizerFast.from_pretrained(layout.model)
    reference.chat_template = HERMES
    messages = [CHAT[0], CALLED, {"role": "tool", "content": "1"}, ASKED]
    prompt = prepared(layout, {"messages": messages, "answer": 2}, question_field="messages")
    shown = [{**message, "content": message["content"] or ""} for message in messages]
    assert prompt.text == reference.apply_chat_template(
        shown, tokenize=False, add_generation_prompt=True
    )
    assert [message["role"] for message in messages_in(prompt.metadata, "messages")] == [
        message["role"] for message in messages
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the user's message at the end, found no message"),
        ([ASKED, SYSTEM], "the user's message at the end, found system"),
        (["1 + 1 ="], "expected messages with role and content as text, found '1 + 1 ='"),
        ([{**ASKED, "content": None}], "expected messages with role and content as text"),
        ([{"role": "user"}], "expected messages with role and content as text"),
        ([{"role": "user", "content": " "}], "expected non-empty text"),
    ],
)
def test_messages_that_ask_nothing_are_named_by_line_and_field(
    layout: RunLayout, messages: Any, message: str
) -> None:
    path = layout.root / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, "answer": 2}) + "\n")
    with pytest.raises(PromptError) as raised:
        prepare_prompts(recipe(path, question_field="messages").prompt_plan(), layout)
    assert "rows.jsonl, line 1: field 'messages': expected" in str(raised.value)
    assert message in str(raised.value)


def test_messages_without_a_chat_template_name_the_setting(layout: RunLayout) -> None:
    path = layout.root / "rows.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "answer": 2}) + "\n")
    with pytest.raises(PromptError, match=r"messages need prompts\.chat_template = true"):
        prepare_prompts(
            recipe(path, question_field="messages", chat_template=False).prompt_plan(), layout
        )
    with pytest.raises(ConfigError, match=r"needs prompts\.chat_template = true"):
        recipe(path, chat_template=False, system_prompt="Be brief.")


def test_tokenizer_without_a_template_is_refused(layout: RunLayout) -> None:
    write_tiny_model(layout.model, max_model_len=512)
    with pytest.raises(ModelError, match=r"model 'tiny' has no chat template, neither a file"):
        prepare_prompts(recipe(layout.root / "unread.jsonl").prompt_plan(), layout)


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (
            LLAMA_2,
            {"system_prompt": "Be brief."},
            "TemplateError: System role not supported",
        ),
        ("{{ messages[0].nothing.more }}", {}, "UndefinedError"),
        (FORGETS_REASONING, {"workflow": {"name": "multi_turn"}}, "rewrites earlier answers"),
        (CHATML, {"workflow": TOOLS}, "does not tell the policy of tools"),
        (FORGETS_REASONING, {"workflow": GAME}, "rewrites earlier answers"),
        (CHATML, {"workflow": {**GAME, "mcp": True}}, "does not tell the policy of tools"),
    ],
)
def test_template_that_cannot_do_what_the_recipe_asks_is_refused(
    layout: RunLayout, template: str, settings: dict[str, Any], message: str
) -> None:
    give_chat_template(layout.model, template)
    with pytest.raises(ModelError) as raised:
        prepare_prompts(recipe(layout.root / "unread.jsonl", **settings).prompt_plan(), layout)
    assert message in str(raised.value)
    assert "model 'tiny'" in str(raised.value)


@pytest.mark.parametrize(
    ("template", "following"),
    [
        (CHATML, "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA_3, "<|start|>user<|end|>\n\nno<|im_end|><|start|>assistant<|end|>\n\n"),
        (LLAMA_2, "<s>[INST] no [/INST]"),
    ],
)
def test_next_turn_is_what_follows_the_token_that_ended_the_answer(
    layout: RunLayout, template: str, following: str
) -> None:
    give_chat_template(layout.model, template)
    chat = chat_template_of(layout.model)
    assert chat is not None
    assert chat.next_turn("no", ended_by="<|im_end|>") == following
    ended_otherwise = chat.next_turn("no", ended_by="<|other|>")
    assert ended_otherwise.lstrip() == f"<|im_end|>{following}"


def test_next_turn_of_a_template_that_rewrites_answers_is_refused(layout: RunLayout) -> None:
    give_chat_template(layout.model, FORGETS_REASONING)
    chat = chat_template_of(layout.model)
    assert chat is not None
    with pytest.raises(ValueError, match="rewrites earlier answers"):
        chat.next_turn("no", ended_by="<|im_end|>")


def test_tools_are_rendered_and_called_in_the_format_of_the_chat_template(
    layout: RunLayout,
) -> None:
    give_chat_template(layout.model, HERMES)
    path = layout.root.parent / "rows.jsonl"
    path.write_text(json.dumps({"question": "6 * 7 =", "answer": "42"}) + "\n")
    prepared = prepare_prompts(recipe(path, workflow=TOOLS).prompt_plan(), layout)
    assert '"name": "calculator", "description": "Compute an arithmetic' in prepared.first_prompt
    chat = chat_template_of(layout.model)
    assert chat is not None
    call = '<tool_call>\n{"name": "calculator", "arguments": {"input": "6*7"}}\n</tool_call>'
    calculation = ToolCall("calculator", {"input": "6*7"})
    assert chat.calls_in(f"I ask.{call}\n{call}") == [calculation] * 2
    assert chat.calls_in("42") == []
    assert chat.calls_in("<tool_call>{broken") == [ToolCall("", {})]
    assert chat.calls_in(f"<think>{call}</think>42") == chat.calls_in(f"so {call}</think>42") == []
    as_text = call.replace('{"input": "6*7"}', r'"{\"input\": \"6*7\"}"')
    assert chat.calls_in(as_text) == [calculation]
    assert chat.calls_in('<tool_call>{"name": "calculator"}') == [ToolCall("calculator", {})]
    shown = chat.next_turn("42", ended_by="<|im_end|>", role="tool")
    answered = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    assert shown == f"\n{answered}<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [HERMES, ONE_TURN_OF_TOOLS])
def test_answers_of_two_calls_are_two_messages(layout: RunLayout, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    give_chat_template(layout.model, template)
    reference = PreTrainedTokenizerFast.from_pretrained(layout.model)
    reference.chat_template = template
    chat = chat_template_of(layout.model)
    assert chat is not None
    called = {"role": "assistant", "content": "both"}
    answered = [{"role": "tool", "content": content} for content in ("42", "7")]
    messages = [ASKED, called, *answered]
    rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    shown = chat.next_turn("42", "7", ended_by="<|im_end|>", role="tool")
    assert rendered == chat.render([ASKED]) + "both<|im_end|>" + shown


@pytest.mark.parametrize("template", [CHATML, HERMES, LLAMA_3])
def test_what_follows_an_answer_ends_the_whole_conversation(
    template: str, layout: RunLayout
) -> None:
    give_chat_template(layout.model, template)
    chat = chat_template_of(layout.model)
    assert chat is not None
    answer = {"role": "assistant", "content": "four"}
    messages = [SYSTEM, *CHAT[:1], answer, ASKED, {**answer, "content": "two"}, ASKED]
    rendered = chat.render(messages)
    begun = chat.render(messages[:4]) + "two"
    for ended_by in ("<|im_end|>", ""):
        following = chat.following(messages, 4, ended_by=ended_by)
        assert begun + ended_by + following == rendered


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (MESSAGES, "prompts.chat_template = true, since the rows of rows.jsonl are messages"),
        (TEXT, UNUSED.strip()),
    ],
)
def test_an_evaluation_of_a_chat_model_says_whether_its_chat_template_is_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    message: str,
) -> None:
    model = write_model_directory(tmp_path / "model")
    give_chat_template(model, CHATML)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("pipelines.jobs.evaluate.wait_for", lambda work: [])
    monkeypatch.setattr("pipelines.jobs.evaluate.tabulate", lambda *_, **__: None)
    evaluate_model(model, data=[str(tmp_path / "rows.jsonl")])
    assert message in capsys.readouterr().err
