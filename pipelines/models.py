"""Hands a model out as other programs read it, and says what it was made from."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_flow.core.errors import ModelError
from areal_flow.policy.checkpoints import ADAPTER_FILE, MODEL_FILE, weight_files
from pipelines.references import Reference, chosen_step

if TYPE_CHECKING:
    from areal_flow.log.lineage import HashCheck, Lineage
    from areal_flow.tracking.model_registry import RegisteredVersion

_TRAINING_ONLY = (ADAPTER_FILE, "optimizer.safetensors", "state.json", "MLmodel")


@dataclass(frozen=True, slots=True)
class Traced:
    lineage: Lineage
    registered: RegisteredVersion | None
    checks: tuple[HashCheck, ...]


def export(source: Path, directory: Path) -> None:
    """Write a checkpoint's configuration, tokenizer and weights: a plain Hugging Face directory."""
    _copy_without(source, directory, *_TRAINING_ONLY)
    if (source / ADAPTER_FILE).is_file():
        from safetensors.torch import save_file

        from areal_flow.policy.models.policy import load_policy, policy_tensors

        merged = policy_tensors(load_policy(source))
        save_file(merged, directory / MODEL_FILE, metadata={"format": "pt"})
    print(f"Exported {source} to {directory}. Load it with:")
    (architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
    scores = architecture.endswith("SequenceClassification")
    kind = "SequenceClassification" if scores else "CausalLM"
    print(f"  transformers.AutoModelFor{kind}.from_pretrained({str(directory)!r})")


def export_adapter(source: Path, directory: Path) -> None:
    """Write a checkpoint's adapter as `peft` has it, and which directory it adapts."""
    if not (source / ADAPTER_FILE).is_file():
        raise ModelError(
            f"--adapter: expected a checkpoint of a run with trainer.lora.rank, found {source}, "
            "which has no adapter: leave it out"
        )
    from areal_flow.policy.models.lora import adapter_description
    from areal_flow.policy.models.policy import read_lora_settings

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
