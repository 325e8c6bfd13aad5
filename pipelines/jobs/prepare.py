"""Prepare a training run before its first process starts: model, prompts, rows, inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from areal_flow.config import Recipe, build_recipe, dump_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import usable_bytes
from areal_flow.log.directory import read_parent
from areal_flow.log.inputs import record_inputs
from areal_flow.log.queries import record_pass_rates
from areal_flow.log.run_log import create_logs
from areal_flow.policy.tokenizer.auto_tokenizer import NUM_COMPARED, warn_of_other_tokens
from areal_flow.rollout.engines.pages import CACHE_SHARE, cached_numbers
from areal_flow.rollout.engines.registry import choose_engine, require_served
from areal_flow.rollout.prompts.prepare import (
    Prepared,
    check_first_rows,
    chosen_fields,
    prepare_prompts,
)
from areal_flow.rollout.prompts.rendering import unused_chat_template, why_chat_template
from areal_flow.rollout.prompts.settings import PromptSettings
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.rollout.workflows.registry import load_workflow
from areal_flow.training.supervised import OBJECTIVES
from pipelines.console.tables import printable
from pipelines.jobs.built_in import (
    MODELS,
    changed,
    initial_model,
    prepare_model,
    reference_model,
    with_files,
)
from pipelines.jobs.defaults import (
    CPU_SEQUENCES,
    Choice,
    chat_template_choice,
    describe_choices,
    model_facts,
    prompt_facts,
    smallest_gpu_bytes,
    training_settings,
    with_choices,
)
from pipelines.jobs.preflight import found_verifier, try_verifiers, try_workflow
from pipelines.jobs.sft import check_first_sft_rows, prepare_sft

MIN_TOKENS_IN_MEMORY = 128
"""The context length is not chosen lower than this for lack of memory."""
TINY_MODEL_LEN = UNKNOWN_MODEL_LEN = 4096
"""The longest context that is chosen for a tiny model, or for one that states none."""
_SHOWN_BAD_ROWS = 5
_SHOWN_CHARACTERS = 1000
"""From the start and from the end of the first prompt."""


def prepare_training(
    layout: RunLayout, recipe: Recipe, given: Collection[str] | None = None
) -> str:
    prepared = [prepare_run(layout, recipe, given), *describe_parent(layout)]
    tried = [*try_verifiers(layout, recipe), *try_workflow(layout, recipe)]
    return "\n".join([*prepared, *tried])


def prepare_run(
    layout: RunLayout, recipe: Recipe, given_names: Collection[str] | None = None
) -> str:
    """Write a new run's model, prompts, rows and inputs; return a summary to print.

    Args:
        given_names: settings that stay; other ones follow the model and the rows. None: all stay.
    """
    if recipe.sft.num_steps and OBJECTIVES[recipe.sft.objective].makes_reward_model:
        raise ConfigError(
            "sft.objective = 'reward_model' makes no policy to train: run `areal-flow "
            "reward-model` by itself, and set it to 'cross_entropy' or 'dpo'"
        )
    verifier = found_verifier(layout, recipe)
    load_workflow(recipe.workflow, layout.rewards)
    check_first_rows(with_fields(recipe, recipe)[0].prompt_plan(), layout.rewards)
    check_first_sft_rows(recipe)
    prepare_model(recipe, layout)
    files, notes = with_files(recipe, layout), list[str]()
    recipe, fields = with_fields(recipe, files)
    files, _ = with_fields(files, files)
    if given_names is not None:
        choices, notes = choose_settings(files, layout, given_names)
        recipe, files = (with_choices(each, choices) for each in (recipe, files))
        if recipe.model in MODELS:  # with the context that was chosen
            prepare_model(recipe, layout)
    recipe, engine = with_engine(recipe)
    recipe, length = with_context_length(recipe, layout.model)
    reference = reference_model(recipe, layout)
    require_served(recipe.generation, layout.model)
    given, recipe = recipe, files.model_copy(update={"generation": recipe.generation})
    notes += [f"  {length}"] if length and recipe.model not in MODELS else []
    notes += [f"  {engine}"] if engine else []
    notes += [f"  {note}" for note in fields]
    if why := why_chat_template(recipe.prompt_plan()):
        recipe, given = (changed(each, "prompts", chat_template=True) for each in (recipe, given))
        notes.append(f"  prompts.chat_template = true, since {why}")
    elif unused := unused_chat_template(recipe.prompts, layout.model):
        notes.append(f"  {unused}")
    if earlier := recipe.prompts.difficulty.run:
        record_pass_rates(layout, earlier)
    prepared = prepare_prompts(recipe.prompt_plan(), layout)
    if recipe.has_held_out and not prepared.num_held_out:
        given = changed(given, "prompts", num_held_out=0)
        notes.append("  No prompt is held out: there will be no evaluation")
    layout.config.write_text(dump_recipe(given))
    first = PromptTable(layout.train_prompts, seed=recipe.seed).rows(NUM_COMPARED)
    texts = [prompt.text for prompt in first]
    warn_of_other_tokens(initial_model(given, layout), layout.model, texts)
    prepare_sft(layout, recipe)
    record_inputs(
        layout, given, verifier=verifier, model=initial_model(given, layout), reference=reference
    )
    create_logs(layout)
    return describe_prompts(prepared, layout, notes)


def with_fields(recipe: Recipe, fetched: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe with the fields of its rows that it leaves open, and notes about them.

    Args:
        recipe: the recipe.
        fetched: the recipe with files, after `with_files`.
    """
    notes = list[str]()

    def with_own(settings: Any, path: Path | None, shared: PromptSettings | None = None) -> Any:
        if not getattr(settings, "source", "file").startswith(("file", "datasets:")):
            return settings  # made rows have the usual fields
        chosen, note = chosen_fields(path, settings, shared)
        notes.extend([note] if note else [])
        return settings.model_copy(update=chosen)

    paths = [each.path for each in fetched.sources]
    prompts = with_own(recipe.prompts, next(iter(paths), fetched.prompts.path))
    sources = zip(recipe.sources, paths, strict=True)
    sets = zip(recipe.evaluation.held_out, fetched.evaluation.held_out, strict=True)
    held_out = tuple(with_own(each, of_file.path, prompts) for each, of_file in sets)
    update = {
        "prompts": prompts,
        "sources": tuple(with_own(each, path, prompts) for each, path in sources),
        "evaluation": recipe.evaluation.model_copy(update={"held_out": held_out}),
    }
    return recipe.model_copy(update=update), notes


