"""Deaths during a run: training goes on or can be resumed, and tokens add up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from time import sleep

import psutil
import pytest

import areal_flow
from areal_flow.cluster.control import list_workers
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.log.browse import Selection, show_trajectory
from areal_flow.policy.checkpoints import list_checkpoints, read_forks
from areal_flow.policy.weights.shared_memory import available_bytes, segments_of
from pipelines.cluster_address import scheduler_of
from tests.chaos import SETTINGS
from tests.integration.conftest import Typed
from tests.integration.runs import (
    check_accounting,
    check_costs,
    cli,
    run_small,
    small_arguments,
    small_recipe,
    started_cli,
    step_reached,
    worker_pid,
)
from tests.struck_run import StruckRun
from tests.unrepeatable_trainer import write_patch


@pytest.mark.slow
def test_killed_generator_reward_worker_and_trainer_cost_nothing(tmp_path: Path) -> None:
    """In the schedule in which no batch is ready for a step when trainer and generator die."""
    root = tmp_path / "killed"
    layout = RunLayout(root.resolve())
    killed: list[str] = []

    async def kill_in_turn() -> None:
        for step, *roles in ((2, "generator"), (5, "reward"), (8, "trainer", "generator")):
            await step_reached(layout, step)
            for pid in [await worker_pid(role) for role in roles]:
                os.kill(pid, signal.SIGKILL)
            killed.append(" and ".join(roles))
            await asyncio.sleep(0.5)

    changed = {
        "schedule": "sync",
        "weights": {"medium": "directory"},
        "generation": {"dtype": "bfloat16"},  # of which a version has what changed
    }
    recipe = small_recipe(num_steps=12, prompts={"num_held_out": 0}, **changed)
    run_small(root, recipe, kill_in_turn)
    assert killed == ["generator", "reward", "trainer and generator"]
    check_accounting(layout)
    steps = areal_flow.open_run(root).steps("arrow")
    assert sorted(steps["step"].to_pylist()) == list(range(13))


def wait_for_step(process: object, layout: RunLayout, step: int) -> None:
    for _ in range(1200):
        sleep(0.1)
        if layout.steps.is_dir() and len(areal_flow.open_run(layout.root).steps("arrow")) > step:
            return
    pytest.fail("the run did not get anywhere")


def kill_workers(layout: RunLayout, *names: str) -> None:
    address, network = scheduler_of(layout.root.parent, layout.name)
    pids = {status.name: status.pid for status in asyncio.run(list_workers(address, network))}
    for name in names:
        os.kill(pids[name], signal.SIGKILL)


def test_run_survives_its_generator_trainer_and_driver_is_audited_and_replayed(
    tmp_path: Path, typed: Typed
) -> None:
    """It trains on a mixture; a resume reads only the run's own copy."""
    layout = RunLayout((tmp_path / "runs" / "k").resolve())
    arguments = [*small_arguments(), "--num-steps", "500", "--trainer.checkpoint-every-steps", "4"]
    for name, sign in (("given", 1), ("less", -1)):  # both files number their rows from 0
        rows = [
            {"id": n, "question": f"{a}{'+' if sign > 0 else '-'}{b} =", "answer": a + sign * b}
            for n, (a, b) in enumerate((n % 10, n // 10) for n in range(60))
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = """[{name = "made", source = "arithmetic", weight = 2.0},
                  {name = "given", path = "given.jsonl"}, {name = "less", path = "less.jsonl"}]"""
    arguments += ["--sources", sources]
    with started_cli("train", "--name", "k", *arguments, cwd=tmp_path) as process:
        wait_for_step(process, layout, 3)
        kill_workers(layout, "generator-0", "trainer-0")
        second = typed("train", "--resume", "k", cwd=tmp_path)
        assert second.returncode == 1
        assert f"held by process {process.pid} on" in second.stderr
        wait_for_step(process, layout, 8)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(children, timeout=20)[1]
        left = segments_of(layout.weights_of(1))
        assert left.exists() == bool(available_bytes())
        assert "crashed" in typed("runs", cwd=tmp_path).stdout
        (tmp_path / "given.jsonl").unlink()
        head = len(areal_flow.open_run(layout.root).steps("arrow")) - 1
        newest = list_checkpoints(layout.checkpoints)[-1]
        done = cli("train", "--resume", "k", "--num-steps", str(head + 3), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        # The newest may have been half written when its driver was killed.
        assert head - newest < 8
        assert f"{head - newest} steps replayed" in done.stdout
        assert f"Resuming at step {head}" in done.stdout
        assert not left.exists()
        assert not segments_of(layout.weights_of(2)).exists()
        check_accounting(layout)
        roles = check_costs(layout)[0]["by_role"]
        assert min(roles[role]["lost"] for role in ("generator", "trainer")) > 1, "restarts"
        run = areal_flow.open_run(layout.root)
        columns = ["source", "prompt", "metadata.question", "metadata.answer", "trajectory_id"]
        shown = run.trajectories(columns=columns, text=True)
        assert {*shown.source} == {"made", "given", "less"}
        assert [*shown.prompt] == [*shown["metadata.question"]]
        row = shown[shown.source == "less"].iloc[-1]
        answer = show_trajectory(run, row.trajectory_id, selection=Selection()).answer
        assert answer == str(row["metadata.answer"])
        replay = replay_step(layout, step=head + 3, from_checkpoint=0)
        steps = [*replay.before, replay.compared]
        assert [compared.equal for compared in steps] == [True] * (head + 3)


@pytest.mark.slow
def test_run_whose_replay_does_not_repeat_bits_survives_its_trainers_and_its_driver(
    tmp_path: Path,
) -> None:
    run = StruckRun(tmp_path, write_patch(tmp_path / "unrepeatable"))
    try:
        run.begin({**SETTINGS, "cluster.num-generators": "1"})
        for _ in range(2):
            kill_workers(run.layout, "trainer-0")
            run.wait_for_steps(2, "steps after the fork")
            run.audit()
        run.kill_driver()
        run.resume()
        assert run.stop() == 143, run.log.read_text()
    finally:
        run.close()
    run.audit()
    forks = read_forks(run.layout.forks)
    steps = areal_flow.open_run(run.layout.root).steps("arrow").to_pylist()
    parents = {row["parent_hash"] for row in steps}
    assert len(parents & {fork["replayed"]["weights_hash"] for fork in forks}) >= 2
    lineage = areal_flow.open_run(run.layout.root).lineage(len(steps) - 1)
    assert all(check.holds for check in lineage.hash_checks({}))
    assert not replay_step(run.layout, step=len(steps) - 1, from_checkpoint=0).refused


@pytest.mark.slow
def test_driver_that_hung_and_was_taken_over_changes_nothing(tmp_path: Path) -> None:
    layout = RunLayout((tmp_path / "runs" / "z").resolve())
    arguments = [*small_arguments(), "--num-steps", "500", "--prompts.num-held-out", "0"]
    with started_cli("train", "--name", "z", *arguments, cwd=tmp_path) as hung:
        wait_for_step(hung, layout, 3)
        children = psutil.Process(hung.pid).children(recursive=True)
        hung.send_signal(signal.SIGSTOP)
        refused = cli("train", "--resume", "z", cwd=tmp_path)
        assert refused.returncode == 1
        assert f"kill -CONT {hung.pid}; if it hangs, --take-over" in refused.stderr
        head = len(areal_flow.open_run(layout.root).steps("arrow")) - 1
        more = ["--num-steps", str(head + 3)]
        done = cli("train", "--resume", "z", "--take-over", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        seen = everything_a_reader_sees(layout)
        hung.send_signal(signal.SIGCONT)
        output, _ = hung.communicate(timeout=60)
        assert hung.returncode == 1, output
        assert "the run was taken over by process" in output
        assert "Traceback" not in output
        assert not psutil.wait_procs(children, timeout=20)[1]
        assert everything_a_reader_sees(layout) == seen
        check_accounting(layout)


def everything_a_reader_sees(layout: RunLayout) -> tuple[object, ...]:
    run = areal_flow.open_run(layout.root)
    trajectories = run.trajectories("arrow").sort_by("trajectory_id").to_pylist()
    checkpoints = sorted(path.name for path in layout.checkpoints.glob("[0-9]*"))
    return (
        trajectories,
        run.steps("arrow").sort_by("step").to_pylist(),
        checkpoints,
        layout.state.read_text(),
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.walk),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.walk),
    ],
)
def test_signal_stops_cleanly_and_says_how_to_resume(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    layout = RunLayout((tmp_path / "runs" / "s").resolve())
    arguments = [*small_arguments(), "--num-steps", "500", "--prompts.num-held-out", "0"]
    with started_cli("train", "--name", "s", *arguments, cwd=tmp_path) as process:
        wait_for_step(process, layout, 2)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)  # as a terminal does: to the workers, too
        output, _ = process.communicate(timeout=60)
        assert process.returncode == code, output
        assert "areal-flow train --resume s" in output
        assert "Traceback" not in output
        assert not psutil.wait_procs(children, timeout=20)[1]
        check_accounting(layout)
        head = len(areal_flow.open_run(layout.root).steps("arrow")) - 1
        assert (layout.checkpoints / f"{head:08d}" / "state.json").is_file()


@pytest.mark.walk
def test_second_signal_stops_at_once_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    layout = RunLayout((tmp_path / "runs" / "s").resolve())
    slow = [*small_arguments(), "--num-steps", "500", "--controller.batch-size", "512"]
    with started_cli("train", "--name", "s", *slow, cwd=tmp_path) as process:
        wait_for_step(process, layout, 1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 143, output
        assert "stopping at once" in output
        assert "areal-flow train --resume s" in output
        assert "Traceback" not in output
        assert not psutil.wait_procs(children, timeout=20)[1]
        head = len(areal_flow.open_run(layout.root).steps("arrow")) - 1
        done = cli("train", "--resume", "s", "--num-steps", str(head + 1), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        check_accounting(layout)


@pytest.mark.slow
def test_signal_before_training_stops_with_a_checkpoint_to_go_on_from(
    tmp_path: Path, typed: Typed
) -> None:
    slow = [*small_arguments(), "--sft.num-steps", "300"]
    slow += ["--sft.checkpoint-every-steps", "10000"]
    with started_cli("train", "--name", "w", *slow, cwd=tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "supervised fine-tuning" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 143, output
        assert "Traceback" not in output
        assert "areal-flow train --resume w" in output
        assert not psutil.wait_procs(children, timeout=20)[1]
        assert "stopped" in typed("runs", cwd=tmp_path).stdout
    layout = RunLayout((tmp_path / "runs" / "w").resolve())
    (stopped_at,) = list_checkpoints(layout.sft_checkpoints)
    assert 0 < stopped_at < 300
    done = cli("train", "--resume", "w", "--num-steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list_checkpoints(layout.sft_checkpoints)[-1] == 300
    check_accounting(layout)


@pytest.mark.walk
def test_max_minutes_ends_with_a_summary(tmp_path: Path) -> None:
    recipe = small_recipe(num_steps=10_000, max_minutes=1.0, sft={"num_steps": 0})
    layout = run_small(tmp_path / "timed", recipe)
    steps = len(areal_flow.open_run(layout.root).steps("arrow")) - 1
    summary = areal_flow.open_run(layout.root).summary()
    assert 0 < summary["num_steps"] == steps < 10_000
    assert summary["held_out_after"]["n"] == 64
