"""Reads the overrides of a shell script that starts verl, without running it.

Variables, arrays and sums of numbers that the script itself sets are replaced. A value that depends
on a condition, a command or the environment is left as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from areal_flow.core.errors import ConfigError

PUBLISHED = ("ppo_trainer", "ppo_megatron_trainer", "ppo_torchtitan_trainer", "ppo_veomni_trainer")
"""Configurations of verl whose options are published."""
_LAUNCH = re.compile(r"\bmain_ppo\b")
_SECTION = "actor_rollout_ref."
"""How options begin that only a command has which trains by reinforcement learning."""
_OPTIONS = re.compile(r"[+]{0,2}\w+(\.[\w-]+)+=.*|~[\w.]+|\$\{\w+\[@\]\}", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(\w+)(\+?)=\((.*)\)\s*", re.DOTALL)
_ARRAY_BEGINS = re.compile(r"\s*\w+\+?=\(")
_ELEMENTS = re.compile(r"\$\{(\w+)\[@\]\}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^${}]*))?\})")
_SUM = re.compile(r"\$\(\(([\w()+*/-]+)\)\)")
_ANY_SUM = re.compile(r"\$\(\(.*?\)\)")
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?<!\S)#.*")
_UNKNOWN = re.compile(r"\$(?!\{[\w.]*[.:][^{}]*\})")
_BEGIN, _END = ("if", "for", "while", "case"), ("fi", "done", "esac")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(slots=True)
class Script:
    """What a script sets, as far as it was read."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    conditional: set[str] = field(default_factory=set)
    """Variables whose value depends on a condition."""
    under_condition: dict[str, list[str]] = field(default_factory=dict)
    """Elements of arrays that depend on a condition."""
    launches: list[list[str]] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    """Options after the end of a command, which bash takes for a command of its own."""


def read_overrides(path: Path, text: str) -> tuple[list[str], dict[str, str]]:
    """Return the overrides of the one command that starts verl, and those to set by hand."""
    script = Script({"HOME": str(Path.home())})
    depth = 0
    for line in _commands(path, text):
        if match := _ARRAY.fullmatch(line):
            _set_array(script, match[1], shlex.split(match[3], comments=True), match[2], depth)
            continue
        words = shlex.split(line, comments=True)
        first = words[0] if words else ""
        depth += (first in _BEGIN) - (first in _END)
        assigned = words[1:] if first == "export" else words
        if assigned and all(_ASSIGNMENT.fullmatch(word) for word in assigned):
            for word in assigned:
                name, _, value = word.partition("=")
                _set_variable(script, name, _substituted(value, script), depth)
        elif script.launches and _OPTIONS.fullmatch(first):
            script.left_over += filter(_OPTIONS.fullmatch, words)
        elif _start(words, script) is not None:
            script.launches.append(words)
    if len(script.launches) != 1:
        raise ConfigError(
            f"{path}: expected one command that trains with verl, such as `python3 -m "
            f"verl.trainer.main_ppo` and its options, found {len(script.launches) or 'none'}"
            + (": keep one of them in a copy of the script" if script.launches else "")
        )
    overrides: list[str] = []
    by_hand: dict[str, str] = {}
    for word in script.left_over:
        option = word.partition("=")[0].lstrip("+~")
        by_hand[option] = (
            f"bash ends the command before {word!r}: at a comment, or a space after \\"
        )
    for word, is_certain in _arguments(script, script.launches[0]):
        name, equals, value = word.partition("=")
        option = name.lstrip("+~")
        if not is_certain:
            by_hand[option] = f"{word!r} is under a condition of the script"
        elif _UNKNOWN.search(word) or word.startswith("-"):
            if not {"--config-path", value.removesuffix(".yaml")} & {name, *PUBLISHED}:
                by_hand[option] = f"{word!r} is not a value that the script itself gives"
        elif (equals and name) or word.startswith("~"):
            overrides.append(word)
        elif word.strip():
            by_hand[word] = "it is no override"
    return overrides, by_hand


def _commands(path: Path, text: str) -> Iterator[str]:
    """Yield the lines of a script; those that a quote or a bracket keeps open are one."""
    text = _ANY_SUM.sub(lambda match: re.sub(r"\s", "", match[0]), re.sub(r"\\(\n|\Z)", " ", text))
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if not (problem := _what_is_open(pending)):
            yield pending
            pending = ""
    if pending:
        raise ConfigError(f"{path}: {problem} from the line {pending.splitlines()[0][:60]!r} on")


def _what_is_open(lines: str) -> str:
    try:
        shlex.split(lines, comments=True)
    except ValueError as error:
        return str(error)
    unquoted = _QUOTED.sub("", lines)
    is_open = _ARRAY_BEGINS.match(lines) and unquoted.count("(") > unquoted.count(")")
    return "No closing bracket" if is_open else ""


def _set_variable(script: Script, name: str, value: str, depth: int) -> None:
    if depth and script.variables.get(name) != value:
        script.conditional.add(name)
    script.variables[name] = value


def _set_array(script: Script, name: str, words: list[str], appends: str, depth: int) -> None:
    kept = script.under_condition if depth else script.arrays
    script.arrays.setdefault(name, [])
    kept[name] = [*(kept.get(name, ()) if appends or depth else ()), *words]


def _start(words: list[str], script: Script) -> int | None:
    """Return the place of the program in a command that trains; None of any other command."""
    for place, word in enumerate(words):
        if _LAUNCH.search(word):
            return place
        if word.endswith(".py") or words[place - 1 : place] == ["-m"]:
            given = (
                part
                for each in words[place + 1 :]
                for part in (*_elements(each, script.arrays), *_split(each, script))
            )
            return place if any(part.lstrip("+").startswith(_SECTION) for part in given) else None
    return None


def _elements(word: str, arrays: dict[str, list[str]]) -> list[str]:
    array = _ELEMENTS.fullmatch(word)
    return arrays.get(array[1], []) if array else []


def _arguments(script: Script, words: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the arguments of a command, and whether they depend on no condition."""
    start = _start(words, script)
    assert start is not None
    for word in words[start + 1 :]:
        array = _ELEMENTS.fullmatch(word)
        if array and array[1] in script.arrays:
            for kept, is_certain in ((script.arrays, True), (script.under_condition, False)):
                for each in kept.get(array[1], ()):
                    yield from ((part, is_certain) for part in _split(each, script))
        elif word in ("|", ">", "2>&1", "&&", ";", "&"):
            return
        elif word not in ("$@", "$*", "${@}"):
            yield from ((part, True) for part in _split(word, script))


def _split(word: str, script: Script) -> list[str]:
    """Return the words that a word stands for: several, if it is a variable of several."""
    value = _substituted(word, script)
    return shlex.split(value) if _VARIABLE.fullmatch(word) and value != word else [value]


def _substituted(text: str, script: Script) -> str:
    """Replace the variables that are known, and sums of numbers, from the innermost on."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in script.conditional:
            return match[0]
        assigned = script.variables.get(name)
        if match[3] is not None:
            return assigned or match[3]
        return match[0] if assigned is None else assigned

    previous = ""
    while text != previous:
        previous = text
        text = _SUM.sub(lambda match: _sum(match, script), _VARIABLE.sub(value, text))
    return text


def _sum(match: re.Match[str], script: Script) -> str:
    """Return the value of `$((...))`, or its text if a part of it is not known."""

    def of(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name not in script.conditional:
                return int(script.variables[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return int(_OPERATORS[type(op)](of(left), of(right)))
        raise ValueError

    try:
        return str(of(ast.parse(match[1], mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return match[0]
