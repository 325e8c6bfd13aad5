"""Status of trajectories, pages and files: the parts that need no run."""

from __future__ import annotations

import atexit
import json
import random
import re
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.log import queries
from areal_flow.log.browse import (
    ShownToken,
    ShownTrajectory,
    TrainedBatch,
    token_texts,
)
from areal_flow.log.codec import TRAJECTORIES
from areal_flow.log.database import LEDGER_COLUMNS, connect, consumption_table
from areal_flow.log.ledger import STEPS
from areal_flow.log.queries import TableFormat
from pipelines.cli.reports import bucketed
from pipelines.cli.trajectory_report import listing, report_trajectory
from pipelines.console.tables import (
    Report,
    Table,
    one_line,
    printable,
    rendered,
    show,
    write_table_file,
)
from pipelines.notebook import open_run
from pipelines.tiny_jobs.tiny_policy import build_tokenizer
from tests.finished_runs import make_finished_run
from tests.rows import group_table
from tests.tracked_runs import make_run
from tests.unit.test_audit import random_row, trained_ages


def steps_table(*rows: tuple[int, list[str], list[tuple[str, str]]]) -> pa.Table:
    schema = pa.schema([STEPS.field(name) for name in LEDGER_COLUMNS])
    return pa.Table.from_pylist(
        [
            {
                "step": step,
                "policy_version": max(0, step - 1),
                "trajectory_ids": trained,
                "importance_weight_means": [1.0 + place for place in range(len(trained))],
                "importance_weight_maxima": [None for _ in trained],
                "discarded": [{"trajectory_id": i, "reason": why} for i, why in discarded],
            }
            for step, trained, discarded in rows
        ],
        schema=schema,
    )


def log_table(*identifiers: str) -> pa.Table:
    epochs = pa.array([1] * len(identifiers), pa.int32())
    return pa.table({"trajectory_id": pa.array(identifiers, pa.string()), "writer_epoch": epochs})


def test_every_trajectory_is_trained_discarded_or_waiting() -> None:
    steps = steps_table((0, [], []), (1, ["c", "a"], []), (2, ["d"], [("b", "stale")]))
    rows = consumption_table(steps, log_table("a", "b", "c", "d", "e")).to_pylist()
    assert [(row["status"], row["step"], row["policy_version"], row["reason"]) for row in rows] == [
        ("trained", 1, 0, None),
        ("discarded", 2, 1, "stale"),
        ("trained", 1, 0, None),
        ("trained", 2, 1, None),
        ("waiting", None, None, None),
    ]
    weights = [(row["importance_weight_mean"], row["importance_weight_max"]) for row in rows]
    assert weights == [(2.0, None), (None, None), (1.0, None), (1.0, None), (None, None)]


def test_consumption_reads_ledgers_in_many_chunks_and_empty_ones() -> None:
    parts = [(1, ["a"], []), (2, ["b", "c"], [("d", "stale")]), (3, ["e"], [])]
    chunked = pa.concat_tables([steps_table(part) for part in parts])
    consumption = consumption_table(chunked, log_table("e", "d", "c", "b", "a"))
    assert consumption["step"].to_pylist() == [3, 2, 2, 2, 1]
    nothing = consumption_table(steps_table((0, [], [])), log_table("a"))
    assert nothing["status"].to_pylist() == ["waiting"]
    assert consumption_table(steps_table(), log_table()).num_rows == 0


def database(rows: pa.Table, steps: pa.Table, *, max_staleness: int) -> Any:
    tables = {"stored": rows, "consumption": consumption_table(steps, rows), "steps": steps}
    return connect(
        tables,
        decode=lambda tokens: pa.array([str(t) for t in tokens.to_pylist()], pa.string()),
        max_staleness=max_staleness,
    )


def test_steps_are_read_in_order_however_a_compaction_left_them(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "r")
    in_order = lance.dataset(layout.steps).to_table()
    lance.write_dataset(in_order.take([3, 0, 1, 2]), layout.steps, mode="overwrite")
    run = open_run(layout.root)
    assert list(run.steps().step) == [0, 1, 2, 3]
    read = run.steps("arrow", columns=[PASS_RATE])
    assert read.to_pydict() == {PASS_RATE: [None, 0.25, 0.5, 0.75]}


def test_genesis_has_no_means_and_its_counts_are_zero(tmp_path: Path) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=1).root)
    genesis, step = run.steps("arrow").to_pylist()
    for name in ("reward_mean", "staleness_mean", "staleness_max", "learning_rate", "step_s"):
        assert genesis[name] is None
        assert step[name] is not None
    assert genesis["num_trained_tokens"] == 0
    assert run.steps("arrow", columns=["reward_mean"])["reward_mean"].to_pylist()[0] is None


