"""Calls a tool for a policy, which is told what goes wrong in the tool instead of failing by it.

What goes wrong in the infrastructure (a sandbox that cannot be had) is raised: it is no policy's
doing.
"""

from __future__ import annotations

import threading

from areal_flow.errors import ArealFlowError, RewardError
from areal_flow.import_path import import_function


def answer(path: str, text: str, timeout_s: float, max_characters: int) -> str:
    """Return what a tool returns for the text of a call, or why it returned nothing.

    Args:
        path: the tool's import path.
        max_characters: of the answer; what is longer ends with how much was left out.
    """
    tool = import_function(path, setting="workflow.tools", error=ArealFlowError)
    outcome: list[str] = []
    failure: list[RewardError] = []

    def run() -> None:
        try:
            outcome.append(str(tool(text)))
        except RewardError as error:
            failure.append(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy's own doing
            outcome.append(f"Error: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="tool", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failure:
        raise failure[0]
    said = outcome[0] if outcome else f"Error: no result within {timeout_s:g} s"
    said = said.encode(errors="replace").decode()  # a lone surrogate has no tokens
    left_out = len(said) - max_characters
    return said if left_out <= 0 else f"{said[:max_characters]} ({left_out} characters left out)"
