"""Mistakes are reported once, by name, before a cluster starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from areal_flow.config import Recipe, dump_recipe, load_recipe
from areal_flow.core.errors import ConfigError, RewardError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import create_run
from areal_flow.log.inputs import record_inputs
from areal_flow.rollout.workflows.openenv import OpenEnv
from pipelines.jobs.preflight import found_verifier, try_verifiers, try_workflow
from pipelines.jobs.prepare import prepare_run
from tests.chat_templates import CHATML, give_chat_template
from tests.integration.conftest import Typed
from tests.integration.runs import cli, small_arguments, small_recipe
from tests.openenv_server import COMMAND
from tests.policies import write_model_directory

VERIFIERS = """
import os, sys, threading, time

def raises(completion, answer):
    return inner({})

def inner(table):
    return table["nothing"]

def needs_tests(completion, tests):
    return 1.0

def exits(completion):
    os._exit(3)

def exits_by_sys(completion):
    sys.exit(3)

def hangs(completion):
    threading.Event().wait()

def returns_nothing(completion):
    pass

async def holds_the_loop(completion):
    time.sleep(60)

def fails_on_nothing(completion):
    return len(completion) / len(completion)

def fails_at_times(completion):
    if len(completion) % 3 == 2:
        raise ValueError("no verdict")
    return len(completion) / 8

def is_slow(completion):
    time.sleep(1.0)
    return 1.0
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Return a prepared run that has not started."""
    layout = RunLayout(tmp_path_factory.mktemp("runs") / "r")
    create_run(layout, small_recipe())
    prepare_run(layout, small_recipe())
    return layout


@pytest.mark.slow
def test_verifier_that_raises_is_refused_before_the_cluster_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(VERIFIERS)
    rewards = '[{verifier = "own:raises"}]'
    done = cli("train", *small_arguments(), "--rewards", rewards, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "areal-flow: rewards.verifier = 'own:raises' fails on the first prompt" in done.stderr
    assert "'nothing' (at inner, own.py, line 8)" in done.stderr
    assert done.stderr.count('return table["nothing"]') == 1
    assert "rewards/function.py" not in done.stderr
    assert "Dask" not in done.stdout
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("needs_tests", "asks for 'tests'; it may ask, by name, for prompt, completion, answer,"),
        ("exits", "exits (status 3) on the first prompt row, instead of returning a reward"),
        ("exits_by_sys", "called sys.exit(3): it must return a reward (at exits_by_sys, own.py"),
        ("hangs", "no verdict on a completion within 0.5 s, it stands in hangs, own.py, line 20"),
        ("returns_nothing", "returned None, expected a number, a Score"),
        ("holds_the_loop", "no verdict on a completion within 0.5 s, it stands in holds_the_loop"),
    ],
)
def test_errors_of_a_verifier_are_explained(
    tmp_path: Path,
    prepared: RunLayout,
    monkeypatch: pytest.MonkeyPatch,
    verifier: str,
    message: str,
) -> None:
    monkeypatch.setattr("pipelines.jobs.preflight.START_TIMEOUT_S", 6.0)
    with pytest.raises(RewardError) as raised:
        tried(tmp_path, prepared, monkeypatch, verifier)
    assert message in str(raised.value)


def test_verifier_that_works_is_shown_with_its_rewards_and_its_time(
    tmp_path: Path, prepared: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = tried(tmp_path, prepared, monkeypatch, "fails_on_nothing")
    assert "own:fails_on_nothing, tried on the first row: 1 for its answer as the" in line
    assert "an error for an empty one; " in line
    (line,) = tried(tmp_path, prepared, monkeypatch, "is_slow", timeout_s=5.0)
    assert "32 completions of a step take 32 s on 1 reward worker(s): raise" in line


def tried(
    folder: Path,
    layout: RunLayout,
    monkeypatch: pytest.MonkeyPatch,
    verifier: str,
    *,
    timeout_s: float = 0.5,
) -> list[str]:
    (folder / "own.py").write_text(VERIFIERS)
    monkeypatch.syspath_prepend(str(folder))
    recipe = small_recipe(rewards=[{"verifier": f"own:{verifier}", "timeout_s": timeout_s}])
    layout.config.write_text(dump_recipe(recipe))
    return try_verifiers(layout, recipe)


AGENTS = """
import json, sys, time
from urllib.request import Request, urlopen

