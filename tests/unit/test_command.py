"""Every command that is printed works as it is printed, whatever folder the runs are in."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pipelines.jobs.job
import pipelines.pages.report
from areal_flow.config import Recipe, TrackingSettings, build_recipe, dump_recipe
from areal_flow.core.errors import TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.core.program import command
from areal_flow.log.directory import hold_run
from areal_flow.log.run_log import RunLog
from areal_flow.tracking.protocol import describe_run
from areal_flow.tracking.registry import RunTracking
from pipelines.cli.main import main
from pipelines.console.summary import next_commands
from pipelines.jobs.job import SFT, TRAINING, supervised
from pipelines.jobs.stop_signals import Outcome
from pipelines.jobs.train import write_summary
from pipelines.models import newest_checkpoint
from tests.recorded_runs import WRITER, make_recorded_run
from tests.tracked_runs import make_run

HEAVY = {
    "pipelines.jobs.job.start": Outcome(True),
    "pipelines.jobs.job.resume": Outcome(True),
    "areal_flow.tracking.mlflow_pages.serve": None,
    "areal_flow.tracking.registry.track": 0,
    "pipelines.pages.report.write_report": Path("report.html"),
}
"""What some of the commands call, and what that returns, where it takes long."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    layout = make_recorded_run(tmp_path_factory.mktemp("recorded") / "x")
    shutil.copytree(layout.checkpoints, layout.sft_checkpoints)
    return layout


