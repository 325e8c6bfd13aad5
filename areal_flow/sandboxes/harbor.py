"""Tasks in Harbor's format: a folder with an instruction, an environment, and tests that reward.

    task.toml        limits, and an image
    instruction.md   what is asked
    environment/     a Dockerfile, and the files that it copies
    tests/test.sh    copied to /tests at the end; writes /logs/verifier/reward.txt or reward.json
    solution/        copied to /solution by a trial of the task: solve.sh

Format: https://www.harborframework.com/docs/tasks. What is not supported is refused by its name.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import shlex
import shutil
import tarfile
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, dropwhile
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from areal_flow.core.digests import row_hash
from areal_flow.core.errors import ArealFlowError
from areal_flow.sandboxes.protocol import CommandResult, Sandbox, opened
from areal_flow.sandboxes.registry import SandboxSettings, make_sandbox
from areal_flow.sandboxes.run import SandboxError

CONFIG, INSTRUCTION = "task.toml", "instruction.md"
ENVIRONMENT, TESTS, SOLUTION = "environment", "tests", "solution"
DOCKERFILE = "Dockerfile"
_TEST, _SOLVE = "test.sh", "solve.sh"
_REWARDS = "/logs/verifier"
COPY_TIMEOUT_S = 60.0
SOLUTION_TIMEOUT_S = 600.0
MAX_SHOWN = 500
"""Characters of what tests print that are kept."""
MB = 2**20
MAX_REWARD_BYTES, MAX_REWARDS, MAX_REWARD = 1 << 16, 100, 1e6
"""Of what tests write, the last for the absolute value of a number."""
_NAME = re.compile(r"[\w./-]{1,100}")
_NOT_OURS = ("docker-compose.yaml", "docker-compose.yml")
_REFUSED = {
    "steps": "several steps",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "a health check",
    "environment.gpus": "GPUs",
    "environment.tpu": "TPUs",
    "environment.skills_dir": "skills",
    "agent.user": "a user of its own",
    "verifier.user": "a user of its own",
    "verifier.environment": "a verifier of its own",
    "verifier.collect": "artifacts of services",
}
"""What a task may ask for, and has no counterpart here, by its place in `task.toml`."""
_CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)
"""A line that marks data of benchmarks, which no policy is shown."""


class TaskError(ArealFlowError):
    """A task cannot be read, or gives no reward."""


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Variables = dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str]


class _Environment(BaseModel):
    docker_image: str | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    workdir: str | None = None
    env: _Variables = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _with_sizes(cls, table: Any) -> Any:
        """Accept the sizes of older tasks, such as `memory = "2G"`."""
        if not isinstance(table, Mapping):
            return table
        old = {f"{name}_mb": table[name] for name in ("memory", "storage") if name in table}
        return {**{name: _megabytes(size) for name, size in old.items()}, **table}


class _Agent(BaseModel):
    timeout_sec: _Seconds | None = None


class _Verifier(BaseModel):
    timeout_sec: _Seconds = 600.0
    env: _Variables = Field(default_factory=dict)
    environment_mode: str | None = None


class _Solution(BaseModel):
    env: _Variables = Field(default_factory=dict)


class _Config(BaseModel):
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()


@dataclass(frozen=True, slots=True)
class TestResult:
    """What a task's tests say."""

    __test__ = False

    reward: float
    rewards: Mapping[str, float]
    """All numbers of `reward.json`."""
    output: str
    """What the tests printed, or why they gave no reward."""

    def shown(self) -> str:
        """Return the end of the output."""
        return self.output.strip()[-MAX_SHOWN:]


