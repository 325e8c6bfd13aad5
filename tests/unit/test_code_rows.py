"""Rows of code as they are published, and where the code is in a completion."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from areal_flow.core.errors import RewardError
from areal_flow.rewards.code import rows as code_rows
from areal_flow.rewards.code.reward import grade
from areal_flow.rewards.code.rows import NoTests, code_task, extract_code
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.registry import load_reward
from areal_flow.sandboxes.pool import SandboxPool
from areal_flow.sandboxes.run import Limits, SandboxError

ADD = "def add(a, b):\n    return a + b\n"
HUMAN_EVAL = {
    "task_id": "HumanEval/38",
    "prompt": 'def double(x: int):\n    """Helps the tests."""\n    return 2 * x\n\n\n'
    'def halve(x: int):\n    """Undo `double`."""\n',
    "canonical_solution": "    return x // 2\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    for x in range(9):\n"
    "        assert candidate(double(x)) == x\n",
    "entry_point": "halve",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to find the shared elements of two lists.",
    "code": "def similar_elements(a, b):\n  return tuple(set(a) & set(b))",
    "test_setup_code": "",
    "test_list": [
        "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar_elements((1, 2),(5, 4))) == set()",
    ],
    "challenge_test_list": [],
}


def hidden(cases: list[dict[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


LIVE_STDIN = {
    "question_content": "Add.",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": hidden([{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]),
}
LIVE_CALL = {
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
    "private_test_cases": hidden([{"input": "5\n6", "output": "11", "testtype": "functional"}]),
}
DEEP_STDIN = [{"type": "stdin_stdout", "input": f"1 {n}\n", "output": f"{n + 1}\n"} for n in (2, 5)]
DEEP_CALL = [{"type": "function_call", "fn_name": "add", "input": [1, n], "output": [n + 1]}
             for n in (2, 5)]  # fmt: skip
DEEP_TACO = {"fn_name": "add", "inputs": [[1, 2], [1, 5]], "outputs": [[3], [6]]}
DEEP_LINES = {"inputs": [["2", "1 2", "1 5"], ["1", "3"]], "outputs": [["3", "6"], ["3"]]}
LIVE_UNIMPORTED = """
class Solution:
    def add(self, a: int, b: int) -> Optional[int]:
        counts: List[Counter] = [Counter({1: a, 2: b}), collections.Counter(), defaultdict(int)]
        return heapq.nlargest(1, accumulate(counts[0].values()))[0]
