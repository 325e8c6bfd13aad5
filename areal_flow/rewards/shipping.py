"""Ships reward functions that workers cannot import, of a notebook or a script, by value.

    rewards/length@1f0c2a9b77d3.pickle     the function
    rewards/length@1f0c2a9b77d3.py         its source, for readers

Loading a reward executes it: load only from run directories that you trust.
"""

from __future__ import annotations

import inspect
import pickle
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import RewardError
from areal_flow.rewards.functions import without_partial

SHIPPED = "shipped:"


def ship_function(function: Callable[..., Any], directory: Path) -> str:
    """Write a function with everything of its module that it uses; return its name for a recipe."""
    callee: Any = without_partial(function)
    code = callee if inspect.isroutine(callee) else type(callee)  # of a callable object
    pickled, source = _pickled_by_value(function, code.__module__), _source_of(code)
    name = re.sub(r"\W+", "", code.__name__) or "function"
    stem = f"{name}@{_hash(pickled, source)}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{stem}.py").write_text(source)
    (directory / f"{stem}.pickle").write_bytes(pickled)
    return f"{SHIPPED}{stem}"


def load_shipped(name: str, directory: Path) -> Callable[..., Any]:
    stem = name.removeprefix(SHIPPED)
    try:
        pickled = (directory / f"{stem}.pickle").read_bytes()
        source = (directory / f"{stem}.py").read_text()
    except OSError as error:
        raise RewardError(f"reward {name!r} is not in {directory}: {error}") from None
    if (actual := _hash(pickled, source)) != stem.rpartition("@")[2]:
        raise RewardError(
            f"reward {name!r}: expected the function that was shipped, found another with hash "
            f"{actual} in {directory}: restore it from a copy"
        )
    try:
        return pickle.loads(pickled)  # type: ignore[no-any-return]
    except Exception as error:
        raise RewardError(
            f"reward {name!r} cannot be loaded: {type(error).__name__}: {error}. What it imports "
            "must be installed where reward workers run"
        ) from error


def what_is_executed(names: Iterable[str]) -> str:
    """Return a note about rewards whose code came with a run directory; empty if none did."""
    shipped = [name.removeprefix(SHIPPED) for name in names if name.startswith(SHIPPED)]
    if not shipped:
        return ""
    sources = ", ".join(f"rewards/{stem}.py" for stem in shipped)
    return f"This executes code that came with the run directory: {sources}"


def _pickled_by_value(function: Callable[..., Any], home: str) -> bytes:
    import cloudpickle

    module = sys.modules.get(home)
    with ExitStack() as afterwards:
        if module is not None and module.__name__ != "__main__":
            cloudpickle.register_pickle_by_value(module)
            afterwards.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            return bytes(cloudpickle.dumps(function))
        except Exception as error:
            raise RewardError(
                f"reward function {function!r} cannot be shipped to the workers: {error}"
            ) from error


def _source_of(code: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return "# The source is not known: the function was typed into an interpreter.\n"


def _hash(pickled: bytes, source: str) -> str:
    return sha256_hex(pickled + source.encode(), 12)
