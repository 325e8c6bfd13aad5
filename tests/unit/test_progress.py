"""A driver's live display and its log."""

from __future__ import annotations

import logging
import math
import re
import sys
import warnings
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.core.types import SKIPPED_UPDATES
from pipelines.console import progress as shown
from pipelines.console.progress import (
    Lines,
    NotebookCell,
    Progress,
    Sparkline,
    Terminal,
    counted,
)
from pipelines.console.run_log import log, log_kept, logged_warnings, say
from pipelines.console.tables import Table

ESCAPE = "\x1b"
ROW: dict[str, Any] = {
    "step": 3,
    "reward_mean": 0.5,
    "metrics": {PASS_RATE: 0.25},
    "completion_tokens_mean": 8.0,
    "staleness_mean": 1.0,
    "staleness_max": 2,
    "num_generated_tokens": 100,
    "num_trained_tokens": 90,
    "step_s": 2.0,
    "generate_s": 1.0,
    "read_s": 0.3,
    "train_s": 1.0,
    "stage_s": 0.1,
}


def on_terminal(file: StringIO) -> Progress:
    console = Console(file=file, force_terminal=True, width=80, markup=False, highlight=False)
    return Progress(4, 1, screen=Terminal(console))


def test_messages_appear_above_a_live_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    file, terminal = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    live = on_terminal(file)
    live.step(ROW)
    say("", "SIGINT: finishing this step")
    live.close()
    assert "SIGINT: finishing this step" in file.getvalue()
    assert terminal.getvalue() == "", "a picture would be drawn over it"


def test_skipped_updates_are_shown_while_they_are_among_the_last_steps() -> None:
    file = StringIO()
    progress = Progress(4, 1, screen=Lines(Console(file=file, width=300)))
    progress.step(ROW)
    assert "SKIPPED" not in file.getvalue()
    progress.step({**ROW, "metrics": {**ROW["metrics"], SKIPPED_UPDATES: 0.25}})
    assert "SKIPPED 1 of 2 steps" in file.getvalue()


def test_a_step_is_shown_with_its_own_values_and_rates_are_labelled() -> None:
    file, terminal = StringIO(), StringIO()
    lines = Progress(4, 1, screen=Lines(Console(file=file, width=300)))
    live = on_terminal(terminal)
    for step, reward in ((1, 0.0), (2, 1.0)):
        row = {**ROW, "step": step, "reward_mean": reward, "metrics": {PASS_RATE: reward}}
        lines.step(row)
        live.step(row)
    live.close()
    line = file.getvalue().splitlines()[1]
    assert line.startswith("step 2/4  reward 1.000  pass 1.000  length 8.0  staleness ")
    assert len(line) < 180
    for value in ("reward", "pass", "length", "staleness", "generated tok/s", "trainer busy"):
        assert line.count(value) == 1
    left = [line.split() for line in screen(terminal.getvalue()).splitlines()]
    assert ["reward", "1.000", "▁█"] in left
    assert ["tok/s", "and", "busy", "over", "the", "last", "2", "steps"] in left


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colours", [True, False])
def test_a_picture_has_the_same_lines_at_any_width_and_never_grows(
    width: int, colours: bool
) -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=width, no_color=not colours)
    live = Progress(60, 1, screen=Terminal(console))
    for step in range(1, 61):
        live.step({**ROW, "step": step, "reward_mean": step / 60})
    live.close()
    lines = screen(file.getvalue()).rstrip().splitlines()
    assert max(map(len, lines)) <= min(width, 70)
    assert [line.split()[0] for line in lines] == [
        *("step", "left", "reward", "pass", "length", "staleness"),
        *("generated", "trained", "generators", "trainer", "tok/s"),
    ]
    assert (re.search(r"\x1b\[[\d;]*3\d", file.getvalue()) is not None) == colours
    reward = next(line for line in lines if "reward" in line).split()[-1]
    assert (reward[0], reward[-1]) == ("▁", "█")
    assert list(reward) == sorted(reward)


def test_a_sparkline_draws_what_is_finite_with_the_characters_that_there_are() -> None:
    def drawn(*numbers: float, **options: Any) -> str:
        console = Console(file=StringIO(), width=10, **options)
        console.print(Sparkline(numbers))
        return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]

    assert drawn(0.0, 0.5, 1.0) == "▁▅█"
    assert drawn(2.0, math.nan, 2.0, math.inf) == "▁▁"
    assert drawn(math.nan) == drawn() == ""
    assert len(drawn(*range(1000))) == 10


def test_a_cell_shows_bar_and_time_left_and_keeps_no_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures: list[dict[str, str]] = []
    display = SimpleNamespace(update=lambda data, raw: pictures.append(data))
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: display)
    cell = NotebookCell()
    live = Progress(4, 1, screen=cell)
    live.phase("Training")
    live.step(ROW)
    assert re.search(r"step +3/4  ━{10,}[^|]*left +0:02", pictures[-1]["text/plain"])
    assert "━━━" in pictures[-1]["text/html"]
    assert cell._console.file.getvalue() == "", "a picture a step would fill memory"


