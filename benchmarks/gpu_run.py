"""A run from its first step to its replay: killed half-way, resumed, audited, replayed.

Without `--model` a policy of Qwen2.5-0.5B's width and depth with random weights and a small
tokenizer answers made-up sums: nothing is downloaded, and nothing is learned. Each command is the
one that a user types.

    python -m benchmarks.gpu_run [--recipe gsm8k-1gpu] [--model DIRECTORY] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import areal_flow
from areal_flow.policy.models.huggingface import AutoConfig
from benchmarks import harness
from benchmarks.shapes import drawn_policy
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

NAME = "day"
PATIENCE_S = 300.0
QWEN_0_5B = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
}


def write_model(directory: Path, device: str) -> None:
    write_tiny_model(directory, max_model_len=2048)
    described = directory / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | QWEN_0_5B))
    config = AutoConfig.from_pretrained(directory)
    drawn_policy(config, device=device).save_pretrained(directory)


def write_sums(path: Path, num: int) -> None:
    rows = ((index % 97, index % 89) for index in range(num))
    lines = [{"question": f"{a} + {b} =", "answer": f"#### {a + b}"} for a, b in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def settings_of(root: Path, chosen: argparse.Namespace) -> dict[str, object]:
    """Return the overrides of the recipe."""
    data = root / "sums.jsonl"
    write_sums(data, 2048)
    model: object = chosen.model
    if not model and chosen.device == "cuda":
        model = root / "model"
        write_model(root / "model", chosen.device)
    return {
        "name": NAME,
        "data": data,
        "num-steps": chosen.steps,
        "prompts.num-held-out": 0,
        "tracking.enabled": "false",
        "trainer.checkpoint-every-steps": max(1, chosen.steps // 4),
        "generation.engine": "auto",
        "generation.max-new-tokens": chosen.max_new_tokens,
        **({"model": model, "prompts.chat-template": "false"} if model else {}),
    }


def train_and_kill(root: Path, chosen: argparse.Namespace, settings: dict[str, object]) -> int:
    """Kill a driver after half of the steps; return the number of steps."""
    half = chosen.steps // 2
    command = [*harness.CLI, "train", chosen.recipe, *harness.flags(settings)]
    newest = harness.kill_driver(command, root, NAME, num_steps=half, limit_s=PATIENCE_S)
    if newest < half:
        log = (root / harness.DRIVER_LOG).read_text()
        sys.exit(f"no {half} steps after {PATIENCE_S:g} s:\n{log}")
    return newest


def main() -> None:
    numbers = {"steps": 20, "max_new_tokens": 256}
    names = {"recipe": "gsm8k-1gpu", "model": "", "device": "cuda"}
    chosen = harness.parse_options(__doc__, **numbers, **names)
    rows: list[dict[str, Any]] = []

    def timed(what: str, *command: str) -> str:
        printed: list[str] = []
        cli = [*harness.CLI, *command]
        seconds = harness.seconds_of(lambda: printed.append(harness.output_of(cli, cwd=root)))
        rows.append({"part": what, "seconds": seconds, "result": "exit code 0"})
        return printed[0]

    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        settings = settings_of(root, chosen)
        seconds = harness.seconds_of(lambda: train_and_kill(root, chosen, settings))
        killed_at = harness.newest_step(root, NAME)
        rows.append({"part": "train", "seconds": seconds, "result": f"killed at step {killed_at}"})
        timed("resume", "train", "--resume", NAME)
        timed("audit", "check", NAME)
        replayed = json.loads(
            timed("replay", "replay", NAME, "--step", str(chosen.steps), "--json")
        )
        rows[-1]["result"] = " ".join(replayed["verdict"])
        steps = harness.steps_after(areal_flow.open_run(root / "runs" / NAME), killed_at + 1)
    per_step = sum(row["step_s"] for row in steps) / max(1, len(steps))
    rows.append({"part": "a step", "seconds": per_step, "result": f"mean of {len(steps)}"})
    harness.report(chosen.json, {f"`{chosen.recipe}`, {chosen.steps} steps": rows})


if __name__ == "__main__":
    main()
