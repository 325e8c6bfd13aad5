"""A trainer rank: holds the state, answers step requests, stages weights, writes checkpoints.

A request names its parent by hash. At the parent the rank computes; at the child of the very same
request it answers what it has; anywhere else it refuses, and must be restored first.

Each rank holds the whole state and reads the whole batch; it computes its share of the gradient,
and all make the same update. Only the leader's weights and checkpoints are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

from areal_flow.algorithms.losses import TokenLoss, decoupled_ppo_loss
from areal_flow.algorithms.staleness import count_staleness
from areal_flow.config import Recipe
from areal_flow.errors import TrainerLost
from areal_flow.layout import RunLayout
from areal_flow.models.policy import DTYPES, empty_policy, load_policy
from areal_flow.recovery.checkpoints import checkpoint_path
from areal_flow.recovery.lease import Writer
from areal_flow.trainer.checkpoint import (
    Snapshot,
    describe,
    read_checkpoint,
    take_snapshot,
    write_checkpoint,
)
from areal_flow.trainer.replicas import ReplicaGroup, SingleProcess
from areal_flow.trainer.sequences import (
    TrainingSequence,
    masked_fraction_by_tenth,
    sequences_from_rows,
    spans_of_row,
)
from areal_flow.trainer.state import TrainerState, numeric_environment
from areal_flow.trainer.step import StepSettings, UpdateNumbers, train_step
from areal_flow.types import PolicyHashes, StepMetrics, StepRequest, StepResult
from areal_flow.weights.channel import HashingWriter, WeightsWriter

ReadRows = Callable[[Sequence[str]], Sequence[Mapping[str, Any]]]
"""Trajectory ids in, their rows out, in the same order."""


class TrainerRank:
    """One rank's policy between two steps; not for concurrent use."""

    def __init__(
        self,
        layout: RunLayout,
        recipe: Recipe,
        *,
        channel: WeightsWriter,
        read_rows: ReadRows,
        loss: TokenLoss = decoupled_ppo_loss,
    ) -> None:
        self._layout = layout
        self._recipe = recipe
        self._channel = channel
        self._read_rows = read_rows
        self._snapshot: Snapshot | None = None
        self._replicas: ReplicaGroup = SingleProcess(recipe.cluster.num_trainers)
        self.loss = loss
        self._last: tuple[StepRequest, StepResult] | None = None
        self._hashes: PolicyHashes | None = None
        self._step = 0
        self.state: TrainerState | None = None

    def adopt(self, policy: Any) -> TrainerState:
        """Take a policy as the one to train, with a fresh optimizer."""
        self.state = TrainerState(policy.train(), self._recipe.trainer)
        return self.state

    def load_pretrained(self, directory: Path) -> None:
        """Start from a Hugging Face model directory."""
        settings = self._recipe.trainer
        self.adopt(load_policy(directory, device=settings.device))

    @property
    def settings(self) -> StepSettings:
        """Return what this rank's steps need beside state and sequences."""
        return StepSettings(
            algorithm=self._recipe.algorithm,
            temperature=self._recipe.generation.temperature,
            seed=self._recipe.seed,
            num_ranks=self._recipe.cluster.num_trainers,
            loss=self.loss,
        )

    def join(self, replicas: ReplicaGroup) -> None:
        """Compute with others from here on; a rank that never did computes every share itself."""
        self._replicas = replicas

    def leave(self) -> None:
        """Be of its replica group no more, so that nobody waits for this rank."""
        self._replicas.leave()

    def genesis(self) -> tuple[PolicyHashes, str]:
        """Stage the policy as version 0; return its identity and the numeric environment."""
        self._step, self._last = 0, None
        self._hashes = self._stage(0)
        return self._hashes, self._numeric_environment()

    def step(self, request: StepRequest) -> StepResult:
        """Compute a step and stage its weights; see the module for where a rank must stand.

        Raises:
            TrainerLost: this rank is not at the parent, or another one was lost.
            TrainingError: numbers are not finite.
        """
        if self._last and self._last[0] == request:
            return self._last[1]
        try:
            result = self._compute(request)
        except BaseException:
            self.leave()
            raise
        self._step, self._last = request.step, (request, result)
        return result

    def _compute(self, request: StepRequest) -> StepResult:
        self._refuse_unless_at(request.parent_hash, purpose=f"step {request.step}")
        began = perf_counter()
        rows = self._read_rows(request.trajectory_ids)
        sequences = sequences_from_rows(
            rows, policy_version=request.policy_version, max_staleness=request.max_staleness
        )
        read = perf_counter()
        numbers = self._train(request, sequences)
        trained = perf_counter()
        self._hashes = self._stage(request.step)
        metrics = self._metrics(
            request,
            rows,
            sequences,
            numbers,
            seconds_read=read - began,
            seconds_train=trained - read,
            seconds_stage=perf_counter() - trained,
        )
        return StepResult(request.step, self._hashes, metrics, self._numeric_environment())

    def snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        """Copy the state with these weights, for `write_snapshot` to write beside the next steps.

        Raises:
            TrainerLost: this rank holds other weights.
        """
        self._refuse_unless_at(weights_hash, purpose="a checkpoint")
        assert self.state is not None
        assert self._hashes is not None
        description = describe(
            self._hashes,
            step=self._step,
            next_submission_index=next_submission_index,
            config_hash=self._recipe.digest(),
        )
        self._snapshot = take_snapshot(self.state, description)

    def write_snapshot(self, step: int, writer: Writer) -> Path:
        """Write the snapshot of a step as a checkpoint; return its directory. Any thread.

        Raises:
            TrainerLost: this rank was started after the snapshot was taken.
            RunError: another driver took over.
            StorageError: the disk refused; older checkpoints are intact.
        """
        snapshot = self._snapshot
        if snapshot is None or snapshot.description.step != step:
            raise TrainerLost(f"the snapshot of step {step} went with the trainer that took it")
        self._snapshot = None
        return write_checkpoint(self._layout.checkpoints, self._layout.model, snapshot, writer)

    def restore(self, step: int) -> PolicyHashes:
        """Load a checkpoint and stage its weights again; return its identity."""
        settings = self._recipe.trainer
        policy = empty_policy(self._layout.model, device=settings.device)
        state = self.adopt(policy)
        read_checkpoint(checkpoint_path(self._layout.checkpoints, step), state)
        self._step, self._last = step, None
        self._hashes = self._stage(step)
        return self._hashes

    def branch(self, recipe: Recipe, *, loss: TokenLoss = decoupled_ppo_loss) -> TrainerRank:
        """Return a rank that stands where this one does, with a state and settings of its own."""
        assert self.state is not None
        other = TrainerRank(
            self._layout, recipe, channel=self._channel, read_rows=self._read_rows, loss=loss
        )
        state = other.adopt(deepcopy(self.state.policy).to(recipe.trainer.device))
        state.load_optimizer_tensors(self.state.optimizer_tensors())
        other._hashes, other._step = self._hashes, self._step
        return other

    def _refuse_unless_at(self, weights_hash: str, *, purpose: str) -> None:
        found = self._hashes.weights_hash if self._hashes else "nothing"
        if found != weights_hash:
            raise TrainerLost(
                f"{purpose} needs weights {weights_hash}, this rank holds {found} (step "
                f"{self._step}): restore it from a checkpoint and the ledger"
            )

    def _train(self, request: StepRequest, sequences: Sequence[TrainingSequence]) -> UpdateNumbers:
        assert self.state is not None
        # From here until its weights are staged this rank stands nowhere: an error must not leave
        # changed weights under the parent's name.
        self._hashes = None
        return train_step(
            self.state,
            sequences,
            step=request.step,
            settings=self.settings,
            replicas=self._replicas,
        )

    def _numeric_environment(self) -> str:
        return numeric_environment(
            self._recipe.trainer, num_ranks=self._recipe.cluster.num_trainers
        )

    def _stage(self, version: int) -> PolicyHashes:
        assert self.state is not None
        dtype = DTYPES[self._recipe.generation.dtype]
        tensors = {name: tensor.to(dtype) for name, tensor in self.state.tensors().items()}
        channel = self._channel if self._replicas.leads else HashingWriter()
        return PolicyHashes(
            weights_hash=self.state.weights_hash(),
            optimizer_hash=self.state.optimizer_hash(),
            served_hash=channel.stage(version, tensors),
        )

    def _metrics(
        self,
        request: StepRequest,
        rows: Sequence[Mapping[str, Any]],
        sequences: Sequence[TrainingSequence],
        numbers: UpdateNumbers,
        **seconds: float,
    ) -> StepMetrics:
        assert self.state is not None
        staleness = count_staleness(
            (spans_of_row(row) for row in rows),
            policy_version=request.policy_version,
            max_staleness=request.max_staleness,
        )
        num_trained = sum(sequence.num_trained for sequence in sequences)
        num_tokens = sum(len(sequence.output_tokens) for sequence in sequences)
        num_sequences = len(sequences)
        return StepMetrics(
            loss=sum(numbers.losses) / max(1, len(numbers.losses)),
            grad_norm=sum(numbers.grad_norms) / max(1, len(numbers.grad_norms)),
            learning_rate=self.state.learning_rate(request.step),
            clip_fraction=numbers.num_clipped / max(1, numbers.num_tokens),
            importance_weight_mean=numbers.importance_weight_sum / max(1, numbers.num_tokens),
            importance_weight_max=numbers.importance_weight_max,
            reward_mean=sum(sequence.reward for sequence in sequences) / num_sequences,
            completion_tokens_mean=num_tokens / num_sequences,
            num_trained_tokens=num_trained,
            num_masked_tokens=num_tokens - num_trained,
            staleness_mean=staleness.staleness_mean,
            staleness_max=staleness.staleness_max,
            masked_fraction_by_tenth=masked_fraction_by_tenth([s.trained for s in sequences]),
            **seconds,
        )
