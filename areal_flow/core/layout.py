"""Paths in a run directory. This module neither reads nor writes the files.

runs/NAME/
    run.json               schema version, identity, the recipe's name, the initial number of steps,
                           and the parent of a fork
    config.toml            the complete recipe, including defaults
    inputs.json            what the run was prepared with: the verifier's identity, hashes of files
    model/                 config.json and tokenizer of the policy, no weights
    prompts/               train.arrow, held_out.arrow, bad_rows.jsonl; generated prompts also as
                           JSONL; chat_template.json: the template in use and its hash;
                           difficulty.parquet: the pass rates that prompts were selected by
    rewards/               reward functions that were shipped, with their source
    trajectories.lance     the log: every trajectory
    steps.lance            the ledger: one row per training step
    evaluations.lance      held-out answers
    datasets.url           only with datasets in an object store: their folder's URL; the three
                           above are then files, each with the URL of its dataset
    checkpoints/           policy and optimizer, by step
    weights/00000002/      weights that generators load, by driver (writer epoch): files, or a link
                           into shared memory
    rendezvous/00000002/   where trainer ranks find each other, by driver
    processes/00000002/    what a driver's processes share while it runs: certificates, locks,
                           executions of tasks
    sft/                   supervised fine-tuning: rows, checkpoints, metrics by step
    forks.jsonl            replayed steps that differed, where replay is not bitwise reproducible
    tracking.json          the checkpoints that the model registry protects, as last read
    tensorboard/, wandb/   files of these sinks, if the recipe enables them
    train.log              messages and warnings of the drivers
    jobs/                  with Slurm or Kubernetes: the output of each worker's job
    summary.json           written at the end
    report.html            the run on one page, written at the end
    writers/               leases and fences: which driver may write
    state.json             how the run last ended
    verified.json          what the last clean `areal-flow check` verified
    settled.json           up to which step and trajectory a resumed run need not read its logs
    index/                 trajectories without their tokens, and what became of them, for queries
    cluster.json           the address of the scheduler, while it runs
    workers.jsonl          when each worker joined, died and left
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from areal_flow.core.errors import RunError

SCHEMA_VERSION = 10
"""Version of the paths above and of the datasets' columns. Version 1 recorded no number."""
_URL = re.compile(r"[a-z][a-z0-9]+:/")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


class _Path:
    """A path relative to the run directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, layout: RunLayout, owner: type[RunLayout]) -> Path:
        return layout.root.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class RunLayout:
    root: Path

    identity = _Path("run.json")
    config = _Path("config.toml")
    inputs = _Path("inputs.json")
    model = _Path("model")
    train_prompts = _Path("prompts", "train.arrow")
    held_out_prompts = _Path("prompts", "held_out.arrow")
    bad_rows = _Path("prompts", "bad_rows.jsonl")
    chat_template = _Path("prompts", "chat_template.json")
    difficulty = _Path("prompts", "difficulty.parquet")
    sft_rows = _Path("sft", "rows.npz")
    sft_checkpoints = _Path("sft", "checkpoints")
    sft_metrics = _Path("sft", "metrics.jsonl")
    rewards = _Path("rewards")
    trajectories = _Path("trajectories.lance")
    steps = _Path("steps.lance")
    evaluations = _Path("evaluations.lance")
    datasets_url = _Path("datasets.url")
    checkpoints = _Path("checkpoints")
    weights = _Path("weights")
    rendezvous = _Path("rendezvous")
    processes = _Path("processes")
    forks = _Path("forks.jsonl")
    tracking = _Path("tracking.json")
    tensorboard = _Path("tensorboard")
    wandb = _Path("wandb")
    log = _Path("train.log")
    jobs = _Path("jobs")
    summary = _Path("summary.json")
    report = _Path("report.html")
    writers = _Path("writers")
    state = _Path("state.json")
    settled = _Path("settled.json")
    verified = _Path("verified.json")
    index = _Path("index")
    index_parts = _Path("index", "parts.json")
    cluster = _Path("cluster.json")
    workers = _Path("workers.jsonl")

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def prometheus_target(self) -> Path:
        """The address that Prometheus scrapes while the run lives; a file beside the runs."""
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
