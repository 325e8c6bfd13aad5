"""Exports: a folder to upload with its card, and trajectories that `datasets` reads."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from huggingface_hub import ModelCard

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.digests import file_hash
from areal_flow.core.errors import ConfigError, ModelError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import (
    Completion,
    EngineStats,
    Episode,
    GroupReceipt,
    Score,
    VersionSpan,
    as_tokens,
)
from areal_flow.log.codec import receipts, rollout_rows, scored_table
from areal_flow.log.directory import create_run, hold_run, leave_run
from areal_flow.log.inputs import Verifier, record_inputs
from areal_flow.log.queries import Run
from areal_flow.log.run_log import RunLog, append_evaluation, create_logs
from areal_flow.log.trajectories import write_groups
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.rollout.prompts.completions import RowEncoder
from areal_flow.rollout.prompts.prepare import prepare_prompts
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.rollout.workflows.episode import RolledOutGroup, TrajectoryDraft
from pipelines.cli.main import main
from pipelines.export import export_model, export_trajectories
from tests.chat_templates import CHATML, give_chat_template
from tests.finished_runs import answers
from tests.policies import write_model_directory
from tests.rows import append, commit
from tests.tracked_runs import step_row

GROUPS = [
    [("one", 1.0), ("two", 0.0), ("six", 0.25)],
    [("two", 1.0), ("one", 1.0)],
    [("six", 0.0), ("no", None)],
    [("two", 0.25), ("two", 0.0)],
]
"""Completions with their rewards."""


def make_run(root: Path, *, chat: bool, workflow: str = "single_turn") -> Run:
    layout, rows = RunLayout(root / "runs" / "sums"), root / "rows.jsonl"
    root.mkdir(exist_ok=True)
    rows.write_text(
        "".join(json.dumps({"id": n, "question": f"{n} =", "answer": n}) + "\n" for n in range(4))
    )
    recipe = build_recipe(
        {
            "model": "owner/base",
            "prompts": {"path": str(rows), "num_held_out": 0, "template": "{question} Say it."}
            | ({"chat_template": True, "system_prompt": "Be brief."} if chat else {}),
            "generation": {"temperature": 0.7, "max_new_tokens": 32, "max_model_len": 128},
            "workflow": {"name": workflow} | ({"path": "m:f"} if workflow == "agent" else {}),
        },
        source="test",
    )
    create_run(layout, recipe)
    write_model_directory(layout.model)
    give_chat_template(layout.model, CHATML)
    shutil.copytree(layout.model, layout.checkpoints / "00000001")
    (layout.checkpoints / "00000001" / "state.json").write_text("{}")
    prepare_prompts(recipe.prompt_plan(), layout)
    create_logs(layout)
    with hold_run(layout) as writer:
        log = RunLog(layout, writer)
        append(log, step_row(0, trajectory_watermark=0))
        for index in range(len(GROUPS)):
            commit(log, _group(layout, recipe, index))
        append(
            log,
            step_row(1, trajectory_watermark=log.watermark, trajectory_ids=["00000000-0000-00"]),
        )
        append_evaluation(layout, answers("before", 0, reward=0.0, text="3"), writer)
        append_evaluation(layout, answers("after", 1, reward=1.0, text="4"), writer)
        leave_run(layout, writer, "finished", seconds=1.0)
    record_inputs(layout, recipe, verifier=Verifier("numeric@0"), model=layout.model)
    return Run(layout.root)


def _group(layout: RunLayout, recipe: Recipe, index: int) -> GroupReceipt:
    tokenizer, prompt = (
        tokenizer_of(layout.model),
        PromptTable(layout.train_prompts, seed=0).row(index),
    )
    episode = Episode(index, prompt, tuple(range(len(GROUPS[index]))), 0, 1, datetime.now(UTC))
    drafts, scores = [], []
    for member, (text, reward) in enumerate(GROUPS[index]):
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, 1]
        logprobs = np.full(len(tokens), -0.5, np.float32)
        completion = Completion(as_tokens(tokens), logprobs, (VersionSpan(0, len(tokens)),), "stop")
        drafts.append((member, TrajectoryDraft(prompt.tokens).with_completion(completion)))
        scores.append(Score(reward, "error" if reward is None else "correct", error="raised"))
    table, _ = rollout_rows(
        [(episode, RolledOutGroup(tuple(drafts)))],
        generator="g-0",
        started_at=datetime.now(UTC),
        engine_stats=EngineStats(),
    )
    table = scored_table(table, scores, verifier="numeric@0")
    return GroupReceipt(index, write_groups(layout.trajectories, table), receipts(table))


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("chat"), chat=True)


def loaded(directory: Path, cache: Path) -> list[dict[str, Any]]:
    rows = datasets.load_dataset(str(directory), split="train", cache_dir=str(cache))
    return [*rows]


def test_folder_of_a_model_loads_and_samples_as_training_did(chat_run: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout, plain = chat_run.layout, tmp_path / "plain"
    export_model(layout.checkpoints / "00000001", plain, run=layout)
    model = AutoModelForCausalLM.from_pretrained(plain)
    sampling = model.generation_config
    assert (sampling.do_sample, sampling.temperature, sampling.max_new_tokens) == (True, 0.7, 32)
    assert (sampling.top_k, sampling.top_p) == (0, 1.0)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    messages = [{"role": "user", "content": "1 ="}]
    assert "<|im_start|>user" in tokenizer.apply_chat_template(messages, tokenize=False)
    assert not (plain / "state.json").exists()
    ids = tokenizer("1 =", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2).shape[1] > ids.shape[1]
    with pytest.raises(ModelError, match="is not empty; give a new directory"):
        export_model(layout.checkpoints / "00000001", plain, run=layout)


def test_card_has_base_data_pass_rates_and_lineage_and_no_folder(
    chat_run: Run, tmp_path: Path
) -> None:
    layout, plain = chat_run.layout, tmp_path / "plain"
    export_model(layout.checkpoints / "00000001", plain, run=layout)
    card = ModelCard.load(plain / "README.md")
    data = card.data
    assert (data.base_model, data.library_name) == ("owner/base", "transformers")
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["areal-flow", "reinforcement-learning", "decoupled-ppo"]
    step = chat_run.steps("arrow", where="step = 1").to_pylist()[0]
    run_id = json.loads(layout.identity.read_text())["run_id"]
    rows = layout.root.parent.parent / "rows.jsonl"
    for text in (
        f"`rows.jsonl`, SHA-256 `{file_hash(rows)}…`",
        "| held_out | 1.000 | 0.610 to 1.000 | 6 | 1 |",
        "Sampled with temperature 0.7, ",
        "- `generation.temperature`: `0.7`",
        "- `prompts.template`: `'{question} Say it.'`",
        f"run `sums` (`{run_id}`)",
        f"step 1, weights hash `{step['weights_hash']}`",
        f"`sha256sum model.safetensors` begins with `{file_hash(plain / 'model.safetensors')}`",
        "areal-flow lineage sums@1",
    ):
        assert text in card.content, text
    assert str(layout.root.parent.parent) not in card.content


def test_trajectories_are_a_dataset_with_every_column(chat_run: Run, tmp_path: Path) -> None:
    export_trajectories(chat_run, tmp_path / "all")
    rows = loaded(tmp_path / "all", tmp_path / "cache")
    stored = chat_run.trajectories("arrow", text=True)
    assert {*rows[0]} == {*stored.column_names}
    by_id = {row["trajectory_id"]: row for row in stored.to_pylist()}
    assert {row["trajectory_id"]: row["output_tokens"] for row in rows} == {
        identifier: row["output_tokens"] for identifier, row in by_id.items()
    }
    export_trajectories(chat_run, tmp_path / "some", where="reward = 0.25 AND num_tokens > 0")
    some = loaded(tmp_path / "some", tmp_path / "cache")
    assert [(row["completion"], row["reward"]) for row in some] == [("six", 0.25), ("two", 0.25)]


def question(n: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{n} = Say it."},
    ]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_rows_for_sft_are_those_that_passed_and_tokenise_as_they_were_sampled(
    chat_run: Run, tmp_path: Path
) -> None:
    export_trajectories(chat_run, tmp_path / "sft", form="sft")
    rows = loaded(tmp_path / "sft", tmp_path / "cache")
    table = PromptTable(chat_run.layout.train_prompts, seed=0)
    numbers = [int(table.row(index).answer) for index in range(len(GROUPS))]
    assert rows == [
        {"prompt": question(numbers[0]), "completion": answer("one")},
        {"prompt": question(numbers[1]), "completion": answer("two")},
        {"prompt": question(numbers[1]), "completion": answer("one")},
    ]
    from areal_flow.policy.tokenizer.directory import chat_template_of

    model = chat_run.layout.model
    encoder = RowEncoder(tokenizer_of(model), stop_token_ids=[1], chat=chat_template_of(model))
    prompt, ((output,),) = encoder.encode(rows[0], ["completion"])
    (sampled,) = chat_run.trajectories(
        "arrow",
        columns=["prompt_tokens", "output_tokens"],
        where="trajectory_id = '00000000-0000-00'",
    ).to_pylist()
    assert (prompt, output) == (sampled["prompt_tokens"], sampled["output_tokens"])


def test_pairs_for_dpo_are_best_and_worst_of_groups_that_differ(
    chat_run: Run, tmp_path: Path
) -> None:
    export_trajectories(chat_run, tmp_path / "dpo", form="dpo")
    (row,) = loaded(tmp_path / "dpo", tmp_path / "cache")  # the last group's texts are equal
    first = int(PromptTable(chat_run.layout.train_prompts, seed=0).row(0).answer)
    assert row == {"prompt": question(first), "chosen": answer("one"), "rejected": answer("two")}
    with pytest.raises(RunError, match="in a group of different rewards and satisfy 'reward = 1'"):
        export_trajectories(chat_run, tmp_path / "none", form="dpo", where="reward = 1")
    with pytest.raises(RunError, match="nonsense"):
        export_trajectories(chat_run, tmp_path / "bad", form="sft", where="nonsense = 1")
    assert not (tmp_path / "none").exists()


def test_rows_of_a_run_without_a_chat_template_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "text", chat=False)
    runs, options = str(run.layout.root.parent), ["--trajectories", "--format", "dpo"]
    assert main(["--runs", runs, "export", "sums", str(tmp_path / "dpo"), *options]) == 0
    (row,) = loaded(tmp_path / "dpo", tmp_path / "cache")
    first = PromptTable(run.layout.train_prompts, seed=0).row(0)
    assert row == {"prompt": first.text, "chosen": "one", "rejected": "two"}


def test_trajectories_with_text_of_an_environment_are_no_rows_for_trl(tmp_path: Path) -> None:
    run = make_run(tmp_path / "agent", chat=True, workflow="agent")
    with pytest.raises(ConfigError, match="workflow is single_turn, found agent: its trajectories"):
        export_trajectories(run, tmp_path / "sft", form="sft")
    export_trajectories(run, tmp_path / "all")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--format", "sft"], "--format and --where go with --trajectories"),
        (["--adapter", "--trajectories"], "expected one of --adapter and --trajectories"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "a", str(tmp_path / "b"), *options])
    assert expected in capsys.readouterr().err
