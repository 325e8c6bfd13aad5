"""Small real runs, in this process or from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from distributed import Client, default_client

import areal_flow
from areal_flow.config import Recipe, build_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.flow.costs import StepCost
from areal_flow.log.audit.run import check_run
from areal_flow.log.directory import create_run, hold_run
from pipelines.costs import costs_of, trajectory_costs
from pipelines.jobs.prepare import prepare_run
from pipelines.jobs.stop_signals import Outcome
from pipelines.jobs.train import run_training

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
"""Of commands: verifiers of the tests are found from wherever they run."""

LIMIT_S = 240.0
"""Ten times what a small run takes on two idle cores, most of it imports; below pytest's limit."""

ENDING_S = 20.0
"""Longer than a run that fails takes to end."""

SMALL: dict[str, Any] = {
    "num_steps": 4,
    "prompts": {"num_prompts": 400, "num_held_out": 64},
    "sft": {"num_steps": 20, "batch_size": 16, "learning_rate": 5e-3, "shuffle": False},
    # The engine by name, as a preparation settles it: these runs are driven as they are given.
    "generation": {
        "engine": "torch",
        "max_new_tokens": 12,
        "max_model_len": 32,
        "max_num_seqs": 16,
    },
    "controller": {"batch_size": 32, "group_size": 4},
    "trainer": {"checkpoint_every_steps": 2},
    # With a reward by right answers a policy this raw would get no gradient: nothing to replay.
    "rewards": [{"verifier": "tests.integration.verifiers:reward_length"}],
    "tracking": {"enabled": False},
}


def small_recipe(**changes: Any) -> Recipe:
    """Return a recipe that trains in seconds; changes are by section."""
    table = {**SMALL}
    for key, value in changes.items():
        old = table.get(key)
        table[key] = {**old, **value} if isinstance(old, dict) else value
    return build_recipe(table, source="test")


def run_small(root: Path, recipe: Recipe, *beside: Callable[[], Awaitable[None]]) -> RunLayout:
    """Make and train a run in this process, alongside coroutines; return its layout."""
    layout = RunLayout(root.resolve())
    create_run(layout, recipe)
    with hold_run(layout) as writer:
        prepare_run(layout, recipe)
        outcome = asyncio.run(_run_beside(layout, recipe, writer, False, beside))
    assert outcome.finished
    return layout


def check_costs(layout: RunLayout) -> tuple[dict[str, Any], list[StepCost]]:
    """Check a run's costs against its workers file, recounted here; return them."""
    run = areal_flow.open_run(layout.root)
    (costs, of_steps), last = costs_of(run), dict[int, float]()
    steps = run.steps("arrow", columns=["writer_epoch", "committed_at", "step_s"])
    events = [json.loads(line) for line in layout.workers.read_text().splitlines()]
    moments = [(row["writer_epoch"], row["committed_at"].timestamp()) for row in steps.to_pylist()]
    for epoch, at in [*moments, *((e["writer_epoch"], e["at"]) for e in events)]:
        last[epoch] = max(at, last.get(epoch, at))
    workers = {(e["writer_epoch"], e["worker"]): e for e in events}
    total = 0.0
    for (epoch, worker), event in workers.items():
        worker_events = [e for e in events if (e["writer_epoch"], e["worker"]) == (epoch, worker)]
        left = [e["at"] for e in worker_events if e["event"] == "left"]
        total += event["num_devices"] * (min([*left, last[epoch]]) - worker_events[0]["at"])
    uses = costs["by_use"]
    assert uses["total"] == pytest.approx(total)
    assert (
        min(cost for worker_events in costs["by_role"].values() for cost in worker_events.values())
        > -1e-6
    )
    seconds = sum(row["step_s"] or 0.0 for row in steps.to_pylist())
    charged = sum(sum(each.accounts.values()) for each in of_steps)
    assert seconds < charged < total, "more than one worker was there, and before the first step"
    rows = trajectory_costs(run, of_steps, waiting=uses["waiting"])
    consumed = ("trained", "masked", "discarded", "waiting")
    assert rows["cost"].sum() == pytest.approx(sum(uses[use] for use in consumed))
    return costs, of_steps


def run_while(root: Path, recipe: Recipe, beside: Callable[[], Awaitable[None]]) -> RunLayout:
    """Make a run and train it until the coroutine ends; return its layout."""
    layout = RunLayout(root.resolve())
    create_run(layout, recipe)
    with hold_run(layout) as writer:
        prepare_run(layout, recipe)
        _until_over(layout, recipe, writer, False, beside)
    return layout