"""
DEEP_LIVE = {
    "problem": "Add.",
    "starter_code": LIVE_CALL["starter_code"],
    "tests": LIVE_CALL["public_test_cases"],
    "metadata": {"func_name": "add"},
}
SOLVED = {
    "own": (
        {"mode": "call", "tests": [{"args": [1, 2], "expected": 3}], "entry_point": "add"},
        ADD,
    ),
    "HumanEval, continued": (HUMAN_EVAL, HUMAN_EVAL["canonical_solution"]),
    "HumanEval, whole": (HUMAN_EVAL, "```python\ndef halve(x):\n    return x // 2\n```"),
    "MBPP": (MBPP, f"Here it is:\n```python\n{MBPP['code']}\n```\nIt intersects."),
    "LiveCodeBench, stdin": (LIVE_STDIN, "print(sum(map(int, input().split())))"),
    "LiveCodeBench, call": (LIVE_CALL, "class Solution:\n    def add(self, a, b): return a + b"),
    "DeepCoder, stdin": (
        {"problem": "Add.", "tests": json.dumps(DEEP_STDIN)},
        "print(sum(map(int, input().split())))",
    ),
    "DeepCoder, call": ({"problem": "Add.", "tests": json.dumps(DEEP_CALL)}, ADD),
    "DeepCoder, TACO": ({"problem": "Add.", "tests": json.dumps(DEEP_TACO)}, ADD),
    "DeepCoder, lcbv5": (DEEP_LIVE, "class Solution:\n    def add(self, a, b): return a + b"),
}
SOLVED |= {
    "DeepCoder, lines in a list": (
        {"tests": json.dumps(DEEP_LINES)},
        "for _ in range(int(input())):\n    print(sum(map(int, input().split())))",
    ),
    "own, lines in a list": (
        {"mode": "stdin", "tests": [{"input": ["1 2"], "output": ["1", "2"]}]},
        "print(*input().split(), sep='\\n')",
    ),
    "LiveCodeBench, call without imports": (LIVE_CALL, LIVE_UNIMPORTED),
    "LiveCodeBench, stdin without imports": (
        LIVE_STDIN,
        "from __future__ import annotations\nprint(reduce(lambda a, b: a + b, "
        "map(int, stdin.readline().split())))\nexit()",
    ),
    "own, with quit": (
        {"mode": "stdin", "tests": [{"input": "1", "output": "1"}]},
        "print(input())\nquit()\nprint(2)",
    ),
    "own, with a fence in a string": (
        {"mode": "stdin", "tests": [{"input": "", "output": "```"}]},
        "So:\n```python\nfence = '```'\nprint(fence)\n```\nIt prints:\n```\n3\n```",
    ),
}
FORGED = {
    "own": (SOLVED["own"][0], "def add(a, b): return 3 if a == 0 else None"),
    "HumanEval": (HUMAN_EVAL, "```\ndef double(x): return 0\ndef halve(x): return 0\n```"),
    "MBPP": (MBPP, "def similar_elements(a, b): return ()\ndef set(x): return 0"),
    "LiveCodeBench, stdin": (LIVE_STDIN, "print(3)"),
    "LiveCodeBench, call": (LIVE_CALL, "class Solution:\n    def add(self, a, b): return 3"),
    "DeepCoder, stdin": (SOLVED["DeepCoder, stdin"][0], "print(3)"),
    "DeepCoder, call": (SOLVED["DeepCoder, call"][0], "def add(a, b): return 3"),
    "DeepCoder, TACO": (SOLVED["DeepCoder, TACO"][0], "def add(a, b): return [3]"),
    "LiveCodeBench, built in": (LIVE_CALL, "class Solution:\n    def add(self, a, b): return 3"),
}


@pytest.fixture(scope="module")
def pool() -> Any:
    try:
        sandboxes = SandboxPool()
    except SandboxError as error:
        pytest.skip(str(error))
    yield sandboxes
    sandboxes.close()


def verdict(pool: SandboxPool, row: dict[str, Any], completion: str) -> str:
    task = code_task(row, completion)
    assert task is not None
    return grade(pool, task).verdict


@pytest.mark.parametrize("name", SOLVED)
def test_right_programs_pass_the_tests_of_published_rows(pool: SandboxPool, name: str) -> None:
    assert verdict(pool, *SOLVED[name]) == "correct"


def test_imported_names_do_not_replace_a_missing_function(pool: SandboxPool) -> None:
    row = {"tests": json.dumps({"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [[2]]})}
    assert verdict(pool, row, "def f(): pass") == "runtime_error"
    assert verdict(pool, row, "def gcd(a, b): return math.gcd(a, b)") == "correct"


def test_programs_of_own_rows_import_what_they_use(pool: SandboxPool) -> None:
    row = {"mode": "stdin", "tests": [{"input": "", "output": "1"}]}
    assert verdict(pool, row, "print(gcd(1, 2))") == "runtime_error"
    assert verdict(pool, row, "from math import gcd\nprint(gcd(1, 2))") == "correct"


@pytest.mark.parametrize("name", FORGED)
def test_programs_that_help_their_own_tests_do_not_pass(pool: SandboxPool, name: str) -> None:
    assert verdict(pool, *FORGED[name]) == "incorrect"


def test_a_row_of_several_functions_borrows_those_and_no_more(pool: SandboxPool) -> None:
    row = MBPP | {
        "code": "def f(x): return [x]\ndef g(x): return [x, x]",
        "test_list": ["assert Counter(f(1)) == Counter([1])", "assert g(2) == [2, 2]"],
        "test_setup_code": "",
    }
    forged = "def Counter(x): return 0\ndef f(x): return []\ndef g(x): return [2, 2]"
    assert verdict(pool, row, forged) == "runtime_error"
    row["test_setup_code"] = "from collections import Counter"
    assert verdict(pool, row, forged) == "incorrect"
    assert verdict(pool, row, row["code"]) == "correct"


CLOSE = "from math import isclose\nassert isclose(half(3), 1.5)"
SOME_TESTS = {
    "import": CLOSE,
    "all of the program": f"{CLOSE}\nfrom solution import *\nassert isclose(half(5), 2.5)",
    "module": f"import solution as s\n{CLOSE.replace('half', 's.half')}",
    "own helper": "def near(a, b): return abs(a - b) < 1e-6\nassert near(half(3), 1.5)",
    "unittest": "import unittest\nfrom solution import half\nclass T(unittest.TestCase):\n"
    "    def test_it(self): self.assertEqual(half(3), 1.5)",
    "function": "def test_it():\n    from math import isclose\n    assert isclose(half(3), 1.5)",
}
HELPS = """
def half(x): return 0
def isclose(*a): return True
near = abs = test_it = isclose
class T:
    def __init__(self, *a): pass
