"""Fakes that ship: second implementations of engine, weights and tracker, for trying ideas.

The contract suites test that they implement their protocols.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import exp, inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_flow.core.errors import WeightsError
from areal_flow.core.types import Completion, GroupRequest, Sampling
from areal_flow.rollout.engines.scheduler import SampledSequence, SlotScheduler
from areal_flow.tracking.mlflow import BEST, CURRENT
from areal_flow.tracking.protocol import PASS_RATE_TAG, RunDescription, StepMetrics

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class BigramEngine:
    """An `EngineCore` whose next token depends on the last one and the version: exact and quick.

    Weights are a mapping with one entry, `"logits"`: a square table of next-token logits.
    """

    def __init__(
        self,
        logits: Sequence[Sequence[float]],
        *,
        version: int = 0,
        max_num_seqs: int = 4,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.version = version
        self._logits = logits
        self._scheduler = SlotScheduler(max_num_seqs, tokenizer)

    def add(self, request: GroupRequest) -> None:
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def occupancy(self) -> dict[str, float]:
        return self._scheduler.occupancy()

    def step(self) -> list[tuple[str, list[Completion]]]:
        self._scheduler.admit()
        for sequence in self._scheduler.running.values():
            self._extend(sequence)
        return self._scheduler.finish()

    def load_weights(self, tensors: Mapping[str, Any], *, version: int) -> None:
        if set(tensors) != {"logits"}:
            raise WeightsError("expected the bigram logits")
        self._logits, self.version = tensors["logits"], version

    def _extend(self, sequence: SampledSequence) -> None:
        request = sequence.request
        last = (sequence.tokens or request.prompt_tokens)[-1]
        adjusted = _adjusted(self._logits[last], sequence)
        logprobs = _log_softmax(adjusted, request.sampling.temperature)
        logprobs = _truncated(logprobs, request.sampling)
        seed = f"{request.seeds[sequence.index]}:{len(sequence.tokens)}"
        token = _invert(logprobs, random.Random(seed).random())
        sequence.append(token, logprobs[token], self.version)


def _adjusted(logits: Sequence[float], sequence: SampledSequence) -> Sequence[float]:
    """Return logits after penalties for earlier tokens; see `generation.sampling`."""
    sampling = sequence.request.sampling
    if not sampling.depends_on_prefix:
        return logits
    adjusted, penalty = list(logits), sampling.repetition_penalty
    if len(sequence.tokens) < sampling.min_new_tokens:
        for stop in sampling.stop_token_ids:
            adjusted[stop] = -inf
    for token in {*sequence.request.prompt_tokens.tolist(), *sequence.tokens}:
        adjusted[token] *= 1 / penalty if adjusted[token] > 0 else penalty
    return adjusted


def _truncated(logprobs: list[float], sampling: Sampling) -> list[float]:
    """Return log-probabilities after min-p, top-k and top-p, renormalised."""
    if not sampling.min_p and not sampling.top_k and sampling.top_p == 1:
        return logprobs
    order = sorted(range(len(logprobs)), key=logprobs.__getitem__, reverse=True)
    least = logprobs[order[0]] + log(sampling.min_p) if sampling.min_p else -inf
    likely = [token for token in order if logprobs[token] >= least][: sampling.top_k or None]
    masses = [0.0, *accumulate(exp(logprobs[token]) for token in likely)]
    enough = sampling.top_p * masses[-1]
    kept = [t for t, before in zip(likely, masses, strict=False) if before < enough]
    log_total = log(sum(exp(logprobs[token]) for token in kept))
    return [lp - log_total if t in kept else -inf for t, lp in enumerate(logprobs)]


def _log_softmax(logits: Sequence[float], temperature: float) -> list[float]:
    if temperature == 0:
        likeliest = max(range(len(logits)), key=logits.__getitem__)
        return [0.0 if token == likeliest else -inf for token in range(len(logits))]
    scaled = [value / temperature for value in logits]
    largest = max(scaled)
    total = largest + log(sum(exp(value - largest) for value in scaled))
    return [value - total for value in scaled]


def _invert(logprobs: Sequence[float], drawn: float) -> int:
    cumulative = 0.0
    for token, logprob in enumerate(logprobs):
        cumulative += exp(logprob)
        if drawn < cumulative:
            return token
    return len(logprobs) - 1


class MemoryWriter:
    """An in-process `WeightsWriter` that pushes published weights to its readers."""

    def __init__(self) -> None:
        self._staged: dict[int, dict[str, Any]] = {}
        self._readers: list[MemoryReader] = []
        self._newest: tuple[int, dict[str, Any]] | None = None

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        from areal_flow.policy.models.hashing import hash_tensors

        self._staged[version] = {name: tensors[name].clone() for name in sorted(tensors)}
        return hash_tensors(self._staged[version])

    def publish(self, version: int) -> None:
        if version in self._staged:
            self._newest = version, self._staged.pop(version)
        elif self._newest is None or version != self._newest[0]:
            raise WeightsError(f"version {version} was never staged")
        for reader in self._readers:
            reader.receive(*self._newest)

    def join(self, reader: MemoryReader) -> None:
        """Push the newest version, and all later ones, to a reader."""
        self._readers.append(reader)
        if self._newest:
            reader.receive(*self._newest)


class MemoryReader:
    """The `WeightsReader` at the other end of a `MemoryWriter`."""

    def __init__(self, writer: MemoryWriter) -> None:
        self._received: dict[int, dict[str, Any]] = {}
        writer.join(self)

    def receive(self, version: int, tensors: dict[str, Any]) -> None:
        self._received[version] = tensors

    def newest(self) -> int:
        if not self._received:
            raise WeightsError("no weights were published")
        return max(self._received)

    def load(self, version: int) -> dict[str, Any]:
        if version not in self._received:
            raise WeightsError(f"version {version} was not published")
        return self._received[version]


class MemoryTracker:
    """A `Tracker` in memory; while `away`, it raises as if unreachable."""

    def __init__(self) -> None:
        self.away = False
        self.metrics: dict[str, dict[int, float]] = {}
        self.timestamps_ms: dict[int, int] = {}
        self.parameters: dict[str, str] = {}
        self.description: RunDescription | None = None
        self.samples: Sequence[Mapping[str, Any]] = ()
        self.versions: dict[Path, str] = {}
        self.tags: dict[Path, Mapping[str, str]] = {}
        self.aliases: dict[str, Path] = {}
        self.delivered = 0
        self.status = ""
        self.model_version: str | None = None
        self.alias: str | None = None

    def begin(self) -> int:
        self._answer()
        self.status = "RUNNING"
        return self.delivered

    def describe(self, description: RunDescription) -> None:
        self._answer()
        given = {name: str(value) for name, value in description.parameters.items()}
        self.parameters = given | self.parameters
        self.description = description

    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._answer()
        self.samples = rows

    def show_report(self, page: Path) -> None:
        self._answer()
        self.report = page.read_text()

    def log_steps(self, steps: Sequence[StepMetrics]) -> None:
        for step, metrics, timestamp_ms in steps:
            self.log_evaluation(step, metrics, timestamp_ms=timestamp_ms)
            self.timestamps_ms[step], self.delivered = timestamp_ms, step

    def log_evaluation(
        self, policy_version: int, metrics: Mapping[str, float], *, timestamp_ms: int
    ) -> None:
        self._answer()
        for name, value in metrics.items():
            self.metrics.setdefault(name, {})[policy_version] = value

    def register_checkpoints(self, present: Mapping[Path, Mapping[str, str]]) -> None:
        self._answer()
        for path, tags in present.items():
            number = str(len(self.tags) + 1)
            self.versions.setdefault(path, number)
            self.tags[path] = tags
            self.alias = tags["run"]
            self.aliases[self.alias] = path
            self.model_version = self.versions[path]
        if rates := {p: float(t[PASS_RATE_TAG]) for p, t in present.items() if PASS_RATE_TAG in t}:
            self.aliases[BEST] = max(rates, key=rates.__getitem__)
        self.versions = {path: n for path, n in self.versions.items() if path in present}

    def protected(self) -> frozenset[Path]:
        self._answer()
        moving = {CURRENT, self.alias}
        return frozenset(path for alias, path in self.aliases.items() if alias not in moving)

    def remove(self) -> int:
        self._answer()
        num_versions, self.delivered = len(self.versions), 0
        for kept in (self.metrics, self.timestamps_ms, self.parameters, self.versions, self.tags):
            kept.clear()
        self.aliases.clear()
        return num_versions

    def is_reachable(self) -> bool:
        return not self.away

    def end(self, status: str) -> None:
        self._answer()
        self.status = status
        if status == "FINISHED" and self.alias:
            self.aliases[CURRENT] = self.aliases[self.alias]

    def _answer(self) -> None:
        if self.away:
            raise ConnectionError("the fake tracker is away")
