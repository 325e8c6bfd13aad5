"""Where things lie in a run directory. Paths only: reading and writing is others' work.

runs/NAME/
    config.toml            the whole recipe, defaults written out
    model/                 config.json and tokenizer of the policy, no weights
    prompts/               train.arrow, held_out.arrow, bad_rows.jsonl
    rewards/               reward functions that were shipped, with their source
    trajectories.lance     the events
    steps.lance            their order
    evaluations.lance      held-out answers
    checkpoints/           snapshots
    weights/00000002/      what the generators of one driver's life load
    rendezvous/00000002/        where the trainer ranks of one driver's life meet
    forks.jsonl            replayed steps that differed, in another numeric environment
    mlflow-spool.jsonl     metrics on their way to MLflow
    summary.json           written at the end
    writers/               who may write: one claim a driver's life
    state.json             how it last ended
    cluster.json           where its scheduler is, while it runs
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from areal_flow.errors import RunError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The paths of one run."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def train_prompts(self) -> Path:
        return self.root / "prompts" / "train.arrow"

    @property
    def held_out_prompts(self) -> Path:
        return self.root / "prompts" / "held_out.arrow"

    @property
    def bad_rows(self) -> Path:
        return self.root / "prompts" / "bad_rows.jsonl"

    @property
    def rewards(self) -> Path:
        return self.root / "rewards"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories.lance"

    @property
    def steps(self) -> Path:
        return self.root / "steps.lance"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.lance"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def weights_of(self, writer_epoch: int) -> Path:
        """Return the weights channel of one driver's life; no other driver's generators look."""
        return self.weights / f"{writer_epoch:08d}"

    @property
    def rendezvous(self) -> Path:
        return self.root / "rendezvous"

    def rendezvous_file(self, writer_epoch: int, name: str) -> Path:
        """Return the file at which the ranks of one replica group meet."""
        return self.rendezvous / f"{writer_epoch:08d}" / name

    @property
    def spool(self) -> Path:
        return self.root / "mlflow-spool.jsonl"

    @property
    def forks(self) -> Path:
        return self.root / "forks.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def writers(self) -> Path:
        return self.root / "writers"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def cluster(self) -> Path:
        return self.root / "cluster.json"


def run_layout(runs: Path, name: str) -> RunLayout:
    """Return the layout of a run by name.

    Raises:
        RunError: the name could lead outside `runs`.
    """
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise RunError(
            f"run name {name!r}: expected 1 to 80 letters, digits, dots, dashes or underscores"
        )
    return RunLayout((runs / name).resolve())
