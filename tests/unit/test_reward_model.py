"""The verifier `reward_model`: scores of a model in a directory."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from areal_flow.core.errors import RewardError
from areal_flow.core.types import Score
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.registry import load_reward
from pipelines.jobs.verify import verify_lines
from tests.reward_models import write_reward_model
from tests.unit.test_auto_tokenizer import SUM, write_own_model

COMPLETIONS = (" 3", "", " 12 +4 #### 16", " no sum at all: " + "12 " * 9, " 3<pad>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward") / "model")


def scores(directory: Path, completions: Sequence[str], **settings: Any) -> Sequence[Score]:
    reward = load_reward(
        "reward_model", Path(), settings={"path": str(directory), **settings}
    ).reward
    reward.open()
    rewards = asyncio.run(reward.score([RewardInput("1 +2 =", text, "3") for text in completions]))
    reward.close()
    return rewards


def test_score_is_the_model_s_after_the_last_token_whatever_is_scored_beside_it(
    model: Path,
) -> None:
    reference, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(model),
        tokenizer_of(model),
    )
    expected = []
    for text in COMPLETIONS:
        ids = [id_ for part in ("1 +2 =", text) for id_ in tokenizer.encode(part).ids]
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
            expected.append(float(reference.score(hidden)[0]))
    assert max(expected) - min(expected) > 0.1
    for max_concurrency in (1, 2, 8):
        rewards = scores(model, COMPLETIONS, max_concurrency=max_concurrency)
        assert [score.reward for score in rewards] == pytest.approx(expected, abs=1e-4)


def test_model_reads_the_tokens_that_auto_tokenizer_makes_of_its_files(tmp_path: Path) -> None:
    write_own_model(tmp_path)
    file = tmp_path / "config.json"
    head = {"head_dim": 32, "rope_theta": 1e4, "num_labels": 1}
    config = {**json.loads(file.read_text()), **head}
    file.write_text(json.dumps(config | {"architectures": ["Qwen2ForSequenceClassification"]}))
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(tmp_path), dtype=torch.float32
    )
    made.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer("1 +2 =")["input_ids"] + tokenizer(SUM)["input_ids"]
    assert tokens[-len(tokenizer(SUM)["input_ids"]) :] != tokenizer_of(tmp_path).encode(SUM).ids
    with torch.inference_mode():
        hidden = made.eval().model(torch.tensor([tokens])).last_hidden_state[0, -1]
        expected = float(made.score(hidden)[0])
    (score,) = scores(tmp_path, [SUM])
    assert score.reward == pytest.approx(expected, abs=1e-5)


def test_score_may_be_squashed_and_the_raw_one_is_kept(model: Path) -> None:
    raw = [score.reward or 0.0 for score in scores(model, COMPLETIONS)]
    squashed = scores(model, COMPLETIONS, squash=True)
    expected = [1 / (1 + math.exp(-score)) for score in raw]
    assert [score.reward for score in squashed] == pytest.approx(expected, abs=1e-4)
    kept = [float(score.message.removeprefix("score ")) for score in squashed]
    assert kept == pytest.approx(raw, abs=1e-4)


def test_too_long_completions_are_not_scored_and_affect_no_other(model: Path) -> None:
    texts = (" 3", " 3" * 400, "1 2 " * 25_000_000)
    short, long, huge = scores(model, texts)
    assert short.reward == pytest.approx(scores(model, texts[:1])[0].reward)
    assert [(score.reward, score.verdict) for score in (long, huge)] == [(None, "output_limit")] * 2
    assert "takes 1 to 256 tokens" in long.error  # which is all that its positions are for
    (limited,) = scores(model, (" 12 +4 #### 16",), max_tokens=5)
    assert "takes 1 to 5 tokens" in limited.error


def identity(directory: Path, **settings: Any) -> str:
    return load_reward(
        "reward_model", Path(), settings={"path": str(directory), **settings}
    ).identity


def test_identity_is_that_of_the_model_s_files_and_of_the_settings(
    model: Path, tmp_path: Path
) -> None:
    copy = copytree(model, tmp_path / "model")
    before = identity(copy)
    assert identity(model).rpartition("-")[2] == before.rpartition("-")[2]
    assert identity(copy, squash=True) != before
    weights = load_file(copy / "model.safetensors")
    save_file({**weights, "score.weight": weights["score.weight"] + 1}, copy / "model.safetensors")
    assert identity(copy) != before


def without_file(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def of_a_policy(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["SeedOssForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config))


def of_two_labels(directory: Path) -> None:
    write_reward_model(directory, num_labels=2)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without_file("config.json"), "expected config.json of a reward model"),
        (without_file("tokenizer.json"), "expected tokenizer.json"),
        (without_file("model.safetensors"), r"expected \*.safetensors"),
        (of_a_policy, "with one label, found SeedOssForCausalLM with 1"),
        (of_two_labels, "with one label, found SeedOssForSequenceClassification with 2"),
    ],
)
def test_directory_of_no_reward_model_is_refused_before_anything_starts(
    spoil: Callable[[Path], None], why: str, model: Path, tmp_path: Path
) -> None:
    spoiled = copytree(model, tmp_path / "model")
    spoil(spoiled)
    with pytest.raises(RewardError, match=rf"reward 'reward_model', path = .*{why}"):
        identity(spoiled)


def test_absent_directory_and_senseless_limits_are_refused(model: Path) -> None:
    with pytest.raises(RewardError, match="expected a model directory or a hub name"):
        identity(Path("./absent"))
    with pytest.raises(RewardError, match="expected max_tokens >= 1"):
        identity(model, max_tokens=0)
    with pytest.raises(RewardError, match="needs the setting 'path'"):
        load_reward("reward_model", Path())


def test_weights_that_would_be_drawn_at_random_are_refused(model: Path, tmp_path: Path) -> None:
    pending_prefill = copytree(model, tmp_path / "model")
    weights = load_file(pending_prefill / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, pending_prefill / "model.safetensors", metadata={"format": "pt"})
    reward = load_reward("reward_model", Path(), settings={"path": str(pending_prefill)}).reward
    with pytest.raises(RewardError, match=r"lacks score.weight"):
        reward.open()


def test_verify_scores_rows(model: Path) -> None:
    rows = [json.dumps({"id": n, "prompt": "1 +2 =", "completion": " 3"}) for n in range(2)]
    verdicts = [*verify_lines("reward_model", rows, settings={"path": str(model), "squash": True})]
    assert [verdict["id"] for verdict in verdicts] == [0, 1]
    assert verdicts[0]["detail"].startswith("score ")
