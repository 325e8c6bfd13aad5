"""A run that is forked from a step of another one, all without a cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lance
import pytest
from safetensors.torch import load_file

import areal_flow
import pipelines.jobs.job
from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import PolicyHashes
from areal_flow.log.audit.run import check_run
from areal_flow.log.dataset import create_dataset
from areal_flow.log.directory import (
    Parent,
    check_schema_version,
    create_run,
    read_parent,
    record_parent,
)
from areal_flow.log.ledger import STEPS, LedgerReader
from areal_flow.log.ledger_row import genesis_row
from areal_flow.log.queries import Run
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.policy.checkpoints import (
    RNG_STATE,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint_state,
    record_fork,
)
from areal_flow.policy.tokenizer.directory import copy_model_description
from pipelines.jobs.job import Fork, _record_num_steps, fork_of
from pipelines.jobs.prepare import describe_parent
from pipelines.models import find_reference
from tests.recorded_runs import PROVENANCE, WRITER, make_recorded_run
from tests.rows import append


@pytest.fixture
def parent(tmp_path: Path) -> RunLayout:
    return make_recorded_run(tmp_path / "parent")


def forked(
    parent: RunLayout, step: int | None, name: str = "child", *, reset: bool = False, **over: Any
) -> RunLayout:
    """Make a run up to the fork."""
    fork = Fork(parent, step, reset)
    layout, recipe = RunLayout(parent.root.parent / name), fork.recipe(over)
    create_run(layout, recipe)
    fork.begin(layout, recipe, WRITER)
    return layout


def recorded_hash(layout: RunLayout, step: int) -> str:
    return str(LedgerReader(layout).rows(["weights_hash"])[step]["weights_hash"])


def begun(layout: RunLayout, weights_hash: str) -> RunLayout:
    """Write the logs of a fork that has made its version 0."""
    copy_model_description(checkpoint_path(layout.checkpoints, 0), layout.model)
    create_logs(layout)
    hashes = PolicyHashes(weights_hash, served_hash=weights_hash)
    row = genesis_row(hashes, provenance=PROVENANCE, numeric_environment="{}")
    append(RunLog(layout, WRITER), row)
    return layout


def optimizer_of(layout: RunLayout) -> set[str]:
    path = checkpoint_path(layout.checkpoints, 0) / "optimizer.safetensors"
    return set(load_file(path)) - {RNG_STATE}


def listing(layout: RunLayout) -> dict[str, tuple[int, int]]:
    paths = [layout.root, *layout.root.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


@pytest.mark.parametrize("requested_step", [None, 0, 1, 2])
def test_version_0_is_the_step_of_the_parent_which_is_left_as_it_was(
    parent: RunLayout, requested_step: int | None
) -> None:
    """By default that of the newest usable checkpoint."""
    before, step = listing(parent), requested_step or 0
    child = forked(parent, requested_step)
    assert listing(parent) == before
    expected = recorded_hash(parent, step)
    (checkpoint,) = list_checkpoints(child.checkpoints)
    state = read_checkpoint_state(checkpoint_path(child.checkpoints, checkpoint))
    assert (state.step, state.weights_hash, state.next_submission_index) == (0, expected, 0)
    assert bool(optimizer_of(child)) == (step > 0)
    identity = check_schema_version(parent)
    assert read_parent(child) == Parent(identity, "parent", step, expected, "kept")
    assert check_schema_version(child) != identity
    assert describe_parent(child) == [
        f"Forked from step {step} of run parent: its weights; optimizer kept"
    ]
    assert describe_parent(parent) == []


@pytest.mark.parametrize(
    ("reset", "trainer", "why"),
    [
        (True, {}, "fresh, as asked for"),
        (False, {"adamw": {"betas": [0.9, 0.9]}}, "fresh, since trainer.adamw.betas changed"),
        (False, {"optimizer": "muon"}, "fresh, since trainer.optimizer changed"),
        (False, {"learning_rate": 1e-5, "adamw": {"weight_decay": 0.1}}, "kept"),
    ],
)
def test_optimizer_state_is_forked_where_it_still_applies(
    parent: RunLayout, reset: bool, trainer: dict[str, Any], why: str
) -> None:
    child = forked(parent, 2, reset=reset, trainer=trainer)
    recorded = read_parent(child)
    assert recorded is not None
    assert recorded.optimizer == why
    assert bool(optimizer_of(child)) == (why == "kept")


def test_recipe_is_the_parents_with_settings_over_it_and_no_fine_tuning(parent: RunLayout) -> None:
    fork = Fork(parent, 0)
    recipe = fork.recipe(
        {"seed": 7, "algorithm": {"name": "gspo"}, "controller": {"group_size": 8}}
    )
    assert (recipe.seed, recipe.algorithm.name, recipe.controller.group_size) == (7, "gspo", 8)
    assert fork.recipe({}) == load_recipe(parent.config)
    child = RunLayout(parent.root.parent / "child")
    create_run(child, recipe)
    begins = fork.begin(child, recipe, WRITER)
    assert begins.model == str(checkpoint_path(child.checkpoints, 0))
    assert (begins.sft.num_steps, begins.sft.path) == (0, None)
    state = read_checkpoint_state(Path(begins.model))
    assert state.config_hash == begins.digest()


def test_decay_of_a_fork_ends_with_its_own_steps_unless_another_end_was_chosen(
    tmp_path: Path,
) -> None:
    for given, expected in ((0, 12), (50, 50)):
        parent = RunLayout(tmp_path / str(given))
        trainer = {"learning_rate_schedule": "linear", "num_decay_steps": given}
        create_run(parent, build_recipe({"num_steps": 30, "trainer": trainer}, source="test"))
        recipe = Fork(parent, None).recipe(
            {"num_steps": 12, "trainer": {"adamw": {"weight_decay": 0.8}}}
        )
        assert recipe.trainer.num_decay_steps == expected
        assert recipe.trainer.learning_rate_schedule == "linear"
        assert recipe.trainer.adamw.weight_decay == 0.8


def test_fork_of_an_extended_run_decays_by_its_own_steps(tmp_path: Path) -> None:
    for given, expected in ((0, 200), (50, 50), (60, 60)):
        parent = RunLayout(tmp_path / str(given))
        trainer = {"learning_rate_schedule": "linear", "num_decay_steps": given}
        create_run(parent, build_recipe({"num_steps": 30, "trainer": trainer}, source="test"))
        before = load_recipe(parent.config)
        _record_num_steps(parent, 60)
        extended = load_recipe(parent.config)
        assert (extended.num_steps, extended.trainer) == (60, before.trainer)
        recipe = Fork(parent, None).recipe({"num_steps": 200})
        assert recipe.trainer.num_decay_steps == expected


@pytest.mark.parametrize("over", [{"model": "tiny"}, {"sft": {"num_steps": 3}}])
def test_model_and_fine_tuning_cannot_change(parent: RunLayout, over: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keeps the model of run parent and is not fine-tuned"):
        Fork(parent, 0).recipe(over)
    with pytest.raises(ConfigError, match="there is no such setting"):
        Fork(parent, 0).recipe({"trainer": {"lr": 1}})


def test_missing_run_or_step_is_reported(parent: RunLayout, tmp_path: Path) -> None:
    assert fork_of(find_reference(tmp_path, "parent@2")) == Fork(parent, 2)
    by_directory = find_reference(Path("elsewhere"), str(parent.root))
    assert fork_of(by_directory, reset_optimizer=True) == Fork(parent, None, True)
    for reference, message in (
        ("parent@3", "run parent has no step 3: expected a step from 0 to 2"),
        ("nobody@1", "expected a run named 'nobody' in .*, found: parent"),
        ("parent@new", "expected a run named 'parent@new'"),
    ):
        with pytest.raises(RunError, match=message):
            fork_of(find_reference(tmp_path, reference))


def test_python_forks_by_name_and_step_or_by_run(
    parent: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[RunLayout, Recipe, Fork]] = []

    def start(_: Any, layout: RunLayout, recipe: Recipe, *, fork: Fork, **__: Any) -> None:
        create_run(layout, recipe)
        started.append((layout, recipe, fork))

    monkeypatch.setattr(pipelines.jobs.job, "start", start)
    runs = parent.root.parent
    areal_flow.train(source="parent@1", runs=runs, num_steps=7, reset_optimizer=True)
    areal_flow.train(source=Run(parent.root), runs=runs, name="named", prompts="p.jsonl")
    (layout, recipe, fork), (_, on_rows, fork_of_run) = started
    assert layout.name.startswith("parent-")
    assert (recipe.num_steps, recipe.algorithm.advantage) == (7, "rloo")
    assert (fork, fork_of_run) == (Fork(parent, 1, True), Fork(parent, None))
    assert (on_rows.prompts.source, on_rows.prompts.path) == ("file", Path("p.jsonl"))
    with pytest.raises(ConfigError, match="expected a recipe or a source, found both"):
        areal_flow.train("r.toml", source="parent", runs=runs)


def test_replay_before_a_fork_opens_no_display_of_its_own(
    parent: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("pipelines.console.progress.NotebookCell", lambda: pytest.fail("a display"))
    forked(parent, 1)
    assert "run parent: replaying step 1/1" in capsys.readouterr().out


def test_run_without_a_policy_is_refused(parent: RunLayout, tmp_path: Path) -> None:
    unprepared = RunLayout(tmp_path / "young")
    create_run(unprepared, load_recipe(parent.config))
    with pytest.raises(RunError, match="run young has no ledger"):
        fork_of(find_reference(tmp_path, "young"))
    create_dataset(unprepared.steps, STEPS)
    with pytest.raises(RunError, match=r"run young has no policy yet.*--resume young"):
        fork_of(find_reference(tmp_path, "young"))


def test_damaged_checkpoint_is_not_taken_and_left_where_it_is(parent: RunLayout) -> None:
    weights = checkpoint_path(parent.checkpoints, 0) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0xFF
    weights.write_bytes(content)
    before = listing(parent)
    for step in (None, 0, 2):
        with pytest.raises(RunError, match=r"no usable checkpoint up to step . *: expected one"):
            forked(parent, step, f"child-{step}")
    assert listing(parent) == before


def test_replay_that_makes_other_weights_is_refused(parent: RunLayout) -> None:
    lance.dataset(str(parent.steps)).update({"weights_hash": "'other'"}, where="step = 1")
    with pytest.raises(RunError, match=r"step 1 of run parent was replayed to weights \w+, its"):
        forked(parent, 2)


def test_checkpoint_that_a_replay_forked_to_is_the_step_of_the_parent(parent: RunLayout) -> None:
    (row,) = LedgerReader(parent).rows(["weights_hash", "served_hash"])[:1]
    lance.dataset(str(parent.steps)).update({"weights_hash": "'lost'"}, where="step = 0")
    replayed = {name: row[name] for name in ("weights_hash", "served_hash")}
    record_fork(parent.forks, {"step": 0, "replayed": replayed})
    child = begun(forked(parent, 0), row["weights_hash"])
    assert findings(child) == {}
    checks = [
        *Run(parent.root).lineage(0).hash_checks({}),
        *Run(child.root).lineage(0).hash_checks({}),
    ]
    assert [check.holds for check in checks] == [True] * 3


def test_shipped_rewards_of_the_parent_go_along(parent: RunLayout) -> None:
    parent.rewards.mkdir()
    (parent.rewards / "mine@1.py").write_text("def mine(): ...")
    assert (forked(parent, 0).rewards / "mine@1.py").read_text() == "def mine(): ..."


def test_fork_says_that_it_executes_code_of_the_parents_directory(
    parent: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = {"verifier": "shipped:length@0123456789ab"}
    table = load_recipe(parent.config).model_dump(mode="json")
    parent.config.write_text(dump_recipe(build_recipe(table, {"rewards": [shipped]}, source="")))
    forked(parent, 1)
    assert "executes code that came with the run directory: rewards/length@0123456789ab.py" in (
        " ".join(capsys.readouterr().out.split())
    )
    forked(parent, 1, "other", rewards=[{"verifier": "exact"}])
    assert "executes code" not in capsys.readouterr().out


def test_lineage_follows_the_link_back_while_the_parents_are_there(parent: RunLayout) -> None:
    child = begun(forked(parent, 2), recorded_hash(parent, 2))
    grandchild = Run(begun(forked(child, 0, "grandchild"), recorded_hash(child, 0)).root)
    nearest, last = grandchild.lineage(0).forked_from
    assert (nearest["name"], nearest["step"]) == ("child", 0)
    assert (last["name"], last["step"]) == ("parent", 2)
    assert last["ledger"] == {
        "run": "parent",
        "genesis_hash": recorded_hash(parent, 0),
        "weights_hash": recorded_hash(parent, 2),
        "chain_breaks": [],
    }
    checks = grandchild.lineage(0).hash_checks({})
    assert [check.holds for check in checks] == [True, True]
    parent.root.rename(parent.root.with_name("renamed"))
    assert grandchild.lineage(0).forked_from[1]["ledger"]["run"] == "renamed"
    shutil.rmtree(child.root)
    (nearest,) = grandchild.lineage(0).forked_from
    assert nearest["ledger"] is None


def findings(layout: RunLayout) -> dict[str, str]:
    rules = ("fork-genesis", "fork-parent", "parent-not-compared", "checkpoint-beyond-ledger")
    return {f.rule: f.severity for f in check_run(layout).findings if f.rule in rules}


def test_check_compares_the_genesis_with_the_parents_step(parent: RunLayout) -> None:
    child = forked(parent, 2)
    assert check_run(child).clean, "it is still being prepared"
    recorded = read_parent(child)
    assert recorded is not None
    begun(child, recorded.weights_hash)
    assert findings(child) == {}
    record_parent(child, Parent(recorded.run_id, "parent", 1, recorded.weights_hash, "kept"))
    assert findings(child) == {"fork-parent": "error"}
    record_parent(child, Parent(recorded.run_id, "parent", 1, recorded_hash(parent, 1), "kept"))
    assert findings(child) == {"fork-genesis": "error"}
    record_parent(child, Parent(recorded.run_id, "parent", 9, recorded.weights_hash, "kept"))
    assert findings(child) == {"parent-not-compared": "note"}
    record_parent(child, Parent("another", "parent", 2, recorded.weights_hash, "kept"))
    assert findings(child) == {"parent-not-compared": "note"}


def test_first_checkpoint_of_a_fork_may_precede_its_row(parent: RunLayout) -> None:
    child = forked(parent, 2)
    create_dataset(child.steps, STEPS)
    assert findings(child) == {}
    checkpoint = checkpoint_path(child.checkpoints, 0)
    checkpoint.rename(checkpoint_path(child.checkpoints, 1))
    assert findings(child) == {"checkpoint-beyond-ledger": "error"}


def test_run_json_keeps_the_identity_beside_the_parent(parent: RunLayout) -> None:
    child = forked(parent, 1)
    written = json.loads(child.identity.read_text())
    names = {"schema_version", "run_id", "recipe", "first_num_steps", "forked_from"}
    assert set(written) == names
    assert set(written["forked_from"]) == {"run_id", "name", "step", "weights_hash", "optimizer"}
