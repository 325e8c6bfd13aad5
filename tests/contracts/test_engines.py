"""The contract of every engine; exact numbers come from each engine's own reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from areal_flow.core.errors import ConfigError, EngineError
from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.policy.weights.directory import DirectoryReader, publish_model_directory
from areal_flow.rollout.engines.protocol import EngineCore, GenerationSettings
from areal_flow.rollout.engines.registry import ENGINES, engine_factory
from tests.engines import (
    SUBJECTS,
    VOCABULARY,
    Subject,
    assert_exact,
    letters,
    request_of,
    request_with_prompt,
    run_all,
    torch_subject,
    versions_of,
)
from tests.plain import plain
from tests.policies import small_policy, write_model_directory


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"min_new_tokens": 9, "stop_token_ids": (2, 3, 4)},
        {
            "temperature": 1.2,
            "repetition_penalty": 1.3,
            "min_new_tokens": 4,
            "stop_token_ids": (2,),
            "min_p": 0.05,
            "top_k": 6,
            "top_p": 0.9,
        },
    ],
    ids=["plain", "cool", "top-k", "top-p", "min-p", "penalty", "min-tokens", "all-at-once"],
)
def test_logprobs_equal_a_full_forward(subject: Subject, sampling: dict[str, Any]) -> None:
    if "min_p" in sampling and not subject.has_min_p:
        pytest.skip("a recipe refuses min_p with speculation")
    requests = [request_of(f"r{i}", **sampling) for i in range(5)]
    completions = run_all(subject.make(), *requests)
    assert len(completions) == 5
    for request in requests:
        for completion in completions[request.request_id]:
            expected = subject.reference(
                0, request.prompt_tokens, completion.tokens, request.sampling
            )
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_tokens_after_an_interruption_come_from_the_new_weights(subject: Subject) -> None:
    engine = subject.make()
    requests = [request_of(f"r{i}", length=24) for i in range(2)]
    for request in requests:
        engine.add(request)
    completions: dict[str, list[Completion]] = {}
    for step in range(10):
        completions.update(engine.step())
        if step == 4:
            engine.load_weights(subject.weights(1), version=1)
        if step == 8:
            engine.load_weights(subject.weights(2), version=2)
    while engine.has_work():
        completions.update(engine.step())
    for request in requests:
        for completion in completions[request.request_id]:
            versions = versions_of(completion)
            assert len(versions) == len(completion.tokens) == 24
            assert sorted(set(versions)) == [0, 1, 2]
            by_version = {
                v: subject.reference(v, request.prompt_tokens, completion.tokens, request.sampling)
                for v in (0, 1, 2)
            }
            expected = [by_version[version][at] for at, version in enumerate(versions)]
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_tokens_are_streamed_as_they_are_sampled_also_through_an_interruption(
    subject: Subject,
) -> None:
    streamed: dict[int, list[int]] = {0: [], 1: []}
    request = request_of(seeds=2, length=12)
    quiet = run_all(subject.make(), request)["r"]
    engine = subject.make()
    engine.add(replace(request, on_token=lambda index, token: streamed[index].append(token)))
    completions: dict[str, list[Completion]] = {}
    while not any(streamed.values()) or len(streamed[0]) < 4:
        assert not engine.step()
    engine.load_weights(subject.weights(0), version=1)
    while engine.has_work():
        completions.update(engine.step())
    assert [plain(c.tokens) for c in completions["r"]] == [streamed[0], streamed[1]]
    assert [plain(c.tokens) for c in completions["r"]] == [plain(c.tokens) for c in quiet]
    assert {0, 1} == {version for c in completions["r"] for version in versions_of(c)}


def test_members_that_start_after_a_switch_come_from_the_new_weights(subject: Subject) -> None:
    """Also if the group's prompt was prefilled with the old weights."""
    engine = subject.make(max_num_seqs=2)
    request = request_of(seeds=4, length=12)
    engine.add(request)
    for _ in range(3):
        assert engine.step() == []
    engine.load_weights(subject.weights(1), version=1)
    completions: dict[str, list[Completion]] = {}
    while engine.has_work():
        completions.update(engine.step())
    assert [versions_of(c)[0] for c in completions["r"]] == [0, 0, 1, 1]
    for late in completions["r"][2:]:
        assert set(versions_of(late)) == {1}
        expected = subject.reference(1, request.prompt_tokens, late.tokens, request.sampling)
        assert late.logprobs == pytest.approx(expected, abs=1e-4)