ROW = {"kind": "sum", "level": 2, "info": {"index": 7}}


def test_columns_of_a_row_are_read_beside_its_trajectories(tmp_path: Path) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=2).root)
    first_id, *_ = run.trajectories("arrow", columns=["prompt_id"])["prompt_id"].to_pylist()
    prompts = {
        "source": ["elsewhere", "", ""],
        "prompt_id": [first_id, first_id, "unasked"],
        "metadata": ['{"kind": "wrong"}', json.dumps(ROW), "{}"],
    }
    run.layout.train_prompts.parent.mkdir(exist_ok=True)
    with pa.ipc.new_file(str(run.layout.train_prompts), pa.table(prompts).schema) as writer:
        writer.write_table(pa.table(prompts))
    names = ["reward", "metadata.kind", "metadata.level", "metadata.info.index", "metadata.missing"]
    assert run.trajectories("polars", columns=names).columns == names
    rows = run.trajectories("arrow", columns=[*names, "prompt_id"]).to_pylist()
    assert rows
    for row in rows:
        of_known = row["prompt_id"] == first_id
        assert row["metadata.kind"] == ("sum" if of_known else None)
        assert row["metadata.level"] == (2 if of_known else None)
        assert row["metadata.info.index"] == (7 if of_known else None)
        assert row["metadata.missing"] is None
    with pytest.raises(
        RunError, match=r"where: metadata\.kind is no stored column; expected it in"
    ):
        run.trajectories(where="reward = 1 AND metadata.kind = 'sum'")
    where = run.trajectories("polars", columns=["metadata.kind"], where="reward = 1")
    assert len(where) == len(run.trajectories(where="reward = 1"))


def test_rows_are_parsed_once_each_and_any_integer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=2, evaluated=True).root)
    logs = run.trajectories("arrow"), run.evaluations("arrow")
    run.layout.train_prompts.parent.mkdir(exist_ok=True)
    for log, file in zip(
        logs, (run.layout.train_prompts, run.layout.held_out_prompts), strict=True
    ):
        prompt_ids = pa.array(sorted({*log["prompt_id"].to_pylist()}))
        rows = pa.array([json.dumps({"big": 2**63, "kind": file.stem})] * len(prompt_ids))
        sources = pa.array([""] * len(prompt_ids))
        prompts = pa.table({"source": sources, "prompt_id": prompt_ids, "metadata": rows})
        with pa.ipc.new_file(str(file), prompts.schema) as writer:
            writer.write_table(prompts)
    parsed: list[str] = []
    monkeypatch.setattr(
        queries, "json", SimpleNamespace(loads=lambda t: parsed.append(t) or json.loads(t))
    )
    table = run.trajectories("arrow", columns=["metadata.big"])
    assert {*table["metadata.big"].to_pylist()} == {str(2**63)}
    assert len(parsed) < len(table)
    assert {*run.evaluations("arrow", columns=["metadata.kind"])["metadata.kind"].to_pylist()} == {
        "held_out"
    }


def test_connections_leave_nothing_behind_for_the_end_of_the_program(tmp_path: Path) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=1).root)
    before = atexit._ncallbacks()
    for _ in range(3):
        run.database().close()
    assert atexit._ncallbacks() == before


def test_ages_count_fresh_tokens_that_the_policy_chose() -> None:
    rows = group_table(0, rewards=(1.0, 0.0, 0.0), length=5)
    spans = [{"version": 1, "length": 2}, {"version": 3, "length": 3}]
    chosen = [True, True, False, True, True]
    for name, value in (("version_spans", spans), ("loss_mask", chosen)):
        field = rows.schema.field(name)
        column = pa.array([value] * 3, field.type)
        rows = rows.set_column(rows.schema.get_field_index(name), field, column)
    trained, discarded, _ = rows["trajectory_id"].to_pylist()
    steps = steps_table((4, [trained], [(discarded, "stale")]))
    query = """
        SELECT status, num_tokens, num_trained_tokens, num_masked_tokens, staleness, token_versions,
               verdict, completion
        FROM trajectories ORDER BY trajectory_id
    """
    ages = database(rows, steps, max_staleness=1).sql(query).fetchall()
    versions, text = [1, 1, 3, 3, 3], "[7, 7, 7, 7, 7]"
    assert ages == [
        ("trained", 5, 2, 3, 0.0, versions, "correct", text),
        ("discarded", 5, None, None, None, versions, "correct", text),
        ("waiting", 5, None, None, None, versions, "correct", text),
    ]
    oldest = database(rows, steps, max_staleness=2).sql(query).fetchall()[0]
    assert oldest[2:5] == (4, 1, (2 + 2 + 0 + 0) / 4)


