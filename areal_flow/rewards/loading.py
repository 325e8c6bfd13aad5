"""A verifier's name in, the verifier and its identity out."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from dataclasses import dataclass

from areal_flow.errors import RewardError
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
    verify = BUILT_IN.get(name) or _import(name)
    return LoadedVerifier(verify, f"{name}@{_code_hash(verify)}")


def _import(path: str) -> Verifier:
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise RewardError(
            f"rewards.verifier = {path!r}: expected one of {', '.join(sorted(BUILT_IN))} or an "
            "import path such as 'my_package.my_module:my_function'"
        )
    try:
        verify = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"rewards.verifier = {path!r} cannot be imported: {error}") from error
    if not callable(verify):
        raise RewardError(f"rewards.verifier = {path!r} is not callable")
    return verify  # type: ignore[no-any-return]


def _code_hash(verify: Verifier) -> str:
    try:
        source = inspect.getsource(inspect.getmodule(verify) or verify)
    except (OSError, TypeError):
        source = repr(verify)
    return hashlib.sha256(source.encode()).hexdigest()[:12]