def one_switched_after(steps: int, engine: EngineCore, weights: Mapping[str, Any]) -> Completion:
    """Run one completion of 20 tokens, with new weights after some of its tokens."""
    engine.add(request_of(seeds=1, length=20))
    completions: dict[str, list[Completion]] = {}
    for _ in range(steps):
        completions.update(engine.step())
    engine.load_weights(weights, version=1)
    while engine.has_work():
        completions.update(engine.step())
    assert engine.version == 1
    return completions["r"][0]


def test_drained_completions_have_one_version(subject: Subject) -> None:
    drained = one_switched_after(8, subject.make(interruption="drain"), subject.weights(1))
    assert set(versions_of(drained)) == {0}


@torch.no_grad()
def test_kept_tokens_count_as_their_oldest_context_s_and_are_drawn_from_the_mixture() -> None:
    """Compare with transformers' cache: the prefix with the old weights, the rest with the new."""
    subject = torch_subject()
    kept = one_switched_after(8, subject.make(interruption="keep"), subject.weights(1))
    assert set(versions_of(kept)) == {0}
    prompt, sampling = request_of().prompt_tokens, request_of().sampling
    for version in (0, 1):
        pure = subject.reference(version, prompt, kept.tokens, sampling)[10:]
        assert max(abs(a - b) for a, b in zip(kept.logprobs[10:], pure, strict=True)) > 1e-3
    old, new = (small_policy(seed=version, vocab_size=VOCABULARY) for version in (0, 1))
    for policy in (old, new):
        policy.set_attn_implementation("eager")
    tokens = torch.tensor([[*prompt, *kept.tokens]])
    # One step prefills and decodes, so eight have drawn nine tokens; the ninth has no keys yet.
    num_old = len(prompt) + 8
    before = old(input_ids=tokens[:, :num_old], use_cache=True)
    after = new(input_ids=tokens[:, num_old:-1], past_key_values=before.past_key_values)
    mixed = torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]]).log_softmax(-1)
    expected = mixed.gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()
    assert kept.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("sampling", "mean"), [({}, 1.0), ({"temperature": 0.7}, 1.0), ({"top_p": 0.9}, None)]
)
def test_importance_weights_are_one_on_policy_unless_sampling_truncates(
    sampling: dict[str, Any], mean: float | None
) -> None:
    subject = torch_subject()
    request = request_of(seeds=16, **sampling)
    untruncated = replace(request.sampling, top_p=1.0)
    weights = [
        exp(trained - drawn)
        for completion in run_all(subject.make(), request)["r"]
        for trained, drawn in zip(
            subject.reference(0, request.prompt_tokens, completion.tokens, untruncated),
            completion.logprobs,
            strict=True,
        )
    ]
    mean_weight = sum(weights) / len(weights)
    assert mean_weight == pytest.approx(mean, abs=1e-4) if mean else mean_weight < 0.96


def test_seeds_reproduce_whatever_else_runs(subject: Subject) -> None:
    alone = run_all(subject.make(), request_of("r1"))["r1"]
    crowd = [request_of(f"r{i}") for i in range(6)]
    for engine, requests in (
        (subject.make(), crowd),
        (subject.make(), crowd[::-1]),
        (subject.make(max_num_seqs=5), crowd),
    ):
        completions = run_all(engine, *requests)["r1"]
        assert [plain(c.tokens) for c in completions] == [plain(c.tokens) for c in alone]
        for left, right in zip(completions, alone, strict=True):
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_batch_invariant_completions_have_the_same_bits_whatever_else_runs() -> None:
    def completions(*requests: GroupRequest) -> Any:
        engine = torch_subject().make(batch_invariant=True)
        return plain(run_all(engine, *requests)["r1"])

    alone = completions(request_of("r1", length=50))
    crowd = [request_of(f"r{i}", length=10 * i, seeds=2 * i) for i in (5, 4, 3, 2)]
    assert completions(*crowd[:2], request_of("r1", length=50), *crowd[2:]) == alone
    assert completions(*crowd, request_of("r1", length=50)) == alone


