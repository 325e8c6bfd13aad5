"""Exports for other tools: a model as a Hugging Face directory with a card, an adapter, and a run's
trajectories as a dataset or as rows for TRL.

The folder of a model is ready to upload: weights, tokenizer, chat template, a generation config
that samples as training did, and a card with the model's lineage. A folder of rows is one that
`datasets.load_dataset` reads.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from areal_flow.config import Recipe
from areal_flow.core.digests import file_hash
from areal_flow.core.errors import ConfigError, ModelError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import tabulate
from areal_flow.core.program import CODE_VERSION
from areal_flow.core.settings import flatten
from areal_flow.core.thinking import BEGIN
from areal_flow.log.browse import Selection, read_selected, select_trajectories, stream_rows
from areal_flow.log.directory import check_schema_version, read_parent
from areal_flow.log.inputs import read_inputs
from areal_flow.log.queries import Run
from areal_flow.policy.checkpoints import ADAPTER_FILE, MODEL_FILE, weight_files
from areal_flow.policy.tokenizer.chat import begins_reasoning
from areal_flow.policy.tokenizer.directory import stop_token_ids
from areal_flow.rollout.engines.protocol import WHOLE_DISTRIBUTION
from areal_flow.rollout.prompts.formats import hub_dataset
from areal_flow.rollout.prompts.rendering import conversation
from areal_flow.rollout.prompts.rows import question_of
from areal_flow.rollout.workflows.turns import SingleTurn
from pipelines.console.tables import write_table_file
from pipelines.jobs.built_in import write_jsonl

TrajectoryFormat = Literal["datasets", "sft", "dpo"]
CARD = "README.md"
GENERATION_CONFIG = "generation_config.json"
_TRAINING_ONLY = (ADAPTER_FILE, "optimizer.safetensors", "state.json", "MLmodel")
_NOT_IN_CARD = {"cluster", "tracking", "weights", "model"}
"""Sections of a recipe on which what a policy learns does not depend, and its model."""


def export_model(source: Path, directory: Path, *, run: RunLayout | None = None) -> None:
    """Write a checkpoint as a plain Hugging Face directory; one of a run with its card."""
    _copy_without(source, directory, *_TRAINING_ONLY)
    if (source / ADAPTER_FILE).is_file():
        from safetensors.torch import save_file

        from areal_flow.policy.models.policy import load_policy, policy_tensors

        merged = policy_tensors(load_policy(source))
        save_file(merged, directory / MODEL_FILE, metadata={"format": "pt"})
    (architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
    scores = architecture.endswith("SequenceClassification")
    if run is not None:
        if not scores:
            _write_generation_config(directory, Run(run.root).recipe)
        task = "text-classification" if scores else "text-generation"
        card = model_card(run, source, directory, library="transformers", task=task)
        (directory / CARD).write_text(card)
    print(f"Exported {source} to {directory}. Load it with:")
    kind = "SequenceClassification" if scores else "CausalLM"
    print(f"  transformers.AutoModelFor{kind}.from_pretrained({str(directory)!r})")


def export_adapter(source: Path, directory: Path, *, run: RunLayout | None = None) -> None:
    """Write a checkpoint's adapter in PEFT's format, with the path of its base model."""
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
    if run is not None:
        card = model_card(run, source, directory, library="peft", task="text-generation")
        (directory / CARD).write_text(card)
    print(f"Exported the adapter of {source} to {directory}. Load it with:")
    print(f"  base = transformers.AutoModelForCausalLM.from_pretrained({str(base)!r})")
    print(f"  peft.PeftModel.from_pretrained(base, {str(directory)!r})")


def _copy_without(source: Path, directory: Path, *names: str) -> None:
    _check_new(directory)
    shutil.copytree(
        source,
        directory,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(*names),
        copy_function=shutil.copyfile,  # safetensors writes files that their owner alone can read
    )


def _check_new(directory: Path) -> None:
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise ModelError(f"{directory} is not empty; give a new directory")


def _write_generation_config(directory: Path, recipe: Recipe) -> None:
    """Have `generate` sample by default as training did, whatever the base model's settings."""
    path, generation = directory / GENERATION_CONFIG, recipe.generation
    own = json.loads(path.read_text()) if path.is_file() else {}
    stops = dict.fromkeys([*stop_token_ids(directory), *generation.stop.token_ids])
    config = {
        **{name: value for name, value in own.items() if name not in WHOLE_DISTRIBUTION},
        "do_sample": True,
        "temperature": generation.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": generation.max_new_tokens,
        "eos_token_id": [*stops],
    }
    path.write_text(json.dumps(config, indent=2) + "\n")


