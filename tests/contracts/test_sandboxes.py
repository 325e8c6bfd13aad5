"""The contract of every sandbox of an episode: what lasts, what is limited, what is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from areal_flow.core.errors import ConfigError
from areal_flow.sandboxes import protocol
from areal_flow.sandboxes.protocol import CommandResult, Sandbox
from areal_flow.sandboxes.registry import SandboxSettings, make_sandbox
from areal_flow.sandboxes.run import SandboxError
from areal_flow.sandboxes.shell import KILLED, MAX_OUTPUT_BYTES

MB = 2**20
ULIMITS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
"""Podman would raise them, which this user may not be allowed to."""
LIMITS = {"memory_bytes": 512 * MB, "disk_bytes": 32 * MB, "num_processes": 24}
IMAGE = os.environ.get("AREAL_FLOW_TEST_IMAGE", "")
"""An image with bash, python3 and coreutils, for the containers of `nox -s tests_podman`."""
PODMAN = {"program": "podman", "arguments": ULIMITS}
PROVIDERS = {
    "local": SandboxSettings(**LIMITS),
    "podman": SandboxSettings(provider="docker", image=IMAGE, provider_settings=PODMAN, **LIMITS),
    "imported": SandboxSettings(provider="tests.host_sandbox:HostSandbox", **LIMITS),
}
CONFINED = ("local", "podman")
"""Providers that hold commands to their limits."""


def skip_without(provider: str) -> None:
    if provider == "podman" and not (IMAGE and shutil.which("podman")):
        pytest.skip("needs podman and AREAL_FLOW_TEST_IMAGE: nox -s tests_podman")


def opened(provider: str) -> AbstractAsyncContextManager[Sandbox]:
    skip_without(provider)
    return protocol.opened(make_sandbox(PROVIDERS[provider]))


@pytest.fixture(params=PROVIDERS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with opened(request.param) as made:
        yield made


@pytest.fixture(params=CONFINED)
async def confined(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with opened(request.param) as made:
        yield made


async def bash(sandbox: Sandbox, command: str, timeout_s: float = 30.0) -> CommandResult:
    return await sandbox.run(command, timeout_s=timeout_s)


async def test_a_shell_keeps_variables_and_its_directory(sandbox: Sandbox) -> None:
    await bash(sandbox, "mkdir -p inner && cd inner; x=$((40 + 2)); f() { echo f$x; }")
    result = await bash(sandbox, 'f; basename "$PWD"')
    assert (result.output, result.exit_code) == ("f42\ninner\n", 0)


async def test_an_interpreter_keeps_names_and_prints_the_last_value(sandbox: Sandbox) -> None:
    await sandbox.run("import math\nx = math.factorial(5)", timeout_s=30, interpreter="python")
    result = await sandbox.run("y = x + 1\ny", timeout_s=30, interpreter="python")
    assert (result.output, result.exit_code) == ("121\n", 0)
    failed = await sandbox.run("x / 0", timeout_s=30, interpreter="python")
    assert failed.exit_code == 1
    assert failed.output.endswith("ZeroDivisionError: division by zero\n")


async def test_results_have_exit_codes_output_and_errors_in_order(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "echo a; echo b >&2; echo -n c; (exit 7)")
    assert (result.output, result.exit_code) == ("a\nb\nc", 7)
    assert (await bash(sandbox, "no-such-program")).exit_code == 127
    assert (await bash(sandbox, "if then")).exit_code != 0
    assert (await bash(sandbox, "cat")).output == ""  # standard input is empty


async def test_a_shell_that_exits_is_started_again(sandbox: Sandbox) -> None:
    assert (await bash(sandbox, "x=1; exit 3")).exit_code == 3
    assert (await bash(sandbox, "echo [$x]")).output == "[]\n"
    assert (await bash(sandbox, "kill -9 $$")).exit_code == KILLED
    assert (await bash(sandbox, "echo again")).output == "again\n"


async def test_a_slow_command_is_killed_with_what_it_started(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "echo begun; (while :; do :; done) & sleep 60", timeout_s=0.5)
    assert (result.output, result.timed_out, result.exit_code) == ("begun\n", True, KILLED)
    assert 0.5 <= result.duration_s < 20
    busy = "grep -l '(while' /proc/[0-9]*/cmdline 2>/dev/null | grep -v /self/ | wc -l"
    result = await bash(sandbox, f"echo next; {busy}")
    assert result.output.splitlines()[0] == "next"


async def test_the_middle_of_long_output_is_left_out(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "echo first; yes x | tr -d '\\n' | head -c 500000; echo last")
    assert result.output.startswith("first\nxxx")
    assert result.output.endswith("xxxlast\n")
    assert MAX_OUTPUT_BYTES < len(result.output) < MAX_OUTPUT_BYTES + 100
    assert "bytes left out" in result.output


async def test_a_writer_ends_with_its_reader(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "while :; do echo y; done | head -1; echo ${PIPESTATUS[@]}")
    assert (result.output, result.timed_out) == ("y\n141 0\n", False)


async def test_files_are_written_and_read_as_bytes(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 3000
    await sandbox.write_file("deep/er/file.bin", content)
    assert await sandbox.read_file("deep/er/file.bin") == content
    assert (await bash(sandbox, "wc -c < deep/er/file.bin")).output.strip() == str(len(content))
    await sandbox.write_file("empty", b"")
    assert await sandbox.read_file("empty") == b""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await sandbox.read_file("nowhere")


async def test_text_that_is_no_text_is_replaced(sandbox: Sandbox) -> None:
    assert (await bash(sandbox, "printf 'a\\377b'")).output == "a\ufffdb"
    assert (await bash(sandbox, "echo \0")).exit_code == 2
    assert "é😀" in (await bash(sandbox, "echo é😀")).output


async def test_a_cancelled_command_leaves_the_sandbox_usable(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await bash(sandbox, "sleep 60")
    assert (await bash(sandbox, "echo next")).output == "next\n"


async def test_there_is_no_network_but_its_own(confined: Sandbox) -> None:
    connect = "exec 5<>/dev/tcp/{}/{}"
    assert (await bash(confined, connect.format("192.0.2.1", 80))).exit_code == 1
    server = "import socket\ns = socket.create_server(('127.0.0.1', 8000))"
    await confined.run(server, timeout_s=30, interpreter="python")
    assert (await bash(confined, connect.format("127.0.0.1", 8000))).exit_code == 0


async def test_commands_cannot_use_more_than_their_limits(confined: Sandbox) -> None:
    disk = await bash(confined, "yes | head -c 64M > large; wc -c < large; rm large")
    assert int(disk.output.split()[-1]) <= LIMITS["disk_bytes"]
    memory = await confined.run("x = bytearray(2**30)", timeout_s=30, interpreter="python")
    assert memory.exit_code in (1, KILLED)
    many = await bash(confined, "for i in $(seq 100); do sleep 60 & done; jobs -p | wc -l", 5.0)
    assert many.timed_out or many.exit_code or int(many.output.split()[-1]) < 24
    await bash(confined, "kill $(jobs -p)")
    assert (await bash(confined, "echo usable", 60.0)).exit_code in (0, KILLED)


TOGETHER = """
import os, time
os.fork(); os.fork()
memory = bytearray(200 << 20)
for place in range(0, len(memory), 4096):
    memory[place] = 1
