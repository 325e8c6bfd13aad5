"""A user's chats: rows with messages, numbers as answers, columns of any type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chat_templates import CHATML, FORGETS_REASONING, give_chat_template
from tests.integration.runs import cli
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
from areal_flow.types import Score
def likes_words(completion, answer, id, tests, level, source, **columns):
    types = [type(value).__name__ for value in (answer, id, tests, level, source)]
    assert types == ["int", "int", "list", "float", "dict"], types
    assert answer == id + 1 and columns["solution"] == answer and columns["difficulty"] == id % 3
    assert columns["messages"][0]["content"] == f"{id} + 1 ="
    return Score(min(1.0, len(completion) / 40), "wrong")
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
system = "Be brief."
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: a chat model, rows, a verifier and a recipe."""
    cwd = tmp_path_factory.mktemp("chat")
    give_chat_template(write_model_directory(cwd / "chat-model"), CHATML)
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (cwd / "mine.py").write_text(VERIFIER)
    (cwd / "chat.toml").write_text(RECIPE)
    return cwd


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "tiny", "--sft.num-steps", "0"], "model 'tiny' has no chat template"),
        (["--prompts.question-field", "question"], 'set prompts.question_field = "messages"'),
        (
            ["--prompts.chat-template", "false", "--prompts.system", ""],
            "messages need prompts.",
        ),
        (["--model", "forgets"], "model 'forgets': the chat template rewrites earlier answers"),
    ],
)
def test_what_cannot_be_asked_is_refused_and_leaves_nothing_behind(
    folder: Path, arguments: list[str], expected: str
) -> None:
    if "forgets" in arguments and not (folder / "forgets").exists():
        give_chat_template(write_model_directory(folder / "forgets"), FORGETS_REASONING)
    done = cli("train", "chat.toml", "--name", "refused", *arguments, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs" / "refused").exists()