def test_a_pipe_gets_a_line_a_step_and_few_of_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 12.0, 16.0, 17.0])
    monkeypatch.setattr(shown, "monotonic", lambda: next(clock))
    file = StringIO()
    lines = Progress(4, 1, screen=Lines(Console(file=file, width=20, markup=False)))
    lines.phase("Evaluating version 0 on 5 held-out prompts")
    for done in range(1, 6):
        lines.count("answered", done, 5)
    lines.step(ROW)
    first, *counts, step = file.getvalue().splitlines()
    assert first == "Evaluating version 0 on 5 held-out prompts"
    assert counts == ["  answered 1/5", "  answered 4/5", "  answered 5/5"]
    assert step.startswith("step 3/4  reward 0.500  pass 0.250")


def screen(written: str) -> str:
    """Return the final content of a terminal after erasing and overwriting lines."""
    lines, row, column = [""], 0, 0
    for code, char in re.findall(rf"{ESCAPE}\[([?\d;]*[A-Za-z])|(.)", written, re.DOTALL):
        if code == "2K":
            lines[row] = ""
        elif code.endswith("A"):
            row -= int(code[:-1])
        elif char == "\r":
            column = 0
        elif char == "\n":
            row, column = row + 1, 0
            lines += [""] * (row - len(lines) + 1)
        elif char:
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
    return "\n".join(lines)


def test_the_last_picture_of_each_phase_stays_on_a_terminal() -> None:
    file = StringIO()
    live = on_terminal(file)
    live.phase("Training")
    live.step({**ROW, "step": 1})
    live.step({**ROW, "step": 4})
    live.phase("Evaluating")
    live.count("answered", 32, 64)
    live.count("answered", 64, 64)
    live.close()
    left = screen(file.getvalue())
    assert left.index("Training") < left.index("4/4") < left.index("Evaluating")
    assert left.index("Evaluating") < left.index("answered 64/64")
    assert "1/4" not in left
    assert "32/64" not in left


def test_log_has_every_step_and_count_of_a_terminal_without_its_codes(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    live = on_terminal(StringIO())
    with log_kept(path):
        live.phase("Training")
        live.step(ROW)
        live.count("answered", 64, 64)
        live.close()
        say(Table([{"difficulty": 3, "after": Text("1.000", "green")}], "Held-out prompts"))
    text = path.read_text()
    assert ESCAPE not in text
    for part in ("Training", "step 3/4", "answered 64/64", "Held-out prompts", "1.000"):
        assert part in text
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line) for line in text.splitlines())


def test_log_has_warnings_and_is_appended_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    assert logged_warnings(path) == []
    for life in (1, 2):
        with log_kept(path):
            say(f"driver {life}")
            log("not printed")
            logging.getLogger("areal_flow.cluster.pool").warning("generator-%d died", life)
            warnings.warn(f"a library's warning {life}", stacklevel=1)
    say("after its end")
    logging.getLogger("areal_flow.cluster.pool").warning("after its end")
    assert capsys.readouterr().out == "driver 1\ndriver 2\nafter its end\n"
    text = path.read_text()
    assert text.index("driver 1") < text.index("driver 2")
    assert text.count("not printed") == 2
    assert "after its end" not in text
    messages = [what for _, what in logged_warnings(path)]
    assert messages[0] == "areal_flow.cluster.pool: generator-1 died"
    assert "a library's warning 1" in messages[1]
    assert len(messages) == 4
    with path.open("ab") as file:
        file.write("ä".encode()[:1])
    assert len(logged_warnings(path)) == 4, "a killed driver can leave half a character"


def test_full_disk_loses_lines_and_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    with log_kept(Path("/dev/full")):
        say("step 1")
        logging.getLogger("areal_flow.cluster.pool").warning("generator-1 died")
    output = capsys.readouterr()
    assert output.out == "step 1\n"
    assert "No space left" not in output.err


async def test_answers_are_counted_as_they_come() -> None:
    file = StringIO()

    async def answer(episodes: list[int], *, name: str) -> str:
        return f"{name}: {len(episodes)}"

    answer_counted = counted(answer, Progress(screen=Lines(Console(file=file))), total=5)
    assert await answer_counted([1, 2, 3], name="before") == "before: 3"
    assert await answer_counted([4, 5], name="before") == "before: 2"
    assert file.getvalue().splitlines() == ["  answered 3/5", "  answered 5/5"]


def test_warnings_are_printed_on_what_standard_error_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipelines.cli.main import _Warnings

    handler, later = _Warnings(), StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    handler.emit(logging.LogRecord("n", logging.WARNING, "p", 1, "said %d", (3,), None))
    assert later.getvalue() == "said 3\n"
