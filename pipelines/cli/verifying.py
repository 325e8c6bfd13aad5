"""`areal-flow verify`: what a verifier says of rows, before anything is trained on it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter


def verify(*, kind: Annotated[str, Parameter(metavar="NAME|MODULE:FUNCTION")]) -> int:
    """Judge rows of JSONL from standard input; write one verdict a line, in their order.

    A row has id, completion and what its verifier asks for: reference; or, for code, mode, tests
    and entry_point. The exit code is 1 if a row got no score.

    Args:
        kind: A verifier: code, numeric, exact, or one of yours.
    """
    from pipelines.verify import verify_lines

    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    are_scored = True
    for verdict in verify_lines(kind, sys.stdin):
        print(json.dumps(verdict), flush=True)
        are_scored &= verdict["score"] is not None
    return 0 if are_scored else 1


COMMANDS = (verify,)
