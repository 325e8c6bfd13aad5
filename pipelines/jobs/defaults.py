"""Plain defaults: the settings of a run that is given a model or rows, and no recipe.

What is measured, `ModelFacts` and `RowFacts`, and what follows from it, are separate: the latter
are pure functions. Each setting is printed with its reason and recorded as a value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import gpus_here
from areal_flow.core.settings import nest
from areal_flow.core.thinking import BEGIN
from areal_flow.policy.checkpoints import MODEL_FILE, weight_files
from areal_flow.policy.tokenizer.directory import chat_template_of, prompt_tokens, tokenizer_of
from areal_flow.rollout.prompts.completions import RowEncoder
from areal_flow.rollout.prompts.files import read_prompts
from areal_flow.rollout.prompts.formats import read_rows
from areal_flow.rollout.prompts.rendering import Render, renderer, why_chat_template
from areal_flow.rollout.prompts.rows import Row, question_of
from areal_flow.rollout.prompts.settings import PromptSettings
from areal_flow.training.supervised import OBJECTIVES

NUM_MEASURED = 1000
"""Rows of each file whose lengths are measured."""
MARGIN = 1.25
"""Room for later rows, relative to the longest measured one."""
UNKNOWN_PROMPT_TOKENS = 512
CPU_SEQUENCES = 32
TURNS = 4
"""Completions for which a workflow of several turns has room."""
TINY, SMALL = 20e6, 300e6
"""Parameters below which a model is tiny, made to be trained from scratch, or small."""
RATES = {"tiny": 3e-4, "small": 1e-5, "large": 1e-6}
SFT_RATES = {
    "cross_entropy": {"tiny": 1e-3, "small": 1e-4, "large": 1e-5},
    "dpo": {"tiny": 5e-5, "small": 5e-6, "large": 5e-7},
    "reward_model": {"tiny": 1e-4, "small": 1e-4, "large": 1e-5},
}
LORA_FACTOR = 10
BYTES_PER_WEIGHT = 16
"""Of weights, gradients and AdamW's moments, in float32."""
LORA_BYTES_PER_WEIGHT = 6
TOKEN_BYTES = {"keep": 96, "recompute": 10}
"""A token's activations by `trainer.activations`, for each number of its hidden states in all
layers: at most, by the memory planner. Compiled layers that keep them took 50 on an H200."""
HEAD_SHARE = 1 / 16
"""Of a GPU's memory, at least a GiB of it: a chunk of the head at its peak."""
FREE_SHARE = 0.9
"""Of a GPU's memory, without fragmentation and CUDA's context."""
MAX_MICRO_BATCH = 16_384
"""Tokens for which an H100 computes longer than Python takes to start its kernels."""
GIB = 2**30


class Choice(NamedTuple):
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    num_parameters: int
    max_tokens: int
    """Its context, as far as this machine's memory holds it."""
    has_chat_template: bool = False
    thinks: bool = False
    num_hidden: int = 0
    """Numbers in a token's hidden states of all layers; 0: unknown."""

    @property
    def size(self) -> str:
        number = self.num_parameters
        return "tiny" if number < TINY else "small" if number < SMALL else "large"

    def __str__(self) -> str:
        number = self.num_parameters
        return f"{number / 1e9:.2g}B" if number >= 1e8 else f"{number / 1e6:.2g}M"


@dataclass(frozen=True, slots=True)
class RowFacts:
    num_rows: int = 0
    longest_tokens: int = 0
    """Of the prompts measured, or of rows to imitate or compare; 0: none were."""

    @property
    def room(self) -> int:
        return _rounded(MARGIN * self.longest_tokens + 16, 64) if self.longest_tokens else 0


def batch_sizes(given: Mapping[str, Any], *, num_groups: int = 16, size: int = 8) -> dict[str, int]:
    """Return batch and group size; where one is given, the other one fits it."""
    batch, group = given.get("controller.batch_size"), given.get("controller.group_size")
    if group is None:
        group = size
        if isinstance(batch, int) and batch > 0:
            group = max(each for each in range(1, size + 1) if batch % each == 0)
    if batch is None:
        batch = num_groups * group if isinstance(group, int) else num_groups * size
    return {"controller.batch_size": batch, "controller.group_size": group}


