"""Where prompts come from: mixtures by weight, Lance, reasoning-gym, Hugging Face datasets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError, PromptError, RewardError
from areal_flow.core.layout import RunLayout
from areal_flow.log.dataset import create_dataset
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.rollout.prompts.prepare import Prepared, prepare_prompts
from areal_flow.rollout.prompts.table import BLOCK, CYCLE, Mixture, PromptTable, quotas
from pipelines.jobs.built_in import with_files
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

SUMS = {"name": "sums", "weight": 3.0}
WORDS = {"name": "words", "num_held_out": 2}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    write_tiny_model(made.model, max_model_len=128)
    return made


def rows(size: int, *, first: int = 0) -> list[dict[str, str]]:
    return [{"question": f"{n} + 1 =", "answer": f"{n + 1}"} for n in range(first, first + size)]


def jsonl(path: Path, made: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def recipe_of(sources: list[dict[str, Any]], **settings: Any) -> Recipe:
    generation = {"max_model_len": 128, "max_new_tokens": 16}
    prompts = {"num_held_out": 3, "num_prompts": 20}
    table = {"sources": sources, "generation": generation, "prompts": prompts, **settings}
    return build_recipe(table, source="test")


def prepared(recipe: Recipe, layout: RunLayout) -> tuple[Prepared, PromptTable, PromptTable]:
    prompts = prepare_prompts(with_files(recipe, layout).prompt_plan(), layout)
    tables = (layout.train_prompts, layout.held_out_prompts)
    train, held_out = (PromptTable(path, seed=recipe.seed) for path in tables)
    return prompts, train, held_out


def mixed(tmp_path: Path, layout: RunLayout) -> tuple[Prepared, PromptTable, PromptTable]:
    files = jsonl(tmp_path / "a.jsonl", rows(50)), jsonl(tmp_path / "b.jsonl", rows(20, first=90))
    sources = [{**SUMS, "path": files[0]}, {**WORDS, "path": files[1]}]
    return prepared(recipe_of(sources), layout)


@given(st.integers(1, 7), st.lists(st.integers(0, 700), max_size=7))
def test_every_block_has_the_share_of_each_source_rounded_and_every_cycle_the_share(
    num_blocks: int, cuts: list[int]
) -> None:
    """A cycle of some blocks is cut into sources anywhere; draws of a source are counted up."""
    size = num_blocks * BLOCK
    ends = sorted(min(cut, size) for cut in cuts)
    shares = [end - begin for begin, end in pairwise([0, *ends, size])]
    mixture = Mixture({f"{place}": share for place, share in enumerate(shares)}, seed=5)
    drawn = [mixture.draw(index) for index in range(2 * size)]
    for source, share in enumerate(shares):
        assert [number for name, number in drawn if name == source] == [*range(2 * share)]
        for begin in range(0, 2 * size, BLOCK):
            count = sum(name == source for name, _ in drawn[begin : begin + BLOCK])
            assert share // num_blocks <= count <= -(-share // num_blocks)


def test_draws_follow_small_weights() -> None:
    """A thousandth of 100,000 draws is 100: one in about ten blocks, from the beginning on."""
    mixture = Mixture(quotas({"a": 0.7, "b": 0.299, "c": 0.001}), seed=5)
    drawn = [mixture.draw(index)[0] for index in range(CYCLE)]
    assert [drawn.count(source) for source in range(3)] == [70_000, 29_900, 100]
    blocks = [index // BLOCK for index, source in enumerate(drawn) if source == 2]
    between = [later - earlier for earlier, later in pairwise([0, *blocks])]
    assert 5 <= min(between[1:]) <= max(between) <= 20


def test_whole_percents_are_drawn_alike_from_quotas_of_a_block_and_of_a_cycle() -> None:
    of_block, of_cycle = ({"a": 75 * size, "b": 25 * size} for size in (1, CYCLE // BLOCK))
    first, second = Mixture(of_block, seed=5), Mixture(of_cycle, seed=5)
    assert [*map(first.draw, range(999))] == [*map(second.draw, range(999))]


def test_quotas_are_shares_of_a_cycle_and_at_least_one() -> None:
    assert quotas({"a": 3.0, "b": 1.0}) == {"a": 75_000, "b": 25_000}
    assert quotas({"a": 1.0, "b": 1.0, "c": 1.0}) == {"a": 33_334, "b": 33_333, "c": 33_333}
    assert quotas({"a": 1.0, "b": 1e-9}) == {"a": CYCLE - 1, "b": 1}


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_quotas_are_exact_to_one(weights: list[float]) -> None:
    result = quotas({f"{place}": weight for place, weight in enumerate(weights)})
    assert sum(result.values()) == CYCLE
    for weight, share in zip(weights, result.values(), strict=True):
        assert abs(share - CYCLE * weight / sum(weights)) <= 1


def test_one_source_is_read_in_the_order_that_runs_before_mixtures_had() -> None:
    for epoch in range(3):
        of_one = np.random.default_rng([7, epoch, 0]).permutation(np.arange(40))
        assert (of_one == np.random.default_rng([7, epoch]).permutation(40)).all()
    assert [Mixture({"": 100}, seed=7).draw(index) for index in (0, 99, 100, 12345)] == [
        (0, index) for index in (0, 99, 100, 12345)
    ]


def test_sources_are_mixed_by_weight_and_each_is_read_whole_before_it_repeats(
    tmp_path: Path, layout: RunLayout
) -> None:
    prompts, train, held_out = mixed(tmp_path, layout)
    assert prompts.by_source == {"sums": 47, "words": 18}
    assert Counter(prompt.source for prompt in held_out.rows()) == {"sums": 3, "words": 2}
    drawn = [train.prompt_at(index) for index in range(2 * BLOCK)]
    assert Counter(prompt.source for prompt in drawn) == {"sums": 150, "words": 50}
    for source, size in prompts.by_source.items():
        texts = [prompt.text for prompt in drawn if prompt.source == source]
        assert len(set(texts[:size])) == size == len(set(texts[size : 2 * size]))
    again = PromptTable(layout.train_prompts, seed=0)
    assert [again.prompt_at(index).text for index in range(9)] == [p.text for p in drawn[:9]]


def test_a_reward_judges_the_sources_that_it_names(tmp_path: Path) -> None:
    sources = [{**SUMS, "path": "a.jsonl"}, {**WORDS, "path": "b.jsonl"}]
    rewards = [{"verifier": "numeric", "sources": ["sums"]}, {"verifier": "exact", "weight": 2.0}]
    recipe = recipe_of(sources, rewards=rewards)
    judge = WeightedRewards(recipe.rewards, tmp_path)
    inputs = [RewardInput("?", "= 4", "4", prompt_source=name) for name in ("sums", "words")]
    of_sums, of_words = asyncio.run(judge.score(inputs))
    assert (of_sums.reward, of_words.reward) == (1.0, 0.0)
    assert [part.reward for part in of_words.parts] == [None, 0.0]
    assert judge.identity.split(" + ")[0].endswith(" of sums")
    assert [r.verifier for r in recipe.by_source()["words"].rewards] == ["exact"]


@pytest.mark.parametrize(
    ("sources", "settings", "expected"),
    [
        ([SUMS], {}, "sources 'sums': path is needed"),
        ([{**SUMS, "path": "a"}] * 2, {}, "a name is given twice"),
        ([{**SUMS, "path": "a"}], {"prompts": {"path": "b"}}, "two ways to say the same"),
        ([{**SUMS, "path": "a"}], {"rewards": [{"sources": ["b"]}]}, "name ['b'], expected of"),
        (
            [{**SUMS, "path": "a"}, {**WORDS, "path": "b"}],
            {"rewards": [{"sources": ["sums"]}]},
            "no reward judges 'words'",
        ),
        ([{**SUMS, "path": "a", "weight": 0.0}], {}, "weight"),
        ([{**SUMS, "path": "a", "template": "x"}], {}, "must contain {question}"),
    ],
)
def test_impossible_sources_are_refused(
    sources: list[dict[str, Any]], settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of(sources, **settings)
    assert expected in str(caught.value)


def test_source_without_prompts_to_train_on_is_named(tmp_path: Path, layout: RunLayout) -> None:
    files = jsonl(tmp_path / "a.jsonl", rows(10)), jsonl(tmp_path / "b.jsonl", rows(1))
    sources = [
        {**SUMS, "path": files[0], "held_out_path": files[1]},
        {**WORDS, "path": files[1]},
    ]
    with pytest.raises(PromptError, match="no prompts of source 'words' are left"):
        prepared(recipe_of(sources), layout)


def test_lance_dataset_is_a_file_of_prompts(tmp_path: Path, layout: RunLayout) -> None:
    table = pa.Table.from_pylist(rows(20))
    path = tmp_path / "sums.lance"
    create_dataset(path, table.schema, [table])
    prompts, train, _ = prepared(recipe_of([{**SUMS, "path": str(path)}]), layout)
    assert (prompts.num_train, prompts.num_held_out) == (17, 3)
    assert train.row(0).text in {row["question"] for row in rows(20)}
    (tmp_path / "none.lance").mkdir()
    for name, expected in (("none.lance", "not a readable Lance"), ("no.lance", "found none")):
        with pytest.raises(PromptError, match=expected):
            prepared(recipe_of([{**SUMS, "path": str(tmp_path / name)}]), layout)


def test_reasoning_gym_task_is_a_source_and_judges_itself(layout: RunLayout) -> None:
    settings = {"min_terms": 2, "max_terms": 3, "max_digits": 1}
    task = {"name": "sums", "source": "reasoning_gym:chain_sum", "settings": settings}
    recipe = recipe_of([task], rewards=[{"verifier": "reasoning_gym"}])
    made = with_files(recipe, layout)
    path = made.sources[0].path
    assert path is not None
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(entries) == 20
    assert {entry["metadata"]["source_dataset"] for entry in entries} == {"chain_sum"}
    assert {entry["metadata"]["num_terms"] for entry in entries} == {2, 3}
    again = with_files(recipe, RunLayout(layout.root.with_name("other")))
    assert again.sources[0].path is not None
    assert again.sources[0].path.read_text() == path.read_text()
    judge = WeightedRewards(recipe.rewards, layout.rewards)
    entry = entries[0]
    reward_input = RewardInput(
        entry["question"], entry["answer"], entry["answer"], entry, (), "sums"
    )
    (score,) = asyncio.run(judge.score([reward_input]))
    assert score.reward == 1.0


@pytest.mark.parametrize(
    ("source", "error", "expected"),
    [
        ({"source": "reasoning_gym:nope"}, ConfigError, "'nope' not registered"),
        ({"source": "reasoning_gym:countdown"}, RewardError, "outside a sandbox"),
        ({"source": "reasoning_gym:"}, ConfigError, "expected one of file, arithmetic"),
        (
            {"source": "reasoning_gym:chain_sum", "settings": {"max_terms": 1}},
            ConfigError,
            "with the settings {'max_terms': 1}",
        ),
        ({"source": "arithmetic", "settings": {"a": 1}}, ConfigError, "takes no settings"),
        ({"source": "datasets:a/b", "settings": {"a": 1}}, ConfigError, "has no setting 'a'"),
        ({"source": "verifiers:a", "settings": {"a": 1}}, ConfigError, "takes no settings"),
    ],
)
def test_source_with_wrong_name_or_settings_is_refused(
    source: dict[str, Any], error: type[Exception], expected: str, layout: RunLayout
) -> None:
    recipe = recipe_of([{**SUMS, **source}], rewards=[{"verifier": "reasoning_gym"}])
    if source["source"] == "reasoning_gym:nope":
        recipe = recipe_of([{**SUMS, **source}])
    with pytest.raises(error) as caught:
        with_files(recipe, layout)
    assert expected in str(caught.value)


def test_dataset_of_the_hugging_face_kind_is_a_source(
    tmp_path: Path, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (folder := tmp_path / "data").mkdir()
    jsonl(folder / "train.jsonl", rows(20))
    jsonl(folder / "test.jsonl", rows(5, first=50))
    source = {**SUMS, "source": f"datasets:{folder}"}
    prompts, _, held_out = prepared(
        recipe_of([{**source, "settings": {"held_out_split": "test"}}]), layout
    )
    assert (prompts.num_train, prompts.num_held_out) == (20, 3)
    assert {prompt.text for prompt in held_out.rows()} <= {
        row["question"] for row in rows(5, first=50)
    }
    with pytest.raises(PromptError, match=r"split 'nope': .*Without a network"):
        prepared(recipe_of([{**source, "settings": {"split": "nope"}}]), layout)
