"""Loads the function that `package.module:function` names, and identifies its code."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any

from areal_flow.errors import ArealFlowError


def import_function(
    path: str, *, setting: str, error: type[ArealFlowError], built_in: Collection[str] = ()
) -> Callable[..., Any]:
    """Return the function at an import path.

    Args:
        setting: what the user calls it, for messages.
        error: what to raise.
        built_in: names that would have been understood, too.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon:
        names = f"one of {', '.join(sorted(built_in))} or " if built_in else ""
        raise error(
            f"{setting} = {path!r}: expected {names}an import path such as "
            "'my_package.my_module:my_function'"
        )
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as cause:
        raise error(f"{setting} = {path!r} cannot be imported: {cause}") from cause
    if not callable(function):
        raise error(f"{setting} = {path!r} is not callable")
    return function  # type: ignore[no-any-return]


def code_hash(code: Any) -> str:
    """Return the hash of the module that defines a function or a class: alike in all processes.

    A class says in `made_of` which other files of code decide what it says, and its instance may
    have the `content_hash` of more than code. Without a source, as of a module that was compiled, a
    function's byte code stands for it.
    """
    try:
        text = inspect.getsource(inspect.getmodule(code) or code)
    except (OSError, TypeError):
        compiled = getattr(code, "__code__", None)
        text = _compiled(compiled) if compiled else f"{code.__module__}:{code.__qualname__}"
    others = (path.read_text() for path in getattr(code, "made_of", ()))
    return text_hash("\n".join((text, *others)))


def text_hash(text: str) -> str:
    """Return what identifies a text: 12 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def source_file(code: Any) -> str:
    try:
        return inspect.getsourcefile(code) or ""
    except TypeError:
        return ""


def _compiled(code: CodeType) -> str:
    constants = [_compiled(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
