"""`areal-flow verify`: what a verifier says of rows, before anything is trained on it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from areal_flow.errors import ConfigError


def verify(
    *,
    kind: Annotated[str, Parameter(metavar="NAME|MODULE:FUNCTION")],
    settings: Annotated[str, Parameter(metavar="JSON")] = "{}",
) -> int:
    """Judge rows of JSONL from standard input; write one verdict a line, in their order.

    A row has id, completion and what its verifier asks for: reference; or, for code, mode, tests
    and entry_point. The exit code is 1 if a row got no score.

    Args:
        kind: A verifier: math, code, numeric, exact, regex, format, judge, reward_model,
            reasoning_gym, or one of yours.
        settings: Its keyword arguments, as in a recipe: '{"pattern": "Answer: (.+)"}'.
    """
    from pipelines.jobs.verify import read_lines, verify_lines

    chosen = _settings_of(settings)
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    are_scored = True
    for verdict in verify_lines(kind, read_lines(sys.stdin), settings=chosen):
        print(json.dumps(verdict), flush=True)
        are_scored &= verdict["score"] is not None
    return 0 if are_scored else 1


def _settings_of(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"--settings {text!r}: expected a JSON object")
    return settings


COMMANDS = (verify,)
