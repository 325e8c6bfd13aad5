"""A sandbox by its processes: a provider starts and kills them, the rest is here.

An interpreter reads a mark and a command, both ended by NUL, and prints the mark with the exit code
after the command's output. The mark is drawn for each command, so that no output can hold it; a
command may read its own and lie about its exit code, which is its own business.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic

from areal_flow.sandboxes.protocol import CommandResult, Interpreter
from areal_flow.sandboxes.run import SandboxError

MAX_OUTPUT_BYTES = 1 << 16
"""Of a command that are kept: the first half and the last."""
_HALF = MAX_OUTPUT_BYTES // 2
MAX_FILE_BYTES = 1 << 26
FILE_TIMEOUT_S = 60.0
"""Time limit of reading or writing a file."""
KILLED = 137
"""The exit code of an interpreter that was killed, as a shell has it."""
ENVIRONMENT = {
    "TERM": "dumb", "PAGER": "cat",
    "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1", "DEBIAN_FRONTEND": "noninteractive",
}  # fmt: skip
_BASH = r"""
exec 3<&0 0</dev/null 2>&1
trap 'builtin printf "\0%s %d exit\0" "$__mark" $?' EXIT
while IFS= builtin read -r -d "" -u 3 __mark && IFS= builtin read -r -d "" -u 3 __command; do
  builtin eval "$__command" 3<&-
  builtin printf "\0%s %d\0" "$__mark" $?
done
__mark=
"""
_PYTHON = r"""
def serve():
    import sys
    sys.path.pop(0)
    import ast, os, traceback
    sys.path.insert(0, "")
    commands = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(1, 2)
    names, rest = sys.modules["__main__"].__dict__, b""
    while chunk := os.read(commands, 1 << 16):
        rest += chunk
        while rest.count(b"\0") > 1:
            mark, command, rest = rest.split(b"\0", 2)
            status = 0
            try:
                tree = ast.parse(command.decode())
                last = [tree.body.pop()] if isinstance((tree.body or [0])[-1], ast.Expr) else []
                exec(compile(tree, "<input>", "exec"), names)
                exec(compile(ast.Interactive(last), "<input>", "single"), names)
            except SystemExit as exit_:
                code = exit_.code
                status = code if isinstance(code, int) else 0 if code is None else 1
                if status == 1 != code:
                    print(code)
            except BaseException:
                kind, error, trace = sys.exc_info()
                traceback.print_exception(kind, error, trace.tb_next)
                status = 1
            sys.stdout.flush()
            os.write(1, b"\0%s %d\0" % (mark, status & 255))
serve()
"""
_ARGUMENTS: Mapping[Interpreter, Sequence[str]] = {
    "bash": ("bash", "--noprofile", "--norc", "-c", _BASH),
    "python": ("python3", "-u", "-c", _PYTHON),
}
_MARKED = 'printf %s "$0"; {} && printf %s "$0"'
_READ = _MARKED.format('head -c "$2" < "$1"')
_WRITE = _MARKED.format('mkdir -p -- "$(dirname -- "$1")" && cat > "$1"')
MAX_PATH_BYTES = 4096


@dataclass
class Process:
    """A process of a sandbox, by its pipes: its errors are a part of its output."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    close: Callable[[], None]


