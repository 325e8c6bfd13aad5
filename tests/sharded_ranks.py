"""What processes do that share a policy; `tests/integration/test_sharded.py` starts them.

    python -m tests.sharded_ranks RANK NUM_RANKS DIRECTORY CASE...

Each process writes what its cases returned to DIRECTORY/RANK.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from areal_flow.algorithms.clipped import GSPO, PPO, DecoupledPPO
from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.objectives import M2PO
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.config import AdamWSettings, TrainerSettings
from areal_flow.errors import TrainerLost
from areal_flow.recovery.checkpoints import CheckpointState
from areal_flow.run.lease import Writer
from areal_flow.trainer.backend import TrainerBackend, make_backend
from areal_flow.trainer.checkpoint import (
    Snapshot,
    complete_checkpoint,
    read_checkpoint,
    write_part,
)
from areal_flow.trainer.optimizers import make_optimizer
from areal_flow.trainer.replicas import GlooGroup, ReplicaGroup, SingleProcess
from areal_flow.trainer.step import train_step
from areal_flow.trainer.tensor_rows import rows_of
from areal_flow.trainer.updates import StepSettings
from areal_flow.types import Rendezvous
from areal_flow.weights.channel import HashingWriter
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences

ROOT = Path(__file__).parent.parent
NUM_STEPS = 10


@dataclass(frozen=True)
class Training:
    """Ten steps of a policy."""

    algorithm: ComposedAlgorithm = field(default_factory=lambda: DecoupledPPO(num_minibatches=2))
    trainer: dict[str, Any] = field(default_factory=dict)
    num_sequences: int = 12
    tied: bool = False

    @property
    def settings(self) -> TrainerSettings:
        small = {"learning_rate": 1e-3, "tokens_per_micro_batch": 32, "backend": "fsdp"}
        return TrainerSettings(**{**small, **self.trainer})


IN_REWARD = DecoupledPPO(
    num_minibatches=2, advantage="batch_norm", kl_coefficient=0.1, kl_in="reward"
)
TRAININGS = {
    "plain": Training(),
    "tied": Training(tied=True),
    "gspo": Training(GSPO(num_minibatches=1)),
    "reference": Training(DecoupledPPO(num_minibatches=2, kl_coefficient=0.1)),
    "reward": Training(IN_REWARD),
    "recompute": Training(trainer={"activations": "recompute"}),
    "offload": Training(trainer={"activations": "offload"}),
    "bfloat16": Training(trainer={"dtype": "bfloat16"}),
    "few sequences": Training(DecoupledPPO(num_minibatches=1), num_sequences=1),
}
SHARES = {"parallel": {"context_ranks": 2}}
REPLICATED = {**SHARES, "backend": "replicated"}
SHARED_TOKENS = {
    "context": Training(trainer=REPLICATED),
    "context gspo": Training(GSPO(num_minibatches=1), REPLICATED),
    "context m2po": Training(M2PO(num_minibatches=2), REPLICATED),
    "context entropy": Training(PPO(num_minibatches=2, entropy_coefficient=0.1), REPLICATED),
    "context reference": Training(DecoupledPPO(num_minibatches=2, kl_coefficient=0.1), REPLICATED),
    "context reward": Training(IN_REWARD, REPLICATED),
    "context recompute": Training(trainer={**REPLICATED, "activations": "recompute"}),
    "context few": Training(DecoupledPPO(num_minibatches=1), REPLICATED, num_sequences=1),
    "context fsdp": Training(trainer=SHARES),
}
"""Trained by ranks of which two share each micro-batch's tokens."""


def begin(
    training: Training, replicas: ReplicaGroup | None = None, *, seed: int = 0, num_ranks: int = 1
) -> TrainerBackend:
    """Return a backend; without replicas, of one process that computes for as many ranks."""
    policy = small_policy(seed=seed, tied=training.tied)
    num_batches = num_ranks // training.settings.parallel.context_ranks or 1
    return make_backend(policy, training.settings, replicas or SingleProcess(num_batches))


