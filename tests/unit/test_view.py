"""`areal-flow view`: what a page selects, shows and refuses, without a browser."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import trajectory_id
from areal_flow.log import browse
from areal_flow.log.browse import (
    GroupSelection,
    Selection,
    ShownToken,
    ShownTrajectory,
    select_groups,
    show_group,
    show_trajectory,
)
from areal_flow.log.directory import create_run
from areal_flow.log.queries import Run
from areal_flow.log.run_log import RunLog
from pipelines.cli import runs as commands
from pipelines.cli.main import main
from schemas import PromptRow, arrow_schema
from tests.finished_runs import HOSTILE, make_finished_run
from tests.rows import append, commit, written_group
from tests.tracked_runs import step_row

pytest.importorskip("panel", reason="panel is not installed")
from pipelines.pages import view
from pipelines.pages.view import Page, RunCurves


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps, each trained on group `step`: members of reward 1 and 0."""
    return Run(make_finished_run(tmp_path_factory.mktemp("view") / "run", num_steps=4).root)


def add_step(layout: RunLayout, step: int) -> None:
    writer = Writer(layout.writers, 1)
    log = RunLog(layout, writer)
    commit(log, written_group(layout.trajectories, step, version=step - 1))
    ids = [trajectory_id(step, member) for member in range(2)]
    row = step_row(step, trajectory_watermark=log.watermark, trajectory_ids=ids)
    append(log, {**row, "policy_version": step - 1})


def test_group_is_named_by_the_last_message_of_its_user(tmp_path: Path) -> None:
    """With a chat template all prompts begin with the same system message."""
    layout = make_finished_run(tmp_path / "chat", num_steps=3)
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "How many\napples?"},
    ]
    rows = {1: {"question": messages}, 2: {"question": "6 * 7 ="}, 3: {"other": 1}}
    prompts = [
        {
            "prompt_id": f"prompt-{n}",
            "prompt": f"<system>You help.<user>{n}",
            "answer": "4",
            "difficulty": 0,
            "source": "",
            "metadata": json.dumps(row),
            "prompt_tokens": [1],
        }
        for n, row in rows.items()
    ]
    layout.train_prompts.parent.mkdir(exist_ok=True)
    with pa.ipc.new_file(layout.train_prompts, arrow_schema(PromptRow)) as file:
        file.write(pa.Table.from_pylist(prompts, arrow_schema(PromptRow)))
    shown, _ = select_groups(Run(layout.root), GroupSelection(order="oldest"))
    assert [row["prompt"] for row in shown] == [
        "How many apples?",
        "6 * 7 =",
        "<system>You help.<user>3",
    ]


def groups(run: Run, **chosen: Any) -> list[int]:
    rows, num_matching = select_groups(run, GroupSelection(**chosen))
    assert num_matching == len(rows)
    return [row["group"] for row in rows]


def test_groups_come_newest_first_with_what_became_of_them(run: Run) -> None:
    rows, num_matching = select_groups(run, GroupSelection())
    assert num_matching == 4
    assert rows[0] == {
        "group": 4,
        "reward": 0.5,
        "status": "step 4",
        "prompt": "prompt-4",
        "tokens": 3.0,
        "versions": "3",
        "rewards": "0.0 to 1.0",
        "difficulty": 2,
        "members": 2,
    }


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"order": "oldest"}, [1, 2, 3, 4]),
        ({"where": "prompt_id = 'prompt-2' OR submission_index = 3"}, [3, 2]),
        ({"where": "reward = 0.5"}, []),
        ({"where": "completion LIKE '%%' AND num_tokens = 3 -- all"}, [4, 3, 2, 1]),
        ({"where": "step >= 2 AND staleness = 0"}, [4, 3, 2]),
        ({"where": "completion LIKE '%{x}%' OR '{' = 'step'"}, []),
        ({"where": "prompt_id IN (SELECT prompt_id FROM trajectories WHERE step = 2)"}, [2]),
        ({"where": "member < (SELECT max(step) - 3 FROM steps)"}, [4, 3, 2, 1]),
        ({"step": 3}, [3]),
        ({"step": 3, "where": "member = 1 AND reward = 1"}, []),
    ],
)
def test_conditions_may_name_the_log_and_the_ledger(
    run: Run, chosen: dict[str, Any], expected: list[int]
) -> None:
    assert groups(run, **chosen) == expected


class LogAlone(Run):
    def database(self, *, at: int | None = None) -> Any:
        raise AssertionError("what became of every trajectory was read")