@pytest.mark.parametrize("seed", range(5))
def test_view_trains_the_tokens_that_the_trainer_trains(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, index) for index in range(20)]
    identifiers = [row["trajectory_id"] for row in rows]
    table = pa.Table.from_pylist(rows, schema=TRAJECTORIES)
    relation = database(table, steps_table((4, identifiers, [])), max_staleness=1).sql(
        "SELECT num_trained_tokens, num_masked_tokens, staleness FROM trajectories "
        "ORDER BY trajectory_id"
    )
    for row, (num_trained, num_masked, staleness) in zip(rows, relation.fetchall(), strict=True):
        ages = trained_ages(row, policy_version=3, max_staleness=1)
        assert (num_trained, num_masked) == (len(ages), len(row["loss_mask"]) - len(ages))
        assert staleness == (pytest.approx(sum(ages) / len(ages)) if ages else None)


@given(st.text(), st.integers(2, 60))
def test_one_line_fits_and_moves_no_cursor(text: str, width: int) -> None:
    line = one_line(text, width)
    assert len(line) <= width
    assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in line)


def test_one_line_keeps_both_ends() -> None:
    assert one_line("3 + 4 =\n 3 7 #### 7", 99) == "3 + 4 =⏎ 3 7 #### 7"
    assert one_line("0123456789", 6) == "012…89"
    assert printable("\x1b[2Jred\r\n") == "␛[2Jred␍\n"


