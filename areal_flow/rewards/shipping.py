"""Ships functions that workers cannot import, of a notebook or a script, by value.

    rewards/length@1f0c2a9b77d3.pickle     the function: a reward, an agent or a tool
    rewards/length@1f0c2a9b77d3.py         its source, for readers

Loading a function executes it: load only from run directories that you trust.
"""

from __future__ import annotations

import inspect
import pickle
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import ArealFlowError, RewardError
from areal_flow.core.settings import import_function
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
    except OSError as cause:
        raise RewardError(f"function {name!r} is not in {directory}: {cause}") from None
    if (actual := _hash(pickled, source)) != stem.rpartition("@")[2]:
        raise RewardError(
            f"function {name!r}: expected the function that was shipped, found another with hash "
            f"{actual} in {directory}: restore it from a copy"
        )
    try:
        return pickle.loads(pickled)  # type: ignore[no-any-return]
    except Exception as cause:
        raise RewardError(
            f"function {name!r} cannot be loaded: {type(cause).__name__}: {cause}. What it imports "
            "must be installed where workers run"
        ) from cause


def located(path: str, directory: Path) -> str:
    """Return the path of a function that `load_function` takes, if `directory` has shipped ones."""
    return (
        f"{SHIPPED}{directory / path.removeprefix(SHIPPED)}" if path.startswith(SHIPPED) else path
    )


def load_function(path: str, *, setting: str, error: type[ArealFlowError]) -> Callable[..., Any]:
    """Return the function at an import path, or the shipped one at a path from `located`."""
    if not path.startswith(SHIPPED):
        return import_function(path, setting=setting, error=error)
    return _load_once(Path(path.removeprefix(SHIPPED)))


@cache
def _load_once(file: Path) -> Callable[..., Any]:
    """Load a function once per process: like an imported one, it keeps its globals."""
    return load_shipped(file.name, file.parent)


def function_name(path: str) -> str:
    """Return the name of the function at an import path, or of a shipped one."""
    name = path.rpartition(":")[2]
    return Path(name).name.rpartition("@")[0] if path.startswith(SHIPPED) else name


def what_is_executed(names: Iterable[str]) -> str:
    """Return a note about functions whose code came with a run directory; empty if none did."""
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
                f"function {function!r} cannot be shipped to the workers: {error}"
            ) from error


def _source_of(code: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return "# The source is not known: the function was typed into an interpreter.\n"


def _hash(pickled: bytes, source: str) -> str:
    return sha256_hex(pickled + source.encode(), 12)
