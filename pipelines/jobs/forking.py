"""A new run that begins with the policy of another one: which step that is, and what may change.

The recipe is the parent's, with any setting over it but those of the model.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.settings import flatten, merge
from areal_flow.log.dataset import read_errors
from areal_flow.log.directory import first_num_steps, read_parent
from areal_flow.log.ledger import LedgerReader
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.rewards.shipping import what_is_executed
from areal_flow.training.settings import SftSettings
from pipelines.console.progress import line_progress
from pipelines.console.run_log import say
from pipelines.jobs.stop_signals import wait_for
from pipelines.models import Reference

KIND_OF_OPTIMIZER = ("trainer.optimizer", "trainer.adamw.betas")
"""Settings under which an optimizer's state was gathered, and means something."""


@dataclass(frozen=True, slots=True)
class Fork:
    parent: RunLayout
    step: int | None
    """None: that of the newest usable checkpoint."""
    reset_optimizer: bool = False

    def recipe(self, overrides: dict[str, Any], *, spelling: str = "{}") -> Recipe:
        fixed = [name for name in flatten(overrides) if name.split(".")[0] in ("model", "sft")]
        if fixed:
            raise ConfigError(
                f"{', '.join(spelling.format(name.replace('_', '-')) for name in fixed)}: a fork "
                f"keeps the model of run {self.parent.name} and is not fine-tuned again. "
                "To begin with another model, start a run with --model and without --from"
            )
        before = load_recipe(self.parent.config)
        changed = flatten(overrides.get("trainer", {}).get("lora", {}), "trainer.lora.")
        if any(flatten(before.model_dump())[name] != value for name, value in changed.items()):
            raise ConfigError(
                f"{', '.join(changed)}: a fork has the adapter of run {self.parent.name}, or none "
                "if it has none. To change it, export a step and give that to --model"
            )
        num_steps = first_num_steps(self.parent) or before.num_steps
        if before.trainer.num_decay_steps == num_steps:
            overrides = merge({"trainer": {"num_decay_steps": 0}}, overrides)
        return load_recipe(self.parent.config, overrides, spelling=spelling)

    def begin(self, layout: RunLayout, recipe: Recipe, writer: Writer) -> Recipe:
        """Write the new run's checkpoint 0; return its recipe, whose model that is."""
        from areal_flow.flow.recovery.fork import write_version_0  # torch

        own = {each.verifier for each in load_recipe(self.parent.config).rewards}
        kept = (each.verifier for each in recipe.rewards if each.verifier in own)
        if executed := what_is_executed(kept):
            say(executed)
        model = str(checkpoint_path(layout.checkpoints, 0))
        recipe = recipe.model_copy(update={"model": model, "sft": SftSettings()})
        if self.parent.rewards.is_dir():
            shutil.copytree(self.parent.rewards, layout.rewards, dirs_exist_ok=True)
        progress, what = line_progress(), f"run {self.parent.name}: replaying step"
        wait_for(
            lambda: write_version_0(
                layout,
                recipe,
                writer,
                parent=self.parent,
                step=self.step,
                fresh_optimizer=self._why_fresh(recipe),
                on_replayed=lambda at, last: progress.count(what, at, last),
            )
        )
        return recipe

    def _why_fresh(self, recipe: Recipe) -> str:
        """Return why the parent's optimizer state is of no use; empty if it is."""
        if self.reset_optimizer:
            return "fresh, as asked for"
        before, after = (
            flatten(of.model_dump()) for of in (load_recipe(self.parent.config), recipe)
        )
        changed = [name for name in KIND_OF_OPTIMIZER if before[name] != after[name]]
        return f"fresh, since {' and '.join(changed)} changed" if changed else ""


def fork_of(reference: Reference, *, reset_optimizer: bool = False) -> Fork:
    parent, step = reference.run, reference.step
    if not parent.steps.exists():
        raise RunError(
            f"run {parent.name} has no ledger: expected one that `areal-flow train` made. What "
            f"`areal-flow sft` made is a model: give it to --model"
        )
    with read_errors(parent.steps):
        head = LedgerReader(parent).head
    if head < 0:
        raise RunError(
            f"run {parent.name} has no policy yet: it is still before its version 0; "
            f"wait for it, or go on with it first by --resume {parent.name}"
        )
    if step is not None and step > head:
        raise RunError(f"run {parent.name} has no step {step}: expected a step from 0 to {head}")
    return Fork(parent, step, reset_optimizer)


def describe_parent(layout: RunLayout) -> list[str]:
    parent = read_parent(layout)
    return [f"Forked from {parent}: its weights; optimizer {parent.optimizer}"] if parent else []
