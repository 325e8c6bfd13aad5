"""Programs in containers elsewhere: graded as in a sandbox of one's own, or not at all."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_flow.errors import RewardError
from areal_flow.rewards import retries
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.registry import load_reward
from areal_flow.rewards.sandbox import containers
from areal_flow.rewards.sandbox.containers import ContainerPool
from areal_flow.rewards.sandbox.limits import Limits, SandboxError
from areal_flow.rewards.sandbox.self_test import choose_tier
from areal_flow.types import Score
from tests.containers import answer, run_code
from tests.judges import Refused, running_judge

SUM = {"mode": "stdin", "tests": [{"input": "1 2\n", "output": "3"}]}
ADD = {"mode": "call", "entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]}
ASSERT = {"mode": "assert", "entry_point": "add", "tests": "assert add(1, 2) == 3"}


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_judge(run_code) as url:
        yield url


def judged(url: str, row: dict[str, Any], *completions: str, **limits: Any) -> list[Score]:
    """Judge completions where no sandbox of one's own works, and the pool is known to be good."""
    settings = {"sandbox_url": url, **limits}
    reward = load_reward("code", Path(), settings=settings).reward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal_flow.rewards.code_reward.choose_tier", lambda **_: ContainerPool.tier)
        reward.open()
    inputs = [RewardInput("", completion, "", row) for completion in completions]
    scores = asyncio.run(reward.score(inputs))
    reward.close()
    return [*scores]


def test_pool_is_the_tier_where_no_sandbox_works(url: str) -> None:
    assert choose_tier((), url=url) == ContainerPool.tier
    with pytest.raises(SandboxError, match=r"none is allowed.*sandbox_url"):
        choose_tier(())


PROGRAMS = [
    ("print(sum(map(int, input().split())))", "right"),
    ("import sys; sys.stderr.write('3'); print(4)", "wrong"),
    ("print(3); raise SystemExit(1)", "runtime_error"),
    ("print(", "parse_error"),
    ("x = bytearray(2**30)", "memory_limit"),
    ("print('a' * 5000)", "output_limit"),
]


def test_programs_get_the_verdicts_that_they_get_in_a_sandbox(url: str) -> None:
    sources = [source for source, _ in PROGRAMS]
    scores = judged(url, SUM, *sources, memory_bytes=2**29, output_bytes=4000)
    assert [score.verdict for score in scores] == [verdict for _, verdict in PROGRAMS]


def test_programs_that_do_not_end_time_out(url: str) -> None:
    sources = ("import time; time.sleep(60)", "while True: pass")
    scores = judged(url, SUM, *sources, cpu_s=0.2, wall_per_cpu=1.0)
    assert [score.verdict for score in scores] == ["timeout"] * 2
    with running_judge(lambda _: answer("Failed", return_code=-signal.SIGXCPU)) as other:
        assert judged(other, SUM, "print(3)")[0].verdict == "timeout"


FORGERIES = [
    ("def add(a, b): return a + b", "right"),
    ("print('{}\\n{\"value\": 3}')\ndef add(a, b): return a + b", "right"),
    ("print('{}\\n{\"value\": 3}')\ndef add(a, b): return 4", "wrong"),
    ("import os; os._exit(0)", "runtime_error"),
    ("class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()", "wrong"),
    ("import json\njson.dumps = lambda x: '{\"value\": 4}'\ndef add(a, b): return 3", "wrong"),
]


def test_functions_are_graded_by_what_they_return_and_not_by_what_they_print(url: str) -> None:
    scores = judged(url, ADD, *(source for source, _ in FORGERIES))
    assert [score.verdict for score in scores] == [verdict for _, verdict in FORGERIES]


def test_answers_never_leave_this_process(url: str) -> None:
    sent: list[dict[str, Any]] = []

    def notes(asked: dict[str, Any]) -> dict[str, Any]:
        sent.append(asked)
        return answer(stdout='{}\n{"value": 987654321}\n')

    row = ADD | {"tests": [{"args": [1], "expected": 987654321}]}
    with running_judge(notes) as url:
        (score,) = judged(url, row, "def add(a): ...")
    assert score.verdict == "right"
    assert "987654321" not in str(sent)


