"""A real kernel without ipywidgets: one display per run, and interrupts that stop it."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import observed_state
from areal_flow.policy.checkpoints import list_checkpoints
from tests import notebooks
from tests.integration.runs import ENVIRONMENT, SMALL, check_accounting
from tests.policies import write_model_directory

SETTINGS: dict[str, Any] = {
    **{key: SMALL[key] for key in ("generation", "controller")},
    "num_steps": 200,
}
PREPARE = f"""
import sys
sys.modules["ipywidgets"] = None  # as where it is not installed
import json, logging, os, time
import areal_flow
import polars, tornado.log  # polars has an interrupt handler, and a variable of its own
rows = [{{"question": f"{{n}} + 1 =", "answer": str(n + 1)}} for n in range(40)]
def brevity(completion): return 1 / (1 + len(completion))
def slow(completion): time.sleep(0.08); return 1 / (1 + len(completion))
settings = {SETTINGS!r}
def around(): return dict(os.environ, tornado=logging.getLogger("tornado.access").level)
before = around()
"""
TRAIN = "run = areal_flow.train(prompts=rows, rewards=[{reward}], name='{name}', **settings)"
SCRIPT = f"""
import areal_flow
def brevity(completion): return 1 / (1 + len(completion))
rows = [{{"question": f"{{n}} + 1 =", "answer": str(n + 1)}} for n in range(40)]
settings = dict({SETTINGS!r}, name="script", tracking={{"enabled": False}})
run = areal_flow.train(prompts=rows, rewards=[brevity], **settings)
print("steps:", len(run.steps()) - 1, flush=True)
"""


@dataclass
class Cell:
    """The output of a cell."""

    printed: str = ""
    warned: str = ""
    """What stands on standard error, which a notebook shows in red."""
    displays: list[str] = field(default_factory=list)
    """Their ids, once each, in the order in which they were made."""
    shown: dict[str, dict[str, str]] = field(default_factory=dict)
    """What each shows in the end."""
    error: list[str] = field(default_factory=list)


class Kernel:
    """A notebook kernel."""

    def __init__(self, folder: Path) -> None:
        self._manager = KernelManager()
        self._manager.start_kernel(cwd=str(folder), env=ENVIRONMENT)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, code: str, *, interrupt_at: Sequence[str] = ()) -> Cell:
        """Run a cell; interrupt the kernel each time that the next of some texts is shown."""
        cell, waiting = Cell(), list(interrupt_at)
        request = self._client.execute(code)
        while True:
            message = self._client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            text = take(cell, message["msg_type"], message["content"])
            if waiting and waiting[0] in " ".join(text.split()):  # a cell breaks long lines
                del waiting[0]
                self._manager.interrupt_kernel()
            if message["content"].get("execution_state") == "idle":
                assert not waiting, f"{waiting} was never shown"
                return cell

    def end(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def take(cell: Cell, kind: str, content: dict[str, Any]) -> str:
    """Add a message to the output of a cell; return its text."""
    if kind == "stream":
        if content["name"] == "stderr":
            cell.warned += content["text"]
        else:
            cell.printed += content["text"]
        return str(content["text"])
    if kind == "error":
        cell.error = content["traceback"]
    if kind == "execute_result":
        cell.shown["result"] = content["data"]
    if kind in ("display_data", "update_display_data"):
        identity = content["transient"].get("display_id", "none")
        if kind == "display_data":
            cell.displays.append(identity)
        cell.shown[identity] = content["data"]
        return str(content["data"]["text/plain"])
    return ""


@pytest.mark.walk
def test_first_steps_go_from_rows_to_curves_by_themselves(tmp_path: Path) -> None:
    notebook = notebooks.execute("first_steps", tmp_path)
    assert notebooks.shape(notebook) == notebooks.shape(notebooks.read("first_steps"))
    (root,) = (tmp_path / "runs").glob("first-steps-*")
    check_accounting(RunLayout(root))
    assert observed_state(RunLayout(root)).state == "finished"
    steps = areal_flow.open_run(root).steps()
    assert steps.step.max() == 50
    assert steps.reward_mean.tail(5).mean() > 3 * steps.reward_mean.iloc[1:6].mean()
    assert set(steps.writer_epoch) == {1, 2}, "an interrupt and a resume"
    kinds = [set(o.get("data", ())) for cell in notebook.cells for o in cell.get("outputs", ())]
    assert any("image/png" in kind for kind in kinds)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kernel, Path]]:
    """A kernel that imported the package, and its folder."""
    folder = tmp_path_factory.mktemp("notebook")
    started = Kernel(folder)
    try:
        assert started.run(PREPARE).error == []
        yield started, folder
    finally:
        started.end()


def state_of(folder: Path, name: str) -> tuple[str, str, RunLayout]:
    """Return the final state of a run, by its own record and by MLflow's, and its path."""
    layout = RunLayout(folder / "runs" / name)
    with sqlite3.connect(folder / "runs" / "mlflow.db") as database:
        (status,) = database.execute("SELECT status FROM runs WHERE name = ?", [name]).fetchone()
    return observed_state(layout).state, str(status), layout