@pytest.fixture(params=["runs", "my 'runs'", "/elsewhere"])
def layout(
    request: pytest.FixtureRequest,
    recorded: RunLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> RunLayout:
    """A run in the default folder, in another one, or far from the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    runs = tmp_path / request.param.removeprefix("/") if request.param[0] == "/" else request.param
    layout = RunLayout(Path(runs).resolve() / "x")
    shutil.copytree(recorded.root, layout.root)
    (layout.root.parent / "mlflow.db").touch()
    return layout


def after_training(layout: RunLayout) -> None:
    print("\n".join(next_commands(layout, "x@0", evaluated=False)))


def after_fine_tuning(layout: RunLayout) -> None:
    SFT.conclude(layout)


def after_failing(job: pipelines.jobs.job.Job) -> Callable[[RunLayout], None]:
    async def fail(*_: Any, **__: Any) -> Outcome:
        raise TrainingError("as a test asks for")

    def drive(layout: RunLayout) -> None:
        failing = replace(job, drive=fail)
        with hold_run(layout) as writer, pytest.raises(TrainingError):
            pipelines.jobs.job._drive(
                failing,
                layout,
                Recipe(),
                writer,
                None,
                resume=True,
                began=0.0,  # type: ignore[arg-type]
            )

    return drive


def without_a_page(layout: RunLayout) -> None:
    TRAINING.conclude(layout)


def while_the_tracker_is_away(layout: RunLayout) -> None:
    RunTracking(layout)._warn(OSError("away"))


def in_mlflow(layout: RunLayout) -> None:
    print(describe_run(layout).text)


def test_description_of_a_run_names_the_agent_that_rewards(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "r")
    workflow = {"name": "agent", "path": "my:agent"}
    layout.config.write_text(dump_recipe(build_recipe({"workflow": workflow}, source="test")))
    recorded = json.loads(layout.inputs.read_text())
    recorded["verifiers"] = [[0, "agent:my:agent@0"]]
    layout.inputs.write_text(json.dumps(recorded))
    description = describe_run(layout)
    assert description.tags["verifier"] == "agent:my:agent@0"
    assert "- rewards: `my:agent`; a completion passes above" in description.text


@pytest.mark.parametrize(
    ("table", "advice"),
    [
        ({}, "train x/config.toml --model MODEL --sft.num-steps 0"),
        ({"sft": {"path": "own.jsonl"}}, "train --data PROMPTS.jsonl --model MODEL"),
        (
            {
                "sft": {"path": "own.jsonl"},
                "prompts": {"chat_template": True, "system_prompt": "Think."},
            },
            "train --data PROMPTS.jsonl --model MODEL --prompts.system-prompt Think.",
        ),
        (
            {"sft": {"path": "own.jsonl"}, "prompts": {"path": "prompts.jsonl"}},
            "train x/config.toml --model MODEL --sft.num-steps 0",
        ),
    ],
)
def test_model_of_own_rows_is_not_trained_further_on_sums(
    recorded: RunLayout,
    tmp_path: Path,
    table: dict[str, Any],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(recorded.root, tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    layout = RunLayout((tmp_path / "x").resolve())
    recipe = build_recipe({**table, "tracking": {"enabled": False}}, source="test")
    layout.config.write_text(dump_recipe(recipe))
    SFT.conclude(layout)
    model = str(newest_checkpoint(layout).relative_to(tmp_path.resolve()))
    assert advice.replace("MODEL", model) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("printed_by", "names"),
    [
        (after_training, {"ui", "trajectories", "lineage", "export", "python"}),
        (after_fine_tuning, {"track", "train", "export"}),
        (after_failing(TRAINING), {"train"}),
        (after_failing(supervised("dpo")), {"dpo"}),
        (without_a_page, {"report"}),
        (while_the_tracker_is_away, {"track"}),
        (in_mlflow, {"report", "trajectories"}),
    ],
)
def test_printed_command_works(
    layout: RunLayout,
    printed_by: Callable[[RunLayout], None],
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("broken")

    monkeypatch.setattr(pipelines.pages.report, "write_report", broken)
    monkeypatch.setattr(pipelines.jobs.job, "track", broken)
    with caplog.at_level(logging.WARNING):
        printed_by(layout)
    captured = capsys.readouterr()
    text = "\n".join((captured.out, captured.err, *caplog.messages))
    pattern = r"(?:areal-flow [a-z]|python -c )(?:[^'\"`:\n]|'[^'\n]*'|\"[^\"\n]*\")*"
    commands = [shlex.split(match) for match in dict.fromkeys(re.findall(pattern, text))]
    printed = {words[0] if words[0] == "python" else words[1] for words in commands}
    assert printed == names
    for target, returned in HEAVY.items():
        monkeypatch.setattr(target, lambda *_, returned=returned, **__: returned)
    for words in commands:
        if words[0] == "python":
            exec(words[2], {})
        else:
            assert main([word.replace("DIRECTORY", "out") for word in words[1:]]) == 0, words


@pytest.mark.parametrize("layout", ["my 'runs'"], indirect=True)
@pytest.mark.parametrize("name", ["areal-flow", pytest.param("", marks=pytest.mark.slow)])
def test_printed_command_runs_in_a_shell_that_does_not_find_it(
    layout: RunLayout, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    if not name:  # an environment without the script
        monkeypatch.setattr("areal_flow.core.program.NAME", "no-such-script")
    opened = next_commands(layout, "x@0", evaluated=False)[-1].splitlines()[0]
    for line, output in (
        (opened, "completion"),
        (command("trajectories", "x", "--limit", 1, runs=layout.root.parent), "1 of 8 that match"),
    ):
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert output in done.stdout


def test_next_commands_ask_the_registry_only_where_it_is_beside_the_runs(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    for uri, model in (("", "models:/areal-flow@x"), ("http://there", "x")):
        finished: Any = SimpleNamespace(
            layout=layout,
            recipe=Recipe(tracking=TrackingSettings(uri=uri)),
            tracking=SimpleNamespace(alias="x", model_version="1"),
            held_out=SimpleNamespace(tables={}),
            log=RunLog(layout, WRITER),
            began=0.0,
            writer=SimpleNamespace(check_current=lambda: None),
        )
        write_summary(finished)
        assert f"areal-flow lineage {model}\n" in capsys.readouterr().out.replace(" --runs", "\n")


def test_default_folder_of_runs_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("report", "x", runs=tmp_path / "runs") == "areal-flow report x"
    assert command("report", "x", runs=Path("b c")) == "areal-flow report x --runs 'b c'"
    assert command("ui", runs=Path("/r")) == "areal-flow ui --runs /r"
