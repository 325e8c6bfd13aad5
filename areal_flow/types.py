"""What flows between the parts. Plain frozen values: no behaviour, no vendor, no I/O.

Payload types (`Completion`) carry tokens, as arrays, and stay on workers. Receipts carry ids,
counts and versions, and are all that the driver ever sees. A value that has
arrays is equal to itself only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_flow.digests import seed_of
from areal_flow.step_metrics import StepMetrics

Tokens = NDArray[np.int32]
"""Token ids of one sequence. Sequences are joined with `np.concatenate`: `+` adds ids up."""
Logprobs = NDArray[np.float32]
"""One log-probability a token."""

FinishReason = Literal["stop", "length"]
Verdict = Literal[
    "right", "wrong", "timeout", "bad_reference", "parse_error", "runtime_error", "output_limit",
    "memory_limit", "infrastructure_error", "bad_answer", "error", "no_reward",
]  # fmt: skip


class VersionSpan(NamedTuple):
    """`length` consecutive tokens sampled by policy `version`."""

    version: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One row of the prompt table; `tokens` are what the policy reads."""

    prompt_id: str
    text: str
    answer: Any
    """The right answer as the row has it: text, or any value of JSON."""
    difficulty: int
    tokens: Tokens
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the row that the prompt was made from, for its reward."""
    source: str = ""
    """The name of its source, where a run has several."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is drawn, and what ends it.

    The defaults keep the whole distribution; `temperature=0` takes the likeliest token, with
    log-probability 0. A stop token or a stop string ends the completion and is kept in it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    """So many tokens come before a stop token or the end of a stop string can."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def distribution(self) -> Sampling:
        """Return what of this says how a token is drawn, without what says when to end."""
        early_stops = self.stop_token_ids if self.min_new_tokens else ()
        return replace(self, max_new_tokens=0, stop_token_ids=early_stops, stop_strings=())

    @property
    def depends_on_prefix(self) -> bool:
        """Return whether logits are changed by the tokens before."""
        return self.repetition_penalty != 1 or self.min_new_tokens > 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupRequest:
    """One prompt to be completed once per seed."""

    request_id: str
    prompt_tokens: Tokens
    seeds: tuple[int, ...]
    sampling: Sampling
    on_token: Callable[[int, int], None] | None = field(default=None, repr=False)
    """Called by the engine's thread with the place of a seed and each token that is sampled for it,
    in their order, before the completions are returned."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Sampled tokens with the log-probability each had in the distribution it was drawn from."""

    tokens: Tokens
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason


class RewardPart(NamedTuple):
    """What one of several rewards gave, before its weight; None when it failed, or gave none."""

    name: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's word on one completion; `reward` is None when the verifier itself failed, or,
    with the verdict `no_reward`, when it has nothing to say of this completion.

    A verifier that gives a bare number leaves the verdict open: `right` if the completion passes.
    """

    reward: float | None
    verdict: Verdict | None = None
    extracted: str = ""
    error: str = ""
    message: str = ""
    """What the verifier would tell the policy, for workflows of several turns."""
    parts: tuple[RewardPart, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else a verifier says of this completion, by name."""

    def __post_init__(self) -> None:
        if self.reward is not None and not isfinite(self.reward):
            raise ValueError(f"expected a finite reward, found {self.reward}")


@dataclass(frozen=True, slots=True)
class Episode:
    """A group to be rolled out, scored and written. Everything follows from `submission_index`."""

    submission_index: int
    prompt: Prompt
    seeds: tuple[int, ...]
    attempt: int
    writer_epoch: int
    submitted_at: datetime
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What an evaluation's answers have of `Sampling` that is not the recipe's `generation`."""

    @property
    def group_id(self) -> str:
        return group_id(self.submission_index)


class TrajectoryReceipt(NamedTuple):
    """What the driver knows of a written trajectory: no tokens. A tuple, since it is sent often."""

    trajectory_id: str
    version_spans: tuple[VersionSpan, ...]
    reward: float | None
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.version_spans)

    @property
    def newest_version(self) -> int:
        return max((span.version for span in self.version_spans), default=-1)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine was made; differences of two are rates."""

    incarnation: str = ""
    num_tokens: int = 0
    busy_s: float = 0.0
    stall_s: float = 0.0
    """From each switch of weights while there was work to the end of the decode step after it,
    which may prefill again what an interruption dropped."""
    elapsed_s: float = 0.0
    """From when the engine was made to the moment up to which `busy_s` is counted."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What a generator serves, and what its last update cost."""

    policy_version: int
    served_hash: str
    """As found in what was loaded."""
    transfer_s: float
    """To read the weights and to hash them, while decoding went on."""
    stall_s: float
    """To switch, and to decode the first step after it."""


@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """A written, not yet committed group: its members' receipts, and the fragments that it lies in,
    which it may share with groups that are committed together with it."""

    submission_index: int
    fragments: tuple[str, ...]
    trajectories: tuple[TrajectoryReceipt, ...]
    engine_stats: EngineStats = EngineStats()
    member_errors: tuple[str, ...] = ()
    """Why members are missing or unscored, one root cause each."""
    reward_queue_s: float = 0.0
    """From its last completion to its receipt, without the time that it was scored in."""


@dataclass(frozen=True, slots=True)
class Discard:
    """A committed trajectory that will never be trained, and why."""

    trajectory_id: str
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a trainer's ranks come together: one name a replica group, never used again."""

    name: str
    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Exactly what a step computes. Built from a fresh batch or from a ledger row, alike."""

    step: int
    parent_hash: str
    policy_version: int
    trajectory_ids: tuple[str, ...]
    batch_digest: str
    max_staleness: int


@dataclass(frozen=True, slots=True)
class PolicyHashes:
    """Identity of a policy: of its master weights, and of the bytes that generators load."""

    weights_hash: str
    served_hash: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a trainer made: staged weights of version `step`, their hashes and the numbers."""

    step: int
    hashes: PolicyHashes
    metrics: StepMetrics
    numeric_environment: str


def answer_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def group_id(submission_index: int) -> str:
    return f"{submission_index:08d}"


def trajectory_id(submission_index: int, member: int, branch: int = 0) -> str:
    """Return the id of one trajectory; sorting ids sorts by submission, member, then branch."""
    return f"{group_id(submission_index)}-{member:04d}-{branch:02d}"


def counter_seed(*counters: int) -> int:
    """Return a 63-bit seed that follows from some numbers alone, in any process."""
    return seed_of(":".join(map(str, counters)))


def submission_index_of(identifier: str) -> int:
    return int(identifier.split("-", 1)[0])


def as_tokens(ids: Sequence[int] | Tokens) -> Tokens:
    return np.asarray(ids, np.int32)


def merged_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the spans with neighbours of one version made one."""
    return tuple(
        VersionSpan(version, sum(span.length for span in alike))
        for version, alike in groupby(spans, key=lambda span: span.version)
    )