def test_stop_token_ends_a_completion_and_is_kept(subject: Subject) -> None:
    stops = (2, 3, 4)
    completions = run_all(subject.make(), request_of(seeds=8, length=60 - 5, stop_token_ids=stops))[
        "r"
    ]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.tokens[-1] in stops
        assert not {*completion.tokens[:-1]} & {*stops}


def test_stop_token_comes_after_the_minimum_of_tokens(subject: Subject) -> None:
    """Nearly half of all tokens stop, so without a minimum most would end before the tenth."""
    stops = {"stop_token_ids": tuple(range(6)), "length": 50}
    completions = run_all(subject.make(), request_of(seeds=8, min_new_tokens=9, **stops))["r"]
    assert all(c.finish_reason == "stop" and len(c.tokens) > 9 for c in completions)
    assert 10 in {len(c.tokens) for c in completions}
    free = run_all(subject.make(), request_of(seeds=8, **stops))["r"]
    assert min(len(c.tokens) for c in free) < 10


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_stop_string_ends_a_completion_where_a_token_completes_it(
    subject: Subject, min_tokens: int
) -> None:
    """Up to there, tokens and log-probabilities are those without stop strings."""
    unstopped = request_of(seeds=16, length=40)
    completions = run_all(subject.make(max_num_seqs=16), unstopped)["r"]
    texts = [letters().decode(c.tokens.tolist()) for c in completions]
    strings = (texts[0][13:15], texts[1][3:6], texts[2][20])
    ends = [min_end(text, strings, min_tokens) for text in texts]
    assert len({*ends}) > 2
    stopping = replace(unstopped.sampling, stop_strings=strings, min_new_tokens=min_tokens)
    requests = [replace(unstopped, sampling=stopping), request_of("s")]
    stopped = run_all(subject.make(max_num_seqs=16), *requests)["r"]
    for actual, full, end in zip(stopped, completions, ends, strict=True):
        assert actual.finish_reason == ("stop" if end else "length")
        assert plain(actual.tokens) == plain(full.tokens[:end])
        assert actual.logprobs == pytest.approx(full.logprobs[:end], abs=1e-5)
        assert len(versions_of(actual)) == len(actual.tokens)


def min_end(text: str, strings: Sequence[str], min_length: int) -> int | None:
    """Return the end of the first stop string that ends beyond this many characters."""
    ends = range(min_length + 1, len(text) + 1)
    return next((end for end in ends if text[:end].endswith(tuple(strings))), None)


def test_length_limit_is_exact(subject: Subject) -> None:
    for length in (1, 2, 17):
        completions = run_all(subject.make(), request_of(length=length))["r"]
        assert [len(c.tokens) for c in completions] == [length] * 4
        assert {c.finish_reason for c in completions} == {"length"}


def test_more_members_than_slots_all_finish(subject: Subject) -> None:
    completions = run_all(
        subject.make(max_num_seqs=4), request_of(seeds=11), request_of("q", seeds=3)
    )
    assert [len(completions[name]) for name in ("r", "q")] == [11, 3]


def test_cancelled_request_frees_its_slots(subject: Subject) -> None:
    engine = subject.make(max_num_seqs=4)
    engine.add(request_of("gone", seeds=6, length=50))
    engine.add(request_of("stays", length=10))
    for _ in range(3):
        assert engine.step() == []
    engine.cancel("gone")
    engine.cancel("never was")
    completions: dict[str, list[Completion]] = {}
    for _ in range(12):
        completions.update(engine.step())
    assert list(completions) == ["stays"]
    assert not engine.has_work()


def test_empty_prompt_is_refused(subject: Subject) -> None:
    with pytest.raises(EngineError, match="empty"):
        subject.make().add(GroupRequest("r", as_tokens([]), (1,), Sampling(4)))


def test_context_can_be_filled_and_no_request_exceeds_it(subject: Subject) -> None:
    if subject.max_model_len is None:
        pytest.skip("the bigram engine has no context that fills up")
    prompt = request_with_prompt("r", 40, seeds=6, length=subject.max_model_len - 40)
    engine = subject.make(max_num_seqs=4)
    too_long = replace(prompt, request_id="s", prompt_tokens=as_tokens([1] * 41))
    with pytest.raises(EngineError, match=rf"at most {subject.max_model_len} tokens of context"):
        engine.add(too_long)
    completions = run_all(engine, prompt)["r"]
    assert [len(c.tokens) for c in completions] == [prompt.sampling.max_new_tokens] * 6
    assert {c.finish_reason for c in completions} == {"length"}
    assert_exact(subject, prompt, completions)