def test_whole_log_is_read_only_for_conditions_on_statuses_and_tokens(run: Run) -> None:
    log_alone = LogAlone(run.layout.root)
    assert groups(log_alone, where="reward = 1 AND completion <> prompt", step=2) == [2]
    assert groups(log_alone, where="status = 'trained'", step=2) == [2]
    assert len(show_group(log_alone, 2)) == 2
    with pytest.raises(AssertionError, match="was read"):
        groups(log_alone, where="status = 'trained' AND completion <> prompt")


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("rewrd = 1", '"rewrd" not found'),
        ("reward =", "syntax error"),
        ("TRUE); DROP VIEW logged; SELECT (1", "several statements"),
        ("EXISTS (FROM read_csv('{file}'))", "file system operations are disabled"),
        ("EXISTS (FROM run)", "run does not exist"),
        ("reward = 'one'", "Could not convert"),
    ],
)
def test_a_wrong_condition_is_explained(run: Run, tmp_path: Path, where: str, why: str) -> None:
    (tmp_path / "file.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=f"expected an SQL condition.*{why}.*Columns are"):
        select_groups(run, GroupSelection(where.format(file=tmp_path / "file.csv")))
    assert groups(run) == [4, 3, 2, 1]


def test_a_condition_that_takes_too_long_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browse, "MAX_QUERY_S", 0.2)
    endless = "(SELECT sum(a.range * b.range) FROM range(10000000) a, range(1000000) b) > 0"
    with pytest.raises(ConfigError, match=r"takes longer than 0\.2 s"):
        select_groups(run, GroupSelection(endless))


def test_a_missing_step_is_reported(run: Run) -> None:
    with pytest.raises(RunError, match="has no step 9"):
        select_groups(run, GroupSelection(step=9))


def test_a_group_is_its_trajectories_as_the_command_shows_them(run: Run) -> None:
    expected = [
        show_trajectory(run, trajectory_id(3, member), selection=Selection()) for member in range(2)
    ]
    group = show_group(run, 3)
    assert group == expected
    assert [member.batch and member.batch.advantage for member in group] == [0.5, -0.5]


def test_curves_are_extended_by_new_steps_only(tmp_path: Path) -> None:
    curves = RunCurves(Run(make_finished_run(tmp_path / "run", num_steps=2).root), 0, pytest.fail)
    assert [curves.refresh(), curves.refresh()] == [True, False]
    add_step(curves.run.layout, 3)
    assert [curves.refresh(), curves.refresh()] == [True, False]
    assert curves.steps.data["step"] == [1, 2, 3]
    assert curves.steps.data["reward_mean"] == pytest.approx([0.1, 0.2, 0.3])


def shown_member(run: Run, *tokens: ShownToken) -> ShownTrajectory:
    return replace(show_group(run, 1)[0], tokens=tokens, answer=HOSTILE, prompt=HOSTILE)


def token(text: str, *, trained: bool = True, logprob: float = -0.5) -> ShownToken:
    return ShownToken(text, 7, 0, logprob, 1, trained, True)


@pytest.mark.parametrize("colour_by", view.COLOUR_BY)
def test_what_a_policy_wrote_is_escaped(run: Run, colour_by: str) -> None:
    hostile = shown_member(run, token(HOSTILE))
    html = view.render("group.html", group=[hostile], colour_by=colour_by)
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3
    assert "<script" not in html
    assert "<img" not in html


def test_calls_of_tools_are_listed_and_escaped(run: Run) -> None:
    call = {"turn": 0, "name": "bash", "arguments": HOSTILE, "result": HOSTILE}
    calls = [
        {**call, "exit_code": 3, "duration_s": 0.25},
        {**call, "exit_code": None, "duration_s": 1},
    ]
    member = show_group(run, 1)[0]
    html = view.render(
        "group.html",
        group=[replace(member, row={**member.row, "tool_calls": calls})],
        colour_by=view.COLOUR_BY[0],
    )
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4
    assert "<td>3</td><td>0.250</td>" in html
    assert "<td></td><td>1.000</td>" in html
    assert "<script" not in html


def test_masked_tokens_are_struck_through_and_equal_ones_are_one_element(run: Run) -> None:
    member = shown_member(run, token("old ", trained=False), token("new "), token("er"))
    assert [(masked, text) for *_, masked, text in view.stretches(member, "staleness", 9)] == [
        (True, "old "),
        (False, "new er"),
    ]
    assert "<s style" in view.render("group.html", group=[member], colour_by="staleness")


def test_an_unlikely_token_is_redder(run: Run) -> None:
    member = shown_member(run, token("a", logprob=0.0), token("b", logprob=-5.0))
    (likely, *_), (unlikely, title, *_) = view.stretches(member, "log-prob", 9)
    assert ("--bad) 0%" in likely, "--bad) 70%" in unlikely) == (True, True)
    assert title == "log-prob -5.000, probability 0.007"


def test_importance_weights_name_the_replay_that_computes_them(run: Run) -> None:
    html = view.render("group.html", group=show_group(run, 2), colour_by="importance weight")
    assert "areal-flow replay run@2 --tokens 00000002-0000-00" in html