def model_card(layout: RunLayout, source: Path, directory: Path, *, library: str, task: str) -> str:
    """Return the card of a run's model: what trained it, on what, and how to verify it.

    Args:
        layout: the run.
        source: the checkpoint.
        directory: its exported files, whose hashes the card has.
        library: that loads it: transformers or peft.
        task: the hub's name of what it does.
    """
    run = Run(layout.root)
    recipe = run.recipe
    is_policy = source.parent == layout.checkpoints
    version = int(source.name) if is_policy else None
    base = recipe.model if _is_hub_name(recipe.model) else ""
    algorithm = recipe.algorithm.name if version else recipe.sft.objective
    front = {
        **({"base_model": base} if base else {}),
        "library_name": library,
        "pipeline_tag": task,
        "tags": ["areal-flow", "reinforcement-learning", algorithm.replace("_", "-")],
    }
    parts = [f"# {layout.name}", _summary(recipe, version=version, base=base)]
    if version is not None:
        parts += ["## Held-out pass rates", _pass_rates(run, version)]
    parts += ["## Data", _data(layout, recipe), "## Settings that differ from the defaults"]
    parts.append(_bullets(f"`{name}`: `{value!r}`" for name, value in _chosen_settings(recipe)))
    parts += ["## Lineage", _lineage(run, version), "## Verify it"]
    parts.append(_how_to_verify(run, version, directory))
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n" + "\n\n".join(parts) + "\n"