def test_id_of_a_running_request_is_refused(subject: Subject) -> None:
    engine = subject.make()
    engine.add(request_of("r"))
    with pytest.raises(EngineError, match="running already"):
        engine.add(request_of("r"))
    assert list(run_all(engine)) == ["r"]
    engine.add(request_of("r"))


@pytest.mark.parametrize(
    "changed", [{}, {"min_p": 0.05, "top_p": 0.95, "repetition_penalty": 1.3}], ids=["whole", "cut"]
)
def test_group_distribution_is_the_requested_one(
    subject: Subject, changed: dict[str, float]
) -> None:
    """Chi-square of 4,000 sampled pairs against the exact probability of each pair."""
    if not subject.has_min_p:
        changed = {name: value for name, value in changed.items() if name != "min_p"}
    sampling = Sampling(max_new_tokens=2, temperature=0.9, **changed)  # type: ignore[arg-type]
    prompt = as_tokens([3, 5, 2])
    seeds = tuple(range(4000))
    members = run_all(subject.make(max_num_seqs=500), GroupRequest("r", prompt, seeds, sampling))[
        "r"
    ]
    counted = Counter(tuple(completion.tokens.tolist()) for completion in members)
    pairs = list(product(range(VOCABULARY), repeat=2))
    exact = [exp(sum(subject.reference(0, prompt, pair, sampling))) for pair in pairs]
    assert sum(exact) == pytest.approx(1, abs=1e-4)
    common = [i for i, p in enumerate(exact) if p * len(seeds) >= 5]
    observed = [counted[pairs[i]] for i in common]
    expected = [exact[i] * len(seeds) for i in common]
    observed.append(len(seeds) - sum(observed))
    expected.append(len(seeds) - sum(expected))
    if expected[-1] < 1e-9:
        observed.pop(), expected.pop()
    scaled = [e * sum(observed) / sum(expected) for e in expected]
    assert chisquare(observed, scaled).pvalue > 1e-3


def test_temperature_0_takes_the_likeliest_token_whatever_the_seed(subject: Subject) -> None:
    prompt, seeds = as_tokens([3, 5, 2]), tuple(range(8))
    greedy = GroupRequest("r", prompt, seeds, Sampling(max_new_tokens=4, temperature=0.0))
    beside = GroupRequest("s", prompt, seeds, Sampling(max_new_tokens=4))
    members = run_all(subject.make(max_num_seqs=16), greedy, beside)
    (tokens,) = {tuple(completion.tokens.tolist()) for completion in members["r"]}
    assert all(plain(completion.logprobs) == [0.0] * 4 for completion in members["r"])
    for position, token in enumerate(tokens):
        before = tokens[:position]
        given = [
            subject.reference(0, prompt, (*before, candidate), Sampling(4))[-1]
            for candidate in range(VOCABULARY)
        ]
        assert token == max(range(VOCABULARY), key=given.__getitem__)
    assert len({completion.tokens.tobytes() for completion in members["s"]}) > 1


def test_recipes_name_engines_of_the_registry() -> None:
    for name in ENGINES.keys() & SUBJECTS.keys():
        assert callable(engine_factory(name))
    with pytest.raises(ConfigError, match=r"generation.engine = 'tensor': expected one of auto, t"):
        engine_factory("tensor")


async def test_torch_engine_starts_with_the_newest_weights_of_a_directory(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path / "model")
    publish_model_directory(model, tmp_path / "weights")
    reader = DirectoryReader(tmp_path / "weights")
    settings = GenerationSettings(max_num_seqs=2, max_model_len=32, max_new_tokens=4)
    engine = await engine_factory("torch")(model, settings, reader)
    try:
        assert engine.version == 0
        (completion,) = await engine.generate(
            GroupRequest("r", as_tokens([5, 6]), (1,), Sampling(4))
        )
        assert len(completion.tokens) == 4
    finally:
        engine.close()
