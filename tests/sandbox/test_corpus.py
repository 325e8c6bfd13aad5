"""Hostile and honest programs, each with its verdict, in every tier that this machine has."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from areal_flow.rewards.code.reward import CORRECT, Judgement, grade
from areal_flow.rewards.code.rows import CodeTask
from areal_flow.sandboxes import run
from areal_flow.sandboxes.inside import program
from areal_flow.sandboxes.pool import MAX_ATTEMPTS, SandboxPool, choose_tier
from areal_flow.sandboxes.run import Program, SandboxError, available_tiers
from tests.sandbox.corpus import CORPUS, FORGERIES, HONEST, Case
from tests.sandbox.judging import ASSERTS, LIMITS, judge, living_below, runs_here, surroundings

MIN_PROGRAMS = 120
NAIVE = """
import json
candidate, tests = {candidate!r}, {tests!r}
names = {{}}
try:
    exec(candidate, names)
    names["candidate"] = names.get("add")
    exec(tests, names)
    names["check"](names["candidate"])
except Exception:
    print("wrong")
else:
    print("right")
"""
"""The grader that everybody writes first; here it runs in a sandbox itself."""


STRONGEST = "the strongest here"
OTHERS = [pytest.param(tier, marks=pytest.mark.slow) for tier in available_tiers()[1:]]


@pytest.fixture(params=[STRONGEST, *OTHERS])
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    try:
        tier = choose_tier(None if request.param == STRONGEST else (request.param,))
    except SandboxError as error:
        pytest.skip(str(error))
    sandboxes = SandboxPool(LIMITS, tier=tier)
    yield sandboxes
    sandboxes.close()


def test_each_program_gets_its_verdict_and_leaves_nothing(
    pool: SandboxPool, tmp_path: Path
) -> None:
    cases = [case for case in CORPUS if runs_here(case)]
    endless = [case for case in cases if "timeout" in case.verdicts]
    ending = [case for case in cases if "timeout" not in case.verdicts]
    with surroundings(tmp_path) as around:
        judgements = judge(pool, endless, around)
        # On a busy machine an import takes more than endless programs should waste.
        pool.limits = replace(LIMITS, cpu_s=2.0)
        judgements += judge(pool, ending, around)
        wrong = [(c.name, f) for c, f in zip(endless + ending, judgements, strict=True)
                 if f.verdict not in c.verdicts]  # fmt: skip
        assert not wrong
        assert not around.escapes()
        assert not living_below(pool)


def test_killed_zygotes_lose_no_verdict(pool: SandboxPool, tmp_path: Path) -> None:
    finished = threading.Event()

    def kill() -> None:
        for _ in range(MAX_ATTEMPTS - 1):  # so that no program can meet them all
            finished.wait(0.3)
            with suppress(ProcessLookupError):
                os.kill(pool.pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    with surroundings(tmp_path) as around:
        plain = [case for case in HONEST if case.name.endswith(" plain")]
        killer.start()
        judgements = judge(pool, plain * 40, around, num_threads=4)
        finished.set()
        killer.join()
    assert Counter(judgement.verdict for judgement in judgements) == {"correct": 40 * len(plain)}


def test_stopped_zygote_is_replaced(
    pool: SandboxPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SILENCE_S", 0.5)
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
        for process in psutil.Process(pid).children(recursive=True):
            process.suspend()
    with surroundings(tmp_path) as around:
        plain = next(case for case in HONEST if case.name == "stdin plain")
        judgements = judge(pool, [plain] * 3, around, num_threads=1)
    assert [judgement.verdict for judgement in judgements] == ["correct"] * 3


def test_corpus_breaks_a_naive_grader(pool: SandboxPool) -> None:
    def fooled(case: Case) -> bool:
        naive = NAIVE.format(candidate=case.source, tests=ASSERTS).encode()
        (outcome,) = pool.run(lambda: [Program(program.SCRIPT, naive)])
        return b"right" in outcome.stdout or outcome.stdout == b""  # or it never says "wrong"

    forgeries = [c for c in FORGERIES if c.mode == "assert"]
    broken = [case.name for case in forgeries if fooled(case)]
    assert len(broken) >= 4, broken


def test_without_a_tier_nothing_runs() -> None:
    with pytest.raises(SandboxError, match="no sandbox passes its self-test"):
        SandboxPool(tier=choose_tier(()))


def test_corpus_is_large_and_its_names_are_distinct() -> None:
    assert len(CORPUS) - len(HONEST) >= MIN_PROGRAMS
    assert len({case.name for case in CORPUS}) == len(CORPUS)


SLOW = """
import time
def add(a, b):
    began = time.process_time()
    while time.process_time() - began < (60 if a == 7 else 0.15): pass
    return a + b
"""


def test_each_call_has_the_time_limit_of_a_test(pool: SandboxPool) -> None:
    def graded(num_tests: int) -> Judgement:
        tests = [([number, 1], number + 1) for number in range(num_tests)]
        return grade(pool, CodeTask(SLOW, "call", tests, entry_point="add"))

    assert graded(6) == CORRECT, "0.9 s of processor time, with a limit of 0.4 s a test"
    began = time.monotonic()
    assert graded(40).verdict == "timeout"
    assert time.monotonic() - began < 10
