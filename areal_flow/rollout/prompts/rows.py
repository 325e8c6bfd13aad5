"""Reads the fields of a prompt's row: question, reference answer, difficulty, verifier columns.

Values keep their JSON types; other types, such as dates in Parquet, become text. A field `a.b` is
`b` in `a`, unless the row has a field of that full name. Fields that settings leave open are found
by their usual names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isinf
from typing import Any

from areal_flow.core.types import answer_text
from areal_flow.policy.tokenizer.chat import Message, Tool, arguments_of
from areal_flow.rollout.prompts.settings import PromptSettings

Row = dict[str, Any]

MAX_DIFFICULTY = 2**31 - 1
QUESTION_FIELDS: tuple[str, ...] = (
    *("question", "problem", "prompt", "messages"),
    *("query", "input", "instruction"),
)
ANSWER_FIELDS: tuple[str, ...] = (
    *("answer", "solution", "ground_truth", "reward_model.ground_truth"),
    *("final_answer", "target", "label", "output"),
)
"""Usual names of these fields in data sets, by precedence."""
REFERENCE_ANSWER = "areal_flow.answer"
"""The key of the reference answer in stored columns if the row has a different `answer`."""


def value_at(row: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field, which may be nested; None if there is none."""
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    nested = row.get(outer) if dot else None
    return value_at(nested, inner) if isinstance(nested, Mapping) else None