def test_tokens_of_a_split_character_come_together() -> None:
    tokenizer = build_tokenizer()
    tokens = tokenizer.encode("5 é<eos>").ids
    texts = token_texts(tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == "5 é<eos>"
    assert "" in texts


def listed(**changes: Any) -> dict[str, Any]:
    return {
        "trajectory_id": "00000000-0000-00",
        "difficulty": 3,
        "reward": 1.0,
        "passed": True,
        "num_tokens": 4,
        "version_spans": [{"version": v, "length": 1} for v in (4, 5)],
        "finish_reason": "stop",
        "status": "trained",
        "step": 6,
        "reason": None,
        "prompt": "1 + 1 = " * 30,
        "completion": "2 " * 100,
        **changes,
    }


def printed(*parts: Any, width: int, terminal: bool = True) -> list[str]:
    """Return the lines that a terminal or a pipe shows."""
    console = Console(width=width, file=StringIO(), force_terminal=terminal, color_system=None)
    return rendered(console, *parts).splitlines()


def listed_rows() -> list[dict[str, Any]]:
    many = [{"version": v, "length": 1} for v in range(9)]
    return [
        listed(),
        listed(version_spans=many, status="discarded", reason="verifier_error", reward=None),
        listed(prompt="1 =", status="waiting", step=None, completion=""),
    ]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_listing_fits_its_width(width: int) -> None:
    lines = printed(listing(listed_rows()), width=width)
    assert len(lines) == 4
    assert all(len(line) <= width for line in lines)
    assert "4→5" in lines[1]
    assert "step 6" in lines[1]
    assert "0…8" in lines[2]
    assert "verifier_error" in lines[2]
    assert "waiting" in lines[3]


def test_listing_in_a_pipe_has_whole_texts(capsys: pytest.CaptureFixture[str]) -> None:
    row = listed(prompt="[bold]1 + 1 =[/bold] " * 30)
    assert show(Report({}, [listing([row])]), as_json=False) == 0
    (_, line) = capsys.readouterr().out.splitlines()
    assert row["prompt"].strip() in line
    assert line.endswith("2 " * 99 + "2")


LABELS = ("run", "state", "steps", "reason")
LONG_NAME = "a-run-with-a-long-name-20260101-120000"
ROWS = [
    {"run": LONG_NAME, "state": "failed", "steps": "12", "reason": "the disk is full: " * 9},
    {"run": "b", "state": "finished", "steps": "1,200", "reason": ""},
]


def printed_table(width: int, *, terminal: bool = True, prose: bool = True) -> list[str]:
    table = Table(ROWS, prose=("reason",) if prose else ())
    lines = printed(table, width=width, terminal=terminal)
    assert LONG_NAME in "\n".join(lines)
    assert "the disk is" in "\n".join(lines)
    return lines


def test_table_in_a_pipe_is_a_line_a_row_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({"runs": ROWS}, [Table(ROWS, prose=("reason",))], code=1)
    assert show(report, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("the disk is full:")
    assert lines[1].index("   12  ") + 5 == lines[2].index("1,200") + 5
    assert show(report, as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {"runs": ROWS}


@pytest.mark.parametrize("width", [80, 100, 140])
def test_table_on_a_terminal_folds_prose_and_cuts_no_name(width: int) -> None:
    lines = printed_table(width)
    assert all(len(line) <= width for line in lines)
    assert lines[0].split() == list(LABELS)
    assert len(lines) > 3


def test_table_that_does_not_fit_is_shown_row_by_row() -> None:
    lines = printed_table(50)
    assert all(len(line) <= 50 for line in lines)
    assert lines[:3] == [f"run     {LONG_NAME}", "state   failed", "steps   12"]
    assert "state   finished" in lines
    wide = printed_table(100, prose=False)
    assert wide[0].split() == ["run", LONG_NAME]


def test_missing_values_are_dashes() -> None:
    table = Table([{"rate": 0.5, "of": "[bold]"}, {"rate": None, "of": None}])
    assert printed(table, width=80) == ["rate  of", " 0.5  [bold]", "   -  -"]


def shown(*tokens: ShownToken, **detail: str) -> ShownTrajectory:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    row = {
        **listed(num_trained_tokens=1, num_masked_tokens=2, staleness=1.0, policy_version=5),
        **{f"{name}_at": at for name in ("submitted", "started", "finished", "scored")},
        "submission_index": 0,
        "member": 0,
        "attempt": 0,
        "seed": 1,
        "writer_epoch": 1,
        "generator": "g",
        "verifier": "agent:my:solve@0",
        "prompt_id": "p",
        "reward_detail": json.dumps({"verdict": "correct", "extracted": "2", **detail}),
        "reward_parts": [],
        "tool_calls": [],
    }
    batch = TrainedBatch(0.75, "dr_grpo", 32, at)
    return ShownTrajectory(
        "small",
        row,
        "1 + 1 =<eos>",
        tokens,
        "2",
        (("00000000-0000-00", 1.0), ("x", None)),
        batch,
        1,
    )


def printed_page(*tokens: ShownToken, **detail: str) -> str:
    report = report_trajectory(shown(*tokens, **detail), by_token=True)
    return "\n".join(printed(*report.parts, width=100, terminal=False))


def test_page_has_what_a_function_logged_of_the_completion() -> None:
    trajectory = shown()
    detail = {"verdict": "correct", "extra": {"parsed": ["2"], "gold": "\x1b[2J"}}
    page = report_trajectory(
        replace(trajectory, row={**trajectory.row, "reward_detail": json.dumps(detail)}),
        by_token=False,
    )
    text = "\n".join(printed(*page.parts, width=100, terminal=False))
    assert "parsed: ['2']" in text
    assert "gold: ␛[2J" in text


def test_page_marks_where_a_long_answer_is_cut() -> None:
    page = report_trajectory(replace(shown(), answer=f"{'x' * 60} #### 14"), by_token=False)
    text = "\n".join(printed(*page.parts, width=200, terminal=False))
    assert f"expected '…{'x' * 31} #### 14'" in text


def test_page_marks_versions_and_masked_tokens_without_colours() -> None:
    page = printed_page(
        ShownToken(" 1", 11, 2, -0.5, 3, False, True),
        ShownToken(" 2", 12, 4, -0.1, 1, True, True),
        ShownToken(" 3", 13, 4, 0.0, 1, False, False),
    )
    assert "\x1b" not in page
    assert "1 + 1 =<eos>" in page, "special tokens of the prompt are shown"
    assert "⟨v2⟩ 1⟨v4⟩ 2 3" in page
    assert "version 2: 1 token, staleness 3, 1 too old" in page
    assert "version 4: 2 tokens, staleness 1, 1 not the policy's choice" in page
    assert "1 token trained, 2 not; mean staleness" in page, "for whatever reason"
    assert "masked: too old" in page
    assert "masked: not the policy's choice" in page
    assert "+0.75 on each trained token (dr_grpo, over the 32 trajectories" in page
    assert "correct, answered '2', expected '2'" in page
    assert "rewards [1] -" in page


def test_page_says_what_ended_a_completion_and_what_scored_it() -> None:
    limit = "ended by workflow.max_calls (2)"
    page = printed_page(message=limit)
    assert limit in page
    assert re.search(r"^end +stop$", page, re.MULTILINE)
    failed = printed_page(message=limit, error=f"no reward before it was {limit}")
    assert failed.count(limit) == 1
    assert "(agent:my:solve@0)" in page


def test_page_of_an_empty_completion_can_be_printed() -> None:
    assert "the completion is empty" in printed_page()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_half_written_file_has_another_name_and_goes(tmp_path: Path, ending: str) -> None:
    table = pa.table({"a": [1, 2], "at": [datetime(2026, 1, 1, tzinfo=UTC)] * 2})

    def broken() -> Any:
        yield table
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_table_file(tmp_path / f"x.{ending}", broken(), table.schema)
    assert list(tmp_path.iterdir()) == []
    assert write_table_file(tmp_path / f"x.{ending}", [table, table], table.schema) == 4
    with pytest.raises(ConfigError, match="already"):
        write_table_file(tmp_path / f"x.{ending}", [table], table.schema)
    if ending == "parquet":
        assert pq.read_table(tmp_path / "x.parquet").num_rows == 4


def sampled(version: int, trained: int, masked: int) -> dict[str, int]:
    return {
        "version": version,
        "num_trained_tokens": trained,
        "num_masked_tokens": masked,
    }


def test_many_versions_are_summed_in_ranges_that_lose_nothing() -> None:
    assert bucketed([sampled(0, 5, 1), sampled(2, 7, 0)]) == [("0", 5, 1), ("2", 7, 0)]
    many = bucketed([sampled(version, version, 1) for version in range(90)])
    assert len(many) <= 12
    assert many[0][0] == "0 to 7"
    assert sum(trained for _, trained, _ in many) == sum(range(90))
    assert sum(masked for _, _, masked in many) == 90
    assert bucketed([]) == []


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow", "duckdb"])
def test_trajectories_come_with_texts_and_status_in_every_format(
    kind: TableFormat, tmp_path: Path
) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=3).root)
    columns = ["trajectory_id", "prompt", "completion", "status", "step"]
    where = "status = 'trained' AND step > 1 AND prompt <> ''"
    trajectories = run.trajectories(kind, text=True, columns=columns, where=where)
    rows = {
        "pandas": lambda: trajectories.to_dict("records"),
        "polars": lambda: trajectories.to_dicts(),
        "arrow": lambda: trajectories.to_pylist(),
        "duckdb": lambda: trajectories.to_arrow_table().to_pylist(),
    }[kind]()
    assert [*rows[0]] == columns
    assert {row["step"] for row in rows} == {2, 3}
    for row in rows:
        trajectory = run.trajectory(row["trajectory_id"])
        assert row == {name: trajectory[name] for name in columns}
        assert isinstance(row["completion"], str)


def test_trajectories_with_texts_travel_in_time_and_name_the_columns_there_are(
    tmp_path: Path,
) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=3).root)
    assert len(run.trajectories("arrow", text=True, at=2)) == 4
    assert len(run.trajectories("arrow", text=True)) == 6
    for wrong in ({"columns": ["colour"]}, {"where": "colour = 1"}):
        with pytest.raises(RunError, match=r"colour.*Columns are: .*completion.*status"):
            run.trajectories(text=True, **wrong)


