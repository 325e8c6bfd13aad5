"""The tool `python`: a program of the policy, run in a sandbox; what it prints is the answer.

Each call is a program of its own: nothing is kept from the one before.
"""

from __future__ import annotations

from functools import cache

from areal_flow.rewards.code.sandbox.inside import program
from areal_flow.rewards.code.sandbox.pool import SandboxPool
from areal_flow.rewards.code.sandbox.run import Outcome, Program


@cache
def _sandboxes() -> SandboxPool:
    return SandboxPool()


def run_python(text: str) -> str:
    """Run a Python program, with numpy; the answer is what it prints."""
    script = Program(program.SCRIPT, text.encode(errors="replace"))
    (outcome,) = _sandboxes().run(lambda: [script])
    printed = outcome.stdout.decode(errors="replace").strip()
    return "\n".join(filter(None, (printed, _failure(outcome))))


def _failure(outcome: Outcome) -> str:
    if outcome.is_output_over:
        return "Error: the program printed too much"
    if outcome.timed_out:
        return "Error: the program ran too long"
    if outcome.exit_code:
        said = outcome.stderr.decode(errors="replace").strip()
        return said or f"Error: the program ended with {outcome.exit_code}"
    return ""
