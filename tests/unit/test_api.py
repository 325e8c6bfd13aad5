"""What the Python API accepts: rows of every kind, settings by keyword; without a cluster."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import areal_flow
import pipelines.api
import pipelines.jobs.job
from areal_flow.config import Recipe
from areal_flow.core.errors import ArealFlowError, ConfigError, PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.rewards.protocol import RewardSettings
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.rewards.shipping import load_function, what_is_executed
from areal_flow.rollout.workflows.registry import load_workflow
from areal_flow.rollout.workflows.tool_use import tool_result, tools_by_name
from pipelines.arguments import placed, rows_of
from pipelines.jobs.built_in import write_jsonl
from pipelines.jobs.job import Job
from pipelines.jobs.stop_signals import WAKE_EVERY_S, Outcome, StopSignals, wait_for
from tests.tracked_runs import make_bare_run

ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "difficulty": n} for n in range(3)]


class HuggingFace:
    """The part of a `datasets.Dataset` that is used."""

    def to_list(self) -> list[dict[str, Any]]:
        return ROWS


@pytest.mark.parametrize(
    "table",
    [
        *(ROWS, iter(ROWS), pd.DataFrame(ROWS), pl.DataFrame(ROWS)),
        *(pa.Table.from_pylist(ROWS), HuggingFace()),
    ],
    ids=["dicts", "iterator", "pandas", "polars", "arrow", "hugging face"],
)
def test_rows_of_every_kind_of_table(table: Any) -> None:
    assert list(rows_of(table)) == ROWS


def test_numpy_values_become_plain_ones() -> None:
    rows = [{"question": "q", "difficulty": np.int64(2), "tests": np.array([1, 2])}]
    assert list(rows_of(rows)) == [{"question": "q", "difficulty": 2, "tests": [1, 2]}]


def test_messages_and_answers_of_every_table_keep_their_types() -> None:
    messages = [{"role": "user", "content": "1 + 1 ="}]
    rows = [
        {"messages": messages, "answer": [1, 2], "level": 0.5, "seen": True},
        {"messages": messages * 3, "answer": [], "level": None, "seen": False},
    ]
    tables = rows, pd.DataFrame(rows), pl.DataFrame(rows), pa.Table.from_pylist(rows)
    for table in tables:
        assert list(rows_of(table)) == rows


def test_missing_values_of_pandas_become_null() -> None:
    table = pd.DataFrame({"a": [1.5, None], "b": pd.array([1, None], "Int64"), "c": ["x", None]})
    table["d"] = pd.to_datetime(["2024-05-01", None])
    first, second = rows_of(table)
    assert first == {"a": 1.5, "b": 1, "c": "x", "d": "2024-05-01 00:00:00"}
    assert set(second.values()) == {None}


@pytest.mark.parametrize("wrong", [5, {"question": "q"}, [1, 2], "text"])
def test_values_that_are_no_table_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        list(rows_of(wrong))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, RunLayout, Recipe]]:
    """Collects the jobs that would start; the run's files are written."""
    starts: list[tuple[str, RunLayout, Recipe]] = []

    def start(job: Job, layout: RunLayout, recipe: Recipe, *, fill: Any, **_: Any) -> Outcome:
        make_bare_run(layout.root)
        starts.append((job.command, layout, fill(layout, recipe)))
        return Outcome(True)

    monkeypatch.setattr(pipelines.jobs.job, "start", start)
    monkeypatch.chdir(tmp_path)
    return starts


def test_settings_by_keyword_and_by_dotted_name(started: list[Any]) -> None:
    dotted = {"controller.max_staleness": 1}
    run = areal_flow.train(
        prompts=ROWS, name="n", num_steps=20, trainer={"learning_rate": 1e-5}, **dotted
    )
    ((command, layout, recipe),) = started
    assert (command, run.layout) == ("train", layout)
    assert layout.root == Path("runs/n").resolve()
    assert (recipe.num_steps, recipe.trainer.learning_rate) == (20, 1e-5)
    assert recipe.controller.max_staleness == 1
    assert recipe.prompts.source == "file"
    assert [row["answer"] for row in rows_of_file(recipe.prompts.path)] == ["1", "2", "3"]


