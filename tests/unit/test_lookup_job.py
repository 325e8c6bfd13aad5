"""The recipe `lookup`: answers are in the files, and demonstrations are like its episodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import PromptError
from areal_flow.policy.tokenizer.chat import ToolCall
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.rollout.workflows.tool_use import ToolUse, marked_call
from areal_flow.sandboxes.protocol import opened
from areal_flow.sandboxes.registry import make_sandbox
from pipelines.jobs.built_in import MODELS
from pipelines.jobs.job import recipe_path
from pipelines.tiny_jobs.lookups import DIRECT, REFERRED, SEE, look_ups, make_lookups


def recipe(**prompts: int) -> Recipe:
    return load_recipe(recipe_path(Path("lookup")), {"prompts": prompts})


def lines_of(row: dict[str, object]) -> Iterator[tuple[str, str]]:
    assert isinstance(row["files"], dict)
    ((_, text),) = row["files"].items()
    return (line.split(" ", 1) for line in text.splitlines())


def test_answers_are_in_the_file_and_what_is_held_out_is_never_trained() -> None:
    train, held_out = make_lookups(recipe(num_prompts=400, num_held_out=100))
    assert (len(train), len(held_out)) == (400, 100)
    assert len({row["question"] for row in [*train, *held_out]}) == 500
    for row in [*train, *held_out]:
        key, file = re.findall(r"\d+", row["question"])
        lines = dict(lines_of(row))
        assert [*row["files"]] == [file]
        other = lines[key].removeprefix(SEE.lstrip())
        assert row["difficulty"] == (DIRECT if other == lines[key] else REFERRED)
        assert row["answer"] == (lines[key] if other == lines[key] else lines[other])
    with pytest.raises(PromptError, match="expected at most 90000 questions in all"):
        make_lookups(recipe(num_prompts=90_000, num_held_out=1))


async def test_demonstrated_calls_are_the_workflows_and_find_the_line() -> None:
    workflow = recipe().workflow
    assert isinstance(workflow, ToolUse)
    rows = [*look_ups(["37 in 4821 ?"], num_steps=1, batch_size=50, seed=0)]
    turns = [row["completion"] for row in rows if len(row["completion"]) > 1]
    assert {len(each) for each in turns} == {3, 5}
    call_text, shown, answer = next(each for each in turns if len(each) == 3)
    call = marked_call(call_text, start=workflow.call_start, end=workflow.call_end)
    assert call == ToolCall("bash", {"input": "grep ^37 4821"})
    async with opened(make_sandbox(workflow.sandbox)) as sandbox:
        number = answer.removeprefix(" #### ")
        await sandbox.write_file("4821", f"12 1000\n37 {number}\n".encode())
        result = (await sandbox.run(str(call.arguments["input"]), timeout_s=10)).output.rstrip()
    assert shown == workflow.result_template.replace("{result}", result)


def test_guesses_become_a_habit_late() -> None:
    rows = [*look_ups(["37 in 4821 ?"], num_steps=100, batch_size=20, seed=0)]
    has_call = [len(row["completion"]) > 1 for row in rows]
    assert all(has_call[:1700])
    assert 0.1 < sum(has_call[1700:]) / 300 < 0.3


def test_marks_and_pairs_of_digits_are_one_token_each(tmp_path: Path) -> None:
    MODELS["tiny_lookup"](tmp_path, max_model_len=48)
    tokenizer = tokenizer_of(tmp_path)
    turns = ("37 in 4821 ?", "<tool>bash grep ^37 4821</tool>", "<result>37 see 52</result>")
    assert [len(tokenizer.encode(turn).ids) for turn in turns] == [5, 6, 5]
