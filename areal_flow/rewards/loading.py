"""A verifier's name in, the verifier and its identity out."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass

from areal_flow.errors import RewardError
from areal_flow.import_path import import_function
from areal_flow.rewards.numeric import verify_exact, verify_numeric
from areal_flow.rewards.protocol import Verifier

BUILT_IN: dict[str, Verifier] = {"numeric": verify_numeric, "exact": verify_exact}


@dataclass(frozen=True, slots=True)
class LoadedVerifier:
    """A verifier with the identity that every trajectory it scores will carry."""

    verify: Verifier
    identity: str


def load_verifier(name: str) -> LoadedVerifier:
    """Return a built-in verifier, or the one at an import path `package.module:function`.

    Raises:
        RewardError: the name is unknown or cannot be imported.
    """
    verify = BUILT_IN.get(name) or import_function(
        name, setting="rewards.verifier", error=RewardError, built_in=BUILT_IN
    )
    return LoadedVerifier(verify, f"{name}@{_code_hash(verify)}")


def _code_hash(verify: Verifier) -> str:
    try:
        source = inspect.getsource(inspect.getmodule(verify) or verify)
    except (OSError, TypeError):
        source = repr(verify)
    return hashlib.sha256(source.encode()).hexdigest()[:12]
