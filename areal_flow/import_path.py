"""Loads the function that an import path `package.module:function` names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
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

    Raises:
        ArealFlowError: of the kind asked for: there is no such function.
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
