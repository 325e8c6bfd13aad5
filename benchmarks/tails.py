"""Async against sync with long, heavy-tailed completions, as in the paper.

`schedule` says what is measured. A completion is as long as a draw from its member's seed says, so
both schedules decode the same lengths. Until `--skip` async trains short completions.

    python -m benchmarks.tails [--steps 30] [--skip 12] [--rounds 1] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.endless_policy import write_endless_policy
from benchmarks.schedule import compare_schedules
from benchmarks.tailed_load import TAILS

PROMPT_ROOM = 32
LENGTHS = ", ".join(f"{name} = {value}" for name, value in asdict(TAILS).items())
SETTINGS = {
    "sft.num-steps": 0,
    "workflow.name": "imported",
    "workflow.path": "benchmarks.tailed_load:GivenLengths",
    "workflow.settings": f"{{{LENGTHS}}}",
    "generation.max-new-tokens": TAILS.cut,
    "generation.max-model-len": TAILS.cut + PROMPT_ROOM,
    "generation.max-num-seqs": 128,
    "controller.group-size": 8,
    "controller.batch-size": 64,
    "controller.max-staleness": 8,
    "algorithm.num-minibatches": 4,
    "trainer.tokens-per-micro-batch": 8192,
    "trainer.learning-rate": 1e-6,
}
"""Minibatches and staleness are the paper's, for mathematics."""


def make_model(cwd: Path) -> Path:
    """Write the policy, with random weights."""
    write_endless_policy(cwd / "model", max_model_len=TAILS.cut + PROMPT_ROOM)
    return cwd / "model"


if __name__ == "__main__":
    title = "long completions with a heavy tail"
    defaults = {"steps": 30, "skip": 12, "rounds": 1, "sync_trainer": "ranks"}
    compare_schedules(__doc__, title, make_model, SETTINGS, **defaults)
