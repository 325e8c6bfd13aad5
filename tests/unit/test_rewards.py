"""Verifiers: what counts as right, and what happens when one fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_flow.core.errors import RewardError
from areal_flow.core.settings import code_hash
from areal_flow.core.types import RewardPart, Score
from areal_flow.rewards.functions import FAILURES, FunctionReward, function_reward
from areal_flow.rewards.math.reward import verify_exact, verify_numeric
from areal_flow.rewards.protocol import RewardInput, RewardSettings
from areal_flow.rewards.registry import WeightedRewards, load_reward
from areal_flow.rewards.shipping import ship_function

NOWHERE = Path("nowhere")


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        (" 6 6 -1 #### -1", "-1", "correct"),
        ("#### 1,234", "1234", "correct"),
        ("#### $18.", "so she has 18 left\n#### 18", "correct"),
        ("the answer is \\boxed{3/4}", "0.75", "correct"),
        ("first 5, then #### 7", "7", "correct"),
        ("no mark, just 41 and 42", "42", "incorrect"),
        ("#### 2.50", "2.5", "correct"),
        ("#### 8", "7", "incorrect"),
        ("\\boxed{1} but no, \\boxed{2}", "1", "incorrect"),
        ("#### 7=5", "5", "incorrect"),
        ("#### twelve", "12", "incorrect"),
        ("nothing at all", "12", "incorrect"),
        ("", "12", "parse_error"),
        ("#### 1/0", "12", "parse_error"),
        ("#### \uff11\uff12", "12", "parse_error"),
        ("\u0661\u0662", "12", "parse_error"),
        ("#### " + "9" * 5000, "12", "parse_error"),
        ("#### 1", "one", "bad_reference"),
        ("Total = 17", "17", "correct"),
        ("12", "Total = 12", "correct"),
        ("x = 13", "x = 12", "incorrect"),
        ("12 apples", "n=12", "correct"),
        ("12", "= 12", "correct"),
        ("5", "5 = x", "correct"),
        ("7", "so 3 and 4, 7", "bad_reference"),
        ("7", "2x = 7", "bad_reference"),
        ("5", "5!", "bad_reference"),
        (r"\boxed{\frac{1}{2}}", "1/2", "correct"),
        (r"\boxed{\frac{1}{2}}", "0.5", "correct"),
        (r"\boxed{\frac{1}{2}}", "2", "incorrect"),
        (r"so it is $-\dfrac{3}{4}$.", "-0.75", "correct"),
        (r"\boxed{0.5}", r"$\frac{1}{2}$", "correct"),
        (r"\boxed{2}", r"\frac{1}{2}", "incorrect"),
        (r"\boxed{\frac{1}{0}}", "1", "parse_error"),
        (r"\boxed{\frac{x}{2}}", "2", "parse_error"),
        (r"so it is \frac{x}{2}", "2", "incorrect"),
        (r"so it is x^{2}", "2", "incorrect"),
        (r"\boxed{\sqrt{2}}", "2", "parse_error"),
        (r"\boxed{\text{18}}", "18", "correct"),
        (r"\boxed{50\%}", "50", "correct"),
        (r"\boxed{1{,}234}", "1234", "correct"),
        (r"\boxed{1} and \boxed{2}", "2", "incorrect"),
        (r"\boxed{1, 2}", "12", "incorrect"),
        ("#### 1,2", "12", "incorrect"),
        ("#### 1 2", "12", "incorrect"),
        ("#### 1 234", "1234", "correct"),
        ("it costs 5, 6, or 7, in all", "7", "incorrect"),
        ("first 41 ####", "41", "parse_error"),
        (r"first 41 \boxed{}", "41", "parse_error"),
        ("#### 7\nThat was all.", "7", "correct"),
        (r"\boxed{2\frac{1}{2}}", "5/2", "correct"),
        (r"\boxed{2\frac{1}{2}}", "21/2", "incorrect"),
        (r"it takes $-1 \tfrac12$ hours", "-1.5", "correct"),
        (r"1,000\frac{1}{2}", "1000.5", "correct"),
        (r"\boxed{3/2}", r"1\frac{1}{2}", "correct"),
        (r"\boxed{11/2}", r"1\frac{1}{2}", "incorrect"),
        (r"\boxed{1.5\frac{1}{2}}", "2", "parse_error"),
        (r"\boxed{\frac{1}{-2}}", "-0.5", "correct"),
        (r"\boxed{\frac{1.5}{2}}", "0.75", "correct"),
        (r"\boxed{\frac{1{,}000}{2}}", "500", "correct"),
        (r"it is \frac{ 3 }{ 4 }", "0.75", "correct"),
        ("__42__", "42", "correct"),
        ("_42_", "42", "correct"),
        (r"\textbf{42}", "42", "correct"),
        (r"so $\mathbf{42}$", "42", "correct"),
        ("Answer: {42}", "42", "correct"),
        (r"so it is x_2", "2", "incorrect"),
        (r"so it is \sqrt{2}", "2", "incorrect"),
        (r"so it is \frac{x}{2", "2", "incorrect"),
    ],
)
def test_numeric_verdicts(completion: str, answer: str, verdict: str) -> None:
    score = verify_numeric(prompt="", completion=completion, answer=answer)
    assert score.verdict == verdict
    assert score.reward == (1.0 if verdict == "correct" else 0.0)


def test_reference_of_several_numbers_is_quoted() -> None:
    score = verify_numeric(prompt="", completion="7", answer="so 3 and 4, 7")
    assert score.error == "expected a single number, got 'so 3 and 4, 7'"


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        ("thinking... #### Paris", "Paris", "correct"),
        ("thinking... ####\n1 2\n3 4", "1 2 3 4", "correct"),
        (f"\\boxed{{{'word ' * 400}}}", "word " * 400, "correct"),
        ("\\boxed{x + 1}", "#### x + 1", "correct"),
        ("Paris ", "Paris", "correct"),
        ("paris", "Paris", "incorrect"),
        ("", "Paris", "incorrect"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", "correct"),
        (r"\boxed{\frac{1}{2}}", "2", "incorrect"),
    ],
)
def test_exact_verdicts(completion: str, answer: str, verdict: str) -> None:
    assert verify_exact(prompt="", completion=completion, answer=answer).verdict == verdict


@pytest.mark.parametrize(
    ("verify", "completion", "answer", "verdict"),
    [
        (verify_numeric, "so 42", 42, "correct"),
        (verify_numeric, "1/100000", 1e-05, "correct"),
        (verify_numeric, "0.5", -0.5, "incorrect"),
        (verify_numeric, "1", True, "bad_reference"),
        (verify_numeric, "2", [1, 2], "bad_reference"),
        (verify_numeric, "2", float("inf"), "bad_reference"),
        (verify_exact, "42", 42, "correct"),
        (verify_exact, '["a",  "b"]', ["a", "b"], "correct"),
        (verify_exact, "True", True, "incorrect"),
    ],
)
def test_non_text_answers_are_compared_by_value(
    verify: Callable[..., Score], completion: str, answer: Any, verdict: str
) -> None:
    assert verify(prompt="", completion=completion, answer=answer).verdict == verdict


def scores_of(
    function: Callable[..., Any], *completions: str, answer: str = "a", **metadata: Any
) -> Sequence[Score]:
    inputs = [RewardInput("p", completion, answer, metadata) for completion in completions]
    return asyncio.run(FunctionReward(function).score(inputs))


def test_verifier_that_raises_costs_only_its_own_completion() -> None:
    def fragile(*, prompt: str, completion: str, answer: str) -> float:
        if completion == "bad":
            raise ZeroDivisionError("on purpose")
        return float(completion == answer)

    async def fragile_and_awaited(completion: str, answer: str) -> float:
        return fragile(prompt="", completion=completion, answer=answer)

    for function in (fragile, fragile_and_awaited):
        scores = scores_of(function, "a", "bad", "b")
        assert [score.reward for score in scores] == [1.0, None, 0.0]
        assert scores[1].verdict == "error"
        assert "ZeroDivisionError: on purpose (at fragile, test_rewards.py, line" in scores[1].error


def test_reward_that_is_not_finite_is_an_error() -> None:
    (score,) = scores_of(lambda prompt, completion, answer: float("nan"), "a")
    assert score.reward is None
    assert score.error == "ValueError: expected a finite reward, found nan"


def test_function_gets_what_it_names_and_all_columns_if_it_takes_them() -> None:
    row = {"tests": ["t"], "entry": "f"}
    given: list[Any] = []
    functions: list[Callable[..., Any]] = [
        lambda completion: given.append(completion) or 1,
        lambda completion, metadata: given.append(metadata) or 1,
        lambda completion, tests: given.append(tests) or 1,
        lambda answer, **columns: given.append(columns) or 1,
    ]
    for function in functions:
        (score,) = scores_of(function, "x", **row)
        assert score.reward == 1.0, score.error
    assert given == ["x", row, ["t"], row]


def test_score_may_be_returned_whole() -> None:
    (score,) = scores_of(lambda completion: Score(0.5, "correct", extracted=completion), "x")
    assert score == Score(0.5, "correct", extracted="x")


def test_verifier_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_verifier.py").write_text(
        "def starts(*, prompt, completion, answer):\n"
        "    return float(completion.startswith(answer))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_reward("my_verifier:starts", NOWHERE)
    (score,) = asyncio.run(loaded.reward.score([RewardInput("", "abc", "ab")]))
    assert score.reward == 1.0
    assert loaded.identity.startswith("my_verifier:starts@")
    del sys.modules["my_verifier"]


@pytest.mark.parametrize(
    "name", ["nonsense", "json:nothing", "no_such_module:f", "json:__name__", "shipped:f@0"]
)
def test_unknown_verifier_is_refused_by_name(name: str) -> None:
    with pytest.raises(RewardError, match=rf"rewards\.verifier|{name}"):
        load_reward(name, NOWHERE)


def identity_elsewhere(name: str, directory: Path) -> str:
    code = (
        "import sys, pathlib; from areal_flow.rewards.registry import load_reward;"
        "print(load_reward(sys.argv[1], pathlib.Path(sys.argv[2])).identity)"
    )
    arguments = [sys.executable, "-c", code, name, str(directory)]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()


def test_identity_is_the_same_in_every_process(tmp_path: Path) -> None:
    shipped = ship_function(lambda completion: len(completion) / 9, tmp_path)
    for name in ("numeric", "exact", "operator:eq", shipped):
        assert load_reward(name, tmp_path).identity == identity_elsewhere(name, tmp_path)


def test_functions_without_source_are_distinguished_by_their_code() -> None:
    def compiled(text: str) -> Any:
        names: dict[str, Any] = {"__name__": "nowhere"}
        exec(compile(f"def reward(completion):\n    return {text}", "nowhere", "exec"), names)
        return names["reward"]

    assert code_hash(compiled("1.0")) == code_hash(compiled("1.0")) != code_hash(compiled("2.0"))


def test_verifier_that_exits_hangs_or_returns_nothing_is_reported() -> None:
    def exits(completion: str) -> float:
        sys.exit(3)

    async def exits_on_the_loop(completion: str) -> float:
        sys.exit(3)

    def waits_for_ever(completion: str) -> float:
        threading.Event().wait()
        return 1.0

    async def waits_on_the_loop(completion: str) -> float:
        await asyncio.Event().wait()
        return 1.0

    async def will_not_be_cancelled(completion: str) -> float:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    def returns_nothing(completion: str) -> None: ...

    expected = {
        exits: "called sys.exit(3): it must return a reward (at exits, test_rewards.py, line",
        exits_on_the_loop: "called sys.exit(3)",
        waits_for_ever: "within 0.05 s, it stands in waits_for_ever, test_rewards.py, line",
        waits_on_the_loop: "no verdict on a completion within 0.05 s. Give it a time limit",
        will_not_be_cancelled: "no verdict on a completion within 0.05 s. Give it a time limit",
        returns_nothing: "returned None, expected a number, a Score",
    }
    for function, message in expected.items():
        reward = FunctionReward(function, timeout_s=0.05)  # type: ignore[arg-type]
        (score,) = asyncio.run(reward.score([RewardInput("", "c", "a")]))
        assert score.reward is None
        assert message in score.error


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
    is_right = solution_str.split("####")[-1].strip() == ground_truth
    return {"score": float(is_right), "acc": is_right, "of": data_source, "at": extra_info["index"]}


VERL_INPUT = RewardInput(
    *("1 + 1 =", "so #### 2", "2"),
    metadata={"data_source": "openai/gsm8k", "extra_info": {"index": 7, "split": "train"}},
)


def test_functions_with_verls_signature_are_called_for_one_completion() -> None:
    def takes_all(solution_str: str, ground_truth: str, **others: Any) -> float:
        return float(
            solution_str == ground_truth and sorted(others) == ["data_source", "extra_info"]
        )

    async def waits(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = 3
    ) -> int:
        return int((data_source, extra_info) == ("sums", {}))

    def scored(function: Any, item: RewardInput) -> Score:
        (score,) = asyncio.run(function_reward(function, timeout_s=5).score([item]))
        return score

    score = scored(compute_score, VERL_INPUT)
    extra = {"acc": True, "of": "openai/gsm8k", "at": 7}
    assert (score.reward, score.extra, score.error) == (1.0, extra, "")
    wrong = replace(VERL_INPUT, completion="#### 3")
    assert scored(compute_score, wrong).reward == 0.0
    plain = RewardInput("?", "2", "2", prompt_source="sums")
    assert [scored(function, plain).reward for function in (takes_all, waits)] == [1.0, 1]
    assert (
        "asks for 'answers'; it may ask"
        in scored(lambda solution_str, answers: 1.0, VERL_INPUT).error
    )
    own = replace(VERL_INPUT, metadata={**VERL_INPUT.metadata, "ground_truth": "3"})
    assert scored(compute_score, own).reward == 0.0  # a column of the name comes first
    no_score = scored(lambda solution_str: {"acc": 1}, VERL_INPUT)
    assert "expected a number, a Score, or a dict with 'score'" in no_score.error


FOREVER = threading.Event()


def waits(completion: str) -> float:
    if completion == "hangs":
        FOREVER.wait()
    return float(completion)


async def blocks_the_loop(completion: str) -> float:
    await asyncio.sleep(0)
    return waits(completion)


async def blocks_the_loop_in_a_task(completion: str) -> float:
    await asyncio.sleep(0.1)  # begun, and to be begun again
    (reward,) = await asyncio.gather(blocks_the_loop(completion))
    return reward


async def never_returns(completion: str) -> float:
    return waits(completion) if completion != "hangs" else await asyncio.Event().wait()


@pytest.mark.parametrize(
    "verifier", [waits, blocks_the_loop, blocks_the_loop_in_a_task, never_returns]
)
def test_completion_on_which_a_verifier_hangs_delays_no_other_by_more_than_its_limit(
    verifier: Callable[..., Any],
) -> None:
    limit_s = 0.5
    inputs = [RewardInput("", text, "") for text in ("1", "2", "hangs", "3", "4")]
    began = time.monotonic()
    scores = asyncio.run(FunctionReward(verifier, timeout_s=limit_s).score(inputs))
    assert [score.reward for score in scores] == [1.0, 2.0, None, 3.0, 4.0]
    assert "the verifier hangs" in scores[2].error
    assert time.monotonic() - began < 4 * limit_s


def test_many_slow_steps_of_async_verifiers_are_no_hanging_one() -> None:
    async def computes(completion: str) -> float:
        time.sleep(0.05)
        return 1.0

    inputs = [RewardInput("", "", "")] * 12
    scores = asyncio.run(FunctionReward(computes, timeout_s=0.3).score(inputs))
    assert [score.reward for score in scores] == [1.0] * 12


def test_state_of_an_async_verifier_is_usable_in_the_next_batch() -> None:
    kept: dict[str, Any] = {}

    async def locks(completion: str) -> float:
        lock = kept.setdefault("lock", asyncio.Lock())
        async with lock:  # bound to the loop on which somebody waited for it
            await asyncio.sleep(0)
        return 1.0

    for _ in range(2):
        scores = asyncio.run(FunctionReward(locks).score([RewardInput("", "", "")] * 2))
        assert [score.reward for score in scores] == [1.0, 1.0], scores[0].error


def test_time_out_of_a_verifiers_own_is_not_taken_for_the_limit() -> None:
    async def times_out(completion: str) -> float:
        raise TimeoutError("no answer from the judge")

    (score,) = asyncio.run(FunctionReward(times_out).score([RewardInput("", "c", "a")]))
    assert "TimeoutError: no answer from the judge" in score.error


def test_failure_is_logged_once_with_the_users_frames_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def inner(completion: str) -> float:
        return 1 / len(completion)

    def outer(completion: str) -> float:
        return inner(completion) if completion != "other" else float(completion)

    rewards = FunctionReward(outer)
    FAILURES.sum_up()
    caplog.clear()
    asyncio.run(rewards.score([RewardInput("", "", "")] * 23 + [RewardInput("", "other", "")]))
    FAILURES.sum_up()
    once, tenth, other, total = (record.getMessage() for record in caplog.records)
    frames = [line.rpartition(" in ")[2] for line in once.splitlines() if 'File "' in line]
    assert frames == ["outer", "inner"]
    assert "function.py" not in once
    assert tenth == f"a verifier failed 10 times so far: {total.partition(': ')[2]}"
    assert "ValueError" in other
    assert total.startswith("a verifier failed 23 times: ZeroDivisionError in inner, test_rewards")


def settings(**weights: float) -> list[RewardSettings]:
    return [RewardSettings(verifier=name, weight=weight) for name, weight in weights.items()]


def test_rewards_are_summed_by_their_weights_and_each_part_is_kept() -> None:
    rewards = WeightedRewards(settings(numeric=2.0, exact=-0.5), NOWHERE)
    inputs = [RewardInput("", completion, "2") for completion in ("2", "so 2", "3")]
    scores = asyncio.run(rewards.score(inputs))
    assert [score.reward for score in scores] == [1.5, 2.0, 0.0]
    assert scores[1].parts == (RewardPart("numeric", 1.0), RewardPart("exact", 0.0))
    assert [score.verdict for score in scores] == ["correct", "correct", "incorrect"]
    first, second = rewards.identity.split(" + ")
    assert first.startswith("2*numeric@")
    assert second.startswith("-0.5*exact@")
    assert WeightedRewards(settings(numeric=1.0), NOWHERE).identity.startswith("numeric@")


def test_sum_with_a_part_that_failed_is_no_reward(tmp_path: Path) -> None:
    def fails_at_three(completion: str) -> float:
        return 1 / (float(completion) - 3)

    name = ship_function(fails_at_three, tmp_path)
    rewards = WeightedRewards(settings(**{"numeric": 1.0, name: 1.0}), tmp_path)
    right, failed = asyncio.run(rewards.score([RewardInput("", c, "2") for c in ("2", "3")]))
    assert right.reward == 0.0
    assert failed.reward is None
    assert "ZeroDivisionError" in failed.error
    assert failed.parts == (RewardPart("numeric", 0.0), RewardPart(name, None))


class TooFew:
    """A reward that skips one of its inputs; records when it is opened and closed."""

    events: list[str] = []  # noqa: RUF012

    def open(self) -> None:
        self.events.append("open")

    def close(self) -> None:
        self.events.append("close")

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        return [Score(1.0, "correct")] * (len(inputs) - 1)


class NeverOpens(TooFew):
    def open(self) -> None:
        raise OSError("no connection")


def test_reward_that_returns_too_few_scores_scores_none() -> None:
    rewards = WeightedRewards([RewardSettings(verifier=f"{__name__}:TooFew")], NOWHERE)
    scores = asyncio.run(rewards.score([RewardInput("", "", "")] * 2))
    assert [score.reward for score in scores] == [None, None]
    assert "returned 1 scores, expected 2" in scores[0].error


class Blocks(TooFew):
    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        return [Score(waits(given.completion)) for given in inputs]


def test_blocking_user_reward_is_timed_out_and_affects_no_other() -> None:
    chosen = [
        RewardSettings(verifier="numeric"),
        RewardSettings(verifier=f"{__name__}:Blocks", timeout_s=0.1),
    ]
    (score,) = asyncio.run(WeightedRewards(chosen, NOWHERE).score([RewardInput("", "hangs", "")]))
    assert score.reward is None
    assert "the verifier hangs" in score.error
    assert "waits, test_rewards.py, line" in score.error
    assert score.parts[0].reward == 0.0


def test_rewards_are_opened_and_closed_together() -> None:
    both = [RewardSettings(verifier=f"{__name__}:{name}") for name in ("TooFew", "NeverOpens")]
    TooFew.events.clear()
    rewards = WeightedRewards(both[:1], NOWHERE)
    rewards.open()
    rewards.close()
    rewards.close()
    assert TooFew.events == ["open", "close"]
    with pytest.raises(OSError, match="no connection"):
        WeightedRewards(both, NOWHERE).open()
    assert TooFew.events == ["open", "close", "open", "close"]


def test_function_of_a_notebook_is_shipped_with_its_closure_and_its_source(tmp_path: Path) -> None:
    scale = 4.0

    def by_length(completion: str) -> float:
        return len(completion) / scale

    name = ship_function(by_length, tmp_path)
    assert name.startswith("shipped:by_length@")
    loaded = load_reward(name, tmp_path)
    assert loaded.identity == name.removeprefix("shipped:")
    scores = asyncio.run(loaded.reward.score([RewardInput("", "abc", "")]))
    assert [score.reward for score in scores] == [0.75]
    (source,) = tmp_path.glob("*.py")
    assert source.read_text().startswith("def by_length(completion: str)")


@pytest.mark.parametrize("suffix", ["py", "pickle"])
def test_shipped_function_that_was_changed_is_refused(tmp_path: Path, suffix: str) -> None:
    name = ship_function(lambda completion: 1.0, tmp_path)
    (file,) = tmp_path.glob(f"*.{suffix}")
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(RewardError, match="expected the function that was shipped"):
        load_reward(name, tmp_path)


def test_function_that_cannot_be_shipped_is_refused_with_the_cause(tmp_path: Path) -> None:
    with (
        (tmp_path / "open.txt").open("w") as file,
        pytest.raises(RewardError, match=r"cannot be shipped.*pickle"),
    ):
        ship_function(lambda completion: file.write(completion), tmp_path)


@pytest.mark.parametrize("verify", [verify_numeric, verify_exact])
def test_completion_that_ends_while_it_thinks_has_no_answer(verify: Callable[..., Score]) -> None:
    for prompt, completion, is_right in (
        ("", "<think>\n#### 7", False),
        ("Think.\n<think>\n", "#### 7", False),
        ("Think.\n<think>\n", "#### 8\n</think>7", True),
        ("Do not think.\n<think>\n\n</think>\n\n", "7", True),
        ("", "<think>8</think>\n7", True),
    ):
        score = verify(prompt=prompt, completion=completion, answer="7")
        assert score.reward == is_right, (prompt, completion)


def test_identity_of_numeric_counts_what_reads_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_hash(verify_numeric), code_hash(verify_exact)
    monkeypatch.setattr(Path, "read_text", lambda _: "changed")
    assert not {*before} & {code_hash(verify_numeric), code_hash(verify_exact)}


def test_identity_counts_the_agent_that_gives_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    identities = []
    for reward in ("1.0", "0.25"):
        (tmp_path / "an_agent.py").write_text(f"def solve(base_url):\n    return {reward}\n")
        sys.modules.pop("an_agent", None)
        alone = WeightedRewards([], NOWHERE, agent="an_agent:solve")
        assert alone.files == (str(tmp_path / "an_agent.py"),)
        identities.append(alone.identity)
        both = WeightedRewards(settings(numeric=2.0), NOWHERE, agent="an_agent:solve")
        assert both.identity.startswith(f"{alone.identity} + 2*numeric@")
    assert all(identity.startswith("agent:an_agent:solve@") for identity in identities)
    assert identities[0] != identities[1]