def describe_prompts(prepared: Prepared, layout: RunLayout, notes: Sequence[str] = ()) -> str:
    """Describe how many prompts there are, which rows were left out, and the first prompt."""
    counts = f"{prepared.num_train} prompts to train on, {prepared.num_held_out} held out"
    lines = [counts, *notes]
    lines += [
        f"  {num_rows} of {path} may be held out, fewer than num_held_out: a fifth of its rows"
        for path, num_rows in prepared.cut_to.items()
    ]
    if prepared.num_repeated:
        lines.append(f"  {prepared.num_repeated} rows that repeat a held-out prompt are left out")
    if prepared.chosen:
        lines.append(f"  {prepared.chosen}")
    if bad_rows := prepared.bad_rows:
        lines.append(f"  {len(bad_rows)} bad rows skipped, listed in {layout.bad_rows}:")
        lines += [f"  {row}" for row in bad_rows[:_SHOWN_BAD_ROWS]]
    digest, prompt = prepared.chat_template_hash[:12], printable(prepared.first_prompt)
    by = f" by the chat template {digest} ({layout.chat_template})" if digest else ""
    if (num_left_out := len(prompt) - 2 * _SHOWN_CHARACTERS) > 0:
        ends = prompt[:_SHOWN_CHARACTERS], prompt[-_SHOWN_CHARACTERS:]
        prompt = f" … {num_left_out} characters more … ".join(ends)
    return "\n".join([*lines, f"The first prompt{by}:", indent(prompt, "  ")])