def train(
    training: Training,
    num_ranks: int,
    replicas: ReplicaGroup | None = None,
    *,
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """Return what steps found and made; without replicas, in one process."""
    backend = begin(training, replicas, num_ranks=num_ranks)
    backend.hold_reference(small_policy(seed=1, tied=training.tied))
    numbers = [take_step(backend, step, training) for step in range(1, num_steps + 1)]
    weights = backend.export_weights()
    return {
        "losses": [loss for found in numbers for loss in found.losses],
        "grad_norms": [norm for found in numbers for norm in found.grad_norms],
        "metrics": {name: metric.value for name, metric in numbers[-1].metrics.items()},
        "weights": {name: weights[name].tolist() for name in sorted(weights)},
    }


def take_step(backend: TrainerBackend, step: int, training: Training, **settings: Any) -> Any:
    how = StepSettings(training.algorithm, temperature=1.0, seed=0, **settings)
    sequences = make_sequences(training.num_sequences, seed=step)
    return train_step(backend, sequences, step=step, settings=how)


def staged(replicas: GlooGroup, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return the hashes of a policy, of what is served of it, and of an equal whole one."""
    found = []
    for backend in (begin(TRAININGS["tied"], replicas), begin(TRAININGS["tied"])):
        hashes = backend.stage(1, HashingWriter(), dtype=torch.bfloat16)
        found.append([hashes.weights_hash, hashes.served_hash, backend.fingerprint()])
    return {"sharded": found[0], "whole": found[1]}


def written(replicas: GlooGroup, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Write a checkpoint of step 1, go on to step 2, and come back to it."""
    backend = begin(TRAININGS["plain"], replicas)
    take_step(backend, 1, TRAININGS["plain"])
    weights_hash = backend.fingerprint()
    snapshot = Snapshot(
        backend.save(),
        CheckpointState(1, weights_hash, 7, "config"),
        attempt=replicas.name,
        random_state=rows_of(torch.get_rng_state(), whole=replicas.leads),
    )
    take_step(backend, 2, TRAININGS["plain"])
    writer = Writer(directory / "writers", 1)
    write_part(directory / "checkpoints", snapshot, writer)
    replicas.gather({rank: torch.ones(1) for rank in replicas.mine})
    if replicas.leads:
        complete_checkpoint(directory / "checkpoints", directory / "model", snapshot, writer)
    replicas.gather({rank: torch.ones(1) for rank in replicas.mine})
    return {"after": backend.fingerprint(), **read(replicas, num_ranks, directory)}


def read(replicas: GlooGroup, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Load the checkpoint of step 1 into a policy without weights, and take step 2."""
    from areal_flow.trainer.sharded import ShardedBackend

    with torch.device("meta"):
        empty = small_policy(seed=3)
    backend = ShardedBackend(empty, TRAININGS["plain"].settings, replicas)
    description = read_checkpoint(directory / "checkpoints" / "00000001", backend)
    loaded = backend.fingerprint()
    take_step(backend, 2, TRAININGS["plain"])
    return {
        "expected": description.weights_hash,
        "loaded": loaded,
        "again": backend.fingerprint(),
    }


def not_finite(replicas: GlooGroup, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Take a step whose loss is no number on the last rank alone."""

    def loss(inputs: LossInputs) -> PolicyLoss:
        found = training.algorithm.loss(inputs)
        if replicas.leads:
            return found
        return PolicyLoss(found.losses_T * torch.nan, found.metrics)

    training = TRAININGS["plain"]
    backend = begin(training, replicas)
    before = backend.fingerprint()
    numbers = take_step(backend, 1, training, loss=loss)
    return {"losses": numbers.losses, "unchanged": backend.fingerprint() == before}


def left(replicas: GlooGroup, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Leave in the midst of a step, but for the leader, which returns what it notices."""
    return _left(replicas, num_ranks, TRAININGS["plain"])


def left_within_a_sequence(replicas: GlooGroup, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Do as `left`, while the leader exchanges gradients of attention."""
    return _left(replicas, num_ranks, SHARED_TOKENS["context"])


def _left(replicas: GlooGroup, num_ranks: int, training: Training) -> dict[str, Any]:

    def loss(inputs: LossInputs) -> PolicyLoss:
        if not replicas.leads:
            raise KeyboardInterrupt
        return training.algorithm.loss(inputs)

    backend = begin(training, replicas)
    try:
        take_step(backend, 1, training, loss=loss)
    except KeyboardInterrupt:
        replicas.leave()
        return {"noticed": "its own end"}
    except TrainerLost as lost:
        return {"noticed": str(lost)}
    return {"noticed": "nothing"}


def moved_by_muon(replicas: GlooGroup, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return whether rows of matrices become those of whole ones, to the bit."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, rows_only = replicas.mesh("cpu"), [Shard(0)]
    torch.manual_seed(0)
    equal = []
    for shape in [(64, 96), (96, 64), (5, 7), (1, 8)]:
        start, *gradients = torch.randn(4, *shape)
        whole = nn.Parameter(start.clone())
        rows = nn.Parameter(distribute_tensor(start, mesh, rows_only))
        of_whole, of_rows = (make_optimizer([("layers.0", p)], MUON) for p in (whole, rows))
        for gradient in gradients:
            whole.grad, rows.grad = gradient, distribute_tensor(gradient, mesh, rows_only)
            of_whole.update(learning_rate=1e-2)
            of_rows.update(learning_rate=1e-2)
            state = of_rows.named_state()
            of_rows.load_named_state(state)
        momentum, expected = state["layers.0.momentum_buffer"], of_whole.named_state()
        equal.append(torch.equal(rows.full_tensor(), whole) and not torch.equal(whole, start))
        equal.append(torch.equal(momentum.full_tensor(), *expected.values()))
        equal.append(momentum.placements == rows.placements)
    return {"equal": equal}


MUON = TrainerSettings(optimizer="muon", adamw=AdamWSettings(weight_decay=0.1))

CASES: dict[str, Callable[[GlooGroup, int, Path], dict[str, Any]]] = {
    "staged": staged,
    "written": written,
    "read": read,
    "not finite": not_finite,
    "muon": moved_by_muon,
    "left": left,
    "left within a sequence": left_within_a_sequence,
}


def run_ranks(directory: Path, num_ranks: int, *cases: str) -> list[dict[str, Any]]:
    """Start the processes, wait for them, and return what each found by case."""
    command = [sys.executable, "-m", "tests.sharded_ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(num_ranks), str(directory), *cases], cwd=ROOT)
        for rank in range(num_ranks)
    ]
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * num_ranks
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def main(rank: int, num_ranks: int, directory: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        point = directory / f"rendezvous-{case}"
        replicas = GlooGroup(Rendezvous(case, rank, num_ranks), point, host="127.0.0.1")
        if training := (TRAININGS | SHARED_TOKENS).get(case):
            found[case] = train(training, num_ranks, replicas)
        else:
            found[case] = CASES[case](replicas, num_ranks, directory)
    (directory / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
