"""The command line: every setting is listed and parsed, and errors say how to fix them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import pipelines.jobs.job
from areal_flow.config import Recipe
from areal_flow.config.listing import all_settings
from areal_flow.core.layout import RunLayout
from pipelines.cli.main import app, main
from pipelines.cli.settings import settings_page
from pipelines.jobs.stop_signals import Outcome
from tests.tracked_runs import make_bare_run

ROOT = Path(__file__).parents[2]
SETTINGS = [setting for _, _, settings in all_settings() for setting in settings]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RunLayout, Recipe]]:
    """Collects the jobs that would start."""
    starts: list[tuple[str, RunLayout, Recipe]] = []

    def start(job: pipelines.jobs.job.Job, layout: RunLayout, recipe: Recipe, **_: Any) -> Outcome:
        starts.append((job.command, layout, recipe))
        return Outcome(False, "SIGTERM")

    monkeypatch.setattr(pipelines.jobs.job, "start", start)
    return starts


def test_every_setting_has_a_meaning_of_one_line() -> None:
    assert len(SETTINGS) > 70
    without = {each.name for each in SETTINGS if not each.meaning}
    assert {name.partition(".")[0] for name in without} == {"sources", "evaluation"}
    assert {f"prompts.{name.rpartition('.')[2]}" for name in without} < {s.name for s in SETTINGS}
    for setting in SETTINGS:
        assert setting.meaning.endswith(".") or setting.name in without, setting
        assert "\n" not in setting.meaning, setting


def test_settings_page_is_what_the_code_says() -> None:
    again = "python -m pipelines.cli.settings > docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), again


@pytest.mark.parametrize("command", ["train", "sft"])
def test_help_shows_every_setting_with_type_default_and_meaning(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [settings for name, _, settings in all_settings() if not name.startswith("[[")]
    for setting in chain.from_iterable(tables):
        option = f"--{setting.name.replace('_', '-')} {setting.kind.upper()}"
        (line,) = [line for line in lines if option in line]
        for part in (setting.meaning.replace("`", ""), f"[default: {setting.default}]"):
            assert part in line
        assert all(choice in line for choice in setting.choices)
        assert setting.rule in line


@pytest.mark.parametrize(
    ("cluster", "shown"),
    [
        ({}, '-m areal_flow.cluster.worker \'{"name": "generator-0"'),
        ({"launcher": "ssh", "remote.hosts": '["127.0.0.1"]'}, "127.0.0.1 'cd "),
        ({"launcher": "slurm", "slurm": '{reward = ["--mem=2G"]}'}, "#SBATCH --mem=2G"),
        ({"launcher": "kubernetes", "kubernetes.image": "here/it:1"}, "image: here/it:1"),
    ],
)
def test_plan_shows_once_what_each_kind_of_worker_would_start(
    cluster: dict[str, str], shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = {"num-generators": "2", **cluster}
    options = [text for name, value in settings.items() for text in (f"--cluster.{name}", value)]
    assert main(["plan", "--placement", *options, "--runs", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert shown in output
    assert output.count("\ngenerator-1  ") == output.count("\ngenerator-0:\n") == 1
    assert "\ngenerator-1:\n" not in output
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_settings(shell: Any) -> None:
    script = app.generate_completion(shell=shell)
    for word in ("trajectories", "take-over", "trainer.learning-rate", "batch_norm"):
        assert word in script


def test_run_that_cannot_be_locked_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        main(["train", "--name", "n", "--runs", str(tmp_path)])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_during_the_preparation_leaves_no_run(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(placements: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(pipelines.jobs.job, "start_fork_server", prepare)
    assert main(["train", "--name", "n", "--runs", str(tmp_path)]) == code
    assert not [*tmp_path.iterdir()]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_interrupt_while_the_program_is_imported_prints_no_traceback() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"areal-flow": "areal_flow.__main__:main"}
    program = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'pipelines.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from areal_flow.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")


def test_settings_reach_the_recipe_over_the_file(
    started: list[tuple[str, RunLayout, Recipe]], tmp_path: Path
) -> None:
    (tmp_path / "r.toml").write_text(
        "num_steps = 7\nseed = 1\n[trainer]\nadamw.weight_decay = 0.5\n"
        "[[sources]]\nname = 'a'\npath = 'a.jsonl'\n"
    )
    arguments = [
        *("train", str(tmp_path / "r.toml"), "--name", "n", "--runs", str(tmp_path / "runs")),
        *("--seed", "9", "--seed", "2", "--trainer.learning-rate", "1e-5"),
        *("--tracking.enabled", "true", "--tracking.enabled", "false"),
        *("--cluster.network.host", "localhost"),
        *("--algorithm.advantage=rloo", "--prompts", "p.jsonl", "--skip-bad-rows"),
        *("--prompts.template", "Q: {question}", "--pass-threshold", "-2", "--model", "7"),
    ]
    assert main(arguments) == 143
    ((command, layout, recipe),) = started
    assert (command, layout.root) == ("train", (tmp_path / "runs" / "n").resolve())
    assert (recipe.num_steps, recipe.seed, recipe.model) == (7, 2, "7")
    assert (recipe.trainer.adamw.weight_decay, recipe.trainer.learning_rate) == (0.5, 1e-5)
    assert recipe.tracking.enabled is False
    assert recipe.cluster.network.host == "localhost"
    assert (recipe.algorithm.advantage, recipe.pass_threshold) == ("rloo", -2.0)
    assert recipe.prompts.source == "file"
    assert (recipe.prompts.path, recipe.sources) == (Path("p.jsonl"), ())
    assert recipe.prompts.skip_bad_rows
    assert recipe.prompts.template == "Q: {question}"


def test_rewards_may_be_the_names_of_verifiers(
    started: list[tuple[str, RunLayout, Recipe]],
) -> None:
    for rewards in ("math", '["math", {verifier = "format", weight = 0.5}]'):
        assert main(["train", "--rewards", rewards]) == 143
    given = [[(each.verifier, each.weight) for each in recipe.rewards] for *_, recipe in started]
    assert given == [[("math", 1.0)], [("math", 1.0), ("format", 0.5)]]


def test_prompts_of_the_hub_replace_the_file_of_a_shipped_recipe(
    started: list[tuple[str, RunLayout, Recipe]],
) -> None:
    hub = '[{name = "hub", source = "datasets:openai/gsm8k"}]'
    assert main(["train", "gsm8k", "--sources", hub]) == 143
    assert main(["train", "gsm8k", "--prompts.source", "datasets:mine"]) == 143
    (of_sources, of_prompts) = [recipe for _, _, recipe in started]
    assert [each.source for each in of_sources.sources] == ["datasets:openai/gsm8k"]
    assert (of_prompts.prompts.source, of_prompts.prompts.path) == ("datasets:mine", None)


def test_working_directory_shadows_no_module_and_is_searched_only_for_user_code(
    started: list[tuple[str, RunLayout, Recipe]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [*before])
    for command in (["runs"], ["settings", "seed"], ["sft"], ["trajectories", "no-run"]):
        main(command)
        assert sys.path == before
    assert main(["train"]) == 143
    assert sys.path == [*before, str(tmp_path)]


def test_default_recipe_and_name(started: list[tuple[str, RunLayout, Recipe]]) -> None:
    assert main(["--runs", "elsewhere", "sft"]) == 143
    ((command, layout, recipe),) = started
    assert command == "sft"
    assert layout.root.parent.name == "elsewhere"
    assert layout.name.startswith("arithmetic-")
    assert recipe.sft.num_steps == 2300


@pytest.mark.parametrize(
    ("command", "section"),
    [("train", "prompts"), ("sft", "sft"), ("dpo", "sft"), ("reward-model", "sft")],
)
def test_data_names_the_input_of_every_command_that_trains(
    started: list[tuple[str, RunLayout, Recipe]], command: str, section: str
) -> None:
    assert main([command, "--data", "mine.jsonl"]) == 143
    ((_, layout, recipe),) = started
    assert getattr(recipe, section).path == Path("mine.jsonl")
    assert layout.name.startswith("mine-")
    assert main([command, "gsm8k", "--data", "mine.jsonl", "--sft.num-steps", "1"]) == 143
    assert started[1][1].name.startswith("gsm8k-")


@pytest.mark.parametrize(
    ("command", "objective"), [("dpo", "dpo"), ("reward-model", "reward_model")]
)
def test_commands_of_pairs_are_fine_tuning_with_their_objective(
    started: list[tuple[str, RunLayout, Recipe]], command: str, objective: str
) -> None:
    assert main([command, "--sft.num-steps", "3"]) == 143
    ((name, layout, recipe),) = started
    assert name == command
    assert layout.name.startswith(f"{objective}-")
    assert (recipe.sft.objective, recipe.sft.num_steps) == (objective, 3)


@pytest.mark.parametrize(
    ("command", "section"), [("train", "trainer"), ("sft", "sft"), ("dpo", "sft")]
)
def test_setting_that_one_section_has_needs_no_section(
    started: list[tuple[str, RunLayout, Recipe]], command: str, section: str
) -> None:
    options = ["--learning-rate", "2e-5", "--max-new-tokens=9", "--trainer.max-grad-norm", "2"]
    assert main([command, *options, "--weight-decay=0.3", "--vllm.enforce-eager=true"]) == 143
    ((_, _, recipe),) = started
    assert getattr(recipe, section).learning_rate == 2e-5
    assert (recipe.trainer.learning_rate == 2e-5) == (section == "trainer")
    assert (recipe.generation.max_new_tokens, recipe.trainer.max_grad_norm) == (9, 2)
    assert (recipe.trainer.adamw.weight_decay, recipe.generation.vllm.enforce_eager) == (0.3, True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], 'Did you mean "train"'),
        (["train", "a.toml", "b.toml"], "Unexpected argument: b.toml. `areal-flow train --help`"),
        (["train", "a.toml", "actor_rollout_ref.rollout.n=8"], "Did you mean --controller.group-s"),
        (["train", "a.toml", "lr=1"], "lr=1: settings are options, --SETTING VALUE. Did you mean"),
        (["train", "--trainer.lr", "1"], "Did you mean --trainer.learning-rate?"),
        (["train", "--stps", "1"], "Unknown option: --stps. Did you mean --num-steps or"),
        (["train", "--num-generations", "8"], "Did you mean --controller.group-size?"),
        (["train", "--actor_rollout_ref.rollout.n", "8"], "Did you mean --controller.group-size?"),
        (["train", "--beta", "0.1"], "Did you mean --algorithm.kl-coefficient?"),
        (["train", "--max-completion-length", "9"], "Did you mean --generation.max-new-tokens?"),
        (["train", "--per-device-train-batch-size", "9"], "mean --controller.batch-size?"),
        (["train", "--num-train-epochs", "3"], "--num-steps? TRL's num_train_epochs differs: "),
        (["train", "--num-iterations", "2"], "TRL's num_iterations has no counterpart here: a ba"),
        (["train", "--temperature", "1"], "of --generation.temperature, --evaluation.temperature"),
        (["train", "--top-p", "0.9"], "--top-p: evaluation.top_p has this name, which only eva"),
        (["runs", "--learning-rate", "1"], "Unknown option: --learning-rate. `areal-flow runs"),
        (["train", "--learning-rate=-1"], "  --trainer.learning-rate = -1: Input should be gr"),
        (["train", "--eval-dataset", "e"], "Did you mean --prompts.held-out-path?"),
        (["train", "--algorithm.name", "grpo"], "name grpo: GRPO is a way to compute advantages"),
        (["train", "--algorithm.name", "dapo"], "dapo: use algorithm.name = 'ppo' with advantage"),
        (["train", "--algorithm.name", "pppo"], "expected one of decoupled_ppo, ppo"),
        (["train", "--sources", "p.jsonl"], "--sources = 'p.jsonl': expected an array, such as ["),
        (["train", "--wd=1"], "--wd. Did you mean --trainer.adamw.weight-decay?"),
        (["train", "--xyzzy", "1"], "Unknown option: --xyzzy. `areal-flow train --help` lists"),
        (["train", "--trainer.learning-rate", "much"], "  --trainer.learning-rate = 'much'"),
        (["train", "--trainer.learning-rate", "-1"], "  --trainer.learning-rate = -1"),
        (["train", "--algorithm.epsilon", "x"], "areal-flow: 1 setting(s) are wrong; nothing was"),
        (["train", "--algorithm.num-minibatches", "99"], "  --algorithm.num-minibatches (99) must"),
        (["train", "--schedule", "often"], 'Choose from: "async", "sync"'),
        (["train", "--num-steps"], "--num-steps"),
        (["train", "--take-over"], "--accept-verifier go with --resume"),
        (["dpo", "--resume", "run", "--data", "p.jsonl"], "--data goes with a new run"),
        (["sft", "--resume", "run", "--data", "p.jsonl"], "--data goes with a new run"),
        (["sft", "--resume", "run", "--accept-verifier"], "Unknown option: --accept-verifier"),
        (["replay", "run", "--step", "one"], '"one"'),
        (["runs", "--trainer.learning-rate", "1"], "Unknown option"),
        (["trajectories", "run", "--limit", "-2"], "expected 0 (all) or more"),
        (["trajectories", "run", "--tokens"], "--tokens goes with --show"),
        (["trajectories", "run", "--show", "1", "--to", "f.jsonl"], "one of --show and --to"),
        (["workers", "add", "run"], "--role requires an argument"),
        (["ui", "--port", "99999"], "99999"),
        (["ui", "--port", "-1"], "-1"),
        (["--json", "train"], "`train` prints no report"),
    ],
)
def test_wrong_usage_says_what_was_expected(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("areal-flow: ")
    assert expected in message
    assert "Traceback" not in message


def test_ui_and_track_find_what_they_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["ui", "--runs", str(tmp_path)]) == 1
    assert "mlflow.db, found none" in capsys.readouterr().err
    tracked: list[tuple[Path, str, str]] = []

    def track(run_directory: Path, uri: str, *, sink: str) -> int:
        tracked.append((run_directory, uri, sink))
        return 3

    monkeypatch.setattr("areal_flow.tracking.registry.track", track)
    root = make_bare_run(tmp_path / "r").root
    assert main(["--runs", str(tmp_path), "track", "r", "--to", "http://there"]) == 0
    assert main(["--runs", str(tmp_path), "track", "r"]) == 0
    assert main(["--runs", str(tmp_path), "track", "r", "--sink", "wandb"]) == 0
    assert tracked == [(root, "http://there", ""), (root, "", ""), (root, "", "wandb")]
    assert "it lacked 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["runs", "doctor"])
def test_reports_can_be_had_as_json(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bare_run(tmp_path / "r")
    for arguments in (["--json", command], [command, "--json"]):
        assert main(["--runs", str(tmp_path), *arguments]) == 0
        output = json.loads(capsys.readouterr().out)
    if command == "runs":
        assert [row["run"] for row in output["runs"]] == ["r"]
    else:
        subjects = {row["what"] for row in output["machine"]}
        assert {"python", "cores", "gpu", "vllm", "engine", "sandbox", "free disk"} <= subjects


def test_resumed_run_keeps_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bare_run(tmp_path / "r", "num_steps = 3\n")
    runs = ["--runs", str(tmp_path), "train", "--resume", "r"]
    for changed in (["--seed", "1"], ["--name", "s"], ["--prompts", "p.jsonl"], ["r.toml"]):
        assert main([*runs, *changed]) == 2
        assert "a resumed run keeps its recipe" in capsys.readouterr().err
    assert main([*runs, "--num-steps", "5"]) == 1
    assert "areal-flow train` prepared" in capsys.readouterr().err


def test_replay_refuses_a_wrong_setting_before_it_reads_the_log(tmp_path: Path) -> None:
    make_bare_run(tmp_path / "r")
    of_adamw = "--set trainer.adamw.weight_decay"
    wrong = {
        "trainer.lr=1": "--set trainer.lr: there is no such setting. Did you mean trainer.learn",
        "trainer.adamw.weight_decay=x": f"{of_adamw} = 'x': ",
        "num_steps=3": "--set num_steps: cannot change what a step computes",
        "trainer.adamw.weight_decay": f"{of_adamw}: expected SECTION.KEY=VALUE",
    }
    code = (
        "import sys; from pipelines.cli.main import main;"
        f"print([main([*sys.argv[1:], given]) for given in {[*wrong]!r}]);"
        "print([name for name in ('torch', 'lance') if name in sys.modules])"
    )
    arguments = ("--runs", str(tmp_path), "replay", "r", "--step", "1", "--set")
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[2, 2, 2, 2]\n[]\n", done.stderr
    for message in wrong.values():
        assert message in done.stderr


@pytest.fixture
def closed_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user may not read, not even root."""
    folder = tmp_path / "closed"
    (folder / "runs").mkdir(parents=True)
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o700)


@pytest.mark.parametrize("command", [["runs"], ["train", "--resume", "r"], ["train"]])
def test_unreadable_folder_is_reported_in_one_line(
    closed_folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", str(closed_folder / "runs"), *command]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"areal-flow: {closed_folder}")
    assert "Permission denied; change its permissions" in line


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("/sys/runs", "/sys/runs: Operation not permitted; change its permissions"),
        ("FILE", "FILE/r: Not a directory; choose another place"),
    ],
)
def test_unwritable_folder_is_reported_in_one_line(
    runs: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    runs, message = (text.replace("FILE", str(file)) for text in (runs, message))
    assert main(["--runs", runs, "train", "--name", "r", "--prompts.num-prompts", "8"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"areal-flow: {message}")


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EEXIST, "choose another place"),
        (errno.ENOSPC, "free some, or choose another place"),
    ],
)
def test_unusable_folder_is_reported_in_one_line(
    code: int, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code), "/runs/r")

    monkeypatch.setattr("pipelines.cli.inspecting.report_settings", fail)
    assert main(["settings"]) == 1
    assert capsys.readouterr().err == f"areal-flow: /runs/r: {os.strerror(code)}; {advice}\n"
