"""Finds what a user calls a model: a run, a registry reference, or a path; and hands it out."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_flow.errors import ModelError
from areal_flow.layout import RunLayout, run_layout
from areal_flow.recovery.checkpoints import (
    ADAPTER_FILE,
    MODEL_FILE,
    checkpoint_path,
    list_checkpoints,
    weight_files,
)
from areal_flow.recovery.run_directory import find_run
from areal_flow.tracking.mlflow import (
    RegisteredVersion,
    default_tracking_uri,
    registered_version,
)

if TYPE_CHECKING:
    from areal_flow.store.lineage import HashCheck, Lineage

_TRAINING_ONLY = (ADAPTER_FILE, "optimizer.safetensors", "state.json")


@dataclass(frozen=True, slots=True)
class Traced:
    """A lineage, how it was asked for, and what its hashes were compared with."""

    lineage: Lineage
    registered: RegisteredVersion | None
    checks: tuple[HashCheck, ...]


def find_model(runs: Path, reference: str, *, registry: str | None = None) -> Path:
    """Return the directory of a checkpoint or a model.

    Args:
        reference: a run's name (its newest checkpoint), `NAME@VERSION` of it, `models:/NAME@ALIAS`,
            or a directory.
        registry: MLflow's address, if it is not the database beside the runs.

    Raises:
        ModelError: there is nothing of that name.
    """
    if reference.startswith("models:/"):
        directory = registered_version(registry or default_tracking_uri(runs), reference).source
        if not directory.is_dir():
            raise ModelError(f"{reference} points to {directory}, which is gone")
        return directory
    if (Path(reference) / "config.json").is_file():
        return Path(reference).resolve()
    if "/" not in reference and (runs / reference / "config.toml").is_file():
        return newest_checkpoint(run_layout(runs, reference))
    name, _, version = reference.rpartition("@")
    if version.isdecimal() and "/" not in name and (runs / name / "config.toml").is_file():
        return _checkpoint_of(run_layout(runs, name), int(version))
    raise ModelError(
        f"expected a run in {runs}, NAME@VERSION of one, models:/NAME@ALIAS or a model directory, "
        f"found {reference!r}"
    )


def _checkpoint_of(layout: RunLayout, version: int) -> Path:
    """Return the checkpoint of a version of a run's policy.

    Raises:
        ModelError: it was not kept.
    """
    kept = list_checkpoints(layout.checkpoints)
    if version not in kept:
        raise ModelError(
            f"run {layout.name} has no checkpoint of version {version}, only of "
            f"{', '.join(map(str, kept)) or 'none'}; see trainer.keep_checkpoints"
        )
    return checkpoint_path(layout.checkpoints, version)


def export(source: Path, directory: Path) -> None:
    """Write a checkpoint's configuration, tokenizer and weights: a plain Hugging Face directory.

    Raises:
        ModelError: the directory is not empty.
    """
    _copy_without(source, directory, *_TRAINING_ONLY)
    if (source / ADAPTER_FILE).is_file():
        from safetensors.torch import save_file

        from areal_flow.models.policy import load_policy, policy_tensors

        merged = policy_tensors(load_policy(source))
        save_file(merged, directory / MODEL_FILE, metadata={"format": "pt"})
    print(f"Exported {source} to {directory}. Load it with:")
    print(f"  transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})")


def export_adapter(source: Path, directory: Path) -> None:
    """Write a checkpoint's adapter as `peft` has it, and which directory it adapts.

    Raises:
        ModelError: the checkpoint has none, or the directory is not empty.
    """
    if not (source / ADAPTER_FILE).is_file():
        raise ModelError(
            f"--adapter: expected a checkpoint of a run with trainer.lora.rank, found {source}, "
            "which has no adapter: leave it out"
        )
    from areal_flow.models.lora import adapter_description
    from areal_flow.models.policy import read_lora_settings

    base = weight_files(source)[0].parent.resolve()
    description = adapter_description(read_lora_settings(source), base=str(base))
    _copy_without(source, directory, *_TRAINING_ONLY, MODEL_FILE, "config.json")
    shutil.copyfile(source / ADAPTER_FILE, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(description, indent=2, default=list))
    print(f"Exported the adapter of {source} to {directory}. Load it with:")
    print(f"  base = transformers.AutoModelForCausalLM.from_pretrained({str(base)!r})")
    print(f"  peft.PeftModel.from_pretrained(base, {str(directory)!r})")


def _copy_without(source: Path, directory: Path, *names: str) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise ModelError(f"{directory} is not empty; give a new directory")
    shutil.copytree(
        source,
        directory,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(*names),
        copy_function=shutil.copyfile,  # safetensors writes files that their owner alone can read
    )


def newest_checkpoint(layout: RunLayout) -> Path:
    """Return a run's newest checkpoint; before training, that of supervised fine-tuning.

    Raises:
        ModelError: it has none.
    """
    for root in (layout.checkpoints, layout.sft_checkpoints):
        if found := list_checkpoints(root):
            return checkpoint_path(root, found[-1])
    raise ModelError(f"run {layout.name} has no checkpoint yet")


def run_of_checkpoint(directory: Path) -> RunLayout | None:
    """Return the run that a checkpoint lies in, if it lies in one."""
    root = directory.parent.parent
    return RunLayout(root) if (root / "config.toml").is_file() else None


def title_of(reference: str, directory: Path) -> str:
    """Return what a model was asked for by, and which step of which run that is."""
    run = run_of_checkpoint(directory)
    if run is None:
        return reference
    kind = "fine-tuning step" if directory.parent == run.sft_checkpoints else "step"
    return f"{reference} ({kind} {int(directory.name)} of run {run.name})"


def trace_model(
    runs: Path, reference: str, *, step: int | None = None, registry: str | None = None
) -> Traced:
    """Return the lineage of a registered version, or of a run's step, by default its last.

    Args:
        reference: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, a run's name or its directory.
        registry: MLflow's address, if it is not the database beside the runs.

    Raises:
        ModelError: the registry does not know it, or it lies in no run.
        RunError: there is no such run or step.
    """
    from areal_flow.store.queries import Run

    version, recorded = None, {}
    if reference.startswith("models:/"):
        version = registered_version(registry or default_tracking_uri(runs), reference)
        layout = run_of_checkpoint(version.source)
        if layout is None:
            raise ModelError(f"{reference} points to {version.source}, which lies in no run")
        step = int(version.tags.get("step", version.source.name))
        recorded = {"the registered version": version.tags.get("weights_hash", "none")}
    else:
        layout = find_run(runs, reference)
    run = Run(layout.root)
    if step is None:
        step = max(run.steps("arrow", columns=["step"])["step"].to_pylist(), default=None)
    if step is None:
        raise ModelError(f"{layout.name} has no policy yet: its ledger is empty")
    lineage = run.lineage(step)
    return Traced(lineage, version, lineage.hash_checks(recorded))
