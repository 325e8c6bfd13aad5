"""Tools: results, calls, errors that the policy sees, and the end of an episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, PromptError, RewardError
from areal_flow.core.types import Completion, GroupRequest, Score, Tokens, VersionSpan, as_tokens
from areal_flow.policy.tokenizer.chat import ToolCall
from areal_flow.rollout.prompts.rendering import _tool_schemas, renderer
from areal_flow.rollout.tools import calculate
from areal_flow.rollout.workflows.episode import RolledOutGroup, run_group
from areal_flow.rollout.workflows.sandbox_task import SandboxTask
from areal_flow.rollout.workflows.sandbox_tools import files_of
from areal_flow.rollout.workflows.tool_use import (
    ToolUse,
    marked_call,
    tool_result,
)
from areal_flow.sandboxes.protocol import Sandbox
from areal_flow.sandboxes.registry import SandboxSettings, make_sandbox
from areal_flow.sandboxes.run import SandboxError
from tests.episodes import PROMPT, FakeServices, episode_of
from tests.harbor_tasks import write_task


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("347*86", "29842"),
        (" 1,234 + -(2 - 5) ", "1237"),
        ("2**10 // 3 % 7", "5"),
        ("0.1 + 0.2", "0.3"),
        ("-1/8", "-0.125"),
        ("1/3", "0.3333333333"),
        ("2**-2", "0.25"),
    ],
)
def test_calculator_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "2 +", "x + 1", "__import__('os')", "1 if 2 else 3", "2**0.5", "9**9**9", "(" * 300),
        *("1+" * 300 + "1", "0**-1", "1/0", "9" * 399 + "**9", "2**2000*2**2000", "1\n2", "٣"),
    ],
)
def test_calculator_refuses_what_is_no_small_expression(text: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculate(text)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("so <t>calculator 1 + 2</t>", ToolCall("calculator", {"input": "1 + 2"})),
        ("<t>python\nprint(1)\nprint(2)</t>", ToolCall("python", {"input": "print(1)\nprint(2)"})),
        ("<t>a 1 <t>b 2</t>", ToolCall("b", {"input": "2"})),
        ("<t></t>", ToolCall("", {"input": ""})),
        ("no beginning</t>", ToolCall("", {"input": "no beginning"})),
        ("<t>calculator 1 + 2", None),
    ],
)
def test_call_is_the_last_one_between_marks(text: str, call: ToolCall | None) -> None:
    assert marked_call(text, start="<t>", end="</t>") == call


def fails_by(text: str) -> str:
    match text:
        case "hang":
            sleep(5)
        case "exit":
            raise SystemExit(3)
        case "sandbox":
            raise SandboxError("no sandbox")
    raise KeyError(text)


def shown_result(tool: str, text: str, *, max_characters: int = 100) -> str:
    path = f"{__name__}:fails_by" if tool == "fails_by" else f"areal_flow.rollout.tools:{tool}"
    return tool_result(path, {"input": text}, 0.2, max_characters)


def test_policy_sees_the_error_of_a_tool() -> None:
    assert shown_result("calculate", "1/0").startswith("Error: ZeroDivisionError")
    assert shown_result("fails_by", "hang") == "Error: no result within 0.2 s"
    assert shown_result("fails_by", "exit") == "Error: SystemExit: 3"
    assert shown_result("calculate", "2**99", max_characters=4) == "6338 (26 characters left out)"


def lines_of(path: str, first: int, last: int = 2) -> str:
    """Show lines.

    Args:
        path: of the file
        first: number of the first line
        last: number of the last
    """
    return f"{path} {first + 1} {last}"


def undescribed(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_a_tool_of_several_arguments_gets_them_by_name() -> None:
    def result(arguments: dict[str, Any]) -> str:
        return tool_result(f"{__name__}:lines_of", arguments, 10.0, 100)

    assert result({"path": "a", "first": 3}) == "a 4 2"
    assert result({"input": '{"path": "a", "first": 3, "last": 9}'}) == "a 4 9"
    assert result({"input": "a 3"}).startswith("Error: JSONDecodeError")
    assert "missing 1 required positional argument: 'first'" in result({"path": "a"})
    path = "areal_flow.rollout.tools:calculate"
    several = tool_result(path, {"a": "1", "b": "2"}, 10.0, 100)
    assert several == "Error: ValueError: expected one argument, found a, b"


def test_arguments_are_described_by_annotations_and_docstring() -> None:
    path = f"{__name__}:{{}}"
    (schema,) = _tool_schemas(ToolUse(tools=(path.format("lines_of"),)), Path())
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["path", "first"]
    described = {name: tuple(each.values()) for name, each in parameters["properties"].items()}
    assert described["first"] == ("integer", "number of the first line")
    with pytest.raises(ConfigError, match="arguments of undescribed need annotations"):
        _tool_schemas(ToolUse(tools=(path.format("undescribed"),)), Path())


def test_failure_of_the_infrastructure_is_raised() -> None:
    with pytest.raises(RewardError, match="no sandbox"):
        shown_result("fails_by", "sandbox")


WORDS = [
    *("<eos>", "<tool>", "calculator ", "python ", "unknown ", "6*7", "</tool>", " #### 42", "?"),
    *("bash ", "cd inner; x=$(cat a)", "echo $x; exit 3"),
    *("edit ", '{"path": "a", "old": "b", "new": "c"}', "lines_of ", '{"path": "a", "first": 1}'),
    *('python3 sums.py < "$NUMBERS" > answer.txt', "also_lines_of "),
]
CALL, UNKNOWN, ANSWER = [1, 2, 5, 6], [1, 4, 5, 6], [7, 0]


class ScriptedServices(FakeServices):
    """`EpisodeServices` of a scripted policy, each token sampled by a newer version."""

    def __init__(self, *script: list[int], **settings: Any) -> None:
        super().__init__(lambda _: Score(1.0, "correct"), **settings)
        self.script = script
        self.shown: list[str] = []
        self.failure: Exception | None = None

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        tokens = self.script[len(self.requests)]
        self.requests.append(request)
        first = 10 * len(self.requests)
        spans = tuple(VersionSpan(first + place, 1) for place in range(len(tokens)))
        done = Completion(as_tokens(tokens), np.full(len(tokens), -1, np.float32), spans, "stop")
        return [done] * len(request.seeds)

    async def call_tool(self, path: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        self.tool_calls += [(path, arguments) for arguments in calls]
        return [self.failure or tool_result(*arguments) for arguments in calls]

    async def new_sandbox(self, settings: SandboxSettings) -> Sandbox:
        self.sandbox = make_sandbox(settings)
        return self.sandbox

    def encode(self, text: str) -> Tokens:
        self.shown.append(text)
        return as_tokens([8] * len(text))

    def decode(self, tokens: Tokens) -> str:
        return "".join(WORDS[token] for token in tokens if token)


def roll_out(services: ScriptedServices, **settings: Any) -> RolledOutGroup:
    workflow = ToolUse.model_validate({"tools": ["calculator"], **settings})
    return asyncio.run(run_group(workflow, episode_of(3), services))


def test_answers_of_tools_are_context_and_versions_cover_every_token() -> None:
    services = ScriptedServices(CALL, ANSWER, max_model_len=200)
    group = roll_out(services, call_cost=0.25)
    (member, draft), *_ = group.drafts
    assert (member, len(group.drafts)) == (0, 3)
    assert services.shown == ["<result>42</result>"] * 3
    assert draft.loss_mask.tolist() == [True] * 4 + [False] * 19 + [True] * 2
    lengths = {span.version: span.length for span in draft.version_spans}
    assert lengths == {10: 1, 11: 1, 12: 1, 13: 20, 20: 1, 21: 1}
    assert draft.score is not None
    assert draft.score.reward == 0.75
    assert [tuple(part) for part in draft.score.parts] == [("tool_calls", 1.0)]
    assert [tokens.tolist() for tokens in services.scored[0]] == [ANSWER] * 3


class ChattingServices(ScriptedServices):
    """`ScriptedServices` with a chat template, in which `?` stands for two calls."""

    is_chat = True

    def chat_calls(self, prompt: Tokens, answer: Tokens) -> Sequence[ToolCall]:
        calls = [ToolCall("calculator", {"input": "6*7"}), ToolCall("unknown", {})]
        return calls if 8 in answer else []

    def next_turn(self, contents: Sequence[str], ended_by: int, role: str) -> Tokens:
        assert (ended_by, role) == (0, "tool")
        return self.encode("|".join(contents))


def test_calls_of_one_answer_in_a_chat_are_answered_together() -> None:
    services = ChattingServices([8, 0], ANSWER, max_model_len=400)
    (_, draft), *_ = roll_out(services).drafts
    computed, error = services.shown[0].split("|")
    assert computed == "42"
    assert error.startswith("Error: expected one of the tools")
    assert draft.score is not None
    assert draft.score.parts[0].reward == 2


BASH, BASH_AGAIN, PYTHON = [1, 9, 10, 6], [1, 9, 11, 6], [1, 3, 5, 6]


def test_calls_of_an_episode_share_a_sandbox_that_has_the_prompts_files() -> None:
    services = ScriptedServices(BASH, BASH_AGAIN, PYTHON, ANSWER, max_model_len=400)
    prompt = replace(PROMPT, metadata={"files": '{"inner/a": "from a file"}'})
    episode = replace(episode_of(1), prompt=prompt)
    workflow = ToolUse.model_validate({"tools": ["bash", "python"], "sandbox": {}})
    group = asyncio.run(run_group(workflow, episode, services))
    results = ["", "from a file\nError: exit code 3", "42"]
    assert not group.errors
    ((_, draft),) = group.drafts
    assert [(c.turn, c.name, c.result, c.exit_code) for c in draft.tool_calls] == [
        (0, "bash", "", 0),
        (1, "bash", results[1], 3),
        (2, "python", "42", 0),
    ]
    assert json.loads(draft.tool_calls[1].arguments) == {"input": "echo $x; exit 3"}
    assert all(0 < call.duration_s < 60 for call in draft.tool_calls)
    assert services.shown == [f"<result>{each}</result>" for each in results]
    with pytest.raises(SandboxError, match="it was closed"):
        asyncio.run(services.sandbox.run("true", timeout_s=1))


def test_files_that_the_sandbox_cannot_have_are_an_error_of_the_prompt() -> None:
    services = ScriptedServices(BASH, BASH, ANSWER, max_model_len=400)
    prompt = replace(PROMPT, metadata={"files": {"/etc/motd": "x"}})
    workflow = ToolUse.model_validate({"tools": ["bash"], "sandbox": {}})
    group = asyncio.run(run_group(workflow, replace(episode_of(1), prompt=prompt), services))
    (error,) = group.errors
    reason = "/etc/motd: Read-only file system"
    assert f"prompt p: its files cannot be in the sandbox: {reason}" in error
    assert len(services.requests) == 1


def test_edits_replace_a_text_that_is_there_once() -> None:
    edit = [1, 12, 13, 6]
    services = ScriptedServices(edit, edit, [1, 12, 5, 6], ANSWER, max_model_len=600)
    prompt = replace(PROMPT, metadata={"files": {"a": "abc\n"}})
    workflow = ToolUse.model_validate({"tools": ["edit"], "sandbox": {}, "max_calls": 3})
    asyncio.run(run_group(workflow, replace(episode_of(1), prompt=prompt), services))
    changed, again, no_json = services.shown
    assert changed == "<result>a was changed</result>"
    assert again == "<result>Error: expected the old text once in a, found it 0 times</result>"
    assert no_json.startswith("<result>Error: ")
    (schema,) = _tool_schemas(workflow, Path())
    assert [*schema["function"]["parameters"]["properties"]] == ["path", "old", "new"]


@pytest.mark.parametrize(("name", "token"), [("lines_of", 14), ("also_lines_of", 17)])
def test_functions_may_run_in_the_sandbox(name: str, token: int) -> None:
    services = ScriptedServices([1, token, 15, 6], ANSWER, max_model_len=400)
    prompt = replace(PROMPT, metadata={"files": {"a": "first\nsecond\n"}})
    workflow = ToolUse.model_validate(
        {"tools": [f"tests.unit.sandboxed:{name}"], "sandbox": {}, "functions_in_sandbox": True}
    )
    group = asyncio.run(run_group(workflow, replace(episode_of(1), prompt=prompt), services))
    ((_, draft),) = group.drafts
    (call,) = draft.tool_calls
    assert (call.result, call.exit_code) == ("first", 0)
    assert not services.tool_calls
    with pytest.raises(ValueError, match=r"functions_in_sandbox needs a workflow\.sandbox"):
        ToolUse.model_validate({"functions_in_sandbox": True})


def test_the_tests_of_a_task_reward_what_was_done_in_its_sandbox(tmp_path: Path) -> None:
    write_task(tmp_path / "sum")
    solve = [1, 9, 16, 6]
    workflow = SandboxTask(tasks=str(tmp_path))
    prompt = replace(PROMPT, metadata={"task": "sum"})
    rewards = []
    for script in ([solve, ANSWER], [BASH, ANSWER], [ANSWER]):
        services = ScriptedServices(*script, max_model_len=400)
        group = asyncio.run(run_group(workflow, replace(episode_of(1), prompt=prompt), services))
        ((_, draft),) = group.drafts
        assert draft.score is not None
        rewards.append(draft.score.reward)
        assert not services.scored
    assert rewards == [1, 0, 0]
    assert draft.score.message == "the answer is , expected 42"
    assert [part.name for part in draft.score.parts] == ["reward", "tool_calls"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({}, "it has no column 'task'"), ({"task": "gone"}, "it has no task.toml")],
)
def test_a_row_without_its_task_fails(
    tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    workflow, prompt = SandboxTask(tasks=str(tmp_path)), replace(PROMPT, metadata=metadata)
    services = ScriptedServices(ANSWER, max_model_len=400)
    group = asyncio.run(run_group(workflow, replace(episode_of(1), prompt=prompt), services))
    assert group.has_failed
    assert message in group.errors[0]


def test_files_that_are_no_text_by_path_are_refused() -> None:
    for files in ("[1]", "{", {"a": 1}):
        with pytest.raises(PromptError, match="prompt p: expected in column 'files' text by path"):
            files_of(replace(PROMPT, metadata={"files": files}))


def test_unknown_tool_is_an_error_that_the_policy_sees() -> None:
    services = ScriptedServices(UNKNOWN, ANSWER, max_model_len=200)
    roll_out(services)
    assert "expected one of the tools calculator, found 'unknown'" in services.shown[0]
    assert not services.tool_calls


@pytest.mark.parametrize(
    ("settings", "max_model_len", "limit"),
    [
        ({"max_calls": 1}, 200, "workflow.max_calls (1)"),
        ({"episode_timeout_s": 1e-9}, 200, "workflow.episode_timeout_s (1e-09)"),
        ({}, 22, "generation.max_model_len"),
    ],
)
def test_limit_ends_an_episode_and_is_recorded(
    settings: dict[str, Any], max_model_len: int, limit: str
) -> None:
    services = ScriptedServices(CALL, CALL, max_model_len=max_model_len)
    (_, draft), *_ = roll_out(services, **settings).drafts
    assert draft.finish_reason == "length"
    assert draft.score is not None
    assert draft.score.message == f"ended by {limit}"
    assert draft.loss_mask[-1]


def test_failure_of_the_infrastructure_is_the_members() -> None:
    services = ScriptedServices(CALL, ANSWER, max_model_len=200)
    services.failure = SandboxError("no sandbox")
    group = roll_out(services)
    assert group.has_failed
    assert len(group.errors) == 3
    assert "no sandbox" in group.errors[0]


@pytest.mark.parametrize(
    ("workflow", "rule"),
    [
        (
            {"tools": ["abacus"]},
            "expected one of calculator, python, bash, edit, or an import path",
        ),
        ({"tools": ["bash"]}, "workflow.tools: bash needs a workflow.sandbox.provider"),
        ({"tools": ["calculator", "mine:calculator"]}, "two tools are called 'calculator'"),
        ({"result_template": "none"}, "must contain {result}"),
        ({"call_end": "</call>"}, r'needs generation.stop.strings = \["</call>"\]'),
    ],
)
def test_mistake_in_settings_is_reported_before_a_run(workflow: dict[str, Any], rule: str) -> None:
    stop = {"generation": {"stop": {"strings": ["</tool>"]}}}
    with pytest.raises(ConfigError, match=rule):
        build_recipe({**stop, "workflow": {"name": "tool_use", **workflow}}, source="test")


def test_tool_that_cannot_be_imported_is_reported_before_a_run() -> None:
    stop = {"generation": {"stop": {"strings": ["</tool>"]}}}
    workflow = {"name": "tool_use", "tools": ["nowhere:search"]}
    plan = build_recipe({**stop, "workflow": workflow}, source="test").prompt_plan()
    with pytest.raises(ConfigError, match=r"workflow.tools = 'nowhere:search' cannot be imported"):
        renderer(plan, plan.rows.prompts, Path("unread"), functions=Path())
