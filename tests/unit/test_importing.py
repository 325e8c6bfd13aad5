"""`areal-flow import`: files of verl, AReaL and TRL become recipes, and nothing is dropped."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from areal_flow.config import build_recipe
from areal_flow.config.other_tools import TOOLS, counterparts
from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import flatten, nest
from pipelines.cli.main import main
from pipelines.importing.conversions import CONVERSIONS
from pipelines.importing.files import Options, read_options
from pipelines.importing.recipe import Fate, Import, convert
from tests.unit.test_other_tools import options_of

FOLDER = Path(__file__).parents[1] / "data" / "imports"
FILES: dict[str, tuple[str, ...]] = {
    "verl_grpo.yaml": (
        "actor_rollout_ref.actor.clip_ratio_low=0.15",
        "+trainer.total_training_steps=null",
        "~data.val_files",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
    ),
    "verl_ppo.yaml": (),
    "verl_launch.sh": ("trainer.save_freq=7",),
    "verl_arrays.sh": ("data.max_prompt_length=256",),
    "verl_remax.yaml": (),
    "areal_grpo.yaml": ("actor.eps_clip_higher=0.5",),
    "areal_ppo.yaml": (),
    "areal_sapo.yaml": (),
    "trl_grpo.py": (),
    "trl_dr_grpo.py": (),
    "trl_vllm.py": (),
}
"""Files with their overrides; the recipe of each lies beside it."""


def imported(path: Path, overrides: Sequence[str] = ()) -> Import:
    return convert(read_options(path, overrides), path.parent)


def of_yaml(folder: Path, text: str, *overrides: str) -> dict[str, Any]:
    """Return the options of a YAML file."""
    path = folder / "given.yaml"
    path.write_text(text)
    return read_options(path, overrides).given


@pytest.mark.parametrize("name", FILES)
def test_file_becomes_the_recipe_beside_it(name: str) -> None:
    path = FOLDER / name
    result = imported(path, FILES[name])
    assert result.to_toml(name) == path.with_suffix(".toml").read_text()
    written = flatten(tomllib.loads(result.to_toml(name)))
    assert written == flatten(nest(result.table()))
    build_recipe(nest(written), source=name)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yaml")])
def test_every_option_of_a_file_has_a_fate(name: str) -> None:
    tree = yaml.safe_load((FOLDER / name).read_text())
    tree.pop("defaults", None)
    result = imported(FOLDER / name, FILES[name])
    assert {*flatten(tree)} <= result.fates.keys()
    listed = [option for fate in Fate for option in result.with_fate(fate)]
    assert len(listed) == len(set(listed)) == len(result.fates)


@pytest.mark.parametrize("value", [None, 1, "text", [], True, -1.5])
@pytest.mark.parametrize("tool", TOOLS)
def test_every_published_option_has_a_fate_whatever_its_value(tool: str, value: object) -> None:
    options = options_of(tool)
    result = convert(Options(tool, dict.fromkeys(options, value)), FOLDER)
    assert {*options} <= result.fates.keys()
    assert not result.with_fate(Fate.UNKNOWN)


def test_table_names_conversions_that_exist_and_all_are_named() -> None:
    records = (
        each for tool in TOOLS for several in counterparts(tool).values() for each in several
    )
    named = {each.convert for each in records if each.convert}
    assert named <= CONVERSIONS.keys()
    functions = {CONVERSIONS[name] for name in named}
    unused = {name for name, each in CONVERSIONS.items() if each not in functions}
    assert all(name.startswith("_") for name in unused), unused


def test_published_defaults_of_an_installed_trl_are_those_of_the_table() -> None:
    trl = pytest.importorskip("trl")
    if trl.__version__.startswith("1.16."):
        defaults = {each.name: each.default for each in fields(trl.GRPOConfig)}
        for option, (record, *_) in counterparts("trl").items():
            if record.default is not None and option in defaults:
                assert record.default == defaults[option], option


VERL = "data: {train_batch_size: 4}\nactor_rollout_ref: {rollout: {n: 2, name: vllm}}\n"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_size=8", {"data.train_batch_size": 8}),
        ("+data.new=1e-6", {"data.new": 1e-6}),
        ("++data.train_batch_size=1_000", {"data.train_batch_size": 1000}),
        ("data.path='a b.parquet'", {"data.path": "a b.parquet"}),
        ("data.flag=True", {"data.flag": True}),
        ("data.off=null", {"data.off": None}),
        ("data.files=[a.parquet,'b c']", {"data.files": ["a.parquet", "b c"]}),
        ("data.kwargs={a:1,b:x}", {"data.kwargs.a": 1, "data.kwargs.b": "x"}),
        ("data.text=a=b", {"data.text": "a=b"}),
        ("data.copy=${actor_rollout_ref.rollout.n}", {"data.copy": 2}),
        ("~data.train_batch_size", {"data.train_batch_size": None}),
        ("data.train_batch_size.deeper=1", {"data.train_batch_size.deeper": 1}),
    ],
)
def test_overrides_are_read_as_those_of_hydra(
    tmp_path: Path, override: str, expected: dict[str, Any]
) -> None:
    given = of_yaml(tmp_path, VERL, override)
    assert expected.items() <= given.items()
    assert given["actor_rollout_ref.rollout.n"] == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${data.train_batch_size}", 4),
        ("${actor_rollout_ref.rollout.name}-${data.train_batch_size}", "vllm-4"),
        ("${.train_batch_size}", 4),
        ("${..actor_rollout_ref.rollout.n}", 2),
        ("${oc.select:data.nothing,7}", 7),
        ("${oc.select:data.train_batch_size,7}", 4),
        ("${oc.select:data.nothing, null}", None),
        ("${oc.env:AREAL_FLOW_NO_SUCH_VARIABLE,0.5}", 0.5),
        ("${oc.env:AREAL_FLOW_TEST_VARIABLE}", "from outside"),
        ("${oc.select:data.nothing,${data.train_batch_size}}", 4),
        ("1e-6", 1e-6),
        ("1", 1),
        ("1.5", 1.5),
        ("1e3x", "1e3x"),
    ],
)
def test_interpolations_are_resolved_as_by_omegaconf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, expected: object
) -> None:
    monkeypatch.setenv("AREAL_FLOW_TEST_VARIABLE", "from outside")
    given = of_yaml(tmp_path, VERL, f"data.value={value}")
    assert given["data.value"] == expected
    assert type(given["data.value"]) is type(expected)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("N=3", {"data.n": 3}),
        ("N=${N:-4}", {"data.n": 4}),
        ("N=${1:-5}", {"data.n": 5}),
        ("M=6\nN=$M", {"data.n": 6}),
        ("N=$((2 * (3 + M)))", {}),  # M is not known
        ("M=7\nN=$((2 * (3 + M) / 5))", {"data.n": 4}),
        ("N=${M:-${K:-8}}", {"data.n": 8}),
        ("export N='9'  # a comment", {"data.n": 9}),
        ("N=10\nif [ $X ]; then\n  N=11\nfi", {}),
        ("N=10\nif [ $X ]; then\n  N=10\nfi", {"data.n": 10}),
        ("N=$(nproc)", {}),
    ],
)
def test_variables_of_a_script_are_replaced_if_they_are_certain(
    tmp_path: Path, script: str, expected: dict[str, Any]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{script}\npython -m verl.trainer.main_ppo data.seed=1 data.n=$N > log\n")
    options = read_options(path)
    assert options.given == {"data.seed": 1} | expected
    assert bool(options.by_hand) == (not expected)


@pytest.mark.parametrize(
    "command",
    [
        "ray job submit --address=127.0.0.1:8265 -- python3 -m recipe.dapo.main_dapo data.n=1 $A",
        "python3 -m verl.experimental.fully_async_policy.fully_async_main data.n=1 ${A}",
        'uv run python examples/train.py data.n=1 "${OPTIONS[@]}"',
        "python -m verl.trainer.main_ppo data.n=1 actor_rollout_ref.rollout.n=2 \\",
    ],
)
def test_any_program_with_options_of_a_rollout_trains(tmp_path: Path, command: str) -> None:
    path = tmp_path / "run.sh"
    option = "actor_rollout_ref.rollout.n=2"
    path.write_text(
        f"python3 {tmp_path}/rows.py --n 1\nA={option}\nOPTIONS=(\n{option}\n)\n{command}"
    )
    options = read_options(path)
    assert options.given == {"data.n": 1, "actor_rollout_ref.rollout.n": 2}
    assert not options.by_hand


@pytest.mark.parametrize("end", ["\\ \n", "\\  # a comment\n", "\\\n# a comment\n"])
def test_options_after_the_end_of_a_command_are_to_be_set_by_hand(tmp_path: Path, end: str) -> None:
    path = tmp_path / "run.sh"
    rest = '+trainer.total_epochs=2 \\\n"${MORE[@]}" $@'
    path.write_text(f"python -m verl.trainer.main_ppo data.n=1 {end} {rest} > log\n")
    options = read_options(path)
    assert options.given == {"data.n": 1}
    assert {*options.by_hand} == {"trainer.total_epochs", "${MORE[@]}"}
    expected = "bash ends the command before '+trainer.total_epochs=2': at a comment, or a space"
    assert expected in options.by_hand["trainer.total_epochs"]


def test_section_may_be_another_and_a_missing_value_is_none(tmp_path: Path) -> None:
    text = (
        "actor: {optimizer: {lr: 1e-5}, path: '???'}\ncritic: {optimizer: '${actor.optimizer}'}\n"
    )
    assert of_yaml(tmp_path, text) == {
        "actor.optimizer.lr": 1e-5,
        "critic.optimizer.lr": 1e-5,
    }


def test_epochs_become_steps_where_the_prompts_are_here(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["?"] * 40}), tmp_path / "train.parquet")
    text = f"{VERL}trainer: {{total_epochs: 3}}\n"
    path = tmp_path / "given.yaml"
    path.write_text(text)
    result = imported(path, ["data.train_files=train.parquet"])
    assert result.table()["num_steps"] == 30  # 3 epochs of 40 prompts, 4 a step
    assert "num_steps" not in imported(path, ["data.train_files=other.parquet"]).table()


def test_batch_of_no_prompts_is_to_be_set_by_hand(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(VERL)
    result = imported(tmp_path / "a.yaml", ["data.train_batch_size=0"])  # fully asynchronous verl
    assert not {"controller.batch_size", "algorithm.num_minibatches"} & result.table().keys()
    by_hand = result.with_fate(Fate.BY_HAND)
    assert by_hand["data.train_batch_size"] == "0 prompts: set how many completions a step has"


@pytest.mark.parametrize(
    "section",
    [
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
    ],
)
def test_overlong_buffer_is_the_lengths_between_which_the_penalty_grows(
    tmp_path: Path, section: str
) -> None:
    (tmp_path / "a.yaml").write_text(VERL)
    given = ["data.max_response_length=20480", f"+{section}.len=4096", f"+{section}.log=False"]
    on = imported(tmp_path / "a.yaml", [*given, f"+{section}.enable=True"])
    assert on.table()["algorithm.overlong_tokens"] == [16384, 20480]
    off = imported(tmp_path / "a.yaml", [*given, f"+{section}.enable=False"])
    assert "algorithm.overlong_tokens" not in off.table()
    factor = imported(tmp_path / "a.yaml", [*given, f"+{section}.penalty_factor=0.5"])
    assert f"{section}.penalty_factor" in factor.with_fate(Fate.WITHOUT)


def test_kl_term_in_two_places_is_to_be_set_by_hand(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(VERL)
    loss, reward = "actor_rollout_ref.actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"
    result = imported(tmp_path / "a.yaml", [loss, reward, "algorithm.adv_estimator=grpo"])
    assert "algorithm.kl_in" not in result.table()
    assert "algorithm.use_kl_in_reward" in result.with_fate(Fate.BY_HAND)
    result = imported(tmp_path / "a.yaml", [reward, "algorithm.adv_estimator=grpo"])
    table = result.table()
    kl = [table[f"algorithm.kl_{each}"] for each in ("in", "coefficient", "estimator")]
    assert kl == ["reward", 0.001, "k1"]


@pytest.mark.parametrize(
    ("norms", "advantage"),
    [
        ("reward_norm: {mean_level: group, std_level: group}", "grpo"),
        ("reward_norm: {mean_level: group, std_level: null}", "dr_grpo"),
        ("reward_norm: {mean_level: group, std_level: null, mean_leave1out: true}", "rloo"),
        ("reward_norm: {mean_level: group}", "reinforce_baseline"),  # the deviation of the batch
        ("adv_norm: {mean_level: batch, std_level: batch}", "batch_norm"),
        ("reward_norm: null", None),
    ],
)
def test_normalisation_of_areal_is_an_advantage(
    tmp_path: Path, norms: str, advantage: str | None
) -> None:
    (tmp_path / "a.yaml").write_text(f"actor: {{path: m, {norms}}}\ngconfig: {{n_samples: 4}}\n")
    result = imported(tmp_path / "a.yaml")
    assert result.table().get("algorithm.advantage") == advantage
    assert ("algorithm.advantage" in result.with_fate(Fate.BY_HAND)) == (advantage is None)


DAPO = "python3 -m recipe.dapo.main_dapo actor_rollout_ref.rollout.n=16"
SFT = "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=rows.parquet"
CALL = "from trl import GRPOConfig\nGRPOConfig(num_generations=4)\n"


@pytest.mark.parametrize(
    ("name", "text", "overrides", "message"),
    [
        ("a.toml", "", (), "expected YAML of verl or AReaL (.yaml), a script of TRL (.py) or a"),
        ("a.yaml", "a: [", (), "a.yaml is not valid YAML: "),
        ("a.yaml", "- 1\n- 2\n", (), "expected a mapping of options, found list"),
        ("a.yaml", "services: {web: {image: x}}\n", (), "options that neither has: services.web"),
        ("a.yaml", "{}", (), "found options that neither has: none at all"),
        ("a.yaml", "", (), "expected a mapping of options, found NoneType"),
        ("a.yaml", VERL, ("data.n=${data.m}", "data.m=${data.n}"), "refer to each other: data.m"),
        ("a.yaml", VERL, ("train_batch_size",), "expected an override, KEY=VALUE, +KEY=VALUE or"),
        ("a.py", "x = (", (), "a.py is not valid Python: line 1"),
        ("a.py", "print(1)", (), "expected one call of GRPOConfig(...), found none"),
        ("a.py", CALL + CALL, (), "found 2 (line 2, line 4): keep the one to import"),
        ("a.py", CALL, ("seed=1",), "'seed=1': overrides go with YAML, not with a script"),
        ("a.sh", "echo hello\n", (), "expected one command that trains with verl, such as `pytho"),
        ("a.sh", f"{SFT}\npython3 -m verl.model_merger merge\n", (), "and its options, found none"),
        ("a.sh", f"{DAPO}\n{DAPO}\n", (), "found 2: keep one of them in a copy of the script"),
        ("a.sh", "python -m verl.trainer.main_ppo a='\n", (), "No closing quotation from the line"),
        ("a.sh", "X=(\n a=b\n", (), "No closing bracket from the line 'X=(' on"),
    ],
)
def test_file_that_cannot_be_imported_is_refused(
    tmp_path: Path, name: str, text: str, overrides: tuple[str, ...], message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_options(tmp_path / name, overrides)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a file at .*none\.yaml, found none"):
        read_options(tmp_path / "none.yaml")


def test_command_writes_a_recipe_and_lists_what_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["import", str(FOLDER / "areal_grpo.yaml"), "actor.eps_clip_higher=0.5"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "areal_grpo.toml: 42 settings from AReaL's areal_grpo.yaml",
        "total_train_epochs 10 * N / 256 steps, where N is the number of prompts",
        "AReaL counts prompts; here completions are counted",
        "stats_logger.wandb.wandb_api_key",
        "Off or the same here, without a setting: ",
    ):
        assert text in shown
    assert "not-to-be-shown" not in shown
    written = (tmp_path / "areal_grpo.toml").read_text()
    assert written == (FOLDER / "areal_grpo.toml").read_text()
    assert main(command) == 2
    assert "areal_grpo.toml exists: name another file by --to" in capsys.readouterr().err
    assert main([*command, "--to", "new/other.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["controller.batch_size"] == 1024


def test_recipe_that_is_not_valid_yet_is_written_with_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(VERL)
    clip = "actor_rollout_ref.actor.clip_ratio_c=1.1"
    assert main(["import", "a.yaml", "algorithm.adv_estimator=grpo", clip]) == 1
    shown = capsys.readouterr().out
    assert "Not valid yet: a.toml: 1 setting(s) are wrong\n" in shown
    assert "algorithm.dual_clip (1.1) must be above the clip's own end, 1.2" in shown
    assert "dual_clip = 1.1" in Path("a.toml").read_text()
