"""Output of workers in the run's log, with their names; events as JSON; `areal-flow logs`."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from areal_flow.cluster.launchers.child import OUTPUT, Child, last_line, start_process
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.config import Recipe
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import create_run, hold_run, leave_run
from pipelines.cli.main import main
from pipelines.console.progress import make_progress
from pipelines.console.run_log import log_kept, logged_lines, logged_warnings, print_as, say
from tests.unit.test_progress import ROW

PLACEMENT = WorkerPlacement("reward-0", "reward", 1)
PROGRAM = """
import logging, os, sys
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
print("one reward: 0.5")
logging.getLogger("own").warning("a long answer")
os.write(1, bytes([0xC3]))
sys.stdin.read(1)
os.write(2, bytes([0xA4]) + b"\\n50%\\r100%\\n\\n")
os.write(1, b"no newline")
"""


async def printed_by_child(child: Child) -> None:
    await asyncio.sleep(0.3)
    child.input.write(b"x")
    await child.ended.wait()
    child.close()


def test_output_of_workers_is_in_the_log_by_name_and_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def print_lines() -> None:
        child = Child(start_process([sys.executable, "-c", PROGRAM], PLACEMENT), PLACEMENT.name)
        await printed_by_child(child)
        assert last_line(child.last_output) == "no newline"

    path = tmp_path / "train.log"
    with log_kept(path):
        asyncio.run(print_lines())
    expected = ["one reward: 0.5", "WARNING own: a long answer", "ä", "50%", "100%", "no newline"]
    assert capsys.readouterr().err.splitlines() == expected
    text = path.read_text(encoding="utf-8")
    assert [line[20:] for line in text.splitlines()] == [f"[reward-0] {line}" for line in expected]
    assert logged_warnings(path) == [], "a page of warnings has those of the driver"


def print_until_the_test_ends(
    monkeypatch: pytest.MonkeyPatch, log_format: str, run: str = "sums"
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    for logger in (OUTPUT, logging.getLogger()):
        monkeypatch.setattr(logger, "handlers", [*logger.handlers])
    print_as(log_format, run)


def test_each_event_is_an_object_with_its_step_and_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    print_until_the_test_ends(monkeypatch, "json")
    progress = make_progress(num_steps=4, num_generators=1)
    with log_kept(tmp_path / "train.log"):
        say("Run sums", "in two lines")
        progress.step(ROW)
        OUTPUT.log(logging.WARNING, "%s", "out of memory", extra={"worker": "generator-1"})
        try:
            raise ValueError("expected 1\nfound 2")
        except ValueError:
            logging.getLogger("areal_flow.x").exception("it failed")
        print("a verifier prints", end=" ")
        print("in the driver")
    subprocess.run(["echo", "a trial"], check=True)
    out, err = capfd.readouterr()
    events: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert {tuple(event) for event in events} == {
        ("time", "level", "run", "step", "worker", "message")
    }
    assert {event["run"] for event in events} == {"sums"}
    shown = [(each["level"], each["step"], each["worker"], each["message"]) for each in events]
    assert shown[0] == ("INFO", 0, "driver", "Run sums")
    assert shown[1] == ("INFO", 0, "driver", "in two lines")
    assert shown[2][1] == ROW["step"] == 3
    assert shown[2][3].startswith("step 3/")
    assert shown[3] == ("WARNING", 3, "generator-1", "out of memory")
    assert shown[4][:3] == ("ERROR", 3, "driver")
    assert shown[4][3].startswith("it failed\nTraceback")
    assert shown[4][3].endswith("ValueError: expected 1\nfound 2")
    assert shown[5:] == [("INFO", 3, "driver", "a verifier prints in the driver")]
    assert err == "a trial\n", "other processes cannot break the lines of objects"
    assert "[generator-1] out of memory" in (tmp_path / "train.log").read_text()


def test_text_log_format_prints_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_until_the_test_ends(monkeypatch, "text")
    say("Run sums")
    assert capsys.readouterr().out == "Run sums\n"


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Return a run of two generators, one of which was a Slurm job, that ended."""
    made = RunLayout((tmp_path / "runs" / "sums").resolve())
    create_run(made, Recipe())
    made.log.write_text(
        "2026-01-02 03:04:05 Starting 3 workers\n"
        "2026-01-02 03:04:06 [generator-1] loading\n"
        "2026-01-02 03:04:07 [generator-10] loading\n"
        "2026-01-02 03:04:08 WARNING areal_flow.cluster.pool: generator-1 died (signal 9)\n"
    )
    made.jobs.mkdir()
    (made.jobs / "generator-1-42.log").write_text("slurm: started\n")
    return made


def logs(layout: RunLayout, *options: str) -> int:
    return main(["logs", layout.name, "--runs", str(layout.root.parent), *options])


def test_log_of_a_run_has_its_drivers_and_workers(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logs(layout) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[-1] == "[generator-1] slurm: started"


@pytest.mark.parametrize("follow", [(), ("--follow",)], ids=["once", "until the run ends"])
def test_log_of_a_worker_has_its_output_and_messages_about_it(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], follow: tuple[str, ...]
) -> None:
    assert logs(layout, "--worker", "generator-1", *follow) == 0
    assert [line[20:] for line in capsys.readouterr().out.splitlines()] == [
        "[generator-1] loading",
        "WARNING areal_flow.cluster.pool: generator-1 died (signal 9)",
        " started",
    ]


def test_wrong_name_of_a_worker_is_reported(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logs(layout, "--worker", "generator1") == 2
    assert "--worker generator1: expected one such as generator-0" in capsys.readouterr().err
    assert logs(layout, "--worker", "generator-7") == 1
    assert "train.log is of generator-7, or names it" in capsys.readouterr().err


def test_log_is_followed_until_its_driver_ends(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor() as pool, hold_run(layout) as writer:
        following = pool.submit(logs, layout, "--follow")
        sleep(0.3)
        with layout.log.open("a") as file:
            file.write("2026-01-02 03:04:09 the last line\n")
        leave_run(layout, writer, "finished", seconds=1.0)
        assert following.result(timeout=10) == 0
    assert capsys.readouterr().out.count("the last line") == 1


def test_line_that_is_being_written_is_read_when_it_is_whole(layout: RunLayout) -> None:
    num_read = Counter[Path]()
    assert len([*logged_lines(layout, num_read)]) == 5
    with layout.log.open("a") as file:
        file.write("half a ")
        file.flush()
        assert [*logged_lines(layout, num_read)] == []
        file.write("line\n")
    assert [*logged_lines(layout, num_read)] == ["half a line"]
    assert [*logged_lines(layout, num_read)] == []