def training_settings(
    model: ModelFacts, rows: RowFacts, recipe: Recipe, given: Collection[str], *, gpu_bytes: int
) -> dict[str, Choice]:
    """Return the settings of reinforcement learning that are not given.

    Args:
        recipe: with what is given.
        gpu_bytes: memory of a GPU; 0: unknown, or no GPU.
    """
    on_gpu, is_tiny = recipe.generation.device == "cuda", model.size == "tiny"
    where = "" if on_gpu or is_tiny else " on a CPU"
    num_held_out = 256 if on_gpu else 32 if model.size == "small" else 16
    chosen = {"trainer.learning_rate": _learning_rate(model, recipe)}
    num_groups, size = (16, 8) if on_gpu or is_tiny else (4, 8) if model.size == "small" else (4, 4)
    controller = {f"controller.{name}": value for name, value in recipe.controller}
    of_user = {name: value for name, value in controller.items() if name in given}
    for name, value in batch_sizes(of_user, num_groups=num_groups, size=size).items():
        chosen[name] = Choice(value, f"a {model.size} model{where}")
    if not is_tiny:
        chosen["prompts.num_held_out"] = Choice(num_held_out, f"answered before training{where}")
    if where:
        chosen["generation.max_num_seqs"] = Choice(CPU_SEQUENCES, "a CPU decodes few at once")
    chosen |= _lengths(model, rows, recipe, given)
    length = _value("generation.max_model_len", chosen, recipe, given)
    fits = Choice(length, "one sequence must fit, more are packed")
    chosen |= _memory(model, recipe, given, fits, gpu_bytes=gpu_bytes)
    return {name: choice for name, choice in chosen.items() if name not in given}


def _learning_rate(model: ModelFacts, recipe: Recipe) -> Choice:
    rate = RATES[model.size]
    if recipe.trainer.lora.rank:
        return Choice(rate * LORA_FACTOR, f"an adapter of a model of {model} parameters")
    return Choice(rate, f"all {model} parameters are trained")


