"""Supervised fine-tuning: rows, loss, order, and resuming bit for bit."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import Replace

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, PromptError, TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.policy.checkpoints import list_checkpoints
from areal_flow.rollout.prompts.completions import RowEncoder, tokenise_completions
from areal_flow.training.settings import SftSettings, TrainerSettings
from areal_flow.training.sft import CompletionRows, SftTrainer
from pipelines.jobs.built_in import with_files
from pipelines.jobs.prepare import prepare_run
from pipelines.jobs.sft import prepare_sft_run
from pipelines.tiny_jobs.sums import arithmetic_questions, curriculum, running_sums
from pipelines.tiny_jobs.tiny_policy import build_tokenizer
from tests.policies import completion_rows, small_policy
from tests.rows import is_chain_of_thought

STOP = 1
ROWS = completion_rows(10)
WRITER = Writer(Path("nobody"), 1)


def trainer(*, tokens_per_micro_batch: int = 64, **settings: Any) -> SftTrainer:
    chosen = SftSettings(**{"num_steps": 6, "batch_size": 4, "learning_rate": 1e-2, **settings})
    of_trainer = TrainerSettings(tokens_per_micro_batch=tokens_per_micro_batch)
    return SftTrainer(small_policy(), ROWS, chosen, of_trainer, seed=3)


def run_layout(root: Path) -> RunLayout:
    layout = RunLayout(root)
    layout.model.mkdir()
    return layout


def test_loss_is_the_cross_entropy_of_completions_by_token() -> None:
    """Against each sequence alone, through the model's own forward pass."""
    policy = small_policy()
    policy.set_attn_implementation("eager")
    losses = []
    for row in range(4):
        (sequence,) = ROWS.sequences(row)
        prompt, completion = sequence.prompt_tokens.tolist(), sequence.output_tokens.tolist()
        logits = policy(input_ids=torch.tensor([prompt + completion])).logits[0].double()
        predicting = logits[len(prompt) - 1 : -1].log_softmax(-1)
        losses += [-float(predicting[at, token].detach()) for at, token in enumerate(completion)]
    expected = sum(losses) / len(losses)
    for room in (12, 64):
        loss = trainer(shuffle=False, tokens_per_micro_batch=room).take_step()
        assert loss == pytest.approx(expected, abs=1e-5)


def test_damaged_checkpoint_is_set_aside_for_an_older_one(tmp_path: Path) -> None:
    layout = run_layout(tmp_path)
    sft_trainer = trainer()
    for _ in range(2):
        sft_trainer.take_step()
        newest = sft_trainer.save(layout, WRITER)
    (newest / "model.safetensors").write_bytes(b"no tensors")
    resumed = trainer()
    resumed.restore(layout)
    assert resumed.step == 1
    assert list_checkpoints(layout.sft_checkpoints) == [1]


