"""What every engine promises while new weights arrive: exact numbers, no stale prefix, no leak."""

from __future__ import annotations

import random

import psutil
import pytest

from areal_flow.core.types import Completion, GroupRequest
from areal_flow.rollout.engines.protocol import EngineCore
from tests.engines import (
    Subject,
    assert_exact,
    request_of,
    request_with_prompt,
    run_all,
    run_crowd,
    versions_of,
)
from tests.plain import plain

MEMORY_GROWTH_BYTES = 16 << 20


def run_switching(
    engine: EngineCore,
    subject: Subject,
    switches: dict[int, int],
    *requests: GroupRequest,
) -> dict[str, list[Completion]]:
    """Run requests; load new weights after the given decode steps."""
    for request in requests:
        engine.add(request)
    completions: dict[str, list[Completion]] = {}
    for step in range(1, max(switches, default=0) + 1):
        completions.update(engine.step())
        if step in switches:
            engine.load_weights(subject.weights(switches[step]), version=switches[step])
    return completions | run_all(engine)


def test_stale_prefix_is_never_read_again(subject: Subject) -> None:
    """Holds for a group that runs during the switch and for a later one: both have the
    same prompt, longer than a page of keys and values."""
    engine = subject.make()
    before, during, after = (
        request_with_prompt(name, 40, seeds=4, length=20, draw="same")
        for name in ("before", "during", "after")
    )
    run_all(engine, before)
    completions = run_switching(engine, subject, {6: 1}, during) | run_all(engine, after)
    assert {v for completion in completions["during"] for v in versions_of(completion)} == {0, 1}
    assert {v for completion in completions["after"] for v in versions_of(completion)} == {1}
    assert_exact(subject, during, completions["during"])
    assert_exact(subject, after, completions["after"])


@pytest.mark.parametrize("seed", range(3))
def test_interruptions_at_random_moments_leave_every_log_probability_exact(
    subject: Subject, seed: int
) -> None:
    """Twelve in 40 steps, so that a request has several, also in two steps that follow."""
    rng = random.Random(seed)
    switches = {step: n % 4 for n, step in enumerate(sorted(rng.sample(range(1, 41), 12)), 1)}
    requests = [request_of(f"r{i}", length=20) for i in range(4)]
    all_completions = run_switching(subject.make(max_num_seqs=6), subject, switches, *requests)
    changes = [
        len(c.version_spans) for completions in all_completions.values() for c in completions
    ]
    assert max(changes) > 3
    for request in requests:
        completions = all_completions[request.request_id]
        assert [len(versions_of(c)) for c in completions] == [20] * 4
        assert_exact(subject, request, completions)


def test_200_requests_join_leave_and_are_interrupted_at_random(subject: Subject) -> None:
    run_crowd(subject.make(), subject, random.Random(0), longest_prompt=30, longest=30)


def test_seeds_reproduce_after_a_crowd(subject: Subject) -> None:
    """Earlier requests leave nothing behind in slots, pages or caches."""
    engine = subject.make()
    run_crowd(engine, subject, random.Random(1), longest_prompt=30, longest=12)
    engine.load_weights(subject.weights(0), version=4)
    completions = run_all(engine, request_of("r"))["r"]
    fresh = run_all(subject.make(), request_of("r"))["r"]
    assert [plain(c.tokens) for c in completions] == [plain(c.tokens) for c in fresh]


@pytest.mark.slow
def test_memory_does_not_grow_over_500_updates(subject: Subject) -> None:
    engine = subject.make()
    weights = [subject.weights(version) for version in range(4)]
    process = psutil.Process()
    sizes = []
    for update in range(1, 501):
        engine.add(request_of(f"r{update}", length=3))
        engine.step()
        engine.load_weights(weights[update % 4], version=update)
        run_all(engine)
        if update in (100, 500):
            sizes.append(process.memory_info().rss)
    assert sizes[1] - sizes[0] < MEMORY_GROWTH_BYTES
