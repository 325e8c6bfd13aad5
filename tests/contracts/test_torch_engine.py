"""What the torch engine's pages must not change: tokens and log-probabilities of completions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from areal_flow.generation import torch_engine
from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.paged_prefill import Chunk, PagedCache
from areal_flow.models.policy import fill_pages
from areal_flow.types import Completion, GroupRequest, Sampling, as_tokens
from tests.engines import VOCABULARY, request_of, run_all, torch_subject, versions_of
from tests.plain import plain


def engine_of(**settings: Any) -> TorchEngine:
    engine = torch_subject().make(**{"max_model_len": 128, **settings})
    assert isinstance(engine, TorchEngine)
    return engine


def request_with_prompt(name: str, num_tokens: int, *, seeds: int, length: int) -> GroupRequest:
    rng = random.Random(name)
    prompt = as_tokens([rng.randrange(VOCABULARY) for _ in range(num_tokens)])
    return GroupRequest(name, prompt, tuple(range(seeds)), Sampling(max_new_tokens=length))


def check_exact(request: GroupRequest, completions: list[Completion]) -> None:
    """Compare with full forwards of the version that drew each token."""
    subject = torch_subject()
    for completion in completions:
        versions = versions_of(completion)
        by_version = {
            v: subject.reference(v, request.prompt_tokens, completion.tokens, request.sampling)
            for v in {*versions}
        }
        expected = [by_version[version][at] for at, version in enumerate(versions)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_model_len", [128, 300])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 70])
def test_members_share_prompts_of_any_length(num_tokens: int, max_model_len: int) -> None:
    """Of more pages than one, where pages are small and where they are large."""
    request = request_with_prompt("r", num_tokens, seeds=5, length=40)
    engine = engine_of(max_num_seqs=3, max_model_len=max_model_len)
    check_exact(request, run_all(engine, request)["r"])


def test_long_prompts_in_chunks_equal_whole_ones_and_delay_nobody() -> None:
    long = request_with_prompt("long", 100, seeds=2, length=20)
    short = request_with_prompt("short", 3, seeds=2, length=6)
    engine = engine_of()
    engine.prefill_tokens_a_step = 16
    engine.add(short)
    engine.add(long)
    found: dict[str, list[Completion]] = {}
    while "short" not in found:
        found.update(engine.step())
    assert not [m for m in engine._scheduler.running.values() if m.tokens]
    found |= run_all(engine)
    check_exact(long, found["long"])
    whole = run_all(engine_of(), long)["long"]
    assert [plain(c.tokens) for c in found["long"]] == [plain(c.tokens) for c in whole]


@pytest.mark.parametrize(("interruption", "version"), [("interrupt", 1), ("keep", 1), ("drain", 0)])
def test_switch_in_the_middle_of_a_prompt_computes_it_anew_unless_drained(
    interruption: str, version: int
) -> None:
    request = request_with_prompt("r", 100, seeds=2, length=10)
    engine = engine_of(interruption=interruption)
    engine.prefill_tokens_a_step = 40
    engine.add(request)
    engine.step()
    engine.load_weights(torch_subject().weights(1), version=1)
    completions = run_all(engine)["r"]
    assert {v for completion in completions for v in versions_of(completion)} == {version}
    check_exact(request, completions)


@pytest.mark.parametrize(("batch_invariant", "num_ends"), [(False, 1), (True, 4)])
def test_new_weights_have_a_prompt_computed_once_for_its_group(
    batch_invariant: bool, num_ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its whole page and the 10 tokens after it; alone, where no company may change the bits."""
    request = request_with_prompt("r", 42, seeds=4, length=12)
    engine = engine_of(batch_invariant=batch_invariant)
    engine.add(request)
    for _ in range(5):
        engine.step()
    num_own = [member.num_cached - 42 for member in engine._scheduler.running.values()]
    computed: list[int] = []

    def counted(policy: Any, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
        computed.extend(len(chunk.tokens) for chunk in chunks)
        fill_pages(policy, cache, chunks)

    monkeypatch.setattr(torch_engine, "fill_pages", counted)
    engine.load_weights(torch_subject().weights(1), version=1)
    check_exact(request, run_all(engine)["r"])
    assert sum(computed) == 32 + 10 * num_ends + sum(num_own)


@pytest.mark.parametrize("interruption", ["interrupt", "keep", "drain"])
def test_sequences_that_give_up_their_pages_lose_no_token(interruption: str) -> None:
    requests = [request_with_prompt(f"{i}", 10 + 9 * i, seeds=4, length=60) for i in range(4)]
    roomy = run_all(engine_of(max_num_seqs=8), *requests)
    engine = engine_of(max_num_seqs=8, kv_cache_tokens=256, interruption=interruption)
    preempted = []
    preempt = engine._scheduler.preempt
    engine._scheduler.preempt = lambda slot: (preempted.append(slot), preempt(slot))[1]  # type: ignore[assignment,func-returns-value]
    found = run_all(engine, *requests)
    assert preempted
    for request in requests:
        name = request.request_id
        check_exact(request, found[name])
        assert [plain(c.tokens) for c in found[name]] == [plain(c.tokens) for c in roomy[name]]


def test_one_sequence_of_the_longest_context_fits_the_smallest_memory() -> None:
    request = request_with_prompt("r", 33, seeds=3, length=95)
    engine = engine_of(kv_cache_tokens=128)
    check_exact(request, run_all(engine, request, request_of("other", length=50))["r"])


@pytest.mark.parametrize(
    ("kv_cache_tokens", "interruption"), [(0, "interrupt"), (300, "interrupt"), (300, "drain")]
)
def test_crowd_that_joins_leaves_and_is_interrupted_at_random(
    kv_cache_tokens: int, interruption: str
) -> None:
    """200 requests, some cancelled, under three versions; every page is free in the end."""
    rng = random.Random(kv_cache_tokens)
    subject = torch_subject()
    engine = engine_of(max_num_seqs=8, kv_cache_tokens=kv_cache_tokens, interruption=interruption)
    engine.prefill_tokens_a_step = 48
    num_free = engine._pages.num_free
    requests = [
        request_with_prompt(f"{i}", rng.randint(1, 80), seeds=rng.randint(1, 4), length=length)
        for i in range(200)
        for length in (rng.randint(1, 40),)
    ]
    waiting, running = requests[::-1], set[str]()
    found: dict[str, list[Completion]] = {}
    cancelled, version = set[str](), 0
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.3:
            running.add(waiting[-1].request_id)
            engine.add(waiting.pop())
        if running and rng.random() < 0.03:
            cancelled.add(gone := rng.choice(sorted(running)))
            running.discard(gone)
            engine.cancel(gone)
        if version < 3 and rng.random() < 0.02:
            version += 1
            engine.load_weights(subject.weights(version), version=version)
        for name, completions in engine.step():
            found[name] = completions
            running.discard(name)
    assert found.keys() | cancelled == {request.request_id for request in requests}
    assert version == engine.version == 3
    assert engine._pages.num_free == num_free
    for request in rng.sample(requests, 20):
        check_exact(request, found.get(request.request_id, []))
