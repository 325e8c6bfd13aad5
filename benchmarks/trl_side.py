"""TRL's half of `benchmarks/trl.py`, in an environment that has it: one `GRPOTrainer`, on the CPU.

Reads a JSON object of settings from its standard input, trains, and prints one JSON object: for
each batch of completions, when it was scored, its tokens and its mean reward; and when updates
ended.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepEnds(TrainerCallback):
    """Notes when each optimizer update ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.at.append(perf_counter())


def main() -> None:
    given = json.load(sys.stdin)
    torch.set_num_threads(given["threads"])
    module, _, name = given["reward"].partition(":")
    verify = getattr(import_module(module), name)
    batches: list[dict[str, float]] = []

    def reward(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        columns = zip(prompts, completions, answer, strict=True)
        scores = [verify(prompt=p, completion=c, answer=a) for p, c, a in columns]
        rewards = [float(getattr(score, "reward", score)) for score in scores]
        num_tokens = sum(map(len, completion_ids))
        mean = sum(rewards) / len(rewards)
        batches.append({"at": perf_counter(), "num_tokens": num_tokens, "reward_mean": mean})
        return rewards

    num_minibatches, batch_size = given["num_minibatches"], given["batch_size"]
    config = GRPOConfig(
        output_dir=given["output"],
        use_cpu=True,
        bf16=False,
        seed=given["seed"],
        max_steps=given["num_steps"] * num_minibatches,
        per_device_train_batch_size=batch_size // num_minibatches,
        steps_per_generation=num_minibatches,
        num_generations=given["group_size"],
        max_completion_length=given["max_new_tokens"],
        temperature=1.0,
        learning_rate=given["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dr_grpo",
        scale_rewards=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    ends = StepEnds()
    trainer = GRPOTrainer(
        model=given["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(given["prompts"]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            given["model"], padding_side="left"
        ),
        callbacks=[ends],
    )
    began = perf_counter()
    trainer.train()
    print(json.dumps({"began": began, "batches": batches, "step_ends": ends.at}))


if __name__ == "__main__":
    main()