def _is_hub_name(model: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not Path(model).exists()


def _summary(recipe: Recipe, *, version: int | None, base: str) -> str:
    model = f"`{base}`" if base else f"The model `{Path(recipe.model).name}`"
    if version is None:
        how = f"fine-tuning (`{recipe.sft.objective}`, {recipe.sft.num_steps} steps)"
        return f"{model} after supervised {how}, by {CODE_VERSION}."
    rewards = " + ".join(f"{each.weight:g} x `{each.verifier}`" for each in recipe.rewards)
    return (
        f"{model} after {version} steps of `{recipe.algorithm.name}`, "
        f"{recipe.controller.batch_size} completions a step in groups of "
        f"{recipe.controller.group_size}, at most {recipe.controller.max_staleness} versions old. "
        f"Reward: {rewards or 'of the agent'}. By {CODE_VERSION}."
    )


def _pass_rates(run: Run, version: int) -> str:
    if not run.layout.evaluations.exists():
        return "No held-out prompts were answered."
    where = f"policy_version = {version}"
    rows = run.evaluations("arrow", where=where).to_pylist()
    if not rows:
        return f"No held-out prompts were answered by version {version}."
    newest = max(rows, key=itemgetter("evaluated_at"))["evaluation"]
    rows = [row for row in rows if row["evaluation"] == newest]
    by_set = tabulate(rows, threshold=run.pass_threshold).by_set
    lines = ["| set | pass rate | 95% interval | prompts | samples each |", "|---|---|---|---|---|"]
    for name, scores in by_set.items():
        rate = scores.passed
        interval = f"{rate.low:.3f} to {rate.high:.3f}"
        cells = (name, f"{rate.pass_rate:.3f}", interval, rate.n, scores.num_samples)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    recipe = run.recipe
    sampling = {"temperature": recipe.generation.temperature, **recipe.evaluation.sampling()}
    shown = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    return "\n".join([*lines, "", f"Sampled with {shown}."])


def _data(layout: RunLayout, recipe: Recipe) -> str:
    """List the files that a run was prepared from, with their hashes, without their folders."""
    if not layout.inputs.is_file():
        return "Not recorded."
    inputs = read_inputs(layout)
    lines = [
        f"`{Path(path).name}`, SHA-256 `{content}…`" for path, content in inputs.sources.items()
    ]
    named = (recipe.prompts, *recipe.sources, *recipe.evaluation.held_out, recipe.sft)
    paths = [
        p for each in named for k in ("path", "held_out_path") if (p := getattr(each, k, None))
    ]
    lines += [f"`{path}` of the Hugging Face hub" for path in paths if hub_dataset(path)]
    sources = {recipe.prompts.source, *(each.source for each in recipe.sources)} - {"file"}
    lines += [f"`prompts.source = {source!r}`" for source in sorted(sources if not paths else ())]
    tables = (layout.train_prompts, layout.held_out_prompts)
    names = [path.relative_to(layout.root).as_posix() for path in tables]
    lines += [f"the run's `{n}`: `{inputs.files[n]}…`" for n in names if n in inputs.files]
    return _bullets(lines)


def _chosen_settings(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    chosen = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_IN_CARD)
    for name, value in flatten(chosen).items():
        if name.rpartition(".")[2] not in ("path", "held_out_path"):
            yield name, _without_folders(value)


def _without_folders(value: Any) -> Any:
    """Return a setting without the folders of this machine."""
    match value:
        case Mapping():
            return {name: _without_folders(each) for name, each in value.items()}
        case list() | tuple():
            return [*map(_without_folders, value)]
        case str() if value.startswith("/"):
            return Path(value).name
        case _:
            return value


def _lineage(run: Run, version: int | None) -> str:
    lines = [f"run `{run.layout.name}` (`{check_schema_version(run.layout)}`)"]
    if version is not None:
        chain = run.lineage(version).chain
        lines += [
            f"step {version}, weights hash `{chain['weights_hash']}`",
            f"of version 0 with weights hash `{chain['genesis_hash']}`",
        ]
    if parent := read_parent(run.layout):
        lines.append(
            f"forked from step {parent.step} of run `{parent.name}`, weights hash "
            f"`{parent.weights_hash}`"
        )
    return _bullets(lines)


def _how_to_verify(run: Run, version: int | None, directory: Path) -> str:
    files = sorted(directory.glob("*.safetensors"))
    lines = [f"`sha256sum {path.name}` begins with `{file_hash(path)}`" for path in files]
    if version is not None:
        at = f"{run.layout.name}@{version}"
        lines += [
            f"with the run's directory, `areal-flow lineage {at}` compares the weights hashes and "
            f"lists every trajectory; `areal-flow replay {at}` computes the step again",
        ]
    return _bullets(lines)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "None."


def export_trajectories(
    run: Run, directory: Path, *, form: TrajectoryFormat = "datasets", where: str | None = None
) -> None:
    """Write trajectories of a run as a folder for `datasets.load_dataset`.

    Args:
        run: the run.
        directory: a new folder.
        form: `datasets`: every column, as `Run.trajectories(text=True)`; `sft`: prompt and
            completion of those that passed; `dpo`: prompt, and the best and the worst completion
            of each group whose rewards differ.
        where: a condition over the columns of `datasets`.
    """
    _check_new(directory)
    data = directory / "data"
    if form == "datasets":
        identifiers, _ = select_trajectories(run, Selection(where))
        with closing(run.database()) as database:
            schema = read_selected(database, []).schema
            rows = stream_rows(database, identifiers)
            data.mkdir(parents=True, exist_ok=True)
            num_rows = write_table_file(data / "train.parquet", rows, schema)
    else:
        made = [*_trl_rows(run, form, where)]
        if not made:
            chosen = "passed" if form == "sft" else "are in a group of different rewards"
            raise RunError(
                f"run {run.layout.name} has no trajectories to export as {form}: expected some "
                f"that {chosen}{f' and satisfy {where!r}' if where else ''}"
            )
        num_rows = len(made)
        write_jsonl(data / "train.jsonl", made)
    (directory / CARD).write_text(_data_card(run, form, where, num_rows))
    print(f"Exported {num_rows} rows to {directory}. Load them with:")
    print(f"  datasets.load_dataset({str(directory)!r}, split='train')")


def _trl_rows(run: Run, form: TrajectoryFormat, where: str | None) -> Iterator[dict[str, Any]]:
    recipe = run.recipe
    if not isinstance(recipe.workflow, SingleTurn):
        raise ConfigError(
            f"--format {form}: expected a run whose workflow is single_turn, found "
            f"{recipe.workflow.name}: its trajectories hold text that the policy did not write, "
            "which TRL would train on. Take --format datasets, whose loss_mask tells them apart"
        )
    columns = ["group_id", "source", "prompt_id", "prompt", "completion", "reward", "passed"]
    table = run.trajectories("arrow", columns=[*columns, "trajectory_id"], where=where, text=True)
    scored = (row for row in table.to_pylist() if row["reward"] is not None)
    rows = [row for row in scored if row["completion"] is not None]  # its tokens were not dropped
    rows.sort(key=itemgetter("trajectory_id"))
    prompts = _conversations(run, {(row["source"], row["prompt_id"]) for row in rows})

    def prompt(row: Mapping[str, Any]) -> Any:
        return prompts.get((row["source"], row["prompt_id"]), row["prompt"])

    def completion(row: Mapping[str, Any]) -> Any:
        if not recipe.prompts.chat_template:
            return row["completion"]
        thought = f"{BEGIN}\n" if begins_reasoning(row["prompt"]) else ""
        return [{"role": "assistant", "content": thought + row["completion"]}]

    if form == "sft":
        passed = (row for row in rows if row["passed"])
        yield from ({"prompt": prompt(row), "completion": completion(row)} for row in passed)
        return
    for _, members in groupby(rows, key=itemgetter("group_id")):
        group = [*members]
        best, worst = (choose(group, key=itemgetter("reward")) for choose in (max, min))
        if best["reward"] > worst["reward"] and best["completion"] != worst["completion"]:
            chosen, rejected = completion(best), completion(worst)
            yield {"prompt": prompt(best), "chosen": chosen, "rejected": rejected}


def _conversations(run: Run, keys: set[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Return the messages of prompts, by source and id; none where prompts are text."""
    plan = run.recipe.prompt_plan()
    if not plan.rows.prompts.chat_template:
        return {}
    table = run.prompts().select(["source", "prompt_id", "metadata"])
    messages = {}
    for row in table.to_pylist():
        if (key := (row["source"], row["prompt_id"])) in keys:
            settings = plan.rows_of(row["source"]).prompts
            question = question_of(json.loads(row["metadata"]), settings)
            messages[key] = conversation(question, settings)
    return messages


def _data_card(run: Run, form: TrajectoryFormat, where: str | None, num_rows: int) -> str:
    file = "data/train.parquet" if form == "datasets" else "data/train.jsonl"
    front = {
        "tags": ["areal-flow", "reinforcement-learning"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": file}]}],
    }
    meanings = {
        "datasets": "One row each, with tokens, log-probabilities, rewards and policy versions.",
        "sft": "Prompt and completion of those that passed, for TRL's `SFTTrainer`.",
        "dpo": "The best and the worst completion of each group, for TRL's `DPOTrainer`.",
    }
    lines = [
        f"run `{run.layout.name}` (`{check_schema_version(run.layout)}`)",
        f"model `{Path(run.recipe.model).name}`, {CODE_VERSION}",
        f"{num_rows} rows" + (f" where `{where}`" if where else ""),
    ]
    parts = [f"# Trajectories of {run.layout.name}", meanings[form], _bullets(lines)]
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n" + "\n\n".join(parts) + "\n"