def resume_while(layout: RunLayout, recipe: Recipe, beside: Callable[[], Awaitable[None]]) -> None:
    """Resume a run and train it until the coroutine ends."""
    with hold_run(layout) as writer:
        _until_over(layout, recipe, writer, True, beside)


def _until_over(
    layout: RunLayout,
    recipe: Recipe,
    writer: Writer,
    resume: bool,
    beside: Callable[[], Awaitable[None]],
) -> None:
    async def then_stop() -> None:
        try:
            await beside()
        except Exception:
            await asyncio.sleep(ENDING_S)  # perhaps the run fails, too: its end cancels this
            os.kill(os.getpid(), signal.SIGTERM)
            raise
        os.kill(os.getpid(), signal.SIGTERM)

    outcome = asyncio.run(_run_beside(layout, recipe, writer, resume, (then_stop,)))
    assert outcome.stopped_by == "SIGTERM"


async def _run_beside(
    layout: RunLayout,
    recipe: Recipe,
    writer: Writer,
    resume: bool,
    beside: tuple[Callable[[], Awaitable[None]], ...],
) -> Outcome:
    others = [asyncio.ensure_future(start()) for start in beside]
    try:
        outcome = await run_training(
            layout, recipe, writer=writer, resume=resume, began=monotonic()
        )
        for start in others:
            await start
        return outcome
    finally:
        for start in others:
            start.cancel()


async def worker_pid(role: str) -> int:
    """Wait for a live worker of the current cluster and return its pid."""
    client: Client = default_client()
    while True:
        identity = await client.scheduler.identity(n_workers=-1)
        pids = await client.run(os.getpid, on_error="ignore")
        for address, worker in identity["workers"].items():
            if role in worker["resources"] and address in pids:
                return int(pids[address])
        await asyncio.sleep(0.2)


async def step_reached(layout: RunLayout, step: int) -> None:
    """Wait until the ledger has this step."""
    while True:
        await asyncio.sleep(0.1)
        if layout.steps.is_dir() and len(areal_flow.open_run(layout.root).steps("arrow")) > step:
            return


def cli(
    *arguments: str | Path, cwd: Path, timeout: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run `areal-flow` as a user does."""
    return _python("-m", "pipelines.cli.main", *map(str, arguments), cwd=cwd, timeout=timeout)


def done(folder: Path, *command: str, code: int = 0) -> str:
    """Run a command, check its exit code, and return its output."""
    ended = cli(*command, cwd=folder)
    output = ended.stdout + ended.stderr
    assert ended.returncode == code, output
    return output


def run_script(text: str, *, cwd: Path) -> str:
    """Run a user's Python script successfully and return its output."""
    (cwd / "script.py").write_text(text)
    ended = _python("script.py", cwd=cwd, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def typed_in_a_shell(command: str, *, cwd: Path) -> str:
    """Run a command of a page successfully and return its output and errors."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=cwd,
        env={**ENVIRONMENT, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "leaked" not in done.stdout
    return done.stdout


def _python(*arguments: str, cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as hung:
        printed = b"".join(filter(None, (hung.stdout, hung.stderr))).decode()
        pytest.fail(f"{shlex.join(command)} had not ended after {timeout:g} s:\n{printed}")


@contextmanager
def started_cli(*arguments: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start `areal-flow` in its own process group; kill the group at the end."""
    with _started("-m", "pipelines.cli.main", *map(str, arguments), cwd=cwd) as process:
        yield process


@contextmanager
def started_script(text: str, *, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a user's Python script in its own process group; kill it at the end."""
    (cwd / "script.py").write_text(text)
    with _started("script.py", cwd=cwd) as process:
        yield process


@contextmanager
def _started(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def small_arguments() -> list[str]:
    """Return `SMALL` as command-line arguments."""
    arguments: list[str] = []
    for key, value in SMALL.items():
        if isinstance(value, dict):
            for name, setting in value.items():
                text = str(setting).lower() if isinstance(setting, bool) else str(setting)
                arguments += [f"--{key}.{name.replace('_', '-')}", text]
        elif isinstance(value, list):
            tables = [", ".join(f'{n} = "{v}"' for n, v in item.items()) for item in value]
            arguments += [f"--{key}", f"[{', '.join(f'{{{table}}}' for table in tables)}]"]
        else:
            arguments += [f"--{key.replace('_', '-')}", str(value)]
    return arguments


def check_accounting(layout: RunLayout) -> None:
    """Audit a run from its directory alone; leftovers of a crash are no error."""
    report = check_run(layout)
    assert report.clean, "\n".join(map(str, report.findings))
