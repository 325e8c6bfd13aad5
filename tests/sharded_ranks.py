"""Processes that share a policy, started by `tests/integration/test_sharded.py`.

    python -m tests.sharded_ranks RANK NUM_RANKS DIRECTORY CASE...

Each process writes what its cases returned to DIRECTORY/RANK.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.algorithms.registry import GSPO, M2PO, PPO, ActorCriticPPO, DecoupledPPO
from areal_flow.config import build_recipe
from areal_flow.core.errors import TrainerLost
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import Rendezvous
from areal_flow.policy.checkpoints import CheckpointState
from areal_flow.policy.models.hashing import TensorHash
from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import (
    complete_checkpoint,
    read_checkpoint,
    take_snapshot,
    write_part,
)
from areal_flow.training.optimizers import PolicyMuon
from areal_flow.training.rank import TrainerRank
from areal_flow.training.replicas import ConnectedRanks, ReplicaGroup, connect_ranks
from areal_flow.training.sequences import pack_sequences
from areal_flow.training.settings import (
    AdamWSettings,
    SftObjectiveName,
    SftSettings,
    StepSettings,
    TrainerSettings,
)
from areal_flow.training.sft import SftTrainer
from areal_flow.training.step import train_step
from areal_flow.training.supervised import OBJECTIVES
from areal_flow.training.tensor_rows import first_model
from tests.policies import completion_rows, served_weights, small_policy
from tests.unit.test_trainer import make_sequences

ROOT = Path(__file__).parent.parent
NUM_STEPS = 4


@dataclass(frozen=True)
class Training:
    """Steps of a policy."""

    algorithm: ComposedAlgorithm = field(default_factory=lambda: DecoupledPPO(num_minibatches=2))
    trainer: dict[str, Any] = field(default_factory=dict)
    num_sequences: int = 12
    tied: bool = False

    @property
    def settings(self) -> TrainerSettings:
        small = {"learning_rate": 1e-3, "tokens_per_micro_batch": 32}
        return TrainerSettings(**{**small, **self.trainer})


IN_REWARD = DecoupledPPO(
    num_minibatches=2, advantage="batch_norm", kl_coefficient=0.1, kl_in="reward"
)
LIKELY = DecoupledPPO(num_minibatches=2, kl_coefficient=0.1, reference_top_k=3)
CRITIC = ActorCriticPPO(num_minibatches=2)
ADAPTER = {"lora": {"rank": 3, "alpha": 6.0}}
TRAININGS = {
    "plain": Training(),
    "tied": Training(tied=True),
    "gspo": Training(GSPO(num_minibatches=1)),
    "m2po": Training(M2PO(num_minibatches=2)),
    "sequence mean": Training(DecoupledPPO(num_minibatches=2, aggregation="sequence_mean")),
    "entropy": Training(PPO(num_minibatches=2, entropy_coefficient=0.1)),
    "interpolated": Training(
        DecoupledPPO(num_minibatches=2, proximal="interpolated", kl_coefficient=0.1)
    ),
    "reference": Training(DecoupledPPO(num_minibatches=2, kl_coefficient=0.1)),
    "reward": Training(IN_REWARD),
    "recompute": Training(trainer={"activations": "recompute"}),
    "offload": Training(trainer={"activations": "offload"}),
    "bfloat16": Training(trainer={"dtype": "bfloat16"}),
    "few sequences": Training(DecoupledPPO(num_minibatches=1), num_sequences=1),
    "likely tokens": Training(LIKELY),
    "adapter": Training(DecoupledPPO(num_minibatches=2, kl_coefficient=0.1), ADAPTER),
    "adapter, likely tokens": Training(LIKELY, ADAPTER),
    "critic": Training(CRITIC),
    "critic, divergence in the reward": Training(
        ActorCriticPPO(kl_coefficient=0.1, kl_estimator="k1", kl_in="reward")
    ),
}
SHARES = {"parallel": {"context_ranks": 2}}
SHARED_TOKENS = {
    "context": Training(trainer=SHARES),
    "context gspo": Training(GSPO(num_minibatches=1), SHARES),
    "context m2po": Training(M2PO(num_minibatches=2), SHARES),
    "context entropy": Training(PPO(num_minibatches=2, entropy_coefficient=0.1), SHARES),
    "context reference": Training(DecoupledPPO(num_minibatches=2, kl_coefficient=0.1), SHARES),
    "context likely tokens": Training(LIKELY, SHARES),
    "context reward": Training(IN_REWARD, SHARES),
    "context recompute": Training(trainer={**SHARES, "activations": "recompute"}),
    "context few": Training(DecoupledPPO(num_minibatches=1), SHARES, num_sequences=1),
    "context critic": Training(CRITIC, SHARES),
    "context adapter": Training(trainer={**SHARES, **ADAPTER}),
}
"""Trained by ranks of which two share each micro-batch's tokens."""
COPIES = {"parallel": {"shard_ranks": 2}}
TWO_COPIES = {
    "copies": Training(DecoupledPPO(num_minibatches=2, kl_coefficient=0.1), COPIES),
    "copies adapter": Training(trainer={**COPIES, **ADAPTER}),
    "copies critic": Training(CRITIC, COPIES),
    "whole copies": Training(trainer={"parallel": {"shard_ranks": 1}}),
    "copies context": Training(trainer={"parallel": {"shard_ranks": 2, "context_ranks": 2}}),
}
"""Trained by ranks of which two share a copy of the policy, or one has it whole."""


