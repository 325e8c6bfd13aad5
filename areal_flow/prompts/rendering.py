"""How a question becomes the text that the policy reads: by `prompts.template`, and as a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from areal_flow.config import Recipe
from areal_flow.errors import ModelError
from areal_flow.models.chat import ChatTemplate, Message
from areal_flow.models.directory import chat_template_of
from areal_flow.workflows.multi_turn import MultiTurn

Render = Callable[[Sequence[Message]], str]


def renderer(recipe: Recipe, model: Path) -> Render:
    """Return what renders the messages of a row, the last of which asks the question.

    Args:
        model: the directory of the tokenizer, whose chat template is used if the recipe says so.

    Raises:
        ModelError: the tokenizer has no chat template, or one that cannot do what the recipe asks.
    """
    settings = recipe.prompts
    chat = required_chat_template(recipe, model)

    def render(messages: Sequence[Message]) -> str:
        *earlier, last = messages
        content = settings.template.replace("{question}", last["content"])
        if chat is None:
            return content
        system = _system_message(settings.system) if _lacks_system_message(earlier) else []
        return chat.render([*system, *earlier, {**last, "content": content}])

    return render


def required_chat_template(recipe: Recipe, model: Path) -> ChatTemplate | None:
    """Return the chat template that a recipe asks for; None if it asks for none.

    Raises:
        ModelError: there is none, or one that cannot do what the recipe asks.
    """
    if not recipe.prompts.chat_template:
        return None
    chat = chat_template_of(model)
    if chat is None:
        raise ModelError(
            f"prompts.chat_template = true: the tokenizer of model {recipe.model!r} has no chat "
            "template, neither a file chat_template.jinja nor chat_template in "
            "tokenizer_config.json: use a chat model's tokenizer, or write what marks a turn into "
            "prompts.template"
        )
    try:
        chat.render([*_system_message(recipe.prompts.system), {"role": "user", "content": "?"}])
        if isinstance(recipe.workflow, MultiTurn) and recipe.workflow.max_turns > 1:
            chat.next_turn("?", ended_by="\n")
    except ValueError as error:
        raise ModelError(
            f"model {recipe.model!r}: {error}. Give it a chat_template.jinja that does, or change "
            "prompts.system or the workflow"
        ) from error
    return chat


def _lacks_system_message(messages: Sequence[Message]) -> bool:
    return not any(message["role"] == "system" for message in messages)


def _system_message(content: str) -> list[Message]:
    return [{"role": "system", "content": content}] if content else []