def _lengths(
    model: ModelFacts, rows: RowFacts, recipe: Recipe, given: Collection[str]
) -> dict[str, Choice]:
    generation, trainer = recipe.generation, recipe.trainer
    context, of = model.max_tokens, "the model's context"
    if "trainer.tokens_per_micro_batch" in given and trainer.tokens_per_micro_batch < context:
        context, of = trainer.tokens_per_micro_batch, "trainer.tokens_per_micro_batch"
    if "generation.max_model_len" in given and generation.max_model_len:
        context, of = generation.max_model_len, "generation.max_model_len"
    room = rows.room or min(UNKNOWN_PROMPT_TOKENS, context // 2)
    if model.size == "tiny":
        target, why = 64, "a tiny model"
    elif generation.device != "cuda":
        target, why = 256 if model.size == "small" else 128, f"a {model.size} model on a CPU"
    elif model.thinks:
        target, why = 4096, "a model that thinks first"
    else:
        target, why = 1024, "a model that answers at once"
    left = max(context - room, context // 4, 1)
    new = min(target, left)
    if "generation.max_new_tokens" in given:
        new = generation.max_new_tokens
    prompts = "rows are not measured"
    if rows.longest_tokens:
        prompts = f"the longest prompt of the first rows has {rows.longest_tokens} tokens"
    turns = 1 if recipe.workflow.name == "single_turn" else TURNS
    length = min(context, room + turns * new)
    return {
        "generation.max_new_tokens": Choice(
            new, why if new == target else f"{of} ({context}) less room for prompts"
        ),
        "generation.max_model_len": Choice(
            length,
            of if length == context else prompts,
        ),
    }


def _memory(
    model: ModelFacts,
    recipe: Recipe,
    given: Collection[str],
    longest: Choice,
    *,
    gpu_bytes: int,
) -> dict[str, Choice]:
    """Return settings by which trainer and generator fit a GPU and use it.

    Args:
        longest: the tokens that a micro-batch must hold.
    """
    tokens = "trainer.tokens_per_micro_batch"
    chosen = {tokens: longest._replace(value=max(4096, longest.value))}
    trainer_bytes = gpu_bytes
    if recipe.trainer.device != "cuda":
        return chosen
    if recipe.shares_gpu and gpu_bytes:
        needed = 2 * model.num_parameters + 3.5 * GIB
        share = min(0.6, max(0.2, ceil(20 * needed / gpu_bytes) / 20))
        if recipe.generation.vllm.gpu_memory_utilization != 0.9:  # vLLM generates
            chosen["generation.vllm.gpu_memory_utilization"] = Choice(
                share, f"{needed / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB; the trainer has the rest"
            )
        trainer_bytes = int(gpu_bytes * (1 - share))
    states = training_bytes(model, recipe)
    if trainer_bytes < 3 * states or not gpu_bytes:
        reason = f"weights, gradients and moments take {states / GIB:.1f} GiB"
        if 0 < trainer_bytes < states:
            reason += f" of {trainer_bytes / GIB:.1f}: --trainer.lora.rank 16 trains an adapter"
        chosen["trainer.activations"] = Choice("recompute", reason)
        chosen[tokens] = longest._replace(value=max(2048, longest.value))
    activations = _value("trainer.activations", chosen, recipe, given)
    per_token = TOKEN_BYTES.get(activations, TOKEN_BYTES["keep"]) * model.num_hidden
    head_bytes = max(GIB, int(HEAD_SHARE * gpu_bytes))
    free_bytes = int(FREE_SHARE * trainer_bytes) - states - head_bytes
    if per_token and free_bytes > 0:
        power = 1 << ((free_bytes // per_token).bit_length() - 1)
        room = Choice(min(power, MAX_MICRO_BATCH), f"activations have {free_bytes / GIB:.0f} GiB")
        chosen[tokens] = max(chosen[tokens], room, key=lambda choice: choice.value)
    return chosen


def training_bytes(model: ModelFacts, recipe: Recipe) -> int:
    per_weight = LORA_BYTES_PER_WEIGHT if recipe.trainer.lora.rank else BYTES_PER_WEIGHT
    return per_weight * model.num_parameters // recipe.cluster.num_trainers


def supervised_settings(
    model: ModelFacts, rows: RowFacts, recipe: Recipe, given: Collection[str], *, gpu_bytes: int
) -> dict[str, Choice]:
    """Return the settings of fine-tuning, preferences or a reward model that are not given."""
    sft, is_slow = recipe.sft, recipe.trainer.device == "cpu" and model.size != "tiny"
    objective = sft.objective
    batch_size = sft.batch_size
    if "sft.batch_size" not in given:
        largest = (64 if objective == "cross_entropy" else 32) // (4 if is_slow else 1)
        batch_size = min(largest, max(1, rows.num_rows // 4))
    epochs = 3 if objective == "cross_entropy" else 1
    num_steps = max(1, ceil(epochs * (rows.num_rows - sft.num_held_out) / batch_size))
    of_steps = sft.num_steps if "sft.num_steps" in given else num_steps
    on = " on a CPU" if is_slow else ""
    chosen = {
        "sft.learning_rate": Choice(
            SFT_RATES[objective][model.size], f"{objective} of all {model} parameters"
        ),
        "sft.batch_size": Choice(batch_size, f"{rows.num_rows} rows{on}"),
        "sft.num_steps": Choice(
            num_steps, f"{epochs} epoch{'s' * (epochs > 1)} of {rows.num_rows} rows"
        ),
        "sft.num_warmup_steps": Choice(min(30, of_steps // 10), "a tenth of the steps, at most 30"),
    }
    longest = Choice(rows.room, f"the longest of the first rows has {rows.longest_tokens} tokens")
    if model.size == "tiny":
        chosen["generation.max_model_len"] = longest._replace(value=max(128, rows.room))
    chosen |= _memory(model, recipe, given, longest, gpu_bytes=gpu_bytes)
    of_training = ("sft.", "trainer.", "generation.max_model_len")
    return {n: c for n, c in chosen.items() if n not in given and n.startswith(of_training)}


def _value(name: str, chosen: Mapping[str, Choice], recipe: Recipe, given: Collection[str]) -> Any:
    section, _, setting = name.partition(".")
    is_chosen = name in chosen and name not in given
    return chosen[name].value if is_chosen else getattr(getattr(recipe, section), setting)


def _rounded(number: float, step: int) -> int:
    return step * ceil(number / step)


def with_choices(recipe: Recipe, choices: Mapping[str, Choice]) -> Recipe:
    values = nest({name: choice.value for name, choice in choices.items()})
    table = recipe.model_dump(mode="json", exclude_none=True)
    return build_recipe(table, values, source="the defaults for this model and these rows")


def describe_choices(
    model: ModelFacts, choices: Mapping[str, Choice], given: Collection[str]
) -> list[str]:
    """Return a block of lines to print."""
    lines = [f"  Chosen for this model ({model} parameters) and these rows; options override it:"]
    if "model" not in given:
        lines.insert(0, "  model = 'tiny', of random weights: --model NAME trains another one")
    values = [f"{name} = {_shown(choice.value)}" for name, choice in choices.items()]
    width = max(map(len, values), default=0)
    reasons = (choice.reason for choice in choices.values())
    return lines + [
        f"    {value:{width}}  {reason}" for value, reason in zip(values, reasons, strict=True)
    ]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def model_facts(weights: Path, description: Path, *, max_tokens: int) -> ModelFacts:
    """Return the facts of a model.

    Args:
        weights: its directory.
        description: the directory of its configuration and tokenizer.
        max_tokens: its context.
    """
    chat = chat_template_of(description)
    config = json.loads((description / "config.json").read_text())
    shape = {**config, **config.get("text_config", {})}
    return ModelFacts(
        num_parameters(weights) or parameters_of(config),
        max_tokens,
        has_chat_template=chat is not None,
        thinks=chat is not None and BEGIN in chat.source,
        num_hidden=shape.get("hidden_size", 0) * shape.get("num_hidden_layers", 0),
    )


def num_parameters(directory: Path) -> int:
    """Return the number of weights, by the headers of their files; 0: there are none."""
    files = weight_files(directory) if (directory / MODEL_FILE).is_file() else []
    files = files or [*directory.glob("*.safetensors")]
    return sum(prod(shape) for file in files for shape in _shapes_in(file))


def _shapes_in(file: Path) -> Iterator[list[int]]:
    with file.open("rb") as content:
        num_bytes = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(num_bytes))
    return (entry["shape"] for name, entry in header.items() if name != "__metadata__")


def parameters_of(config: Mapping[str, Any]) -> int:
    """Estimate the number of weights of a decoder from its configuration."""
    shape = {**config, **config.get("text_config", {})}
    width, num_heads = shape["hidden_size"], shape["num_attention_heads"]
    head_width = shape.get("head_dim") or width // num_heads
    num_key_heads = shape.get("num_key_value_heads") or num_heads
    attention = 2 * width * head_width * (num_heads + num_key_heads)
    mlp = 3 * width * shape.get("intermediate_size", 4 * width)
    embedding = shape["vocab_size"] * width * (1 if shape.get("tie_word_embeddings") else 2)
    return int(embedding + shape["num_hidden_layers"] * (attention + mlp))


def prompt_facts(recipe: Recipe, layout: RunLayout) -> RowFacts:
    """Measure the first prompts of each file, rendered as the policy will read them."""
    plan, tokenizer, longest = recipe.prompt_plan(), tokenizer_of(layout.model), 0
    for path, rows in plan.files():
        settings = rows.prompts
        render = renderer(plan, settings, layout.model, functions=layout.rewards)

        def length(row: Row, render: Render = render, settings: PromptSettings = settings) -> int:
            return len(prompt_tokens(tokenizer, render(question_of(row, settings))))

        lengths = islice(read_prompts(path, length, on_bad=_ignore), NUM_MEASURED)
        longest = max(longest, *lengths, 0)
    return RowFacts(longest_tokens=longest)


def completion_facts(recipe: Recipe, model: Path, encoder: RowEncoder) -> RowFacts:
    """Measure the first rows of supervised fine-tuning."""
    path, fields = recipe.sft.path, OBJECTIVES[recipe.sft.objective].fields
    assert path is not None

    def length(row: Row) -> int:
        prompt, completions = encoder.encode(row, fields)
        return sum(len(prompt) + sum(map(len, turns)) for turns in completions)

    lengths = islice(read_prompts(path, length, on_bad=_ignore), NUM_MEASURED)
    return RowFacts(sum(1 for _ in read_rows(path)), max(lengths, default=0))


def _ignore(place: object, error: object) -> None:
    """Leave a bad row to the preparation, which refuses or skips it."""


def chat_template_choice(recipe: Recipe, model: Path) -> dict[str, Choice]:
    """Return the choice of the model's chat template, if it has one or if prompts need it."""
    if recipe.prompts.chat_template is not None:
        return {}
    if why := why_chat_template(recipe.prompt_plan()):
        return {"prompts.chat_template": Choice(True, why)}
    if chat_template_of(model) is None:
        return {}
    return {"prompts.chat_template": Choice(True, "the model has one; false: plain text")}


def smallest_gpu_bytes(recipe: Recipe) -> int:
    """Return the memory of a GPU here; 0: unknown, or GPUs of other machines."""
    gpus = gpus_here().usable if recipe.cluster.launcher == "local" else ()
    return min((gpu.num_bytes for gpu in gpus), default=0)
