"""Plain defaults: what follows from a model, its rows and a device where there is no recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_flow.config import Recipe, build_recipe, load_recipe
from areal_flow.core import machine
from areal_flow.core.errors import PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import Gpu, Gpus
from areal_flow.core.settings import flatten, merge, nest
from areal_flow.log.directory import create_run
from areal_flow.planning.costs import Policy, model_config
from areal_flow.planning.gpus import gpu_bytes
from areal_flow.planning.memory import plan_memory, trainer_memory
from areal_flow.rollout.engines import registry
from areal_flow.rollout.engines.vllm import support
from areal_flow.rollout.prompts.table import PromptTable
from pipelines.jobs.built_in import MODELS
from pipelines.jobs.defaults import (
    GIB,
    ModelFacts,
    RowFacts,
    num_parameters,
    parameters_of,
    supervised_settings,
    training_settings,
    with_choices,
)
from pipelines.jobs.job import chosen_recipe
from pipelines.jobs.prepare import prepare_run
from pipelines.jobs.sft import prepare_sft_run
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.unit.test_chat import CHATML, give_chat_template

TINY_ONE, SMOLLM = ModelFacts(430_000, 4096), ModelFacts(135_000_000, 8192)
QWEN = ModelFacts(494_000_000, 32_768, num_hidden=24 * 896)
QWEN_7B = ModelFacts(7_600_000_000, 131_072)
THINKING = ModelFacts(1_500_000_000, 131_072, thinks=True)
GSM8K_ROWS = RowFacts(7473, 220)
CUDA = {"trainer": {"device": "cuda"}, "generation": {"device": "cuda"}, "cluster": {"num_gpus": 1}}


@pytest.fixture(autouse=True)
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (support, registry):
        monkeypatch.setattr(module, "installed_vllm", lambda _: "0.32.0")


def chosen(
    model: ModelFacts, rows: RowFacts, table: dict[str, Any], *, gpu_bytes: int = 22 * GIB
) -> dict[str, Any]:
    recipe = chosen_recipe(None, merge({"model": "./mine"}, table))[1]
    gpu_bytes = gpu_bytes if recipe.trainer.device == "cuda" else 0
    choices = training_settings(model, rows, recipe, [*flatten(table)], gpu_bytes=gpu_bytes)
    with_choices(recipe, choices)  # it is valid
    return {name.rpartition(".")[2]: choice.value for name, choice in choices.items()}


@pytest.mark.parametrize(
    ("model", "table", "expected"),
    [
        (TINY_ONE, {}, {"learning_rate": 3e-4, "batch_size": 128, "max_new_tokens": 64}),
        (SMOLLM, {}, {"learning_rate": 1e-5, "batch_size": 32, "max_new_tokens": 256}),
        (QWEN, {}, {"learning_rate": 1e-6, "batch_size": 16, "max_new_tokens": 128}),
        (QWEN, {}, {"group_size": 4, "num_held_out": 16, "max_num_seqs": 32}),
        (QWEN, CUDA, {"batch_size": 128, "group_size": 8, "max_new_tokens": 1024}),
        (QWEN, CUDA, {"learning_rate": 1e-6, "num_held_out": 256, "max_model_len": 1344}),
        (QWEN, CUDA, {"activations": "recompute", "gpu_memory_utilization": 0.25}),
        (THINKING, CUDA, {"max_new_tokens": 4096, "tokens_per_micro_batch": 4416}),
        (SMOLLM, {"trainer": {"lora": {"rank": 8}}}, {"learning_rate": 1e-4}),
        (QWEN, {"trainer": {"lora": {"rank": 8}}}, {"learning_rate": 1e-5}),
        (QWEN, {"controller": {"group_size": 6}}, {"batch_size": 24}),
        (QWEN, {"controller": {"batch_size": 30}}, {"group_size": 3}),
        (QWEN, {"generation": {"max_new_tokens": 700}}, {"max_model_len": 1020}),
        (QWEN, {"generation": {"max_model_len": 400}}, {"max_new_tokens": 100}),
        (QWEN, {"trainer": {"tokens_per_micro_batch": 350}}, {"max_model_len": 350}),
        (QWEN, {"workflow": {"name": "multi_turn"}}, {"max_model_len": 320 + 4 * 128}),
        (ModelFacts(494_000_000, 400), CUDA, {"max_new_tokens": 100, "max_model_len": 400}),
    ],
)
def test_settings_follow_the_model_the_rows_and_the_device(
    model: ModelFacts, table: dict[str, Any], expected: dict[str, Any]
) -> None:
    values = chosen(model, GSM8K_ROWS, table)
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_large_gpu_keeps_activations_and_leaves_most_memory_to_the_trainer() -> None:
    values = chosen(QWEN, GSM8K_ROWS, CUDA, gpu_bytes=80 * GIB)
    assert "activations" not in values
    assert (values["gpu_memory_utilization"], values["tokens_per_micro_batch"]) == (0.2, 16_384)
    unknown = chosen(QWEN, GSM8K_ROWS, CUDA, gpu_bytes=0)
    assert (unknown["activations"], unknown["tokens_per_micro_batch"]) == ("recompute", 2048)


def test_model_that_is_too_large_for_a_gpu_is_advised_an_adapter() -> None:
    recipe = chosen_recipe(None, merge({"model": "./mine"}, CUDA))[1]
    choices = training_settings(QWEN_7B, GSM8K_ROWS, recipe, (), gpu_bytes=22 * GIB)
    assert choices["trainer.activations"].reason == (
        "weights, gradients and moments take 113.2 GiB of 8.8: --trainer.lora.rank 16 trains an "
        "adapter"
    )


MODEL_SIZES = st.sampled_from([430_000, 135_000_000, 494_000_000, 7_600_000_000])


@given(
    size=MODEL_SIZES,
    context=st.integers(64, 200_000),
    longest=st.integers(0, 100_000),
    thinks=st.booleans(),
    table=st.sampled_from([{}, CUDA, {"generation": {"max_new_tokens": 20}}]),
    gpu_bytes=st.sampled_from([0, 16 * GIB, 80 * GIB]),
)
@settings(max_examples=80)
def test_choices_make_a_valid_recipe_of_any_model_and_rows(
    size: int, context: int, longest: int, thinks: bool, table: dict[str, Any], gpu_bytes: int
) -> None:
    model = ModelFacts(size, context, thinks=thinks)
    values = chosen(model, RowFacts(10, longest), table, gpu_bytes=gpu_bytes)
    assert values["max_model_len"] <= context
    if longest and longest * 1.5 + 100 < context / 2:
        room = values["max_model_len"] - values.get("max_new_tokens", 20)
        assert room >= longest * 1.25, "measured prompts fit, with room for longer ones"


def test_what_is_given_stays() -> None:
    names = chosen(QWEN, GSM8K_ROWS, CUDA)
    table = nest(
        {
            "trainer.learning_rate": 0.5,
            "trainer.activations": "keep",
            "generation.max_new_tokens": 9,
            "prompts.num_held_out": 3,
            "generation.vllm.gpu_memory_utilization": 0.5,
        }
    )
    assert set(names) - set(chosen(QWEN, GSM8K_ROWS, merge(CUDA, table))) == {
        "learning_rate",
        "activations",
        "max_new_tokens",
        "num_held_out",
        "gpu_memory_utilization",
    }


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["RTX4080-16GB", "L4-24GB", "A100-40GB", "H100-80GB"])
def test_half_a_billion_parameters_fit_a_gpu_by_the_planner(gpu: str) -> None:
    """Trainer and vLLM share it, all weights are trained."""
    recipe = chosen_recipe(None, merge({"model": "Qwen2.5-0.5B"}, CUDA))[1]
    num_bytes = gpu_bytes(gpu)
    choices = training_settings(QWEN, GSM8K_ROWS, recipe, (), gpu_bytes=num_bytes)
    recipe, policy = with_choices(recipe, choices), Policy.of(model_config("Qwen2.5-0.5B"))
    ranks = trainer_memory(recipe, policy.config, device_bytes=num_bytes)
    assert plan_memory(recipe, ranks, policy.module, gpu=gpu).fits


@pytest.mark.parametrize(
    ("objective", "model", "rows", "expected"),
    [
        ("cross_entropy", SMOLLM, 1000, (1e-4, 16, 188, 18)),
        ("cross_entropy", QWEN, 1000, (1e-5, 16, 188, 18)),
        ("cross_entropy", TINY_ONE, 1000, (1e-3, 64, 47, 4)),
        ("cross_entropy", TINY_ONE, 10, (1e-3, 2, 15, 1)),
        ("cross_entropy", TINY_ONE, 100_000, (1e-3, 64, 4688, 30)),
        ("dpo", QWEN, 1000, (5e-7, 8, 125, 12)),
        ("reward_model", QWEN, 1, (1e-5, 1, 1, 0)),
    ],
)
def test_fine_tuning_goes_over_its_rows_at_a_rate_for_the_model(
    objective: str, model: ModelFacts, rows: int, expected: tuple[float, ...]
) -> None:
    table = {"sft": {"objective": objective, "path": "rows.jsonl"}}
    recipe = chosen_recipe(None, table)[1]
    choices = supervised_settings(model, RowFacts(rows, 900), recipe, (), gpu_bytes=0)
    sft, trainer = (getattr(with_choices(recipe, choices), name) for name in ("sft", "trainer"))
    assert (sft.learning_rate, sft.batch_size, sft.num_steps, sft.num_warmup_steps) == expected
    assert trainer.tokens_per_micro_batch == 4096
    assert not [name for name in choices if name.startswith("generation.") and model is QWEN]


@pytest.mark.parametrize(
    ("over", "name", "num_steps"),
    [
        ({}, "arithmetic", 60),
        ({"num_steps": 3, "trainer": {"learning_rate": 1e-5}}, "arithmetic", 3),
        ({"prompts": {"num_held_out": 3}}, "arithmetic", 60),
        ({"sft": {"num_steps": 3}}, "arithmetic", 60),
        ({"model": "models/mine"}, "mine", 90),
        ({"prompts": {"path": "rows.jsonl"}}, "plain", 90),
        ({"prompts": {"source": "datasets:openai/gsm8k"}}, "plain", 90),
        ({"sources": [{"name": "a", "path": "rows.jsonl"}]}, "plain", 90),
        ({"sft": {"path": "rows.jsonl"}}, "plain", 90),
        ({"model": "m", "controller": {"group_size": 3}}, "m", 90),
    ],
)
def test_toy_recipe_is_used_only_if_neither_a_model_nor_rows_are_named(
    over: dict[str, Any], name: str, num_steps: int
) -> None:
    recipe_name, recipe = chosen_recipe(None, over)
    assert (recipe_name, recipe.num_steps) == (name, num_steps)
    assert (recipe.generation.max_model_len == 32) == (name == "arithmetic")


def test_recipe_and_its_values_are_left_alone() -> None:
    assert chosen_recipe("smollm", {"model": "mine"})[1].trainer.learning_rate == 2e-5
    assert chosen_recipe(Recipe(num_steps=7), {"model": "mine"})[1].num_steps == 7


def chatty(directory: Path, *, max_model_len: int) -> None:
    write_tiny_model(directory, max_model_len=max_model_len)
    give_chat_template(directory, CHATML)


QUESTION = "A farmer has 12 hens and buys 30 more. How many hens has the farmer?"


def rows_file(folder: Path, **last: str) -> Path:
    rows = [{"question": f"{index}: {QUESTION}", "answer": "42"} for index in range(20)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *([last] if last else [])]))
    return path


def prepare(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: Path, **over: Any
) -> tuple[Recipe, list[str], RunLayout]:
    monkeypatch.setitem(MODELS, "chatty", chatty)
    table = merge({"model": "chatty", "prompts": {"path": str(path)}}, over)
    recipe, layout = chosen_recipe(None, table)[1], RunLayout(folder / "run")
    create_run(layout, recipe)
    lines = prepare_run(layout, recipe, [*flatten(table)]).splitlines()
    return load_recipe(layout.config), lines, layout


def test_run_without_a_recipe_records_what_was_chosen_and_prints_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, lines, layout = prepare(tmp_path, monkeypatch, rows_file(tmp_path), num_steps=3)
    assert recipe.prompts.chat_template is True
    first = PromptTable(layout.train_prompts, seed=0).row(0)
    assert "<|im_start|>user" in first.text
    generation, length = recipe.generation, len(first.tokens)
    room = generation.max_model_len - generation.max_new_tokens
    assert length * 1.25 <= room <= length * 1.25 + 96
    assert (generation.max_new_tokens, recipe.controller.batch_size, recipe.num_steps) == (
        64,
        128,
        3,
    )
    config = json.loads((layout.model / "config.json").read_text())
    assert config["max_position_embeddings"] == generation.max_model_len
    (start,) = [at for at, line in enumerate(lines) if "Chosen for this model (0.4" in line]
    block = lines[start + 1 : start + 8]
    assert [line.split()[0] for line in block[:2]] == [
        "prompts.chat_template",
        "trainer.learning_rate",
    ]
    assert block[0].endswith("true           the model has one; false: plain text")
    for line in block:
        name, _, value = line.split()[:3]
        assert flatten(recipe.model_dump())[name] == json.loads(value)


def test_text_may_be_sent_without_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {"chat_template": False}
    recipe, lines, _ = prepare(tmp_path, monkeypatch, rows_file(tmp_path), prompts=prompts)
    assert recipe.prompts.chat_template is False
    assert not [line for line in lines if "prompts.chat_template" in line]


def test_row_that_is_longer_than_what_was_measured_is_refused_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.jobs.defaults.NUM_MEASURED", 20)
    path = rows_file(tmp_path, question=QUESTION * 9, answer="1")
    with pytest.raises(PromptError, match=r"rows.jsonl, line 21: the prompt has \d+ tokens, exp"):
        prepare(tmp_path, monkeypatch, path)


def test_fine_tuning_without_a_recipe_records_what_was_chosen(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": QUESTION, "completion": "42"}
    path.write_text("".join(json.dumps(row | {"id": index}) + "\n" for index in range(40)))
    table = {"sft": {"path": str(path), "num_warmup_steps": 1}}
    recipe, layout = chosen_recipe(None, table)[1], RunLayout(tmp_path / "run")
    create_run(layout, recipe)
    lines = prepare_sft_run(layout, recipe, [*flatten(table)]).splitlines()
    recorded = load_recipe(layout.config).sft
    assert (recorded.batch_size, recorded.num_steps, recorded.num_warmup_steps) == (10, 12, 1)
    assert lines[:2] == [
        "40 rows to learn from",
        "  model = 'tiny', of random weights: --model NAME trains another one",
    ]


def test_weights_are_counted_by_headers_or_estimated_by_configuration(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for part in (1, 2):
        save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / f"{part}.safetensors")
    assert num_parameters(tmp_path) == 2 * 17
    assert num_parameters(tmp_path / "none") == 0
    for name in ("Qwen2.5-0.5B", "Qwen2.5-7B"):
        config = model_config(name)
        exact = sum(each.numel() for each in Policy.of(config).module.parameters())
        assert parameters_of(config.to_dict()) == pytest.approx(exact, rel=0.01)


def test_gpus_of_other_machines_have_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.jobs import defaults

    gpus = Gpus((Gpu("a", 80 * GIB, (9, 0)), Gpu("b", 24 * GIB, (8, 9))))
    monkeypatch.setattr(defaults, "gpus_here", lambda: gpus)
    monkeypatch.setattr(machine, "gpus_here", lambda: gpus)
    local = build_recipe({"model": "./mine"}, source="test")
    assert defaults.smallest_gpu_bytes(local) == 24 * GIB
    remote = build_recipe({"model": "./mine", "cluster": {"launcher": "slurm"}}, source="test")
    assert defaults.smallest_gpu_bytes(remote) == 0
