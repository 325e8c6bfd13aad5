"""The values that flow between the parts: frozen, without behaviour or I/O.

Values with tokens (`Completion`) stay on workers; the driver sees receipts, which have ids, counts
and versions. A value with arrays is equal to itself only.
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

from areal_flow.core.digests import seed_of

Tokens = NDArray[np.int32]
"""Token ids of one sequence. Join sequences with `np.concatenate`: `+` adds ids."""
Logprobs = NDArray[np.float32]

FinishReason = Literal["stop", "length", "error"]
"""`error`: the workflow failed, so that there are no tokens."""
Verdict = Literal[
    "correct", "incorrect", "timeout", "bad_reference", "parse_error", "runtime_error",
    "output_limit", "memory_limit", "infrastructure_error", "error", "no_reward",
]  # fmt: skip

SKIPPED_UPDATES = "skipped_updates_fraction"
"""The metric of a step's updates that changed nothing, since a loss or gradient was not finite."""
CRITIC_SKIPPED_UPDATES = "critic_skipped_updates_fraction"
"""The same, of a critic's."""
TRAINED_BY_STALENESS = "staleness/trained_tokens_"
"""The prefix of a metric's name; the staleness of these tokens, in versions, follows."""
SPEED_AREA = "speed/"
"""The same, of metrics of throughput and utilization, which depend on the machine."""
ENGINE_GAP = "engine_gap/"
"""The same, of metrics that compare a rollout engine with the trainer at the same weights."""


class ToolRecord(NamedTuple):
    """A call of a tool in an episode, and what the policy got."""

    turn: int
    """Number of the completion that called it, from 0."""
    name: str
    arguments: str
    """JSON, by name."""
    result: str
    exit_code: int | None
    """Of a command in a sandbox."""
    duration_s: float


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
    """The right answer: text, or any value of JSON."""
    difficulty: int
    tokens: Tokens
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the prompt's row, for rewards."""
    source: str = ""
    """The name of its source, in a run with several."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is sampled, and what ends it.

    The defaults keep the whole distribution; `temperature=0` takes the likeliest token, with
    log-probability 0. A stop token or a stop string ends the completion and is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    """A stop token or the end of a stop string comes after so many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def distribution(self) -> Sampling:
        """Return this without what only says when to end."""
        early_stops = self.stop_token_ids if self.min_new_tokens else ()
        return replace(self, max_new_tokens=0, stop_token_ids=early_stops, stop_strings=())

    @property
    def depends_on_prefix(self) -> bool:
        """Return whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.min_new_tokens > 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupRequest:
    """One prompt to be completed once per seed."""

    request_id: str
    prompt_tokens: Tokens
    seeds: tuple[int, ...]
    sampling: Sampling
    on_token: Callable[[int, int], None] | None = field(default=None, repr=False)
    """Called by the engine's thread with the index of a seed and each token sampled for it, in
    order, before the completions are returned."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Sampled tokens, each with its log-probability in the distribution it was sampled from."""

    tokens: Tokens
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason


class RewardPart(NamedTuple):
    """One of several rewards, without its weight; None if it failed or gave none."""

    name: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's result for one completion.

    `reward` is None if the verifier failed or, with the verdict `no_reward`, gives none for this
    completion. Without a verdict, it is `correct` if the completion passes.
    """

    reward: float | None
    verdict: Verdict | None = None
    extracted: str = ""
    error: str = ""
    message: str = ""
    """For the policy, in workflows of several turns."""
    parts: tuple[RewardPart, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further values of the verifier, by name."""

    def __post_init__(self) -> None:
        if self.reward is not None and not isfinite(self.reward):
            raise ValueError(f"expected a finite reward, found {self.reward}")


@dataclass(frozen=True, slots=True)
class Episode:
    """A group to roll out, score and write. `submission_index` determines prompt and seeds."""

    submission_index: int
    prompt: Prompt
    seeds: tuple[int, ...]
    attempt: int
    writer_epoch: int
    submitted_at: datetime
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of `Sampling` in which an evaluation differs from the recipe's `generation`."""
    is_last_attempt: bool = True
    """Whether a group in which the workflow failed for all members is stored, not tried again."""

    @property
    def group_id(self) -> str:
        return group_id(self.submission_index)