@pytest.mark.parametrize("kind", ["pandas", "duckdb"])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"where": "step = 40"}, "step"),
        ({"columns": ["status"]}, "status"),
        ({"where": "reward = ="}, "pars|syntax"),
    ],
)
def test_wrong_question_about_stored_trajectories_is_explained(
    kind: TableFormat, wrong: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=1).root)
    with pytest.raises(RunError, match=rf"found .*{reason}.*Columns are: .*text=True adds") as no:
        run.trajectories(kind, **wrong)
    assert ".rs:" not in str(no.value)
    with pytest.raises(RunError, match="Columns are"):
        run.trajectories("arrow", text=True, where="step = 'x'")


def test_wrong_question_about_steps_evaluations_or_one_trajectory_is_explained(
    tmp_path: Path,
) -> None:
    run = open_run(make_finished_run(tmp_path / "r", num_steps=1, evaluated=True).root)
    with pytest.raises(RunError, match=r"over steps, .*colour.*Columns are: step, "):
        run.steps(where="colour = 1")
    with pytest.raises(RunError, match=r"over evaluations, .*colour.*Columns are: evaluation, "):
        run.evaluations(columns=["colour"])
    number: Any = 1
    with pytest.raises(RunError, match="r has no trajectory 1"):
        run.trajectory(number)