def choose_settings(
    recipe: Recipe, layout: RunLayout, given: Collection[str]
) -> tuple[dict[str, Choice], list[str]]:
    """Return the settings that follow from a run's model and rows, and lines about them.

    Args:
        recipe: with files of rows.
        given: names of settings that stay.
    """
    from transformers import AutoConfig  # slow

    choices, bounds = chat_template_choice(recipe, layout.model), {"": TINY_MODEL_LEN}
    recipe = with_choices(recipe, choices)
    if recipe.model not in MODELS:
        few = min(CPU_SEQUENCES, recipe.generation.max_num_seqs)
        in_memory = changed(recipe, "generation", max_num_seqs=few)
        config = AutoConfig.from_pretrained(layout.model).get_text_config()
        bounds = room_by_part(in_memory, config, memory_bytes=usable_bytes())
        del bounds["trainer.tokens_per_micro_batch"]
    max_tokens = min(bounds.values(), default=UNKNOWN_MODEL_LEN)
    model = model_facts(initial_model(recipe, layout), layout.model, max_tokens=max_tokens)
    rows, gpu_bytes = prompt_facts(recipe, layout), smallest_gpu_bytes(recipe)
    choices |= training_settings(model, rows, recipe, given, gpu_bytes=gpu_bytes)
    return choices, describe_choices(model, choices, given)


def with_engine(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with its engine by name, which a resume keeps, and a note for GPUs."""
    settings = recipe.generation
    chosen = choose_engine(settings)
    named = settings.model_copy(update={"engine": chosen.name})
    recipe = recipe.model_copy(update={"generation": named})
    if settings.device != "cuda" or settings.engine == "vllm":
        return recipe, ""
    note = "" if chosen.name == "vllm" else ", the CPU's and the reference, which is slow on a GPU"
    return recipe, f"generation.engine = {chosen.name!r}{note}: {chosen.reason}"


def with_context_length(recipe: Recipe, model: Path) -> tuple[Recipe, str]:
    """Return the recipe with `generation.max_model_len`, and a note if it was chosen here."""
    if recipe.generation.max_model_len:
        return recipe, ""
    from transformers import AutoConfig  # slow

    config = AutoConfig.from_pretrained(model).get_text_config()
    bounds = room_by_part(recipe, config, memory_bytes=usable_bytes())
    part, length = min(bounds.items(), key=lambda bound: bound[1])
    source = f"generation.max_model_len = {length}, which is what {part} has room for"
    return build_recipe(
        recipe.model_dump(mode="json", exclude_none=True),
        {"generation": {"max_model_len": length}},
        source=source,
        spelling=f"{{}} ({part})",
    ), source


def room_by_part(recipe: Recipe, config: Any, *, memory_bytes: int) -> dict[str, int]:
    """Return how many tokens of one sequence each part of a run has room for.

    The memory of GPUs is not considered: vLLM's cache need not hold all sequences at full length.
    """
    generation = recipe.generation
    rooms = {"trainer.tokens_per_micro_batch": recipe.trainer.tokens_per_micro_batch}
    if longest := getattr(config, "max_position_embeddings", None):
        rooms["the model"] = longest
    if generation.kv_cache_tokens:
        rooms["generation.kv_cache_tokens"] = generation.kv_cache_tokens
    elif choose_engine(generation).name == "torch" and generation.device == "cpu":
        num_sequences = generation.max_num_seqs * max(1, recipe.cluster.num_generators)
        token_bytes = cached_numbers(config) * (2 if generation.dtype == "bfloat16" else 4)
        num_tokens = int(CACHE_SHARE * memory_bytes / token_bytes / num_sequences)
        rooms[f"memory for {num_sequences} sequences at a time"] = max(
            MIN_TOKENS_IN_MEMORY, num_tokens
        )
    return rooms


def describe_parent(layout: RunLayout) -> list[str]:
    parent = read_parent(layout)
    return [f"Forked from {parent}: its weights; optimizer {parent.optimizer}"] if parent else []
