"""`areal-flow`: the command line. Heavy imports are left to the command that needs them.

Exit codes: 0 success; 1 an error, with one message; 2 wrong usage or settings; 129, 130 and 143
stopped by SIGHUP, SIGINT or SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from errno import EACCES, EEXIST, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)

from areal_flow.config.listing import setting_names
from areal_flow.config.messages import OPTION, did_you_mean, spell, why_no_algorithm
from areal_flow.core.errors import ArealFlowError, ConfigError
from areal_flow.core.settings import search_here_last
from pipelines.cli import importing, inspecting, plan, runs, training
from pipelines.cli.settings import EXIT_CODES, Flag, Folders
from pipelines.cli.version import version_text
from pipelines.console.tables import Report, show

WHAT_TO_DO = {
    **dict.fromkeys((EACCES, EPERM, EROFS), "change its permissions, or "),
    **dict.fromkeys((EEXIST, ENOTDIR), ""),
    ENOSPC: "free some, or ",
}
"""Advice about a path that cannot be used, by errno."""
IMPORT_USER_CODE = {"train", "evaluate", "replay", "verify", "plan"}
"""Commands that import verifiers, workflows or losses by path, or preview workers that do."""
SECTIONS = dict.fromkeys(("train", "plan"), "prompts") | dict.fromkeys(
    ("sft", "dpo", "reward-model"), "sft"
)
"""Commands that take all settings, and the section that comes first where several have a name."""

app = App(
    name="areal-flow",
    help="Fully asynchronous reinforcement learning for reasoning models, as a dataflow.",
    version=version_text,
    version_format="plaintext",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
)
app.meta.suppress_keyboard_interrupt = False  # `main` ends with the code of the signal
app.register_install_completion_command()
for module in (training, inspecting, runs, plan, importing):
    for command in module.COMMANDS:
        app.command(command)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    runs: Annotated[Path, Parameter(help="Folder of runs.")] = Path("runs"),
    registry: Annotated[
        str | None, Parameter(help="MLflow's address, for models:/...", metavar="URI")
    ] = None,
    json: Annotated[Flag, Parameter(help="Print a report as one JSON object.")] = False,
) -> int:
    """Run one command; shared options may stand before or after its name."""
    began = monotonic()
    command, bound, ignored = _parsed(tokens)
    if json and Report.__name__ not in command.__annotations__.get("return", ""):
        raise ConfigError(f"`{' '.join(tokens[:1])}` prints no report: it takes no --json")
    if command.__name__ in IMPORT_USER_CODE:
        search_here_last()
    shared = {"folders": Folders(runs, registry, began)} if "folders" in ignored else {}
    outcome = command(*bound.args, **bound.kwargs, **shared)
    return show(outcome, as_json=json) if isinstance(outcome, Report) else int(outcome or 0)


def _parsed(tokens: Sequence[str]) -> tuple[Any, Any, Any]:
    """Parse a command; a setting that only one section has needs no section."""
    try:
        return app.parse_args(tokens)
    except UnknownOptionError as error:
        command = next(iter(error.command_chain or ()), "")
        if command not in SECTIONS:
            raise
        given, options = _unknown(error)
        from pipelines.arguments import NOT_OF_TRAINING, full_name

        refused = NOT_OF_TRAINING if SECTIONS[command] == "prompts" else {}
        name = given.removeprefix("--").replace("-", "_")
        name = full_name(name, "", section=SECTIONS[command], refused=refused, spelling=OPTION)
        option = spell(name, OPTION)
        if option == given or option not in options:
            raise
        rest = [f"{option}{t.removeprefix(given)}" if _is(given, t) else t for t in tokens]
        return _parsed(rest)


def _is(option: str, token: str) -> bool:
    return token.partition("=")[0] == option


def _unknown(error: UnknownOptionError) -> tuple[str, list[str]]:
    """Return the option as it was given, and those that the command has."""
    given = (error.token.keyword or error.token.value).partition("=")[0]
    return given, [name for argument in error.argument_collection for name in argument.names]


class _Warnings(logging.Handler):
    """Prints warnings to the current standard error: above a live display, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; our errors become one message and an exit code."""
    logging.basicConfig(format="%(name)s: %(message)s", handlers=[_Warnings()])
    try:
        return int(app.meta(sys.argv[1:] if arguments is None else list(arguments)) or 0)
    except BrokenPipeError:  # `| head` has read enough; the interpreter flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CycloptsError as error:
        print(f"areal-flow: {_explain(error)}", file=sys.stderr)
        return 2
    except ArealFlowError as error:
        print(f"areal-flow: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        if error.errno not in WHAT_TO_DO:
            raise
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        advice = WHAT_TO_DO[error.errno] + "choose another place"
        print(f"areal-flow: {what}; {advice}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        print("areal-flow: stopped", file=sys.stderr)
        return EXIT_CODES.get(str(stop), EXIT_CODES["SIGINT"])


def _explain(error: CycloptsError) -> str:
    command = next(iter(error.command_chain or ()), "")
    advice = f"`areal-flow {command} --help` lists " + ("options" if command else "commands")
    if command == "replay":
        advice += "; it takes settings as --set SECTION.KEY=VALUE"
    problem = str(error)
    if isinstance(error, UnknownOptionError):
        given, options = _unknown(error)
        problem = f"Unknown option: {given}{did_you_mean(given, options) or '.'}"
    elif isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        word = error.unused_tokens[0]
        problem = f"Unexpected argument: {word}"
        name, equals, _ = word.lstrip("+").partition("=")
        if equals and command in SECTIONS:
            options = [spell(each, OPTION) for each in setting_names()]
            hint = did_you_mean(f"--{name}", options)
            problem += f": settings are options, --SETTING VALUE{hint}"
        problem += "" if problem.endswith(("?", ".")) else "."
    elif (
        isinstance(error, CoercionError)
        and error.token is not None
        and error.token.keyword == "--algorithm.name"
    ):
        problem = f"--algorithm.name {error.token.value}: {why_no_algorithm(error.token.value)}"
        problem += "" if problem.endswith("?") else "."
    return f"{problem} {advice}.".replace("  ", " ")


if __name__ == "__main__":
    sys.exit(main())