def ask(base_url, api_key, content):
    asked = {"model": "policy", "messages": [{"role": "user", "content": content}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(base_url + "/chat/completions", json.dumps(asked).encode(), headers)) as f:
        return json.load(f)["choices"][0]["message"]["content"]

def works(prompt, answer, base_url, api_key):
    return ask(base_url, api_key, prompt) == answer

def reads_json(prompt, base_url, api_key):
    return json.loads("{" + ask(base_url, api_key, prompt))["reward"]

def leaves_it_to_the_recipe(prompt, base_url, api_key):
    ask(base_url, api_key, prompt)

def raises(prompt):
    return {}["nothing"]

def asks_nothing(prompt):
    return 1.0

def praises(prompt, base_url, api_key):
    return "well done: " + ask(base_url, api_key, prompt)

def exits(prompt):
    import os
    os._exit(3)

class Shouts:
    async def run(self, prompt, context):
        raise ValueError("no")
"""


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Return a prepared run with an agent that has not started."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agents.py").write_text(AGENTS)
    model = write_model_directory(folder / "model")
    give_chat_template(model, CHATML)
    recipe = of_agent("works", model=str(model))
    layout = RunLayout(folder / "runs" / "r")
    create_run(layout, recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        prepare_run(layout, recipe)
    return layout


def of_agent(name: str, **changes: Any) -> Recipe:
    kind = "imported" if name.istitle() else "agent"
    return small_recipe(
        sft={"num_steps": 0},
        prompts={"num_held_out": 4},
        generation={"max_new_tokens": 12, "max_model_len": 0},
        trainer={"tokens_per_micro_batch": 4096},
        workflow={"name": kind, "path": f"agents:{name}"},
        rewards=[] if kind == "agent" else [{"verifier": "numeric"}],
        **changes,
    )


def tried_agent(layout: RunLayout, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(str(layout.root.parents[1]))
    settings = of_agent(name)
    return tried_workflow(layout, workflow=settings.workflow, rewards=settings.rewards)


def tried_workflow(layout: RunLayout, **settings: Any) -> list[str]:
    recipe = load_recipe(layout.config).model_copy(update=settings)
    layout.config.write_text(dump_recipe(recipe))
    record_inputs(
        layout, recipe, verifier=found_verifier(layout, recipe), model=layout.model, reference=None
    )
    return try_workflow(layout, recipe)


def test_context_length_and_chat_template_left_open_are_decided(chatting: RunLayout) -> None:
    recipe = load_recipe(chatting.config)
    assert recipe.generation.max_model_len == 2048, "the model's"
    assert recipe.prompts.chat_template is True


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("works", r"1 answer, .* s; reward 1"),
        pytest.param("reads_json", ", then JSONDecodeError: ", marks=pytest.mark.slow),
        pytest.param("leaves_it_to_the_recipe", "s; reward none", marks=pytest.mark.slow),
    ],
)
def test_agent_is_tried_on_the_first_row(
    chatting: RunLayout, monkeypatch: pytest.MonkeyPatch, agent: str, message: str
) -> None:
    (line,) = tried_agent(chatting, agent, monkeypatch)
    assert line.startswith(f"Workflow agents:{agent}, tried on the first row")
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("raises", "KeyError: 'nothing' (at raises, agents.py, line 21)"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("asks_nothing", "the agent asks_nothing had no answer from its base_url"),
                ("praises", "expected a finite number as the reward, found 'well done: "),
                ("exits", "exits (status 3) on the first prompt row"),
                ("Shouts", "ValueError: no (at run, agents.py, line 35)"),
            )
        ),
    ],
)
def test_agent_that_cannot_work_is_refused_before_the_cluster_starts(
    chatting: RunLayout, monkeypatch: pytest.MonkeyPatch, agent: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^workflow.path = 'agents:{agent}' ") as refused:
        tried_agent(chatting, agent, monkeypatch)
    assert message in str(refused.value)


def test_environment_is_tried_before_the_cluster_starts(chatting: RunLayout) -> None:
    environment = OpenEnv(server=COMMAND, action_field="message", max_actions=1)
    (line,) = tried_workflow(chatting, workflow=environment, rewards=())
    assert line.startswith(f"Workflow {COMMAND}, tried on the first row with its answer")
    assert re.search(r"1 answer, .* s; reward [1-9]", line)
    broken = OpenEnv(server="echo no game; exit {port}")
    with pytest.raises(ConfigError, match=r"^workflow.server = .* ended with exit .*: no game"):
        tried_workflow(chatting, workflow=broken, rewards=())


@pytest.mark.walk
def test_command_tries_an_agent_before_the_cluster_starts(
    chatting: RunLayout, tmp_path: Path
) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    recipe = of_agent("raises", model=str(chatting.root.parents[1] / "model"))
    (tmp_path / "r.toml").write_text(dump_recipe(recipe))
    done = cli("train", "r.toml", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "workflow.path = 'agents:raises' fails on the first prompt row: KeyEr" in done.stderr
    assert "Dask" not in done.stdout


def test_stop_token_that_no_tokenizer_has_is_refused_with_nothing_left_behind(
    tmp_path: Path, typed: Typed
) -> None:
    stop = ("--generation.stop.token-ids", "[4711]")
    done = typed("train", *small_arguments(), *stop, cwd=tmp_path)
    assert done.returncode == 1
    assert "generation.stop.token_ids: expected tokens of the model, found 4711" in done.stderr
    assert not [*(tmp_path / "runs").glob("*")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Train a model directory; return the folder, stdout and stderr."""
    folder = tmp_path_factory.mktemp("trained")
    model = write_model_directory(folder / "model")
    (folder / "own.py").write_text(VERIFIERS)
    done = cli(
        *("train", "--name", "r", *small_arguments(), "--model", model, "--sft.num-steps", "0"),
        *("--num-steps", "2", "--prompts.num-held-out", "32", "--generation.max-model-len", "64"),
        *("--rewards", '[{verifier = "own:fails_at_times"}]'),
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout, done.stderr


@pytest.mark.walk
def test_failure_is_printed_once_and_then_counted(trained: tuple[Path, str, str]) -> None:
    _, output, warned = trained
    assert "Verifier own:fails_at_times, tried on the first row: " in output
    assert warned.count('raise ValueError("no verdict")') == 1
    assert "a verifier failed 10 times so far: ValueError in fails_at_times, own.py, line" in warned
    assert len(warned.splitlines()) < 30, warned


@pytest.mark.walk
def test_output_has_no_bars_of_libraries_and_no_stage_that_was_not(
    trained: tuple[Path, str, str],
) -> None:
    _, output, warned = trained
    assert "Loading weights" not in output + warned
    assert "fine-tuning" not in output
    assert "2 steps in " in output


@pytest.mark.walk
def test_evaluation_prints_its_settings_and_its_model(trained: tuple[Path, str, str]) -> None:
    folder, _, _ = trained
    done = cli("evaluate", "r", "--num-prompts", "8", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Evaluating r (step 2 of run r) on 8 held-out prompts" in done.stderr
    assert "answered 8/8" in done.stderr
    assert "r (step 2 of run r): held-out prompts, one sample each" in done.stdout
    assert "00000002" not in done.stdout


@pytest.mark.walk
def test_exported_files_can_be_read_by_others(trained: tuple[Path, str, str], typed: Typed) -> None:
    folder, _, _ = trained
    done = typed("export", "r", "plain", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "touched").touch()
    usual = (folder / "touched").stat().st_mode
    assert {path.name: path.stat().st_mode for path in (folder / "plain").iterdir()} == {
        path.name: usual for path in (folder / "plain").iterdir()
    }


def test_model_that_nobody_registered_leaves_no_registry(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "runs").mkdir()
    done = typed("evaluate", "models:/areal-flow@current", cwd=tmp_path)
    assert done.returncode == 1
    assert "expected a registry at sqlite:///" in done.stderr
    assert "found none" in done.stderr
    assert not list(tmp_path.rglob("*.db"))
