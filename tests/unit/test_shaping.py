"""Rewards of a completion's form, and of a judge over HTTP."""

from __future__ import annotations

import asyncio
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, RewardError
from areal_flow.core.types import Score
from areal_flow.rewards import judge
from areal_flow.rewards.code.reward import CodeReward
from areal_flow.rewards.judge import JudgeReward
from areal_flow.rewards.protocol import RewardInput, RewardSettings, part_names
from areal_flow.rewards.registry import WeightedRewards, load_reward
from areal_flow.rewards.shaping import penalize_length, verify_format, verify_regex
from areal_flow.training.metrics import _part_means
from tests.judges import Refused, running_judge

NOWHERE = Path("nowhere")
CATASTROPHE = r"(?:a|aa)+[^a]"


@pytest.mark.parametrize(
    ("completion", "pattern", "verdict"),
    [
        ("Answer: no. Answer: yes.", r"Answer: (\w+)", "correct"),
        ("Answer: yes. Answer: no.", r"Answer: (\w+)", "incorrect"),
        ("yes", r"\w+", "correct"),
        ("Answer:  yes ", r"Answer:(.*)", "correct"),
        ("nothing", r"Answer: (\w+)", "parse_error"),
        ("yes or no", r"(no)|yes", "incorrect"),
        ("", r".+", "parse_error"),
    ],
)
def test_last_match_is_the_answer(completion: str, pattern: str, verdict: str) -> None:
    score = verify_regex(completion=completion, answer="yes", pattern=pattern)
    assert (score.reward, score.verdict) == (float(verdict == "correct"), verdict)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think> 4", 1.0),
        ("<think>a</think> 4\n<think>b</think>", 0.0),
        ("well: <think>a</think> 4", 0.0),
        ("", 0.0),
    ],
)
def test_format_describes_the_whole_completion(completion: str, reward: float) -> None:
    pattern = r"<think>(?:(?!<think>).)*</think>[^<]*"
    assert verify_format(completion=completion, pattern=pattern).reward == reward


@pytest.mark.timeout(30)
def test_pattern_that_never_ends_times_out() -> None:
    hostile = "a" * 60
    assert verify_format(completion=hostile, pattern=CATASTROPHE).verdict == "timeout"
    score = verify_regex(completion=hostile, answer="c", pattern=CATASTROPHE)
    assert (score.reward, score.verdict) == (0.0, "timeout")


def test_length_is_punished_as_in_equation_13_of_dapo() -> None:
    lengths = [0, 60, 80, 85, 90, 100, 101, 5000]
    penalties = [
        penalize_length(completion_ids=[1] * length, max_tokens=100, buffer_tokens=20)
        for length in lengths
    ]
    assert penalties == [0, 0, 0, -0.25, -0.5, -1, -1, -1]


