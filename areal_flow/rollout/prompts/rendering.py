"""Renders a question as the text that the policy reads: by `prompts.template`, and as a chat."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_flow.core.errors import ConfigError, ModelError
from areal_flow.core.types import Prompt
from areal_flow.policy.tokenizer.chat import ChatTemplate, Message, Tool, tool_schema
from areal_flow.policy.tokenizer.directory import chat_template_of
from areal_flow.rewards.shipping import load_function, located
from areal_flow.rollout.prompts.files import read_prompts
from areal_flow.rollout.prompts.rows import messages_in, question_field
from areal_flow.rollout.prompts.settings import PromptPlan, PromptSettings
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.openenv import OpenEnv
from areal_flow.rollout.workflows.registry import WorkflowSettings
from areal_flow.rollout.workflows.tool_use import WithTools, takes_text, tools_by_name
from areal_flow.rollout.workflows.turns import MultiTurn

Render = Callable[[Sequence[Message]], str]


def renderer(plan: PromptPlan, settings: PromptSettings, model: Path, *, functions: Path) -> Render:
    """Return a function that renders a row's messages, the last of which is the question.

    `functions` is the folder of shipped tools.
    """
    chat = required_chat_template(plan, settings, model)
    tools = _tool_schemas(plan.workflow, functions)

    def render(messages: Sequence[Message]) -> str:
        shown = conversation(messages, settings)
        return str(shown[-1]["content"]) if chat is None else chat.render(shown, tools=tools)

    return render


def conversation(messages: Sequence[Message], settings: PromptSettings) -> list[Message]:
    """Return a row's messages with the template around the question, and the system message."""
    *earlier, last = messages
    content = settings.template.replace("{question}", last["content"])
    return with_system_message([*earlier, {**last, "content": content}], settings.system_prompt)


def required_chat_template(
    plan: PromptPlan, settings: PromptSettings, model: Path
) -> ChatTemplate | None:
    """Return the model's chat template, checked for what the workflow needs; None if unused."""
    if not settings.chat_template:
        return None
    chat = chat_template_of(model)
    if chat is None:
        raise ModelError(
            f"prompts.chat_template = true: the tokenizer of model {plan.model!r} has no chat "
            "template, neither a file chat_template.jinja nor chat_template in "
            "tokenizer_config.json: use a chat model's tokenizer, or write what marks a turn into "
            "prompts.template"
        )
    try:
        chat.render([*_system_message(settings.system_prompt), {"role": "user", "content": "?"}])
        match plan.workflow:
            case MultiTurn(max_turns=1):
                pass
            case MultiTurn() | OpenEnv(mcp=False):
                chat.next_turn("?", ended_by="\n")
            case WithTools() | OpenEnv():
                chat.calls_in("")
                chat.next_turn("?", ended_by="\n", role="tool")
    except ValueError as error:
        raise ModelError(
            f"model {plan.model!r}: {error}. Give it a chat_template.jinja that does, or change "
            "prompts.system_prompt or the workflow"
        ) from error
    return chat


def why_chat_template(plan: PromptPlan) -> str:
    """Return why a chat template is needed; empty if it is not, or if the recipe decides.

    The first good row of each file counts, held-out files included.
    """
    settings, workflow = plan.rows.prompts, plan.workflow
    if settings.chat_template is not None:
        return ""
    if isinstance(workflow, Agent):
        return "an agent asks in messages"
    if isinstance(workflow, OpenEnv) and workflow.mcp:
        return "an environment's tools are shown in messages"
    if settings.system_prompt:
        return "prompts.system_prompt is a message"
    for path, rows in plan.files():
        if path.exists():
            good = read_prompts(path, lambda row: row, on_bad=lambda place, error: None)
            first = next(good, {})
            if messages_in(first, question_field(first, rows.prompts)):
                return f"the rows of {path.name} are messages"
    return ""


def unused_chat_template(settings: PromptSettings, model: Path) -> str:
    """Return a note that prompts do not use the model's chat template; empty if they need not.

    Call it after `why_chat_template`.
    """
    if settings.chat_template is not None or chat_template_of(model) is None:
        return ""
    return (
        "This model has a chat template, but prompts are sent as plain text. Set "
        "prompts.chat_template = true to use it, or = false to silence this message."
    )


def messages_asked(prompt: Prompt, plan: PromptPlan) -> list[Message]:
    settings = plan.rows_of(prompt.source).prompts
    return messages_in(prompt.metadata, question_field(prompt.metadata, settings))


def _tool_schemas(workflow: WorkflowSettings, functions: Path) -> list[Tool]:
    if not isinstance(workflow, WithTools):
        return []
    schemas = []
    for name, path in tools_by_name(workflow.tools).items():
        if schema := workflow.schema_in_sandbox(name):
            schemas.append(schema)
            continue
        path = located(path, functions)
        tool = load_function(path, setting="workflow.tools", error=ConfigError)
        description = (inspect.getdoc(tool) or name).partition("\n")[0]
        is_text = takes_text(tool)
        schemas.append(
            tool_schema(name, description) if is_text else _schema_of_arguments(name, tool)
        )
    return schemas


def _schema_of_arguments(name: str, tool: Callable[..., Any]) -> Tool:
    # Imported here: transformers takes two seconds.
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"workflow.tools: the arguments of {name} need annotations, and a docstring whose "
            f"`Args:` describe each: {error}"
        ) from error
    function = {key: value for key, value in schema["function"].items() if key != "return"}
    return {"type": "function", "function": {**function, "name": name}}


def with_system_message(messages: Sequence[Message], content: str) -> list[Message]:
    """Put a system message before messages that have none; empty content adds nothing."""
    has_own = any(message["role"] == "system" for message in messages)
    return [*([] if has_own else _system_message(content)), *messages]


def _system_message(content: str) -> list[Message]:
    return [{"role": "system", "content": content}] if content else []
