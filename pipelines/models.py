"""Runs and models by the names that users give them, and the lineage of a model.

    NAME                    a run in the folder of runs; as a model, its newest checkpoint
    PATH                    the directory of a run, of a checkpoint, or of any model
    NAME@STEP, PATH@STEP    a step of a run; as a model, the checkpoint of that version
    models:/NAME@ALIAS, models:/NAME/VERSION    a registered version, and the step that made it

Where a run and a model directory have the same name, it means the run; `./NAME` is the directory.
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
    from areal_flow.log.lineage import HashCheck, Lineage
    from areal_flow.tracking.mlflow import RegisteredVersion


@dataclass(frozen=True, slots=True)
class Reference:
    """A run, a step of a run, or a model outside any run."""

    text: str
    layout: RunLayout | None
    step: int | None = None
    directory: Path | None = None
    """The model's, if the text names the model and not its run."""
    registered: RegisteredVersion | None = None

    @property
    def run(self) -> RunLayout:
        if self.layout is None:
            raise RunError(
                f"expected a run or a model of one, found {self.text}: a model in no run"
            )
        return self.layout

    def whole_run(self, command: str) -> RunLayout:
        """Return the run, for a command that takes no step."""
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
        """The text, and the step and run that it refers to."""
        if self.layout is None:
            return self.text
        directory = self.model()
        tuned = directory.parent == self.layout.sft_checkpoints
        kind = "fine-tuning step" if tuned else "step"
        step = directory.name.lstrip("0") or "0"
        return f"{self.text} ({kind} {step} of run {self.layout.name})"


def find_reference(runs: Path, text: str, *, registry: str | None = None) -> Reference:
    """Resolve a reference; `registry` is MLflow's address, by default the one beside the runs."""
    if text.startswith("models:/"):
        from areal_flow.tracking.mlflow import default_tracking_uri, registered_version

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
    """Return a run's newest checkpoint; before step 0, that of supervised fine-tuning."""
    for root in (layout.checkpoints, layout.sft_checkpoints):
        if checkpoints := list_checkpoints(root):
            return checkpoint_path(root, checkpoints[-1])
    raise ModelError(f"run {layout.name} has no checkpoint yet")


def chosen_step(reference: Reference, step: int | None, *, option: str) -> int | None:
    if None not in (step, reference.step) and step != reference.step:
        raise ConfigError(f"{option} {step}: {reference.text} is step {reference.step} already")
    return reference.step if step is None else step


@dataclass(frozen=True, slots=True)
class Traced:
    lineage: Lineage
    registered: RegisteredVersion | None
    checks: tuple[HashCheck, ...]


def trace_model(reference: Reference, *, step: int | None = None) -> Traced:
    """Return the lineage of a registered version, or of a run's step, by default its last."""
    from areal_flow.log.queries import Run

    run = Run(reference.run.root)
    if reference.directory is not None and reference.step is None:
        raise ModelError(
            f"expected a step of run {reference.run.name}, found {reference.text}, which is of "
            "fine-tuning before step 0"
        )
    step = chosen_step(reference, step, option="--step")
    steps = run.steps("arrow", columns=["step"])["step"].to_pylist() if step is None else [step]
    if not steps:
        raise ModelError(f"{reference.run.name} has no policy yet: its ledger is empty")
    lineage, recorded = run.lineage(max(steps)), {}
    if version := reference.registered:
        recorded["the registered version"] = version.tags.get("weights_hash", "none")
    return Traced(lineage, version, lineage.hash_checks(recorded))