class ShellSandbox(ABC):
    """A `Sandbox`, of a provider that can start processes in it and kill them."""

    def __init__(self, *, workdir: str, variables: Mapping[str, str]) -> None:
        self._workdir, self._variables = workdir, {**ENVIRONMENT, **variables}
        self._interpreters: dict[Interpreter, Process] = {}
        self._lock = asyncio.Lock()

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def _start_process(self, arguments: Sequence[str]) -> Process:
        """Start a process in the working directory, in a session of its own.

        Raises:
            SandboxError: the sandbox is gone.
        """

    @abstractmethod
    async def _kill_all(self) -> None:
        """Kill all processes but those that keep the sandbox alive."""

    async def close(self) -> None:
        self._drop_all()

    async def run(
        self, command: str, *, timeout_s: float, interpreter: Interpreter = "bash"
    ) -> CommandResult:
        if "\0" in command:
            return CommandResult("expected no NUL character in a command", 2, 0.0)
        async with self._lock:
            began, mark = monotonic(), token_hex(16).encode()
            output = _Output(mark)
            process = self._interpreters.get(interpreter)
            if process and process.stdout.at_eof():  # it was killed meanwhile
                process.close()
                process = None
            if process is None:
                process = await self._start_process(_ARGUMENTS[interpreter])
                self._interpreters[interpreter] = process
            try:
                async with asyncio.timeout(timeout_s):
                    with suppress(ConnectionError):
                        process.stdin.write(b"%s\0%s\0" % (mark, command.encode(errors="replace")))
                        await process.stdin.drain()
                    while output.exit_code is None:
                        chunk = await process.stdout.read(1 << 16)
                        output.add(chunk)
            except BaseException as error:
                self._drop_all()
                await self._kill_all()
                if not isinstance(error, TimeoutError):
                    raise
                return output.result(monotonic() - began, timed_out=True)
            if output.is_last and output.exit_code == KILLED:
                self._drop_all()
                await self._kill_all()  # there may be too many for another to start
                await self._output_of(_MARKED.format("true"))  # raises if the sandbox is gone
            elif output.is_last:
                self._interpreters.pop(interpreter).close()
            return output.result(monotonic() - began)

    async def stop_processes(self) -> None:
        async with self._lock:
            self._drop_all()
            await self._kill_all()

    async def read_file(self, path: str) -> bytes:
        async with self._lock:
            content = await self._output_of(_READ, path, str(MAX_FILE_BYTES + 1))
            if len(content) > MAX_FILE_BYTES:
                raise FileNotFoundError(f"{path}: it has more than {MAX_FILE_BYTES:,} bytes")
            return content

    async def write_file(self, path: str, content: bytes) -> None:
        async with self._lock:
            await self._output_of(_WRITE, path, stdin=content)

    def _drop_all(self) -> None:
        while self._interpreters:
            self._interpreters.popitem()[1].close()

    async def _output_of(
        self, script: str, path: str = "", *arguments: str, stdin: bytes = b""
    ) -> bytes:
        """Return what a script prints between two marks.

        Raises:
            FileNotFoundError: it failed, or did not end: there is no such path, or it is a pipe.
            SandboxError: it did not start.
        """
        if "\0" in path or len(path.encode(errors="replace")) > MAX_PATH_BYTES:
            raise FileNotFoundError(
                f"expected a path of at most {MAX_PATH_BYTES:,} bytes, found {path!r:.80}"
            )
        path = path.encode(errors="replace").decode()
        mark = token_hex(16).encode()
        # Bash reads ~/.bashrc, which commands may write, if its standard input is a socket.
        command = ("bash", "--noprofile", "--norc", "-c", script, mark.decode(), path, *arguments)
        process = await self._start_process(command)
        try:
            async with asyncio.timeout(FILE_TIMEOUT_S):
                with suppress(ConnectionError):
                    process.stdin.write(stdin)
                    await process.stdin.drain()
                    process.stdin.write_eof()
                output = await process.stdout.read()
        except TimeoutError:
            self._drop_all()
            await self._kill_all()
            raise FileNotFoundError(f"{path}: not done within {FILE_TIMEOUT_S:g} s") from None
        finally:
            process.close()
        before, has_begun, content = output.partition(mark)
        if not has_begun:
            raise SandboxError(f"a sandbox is gone: {before.decode(errors='replace').strip()}")
        if not content.endswith(mark):
            reason = content.replace(b"%s: line 1: " % mark, b"")  # bash has it as its name
            raise FileNotFoundError(reason.decode(errors="replace").strip())
        return content.removesuffix(mark)


class _Output:
    """The output of a command up to its mark; of a long one the first half and the last."""

    def __init__(self, mark: bytes) -> None:
        self._end = re.compile(rb"\x00%s (\d{1,3})( exit)?\x00" % mark)
        self._head, self._tail = b"", bytearray()
        self._num_dropped = 0
        self.exit_code: int | None = None
        self.is_last = False
        """Whether the interpreter has ended with it."""

    def add(self, chunk: bytes) -> None:
        """Take in what was read next; nothing means that the interpreter was killed."""
        self._tail += chunk
        if not chunk:
            self.exit_code, self.is_last = KILLED, True
        elif end := self._end.search(self._tail):
            self.exit_code, self.is_last = int(end[1]), end[2] is not None
            del self._tail[end.start() :]
        if len(self._tail) > (MAX_OUTPUT_BYTES if self.exit_code is None else _HALF):
            self._shorten()

    def result(self, duration_s: float, *, timed_out: bool = False) -> CommandResult:
        exit_code = KILLED if self.exit_code is None else self.exit_code
        parts = [self._head + bytes(self._tail)]
        if self._num_dropped:
            parts = [self._head, bytes(self._tail)]
        gap = f"\n[{self._num_dropped:,} bytes left out]\n"
        output = gap.join(part.decode(errors="replace") for part in parts)
        return CommandResult(output, exit_code, duration_s, timed_out)

    def _shorten(self) -> None:
        if not self._head:
            self._head = bytes(self._tail[:_HALF])
            del self._tail[:_HALF]
        if (num_dropped := len(self._tail) - _HALF) > 0:
            del self._tail[:num_dropped]
            self._num_dropped += num_dropped