def usual_fields(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return which of some names have a value in one row or more, in the order of the names."""
    present = {name for row in rows for name in names if value_at(row, name) is not None}
    return [name for name in names if name in present]


def question_field(row: Mapping[str, Any], settings: PromptSettings) -> str:
    return settings.question_field or _usual_field(row, QUESTION_FIELDS)


def answer_field(row: Mapping[str, Any], settings: PromptSettings) -> str:
    return settings.answer_field or _usual_field(row, ANSWER_FIELDS)


def _usual_field(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return next(chain(usual_fields([row], names), filter(row.__contains__, names)), names[0])


def columns_of(row: Row, settings: PromptSettings, *, needs_answer: bool = True) -> Row:
    """Return the columns of a prompt table that depend on the row alone.

    `metadata` is JSON of all fields of the row, of the fields nested in its `metadata` (the row's
    own take precedence), and of the reference answer, which `pop_reference_answer` removes again.
    """
    answer = answer_of(row, settings, needs_answer=needs_answer)
    nested = row.get("metadata")
    columns = {**(nested if isinstance(nested, Mapping) else {}), "answer": answer, **row}
    if columns["answer"] != answer:
        columns[REFERENCE_ANSWER] = answer
    return {
        "prompt_id": given_id(row),
        "answer": answer_text(answer),
        "difficulty": _difficulty_of(row),
        "metadata": _as_json(columns),
    }


def given_id(row: Row) -> str:
    """Return the row's own id as text; empty if it has none."""
    for field in ("id", "prompt_id"):
        if not _is_unset(value := row.get(field)) and value != "":
            return checked_text(str(value), field)
    return ""


def _difficulty_of(row: Row) -> int:
    value = row.get("difficulty")
    if isinstance(value, str) and value.isascii() and value.isdecimal():  # of CSV
        value = int(value)
    if _is_unset(value) or isinstance(value, str):
        return 0
    if isinstance(value, float) and value.is_integer():  # pandas: integers beside nulls
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_DIFFICULTY:
        raise ValueError(
            f"field 'difficulty': expected an integer from 0 to {MAX_DIFFICULTY}, got {value!r}"
        )
    return value


def _is_unset(value: Any) -> bool:
    return value is None or value != value  # NaN


def _as_json(columns: Row) -> str:
    """Return columns as JSON; NaN becomes null, infinities are errors."""
    try:
        return json.dumps(columns, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(
            {name: _without_nan(value, name) for name, value in columns.items()}, default=str
        )


def _without_nan(value: Any, name: str) -> Any:
    match value:
        case Mapping():
            return {key: _without_nan(item, f"{name}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item, name) for item in value]
        case float() if isinf(value):
            raise ValueError(f"field {name!r}: expected a finite number, got {value}")
        case _:
            return None if _is_unset(value) else value


def pop_reference_answer(columns: Row) -> Any:
    """Remove the reference answer from stored columns and return it; a different `answer` stays."""
    return columns.pop(REFERENCE_ANSWER if REFERENCE_ANSWER in columns else "answer", None)


def question_of(row: Row, settings: PromptSettings) -> list[Message]:
    """Return the question as messages that end with the user's; a text becomes one message."""
    _require_fields(row, settings, needs_answer=False)
    field = question_field(row, settings)
    value = value_at(row, field)
    if not isinstance(value, list):
        return [{"role": "user", "content": checked_text(value, field)}]
    if not settings.chat_template:
        raise ValueError(
            f"field {field!r}: expected text, found a list: messages need "
            "prompts.chat_template = true"
        )
    messages = [checked_message(message, field) for message in value]
    if not messages or messages[-1]["role"] != "user":
        last_role = messages[-1]["role"] if messages else "no message"
        raise ValueError(
            f"field {field!r}: expected the user's message at the end, found {last_role}"
        )
    checked_text(messages[-1]["content"], field)
    return messages


def messages_in(row: Mapping[str, Any], field: str) -> list[Message]:
    """Return the messages in a field; empty if it holds anything else."""
    value = value_at(row, field)
    items = value if isinstance(value, list) else []
    is_chat = all(isinstance(item, Mapping) and _is_message(item) for item in items)
    return [*map(_normalized, items)] if is_chat else []


def _is_message(value: Mapping[str, Any]) -> bool:
    return "role" in value and ("content" in value or bool(value.get("tool_calls")))


def checked_message(value: Any, field: str) -> Message:
    message = _normalized(value) if isinstance(value, Mapping) else {}
    if not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise ValueError(
            f"field {field!r}: expected messages with role and content as text, found {value!r:.60}"
        )
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": [_with_arguments(call, field) for call in calls]}
    return message


def _with_arguments(call: Any, field: str) -> Mapping[str, Any]:
    """Return a call with its arguments parsed, as chat templates expect them."""
    try:
        function = call["function"]
        parsed = {"name": str(function["name"]), "arguments": arguments_of(function)}
        return {**call, "function": {**function, **parsed}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"field {field!r}: expected a call of a function with a name and JSON arguments, found "
            f"{call!r:.80}"
        ) from error


def tools_of(row: Row) -> list[Tool]:
    """Return the schemas in a row's `tools`: a list, or JSON of one; empty if there is none."""
    value = row.get("tools")
    try:
        value = json.loads(value) if isinstance(value, str) and value else value
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in value or ()]
    except (ValueError, TypeError):
        tools = [value]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"field 'tools': expected a list of JSON schemas, found {value!r:.60}")
    return [_without_nulls(tool) for tool in tools]


def _normalized(message: Message) -> Message:
    """Return a message without nulls, which columnar files store for keys that only other rows use.

    Content stays a text if a message with tool calls has none.
    """
    content = {"content": ""} if message.get("tool_calls") else {}
    return {**content, **_without_nulls(message)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def answer_of(row: Row, settings: PromptSettings, *, needs_answer: bool = True) -> Any:
    """Return the reference answer of a row, with its own type; None if there is none."""
    _require_fields(row, settings, needs_answer=needs_answer)
    field = answer_field(row, settings)
    value = value_at(row, field)
    if value in (None, "") and not needs_answer:
        return None
    if value is None or isinstance(value, str):
        return checked_text(value, field)
    try:
        return json.loads(json.dumps(value, default=str, allow_nan=False))
    except ValueError:
        raise ValueError(
            f"field {field!r}: expected text, a finite number or a list, found {value!r:.40}"
        ) from None


def text_of(row: Row, field: str) -> str:
    if field not in row:
        raise ValueError(f"field {field!r} is missing; found fields: {_fields(row)}")
    return checked_text(row[field], field)


def texts_of_turns(row: Row, field: str) -> list[str]:
    """Return the texts in a field: one, or a list in which policy and environment alternate."""
    turns = row.get(field)
    if not isinstance(turns, list):
        return [text_of(row, field)]
    if len(turns) % 2 == 0:
        raise ValueError(
            f"field {field!r}: expected texts of the policy and the environment by turns, the "
            f"policy's first and last, found {len(turns)} texts"
        )
    return [checked_text(turn, field) for turn in turns]


def checked_text(value: Any, field: str) -> str:
    """Return a value if it is non-empty text that can be tokenised and stored."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {field!r}: expected non-empty text, found {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r}: not encodable text: {error}") from None
    return value


def _require_fields(row: Row, settings: PromptSettings, *, needs_answer: bool) -> None:
    fields = {"question_field": (question_field(row, settings), QUESTION_FIELDS)}
    if needs_answer:
        fields["answer_field"] = answer_field(row, settings), ANSWER_FIELDS
    missing, advice = [], []
    for setting, (field, usual_names) in fields.items():
        if field not in row and value_at(row, field) is None:
            missing.append(f"field {field!r} is missing")
            guess = next(iter(usual_fields([row], usual_names)), "")
            if guess:
                advice.append(f'prompts.{setting} = "{guess}"')
            is_question_without_chat = (
                setting == "question_field" and settings.chat_template is False
            )
            if is_question_without_chat and isinstance(value_at(row, guess), list):
                advice.append("prompts.chat_template = true")
    if missing:
        hint = f"; set {' and '.join(advice)}" if advice else ""
        raise ValueError(f"{', '.join(missing)}; found fields: {_fields(row)}{hint}")


def _fields(row: Row) -> str:
    return ", ".join(sorted(row)) or "none"
