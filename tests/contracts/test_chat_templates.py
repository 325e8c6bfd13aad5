"""The tokens of an agent's calls are those of the public chat templates, turn after turn.

The templates follow the public descriptions of their families; the wording around tools is ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from areal_flow.cluster.generator_tasks import GeneratorRole
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config import dump_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Completion, GroupRequest, VersionSpan, as_tokens
from areal_flow.rollout.workflows.episode import TrajectoryDraft
from pipelines.tiny_jobs.tiny_policy import build_tokenizer, write_tiny_model
from tests.agents import Create, answer, run_talk, user_messages
from tests.integration.runs import small_recipe
from tests.plain import plain


@dataclass(frozen=True)
class Family:
    template: str
    specials: Sequence[str]
    """The first begins a text and the second ends an answer."""
    answers: Sequence[str] = ("It is 4.", "It\nis 5.", "Yes: 5.")
    has_system: bool = True
    keeps_answers: bool = True


FAMILIES = {
    "qwen": Family(
        "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'Help.' }}"
        "{% if tools %}{{ '\\n\\n' }}# Tools\n<tools>\n"
        "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}</tools>\n"
        "Call one as JSON in <tool_call></tool_call>.{% endif %}<|im_end|>\n"
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "{{ '<|im_start|>user' if loop.previtem.role != 'tool' }}"
        "\n<tool_response>\n{{ message.content }}\n</tool_response>"
        "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% elif message.role != 'system' %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls or [] %}"
        "{{ '\\n' if message.content or not loop.first }}"
        "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    ),
    "llama 3": Family(
        "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{% endif %}",
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": Family(
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
        "[INST] {{ message.content }} [/INST]{% elif message.role == 'assistant' %}"
        " {{ message.content | trim }}{{ eos_token }}"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        answers=(" It is 4.", " It\nis 5.", " Yes: 5."),
        has_system=False,
    ),
    "gemma": Family(
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}<start_of_turn>"
        "{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<end_of_turn>", "<start_of_turn>"),
        has_system=False,
    ),
    "deepseek r1": Family(
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
        "{{ message.content }}{% elif message.role == 'user' %}<｜User｜>{{ message.content }}"
        "{% else %}<｜Assistant｜>{{ message.content.split('</think>')[-1] }}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        answers=("2 + 2.\n</think>\n\n4", "4 + 1.\n</think>\n\n5", "Sure.\n</think>\n\n5"),
        keeps_answers=False,
    ),
}
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTIONS = ("2 + 2?", "And 1 more?", "Sure?")
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look_up")
]


class Policy(GeneratorRole):
    """A generator with these answers, one after the other."""

    def __init__(self, context: WorkerContext, answers: Sequence[str]) -> None:
        super().__init__(context)
        self._answers = iter(answers)
        self.requests: list[GroupRequest] = []

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        self.requests.append(request)
        sampled = self.encode(next(self._answers)).tolist()
        tokens = as_tokens([*sampled, self.sampling.stop_token_ids[0]])
        spans = (VersionSpan(0, len(tokens)),)
        return [Completion(tokens, np.zeros(len(tokens), np.float32), spans, "stop")]


def policy_of(root: Path, family: Family, answers: Sequence[str]) -> Policy:
    """Return a generator of a model directory with the family's template and tokens."""

    def make_tokenizer() -> Tokenizer:
        tokenizer = build_tokenizer()
        tokenizer.add_special_tokens([*family.specials])
        return tokenizer

    layout = RunLayout(root)
    write_tiny_model(layout.model, max_model_len=512, make_tokenizer=make_tokenizer)
    begin, end, *_ = family.specials
    ends = {"eos_token_id": make_tokenizer().token_to_id(end)}
    (layout.model / "generation_config.json").write_text(json.dumps(ends))
    marks = {"bos_token": begin, "eos_token": end, "chat_template": family.template}
    (layout.model / "tokenizer_config.json").write_text(json.dumps(marks))
    recipe = small_recipe(
        workflow={"name": "single_turn"},
        prompts={"chat_template": True},
        generation={"max_new_tokens": 64, "max_model_len": 512},
    )
    layout.config.write_text(dump_recipe(recipe))
    return Policy(WorkerContext(layout.root, 1), answers)