@pytest.mark.parametrize("ending", view.FORMATS)
def test_the_filtered_rows_are_exported(run: Run, ending: str) -> None:
    content = view.export([run, run], GroupSelection("reward = 1", step=2), ending)
    if ending == ".parquet":
        rows = pl.read_parquet(content).to_dicts()
    elif ending == ".csv":
        rows = pl.read_csv(content).to_dicts()
        assert json.loads(rows[0]["output_tokens"]) == [7, 7, 7]
    else:
        rows = [json.loads(line) for line in content.read().splitlines()]
    assert [(row["run"], row["trajectory_id"], row["step"]) for row in rows] == [
        ("run", "00000002-0000-00", 2)
    ] * 2


def test_two_policies_are_compared_on_prompts_that_both_answered(run: Run) -> None:
    rows = view.compare((run, 0), (run, 4))
    assert {(row["before"], row["after"]) for row in rows} == {(HOSTILE, "#### 4")}
    assert len(rows) == 4
    swapped = view.compare((run, 4), (run, 0))
    assert {(row["before"], row["after"]) for row in swapped} == {("#### 4", HOSTILE)}
    html = view.render("compared.html", rows=rows)
    assert "<script" not in html


def test_lineage_names_who_sampled_for_which_step(run: Run) -> None:
    hashes, sampled = run.lineage(4).last_steps(2)
    assert [row["step"] for row in hashes] == [2, 3, 4]
    assert sampled == [
        {"step": step, "version": step - 1, "num_trained_tokens": 6, "num_tokens": 6}
        for step in (3, 4)
    ]
    content = {"summary": run.lineage(4).summary(), "hashes": hashes, "sampled": sampled}
    html = view.render("lineage.html", **content)
    assert "step 4 trained 6 of 6 tokens that version 3 sampled" in html


def test_an_error_on_the_page_keeps_its_content(run: Run) -> None:
    page = Page([run])
    page.step.value = 2
    assert list(page.table.value["group"]) == [2]
    page.where.value = "<b>"
    assert 'role="alert">expected an SQL condition, found &lt;b&gt;' in page.error.object
    assert list(page.table.value["group"]) == [2]
    page.where.value = ""
    assert page.error.object == ""


def test_a_point_of_a_curve_filters_by_its_step(run: Run) -> None:
    page = Page([run])
    page.curves[0].steps.selected.indices = [1]
    assert (page.step.value, page.version.value, list(page.table.value["group"])) == (2, 2, [2])


def test_a_step_is_searched_only_in_runs_that_have_it(run: Run, tmp_path: Path) -> None:
    short = make_finished_run(tmp_path / "short", num_steps=1)
    create_run(RunLayout(tmp_path / "new"), Recipe())
    page = Page([run, Run(short.root), Run(tmp_path / "new")])
    assert len(page.table.value) == 5
    page.step.value = 3
    assert page.error.object == ""
    assert list(page.table.value["run"]) == ["run"]
    page.format.value = ".jsonl"
    assert len(page._export().read().splitlines()) == 2
    page.step.value = 9
    assert "run has no step 9" in page.error.object


def test_other_groups_of_a_prompt_are_listed(run: Run) -> None:
    page = Page([run])
    page._open(1)
    assert "Group 3 of run" in page.shown.object
    page._find_prompt()
    assert (page.where.value, list(page.table.value["group"])) == ("prompt_id = 'prompt-3'", [3])


def test_view_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", "--runs", str(tmp_path)]) == 1
    assert f"no runs in {tmp_path}" in capsys.readouterr().err
    make_finished_run(tmp_path / "run", num_steps=0, evaluated=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", "--runs", str(tmp_path), "--port", str(port)]) == 2
    assert f"port {port} is taken" in capsys.readouterr().err
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    assert main(["view", "run", "--runs", str(tmp_path)]) == 2
    assert "areal-flow[view]" in capsys.readouterr().err


def test_the_timer_shows_new_rows_and_leaves_an_error_and_the_last_valid_condition(
    tmp_path: Path,
) -> None:
    layout = make_finished_run(tmp_path / "going-on", num_steps=2, state="crashed")
    page = Page([Run(layout.root)])
    assert (page.curves[0].head, len(page.table.value)) == (2, 2)
    page.where.value = "member = 1"
    page.where.value = "rewrd = 1"
    add_step(layout, 3)
    page._next_refresh = 1e-9
    page._guarded(page.refresh)()
    assert "rewrd" in page.error.object
    assert (page.curves[0].head, list(page.table.value["group"])) == (3, [3, 2, 1])


def test_nothing_that_a_run_names_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carried.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    layout = make_finished_run(tmp_path / "run", num_steps=2)
    recipe = layout.config.read_text()
    assert 'verifier = "numeric"' in recipe
    layout.config.write_text(recipe.replace('verifier = "numeric"', 'verifier = "carried:score"'))
    page = Page([Run(layout.root)])
    page._open(0)
    page._draw_lineage()
    assert "Group 2 of run" in page.shown.object
    assert "carried" not in sys.modules
