"""Any recorded step can be replayed bit for bit, or with changes."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import lance
import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from pipelines.cli.main import main

NUM_STEPS = 6
HASHES = ["weights_hash", "served_hash"]


@pytest.fixture(scope="module")
def layout(finished: RunLayout) -> RunLayout:
    return finished


@pytest.fixture
def copied(layout: RunLayout, tmp_path: Path) -> RunLayout:
    """A copy that a test may spoil."""
    return RunLayout(shutil.copytree(layout.root, tmp_path / "runs" / "small").resolve())


def recorded_hashes(layout: RunLayout, step: int) -> dict[str, str]:
    steps = areal_flow.open_run(layout.root).steps("arrow", where=f"step = {step}")
    (row,) = steps.select(HASHES).to_pylist()
    return dict(row)


def tamper(layout: RunLayout, step: int, **columns: str) -> None:
    values = {name: f"'{value}'" for name, value in columns.items()}
    lance.dataset(str(layout.steps)).update(values, where=f"step = {step}")


def replay(layout: RunLayout, *arguments: str) -> int:
    return main(["--runs", str(layout.root.parent), "replay", layout.name, *arguments])


def listing(layout: RunLayout) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in [layout.root, *layout.root.rglob("*")]
    }


def test_every_step_is_equal_from_the_nearest_checkpoint_and_nothing_is_written(
    copied: RunLayout,
) -> None:
    before = listing(copied)
    changed = set()
    for step, checkpoint in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4)):
        replay = replay_step(copied, step=step)
        assert (replay.checkpoint, len(replay.before)) == (checkpoint, step - checkpoint - 1)
        assert all(compared.equal for compared in (*replay.before, replay.compared))
        assert asdict(replay.replayed.hashes) == recorded_hashes(copied, step)
        assert replay.replayed.metrics.grad_norm > 0
        assert replay.compared.environment_differences == {}
        changed.add(replay.replayed.hashes.weights_hash)
    assert len(changed) == NUM_STEPS
    assert listing(copied) == before


@pytest.mark.slow
def test_whole_run_is_equal_from_the_genesis(layout: RunLayout) -> None:
    replay = replay_step(layout, step=NUM_STEPS, from_checkpoint=0)
    assert asdict(replay.replayed.hashes) == recorded_hashes(layout, NUM_STEPS)
    assert [compared.step for compared in replay.before] == [*range(1, NUM_STEPS)]
    assert all(compared.equal for compared in replay.before)


def test_command_prints_recorded_replayed_and_changed(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    (identifier, *_) = areal_flow.open_run(layout.root).steps().trajectory_ids.iloc[3]
    changes = ("--set", "algorithm.epsilon=0.01", "--set", "algorithm.advantage=rloo")
    shown = ("--trajectories", "2", "--tokens", identifier)
    assert replay(layout, "--step", "3", "--from", "0", *changes, *shown) == 0
    output = capsys.readouterr().out
    assert "step 3, from checkpoint 0; steps 1 to 2 on the way: 2 of 2 equal" in output
    assert "equal to its record, bit for bit" in output
    for word in ("recorded", "replayed", "changed", "clipped", "masked?", identifier):
        assert word in output, word
    (weights,) = [line.split() for line in output.splitlines() if "weights hash" in line]
    assert weights[2] == weights[3]
    assert weights[4] == "yes"
    assert weights[5] != weights[3]


def test_a_change_to_the_same_value_changes_nothing(layout: RunLayout) -> None:
    replay = replay_step(layout, step=3, changes={"algorithm": {"epsilon": 0.2}})
    assert replay.changed is not None
    assert replay.changed.hashes == replay.replayed.hashes
    assert all(t.changed == t.replayed for t in replay.trajectories)


def test_stricter_staleness_masks_tokens_of_the_changed_step_alone(layout: RunLayout) -> None:
    replay = replay_step(layout, step=3, changes={"controller": {"max_staleness": 0}})
    assert replay.changed is not None
    assert replay.compared.equal
    for trajectory in replay.trajectories:
        assert trajectory.changed is not None
        assert trajectory.changed.trained == tuple(v == 2 for v in trajectory.versions)
    num_trained = sum(t.changed.num_trained for t in replay.trajectories if t.changed)
    assert num_trained == replay.changed.metrics.num_trained_tokens
    assert num_trained < replay.replayed.metrics.num_trained_tokens


def test_own_loss_by_import_path(
    layout: RunLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my_loss.py").write_text(
        "from dataclasses import replace\n"
        "from areal_flow.algorithms.registry import DecoupledPPO\n"
        "def unweighted(inputs):\n"
        "    on_policy = replace(inputs, behavior_logprobs_T=inputs.proximal_logprobs_T)\n"
        "    return DecoupledPPO().loss(on_policy)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert replay(layout, "--step", "4", "--loss", "my_loss:unweighted", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["equal"]
    assert output["changes"] == {"loss": ["decoupled_ppo", "unweighted"]}
    assert output["changed"]["importance_weight_max"] == 1
    assert output["replayed"]["importance_weight_max"] > 1
    assert output["changed"]["weights_hash"] != output["replayed"]["weights_hash"]


@pytest.mark.slow
def test_token_table_agrees_with_what_was_sampled_and_counted(layout: RunLayout) -> None:
    num_fresh = 0
    for step in (1, 2, 3, 4):
        replay = replay_step(layout, step=step)
        metrics = replay.recorded.metrics
        for trajectory in replay.trajectories:
            for index, version in enumerate(trajectory.versions):
                if version == step - 1:
                    num_fresh += 1
                    assert trajectory.proximal_logprobs[index] == pytest.approx(
                        trajectory.behavior_logprobs[index], abs=1e-4
                    )
        assert (
            sum(t.replayed.num_trained for t in replay.trajectories) == metrics.num_trained_tokens
        )
        num_clipped = sum(sum(t.replayed.clipped) for t in replay.trajectories)
        assert num_clipped == round(metrics.metrics["clip_fraction"] * metrics.num_trained_tokens)
    assert num_fresh


@pytest.mark.slow
def test_tampered_row_is_detected(layout: RunLayout, copied: RunLayout) -> None:
    tamper(copied, 3, weights_hash="0" * 32)
    assert replay(copied, "--step", "3") == 1
    assert replay(copied, "--step", "4") == 1
    assert replay(copied, "--step", "2") == 0
    assert replay(layout, "--step", "3") == 0


def test_checkpoint_that_is_not_its_rows_is_passed_over(
    copied: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(copied, 2, weights_hash="0" * 32)
    assert replay(copied, "--step", "3") == 1
    assert "Step 2 DIFFERS where it must not, in weights_hash" in capsys.readouterr().out
    assert replay(copied, "--step", "3", "--from", "2") == 1
    assert "no usable checkpoint 2 below step 3" in capsys.readouterr().err


@pytest.mark.slow
def test_another_environment_is_reported_and_excuses_a_difference(
    copied: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = areal_flow.open_run(copied.root).steps("arrow", where="step = 3").to_pylist()
    there = {**json.loads(row["numeric_environment"]), "torch": "1.0", "threads": 2}
    tamper(copied, 3, numeric_environment=json.dumps(there), served_hash="0" * 32)
    assert replay(copied, "--step", "3") == 0
    output = capsys.readouterr().out
    assert "torch 1.0 there" in output
    assert "threads" not in output
    assert "Step 3 differs, as it may" in output


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--step", "0"], 1, "it cannot be replayed; expected a step from 1 to 6"),
        (["--step", "7"], 1, "has no step 7: expected a step from 1 to 6"),
        (["--step", "3", "--from", "1"], 1, "found checkpoints of steps 0, 2, 4, 6"),
        (["--step", "3", "--from", "4"], 1, "expected a checkpoint of run small below step 3"),
        (["--step", "3", "--tokens", "x"], 1, "did not train trajectory 'x': it trained "),
        (["--step", "3", "--set", "algorithm.nothing=1"], 2, "there is no such setting"),
        (["--step", "3", "--set", "algorithm.epsilon=-1"], 2, "algorithm.epsilon = -1"),
        (["--step", "3", "--set", "algorithm.epsilon"], 2, "expected SECTION.KEY=VALUE"),
        (
            ["--step", "3", "--set", "generation.max_num_seqs=4"],
            2,
            "these can: algorithm.advantage",
        ),
        (["--step", "3", "--set", "trainer.keep_checkpoints=4"], 2, "cannot change what a step"),
        (["--step", "3", "--set", "trainer.device=cuda"], 2, "this machine has no such device"),
        (["--step", "3", "--loss", "nonsense"], 2, "expected an import path"),
        (["--step", "3", "--algorithm.epsilon", "1"], 2, "as --set SECTION.KEY=VALUE"),
    ],
)
def test_wrong_argument_is_explained(
    layout: RunLayout,
    arguments: list[str],
    code: int,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay(layout, *arguments) == code
    assert expected in capsys.readouterr().err


def test_missing_run_and_missing_checkpoints(
    copied: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", str(copied.root.parent), "replay", "nobody", "--step", "1"]) == 1
    assert "expected a run named 'nobody'" in capsys.readouterr().err
    shutil.rmtree(copied.checkpoints)
    assert replay(copied, "--step", "2") == 1
    assert "found checkpoints of steps none" in capsys.readouterr().err