@pytest.mark.parametrize(
    ("verifier", "settings", "message"),
    [
        ("regex", {}, "reward 'regex' needs the setting 'pattern'"),
        ("regex", {"patern": "x"}, "has no setting 'patern': it takes pattern"),
        ("numeric", {"digits": 3}, "has no setting 'digits': it takes no settings"),
        ("format", {"completion": "x"}, "has no setting 'completion'"),
        ("judge", {"url": "localhost:80"}, r"expected url = 'http\(s\)://...'"),
        ("judge", {"url": "http://localhost", "max_concurrency": 0}, "max_concurrency >= 1"),
        ("judge", {}, "reward 'judge' needs the setting 'url'"),
        ("judge", {"url": "http://localhost", "scale": [1, 0]}, r"scale = .*found \[1, 0\]"),
        ("judge", {"url": "http://localhost", "scale": 5}, "scale = .*found 5"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_judged(
    verifier: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        load_reward(verifier, NOWHERE, settings=settings)


def test_wrong_pattern_and_lengths_are_named() -> None:
    with pytest.raises(RewardError, match=r"expected a regular expression, found '\('"):
        verify_format(completion="", pattern="(")
    with pytest.raises(RewardError, match="1 <= buffer_tokens <= max_tokens"):
        penalize_length(completion_ids=[], max_tokens=10, buffer_tokens=20)


def scaled(*, completion: str, factor: float = 1.0) -> float:
    return factor * len(completion)


def test_settings_reach_a_function_of_ones_own_and_its_identity() -> None:
    path = f"{__name__}:scaled"
    plain, doubled = (
        load_reward(path, NOWHERE, settings=settings) for settings in ({}, {"factor": 2.0})
    )
    assert plain.identity != doubled.identity
    (score,) = asyncio.run(doubled.reward.score([RewardInput("", "abc", "")]))
    assert score.reward == 6.0


def test_shaping_is_added_to_the_reward_of_an_answer() -> None:
    length = {"max_tokens": 4, "buffer_tokens": 2}
    rewards = WeightedRewards(
        [
            RewardSettings(verifier="exact"),
            RewardSettings(verifier="length", settings=length, weight=0.5),
        ],
        NOWHERE,
    )
    given = [RewardInput("", "yes", "yes", completion_ids=ids) for ids in ([1], [1, 1, 1])]
    scores = asyncio.run(rewards.score(given))
    assert [score.reward for score in scores] == [1.0, 0.75]
    assert [part.reward for part in scores[1].parts] == [1.0, -0.5]


def test_verifier_may_stand_twice_with_other_settings_and_each_part_has_a_name() -> None:
    patterns = [r"A: (\w+)", r"B: (\w+)", r"C: (\w+)"]
    chosen = [{"verifier": "regex", "settings": {"pattern": pattern}} for pattern in patterns]
    recipe = build_recipe({"rewards": [*chosen, {"verifier": "numeric"}]}, source="test")
    rewards = WeightedRewards(recipe.rewards, NOWHERE)
    (score,) = asyncio.run(rewards.score([RewardInput("", "A: 1 B: 2 C: 3", "2")]))
    names = [part.name for part in score.parts]
    assert names == ["regex", "regex_2", "regex_3", "numeric"]
    assert [part.reward for part in score.parts] == [0.0, 1.0, 0.0, 0.0]
    row = {"reward_parts": [part._asdict() for part in score.parts]}
    assert {*_part_means([row])} == {f"reward/{name}_mean" for name in names}


def test_numbered_parts_keep_clear_of_names_that_others_have() -> None:
    chosen = [RewardSettings(verifier=name) for name in ("m:a", "m:a", "m:a_2", "m:a")]
    assert part_names(chosen) == ["m:a", "m:a_3", "m:a_2", "m:a_4"]


def test_verifier_that_stands_twice_with_the_same_settings_is_refused() -> None:
    twice = [{"verifier": "numeric", "weight": weight} for weight in (1.0, 0.5)]
    with pytest.raises(ConfigError, match=r"rewards: \['numeric'\] named twice with the same set"):
        build_recipe({"rewards": twice}, source="test")


def judge_score(answer: Any, **settings: Any) -> Score:
    with running_judge(answer) as url:
        reward = JudgeReward(url=url, **settings)
        reward.open()
        given = RewardInput("1 + 1 =", "so 2", "2", {"level": 3})
        (score,) = asyncio.run(reward.score([given]))
        return score


def test_judge_is_sent_the_whole_row() -> None:
    seen: list[Any] = []

    def judged(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request)
        return {"score": 0.5, "detail": "half"}

    score = judge_score(judged)
    assert (score.reward, score.message) == (0.5, "half")
    assert seen[0]["metadata"] == {"level": 3}
    assert (seen[0]["prompt"], seen[0]["completion"], seen[0]["answer"]) == ("1 + 1 =", "so 2", "2")


def test_judge_model_gets_a_prompt_and_its_last_score_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    seen: list[Any] = []

    def completion_of(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request)
        return {"choices": [{"message": {"content": "Score: 0? no.\nScore: 0.75"}}]}

    score = judge_score(completion_of, model="a-judge", key_variable="JUDGE_KEY")
    assert score.reward == 0.75
    (request,) = seen
    assert (request["model"], request["path"]) == ("a-judge", "/chat/completions")
    assert request["authorization"] == "Bearer secret"
    assert "so 2" in request["messages"][0]["content"]


@pytest.mark.parametrize(
    ("verdict", "scale", "reward"),
    [
        ("Score: 95", None, None),
        ("Score: -0.5", None, None),
        ("Score: 1", None, 1.0),
        ("Score: 95", (0, 100), 95.0),
        ("Score: 0", (1, 5), None),
    ],
)
def test_score_beyond_the_scale_of_a_judge_is_no_reward(
    verdict: str, scale: tuple[float, float] | None, reward: float | None
) -> None:
    score = judge_score(
        lambda _: {"choices": [{"message": {"content": verdict}}]}, model="a-judge", scale=scale
    )
    assert score.reward == reward
    assert score.verdict == ("error" if reward is None else None)
    low, high = scale or (0, 1)
    assert reward is not None or f"expected a score from {low} to {high}, found" in score.error


def test_score_of_a_service_is_bounded_by_the_scale_that_is_set() -> None:
    assert judge_score(lambda _: 95).reward == 95
    assert judge_score(lambda _: 95, scale=(0, 1)).reward is None
    for infinite in (inf, -inf, nan):
        assert judge_score(lambda _, score=infinite: score).verdict == "error"
    with pytest.raises(RewardError, match="two numbers"):
        JudgeReward(url="http://x", scale=(0, inf))


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("**Score:** 1", 1.0),
        ("Score: .5", 0.5),
        ("Score: +1.0, since it is right.", 1.0),
        ("Score: 0.5.", 0.5),
        *(
            (f"Score: {unclear}", None)
            for unclear in ("1e2", "1/10", "0,5", "1 of 10", "1%", "1.0.1")
        ),
    ],
)
def test_score_is_the_whole_number_that_a_judge_says(verdict: str, score: float | None) -> None:
    judged = judge_score(lambda _: {"choices": [{"message": {"content": verdict}}]}, model="m")
    assert judged.reward == score
    assert judged.verdict == (None if score is not None else "infrastructure_error")


def test_words_of_a_completion_are_not_taken_for_places_of_the_question() -> None:
    seen: list[Any] = []

    def completion_of(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request["messages"][0]["content"])
        return {"choices": [{"message": {"content": "Score: 1"}}]}

    with running_judge(completion_of) as url:
        reward = JudgeReward(url=url, model="m", question="{prompt}|{answer}|{completion}|{x}")
        reward.open()
        given = RewardInput("say {completion}", "{answer} {prompt}", "{completion}")
        asyncio.run(reward.score([given]))
    assert seen == ["say {completion}|{completion}|{answer} {prompt}|{x}"]


def test_request_is_retried_until_the_service_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_WAIT_S", 0.01)
    statuses = [503, 429]

    def judged(_: dict[str, Any]) -> float:
        if statuses:
            raise Refused(statuses.pop())
        return 1.0

    assert judge_score(judged).reward == 1.0


@pytest.mark.parametrize(("status", "times"), [(500, 4), (401, 1)])
def test_service_that_fails_gives_no_score(
    status: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "FIRST_WAIT_S", 0.01)
    requests: list[Any] = []

    def refused(request: dict[str, Any]) -> float:
        requests.append(request)
        raise Refused(status)

    score = judge_score(refused)
    assert (score.reward, score.verdict) == (None, "infrastructure_error")
    assert f"status {status}" in score.error
    assert len(requests) == times


def test_answer_without_a_score_and_absent_service_give_none() -> None:
    assert "no score in" in judge_score(lambda _: {"verdict": "fine"}).error
    reward = JudgeReward(url="http://127.0.0.1:9", num_retries=0)
    reward.open()
    (score,) = asyncio.run(reward.score([RewardInput("", "", "")]))
    assert score.verdict == "infrastructure_error"


def test_key_that_is_not_there_is_named() -> None:
    with pytest.raises(RewardError, match="environment variable NO_SUCH_KEY"):
        JudgeReward(url="http://localhost", key_variable="NO_SUCH_KEY").open()


def test_identity_of_a_class_covers_the_files_that_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part.py"
    part.write_text("x = 1")
    monkeypatch.setattr(CodeReward, "made_of", (*CodeReward.made_of, part))
    before = load_reward("code", NOWHERE).identity
    part.write_text("x = 2")
    assert load_reward("code", NOWHERE).identity != before
    assert any(path.parent.name == "inside" for path in CodeReward.made_of)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("numeric", {}),
        ("exact", {}),
        ("regex", {"pattern": r"\d+"}),
        ("format", {"pattern": ".*"}),
        ("judge", {"url": "http://127.0.0.1:1"}),
        ("reasoning_gym", {}),
    ],
)
def test_a_hundred_megabytes_are_not_read(name: str, settings: dict[str, Any]) -> None:
    reward = load_reward(name, Path(), settings=settings).reward
    reward.open()
    (score,) = asyncio.run(reward.score([RewardInput("", "1 2 " * 25_000_000, "2")]))
    assert (score.reward, score.verdict) == (0.0, "output_limit")


def test_length_of_a_completion_counts_whatever_its_text() -> None:
    settings = {"max_tokens": 8, "buffer_tokens": 4}
    reward = load_reward("length", Path(), settings=settings).reward
    given = RewardInput("", "1 2 " * 25_000_000, "2", completion_ids=(1,) * 10**6)
    assert asyncio.run(reward.score([given]))[0].reward == -1.0
