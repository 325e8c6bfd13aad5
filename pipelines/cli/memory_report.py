"""`areal-flow plan --memory`: what trainer ranks and generators need of a GPU."""

from __future__ import annotations

from typing import Any

import torch

from areal_flow.config import Recipe
from areal_flow.planning.costs import model_config
from areal_flow.planning.gpus import GIB, gpu_bytes
from areal_flow.planning.memory import (
    FRAGMENTATION,
    GeneratorMemory,
    MemoryPlan,
    RankMemory,
    plan_memory,
    trainer_memory,
)
from areal_flow.policy.models.policy import policy_from_config
from areal_flow.training.kernels import RESERVED_BYTES
from pipelines.console.tables import Report, Table


def report_memory(name: str, recipe: Recipe, *, gpu: str) -> Report:
    gpu_bytes(gpu)  # an unknown one is reported before the step is computed
    config = model_config(recipe.model)
    with torch.device("meta"):
        policy = policy_from_config(config, device="meta")
    plan = plan_memory(recipe, trainer_memory(recipe, config), policy, gpu=gpu)
    data: dict[str, Any] = {
        "recipe": name,
        "gpu": gpu,
        "gpu_bytes": plan.gpu_bytes,
        "fits": plan.fits,
        "ranks": [
            {
                "rank": rank.rank,
                "peak_bytes": rank.peak_bytes,
                "kept_bytes": rank.kept_bytes,
                "by_kind": dict(rank.by_kind),
            }
            for rank in plan.ranks
        ],
    }
    parts = [Table([_row(rank) for rank in plan.ranks], "GiB at the peak of a step")]
    if generator := plan.generator:
        data["generator"] = {
            "weights_bytes": generator.weights_bytes,
            "taken_bytes": generator.taken_bytes,
            "cache_tokens": generator.cache_tokens,
            "takes_turns": plan.takes_turns,
        }
        parts.append(Table([_generator_row(generator)], "GiB of a generator"))
    return Report(data, [*parts, _verdict(plan, gpu)], code=int(not plan.fits))


def _row(rank: RankMemory) -> dict[str, Any]:
    kinds = {kind: _gib(num_bytes) for kind, num_bytes in rank.by_kind.items()}
    return {
        "rank": rank.rank,
        "peak": _gib(rank.peak_bytes),
        **kinds,
        "needed": _gib(rank.needed_bytes),
        "kept": _gib(rank.kept_bytes),
    }


def _generator_row(generator: GeneratorMemory) -> dict[str, Any]:
    return {
        "weights": _gib(generator.weights_bytes),
        "taken": _gib(generator.taken_bytes),
        "cache, tokens": f"{generator.cache_tokens:,}",
        "longest sequence": f"{generator.longest_tokens:,}",
    }


def _verdict(plan: MemoryPlan, gpu: str) -> str:
    needed = max(rank.needed_bytes for rank in plan.ranks)
    verdict = (
        f"{gpu}: {_gib(plan.trainer_bytes)} GiB for a trainer rank, {_gib(needed)} needed "
        f"(the peak, {FRAGMENTATION:.0%} for fragmentation and {_gib(RESERVED_BYTES)} for CUDA)"
    )
    if plan.generator and not plan.generator.fits:
        verdict += (
            ". The generator's cache does not hold the longest sequence: lower "
            "generation.max_model_len or raise generation.vllm.gpu_memory_utilization"
        )
    if plan.generator and plan.generator.taken_bytes > plan.generator_bytes:
        verdict += (
            f". The trainer at rest leaves {_gib(plan.generator_bytes)} GiB to the generator: "
            "lower generation.vllm.gpu_memory_utilization"
        )
    if needed > plan.trainer_bytes:
        verdict += (
            ". Lower trainer.tokens_per_micro_batch, set trainer.activations = 'recompute', or "
            "use more trainer ranks"
        )
    return f"{'fits' if plan.fits else 'DOES NOT FIT'} {verdict}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"
