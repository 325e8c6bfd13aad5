"""Finds what a user calls a run or a model.

    NAME                    a run in the folder of runs; as a model, its newest checkpoint
    PATH                    the directory of a run, of a checkpoint, or of any model
    NAME@STEP, PATH@STEP    a step of a run; as a model, the checkpoint of that version
    models:/NAME@ALIAS, models:/NAME/VERSION    a registered version, and the step that made it

Where a run has the name of a model directory, it is the run; `./NAME` is the directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_flow.core.errors import ConfigError, ModelError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import find_run
from areal_flow.policy.checkpoints import checkpoint_path, list_checkpoints
from areal_flow.policy.tokenizer.directory import refuse_gguf

if TYPE_CHECKING:
    from areal_flow.tracking.model_registry import RegisteredVersion


@dataclass(frozen=True, slots=True)
class Reference:
    """What was asked for: a run, perhaps one step of it, or a model that lies in no run."""

    text: str
    layout: RunLayout | None
    step: int | None = None
    directory: Path | None = None
    """Of the model, where that was named and not its run."""
    registered: RegisteredVersion | None = None

    @property
    def run(self) -> RunLayout:
        if self.layout is None:
            raise RunError(
                f"expected a run or a model of one, found {self.text}: a model in no run"
            )
        return self.layout

    def whole_run(self, command: str) -> RunLayout:
        """Return the run, for a command that looks at all of it."""
        if self.step is not None and self.directory is None:
            raise ConfigError(
                f"`{command}` takes a run, not step {self.step} of it: give "
                f"{self.text.rpartition('@')[0]}"
            )
        return self.run

    def model(self) -> Path:
        if self.directory is not None:
            if not self.directory.is_dir():
                raise ModelError(f"{self.text} points to {self.directory}, which is gone")
            return self.directory
        if self.step is None:
            return newest_checkpoint(self.run)
        checkpoints = self.run.checkpoints
        if self.step not in (kept := list_checkpoints(checkpoints)):
            raise ModelError(
                f"run {self.run.name} has no checkpoint of version {self.step}, only of "
                f"{', '.join(map(str, kept)) or 'none'}; see trainer.keep_checkpoints"
            )
        return checkpoint_path(checkpoints, self.step)

    @property
    def title(self) -> str:
        """What the model was asked for by, and which step of which run that is."""
        if self.layout is None:
            return self.text
        directory = self.model()
        tuned = directory.parent == self.layout.sft_checkpoints
        kind = "fine-tuning step" if tuned else "step"
        step = directory.name.lstrip("0") or "0"
        return f"{self.text} ({kind} {step} of run {self.layout.name})"


def find_reference(runs: Path, text: str, *, registry: str | None = None) -> Reference:
    """Return what is called so; `registry` is MLflow's address, if not that beside the runs."""
    if text.startswith("models:/"):
        from areal_flow.tracking.model_registry import default_tracking_uri, registered_version

        version = registered_version(registry or default_tracking_uri(runs), text)
        return _of_model(text, version.source, version)
    directory, (name, _, step) = Path(text).resolve(), text.rpartition("@")
    is_named = "/" not in text and (runs / text).is_dir()
    if (directory / "config.json").is_file() and not is_named:
        return _of_model(text, directory)
    if not is_named:
        refuse_gguf(directory)
    if name and step.isdecimal():
        return Reference(text, find_run(runs, name), int(step))
    return Reference(text, find_run(runs, text))


def _of_model(text: str, directory: Path, registered: RegisteredVersion | None = None) -> Reference:
    run = run_of_checkpoint(directory)
    is_step = run and directory.parent == run.checkpoints and directory.name.isdecimal()
    return Reference(text, run, int(directory.name) if is_step else None, directory, registered)


def run_of_checkpoint(directory: Path) -> RunLayout | None:
    root = directory.parent.parent
    return RunLayout(root) if (root / "config.toml").is_file() else None


def newest_checkpoint(layout: RunLayout) -> Path:
    """Return a run's newest checkpoint; before training, that of supervised fine-tuning."""
    for root in (layout.checkpoints, layout.sft_checkpoints):
        if checkpoints := list_checkpoints(root):
            return checkpoint_path(root, checkpoints[-1])
    raise ModelError(f"run {layout.name} has no checkpoint yet")


def chosen_step(reference: Reference, step: int | None, *, option: str) -> int | None:
    if None not in (step, reference.step) and step != reference.step:
        raise ConfigError(f"{option} {step}: {reference.text} is step {reference.step} already")
    return reference.step if step is None else step
