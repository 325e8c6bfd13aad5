"""Says what is wrong with a command line, what was meant, and where it is explained."""

from __future__ import annotations

from cyclopts import CycloptsError, UnknownOptionError

from areal_flow.config.messages import did_you_mean


def explain_usage(error: CycloptsError) -> str:
    """Return a message for a command line that is none of ours."""
    command = next(iter(error.command_chain or ()), "")
    advice = f"`areal-flow {command} --help` lists " + ("options" if command else "commands")
    if command == "replay":
        advice += "; it takes settings as --set SECTION.KEY=VALUE"
    return f"{_unknown_option(error) or error} {advice}.".replace("  ", " ")


def _unknown_option(error: CycloptsError) -> str:
    """Return which option there is not, and those that are nearest; empty for other mistakes."""
    if not isinstance(error, UnknownOptionError):
        return ""
    given = (error.token.keyword or error.token.value).partition("=")[0]
    options = [name for argument in error.argument_collection for name in argument.names]
    return f"Unknown option: {given}{did_you_mean(given, options) or '.'}"