def test_rows_come_in_the_order_of_the_file_or_of_the_seed() -> None:
    in_order = [row for step in range(5) for row in trainer(shuffle=False)._rows_of(step)]
    assert in_order == [index % 10 for index in range(20)]
    drawn = [row for step in range(5) for row in trainer()._rows_of(step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:] != in_order[:10]
    assert drawn == [row for step in range(5) for row in trainer()._rows_of(step)]


def test_learning_rate_warms_up_and_falls_or_stays() -> None:
    falling = trainer(num_steps=100, num_warmup_steps=4)
    assert falling.learning_rate(0) == pytest.approx(1e-2 / 4)
    assert falling.learning_rate(50) == pytest.approx(1e-2 * (0.03 + 0.97 / 2))
    assert falling.learning_rate(99) == pytest.approx(1e-2 * 0.03, rel=0.02)
    flat = trainer(num_warmup_steps=0, learning_rate_schedule="constant")
    assert {flat.learning_rate(step) for step in range(6)} == {1e-2}


def test_steps_without_a_finite_loss_change_nothing_and_end_the_stage() -> None:
    broken = trainer()
    with torch.no_grad():
        next(broken.backend.policy.parameters()).fill_(float("nan"))
    before = broken.backend.fingerprint()
    assert all(isnan(broken.take_step()) for _ in range(4))
    with pytest.raises(TrainingError, match="found 5 steps in a row"):
        broken.take_step()
    assert broken.backend.fingerprint() == before


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenise(
    path: Path,
    tokenizer: Tokenizer,
    *,
    stop: int | None = STOP,
    fields: Sequence[str] = ("completion",),
) -> CompletionRows:
    target = path.with_suffix(".npz")
    encoder = RowEncoder(tokenizer, stop_token_ids=() if stop is None else (stop,))
    tokenise_completions(path, target, encoder=encoder, max_tokens=64, fields=fields)
    return CompletionRows.read(target, num_completions=len(fields))


def test_rows_are_tokenised_with_a_stop_token(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    texts = [("1 + 2 =", " 1 3 #### 3"), ("4 - 1 =", " #### 3"), ("1 + 2 =", " #### 3")]
    texts.append(texts[0])  # a curriculum shows its rows again
    path = write_rows(tmp_path / "r.jsonl", *({"prompt": p, "completion": c} for p, c in texts))
    rows = tokenise(path, tokenizer)
    for index, (prompt, completion) in enumerate(texts):
        sequence = rows.sequences(index)[0]
        assert tokenizer.decode(list(sequence.prompt_tokens)) == prompt
        assert tokenizer.decode(list(sequence.output_tokens[:-1])) == completion
        assert sequence.output_tokens[-1] == STOP
        assert sequence.num_trained == len(sequence.output_tokens)


def test_turns_of_the_environment_are_tokenised_by_themselves_and_not_trained(
    tmp_path: Path,
) -> None:
    turns = [" 1", "2 3", " #### 3"]
    rows = tokenise(
        write_rows(tmp_path / "r.jsonl", {"prompt": "1 + 2 =", "completion": turns}),
        tokenizer := build_tokenizer(),
    )
    sequence = rows.sequences(0)[0]
    trained, text = sequence.output_tokens[sequence.trained], "".join(turns)
    environment = sequence.output_tokens[~sequence.trained]
    assert trained.tolist() == [*tokenizer.encode(" 1").ids, *tokenizer.encode(" #### 3").ids, STOP]
    assert environment.tolist() == tokenizer.encode("2 3").ids
    assert tokenizer.decode(list(sequence.output_tokens[:-1])) == text


def test_pairs_are_tokenised_side_by_side_with_a_stop_token_or_without(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    row = {"prompt": "1 + 2 =", "chosen": " #### 3", "rejected": [" 1", "2", " #### 4"]}
    path = write_rows(tmp_path / "r.jsonl", row, row)
    for stop, end in ((STOP, [STOP]), (None, [])):
        rows = tokenise(path, tokenizer, stop=stop, fields=("chosen", "rejected"))
        assert len(rows) == 2
        for chosen, rejected in map(rows.sequences, range(2)):
            assert tokenizer.decode(chosen.prompt_tokens.tolist()) == "1 + 2 ="
            assert chosen.output_tokens.tolist() == [*tokenizer.encode(" #### 3").ids, *end]
            assert rejected.num_trained == len(rejected.output_tokens) - 1


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"chosen": " 2"}, "field 'rejected' is missing; found fields: chosen, prompt"),
        ({"chosen": " 2", "rejected": " 2"}, "fields 'chosen' and 'rejected': found the same text"),
        ({"chosen": " 2" * 40, "rejected": " 2" * 20}, "trainer.tokens_per_micro_batch (64)"),
    ],
)
def test_bad_pair_is_named(tmp_path: Path, bad: dict[str, Any], expected: str) -> None:
    path = write_rows(tmp_path / "r.jsonl", {"prompt": "1 + 1 =", **bad})
    with pytest.raises(PromptError) as raised:
        tokenise(path, build_tokenizer(), fields=("chosen", "rejected"))
    assert expected in str(raised.value)


