"""Reads a program's tests from rows of HumanEval, MBPP, LiveCodeBench, DeepCoder and our format.

| rows of            | recognised by                        | mode                          |
|--------------------|--------------------------------------|-------------------------------|
| this project       | `mode`, `tests` and `entry_point`    | what it says                  |
| HumanEval          | `test` and `entry_point`             | `assert`                      |
| MBPP               | `test_list`                          | `assert`                      |
| LiveCodeBench      | `public_test_cases`, `starter_code`  | `stdin`, or `call`            |
| DeepCoder          | `tests`, and no `mode`               | `stdin`, or `call`            |

Rows are trusted. The completion's program is not: it is extracted as text, and never parsed here.
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import pickle
import re
import symtable
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, get_args

from areal_flow.core.errors import RewardError
from areal_flow.core.thinking import after_thinking
from areal_flow.sandboxes.inside.testing import MODULE

Row = Mapping[str, Any]
Mode = Literal["stdin", "call", "assert"]

MAX_SOURCE_CHARS = 2**20
MAX_PRIVATE_BYTES = 2**28
"""Maximum unpacked size of the hidden tests of a LiveCodeBench row."""
MAX_CACHED_BYTES = 2**26
"""Maximum unpacked size of all cached tests; those of the last row always stay."""
_FENCE = re.compile(
    r"^([ \t]*+(?:(?:[-*+]|\d++[.)])[ \t]++)?+)(?:[^`\n]*+(?=```py|`{3,}+[ \t\r]*+$))?+"
    r"(`{3,}+|~{3,}+)[ \t]*+\{?\.?(\w*+)[^`\n]*+$",
    re.MULTILINE,
)
"""Groups: indentation (or list marker), fence, language. Text may precede the fence on its line if
it names Python or no language, see `_is_doubtful`."""
_FENCED = re.compile(r"^(.*?)(`{3,}+|~{3,}+)(.*)$", re.MULTILINE)
_LANGUAGES = ("python", "python3", "py")
_METHOD = re.compile(r"def\s+(\w+)\s*\(\s*self\b")


_cache: OrderedDict[str, tuple[int, Any]] = OrderedDict()
_cache_lock = Lock()


@dataclass(frozen=True, slots=True)
class CodeTask:
    """A program and its tests."""

    source: str
    mode: Mode
    tests: Sequence[tuple[Any, Any]] = ()
    """Pairs of input and output, or of arguments and return value."""
    test_source: str = ""
    """The tests in mode `assert`."""
    entry_point: str = ""
    setup: str = ""
    """Trusted code that runs before the tests."""
    borrowed: tuple[str, ...] = ()
    """Names of the program that tests in mode `assert` use."""
    imports: bool = False
    """Whether common names of the standard library are predefined."""


class NoTests(RewardError):
    """A row has no usable tests."""


def code_task(row: Row, completion: str, prompt: str = "") -> CodeTask | None:
    """Return the program of a completion with its row's tests; None if it has no code, or too much.

    Args:
        prompt: the rendered prompt.
    """
    source = extract_code(completion, prompt)
    if not source.strip() or len(source) > MAX_SOURCE_CHARS:
        return None
    try:
        for column, read in _READERS.items():
            if column in row:
                return read(row, source)
    except (ValueError, TypeError, LookupError, AttributeError, SyntaxError, zlib.error) as error:
        raise NoTests(f"the row's tests cannot be read: {type(error).__name__}: {error}") from None
    raise NoTests(f"no tests in a row of {', '.join(row) or 'no columns'}: expected one of "
                  f"{', '.join(_READERS)}")  # fmt: skip


def extract_code(completion: str, prompt: str = "") -> str:
    """Return the last Python block after the thinking, else the last unlabelled one, else all text.

    A fence usually has a line of its own. One after code, or before text, closes a block only if no
    other fence does before the next block starts. An unclosed block ends with the text.
    """
    text = after_thinking(completion[-4 * MAX_SOURCE_CHARS :], prompt)
    codes: dict[bool, str] = {}
    for opening, stop in _blocks(text):
        indent, _, language = opening.groups()
        if not language or language.lower() in _LANGUAGES:
            code = text[opening.end() + 1 : stop]
            code = re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", code, flags=re.MULTILINE)
            codes[bool(language)] = code if code.strip() else codes.get(bool(language), "")
    return (codes.get(True) or codes.get(False, "")) if codes else text


def _blocks(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the opening fence of each block and the end of its code, in one pass."""
    opening, stop = None, -1
    for line in _FENCED.finditer(text):
        begins = _FENCE.match(text, line.start())
        if opening:
            end, is_certain = _closing(line, opening)
            is_doubtful = _is_doubtful(opening)
            if is_certain and not (is_doubtful and text[opening.end() : end].isspace()):
                yield opening, end
                opening = None
                continue
            if not is_doubtful:
                if stop < 0 or not (begins and begins[3] and begins[3] == line[3].rstrip()):
                    stop = end if stop < 0 else stop
                    continue
                yield opening, stop
        opening, stop = begins, -1
    if opening and not _is_doubtful(opening):
        yield opening, len(text) if stop < 0 else stop