class HarborTask:
    """A task of a folder."""

    def __init__(self, folder: Path) -> None:
        """Read a task.

        Raises:
            TaskError: it is incomplete, or asks for what is not supported.
        """
        self.folder = folder
        try:
            table = tomllib.loads(self._text(CONFIG))
            self._config = _Config.model_validate(table)
        except (tomllib.TOMLDecodeError, ValidationError) as error:
            raise TaskError(f"{folder / CONFIG}: {_problems(error)}") from None
        lines = self._text(INSTRUCTION).strip().splitlines()
        shown = dropwhile(lambda line: not line.strip() or _CANARY.fullmatch(line), lines)
        self.instruction = "\n".join(shown)
        if not self.instruction:
            raise TaskError(f"{folder / INSTRUCTION}: expected an instruction, found none")
        self._refuse(table)

    @property
    def agent_timeout_s(self) -> float | None:
        return self._config.agent.timeout_sec

    @property
    def test_timeout_s(self) -> float:
        return self._config.verifier.timeout_sec

    @property
    def has_solution(self) -> bool:
        return (self.folder / SOLUTION / _SOLVE).is_file()

    def settings(self, base: SandboxSettings) -> SandboxSettings:
        """Return the settings of the task's sandbox: its own where it has them.

        Files of `local` are in memory, so that its `disk_bytes` is also a limit for tasks.

        Raises:
            TaskError: its environment needs a container, and `base` is of this machine.
        """
        of_task = self._config.environment
        update: dict[str, Any] = {
            "variables": {**base.variables, **_resolved(of_task.env)},
            "workdir": of_task.workdir or base.workdir,
            "memory_bytes": (of_task.memory_mb or 0) * MB or base.memory_bytes,
            "disk_bytes": (of_task.storage_mb or 0) * MB or base.disk_bytes,
        }
        if base.provider == "local":
            built = self._dockerfile
            update["disk_bytes"] = min(update["disk_bytes"], base.disk_bytes)
            update["variables"] = {**built.variables, **update["variables"]}
            update["workdir"] = update["workdir"] or built.workdir
        elif of_task.docker_image:
            update["image"] = of_task.docker_image
        elif (self.folder / ENVIRONMENT / DOCKERFILE).is_file():
            update["image"] = str((self.folder / ENVIRONMENT).resolve())
        elif base.provider == "docker" and not base.image:
            raise TaskError(f"{self.folder}: it has neither a Dockerfile nor a docker_image")
        try:
            return SandboxSettings.model_validate({**base.model_dump(), **update})
        except ValidationError as error:
            raise TaskError(f"{self.folder / CONFIG}: {_problems(error)}") from None

    @asynccontextmanager
    async def opened(self, base: SandboxSettings) -> AsyncIterator[Sandbox]:
        """Have a sandbox with the task's environment until the end of the block."""
        settings = self.settings(base)
        async with opened(make_sandbox(settings)) as sandbox:
            await self.furnish(sandbox, settings.provider)
            yield sandbox

    async def furnish(self, sandbox: Sandbox, provider: str) -> None:
        """Copy the environment's files, unless they are a part of its image."""
        if provider == "local" and (files := self._dockerfile.files):
            archive = _archive(files)
            try:
                await _unpack(sandbox, archive)
            except OSError as error:
                raise SandboxError(f"{self.folder}: its environment: {error}") from error

    async def solve(self, sandbox: Sandbox) -> CommandResult:
        """Run the task's own solution.

        Raises:
            OSError: it does not fit the sandbox.
        """
        await _unpack(sandbox, _archive(_files(self.folder / SOLUTION, "/solution")))
        script = _script(f"/solution/{_SOLVE}", self._config.solution.env)
        return await sandbox.run(script, timeout_s=self.agent_timeout_s or SOLUTION_TIMEOUT_S)

    async def judge(self, sandbox: Sandbox) -> TestResult:
        """Run the task's tests on what was done; whatever still runs is ended first.

        If they cannot run, take too long or leave no reward, the episode kept them from it: the
        reward is 0.

        Raises:
            SandboxError: there is no result, for reasons of the infrastructure.
        """
        archive = _archive(_files(self.folder / TESTS, f"/{TESTS}"))
        limit_s, output = self.test_timeout_s, ""
        variables = {**self._config.verifier.env, "PYTHONNOUSERSITE": "1"}
        try:
            await sandbox.stop_processes()
            prepare = f"rm -rf /{TESTS} {_REWARDS} && mkdir -p /{TESTS} {_REWARDS}"
            await _checked(sandbox, prepare)
            await _unpack(sandbox, archive)
            script = _script(f"/{TESTS}/{_TEST}", variables)
            result = await sandbox.run(script, timeout_s=limit_s)
            output = result.output
            if result.timed_out:
                raise ValueError(f"not done within {limit_s:g} s")
            await sandbox.stop_processes()
            rewards = await _rewards(sandbox)
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            return TestResult(0.0, {}, f"the tests left no reward: {error}; {output}")
        reward = rewards.get("reward", next(iter(rewards.values())))
        return TestResult(reward, rewards, output)

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"{self.folder}: it has no {name}: {error}") from None

    def _refuse(self, table: Mapping[str, Any]) -> None:
        for place, what in _REFUSED.items():
            section, _, name = place.rpartition(".")
            value = (table.get(section) or {} if section else table).get(name)
            if value and value != "root":
                raise TaskError(f"{self.folder / CONFIG}: {place}: {what} are not supported")
        if (table.get("environment") or {}).get("os", "linux") != "linux":
            raise TaskError(f"{self.folder / CONFIG}: environment.os: only linux is supported")
        if (self._config.verifier.environment_mode or "shared") != "shared":
            raise TaskError(
                f"{self.folder / CONFIG}: verifier.environment_mode: only 'shared' is supported"
            )
        for name in _NOT_OURS:
            if (self.folder / ENVIRONMENT / name).exists():
                raise TaskError(f"{self.folder / ENVIRONMENT / name}: services are not supported")
        if not (self.folder / TESTS / _TEST).is_file():
            raise TaskError(f"{self.folder}: it has no {TESTS}/{_TEST}, which gives the reward")

    @cached_property
    def _dockerfile(self) -> _Dockerfile:
        file = self.folder / ENVIRONMENT / DOCKERFILE
        if file.is_file():
            return _Dockerfile(file)
        if self._config.environment.docker_image:
            raise TaskError(_NEEDS_CONTAINER.format(file=self.folder / CONFIG, what="docker_image"))
        return _Dockerfile(None)


