"""The tools, by the name that a policy calls them by, and what a call is in its text.

A tool is a function from the text of a call to the text of its answer. The next is a file in
`areal_flow/tools/` and a name here. This module refuses to know what tools do.
"""

from __future__ import annotations

from dataclasses import dataclass

TOOLS: dict[str, str] = {
    "calculator": "areal_flow.tools.calculator:calculate",
    "python": "areal_flow.tools.python:run_python",
}
ANSWERING = "areal_flow.tools.answering:answer"
"""What calls a tool on a reward worker."""


def tools_by_name(names: tuple[str, ...]) -> dict[str, str]:
    """Return the import path of each tool; one that is given by its path has the function's name."""
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