@pytest.mark.slow
def test_first_interrupt_finishes_the_step_and_the_cell_returns_the_run(
    kernel: tuple[Kernel, Path],
) -> None:
    notebook, folder = kernel
    cell = notebook.run(TRAIN.format(reward="brevity", name="one"), interrupt_at=["3/200"])
    assert (cell.error, cell.warned) == ([], "")
    assert "SIGINT: finishing this step; once more to stop at once" in cell.printed
    assert "safe. Continue with: areal_flow.train(resume='one')\n" in cell.printed
    state, status, layout = state_of(folder, "one")
    assert (state, status) == ("stopped", "KILLED")
    num_steps = int(notebook.run("print(len(run.steps()) - 1)").printed)
    assert 3 <= num_steps < 100, "it went on after the interrupt"
    assert max(list_checkpoints(layout.checkpoints)) == num_steps
    check_accounting(layout)

    (display,) = cell.displays
    shown = cell.shown[display]
    assert {"text/plain", "text/html"} <= shown.keys()
    text = shown["text/plain"]
    assert text.index("Starting 3 workers") < text.index(f"{num_steps}/200") < text.index("reward")
    assert f"over the last {min(8, num_steps)} steps" in text
    assert re.search(rf"step +{num_steps}/200  .?━{{3}}[^|]*left +\d+:\d\d", text)
    assert max(map(len, text.splitlines())) <= 76, "it fits a cell"
    changed = "print(sorted(dict(around().items() ^ before.items())))"
    assert notebook.run(changed).printed == "[]\n"
    version = notebook.run("!{sys.executable} -m areal_flow --version")
    assert version.printed.startswith(f"areal-flow {areal_flow.__version__}"), "a warning of a fork"


@pytest.mark.slow
def test_second_interrupt_ends_the_cell_at_once_in_few_lines(kernel: tuple[Kernel, Path]) -> None:
    notebook, folder = kernel
    train = TRAIN.format(reward="slow", name="two")
    cell = notebook.run(train, interrupt_at=["1/200", "finishing this step"])
    assert "SIGINT: stopping at once" in cell.printed
    assert cell.error == ["KeyboardInterrupt: stopped at once by SIGINT"]
    assert "Traceback" not in cell.printed
    state, status, layout = state_of(folder, "two")
    assert (state, status) == ("stopped", "KILLED")
    check_accounting(layout)
    assert notebook.run("print('alive')").printed == "alive\n"


@pytest.mark.slow
def test_interrupt_of_an_evaluation_ends_it_in_few_lines(kernel: tuple[Kernel, Path]) -> None:
    notebook, _ = kernel
    settings = "**{**settings, 'num_steps': 1}"
    notebook.run(f"areal_flow.train(prompts=rows, rewards=brevity, name='few', {settings})")
    evaluate = "areal_flow.evaluate('few', prompts=rows)"
    cell = notebook.run(evaluate, interrupt_at=["on 40 held-out prompts"])
    assert cell.error == ["KeyboardInterrupt: stopped at once by SIGINT"]


@pytest.mark.walk
def test_directory_of_hugging_face_is_trained_and_evaluated_without_a_warning(
    tmp_path: Path,
) -> None:
    write_model_directory(tmp_path / "model")
    notebook = Kernel(tmp_path)  # of its own: a library warns on its first import only
    try:
        few = "model='model', tracking={'enabled': False}, **{**settings, 'num_steps': 1}"
        notebook.run(PREPARE)
        cell = notebook.run(f"areal_flow.train(prompts=rows, rewards=brevity, name='r', {few})")
        assert (cell.error, cell.warned, len(cell.displays)) == ([], "", 1)
        evaluate = "areal_flow.evaluate('r', temperature=0, num_prompts=4).policy_version"
        assert notebook.run(evaluate).shown["result"]["text/plain"] == "1"
        result = notebook.run("areal_flow.evaluate('r', num_prompts=4)").shown["result"]
        assert "pass rate" in result["text/plain"]
        assert "completion" not in result["text/plain"], "a cell shows no list of answers"
    finally:
        notebook.end()


def test_mistake_is_shown_with_the_calls_of_the_user_alone(kernel: tuple[Kernel, Path]) -> None:
    notebook, _ = kernel
    cell = notebook.run(
        "def begin(path):\n    return areal_flow.train(prompts=path)\n"
        "for path in ('absent.jsonl', 'other.jsonl'):\n    begin(path)"
    )
    *frames, message = cell.error
    assert [frame.splitlines()[1].strip() for frame in frames] == [
        "begin(path)",
        "return areal_flow.train(prompts=path)",
    ]
    assert re.search("expected a file or folder of rows at .*absent.jsonl", message)
    assert len(message.splitlines()) < 4


@pytest.mark.walk
def test_signal_stops_a_script_after_its_step_and_the_script_goes_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = []
    try:
        assert script.stdout is not None
        for line in script.stdout:
            printed.append(line)
            if line.startswith("step 3/"):
                script.send_signal(signal.SIGINT)
        assert script.wait() == 0, "".join(printed)
    finally:
        script.kill()
    name, _, num_steps = printed[-1].partition(" ")
    assert name == "steps:"
    assert 3 <= int(num_steps) < 100
    assert observed_state(RunLayout(tmp_path / "runs" / "script")).state == "stopped"