def _is_doubtful(opening: re.Match[str]) -> bool:
    """Return whether a fence opens a block only if the next line with a fence closes it."""
    return not opening[3] and opening.end(1) < opening.start(2)


def _closing(line: re.Match[str], opening: re.Match[str]) -> tuple[int, bool]:
    """Return where the code ends if a line closes the block, else -1, and if that is certain."""
    (indent, fence, _), (before, run, after) = opening.groups(), line.groups()
    is_last = not after.strip()
    if not run.startswith(fence) or (before.isspace() and len(before) > len(indent) + 3):
        return -1, False
    if before.strip():
        return line.start(2) if is_last else -1, False
    return line.start(), is_last


def _own_format(row: Row, source: str) -> CodeTask:
    mode, tests, entry_point = row["mode"], row["tests"], str(row.get("entry_point") or "")
    if mode not in get_args(Mode):
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(get_args(Mode))}")
    if mode == "assert":
        if not isinstance(tests, str):
            raise ValueError(f"tests of mode 'assert': expected text, found {tests!r:.40}")
        setup = str(row.get("setup") or "")
        borrowed = (entry_point,) if entry_point else _borrowed_names(f"{setup}\n{tests}")
        return CodeTask(
            source, mode, test_source=tests, entry_point=entry_point, setup=setup, borrowed=borrowed
        )
    cases = json.loads(tests) if isinstance(tests, str) else tests
    if mode == "stdin":
        return CodeTask(source, mode, [(case["input"], case["output"]) for case in cases])
    if not entry_point:
        raise ValueError("mode 'call' needs an entry_point")
    pairs = [(list(case["args"]), case["expected"]) for case in cases]
    return CodeTask(source, mode, pairs, entry_point=entry_point)


def _human_eval(row: Row, source: str) -> CodeTask:
    """Read a HumanEval row; a completion is a complete function, or continues the prompt's."""
    prompt, entry_point = str(row["prompt"]), str(row["entry_point"])
    head = re.escape(f"def {entry_point}")
    if re.search(rf"^{head}\b", source, re.MULTILINE):
        source = re.split(rf"^{head}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0] + source
    else:
        source = prompt + source
    return CodeTask(
        source,
        "assert",
        test_source=str(row["test"]),
        entry_point=entry_point,
        setup=prompt,
        borrowed=(entry_point,),
    )


def _mbpp(row: Row, source: str) -> CodeTask:
    tests = "\n".join(row["test_list"])
    imports = "\n".join(row.get("test_imports") or [])
    setup = f"{imports}\n{row.get('test_setup_code') or ''}".strip()
    # Names that the reference solution defines; without one, names that the tests leave undefined.
    defined = _free_names(f"{setup}\n{tests}") & _defined(str(row.get("code") or ""))
    borrowed = tuple(sorted(defined)) or _borrowed_names(f"{setup}\n{tests}")
    return CodeTask(source, "assert", test_source=tests, setup=setup, borrowed=borrowed)


def _defined(reference: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(reference).body if isinstance(node, kinds)}


def _borrowed_names(source: str) -> tuple[str, ...]:
    """Return the names of the program that tests without an entry point use.

    These are the names imported from `solution`, or the only undefined name. Several undefined
    names are an error: one may be a checker that the tests forgot to import, and a program that
    defines it would judge itself.
    """
    imported, nodes = set[str](), [*ast.walk(ast.parse(source))]
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or MODULE for alias in imports if alias.name == MODULE}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == MODULE:
                imported |= names - {"*"}
            elif "*" in names:
                raise ValueError(f"`from {node.module} import *` hides which names the "
                                 "tests use of the program: name an entry_point")  # fmt: skip
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imported |= {node.attr} if node.value.id in modules else set()
    free = _free_names(source)
    if len(free) != (not imported):
        undefined = ", ".join(sorted(free)) or "none"
        raise ValueError(
            f"undefined names in the tests: {undefined}; name an entry_point, or import the "
            f"program's names from `{MODULE}`"
        )
    return tuple(sorted(imported | free))