class TrajectoryReceipt(NamedTuple):
    """A written trajectory, without tokens. A tuple, since it is sent often."""

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
    """Totals since the engine was made."""

    incarnation: str = ""
    num_tokens: int = 0
    busy_s: float = 0.0
    stall_s: float = 0.0
    """From each switch of weights, while there was work, to the end of the next decode step, which
    may repeat the prefill that an interruption dropped."""
    elapsed_s: float = 0.0
    """The time in which `busy_s` was counted."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What a generator serves, and the duration of its last update."""

    policy_version: int
    served_hash: str
    """Of the weights that were loaded."""
    transfer_s: float
    """To read and hash the weights, while decoding continued."""
    stall_s: float
    """To switch, and to decode the next step."""


@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """A written, not yet committed group. It may share fragments with groups written with it."""

    submission_index: int
    fragments: tuple[str, ...]
    trajectories: tuple[TrajectoryReceipt, ...]
    engine_stats: EngineStats = EngineStats()
    member_errors: tuple[str, ...] = ()
    """The root cause of each trajectory without a reward."""
    reward_queue_s: float = 0.0
    """From its last completion to its receipt, without the time of scoring."""


@dataclass(frozen=True, slots=True)
class Discard:
    """A committed trajectory that will never be trained, and why."""

    trajectory_id: str
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a trainer's ranks connect; each replica group has a new name."""

    name: str
    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What a step computes, from a new batch or from a ledger row."""

    step: int
    parent_hash: str
    policy_version: int
    trajectory_ids: tuple[str, ...]
    batch_digest: str
    max_staleness: int


@dataclass(frozen=True, slots=True)
class PolicyHashes:
    """The hashes of a policy's master weights and of the bytes that generators load."""

    weights_hash: str
    served_hash: str


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Numbers of one step that every algorithm has; tokens are completion tokens, seconds are wall
    time. `metrics` holds what the step's algorithm computes besides, by name."""

    loss: float
    grad_norm: float
    learning_rate: float
    reward_mean: float
    completion_tokens_mean: float
    num_trained_tokens: int
    num_masked_tokens: int
    staleness_mean: float
    staleness_max: int
    masked_fraction_by_decile: tuple[float, ...]
    read_s: float
    train_s: float
    stage_s: float
    importance_weight_means: tuple[float | None, ...] = ()
    """Of each trajectory; None where no token was trained, or where it was not computed."""
    importance_weight_maxima: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def skipped_an_update(self) -> bool:
        """Whether an update of the policy or of a critic changed nothing."""
        names = (SKIPPED_UPDATES, CRITIC_SKIPPED_UPDATES)
        return any(self.metrics.get(name, 0.0) > 0 for name in names)


NOTHING_TRAINED = StepMetrics(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0, (), 0.0, 0.0, 0.0)
"""The metrics of the genesis."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step; its weights are staged as version `step`."""

    step: int
    hashes: PolicyHashes
    metrics: StepMetrics
    numeric_environment: str
    parent_hash: str
    """The weights that the step started from: the request's, unless the trainer was lost since the
    step before and its replay made other weights."""


def answer_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def group_id(submission_index: int) -> str:
    return f"{submission_index:08d}"


def trajectory_id(submission_index: int, member: int, branch: int = 0) -> str:
    """Return the id of one trajectory; sorting ids sorts by submission, member, then branch."""
    return f"{group_id(submission_index)}-{member:04d}-{branch:02d}"


def counter_seed(*counters: int) -> int:
    """Return a 63-bit seed that depends on these numbers only."""
    return seed_of(":".join(map(str, counters)))


def submission_index_of(identifier: str) -> int:
    return int(identifier.split("-", 1)[0])


def as_tokens(ids: Sequence[int] | Tokens) -> Tokens:
    return np.asarray(ids, np.int32)


def merged_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the spans, neighbours of one version merged."""
    return tuple(
        VersionSpan(version, sum(span.length for span in alike))
        for version, alike in groupby(spans, key=lambda span: span.version)
    )