def test_assertions_are_not_run_beside_the_program_that_they_judge(url: str) -> None:
    (score,) = judged(url, ASSERT, "def add(a, b): return a + b")
    assert (score.reward, score.verdict) == (None, "infrastructure_error")
    assert "mode 'assert'" in score.error


def refuses(status: int) -> Callable[[Any], Any]:
    def judge(asked: Any) -> Any:
        raise Refused(status)

    return judge


@pytest.mark.parametrize(
    ("pool", "num_asked", "why"),
    [
        (refuses(500), 3, "status 500"),
        (refuses(404), 1, "status 404"),
        (lambda _: 3, 3, "KeyError"),
        (lambda _: answer("SandboxError") | {"message": "no cgroup"}, 3, "no cgroup"),
        (lambda _: answer(return_code=None), 3, "TypeError"),
        (lambda _: answer(status="Error"), 3, "status 'Error' of a run"),
        (lambda _: answer(stdout=None), 3, "AttributeError"),
    ],
)
def test_pool_that_fails_gives_no_reward(
    pool: Callable[[Any], Any], num_asked: int, why: str
) -> None:
    asked: list[Any] = []
    with running_judge(lambda given: asked.append(given) or pool(given)) as url:
        (score,) = judged(url, SUM, "print(3)")
    assert (score.reward, score.verdict) == (None, "infrastructure_error")
    assert why in score.error
    assert len(asked) == num_asked


def test_pool_that_is_down_or_slow_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    (score,) = judged("http://127.0.0.1:9", SUM, "print(3)")
    assert "ConnectionRefusedError" in score.error
    monkeypatch.setattr(containers, "QUEUE_S", 0.1)
    with running_judge(lambda _: time.sleep(0.5)) as url:
        (score,) = judged(url, SUM, "print(3)", cpu_s=0.1, wall_per_cpu=1.0)
    assert (score.reward, score.verdict) == (None, "infrastructure_error")
    assert "TimeoutError" in score.error


def test_pool_that_recovers_loses_nothing(url: str) -> None:
    num_failures = iter(range(2))

    def recovers(asked: dict[str, Any]) -> dict[str, Any]:
        if next(num_failures, None) is not None:
            raise Refused(503)
        return run_code(asked)

    with running_judge(recovers) as url:
        (score,) = judged(url, SUM, "print(3)")
    assert score.verdict == "right"


def test_answer_without_end_is_not_kept() -> None:
    with running_judge(lambda _: answer(stdout="a" * 2**22)) as url:
        (score,) = judged(url, SUM, "print(3)", output_bytes=1000)
    assert score.verdict == "output_limit"


def without(name: str, said: Any) -> Callable[[Any], Any]:
    def run(asked: Any) -> Any:
        found = run_code(asked)
        found["run_result"][name] = said(found["run_result"])
        return found

    return run


def patiently(asked: Any) -> Any:
    found = run_code(asked)
    return answer() if found["run_result"]["status"] == "TimeLimitExceeded" else found


BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "says nothing": (lambda _: answer(), "what a program prints does not come back"),
    "mixes the streams": (without("stdout", lambda r: r["stdout"] + r["stderr"]), "prints"),
    "hides how a program ends": (without("return_code", lambda _: 0), "expected 7, found 0"),
    "never ends a program": (patiently, "lasts too long is not ended"),
    "cannot be asked": (refuses(403), "status 403"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_pool_that_does_not_do_what_grading_needs_is_refused(name: str) -> None:
    pool, why = BROKEN[name]
    with running_judge(pool) as url, pytest.raises(SandboxError, match=f"containers: .*{why}"):
        choose_tier((), url=url)


def test_pool_whose_programs_see_each_other_s_files_is_refused(tmp_path: Path) -> None:
    def shares(asked: Any) -> Any:
        return run_code(asked, folder=str(tmp_path))

    with running_judge(shares) as url, pytest.raises(SandboxError, match="isolation = 'lite'"):
        ContainerPool(url, Limits()).check()


def test_what_is_no_url_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(RewardError, match="expected sandbox_url"):
        load_reward("code", Path(), settings={"sandbox_url": "pool.example"})
