"""Inputs of a run: recorded once, compared on resume, verifiers by epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import RewardError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.log.inputs import (
    Verifier,
    accept,
    check_inputs,
    check_verifier,
    read_inputs,
    record_inputs,
)
from tests.checkpoints import write_fake_checkpoint

FIRST, OTHER = Verifier("grade@1", ("graders.py",)), Verifier("grade@2", ("graders.py",))


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run prepared from a prompt file and a model directory."""
    made = RunLayout(tmp_path / "r")
    for path in (made.train_prompts, made.held_out_prompts, made.model / "tokenizer.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("weights")
    (tmp_path / "p.jsonl").write_text("rows")
    record_inputs(made, recipe(tmp_path), verifier=FIRST, model=model)
    return made


def recipe(folder: Path) -> Recipe:
    table = {"prompts": {"source": "file", "path": str(folder / "p.jsonl")}}
    return build_recipe(table, source="test")


@pytest.mark.parametrize("name", ["prompts/train.arrow", "prompts/held_out.arrow"])
def test_file_of_the_run_that_changed_is_refused(layout: RunLayout, name: str) -> None:
    (layout.root / name).write_text("other")
    with pytest.raises(RunError, match=rf"{name}: expected the content \w+, found .* from a copy"):
        check_inputs(layout, FIRST, accept_verifier=True)
    (layout.root / name).unlink()
    with pytest.raises(RunError, match="found no such file"):
        check_inputs(layout, FIRST, accept_verifier=True)


def test_every_change_is_named_at_once(layout: RunLayout) -> None:
    (layout.model / "tokenizer.json").write_text("other")
    layout.train_prompts.write_text("other")
    with pytest.raises(RunError) as refused:
        check_inputs(layout, OTHER, accept_verifier=False)
    for part in ("model/tokenizer.json", "train.arrow", "expected grade@1, found grade@2"):
        assert part in str(refused.value)


def test_prompt_file_that_changed_is_named_and_changes_nothing(layout: RunLayout) -> None:
    source = layout.root.parent / "p.jsonl"
    source.write_text("other rows")
    (note,) = check_inputs(layout, FIRST, accept_verifier=False)
    assert note.startswith(str(source))
    assert "goes on with its own copy" in note
    source.unlink()
    assert check_inputs(layout, FIRST, accept_verifier=False) == []


def test_model_directory_counts_until_version_0_is_in_a_checkpoint(layout: RunLayout) -> None:
    (layout.root.parent / "model" / "model.safetensors").write_text("other weights")
    with pytest.raises(RunError, match=r"model\.safetensors.*version 0 is not made yet"):
        check_inputs(layout, FIRST, accept_verifier=False)
    write_fake_checkpoint(layout, 0, weights_hash="w0")
    assert check_inputs(layout, FIRST, accept_verifier=False) == []


def test_other_verifier_is_refused_or_accepted_from_an_epoch_on(layout: RunLayout) -> None:
    with pytest.raises(RunError, match=r"in graders\.py; restore it, or go on with --accept-veri"):
        check_inputs(layout, OTHER, accept_verifier=False)
    assert check_inputs(layout, OTHER, accept_verifier=True) == []
    accept(layout, FIRST, Writer(layout.writers, 2))
    accept(layout, OTHER, Writer(layout.writers, 3))
    accept(layout, OTHER, Writer(layout.writers, 4))
    assert read_inputs(layout).verifiers == [(1, "grade@1"), (3, "grade@2")]
    with pytest.raises(RunError, match="expected grade@2, found grade@1"):
        check_inputs(layout, FIRST, accept_verifier=False)


def test_reward_worker_scores_with_the_verifier_of_the_run_alone(layout: RunLayout) -> None:
    check_verifier(layout, "grade@1")
    with pytest.raises(RewardError, match="expected the verifier grade@1, found grade@2 while"):
        check_verifier(layout, "grade@2")
    check_verifier(RunLayout(layout.root / "no run"), "grade@2")


def test_run_whose_inputs_nobody_can_read_is_refused(layout: RunLayout) -> None:
    layout.inputs.write_text("{}")
    with pytest.raises(RunError, match="says what run r is made of"):
        check_inputs(layout, FIRST, accept_verifier=False)
