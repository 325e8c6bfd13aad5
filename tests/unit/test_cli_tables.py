"""Output of commands fits a terminal and a pipe: settings, runs, times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from areal_flow.config.listing import all_settings
from areal_flow.log.database import empty_database
from pipelines.cli.main import main
from pipelines.cli.reports import report_runs
from pipelines.cli.settings import report_settings
from pipelines.console.tables import Report, rendered, short_time
from tests.finished_runs import make_finished_run

NAMES = ("arithmetic-20261122-062324", "short", "a" * 36)


def printed(report: Report, *, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, color_system=None)
    return rendered(console, *report.parts).splitlines()


def test_settings_shows_every_setting_with_type_default_and_meaning() -> None:
    lines = printed(report_settings(None), width=1000)
    for _, _, settings in all_settings():
        for setting in (each for each in settings if each.meaning):
            name = setting.name.rpartition(".")[2]
            matches = [line for line in lines if line.startswith(f"{name} ")]
            assert any(
                setting.meaning in line and setting.default in line and setting.rule in line
                for line in matches
            ), setting


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("trainer.learning-rate", ["trainer.learning_rate"]),
        ("--trainer.learning_rate", ["trainer.learning_rate"]),
        ("num_steps", ["num_steps"]),
        ("[[sources]]", ["sources", *(f"sources.{n}" for n in ("name", "weight", "settings"))]),
        ("sources.path", ["sources.path"]),
    ],
)
def test_settings_of_a_section_or_one_alone(name: str, names: list[str]) -> None:
    sections = report_settings(name).data["sections"]
    assert [each["name"] for section in sections for each in section["settings"]] == names


def test_sections_within_a_section_are_listed_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["settings", "cluster", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert {"cluster", "cluster.network"} <= {section["section"] for section in sections}


def test_unknown_setting_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "trainer.lerning_rate"]) == 2
    assert "did you mean trainer.learning_rate" in capsys.readouterr().err
    assert main(["settings", "zzz"]) == 2
    assert "a section: prompts, " in capsys.readouterr().err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of long and short names, of which one failed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        make_finished_run(folder / name, num_steps=1, state="failed")
    state = {"state": "failed", "reason": "a very long reason " * 8, "driven_s": 1.0}
    (folder / NAMES[0] / "state.json").write_text(json.dumps(state))
    return folder


def test_runs_are_a_line_each_on_eighty_columns_and_no_name_is_cut(runs: Path) -> None:
    head, *lines = printed(report_runs(runs), width=80)
    assert head.split() == ["run", "state", "steps", "pass", "rate", "since", "reason"]
    assert len(lines) == len(NAMES)
    assert [line.split()[0] for line in lines] == sorted(NAMES)
    assert all(len(line) <= 80 for line in lines)


def test_runs_in_a_pipe_have_their_whole_reason_and_json_the_exact_time(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--runs", str(runs)]) == 0
    assert ("a very long reason " * 8).strip() in capsys.readouterr().out
    assert main(["runs", "--json", "--runs", str(runs)]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["runs"]
    assert datetime.fromisoformat(first["since"]).tzinfo is not None


def test_times_are_short_and_local() -> None:
    now = datetime.now(UTC)
    assert short_time(now) == f"{now.astimezone():%d %b %H:%M}"
    assert short_time(now - timedelta(days=800)).count("-") == 2


def test_reader_that_closes_the_pipe_is_no_error() -> None:
    code = "import sys; from pipelines.cli.main import main; sys.exit(main())"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code, "settings", "--json"]
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_queries_show_no_progress_bar() -> None:
    with empty_database() as database:
        assert database.sql("SELECT current_setting('enable_progress_bar')").fetchall() == [
            (False,)
        ]
