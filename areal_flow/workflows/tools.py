"""The tools, by the name that a policy calls them by, and what a call is in its text.

A tool is a function from the text of a call to the text of its answer. The next is a file in
`areal_flow/tools/` and a name here. This module does not import the tools.
"""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass

from areal_flow.errors import ArealFlowError, RewardError
from areal_flow.failures import in_own_thread
from areal_flow.settings import import_function

TOOLS: dict[str, str] = {
    "calculator": "areal_flow.tools.calculator:calculate",
    "python": "areal_flow.tools.python:run_python",
}
ANSWERING = f"{__name__}:answer"
"""What calls a tool on a reward worker."""


def tools_by_name(names: tuple[str, ...]) -> dict[str, str]:
    """Return the import path of each tool by its name, which is that of its function."""
    found: dict[str, str] = {}
    for given in names:
        if given not in TOOLS and ":" not in given:
            raise ValueError(
                f"workflow.tools: expected {', '.join(TOOLS)} or an import path such as "
                f"'my_package.my_module:my_tool', found {given!r}"
            )
        name = given.rpartition(":")[2]
        if name in found:
            raise ValueError(f"workflow.tools: two tools are called {name!r}")
        found[name] = TOOLS.get(given, given)
    return found


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a policy asked for; without a name it is no call that could be read."""

    name: str
    text: str


def marked_call(text: str, *, start: str, end: str) -> ToolCall | None:
    """Return the call with which a completion ends: the tool's name and its input between marks.

    None where it does not end with a call's last mark.
    """
    said, found, _ = text.rpartition(end)
    _, began, asked = said.rpartition(start)
    if not found:
        return None
    name, *rest = asked.split(maxsplit=1) or [""]
    return ToolCall(name, "".join(rest)) if began else ToolCall("", asked)


def answer(path: str, text: str, timeout_s: float, max_characters: int) -> str:
    """Return what a tool returns for the text of a call, or why it returned nothing.

    What the tool raises becomes the policy's answer; a `RewardError`, an error of the
    infrastructure, is raised. An answer of more than `max_characters` is cut.
    """
    tool = import_function(path, setting="workflow.tools", error=ArealFlowError)
    call = in_own_thread(lambda: str(tool(text)), name="tool")
    wait([call], timeout_s)
    if not call.done():
        said = f"Error: no result within {timeout_s:g} s"
    elif error := call.exception():
        if isinstance(error, RewardError):
            raise error
        said = f"Error: {type(error).__name__}: {error}"
    else:
        said = call.result()
    said = said.encode(errors="replace").decode()  # a lone surrogate has no tokens
    left_out = len(said) - max_characters
    return said if left_out <= 0 else f"{said[:max_characters]} ({left_out} characters left out)"