def rows_of_file(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return pd.read_json(path, lines=True, dtype=False).to_dict("records")


def test_recipe_may_be_a_path_or_an_object_and_prompts_a_path(
    started: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text("num_steps = 3\nseed = 5\n")
    areal_flow.train("mine.toml", prompts="p.jsonl", model=tmp_path / "model", num_steps=4)
    areal_flow.train(Recipe(seed=6), name="object")
    (_, layout, by_path), (_, _, by_object) = started
    assert layout.name.startswith("mine-")
    assert (by_path.num_steps, by_path.seed) == (4, 5)
    assert by_path.model == str(tmp_path / "model")
    assert by_path.prompts.path == (tmp_path / "p.jsonl").resolve()
    assert by_object.seed == 6


def test_nothing_but_a_call_is_the_default_job(started: list[Any]) -> None:
    areal_flow.train()
    ((_, layout, recipe),) = started
    assert layout.name.startswith("arithmetic-")
    assert (recipe.num_steps, recipe.sft.num_steps) == (60, 2300)


def test_setting_that_one_section_has_needs_no_section(started: list[Any]) -> None:
    few = {"chat_template": True, "max_new_tokens": 20, "max_staleness": 1}
    of_both = {"batch_size": 64, "learning_rate": 1e-5, "num_held_out": 3}
    dotted = {"sft.beta": 0.2, "evaluation.top_p": 0.9}
    areal_flow.train(prompts=ROWS, **few, **of_both, **dotted)
    with suppress(ArealFlowError):  # it made no checkpoint
        areal_flow.sft(rows=ROWS, batch_size=4, name="taught")
    (_, _, trained), (_, _, taught) = started
    assert (trained.prompts.chat_template, trained.generation.max_new_tokens) == (True, 20)
    assert trained.controller.max_staleness == 1
    assert (trained.controller.batch_size, trained.trainer.learning_rate) == (64, 1e-5)
    assert (trained.prompts.num_held_out, taught.sft.batch_size) == (3, 4)
    assert (trained.sft.beta, trained.evaluation.top_p) == (0.2, 0.9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beta": 0.04}, r"beta: sft\.beta .*Did you mean algorithm\.kl_coefficient\?"),
        ({"shuffle": False}, r"shuffle: .* only fine-tuning .*\*\*\{'sft\.shuffle': False\}"),
        ({"top_p": 0.9}, r"top_p: .* only evaluations .*\*\*\{'evaluation\.top_p': 0\.9\}"),
        ({"num_generations": 8}, r"Did you mean controller\.group_size\?"),
        ({"max_completion_length": 8}, r"Did you mean generation\.max_new_tokens\?"),
        ({"max_steps": 8}, r"Did you mean num_steps\?"),
        ({"temperature": 0.9}, r"expected one of generation\.temperature, eval"),
        ({"trainer": {"lr": 1}}, r"trainer\.lr: there is no such setting"),
    ],
)
def test_setting_that_is_not_of_training_is_refused_with_the_one_that_is(
    started: list[Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        areal_flow.train(prompts=ROWS, **given)
    assert not started


def brevity(completion: str) -> float:
    return 1 / (1 + len(completion))


def length(completions: list[str], **columns: Any) -> list[float]:
    return [*map(len, completions)]


def test_rewards_may_be_one_function_a_name_or_tables(started: list[Any]) -> None:
    half = {"verifier": brevity, "weight": 0.5}
    given = [
        (brevity, [("shipped:brevity", 1)]),
        ("exact", [("exact", 1)]),
        (RewardSettings(verifier="exact", weight=2), [("exact", 2)]),
        ([half, "numeric"], [("shipped:brevity", 0.5), ("numeric", 1)]),
        (half, [("shipped:brevity", 0.5)]),
        ([brevity, length], [("shipped:brevity", 1), ("shipped:length", 1)]),
    ]
    for number, (rewards, _) in enumerate(given):
        areal_flow.train(prompts=ROWS, rewards=rewards, name=f"n{number}")
    for (_, _, recipe), (_, expected) in zip(started, given, strict=True):
        rewards_and_weights = [
            (each.verifier.partition("@")[0], each.weight) for each in recipe.rewards
        ]
        assert rewards_and_weights == expected
    assert half == {"verifier": brevity, "weight": 0.5}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([(brevity, 0.5)], r"expected a reward as a function, .* found tuple"),
        ([5], "expected a reward as a function, .* found int: 5"),
        (5, "expected a reward as a function, .* found int: 5"),
        ([{"weight": 0.5}], "expected a reward as a function"),
        ([{"verifier": brevity, "wieght": 0.5}], r"rewards\.0\.wieght: there is no such setting"),
    ],
)
def test_invalid_rewards_are_refused_before_a_run_is_made(
    started: list[Any], rewards: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        areal_flow.train(prompts=ROWS, rewards=rewards)
    assert not started


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": {"num_steps": 3}}, "expected a recipe as a path or a Recipe, found dict"),
        ({"source": True}, "expected source as a run or its name, found True"),
        ({"resume": True}, "expected resume as a run or its name, found True"),
        ({"reset_optimizer": True}, "reset_optimizer goes with source"),
        ({"resume": "r", "reset_optimizer": True}, "resume without reset_optimizer"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    started: list[Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        areal_flow.train(**given)
    assert not started


def test_bad_row_in_memory_is_named_by_its_number(tmp_path: Path) -> None:
    rows = [*ROWS, {"question": "?"}]
    with pytest.raises(PromptError, match=r"^row 4 of the rows given: field 'answer' is missing"):
        areal_flow.train(prompts=rows, runs=tmp_path, tracking={"enabled": False})
    with pytest.raises(PromptError, match=r"p\.jsonl, line 4: field 'answer' is missing"):
        areal_flow.train(prompts=write_jsonl(tmp_path / "p.jsonl", rows), runs=tmp_path)


def test_evaluation_is_by_the_settings_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    reference = SimpleNamespace(model=lambda: Path("m"))
    monkeypatch.setattr(pipelines.api, "find_reference", lambda *_, **__: reference)
    monkeypatch.setattr(pipelines.api, "evaluate_model", lambda _, **others: given.append(others))
    areal_flow.evaluate("m", temperature=0, max_new_tokens=9)
    (settings,) = [each["settings"] for each in given]
    assert settings == {"evaluation": {"temperature": 0}, "generation": {"max_new_tokens": 9}}


@pytest.fixture
def resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[RunLayout, Recipe, dict[str, Any]]]:
    """Collects the runs that would be resumed; `runs` has a run `r`."""
    resumes: list[tuple[RunLayout, Recipe, dict[str, Any]]] = []

    def resume(job: Job, layout: RunLayout, recipe: Recipe, **given: Any) -> Outcome:
        del given["began"], given["take_over"]
        resumes.append((layout, recipe, given))
        return Outcome(True)

    monkeypatch.setattr(pipelines.jobs.job, "resume", resume)
    monkeypatch.chdir(tmp_path)
    make_bare_run(tmp_path / "runs" / "r", "num_steps = 3\nseed = 4\n")
    return resumes


def test_run_is_resumed_by_name_or_as_it_is_with_more_steps(resumed: list[Any]) -> None:
    run = areal_flow.train(resume="r", num_steps=9)
    again = areal_flow.train(resume=run, accept_verifier=True)
    areal_flow.train(resume=Path("runs/r"))
    (layout, recipe, given), (_, unchanged, accepted), (by_path, _, _) = resumed
    assert by_path == layout
    assert layout == run.layout == again.layout
    assert (recipe.num_steps, recipe.seed) == (9, 4)
    assert unchanged.num_steps == 3
    assert (given, accepted) == ({"accept_verifier": False}, {"accept_verifier": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 1}, "only num_steps and max_minutes may change"),
        ({"prompts": ROWS, "name": "n"}, "resume without prompts, name"),
        ({"rewards": [len]}, "resume without rewards"),
        ({"resume": "gone"}, "gone"),
        ({"resume": "r@1"}, r"expected resume without a step, found 'r@1': .* source='r@1'"),
    ],
)
def test_resumed_run_keeps_its_recipe(
    resumed: list[Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArealFlowError, match=message):
        areal_flow.train(**{"resume": "r", **given})
    assert not resumed


async def test_work_is_waited_for_on_a_running_event_loop() -> None:
    async def work() -> tuple[bool, int]:
        with StopSignals():  # Python would refuse to handle signals in this thread
            await asyncio.sleep(0)
        return threading.current_thread() is threading.main_thread(), 7

    assert wait_for(work) == (False, 7)


async def test_interrupts_beside_a_running_loop_ask_for_a_stop_and_then_end_the_work() -> None:
    """`import polars` sets a handler that restarts waits which a signal would end."""
    before = signal.getsignal(signal.SIGINT)

    async def work() -> None:
        stop_requested = asyncio.Event()
        with StopSignals() as signals, signals.finishing_steps(stop_requested.set):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stop_requested.wait(), timeout=5)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(5)

    with pytest.raises(KeyboardInterrupt, match="SIGINT") as caught:
        wait_for(work)
    assert caught.value.__context__ is None, "a notebook would print it"
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("handled", [StopSignals, nullcontext])
async def test_interrupt_where_no_step_is_under_way_ends_the_work_at_once(handled: Any) -> None:
    """As in an evaluation or fine-tuning, or without a handler."""

    async def work() -> None:
        with handled():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(5)

    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        wait_for(work)


async def test_interrupt_while_the_loop_is_closed_already_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work is done, and its thread not yet: `wait` comes back for the interrupt, once."""
    closed = threading.Event()
    run = asyncio.run

    def run_and_linger(work: Any) -> Any:
        result = run(work)
        os.kill(os.getpid(), signal.SIGINT)
        closed.set()
        time.sleep(2 * WAKE_EVERY_S)
        return result

    async def work() -> int:
        return 7

    monkeypatch.setattr(asyncio, "run", run_and_linger)
    assert wait_for(work) == 7
    assert closed.is_set()


async def test_interrupt_that_comes_after_the_work_is_ignored() -> None:
    async def work() -> int:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        return 7

    assert wait_for(work) == 7


CLOSED_TERMINAL = """
import asyncio
from pipelines.jobs.stop_signals import StopSignals
async def work():
    requested = asyncio.Event()
    with StopSignals() as signals, signals.finishing_steps(requested.set):
        print("ready", flush=True)
        await requested.wait()
        print("finished", flush=True)
asyncio.run(work())
"""


def test_closed_terminal_lets_the_step_finish_although_nothing_can_be_printed() -> None:
    ours, theirs = os.openpty()
    standard = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([sys.executable, "-c", CLOSED_TERMINAL], **standard) as program:
        os.close(theirs)
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            assert terminal.readline() == b"ready\r\n"
        program.send_signal(signal.SIGHUP)
        try:
            assert program.wait(20) == 0
        finally:
            program.kill()


def test_closed_terminal_stops_nothing_under_nohup() -> None:
    async def work() -> list[str]:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        return signals.received

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert asyncio.run(work()) == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_path_of_a_model_is_never_the_name_of_one_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert placed({"model": Path("./tiny")}) == {"model": str(tmp_path / "tiny")}
    assert placed({"model": "tiny"}) == {"model": "tiny"}


def test_held_out_rows_in_memory_are_written_beside_the_prompts(started: list[Any]) -> None:
    held_out = pd.DataFrame(ROWS[:1])
    areal_flow.train(prompts=ROWS, held_out=held_out, name="n")
    areal_flow.train(prompts=ROWS, held_out="mine.jsonl", name="by-path")
    (_, layout, recipe), (_, _, by_path) = started
    assert recipe.prompts.held_out_path == layout.root / "held_out.jsonl"
    assert rows_of_file(recipe.prompts.held_out_path) == ROWS[:1]
    assert by_path.prompts.held_out_path == Path("mine.jsonl").resolve()


def test_bad_held_out_row_is_named_as_such(tmp_path: Path) -> None:
    given: dict[str, Any] = {"runs": tmp_path, "tracking": {"enabled": False}}
    with pytest.raises(PromptError, match=r"^row 2 of the held-out rows given: field 'answer'"):
        areal_flow.train(prompts=ROWS, held_out=[ROWS[0], {"question": "?"}], **given)
    path = write_jsonl(tmp_path / "h.jsonl", [{"question": "?"}])
    with pytest.raises(PromptError, match=r"h\.jsonl, line 1: field 'answer'"):
        areal_flow.train(prompts=ROWS, held_out=path, **given)


async def guess(base_url: str, api_key: str) -> float:
    return 1.0


def weather(text: str) -> str:
    """Return the weather of a town."""
    return f"sunny in {text}"


STOP = {"generation": {"stop": {"strings": ["</tool>"]}}}


@pytest.mark.parametrize(
    "given",
    [
        {"agent": guess, "workflow": {"max_calls": 3}},
        {"workflow": {"name": "agent", "path": guess, "max_calls": 3}},
        {"agent": guess, "workflow.max_calls": 3},
    ],
)
def test_agent_may_be_a_function(started: list[Any], given: dict[str, Any]) -> None:
    areal_flow.train(prompts=ROWS, name="n", **given)
    ((_, layout, recipe),) = started
    workflow = recipe.workflow
    assert re.fullmatch(r"shipped:guess@\w{12}", workflow.path)
    assert (workflow.name, workflow.max_calls) == ("agent", 3)
    agent = load_workflow(workflow, layout.rewards)
    loaded = load_function(agent.path, setting="workflow.path", error=ConfigError)
    assert asyncio.run(loaded("url", "key")) == 1.0
    rewards = WeightedRewards(recipe.rewards, layout.rewards, agent=recipe.rewarding_agent)
    assert rewards.identity == f"agent:{workflow.path.removeprefix('shipped:')}"
    assert recipe.function_paths[-1] == workflow.path


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tools": [weather, "calculator"]}, ["weather", "calculator"]),
        ({"tools": weather}, ["weather"]),
        ({"workflow": {"name": "tool_use", "tools": ["calculator", weather]}}, None),
    ],
)
def test_tools_may_be_functions(
    started: list[Any], given: dict[str, Any], names: list[str] | None
) -> None:
    areal_flow.train(prompts=ROWS, name="n", **given, **STOP)
    ((_, layout, recipe),) = started
    workflow = load_workflow(recipe.workflow, layout.rewards)
    paths = tools_by_name(workflow.tools)
    assert [*paths] == (names or ["calculator", "weather"])
    assert tool_result(paths["weather"], {"city": "Rome"}, 5, 100) == "sunny in Rome"
    assert "sunny" in next(layout.rewards.glob("weather@*.py")).read_text()
    announced = what_is_executed(recipe.function_paths)
    assert re.search(r"came with the run directory: rewards/weather@\w+\.py$", announced)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"agent": guess, "tools": [weather]}, "expected agent or tools, found both"),
        (
            {"agent": guess, "workflow": "tool_use"},
            r"workflow\.name = 'tool_use' does not go with agent: leave one out",
        ),
        ({"tools": [weather, weather], **STOP}, "two tools are called 'weather'"),
        ({"agent": 5}, r"workflow\.agent\.path|workflow\.path"),
    ],
)
def test_functions_that_do_not_fit_are_refused_before_a_run_is_made(
    started: list[Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        areal_flow.train(prompts=ROWS, **given)
    assert not started


def test_changed_shipped_tool_is_refused(started: list[Any]) -> None:
    areal_flow.train(prompts=ROWS, tools=weather, name="n", **STOP)
    ((_, layout, recipe),) = started
    (pickled,) = layout.rewards.glob("*.pickle")
    pickled.write_bytes(pickled.read_bytes() + b".")
    (path,) = tools_by_name(load_workflow(recipe.workflow, layout.rewards).tools).values()
    with pytest.raises(ArealFlowError, match="expected the function that was shipped"):
        tool_result(path, {"city": "Rome"}, 5, 100)