class unittest:
    TestCase = T
class AssertionError(Exception): pass
"""
HELPS_BY_HAND = """
import os, sys
offered = '["half", "isclose", "near", "__builtins__", "__name__", "unittest", "AssertionError"]'
os.write(5, ('{"names": ' + offered + '}\\n' + '{"value": true}\\n' * 50).encode())
"""


@pytest.mark.parametrize("name", SOME_TESTS)
def test_without_an_entry_point_tests_borrow_only_what_they_name(
    pool: SandboxPool, name: str
) -> None:
    row = {"mode": "assert", "tests": SOME_TESTS[name]}
    assert verdict(pool, row, "def half(x): return x / 2") == "correct"
    assert verdict(pool, row, HELPS) == "incorrect"
    assert verdict(pool, row, HELPS_BY_HAND) in ("incorrect", "runtime_error")


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("assert abs(-1) == 1", "undefined names in the tests: none"),
        ("assert isclose(half(3), 1.5)", "undefined names in the tests: half, isclose;"),
        ("from solution import half\nassert isclose(half(3), 1.5)", "in the tests: isclose;"),
        ("from math import *\nassert isclose(half(3), 1.5)", "name an entry_point"),
        ("assert half(", "SyntaxError"),
    ],
)
def test_tests_that_do_not_say_what_they_borrow_are_a_bad_reference(tests: str, why: str) -> None:
    with pytest.raises(NoTests, match=why):
        code_task({"mode": "assert", "tests": tests}, "def half(x): return x / 2")


def test_tests_that_never_call_the_program_are_a_bad_reference(pool: SandboxPool) -> None:
    row = {"mode": "assert", "tests": "assert True", "entry_point": "add"}
    assert verdict(pool, row, ADD) == "bad_reference"


YES = "class Yes:\n    def __getattr__(self, name): return lambda *a: True\ndef f(): return Yes()"


@pytest.mark.parametrize(
    "test",
    [
        "f().startswith('a')",
        "f().issubset({1})",
        "f() == 1",
        "f()",
        "not f()",
        "f() < 2",
        "1 in f()",
    ],
)
def test_object_of_the_program_never_answers_for_a_test(pool: SandboxPool, test: str) -> None:
    row = {"mode": "assert", "tests": f"assert {test}", "entry_point": "f"}
    assert verdict(pool, row, YES) in ("incorrect", "runtime_error")


def test_methods_of_a_program_s_class_can_be_tested(pool: SandboxPool) -> None:
    source = "class Stack(list):\n    pass\nclass Box:\n    def __init__(self, x): self.x = x\n"
    source += "    def get(self): return self.x\n    def put(self, x): self.x = x\n"
    tests = "box = Box([1])\nassert box.get() == [1]\nbox.put(2)\nassert box.get() == 2"
    assert (
        verdict(pool, {"mode": "assert", "tests": tests, "entry_point": "Box"}, source) == "correct"
    )


def test_tests_that_do_not_end_time_out(pool: SandboxPool) -> None:
    impatient = SandboxPool(Limits(cpu_s=0.3), tier=pool.tier)
    row = {"mode": "assert", "tests": "while True: add(1, 2)", "entry_point": "add"}
    assert verdict(impatient, row, ADD) == "timeout"
    impatient.close()


@pytest.mark.parametrize(
    ("settings", "source", "verdict"),
    [
        ({"cpu_s": 0.2}, "while True: pass", "timeout"),
        ({"cpu_s": 0.3, "wall_per_cpu": 1.0}, "import time; time.sleep(60)", "timeout"),
        ({"memory_bytes": 2**28}, "x = bytearray(300 * 2**20)", "memory_limit"),
        ({"output_bytes": 1000}, "print('a' * 5000)", "output_limit"),
    ],
)
def test_limits_of_programs_are_settings(
    pool: SandboxPool, settings: dict[str, Any], source: str, verdict: str
) -> None:
    assert judged_by_row(settings, source) == verdict


def test_threads_of_a_program_are_limited_by_a_setting(pool: SandboxPool) -> None:
    if pool.tier != "namespaces" and os.getuid():
        pytest.skip("threads are not counted here")
    start = "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()"
    source = f"import threading, time\nfor _ in range(3): {start}\nprint(1)"
    verdicts = [judged_by_row({"num_threads": number}, source) for number in (2, 6)]
    assert verdicts == ["runtime_error", "correct"]


PRINTS_ONE = {"mode": "stdin", "tests": [{"input": "", "output": "1"}]}


def judged_by_row(
    settings: dict[str, Any], source: str, row: dict[str, Any] = PRINTS_ONE, prompt: str = ""
) -> str | None:
    reward = load_reward("code", Path(), settings=settings).reward
    reward.open()
    (score,) = asyncio.run(reward.score([RewardInput(prompt, source, "", row)]))
    reward.close()
    return score.verdict


@pytest.mark.parametrize("value", [0, -1, True, "4", 2.5, float("nan")])
def test_invalid_limits_are_refused_before_a_sandbox_starts(value: Any) -> None:
    with pytest.raises(RewardError, match="limit output_bytes of programs: expected a whole num"):
        load_reward("code", Path(), settings={"output_bytes": value})


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        ("x = 1", "x = 1"),
        ("<think>```\nno\n```</think>\n```python\nyes\n```", "yes\n"),
        ("```python\nfirst\n```\nthen\n```py\nlast\n```\ndone", "last\n"),
        ("```python\nnever closed", "never closed"),
        ("```python\ncode\n```\noutput:\n```text\n3\n```", "code\n"),
        ("```python\ncode\n```\noutput:\n```\n3\n```", "code\n"),
        ("```python\nx = '```'\n    ```\ny\n```", "x = '```'\n    ```\ny\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("So: ```python\ncode\n```", "code\n"),
        ("````python\nx\n```\ny\n````", "x\n```\ny\n"),
        ("~~~py\r\ncode\r\n~~~\r\n", "code\r\n"),
        ("<think>```python\nno\n```", ""),
        ("`a` and ```b``` print", "`a` and ```b``` print"),
        ("```python\nreturn a+b```", "return a+b"),
        ("```python\nx = '```'\ny```\nIt is `y`.", "x = '```'\ny"),
        ("```python\nfirst```\nthen\n```python\nlast\n```", "last\n"),
        ("```python\ncode\n``` This adds.", "code\n"),
        ("```python\ncode\n```.\nDone.", "code\n"),
        ("```python\ncode  # ```\n``` x\nmore\n```", "code  # ```\n``` x\nmore\n"),
        ("```python\nx = (1,\n    ```\n2", "x = (1,\n    ```\n2"),
        ("**Code:** ```\ncode\n```", "code\n"),
        ("**Code:** ```\ncode\n```\nIt adds.", "code\n"),
        ("Fences are ```\n```python\ncode\n```", "code\n"),
        ("Fences are ```\n```\ncode\n```", "code\n"),
        ("```\ncode\n```\n```\n```", "code\n"),
        ("```\ncode\n```\n```python\n```", "code\n"),
    ],
)
def test_code_is_the_last_block_of_python_after_the_thinking(completion: str, source: str) -> None:
    assert extract_code(completion) == source


def test_fences_are_read_once_however_many_there_are() -> None:
    began = time.process_time()
    for text in ("```python\nx```\n", "x ```\n", "```python\n``` x\n", "```\n", "`` ~~ "):
        extract_code(text * (2**18 // len(text)))
    assert time.process_time() - began < 2


def test_the_rendered_prompt_says_whether_a_completion_begins_as_thinking(
    pool: SandboxPool,
) -> None:
    row = PRINTS_ONE | {"prompt": "Print 1."}
    assert judged_by_row({}, "print(1)", row, prompt="Print 1.<think>\n") == "parse_error"
    assert judged_by_row({}, "</think>print(1)", row, prompt="Print 1.<think>\n") == "correct"


@pytest.mark.parametrize("completion", ["", "```python\n```", "x" * 100_000_000])
def test_completions_without_code_have_no_task(completion: str) -> None:
    assert code_task({"mode": "assert", "tests": "f()"}, completion) is None


@pytest.mark.parametrize(
    "row",
    [
        {}, {"mode": "fast", "tests": []}, {"mode": "call", "tests": [{"args": [1]}]},
        {"mode": "stdin", "tests": 3}, {"public_test_cases": "not base64"},
        {"tests": "[]"}, {"tests": "3"}, {"tests": '{"inputs": ["1"], "outputs": []}'},
        {"public_test_cases": base64.b64encode(zlib.compress(pickle.dumps(os.system))).decode()},
    ],
)  # fmt: skip
def test_rows_without_readable_tests_say_so(row: dict[str, Any]) -> None:
    with pytest.raises(NoTests, match="tests"):
        code_task(row, ADD)


@pytest.mark.parametrize("tests", [[{"input": "1", "output": "2"}], {"inputs": [], "outputs": []}])
def test_tests_that_are_no_text_without_a_mode_are_named(tests: Any) -> None:
    message = f"found a {type(tests).__name__} and no 'mode'"
    with pytest.raises(NoTests, match=f"field 'tests': expected JSON as text, .*{message}"):
        code_task({"prompt": "", "tests": tests}, "pass")


def test_cache_of_unpacked_tests_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    unpacked = code_rows._unpacked
    monkeypatch.setattr(code_rows, "_unpacked", lambda text: read.append(text) or unpacked(text))
    monkeypatch.setattr(code_rows, "MAX_CACHED_BYTES", 2500)
    rows = {n: hidden([{"input": f"{n}" * 1000, "output": ""}]) for n in range(3)}

    def inputs_of(n: int) -> str:
        task = code_task({"prompt": "", "tests": rows[n]}, "pass")
        assert task is not None
        return str(task.tests[0][0])

    for n in (0, 0, 1, 0, 2, 0, 1):
        assert inputs_of(n) == f"{n}" * 1000
    assert read == [rows[n] for n in (0, 1, 2, 1)], "the one that was not asked for longest goes"
    monkeypatch.setattr(code_rows, "MAX_CACHED_BYTES", 1)
    assert inputs_of(2) == inputs_of(2) == "2" * 1000
    assert read[4:] == [rows[2]], "one row is kept, however large it is"
    assert list(code_rows._cache) == [rows[2]]
