"""What TRL, verl and AReaL call a setting: every published option of theirs is in the table."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from areal_flow.config.listing import all_settings, setting_names
from areal_flow.config.messages import did_you_mean
from areal_flow.config.other_tools import TOOLS, counterparts, counterparts_of, missing, renamed
from pipelines.cli.importing import names_page

ROOT = Path(__file__).parents[2]
OLDER = {"warmup_ratio", "max_prompt_length"}
"""Options of earlier versions of TRL, which many scripts have."""
OF_DAPO = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)
"""What scripts of verl's DAPO add to the published options, by version."""
BESIDE = ("GRPOTrainer.", "LoraConfig.", "model_name_or_path", "dataset_name")
"""Names of a TRL script that are not of its `GRPOConfig`."""


def options_of(tool: str) -> list[str]:
    """Return the published options of a tool; the first line says of which version."""
    first, *names = (ROOT / "tests" / "data" / f"{tool}_options.txt").read_text().splitlines()
    assert first.startswith("# ")
    return names


@pytest.mark.parametrize("tool", TOOLS)
def test_every_published_option_is_a_setting_or_has_a_reason_why_not(tool: str) -> None:
    options = options_of(tool)
    assert len(options) > 180
    assert [each for each in options if not counterparts_of(tool, each)] == []


@pytest.mark.parametrize("tool", TOOLS)
def test_table_has_no_option_that_was_never_published(tool: str) -> None:
    options = options_of(tool)
    for name in counterparts(tool):
        published = any(fnmatchcase(each, name) for each in options) or name.startswith(OF_DAPO)
        assert published or (tool == "trl" and (name in OLDER or name.startswith(BESIDE))), name


@pytest.mark.parametrize("tool", TOOLS)
def test_records_name_settings_that_exist_and_reasons_are_phrases(tool: str) -> None:
    for records in counterparts(tool).values():
        for each in records:
            assert bool(each.setting) != bool(each.reason), each
            assert not each.setting or each.setting in setting_names(), each
            assert not each.values or not each.convert, each
            for text in (each.note, each.reason):
                assert text == text.strip(" .|"), each


def test_values_are_choices_of_the_setting() -> None:
    choices = {each.name: each.choices for _, _, settings in all_settings() for each in settings}
    for tool in TOOLS:
        for record in (each for several in counterparts(tool).values() for each in several):
            allowed = choices.get(record.setting) or ()
            assert not allowed or {*record.values.values()} <= {*allowed, ""}, record


def test_page_is_what_the_table_says() -> None:
    again = "python -m pipelines.cli.importing > docs/guides/names.md"
    assert (ROOT / "docs" / "guides" / "names.md").read_text() == names_page(), again


def test_options_of_an_installed_trl_are_in_the_table() -> None:
    trl = pytest.importorskip("trl")
    if trl.__version__.startswith("1.16."):
        fields = [each.name for each in dataclasses.fields(trl.GRPOConfig)]
        assert [each for each in fields if not counterparts_of("trl", each)] == []


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("num_generations", "Did you mean controller.group_size?"),
        ("--num-generations", "Did you mean controller.group_size?"),
        ("rollout.n", "Did you mean controller.group_size?"),
        ("actor_rollout_ref.rollout.n", "Did you mean controller.group_size?"),
        ("gconfig.n_samples", "Did you mean controller.group_size?"),
        ("max_response_length", "Did you mean generation.max_new_tokens?"),
        ("eval_dataset", "Did you mean prompts.held_out_path?"),
        ("trainer.num_generations", "Did you mean controller.group_size?"),
        ("num_train_epochs", "num_steps? TRL's num_train_epochs differs: training is counted in"),
        ("total_epochs", "num_steps? verl's trainer.total_epochs differs: training is counted"),
        ("train_batch_size", "verl's data.train_batch_size differs: verl counts prompts; here"),
        ("max_head_offpolicyness", "Did you mean controller.max_staleness? AReaL's rollout."),
        ("num_iterations", "TRL's num_iterations has no counterpart here: a batch is trained"),
        ("--vllm-server-port", "TRL's vllm_server_port has no counterpart here: generators are"),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "verl's actor_rollout_ref.actor.fsdp_config.param_offload has no counterpart here",
        ),
        ("critic.learning_rate", "learning_rate?"),  # ours, although verl has a `critic`
        ("trainer.learning_rte", "Did you mean trainer.learning_rate?"),
        ("num_step", "Did you mean num_steps or "),
    ],
)
def test_names_of_other_tools_are_answered_with_ours(name: str, answer: str) -> None:
    assert answer in did_you_mean(name, setting_names())


def test_an_ending_that_means_several_settings_is_no_answer() -> None:
    assert renamed("enable") is None  # seven options of verl end so
    assert renamed("path") is None
    assert missing("controller.group_size") is None
