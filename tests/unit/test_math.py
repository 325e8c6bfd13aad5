r"""The verifier `math`: one answer per completion, with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_flow.core.types import Score
from areal_flow.rewards.math.processes import MathLimits, MathPool, MathPoolError
from areal_flow.rewards.math.reward import check_reference, judge
from areal_flow.rewards.protocol import MAX_COMPLETION_CHARS
from pipelines.jobs.verify import verify_lines
from tests import math_corpus

MODEL_ANSWERS = Path(__file__).parents[1] / "data" / "gsm8k" / "model_answers.jsonl"


class NoPool(MathPool):
    """Fails a test that starts a process."""

    def ask(self, answer: str | None, reference: str) -> Any:
        raise AssertionError(f"algebra is asked about {answer!r} and {reference!r}")


@pytest.fixture(scope="module")
def pool() -> Iterator[MathPool]:
    made = MathPool(1)
    yield made
    made.close()


def boxed(answer: str) -> str:
    return rf"So it is $\boxed{{{answer}}}$."


def is_right(score: Score) -> bool:
    assert score.reward == float(score.verdict == "correct")
    return score.verdict == "correct"


@pytest.mark.parametrize(("answer", "reference", "expected"), math_corpus.BOXED)
def test_numbers_words_and_lists_are_judged_without_algebra(
    answer: str, reference: Any, expected: bool
) -> None:
    assert is_right(judge(NoPool(), boxed(answer), reference)) is expected


@pytest.mark.parametrize(("completion", "reference", "expected"), math_corpus.WHOLE)
def test_completion_with_two_answers_is_wrong(
    completion: str, reference: Any, expected: bool
) -> None:
    assert is_right(judge(NoPool(), completion, reference)) is expected


@pytest.mark.parametrize(("answer", "reference", "expected"), math_corpus.ALGEBRA)
def test_algebra_decides_the_rest(
    answer: str, reference: Any, expected: bool, pool: MathPool
) -> None:
    score = judge(pool, boxed(answer), reference)
    assert is_right(score) is expected
    assert score.verdict in {"correct", "incorrect", "parse_error"}


@pytest.mark.parametrize("guesses", math_corpus.GUESSES)
def test_list_of_guesses_is_never_right(guesses: tuple[str, ...], pool: MathPool) -> None:
    for separator in math_corpus.SEPARATORS:
        for frame in ("{}", r"\{{{}\}}", "({})", "x={}"):
            answer = boxed(frame.format(separator.join(guesses)))
            right = [guess for guess in guesses if is_right(judge(pool, answer, guess))]
            assert not right, answer


def test_labelled_answers_of_models_are_judged_as_labelled() -> None:
    """Published with GSM8K by its authors, who compared the final numbers as text."""
    rows = [json.loads(line) for line in MODEL_ANSWERS.open()]
    agree = [
        is_right(judge(NoPool(), row["completion"], row["reference"])) == row["is_correct"]
        for row in rows
    ]
    assert sum(agree) / len(rows) >= 0.995
    assert {row["is_correct"] for row in rows} == {True, False}


@pytest.mark.parametrize("answer", math_corpus.REFUSED)
def test_expressions_that_would_explode_are_refused_unevaluated(answer: str) -> None:
    assert judge(NoPool(), boxed(answer), "5").verdict == "parse_error"


def test_huge_completion_is_output_limit() -> None:
    completion = "1" * 10**8 + boxed("18")
    began = time.process_time()
    assert judge(NoPool(), completion, "18").verdict == "output_limit"
    unclosed = r"\boxed{" * (MAX_COMPLETION_CHARS // 7)
    assert not is_right(judge(NoPool(), unclosed, "18"))
    assert not is_right(judge(NoPool(), "<" * MAX_COMPLETION_CHARS, "18"))
    assert time.process_time() - began < 2


def test_python_in_an_answer_is_not_run(pool: MathPool, tmp_path: Path) -> None:
    mark = tmp_path / "made"
    for template in math_corpus.INJECTED:
        assert not is_right(judge(pool, boxed(template.replace("{}", str(mark))), "5"))
        assert not is_right(judge(pool, boxed("x+" + template.replace("{}", str(mark))), "x+5"))
    assert not mark.exists()


def test_answer_that_explodes_times_out_and_delays_no_other() -> None:
    pool = MathPool(2, limits=MathLimits(cpu_s=0.5, wall_s=10))
    honest = [(r"\sqrt{25}", "5"), ("x^2+2x+1", "(x+1)^2")]
    with ThreadPoolExecutor(8) as threads:
        hanging = [threads.submit(judge, pool, boxed(a), "5") for a in math_corpus.EXPLOSIVE[:2]]
        others = [threads.submit(judge, pool, boxed(a), r) for a, r in honest * 4]
        assert {future.result().verdict for future in hanging} == {"timeout"}
        assert {future.result().verdict for future in others} == {"correct"}
    assert len(pids := pool.pids) == 2
    pool.close()
    assert not any(map(psutil.pid_exists, pids))


def test_answer_that_takes_all_memory_is_memory_limit_and_processes_end_with_their_pool() -> None:
    small = MathPool(1, limits=MathLimits(cpu_s=20, wall_s=60, memory_bytes=200 * 2**20))
    assert judge(small, boxed("((2^{9999})^{9999})^{99}"), "5").verdict == "memory_limit"
    assert judge(small, boxed(r"\sqrt{25}"), "5").verdict == "correct"
    (pid,) = small.pids
    del small
    assert not psutil.pid_exists(pid)


def test_process_that_dies_is_replaced(pool: MathPool) -> None:
    judge(pool, boxed(r"\sqrt{25}"), "5")
    (before,) = pool.pids
    os.killpg(before, signal.SIGKILL)
    assert judge(pool, boxed(r"\sqrt{25}"), "5").verdict == "correct"
    assert pool.pids != (before,)


def test_processes_that_do_not_start_give_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    broken = MathPool(1)
    score = judge(broken, boxed(r"\sqrt{25}"), "5")
    assert (score.reward, score.verdict) == (None, "infrastructure_error")
    assert "import math_verify" in score.error
    with pytest.raises(MathPoolError):
        check_reference(broken, "x^2")


@pytest.mark.parametrize("reference", math_corpus.BAD_REFERENCES)
def test_reference_that_nothing_equals_is_refused(reference: Any, pool: MathPool) -> None:
    with pytest.raises(ValueError, match="'math' cannot use the right answer"):
        check_reference(pool, reference)
    score = judge(pool, boxed("y+1"), reference)
    assert (score.verdict, score.reward) == ("bad_reference", 0.0)


@pytest.mark.parametrize("reference", math_corpus.GOOD_REFERENCES)
def test_good_reference_is_accepted(reference: Any, pool: MathPool) -> None:
    check_reference(pool, reference)


def test_worker_loads_no_torch() -> None:
    code = "import areal_flow.rewards.math.worker, math_verify, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_verify_judges_rows_of_mathematics_in_their_order() -> None:
    rows = [
        {"id": 1, "completion": boxed("18"), "reference": "18"},
        {"id": 2, "completion": boxed(r"\sqrt{25}"), "reference": "5"},
        {"id": 3, "completion": boxed("17"), "reference": "18"},
        {"id": 4, "completion": boxed("1" * 301), "reference": "18"},
        {"id": 5, "completion": boxed("5"), "reference": r"\frac{1}{"},
        {"id": 6, "completion": boxed("5")},
    ]
    verdicts = [*verify_lines("math", map(json.dumps, rows))]
    assert [verdict["id"] for verdict in verdicts] == [1, 2, 3, 4, 5, 6]
    assert [verdict["verdict"] for verdict in verdicts] == [
        "correct", "correct", "incorrect", "parse_error", "bad_reference", "bad_reference",
    ]  # fmt: skip
