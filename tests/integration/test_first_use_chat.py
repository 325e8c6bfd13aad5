"""A user's chats: rows with messages, numbers as answers, columns of any type."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import sleep

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.policy.tokenizer.directory import tokenizer_of
from tests.chat_templates import CHATML, FORGETS_REASONING, give_chat_template
from tests.integration.conftest import Typed
from tests.integration.runs import check_accounting, done, started_cli
from tests.policies import write_model_directory

ROWS = [
    {
        "id": n,
        "messages": [{"role": "user", "content": f"{n} + 1 ="}],
        "solution": n + 1,
        "difficulty": n % 3,
        "tests": [f"{n} < 99"],
        "level": n / 2,
        "source": {"page": n},
    }
    for n in range(40)
]
VERIFIER = """
from areal_flow.core.types import Score
def likes_words(completion, answer, id, tests, level, source, **columns):
    types = [type(value).__name__ for value in (answer, id, tests, level, source)]
    assert types == ["int", "int", "list", "float", "dict"], types
    assert answer == id + 1 and columns["solution"] == answer and columns["difficulty"] == id % 3
    assert columns["messages"][0]["content"] == f"{id} + 1 ="
    return Score(min(1.0, len(completion) / 40), "incorrect")
"""
RECIPE = """
model = "chat-model"
num_steps = 3
rewards = [{ verifier = "mine:likes_words" }]
[prompts]
source = "file"
path = "rows.jsonl"
question_field = "messages"
answer_field = "solution"
chat_template = true
system_prompt = "Be brief."
num_held_out = 4
[generation]
max_new_tokens = 48
max_model_len = 512
max_num_seqs = 16
[controller]
batch_size = 16
group_size = 4
[trainer]
checkpoint_every_steps = 2
[workflow]
name = "multi_turn"
message_template = "{message}"
[tracking]
enabled = false
"""
FIRST = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
NEXT = "<|im_end|>\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a chat model, rows, a verifier and a recipe."""
    cwd = tmp_path_factory.mktemp("chat")
    give_chat_template(write_model_directory(cwd / "chat-model"), CHATML)
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (cwd / "mine.py").write_text(VERIFIER)
    (cwd / "chat.toml").write_text(RECIPE)
    return cwd


@pytest.fixture(scope="module")
def run(folder: Path) -> areal_flow.Run:
    """A run of chats of two turns that was killed and resumed."""
    layout = RunLayout(folder / "runs" / "chat")
    with started_cli("train", "chat.toml", "--name", "chat", cwd=folder) as process:
        while not list(layout.checkpoints.glob("0*")):
            assert process.poll() is None, process.communicate()[0]
            sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
    assert "The first prompt by the chat template" in output
    assert "".join(f"  {line}\n" for line in FIRST.splitlines()) in output
    done(folder, "train", "--resume", "chat")
    check_accounting(layout)
    return areal_flow.open_run(layout.root)


@pytest.mark.slow
def test_rows_with_messages_are_sent_as_chats_and_judged_with_every_column(
    run: areal_flow.Run, folder: Path, typed: Typed
) -> None:
    stored = run.trajectories()
    assert stored.reward.notna().all(), stored.reward_detail.iloc[0]
    assert len(run.steps()) == 4
    assert set(run.evaluations().answer) <= {str(n + 1) for n in range(40)}
    shown = typed("trajectories", "chat", "--show", "1", cwd=folder)
    assert f"  {FIRST.splitlines()[0]}\n  Be brief.<|im_end|>" in shown.stdout
    trajectory = json.loads(
        typed("trajectories", "chat", "--show", "1", "--json", cwd=folder).stdout
    )
    assert trajectory["prompt"].startswith(FIRST)
    assert trajectory["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    record = json.loads(run.layout.chat_template.read_text())
    assert record["template"] == CHATML
    lineage = typed("lineage", "chat", cwd=folder).stdout
    assert f"chat template  {record['sha256']}" in lineage


@pytest.mark.slow
def test_next_turn_is_the_templates_and_every_step_can_be_replayed(
    run: areal_flow.Run, folder: Path, typed: Typed
) -> None:
    with run.database() as database:
        turns = database.sql("SELECT output_tokens, loss_mask FROM trajectories").fetchall()
    decode = tokenizer_of(run.layout.model).decode
    with_context = [tokens for tokens, mask in turns if not all(mask)]
    assert with_context
    assert all(NEXT in decode(tokens, skip_special_tokens=False) for tokens in with_context)
    replayed = typed("replay", "chat", "--step", "3", cwd=folder)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "tiny", "--sft.num-steps", "0"], "model 'tiny' has no chat template"),
        (["--prompts.question-field", "question"], 'set prompts.question_field = "messages"'),
        (
            ["--prompts.chat-template", "false", "--prompts.system-prompt", ""],
            "messages need prompts.",
        ),
        (["--model", "forgets"], "model 'forgets': the chat template rewrites earlier answers"),
    ],
)
def test_invalid_request_is_refused_and_leaves_nothing_behind(
    folder: Path, typed: Typed, arguments: list[str], expected: str
) -> None:
    if "forgets" in arguments and not (folder / "forgets").exists():
        give_chat_template(write_model_directory(folder / "forgets"), FORGETS_REASONING)
    ended = typed("train", "chat.toml", "--name", "refused", *arguments, cwd=folder)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (folder / "runs" / "refused").exists()
