"""What all validated settings have in common; a component keeps its own beside it.

It refuses to know any component.
"""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Settings(BaseModel):
    """Base of every section: frozen, closed to unknown keys, and without silent conversions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def require(holds: bool, rule: str) -> None:
    """Refuse settings that do not fit together, inside a validator.

    Raises:
        ValueError: with the rule, if it does not hold.
    """
    if not holds:
        raise ValueError(rule)


def unnamed_is(name: str) -> BeforeValidator:
    """Return what gives a table that names none of several settings models the name of one."""
    return BeforeValidator(lambda given: {"name": name, **given} if type(given) is dict else given)
