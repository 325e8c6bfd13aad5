"""Which engines there are: their names in recipes, and where each one's factory is.

The next engine is a file with a factory, a line here, and a subject in the contract suite. Nothing
of an engine is imported before it is asked for.
"""

from __future__ import annotations

from areal_flow.errors import ConfigError
from areal_flow.generation.protocol import EngineFactory
from areal_flow.import_path import import_function

ENGINES: dict[str, str] = {
    "torch": "areal_flow.generation.torch_engine:start_torch_engine",
}


def require_engine(name: str) -> None:
    """Refuse a name that no engine has, without importing any.

    Raises:
        ConfigError: listing the names.
    """
    if name not in ENGINES:
        raise ConfigError(f"generation.engine = {name!r}: expected one of {', '.join(ENGINES)}")


def engine_factory(name: str) -> EngineFactory:
    """Import and return the factory of the engine that a recipe names.

    Raises:
        ConfigError: there is no such engine, or what it needs is not installed.
    """
    require_engine(name)
    return import_function(ENGINES[name], setting="generation.engine", error=ConfigError)