_NEEDS_CONTAINER = (
    "{file}: {what} needs a container: set workflow.sandbox.provider = 'docker' "
    '(of a trial: --settings \'{{"provider": "docker"}}\')'
)


class _Dockerfile:
    """What a sandbox of this machine can do of a Dockerfile: WORKDIR, COPY and ENV."""

    def __init__(self, file: Path | None) -> None:
        """Read a file; `FROM` is taken to be this machine.

        Raises:
            TaskError: it does more.
        """
        self.workdir = ""
        self.files: dict[str, Path] = {}
        self.variables: dict[str, str] = {}
        if file is None:
            return
        text = re.sub(r"(?m)^\s*#.*\n?", "", file.read_text())
        lines = re.sub(r"\\[ \t]*\n", " ", text).splitlines()
        steps = [line.split(maxsplit=1) for line in lines if line.strip()]
        names = [word.upper() for word, *_ in steps]
        if names.count("FROM") > 1 or (file.parent / ".dockerignore").exists():
            what = "a second FROM" if names.count("FROM") > 1 else ".dockerignore"
            raise TaskError(_NEEDS_CONTAINER.format(file=file, what=what))
        for name, (_, *rest) in zip(names, steps, strict=True):
            if name in ("WORKDIR", "COPY", "ENV"):
                self._take(file, name, "".join(rest))
            elif name not in ("FROM", "CMD", "LABEL"):
                raise TaskError(_NEEDS_CONTAINER.format(file=file, what=name))

    def _take(self, file: Path, name: str, rest: str) -> None:
        try:
            words = [] if "$" in rest or rest.startswith(("-", "[")) else shlex.split(rest)
        except ValueError:
            words = []
        if name == "WORKDIR" and len(words) == 1:
            self.workdir = self._path(words[0])
        elif name == "ENV" and words and all("=" in word for word in words):
            self.variables |= dict(word.split("=", 1) for word in words)
        elif name == "COPY" and len(words) > 1 and not _is_read_only(self._path(words[-1])):
            self._copy(file.parent, words[:-1], words[-1])
        else:
            raise TaskError(_NEEDS_CONTAINER.format(file=file, what=f"{name} {rest}"))

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir or "/", path))

    def _copy(self, folder: Path, sources: Sequence[str], target: str) -> None:
        place = self._path(target)
        is_folder = place == self.workdir or target.endswith(("/", "/.")) or target == "."
        is_folder |= len(sources) > 1 or any(path.startswith(f"{place}/") for path in self.files)
        for source in (path for pattern in sources for path in _matching(folder, pattern)):
            if source.is_dir():
                copied = _files(source, place)
                dockerfile = folder / DOCKERFILE
                self.files |= {path: file for path, file in copied.items() if file != dockerfile}
            else:
                self.files[f"{place}/{source.name}" if is_folder else place] = source


def _is_read_only(path: str) -> bool:
    """Return whether a path is among the programs of this machine."""
    places = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "dev", "proc")
    return path.split("/")[1] in places


def _megabytes(size: Any) -> int:
    units = {"K": 1 / 1024, "M": 1, "G": 1024}
    if not (match := re.fullmatch(r"\s*([\d.]+)([KMG])\s*", str(size).upper())):
        raise ValueError(f"expected a size such as '2G', found {size!r}")
    return int(float(match[1]) * units[match[2]])


def task_folders(folder: Path) -> list[Path]:
    """Return the tasks of a folder in order, or the one that it is.

    Raises:
        TaskError: there is none.
    """
    folders = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
    if not (tasks := [each for each in folders if (each / CONFIG).is_file()]):
        raise TaskError(f"{folder}: expected folders with {CONFIG} each, found none")
    return tasks


