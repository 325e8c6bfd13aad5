"""Rewards by the names that recipes use, and the identity that each trajectory carries of them."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from areal_flow.errors import RewardError
from areal_flow.import_path import import_function
from areal_flow.rewards.function import FunctionReward, RewardFunction
from areal_flow.rewards.numeric import verify_exact, verify_numeric
from areal_flow.rewards.protocol import Reward
from areal_flow.rewards.shipping import SHIPPED, load_shipped

REWARDS: dict[str, RewardFunction | type[Reward]] = {
    "numeric": verify_numeric,
    "exact": verify_exact,
}
"""A function, or a class that is a `Reward` and takes no arguments."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward, the name that a recipe has for it, and the identity of its code."""

    name: str
    identity: str
    reward: Reward


def load_reward(name: str, directory: Path, *, timeout_s: float = 60.0) -> NamedReward:
    """Return a reward of the registry, a shipped one, or the one at `package.module:name`.

    An import path leads to what `REWARDS` may hold.

    Args:
        directory: where shipped functions lie: a run's `RunLayout.rewards`.
        timeout_s: how long a function may take over one completion.

    Raises:
        RewardError: the name is unknown, cannot be imported, or is not what was shipped.
    """
    if name.startswith(SHIPPED):
        function = load_shipped(name, directory)
        return NamedReward(
            name, name.removeprefix(SHIPPED), FunctionReward(function, timeout_s=timeout_s)
        )
    found: Any = REWARDS.get(name) or import_function(
        name, setting="rewards.verifier", error=RewardError, built_in=REWARDS
    )
    reward: Any = found() if inspect.isclass(found) else FunctionReward(found, timeout_s=timeout_s)
    return NamedReward(name, f"{name}@{code_hash(found)}", reward)


def code_hash(code: Any) -> str:
    """Return the hash of the module that defines a function or a class: alike in all processes.

    Without a source, as of a module that was compiled, a function's byte code stands for it.
    """
    try:
        text = inspect.getsource(inspect.getmodule(code) or code)
    except (OSError, TypeError):
        text = _compiled(getattr(code, "__code__", None)) or (
            f"{code.__module__}:{code.__qualname__}"
        )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _compiled(code: CodeType | None) -> str:
    """Return byte code, names and constants as text; no address stands in it."""
    if code is None:
        return ""
    constants = [_compiled(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
