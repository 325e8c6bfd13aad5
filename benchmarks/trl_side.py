"""TRL's half of `benchmarks/trl.py`, in an environment that has it: one `GRPOTrainer`, on the CPU.

Reads a JSON object from its standard input, trains, and prints a JSON list of two: tokens and mean
reward of each batch of completions, and when each optimizer update ended.
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

ends: list[float] = []
"""When each optimizer update ended."""


class StepEnds(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        ends.append(perf_counter())


def config_of(given: dict[str, Any]) -> GRPOConfig:
    settings = given["settings"]
    num_minibatches = settings["algorithm.num-minibatches"]
    return GRPOConfig(
        output_dir=given["output"],
        use_cpu=True,
        bf16=False,
        seed=0,
        max_steps=given["num_steps"] * num_minibatches,
        per_device_train_batch_size=settings["controller.batch-size"] // num_minibatches,
        steps_per_generation=num_minibatches,
        num_generations=settings["controller.group-size"],
        max_completion_length=settings["generation.max-new-tokens"],
        temperature=1.0,
        learning_rate=settings["trainer.learning-rate"],
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


def main() -> None:
    given = json.load(sys.stdin)
    torch.set_num_threads(given["threads"])
    module, _, name = given["reward"].partition(":")
    verify = getattr(import_module(module), name)
    batches: list[dict[str, float]] = []

    def reward(
        prompts: list[str], completions: list[str], answer: list[str], **columns: Any
    ) -> list[float]:
        rows = zip(prompts, completions, answer, strict=True)
        scores = [verify(prompt=p, completion=c, answer=a) for p, c, a in rows]
        rewards = [float(getattr(score, "reward", score)) for score in scores]
        num_tokens = sum(map(len, columns["completion_ids"]))
        batches.append({"num_tokens": num_tokens, "reward_mean": sum(rewards) / len(rewards)})
        return rewards

    model = given["model"]
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config_of(given),
        train_dataset=Dataset.from_list(given["prompts"]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model, padding_side="left"),
        callbacks=[StepEnds()],
    ).train()
    print(json.dumps([batches, ends]))


if __name__ == "__main__":
    main()
