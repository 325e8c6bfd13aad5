"""What the text of an answer says about calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from areal_flow.core.thinking import BEGIN, END

PROMPT_END = 16
"""Tokens of a prompt that are read to see whether the policy begins by thinking."""
_REASONING = re.compile(rf"\A(?:(?!{BEGIN}).)*?{END}|{BEGIN}.*?(?:{END}|\Z)", re.DOTALL)
"""What a model thinks before it acts; the prompt may have begun it, and a limit may end it."""


def blank_reasoning(text: str, *, has_begun: bool = False) -> str:
    """Return a text as long, with other characters in the place of reasoning: it is no action.

    Args:
        has_begun: whether the prompt ends with the start of reasoning.
    """
    if has_begun:
        return blank_reasoning(BEGIN + text)[len(BEGIN) :]
    return _REASONING.sub(lambda reasoning: "\0" * len(reasoning[0]), text)


def begins_reasoning(prompt_end: str) -> bool:
    """Return whether a prompt that ends so has begun the policy's reasoning."""
    return prompt_end.rstrip().endswith(BEGIN)


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call, decoded if they are a JSON string; without any, `{}`.

    Raises:
        ValueError: they are a string that is not JSON.
    """
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments:
        return json.loads(arguments)
    return arguments or {}