def _free_names(source: str) -> set[str]:
    """Return the global names that a source reads but does not define, except built-in names."""
    top = symtable.symtable(source, MODULE, "exec")
    tables, read, defined = [top], set[str](), {*dir(builtins)}
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                is_set = symbol.is_assigned() or symbol.is_imported()
                (defined if is_set else read).add(symbol.get_name())
    return {name for name in read - defined if not name.startswith("__")}


def _live_code_bench(row: Row, source: str) -> CodeTask:
    cases = _live_cases(row["public_test_cases"]) + _live_cases(row.get("private_test_cases"))
    return _live_task(row, source, cases)


def _live_task(row: Row, source: str, cases: list[dict[str, Any]]) -> CodeTask:
    if cases[0]["testtype"] == "stdin":
        tests = [(case["input"], case["output"]) for case in cases]
        return CodeTask(source, "stdin", tests, imports=True)
    method = _METHOD.search(str(row["starter_code"]))
    if method is None:
        raise ValueError(f"no method in starter_code {row['starter_code']!r:.60}")
    pairs = [
        ([json.loads(line) for line in case["input"].splitlines()], json.loads(case["output"]))
        for case in cases
    ]
    return CodeTask(source, "call", pairs, entry_point=method[1], imports=True)


def _deep_coder(row: Row, source: str) -> CodeTask:
    """Read a DeepCoder row, in the format of its source: LiveCodeBench, PrimeIntellect or TACO."""
    if not isinstance(row["tests"], str):
        raise ValueError(
            "field 'tests': expected JSON as text, as DeepCoder has it, or a field 'mode' beside "
            f"it ({', '.join(get_args(Mode))}), found a {type(row['tests']).__name__} and no 'mode'"
        )
    tests = _live_cases(row["tests"])
    if isinstance(tests, Mapping):
        name, pairs = tests.get("fn_name"), [*zip(tests["inputs"], tests["outputs"], strict=True)]
    elif "testtype" in tests[0]:
        return _live_task(row, source, tests)
    else:
        name, pairs = tests[0].get("fn_name"), [(test["input"], test["output"]) for test in tests]
    if not name:
        return CodeTask(source, "stdin", pairs, imports=True)
    calls = [(args, value) for args, (value,) in pairs]
    return CodeTask(source, "call", calls, entry_point=name, imports=True)


def _live_cases(text: str | None) -> Any:
    """Return test cases, cached because the completions of a prompt are judged together."""
    if not text:
        return []
    with _cache_lock:
        if text not in _cache:
            unpacked = _unpacked(text)
            _cache[text] = len(unpacked), json.loads(unpacked)
        _cache.move_to_end(text)
        while len(_cache) > 1 and sum(size for size, _ in _cache.values()) > MAX_CACHED_BYTES:
            _cache.popitem(last=False)
        return _cache[text][1]


def _unpacked(text: str) -> str:
    """Return the JSON of test cases; hidden ones are pickled, compressed and base64-encoded."""
    if not text.lstrip().startswith(("[", "{")):
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(text), MAX_PRIVATE_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"hidden tests are larger than {MAX_PRIVATE_BYTES} bytes")
        return str(_TextUnpickler(io.BytesIO(pickled)).load())
    return text


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"hidden tests: expected text, found {module}.{name}")


_READERS = {
    "mode": _own_format,
    "tests": _deep_coder,
    "test_list": _mbpp,
    "public_test_cases": _live_code_bench,
    "test": _human_eval,
}
