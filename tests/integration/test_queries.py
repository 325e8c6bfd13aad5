"""Queries of one small run: trajectories, lineage, and every query of the cookbook."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pandas as pd
import pyarrow.parquet as pq
import pytest

import areal_flow
from areal_flow.config import load_recipe
from areal_flow.core.layout import RunLayout
from pipelines.cli.main import main
from tests.cookbook import Question, questions, setup_block
from tests.integration.runs import cli

Ask = Callable[..., str]

COLUMNS = 100


@pytest.fixture(scope="module")
def layout(finished: RunLayout) -> RunLayout:
    return finished


@pytest.fixture(scope="module")
def run(layout: RunLayout) -> areal_flow.Run:
    return areal_flow.open_run(layout.root)


@pytest.fixture
def ask(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Ask:
    """Run a command of `areal-flow` in a terminal of 100 columns; return its output."""
    monkeypatch.setattr("pipelines.console.tables.PIPE_WIDTH", COLUMNS)

    def run_command(*arguments: str | Path, code: int = 0) -> str:
        exit_code = main(["--runs", str(layout.root.parent), *map(str, arguments)])
        captured = capsys.readouterr()
        assert exit_code == code, captured.out + captured.err
        return captured.out or captured.err

    return run_command


def listed_ids(output: str) -> list[str]:
    return [line.split()[1] for line in output.splitlines()[1:-1]]


def test_listing_shows_twenty_of_all_and_fits_the_terminal(ask: Ask, run: areal_flow.Run) -> None:
    output = ask("trajectories", "small")
    identifiers = sorted(run.trajectories(columns=["trajectory_id"]).trajectory_id)
    assert listed_ids(output) == identifiers[:20]
    assert f"20 of {len(identifiers)} that match" in output
    assert all(len(line.rstrip()) <= COLUMNS for line in output.splitlines())


def test_listing_takes_conditions_over_stored_and_derived_columns(
    ask: Ask, run: areal_flow.Run
) -> None:
    output = ask(
        "trajectories",
        "small",
        "--where",
        "status = 'discarded' AND reward IS NULL",
        "--limit",
        "0",
    )
    failed = run.trajectories(where="reward IS NULL", columns=["trajectory_id"]).trajectory_id
    assert len(failed) > 0
    assert set(listed_ids(output)) <= set(failed)
    assert "verifier_error" in output
    marked = ask("trajectories", "small", "--where", "completion LIKE '%####%'", "--limit", "0")
    texts = run.decode(run.trajectories(columns=["output_tokens"]).output_tokens).to_pylist()
    assert len(listed_ids(marked)) == sum("####" in text for text in texts) > 0
    assert "matches" in ask("trajectories", "small", "--where", "difficulty > 99")


def test_listing_sorts_by_derived_columns_with_unknown_ages_last(
    ask: Ask, run: areal_flow.Run
) -> None:
    by_length = listed_ids(ask("trajectories", "small", "--sort", "num_tokens", "--descending"))
    tokens = {i: run.trajectory(i)["num_tokens"] for i in (by_length[0], by_length[-1])}
    assert list(tokens.values()) == sorted(tokens.values(), reverse=True)
    oldest = ask("trajectories", "small", "--sort", "staleness", "--descending", "--limit", "1")
    assert "staleness" in oldest
    assert run.trajectory(listed_ids(oldest)[0])["staleness"] > 0


def test_listing_travels_in_time(ask: Ask, run: areal_flow.Run) -> None:
    output = ask("trajectories", "small", "--at", "2", "--limit", "0")
    assert len(listed_ids(output)) == len(run.trajectories(at=2, columns=["reward"]))
    assert "step 2" in output
    assert "step 3" not in output
    assert "no step 99" in ask("trajectories", "small", "--at", "99", code=1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--where", "nope = 3"], 'column "nope" not found'),
        (["--where", "reward = = 3"], "syntax error"),
        (["--where", "reward = 'high'"], "Could not convert"),
        (["--sort", "nope"], "no such column"),
        (["--limit", "-1"], "--limit -1"),
        (["--tokens"], "goes with --show"),
    ],
)
def test_wrong_question_is_one_clear_message(ask: Ask, arguments: list[str], expected: str) -> None:
    message = ask("trajectories", "small", *arguments, code=2)
    assert expected in message
    if "--where" in arguments or "nope" in arguments:
        assert "Columns are: attempt," in message


def test_shown_trajectory_has_everything(ask: Ask, run: areal_flow.Run) -> None:
    plain = run.database().sql(
        "SELECT trajectory_id FROM trajectories WHERE status = 'trained' "
        "AND len(version_spans) = 1 AND regexp_full_match(completion, '[ -~]+') "
        "ORDER BY reward DESC, trajectory_id LIMIT 1"
    )
    trajectory = row = run.trajectory(plain.fetchall()[0][0])
    page = ask("trajectories", "small", "--show", row["trajectory_id"], "--tokens")
    for part in (trajectory["prompt"], trajectory["completion"], "length_that_raises", "seed"):
        assert part in page
    assert f"version {trajectory['token_versions'][0]}: " in page
    assert page.count(f"{row['behavior_logprobs'][0]:.3f}") >= 1
    assert "trained +" in page
    part = " ".join(page.split())
    limit = load_recipe(run.layout.config).controller.max_staleness
    assert f"mean staleness {row['staleness']:.2f} of at most {limit}" in part
    assert "driver 1 of the run" in part


def test_shown_trajectory_can_be_a_line_of_the_listing(ask: Ask) -> None:
    arguments = ("--sort", "num_tokens", "--where", "reward = 0")
    second = listed_ids(ask("trajectories", "small", *arguments))[1]
    assert f"trajectory {second} of" in ask("trajectories", "small", *arguments, "--show", "2")
    assert "from 1 to" in ask("trajectories", "small", "--show", "9999", code=2)
    assert "has no trajectory" in ask("trajectories", "small", "--show", "a'b", code=1)


def test_shown_advantage_is_that_of_the_step(ask: Ask, run: areal_flow.Run) -> None:
    groups = run.database().sql(
        "SELECT submission_index, avg(reward) FROM trajectories WHERE status = 'trained' "
        "GROUP BY ALL HAVING count(DISTINCT reward) > 1 LIMIT 1"
    )
    group, mean = groups.fetchall()[0]
    for row in run.trajectories("arrow", where=f"submission_index = {group}").to_pylist():
        page = ask("trajectories", "small", "--show", row["trajectory_id"])
        if row["reward"] is None:
            assert "no step trained it" in page
        else:
            assert f"{row['reward'] - mean:+.6g} on each trained token (dr_grpo" in page


def test_discarded_and_waiting_trajectories_say_so(ask: Ask) -> None:
    discarded = ("--where", "status = 'discarded'", "--show", "1")
    assert "verifier_error" in ask("trajectories", "small", *discarded)
    waiting = ask("trajectories", "small", "--where", "status = 'waiting'", "--show", "1")
    assert "neither trained nor discarded" in waiting


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_export_reads_back_as_it_was(
    ask: Ask, run: areal_flow.Run, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"all.{ending}"
    ask("trajectories", "small", "--where", "reward >= 0", "--to", path)
    if ending == "parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    stored = {r["trajectory_id"]: r for r in run.trajectories("arrow").to_pylist()}
    assert len(rows) == len(run.trajectories(where="reward >= 0", columns=["reward"]))
    for row in rows:
        same = stored[row["trajectory_id"]]
        for name in ("output_tokens", "behavior_logprobs", "version_spans", "reward", "seed"):
            assert row[name] == same[name]
        assert run.decode([row["output_tokens"]]).to_pylist() == [row["completion"]]
    assert [path] == list(tmp_path.iterdir())


def test_export_refuses_what_is_there_and_what_it_does_not_know(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    for name, message in (
        ("there.jsonl", "the file exists already"),
        ("all.txt", "ends in .parquet or .jsonl or .csv"),
        ("nowhere/all.jsonl", "does not exist"),
    ):
        assert message in ask("trajectories", "small", "--to", tmp_path / name, code=2)
    assert (tmp_path / "there.jsonl").read_text() == "mine"


def test_run_is_opened_by_its_directory_and_unknown_names_are_reported(
    ask: Ask, layout: RunLayout
) -> None:
    assert "00000000-0000-00" in ask("trajectories", layout.root)
    assert "found: small" in ask("trajectories", "large", code=1)


def test_command_leaves_nothing_on_standard_error(layout: RunLayout) -> None:
    done = cli("trajectories", "small", cwd=layout.root.parent.parent)
    assert done.returncode == 0
    assert done.stderr == ""


def test_consumption_inverts_the_ledger(run: areal_flow.Run) -> None:
    consumption = run.consumption()
    assert set(consumption.status) == {"trained", "discarded", "waiting"}
    trained = consumption[consumption.status == "trained"]
    by_step = {step: set(part.trajectory_id) for step, part in trained.groupby("step")}
    ledger = run.steps(where="step > 0")
    assert by_step == {row.step: set(row.trajectory_ids) for row in ledger.itertuples()}
    assert len(consumption) == len(run.trajectories(columns=["reward"]))
    early = run.consumption("arrow", at=3)
    assert max(step for step in early["step"].to_pylist() if step is not None) == 3


def test_lineage_adds_up_to_the_ledger(run: areal_flow.Run) -> None:
    lineage = run.lineage(4)
    ledger = run.steps(where="step > 0 AND step <= 4")
    assert lineage.steps.step.tolist() == [0, 1, 2, 3, 4]
    used = lineage.trajectories()
    assert sorted(used.trajectory_id) == sorted(i for ids in ledger.trajectory_ids for i in ids)
    assert used.trajectory_id.is_unique
    versions = lineage.policy_versions
    for name in ("num_trained_tokens", "num_masked_tokens"):
        by_step = used.groupby("step")[name].sum()
        assert by_step.to_dict() == ledger.set_index("step")[name].to_dict()
        assert versions[name].sum() == ledger[name].sum() == lineage.summary()[name]
    assert lineage.prompts.num_trajectories.sum() == len(used)
    assert lineage.verifiers.verifier.str.match("tests.*at_times@[0-9a-f]{12}$").all()
    assert lineage.weights_hashes.follows.all()
    assert lineage.summary()["chain_breaks"] == []


def test_registered_alias_leads_to_the_ledger(ask: Ask, run: areal_flow.Run) -> None:
    printed = ask("lineage", "models:/areal-flow@small")
    assert "version 6 of run small" in printed
    assert "the last 5 of 6 steps" in printed
    assert printed.count("✓") == 2
    lineage = json.loads(ask("lineage", "models:/areal-flow@small", "--json"))
    assert lineage["registered"]["tags"]["weights_hash"] == lineage["weights_hash"]
    assert lineage["weights_hash"] == run.steps(where="step = 6").weights_hash[0]
    assert [check["holds"] for check in lineage["checks"]] == [True, True]
    second = json.loads(ask("lineage", "models:/areal-flow/2", "--json"))
    assert second["version"] == 2
    assert "is step 2 already" in ask("lineage", "models:/areal-flow/2", "--step", "1", code=2)
    assert "found 'models:/areal-flow/99'" in ask("lineage", "models:/areal-flow/99", code=1)


def test_lineage_of_a_run_and_of_its_genesis(ask: Ask, tmp_path: Path) -> None:
    assert "version 6 of run small" in ask("lineage", "small")
    assert "version 3 of run small" in ask("lineage", "small", "--step", "3")
    assert "0 trained, 0 not" in ask("lineage", "small", "--step", "0")
    assert "no step 7 yet" in ask("lineage", "small", "--step", "7", code=1)
    ask("lineage", "small", "--step", "2", "--to", tmp_path / "used.parquet")
    assert set(pq.read_table(tmp_path / "used.parquet")["step"].to_pylist()) == {1, 2}


def test_broken_chain_and_foreign_weights_are_reported(
    ask: Ask, layout: RunLayout, tmp_path: Path
) -> None:
    copy = tmp_path / "broken"
    shutil.copytree(layout.root, copy, ignore=shutil.ignore_patterns("weights"))
    state = copy / "checkpoints" / "00000006" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "weights_hash": "other"}))
    lance.dataset(str(copy / "steps.lance")).update({"parent_hash": "'elsewhere'"}, "step = 5")
    (copy / "forks.jsonl").write_text(json.dumps({"step": 4}) + "\n" + json.dumps({"step": 9}))
    printed = ask("lineage", copy, code=1)
    assert "✗ the checkpoint has weights other" in printed
    assert "broken before step 5" in " ".join(printed.split())
    assert "where replay does not repeat bits: steps 4" in " ".join(printed.split())
    lineage = areal_flow.open_run(copy).lineage(6)
    assert lineage.summary()["chain_breaks"] == [5]
    assert lineage.summary()["forks"] == [{"step": 4}]


@pytest.fixture(scope="module")
def kitchen(run: areal_flow.Run) -> dict[str, Any]:
    """The namespace after the cookbook's setup."""
    names: dict[str, Any] = {}
    exec(setup_block().replace("NAME", str(run.layout.root)), names)
    return names


@pytest.mark.parametrize("question", questions(), ids=lambda question: question.title)
def test_cookbook_answers_alike_in_pandas_and_duckdb(
    kitchen: dict[str, Any], question: Question
) -> None:
    answers = []
    for block in (question.pandas, question.duckdb):
        names = dict(kitchen)
        exec(block, names)
        answers.append(comparable(names[question.answer]))
    assert len(answers[0]) > 0 or question.title == "Reward-hacking suspects"
    in_one = pd.concat(answers).astype(str).drop_duplicates(keep=False)
    assert len(answers[0]) == len(answers[1]), in_one.to_string()
    pd.testing.assert_frame_equal(*answers, check_dtype=False, rtol=1e-9)


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame as sorted Python values."""
    plain = pd.DataFrame({name: frame[name].to_numpy(object) for name in frame.columns})
    return plain.sort_values(list(plain.columns), ignore_index=True).infer_objects()


def test_cookbook_has_its_questions() -> None:
    assert len(questions()) == 12
