"""A run whose trainer and generators have one GPU in turns, killed in mid-turn: no GPU needed.

Each process of it takes its devices for one GPU (a `sitecustomize` of the test); the torch engine
sleeps and wakes as vLLM does, but frees nothing.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

import pytest

import areal_flow
from areal_flow.core.lease import newest_lease
from areal_flow.flow.recovery.replay import replay_step
from tests.chaos import SETTINGS
from tests.struck_run import StruckRun

pytestmark = pytest.mark.slow

ON_ONE_GPU = """
import os
from areal_flow.config import Recipe
from areal_flow.rollout.engines import threaded_engine

Recipe.takes_turns = property(lambda recipe: recipe.schedule == "sync")
between = threaded_engine.ThreadedEngine._between_steps

async def noted(engine, change, *, asleep):
    await between(engine, change, asleep=asleep)
    with open(os.environ["TURNS"], "a") as file:
        file.write(f"{os.getpid()} {'sleeps' if asleep else 'wakes'}\\n")

threaded_engine.ThreadedEngine._between_steps = noted
"""

ON_A_CPU = {
    **SETTINGS,
    "schedule": "sync",
    "generation.engine": "torch",
    "cluster.num-generators": "1",
    "cluster.heartbeat-timeout-s": "10",  # a trainer that is stopped in its turn is no hung one
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StruckRun]:
    customized = tmp_path / "customized"
    customized.mkdir()
    (customized / "sitecustomize.py").write_text(ON_ONE_GPU)
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    struck = StruckRun(tmp_path, customized)
    try:
        yield struck
    finally:
        struck.close()


def turns(run: StruckRun) -> list[tuple[str, str]]:
    """Return the sleep and wake events of generator processes, in order."""
    lines = Path(os.environ["TURNS"]).read_text().splitlines()
    return [(pid, what) for pid, _, what in (line.partition(" ") for line in lines)]


def is_trainers_turn(run: StruckRun) -> bool:
    """Return whether the driver holds the GPU's lock for its trainer."""
    lease = newest_lease(run.layout.writers)
    assert lease is not None
    with (run.layout.processes_of(lease.writer_epoch) / "gpu").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def turn_that_does_not_end(run: StruckRun) -> Iterator[int]:
    """Stop the trainer within its turn, with its generator asleep; return the trainer's pid."""
    (trainer,) = run.live_workers("trainer")
    while True:
        run.wait_until(lambda: is_trainers_turn(run), "the trainer's turn")
        os.kill(trainer.pid, signal.SIGSTOP)
        sleep(0.5)  # an answer that is on its way ends the turn
        if is_trainers_turn(run) and turns(run)[-1][1] == "sleeps":
            break
        os.kill(trainer.pid, signal.SIGCONT)
    try:
        yield trainer.pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(trainer.pid, signal.SIGCONT)


def test_run_in_turns_survives_kills_in_mid_turn(run: StruckRun) -> None:
    """Of the generator, which starts again after the turn, then of the trainer, then the driver."""
    run.begin({**ON_A_CPU, "weights.medium": "directory"})
    (generator,) = run.live_workers("generator")
    with turn_that_does_not_end(run):
        os.kill(generator.pid, signal.SIGKILL)
        run.wait_until(lambda: run.live_workers("generator")[0].pid != generator.pid, "another one")
        assert is_trainers_turn(run)
    run.wait_for_steps(2, "steps after a generator's death")
    run.audit()
    with turn_that_does_not_end(run) as pid:
        os.kill(pid, signal.SIGKILL)
    run.wait_for_steps(2, "steps after the trainer's death")
    run.audit()
    with turn_that_does_not_end(run):
        run.kill_driver()
    run.audit()
    run.resume()
    run.wait_for_steps(2, "steps after the resume")
    assert run.stop() == 128 + signal.SIGTERM
    run.audit()
    by_process = {pid: [what for p, what in turns(run) if p == pid] for pid, _ in turns(run)}
    assert len(by_process) == 3
    for events in by_process.values():  # of one after the other, as far as it came
        assert events == ["sleeps", "wakes"] * (len(events) // 2) + ["sleeps"] * (len(events) % 2)
    assert sum(map(len, by_process.values())) >= 2 * run.head() - 2
    steps = areal_flow.open_run(run.layout.root).steps("arrow").sort_by("step")["weights_hash"]
    last = replay_step(run.layout, step=len(steps) - 1, from_checkpoint=0)
    assert last.replayed.hashes.weights_hash == steps[-1].as_py()