time.sleep(60)
"""
NO_ONES = """
import mmap, os, socket
for hidden in (lambda: os.memfd_create("x"), lambda: mmap.mmap(-1, 4096)):
    try:
        hidden()
    except PermissionError:
        print("refused")
own = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
"""


async def test_memory_of_all_processes_together_is_limited() -> None:
    async with opened("local") as sandbox:
        result = await bash(sandbox, f"python3 -c '{TOGETHER}'", 30.0)
        assert (result.exit_code, result.timed_out) == (KILLED, False)
        hidden = await sandbox.run(NO_ONES, timeout_s=30, interpreter="python")
        assert (hidden.output, hidden.exit_code) == ("refused\n" * 2, 0)


async def test_a_policy_cannot_break_its_sandbox() -> None:
    """Else it could do without a reward where it expects a bad one."""
    attacks = (
        *("kill -INT 1", "kill -9 -1", "prlimit --pid 1 --nofile=3:3", "kill -STOP $$"),
        *("exec >/dev/null", "exec 3<&-", "read() { sleep 60; }; printf() { sleep 60; }"),
        r"builtin printf '\0%s %s\0' $__mark $(yes 1 | head -9000 | tr -d '\n')",
        *("(exit 137)", "kill -9 $$", "mkfifo pipe; break", "echo 'x = 1' > ast.py"),
    )
    async with opened("local") as sandbox:
        for attack in attacks:
            await bash(sandbox, attack, 1.0)
            assert (await bash(sandbox, "echo next", 30.0)).output == "next\n", attack
            for _ in range(2):  # the first one may still find an interpreter that is being killed
                answered = await sandbox.run("6 * 7", timeout_s=30, interpreter="python")
            assert answered.output == "42\n", attack
        for path in ("x" * 200_000, "a\0b", "é" * 3000):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)
        assert (await bash(sandbox, "echo next", 30.0)).output == "next\n"


async def test_what_is_started_in_vain_leaves_nothing() -> None:
    first = make_sandbox(PROVIDERS["local"])
    await first.start()
    num_files = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(20):
        sandbox = make_sandbox(PROVIDERS["local"])
        starting = asyncio.create_task(sandbox.start())
        await asyncio.sleep(0.001)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await sandbox.close()
    async with asyncio.timeout(30):
        while len([*Path("/proc/self/fd").iterdir()]) > num_files + 1:
            await asyncio.sleep(0.05)
    assert (await bash(first, "echo alive")).output == "alive\n"
    running = asyncio.create_task(bash(first, "sleep 60"))
    await asyncio.sleep(0.2)
    await first.close()
    with pytest.raises(SandboxError):
        await running


async def test_a_sandbox_sees_neither_this_machine_nor_another_sandbox(
    confined: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    for path in (tmp_path / "secret", Path("/etc/shadow"), Path.home() / ".ssh"):
        assert (await bash(confined, f"cat {path}")).exit_code == 1
    assert str(os.getpid()) not in (await bash(confined, "ls /proc")).output.split()
    processes = (await bash(confined, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).output
    assert "pytest" not in processes


async def test_many_live_side_by_side() -> None:
    sandboxes = [make_sandbox(PROVIDERS["local"]) for _ in range(64)]
    try:
        await asyncio.gather(*(each.start() for each in sandboxes))
        writes = (bash(each, f"echo {n} > n") for n, each in enumerate(sandboxes))
        await asyncio.gather(*writes)
        results = await asyncio.gather(*(bash(each, "cat n; ls | wc -l") for each in sandboxes))
        assert [r.output.split() for r in results] == [[str(n), "1"] for n in range(64)]
    finally:
        await asyncio.gather(*(each.close() for each in sandboxes))
    await _wait_until_alone()


async def test_nothing_is_left_of_a_closed_sandbox(confined: Sandbox) -> None:
    await bash(confined, "(setsid sleep 600 &) ; nohup sleep 600 >/dev/null 2>&1 &")
    await confined.close()
    await confined.close()
    await _wait_until_alone()
    with pytest.raises(SandboxError):
        await bash(confined, "true")


async def _wait_until_alone() -> None:
    """Wait until nothing that a sandbox has started is left."""
    async with asyncio.timeout(30):
        while any("sleep" in name or "bash" in name for name in _names_below()):
            await asyncio.sleep(0.05)


def _names_below() -> list[str]:
    names = []
    for process in psutil.Process().children(recursive=True):
        try:
            names.append(process.name())
        except psutil.NoSuchProcess:
            continue
    return names


KEEP_OPEN = """
import asyncio, sys
from areal_flow.sandboxes.registry import make_sandbox
from tests.contracts.test_sandboxes import PROVIDERS, bash
async def main():
    sandboxes = [make_sandbox(PROVIDERS[sys.argv[1]]) for _ in range(int(sys.argv[2]))]
    for each in sandboxes:
        await each.start()
        await bash(each, f"sleep {sys.argv[3]} & (setsid sleep {sys.argv[3]} &)")
    print("open", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize(("provider", "num_sandboxes"), [("local", 20), ("podman", 2)])
async def test_nothing_is_left_when_its_process_is_killed(
    provider: str, num_sandboxes: int
) -> None:
    skip_without(provider)
    mark = f"{600 + os.getpid() / 1e7}"  # seconds, and how to find the processes
    for _ in range(10 if provider == "local" else 1):
        arguments = ("-c", KEEP_OPEN, provider, str(num_sandboxes), mark)
        owner = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert owner.stdout
        assert await owner.stdout.readline() == b"open\n"
        assert len(_processes_with(mark)) >= num_sandboxes
        owner.kill()
        async with asyncio.timeout(60):
            while _processes_with(mark):
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("fails", [False, True])
async def test_members_of_a_group_share_a_build(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    program = tmp_path / "docker"
    builds = f"sleep 0.2; echo build >>{tmp_path}/builds; echo image; exit {fails:d}"
    program.write_text(
        f'#!/bin/bash\ncase $1 in build) {builds};; run) [[ "$*" = *" image "* ]] && echo ready; '
        "read;; esac\n"
    )
    program.chmod(0o755)
    own = {"program": str(program)}
    settings = SandboxSettings(provider="docker", image=str(tmp_path), provider_settings=own)

    async def start() -> None:
        async with protocol.opened(make_sandbox(settings)):
            pass

    outcomes = await asyncio.gather(*(start() for _ in "abc"), return_exceptions=True)
    assert [type(each) for each in outcomes] == [SandboxError if fails else type(None)] * 3
    assert (tmp_path / "builds").read_text() == "build\n"


def _processes_with(argument: str) -> list[int]:
    processes = psutil.process_iter(["pid", "cmdline"])
    return [p.pid for p in processes if ["sleep", argument] == (p.info["cmdline"] or [])[:2]]


def test_providers_that_cannot_be_had_are_refused_by_name() -> None:
    for settings, message in (
        ({"provider": "e3b"}, "one of docker, local or an import path"),
        ({"provider": "docker"}, "sandbox.image: the provider 'docker' needs an image"),
        ({"image": "debian"}, "sandbox.image = 'debian': the provider 'local' has none"),
        ({"provider_settings": {"colour": 1}}, "unexpected keyword argument 'colour'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_sandbox(SandboxSettings.model_validate(settings))
