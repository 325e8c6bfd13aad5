"""Settings by their dotted names on a command line: `--trainer.learning-rate 1e-5`."""

from __future__ import annotations

from collections.abc import Sequence

from areal_flow.errors import ConfigError


def split_dotted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--SECTION.SETTING VALUE` from everything else, which argparse understands."""
    plain: list[str] = []
    dotted: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        option, equals, _ = argument.partition("=")
        if not (option.startswith("--") and ("." in option or option == "--rewards")):
            plain.append(argument)
            continue
        dotted.append(argument)
        if not equals and remaining:
            dotted.append(remaining.pop(0))
    return plain, dotted


def refuse_settings(dotted: list[str]) -> None:
    """Refuse settings after a command that takes none.

    Raises:
        ConfigError: naming them.
    """
    if dotted:
        raise ConfigError(f"settings are for `train` only, found: {' '.join(dotted)}")