def test_completion_of_no_token_is_named(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.normalizer = Replace("3", "")
    path = write_rows(tmp_path / "r.jsonl", {"prompt": "1 + 1 =", "chosen": " 2", "rejected": "3"})
    with pytest.raises(PromptError, match=r"'rejected': found a text of which .* makes no token"):
        tokenise(path, tokenizer, stop=None, fields=("chosen", "rejected"))


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"prompt": "1 + 1 ="}, "field 'completion' is missing; found fields: prompt"),
        ({"prompt": "1 + 1 =", "completion": 2}, "field 'completion': expected non-empty text"),
        ({"prompt": "1 + 1 =", "completion": [" 2", "3"]}, "by turns, the policy's first and last"),
        ({"prompt": "1 + 1 =", "completion": [" 2", "3", 4]}, "expected non-empty text, found 4"),
        ({"prompt": "1 + 1 =", "completion": " 2" * 70}, "trainer.tokens_per_micro_batch (64)"),
    ],
)
def test_bad_row_is_named(tmp_path: Path, bad: dict[str, Any], expected: str) -> None:
    good = {"prompt": "1 + 1 =", "completion": " 2"}
    with pytest.raises(PromptError) as raised:
        tokenise(write_rows(tmp_path / "r.jsonl", good, bad), build_tokenizer())
    assert "r.jsonl, line 2" in str(raised.value)
    assert expected in str(raised.value)


def test_curriculum_reasons_first_and_answers_directly_late_rare_sums_more_often() -> None:
    questions = [
        question["question"]
        for question in arithmetic_questions(size=40, seed=0, min_terms=3, max_terms=7, stream=1)
    ]
    num_steps, batch_size = 400, 64
    rows = list(curriculum(questions, num_steps=num_steps, batch_size=batch_size, seed=0))
    shows = [is_chain_of_thought(row["completion"]) for row in rows]
    late = int(num_steps * 0.88) * batch_size
    assert all(shows[:late])
    assert np.mean(shows[late:]) == pytest.approx(0.24, abs=0.03)
    frequency = Counter(value for question in questions for value in running_sums(question))
    weight = {
        question: np.mean([frequency[value] ** -0.5 for value in running_sums(question)])
        for question in questions
    }
    drawn = Counter(row["prompt"] for row in rows)
    for question in questions:
        expected = len(rows) * weight[question] / sum(weight.values())
        assert abs(drawn[question] - expected) < 5 * expected**0.5


@pytest.mark.parametrize(
    ("objective", "row", "expected"),
    [
        ("cross_entropy", "", "is empty: expected one row or more"),
        ("cross_entropy", '{"prompt": "1 + 1 ="}', "line 1: field 'completion' is missing"),
        ("dpo", '{"prompt": "1 + 1 =", "chosen": "2"}', "line 1: field 'rejected' is missing"),
        ("dpo", '{"chosen": [{"role": "assistant"}], "rejected": "3"}', "line 1: field 'chosen'"),
    ],
)
def test_rows_are_refused_before_a_model_is_read(
    tmp_path: Path, objective: str, row: str, expected: str
) -> None:
    path, layout = tmp_path / "r.jsonl", RunLayout(tmp_path / "run")
    path.write_text(row + "\n")
    table = {"model": "no/where", "sft": {"objective": objective, "path": str(path)}}
    recipe = build_recipe(table, {"sft": {"num_steps": 2}}, source="test")
    for prepare in (prepare_sft_run, prepare_run):
        with pytest.raises(PromptError, match=re.escape(expected)):
            prepare(layout, recipe)


def test_fine_tuning_without_rows_names_the_option_that_gives_them(tmp_path: Path) -> None:
    recipe = build_recipe({"model": "no/where"}, source="test")
    with pytest.raises(ConfigError, match=r"and sft\.path \(--data of `areal-flow sft`"):
        prepare_sft_run(RunLayout(tmp_path), recipe)


def test_only_the_tiny_policy_on_sums_brings_its_own_rows(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    table: dict[str, Any] = {
        "prompts": {"num_prompts": 40, "num_held_out": 8},
        "sft": {"num_steps": 2, "batch_size": 4},
    }
    made = with_files(build_recipe(table, source="test"), layout)
    assert made.sft.path is not None
    assert len(made.sft.path.read_text().splitlines()) == 8
    assert made.prompts.source == "file"
    other = with_files(build_recipe({**table, "model": "no/where"}, source="test"), layout)
    assert (other.sft.path, other.sft.num_steps) == (None, 0)
    table["prompts"] = {"source": "file", "path": "p.jsonl"}
    with pytest.raises(ConfigError, match=r"needs sft\.path \(--data of `areal-flow sft`"):
        with_files(build_recipe(table, source="test"), layout)
    table["prompts"] = {"source": "nowhere"}
    with pytest.raises(ConfigError, match="expected one of file, arithmetic"):
        with_files(build_recipe(table, source="test"), layout)
