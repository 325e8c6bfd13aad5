"""Recipes: every mistake is named with field, value and rule before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import pytest

from areal_flow.algorithms.registry import ALGORITHMS, AnyAlgorithm
from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.config.listing import all_settings, setting_names
from areal_flow.config.messages import OPTION, nearest
from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import Settings, nest, parse_overrides
from areal_flow.rollout.workflows.registry import AnyWorkflow
from benchmarks import tails
from tests import chaos

RECIPES = sorted((Path(__file__).parents[2] / "pipelines" / "recipes").glob("*.toml"))


def error_of(table: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as raised:
        build_recipe(table, source="test.toml")
    return str(raised.value)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"trainer": {"lr": 1}}, "trainer.lr: there is no such setting"),
        ({"algorithm": {"nothing": 1}}, "algorithm.nothing: there is no such setting"),
        (
            {"algorithm": {"name": "cispo", "epsilon": 1}},
            "algorithm.epsilon: 'cispo' has no such setting, others have",
        ),
        (
            {"algorithm": {"name": "grpo"}},
            "algorithm.name = 'grpo': GRPO is a way to compute advantages: set algorithm.advantage",
        ),
        ({"algorithm": {"name": "gspoo"}}, "ppo_critic. Did you mean gspo?"),
        ({"num_generations": 8}, "there is no such setting. Did you mean controller.group_size?"),
        ({"num_steps": "many"}, "num_steps = 'many'"),
        ({"controller": {"max_staleness": -1}}, "controller.max_staleness = -1"),
        ({"controller": {"batch_size": 10, "group_size": 4}}, "group_size (4) must divide"),
        ({"generation": {"top_p": 0.9}}, "importance weights would be biased"),
        ({"generation": {"top_k": 5}}, "generation.top_k (5): training samples from the full"),
        ({"generation": {"min_new_tokens": 2}}, "set evaluation.min_new_tokens, which"),
        ({"generation": {"stop": {"strings": [""]}}}, "must have no empty string"),
        ({"generation": {"stop": {"token_ids": [-1]}}}, "token_ids ([-1]) must be tokens"),
        ({"evaluation": {"min_new_tokens": 65}}, "must not exceed generation.max_new_tokens (64)"),
        (
            {"generation": {"max_new_tokens": 128, "max_model_len": 128}},
            "must leave room for a prompt",
        ),
        ({"prompts": {"source": "file"}}, "--data FILE"),
        (
            {"prompts": {"source": "arithmetic", "path": "p.jsonl"}},
            "prompts.path (p.jsonl) would not be read, since source is 'arithmetic'",
        ),
        ({"prompts": {"held_out_path": "h.jsonl"}}, "held_out_path (h.jsonl) would not be read"),
        (
            {"sources": [{"name": "a", "source": "datasets:x", "path": "p.jsonl"}]},
            "sources 'a': path (p.jsonl) would not be read",
        ),
        ({"prompts": {"template": "no place"}}, "must contain {question}"),
        ({"prompts": {"num_terms": [9, 3]}}, "prompts.num_terms ([9, 3]) must be"),
        ({"algorithm": {"num_minibatches": 99}}, "groups in a batch (32): lower it"),
        (
            {"trainer": {"tokens_per_micro_batch": 16}, "generation": {"max_model_len": 128}},
            "must hold one sequence",
        ),
        (
            {"algorithm": {"name": "ppo_critic"}, "trainer": {"lora": {"rank": 4}}},
            "trains a critic of the policy's layers: trainer.lora.rank must be 0",
        ),
        ({"algorithm": {"name": "ppo_critic", "advantage": "grpo"}}, "algorithm.advantage"),
        ({"trainer": {"backend": "ddp"}}, "trainer.backend"),
        (
            {"trainer.learning_rate": 1},
            "expected a nested table, {'trainer': {'learning_rate': 1}}, found a dotted name",
        ),
        ({"trainer.rate": 1}, "trainer.rate: there is no such setting. Did you mean"),
        (
            {"trainer": {"parallel": {"context_ranks": 2}}},
            "(2) must divide cluster.num_trainers (1)",
        ),
        (
            {"trainer": {"parallel": {"shard_ranks": 3}}, "cluster": {"num_trainers": 4}},
            "trainer.parallel.shard_ranks (3) must divide cluster.num_trainers (4)",
        ),
        ({"generation": {"max_num_seqs": "64"}}, "generation.max_num_seqs = '64'"),
        ({"controller": {"max_attempts": True}}, "controller.max_attempts = True"),
        ({"generation": {"temperature": float("inf")}}, "finite number"),
        ({"cluster": {"remote": {"hosts": ["me@10.0.0.7"]}}}, "set launcher to 'ssh'"),
        (
            {"cluster": {"launcher": "slurm", "remote": {"hosts": ["me@10.0.0.7"]}}},
            "launcher = 'slurm' starts no workers on cluster.remote.hosts",
        ),
        ({"cluster": {"slurm": {"all": ["-n1", "partition=gpu"]}}}, "found ['partition=gpu']"),
        (
            {"cluster": {"generator_range": [2, 4]}},
            "around cluster.num_generators (1)",
        ),
        (
            {"cluster": {"launcher": "ssh", "remote": {"hosts": ["me@10.0.0.7"]}}},
            "cannot be reached from ['me@10.0.0.7']",
        ),
    ],
)
def test_mistake_is_named(table: dict[str, object], expected: str) -> None:
    message = error_of(table)
    assert expected in message
    assert "nothing was started" in message


def test_all_mistakes_are_listed_at_once() -> None:
    message = error_of({"num_steps": -1, "seed": "x", "wrong": 1})
    assert all(name in message for name in ("num_steps", "seed", "wrong", "3 setting(s)"))


def test_settings_by_dotted_name_become_a_nested_table() -> None:
    expected = {"trainer": {"learning_rate": 1e-5, "adamw": {"weight_decay": 0.5}}, "seed": 3}
    dotted = {"trainer.learning_rate": 1e-5, "trainer": {"adamw.weight_decay": 0.5}, "seed": 3}
    assert nest(dotted) == expected
    texts = ["trainer.learning-rate=1e-5", "trainer.adamw.weight_decay=0.5", "seed=3"]
    assert parse_overrides(texts) == expected
    assert parse_overrides(["prompts.template=a = {question}"]) == {
        "prompts": {"template": "a = {question}"}
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_is_valid_and_survives_a_round_trip(path: Path) -> None:
    overrides = {"prompts": {"path": "prompts.jsonl"}} if path.stem != "arithmetic" else {}
    recipe = load_recipe(path, overrides)
    assert Recipe.model_validate(tomllib.loads(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize("settings", [chaos.SETTINGS, tails.SETTINGS])
def test_chaos_and_benchmarks_ask_for_settings_that_exist(settings: dict[str, object]) -> None:
    overrides = parse_overrides([f"{name}={value}" for name, value in settings.items()])
    load_recipe(next(path for path in RECIPES if path.stem == "arithmetic"), overrides)


def test_recipe_of_an_earlier_run_may_name_the_whole_distribution() -> None:
    stored = {"generation": {"temperature": 0.7, "top_p": 1.0, "top_k": 0}}
    assert build_recipe(stored, source="test").generation.temperature == 0.7


def test_missing_and_malformed_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("num_steps = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_recipe(broken)


def test_configuration_stays_small() -> None:
    """A nested section counts as its own; algorithms and workflows, each of which
    has its own settings, are one section each."""
    counts = {name: len([s for s in settings if s.meaning]) for name, _, settings in all_settings()}
    assert sum(counts.values()) <= 195
    assert max(counts[name] for name in counts.keys() - {"algorithm", "workflow"}) <= 14, counts


@pytest.mark.parametrize(
    ("section", "models"),
    [("algorithm", get_args(AnyAlgorithm)), ("workflow", get_args(AnyWorkflow))],
)
def test_default_of_each_algorithm_and_workflow_is_listed(
    section: str, models: tuple[type[Settings], ...]
) -> None:
    (listed,) = [settings for name, _, settings in all_settings() if name == section]
    defaults = {setting.name.rpartition(".")[2]: setting.default for setting in listed}
    assert defaults["max_calls" if section == "workflow" else "epsilon"].count("; ") == 1
    for model in models:
        fields = {name: field for name, field in model.model_fields.items() if name in defaults}
        owner = fields.pop("name").default
        for name, field in fields.items():
            (default,) = [
                part
                for part in defaults[name].split("; ")
                if "(" not in part or owner in part.rpartition("(")[2].rstrip(")").split(", ")
            ]
            own = default.rpartition(" (")[0] if "(" in default else default
            if type(field.default) in (int, float):
                assert float(own) == field.default, (owner, name)
            elif field.default is None or isinstance(field.default, str | bool):
                expected = str(field.default).lower().replace("\n", "\\n") or "empty"
                assert own.lower() == expected, (owner, name)


def test_override_that_names_another_workflow_drops_the_settings_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[workflow]\nname = "multi_turn"\nmax_turns = 3\n')
    assert load_recipe(path, {"workflow": {"max_turns": 4}}).workflow.name == "multi_turn"
    assert not caplog.messages
    assert load_recipe(path, {"workflow": {"name": "single_turn"}}).workflow.name == "single_turn"
    assert caplog.messages == [
        "ignoring recipe settings that do not apply to workflow.name = 'single_turn': max_turns = 3"
    ]


@pytest.mark.parametrize(
    ("recipe", "chosen", "kept", "dropped"),
    [
        (
            {"advantage": "batch_norm", "num_minibatches": 4, "epsilon": 0.1},
            "ppo",
            {"advantage": "batch_norm", "num_minibatches": 4, "epsilon": 0.1},
            "",
        ),
        (  # of tokens there, of whole sequences here
            {"advantage": "batch_norm", "epsilon": 0.25, "epsilon_high": 0.28},
            "gspo",
            {"advantage": "batch_norm", "epsilon": 3e-4, "epsilon_high": 4e-4},
            "epsilon = 0.25, epsilon_high = 0.28",
        ),
        ({"advantage": "batch_norm"}, "ppo_critic", {"advantage": "gae"}, "advantage = 'batch_"),
        ({"dual_clip": 3.0, "kl_coefficient": 0.1}, "dppo", {"kl_coefficient": 0.1}, "dual_clip"),
        (  # together
            {"proximal": "interpolated", "importance_weight_rule": "mask", "num_minibatches": 4},
            "ppo",
            {"proximal": "behavior", "importance_weight_rule": "full", "num_minibatches": 4},
            "proximal = 'interpolated', importance_weight_rule = 'mask'",
        ),
    ],
)
def test_override_that_names_another_algorithm_keeps_what_means_the_same_to_it(
    recipe: dict[str, object],
    chosen: str,
    kept: dict[str, object],
    dropped: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    built = build_recipe({"algorithm": recipe}, {"algorithm": {"name": chosen}}, source="test")
    assert {name: getattr(built.algorithm, name) for name in kept} == kept
    assert built.algorithm.name == chosen
    assert bool(caplog.messages) == bool(dropped)
    assert dropped in caplog.text


@pytest.mark.parametrize("chosen", ALGORITHMS)
def test_recorded_defaults_of_an_algorithm_do_not_apply_to_another(chosen: str) -> None:
    recorded, given = tomllib.loads(dump_recipe(Recipe())), {"algorithm": {"name": chosen}}
    built = build_recipe(recorded, given, source="test")
    assert built.algorithm == build_recipe({}, given, source="test").algorithm


def test_file_of_prompts_needs_no_source() -> None:
    assert build_recipe({"prompts": {"path": "p.jsonl"}}, source="test").prompts.source == "file"


WITH_FILES = {"prompts": {"path": "r", "held_out_path": "h"}}
HUB = [{"name": "hub", "source": "datasets:openai/gsm8k"}]


@pytest.mark.parametrize(
    ("recipe", "given", "expected"),
    [
        ({"prompts": {"source": "arithmetic"}}, {"prompts": {"path": "p"}}, ("file", "p", None, 0)),
        (WITH_FILES, {"prompts": {"path": "p"}}, ("file", "p", "h", 0)),
        (
            WITH_FILES,
            {"prompts": {"source": "datasets:x"}},
            ("datasets:x", None, None, 0),
        ),
        (WITH_FILES, {"sources": HUB}, ("arithmetic", None, None, 1)),
        ({"sources": HUB}, {"prompts": {"path": "p"}}, ("file", "p", None, 0)),
        ({"sources": HUB}, {"prompts": {"source": "calculator"}}, ("calculator", None, None, 0)),
        ({"prompts": {"path": "r"}}, {"prompts": {"source": "file"}}, ("file", "r", None, 0)),
    ],
)
def test_prompts_named_over_a_recipe_replace_those_of_the_recipe(
    recipe: dict[str, object], given: dict[str, object], expected: tuple[object, ...]
) -> None:
    built = build_recipe(recipe, given, source="test")
    paths = [path and str(path) for path in (built.prompts.path, built.prompts.held_out_path)]
    assert (built.prompts.source, *paths, len(built.sources)) == expected


def test_unknown_setting_is_answered_with_the_nearest_one() -> None:
    message = error_of({"trainer": {"lr": 1}, "rewards": [{"verifer": "exact"}]})
    assert "test.toml: 2 setting(s) are wrong" in message
    for name, meant in (
        ("trainer.lr", "trainer.learning_rate"),
        ("rewards.0.verifer", "rewards.verifier"),
    ):
        assert f"{name}: there is no such setting. Did you mean {meant}?" in message
    assert not nearest("xyzzy", setting_names())


def test_mistake_in_what_was_given_over_a_recipe_is_not_blamed_on_the_recipe(
    tmp_path: Path,
) -> None:
    given = {"trainer": {"adamw": {"weight_decay": -2.0}}}
    for text, blamed in (("num_steps = 7\n", ""), ("num_steps = -7\n", "  num_steps = -7: ")):
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(ConfigError) as raised:
            load_recipe(tmp_path / "r.toml", given, spelling=OPTION)
        assert ("r.toml: 2 setting" in str(raised.value)) == bool(blamed)
        assert blamed in str(raised.value)
        assert "  --trainer.adamw.weight-decay = -2.0: " in str(raised.value)


AGENT = {"prompts": {"chat_template": True}, "workflow": {"name": "agent", "path": "my:agent"}}


def test_recipe_has_no_reward_by_default_where_an_agent_gives_the_rewards() -> None:
    recipe = build_recipe(AGENT, source="test")
    assert recipe.rewards == ()
    again = build_recipe(tomllib.loads(dump_recipe(recipe)), source="test")
    assert (again.rewards, again.digest()) == ((), recipe.digest())
    scored = {**AGENT, "workflow": {**AGENT["workflow"], "missing_reward": "score"}}
    for table in (scored, {}):
        assert [r.verifier for r in build_recipe(table, source="test").rewards] == ["numeric"]
    for table in ({}, scored):
        with pytest.raises(ConfigError, match="rewards: expected at least one, found none"):
            build_recipe({**table, "rewards": []}, source="test")


def test_agent_over_a_recorded_recipe_drops_the_unused_reward(tmp_path: Path) -> None:
    recorded = tomllib.loads(dump_recipe(Recipe()))
    assert build_recipe(recorded, AGENT, source="test").rewards == ()
    (tmp_path / "r.toml").write_text(dump_recipe(Recipe()))
    assert load_recipe(tmp_path / "r.toml", AGENT).rewards == ()
    named = {**AGENT, "rewards": [{"verifier": "exact"}]}
    with pytest.raises(
        ConfigError, match=r"nothing asks \['exact'\], .*set rewards = \[\], or"
    ) as no:
        build_recipe(named, source="test")
    assert "workflow.missing_reward = 'score'" in str(no.value)


def test_sources_of_an_agent_need_no_reward() -> None:
    sources = [{"name": name, "path": f"{name}.jsonl"} for name in ("easy", "hard")]
    assert build_recipe({**AGENT, "sources": sources}, source="test").rewards == ()
