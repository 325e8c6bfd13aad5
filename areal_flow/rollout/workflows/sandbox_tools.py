"""Tools that run in the sandbox of their episode: a shell, an interpreter, an editor, functions."""

from __future__ import annotations

import asyncio
import inspect
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any, cast

from areal_flow.core.errors import ArealFlowError, PromptError
from areal_flow.core.types import Prompt
from areal_flow.policy.tokenizer.chat import Tool
from areal_flow.rewards.shipping import SHIPPED, function_name, load_function
from areal_flow.rollout.workflows.episode import EpisodeContext
from areal_flow.sandboxes.protocol import CommandResult, Interpreter, Sandbox
from areal_flow.sandboxes.registry import SandboxSettings

FILES = "files"
"""The column of prompts with the files of the sandbox: text by path, or the same as JSON."""
INTERPRETERS: Mapping[str, str] = {
    "bash": "Run a bash command; the working directory, variables and files stay for the next one.",
    "python": "Run Python code and print the value of its last line; names stay for the next call.",
}
"""Descriptions of the tools that run text."""
EDIT = "edit"
_EDIT_ARGUMENTS = {
    "path": "the file",
    "old": "text that is in the file once; empty to write a new file",
    "new": "text to have in its place",
}
EDIT_SCHEMA: Tool = {
    "type": "function",
    "function": {
        "name": EDIT,
        "description": "Replace a piece of text in a file.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": "string", "description": meaning}
                for name, meaning in _EDIT_ARGUMENTS.items()
            },
            "required": [*_EDIT_ARGUMENTS],
        },
    },
}
SANDBOX_TOOLS = (*INTERPRETERS, EDIT)
_FUNCTIONS = "/tmp/.tools"
_CALL = (
    "import json, runpy, sys; path, name, given = sys.argv[1:]; given = json.loads(given); "
    "function = runpy.run_path(path)[name]; "
    "print(function(*given) if isinstance(given, list) else function(**given))"
)


class EpisodeSandbox(AsyncExitStack):
    """The sandbox of an episode, started for its first call, with the files of its prompt.

    Leaving its `async with` block closes it.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        context: EpisodeContext,
        prompt: Prompt,
        furnish: Callable[[Sandbox], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self._settings, self._context, self._prompt = settings, context, prompt
        self._furnish = furnish
        self._starting = asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self._functions: set[str] = set()

    async def started(self) -> Sandbox:
        """Return the sandbox.

        Raises:
            PromptError: it cannot have the prompt's files.
        """
        async with self._starting:
            if self._sandbox is None:
                sandbox = await self.enter_async_context(self._context.sandbox(self._settings))
                try:
                    if self._furnish:
                        await self._furnish(sandbox)
                    for path, text in files_of(self._prompt).items():
                        await sandbox.write_file(path, text.encode())
                except (FileNotFoundError, ValueError) as error:
                    what = f"prompt {self._prompt.prompt_id}: its files cannot be in the sandbox"
                    raise PromptError(f"{what}: {error}") from error
                self._sandbox = sandbox
            return self._sandbox

    async def run(self, command: str, timeout_s: float, interpreter: str) -> CommandResult:
        sandbox = await self.started()
        return await sandbox.run(
            command, timeout_s=timeout_s, interpreter=cast("Interpreter", interpreter)
        )

    async def edit(self, *, path: str, old: str, new: str) -> str:
        """Replace a text that is in a file once, or write a new file.

        Raises:
            FileNotFoundError: the file cannot be read or written.
            ValueError: the text is not in it, or more than once.
        """
        sandbox = await self.started()
        if old:
            text = (await sandbox.read_file(path)).decode(errors="surrogateescape")
            if (num_places := text.count(old)) != 1:
                raise ValueError(
                    f"expected the old text once in {path}, found it {num_places} times"
                )
            new = text.replace(old, new)
        await sandbox.write_file(path, new.encode(errors="surrogateescape"))
        return f"{path} was {'changed' if old else 'written'}"

    async def call(
        self, path: str, given: Mapping[str, Any] | list[str], timeout_s: float
    ) -> CommandResult:
        """Call a function by the source of its module, which needs nothing but what is there.

        Args:
            path: its import path, or that of a shipped one.
            given: its arguments, by place or by name.
        """
        sandbox = await self.started()
        name, source = _source_of(path)
        file = f"{_FUNCTIONS}/{name}.py"
        if file not in self._functions:
            await sandbox.write_file(file, source.encode())
            self._functions.add(file)
        words = ("python3", "-c", _CALL, file, name, json.dumps(given))
        # In brackets: the shell's own directory and variables stay.
        return await sandbox.run(f"({shlex.join(words)})", timeout_s=timeout_s)


@cache
def _source_of(path: str) -> tuple[str, str]:
    function = load_function(path, setting="workflow.tools", error=ArealFlowError)
    if path.startswith(SHIPPED):
        return function_name(path), Path(f"{path.removeprefix(SHIPPED)}.py").read_text()
    # Its module may have it by another name than the one that imports it.
    names = function_name(path), function.__name__
    own = (name for name in names if function.__globals__.get(name) is function)
    return next(own, names[0]), Path(inspect.getfile(function)).read_text()


def files_of(prompt: Prompt) -> Mapping[str, str]:
    """Return the files that a prompt's sandbox starts with.

    Raises:
        PromptError: its column `files` is something else.
    """
    files = prompt.metadata.get(FILES) or {}
    if isinstance(files, str):
        try:
            files = json.loads(files)
        except ValueError:
            files = None
    if not isinstance(files, Mapping) or not all(isinstance(t, str) for t in files.values()):
        raise PromptError(
            f"prompt {prompt.prompt_id}: expected in column {FILES!r} text by path, or JSON of it"
        )
    return files