def ship_task(task: HarborTask, directory: Path) -> str:
    """Copy a task without its solution; return its name there, with a hash of its content."""
    folder = task.folder.resolve()
    files = [path for part in (ENVIRONMENT, TESTS) for path in sorted((folder / part).rglob("*"))]
    files = [folder / CONFIG, folder / INSTRUCTION, *filter(Path.is_file, files)]
    contents = ((str(file.relative_to(folder)).encode(), file.read_bytes()) for file in files)
    name = f"{folder.name}@{row_hash(chain.from_iterable(contents))[:12]}"
    for file in files:
        target = directory / name / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    return name


def _matching(folder: Path, pattern: str) -> list[Path]:
    pattern = pattern.lstrip("/") or "."
    paths = [folder] if PurePosixPath(pattern) == PurePosixPath() else sorted(folder.glob(pattern))
    inside = [path for path in paths if path.resolve().is_relative_to(folder.resolve())]
    if not inside:
        raise TaskError(f"{folder / DOCKERFILE}: COPY {pattern}: there is no such file")
    return inside


def _files(folder: Path, target: str) -> dict[str, Path]:
    """Return the files below a folder by their paths in a sandbox.

    Raises:
        TaskError: a link leads out of the folder.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise TaskError(f"{path}: a link out of {folder}: copy the file")
    return {f"{target}/{path.relative_to(folder).as_posix()}": path for path in files}


def _problems(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    places = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
    return "; ".join(f"{place}: {message}" for place, message in places)


def _archive(files: Mapping[str, Path]) -> bytes:
    """Return files with their modes as one archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, file in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = file.stat().st_size, file.stat().st_mode & 0o755 | 0o644
            entry.mtime = int(file.stat().st_mtime)
            with file.open("rb") as content:
                archive.addfile(entry, content)
    return buffer.getvalue()


async def _unpack(sandbox: Sandbox, archive: bytes) -> None:
    """Copy an archive's files.

    Raises:
        OSError: the sandbox cannot take them.
    """
    path = f"/tmp/.{token_hex(8)}.tar"
    await sandbox.write_file(path, archive)
    await _checked(sandbox, f"tar -xf {path} -C / --no-same-owner && rm -f {path}")


async def _checked(sandbox: Sandbox, command: str) -> None:
    """Run a command.

    Raises:
        OSError: it failed.
    """
    result = await sandbox.run(command, timeout_s=COPY_TIMEOUT_S)
    if result.exit_code:
        raise OSError(f"{command} ended with {result.exit_code}: {result.output[-MAX_SHOWN:]}")


def _script(path: str, variables: Mapping[str, str]) -> str:
    chosen = [f"{name}={shlex.quote(text)}" for name, text in _resolved(variables).items()]
    return f"chmod +x {path} && {' '.join(['env', *chosen, path])}"


def _resolved(variables: Mapping[str, str]) -> dict[str, str]:
    """Fill in `${NAME}` and `${NAME:-default}` from this process's environment."""

    def value(match: re.Match[str]) -> str:
        text = os.environ.get(match[1], match[2])
        if text is None:
            raise TaskError(f"a task needs the environment variable {match[1]}, which is not set")
        return text

    pattern = re.compile(r"\$\{(\w+)(?::-(.*?))?\}")
    return {name: pattern.sub(value, text) for name, text in variables.items()}


async def _rewards(sandbox: Sandbox) -> dict[str, float]:
    """Return what tests wrote: `reward.json`, or else `reward.txt`.

    Raises:
        ValueError: they wrote something else, or nothing.
    """
    parsers: Mapping[str, Callable[[bytes], Any]] = {"reward.json": json.loads, "reward.txt": float}
    for name, parse in parsers.items():
        with suppress(FileNotFoundError):
            written = await sandbox.read_file(f"{_REWARDS}/{name}")
            if (size := len(written)) > MAX_REWARD_BYTES:
                raise ValueError(f"expected at most {MAX_REWARD_BYTES:,} bytes, found {size:,}")
            content = parse(written)
            break
    else:
        raise ValueError(f"there is neither reward.txt nor reward.json in {_REWARDS}")
    rewards = content if isinstance(content, dict) else {"reward": content}
    numbers = {
        name: float(number)
        for name, number in rewards.items()
        if isinstance(number, int | float) and abs(number) <= MAX_REWARD and _NAME.fullmatch(name)
    }
    if not 0 < len(numbers) == len(rewards) <= MAX_REWARDS:
        raise ValueError(f"expected numbers up to {MAX_REWARD:g} by name, found {content!r:.200}")
    if "reward" not in numbers and len(numbers) > 1:
        raise ValueError(f"expected 'reward' among {', '.join(numbers)}")
    return numbers