def expected(policy: Policy, family: Family, messages: Sequence[Any], **given: Any) -> list[int]:
    """Return the tokens of transformers' own rendering."""
    model = policy._context.layout.model
    begin, end, *_ = family.specials
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), bos_token=begin, eos_token=end
    )
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=family.template, add_generation_prompt=True, **given
    )
    return list(rendered["input_ids"])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_each_turn_of_an_agent_has_the_tokens_of_the_template(
    tmp_path: Path, family: Family
) -> None:
    """Or it starts another trajectory, where the template rewrites earlier answers."""
    policy = policy_of(tmp_path, family, family.answers)
    histories = list[list[Any]]()

    async def goes_on(create: Create) -> float:
        history: list[Any] = [SYSTEM] if family.has_system else []
        for question in QUESTIONS:
            history += user_messages(question)
            histories.append([*history])
            completion = await create(messages=history)
            history.append({"role": "assistant", "content": answer(completion)["content"]})
        return 1.0

    drafts: list[TrajectoryDraft] = run_talk(goes_on, policy)
    prompts = [plain(request.prompt_tokens) for request in policy.requests]
    assert prompts == [expected(policy, family, history) for history in histories]
    assert len(drafts) == (1 if family.keeps_answers else len(QUESTIONS))
    if family.keeps_answers:
        assert plain(drafts[0].tokens[: len(prompts[-1])]) == prompts[-1]


def test_template_that_rewrites_earlier_answers_says_so(tmp_path: Path) -> None:
    family = FAMILIES["deepseek r1"]
    policy = policy_of(tmp_path, family, family.answers)
    messages = [*user_messages("a"), {"role": "assistant", "content": "b"}, *user_messages("c")]
    with pytest.raises(ValueError, match="rewrites earlier answers"):
        policy.chat(messages, after=(1, -1))


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_system_message_that_a_template_refuses_is_refused_with_its_reason(
    tmp_path: Path, name: str
) -> None:
    async def asks(create: Create) -> float:
        with pytest.raises(openai.BadRequestError, match="does not render messages of system"):
            await create(messages=[SYSTEM, *user_messages("2 + 2?")])
        await create(messages=user_messages("2 + 2?"))
        return 1.0

    run_talk(asks, policy_of(tmp_path, FAMILIES[name], ["4"]))


def test_calls_and_results_of_tools_have_the_tokens_of_the_template(tmp_path: Path) -> None:
    family = FAMILIES["qwen"]
    functions = [{"name": name, "arguments": {"a": 2}} for name in ("add", "look_up")]
    called = "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in functions)
    policy = policy_of(tmp_path, family, [f"Both.\n{called}", "It is 4."])

    async def uses_both(create: Create) -> float:
        asked = user_messages("2 + 2?")
        message = answer(await create(messages=asked, tools=TOOLS))
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(message["tool_calls"], "45", strict=True)
        ]
        await create(messages=[*asked, message, *results], tools=TOOLS)
        return 1.0

    (draft,) = run_talk(uses_both, policy)
    calls = [{"type": "function", "function": function} for function in functions]
    rendered: list[Any] = [
        *user_messages("2 + 2?"),
        {"role": "assistant", "content": "Both.", "tool_calls": calls},
        *({"role": "tool", "content": result} for result in "45"),
    ]
    first, second = (plain(request.prompt_tokens) for request in policy.requests)
    assert first == expected(policy, family, rendered[:1], tools=TOOLS)
    assert second == expected(policy, family, rendered, tools=TOOLS)
    assert [call.result for call in draft.tool_calls] == ["4", "5"]
