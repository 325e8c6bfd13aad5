"""Says where things lie in a run directory. It refuses to read and to write them.

runs/NAME/
    run.json               schema version, identity, the recipe's name, the steps at first and, of a
                           fork, its parent
    config.toml            the whole recipe, defaults written out
    inputs.json            what it was prepared with: the verifier's identity, hashes of files
    model/                 config.json and tokenizer of the policy, no weights
    prompts/               train.arrow, held_out.arrow, bad_rows.jsonl; made ones as JSONL, too;
                           chat_template.json: the template in use, of model/, and its hash;
                           difficulty.parquet: the pass rates that prompts were chosen by
    rewards/               reward functions that were shipped, with their source
    trajectories.lance     the events
    steps.lance            their order
    evaluations.lance      held-out answers
    datasets.url           of a run with datasets in an object store: where they are; then the three
                           above are files that name theirs
    checkpoints/           snapshots
    weights/00000002/      what the generators of one driver's life load: files, or a link into
                           shared memory
    rendezvous/00000002/   where the trainer ranks of one driver's life find each other
    sft/                   rows, checkpoints and metrics by step of supervised fine-tuning
    forks.jsonl            replayed steps that differed, where replay does not repeat bits
    tracking.json          which checkpoints a registry wants kept, as last heard
    tensorboard/, wandb/   what those sinks show, where the recipe names them
    train.log              what its drivers said, and their warnings
    jobs/                  with Slurm or Kubernetes: what each worker's job printed
    summary.json           written at the end
    report.html            the run on one page, written at the end
    writers/               who may write: one lease a driver's life
    state.json             how it last ended
    cluster.json           where its scheduler is, while it runs
    workers.jsonl          when each worker joined, died and left
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from areal_flow.core.errors import RunError

SCHEMA_VERSION = 7
"""Of run directories: what lies where, and the columns of the datasets. Version 1 had no number."""
_URL = re.compile(r"[a-z][a-z0-9]+:/")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


class _Within:
    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, layout: RunLayout, owner: type[RunLayout]) -> Path:
        return layout.root.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class RunLayout:
    root: Path

    identity = _Within("run.json")
    config = _Within("config.toml")
    inputs = _Within("inputs.json")
    model = _Within("model")
    train_prompts = _Within("prompts", "train.arrow")
    held_out_prompts = _Within("prompts", "held_out.arrow")
    sft_rows = _Within("sft", "rows.npz")
    sft_checkpoints = _Within("sft", "checkpoints")
    difficulty = _Within("prompts", "difficulty.parquet")
    sft_metrics = _Within("sft", "metrics.jsonl")
    bad_rows = _Within("prompts", "bad_rows.jsonl")
    chat_template = _Within("prompts", "chat_template.json")
    rewards = _Within("rewards")
    trajectories = _Within("trajectories.lance")
    steps = _Within("steps.lance")
    evaluations = _Within("evaluations.lance")
    datasets_url = _Within("datasets.url")
    checkpoints = _Within("checkpoints")
    weights = _Within("weights")
    rendezvous = _Within("rendezvous")
    processes = _Within("processes")
    forks = _Within("forks.jsonl")
    tracking = _Within("tracking.json")
    tensorboard = _Within("tensorboard")
    wandb = _Within("wandb")
    log = _Within("train.log")
    jobs = _Within("jobs")
    summary = _Within("summary.json")
    report = _Within("report.html")
    writers = _Within("writers")
    state = _Within("state.json")
    cluster = _Within("cluster.json")
    workers = _Within("workers.jsonl")

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def prometheus_target(self) -> Path:
        """Beside the runs: the address of the run's driver while it lives, for Prometheus."""
        return self.root.parent / "prometheus" / f"{self.name}.json"

    def weights_of(self, writer_epoch: int) -> Path:
        return self.weights / f"{writer_epoch:08d}"

    def processes_of(self, writer_epoch: int) -> Path:
        return self.processes / f"{writer_epoch:08d}"

    def rendezvous_file(self, writer_epoch: int, name: str) -> Path:
        return self.rendezvous / f"{writer_epoch:08d}" / name


def run_layout(runs: Path, name: str) -> RunLayout:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise RunError(
            f"run name {name!r}: expected 1 to 80 letters, digits, dots, dashes or underscores"
        )
    if _URL.match(str(runs)):
        raise RunError(
            f"expected a folder for runs, found {runs}: checkpoints and weights need a file "
            "system; only the datasets can be in an object store, by --datasets s3://BUCKET/FOLDER"
        )
    return RunLayout((runs / name).resolve())
