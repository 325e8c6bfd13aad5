"""Paging in the torch engine changes neither tokens nor log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from areal_flow.core.types import Completion, GroupRequest
from areal_flow.policy.models.paged import Chunk, PagedCache, fill_pages
from areal_flow.rollout.engines import torch_engine
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.sampling import sample
from areal_flow.rollout.engines.torch_engine import TorchEngine
from tests.engines import (
    VOCABULARY,
    assert_exact,
    request_of,
    request_with_prompt,
    run_all,
    run_crowd,
    torch_subject,
    versions_of,
)
from tests.plain import plain
from tests.policies import small_policy


def engine_of(**settings: Any) -> TorchEngine:
    engine = torch_subject().make(**{"max_model_len": 128, **settings})
    assert isinstance(engine, TorchEngine)
    return engine


def check_exact(request: GroupRequest, completions: list[Completion]) -> None:
    assert_exact(torch_subject(), request, completions)


@pytest.mark.parametrize("max_model_len", [128, 300])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 70])
def test_members_share_prompts_of_any_length(num_tokens: int, max_model_len: int) -> None:
    """Of several pages, with small and large pages."""
    request = request_with_prompt("r", num_tokens, seeds=5, length=40)
    engine = engine_of(max_num_seqs=3, max_model_len=max_model_len)
    check_exact(request, run_all(engine, request)["r"])


def test_long_prompts_in_chunks_equal_whole_ones_and_delay_nobody() -> None:
    long = request_with_prompt("long", 100, seeds=2, length=20)
    short = request_with_prompt("short", 3, seeds=2, length=6)
    engine = engine_of()
    engine.prefill.tokens_per_step = 16
    engine.add(short)
    engine.add(long)
    completions: dict[str, list[Completion]] = {}
    while "short" not in completions:
        completions.update(engine.step())
    assert not [m for m in engine._scheduler.running.values() if m.tokens]
    completions |= run_all(engine)
    check_exact(long, completions["long"])
    unchunked = run_all(engine_of(), long)["long"]
    assert [plain(c.tokens) for c in completions["long"]] == [plain(c.tokens) for c in unchunked]


@pytest.mark.parametrize(("interruption", "version"), [("interrupt", 1), ("keep", 1), ("drain", 0)])
def test_switch_in_the_middle_of_a_prompt_computes_it_anew_unless_drained(
    interruption: str, version: int
) -> None:
    request = request_with_prompt("r", 100, seeds=2, length=10)
    engine = engine_of(interruption=interruption)
    engine.prefill.tokens_per_step = 40
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
    """Its full page and the next 10 tokens; alone, so that batching cannot change the bits."""
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
    completions = run_all(engine, *requests)
    assert preempted
    for request in requests:
        name = request.request_id
        check_exact(request, completions[name])
        assert [plain(c.tokens) for c in completions[name]] == [
            plain(c.tokens) for c in roomy[name]
        ]


def test_one_sequence_of_the_longest_context_fits_the_smallest_memory() -> None:
    request = request_with_prompt("r", 33, seeds=3, length=95)
    engine = engine_of(kv_cache_tokens=128)
    check_exact(request, run_all(engine, request, request_of("other", length=50))["r"])


@pytest.mark.slow
@pytest.mark.parametrize("interruption", ["interrupt", "drain"])
def test_crowd_in_pages_of_fixed_memory_leaves_every_page_free(interruption: str) -> None:
    engine = engine_of(max_num_seqs=8, kv_cache_tokens=300, interruption=interruption)
    engine.prefill.tokens_per_step = 48
    num_free = engine._pages.num_free
    rng = random.Random(300)
    run_crowd(engine, torch_subject(), rng, longest_prompt=80, longest=40)
    assert engine._pages.num_free == num_free


def test_sequences_that_differ_only_in_where_they_end_are_sampled_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like turns of conversations, each with a different token limit."""
    calls = []
    monkeypatch.setattr(
        torch_engine, "sample", lambda *args: (calls.append(len(args[0])), sample(*args))[1]
    )
    requests = [request_of(f"r{i}", length=5 + i, stop_token_ids=(i,)) for i in range(3)]
    run_all(engine_of(max_num_seqs=16), *requests, request_of("s", temperature=0.5))
    assert calls[:2] == [12, 4]


def completions_in_bfloat16(
    *requests: GroupRequest, seed: int = 1, loaded: bool = False
) -> dict[str, list[Any]]:
    """Return tokens and log-probabilities of the weights 1: of a policy's own, or loaded ones."""
    policy = small_policy(seed=seed, vocab_size=VOCABULARY).bfloat16()
    sizes = {"max_num_seqs": 8, "max_model_len": 128, "max_new_tokens": 40}
    engine = TorchEngine(policy, GenerationSettings(batch_invariant=True, **sizes), version=1)
    if loaded:
        engine.load_weights(torch_subject().weights(1), version=1)
    completions = run_all(engine, *requests)
    return {
        name: [(plain(each.tokens), plain(each.logprobs)) for each in group]
        for name, group in completions.items()
    }


def test_completions_in_bfloat16_depend_on_weights_alone() -> None:
    """Not on other rows, nor on how the weights were loaded."""
    request = request_with_prompt("r", 33, seeds=3, length=20)
    companion = request_with_prompt("other", 70, seeds=5, length=30)
    expected = completions_in_bfloat16(request)["r"]
    assert completions_in_bfloat16(companion, request)["r"] == expected
    assert completions_in_bfloat16(request, seed=0, loaded=True)["r"] == expected


def test_bfloat16_log_probabilities_are_those_of_a_full_forward_in_the_mean() -> None:
    policy = small_policy(vocab_size=VOCABULARY).bfloat16()
    settings = GenerationSettings(max_num_seqs=16, max_model_len=128, max_new_tokens=40)
    request = request_with_prompt("r", 33, seeds=16, length=40)
    completions = run_all(TorchEngine(policy, settings, version=0), request)["r"]
    differences = [
        abs(actual - expected)
        for completion in completions
        for actual, expected in zip(
            completion.logprobs,
            torch_subject().reference(
                0, request.prompt_tokens, completion.tokens, request.sampling
            ),
            strict=True,
        )
    ]
    assert 1e-4 < sum(differences) / len(differences) < 0.05
