"""A trainer rank: answers step requests, stages weights and writes checkpoints of its backend.

A request names the weights that it starts from by hash. A rank that holds them computes the step; a
rank that has just computed this very request returns the result again; any other raises
`TrainerLost` and must be restored first. Each rank reads the whole batch; only the leader writes
weights and completes checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from areal_flow.algorithms.protocol import TokenLoss
from areal_flow.algorithms.registry import ActorCriticPPO
from areal_flow.core.errors import TrainerLost
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import SPEED_AREA, PolicyHashes, StepRequest, StepResult
from areal_flow.policy.checkpoints import CheckpointState, checkpoint_path
from areal_flow.policy.models.lora import add_adapter, drawn_adapter
from areal_flow.policy.models.policy import DTYPES
from areal_flow.policy.weights.channel import WeightsWriter
from areal_flow.training.backend import TrainerBackend, numeric_environment
from areal_flow.training.checkpoint import (
    Snapshot,
    complete_checkpoint,
    read_checkpoint,
    read_weights,
    take_snapshot,
    write_part,
)
from areal_flow.training.flops import PolicyShape, device_peak_rate, matrix_rate
from areal_flow.training.metrics import step_metrics
from areal_flow.training.parallel import check_heads
from areal_flow.training.ranked_model import UpdateNumbers
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.sequences import TrainingSequence, sequences_from_rows
from areal_flow.training.settings import RankSettings, StepSettings
from areal_flow.training.step import train_step
from areal_flow.training.tensor_rows import TensorReaders, pretrained_policy, shapes_of, whole_rows


@dataclass
class TrainerRank:
    """One rank's policy between two steps; not for concurrent use."""

    layout: RunLayout
    config: RankSettings
    _: KW_ONLY
    channel: WeightsWriter
    read_rows: Callable[[Sequence[str]], Sequence[Mapping[str, Any]]]
    """Returns the rows of trajectory ids, in their order, tokens as arrays."""
    loss: TokenLoss | None = None
    """Minimised instead of the algorithm's own."""
    find_teacher: Callable[[], Path | None] = lambda: None
    """Returns the model directory of the reference that the algorithm names, if it names one."""
    numbers: UpdateNumbers = field(default_factory=UpdateNumbers, init=False)
    """Of the last step."""
    _backend: TrainerBackend | None = field(default=None, init=False)
    _shape: PolicyShape | None = field(default=None, init=False)
    _reference_shape: PolicyShape | None = field(default=None, init=False)
    _hashes: PolicyHashes | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    _last: tuple[StepRequest, StepResult] | None = field(default=None, init=False)
    _snapshot: Snapshot | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        num_batches = self.config.num_ranks // self.config.trainer.parallel.context_ranks
        self.replicas: ReplicaGroup = ReplicaGroup(num_batches)
        """The ranks of this trainer; a single process computes every rank's batch."""

    @property
    def backend(self) -> TrainerBackend:
        assert self._backend is not None, "a rank has no policy before it adopts one"
        return self._backend

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            algorithm=self.config.algorithm,
            temperature=self.config.temperature,
            seed=self.config.seed,
            loss=self.loss,
        )

    def adopt(self, policy: Any) -> TrainerBackend:
        self._hashes = None
        check_heads(policy, self.config.trainer.parallel.context_ranks)
        if (lora := self.config.trainer.lora).rank:
            add_adapter(policy, lora, seed=self.config.seed)
        self._shape = PolicyShape.of(policy)
        self._backend = TrainerBackend(policy, self.config.trainer, self.replicas)
        if isinstance(algorithm := self.config.algorithm, ActorCriticPPO):
            self._backend.add_critic(algorithm)
        return self._backend

    def load_pretrained(self, directory: Path) -> None:
        policy, weights = pretrained_policy(directory)
        if (lora := self.config.trainer.lora).rank:
            drawn = drawn_adapter(shapes_of(directory), lora, seed=self.config.seed)
            weights = {**weights, **whole_rows(drawn)}
        self.adopt(policy).load_weights(weights)

    def stage_initial_policy(self) -> tuple[PolicyHashes, str]:
        self._hold_reference(self.backend.weights)
        return self._stage(0), numeric_environment(self.config, self.replicas)

    def step(self, request: StepRequest) -> StepResult:
        if self._last and self._last[0] == request:
            return self._last[1]
        try:
            result = self._compute(request)
        except BaseException:
            self.replicas.leave()  # so that nobody waits for this rank
            raise
        self._last = (request, result)
        return result

    def _compute(self, request: StepRequest) -> StepResult:
        self._refuse_unless_at(request.parent_hash, purpose=f"step {request.step}")
        began = perf_counter()
        rows = self.read_rows(request.trajectory_ids)
        sequences = sequences_from_rows(
            rows, policy_version=request.policy_version, max_staleness=request.max_staleness
        )
        first = checkpoint_path(self.layout.checkpoints, 0)
        self._hold_reference(lambda: read_weights(first))
        read = perf_counter()
        # From here until its weights are staged this rank holds no named weights: an error must not
        # leave changed weights under the parent's name.
        self._hashes = self._last = None
        numbers = train_step(self.backend, sequences, step=request.step, settings=self.settings)
        self.numbers = numbers
        trained = perf_counter()
        hashes = self._stage(request.step)
        metrics = step_metrics(
            request,
            rows,
            sequences,
            numbers,
            settings=self.config,
            speed=self._speed(sequences, seconds=trained - read),
            read_s=read - began,
            train_s=trained - read,
            stage_s=perf_counter() - trained,
        )
        environment = numeric_environment(self.config, self.replicas)
        return StepResult(request.step, hashes, metrics, environment, request.parent_hash)

    def require_policy(self) -> None:
        if self._hashes is None:
            raise TrainerLost("the trainer was started again and holds nothing")

    def snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        """Copy the state with these weights, for `write_snapshot` to write beside the next steps.

        It is this rank's part: every rank is to copy and to write its own.
        """
        self._refuse_unless_at(weights_hash, purpose="a checkpoint")
        description = CheckpointState(
            self._step, weights_hash, next_submission_index, self.config.recipe_digest
        )
        self._snapshot = take_snapshot(self.backend, description, self.config.trainer.lora)

    def write_snapshot(self, step: int, writer: Writer) -> None:
        """Write this rank's part of a snapshot. Any thread."""
        write_part(self.layout.checkpoints, self._snapshot_of(step), writer)
        if not self.replicas.is_leader:
            self._snapshot = None

    def complete_snapshot(self, step: int, writer: Writer) -> Path:
        """Complete the checkpoint that the ranks wrote; return its directory. Any thread."""
        snapshot, layout = self._snapshot_of(step), self.layout
        self._snapshot = None
        return complete_checkpoint(layout.checkpoints, layout.model, snapshot, writer)

    def _snapshot_of(self, step: int) -> Snapshot:
        snapshot = self._snapshot
        if snapshot is None or snapshot.description.step != step:
            raise TrainerLost(f"the snapshot of step {step} was lost: the trainer restarted")
        return snapshot

    def restore(self, step: int) -> PolicyHashes:
        try:
            backend = self.adopt(shapes_of(self.layout.model))
            read_checkpoint(checkpoint_path(self.layout.checkpoints, step), backend)
            return self._stage(step)
        except BaseException:
            self.replicas.leave()  # others may wait for this rank's part of a tensor
            raise

    def branch(self, config: RankSettings, *, loss: TokenLoss | None = None) -> TrainerRank:
        """Return a rank at this one's step, with a copy of its policy and settings of its own."""
        other = replace(self, config=config, loss=loss)
        other.adopt(shapes_of(self.layout.model)).load(*self.backend.save())
        other._hashes, other._step = self._hashes, self._step
        return other

    def _hold_reference(self, first_weights: Callable[[], TensorReaders]) -> None:
        """Hold the reference policy: the recipe's, or the run's initial one."""
        if not self.config.algorithm.needs_reference or self.backend.reference:
            return
        directory = self.find_teacher()
        assert directory or not self.config.algorithm.reference, "the reference was not passed on"
        if directory:
            reference, weights = pretrained_policy(directory)
            self._reference_shape = PolicyShape.of(reference)
            self.backend.hold_reference(reference, weights)
        elif not self.config.trainer.lora.rank:  # with an adapter: the policy without it
            self.backend.hold_reference(shapes_of(self.layout.model), first_weights())

    def _refuse_unless_at(self, weights_hash: str, *, purpose: str) -> None:
        held = self._hashes.weights_hash if self._hashes else "nothing"
        if held != weights_hash:
            raise TrainerLost(
                f"{purpose} needs weights {weights_hash}, this rank holds {held} (step "
                f"{self._step}): restore it from a checkpoint and the ledger"
            )

    def _stage(self, version: int) -> PolicyHashes:
        dtype = DTYPES[self.config.served_dtype]
        self._hashes = self.backend.stage(
            version, self.channel, dtype=dtype, serves_adapter=self.config.serves_adapter
        )
        self._step, self._last = version, None
        return self._hashes

    def _speed(self, sequences: Sequence[TrainingSequence], *, seconds: float) -> dict[str, float]:
        """Return a step's FLOP utilization; nothing for a policy with experts."""
        has_teacher = bool(self.config.algorithm.reference)
        if self._shape is None or (has_teacher and self._reference_shape is None):
            return {}
        algorithm, trainer = self.config.algorithm, self.config.trainer
        share = len(self.replicas.local_ranks) / self.replicas.num_ranks
        flops = share * self._shape.step_flops(
            sequences, self.numbers.plan, algorithm, self._reference_shape
        )
        measured = matrix_rate(trainer.device, trainer.dtype)
        peak = device_peak_rate(trainer.device, trainer.dtype) or measured
        return {
            f"{SPEED_AREA}model_flops_utilization": flops / seconds / peak,
            f"{SPEED_AREA}matrix_tflops": measured / 1e12,
        }