def begin(
    training: Training, replicas: ReplicaGroup | None = None, *, seed: int = 0, num_ranks: int = 1
) -> TrainerBackend:
    """Return a backend; without replicas, that of one process that computes for this many ranks."""
    policy, trainer = small_policy(seed=seed, tied=training.tied), training.settings
    if trainer.lora.rank:
        add_adapter(policy, trainer.lora, seed=seed)
    num_batches = num_ranks // trainer.parallel.context_ranks or 1
    backend = TrainerBackend(policy, trainer, replicas or ReplicaGroup(num_batches))
    if isinstance(training.algorithm, ActorCriticPPO):
        backend.add_critic(training.algorithm)
    return backend


def train(
    training: Training,
    num_ranks: int,
    replicas: ReplicaGroup | None = None,
    *,
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """Return metrics and weights of steps; without replicas, in one process."""
    backend = begin(training, replicas, num_ranks=num_ranks)
    if not training.settings.lora.rank:
        backend.hold_reference(small_policy(seed=1, tied=training.tied))
    numbers = [take_step(backend, step, training) for step in range(1, num_steps + 1)]
    weights = served_weights(backend)
    return {
        "losses": [loss for update in numbers for loss in update.losses],
        "grad_norms": [norm for update in numbers for norm in update.grad_norms],
        "metrics": {name: metric.value for name, metric in numbers[-1].metrics.items()},
        "weights": {name: weights[name].tolist() for name in sorted(weights)},
    }


def take_step(backend: TrainerBackend, step: int, training: Training, **settings: Any) -> Any:
    how = StepSettings(training.algorithm, temperature=1.0, seed=0, **settings)
    sequences = make_sequences(training.num_sequences, seed=step)
    return train_step(backend, sequences, step=step, settings=how)


def staged(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return the hashes of sharded and unsharded policies, and of their served weights.

    And how many tensors were hashed for the sharded ones.
    """
    hashes_by_way: dict[str, Any] = {"sharded": [], "whole": []}
    num_hashed = 0
    for training in (TRAININGS["tied"], TRAININGS["adapter"]):
        for how, backend in (("sharded", begin(training, replicas)), ("whole", begin(training))):
            original = TensorHash.add_async
            with patch.object(TensorHash, "add_async", autospec=True, side_effect=original) as add:
                hashes = backend.stage(1, HashingWriter(), dtype=torch.bfloat16)
                fingerprint = backend.fingerprint()
            num_hashed += add.call_count if how == "sharded" else 0
            hashes_by_way[how] += [hashes.weights_hash, hashes.served_hash, fingerprint]
    return {**hashes_by_way, "num_hashed": num_hashed}


def written(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Write a checkpoint of step 1, go on to step 2, and come back to it."""
    training = TWO_COPIES["copies"] if num_ranks == 4 else TRAININGS["plain"]
    backend = begin(training, replicas)
    take_step(backend, 1, TRAININGS["plain"])
    weights_hash = backend.fingerprint()
    snapshot = take_snapshot(backend, CheckpointState(1, weights_hash, 7, "config"))
    take_step(backend, 2, TRAININGS["plain"])
    writer = Writer(directory / "writers", 1)
    write_part(directory / "checkpoints", snapshot, writer)
    replicas.wait_for_all()
    if replicas.is_leader:
        complete_checkpoint(directory / "checkpoints", directory / "model", snapshot, writer)
    replicas.wait_for_all()
    rows = {
        f"{kind} {name}": [rows.shape[0], rows.first_row, len(rows.values)]
        for kind, of_kind in (("weights", snapshot.weights), ("optimizer", snapshot.optimizer))
        for name, rows in of_kind.items()
        if rows.shape
    }
    return {
        "after": backend.fingerprint(),
        "rows": rows,
        **read(replicas, num_ranks, directory, training=training),
    }


def read(
    replicas: ConnectedRanks,
    num_ranks: int,
    directory: Path,
    *,
    training: Training = TRAININGS["plain"],
) -> dict[str, Any]:
    """Load the checkpoint of step 1 into a policy without weights, and take step 2."""
    with torch.device("meta"):
        empty = small_policy(seed=3)
    backend = TrainerBackend(empty, training.settings, replicas)
    description = read_checkpoint(directory / "checkpoints" / "00000001", backend)
    loaded = backend.fingerprint()
    take_step(backend, 2, TRAININGS["plain"])
    return {
        "expected": description.weights_hash,
        "loaded": loaded,
        "again": backend.fingerprint(),
    }


def not_finite(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Take a step whose loss is no number on the last rank alone."""

    def loss(inputs: LossInputs) -> PolicyLoss:
        value = training.algorithm.loss(inputs)
        if replicas.is_leader:
            return value
        return PolicyLoss(value.losses_T * torch.nan, value.metrics)

    training = TRAININGS["plain"]
    backend = begin(training, replicas)
    before = backend.fingerprint()
    numbers = take_step(backend, 1, training, loss=loss)
    return {"losses": numbers.losses, "unchanged": backend.fingerprint() == before}


def gone(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Leave before anything is computed, except for the leader."""
    if not replicas.is_leader:
        replicas.leave()
    try:
        replicas.wait_for_all()
    except TrainerLost as lost:
        return {"noticed": str(lost)}
    return {"noticed": "nothing"}


def fine_tuned(
    objective: SftObjectiveName, replicas: ReplicaGroup | None, directory: Path
) -> dict[str, Any]:
    """Take four steps, twice from the checkpoint of the second one; return what was found."""
    layout, fingerprints = RunLayout(directory / f"{objective}-{replicas is None}"), {}
    for how in ("straight", "resumed"):
        model, weights = supervised_model(objective, directory)
        trainer = SftTrainer(
            model,
            completion_rows(10, num_completions=len(OBJECTIVES[objective].fields)),
            SftSettings(
                objective=objective,
                num_steps=4,
                batch_size=3,
                learning_rate=1e-2,
                num_held_out=3,
                checkpoint_every_steps=2,
            ),
            TrainerSettings(tokens_per_micro_batch=32),
            seed=3,
            replicas=replicas,
            weights=weights,
        )
        trainer.restore(layout)
        while trainer.step < 4:
            trainer.take_step()
            if trainer.step == 2:
                trainer.save(layout, Writer(directory / "writers", 1))
        fingerprints[how] = trainer.backend.fingerprint()
    return {**fingerprints, "metrics": trainer.metrics}


def supervised_model(objective: SftObjectiveName, directory: Path) -> Any:
    if not OBJECTIVES[objective].makes_reward_model:
        return small_policy(), None
    scores = directory / "scores"
    return first_model(scores, seed=0, device="cpu", reward_model=scores)


def pretrained(replicas: ReplicaGroup | None, directory: Path) -> dict[str, Any]:
    """Load a directory's policy as version 0, with an adapter and without, and a teacher."""
    hashes_by_name = {}
    reference = {"algorithm": {"kl_coefficient": 0.1}}
    for name, changes in {"plain": reference, "adapter": {"trainer": ADAPTER}}.items():
        layout = RunLayout(directory / "pretrained")
        recipe = build_recipe({"seed": 4, **changes}, source="")
        rank = TrainerRank(
            layout, recipe.for_trainer(), channel=HashingWriter(), read_rows=lambda ids: []
        )
        if replicas:
            rank.replicas = replicas
        rank.load_pretrained(layout.model)
        hashes, _ = rank.stage_initial_policy()
        micro = pack_sequences(make_sequences(3))
        backend = rank.backend
        logprobs = [backend.trained.logprobs(micro, 1.0), backend.reference_logprobs(micro, 1.0)]
        hashes_by_name[name] = [
            hashes.weights_hash,
            hashes.served_hash,
            torch.stack(logprobs).tolist(),
        ]
    return hashes_by_name


def left(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Leave during a step, except for the leader, which returns what it notices."""
    return _left(replicas, num_ranks, TRAININGS["plain"])


def left_within_a_sequence(
    replicas: ConnectedRanks, num_ranks: int, directory: Path
) -> dict[str, Any]:
    """Do as `left`, while the leader exchanges gradients of attention."""
    return _left(replicas, num_ranks, SHARED_TOKENS["context"])


def behind(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Have the last rank wait within a step until the others have begun more exchanges."""

    def loss(inputs: LossInputs) -> PolicyLoss:
        if replicas.local_ranks[0] == num_ranks - 1 and not waited:
            waited.append(replicas.num_collectives)
            while not all(begun(rank) > waited[0] for rank in range(num_ranks - 1)):
                time.sleep(0.1)
        return training.algorithm.loss(inputs)

    def begun(rank: int) -> int:
        marker = directory / f"begun-{rank}"
        return int((marker.read_text() if marker.is_file() else "") or 0)

    def tell() -> None:
        while not done.wait(0.1):
            (directory / f"begun-{replicas.local_ranks[0]}").write_text(
                str(replicas.num_collectives)
            )

    training, waited, done = TWO_COPIES["copies"], list[int](), threading.Event()
    telling = threading.Thread(target=tell)
    telling.start()
    numbers = take_step(begin(training, replicas), 1, training, loss=loss)
    done.set()
    telling.join()
    replicas.wait_for_all()
    return {"losses": numbers.losses, "begun": replicas.num_collectives}


def timeouts(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return how long exchanges of copies, and of ranks that share one, wait for others."""
    groups = replicas.mesh(2).get_all_groups()
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {"seconds": [each.options._timeout.total_seconds() for each in backends]}


def _left(replicas: ConnectedRanks, num_ranks: int, training: Training) -> dict[str, Any]:

    def loss(inputs: LossInputs) -> PolicyLoss:
        if not replicas.is_leader:
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


def moved_by_muon(replicas: ConnectedRanks, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return whether Muon moves sharded matrices as it moves full ones, bit for bit."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = replicas.mesh(2)  # of four ranks two copies
    rows_only = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    torch.manual_seed(0)
    equal = []
    for shape in [(64, 96), (96, 64), (5, 7), (1, 8)]:
        start, *gradients = torch.randn(4, *shape)
        full = nn.Parameter(start.clone())
        rows = nn.Parameter(distribute_tensor(start, mesh, rows_only))
        of_whole, of_rows = (PolicyMuon([("layers.0", p)], MUON) for p in (full, rows))
        for gradient in gradients:
            full.grad, rows.grad = gradient, distribute_tensor(gradient, mesh, rows_only)
            of_whole.update(learning_rate=1e-2)
            of_rows.update(learning_rate=1e-2)
            state = of_rows.named_state()
            of_rows.load_named_state(state)
        momentum, expected = state["layers.0.momentum_buffer"], of_whole.named_state()
        equal.append(torch.equal(rows.full_tensor(), full) and not torch.equal(full, start))
        equal.append(torch.equal(momentum.full_tensor(), *expected.values()))
        equal.append(momentum.placements == rows.placements)
    return {"equal": equal}


MUON = TrainerSettings(optimizer="muon", adamw=AdamWSettings(weight_decay=0.1))

SUPERVISED: tuple[SftObjectiveName, ...] = ("cross_entropy", "dpo", "reward_model")

CASES: dict[str, Callable[[ConnectedRanks, int, Path], dict[str, Any]]] = {
    "gone": gone,
    "pretrained": lambda replicas, _, directory: pretrained(replicas, directory),
    "staged": staged,
    "written": written,
    "read": read,
    "not finite": not_finite,
    "muon": moved_by_muon,
    "left": left,
    "behind": behind,
    "timeouts": timeouts,
    "left within a sequence": left_within_a_sequence,
}


def run_ranks(directory: Path, num_ranks: int, *cases: str) -> list[dict[str, Any]]:
    """Start the processes, wait for them, and return their results by case."""
    command = [sys.executable, "-m", "tests.sharded_ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(num_ranks), str(directory), *cases], cwd=ROOT)
        for rank in range(num_ranks)
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * num_ranks
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def main(rank: int, num_ranks: int, directory: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    results = {}
    for case in cases:
        point = directory / f"rendezvous-{case}"
        replicas = connect_ranks(Rendezvous(case, rank, num_ranks), point, host="127.0.0.1")
        if training := (TRAININGS | SHARED_TOKENS | TWO_COPIES).get(case):
            results[case] = train(training, num_ranks, replicas)
        elif case in SUPERVISED:
            results[case] = fine_tuned(case, replicas, directory)
        else:
            results[case] = CASES[case](replicas, num_ranks, directory)
    (directory / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
